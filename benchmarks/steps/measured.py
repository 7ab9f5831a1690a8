"""Measurements of each contender in a run: step times, bytes, its own bound; and who is faster than whom."""

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
    """One contender at one setting; seconds and bytes are those of a step, medians unless said otherwise."""

    name: str
    family: str
    precision: str
    compression: float
    scheme: str
    rounds: tuple[tuple[float, ...], ...]
    """Seconds of the steps of each round."""
    across: Mapping[str, float]
    """Bytes that a host sends to others by kind, counted at the collectives, mean over hosts."""
    needed: Mapping[str, float]
    """Bytes expected by arithmetic."""
    inside: float
    """Bytes between ranks of a host, mean over hosts."""
    uplink: tuple[float, ...]
    """Bytes by the uplinks' counters, by host; empty without uplinks."""
    peak_memory: float
    """Bytes of the rank with most."""
    waiting: float
    """Seconds that the main thread waited for others, mean over ranks."""
    wire: float | None
    """Seconds that the busiest uplink's bytes take at its rate; None where the rate is not limited."""
    compute: float
    """CPU seconds of all processes over the machine's cores."""

    @property
    def seconds(self) -> list[float]:
        """Seconds of all steps."""
        return [second for steps in self.rounds for second in steps]

    def percentile(self, percent: float) -> float:
        """Percentile of the seconds of a step."""
        return float(np.percentile(self.seconds, percent))

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return self.percentile(50)

    @property
    def bound(self) -> float:
        """Seconds below which no step can stay: those of the wire or of the compute alone, whichever are more."""
        return max(self.wire or 0.0, self.compute)

    @property
    def bound_name(self) -> str:
        """Name of the larger of the two bounds."""
        return "wire" if (self.wire or 0.0) >= self.compute else "compute"

    @property
    def bound_ratio(self) -> float:
        """The median over the bound."""
        return self.median / self.bound

    @property
    def counted_ratio(self) -> float | None:
        """Counted bytes across hosts over needed ones; None where none are needed."""
        return _ratio(sum(self.across.values()), sum(self.needed.values()))

    @property
    def counters_ratio(self) -> float | None:
        """Bytes by the counters, headers of packets included, over needed ones."""
        return _ratio(float(np.mean(self.uplink)), sum(self.needed.values())) if self.uplink else None


def _ratio(value: float, base: float) -> float | None:
    return value / base if base else None


def bytes_per_second(mbit_per_s: float) -> float:
    """The rate of a link in bytes.

    Example:
        >>> bytes_per_second(200)
        25000000.0
    """
    return mbit_per_s * 1e6 / 8


def measure_run(run: Mapping[str, Any], *, cores: int) -> list[Measured]:
    """The contenders of a run, in its order; of a stopped run those without steps or bytes are left out.

    Args:
        run: of the JSON of ``benchmarks/train_step.py``.
        cores: of the machine, all hosts together.
    """
    whole = [one for one in run["contenders"] if one["steps"] and one["traffic"] and one["needed"]]
    return [_measure(contender, run["setting"], cores) for contender in whole]


def _measure(contender: Mapping[str, Any], setting: Mapping[str, Any], cores: int) -> Measured:
    hosts, rate, steps, turn = setting["hosts"], setting["mbit_per_s"], contender["steps"], setting["steps_per_turn"]
    seconds = [step["seconds"] for step in steps]
    uplink = _median_by_host([step["uplink_bytes"] or [] for step in steps])
    return Measured(
        **{name: contender[name] for name in ("name", "family", "precision", "compression", "scheme")},
        rounds=tuple(tuple(seconds[i : i + turn]) for i in range(0, len(seconds), turn)),
        across={kind: contender["traffic"][kind] / hosts for kind in KINDS},
        needed={kind: contender["needed"][kind] / hosts for kind in KINDS},
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
    """Speed-up of one contender over another."""

    ratio: float
    """Ratio of the median step times."""
    interval: tuple[float, float] | None
    """95 %, from a bootstrap over rounds; None where there is one round."""

    def __str__(self) -> str:
        """The ratio with its interval."""
        within = "" if self.interval is None else " [{:.2f}, {:.2f}]".format(*self.interval)
        return f"{self.ratio:.2f}{within}"


def fastest(
    contenders: Iterable[Measured], family: str, *, precision: str, compression: float | None = None
) -> Measured | None:
    """The contender with the lowest median step time.

    Args:
        contenders: of one run.
        family: ``"flat"``, ``"etc"``, ``"sptt"`` or ``"dmt"``.
        precision: of what crosses hosts.
        compression: of the tower modules; None for any.

    Returns:
        It, or None where there is none.
    """
    candidates = [
        found
        for found in contenders
        if found.family == family and found.precision == precision and compression in (None, found.compression)
    ]
    return min(candidates, key=lambda found: found.median, default=None)


def best_flat(contenders: Iterable[Measured], precision: str) -> Measured | None:
    """The fastest flat contender at a precision; None where there is none."""
    return fastest(contenders, "flat", precision=precision)


def speedup(ours: Measured, reference: Measured, *, draws: int = 10_000, seed: int = 0) -> Speedup:
    """The reference's median step time over ours.

    The bootstrap draws rounds, the same ones for both, because they ran side by side in a round.

    Args:
        ours: the numerator of the speed.
        reference: of the same run.
        draws: of the bootstrap.
        seed: of the draws.
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
