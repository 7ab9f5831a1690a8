"""Files of data, local or at a URL such as ``s3://bucket/day_0.parquet``, and folders that ``dmt prepare`` writes.

A prepared folder has Parquet files of rows in ``train`` and ``eval``. Its manifest, written last, describes the files.
"""

from __future__ import annotations

import glob
import io
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.files import read_model
from dmt.formatting import shorten
from dmt.training.data.columns import Columns, Feature
from dmt.training.data.config import DataConfig

__all__ = [
    "FORMAT",
    "MANIFEST",
    "REQUEST",
    "REQUEST_FIELD",
    "Manifest",
    "expand_path",
    "file_version",
    "format_of",
    "is_remote",
    "matching_files",
    "open_binary",
    "prepared_schema",
    "read_manifest",
    "starts_of",
]

logger = logging.getLogger(__name__)

MANIFEST, FORMAT = "manifest.json", 3
REQUEST = "#request"
"""Name of the column that holds the hash of a row's request, if ``data.group_by`` was set."""
REQUEST_FIELD = pa.field(REQUEST, pa.int64(), nullable=False)
_PARQUET = (".parquet", ".pq")
_JSON = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")
_ENDINGS = (*_PARQUET, ".csv", ".tsv", ".csv.gz", ".tsv.gz", *_JSON)


def is_remote(path: str) -> bool:
    """Returns whether a path is a URL, such as ``s3://bucket/day_0.parquet``, rather than a local path."""
    return "://" in path


def open_binary(path: str) -> BinaryIO:
    """Opens a file, local or at a URL, for reading.

    Raises:
        OSError: the file cannot be opened.
        InputError: fsspec does not know the protocol of this URL, or the package for it is not installed.
    """
    if not is_remote(path):
        return open(path, "rb")
    with _file_system(path) as (system, inner):
        return io.BufferedReader(system.open(inner, "rb"))


def file_version(path: str) -> tuple[int, int]:
    """Returns the size of a file in bytes and a number that changes with the file; raises what `open_binary` raises."""
    with _file_system(path) as (system, inner):
        # Not `ukey`: some stores compute it from the name alone.
        return int(system.size(inner)), int(system.checksum(inner))


def matching_files(value: str) -> list[str]:
    """Lists the files that a file name, folder or glob matches, sorted by name.

    In a folder or glob, names that begin with ``.`` or ``_`` are left out, also of folders that ``**`` matches. A
    folder ``*.parquet``, as of Spark, is replaced by its Parquet files. Without ``**``, a warning names other folders.

    Raises:
        OSError: the file or folder cannot be read.
        InputError: see `open_binary`; or a link is broken, or a folder named ``*.parquet`` has subfolders.
    """
    with _file_system(value) as (system, inner):

        def visible(pattern: str) -> list[str]:
            first = [*pattern.split("/")[:-1], "**"].index("**")
            return [name for name in system.glob(pattern) if all(p[0] not in "._" for p in name.split("/")[first:])]

        matches, unread = list[str](), list[str]()
        is_folder = system.isdir(inner)
        if system.isfile(inner) or (is_folder and inner.endswith(".parquet")):
            names = [inner]
        else:
            names = visible(f"{glob.escape(inner)}/*" if is_folder else inner)
        for name in names:
            if not system.isdir(name):
                matches.append(name)
            elif name.endswith(".parquet"):
                inside = visible(f"{glob.escape(name)}/*")
                if folders := [each for each in inside if system.isdir(each)]:
                    raise InputError(
                        f"{folders[0]} is a folder, whose rows would be left out. Write {name} without partitions, or "
                        f"list the files of {value!r} by a glob."
                    )
                matches += [each for each in inside if each.endswith(_PARQUET)]
            elif "**" not in inner:
                unread.append(name)
        if broken := [name for name in matches if not system.exists(name)]:
            raise InputError(f"{broken[0]} (matched by {value!r}) is a broken link. Repair or remove the link.")
    if unread:
        logger.warning("%r: these folders are not read: %s. A glob with ** reads them.", value, shorten(unread, ", "))
    if is_remote(value):  # a single file keeps the URL that the user gave
        return [value] if matches == [inner] else sorted({*map(system.unstrip_protocol, matches)})
    return sorted({*matches})  # "**" matches a folder and its files


