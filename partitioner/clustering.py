"""Points into groups of bounded size: constrained K-means, by the package ``k-means-constrained``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["constrained_clusters", "size_bounds"]

# The package rounds distances to 1/1000 before it solves the assignment: points are blown up to this extent first.
EXTENT = 1000.0


def size_bounds(num_points: int, num_clusters: int, balance_ratio: float) -> tuple[int, int]:
    """The smallest and largest group allowed: floor(F / T), and what ``balance_ratio`` makes of it.

    The largest is never below ceil(F / T), without which F points would not fit.

    Example:
        >>> size_bounds(26, 8, 1.0), size_bounds(26, 8, 2.0), size_bounds(24, 8, 1.0)
        ((3, 4), (3, 6), (3, 3))
    """
    smallest = num_points // num_clusters
    # The addend keeps 1.15 * 100 from falling to 114.
    return smallest, min(num_points, max(-(-num_points // num_clusters), int(balance_ratio * smallest + 1e-9)))


def constrained_clusters(
    points: NDArray[np.float64], num_clusters: int, *, balance_ratio: float = 1.0, seed: int = 0, num_starts: int = 20
) -> NDArray[np.int64]:
    """Groups points around centres, with all group sizes within `size_bounds`.

    The method is Bradley, Bennett and Demiriz (2000): K-means whose assignment step is a minimum-cost flow; the
    DMT paper (section 3.3) calls for it. The package's flow minimises distances, not their squares.

    Args:
        points: [F, n] coordinates.
        num_clusters: T, between 1 and F.
        balance_ratio: allowed ratio of the largest to the smallest group, at least 1.
        seed: of the starting centres.
        num_starts: runs from different centres, of which the tightest is kept.

    Returns:
        The group of each point, [F] int64, numbered by first occurrence.

    Example:
        >>> constrained_clusters(np.array([[0.0], [5.0], [0.1], [5.1]]), 2).tolist()
        [0, 1, 0, 1]
    """
    num_points = len(points)
    assert 1 <= num_clusters <= num_points, f"TowerPartitioner checks T={num_clusters} against {num_points} points"
    if num_clusters == 1:
        return np.zeros(num_points, dtype=np.int64)
    if num_clusters == num_points:
        return np.arange(num_points, dtype=np.int64)
    # Imported here: OR-tools, which solves the flow, takes longer to load than all the rest of this package.
    from k_means_constrained import KMeansConstrained

    smallest, largest = size_bounds(num_points, num_clusters, balance_ratio)
    extent = float(np.ptp(points, axis=0).max())
    solver = KMeansConstrained(
        num_clusters, size_min=smallest, size_max=largest, n_init=num_starts, random_state=seed % 2**32
    )
    labels = solver.fit(points * (EXTENT / extent) if extent > 0 else points).labels_
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]
