"""`SaveTimes`: the steps after which a run saves, the same on all ranks, also where a clock decides."""

from __future__ import annotations

import time

from dmt.training.config import TrainConfig

__all__ = ["SaveTimes"]

# Steps from the one at which all ranks hear that it is time to the one after which they save: more than the batches
# that a train pipeline is ahead, which could not be given back.
_AHEAD = 4
_NEVER = 2**62
# Where a checkpoint changes what comes after it, a clock would make every run another one.
_STEPS_OF_DELAYED_STATES = 10_000


class SaveTimes:
    """Names the steps after which a run saves: every ``save_every``, or when ``save_minutes`` have passed on rank 0.

    Clocks of ranks differ, so rank 0's decides. It says that it is time (`asks`) in an exchange that the ranks have
    anyway, at every ``log_every``; with what came of it, each rank calls `agree`.

    Args:
        config: of which ``save_every`` and ``save_minutes`` count.
        interval: a save is at a multiple of it, where replicas are averaged anyway: saving then changes no weight.
        leads: true on rank 0.
        changes_results: saving changes what comes after it, so that steps decide, every 10,000 by default.
    """

    def __init__(self, config: TrainConfig, *, interval: int, leads: bool, changes_results: bool = False) -> None:
        every = config.save_every or (_STEPS_OF_DELAYED_STATES if changes_results else None)
        self._interval, self._leads = interval, leads
        self._every = None if every is None else self._rounded(every)
        self._seconds, self._began = 60.0 * config.save_minutes, time.monotonic()
        self._at: int | None = None

    def asks(self) -> bool:
        """Returns whether this rank asks for a save: rank 0 does when it is time and none is named yet."""
        is_time = time.monotonic() - self._began >= self._seconds
        return self._leads and self._every is None and self._at is None and is_time

    def agree(self, step: int) -> None:
        """Names the step of the next save, on every rank after the same ``step``, because rank 0 asked for one."""
        self._at = self._rounded(step + _AHEAD)

    def is_due(self, step: int) -> bool:
        """Returns whether to save now, after ``step`` steps; call `restart` after that save."""
        if self._every is not None:
            return step % self._every == 0
        if step != self._at:
            return False
        self._at = None
        return True

    def restart(self) -> None:
        """Begins the time to the next save, after one that may have taken long."""
        self._began = time.monotonic()

    def steps_left(self, step: int) -> int:
        """Number of steps from here to the next save, as far as it is named."""
        if self._every is not None:
            return self._every - step % self._every
        return _NEVER if self._at is None or self._at <= step else self._at - step

    def _rounded(self, step: int) -> int:
        return -(-step // self._interval) * self._interval
