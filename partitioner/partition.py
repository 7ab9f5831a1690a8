"""`Partition`: what `TowerPartitioner.partition` found, with the numbers to believe it or not. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dmt.partitioner.affinity import FeatureAffinity
from dmt.plan.towers import TowerPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Comparison", "Partition", "TowerLimits", "TowerLoad"]


@dataclass(frozen=True, kw_only=True)
class TowerLoad:
    """What one tower has to carry."""

    name: str
    """Name of the tower in the plan."""
    num_features: int
    """F_t; column shards of a table count as features of their own."""
    category: str = ""
    """Category of its features; empty where there are none."""
    work: float | None = None
    """Elements read per sample: the sum over features of pooling factor times embedding dim; None without tables."""
    num_bytes: int | None = None
    """Bytes of the tower's tables at 32-bit floats; None without tables."""


@dataclass(frozen=True, kw_only=True)
class TowerLimits:
    """What a tower may carry at most; None where nothing was asked for."""

    balance_ratio: float | None = None
    """Largest over smallest tower, in features, inside each category."""
    max_work: float | None = None
    """Elements read per sample."""
    max_bytes: int | None = None
    """Bytes of tables."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Mean affinity of the pairs of features that share a tower, beside what other assignments reach.

    Pairs of column shards of one table count nowhere: the plan may not put them together. None where there is no such
    pair (towers of one feature; a single tower).
    """

    within: float | None
    """Pairs in one tower of this plan."""
    between: float | None
    """Pairs in different towers of this plan."""
    within_strided: float | None
    """Pairs in one tower of the naive strided assignment (paper, section 5.2.3) to as many towers, which obeys no
    categories."""
    within_random: float | None
    """Pairs in one tower, mean over random assignments to towers of this plan's sizes and categories."""
    std_random: float | None
    """Standard deviation of the same over the random assignments."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Partition:
    """Towers, and how they came about.

    With ``strategy="both"`` this is the one that stands out more from random assignments, and the other is in
    ``alternatives``.
    """

    plan: TowerPlan
    """The towers."""
    affinity: FeatureAffinity
    """Of the members of the plan's towers: the features, with column shards in place of tables that were split."""
    points: NDArray[np.float64]
    """[F, n] coordinates, in the order of ``affinity.features``."""
    stress: float
    """Of the coordinates, see `embed_distances`; summed over the categories where there are any."""
    normalized_stress: float
    """``sqrt(stress / sum of squared wanted distances)``: 0 is perfect, above 0.2 is poor."""
    loads: tuple[TowerLoad, ...]
    """Tower by tower, in the plan's order."""
    limits: TowerLimits
    """What was asked for."""
    comparison: Comparison
    """Against naive and random towers."""
    num_refined: int = 0
    """Features that the refinement on the distances themselves put into another tower than the points did."""
    notes: tuple[str, ...] = ()
    """What the user should know, in whole sentences, such as an affinity that tells nothing."""
    alternatives: tuple[Partition, ...] = field(default=())
    """The other strategies that were tried."""

    @property
    def every(self) -> Sequence[Partition]:
        """This partition and its alternatives."""
        return (self, *self.alternatives)
