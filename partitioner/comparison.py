"""Whether towers mean anything: mean affinities inside and between them, beside naive and random towers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dmt.partitioner.affinity import FeatureAffinity
from dmt.partitioner.partition import Comparison
from dmt.plan import TowerPlan

__all__ = ["compare_towers", "tower_affinity"]

RANDOM_ASSIGNMENTS = 200


def tower_affinity(affinity: FeatureAffinity, plan: TowerPlan) -> tuple[float | None, float | None]:
    """Mean affinity of the pairs of features that share a tower, and of those that do not.

    Returns:
        (within, between); None where there is no such pair (towers of one feature; a single tower).

    Raises:
        InputError: plan and affinity are not about the same features.

    Example:
        >>> affinity = FeatureAffinity(matrix=[[1, 0.5, 0], [0.5, 1, 0.25], [0, 0.25, 1]], features=["a", "b", "c"])
        >>> tower_affinity(affinity, TowerPlan.from_lists([["a", "b"], ["c"]]))
        (0.5, 0.125)
    """
    matrix = _without_diagonal(affinity, plan.features)
    return _within_and_between(matrix, np.arange(len(matrix)), [len(t.features) for t in plan.towers])


def compare_towers(affinity: FeatureAffinity, plan: TowerPlan, *, seed: int = 0) -> Comparison:
    """Puts a plan beside the strided assignment and 200 random ones to towers of the same sizes.

    Args:
        affinity: of the plan's features.
        plan: the towers.
        seed: of the random assignments.

    Raises:
        InputError: plan and affinity are not about the same features.

    Example:
        >>> affinity = FeatureAffinity(matrix=[[1, 0.5, 0], [0.5, 1, 0.25], [0, 0.25, 1]], features=["a", "b", "c"])
        >>> compare_towers(affinity, TowerPlan.from_lists([["a", "b"], ["c"]])).within_strided
        0.0
    """
    # By name, so that the random assignments do not depend on the order of the features.
    names = sorted(plan.features)
    position = {name: i for i, name in enumerate(names)}
    matrix = _without_diagonal(affinity, names)
    sizes = [len(tower.features) for tower in plan.towers]
    within, between = _within_and_between(matrix, np.array([position[name] for name in plan.features]), sizes)
    naive = TowerPlan.strided(affinity.features, plan.num_towers)
    strided, _ = _within_and_between(
        matrix, np.array([position[name] for name in naive.features]), [len(t.features) for t in naive.towers]
    )
    rng = np.random.default_rng(seed)
    # Sorted sizes: the order of towers hangs on the order of features too.
    drawn = [_within(matrix, rng.permutation(len(names)), sorted(sizes)) for _ in range(RANDOM_ASSIGNMENTS)]
    known = [value for value in drawn if value is not None]
    return Comparison(
        within=within,
        between=between,
        within_strided=strided,
        # Rounded like the means: where all assignments are alike, the deviation is 0 and not rounding.
        within_random=round(float(np.mean(known)), 12) if known else None,
        std_random=round(float(np.std(known)), 12) if known else None,
    )


def _without_diagonal(affinity: FeatureAffinity, order: Sequence[str]) -> NDArray[np.float64]:
    matrix = affinity.permuted(order).matrix.copy()
    np.fill_diagonal(matrix, 0.0)
    return matrix


def _within_and_between(
    matrix: NDArray[np.float64], order: NDArray[np.int64], sizes: Sequence[int]
) -> tuple[float | None, float | None]:
    pairs = len(matrix) * (len(matrix) - 1) // 2
    inside, inside_pairs = _sum_within(matrix, order, sizes)
    outside, outside_pairs = float(matrix.sum()) / 2 - inside, pairs - inside_pairs
    return _mean(inside, inside_pairs), _mean(max(0.0, outside), outside_pairs)


def _within(matrix: NDArray[np.float64], order: NDArray[np.int64], sizes: Sequence[int]) -> float | None:
    return _mean(*_sum_within(matrix, order, sizes))


def _mean(total: float, pairs: int) -> float | None:
    # What a difference of sums leaves beyond 12 decimals is rounding, and differs with the order of the features.
    return round(total / pairs, 12) if pairs else None


def _sum_within(matrix: NDArray[np.float64], order: NDArray[np.int64], sizes: Sequence[int]) -> tuple[float, int]:
    """Sum and number of the pairs inside groups of these sizes, filled in ``order``."""
    total, stop = 0.0, 0
    for size in sizes:
        start, stop = stop, stop + size
        rows = order[start:stop]
        total += float(matrix[np.ix_(rows, rows)].sum()) / 2
    return total, sum(size * (size - 1) // 2 for size in sizes)
