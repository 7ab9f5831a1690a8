"""Files written atomically or through to the disk, records of one format version, and names that files before used."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from dmt.errors import InputError

__all__ = ["RENAMED", "atomic_write", "check_writable", "current_name", "fsync_path", "read_record"]

logger = logging.getLogger(__name__)

RENAMED = {
    "data_wise": "data_parallel",
    "exchange_us": "collective_latency_us",
    "link_gb_per_s": "intra_tower_gb_per_s",
    "lookup_gb_per_s": "memory_gb_per_s",
}
"""Current name of every key and value that older files, configs and command lines may use."""


@contextmanager
def atomic_write(target: Path) -> Iterator[Path]:
    """Yields a scratch file beside ``target`` that replaces it atomically at the end; missing folders are made.

    After an error the scratch file is removed, and an existing target is unchanged.

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
    """Flushes a file, or the entries of a folder, to the disk.

    Raises:
        OSError: the path does not exist or cannot be flushed.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(folder: Path) -> None:
    """Checks that a folder can be written to by creating a temporary file in it; a missing folder is made.

    Raises:
        OSError: nothing can be written there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def read_record(path: str | os.PathLike[str], *, what: str, version: int, remedy: str) -> dict[str, Any]:
    """Reads a JSON object whose key ``format`` holds its format version.

    Args:
        path: the file.
        what: kind of file, with which every error message begins: ``"Tower plan"``.
        version: format version that this code reads.
        remedy: advice with which every error message ends.

    Raises:
        InputError: the file is missing, not a JSON object, or of another format version.

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


@cache
def current_name(name: str) -> str:
    """Returns the current name of a key or value; an old name is logged once, at INFO.

    Example:
        >>> current_name("data_wise"), current_name("row_wise")
        ('data_parallel', 'row_wise')
    """
    current = RENAMED.get(name, name)
    if current != name:
        logger.info("%s is now called %s; the old name is still accepted.", name, current)
    return current
