"""Limits on towers, and the local search that assigns blocks of features to towers within them.

Legend: P blocks (features that stay together), T towers, R resources (features, work, bytes).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bounds", "Floats", "Labels", "greedy_start", "local_search", "objective_of", "perturbed_search"]

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

# In shares of a resource's total. Loads are sums of floats: a limit is exceeded only by more than rounding.
TOLERANCE = 1e-12
MAX_SWEEPS = 50
# Squared blocks searched after all perturbations together: 30 perturbations of 200 blocks, 7 of 500, none of 1,500.
PERTURBATION_BUDGET, PERTURBED_SHARE = 2_000_000, 0.3


@dataclass(frozen=True, kw_only=True, eq=False)
class Bounds:
    """Limits on every tower."""

    loads: Floats
    """[R, P] load of each block on each resource; row 0 is its number of features."""
    lower: Floats
    """[R] the least a tower must have."""
    upper: Floats
    """[R] the most a tower may have; infinite where there is no limit."""
    apart: NDArray[np.bool_] | None = None
    """[P, P] symmetric, True for blocks that must not share a tower; None if there are none."""

    @property
    def weights(self) -> Floats:
        """[P] features of each block, its weight in the objective."""
        return self.loads[0]

    @property
    def oversized(self) -> NDArray[np.bool_]:
        """[R, P] blocks that alone exceed the limit of a tower, by more than rounding."""
        scale = np.maximum(self.loads.sum(axis=1, keepdims=True), 1e-300)
        return (self.loads - self.upper[:, None]) / scale > TOLERANCE

    def tower_loads(self, labels: Labels, num_towers: int) -> Floats:
        """[R, T] sums over the blocks of each tower."""
        return np.stack([np.bincount(labels, weights=row, minlength=num_towers) for row in self.loads])

    def excess(self, tower_loads: Floats) -> Floats:
        """Excess over the limits, [...] for loads [R, ...], in shares of each resource's total."""
        shape = (-1,) + (1,) * (tower_loads.ndim - 1)
        scale = np.maximum(self.loads.sum(axis=1), 1e-300).reshape(shape)
        over = (tower_loads - self.upper.reshape(shape)) / scale
        under = (self.lower.reshape(shape) - tower_loads) / scale
        outside = np.maximum(np.maximum(over, under), 0.0)
        return np.where(outside > TOLERANCE, outside, 0.0).sum(axis=0)

    def violation(self, labels: Labels, num_towers: int) -> float:
        """0.0 if every limit is held; else the excess of all towers plus 1 for each pair that must be apart."""
        total = float(self.excess(self.tower_loads(labels, num_towers)).sum())
        if self.apart is not None:
            total += float(np.count_nonzero(self.apart & (labels[:, None] == labels[None, :])) // 2)
        return total


def objective_of(squared: Floats, weights: Floats, labels: Labels) -> float:
    """K-means objective from distances alone: sum over towers of (sum over pairs of w_i w_j d_ij^2) / (sum of w).

    For points in a Euclidean space it equals the sum of squared distances of all features to their tower's centre.
    ``squared`` are the [P, P] squared distances, ``weights`` the [P] features of each block.

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


def local_search(squared: Floats, labels: Labels, num_towers: int, bounds: Bounds) -> Labels:
    """Moves and swaps blocks while limits or the objective improve; no tower is emptied.

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
        >>> local_search(squared, np.array([0, 0, 1, 1]), 2, pairs).tolist()
        [1, 0, 1, 0]
    """
    search = _MoveSearch(squared, labels, num_towers, bounds)
    for _ in range(MAX_SWEEPS):
        changes = sum(search.step(block) for block in range(len(labels)))
        if not changes:
            break
    return search.labels


def perturbed_search(
    squared: Floats, labels: Labels, *, num_towers: int, bounds: Bounds, seed: int, max_perturbations: int = 30
) -> Labels:
    """Repeats `local_search` from perturbed answers; a better answer that holds the limits replaces the best.

    A perturbation deals part of the blocks out again at random. Larger problems, for which one search takes seconds,
    get fewer. Arguments and result are those of `local_search`.

    Example:
        >>> squared = np.square(np.subtract.outer(np.arange(6.0), np.arange(6.0)))
        >>> pairs = Bounds(loads=np.ones((1, 6)), lower=np.array([2.0]), upper=np.array([2.0]))
        >>> perturbed_search(squared, np.array([0, 1, 2, 0, 1, 2]), num_towers=3, bounds=pairs, seed=0).tolist()
        [1, 1, 0, 0, 2, 2]
    """
    rng = np.random.default_rng(seed)
    best = local_search(squared, labels, num_towers, bounds)
    least = objective_of(squared, bounds.weights, best)
    num_blocks = len(labels)
    for _ in range(min(max_perturbations, PERTURBATION_BUDGET // (num_blocks * (num_blocks + num_towers)))):
        picked = rng.permutation(num_blocks)[: max(2, round(PERTURBED_SHARE * num_blocks))]
        perturbed = best.copy()
        perturbed[picked] = rng.permutation(perturbed[picked])
        perturbed = local_search(squared, perturbed, num_towers, bounds)
        value = objective_of(squared, bounds.weights, perturbed)
        if value < least * (1.0 - 1e-9) and bounds.violation(perturbed, num_towers) == 0:
            best, least = perturbed, value
    return best


def greedy_start(bounds: Bounds, num_towers: int) -> Labels:
    """Deals out blocks by load alone, largest first, to the tower with the most remaining capacity.

    No tower stays empty if there are as many blocks as towers.

    Example:
        >>> loads = np.array([[1.0, 1.0, 1.0], [5.0, 4.0, 9.0]])
        >>> greedy_start(Bounds(loads=loads, lower=np.zeros(2), upper=np.full(2, np.inf)), 2).tolist()
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
            # A tower with a block that this one must be apart from comes last.
            after[np.unique(labels[bounds.apart[block] & (labels >= 0)])] += 1e6
        if num_empty == len(labels) - number:
            # Every remaining block is needed for an empty tower.
            after[filled[0] > 0] = np.inf
        labels[block] = tower = int(np.argmin(after))
        num_empty -= int(filled[0, tower] == 0)
        filled[:, tower] += share[:, block]
    return labels


class _MoveSearch:
    """Running sums that price any move or swap in O(1)."""

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
        # A gain below rounding is none; without this the search could cycle.
        self.threshold = 1e-10 * max(
            float((self.pairs / np.maximum(self.mass, 1.0)).sum()), float(squared.max()), 1e-300
        )

    def step(self, block: int) -> bool:
        """Makes the best move or swap of one block; False if none gains."""
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
            # Summed from scratch: loads are compared with limits, and rounding must not pile up.
            self.loads[:, tower] = self.bounds.loads[:, self.labels == tower].sum(axis=1)
        self.excess[towers] = self.bounds.excess(self.loads[:, towers])
