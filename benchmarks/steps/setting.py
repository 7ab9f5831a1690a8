"""`Setting`: sizes of one job of the step benchmark; its JSON form is the ``setting`` of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from dmt.errors import InputError

__all__ = ["Ids", "Setting"]

Ids = Literal["skewed", "uniform"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Sizes and rates of a job.

    Raises:
        InputError: a size or the rate is out of range, ``ids`` is unknown, or there is only one rank.

    Example:
        >>> Setting(hosts=2, ranks_per_host=2).world_size
        4
        >>> Setting(batch_size=0)
        Traceback (most recent call last):
        ...
        dmt.errors.InputError: Setting: batch_size=0 must be at least 1.
    """

    hosts: int = 2
    """H, number of hosts, emulated or real."""
    ranks_per_host: int = 2
    """L, number of ranks on each host."""
    mbit_per_s: float | None = 200.0
    """Rate of each host's uplink in Mbit/s; None: no limit."""
    batch_size: int = 4096
    """B, samples per rank and step."""
    rounds: int = 7
    """Number of measured turns of every contender."""
    warm_up_rounds: int = 1
    """Number of turns before the measured ones."""
    steps_per_turn: int = 2
    """Number of steps in a contender's turn."""
    seed: int = 0
    """Seed of the weights, the batches and the order of turns."""
    rows_cap: int = 40_000
    """Largest number of rows of a table; eight of Criteo-Kaggle's tables have more than the default."""
    ids: Ids = "skewed"
    """Distribution of the ids (`benchmarks.steps.inputs`)."""

    def __post_init__(self) -> None:
        at_least_one = ("hosts", "ranks_per_host", "batch_size", "rounds", "steps_per_turn", "rows_cap")
        for name in at_least_one:
            if getattr(self, name) < 1:
                raise InputError(f"Setting: {name}={getattr(self, name)!r} must be at least 1.")
        if self.warm_up_rounds < 0:
            raise InputError(f"Setting: warm_up_rounds={self.warm_up_rounds!r} must not be negative.")
        if self.mbit_per_s is not None and self.mbit_per_s <= 0:
            raise InputError(f"Setting: mbit_per_s={self.mbit_per_s!r} must be positive, or None for no limit.")
        if self.world_size < 2:
            raise InputError(
                f"Setting: hosts={self.hosts}, ranks_per_host={self.ranks_per_host} is a single rank, which exchanges "
                "nothing. Use two or more."
            )
        if self.ids not in get_args(Ids):
            raise InputError(f"Setting: ids={self.ids!r} is unknown; use one of {list(get_args(Ids))}.")

    @property
    def world_size(self) -> int:
        """Number of ranks in the job."""
        return self.hosts * self.ranks_per_host

    def host(self, rank: int) -> int:
        """Returns the host of a rank; the ranks of a host are consecutive."""
        return rank // self.ranks_per_host
