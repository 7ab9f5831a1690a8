"""The folder of a run's last checkpoints, and the manifest of each.

============================  ======================================================================================
``step-00001234``             a whole checkpoint; ``.1`` is appended where the step is saved again
``.step-00001234.partial``    being written or deleted, or left by a process that was killed while it did
============================  ======================================================================================

The manifest, ``checkpoint.json``, has size and SHA-256 of every file and a digest of itself. It is written last; then
the folder is renamed, so that a kill or a loss of power at any moment leaves each checkpoint whole or out of sight.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from dmt.collectives import run_on_all_or_raise
from dmt.errors import InputError
from dmt.files import check_writable, from_record, fsync_path, open_file, read_record
from dmt.sptt.mesh import TowerMesh

__all__ = [
    "MANIFEST_NAME",
    "FileRecord",
    "Manifest",
    "checkpoints",
    "commit",
    "discard_checkpoints",
    "make_scratch",
    "newest",
    "prepare",
    "prune",
    "read_manifest",
    "record_of",
    "remove",
    "verify",
    "write_manifest",
]

logger = logging.getLogger(__name__)

MANIFEST_NAME = "checkpoint.json"
_FORMAT = 2
_REMEDY = "Use another checkpoint."
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_UNFINISHED = re.compile(r"\.step-\d{8,}(\.\d+)?\.partial")


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size and digest of a file of a checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The ``checkpoint.json`` of a checkpoint; plain data."""

    step: Annotated[int, Field(ge=0)]
    """Number of training steps before the checkpoint."""
    progress: dict[str, Any]
    """Position of the caller's training: epoch, rows; anything JSON takes."""
    versions: dict[str, str]
    """Versions of the packages that wrote the checkpoint."""
    files: dict[str, FileRecord]
    """Every file beside the manifest, by name."""
    moment_scales: dict[str, float] = field(default_factory=dict)
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


def record_of(path: Path) -> FileRecord:
    """Reads a file once and returns its size and SHA-256."""
    with open_file(path) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileRecord(bytes=stream.tell(), sha256=digest)


def verify(folder: Path, share: slice = slice(None)) -> Manifest:
    """Reads every file of a checkpoint, or a share of their sorted names, and compares it with the manifest.

    Raises:
        InputError: the manifest or a file is absent, cut off or altered; the message names it.
    """
    manifest = read_manifest(folder)
    for name in sorted(manifest.files)[share]:
        try:
            size, expected = (folder / name).stat().st_size, manifest.files[name].bytes
            if size != expected:
                wrong = f"has {size} bytes instead of {expected}"
            elif record_of(folder / name) != manifest.files[name]:
                wrong = "was altered"
            else:
                continue
        except OSError as error:
            wrong = "is absent" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise InputError(f"{folder} is damaged: {name} {wrong}. {_REMEDY}")
    return manifest


def checkpoints(folder: Path) -> list[Path]:
    """Lists the checkpoints in a folder, newest first; a folder that is a checkpoint itself is the only one.

    No file is read: checkpoints may be damaged.
    """
    if _NAME.fullmatch(folder.name) or (folder / MANIFEST_NAME).exists():
        return [folder] if folder.is_dir() else []
    # A link to another checkpoint could not be deleted.
    paths = (path for path in folder.iterdir() if not path.is_symlink()) if folder.is_dir() else ()
    return sorted((path for path in paths if _NAME.fullmatch(path.name)), key=_order, reverse=True)


