"""`TowerPartitioner`: balanced towers from a `FeatureAffinity` (DMT paper, section 3.3).

Legend: F features, P blocks (features that stay together), T towers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, InstanceOf, TypeAdapter, ValidationError

from dmt.errors import InputError, check_instance
from dmt.files import explain
from dmt.formatting import shorten
from dmt.partitioner.affinity import FeatureAffinity
from dmt.partitioner.partition import Partition, TowerContents, compare_towers
from dmt.partitioner.points import distances, embed_distances, group_points
from dmt.partitioner.problem import Part, prepare
from dmt.partitioner.rules import PartitionRules
from dmt.partitioner.search import Bounds, Costs, Floats, Labels, local_search, search_towers
from dmt.plan.towers import TowerFeatures, TowerPlan

__all__ = ["Strategy", "TowerPartitioner"]

logger = logging.getLogger(__name__)

Strategy = Literal["auto", "coherent", "diverse", "together", "apart"]
_OF_INTERACTIONS = ("together", "apart")
# Number of random assignments that a partition is compared with.
RANDOM_ASSIGNMENTS = 100


@dataclass(kw_only=True)
class TowerPartitioner:
    """Assigns features to balanced towers by a `FeatureAffinity` (arXiv 2403.00877, section 3.3).

    With cosines, as in the paper, the affinities become distances (`distances`), then points in a plane
    (`embed_distances`), and constrained K-means groups the points (`group_points`). A local search on the distances
    then improves the towers, within all limits. With interactions, the same search runs on the gains. Which features
    share a tower does not depend on the order of the features.

    `fit`, `partition` and `check` check the parameters; the constructor does not.

    Example:
        >>> close, far = 0.9, 0.1
        >>> matrix = [[1, far, close, far], [far, 1, far, close], [close, far, 1, far], [far, close, far, 1]]
        >>> affinity = FeatureAffinity(matrix=matrix, features=["ad", "user", "shop", "city"])
        >>> TowerPartitioner(num_towers=2).fit(affinity).to_lists()
        [['ad', 'shop'], ['user', 'city']]
    """

    num_towers: Annotated[int, Field(strict=True, ge=1)]
    """T, the number of towers."""
    strategy: Strategy = "auto"
    """For cosines, ``"coherent"`` groups similar features and ``"diverse"`` dissimilar ones; in the paper, either may
    train better. For interactions, ``"together"`` keeps as much of them as possible inside towers, for tower modules
    that keep interactions (cross layers), and ``"apart"`` as little, for linear tower modules. ``"auto"`` is coherent
    for cosines; for interactions it is together, or apart if ``keeps_interactions`` is False."""
    keeps_interactions: bool = True
    """For ``"auto"``: whether tower modules return products of features; their class has an attribute of this name."""
    balance_ratio: Annotated[float, Field(strict=True, ge=1)] = 1.0
    """K of the paper: the largest tower has at most K times as many features as the smallest, or ceil(F / T) if that is
    more. Towers have n to K n features, rounded down, for the n that brings the middle of this range nearest to F / T;
    a note says if features that stay together need a wider range. Infinite K allows any. Each category counts alone."""
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**32)] = 0
    """Seed of all random choices."""
    rules: InstanceOf[PartitionRules] = field(default_factory=PartitionRules)
    """Categories, features that must or must not share a tower, and limits on work and memory."""
    refine: bool = True
    """Whether to improve the groups of points by a search on the distances; the paper does not. If False, a search on
    the points runs only if the groups break a limit. Interactions are searched in any case."""

    def fit(self, measure: FeatureAffinity, *, tables: Sequence[Any] = ()) -> TowerPlan:
        """Returns the plan of `partition`, whose arguments and errors it shares; logs the notes as warnings."""
        partition = self.partition(measure, tables=tables)
        for note in partition.notes:
            logger.warning(note)
        return partition.plan

    def partition(self, measure: FeatureAffinity, *, tables: Sequence[Any] = ()) -> Partition:
        """Computes the towers, and numbers to judge them by.

        Args:
            measure: the affinity of the F features to place.
            tables: TorchRec ``EmbeddingBagConfig`` or `TableSpec` of the model, by default ``measure.tables``; the plan
                records them. Limits on work and memory need tables. Features that share a table stay together: they
                form a block, placed by their mean affinities.

        Returns:
            The partition. The features of a tower are in the order of ``measure``; towers (within a category, if there
            are categories) are ordered by their first features. ``plan.affinity`` records settings and comparison.

        Raises:
            InputError: a parameter is out of range or does not fit the measure, tables and ``measure`` have different
                features, rules do not fit the features or contradict each other, a limit needs tables, ``num_towers``
                does not fit blocks or categories, or no assignment within all rules and limits was found.
        """
        from threadpoolctl import threadpool_limits

        self.check()
        check_instance("measure", measure, FeatureAffinity)
        strategy = self._resolved(measure)
        if tables:
            measure = replace(measure, tables=tuple(tables))
        rules, recorded = self.rules.for_features(measure.features), measure.tables
        outside = tuple(rules.outside)
        measure = measure.without(outside)
        parts, notes = prepare(measure, num_towers=self.num_towers, balance_ratio=self.balance_ratio, rules=rules)
        if outside:
            notes = [*notes, f"Every rank holds the tables of the features outside towers: {shorten(outside, ', ')}."]
        # More threads may sum in another order, and so break a tie differently.
        with threadpool_limits(1):
            answers = [self._solve(part, measure, strategy) for part in parts]
            partition = self._assembled(measure, answers, strategy, notes)
        return replace(partition, plan=replace(partition.plan, outside=outside, tables=recorded))

    def check(self) -> None:
        """Raises `InputError` for a parameter of the wrong type or out of range; call it before a long measurement."""
        try:
            TypeAdapter(TowerPartitioner).validate_python(vars(self))
        except ValidationError as error:
            raise InputError(f"TowerPartitioner: {explain(error)}") from error

    def _resolved(self, measure: FeatureAffinity) -> str:
        """Returns the strategy, resolving ``"auto"``; raises `InputError` if it does not fit the measure."""
        fitting = _OF_INTERACTIONS if measure.is_interactions else ("coherent", "diverse")
        if self.strategy == "auto":
            return fitting[measure.is_interactions and not self.keeps_interactions]
        if self.strategy not in fitting:
            raise InputError(
                f"TowerPartitioner: strategy={self.strategy!r} does not fit the measure {measure.measure!r}; use "
                f"'auto' or one of {', '.join(map(repr, fitting))}."
            )
        return self.strategy

    def _solve(self, part: Part, affinity: FeatureAffinity, strategy: str) -> _Answer:
        seed, num_towers = self.seed, part.num_towers
        if strategy in _OF_INTERACTIONS:
            costs = part.blocks.costs(affinity, sign=-1.0 if strategy == "together" else 1.0)
            embedded = np.zeros((len(part.blocks.names), 2)), 0.0, 0.0
        else:
            distance = distances(part.blocks.matrix(affinity.matrix, affinity.features), strategy)
            costs = Costs(pairs=np.square(distance), per_feature=True)
            embedded = embed_distances(distance, seed=seed)
        points, is_paper = embedded[0], costs.per_feature and not self.refine
        if is_paper:
            costs = Costs(pairs=np.square(points[:, None] - points).sum(axis=2), per_feature=True)
        bounds = part.bounds
        starts = [_grouped(points, num_towers, bounds, seed)] if costs.per_feature else []
        if is_paper and not bounds.violation(starts[0], num_towers):
            return _Answer(part, *embedded, labels=starts[0])
        # Also without refine, if the groups of points break limits that K-means does not know.
        starts.append(_neighbors(costs.pairs, num_towers))
        violation, labels = search_towers(costs, starts, num_towers=num_towers, bounds=bounds, seed=seed)
        if violation:
            raise InputError(f"TowerPartitioner: {part.where}{_broken_limits(labels, num_towers, bounds)}")
        return _Answer(part, *embedded, labels=labels)

    def _assembled(
        self, measure: FeatureAffinity, answers: Sequence[_Answer], strategy: str, more_notes: Sequence[str]
    ) -> Partition:
        """Returns the partition made of the answers of all parts."""
        towers: list[TowerFeatures] = []
        loads: list[TowerContents] = []
        for answer in answers:
            category = answer.part.category
            for number, (label, names) in enumerate(answer.members(measure.features).items()):
                towers.append(TowerFeatures(f"{category or 'tower'}_{number}", tuple(names)))
                inside = answer.labels == label
                _, work, num_bytes = answer.part.blocks.loads[:, inside].sum(axis=1).tolist()
                loads.append(
                    TowerContents(
                        num_features=len(names),
                        num_blocks=int(inside.sum()),
                        category=category,
                        work=work if measure.tables else None,
                        num_bytes=int(num_bytes) if measure.tables else None,
                    )
                )
        plan = TowerPlan(towers=tuple(towers), strategy=strategy, seed=self.seed, tables=measure.tables)
        comparison = compare_towers(measure, plan, list(_random_towers(answers, self.seed)))
        wanted = sum(answer.wanted for answer in answers)
        stress = math.sqrt(sum(answer.stress for answer in answers) / wanted) if wanted > 0 else 0.0
        notes = [*measure.notes, *more_notes, *_notes(measure), *(note for a in answers for note in a.notes)]
        ratio = self.balance_ratio if math.isfinite(self.balance_ratio) else None
        recorded = ("measure", "num_features", "num_samples", "digest", "loss")
        settings: dict[str, Any] = {name: getattr(measure, name) for name in recorded}
        settings |= {"balance_ratio": ratio, "notes": notes}
        if not measure.is_interactions:
            settings |= {"refine": self.refine, "normalized_stress": stress}
        plan = replace(plan, affinity=settings | asdict(comparison))
        return Partition(
            plan=plan,
            affinity=measure,
            points=_points(answers, measure),
            normalized_stress=stress,
            loads=tuple(loads),
            comparison=comparison,
            notes=tuple(notes),
        )


@dataclass(frozen=True, eq=False)
class _Answer:
    """Solution of one part."""

    part: Part
    points: Floats
    """[P, 2]; with ``stress`` and ``wanted``, the result of `embed_distances`; 0 for interactions."""
    stress: float
    wanted: float
    labels: Labels
    """[P] the tower of each block."""

    @property
    def notes(self) -> list[str]:
        """A note if the sizes are not as even as requested; else empty."""
        sizes = np.bincount(self.labels, weights=self.part.blocks.loads[0]).astype(int)
        if self.part.asked[0] <= sizes.min() and sizes.max() <= self.part.asked[1]:
            return []
        return [
            f"{self.part.where}Towers have {sizes.min()} to {sizes.max()} features instead of {self.part.asked[0]} to "
            f"{self.part.asked[1]}, because features that share a table or must stay together are not separated."
        ]

    def members(self, features: Sequence[str]) -> dict[int, list[str]]:
        """Returns the features of each tower by its label, towers and features in the order of ``features``."""
        tower_of = self.by_feature(self.labels)
        members: dict[int, list[str]] = {}
        for name in features:
            if name in tower_of:
                members.setdefault(tower_of[name], []).append(name)
        return members

    def by_feature(self, labels: Labels) -> dict[str, int]:
        """Returns the tower of each feature, from the [P] labels of blocks."""
        pairs = zip(self.part.blocks.names, labels.tolist(), strict=True)
        return {name: tower for names, tower in pairs for name in names}


def _grouped(points: Floats, num_towers: int, bounds: Bounds, seed: int) -> Labels:
    """Returns the towers by the paper's K-means, [P]; it limits the points of a tower, and no other load."""
    sizes = len(points) // num_towers, -(-len(points) // num_towers)
    if (bounds.weights == 1).all():
        sizes = int(bounds.lower[0]), int(min(bounds.upper[0], len(points)))
    return group_points(points, num_towers, sizes=sizes, seed=seed)


