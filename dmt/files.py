"""Files: written whole or not at all, or through to the disk; whether a folder takes any; records of one format."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dmt.errors import InputError

__all__ = ["fsync_path", "check_writable", "read_record", "atomic_write"]


@contextmanager
def atomic_write(target: Path) -> Iterator[Path]:
    """A scratch file beside ``target`` that takes its place at the end, in one step; missing folders are made.

    After an error nothing of it is left behind, and an existing file stays as it was.

    Raises:
        OSError: the file cannot be written.
        ValueError: the path is no file name, such as ``"."``.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with atomic_write(Path(folder, "new", "a.txt")) as scratch:
        ...         _ = scratch.write_text("whole")
        ...     Path(folder, "new", "a.txt").read_text()
        'whole'
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield scratch
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)


def fsync_path(path: Path) -> None:
    """Writes a file, or the names in a folder, through to the disk.

    Raises:
        OSError: it is absent, or the disk does not take it.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fsync_path(Path(folder))
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(folder: Path) -> None:
    """Makes the folder where it is absent, and a file in it that is gone again.

    Raises:
        OSError: nothing can be written there.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     check_writable(Path(folder, "new"))
        ...     [path.name for path in Path(folder).rglob("*")]
        ['new']
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def read_record(path: str | os.PathLike[str], *, what: str, version: int, remedy: str) -> dict[str, Any]:
    """Reads a JSON object that says its format version under ``format``.

    Args:
        path: the file.
        what: kind of file, first in every message: ``"Tower plan"``.
        version: the format that is read.
        remedy: last in every message, what to do.

    Raises:
        InputError: the file is absent, not text, not JSON, no object, or of another format version.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "plan.json")
        ...     _ = path.write_text('{"format": 1, "towers": []}')
        ...     read_record(path, what="Tower plan", version=1, remedy="Re-run `dmt partition`.")
        {'format': 1, 'towers': []}
    """
    try:
        record = json.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{what} {path}: cannot be read ({error}). {remedy}") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{what} {path}, line {error.lineno}: not JSON ({error.msg}). {remedy}") from error
    found = record.get("format") if isinstance(record, dict) else None
    if found != version:
        raise InputError(f"{what} {path} has format {found!r}; this version reads format {version}. {remedy}")
    return dict(record)
