"""`Partition`: result of `TowerPartitioner.partition`, and its comparison with naive and random towers.

Legend: F features, T towers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import NDArray

from dmt.partitioner.affinity import FeatureAffinity
from dmt.plan.towers import TowerPlan

__all__ = [
    "Comparison",
    "Partition",
    "TowerContents",
    "compare_towers",
    "tower_affinity",
]

Labels = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class TowerContents:
    """Load of one tower."""

    name: str
    """Name of the tower in the plan."""
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
    """What is inside towers and what is not, as in `Comparison`: mean affinity, or share of all interaction.

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
    inside = _Shares(ordered) if affinity.is_interactions else _Means(ordered.matrix)
    within, between = inside(_labels(plan, names))
    strided, _ = inside(_labels(TowerPlan.strided(affinity.features, plan.num_towers), names))
    drawn = [inside(np.array([towers[name] for name in names]))[0] for towers in random]
    known = [value for value in drawn if value is not None]
    return Comparison(
        within=within,
        between=between,
        within_strided=strided,
        # Rounded like the means: where all assignments are alike, the deviation is 0 and not rounding.
        within_random=round(float(np.mean(known)), 12) if known else None,
        std_random=round(float(np.std(known)), 12) if known else None,
    )


class _Means:
    """Mean affinity of the pairs of features in one tower, and of the others."""

    def __init__(self, matrix: NDArray[np.float64]) -> None:
        self._matrix = matrix * (1.0 - np.eye(len(matrix)))
        self._total, self._num_pairs = float(self._matrix.sum()) / 2, comb(len(matrix), 2)

    def __call__(self, labels: Labels) -> tuple[float | None, float | None]:
        towers = [np.flatnonzero(labels == tower) for tower in np.unique(labels)]
        inside = sum(float(self._matrix[np.ix_(rows, rows)].sum()) / 2 for rows in towers)
        num_inside = sum(comb(len(rows), 2) for rows in towers)
        between, num_between = max(0.0, self._total - inside), self._num_pairs - num_inside
        # What a difference of sums leaves beyond 12 decimals is rounding, and differs with the order of the features.
        return (
            round(inside / num_inside, 12) if num_inside else None,
            round(between / num_between, 12) if num_between else None,
        )


class _Shares:
    """Share of all gains of pairs and triples that is inside towers, and the rest."""

    def __init__(self, affinity: FeatureAffinity) -> None:
        above = np.triu(affinity.significant(), k=1)
        position = {name: i for i, name in enumerate(affinity.features)}
        pairs = [(row, column, row) for row, column in np.argwhere(above > 0).tolist()]
        triples = [tuple(position[name] for name in triple.features) for triple in affinity.triples]
        self._groups = np.array([*pairs, *triples], dtype=np.int64).reshape(-1, 3)
        self._gains = np.array([*(above[i, j] for i, j, _ in pairs), *(triple.gain for triple in affinity.triples)])

    def __call__(self, labels: Labels) -> tuple[float | None, float | None]:
        if not len(self._gains):
            return None, None
        first, second, third = labels[self._groups].T
        share = float(self._gains[(first == second) & (second == third)].sum() / self._gains.sum())
        return round(share, 12), round(1.0 - share, 12)


def _labels(plan: TowerPlan, names: Sequence[str]) -> Labels:
    tower_of = {name: number for number, tower in enumerate(plan.towers) for name in tower.features}
    return np.array([tower_of[name] for name in names])
