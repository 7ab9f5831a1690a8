"""Points into groups within limits: constrained K-means, then local search, then the distances themselves.

The package ``k-means-constrained`` knows bounds on the number of points of a group and nothing else; all other limits
are held by the local search of `dmt.partitioner.assignment`, which starts from the package's answer.

Legend: F points, P blocks (features that stay together), T towers, n dims.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from dmt.errors import InputError
from dmt.partitioner.assignment import (
    RESOURCES,
    Bounds,
    Floats,
    Infeasible,
    Labels,
    amount,
    greedy_start,
    local_search,
    objective_of,
    perturbed_search,
    solve_exactly,
    sum_inside,
)

__all__ = [
    "Grouping",
    "evenly_picked",
    "fitting_sizes",
    "group_blocks",
    "group_by_sums",
    "search_clusters",
    "size_bounds",
    "squared_distances",
]

Pair = tuple[int, int]
Option = TypeVar("Option")

# The package rounds distances to 1/1000 before it solves the assignment: points are scaled to this extent first.
EXTENT = 1000.0
# Starts become fewer as points times groups grow: at 4,000 x 256 one takes several seconds.
START_BUDGET, FEWEST_STARTS = 500_000, 3
NUM_STARTS, NUM_PERTURBATIONS, FEW_PERTURBATIONS = 60, 40, 10
# Starts of a search without points become fewer as its prices, blocks times (blocks + towers), grow.
SUM_STARTS, PRICE_BUDGET = 40, 20_000_000
# Sets of limits for which an exact search, of up to 20 seconds, is made.
MOST_EXACT = 6


@dataclass(frozen=True, kw_only=True, eq=False)
class Grouping:
    """Towers found by `group_blocks`."""

    labels: Labels
    """[P] tower of each block."""
    num_refined: int
    """Features that the refinement left in another tower than the points had put them in."""


def group_blocks(
    points: Floats,
    *,
    distance: Floats,
    num_towers: int,
    options: Sequence[Bounds],
    seed: int,
    refine: bool = True,
) -> Grouping:
    """Groups blocks into towers that hold every limit: constrained K-means on the points (`search_clusters`).

    With ``refine`` a local search continues on the squares of the wanted distances: the same objective without the
    error of squeezing them into few dimensions. The paper ends with the points.

    Args:
        points: [P, n] coordinates of the blocks.
        distance: [P, P] wanted distances of the blocks.
        num_towers: T, at most P.
        options: sets of limits of which any one must be held. At most four, evenly spaced, are searched, and that with
            the best objective wins; the others are tried if none of these can be held.
        seed: of the starts.
        refine: continue the search on ``distance``.

    Raises:
        InputError: no grouping holds the limits, or none was found; says which limit the closest one breaks.
    """
    squared = squared_distances(points)
    wanted = np.square(distance) if refine else squared
    searched = evenly_picked(options)
    # The effort is shared among them.
    search = partial(search_clusters, num_clusters=num_towers, seed=seed, num_starts=NUM_STARTS // len(searched))
    found = [(search(points, squared, bounds=bounds), bounds) for bounds in searched]
    held = [(labels, bounds) for labels, bounds in found if bounds.violation(labels, num_towers) == 0]
    if not held:
        held = [_rescued(squared, found[0][0], num_towers, options)]
    return _refined(held, wanted, num_towers, refine=refine, seed=seed)


def group_by_sums(costs: Floats, *, num_towers: int, options: Sequence[Bounds], seed: int) -> Grouping:
    """Groups blocks into towers within limits so that the costs inside towers add up to least (`sum_inside`).

    Moves and swaps from 40 random starts, fewer for thousands of blocks, from the order of a hierarchical clustering,
    and from perturbations of the best answer. ``costs`` are [P, P] of any sign, for each pair of features of two
    blocks; `group_blocks` describes the other arguments and the error.
    """
    costs = costs.copy()
    np.fill_diagonal(costs, 0.0)
    rng = np.random.default_rng(seed)
    searched = evenly_picked(options)
    count = max(2, min(SUM_STARTS, PRICE_BUDGET // (len(costs) * (len(costs) + num_towers))) // len(searched))
    found: list[tuple[float, float, Labels, Bounds]] = []
    neighbours = _neighbours(costs) * num_towers // len(costs)
    for bounds in searched:
        even = greedy_start(bounds, num_towers)
        for start in [*(rng.permutation(even) for _ in range(count)), neighbours]:
            labels = local_search(costs, start, num_towers=num_towers, bounds=bounds, per_feature=False)
            found.append(
                (bounds.violation(labels, num_towers), sum_inside(costs, bounds.weights, labels), labels, bounds)
            )
    violation, _, best, bounds = min(found, key=lambda one: one[:2])
    if violation:
        best, bounds = _rescued(costs - costs.min(), best, num_towers, options)
    search = partial(perturbed_search, max_perturbations=NUM_PERTURBATIONS, per_feature=False)
    return Grouping(labels=search(costs, best, num_towers=num_towers, bounds=bounds, seed=seed), num_refined=0)


def _neighbours(costs: Floats) -> Labels:
    """[P] places of the blocks in an order in which those of low cost are near each other."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    if len(costs) < 2:
        return np.zeros(len(costs), dtype=np.int64)
    distance = costs - costs.min()
    np.fill_diagonal(distance, 0.0)
    return np.argsort(leaves_list(linkage(squareform(distance, checks=False), method="average"))).astype(np.int64)


