"""`alone_in`: one job at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dmt.errors import InputError

__all__ = ["alone_in"]

_HELD = (errno.EWOULDBLOCK, errno.EACCES)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Holds a folder, which exists, for this process; the end of the process frees it, also a kill.

    A file system without locks cannot be held; then nothing is checked.

    Raises:
        InputError: another job holds it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, alone_in(Path(folder)):
        ...     with alone_in(Path(folder)):
        ...         pass
        Traceback (most recent call last):
        ...
        dmt.errors.InputError: Another job is running in ...
    """
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                raise InputError(
                    f"Another job is running in {folder}. Wait for its end, or give another train.output_dir."
                ) from error
        yield
