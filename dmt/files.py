"""Writing files: whole or not at all, and a look beforehand whether a folder takes any."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["probe_folder", "replacing"]


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A scratch file beside ``target`` that takes its place at the end, in one step; missing folders are made.

    After an error nothing of it is left behind, and an existing file stays as it was.

    Raises:
        OSError: the file cannot be written.
        ValueError: the path is no file name, such as ``"."``.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(Path(folder, "new", "a.txt")) as scratch:
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


def probe_folder(folder: Path) -> None:
    """Makes the folder where it is absent, and a file in it that is gone again.

    Raises:
        OSError: nothing can be written there.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     probe_folder(Path(folder, "new"))
        ...     [path.name for path in Path(folder).rglob("*")]
        ['new']
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
