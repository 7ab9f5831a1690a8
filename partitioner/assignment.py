"""Limits on towers, and assignments within them: local search, refusals that need no search, and an exact search.

Legend: P blocks (features that stay together), T towers, R resources (features, work, bytes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
]

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

# In shares of a resource's total. Loads are sums of floats: a limit is exceeded only by more than rounding.
TOLERANCE = 1e-12
MAX_SWEEPS = 50
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
    up), then for `objective_of`. Ends when a whole sweep, of O(P (P + T)), changes nothing.

    ``squared`` are [P, P] squared distances, ``labels`` [P] the towers to start from. `Bounds.violation` of the [P]
    labels returned says whether all limits are held.
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

    A perturbation deals part of the blocks out again at random. Larger problems get fewer.
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
        kinds = [self._swaps(block, tower)]
        if self.num_blocks[tower] > 1:
            kinds.append(self._moves(block, tower))
        limits, gain = (np.concatenate(changes) for changes in zip(*kinds, strict=True))
        # Lexicographic: limits first, the objective among equals.
        choice = int(np.argmin(np.where(limits <= limits.min() + TOLERANCE, gain, np.inf)))
        if limits[choice] > -TOLERANCE and (limits[choice] > TOLERANCE or gain[choice] > -self.threshold):
            return False
        if choice >= len(self.labels):
            self._relabel([(block, tower, choice - len(self.labels))])
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
