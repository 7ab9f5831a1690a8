"""Points into groups of bounded size: constrained K-means, by the package ``k-means-constrained`` and local search."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dmt.partitioner.assignment import Bounds, Floats, Labels, improve, objective_of
from dmt.partitioner.sizes import evenly_picked, size_bounds

__all__ = ["constrained_clusters", "in_order_of_occurrence", "search_clusters", "squared_distances"]

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
