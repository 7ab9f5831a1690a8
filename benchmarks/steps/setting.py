"""`Setting`: sizes of one job of the step benchmark; its JSON form is the ``setting`` of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from dmt.errors import InputError

__all__ = ["Ids", "Setting"]

Ids = Literal["skewed", "uniform"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of one job.

    Raises:
        InputError: a size is out of range, or there is only one rank.

    Example:
        >>> Setting(hosts=2, ranks_per_host=2).world_size
        4
        >>> Setting(batch_size=0)
        Traceback (most recent call last):
        ...
        dmt.errors.InputError: Setting: batch_size=0 must be at least 1.
    """

    hosts: int = 2
    """Machines, played or real; a tower each."""
    ranks_per_host: int = 2
    """L."""
    mbit_per_s: float | None = 200.0
    """Rate of each host's uplink; None for no limit."""
    batch_size: int = 4096
    """B, samples per rank and step."""
    rounds: int = 7
    """Measured turns of every contender."""
    warm_up_rounds: int = 1
    """Turns that come first and are not counted."""
    steps_per_turn: int = 2
    """Steps of a contender before the next one's turn."""
    seed: int = 0
    """Seed of weights, batches and the order of turns."""
    rows_cap: int = 40_000
    """Tables have the rows of Criteo-Kaggle's, at most this many: eight are cut."""
    ids: Ids = "skewed"
    """Distribution of the ids (`benchmarks.steps.inputs`)."""
    group: int = 1
    """R, samples of a request, which share the ids of the even features."""
    history: int = 0
    """Ids of each of two histories that a sample has beside four ids; 0 for Criteo's 26 ids and no history."""

    def __post_init__(self) -> None:
        at_least_one = ("hosts", "ranks_per_host", "batch_size", "rounds", "steps_per_turn", "rows_cap", "group")
        for name in at_least_one:
            if getattr(self, name) < 1:
                raise InputError(f"Setting: {name}={getattr(self, name)!r} must be at least 1.")
        for name in ("warm_up_rounds", "history"):
            if getattr(self, name) < 0:
                raise InputError(f"Setting: {name}={getattr(self, name)!r} must not be negative.")
        if self.mbit_per_s is not None and self.mbit_per_s <= 0:
            raise InputError(f"Setting: mbit_per_s={self.mbit_per_s!r} must be positive, or None for no limit.")
        if self.world_size < 2:
            raise InputError(
                f"Setting: hosts={self.hosts}, ranks_per_host={self.ranks_per_host} is one rank, which has nobody to "
                "talk to. Use two or more."
            )
        if self.ids not in get_args(Ids):
            raise InputError(f"Setting: ids={self.ids!r} is not one of {list(get_args(Ids))}.")

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.hosts * self.ranks_per_host

    def host(self, rank: int) -> int:
        """The host of a rank: ranks are host-major."""
        return rank // self.ranks_per_host
