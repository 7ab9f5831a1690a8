"""How many features a tower may have: the bounds that a balance ratio allows, loosened where blocks need it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dmt.partitioner.assignment import Bounds, improve, spread

__all__ = ["evenly_picked", "fitting_sizes", "size_bounds"]

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
    size and mending that, which may ask for more room than a perfect packing.

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
