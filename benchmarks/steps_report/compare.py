"""Who is faster than whom: the best flat contender, ratios of medians with an interval over rounds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from benchmarks.steps_report.measures import Measured

__all__ = ["Speedup", "best_flat", "fastest", "precisions", "speedup"]


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
    """The contender with the lowest median step time; those with replicas do other work and are left out.

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
        if found.family == family
        and found.precision == precision
        and found.sync_seconds is None
        and compression in (None, found.compression)
    ]
    return min(candidates, key=lambda found: found.median, default=None)


def best_flat(contenders: Iterable[Measured], precision: str) -> Measured | None:
    """The fastest flat contender at a precision, over schemes and prefetch; None where there is none."""
    return fastest(contenders, "flat", precision=precision)


def precisions(contenders: Iterable[Measured]) -> list[str]:
    """Those that occur, the widest first."""
    return sorted({found.precision for found in contenders}, reverse=True)


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
