"""`Partition`: result of `TowerPartitioner.partition`, with the numbers to judge it by. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dmt.partitioner.affinity import FeatureAffinity
from dmt.plan.towers import TowerPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["AffinityComparison", "Partition", "TowerLimits", "TowerContents"]


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
    """Limits on the load of a tower; None without a limit."""

    balance_ratio: float | None = None
    """Largest over smallest tower, in features, inside each category."""
    max_work: float | None = None
    """Elements read per sample."""
    max_bytes: int | None = None
    """Bytes of tables."""


@dataclass(frozen=True, kw_only=True)
class AffinityComparison:
    """Mean affinity of the pairs of features that share a tower, beside what other assignments reach.

    Pairs of column shards of one table count nowhere: the plan may not put them together. None if there is no such
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
    """Towers, with the points, loads and comparisons behind them.

    With ``strategy="both"`` this is the one that differs more from random assignments, and the other is in
    ``alternatives``.
    """

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
    """The other strategies that were tried."""

    @property
    def every(self) -> Sequence[Partition]:
        """This partition and its alternatives."""
        return (self, *self.alternatives)