def _rescued(squared: Floats, closest: Labels, num_towers: int, options: Sequence[Bounds]) -> tuple[Labels, Bounds]:
    """Fallback: starts from a load-balanced assignment, else solves exactly; `InputError` if both fail."""
    for bounds in options:
        # Limits once held are never given up: a start that fits ends with towers that fit.
        labels = local_search(squared, greedy_start(bounds, num_towers), num_towers=num_towers, bounds=bounds)
        if bounds.violation(labels, num_towers) == 0:
            return labels, bounds
    member = np.zeros((num_towers, len(closest)))
    member[closest, np.arange(len(closest))] = options[0].weights
    cost = options[0].weights[:, None] * (member @ squared / member.sum(axis=1, keepdims=True)).T
    proofs = []
    widest = _widest(options)
    for bounds in widest[:MOST_EXACT]:
        try:
            return local_search(squared, solve_exactly(cost, bounds), num_towers=num_towers, bounds=bounds), bounds
        except Infeasible as error:
            proofs.append(error.proven)
    # Infeasible only if proven for every set of limits.
    proven = len(widest) <= MOST_EXACT and all(proofs)
    reason = Infeasible(num_towers, proven=proven)
    raise InputError(f"{reason} {_broken_limits(closest, num_towers, options[0])}") from reason


def _widest(options: Sequence[Bounds]) -> list[Bounds]:
    """Drops sets of limits that lie within another: if the wider one cannot be held, they cannot."""
    sizes = [(float(bounds.lower[0]), float(bounds.upper[0])) for bounds in options]
    return [
        bounds
        for bounds, (least, most) in zip(options, sizes, strict=True)
        if not any(other != (least, most) and other[0] <= least and other[1] >= most for other in sizes)
    ]


def _refined(
    held: Sequence[tuple[Labels, Bounds]], wanted: Floats, num_towers: int, *, refine: bool, seed: int
) -> Grouping:
    """Picks the best grouping by the wanted distances; with ``refine`` each is searched further there."""

    def improved(labels: Labels, bounds: Bounds, max_perturbations: int) -> Labels:
        if not refine:
            return labels
        return perturbed_search(
            wanted, labels, num_towers=num_towers, bounds=bounds, seed=seed, max_perturbations=max_perturbations
        )

    # Few perturbations tell which limits serve best if there are several.
    tried = [improved(labels, bounds, FEW_PERTURBATIONS if len(held) > 1 else 0) for labels, bounds in held]
    values = [objective_of(wanted, held[0][1].weights, labels) for labels in tried]
    # Better by more than rounding, so that ties fall the same way everywhere.
    best = next(i for i, value in enumerate(values) if value <= min(values) * (1.0 + 1e-9))
    labels, bounds = held[best]
    refined = improved(tried[best], bounds, NUM_PERTURBATIONS)
    return Grouping(labels=refined, num_refined=_num_moved(labels, refined, bounds.weights))


