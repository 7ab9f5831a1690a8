"""Points into groups of bounded size: constrained K-means, by the package ``k-means-constrained`` and local search."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Bounds",
    "Floats",
    "Labels",
    "constrained_clusters",
    "evenly_picked",
    "fitting_sizes",
    "improve",
    "improve_repeatedly",
    "in_order_of_occurrence",
    "objective_of",
    "search_clusters",
    "size_bounds",
    "spread",
    "squared_distances",
]

# The package rounds distances to 1/1000 before it solves the assignment: points are blown up to this extent first.
EXTENT = 1000.0
# Starts become fewer as points times groups grow: at 4,000 x 256 one takes several seconds.
START_BUDGET, FEWEST_STARTS = 500_000, 3


def constrained_clusters(
    points: Floats, num_clusters: int, *, balance_ratio: float = 1.0, seed: int = 0, num_starts: int = 60
) -> Labels:
    """Groups points around centres, with the sizes of groups within one of the pairs of `size_bounds`.

    The method is that of Bradley, Bennett and Demiriz (2000): K-means whose assignment step is a minimum-cost flow; the
    DMT paper (section 3.3) calls for it. See `search_clusters` for what is done beyond the package.

    Args:
        points: [F, n] coordinates.
        num_clusters: T, between 1 and F.
        balance_ratio: allowed ratio of the largest to the smallest group, at least 1.
        seed: of the starting centres.
        num_starts: runs from different centres for each pair of bounds; fewer are made where F x T is large.

    Returns:
        The group of each point, [F] int64, numbered by first occurrence.

    Example:
        >>> constrained_clusters(np.array([[0.0], [5.0], [0.1], [5.1]]), 2).tolist()
        [0, 1, 0, 1]
    """
    squared = squared_distances(points)
    ones = np.ones((1, len(points)))
    found = []
    for smallest, largest in evenly_picked(size_bounds(len(points), num_clusters, balance_ratio)):
        bounds = Bounds(loads=ones, lower=np.array([float(smallest)]), upper=np.array([float(largest)]))
        found.append(
            search_clusters(points, squared, num_clusters=num_clusters, bounds=bounds, seed=seed, num_starts=num_starts)
        )
    return in_order_of_occurrence(min(found, key=lambda labels: objective_of(squared, ones[0], labels)))


def search_clusters(
    points: Floats,
    squared: Floats,
    *,
    num_clusters: int,
    bounds: Bounds,
    seed: int,
    num_starts: int = 60,
    progress: Callable[[float], None] | None = None,
) -> Labels:
    """The best grouping found within the bounds; one that breaks them only if none was found that holds them.

    The package's runs start from the centres of a hierarchical clustering, from random centres (a third of the runs),
    and then from the centres of the best grouping so far, disturbed. Its flow minimises distances, not their squares,
    and knows sizes only, so each of its answers is then improved by moves and swaps (`improve`), and the one with the
    least sum of squared distances to the centres is kept.

    Args:
        points: [P, n] coordinates of blocks.
        squared: [P, P] their squared distances.
        num_clusters: T, between 1 and P.
        bounds: the limits.
        seed: of the random centres.
        num_starts: the most runs; fewer are made where P x T is large.
        progress: called with the share of runs made.

    Returns:
        [P] labels.
    """
    num_points = len(points)
    assert 1 <= num_clusters <= num_points, f"TowerPartitioner checks T={num_clusters} against {num_points} points"
    if num_clusters in (1, num_points):
        return np.arange(num_points, dtype=np.int64) % num_clusters
    flow = _Flow(points, num_clusters, bounds)
    rng = np.random.default_rng(seed)
    count = min(num_starts, max(FEWEST_STARTS, START_BUDGET // (num_points * num_clusters)))
    best, least = flow.run(_ward_centres(flow.points, num_clusters)), (np.inf, np.inf)
    for number in range(count):
        if number == 0:
            start = best
        elif number <= count // 3:
            start = flow.run("k-means++", seed=(seed + 1_000_003 * number) % 2**32)
        else:
            start = flow.run(_disturbed(flow.points, best, num_clusters, rng))
        labels = improve(squared, start, num_clusters, bounds)
        rank = bounds.violation(labels, num_clusters), objective_of(squared, bounds.weights, labels)
        # Better by more than rounding, so that ties fall the same way everywhere.
        if rank[0] < least[0] or (rank[0] == least[0] and rank[1] < least[1] * (1.0 - 1e-9)):
            best, least = labels, rank
        if progress is not None:
            progress((number + 1) / count)
    return best


class _Flow:
    """The package, with the sizes it is to keep and points at the scale it needs."""

    def __init__(self, points: Floats, num_clusters: int, bounds: Bounds) -> None:
        extent = float(np.ptp(points, axis=0).max())
        self.points = points * (EXTENT / extent) if extent > 0 else points
        count = len(points)
        self._num_clusters = num_clusters
        # It counts points; where blocks have several features its answer is only where the search begins.
        self._sizes = (count // num_clusters, -(-count // num_clusters))
        if (bounds.weights == 1).all():
            self._sizes = int(bounds.lower[0]), int(min(bounds.upper[0], count))

    def run(self, centres: Floats | str, seed: int = 0) -> Labels:
        """[P] labels of one run from these centres."""
        # Imported here: OR-tools, which solves the flow, takes longer to load than all the rest of this package.
        from k_means_constrained import KMeansConstrained

        solver = KMeansConstrained(
            self._num_clusters,
            size_min=self._sizes[0],
            size_max=self._sizes[1],
            init=centres,
            n_init=1,
            random_state=seed,
        )
        return solver.fit(self.points).labels_.astype(np.int64)


def _disturbed(points: Floats, labels: Labels, num_clusters: int, rng: np.random.Generator) -> Floats:
    """[T, n] the centres of a grouping, all moved a little, or one put where a random point is."""
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
    """[F, F] squared Euclidean distances of points [F, n].

    Example:
        >>> squared_distances(np.array([[0.0], [2.0]])).tolist()
        [[0.0, 4.0], [4.0, 0.0]]
    """
    from scipy.spatial.distance import cdist

    return cdist(points, points, "sqeuclidean")


def in_order_of_occurrence(labels: Labels) -> Labels:
    """The same groups, numbered by their first point.

    Example:
        >>> in_order_of_occurrence(np.array([2, 0, 2, 1])).tolist()
        [0, 1, 0, 2]
    """
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]


def _ward_centres(points: Floats, num_clusters: int) -> Floats:
    """[T, n] means of the groups of Ward's hierarchical clustering, which finds clear groups whatever their sizes."""
    from scipy.cluster.hierarchy import fcluster, linkage

    groups = fcluster(linkage(points, method="ward"), num_clusters, criterion="maxclust")
    centres = [points[groups == group].mean(axis=0) for group in np.unique(groups)]
    # Where points coincide there are fewer groups than asked for.
    centres += [points[i] for i in range(num_clusters - len(centres))]
    return np.array(centres)


