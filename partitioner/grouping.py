"""Blocks into towers: constrained K-means on their points, refined on the distances themselves, every limit held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dmt.errors import InputError
from dmt.partitioner.assignment import Bounds, Floats, Labels, improve, improve_repeatedly, objective_of, spread
from dmt.partitioner.clustering import search_clusters, squared_distances
from dmt.partitioner.feasibility import RESOURCES, Infeasible, amount, solve_exactly

__all__ = ["Grouping", "group_blocks"]

NUM_STARTS, NUM_SHAKES, FEW_SHAKES = 60, 40, 10
# Sets of limits for which an exact search, of up to 20 seconds, is made.
MOST_EXACT = 6


@dataclass(frozen=True, kw_only=True, eq=False)
class Grouping:
    """Found by `group_blocks`."""

    labels: Labels
    """[P] the tower of each block."""
    num_refined: int
    """Features that the refinement left in another tower than the points had put them in."""


def group_blocks(
    points: Floats,
    *,
    distance: Floats,
    num_towers: int,
    options: Sequence[Bounds],
    spare: Sequence[Bounds] = (),
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
        options: sets of limits of which any one must be held; that with the best objective wins.
        spare: further sets, tried where none of the options can be held.
        seed: of the starts.
        refine: improve on ``distance`` too.
        progress: called with the share of the work done.

    Raises:
        InputError: no grouping holds the limits, or none was found; says which limit the closest one breaks.
    """
    squared = squared_distances(points)
    wanted = np.square(distance) if refine else squared
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
    held = [
        (labels, bounds) for labels, bounds in zip(found, options, strict=True) if _holds(labels, bounds, num_towers)
    ]
    if not held:
        held = [_rescued(squared, found[0], num_towers, [*options, *spare])]
    return _refined(held, wanted, num_towers, refine=refine, seed=seed)


def _holds(labels: Labels, bounds: Bounds, num_towers: int) -> bool:
    return bounds.violation(labels, num_towers) == 0


def _rescued(squared: Floats, closest: Labels, num_towers: int, options: Sequence[Bounds]) -> tuple[Labels, Bounds]:
    """A grouping that begins with towers of equal load, or with an exact search; `InputError` when there is none."""
    for bounds in options:
        # Held limits are never given up: a start that fits ends with towers that fit.
        labels = improve(squared, spread(bounds, num_towers), num_towers, bounds)
        if _holds(labels, bounds, num_towers):
            return labels, bounds
    member = np.zeros((num_towers, len(closest)))
    member[closest, np.arange(len(closest))] = options[0].weights
    cost = options[0].weights[:, None] * (member @ squared / member.sum(axis=1, keepdims=True)).T
    reasons: list[Infeasible] = []
    widest = _widest(options)
    for bounds in widest[:MOST_EXACT]:
        try:
            return improve(squared, solve_exactly(cost, bounds), num_towers, bounds), bounds
        except Infeasible as error:
            reasons.append(error)
    # There is none only if that is so for every set of limits; the one not proven speaks for all.
    reason = next((error for error in reasons if not error.proven), reasons[0])
    text = str(reason)
    if len(widest) > MOST_EXACT and reason.proven:
        text = f"No assignment of the features to {num_towers} towers within all limits was found."
    raise InputError(f"{text} {_worst(closest, num_towers, options[0])}") from reason


def _widest(options: Sequence[Bounds]) -> list[Bounds]:
    """The sets of limits without those that lie within another: what cannot be held there cannot be held in them."""
    sizes = [(float(bounds.lower[0]), float(bounds.upper[0])) for bounds in options]
    return [
        bounds
        for bounds, (least, most) in zip(options, sizes, strict=True)
        if not any(other != (least, most) and other[0] <= least and other[1] >= most for other in sizes)
    ]


def _refined(
    held: Sequence[tuple[Labels, Bounds]], wanted: Floats, num_towers: int, *, refine: bool, seed: int
) -> Grouping:
    """The best of the groupings on the wanted distances; if so asked, each is improved there, and the best most."""

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
    return Grouping(labels=refined, num_refined=_num_moved(labels, refined, bounds.weights))


def _worst(labels: Labels, num_towers: int, bounds: Bounds) -> str:
    """Says what the closest grouping found breaks, and what to do."""
    loads = bounds.tower_loads(labels, num_towers)
    broken = []
    for name, row, lower, upper in zip(RESOURCES, loads, bounds.lower, bounds.upper, strict=True):
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