def _broken_limits(labels: Labels, num_towers: int, bounds: Bounds) -> str:
    """Names the limits that the closest grouping breaks, and what to do."""
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
    """Counts features whose tower changed, matching each new tower with the old one it shares most features with."""
    from scipy.optimize import linear_sum_assignment

    size = int(max(before.max(), after.max())) + 1
    shared = np.zeros((size, size))
    np.add.at(shared, (before, after), weights)
    kept = shared[linear_sum_assignment(-shared)].sum()
    return round(float(weights.sum() - kept))


def search_clusters(
    points: Floats,
    squared: Floats,
    *,
    num_clusters: int,
    bounds: Bounds,
    seed: int,
    num_starts: int = NUM_STARTS,
) -> Labels:
    """Searches for the best grouping within the bounds; the answer breaks them only if none that holds them is found.

    The method is that of Bradley, Bennett and Demiriz (2000), which the DMT paper (section 3.3) calls for: K-means
    whose assignment step is a minimum-cost flow. It starts from the centres of a hierarchical clustering, from random
    centres (a third of the runs), and then from the perturbed centres of the best grouping so far. The package's flow
    minimises distances, not their squares, and knows sizes only, so `local_search` improves each answer.

    ``points`` are [P, n] coordinates of blocks, ``squared`` [P, P] their squared distances; at most ``num_starts`` runs
    are made, fewer where P x T is large.
    """
    num_points = len(points)
    assert 1 <= num_clusters <= num_points, f"TowerPartitioner checks T={num_clusters} against {num_points} points"
    if num_clusters in (1, num_points):
        return np.arange(num_points, dtype=np.int64) % num_clusters
    # Imported here: OR-tools, which solves the flow, takes longer to load than all the rest of this package.
    from k_means_constrained import KMeansConstrained

    extent = float(np.ptp(points, axis=0).max())
    scaled = points * (EXTENT / extent) if extent > 0 else points
    # The package counts points; if blocks have several features its answer is only a start.
    sizes = num_points // num_clusters, -(-num_points // num_clusters)
    if (bounds.weights == 1).all():
        sizes = int(bounds.lower[0]), int(min(bounds.upper[0], num_points))

    def flow(centres: Floats | str, seed: int = 0) -> Labels:
        solver = KMeansConstrained(
            num_clusters, size_min=sizes[0], size_max=sizes[1], init=centres, n_init=1, random_state=seed
        )
        return solver.fit(scaled).labels_.astype(np.int64)

    rng = np.random.default_rng(seed)
    count = min(num_starts, max(FEWEST_STARTS, START_BUDGET // (num_points * num_clusters)))
    best, least = flow(_ward_centres(scaled, num_clusters)), (np.inf, np.inf)
    for number in range(count):
        if number == 0:
            start = best
        elif number <= count // 3:
            start = flow("k-means++", seed=(seed + 1_000_003 * number) % 2**32)
        else:
            start = flow(_perturbed_centres(scaled, best, num_clusters, rng))
        labels = local_search(squared, start, num_towers=num_clusters, bounds=bounds)
        rank = bounds.violation(labels, num_clusters), objective_of(squared, bounds.weights, labels)
        # Better by more than rounding, so that ties fall the same way everywhere.
        if rank[0] < least[0] or (rank[0] == least[0] and rank[1] < least[1] * (1.0 - 1e-9)):
            best, least = labels, rank
    return best


def _perturbed_centres(points: Floats, labels: Labels, num_clusters: int, rng: np.random.Generator) -> Floats:
    """[T, n] the centres of a grouping, all moved a little, or one moved to a random point."""
    counts = np.bincount(labels, minlength=num_clusters)[:, None]
    centres = (
        np.stack([np.bincount(labels, weights=axis, minlength=num_clusters) for axis in points.T], axis=1) / counts
    )
    if rng.random() < 0.25:
        centres[rng.integers(num_clusters)] = points[rng.integers(len(points))]
        return centres
    # Of the order of the points' own distance from their centre.
    radius = np.sqrt(np.square(points - centres[labels]).sum(axis=1).mean())
    return centres + rng.normal(size=centres.shape) * radius * rng.uniform(0.1, 0.8)


def squared_distances(points: Floats) -> Floats:
    """[F, F] squared Euclidean distances of points [F, n]."""
    from scipy.spatial.distance import cdist

    return cdist(points, points, "sqeuclidean")


def _ward_centres(points: Floats, num_clusters: int) -> Floats:
    """[T, n] means of the groups of Ward's hierarchical clustering, which finds clear groups whatever their sizes."""
    from scipy.cluster.hierarchy import fcluster, linkage

    groups = fcluster(linkage(points, method="ward"), num_clusters, criterion="maxclust")
    centres = [points[groups == group].mean(axis=0) for group in np.unique(groups)]
    # Where points coincide there are fewer groups than asked for.
    centres += [points[i] for i in range(num_clusters - len(centres))]
    return np.array(centres)


def size_bounds(num_points: int, num_clusters: int, balance_ratio: float) -> list[Pair]:
    """Lists the pairs (smallest, largest) that keep every group at most ``balance_ratio`` times the smallest.

    The first pair is that with the largest smallest group, floor(F / T); its largest is never below ceil(F / T).

    Example:
        >>> size_bounds(26, 8, 1.0), size_bounds(26, 8, 2.0), size_bounds(24, 8, 1.0)
        ([(3, 4)], [(3, 6), (2, 4)], [(3, 3)])
    """
    smallest, needed = num_points // num_clusters, -(-num_points // num_clusters)
    # The addend keeps 1.15 * 100 from falling to 114.
    pairs = [(least, int(balance_ratio * least + 1e-9)) for least in range(smallest, 0, -1)]
    allowed = [(least, min(num_points, most)) for least, most in pairs if most >= needed]
    if not allowed or allowed[0][0] != smallest:
        allowed.insert(0, (smallest, needed))
    return allowed


def evenly_picked(options: Sequence[Option], count: int = 4) -> list[Option]:
    """Picks at most ``count`` options, evenly spaced, with the first and the last."""
    return [options[i] for i in np.unique(np.linspace(0, len(options) - 1, count).round().astype(int))]


def fitting_sizes(weights: Floats, num_towers: int, pairs: Sequence[Pair]) -> tuple[list[Pair], int]:
    """Loosens the pairs just so far that blocks, of [P] ``weights`` features, can be dealt out within one of them.

    First the largest group is allowed more, then the smallest is kept as large as possible. A local search decides if
    blocks fit, so the pairs may be looser than a perfect packing needs.

    Returns:
        The pairs, and by how much the largest grew; 0 if all blocks are single features.
    """
    if (weights == 1).all() or num_towers > len(weights):
        return list(pairs), 0

    def loosened(more: int, less: int) -> list[Pair]:
        return [(max(1, smallest - less), largest + more) for smallest, largest in pairs]

    def fits(more: int, less: int) -> bool:
        return any(_fit(weights, num_towers, pair) for pair in loosened(more, less))

    most = int(weights.max())
    # More room never hurts, so halving finds the least that is enough.
    more = bisect_left(range(most), True, key=lambda more: fits(more, most))
    less = bisect_left(range(most), True, key=lambda less: fits(more, less))
    return loosened(more, less), more


def _fit(weights: Floats, num_towers: int, pair: Pair) -> bool:
    bounds = Bounds(loads=weights[None, :], lower=np.array([float(pair[0])]), upper=np.array([float(pair[1])]))
    nowhere = np.zeros((len(weights), len(weights)))
    labels = local_search(nowhere, greedy_start(bounds, num_towers), num_towers=num_towers, bounds=bounds)
    return bounds.violation(labels, num_towers) == 0
