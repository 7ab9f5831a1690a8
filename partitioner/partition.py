"""`Partition`, the result of `TowerPartitioner.partition`: its comparison with other towers, and verdicts in words.

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
    "coherent": ("features with similar embeddings", 1.0),
    "diverse": ("features with dissimilar embeddings", -1.0),
}


@dataclass(frozen=True, kw_only=True)
class TowerContents:
    """Load of a tower."""

    num_features: int
    """F_t, the number of its features."""
    num_blocks: int
    """Number of its groups of features that must stay together, such as those of a shared table."""
    category: str = ""
    """Category of its features; empty without categories."""
    work: float | None = None
    """Embedding elements read per sample: sum of pooling factor times embedding dim; None without tables."""
    num_bytes: int | None = None
    """Bytes of its tables' weights; None without tables."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The affinity or interaction inside towers of a plan, compared with strided and random towers.

    For cosines, ``within`` is the mean affinity of pairs of features that share a tower. For interactions it is the
    share of all gains beyond the measuring error that lies inside towers; a triple counts if one tower has all three
    features. A number is None if there is no such pair, gain or random assignment.
    """

    within: float | None
    """Inside the towers of this plan."""
    between: float | None
    """Mean affinity of pairs in different towers of this plan, or the share of gains that is not inside towers."""
    within_strided: float | None
    """Inside as many strided towers (`TowerPlan.strided`; paper, section 5.2.3), which ignore all rules."""
    within_random: float | None
    """Mean of ``within`` over random assignments of the same blocks under the same rules and limits."""
    std_random: float | None
    """Standard deviation over these assignments."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Partition:
    """A tower plan, with the points, loads and comparisons behind it."""

    plan: TowerPlan
    """The towers."""
    affinity: FeatureAffinity
    """The affinity that the towers were made from, without features outside towers."""
    points: NDArray[np.float64]
    """[F, 2] float64 coordinates in the order of ``affinity.features``; zeros for interactions, which have none."""
    normalized_stress: float
    """``sqrt(stress / sum of squared wanted distances)``: 0 is perfect, above 0.2 is poor; 0 for interactions."""
    loads: tuple[TowerContents, ...]
    """The load of each tower, in the plan's order."""
    comparison: Comparison
    """Comparison with strided and random towers."""
    notes: tuple[str, ...] = ()
    """Warnings for the user in whole sentences, for instance that all pairs have the same affinity."""


def tower_affinity(affinity: FeatureAffinity, plan: TowerPlan) -> tuple[float | None, float | None]:
    """Returns the affinity inside towers and between towers: means for cosines, shares of all gains for interactions.

    Returns:
        ``within`` and ``between`` as in `Comparison`. For cosines, ``within`` is None if every tower has one feature,
        ``between`` if there is a single tower. For interactions, both are None if no gain exceeds the measuring error.

    Raises:
        InputError: plan and affinity have different features.

    Example:
        >>> affinity = FeatureAffinity(matrix=[[1, 0.5, 0], [0.5, 1, 0.25], [0, 0.25, 1]], features=["a", "b", "c"])
        >>> tower_affinity(affinity, TowerPlan.from_lists([["a", "b"], ["c"]]))
        (0.5, 0.125)
    """
    comparison = compare_towers(affinity, plan, [])
    return comparison.within, comparison.between


def compare_towers(affinity: FeatureAffinity, plan: TowerPlan, random: Sequence[Mapping[str, int]]) -> Comparison:
    """Compares a plan with strided towers and with ``random`` assignments, which map each feature to a tower's number.

    Raises `InputError` if plan and affinity have different features.
    """
    # Sorted by name, so that sums do not depend on the order of the features.
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
        # Rounded like the means: if all assignments are equal, the deviation is exactly 0.
        within_random=round(float(np.mean(known)), 12) if known else None,
        std_random=round(float(np.std(known)), 12) if known else None,
    )


def _inside(affinity: FeatureAffinity, labels: Labels) -> tuple[float | None, float | None]:
    """Returns the mean affinity of pairs inside and between towers, or the shares of all gains, for [F] labels."""
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
    # Beyond 12 decimals, differences of sums are rounding errors that depend on the order of the features.
    return (
        round(within / num_within, 12) if num_within else None,
        round(max(0.0, total - within) / num_between, 12) if num_between else None,
    )


def _labels(plan: TowerPlan, names: Sequence[str]) -> Labels:
    tower_of = {name: number for number, tower in enumerate(plan.towers) for name in tower.features}
    return np.array([tower_of[name] for name in names])


