"""Files of data, here or behind a URL such as ``s3://bucket/day_0.parquet``, and folders that ``dmt prepare`` writes.

A prepared folder has Parquet files of ids in ``train`` and ``eval``, and a manifest, written last, that describes them.
"""

from __future__ import annotations

import glob
import io
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
from dmt.training.data.columns import Columns, Feature

__all__ = [
    "FORMAT",
    "MANIFEST",
    "REQUEST",
    "Manifest",
    "expand_path",
    "file_version",
    "format_of",
    "is_remote",
    "matching_files",
    "open_binary",
    "read_manifest",
    "starts_of",
]

MANIFEST, FORMAT = "manifest.json", 3
REQUEST = "#request"
"""Column of the key of each row's request, in folders whose rows have one (``data.group_by``)."""
_PARQUET = (".parquet", ".pq")
_JSON = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")
_ENDINGS = (*_PARQUET, ".csv", ".tsv", ".csv.gz", ".tsv.gz", *_JSON)


def is_remote(path: str) -> bool:
    """Tells a URL from a path of this machine.

    Example:
        >>> is_remote("s3://bucket/day_0.parquet"), is_remote("day_0.parquet")
        (True, False)
    """
    return "://" in path


def open_binary(path: str) -> BinaryIO:
    """Opens a file to read.

    Raises:
        OSError: it cannot be opened.
        InputError: there is no package for such a URL.
    """
    if not is_remote(path):
        return open(path, "rb")
    with _file_system(path) as (system, inner):
        return io.BufferedReader(system.open(inner, "rb"))


def file_version(path: str) -> tuple[int, int]:
    """Returns the bytes of a file, and a number that changes with it; errors are those of `open_binary`."""
    with _file_system(path) as (system, inner):
        # Not `ukey`, which some stores make of the name alone.
        return int(system.size(inner)), int(system.checksum(inner))


def matching_files(value: str) -> list[str]:
    """Lists the files that a file name, folder or glob matches, in the order of their names.

    Hidden files and those that begin with ``_`` are left out. A folder that is named ``*.parquet``, as Spark writes,
    stands for its files.

    Raises:
        OSError: the place cannot be read.
        InputError: there is no package for such a URL; a link leads nowhere; or a folder named ``*.parquet`` holds
            other folders, whose rows would be left out.
    """
    with _file_system(value) as (system, inner):

        def visible(pattern: str) -> list[str]:
            return [name for name in system.glob(pattern) if name.rpartition("/")[2][0] not in "._"]

        found, pattern = [], f"{glob.escape(inner)}/*" if system.isdir(inner) else inner
        for name in [inner] if system.isfile(inner) else visible(pattern):
            if not system.isdir(name):
                found.append(name)
            elif name.endswith(".parquet"):
                inside = visible(f"{glob.escape(name)}/*")
                if folders := [each for each in inside if system.isdir(each)]:
                    raise InputError(
                        f"{folders[0]} is a folder, whose rows would be left out. Write {name} without partitions, or "
                        "name its files by a glob."
                    )
                found += [each for each in inside if each.endswith(_PARQUET)]
        if broken := [name for name in found if not system.exists(name)]:
            raise InputError(f"{broken[0]} (of {value!r}) is a broken link. Repair or remove it.")
    if is_remote(value):  # a single file keeps the name that the user gave it
        return [value] if found == [inner] else sorted(map(system.unstrip_protocol, found))
    return sorted(found)


@contextmanager
def _file_system(path: str) -> Iterator[tuple[Any, str]]:
    """Yields fsspec's view of a place; turns the errors of a store's own package into those of files."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    try:
        system, inner = url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise InputError(
            f"{path!r} cannot be read: {error}. Install fsspec's package for such URLs, or copy the files to this host."
        ) from error
    try:
        yield system, inner
    except (InputError, OSError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def expand_path(setting: str, value: str, *, columns: bool) -> list[str]:
    """Lists the files that a file name, directory or glob matches, or a URL of these, in the order of their names.

    With ``columns``, files of a directory whose ending says no format with named columns are left out.

    Raises:
        InputError: nothing matches, a file has an unknown ending, or it is a prepared folder.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = [Path(folder, name).touch() for name in ("day_1.tsv", "day_0.tsv", "_SUCCESS")]
        ...     [Path(file).name for file in expand_path("train_path", folder, columns=True)]
        ['day_0.tsv', 'day_1.tsv']
    """
    if os.path.isfile(os.path.join(value, MANIFEST)):
        raise InputError(f"{setting}={value!r} is a folder of `dmt prepare`. Name it as data.prepared.")
    try:
        files = matching_files(value)
        found = [file for file in files if file.endswith(_ENDINGS)] if columns else files
    except (OSError, ValueError) as error:  # such as a name that is too long
        raise InputError(f"{setting}={value!r} cannot be read ({error}).") from error
    if not found and files:
        raise InputError(f"{setting}: {files[0]} has an unknown ending; expected one of {', '.join(_ENDINGS)}.")
    if not found:
        place = "" if is_remote(value) else f" (in {Path.cwd()})"
        raise InputError(f"{setting}={value!r} matches no file{place}.")
    return found


def format_of(path: str) -> Literal["parquet", "json", "text"]:
    """Tells the format of a file with named columns by its name."""
    return "parquet" if path.endswith(_PARQUET) else "json" if path.endswith(_JSON) else "text"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a prepared folder says of itself; a program other than ``dmt prepare`` may leave out what has a default."""

    format: int
    files: dict[str, tuple[int, int]]
    """Bytes and CRC-32 of each file, by its path in the folder."""
    dense: tuple[str, ...]
    """Dense columns, float32."""
    features: tuple[Feature, ...]
    """Columns of ids."""
    label: str | None = None
    """Column of labels, int8."""
    raw: dict[str, Any] | None = None
    """Section ``[data]`` that turns raw rows into these ids, with every column by name."""
    sources: tuple[tuple[str, int, int], ...] = ()
    """Name, bytes and version of the files that were prepared."""
    access_counts: str | None = None
    """Access counts of the training rows."""
    vocabulary: str | None = None
    """Values and their ids, by frequency."""
    rows: dict[str, int] = field(default_factory=dict)
    """Rows of each part."""
    rejects: int = 0
    """Rows that were left out."""
    summary: dict[str, Any] = field(default_factory=dict)
    """What to know of each column."""
    made_by: dict[str, str] = field(default_factory=dict)
    """Versions of packages."""

    @property
    def columns(self) -> Columns:
        """The columns of a run on these rows."""
        return Columns(dense=self.dense, features=self.features, label=self.label)


def read_manifest(folder: Path, place: str, *, remedy: str | None = None) -> Manifest:
    """Reads the manifest of a folder, and checks that its files are those that it was written for.

    Raises:
        InputError: ``dmt prepare`` has not written the folder, or a file has gone or has another size; ``place`` names
            the setting. ``remedy`` says what to do about a manifest that cannot be read.
    """
    remedy = remedy or "Name a folder that `dmt prepare` has written."
    manifest = read_model(folder / MANIFEST, Manifest, what=f"{place}: manifest", version=FORMAT, remedy=remedy)
    for name, (size, _) in manifest.files.items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            text = "is missing" if found is None else f"has {found} bytes, not {size}"
            raise InputError(f"{place}: {file} {text}. Copy the folder whole, or prepare it again.")
    return manifest


def starts_of(bags: pa.Array) -> NDArray[np.int64]:
    """Returns where each of n lists begins among the values of all, and the end of the last, int64 [n + 1]."""
    offsets = bags.offsets.to_numpy().astype(np.int64)
    return offsets - offsets[0]
