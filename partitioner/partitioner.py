"""`TowerPartitioner`: feature affinities in, balanced towers out (DMT paper, section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dmt.errors import InputError, nearest
from dmt.partitioner.affinity import FeatureAffinity
from dmt.partitioner.clustering import constrained_clusters
from dmt.partitioner.coordinates import distances, embed_distances
from dmt.plan import TowerPlan
from dmt.tables import TableSpec, feature_names, table_specs

__all__ = ["Strategy", "TowerPartitioner", "tower_affinity"]

Strategy = Literal["coherent", "diverse"]


@dataclass(frozen=True, kw_only=True)
class TowerPartitioner:
    """Assigns features to balanced towers by how their trained embeddings relate (arXiv 2403.00877, section 3.3).

    Three steps: the affinity becomes distances (`distances`), the distances become points in a plane
    (`embed_distances`), and the points are grouped by constrained K-means (`constrained_clusters`).

    The answer depends on the affinity, the names and the seed alone: features are put in order of their names before
    anything is computed, so that listing them in another order lists the same towers in another order. (The last bits
    of floating-point sums may differ between machines.)

    Raises:
        InputError: an argument is out of range or the strategy unknown.

    Example:
        >>> close, far = 0.9, 0.1
        >>> matrix = [[1, far, close, far], [far, 1, far, close], [close, far, 1, far], [far, close, far, 1]]
        >>> affinity = FeatureAffinity(matrix=matrix, features=["ad", "user", "shop", "city"])
        >>> plan = TowerPartitioner(num_towers=2).fit(affinity)
        >>> plan.to_lists(), plan.affinity["within_towers"], plan.affinity["within_strided_towers"]
        ([['ad', 'shop'], ['user', 'city']], 0.9, 0.9)
        >>> TowerPartitioner(num_towers=2, strategy="diverse").fit(affinity).affinity["within_towers"]
        0.1
    """

    num_towers: int
    """T."""
    strategy: Strategy = "coherent"
    """``"coherent"`` puts features together that resemble each other, ``"diverse"`` those that do not. The paper finds
    that either may train better, depending on model and data."""
    balance_ratio: float = 1.0
    """K of the paper: the largest tower may have this many times the features of the smallest (rounded down), but
    always ceil(F / T)."""
    dims: int = 2
    """Dimensions of the space in which features are grouped (the paper uses 2)."""
    seed: int = 0
    """Seed of every random choice."""

    def __post_init__(self) -> None:
        for name, lowest in (("num_towers", 1), ("dims", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
                raise InputError(f"TowerPartitioner: {name}={value!r} must be a whole number of at least {lowest}.")
        known = get_args(Strategy)
        if self.strategy not in known:
            raise InputError(
                f"TowerPartitioner: strategy={self.strategy!r} is unknown.{nearest(str(self.strategy), known)} "
                f"Use one of {', '.join(map(repr, known))}."
            )
        if not self.balance_ratio >= 1.0 or not np.isfinite(self.balance_ratio):
            raise InputError(
                f"TowerPartitioner: balance_ratio={self.balance_ratio} must be at least 1 and finite; it is the size "
                "of the largest tower over that of the smallest."
            )

    def fit(self, affinity: FeatureAffinity, *, tables: Sequence[Any] = ()) -> TowerPlan:
        """Computes the towers.

        Args:
            affinity: of the F features to place.
            tables: TorchRec ``EmbeddingBagConfig`` or `TableSpec` of the model, recorded in the plan. The features of
                a shared table are kept together: they are one point, placed by their mean affinities, and
                tower sizes are then balanced by the number of points (tables) instead of features.

        Returns:
            The plan. Towers are in the order of their first feature in ``affinity``, features inside a tower likewise.
            ``plan.affinity`` holds the summary of the affinity, the stress of the embedding, and the mean
            affinity within and between towers, beside that within naive strided towers.

        Raises:
            InputError: more towers than features (or tables), or tables whose features are not the affinity's.
        """
        specs = table_specs(tables)
        points = _points(affinity, specs)
        if self.num_towers > len(points):
            what = "features" if len(points) == affinity.num_features else "tables (shared tables are not split)"
            raise InputError(
                f"TowerPartitioner: num_towers={self.num_towers} exceeds the {len(points)} {what} to place, and no "
                "tower may be empty. Use fewer towers."
            )
        found = embed_distances(
            distances(_point_matrix(affinity, points), self.strategy), dims=self.dims, seed=self.seed
        )
        labels = constrained_clusters(
            found.points, self.num_towers, balance_ratio=self.balance_ratio, seed=self.seed
        ).tolist()
        tower_of = {name: tower for names, tower in zip(points, labels, strict=True) for name in names}
        # Filled in the affinity's order, a dictionary has the towers in the order of their first features.
        towers: dict[int, list[str]] = {}
        for name in affinity.features:
            towers.setdefault(tower_of[name], []).append(name)
        plan = TowerPlan.from_lists(towers.values(), strategy=self.strategy, seed=self.seed, tables=specs)
        stress = {"stress": found.stress, "normalized_stress": found.normalized_stress}
        return replace(plan, affinity=self._summary(affinity, plan) | stress)

    def _summary(self, affinity: FeatureAffinity, plan: TowerPlan) -> dict[str, Any]:
        within, between = tower_affinity(affinity, plan)
        strided, _ = tower_affinity(affinity, TowerPlan.strided(affinity.features, self.num_towers))
        return affinity.to_summary() | {
            "balance_ratio": self.balance_ratio,
            "dims": self.dims,
            "within_towers": within,
            "between_towers": between,
            "within_strided_towers": strided,
        }


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
    matrix = affinity.permuted(plan.features).matrix
    tower = np.repeat(np.arange(plan.num_towers), [len(t.features) for t in plan.towers])
    upper = np.triu(np.ones_like(matrix, dtype=bool), k=1)
    same = tower[:, None] == tower[None, :]
    return _mean(matrix[upper & same]), _mean(matrix[upper & ~same])


def _mean(values: NDArray[np.float64]) -> float | None:
    return float(values.mean()) if values.size else None


def _points(affinity: FeatureAffinity, specs: Sequence[TableSpec]) -> list[tuple[str, ...]]:
    """The features that must stay together, point by point, in order of their names; without tables, one each."""
    if not specs:
        return [(name,) for name in sorted(affinity.features)]
    of_tables, measured = dict.fromkeys(feature_names(specs)), dict.fromkeys(affinity.features)
    for where, names, other, known in (
        ("tables", of_tables, "affinity", measured),
        ("affinity", measured, "tables", of_tables),
    ):
        strangers = [name for name in names if name not in known]
        if strangers:
            raise InputError(
                f"TowerPartitioner: feature {strangers[0]!r} is in the {where} but not in the {other} "
                f"({len(of_tables)} features in the tables, {len(measured)} in the affinity)."
                f"{nearest(strangers[0], known)} Both must be of one model."
            )
    return sorted(tuple(sorted(spec.feature_names)) for spec in specs)


def _point_matrix(affinity: FeatureAffinity, points: Sequence[tuple[str, ...]]) -> NDArray[np.float64]:
    """[P, P] mean affinity between the features of two points; for points of one feature just the affinity."""
    ordered = affinity.permuted([name for names in points for name in names]).matrix
    sizes = np.array([len(names) for names in points])
    starts = np.cumsum(sizes) - sizes
    total = np.add.reduceat(np.add.reduceat(ordered, starts, axis=0), starts, axis=1)
    return total / np.outer(sizes, sizes)
