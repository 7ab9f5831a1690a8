"""`StopRequest`: on SIGTERM or Ctrl-C all ranks stop after one step, so that it can be saved and no step is lost.

Schedulers send SIGTERM before they take machines away. torchrun hands both signals on to its ranks, which are in
sessions of their own, and kills them 30 s later.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dmt.formatting import printable
from dmt.training.checkpoints import checkpoints
from dmt.training.config import TrainConfig

__all__ = ["EXIT_CODE", "SIGNALS", "StopRequest", "say_stopped"]

EXIT_CODE = 128 + signal.SIGTERM
"""Exit code of a rank that has saved and stopped, that of a program ended by SIGTERM: schedulers start it again."""
SIGNALS: Mapping[int, str] = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}
"""The signals that end a run, and what a reader calls them."""

# Steps from the one at which rank 0 knows that all ranks were told to that at which they stop: more than a rank can be
# ahead of another, since all reduce gradients together.
_AHEAD = 4
# A rank gives up after this long since it noted, and after as many steps: a step, or an evaluation, may take longer.
_PATIENCE_S = 5.0
_PATIENCE_STEPS = 3


class StopRequest:
    """Takes SIGTERM and Ctrl-C while it is entered, and says after which step all ranks stop.

    Ranks are told at different steps. Each notes in the store that it was; once all have, rank 0 names the step. Until
    a signal comes nothing is sent. A rank that is told alone ends, as it would without this. One that stops goes on
    taking the signal, so that a second one does not end what is saved. A signal that comes too late for a step has its
    usual effect as soon as this is left.

    Args:
        group: all ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._store, self._size, self._leads = group.get_group_store(), group.size(), group.rank() == 0
        number = self._store.add(f"dmt/stops/{group.rank()}", 1)
        self._told, self._at_key = f"dmt/told/{number}", f"dmt/stop_at/{number}"
        self.signal: int | None = None
        """The signal that has come, if any."""
        self._noted: float | None = None
        self._asked = 0
        self._at: int | None = None
        self._has_stopped = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        # Python lets no other thread set handlers.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        if self._has_stopped:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.signal is not None and error[0] is None:
            signal.raise_signal(self.signal)

    def is_due(self, step: int, interval: int = 1) -> bool:
        """Returns whether all ranks stop after this step, the same on every rank; to be asked after every step.

        Args:
            step: steps done.
            interval: a stop is at a multiple of it.

        Raises:
            SystemExit: other ranks were not told.
        """
        if self.signal is None:
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
                self._has_stopped = True
                raise SystemExit(128 + self.signal)
        self._has_stopped = step == self._at
        return self._has_stopped

    def _note(self, number: int, frame: object) -> None:
        self.signal = number


def say_stopped(config: TrainConfig, by: str) -> None:
    """Prints the last line of a run that was ended by a signal or an error: its newest checkpoint, how to go on.

    It is printed on stderr, since a demo keeps what its runs print on stdout in a file.
    """
    saved = checkpoints(Path(config.output_dir) / "checkpoint")
    what = f"the newest checkpoint is {saved[0]}. To go on" if saved else "nothing was saved yet. To start again"
    line = f"stopped by {by}: {what}: {_command(config.resume)}"
    print(printable(line), file=sys.stderr, flush=True)


def _command(resume: str) -> str:
    """The command of this run, as far as a rank knows it, with what makes it go on instead of starting over."""
    arguments = [*sys.argv[1:], *(["train.resume=auto"] if resume == "never" else [])]
    environ = os.environ
    if "TORCHELASTIC_RUN_ID" not in environ or environ.get("GROUP_WORLD_SIZE") != "1":
        return "the same command again" + (", with train.resume=auto" if resume == "never" else "")
    ranks = environ.get("LOCAL_WORLD_SIZE", "1")
    return shlex.join(["torchrun", "--nproc-per-node", ranks, "-m", "dmt.training", *arguments])