def newest(folder: Path, mesh: TowerMesh | None = None) -> Path | None:
    """Finds the newest whole checkpoint in a folder, or the folder itself if it is one; reads every file of it.

    Damaged ones that are newer are skipped with a warning that says what is wrong with them. Looks again where one is
    gone in the meantime, because the run that saves there has replaced it.

    Args:
        folder: of checkpoints, or a checkpoint.
        mesh: collective over its job if given: rank 0 lists the folder, and each rank reads some of the files.

    Returns:
        None where there is no checkpoint at all.

    Raises:
        InputError: there are some, but none is whole; the same on every rank.
    """
    wrong: dict[str, str] = {}
    while True:
        paths = _on_all(lambda: [str(path) for path in checkpoints(folder)], mesh)[0]
        path = next((path for path in paths if path not in wrong), None)
        if path is None:
            break
        share = slice(None) if mesh is None else slice(mesh.rank, None, mesh.topology.world_size)
        found = [text for text in _on_all(partial(_damage, Path(path), share), mesh) if text is not None]
        if not found:
            return Path(path)
        wrong[path] = found[0]
        if (mesh is None or mesh.rank == 0) and len(paths) > 1 and Path(path).exists():
            logger.warning("A checkpoint is passed over: %s", found[0])
    if wrong:
        first = next(iter(wrong.values()))
        raise InputError(first if list(wrong) == [str(folder)] else f"{folder} holds no whole checkpoint: {first}")
    return None


def _on_all(work: Callable[[], Any], mesh: TowerMesh | None) -> list[Any]:
    return [work()] if mesh is None else run_on_all_or_raise(work, mesh.global_group)


def _damage(path: Path, share: slice) -> str | None:
    try:
        verify(path, share)
    except InputError as error:
        return str(error)
    return None


def discard_checkpoints(folder: Path) -> list[Path]:
    """Deletes the checkpoints in a folder that have a manifest; returns those without one, and then deletes nothing."""
    paths = checkpoints(folder)
    foreign = [path for path in paths if path == folder or not (path / MANIFEST_NAME).is_file()]
    for path in () if foreign else paths:
        _discard(path)
    return foreign


def _order(path: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(path.name)
    assert match is not None, f"{path} is listed by its name"
    return int(match[1]), int(match[2] or 0)


def prepare(folder: Path) -> None:
    """Makes the folder and deletes unfinished work in it."""
    try:
        check_writable(folder)
        for path in [path for path in folder.iterdir() if _UNFINISHED.fullmatch(path.name)]:
            remove(path)
        fsync_path(folder)
        # The entries of new folders. One that may not be read is none that this run has made.
        for path in list(folder.absolute().parents)[:2]:
            with suppress(PermissionError):
                fsync_path(path)
    except OSError as error:
        raise InputError(f"Checkpoint folder {folder} cannot be written: {error.strerror}.") from error


def make_scratch(folder: Path, step: int) -> Path:
    """Makes a new empty folder to write the checkpoint of a step into; `OSError` if it cannot be made."""
    path = folder / f".step-{step:08d}.partial"
    remove(path)
    path.mkdir(parents=True)
    return path


def commit(scratch: Path, step: int) -> Path:
    """Renames a written checkpoint to a name that is free, later than all of its step."""
    fsync_path(scratch)
    number = max((_order(path)[1] + 1 for path in checkpoints(scratch.parent) if _order(path)[0] == step), default=0)
    target = scratch.with_name(f"step-{step:08d}{f'.{number}' if number else ''}")
    os.rename(scratch, target)
    fsync_path(target.parent)
    return target


def prune(committed: Path, keep: int) -> None:
    """Deletes all but the last checkpoints up to one that was just committed.

    Those of later steps go first: training was resumed from before them, so they belong to a course that was given up.
    """
    last = _order(committed)
    steps = {_order(path)[0]: path for path in reversed(checkpoints(committed.parent)) if _order(path) <= last}
    kept = sorted(steps)[-keep:]
    for path in checkpoints(committed.parent):
        if path != steps.get(_order(path)[0]) or _order(path)[0] not in kept:
            _discard(path)


def _discard(path: Path) -> None:
    """Deletes a checkpoint so that a kill in between leaves nothing that looks like one."""
    doomed = path.with_name(f".{path.name}.partial")
    remove(doomed)
    os.rename(path, doomed)
    remove(doomed)


def remove(path: Path) -> None:
    """Deletes a folder and all in it, a link or file of its name without following it, or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _digest(record: dict[str, Any]) -> str:
    # Through JSON: tuples become lists, as they are when the manifest is read.
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
