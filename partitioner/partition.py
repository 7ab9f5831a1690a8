"""`Partition`: result of `TowerPartitioner.partition`, its comparison with other towers, and what can be said of it.

Legend: F features, T towers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dmt.partitioner.affinity import FeatureAffinity
from dmt.plan.towers import TowerPlan

__all__ = [
    "Comparison",
    "Partition",
    "TowerContents",
    "compare_towers",
    "judge_balance",
    "judge_meaning",
    "luck_bound",
    "tower_affinity",
    "tower_loads",
]

Labels = NDArray[np.int64]

_AIMS = {
    "coherent": ("features that resemble each other", 1.0),
    "diverse": ("features that do not resemble each other", -1.0),
}


@dataclass(frozen=True, kw_only=True)
class TowerContents:
    """Load of one tower."""

    num_features: int
    """F_t."""
    num_blocks: int
    """Groups of features that stay together, such as those of one table."""
    category: str = ""
    """Category of its features; empty if there are none."""
    work: float | None = None
    """Elements read per sample: the sum over features of pooling factor times embedding dim; None without tables."""
    num_bytes: int | None = None
    """Bytes of the tower's tables at 32-bit floats; None without tables."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is inside towers, beside what other assignments reach.

    Of resemblance: the mean affinity of the pairs of features that share a tower. Of interactions: the share of all
    gains, beyond the error of measuring, that is inside towers, of triples where all three are together. None where
    there is nothing to take a mean or a share of.
    """

    within: float | None
    """Of this plan."""
    between: float | None
    """Mean of the pairs in different towers of this plan, or the share that is not inside towers."""
    within_strided: float | None
    """Of the naive strided assignment to as many towers (paper, section 5.2.3), which obeys no rule."""
    within_random: float | None
    """Mean over random assignments of the same blocks under the same rules and limits."""
    std_random: float | None
    """Standard deviation over the random assignments."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Partition:
    """Towers, with the points, loads and comparisons behind them."""

    plan: TowerPlan
    """The towers."""
    affinity: FeatureAffinity
    """The measure that the towers were made from, with its tables where they are known."""
    points: NDArray[np.float64]
    """[F, 2] coordinates, in the order of ``affinity.features``; zeros for interactions, which have none."""
    normalized_stress: float
    """``sqrt(stress / sum of squared wanted distances)`` of the points: 0 is perfect, above 0.2 is poor."""
    loads: tuple[TowerContents, ...]
    """Tower by tower, in the plan's order."""
    comparison: Comparison
    """Against naive and random towers."""
    notes: tuple[str, ...] = ()
    """Warnings for the user in whole sentences, such as about an affinity that is equal for all pairs."""


def tower_affinity(affinity: FeatureAffinity, plan: TowerPlan) -> tuple[float | None, float | None]:
    """Returns what is inside towers and what is not, as in `Comparison`: mean affinity, or share of all interaction.

    Returns:
        (within, between); None where there is nothing to take a mean or a share of (towers of one feature; a single
        tower; no interaction beyond the error of measuring).

    Raises:
        InputError: plan and affinity are not about the same features.

    Example:
        >>> affinity = FeatureAffinity(matrix=[[1, 0.5, 0], [0.5, 1, 0.25], [0, 0.25, 1]], features=["a", "b", "c"])
        >>> tower_affinity(affinity, TowerPlan.from_lists([["a", "b"], ["c"]]))
        (0.5, 0.125)
    """
    comparison = compare_towers(affinity, plan, [])
    return comparison.within, comparison.between


def compare_towers(affinity: FeatureAffinity, plan: TowerPlan, random: Sequence[Mapping[str, int]]) -> Comparison:
    """Compares a plan with the strided assignment (DMT paper, section 5.2.3) and with random ones.

    ``random`` are towers by feature.

    Raises:
        InputError: plan and affinity are not about the same features.
    """
    # By name, so that sums do not depend on the order of the features.
    ordered = affinity.permuted(sorted(plan.features))
    names = ordered.features
    within, between = _inside(ordered, _labels(plan, names))
    strided, _ = _inside(ordered, _labels(TowerPlan.strided(affinity.features, plan.num_towers), names))
    drawn = [_inside(ordered, np.array([towers[name] for name in names]))[0] for towers in random]
    known = [value for value in drawn if value is not None]
    return Comparison(
        within=within,
        between=between,
        within_strided=strided,
        # Rounded like the means: where all assignments are alike, the deviation is 0 and not rounding.
        within_random=round(float(np.mean(known)), 12) if known else None,
        std_random=round(float(np.std(known)), 12) if known else None,
    )


def _inside(affinity: FeatureAffinity, labels: Labels) -> tuple[float | None, float | None]:
    """Of towers, [F] labels: mean affinity of the pairs in one tower and of the others, or the shares of all gains."""
    same_tower = np.triu(labels[:, None] == labels, k=1)
    above = np.triu(affinity.significant(), k=1)
    within, total = float(above[same_tower].sum()), float(above.sum())
    if affinity.is_interactions:
        tower_of = dict(zip(affinity.features, labels.tolist(), strict=True))
        for triple in affinity.triples:
            total += triple.gain
            within += triple.gain * (len({tower_of[name] for name in triple.features}) == 1)
        num_within = num_between = total
    else:
        num_within = int(same_tower.sum())
        num_between = math.comb(len(labels), 2) - num_within
    # What a difference of sums leaves beyond 12 decimals is rounding, and differs with the order of the features.
    return (
        round(within / num_within, 12) if num_within else None,
        round(max(0.0, total - within) / num_between, 12) if num_between else None,
    )


def _labels(plan: TowerPlan, names: Sequence[str]) -> Labels:
    tower_of = {name: number for number, tower in enumerate(plan.towers) for name in tower.features}
    return np.array([tower_of[name] for name in names])


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
    aim, sign = _AIMS[partition.plan.strategy]
    opening = f"The towers group {aim}. "
    within, mean, std = comparison.within, comparison.within_random, comparison.std_random
    if within is None or mean is None or not std:
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
    says = (
        f"That is more than unrelated affinities would give (below {bound:.1f}): they have structure, as those of "
        "untrained vectors may have too. Towers from another training seed show whether it is that of the data."
        if deviations * sign > bound
        else "These towers are no better than random: the partitioner looks for the best assignment, and finds one up "
        f"to {bound:.1f} standard deviations away even if the affinities are unrelated."
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
        f"strided ones{random}. Only training shows what that is worth; use several seeds."
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
    """Says how even the towers are; limits are met, or there would be no towers."""
    known = tower_loads(partition).items()
    ratios = {name: max(values) * len(values) / sum(values) for name, values in known if sum(values) > 0}
    said = ", ".join(f"{ratio:.2f} times in {name}" for name, ratio in ratios.items())
    return f"Of the mean, the largest tower carries {said}."