def luck_bound(partition: Partition) -> float:
    """Returns how far from the mean of random assignments the mean affinity inside towers may be by luck alone.

    A partitioner looks for an assignment that differs from random ones, and finds one in noise too. There are N ways to
    deal the blocks into towers of these sizes, category by category. If affinities are independent of one another, the
    n pairs inside the towers of each assignment are a random sample of all pairs, which are x above their mean. So for
    any h > 0, the best sample's mean is (log(mean of exp(h x)) + ln(100 N) / n) / h above it for fewer than 1 of 100
    matrices (Chernoff's bound, also for samples without replacement: Hoeffding, 1963). For ``diverse``, x is below it.
    """
    loads, categories = partition.loads, dict.fromkeys(load.category for load in partition.loads)
    ways = [_log_ways([load.num_blocks for load in loads if load.category == name]) for name in categories]
    rare = (sum(ways) + math.log(100.0)) / max(sum(math.comb(load.num_features, 2) for load in loads), 1)
    pairs = partition.affinity.matrix[np.triu_indices(partition.affinity.num_features, k=1)]
    x = _AIMS[partition.plan.strategy][1] * (pairs - (partition.comparison.within_random or 0.0))
    # The least over these h is near the least over all. The largest x is taken out, so that exp does not overflow.
    steps = np.geomspace(0.05, 50.0, 60) / max(float(x.std()), 1e-300)
    above = min(float(x.max() + (np.log(np.exp(h * (x - x.max())).mean()) + rare) / h) for h in steps)
    # As far from the mean of random assignments as from that of all pairs: blocks may hold similar features.
    return max(above, above - float(x.mean()))


def _log_ways(sizes: Sequence[int]) -> float:
    ways = math.lgamma(sum(sizes) + 1) - sum(math.lgamma(size + 1) for size in sizes)
    # Exchanging towers of equal size gives the same assignment.
    return ways - sum(math.lgamma(number + 1) for number in Counter(sizes).values())


def judge_meaning(partition: Partition) -> str:
    """Returns a verdict in sentences: are the towers better than random towers of the same blocks?"""
    comparison = partition.comparison
    if partition.affinity.is_interactions:
        return _judge_interactions(comparison, partition.plan.strategy)
    aim, sign = _AIMS[partition.plan.strategy]
    opening = f"The towers group {aim}. "
    within, mean, std = comparison.within, comparison.within_random, comparison.std_random
    if within is None or mean is None or not std:
        return (
            f"{opening}No random towers of the same blocks have another mean affinity, so these towers are no better "
            "than random."
        )
    deviations, bound = (within - mean) / std, luck_bound(partition) / std
    numbers = (
        f"Two features of the same tower have a mean affinity of {within:.4f}, which is {abs(deviations):.1f} standard "
        f"deviations {'above' if deviations >= 0 else 'below'} the mean in random towers under the same rules "
        f"({mean:.4f} \u00b1 {std:.4f}). "
    )
    says = (
        f"Noise would give less than {bound:.1f}, so the affinities have structure; those of untrained embeddings may "
        "have structure too. To see whether it comes from the data, compare with towers from another training seed."
        if deviations * sign > bound
        else "These towers may be no better than random: the partitioner searches for the best assignment, which is up "
        f"to {bound:.1f} standard deviations away even if affinities are noise."
    )
    return opening + numbers + says


def _judge_interactions(comparison: Comparison, strategy: str) -> str:
    if comparison.within is None:
        return (
            "No pair or triple of features interacts beyond the measuring error, so the towers are arbitrary. Weak "
            "interactions may show with more rows."
        )
    random = "" if comparison.within_random is None else f", {comparison.within_random:.0%} inside random towers"
    return (
        f"The towers keep interacting features {strategy}: {comparison.within:.0%} of all interaction beyond the "
        f"measuring error is inside towers, {comparison.within_strided or 0.0:.0%} inside strided towers{random}. Only "
        "training shows whether this improves quality; use several seeds."
    )


def tower_loads(partition: Partition) -> dict[str, list[float]]:
    """Returns each tower's number of ``features`` and, with tables, its ``work`` and ``bytes``, in the plan's order."""
    loads = partition.loads
    known = {"features": [float(load.num_features) for load in loads]}
    if loads[0].work is not None:
        known["work"] = [load.work or 0.0 for load in loads]
        known["bytes"] = [float(load.num_bytes or 0) for load in loads]
    return known


def judge_balance(partition: Partition) -> str:
    """Returns a sentence on how even the towers are."""
    known = tower_loads(partition).items()
    ratios = {name: max(values) * len(values) / sum(values) for name, values in known if sum(values) > 0}
    parts = ", ".join(f"{ratio:.2f} times the {name}" for name, ratio in ratios.items())
    return f"Compared with the mean tower, the largest has {parts}."
