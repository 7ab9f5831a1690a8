"""Blocks into towers: constrained K-means on their points, refined on the distances themselves, every limit held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.partitioner.assignment import Bounds, improve, improve_repeatedly, objective_of, spread
from dmt.partitioner.clustering import search_clusters, squared_distances
from dmt.partitioner.feasibility import Infeasible, solve_exactly

__all__ = ["Grouping", "group_blocks"]

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
        progress: called with the share of the work done.

    Raises:
        InputError: no grouping holds the limits, or none was found; says which limit the closest one breaks.
    """
    squared = squared_distances(points)
    wanted = np.square(distance) if refine else squared
    for level, options in enumerate(levels):
        found = []
        for number, bounds in enumerate(options):

            def report(share: float, number: int = number, count: int = len(options)) -> None:
                if progress is not None:
                    progress((number + share) / count)

            found.append((_best_start(points, squared, num_towers, bounds, seed=seed, progress=report), bounds))
        held = [(labels, bounds) for labels, bounds in found if bounds.violation(labels, num_towers) == 0]
        if not held and level == len(levels) - 1:
            # Where wider limits come next, an exact search is not worth its time. The first set allows towers most.
            held = [(_exact_start(squared, found[0][0], num_towers, options[0]), options[0])]
        if held:
            return _refined(held, wanted, num_towers, level=level, refine=refine, seed=seed)
    raise AssertionError("the exact search of the last level finds an answer or says why there is none")


def _refined(
    held: Sequence[tuple[Labels, Bounds]], wanted: Floats, num_towers: int, *, level: int, refine: bool, seed: int
) -> Grouping:
    best: Grouping | None = None
    least = np.inf
    for labels, bounds in held:
        refined = (
            improve_repeatedly(wanted, labels, num_towers=num_towers, bounds=bounds, seed=seed) if refine else labels
        )
        value = objective_of(wanted, bounds.weights, refined)
        # Better by more than rounding, so that ties fall the same way everywhere.
        if best is None or value < least * (1.0 - 1e-9):
            moved = _num_moved(labels, refined, bounds.weights)
            best, least = Grouping(labels=refined, num_refined=moved, level=level), value
    assert best is not None, "there is one held answer at least"
    return best


def _best_start(
    points: Floats,
    squared: Floats,
    num_towers: int,
    bounds: Bounds,
    *,
    seed: int,
    progress: Callable[[float], None],
) -> Labels:
    """The best grouping of the points; one that breaks limits only if none was found that holds them."""
    best = search_clusters(points, squared, num_clusters=num_towers, bounds=bounds, seed=seed, progress=progress)
    if bounds.violation(best, num_towers) > 0:
        # Held limits are never given up: a start that fits by load alone ends with towers that fit.
        fitting = improve(squared, spread(bounds, num_towers), num_towers, bounds)
        if bounds.violation(fitting, num_towers) == 0:
            return fitting
    return best


def _exact_start(squared: Floats, closest: Labels, num_towers: int, bounds: Bounds) -> Labels:
    """A grouping by integer programming, improved; raises `InputError` when there is none."""
    member = np.zeros((num_towers, len(closest)))
    member[closest, np.arange(len(closest))] = bounds.weights
    cost = (member @ squared / member.sum(axis=1, keepdims=True)).T
    try:
        found = solve_exactly(cost * bounds.weights[:, None], bounds)
    except Infeasible as error:
        raise InputError(f"TowerPartitioner: {error} {_worst(closest, num_towers, bounds)}") from error
    return improve(squared, found, num_towers, bounds)


def _worst(labels: Labels, num_towers: int, bounds: Bounds) -> str:
    """Says what the closest grouping found breaks, and what to do."""
    loads = bounds.tower_loads(labels, num_towers)
    broken = []
    for name, row, lower, upper in zip(("features", "work", "bytes"), loads, bounds.lower, bounds.upper, strict=True):
        if row.max() > upper:
            broken.append(f"a tower with {row.max():,.0f} {name} where the limit is {upper:,.0f}")
        if row.min() < lower:
            broken.append(f"a tower with {row.min():,.0f} {name} where at least {lower:,.0f} are due")
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
