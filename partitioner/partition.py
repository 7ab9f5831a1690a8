"""`Partition`: result of `TowerPartitioner.partition`, and its comparison with naive and random towers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.partitioner.affinity import FeatureAffinity
from dmt.partitioner.interactions import FeatureInteractions
from dmt.plan.split_across_towers import shard_names
from dmt.plan.towers import TowerPlan

__all__ = [
    "AffinityComparison",
    "Partition",
    "TowerContents",
    "TowerLimits",
    "compare_towers",
    "share_within",
    "tower_affinity",
]

RANDOM_ASSIGNMENTS = 200

Rows = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class TowerContents:
    """Load of one tower."""

    name: str
    """Name of the tower in the plan."""
    num_features: int
    """F_t; column shards of a table count as features of their own."""
    category: str = ""
    """Category of its features; empty if there are none."""
    work: float | None = None
    """Elements read per sample: the sum over features of pooling factor times embedding dim; None without tables."""
    num_bytes: int | None = None
    """Bytes of the tower's tables at 32-bit floats; None without tables."""


@dataclass(frozen=True, kw_only=True)
class TowerLimits:
    """Limits on the load of a tower; None without one."""

    balance_ratio: float | None = None
    """Largest over smallest tower, in features, inside each category."""
    max_work: float | None = None
    """Elements read per sample."""
    max_bytes: int | None = None
    """Bytes of tables."""


@dataclass(frozen=True, kw_only=True)
class AffinityComparison:
    """Mean affinity of the pairs of features that share a tower, beside what other assignments reach.

    None if there is no such pair (towers of one feature; a single tower).
    """

    within: float | None
    """Pairs in one tower of this plan."""
    between: float | None
    """Pairs in different towers of this plan."""
    within_strided: float | None
    """Pairs in one tower of the naive strided assignment to as many towers (paper, section 5.2.3)."""
    within_random: float | None
    """Pairs in one tower, mean over random assignments to towers of this plan's sizes and categories."""
    std_random: float | None
    """Standard deviation of the same over the random assignments."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Partition:
    """Towers, with the points, loads and comparisons behind them."""

    plan: TowerPlan
    """The towers."""
    affinity: FeatureAffinity
    """Affinity of the plan's features, with column shards in place of tables that were split."""
    points: NDArray[np.float64]
    """[F, n] coordinates, in the order of ``affinity.features``."""
    stress: float
    """Stress of the coordinates (`embed_distances`), summed over the categories if there are any."""
    normalized_stress: float
    """``sqrt(stress / sum of squared wanted distances)``: 0 is perfect, above 0.2 is poor."""
    loads: tuple[TowerContents, ...]
    """Tower by tower, in the plan's order."""
    limits: TowerLimits
    """Limits that the towers hold."""
    comparison: AffinityComparison
    """Against naive and random towers."""
    num_refined: int = 0
    """Features that the refinement on the distances themselves put into another tower than the points did."""
    notes: tuple[str, ...] = ()
    """Warnings for the user in whole sentences, such as about an affinity that is equal for all pairs."""
    alternatives: tuple[Partition, ...] = field(default=())
    """The other strategy with ``strategy="both"``: the one that differs less from random assignments."""
    interactions: FeatureInteractions | None = None
    """The interactions that the towers were made from, if any: ``affinity`` then is the gain of each pair over the
    largest, and there are no points."""

    @property
    def every(self) -> Sequence[Partition]:
        """This partition and its alternatives."""
        return (self, *self.alternatives)


def tower_affinity(affinity: FeatureAffinity, plan: TowerPlan) -> tuple[float | None, float | None]:
    """Mean affinity of the pairs of features that share a tower, and of those that do not.

    Returns:
        (within, between); None if there is no such pair (towers of one feature; a single tower).

    Raises:
        InputError: plan and affinity are not about the same features.

    Example:
        >>> affinity = FeatureAffinity(matrix=[[1, 0.5, 0], [0.5, 1, 0.25], [0, 0.25, 1]], features=["a", "b", "c"])
        >>> tower_affinity(affinity, TowerPlan.from_lists([["a", "b"], ["c"]]))
        (0.5, 0.125)
    """
    position = {name: i for i, name in enumerate(plan.features)}
    return _Pairs(affinity, plan.features).within_and_between(_groups(plan, position))


def share_within(affinity: FeatureAffinity, plan: TowerPlan) -> float | None:
    """Part of the affinity of all pairs of features that is inside towers, 0 to 1; None where all pairs have 0.

    Example:
        >>> affinity = FeatureAffinity(matrix=[[1, 0.5, 0], [0.5, 1, 0.25], [0, 0.25, 1]], features=["a", "b", "c"])
        >>> round(share_within(affinity, TowerPlan.from_lists([["a", "b"], ["c"]])), 4)
        0.6667
    """
    ordered = affinity.permuted(plan.features).matrix
    tower = np.repeat(np.arange(plan.num_towers), [len(own.features) for own in plan.towers])
    above = np.triu(ordered, k=1)
    total = float(above.sum())
    return float(above[tower[:, None] == tower].sum()) / total if total > 0 else None


