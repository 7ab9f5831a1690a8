"""From groups of blocks to a `Partition`: names, loads, comparison, and what the user should know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmt.partitioner.affinity import FeatureAffinity
from dmt.partitioner.comparison import compare_towers
from dmt.partitioner.coordinates import Coordinates
from dmt.partitioner.grouping import Grouping
from dmt.partitioner.partition import Partition, TowerLoad
from dmt.partitioner.prepare import Part, Task
from dmt.plan import TowerFeatures, TowerPlan

__all__ = ["Answer", "assemble"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """The solution of one part."""

    part: Part
    found: Coordinates
    grouping: Grouping
    wanted: float
    """Sum of the squared wanted distances."""


def assemble(
    task: Task, answers: Sequence[Answer], *, strategy: str, seed: int, settings: Mapping[str, Any]
) -> Partition:
    """Puts the answers of all parts together.

    Args:
        task: what was to be solved.
        answers: one for each part, in order.
        strategy: that was solved for.
        seed: recorded in the plan.
        settings: further settings to record in ``plan.affinity``.
    """
    towers: list[TowerFeatures] = []
    loads: list[TowerLoad] = []
    for answer in answers:
        for label, tower in _towers(answer, task.affinity).items():
            named = TowerFeatures(tower.name or f"tower_{len(towers)}", tower.features)
            towers.append(named)
            loads.append(_load(answer, label, named, weighed=bool(task.specs)))
    plan = TowerPlan(
        towers=tuple(towers),
        strategy=strategy,
        seed=seed,
        tables=task.specs,
        column_splits=dict(task.splits),
    )
    categories = {name: a.part.category for a in answers for names in a.part.blocks.names for name in names}
    comparison = compare_towers(task.affinity, plan, seed=seed, categories=categories)
    stress = sum(answer.found.stress for answer in answers)
    wanted = sum(answer.wanted for answer in answers)
    normalized = float(np.sqrt(stress / wanted)) if wanted > 0 else 0.0
    num_refined = sum(answer.grouping.num_refined for answer in answers)
    notes = (*task.notes, *_notes(task.affinity), *_size_notes(answers))
    summary = (
        task.source.to_summary()
        | dict(settings)
        | {
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
    )
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


def _towers(answer: Answer, affinity: FeatureAffinity) -> dict[int, TowerFeatures]:
    """By label, in the order of their first feature in the affinity; named by their category, or not at all."""
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


def _points(answers: Sequence[Answer], affinity: FeatureAffinity) -> NDArray[np.float64]:
    """[F, n]; the parts were embedded apart and are laid side by side along the first axis."""
    position = {name: i for i, name in enumerate(affinity.features)}
    points = np.zeros((affinity.num_features, answers[0].found.points.shape[1]))
    edge = 0.0
    for number, answer in enumerate(answers):
        own = answer.found.points.copy()
        if number:
            own[:, 0] += edge - own[:, 0].min()
        edge = float(own[:, 0].max()) + 0.2 * float(np.ptp(own[:, 0]) or 1.0)
        for names, point in zip(answer.part.blocks.names, own, strict=True):
            points[[position[name] for name in names]] = point
    return points


def _load(answer: Answer, label: int, tower: TowerFeatures, *, weighed: bool) -> TowerLoad:
    """What the blocks of one tower take; their work and bytes are known where tables are."""
    part = answer.part
    _, work, num_bytes = part.blocks.loads[:, answer.grouping.labels == label].sum(axis=1).tolist()
    return TowerLoad(
        name=tower.name,
        num_features=len(tower.features),
        category=part.category,
        work=work if weighed else None,
        num_bytes=int(num_bytes) if weighed else None,
    )


def _notes(affinity: FeatureAffinity) -> list[str]:
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


def _size_notes(answers: Sequence[Answer]) -> list[str]:
    """Says where sizes could not be as even as was asked."""
    notes = []
    for answer in answers:
        asked = answer.part.asked
        if asked is not None:
            sizes = np.bincount(answer.grouping.labels, weights=answer.part.blocks.loads[0]).astype(int)
            notes.append(
                f"{answer.part.where}Towers have {sizes.min()} to {sizes.max()} features instead of {asked[0]} to "
                f"{asked[1]}, because features that share a table or must stay together are not parted."
            )
    return notes
