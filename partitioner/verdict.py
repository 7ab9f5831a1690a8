"""Judgements of a partition, as sentences that claim no more than its numbers support."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from dmt.partitioner.partition import Comparison, Partition

__all__ = ["judge_balance", "judge_meaning", "luck_bound", "tower_loads"]

_AIMS = {
    "coherent": ("features that resemble each other", 1.0),
    "diverse": ("features that do not resemble each other", -1.0),
}


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


def judge_meaning(partition: Partition) -> str:
    """Judges the towers against random towers of the same blocks and, by resemblance, against the best of many."""
    comparison, loads = partition.comparison, partition.loads
    if partition.affinity.is_interactions:
        return _judge_interactions(comparison, partition.plan.strategy)
    aim, sign = _AIMS.get(partition.plan.strategy, ("", 0.0))
    opening = f"The towers put together {aim}. " if aim else ""
    within, mean, std = comparison.within, comparison.within_random, comparison.std_random
    if within is None or mean is None or std is None or not std > 0.0 or not math.isfinite((within - mean) / std):
        return (
            f"{opening}Random towers of the same blocks all have the same affinity inside: these towers are no better "
            "than random."
        )
    deviations = (within - mean) / std
    numbers = (
        f"Two features of one tower have a mean affinity of {within:.4f}, {abs(deviations):.1f} standard deviations "
        f"{'above' if deviations >= 0 else 'below'} that of random towers under the same rules ({mean:.4f} \u00b1 "
        f"{std:.4f}). "
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
    return opening + numbers + says


def _judge_interactions(comparison: Comparison, strategy: str) -> str:
    if comparison.within is None:
        return (
            "No pair or triple of features was found to interact beyond the error of measuring: the towers are "
            "arbitrary. More rows may show weak interactions."
        )
    random = "" if comparison.within_random is None else f" and {comparison.within_random:.0%} in random ones"
    return (
        f"The towers keep features {strategy} that predict the label together: {comparison.within:.0%} of all "
        f"interaction beyond the error of measuring is inside towers, {comparison.within_strided or 0.0:.0%} in "
        f"strided ones{random}. Only training tells what that is worth; use several seeds."
    )


def tower_loads(partition: Partition) -> dict[str, list[float]]:
    """Features, work and bytes of each tower, as far as they are known."""
    loads = partition.loads
    known = {"features": [float(load.num_features) for load in loads]}
    if loads[0].work is not None:
        known["work"] = [load.work or 0.0 for load in loads]
        known["bytes"] = [float(load.num_bytes or 0) for load in loads]
    return known


def judge_balance(partition: Partition) -> str:
    """Says how even the towers are; the limits are held, or there were no towers."""
    known = tower_loads(partition).items()
    ratios = {name: max(values) * len(values) / sum(values) for name, values in known if sum(values) > 0}
    said = ", ".join(f"{ratio:.2f} times in {name}" for name, ratio in ratios.items())
    return f"Of the mean, the largest tower carries {said}."
