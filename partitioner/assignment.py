"""Limits on towers, and assignments within them: local search, refusals that need no search, and an exact search.

Legend: P blocks (features that stay together), T towers, R resources (features, work, bytes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmt.errors import InputError

__all__ = [
    "RESOURCES",
    "Bounds",
    "Floats",
    "Infeasible",
    "Labels",
    "amount",
    "check_bounds",
    "greedy_start",
    "largest_clique",
    "local_search",
    "objective_of",
    "perturbed_search",
    "solve_exactly",
    "sum_inside",
]

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

# In shares of a resource's total. Loads are sums of floats: a limit is exceeded only by more than rounding.
TOLERANCE = 1e-12
MAX_SWEEPS = 50
# Prices of a local search that are found in one pass, at most: passes over small arrays cost little more than over one.
PRICED_TOGETHER = 4096
# Squared blocks searched after all perturbations together: 30 perturbations of 200 blocks, 7 of 500, none of 1,500.
PERTURBATION_BUDGET, PERTURBED_SHARE = 2_000_000, 0.3
# Blocks times towers up to which the exact search is tried, and for how many seconds.
MOST_VARIABLES, SECONDS = 20_000, 20.0
# The solver keeps limits to about one part in a million.
MARGIN = 4e-6
RESOURCES = ("features", "work", "bytes")


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
        return (self.loads - self.upper[:, None]) / self._totals[:, None] > TOLERANCE

    @cached_property
    def _totals(self) -> Floats:
        return np.maximum(self.loads.sum(axis=1), 1e-300)

    def tower_loads(self, labels: Labels, num_towers: int) -> Floats:
        """[R, T] sums over the blocks of each tower."""
        return np.stack([np.bincount(labels, weights=row, minlength=num_towers) for row in self.loads])

    def excess(self, tower_loads: Floats) -> Floats:
        """Excess over the limits, [...] for loads [R, ...], in shares of each resource's total."""
        shape = (-1,) + (1,) * (tower_loads.ndim - 1)
        scale = self._totals.reshape(shape)
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
    """
    total = 0.0
    for tower in np.unique(labels):
        inside = np.flatnonzero(labels == tower)
        own = weights[inside]
        total += float(own @ squared[np.ix_(inside, inside)] @ own) / 2 / float(own.sum())
    return total


def sum_inside(costs: Floats, weights: Floats, labels: Labels) -> float:
    """Sum over the pairs of blocks that share a tower of w_i w_j c_ij; arguments like those of `objective_of`."""
    weighted = costs * weights[:, None] * weights
    return float(weighted[labels[:, None] == labels].sum() - np.trace(weighted)) / 2


def local_search(costs: Floats, labels: Labels, *, num_towers: int, bounds: Bounds, per_feature: bool = True) -> Labels:
    """Moves and swaps blocks while limits or the objective improve; no tower is emptied.

    Every block in turn makes the one move or swap that is best: first for the limits (a limit once held is never given
    up), then for the objective. Ends when a whole sweep, of O(P (P + T)), changes nothing.

    Args:
        costs: [P, P] squared distances, for `objective_of`; or of any sign with a diagonal of 0, for `sum_inside`.
        labels: [P] the towers to start from.
        num_towers: T.
        bounds: the limits. `Bounds.violation` of the [P] labels returned says whether all are held.
        per_feature: `objective_of` is the objective, else `sum_inside`.
    """
    search = _MoveSearch(costs, labels, num_towers, bounds, per_feature=per_feature)
    for _ in range(MAX_SWEEPS):
        if not search.sweep():
            break
    return search.labels


def perturbed_search(
    costs: Floats,
    labels: Labels,
    *,
    num_towers: int,
    bounds: Bounds,
    seed: int,
    max_perturbations: int = 30,
    per_feature: bool = True,
) -> Labels:
    """Repeats `local_search` from perturbed answers; a better answer that holds the limits replaces the best.

    A perturbation deals part of the blocks out again at random. Larger problems get fewer.
    """
    rng = np.random.default_rng(seed)
    value_of = objective_of if per_feature else sum_inside
    best = local_search(costs, labels, num_towers=num_towers, bounds=bounds, per_feature=per_feature)
    least = value_of(costs, bounds.weights, best)
    num_blocks = len(labels)
    for _ in range(min(max_perturbations, PERTURBATION_BUDGET // (num_blocks * (num_blocks + num_towers)))):
        picked = rng.permutation(num_blocks)[: max(2, round(PERTURBED_SHARE * num_blocks))]
        perturbed = best.copy()
        perturbed[picked] = rng.permutation(perturbed[picked])
        perturbed = local_search(costs, perturbed, num_towers=num_towers, bounds=bounds, per_feature=per_feature)
        value = value_of(costs, bounds.weights, perturbed)
        if value < least - 1e-9 * abs(least) and bounds.violation(perturbed, num_towers) == 0:
            best, least = perturbed, value
    return best


def greedy_start(bounds: Bounds, num_towers: int) -> Labels:
    """Deals out blocks by load alone, largest first, to the tower with the most remaining capacity.

    No tower stays empty if there are as many blocks as towers.
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

    def __init__(
        self, squared: Floats, labels: Labels, num_towers: int, bounds: Bounds, *, per_feature: bool = True
    ) -> None:
        # What has no limit is never exceeded, and needs no price.
        limited = np.isfinite(bounds.upper) | (bounds.lower > 0)
        limited[0] = True  # holds the weights
        bounds = replace(bounds, loads=bounds.loads[limited], lower=bounds.lower[limited], upper=bounds.upper[limited])
        self.squared, self.bounds, self.weights = squared, bounds, bounds.weights
        self.per_feature = per_feature
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
            float(np.abs(self._mean(self.pairs, np.maximum(self.mass, 1.0))).sum()),
            float(np.abs(squared).max()),
            1e-300,
        )

    def _mean(self, pairs: Floats, mass: Floats) -> Floats:
        """Sums inside towers over the features of each, or as they are."""
        return pairs / mass if self.per_feature else pairs

    def sweep(self) -> bool:
        """Makes the best move or swap of each block in turn; False if none gains."""
        first, count, changed, most = 0, 1, False, max(1, PRICED_TOGETHER // len(self.labels))
        while first < len(self.labels):
            blocks = np.arange(first, min(first + count, len(self.labels)))
            done = self._first_change(blocks)
            changed |= done is not None
            # Prices hold until something changes: the more blocks have kept their towers, the more are priced together.
            first, count = (blocks[-1] + 1, min(2 * count, most)) if done is None else (done + 1, 1)
        return changed

    def _first_change(self, blocks: Labels) -> int | None:
        """Makes the best move or swap of the first of these [B] blocks that gains by any; None if none does."""
        kinds = self._swaps(blocks), self._moves(blocks)
        limits, gain = (np.concatenate(changes, axis=1) for changes in zip(*kinds, strict=True))  # [B, P + T]
        # Lexicographic: limits first, the objective among equals.
        least = limits.min(axis=1, keepdims=True)
        choices = np.where(limits <= least + TOLERANCE, gain, np.inf).argmin(axis=1)
        limit, gained = (prices[np.arange(len(blocks)), choices] for prices in (limits, gain))
        gains = (limit <= -TOLERANCE) | ((limit <= TOLERANCE) & (gained <= -self.threshold))
        if not gains.any():
            return None
        block, choice = int(blocks[gains.argmax()]), int(choices[gains.argmax()])
        tower = int(self.labels[block])
        if choice >= len(self.labels):
            self._relabel([(block, tower, choice - len(self.labels))])
        else:
            other = int(self.labels[choice])
            self._relabel([(block, tower, other), (choice, other, tower)])
        return block

    def _moves(self, blocks: Labels) -> tuple[Floats, Floats]:
        """[B, T] change of the violation and of the objective when each block goes to each tower."""
        towers, weight, load = self.labels[blocks], self.weights[blocks], self.bounds.loads[:, blocks]
        alone = self.num_blocks[towers] == 1  # a tower is not emptied
        rest = np.where(alone, 1.0, self.mass[towers] - weight)
        before = self._mean(self.pairs, self.mass)
        left = self._mean(self.pairs[towers] - weight * self.to_tower[towers, blocks], rest) - before[towers]
        joined = self._mean(self.pairs + weight[:, None] * self.to_tower[:, blocks].T, self.mass + weight[:, None])
        gain = joined - before + left[:, None]
        limits = self.bounds.excess(self.loads[:, None, :] + load[:, :, None]) - self.excess
        limits += (self.bounds.excess(self.loads[:, towers] - load) - self.excess[towers])[:, None]
        if self.bounds.apart is not None:
            limits += self.conflicts[:, blocks].T - self.conflicts[towers, blocks][:, None]
        barred = alone[:, None] | (np.arange(len(self.mass)) == towers[:, None])
        limits[barred], gain[barred] = np.inf, np.inf
        return limits, gain

    def _swaps(self, blocks: Labels) -> tuple[Floats, Floats]:
        """[B, P] change of the violation and of the objective when each block changes places with each other one."""
        labels, weights, towers, weight = self.labels, self.weights, self.labels[blocks], self.weights[blocks, None]
        between = weight * weights * self.squared[blocks]
        own = self.to_tower[labels, np.arange(len(labels))]
        left = self.pairs[towers] - weights[blocks] * self.to_tower[towers, blocks]
        here = left[:, None] + weights * self.to_tower[towers] - between
        there = self.pairs[labels] - weights * own + weight * self.to_tower[:, blocks].T[:, labels] - between
        masses = (self.mass[towers] - weights[blocks])[:, None] + weights, self.mass[labels] + weight - weights
        before = self._mean(self.pairs, self.mass)
        gain = self._mean(here, masses[0]) + self._mean(there, masses[1]) - before[towers][:, None] - before[labels]
        difference = self.bounds.loads[:, None, :] - self.bounds.loads[:, blocks, None]  # [R, B, P]
        limits = self.bounds.excess(self.loads[:, towers, None] + difference) - self.excess[towers][:, None]
        limits += self.bounds.excess(self.loads[:, None, labels] - difference) - self.excess[labels]
        apart = self.bounds.apart
        if apart is not None:
            conflicts = self.conflicts
            limits += conflicts[:, blocks].T[:, labels] - conflicts[towers, blocks][:, None]
            limits += conflicts[towers] - conflicts[labels, np.arange(len(labels))] - 2.0 * apart[blocks]
        same = labels == towers[:, None]
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


class Infeasible(Exception):
    """No assignment within the limits exists (``proven``), or none was found."""

    def __init__(self, num_towers: int, *, proven: bool = False) -> None:
        self.proven = proven
        found = "holds all limits" if proven else "within all limits was found"
        super().__init__(f"No assignment of the features to {num_towers} towers {found}.")


def check_bounds(names: Sequence[Sequence[str]], bounds: Bounds, num_towers: int, where: str) -> None:
    """Raises `InputError` with the reason where a limit cannot be held whatever the assignment.

    ``names`` are the features of each block, ``where`` what is divided, such as ``"category 'user': "``, or empty.
    """
    if num_towers > len(names):
        features = sum(len(block) for block in names)
        what = "features" if features == len(names) else "tables (shared tables are not split)"
        # A category is not cut for its own sake, nor a shared table at all.
        cut = "" if where or features > len(names) else ", or cut tables into column shards by split_columns='largest'"
        raise InputError(
            f"TowerPartitioner: {where}num_towers={num_towers} exceeds the {len(names)} {what} to place, and no tower "
            f"may be empty. Use fewer towers{cut}."
        )
    advice = ("Raise balance_ratio", "Raise max_work_ratio", "Raise the limit, use more towers")
    for resource, load, limit, oversized, raise_it in zip(
        RESOURCES, bounds.loads, bounds.upper, bounds.oversized, advice, strict=True
    ):
        largest = int(np.argmax(load))
        if oversized[largest]:
            owners = ", ".join(map(repr, names[largest][:5])) + (" ..." if len(names[largest]) > 5 else "")
            alone = "which share a table or must stay together, " if len(names[largest]) > 1 else ""
            cut = ", or cut the table with split_columns='largest'" if resource == "bytes" and not alone else ""
            raise InputError(
                f"TowerPartitioner: {where}feature {owners} {alone}needs {amount(load[largest])} {resource}, but a "
                f"tower may have {amount(limit)} at most. {raise_it}{cut}."
            )
        if load.sum() > limit * num_towers * (1 + 1e-12):
            raise InputError(
                f"TowerPartitioner: {where}the features need {amount(load.sum())} {resource} in all, but "
                f"{num_towers} towers of at most {amount(limit)} hold {amount(limit * num_towers)}. {raise_it}."
            )
    clique = largest_clique(bounds.apart)
    if len(clique) > num_towers:
        shown = ", ".join(repr(names[i][0]) for i in clique[:5])
        raise InputError(
            f"TowerPartitioner: {where}{len(clique)} features must all be apart from each other ({shown} ...), but "
            f"there are {num_towers} towers. Use more towers or part fewer."
        )


def amount(value: float) -> str:
    """A load as text: whole from 1,000 on, else four digits, so that a load and its limit do not look the same."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def largest_clique(apart: NDArray[np.bool_] | None) -> list[int]:
    """Blocks that must all be apart from each other ([P, P] ``apart``), found greedily around the most restricted."""
    if apart is None or not apart.any():
        return []
    first = int(np.argmax(apart.sum(axis=1)))
    best: list[int] = []
    for start in {first, *np.flatnonzero(apart[first]).tolist()[:32]}:
        clique = [start]
        for other in np.flatnonzero(apart[start]).tolist():
            if apart[other, clique].all():
                clique.append(other)
        best = max(best, clique, key=len)
    return best


def solve_exactly(cost: NDArray[np.float64], bounds: Bounds) -> NDArray[np.int64]:
    """Returns the [P] labels of the cheapest assignment within the limits, by SciPy's mixed-integer solver (HiGHS).

    ``cost``, [P, T], is that of each block in each tower.

    Raises:
        Infeasible: there is none, or none was found in 20 seconds, or the problem is too large to try.
    """
    num_blocks, num_towers = cost.shape
    if cost.size > MOST_VARIABLES:
        raise Infeasible(num_towers)
    for margin in (0.0, MARGIN):
        # The solver's answer may be beyond a limit by its own tolerance; a second one keeps clear of it.
        result = _solve(cost, bounds, margin)
        if result.x is None:
            break
        labels = result.x.reshape(num_blocks, num_towers).argmax(axis=1).astype(np.int64)
        if bounds.violation(labels, num_towers) == 0:
            return labels
    # Status 2 is a proof, unless limits were narrowed; 1 is the time limit.
    raise Infeasible(num_towers, proven=result.status == 2 and not margin)


def _solve(cost: NDArray[np.float64], bounds: Bounds, margin: float) -> Any:
    """SciPy's answer; limits on work and bytes are narrowed by a share of ``margin``."""
    from scipy.optimize import Bounds as VariableBounds
    from scipy.optimize import LinearConstraint, milp
    from scipy.sparse import csr_array, eye_array, kron

    num_blocks, num_towers = cost.shape
    towers = eye_array(num_towers)
    # Each block is in one tower, and no tower is empty, even where there is no limit on its features.
    constraints = [
        LinearConstraint(kron(eye_array(num_blocks), np.ones((1, num_towers))), 1, 1),
        LinearConstraint(kron(np.ones((1, num_blocks)), towers), 1, num_blocks),
    ]
    for resource, (load, lower, upper) in enumerate(zip(bounds.loads, bounds.lower, bounds.upper, strict=True)):
        # In shares of the total: bytes by the billion would drown the solver's tolerances.
        total = max(float(load.sum()), 1e-300)
        most = upper * (1.0 - margin) if resource else upper
        constraints.append(LinearConstraint(kron(load[None, :] / total, towers), lower / total, most / total))
    rows, columns = np.nonzero(np.triu(bounds.apart)) if bounds.apart is not None else ((), ())
    if len(rows):
        edges, data, shape = np.arange(len(rows)), np.ones(len(rows)), (len(rows), num_blocks)
        pairs = csr_array((data, (edges, rows)), shape=shape) + csr_array((data, (edges, columns)), shape=shape)
        constraints.append(LinearConstraint(kron(pairs, towers), 0, 1))
    return milp(
        cost.ravel() / max(float(cost.max()), 1e-300),
        integrality=np.ones(cost.size),
        bounds=VariableBounds(0, 1),
        constraints=constraints,
        options={"time_limit": SECONDS, "mip_rel_gap": 0.05},
    )
