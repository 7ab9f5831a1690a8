"""Feasibility of limits: refusals that need no search, and an exact search by integer programming."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.partitioner.assignment import Bounds

__all__ = ["RESOURCES", "Infeasible", "amount", "check_bounds", "largest_clique", "solve_exactly"]

# Blocks times towers up to which the exact search is tried, and for how many seconds.
MOST_VARIABLES, SECONDS = 20_000, 20.0
# The solver keeps limits to about one part in a million.
MARGIN = 4e-6
RESOURCES = ("features", "work", "bytes")


class Infeasible(Exception):
    """No assignment within the limits exists, or none was found."""

    def __init__(self, message: str, *, proven: bool = False) -> None:
        super().__init__(message)
        self.proven = proven
        """True if there is none."""


def check_bounds(names: Sequence[Sequence[str]], bounds: Bounds, num_towers: int, where: str) -> None:
    """Raises `InputError` with the reason where a limit cannot be held whatever the assignment.

    Args:
        names: the features of each block.
        bounds: the limits.
        num_towers: T.
        where: what is divided, for the message, such as ``"category 'user': "``; may be empty.
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
    """A load as text: whole from 1,000 on, else four digits, so that a load and its limit do not look the same.

    Example:
        >>> amount(1234567.8), amount(12.0), amount(0.71234)
        ('1,234,568', '12', '0.7123')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def largest_clique(apart: NDArray[np.bool_] | None) -> list[int]:
    """Blocks that are all to be parted from each other, found greedily around the one with most to be parted from.

    Args:
        apart: [P, P] which blocks must not share a tower, or None.

    Example:
        >>> largest_clique(np.array([[0, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=bool))
        [0, 1]
    """
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
    """The cheapest assignment within the limits, by SciPy's mixed-integer solver (HiGHS).

    Args:
        cost: [P, T] what each block costs in each tower.
        bounds: the limits.

    Returns:
        [P] labels, all limits held.

    Raises:
        Infeasible: there is none, or none was found in 20 seconds, or the problem is too large to try.

    Example:
        >>> loads = np.array([[1.0, 1.0, 1.0], [3.0, 3.0, 3.0]])
        >>> bounds = Bounds(loads=loads, lower=np.array([1.0, 0.0]), upper=np.array([3.0, 6.0]))
        >>> sorted(np.bincount(solve_exactly(np.zeros((3, 2)), bounds)).tolist())
        [1, 2]
    """
    num_blocks, num_towers = cost.shape
    if cost.size > MOST_VARIABLES:
        raise Infeasible(f"No assignment of the features to {num_towers} towers within all limits was found.")
    for margin in (0.0, MARGIN):
        # The solver's answer may be beyond a limit by its own tolerance; a second one keeps clear of it.
        result = _solve(cost, bounds, margin)
        if result.x is None:
            break
        labels = result.x.reshape(num_blocks, num_towers).argmax(axis=1).astype(np.int64)
        if bounds.violation(labels, num_towers) == 0:
            return labels
    # Status 2 is a proof, unless limits were narrowed; 1 is the time limit.
    proven = result.status == 2 and not margin
    found = "holds all limits" if proven else "within all limits was found"
    raise Infeasible(f"No assignment of the features to {num_towers} towers {found}.", proven=proven)


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
