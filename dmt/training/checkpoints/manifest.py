"""Files of checkpoints: the manifest of each, and the folder of the last few of a run. Needs no torch.

================================  ======================================================================
``step-00001234``                 a whole checkpoint; its manifest is ``checkpoint.json``
``.step-00001234.partial``        being written, or left by a save that was killed
``.step-00001234.old``            whole; set aside while another checkpoint of its step takes its place
``.step-00001234.deleted``        being deleted
``.shared-abcdefgh``              an empty file that tests whether all ranks see the folder
================================  ======================================================================

Whenever a process is killed, every checkpoint that was whole is found whole again, under its own name or as ``.old``;
only what is deliberately deleted is lost.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dmt.errors import InputError
from dmt.files import from_record, fsync_path, open_file, parse_json, read_record
from dmt.formatting import shorten

__all__ = [
    "CheckpointStore",
    "FileRecord",
    "MANIFEST_NAME",
    "Manifest",
    "PROBE",
    "check_plain",
    "checkpoints",
    "damaged_files",
    "discard_checkpoints",
    "newest",
    "read_manifest",
    "record_of",
    "verify",
    "write_manifest",
]

logger = logging.getLogger(__name__)

MANIFEST_NAME = "checkpoint.json"
PROBE = ".shared-"
"""Prefix of the files that test whether all ranks see a folder."""
_FORMAT = 1
_REMEDY = "Use another checkpoint."
_NAME = re.compile(r"step-(\d{8,})")
_ASIDE = re.compile(r"\.(step-\d{8,})\.old")
_UNFINISHED = re.compile(r"\.step-\d{8,}\.(partial|deleted)")


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size and digest of a file of a checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The ``checkpoint.json`` of a checkpoint; plain data."""

    step: int
    """Number of training steps before the checkpoint."""
    progress: Mapping[str, Any]
    """Position of the caller's training: epoch, row, samples; anything JSON takes."""
    versions: Mapping[str, str]
    """Versions of the packages that wrote the checkpoint."""
    files: Mapping[str, FileRecord]
    """Every file beside the manifest, by name."""
    column_shards: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Widths of the column shards, by the name of a state that has one value for each row of each shard."""
    moment_scales: Mapping[str, float] = field(default_factory=dict)
    """Factor c of AdaGrad's moments where it was not 1, by table (2D sparse parallelism, Algorithm 1, line 6)."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest through to the disk, with a digest of itself; `OSError` if it cannot be written."""
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
    if not os.path.lexists(path):
        raise InputError(f"{folder} is no whole checkpoint: {MANIFEST_NAME} is absent. {_REMEDY}")
    record = read_record(path, what="Checkpoint", version=_FORMAT, remedy=_REMEDY)
    if record.pop("digest", None) != _digest(record):
        raise InputError(f"{folder} is damaged: {MANIFEST_NAME} was altered. {_REMEDY}")
    manifest = from_record(Manifest, record, place=f"{folder} is damaged: {MANIFEST_NAME}", remedy=_REMEDY)
    for name in manifest.files:
        if Path(name).name != name or "\0" in name:
            raise InputError(f"{folder} is damaged: {MANIFEST_NAME} lists {name!r}, which is not in it. {_REMEDY}")
    return manifest


def verify(folder: Path) -> Manifest:
    """Reads every file of a checkpoint and compares it with the manifest.

    Raises:
        InputError: the manifest or a file is absent, cut off or altered; the message names it.
    """
    manifest = read_manifest(folder)
    if wrong := damaged_files(folder, manifest, sorted(manifest.files)):
        raise InputError(f"{folder} is damaged: {shorten(wrong)}. {_REMEDY}")
    return manifest