MAX_SWEEPS = 50
# In shares of a resource's total. Loads are sums of floats: beyond a limit is what is so by more than rounding.
TOLERANCE = 1e-12
# Squared blocks searched in all shakes together: 30 shakes of 200 blocks, 7 of 500, none of 1,500.
SHAKE_BUDGET, SHAKEN_SHARE = 2_000_000, 0.3

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Bounds:
    """What every tower must hold."""

    loads: Floats
    """[R, P] what each block takes of each resource; row 0 is its number of features."""
    lower: Floats
    """[R] the least a tower must have."""
    upper: Floats
    """[R] the most a tower may have; infinite where there is no limit."""
    apart: NDArray[np.bool_] | None = None
    """[P, P] symmetric: which blocks must not share a tower; None where there are none."""

    @property
    def weights(self) -> Floats:
        """[P] features of each block: what it weighs in the objective."""
        return self.loads[0]

    @property
    def oversized(self) -> NDArray[np.bool_]:
        """[R, P] blocks that alone are beyond what a tower may have, by more than rounding."""
        scale = np.maximum(self.loads.sum(axis=1, keepdims=True), 1e-300)
        return (self.loads - self.upper[:, None]) / scale > TOLERANCE

    def tower_loads(self, labels: Labels, num_towers: int) -> Floats:
        """[R, T] sums over the blocks of each tower."""
        return np.stack([np.bincount(labels, weights=row, minlength=num_towers) for row in self.loads])

    def excess(self, tower_loads: Floats) -> Floats:
        """How far towers are outside their limits, [...] for loads [R, ...], in shares of each resource's total."""
        shape = (-1,) + (1,) * (tower_loads.ndim - 1)
        scale = np.maximum(self.loads.sum(axis=1), 1e-300).reshape(shape)
        over = (tower_loads - self.upper.reshape(shape)) / scale
        under = (self.lower.reshape(shape) - tower_loads) / scale
        outside = np.maximum(np.maximum(over, under), 0.0)
        return np.where(outside > TOLERANCE, outside, 0.0).sum(axis=0)

    def violation(self, labels: Labels, num_towers: int) -> float:
        """0.0 where every limit is held; otherwise the excess of all towers plus one for each pair to be parted."""
        total = float(self.excess(self.tower_loads(labels, num_towers)).sum())
        if self.apart is not None:
            total += float(np.count_nonzero(self.apart & (labels[:, None] == labels[None, :])) // 2)
        return total


def objective_of(squared: Floats, weights: Floats, labels: Labels) -> float:
    """The K-means objective, from distances alone: sum over towers of (sum over pairs of w_i w_j d_ij^2) / (sum of w).

    For points in a Euclidean space it equals the sum of squared distances of all features to their tower's centre.

    Args:
        squared: [P, P] squared distances.
        weights: [P] features of each block.
        labels: [P] tower of each block.

    Example:
        >>> squared = np.array([[0.0, 4.0], [4.0, 0.0]])
        >>> objective_of(squared, np.ones(2), np.array([0, 0]))  # Two points, each 1 from their centre.
        2.0
    """
    total = 0.0
    for tower in np.unique(labels):
        inside = np.flatnonzero(labels == tower)
        own = weights[inside]
        total += float(own @ squared[np.ix_(inside, inside)] @ own) / 2 / float(own.sum())
    return total


def improve(squared: Floats, labels: Labels, num_towers: int, bounds: Bounds) -> Labels:
    """Moves and swaps blocks while limits or the objective get better; no tower is emptied.

    Every block in turn makes the one move or swap that is best: first for the limits (a limit once held is never given
    up), then for `objective_of`. Ends when a whole sweep changes nothing. A sweep costs O(P (P + T)); memory is that of
    ``squared`` and [T, P] sums.

    Args:
        squared: [P, P] squared distances, of points or of the distance matrix itself.
        labels: [P] the tower of each block to start from.
        num_towers: T.
        bounds: the limits.

    Returns:
        [P] labels; `Bounds.violation` says whether all limits are held.

    Example:
        >>> squared = np.array([[0.0, 9.0, 1.0, 9.0], [9.0, 0.0, 9.0, 1.0], [1.0, 9.0, 0.0, 9.0], [9.0, 1.0, 9.0, 0.0]])
        >>> pairs = Bounds(loads=np.ones((1, 4)), lower=np.array([2.0]), upper=np.array([2.0]))
        >>> improve(squared, np.array([0, 0, 1, 1]), 2, pairs).tolist()
        [1, 0, 1, 0]
    """
    search = _Search(squared, labels, num_towers, bounds)
    for _ in range(MAX_SWEEPS):
        changes = sum(search.step(block) for block in range(len(labels)))
        if not changes:
            break
    return search.labels


def improve_repeatedly(
    squared: Floats, labels: Labels, *, num_towers: int, bounds: Bounds, seed: int, max_shakes: int = 30
) -> Labels:
    """`improve`, then shake and improve again: what is better by the objective, and holds the limits, stays.

    A shake deals part of the blocks out again at random. There are fewer shakes for larger problems, of which one
    search alone takes seconds.

    Args:
        squared: [P, P] squared distances.
        labels: [P] the tower of each block to start from.
        num_towers: T.
        bounds: the limits.
        seed: of the shakes.
        max_shakes: the most shakes.

    Returns:
        [P] labels.

    Example:
        >>> squared = np.square(np.subtract.outer(np.arange(6.0), np.arange(6.0)))
        >>> pairs = Bounds(loads=np.ones((1, 6)), lower=np.array([2.0]), upper=np.array([2.0]))
        >>> improve_repeatedly(squared, np.array([0, 1, 2, 0, 1, 2]), num_towers=3, bounds=pairs, seed=0).tolist()
        [1, 1, 0, 0, 2, 2]
    """
    rng = np.random.default_rng(seed)
    best = improve(squared, labels, num_towers, bounds)
    least = objective_of(squared, bounds.weights, best)
    num_blocks = len(labels)
    for _ in range(min(max_shakes, SHAKE_BUDGET // (num_blocks * (num_blocks + num_towers)))):
        picked = rng.permutation(num_blocks)[: max(2, round(SHAKEN_SHARE * num_blocks))]
        shaken = best.copy()
        shaken[picked] = rng.permutation(shaken[picked])
        shaken = improve(squared, shaken, num_towers, bounds)
        value = objective_of(squared, bounds.weights, shaken)
        if value < least * (1.0 - 1e-9) and bounds.violation(shaken, num_towers) == 0:
            best, least = shaken, value
    return best


def spread(bounds: Bounds, num_towers: int) -> Labels:
    """Blocks dealt out by load alone, largest first to the tower that stays fullest of room: a start that fits.

    No tower stays empty where there are as many blocks as towers.

    Example:
        >>> loads = np.array([[1.0, 1.0, 1.0], [5.0, 4.0, 9.0]])
        >>> spread(Bounds(loads=loads, lower=np.zeros(2), upper=np.full(2, np.inf)), 2).tolist()
        [1, 1, 0]
    """
    share = bounds.loads / np.maximum(bounds.loads.sum(axis=1, keepdims=True), 1e-300)
    limited = np.isfinite(bounds.upper)
    weight = share[limited].max(axis=0) if limited.any() else share.max(axis=0)
    labels = np.full(bounds.loads.shape[1], -1, dtype=np.int64)
    filled = np.zeros((len(share), num_towers))
    num_empty = num_towers
    for number, block in enumerate(np.argsort(-weight, kind="stable")):
        after = (filled + share[:, block : block + 1]).max(axis=0)
        if bounds.apart is not None:
            # A tower with a block to be parted from comes last.
            after[np.unique(labels[bounds.apart[block] & (labels >= 0)])] += 1e6
        if num_empty == len(labels) - number:
            # Only as many blocks are left as towers without any.
            after[filled[0] > 0] = np.inf
        labels[block] = tower = int(np.argmin(after))
        num_empty -= int(filled[0, tower] == 0)
        filled[:, tower] += share[:, block]
    return labels


class _Search:
    """The sums that make one move or swap an O(1) question, kept up to date."""

    def __init__(self, squared: Floats, labels: Labels, num_towers: int, bounds: Bounds) -> None:
        self.squared, self.bounds, self.weights = squared, bounds, bounds.weights
        self.labels = labels.astype(np.int64, copy=True)
        member = np.zeros((num_towers, len(labels)))
        member[self.labels, np.arange(len(labels))] = self.weights
        self.to_tower = member @ squared  # [T, P] weighted squared distances of each block to each tower
        self.pairs = (self.to_tower * member).sum(axis=1) / 2  # [T] weighted squared distances inside a tower
        self.mass = member.sum(axis=1)  # [T] features
        self.num_blocks = np.bincount(self.labels, minlength=num_towers)
        self.loads = bounds.tower_loads(self.labels, num_towers)  # [R, T]
        self.excess = bounds.excess(self.loads)  # [T]
        if bounds.apart is not None:
            self.conflicts = (member > 0).astype(np.float64) @ bounds.apart  # [T, P]
        # A gain below rounding is none; without this the search could go round in circles.
        self.threshold = 1e-10 * max(
            float((self.pairs / np.maximum(self.mass, 1.0)).sum()), float(squared.max()), 1e-300
        )

    def step(self, block: int) -> bool:
        """Makes the best move or swap of one block; False when none is worth it."""
        tower = int(self.labels[block])
        options = [self._swaps(block, tower)]
        if self.num_blocks[tower] > 1:
            options.append(self._moves(block, tower))
        best: tuple[float, float, int, int] | None = None
        for kind, (limits, gain) in enumerate(options):
            # Lexicographic: limits first, the objective among equals.
            least = limits.min()
            choice = int(np.argmin(np.where(limits <= least + TOLERANCE, gain, np.inf)))
            candidate = (float(limits[choice]), float(gain[choice]), kind, choice)
            if (
                best is None
                or candidate[0] < best[0] - TOLERANCE
                or (candidate[0] <= best[0] + TOLERANCE and candidate[1] < best[1])
            ):
                best = candidate
        assert best is not None, "swaps are always among the options"
        limits_change, objective_change, kind, choice = best
        if limits_change > -TOLERANCE and (limits_change > TOLERANCE or objective_change > -self.threshold):
            return False
        if kind == 1:
            self._relabel([(block, tower, choice)])
        else:
            other = int(self.labels[choice])
            self._relabel([(block, tower, other), (choice, other, tower)])
        return True

    def _moves(self, block: int, tower: int) -> tuple[Floats, Floats]:
        """[T] change of the violation and of the objective when the block goes to each tower."""
        weight, load = self.weights[block], self.bounds.loads[:, block]
        left = (self.pairs[tower] - weight * self.to_tower[tower, block]) / (self.mass[tower] - weight)
        joined = (self.pairs + weight * self.to_tower[:, block]) / (self.mass + weight)
        gain = joined - self.pairs / self.mass + left - self.pairs[tower] / self.mass[tower]
        limits = self.bounds.excess(self.loads + load[:, None]) - self.excess
        limits += self.bounds.excess(self.loads[:, tower] - load) - self.excess[tower]
        if self.bounds.apart is not None:
            limits += self.conflicts[:, block] - self.conflicts[tower, block]
        limits[tower], gain[tower] = np.inf, np.inf
        return limits, gain

    def _swaps(self, block: int, tower: int) -> tuple[Floats, Floats]:
        """[P] change of the violation and of the objective when the block changes places with each other one."""
        labels, weights, weight = self.labels, self.weights, self.weights[block]
        between = weight * weights * self.squared[block]
        own = self.to_tower[labels, np.arange(len(labels))]
        here = self.pairs[tower] - weight * self.to_tower[tower, block] + weights * self.to_tower[tower] - between
        there = self.pairs[labels] - weights * own + weight * self.to_tower[labels, block] - between
        masses = self.mass[tower] - weight + weights, self.mass[labels] + weight - weights
        before = self.pairs / self.mass
        gain = here / masses[0] + there / masses[1] - before[tower] - before[labels]
        difference = self.bounds.loads - self.bounds.loads[:, block : block + 1]  # [R, P]
        limits = self.bounds.excess(self.loads[:, tower : tower + 1] + difference) - self.excess[tower]
        limits += self.bounds.excess(self.loads[:, labels] - difference) - self.excess[labels]
        apart = self.bounds.apart
        if apart is not None:
            conflicts = self.conflicts
            limits += conflicts[labels, block] - conflicts[tower, block]
            limits += conflicts[tower] - conflicts[labels, np.arange(len(labels))] - 2.0 * apart[block]
        same = labels == tower
        limits[same], gain[same] = np.inf, np.inf
        return limits, gain

    def _relabel(self, changes: list[tuple[int, int, int]]) -> None:
        for block, old, new in changes:
            weight, row = self.weights[block], self.squared[block]
            self.pairs[old] -= weight * self.to_tower[old, block]
            self.to_tower[old] -= weight * row
            self.pairs[new] += weight * self.to_tower[new, block]
            self.to_tower[new] += weight * row
            for sums, change in ((self.mass, weight), (self.num_blocks, 1)):
                sums[old] -= change
                sums[new] += change
            if self.bounds.apart is not None:
                self.conflicts[old] -= self.bounds.apart[block]
                self.conflicts[new] += self.bounds.apart[block]
            self.labels[block] = new
        towers = sorted({tower for _, old, new in changes for tower in (old, new)})
        for tower in towers:
            # Summed afresh: loads are compared with limits, and rounding must not pile up.
            self.loads[:, tower] = self.bounds.loads[:, self.labels == tower].sum(axis=1)
        self.excess[towers] = self.bounds.excess(self.loads[:, towers])


Pair = tuple[int, int]


def size_bounds(num_points: int, num_clusters: int, balance_ratio: float) -> list[Pair]:
    """The pairs (smallest, largest) that keep every group at most ``balance_ratio`` times the smallest.

    The first pair is that with the largest smallest group: floor(F / T), and the largest that goes with it, which is
    never below ceil(F / T) or F points would not fit. A smaller smallest group allows the others less.

    Example:
        >>> size_bounds(26, 8, 1.0), size_bounds(26, 8, 2.0), size_bounds(24, 8, 1.0)
        ([(3, 4)], [(3, 6), (2, 4)], [(3, 3)])
        >>> size_bounds(80, 16, 4.0)
        [(5, 20), (4, 16), (3, 12), (2, 8)]
    """
    smallest, needed = num_points // num_clusters, -(-num_points // num_clusters)
    # The addend keeps 1.15 * 100 from falling to 114.
    pairs = [(least, int(balance_ratio * least + 1e-9)) for least in range(smallest, 0, -1)]
    allowed = [(least, min(num_points, most)) for least, most in pairs if most >= needed]
    if not allowed or allowed[0][0] != smallest:
        allowed.insert(0, (smallest, needed))
    return allowed


def evenly_picked(pairs: Sequence[Pair], count: int = 4) -> list[Pair]:
    """Some of the pairs, evenly spaced, with the first and the last.

    Example:
        >>> evenly_picked([(9, 9), (8, 9), (7, 9), (6, 9), (5, 9)], 3)
        [(9, 9), (7, 9), (5, 9)]
    """
    return [pairs[i] for i in np.unique(np.linspace(0, len(pairs) - 1, count).round().astype(int))]


def fitting_sizes(weights: NDArray[np.float64], num_towers: int, pairs: Sequence[Pair]) -> tuple[list[Pair], int]:
    """The pairs, loosened just so far that blocks of several features can be dealt out within one of them.

    First the largest group is allowed more, and then the smallest kept as large as can be: one block of many features
    takes a large tower, and the others need not be small for it. Whether blocks fit is found by dealing them out by
    size and fixing that, which may ask for more room than a perfect packing.

    Args:
        weights: [P] features of each block.
        num_towers: T.
        pairs: (smallest, largest) as in `size_bounds`.

    Returns:
        The pairs, and by how much the largest grew; 0 where all blocks are single features.

    Example:
        >>> fitting_sizes(np.array([7.0, 1, 1, 1, 1, 1, 1]), 4, [(3, 4)])
        ([(2, 7)], 3)
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


def _fit(weights: NDArray[np.float64], num_towers: int, pair: Pair) -> bool:
    bounds = Bounds(loads=weights[None, :], lower=np.array([float(pair[0])]), upper=np.array([float(pair[1])]))
    labels = spread(bounds, num_towers)
    if bounds.violation(labels, num_towers) == 0:
        return True
    nowhere = np.zeros((len(weights), len(weights)))
    return bounds.violation(improve(nowhere, labels, num_towers, bounds), num_towers) == 0
