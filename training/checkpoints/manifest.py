"""`Manifest`: what a checkpoint says of itself and of its files, and whether the files are what it says. No torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dmt.errors import InputError
from dmt.files import read_record
from dmt.words import few

__all__ = [
    "MANIFEST_NAME",
    "FileRecord",
    "Manifest",
    "check_plain",
    "damaged_files",
    "read_manifest",
    "record_of",
    "verify",
    "write_manifest",
]

MANIFEST_NAME = "checkpoint.json"
_FORMAT = 1
_REMEDY = "Use another checkpoint."


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What a file of a checkpoint must be."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The ``checkpoint.json`` of a checkpoint; plain data."""

    step: int
    """Training steps behind the checkpoint."""
    progress: Mapping[str, Any]
    """What the caller needs to go on: epoch, row, samples; anything JSON takes."""
    versions: Mapping[str, str]
    """Of the packages that wrote it."""
    files: Mapping[str, FileRecord]
    """Every file beside the manifest, by name."""
    column_shards: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Widths of the column shards, by the name of a state that has one value for each row of each shard."""
    moment_scales: Mapping[str, float] = field(default_factory=dict)
    """Factor c of AdaGrad's moments where it was not 1, by table (2D sparse parallelism, Algorithm 1, line 6)."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest through to the disk, with a digest of itself.

    Raises:
        OSError: it cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_manifest(Path(folder), Manifest(step=7, progress={"epoch": 1}, versions={}, files={}))
        ...     verify(Path(folder)).progress
        {'epoch': 1}
    """
    record = {"format": _FORMAT, **asdict(manifest)}
    with (folder / MANIFEST_NAME).open("w") as stream:
        json.dump({**record, "digest": _digest(record)}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Reads a checkpoint's manifest and checks it against its own digest.

    Raises:
        InputError: it is absent, cut off, altered, or of another format.
    """
    path = folder / MANIFEST_NAME
    if not path.exists():
        raise InputError(f"{folder} is no whole checkpoint: {MANIFEST_NAME} is absent. {_REMEDY}")
    record = read_record(path, what="Checkpoint", version=_FORMAT, remedy=_REMEDY)
    if record.pop("digest", None) != _digest(record):
        raise InputError(f"{folder} is damaged: {MANIFEST_NAME} was altered. {_REMEDY}")
    del record["format"]
    try:
        files = {str(name): FileRecord(**entry) for name, entry in record.pop("files").items()}
        cuts = {str(name): tuple(widths) for name, widths in record.pop("column_shards").items()}
        manifest = Manifest(**record, files=files, column_shards=cuts)
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(f"{folder} is damaged: {MANIFEST_NAME} is no manifest ({error}). {_REMEDY}") from error
    for name in files:
        if Path(name).name != name:
            raise InputError(f"{folder} is damaged: {MANIFEST_NAME} lists {name!r}, which is not in it. {_REMEDY}")
    return manifest


def record_of(path: Path) -> FileRecord:
    """Size and SHA-256 of a file, read once from its beginning to its end."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileRecord(bytes=stream.tell(), sha256=digest)


def damaged_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """What is wrong with the named files of a checkpoint, one text for each; sizes are compared before contents."""
    wrong = []
    for name in names:
        wanted, path = manifest.files[name], folder / name
        try:
            size = path.stat().st_size
            if size != wanted.bytes:
                wrong.append(f"{name} has {size} bytes instead of {wanted.bytes}")
            elif record_of(path) != wanted:
                wrong.append(f"{name} was altered")
        except FileNotFoundError:
            wrong.append(f"{name} is absent")
        except OSError as error:
            wrong.append(f"{name} cannot be read ({error.strerror})")
    return wrong


def verify(folder: Path) -> Manifest:
    """Reads every file of a checkpoint and compares it with the manifest.

    Raises:
        InputError: the manifest or a file is absent, cut off or altered; names it.
    """
    manifest = read_manifest(folder)
    if wrong := damaged_files(folder, manifest, sorted(manifest.files)):
        raise InputError(f"{folder} is damaged: {few(wrong)}. {_REMEDY}")
    return manifest


def check_plain(progress: Mapping[str, Any]) -> None:
    """Raises `InputError` unless JSON takes it.

    Example:
        >>> check_plain({"epoch": 1, "seen": {3}})
        Traceback (most recent call last):
        ...
        dmt.errors.InputError: progress={'epoch': 1, 'seen': {3}} is not plain data: Object of type set is not JSON ...
    """
    try:
        json.dumps(progress)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"progress={progress} is not plain data: {error}. Give numbers, texts, lists and dicts."
        ) from error


def _digest(record: Mapping[str, Any]) -> str:
    # Through JSON and back: tuples become lists, as they are when the manifest is read.
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