def damaged_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Compares the named files with the manifest, sizes before contents; returns one text for each that differs."""
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


def record_of(path: Path) -> FileRecord:
    """Reads a file once and returns its size and SHA-256."""
    with open_file(path) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileRecord(bytes=stream.tell(), sha256=digest)


def check_plain(progress: Mapping[str, Any]) -> None:
    """Raises `InputError` unless JSON takes it and `read_manifest` would read it again."""
    try:
        text = json.dumps(progress)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"progress={progress} is not plain data: {error}. Give numbers, texts, lists and dicts."
        ) from error
    parse_json(text, place="progress", remedy="Nothing was saved.")


def checkpoints(folder: Path) -> list[Path]:
    """Lists the checkpoints in a folder, newest first; a folder that is a checkpoint itself is the only one.

    No file is read: checkpoints may be damaged.
    """
    if _NAME.fullmatch(folder.name) or (folder / MANIFEST_NAME).exists():
        return [folder] if folder.is_dir() else []
    # A link to another checkpoint would be taken for one of its own step, and could not be deleted.
    own = (path for path in folder.iterdir() if not path.is_symlink()) if folder.is_dir() else ()
    found = {path.name: path for path in own if _NAME.fullmatch(path.name)}
    for path, name in _set_aside(folder):
        found.setdefault(name, path)
    return [found[name] for name in sorted(found, key=_step, reverse=True)]


def discard_checkpoints(folder: Path) -> list[Path]:
    """Deletes the checkpoints in a folder that have a manifest; returns what looks like one and stays.

    A checkpoint that was set aside comes into sight once the other one of its step is gone.
    """
    while found := checkpoints(folder):
        # Before any of these is gone.
        if foreign := [path for path in found if path == folder or not (path / MANIFEST_NAME).is_file()]:
            return foreign
        for path in found:
            _discard(path)
    return []


def newest(folder: Path) -> Path | None:
    """Finds the newest whole checkpoint in a folder, or the folder itself if it is one; reads every file of it.

    Damaged ones that are newer are skipped with a warning that says what is wrong with them.

    Returns:
        None where there is no checkpoint at all.

    Raises:
        InputError: there are some, but none is whole.
    """
    wrong = []
    for path in checkpoints(folder):
        try:
            verify(path)
        except InputError as error:
            logger.warning("A checkpoint is passed over: %s", error)
            wrong.append(str(error))
        else:
            return path
    if wrong:
        raise InputError(f"{folder} holds no whole checkpoint: {wrong[0]}")
    return None


class CheckpointStore:
    """Puts checkpoints into one folder and keeps the last ``keep``; to be used by one process at a time."""

    def __init__(self, folder: Path, keep: int) -> None:
        if keep < 1:
            raise InputError(f"keep={keep}: at least the checkpoint just written must stay. Give 1 or more.")
        self.folder = folder
        self._keep = keep

    def prepare(self) -> None:
        """Makes the folder, puts back what was set aside when a process was killed, and deletes unfinished work.

        Raises:
            InputError: the folder cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path, name in _set_aside(self.folder):
                if (self.folder / name).exists():
                    _discard(path)
                else:
                    os.rename(path, self.folder / name)
            for path in list(self.folder.glob(f"{PROBE}*")):
                path.unlink()
            for path in [path for path in self.folder.iterdir() if _UNFINISHED.fullmatch(path.name)]:
                _remove(path)
            fsync_path(self.folder)
            # The entries of new folders. One that may not be read is none that this run has made.
            for path in list(self.folder.absolute().parents)[:2]:
                with suppress(PermissionError):
                    fsync_path(path)
        except OSError as error:
            raise InputError(f"Checkpoint folder {self.folder} cannot be written: {error.strerror}.") from error

    def scratch(self, step: int) -> Path:
        """Makes a new empty folder to write the checkpoint of a step into; `OSError` if it cannot be made."""
        path = self.folder / f".{_name(step)}.partial"
        self.drop(path)
        path.mkdir(parents=True)
        return path

    def drop(self, scratch: Path) -> None:
        """Deletes a scratch folder, if it exists."""
        _remove(scratch)

    def commit(self, scratch: Path, step: int) -> Path:
        """Renames a written checkpoint to its final name; an older one of the same step makes way.

        Raises:
            OSError: it cannot be renamed; what was there before stays.
        """
        target = self.folder / _name(step)
        aside = self.folder / f".{_name(step)}.old"
        fsync_path(scratch)
        if target.exists():
            if aside.exists():
                _discard(aside)
            os.rename(target, aside)
        try:
            os.rename(scratch, target)
        except OSError:
            if aside.exists():
                os.rename(aside, target)
            raise
        fsync_path(self.folder)
        return target

    def prune(self, step: int) -> None:
        """Deletes all but the last few checkpoints; to be called after `commit` of ``step``.

        Those of later steps are deleted first: training was resumed from before them, so they belong to a course that
        was given up.

        Raises:
            OSError: something cannot be deleted.
        """
        for path, _ in _set_aside(self.folder):
            _discard(path)
        found = checkpoints(self.folder)
        given_up = [path for path in found if _step(path.name) > step]
        for path in (*given_up, *found[len(given_up) + self._keep :]):
            _discard(path)


def _digest(record: Mapping[str, Any]) -> str:
    # Through JSON: tuples become lists, as they are when the manifest is read.
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _step(name: str) -> int:
    match = _NAME.search(name)
    assert match is not None, f"{name} is no name of a checkpoint"
    return int(match[1])


def _set_aside(folder: Path) -> list[tuple[Path, str]]:
    """Checkpoints that were set aside, and their own names."""
    found = [path for path in folder.glob(".step-*.old") if not path.is_symlink()]
    return [(path, match[1]) for path in found if (match := _ASIDE.fullmatch(path.name))]


def _discard(path: Path) -> None:
    """Deletes a checkpoint so that a kill in between leaves nothing that looks like one."""
    doomed = path.with_name(f".{path.name.removeprefix('.').removesuffix('.old')}.deleted")
    _remove(doomed)
    os.rename(path, doomed)
    _remove(doomed)


def _remove(path: Path) -> None:
    """Deletes a folder and all in it, a link or file of its name without following it, or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
