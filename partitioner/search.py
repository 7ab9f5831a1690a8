"""Assigns blocks to towers within limits, by one local search for distances and for interactions.

Legend: P blocks (features that stay together), T towers, R resources (features, work, bytes), Q triples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bounds", "Costs", "Floats", "Labels", "even_start", "local_search", "search_towers"]

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

# As a share of a resource's total. Loads are sums of floats; a smaller excess over a limit is a rounding error.
TOLERANCE = 1e-12
MAX_SWEEPS = 50
# Limit of prices per pass: a pass over a small array takes little longer than over a single price.
PRICED_TOGETHER = 4096
# Budgets of all random starts and of all perturbations, in P (P + T) each. A perturbation redistributes a tenth of the
# blocks: on noise, costs end 1 % (26 blocks) to 2.5 % (200) lower than with three tenths.
START_BUDGET, MOST_STARTS = 1_000_000, 8
PERTURBATION_BUDGET, MOST_PERTURBATIONS, PERTURBED_SHARE = 2_000_000, 120, 0.1


@dataclass(frozen=True, kw_only=True, eq=False)
class Bounds:
    """Limits that hold for every tower, and the loads of the blocks."""

    loads: Floats
    """[R, P] each block's load on each resource; row 0 is its number of features."""
    lower: Floats
    """[R] smallest load that a tower may have."""
    upper: Floats
    """[R] largest load that a tower may have; infinite without a limit."""
    apart: NDArray[np.bool_] | None = None
    """[P, P] symmetric, True for blocks that must not share a tower; None without such blocks."""

    @property
    def weights(self) -> Floats:
        """[P] number of features of each block, its weight in the objective."""
        return self.loads[0]

    @cached_property
    def totals(self) -> Floats:
        """[R] total load of all blocks, at least 1e-300, because excesses are divided by it."""
        return np.maximum(self.loads.sum(axis=1), 1e-300)

    def tower_loads(self, labels: Labels, num_towers: int) -> Floats:
        """Returns the load of each tower on each resource, [R, T]."""
        return np.stack([np.bincount(labels, weights=row, minlength=num_towers) for row in self.loads])

    def excess(self, tower_loads: Floats) -> Floats:
        """Returns by how much loads [R, ...] lie above or below the limits, summed over the R resources: [...].

        The excess on each resource is a share of its total load. The result lacks the first axis of ``tower_loads``.
        """
        shape = (-1,) + (1,) * (tower_loads.ndim - 1)
        scale = self.totals.reshape(shape)
        over = (tower_loads - self.upper.reshape(shape)) / scale
        under = (self.lower.reshape(shape) - tower_loads) / scale
        outside = np.maximum(np.maximum(over, under), 0.0)
        return np.where(outside > TOLERANCE, outside, 0.0).sum(axis=0)

    def violation(self, labels: Labels, num_towers: int) -> float:
        """Returns 0.0 if every limit holds, else the excess of all towers plus 1 per pair wrongly together."""
        total = float(self.excess(self.tower_loads(labels, num_towers)).sum())
        if self.apart is not None:
            total += float(np.count_nonzero(self.apart & (labels[:, None] == labels[None, :])) // 2)
        return total


@dataclass(frozen=True, kw_only=True, eq=False)
class Costs:
    """The objective that the search minimizes; w_i is the number of features of block i.

    With ``per_feature``, it is the K-means objective from distances: the sum over towers of (sum over pairs of w_i w_j
    d_ij^2) / (sum of w). For points, it equals the sum of squared distances of features to their tower's center.
    Otherwise, it is the sum of w_i w_j c_ij over pairs in the same tower, plus the costs of triples in the same tower.
    """

    pairs: Floats
    """[P, P] d_ij^2, or c_ij of any sign with a diagonal of 0."""
    per_feature: bool
    triples: Labels = field(default_factory=lambda: np.zeros((0, 3), np.int64))
    """[Q, 3] three different blocks each; empty with ``per_feature``."""
    triple_costs: Floats = field(default_factory=lambda: np.zeros(0))
    """[Q] cost of each triple, of any sign."""

    def of(self, labels: Labels, weights: Floats) -> float:
        """Returns the objective of an assignment, labels [P] and weights [P]."""
        total = 0.0
        for tower in np.unique(labels):
            rows = np.flatnonzero(labels == tower)
            inside = float(weights[rows] @ self.pairs[np.ix_(rows, rows)] @ weights[rows]) / 2
            total += inside / float(weights[rows].sum()) if self.per_feature else inside
        a, b, c = labels[self.triples].T
        return total + float(self.triple_costs[(a == b) & (b == c)].sum())


def search_towers(
    costs: Costs, starts: Sequence[Labels], *, num_towers: int, bounds: Bounds, seed: int
) -> tuple[float, Labels]:
    """Searches for the assignment of least cost within the limits.

    Runs a `local_search` from each of ``starts`` ([P] labels each), from random starts, and then from perturbations of
    the best answer. Larger problems get fewer random starts and perturbations.

    Returns:
        The violation, 0 if all limits hold, and the [P] labels.
    """
    rng = np.random.default_rng(seed)
    size = len(costs.pairs) * (len(costs.pairs) + num_towers)

    def tried() -> Iterator[Labels]:
        yield from starts
        if least[0] > 0 or size < START_BUDGET:
            yield even
        for _ in range(min(MOST_STARTS, START_BUDGET // size)):
            yield rng.permutation(even)
        for _ in range(min(MOST_PERTURBATIONS, PERTURBATION_BUDGET // size)):
            picked = rng.permutation(len(best))[: max(2, round(PERTURBED_SHARE * len(best)))]
            perturbed = best.copy()
            perturbed[picked] = rng.permutation(perturbed[picked])
            yield perturbed

    even = even_start(bounds, num_towers)
    least, best = (np.inf, np.inf), even
    for start in tried():
        labels = local_search(costs, start, num_towers=num_towers, bounds=bounds)
        violation, cost = bounds.violation(labels, num_towers), costs.of(labels, bounds.weights)
        # Better by more than rounding, so that ties are broken the same way on every machine.
        if violation < least[0] or (violation == least[0] and cost < least[1] - 1e-9 * abs(least[1])):
            least, best = (violation, cost), labels
    return least[0], best


def even_start(bounds: Bounds, num_towers: int) -> Labels:
    """Assigns blocks by load, not cost, the largest first, each to the tower that it leaves least full: [P] labels.

    A tower is as full as its largest share of a resource; one that holds a block from which the new one must be apart
    comes last. No tower stays empty if there are at least as many blocks as towers.
    """
    share = bounds.loads / bounds.totals[:, None]
    weight = share[np.isfinite(bounds.upper)].max(axis=0)
    labels = np.full(bounds.loads.shape[1], -1, dtype=np.int64)
    filled = np.zeros((len(share), num_towers))
    num_empty = num_towers
    for number, block in enumerate(np.argsort(-weight, kind="stable")):
        after = (filled + share[:, block : block + 1]).max(axis=0)
        if bounds.apart is not None:
            after[np.unique(labels[bounds.apart[block] & (labels >= 0)])] += 1e6
        if num_empty == len(labels) - number:
            # Every remaining block has to fill an empty tower.
            after[filled[0] > 0] = np.inf
        labels[block] = tower = int(np.argmin(after))
        num_empty -= int(filled[0, tower] == 0)
        filled[:, tower] += share[:, block]
    return labels


def local_search(costs: Costs, labels: Labels, *, num_towers: int, bounds: Bounds) -> Labels:
    """Moves and swaps blocks while that lowers the violation or the cost; never empties a tower.

    Each block in turn makes its best move or swap: the one that lowers the violation most and, among equals, the cost.
    Ends when a sweep over all blocks, O(P (P + T)) without triples, changes nothing, or after 50 sweeps. ``labels`` [P]
    are the start. Returns new labels [P]; `Bounds.violation` tells whether they are within all limits.
    """
    search = _MoveSearch(costs, labels, num_towers, bounds)
    for _ in range(MAX_SWEEPS):
        if not search.sweep():
            break
    return search.labels[: search.num_blocks]


class _MoveSearch:
    """Running sums that give the price of any move or swap, its change of violation and cost, in O(1).

    A move is a swap with a dummy: each tower has a block without load or cost that never leaves it. These T dummies
    come after the P blocks.
    """

    def __init__(self, costs: Costs, labels: Labels, num_towers: int, bounds: Bounds) -> None:
        self.num_blocks = len(labels)  # P
        # Resources without a limit need no price.
        limited = np.isfinite(bounds.upper) | (bounds.lower > 0)
        limited[0] = True  # row 0 has the weights
        added = (0, num_towers)
        self.bounds = Bounds(
            loads=np.pad(bounds.loads[limited], ((0, 0), added)),
            lower=bounds.lower[limited],
            upper=bounds.upper[limited],
            apart=None if bounds.apart is None else np.pad(bounds.apart, added),
        )
        self.weights = self.bounds.weights
        self.costs = replace(costs, pairs=np.pad(costs.pairs, added))
        self.labels = np.concatenate([labels, np.arange(num_towers)]).astype(np.int64)  # [P + T]
        member = np.zeros((num_towers, len(self.labels)))
        member[self.labels, np.arange(len(self.labels))] = self.weights
        self.to_tower = member @ self.costs.pairs  # [T, P + T] weighted costs of each block with each tower
        self.pairs = (self.to_tower * member).sum(axis=1) / 2  # [T] weighted costs inside a tower
        self.mass = member.sum(axis=1)  # [T] features
        self.held = np.bincount(labels, minlength=num_towers)  # [T] blocks
        self.loads = self.bounds.tower_loads(self.labels, num_towers)  # [R, T]
        self.excess = self.bounds.excess(self.loads)  # [T]
        if self.bounds.apart is not None:
            self.conflicts = (member > 0).astype(np.float64) @ self.bounds.apart  # [T, P + T]
        self._price_triples()
        # Smaller gains are rounding errors, with which the search could cycle.
        inside = float(np.abs(self._mean(self.pairs, self.mass)).sum())
        self.threshold = 1e-10 * max(inside, float(np.abs(costs.pairs).max()), 1e-300)

    def _mean(self, pairs: Floats, mass: Floats) -> Floats:
        """Returns ``pairs`` divided by the features of each tower with ``per_feature``, else unchanged."""
        return pairs / np.maximum(mass, 1.0) if self.costs.per_feature else pairs

    def _price_triples(self) -> None:
        """Sums costs of triples: those that a block completes in a tower, and those that a swap counts twice."""
        if not len(self.costs.triples):
            return
        self.joining = np.zeros(self.to_tower.shape)
        self.counted_twice = np.zeros(self.costs.pairs.shape)
        cost = self.costs.triple_costs
        for a, b, c in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
            first, second, third = (self.costs.triples[:, place] for place in (a, b, c))
            same = self.labels[second] == self.labels[third]
            np.add.at(self.joining, (self.labels[second[same]], first[same]), cost[same])
            for one, other in ((first, second), (second, first)):
                together = (self.labels[third] == self.labels[one]) | (self.labels[third] == self.labels[other])
                np.add.at(self.counted_twice, (one[together], other[together]), cost[together])

    def sweep(self) -> bool:
        """Makes the best move or swap of each block in turn; returns False if nothing changed."""
        first, count, changed, most = 0, 1, False, max(1, PRICED_TOGETHER // self.num_blocks)
        while first < self.num_blocks:
            blocks = np.arange(first, min(first + count, self.num_blocks))
            done = self._first_change(blocks)
            changed |= done is not None
            # Prices hold until something changes: after blocks that stayed, more blocks are priced together.
            first, count = (blocks[-1] + 1, min(2 * count, most)) if done is None else (done + 1, 1)
        return changed

    def _first_change(self, blocks: Labels) -> int | None:
        """Makes the best move or swap of the first of [B] ``blocks`` that gains by it; returns that block, or None."""
        limits, gain = self.prices(blocks)
        # Lexicographic: the violation first, the cost among equals.
        least = limits.min(axis=1, keepdims=True)
        choices = np.where(limits <= least + TOLERANCE, gain, np.inf).argmin(axis=1)
        limit, gained = (prices[np.arange(len(blocks)), choices] for prices in (limits, gain))
        gains = (limit <= -TOLERANCE) | ((limit <= TOLERANCE) & (gained <= -self.threshold))
        if not gains.any():
            return None
        block, choice = int(blocks[gains.argmax()]), int(choices[gains.argmax()])
        here, there = int(self.labels[block]), int(self.labels[choice])
        self.relabel([(block, here, there), (choice, there, here)][: 1 if choice >= self.num_blocks else 2])
        return block

    def prices(self, blocks: Labels) -> tuple[Floats, Floats]:
        """Returns the changes of violation and cost, [B, P + T], if each of [B] blocks swaps with each block or dummy.

        Infinite for two blocks of the same tower, and for a move that would empty a tower.
        """
        labels, weights, towers, weight = self.labels, self.weights, self.labels[blocks], self.weights[blocks, None]
        every = np.arange(len(labels))
        between = weight * weights * self.costs.pairs[blocks]
        left = self.pairs[towers] - weights[blocks] * self.to_tower[towers, blocks]
        here = left[:, None] + weights * self.to_tower[towers] - between
        left_there = self.pairs[labels] - weights * self.to_tower[labels, every]
        there = left_there + weight * self.to_tower[:, blocks].T[:, labels] - between
        masses = (self.mass[towers] - weights[blocks])[:, None] + weights, self.mass[labels] + weight - weights
        before = self._mean(self.pairs, self.mass)
        gain = self._mean(here, masses[0]) + self._mean(there, masses[1]) - before[towers][:, None] - before[labels]
        if len(self.costs.triples):
            gain += self.joining[:, blocks].T[:, labels] - self.joining[towers, blocks][:, None]
            gain += self.joining[towers] - self.joining[labels, every] - self.counted_twice[blocks]
        difference = self.bounds.loads[:, None, :] - self.bounds.loads[:, blocks, None]  # [R, B, P + T]
        limits = self.bounds.excess(self.loads[:, towers, None] + difference) - self.excess[towers][:, None]
        limits += self.bounds.excess(self.loads[:, None, labels] - difference) - self.excess[labels]
        if self.bounds.apart is not None:
            limits += self.conflicts[:, blocks].T[:, labels] - self.conflicts[towers, blocks][:, None]
            limits += self.conflicts[towers] - self.conflicts[labels, every] - 2.0 * self.bounds.apart[blocks]
        barred = labels == towers[:, None]
        barred[:, self.num_blocks :] |= (self.held[towers] == 1)[:, None]
        limits[barred], gain[barred] = np.inf, np.inf
        return limits, gain

    def relabel(self, changes: list[tuple[int, int, int]]) -> None:
        """Moves blocks; each change is a block, its old tower and its new tower."""
        for block, old, new in changes:
            weight, row = self.weights[block], self.costs.pairs[block]
            self.pairs[old] -= weight * self.to_tower[old, block]
            self.to_tower[old] -= weight * row
            self.pairs[new] += weight * self.to_tower[new, block]
            self.to_tower[new] += weight * row
            for sums, change in ((self.mass, weight), (self.held, 1)):
                sums[old] -= change
                sums[new] += change
            if self.bounds.apart is not None:
                self.conflicts[old] -= self.bounds.apart[block]
                self.conflicts[new] += self.bounds.apart[block]
            self.labels[block] = new
        towers = sorted({tower for _, old, new in changes for tower in (old, new)})
        for tower in towers:
            # Summed from scratch, because rounding errors must not accumulate in what is compared with limits.
            self.loads[:, tower] = self.bounds.loads[:, self.labels == tower].sum(axis=1)
        self.excess[towers] = self.bounds.excess(self.loads[:, towers])
        self._price_triples()
