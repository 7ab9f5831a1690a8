"""Mean affinities within and between towers, compared with those of naive and random towers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.partitioner.affinity import FeatureAffinity
from dmt.partitioner.partition import AffinityComparison
from dmt.plan.column_shards import shard_names
from dmt.plan.towers import TowerPlan

__all__ = ["compare_towers", "tower_affinity"]

RANDOM_ASSIGNMENTS = 200

Rows = NDArray[np.int64]


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


def compare_towers(
    affinity: FeatureAffinity, plan: TowerPlan, *, seed: int = 0, categories: Mapping[str, str] | None = None
) -> AffinityComparison:
    """Compares a plan with the strided assignment and with 200 random ones to towers of the same sizes.

    Random towers obey categories: each category's features are dealt to its towers. They obey no other rule: features
    of a shared table, or that must stay together, may part, and those to be kept apart may meet. Strided towers obey
    none; they are the naive ones (DMT paper, section 5.2.3).

    Pairs of column shards of one table are left out of every mean. They are near-copies of each other that the plan may
    not put together, so that they would raise the other towers' means and that between towers.

    Args:
        affinity: of the plan's features.
        plan: the towers.
        seed: of the random assignments.
        categories: of the plan's features, by name; those not named form one more. A plan of column shards needs those
            of the shards.

    Raises:
        InputError: plan and affinity are not about the same features, or a tower mixes categories.

    Example:
        >>> affinity = FeatureAffinity(matrix=[[1, 0.5, 0], [0.5, 1, 0.25], [0, 0.25, 1]], features=["a", "b", "c"])
        >>> plan = TowerPlan.from_lists([["a", "b"], ["c"]])
        >>> compare_towers(affinity, plan).within_strided
        0.0

        With a category for each tower, there is only one random assignment:

        >>> found = compare_towers(affinity, plan, categories={"a": "user", "b": "user", "c": "item"})
        >>> found.within_random, found.std_random
        (0.5, 0.0)
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
        matrix = affinity.permuted(order).matrix.copy()
        np.fill_diagonal(matrix, 0.0)
        first, second = self._left_out = np.zeros((2, 0), dtype=np.int64) if left_out is None else left_out
        matrix[first, second] = matrix[second, first] = 0.0
        self._matrix = matrix
        self._total = float(matrix.sum()) / 2
        self._num_pairs = len(matrix) * (len(matrix) - 1) // 2 - len(first)

    def within_and_between(self, groups: Sequence[Rows]) -> tuple[float | None, float | None]:
        """Means over the pairs that share a group, and over those that do not; None if there is no such pair."""
        inside = sum(float(self._matrix[np.ix_(rows, rows)].sum()) / 2 for rows in groups)
        num_inside = sum(len(rows) * (len(rows) - 1) // 2 for rows in groups)
        if self._left_out.size:
            group_of = np.empty(len(self._matrix), dtype=np.int64)
            for number, rows in enumerate(groups):
                group_of[rows] = number
            num_inside -= int(np.equal(*group_of[self._left_out]).sum())
        return _mean(inside, num_inside), _mean(max(0.0, self._total - inside), self._num_pairs - num_inside)


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


def _mean(total: float, pairs: int) -> float | None:
    # What a difference of sums leaves beyond 12 decimals is rounding, and differs with the order of the features.
    return round(total / pairs, 12) if pairs else None