def _neighbors(costs: Floats, num_towers: int) -> Labels:
    """Orders blocks so that those with low costs are neighbors, and cuts the order into towers: [P] labels."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    if len(costs) < 2:
        return np.zeros(len(costs), dtype=np.int64)
    distance = costs - costs.min()
    np.fill_diagonal(distance, 0.0)
    leaves = leaves_list(linkage(squareform(distance, checks=False), method="average"))
    return (np.argsort(leaves) * num_towers // len(costs)).astype(np.int64)


def _random_towers(answers: Sequence[_Answer], seed: int) -> Iterator[Mapping[str, int]]:
    """Yields random assignments, as the tower of each feature; skips those whose broken limits cannot be repaired."""
    rng = np.random.default_rng(seed)
    for _ in range(RANDOM_ASSIGNMENTS):
        towers: dict[str, int] = {}
        offset = 0
        for answer in answers:
            bounds, num_towers, labels = answer.part.bounds, answer.part.num_towers, answer.labels.copy()
            for weight in np.unique(bounds.weights):
                alike = np.flatnonzero(bounds.weights == weight)
                labels[alike] = labels[rng.permutation(alike)]
            if bounds.violation(labels, num_towers):
                nothing = Costs(pairs=np.zeros((len(labels), len(labels))), per_feature=False)
                labels = local_search(nothing, labels, num_towers=num_towers, bounds=bounds)
            if bounds.violation(labels, num_towers):
                break
            towers |= answer.by_feature(labels + offset)
            offset += num_towers
        else:
            yield towers


def _broken_limits(labels: Labels, num_towers: int, bounds: Bounds) -> str:
    """Returns the end of a message: which limits the closest assignment breaks, and what to do."""
    loads = bounds.tower_loads(labels, num_towers)
    broken = []
    for name, row, lower, upper in zip(("features", "work", "bytes"), loads, bounds.lower, bounds.upper, strict=True):
        if row.max() > upper:
            broken.append(f"a tower with {_amount(row.max())} {name} (limit {_amount(upper)})")
        if row.min() < lower:
            broken.append(f"a tower with {_amount(row.min())} {name} (at least {_amount(lower)} are required)")
    if bounds.apart is not None and (bounds.apart & (labels[:, None] == labels[None, :])).any():
        broken.append("a tower with features that must be apart")
    return (
        f"found no assignment of the features to {num_towers} towers within all limits. The closest has "
        f"{' and '.join(broken)}. Raise balance_ratio or the limits (max_work_ratio, max_tower_bytes), drop a "
        "rule, or change the number of towers."
    )


def _amount(value: float) -> str:
    """Formats a load: as an integer from 1,000 on, else with four digits, so that it differs from its limit."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _points(answers: Sequence[_Answer], affinity: FeatureAffinity) -> NDArray[np.float64]:
    """Returns the [F, 2] points; parts, which were embedded separately, lie side by side along the first axis."""
    position = {name: i for i, name in enumerate(affinity.features)}
    points = np.zeros((affinity.num_features, 2))
    edge = 0.0
    for number, answer in enumerate(answers):
        placed = answer.points.copy()
        if number:
            placed[:, 0] += edge - placed[:, 0].min()
        edge = float(placed[:, 0].max()) + 0.2 * float(np.ptp(placed[:, 0]) or 1.0)
        for names, point in zip(answer.part.blocks.names, placed, strict=True):
            points[[position[name] for name in names]] = point
    return points


def _notes(affinity: FeatureAffinity) -> list[str]:
    """Returns a note if all pairs of features have the same value; else nothing."""
    pairs = affinity.significant()[np.triu_indices(affinity.num_features, k=1)]
    if len(pairs) < 3 or np.ptp(pairs) >= 1e-6 or affinity.triples:
        return []
    what = "interaction beyond the measuring error" if affinity.is_interactions else "affinity"
    return [
        f"All pairs of features have the same {what}, {pairs[0]:.3g}, so the towers are balanced but otherwise "
        "arbitrary."
    ]
