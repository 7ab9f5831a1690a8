"""`Measured`: step times, bytes and bound of each contender in a run; speedups of one contender over another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["KINDS", "Measured", "Speedup", "best_flat", "bytes_per_second", "fastest", "measure_run", "speedup"]

KINDS = ("ids", "forward", "backward", "dense")
"""Kinds of bytes that cross hosts."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of a contender at a setting; seconds and bytes are medians over steps, unless stated otherwise."""

    name: str
    family: str
    precision: str
    compression: float
    scheme: str
    rounds: tuple[tuple[float, ...], ...]
    """Seconds of the steps of each round."""
    across: Mapping[str, float]
    """Bytes that a host sends to others, by kind, counted at the collectives; mean over hosts."""
    inside: float
    """Bytes sent between ranks of a host; mean over hosts."""
    uplink: tuple[float, ...]
    """Bytes sent by the counter of each host's uplink; empty without uplinks."""
    peak_memory: float
    """Peak bytes of memory of the rank that uses most."""
    waiting: float
    """Seconds that the main thread waited for others; mean over ranks."""
    wire: float | None
    """Seconds that the bytes of the busiest uplink take at its rate; None without a limit, or without uplinks."""
    compute: float
    """CPU seconds of all processes, divided by the number of cores."""

    @property
    def seconds(self) -> list[float]:
        """Seconds of all steps."""
        return [second for steps in self.rounds for second in steps]

    def percentile(self, percent: float) -> float:
        """Returns a percentile of the seconds per step; ``percent`` is from 0 to 100."""
        return float(np.percentile(self.seconds, percent))

    @property
    def median(self) -> float:
        """Median seconds per step."""
        return self.percentile(50)

    @property
    def bound(self) -> float:
        """Lower bound of the seconds per step: the time of the link or of computation, whichever is longer."""
        return max(self.wire or 0.0, self.compute)

    @property
    def bound_name(self) -> str:
        """Name of the larger of the two bounds."""
        return "wire" if (self.wire or 0.0) >= self.compute else "compute"

    @property
    def bound_ratio(self) -> float:
        """The median divided by the bound."""
        return self.median / self.bound

    @property
    def counters_ratio(self) -> float | None:
        """Bytes by the uplinks' counters, with packet headers, divided by `across`; None if nothing crosses hosts."""
        counted = sum(self.across.values())
        return float(np.mean(self.uplink)) / counted if self.uplink and counted else None


def bytes_per_second(mbit_per_s: float) -> float:
    """Converts the rate of a link from Mbit/s to bytes per second.

    Example:
        >>> bytes_per_second(200)
        25000000.0
    """
    return mbit_per_s * 1e6 / 8


def measure_run(run: Mapping[str, Any], *, cores: int) -> list[Measured]:
    """Returns the contenders of a run, in its order; leaves out those without steps or bytes, as in a stopped run.

    Args:
        run: a run from the JSON of ``benchmarks/train_step.py``.
        cores: number of cores of the machine, which all hosts share.
    """
    whole = [one for one in run["contenders"] if one["steps"] and one["traffic"]]
    return [_measure(contender, run["setting"], cores) for contender in whole]


def _measure(contender: Mapping[str, Any], setting: Mapping[str, Any], cores: int) -> Measured:
    hosts, rate, steps, turn = setting["hosts"], setting["mbit_per_s"], contender["steps"], setting["steps_per_turn"]
    seconds = [step["seconds"] for step in steps]
    uplink = _median_by_host([step["uplink_bytes"] or [] for step in steps])
    return Measured(
        **{name: contender[name] for name in ("name", "family", "precision", "compression", "scheme")},
        rounds=tuple(tuple(seconds[i : i + turn]) for i in range(0, len(seconds), turn)),
        across={kind: contender["traffic"][kind] / hosts for kind in KINDS},
        inside=contender["traffic"]["inside"] / hosts,
        uplink=uplink,
        peak_memory=max(contender["peak_memory_bytes"] or [0]),
        waiting=float(np.median([np.mean(step["by_rank"]["waiting"]) for step in steps])),
        wire=None if rate is None or not uplink else max(uplink) / bytes_per_second(rate),
        compute=float(np.median([sum(step["by_rank"]["cpu"]) for step in steps])) / cores,
    )


def _median_by_host(of_steps: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(float(np.median(of_host)) for of_host in zip(*of_steps, strict=True))


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """Speedup of one contender over another."""

    ratio: float
    """Median step time of the other contender, divided by that of this one."""
    interval: tuple[float, float] | None
    """95 % interval from a bootstrap over rounds; None with a single round."""

    def __str__(self) -> str:
        """Returns the ratio with its interval, as text."""
        within = "" if self.interval is None else " [{:.2f}, {:.2f}]".format(*self.interval)
        return f"{self.ratio:.2f}{within}"


def fastest(
    contenders: Iterable[Measured], family: str, *, precision: str, compression: float | None = None
) -> Measured | None:
    """Returns the contender with the lowest median step time.

    Args:
        contenders: the contenders of a run.
        family: ``"flat"``, ``"etc"``, ``"sptt"``, ``"dmt"`` or ``"products"``.
        precision: number format of outputs and gradients across hosts.
        compression: compression ratio of the tower modules; None: any.

    Returns:
        The contender; None if there is none of this kind.
    """
    candidates = [
        found
        for found in contenders
        if found.family == family and found.precision == precision and compression in (None, found.compression)
    ]
    return min(candidates, key=lambda found: found.median, default=None)


def best_flat(contenders: Iterable[Measured], precision: str, *, every_id: bool = False) -> Measured | None:
    """Returns the fastest flat contender of a precision; None if there is none.

    Args:
        contenders: the contenders of a run.
        precision: number format of outputs and gradients across hosts.
        every_id: only among those that send every id of a batch, instead of each distinct one once.
    """
    candidates = (found for found in contenders if not (every_id and "+vbe" in found.name))
    return fastest(candidates, "flat", precision=precision)


def speedup(ours: Measured, reference: Measured, *, draws: int = 10_000, seed: int = 0) -> Speedup:
    """Returns the speedup of a contender over a reference.

    The bootstrap draws the same rounds for both, because they took turns within each round.

    Args:
        ours: the contender.
        reference: another contender of the same run.
        draws: number of draws of the bootstrap.
        seed: seed of the draws.
    """
    ratio = reference.median / ours.median
    rounds = min(len(ours.rounds), len(reference.rounds))
    per_round = min(len(steps) for found in (ours, reference) for steps in found.rounds[:rounds])
    if rounds < 2:
        return Speedup(ratio=ratio, interval=None)
    drawn = np.random.default_rng(seed).integers(rounds, size=(draws, rounds))
    medians = [
        np.median(np.array([steps[:per_round] for steps in found.rounds[:rounds]])[drawn].reshape(draws, -1), axis=1)
        for found in (reference, ours)
    ]
    low, high = np.percentile(medians[0] / medians[1], [2.5, 97.5])
    return Speedup(ratio=ratio, interval=(float(low), float(high)))
