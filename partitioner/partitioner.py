"""`TowerPartitioner`: feature affinities in, balanced towers out (DMT paper, section 3.3)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dmt.errors import InputError, did_you_mean
from dmt.partitioner.affinity import FeatureAffinity
from dmt.partitioner.cluster import Grouping, group_blocks, group_by_sums
from dmt.partitioner.embed import Coordinates, distances, embed_distances
from dmt.partitioner.interactions import FeatureInteractions
from dmt.partitioner.partition import Partition, TowerContents, compare_towers
from dmt.partitioner.problem import Part, SplitColumns, Task, prepare
from dmt.partitioner.rules import PartitionRules
from dmt.partitioner.verdict import deviations_from_random, shares_inside
from dmt.plan.towers import TowerFeatures, TowerPlan

__all__ = ["Strategy", "TowerPartitioner"]

logger = logging.getLogger(__name__)

Strategy = Literal["coherent", "diverse", "both", "together", "apart"]
_OF_INTERACTIONS = ("together", "apart")


@dataclass(frozen=True, kw_only=True)
class TowerPartitioner:
    """Assigns features to balanced towers by how their trained embeddings relate (arXiv 2403.00877, section 3.3).

    Three steps: the affinity becomes distances (`distances`), the distances become points in a plane
    (`embed_distances`), and the points are grouped by constrained K-means, with every limit held (`group_blocks`). The
    answer does not depend on the order in which features are listed.

    Raises:
        InputError: an argument is out of range or the strategy unknown.

    Example:
        >>> close, far = 0.9, 0.1
        >>> matrix = [[1, far, close, far], [far, 1, far, close], [close, far, 1, far], [far, close, far, 1]]
        >>> affinity = FeatureAffinity(matrix=matrix, features=["ad", "user", "shop", "city"])
        >>> TowerPartitioner(num_towers=2).fit(affinity).to_lists()
        [['ad', 'shop'], ['user', 'city']]
    """

    num_towers: int
    """T."""
    strategy: Strategy = "coherent"
    """``"coherent"`` puts features together that resemble each other, ``"diverse"`` those that do not. ``"both"`` tries
    both and prefers the one that differs more from random towers; only training can tell which is better.
    ``"together"`` and ``"apart"`` go by `FeatureInteractions`: most interaction inside towers, for tower modules that
    keep it (cross layers), or least, for linear ones."""
    balance_ratio: float | None = 1.0
    """K of the paper: the largest tower may have this many times the features of the smallest (rounded down), but
    always ceil(F / T). None: towers may have any number of features, for instance to balance their work instead."""
    dims: int = 2
    """Dimensions of the space in which features are grouped (the paper uses 2)."""
    seed: int = 0
    """Seed of every random choice."""
    rules: PartitionRules = field(default_factory=PartitionRules)
    """Categories, features that must or must not share a tower, limits on work and memory."""
    split_columns: SplitColumns = "no"
    """Cutting of tables into column shards so that there is one for every tower: ``"largest"`` cuts the largest
    tables, and those larger than a tower may hold; ``"even"`` all tables alike (see `choose_splits`)."""
    refine: bool = True
    """Improve the towers on the distances themselves after the points have been grouped (see `group_blocks`); the paper
    does not."""

    def __post_init__(self) -> None:
        for name, lowest, highest in (("num_towers", 1, 2**20), ("dims", 1, 1000), ("seed", 0, 2**32 - 1)):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or not lowest <= value <= highest:
                raise InputError(
                    f"TowerPartitioner: {name}={value!r} must be a whole number of at least {lowest} and at "
                    f"most {highest}."
                )
            # Plans are JSON, which knows no numpy integers. A frozen dataclass sets its own cleaned fields this way.
            object.__setattr__(self, name, int(value))
        if not isinstance(self.rules, PartitionRules):
            raise InputError(f"TowerPartitioner: rules={self.rules!r} must be PartitionRules(...).")
        for name, choices in (("strategy", get_args(Strategy)), ("split_columns", get_args(SplitColumns))):
            value = getattr(self, name)
            if value not in choices:
                raise InputError(
                    f"TowerPartitioner: {name}={value!r} is unknown.{did_you_mean(str(value), choices)} "
                    f"Use one of {', '.join(map(repr, choices))}."
                )
        ratio = self.balance_ratio
        number = isinstance(ratio, int | float | np.number) and not isinstance(ratio, bool)
        if ratio is not None and not (number and 1.0 <= ratio <= 1e6):
            raise InputError(
                f"TowerPartitioner: balance_ratio={ratio!r} must be at least 1 and finite (at most 1e6); it is "
                "the size of the largest tower over that of the smallest. None leaves sizes free."
            )
        counts = self.rules.towers_per_category
        if counts and sum(counts.values()) != self.num_towers:
            raise InputError(
                f"TowerPartitioner: num_towers={self.num_towers}, but towers_per_category adds up to "
                f"{sum(counts.values())} ({dict(counts)}). Make them equal."
            )

    def fit(self, affinity: FeatureAffinity | FeatureInteractions, *, tables: Sequence[Any] = ()) -> TowerPlan:
        """Computes the towers: ``partition(...).plan``, whose notes are logged as warnings."""
        found = self.partition(affinity, tables=tables)
        for note in found.notes:
            logger.warning(note)
        return found.plan

    def partition(self, affinity: FeatureAffinity | FeatureInteractions, *, tables: Sequence[Any] = ()) -> Partition:
        """Computes the towers, and the numbers to judge them by.

        Args:
            affinity: of the F features to place; their interactions for the strategies ``together`` and ``apart``.
            tables: TorchRec ``EmbeddingBagConfig`` or `TableSpec` of the model, by default those the affinity was
                collected with; recorded in the plan. Limits on work and memory need them. The features of a shared
                table are kept together: they are one point, placed by their mean affinities.

        Returns:
            The partition. Its plan's towers are in the order of their first feature in ``affinity`` (category by
            category, where there are any), features inside a tower likewise. ``plan.affinity`` holds the numbers.

        Raises:
            InputError: more towers than features (or tables), tables whose features are not the affinity's, or rules
                and limits that contradict each other or that no assignment holds; the reason is given.
        """
        interactions = affinity if isinstance(affinity, FeatureInteractions) else None
        if (interactions is not None) != (self.strategy in _OF_INTERACTIONS):
            given, fitting = (
                ("affinity", ("coherent", "diverse")) if interactions is None else ("interactions", _OF_INTERACTIONS)
            )
            raise InputError(
                f"TowerPartitioner: strategy={self.strategy!r} does not go by Feature{given.capitalize()}; use one of "
                f"{', '.join(map(repr, fitting))}."
            )
        task = prepare(
            affinity.to_affinity() if isinstance(affinity, FeatureInteractions) else affinity,
            tables,
            num_towers=self.num_towers,
            balance_ratio=self.balance_ratio,
            rules=self.rules,
            split_columns=self.split_columns,
        )
        strategies = ["coherent", "diverse"] if self.strategy == "both" else [self.strategy]
        found = [self._solve(task, strategy) for strategy in strategies]
        if interactions is not None:
            return _with_interactions(found[0], interactions)
        # The first of equals, so coherent where neither says anything.
        best = max(found, key=_distinctness)
        return replace(best, alternatives=tuple(partition for partition in found if partition is not best))

    def _solve(self, task: Task, strategy: str) -> Partition:
        answers = []
        for part in task.parts:
            matrix = part.blocks.matrix(task.affinity)
            within: dict[str, Any] = {"num_towers": part.num_towers, "options": part.options, "seed": self.seed}
            try:
                if strategy in _OF_INTERACTIONS:
                    # Most or least interaction inside towers; no coordinates.
                    distance = np.zeros_like(matrix)
                    found = Coordinates(points=np.zeros((len(matrix), 0)), stress=0.0, normalized_stress=0.0)
                    grouped = group_by_sums(-matrix if strategy == "together" else matrix, **within)
                else:
                    distance = distances(matrix, strategy)
                    found = embed_distances(distance, dims=self.dims, seed=self.seed)
                    grouped = group_blocks(found.points, distance=distance, refine=self.refine, **within)
            except InputError as error:
                raise InputError(f"TowerPartitioner: {part.where}{error}") from error
            wanted = float(np.square(distance).sum()) / 2
            answers.append(_Answer(part=part, found=found, grouping=grouped, wanted=wanted))
        settings: dict[str, Any] = {"balance_ratio": self.balance_ratio}
        if strategy not in _OF_INTERACTIONS:
            settings |= {"dims": self.dims, "refine": self.refine}
        return _assemble(task, answers, strategy=strategy, seed=self.seed, settings=settings)


def _with_interactions(partition: Partition, interactions: FeatureInteractions) -> Partition:
    """Adds what was measured to the partition, and the share of it inside towers to the plan."""
    notes = (*interactions.notes, *partition.notes)
    share, strided, _ = shares_inside(partition) or (None, None, None)
    summary = dict(partition.plan.affinity) | {
        "measure": "interactions",
        "largest_gain": float(interactions.gains.max()),
        "loss": interactions.loss,
        "share_within": share,
        "share_within_strided": strided,
        "notes": list(notes),
    }
    for unused in ("stress", "normalized_stress", "num_refined"):
        del summary[unused]
    return replace(partition, interactions=interactions, notes=notes, plan=replace(partition.plan, affinity=summary))


def _distinctness(partition: Partition) -> float:
    """Standard deviations by which the towers' affinity differs from that of random ones, in the strategy's sense."""
    deviations = deviations_from_random(partition.comparison) or 0.0
    return deviations if partition.plan.strategy == "coherent" else -deviations


@dataclass(frozen=True, kw_only=True, eq=False)
class _Answer:
    """Solution of one part."""

    part: Part
    found: Coordinates
    grouping: Grouping
    wanted: float
    """Sum of the squared wanted distances."""

    @property
    def notes(self) -> list[str]:
        """A note if the sizes could not be as even as requested."""
        if self.part.asked is None:
            return []
        sizes = np.bincount(self.grouping.labels, weights=self.part.blocks.loads[0]).astype(int)
        return [
            f"{self.part.where}Towers have {sizes.min()} to {sizes.max()} features instead of {self.part.asked[0]} to "
            f"{self.part.asked[1]}, because features that share a table or must stay together are not parted."
        ]


def _assemble(
    task: Task, answers: Sequence[_Answer], *, strategy: str, seed: int, settings: Mapping[str, Any]
) -> Partition:
    """Puts the answers of all parts together; ``seed`` and ``settings`` are recorded in the plan."""
    towers: list[TowerFeatures] = []
    loads: list[TowerContents] = []
    for answer in answers:
        for label, tower in _towers(answer, task.affinity).items():
            named = TowerFeatures(tower.name or f"tower_{len(towers)}", tower.features)
            towers.append(named)
            _, work, num_bytes = answer.part.blocks.loads[:, answer.grouping.labels == label].sum(axis=1).tolist()
            loads.append(
                TowerContents(
                    name=named.name,
                    num_features=len(named.features),
                    category=answer.part.category,
                    work=work if task.specs else None,
                    num_bytes=int(num_bytes) if task.specs else None,
                )
            )
    splits = dict(task.splits)
    plan = TowerPlan(towers=tuple(towers), strategy=strategy, seed=seed, tables=task.specs, column_splits=splits)
    categories = {name: a.part.category for a in answers for names in a.part.blocks.names for name in names}
    comparison = compare_towers(task.affinity, plan, seed=seed, categories=categories)
    stress = sum(answer.found.stress for answer in answers)
    wanted = sum(answer.wanted for answer in answers)
    normalized = float(np.sqrt(stress / wanted)) if wanted > 0 else 0.0
    num_refined = sum(answer.grouping.num_refined for answer in answers)
    notes = (*task.notes, *_notes(task.affinity, strategy), *(note for answer in answers for note in answer.notes))
    summary = {
        **task.source.to_summary(),
        **settings,
        "within_towers": comparison.within,
        "between_towers": comparison.between,
        "within_strided_towers": comparison.within_strided,
        "within_random_towers": comparison.within_random,
        "std_random_towers": comparison.std_random,
        "stress": stress,
        "normalized_stress": normalized,
        "num_refined": num_refined,
        "notes": list(notes),
    }
    return Partition(
        plan=replace(plan, affinity=summary),
        affinity=task.affinity,
        points=_points(answers, task.affinity),
        stress=stress,
        normalized_stress=normalized,
        loads=tuple(loads),
        limits=task.limits,
        comparison=comparison,
        num_refined=num_refined,
        notes=notes,
    )


def _towers(answer: _Answer, affinity: FeatureAffinity) -> dict[int, TowerFeatures]:
    """Towers by label, in the order of their first feature in the affinity; named by their category, if any."""
    blocks, labels = answer.part.blocks, answer.grouping.labels.tolist()
    tower_of = {name: tower for names, tower in zip(blocks.names, labels, strict=True) for name in names}
    members: dict[int, list[str]] = {}
    for name in affinity.features:
        if name in tower_of:
            members.setdefault(tower_of[name], []).append(name)
    category = answer.part.category
    return {
        label: TowerFeatures(f"{category}_{i}" if category else "", tuple(names))
        for i, (label, names) in enumerate(members.items())
    }


def _points(answers: Sequence[_Answer], affinity: FeatureAffinity) -> NDArray[np.float64]:
    """[F, n] points; the parts were embedded separately and are laid side by side along the first axis."""
    position = {name: i for i, name in enumerate(affinity.features)}
    points = np.zeros((affinity.num_features, answers[0].found.points.shape[1]))
    edge = 0.0
    for number, answer in enumerate(answers):
        own = answer.found.points.copy()
        if number and own.size:
            own[:, 0] += edge - own[:, 0].min()
        edge = float(own[:, 0].max()) + 0.2 * float(np.ptp(own[:, 0]) or 1.0) if own.size else 0.0
        for names, point in zip(answer.part.blocks.names, own, strict=True):
            points[[position[name] for name in names]] = point
    return points


def _notes(affinity: FeatureAffinity, strategy: str) -> list[str]:
    """Notes on affinities that do not say which features belong together."""
    if strategy in _OF_INTERACTIONS:
        if affinity.matrix.any():
            return []
        return [
            "No pair of features tells more about the label than each alone: the towers are balanced and otherwise "
            "arbitrary. More rows may show weak interactions."
        ]
    if affinity.num_features < 3:
        return []
    pairs = affinity.matrix[np.triu_indices(affinity.num_features, k=1)]
    if np.ptp(pairs) < 1e-6:
        return [
            f"All pairs of features have the same affinity, {pairs[0]:.3g}: it does not say which belong together. "
            "The towers are balanced and otherwise arbitrary. Are the embeddings trained?"
        ]
    notes = []
    # Row sums without the diagonal.
    alone = np.flatnonzero(affinity.matrix.sum(axis=1) - np.diag(affinity.matrix) <= 1e-9)
    if len(alone):
        shown = ", ".join(repr(affinity.features[i]) for i in alone[:5]) + (" ..." if len(alone) > 5 else "")
        notes.append(
            f"{len(alone)} of {affinity.num_features} features have affinity 0 with every other ({shown}): they are "
            "absent from the sample or untrained, and placed where there is room."
        )
    return notes
