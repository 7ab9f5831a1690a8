"""Judgements of a partition, as sentences that claim no more than its numbers support."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dmt.partitioner.partition import Partition

__all__ = ["Verdict", "judge_balance", "judge_meaning", "luck_bound", "tower_loads"]

_AIMS = {
    "coherent": ("features that resemble each other", 1.0),
    "diverse": ("features that do not resemble each other", -1.0),
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One judgement."""

    big: str
    """The number that it rests on, with its unit."""
    what: str
    """Name of that number."""
    sentence: str
    """The judgement in a sentence or two."""


def luck_bound(sizes: Sequence[int], *, categories: Sequence[str] = ()) -> float:
    """Bounds the deviation of the best of all assignments if the affinities are unrelated, in standard deviations.

    A partitioner looks for an assignment that differs from random ones, and finds one in noise too. Were the mean
    affinities of the N possible assignments normally distributed, the largest would exceed sqrt(2 ln(100 N)) for fewer
    than 1 of 100 matrices of independent numbers, whatever their dependence (P(z > t) < exp(-t^2 / 2)). N counts the
    ways to deal the blocks into towers of these sizes, category by category.

    ``sizes`` are the blocks of each tower, ``categories`` that of each tower, one for all where none are given. Returns
    sqrt(2 ln(100 N)), at least 3.03.

    Example:
        >>> round(luck_bound([2, 2]), 2), round(luck_bound([4, 4, 3, 3, 3, 3, 3, 3]), 1)
        (3.38, 9.1)
    """
    of_category: dict[str, list[int]] = {}
    for size, category in zip(sizes, categories or [""] * len(sizes), strict=True):
        of_category.setdefault(category, []).append(size)
    return math.sqrt(2.0 * (sum(map(_log_ways, of_category.values())) + math.log(100.0)))


def _log_ways(sizes: Sequence[int]) -> float:
    ways = math.lgamma(sum(sizes) + 1) - sum(math.lgamma(size + 1) for size in sizes)
    # Towers of one size may change places without another assignment.
    ways -= sum(math.lgamma(number + 1) for number in Counter(sizes).values())
    return max(0.0, ways)


def judge_meaning(partition: Partition) -> Verdict:
    """Judges the towers against random towers of the same blocks and, by resemblance, against the best of many."""
    if partition.affinity.is_interactions:
        return _judge_interactions(partition)
    comparison, loads = partition.comparison, partition.loads
    aim, sign = _AIMS.get(partition.plan.strategy, ("", 0.0))
    opening = f"The towers put together {aim}. " if aim else ""
    within, mean, std = comparison.within, comparison.within_random, comparison.std_random
    if within is None or mean is None or std is None or not std > 0.0 or not math.isfinite((within - mean) / std):
        return Verdict(
            big="no difference",
            what="from random towers",
            sentence=f"{opening}Random towers of the same blocks all have the same affinity inside: these towers are "
            "no better than random.",
        )
    deviations = (within - mean) / std
    side = "above" if deviations >= 0 else "below"
    numbers = (
        f"Two features of one tower have a mean affinity of {within:.4f}, {abs(deviations):.1f} standard deviations "
        f"{side} that of random towers under the same rules ({mean:.4f} \u00b1 {std:.4f}). "
    )
    bound = luck_bound([load.num_blocks for load in loads], categories=[load.category for load in loads])
    reached = deviations * sign if sign else abs(deviations)
    says = (
        f"That is more than unrelated affinities would give (below {bound:.1f}): they have structure, as those of "
        "untrained vectors may have too. Whether it is that of the data, only towers from another seed of training "
        "tell."
        if reached > bound
        else "These towers are no better than random: where affinities are unrelated, the best of all assignments, "
        f"which the partitioner looks for, reaches up to {bound:.1f} too."
    )
    return Verdict(
        big=f"{deviations:+.1f} std".replace("-", "\u2212"),
        what="affinity within towers, against random towers",
        sentence=opening + numbers + says,
    )


def _judge_interactions(partition: Partition) -> Verdict:
    comparison, what = partition.comparison, "of the measured interaction is inside towers"
    if comparison.within is None:
        return Verdict(
            big="none",
            what="no interaction beyond the error of measuring",
            sentence="No pair or triple of features was found to interact beyond the error of measuring: the towers "
            "are arbitrary. More rows may show weak interactions.",
        )
    aim = "together" if partition.plan.strategy == "together" else "apart"
    random = "" if comparison.within_random is None else f" and {comparison.within_random:.0%} in random ones"
    return Verdict(
        big=f"{comparison.within:.0%}",
        what=what,
        sentence=f"The towers keep features {aim} that predict the label together: {comparison.within:.0%} of all "
        f"interaction beyond the error of measuring is inside towers, {comparison.within_strided or 0.0:.0%} in "
        f"strided ones{random}. Only training tells what that is worth; use several seeds.",
    )


def tower_loads(partition: Partition) -> dict[str, list[float]]:
    """Features, work and bytes of each tower, as far as they are known."""
    loads = partition.loads
    known = {"features": [float(load.num_features) for load in loads]}
    if loads[0].work is not None:
        known["work"] = [load.work or 0.0 for load in loads]
        known["bytes"] = [float(load.num_bytes or 0) for load in loads]
    return known


def judge_balance(partition: Partition) -> Verdict:
    """Judges how even the towers are; the limits are held, or there were no towers."""
    known = tower_loads(partition).items()
    ratios = {name: max(values) * len(values) / sum(values) for name, values in known if sum(values) > 0}
    worst = max(ratios, key=ratios.__getitem__)
    said = ", ".join(f"{ratio:.2f} times in {name}" for name, ratio in ratios.items())
    return Verdict(
        big=f"{ratios[worst]:.2f}",
        what=f"largest over mean tower, in {worst}",
        sentence=f"Of the mean, the largest tower carries {said}.",
    )