@contextmanager
def _file_system(path: str) -> Iterator[tuple[Any, str]]:
    """Yields fsspec's file system of a path, and the path in it; turns errors of a store's package into `OSError`."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    try:
        system, inner = url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise InputError(
            f"{path!r} cannot be read: {error}. Correct the URL, or install the package that fsspec needs for it."
        ) from error
    try:
        yield system, inner
    except (InputError, OSError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def expand_path(setting: str, value: str, *, columns: bool) -> list[str]:
    """Lists the files that ``value`` (a file name, folder or glob) matches, sorted by name.

    With ``columns``, lists only files with the ending of a format that names columns, and warns of others. Messages
    begin with ``setting``, the key of the configuration.

    Raises:
        InputError: see `matching_files`; or no file matches or has a known ending, or ``value`` is a prepared folder.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = [Path(folder, name).touch() for name in ("day_1.tsv", "day_0.tsv", "_SUCCESS")]
        ...     [Path(file).name for file in expand_path("train_path", folder, columns=True)]
        ['day_0.tsv', 'day_1.tsv']
    """
    if os.path.isfile(os.path.join(value, MANIFEST)):
        raise InputError(f"{setting}={value!r} is a folder that `dmt prepare` wrote. Set data.prepared to this folder.")
    try:
        files = matching_files(value)
    except InputError as error:
        raise InputError(f"{setting}: {error}") from error
    except (OSError, ValueError) as error:  # such as a name that is too long
        raise InputError(f"{setting}={value!r} cannot be read ({error}). Check the path and permissions.") from error
    known = [file for file in files if file.endswith(_ENDINGS)] if columns else files
    if not known and files:
        raise InputError(f"{setting}: {files[0]} has an unknown ending. Give files that end in {', '.join(_ENDINGS)}.")
    if not known:
        place = "" if is_remote(value) or Path(value).is_absolute() else f" (in {Path.cwd()})"
        raise InputError(f"{setting}={value!r} matches no file{place}. Correct the path.")
    if others := sorted({*files}.difference(known)):
        logger.warning("%s=%r: files with unknown endings are not read: %s", setting, value, shorten(others, ", "))
    return known


def format_of(path: str) -> Literal["parquet", "json", "text"]:
    """Returns the format of a file with named columns, by the ending of its name."""
    return "parquet" if path.endswith(_PARQUET) else "json" if path.endswith(_JSON) else "text"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The ``manifest.json`` of a prepared folder. Other programs that write one may leave out fields with a default."""

    format: int
    """Version of the format, `FORMAT`."""
    files: dict[str, tuple[int, int]]
    """Size in bytes and CRC-32 of each other file, by path in the folder."""
    dense: tuple[str, ...]
    """Names of the dense columns, float32."""
    features: tuple[Feature, ...]
    """Features, each with a column of ids."""
    label: str | None = None
    """Name of the column of labels, int8; None if rows have no labels."""
    raw: dict[str, Any] | None = None
    """Section ``[data]`` that turns raw rows into these ids; it names every column, without globs. None if unknown."""
    sources: tuple[tuple[str, int, int], ...] = ()
    """Path, size in bytes and version (`file_version`) of each raw file, for readers of the manifest."""
    access_counts: str | None = None
    """Name of the file with the access counts of the training rows; None without counts."""
    vocabulary: str | None = None
    """Name of the file with the hashes of values and their ids; None unless ids are by frequency."""
    rows: dict[str, int] = field(default_factory=dict)
    """Number of rows in ``"train"`` and ``"eval"``."""
    rejects: int = 0
    """Number of invalid rows that were left out."""
    summary: dict[str, Any] = field(default_factory=dict)
    """Counts of each column, and notes for the user."""
    made_by: dict[str, str] = field(default_factory=dict)
    """Versions of the packages that wrote the folder, for readers of the manifest."""

    @property
    def columns(self) -> Columns:
        """The columns of the prepared rows."""
        return Columns(dense=self.dense, features=self.features, label=self.label)


def read_manifest(folder: Path, place: str, *, remedy: str | None = None) -> Manifest:
    """Reads the manifest of a prepared folder, and checks that the files it lists exist with their sizes.

    Messages begin with ``place``, which names the setting; ``remedy`` replaces the advice for an unreadable manifest.

    Raises:
        InputError: the folder has no valid manifest, or a file is missing or has another size.
    """
    remedy = remedy or "Name a folder that `dmt prepare` has written."
    manifest = read_model(folder / MANIFEST, Manifest, what=f"{place}: manifest", version=FORMAT, remedy=remedy)
    for name, (size, _) in manifest.files.items():
        file = folder / name
        actual_size = file.stat().st_size if file.is_file() else None
        if actual_size != size:
            text = "is missing" if actual_size is None else f"has {actual_size} bytes, not {size}"
            raise InputError(f"{place}: {file} {text}. Copy the whole folder, or prepare the data again.")
    return manifest


def prepared_schema(config: DataConfig, columns: Columns) -> pa.Schema:
    """Returns the schema of prepared rows: of ``columns``, with `REQUEST` if there is a ``data.group_by``."""
    return columns.schema if config.group_by is None else columns.schema.append(REQUEST_FIELD)


def starts_of(bags: pa.Array) -> NDArray[np.int64]:
    """Returns where each of n lists begins in their concatenated values, then where the last ends, int64 [n + 1]."""
    offsets = bags.offsets.to_numpy().astype(np.int64)
    return offsets - offsets[0]
