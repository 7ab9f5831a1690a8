"""Processes that follow others: one that ends with another, and one that has the last word."""

from __future__ import annotations

import os
import threading
import time
from multiprocessing.connection import wait

__all__ = ["end_with", "say_after"]

# A process that has ended stays a zombie, "Z", until its parent looks.
_SAY_AFTER = """
exec < /dev/null > /dev/null
while [ -e "/proc/$0/stat" ] && ! grep -q ") Z" "/proc/$0/stat" 2> /dev/null; do sleep 0.1; done
printf '%s\\n' "$1" >&2
"""


def end_with(process: int) -> None:
    """Kills this process as soon as another one has ended, however that one ends; returns at once.

    A thread waits for it. Linux's parent-death signal would not do: it comes when the *thread* ends that forked this
    process, and the parent of a rank is the process that `prepare_ranks` starts, not the one that waits for its result.
    """

    def follow() -> None:
        try:
            wait([os.pidfd_open(process)])
        except (OSError, AttributeError):  # it has ended; or before Linux 5.3, or in a sandbox
            while os.path.exists(f"/proc/{process}"):
                time.sleep(1)
        os._exit(1)

    threading.Thread(target=follow, name="end_with", daemon=True).start()


def say_after(process: int, line: str) -> None:
    """Prints a line on stderr once another process has ended, so that it is the last one; returns at once.

    Where there is no ``/proc`` it is printed now.
    """
    os.posix_spawn("/bin/sh", ["sh", "-c", _SAY_AFTER, str(process), line], os.environ, setsid=True)
