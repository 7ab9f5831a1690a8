"""`StopRequest`: on SIGTERM all ranks stop after one step, so that it can be saved and no step is lost.

Schedulers send SIGTERM before they take machines away; torchrun hands it on to its ranks, and kills them 30 s later.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import torch.distributed as dist

__all__ = ["EXIT_CODE", "StopRequest"]

EXIT_CODE = 128 + signal.SIGTERM
"""Exit code of a rank that has saved and stopped, that of a program ended by SIGTERM: schedulers start it again."""

# Steps from the one at which rank 0 knows that all ranks were told to that at which they stop: more than a rank can be
# ahead of another, since all reduce gradients together.
_AHEAD = 4
# A rank gives up after this long since it noted, and after as many steps: a step, or an evaluation, may take longer.
_PATIENCE_S = 5.0
_PATIENCE_STEPS = 3


class StopRequest:
    """Takes SIGTERM while it is entered, and says after which step all ranks stop.

    Ranks are told at different steps. Each notes in the store that it was; once all have, rank 0 names the step. Until
    a signal comes nothing is sent. A rank that is told alone ends, as it would without this. One that was told goes on
    taking the signal, so that a second one does not end what is saved.

    Args:
        group: all ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._store, self._size, self._leads = group.get_group_store(), group.size(), group.rank() == 0
        number = self._store.add(f"dmt/stops/{group.rank()}", 1)
        self._told, self._at_key = f"dmt/told/{number}", f"dmt/stop_at/{number}"
        self._is_told = False
        self._noted: float | None = None
        self._asked = 0
        self._at: int | None = None
        self._before: Any = None

    def __enter__(self) -> StopRequest:
        # Python lets no other thread set handlers.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None and not self._is_told:
            signal.signal(signal.SIGTERM, self._before)

    def is_due(self, step: int, interval: int = 1) -> bool:
        """Returns whether all ranks stop after this step, the same on every rank; to be asked after every step.

        Args:
            step: steps done.
            interval: a stop is at a multiple of it.

        Raises:
            SystemExit: other ranks were not told.
        """
        if not self._is_told:
            return False
        if self._noted is None:
            self._store.add(self._told, 1)
            self._noted = time.monotonic()
        if self._at is None:
            self._asked += 1
            if self._leads and self._store.add(self._told, 0) == self._size:
                self._store.set(self._at_key, str(-(-(step + _AHEAD) // interval) * interval))
            if self._store.check([self._at_key]):
                self._at = int(self._store.get(self._at_key))
                assert step <= self._at, f"step {step} is done, but all ranks were to stop after step {self._at}"
            elif self._asked > _PATIENCE_STEPS and time.monotonic() - self._noted > _PATIENCE_S:
                raise SystemExit(EXIT_CODE)
        return step == self._at

    def _note(self, number: int, frame: object) -> None:
        self._is_told = True