def compare_towers(
    affinity: FeatureAffinity, plan: TowerPlan, *, seed: int = 0, categories: Mapping[str, str] | None = None
) -> AffinityComparison:
    """Compares a plan with the strided assignment (DMT paper, section 5.2.3) and with 200 random ones.

    Random towers have the plan's sizes and obey categories, but no other rule; strided towers obey none. Pairs of
    column shards of one table are left out of every mean: they are near-copies of each other that the plan may not put
    together, so that they would raise the means of the other towers.

    ``categories`` are those of the plan's features, column shards included; features not named form one more.

    Raises:
        InputError: plan and affinity are not about the same features, or a tower mixes categories.
    """
    # By name, so that the random assignments do not depend on the order of the features.
    names = sorted(plan.features)
    position = {name: i for i, name in enumerate(names)}
    pairs = _Pairs(affinity, names, _shard_pairs(plan, position))
    within, between = pairs.within_and_between(_groups(plan, position))
    strided, _ = pairs.within_and_between(_groups(TowerPlan.strided(affinity.features, plan.num_towers), position))
    slots = _slots(plan, position, categories or {})
    rng = np.random.default_rng(seed)
    drawn = [pairs.within_and_between(_deal(slots, rng))[0] for _ in range(RANDOM_ASSIGNMENTS)]
    known = [value for value in drawn if value is not None]
    return AffinityComparison(
        within=within,
        between=between,
        within_strided=strided,
        # Rounded like the means: where all assignments are alike, the deviation is 0 and not rounding.
        within_random=round(float(np.mean(known)), 12) if known else None,
        std_random=round(float(np.std(known)), 12) if known else None,
    )


class _Pairs:
    """Pairs of features with their affinity, and which of them do not count."""

    def __init__(self, affinity: FeatureAffinity, order: Sequence[str], left_out: Rows | None = None) -> None:
        self._counts = ~np.eye(len(order), dtype=np.bool_)
        if left_out is not None:
            first, second = left_out
            self._counts[first, second] = self._counts[second, first] = False
        self._matrix = np.where(self._counts, affinity.permuted(order).matrix, 0.0)
        self._total, self._num_pairs = float(self._matrix.sum()) / 2, int(self._counts.sum()) // 2

    def within_and_between(self, groups: Sequence[Rows]) -> tuple[float | None, float | None]:
        """Means over the pairs that share a group, and over those that do not; None if there is no such pair."""
        blocks = [np.ix_(rows, rows) for rows in groups]
        inside = sum(float(self._matrix[block].sum()) / 2 for block in blocks)
        num_inside = sum(int(self._counts[block].sum()) // 2 for block in blocks)
        between, num_between = max(0.0, self._total - inside), self._num_pairs - num_inside
        # What a difference of sums leaves beyond 12 decimals is rounding, and differs with the order of the features.
        return (
            round(inside / num_inside, 12) if num_inside else None,
            round(between / num_between, 12) if num_between else None,
        )


def _groups(plan: TowerPlan, position: Mapping[str, int]) -> list[Rows]:
    return [np.array([position[name] for name in tower.features]) for tower in plan.towers]


def _shard_pairs(plan: TowerPlan, position: Mapping[str, int]) -> Rows:
    """[2, pairs] of column shards of one table."""
    pairs: list[tuple[int, int]] = []
    for feature, widths in plan.column_splits.items():
        pairs += combinations((position[name] for name in shard_names(feature, widths)), 2)
    return np.array(pairs, dtype=np.int64).reshape(-1, 2).T


def _slots(plan: TowerPlan, position: Mapping[str, int], categories: Mapping[str, str]) -> list[tuple[Rows, list[int]]]:
    """For each category, its features and the sizes of its towers."""
    sizes: dict[str, list[int]] = {}
    for tower in plan.towers:
        own = {categories.get(name, "") for name in tower.features}
        if len(own) > 1:
            raise InputError(
                f"compare_towers: tower {tower.name!r} has features of the categories {sorted(own)} ('' where none is "
                "given). Every tower must keep to one."
            )
        sizes.setdefault(own.pop(), []).append(len(tower.features))
    members: dict[str, list[int]] = {category: [] for category in sizes}
    for name, row in position.items():
        members[categories.get(name, "")].append(row)
    # Sorted: the order of towers depends on the order of features too.
    return [(np.array(members[category]), sorted(sizes[category])) for category in sorted(sizes)]


def _deal(slots: Sequence[tuple[Rows, list[int]]], rng: np.random.Generator) -> list[Rows]:
    """One random assignment."""
    groups: list[Rows] = []
    for rows, sizes in slots:
        groups += np.split(rows[rng.permutation(len(rows))], np.cumsum(sizes)[:-1])
    return groups
