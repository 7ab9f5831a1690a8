"""Blocks into towers: constrained K-means on their points, refined on the distances themselves, every limit held."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.partitioner.assignment import Bounds, improve, improve_repeatedly, objective_of, spread
from dmt.partitioner.clustering import search_clusters, squared_distances
from dmt.partitioner.feasibility import Infeasible, amount, solve_exactly

__all__ = ["Grouping", "group_blocks"]

NUM_STARTS, NUM_SHAKES, FEW_SHAKES = 60, 30, 5

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Grouping:
    """Found by `group_blocks`."""

    labels: Labels
    """[P] the tower of each block."""
    num_refined: int
    """Features that the refinement left in another tower than the points had put them in."""
    level: int = 0
    """Which level of limits is held; 0 is the strictest."""


def group_blocks(
    points: Floats,
    *,
    distance: Floats,
    num_towers: int,
    levels: Sequence[Sequence[Bounds]],
    seed: int,
    refine: bool = True,
    where: str = "",
    progress: Callable[[float], None] | None = None,
) -> Grouping:
    """The best grouping whose towers hold every limit.

    Each grouping of the points by constrained K-means (`search_clusters`) is improved within the limits on the squared
    distances of the points, and the best is kept. With ``refine`` it is then improved on the squares of the wanted
    distances: the same objective without the error of squeezing them into few dimensions, which leaves
    features on the wrong side of a group. (The paper ends with the points; ``refine=False`` does too.)

    Args:
        points: [P, n] coordinates of the blocks.
        distance: [P, P] the distances they stand for.
        num_towers: T, at most P.
        levels: limits, strictest first; in each level one or more sets, of which any one must be held, and that with
            the best objective wins.
        seed: of the starts.
        refine: improve on ``distance`` too.
        where: what is divided, for messages, such as ``"category 'user': "``.
        progress: called with the share of the work done.

    Raises:
        InputError: no grouping holds the limits, or none was found; says which limit the closest one breaks.
    """
    squared = squared_distances(points)
    wanted = np.square(distance) if refine else squared
    level = _first_level(squared, num_towers, levels)
    options = _tightened(squared, num_towers, levels, level)
    found = []
    for number, bounds in enumerate(options):

        def report(share: float, number: int = number) -> None:
            if progress is not None:
                progress((number + share) / len(options))

        # The effort is shared among the options.
        found.append(
            search_clusters(
                points,
                squared,
                num_clusters=num_towers,
                bounds=bounds,
                seed=seed,
                num_starts=NUM_STARTS // len(options),
                progress=report,
            )
        )
    held = _held(squared, num_towers, list(zip(found, options, strict=True)), where)
    return _refined(held, wanted, num_towers, level=level, refine=refine, seed=seed)


def _first_level(squared: Floats, num_towers: int, levels: Sequence[Sequence[Bounds]]) -> int:
    """The strictest level that a start by load alone ends in; the last if there is none."""

    def holds(options: Sequence[Bounds]) -> bool:
        return any(_by_load(squared, num_towers, bounds) is not None for bounds in options)

    # Each level allows more than the one before, so halving finds the first that holds.
    return bisect_left(levels[:-1], True, key=holds)


def _tightened(squared: Floats, num_towers: int, levels: Sequence[Sequence[Bounds]], level: int) -> Sequence[Bounds]:
    """The options of a level with the least of a tower as close as can be to that of the strictest level.

    One block of many features takes a large tower; the others need not be small for it.
    """
    steps = [
        [
            replace(bounds, lower=np.maximum(bounds.lower, strictest.lower - step))
            for bounds, strictest in zip(levels[level], levels[0], strict=True)
        ]
        for step in range(level + 1)
    ]
    return steps[_first_level(squared, num_towers, steps)]


def _by_load(squared: Floats, num_towers: int, bounds: Bounds) -> Labels | None:
    """A grouping within the limits that begins with towers of equal load; None if that ends outside of them."""
    # Held limits are never given up: a start that fits ends with towers that fit.
    labels = improve(squared, spread(bounds, num_towers), num_towers, bounds)
    return labels if bounds.violation(labels, num_towers) == 0 else None


def _held(
    squared: Floats, num_towers: int, found: Sequence[tuple[Labels, Bounds]], where: str
) -> list[tuple[Labels, Bounds]]:
    """The groupings that hold their limits; where none does, one from equal loads or from an exact search."""
    held = [(labels, bounds) for labels, bounds in found if bounds.violation(labels, num_towers) == 0]
    if held:
        return held
    by_load = [(_by_load(squared, num_towers, bounds), bounds) for _, bounds in found]
    held = [(labels, bounds) for labels, bounds in by_load if labels is not None]
    return held or [_exact_start(squared, found, num_towers, where)]


def _refined(
    held: Sequence[tuple[Labels, Bounds]], wanted: Floats, num_towers: int, *, level: int, refine: bool, seed: int
) -> Grouping:
    """The best of the groupings on the wanted distances; each is improved there first if so asked, and the best most."""

    def improved(labels: Labels, bounds: Bounds, max_shakes: int) -> Labels:
        if not refine:
            return labels
        return improve_repeatedly(
            wanted, labels, num_towers=num_towers, bounds=bounds, seed=seed, max_shakes=max_shakes
        )

    # Few shakes tell which limits serve best, where there are several.
    tried = [improved(labels, bounds, FEW_SHAKES if len(held) > 1 else 0) for labels, bounds in held]
    values = [objective_of(wanted, held[0][1].weights, labels) for labels in tried]
    # Better by more than rounding, so that ties fall the same way everywhere.
    best = next(i for i, value in enumerate(values) if value <= min(values) * (1.0 + 1e-9))
    labels, bounds = held[best]
    refined = improved(tried[best], bounds, NUM_SHAKES)
    return Grouping(labels=refined, num_refined=_num_moved(labels, refined, bounds.weights), level=level)


def _exact_start(
    squared: Floats, found: Sequence[tuple[Labels, Bounds]], num_towers: int, where: str
) -> tuple[Labels, Bounds]:
    """A grouping by integer programming, improved, for the first limits that have one; `InputError` when none has."""
    reasons = []
    for closest, bounds in found:
        member = np.zeros((num_towers, len(closest)))
        member[closest, np.arange(len(closest))] = bounds.weights
        cost = (member @ squared / member.sum(axis=1, keepdims=True)).T
        try:
            exact = solve_exactly(cost * bounds.weights[:, None], bounds)
        except Infeasible as error:
            reasons.append(error)
        else:
            return improve(squared, exact, num_towers, bounds), bounds
    # The first set of limits is that with the largest towers.
    closest, bounds = found[0]
    raise InputError(f"TowerPartitioner: {where}{reasons[0]} {_worst(closest, num_towers, bounds)}") from reasons[0]


def _worst(labels: Labels, num_towers: int, bounds: Bounds) -> str:
    """Says what the closest grouping found breaks, and what to do."""
    loads = bounds.tower_loads(labels, num_towers)
    broken = []
    for name, row, lower, upper in zip(("features", "work", "bytes"), loads, bounds.lower, bounds.upper, strict=True):
        if row.max() > upper:
            broken.append(f"a tower with {amount(row.max())} {name} where the limit is {amount(upper)}")
        if row.min() < lower:
            broken.append(f"a tower with {amount(row.min())} {name} where at least {amount(lower)} are due")
    if bounds.apart is not None and (bounds.apart & (labels[:, None] == labels[None, :])).any():
        broken.append("a tower with features that are to be apart")
    return (
        f"The closest found has {' and '.join(broken)}. Raise balance_ratio or the limits (max_work_ratio, "
        "max_bytes_ratio, max_tower_bytes), drop a rule, or change the number of towers."
    )


def _num_moved(before: Labels, after: Labels, weights: Floats) -> int:
    """Features whose tower changed, when each new tower is matched with the old one it has most features of."""
    from scipy.optimize import linear_sum_assignment

    size = int(max(before.max(), after.max())) + 1
    shared = np.zeros((size, size))
    np.add.at(shared, (before, after), weights)
    kept = shared[linear_sum_assignment(-shared)].sum()
    return round(float(weights.sum() - kept))
