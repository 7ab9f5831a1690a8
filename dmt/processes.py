"""A process that ends with another."""

from __future__ import annotations

import os
import threading
import time
from multiprocessing.connection import wait

__all__ = ["end_with"]


def end_with(process: int) -> None:
    """Kills this process as soon as another one ends, for whatever reason; returns at once.

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
