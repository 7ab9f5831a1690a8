"""`solve_exactly`: the best packing of a few items, by mixed integer programming (scipy's ``milp``)."""

from __future__ import annotations

from collections import Counter

import numpy as np

from dmt.sharding.packing import Packing, Problem

__all__ = ["solve_exactly"]

# A packing that is better by less than this share is not searched for.
_GAP = 0.003
# A count and not a time, so that all ranks of a job find the same packing.
_MOST_NODES = 200


def solve_exactly(problem: Problem, best: Packing | None = None) -> Packing | None:
    """Returns a packing that costs at least 0.3 % less than ``best``, or ``best`` if none is found.

    Minimises z + the fixed costs of the used kinds, where z is the cost of the busiest rank. Binary variables tell
    which option each item takes and which ranks hold its parts; parts of equal size are interchangeable.

    Args:
        problem: at most some 16 items and 8 ranks.
        best: the best packing known, if any.
    """
    found = _Program(problem).solve(np.inf if best is None else best.objective * (1 - _GAP))
    return best if found is None or (best is not None and found.objective >= best.objective) else found


class _Program:
    """The mixed integer program: column 0 is z, the next ones tell which kinds are used."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.num_columns = 1 + len(problem.fixed)
        self.rows: list[tuple[dict[int, float], float, float]] = []
        """(coefficients by column, lower bound, upper bound)"""
        self.options: list[list[tuple[int, dict[tuple[float, float], int]]]] = []
        """By item and option: its column, and the first of L columns for each size of its parts."""
        least = sum(min(option.total(problem.num_ranks) for option in options) for options in problem.options)
        # The solver's tolerances are absolute: costs are shares of a rank's least load, memory of its capacity.
        self.unit = (float(problem.cost.sum()) + least) / problem.num_ranks or 1.0
        self.cost: list[dict[int, float]] = [{0: -1.0} for _ in range(problem.num_ranks)]
        self.memory: list[dict[int, float]] = [{} for _ in range(problem.num_ranks)]
        for item, options in enumerate(problem.options):
            self.options.append([self._add_option(item, number) for number in range(len(options))])
            self.rows.append(({column: 1.0 for column, _ in self.options[item]}, 1, 1))
        for rank in range(problem.num_ranks):
            self.rows.append((self.cost[rank], -np.inf, -problem.cost[rank] / self.unit))
            if problem.capacity < np.inf:
                self.rows.append((self.memory[rank], -np.inf, 1 - problem.memory[rank] / problem.capacity))

    def _add_option(self, item: int, number: int) -> tuple[int, dict[tuple[float, float], int]]:
        option, ranks = self.problem.options[item][number], range(self.problem.num_ranks)
        column = self.num_columns
        counts = Counter(zip(option.part_costs, option.part_memory, strict=True))
        firsts = {size: column + 1 + i * len(ranks) for i, size in enumerate(counts)}
        self.num_columns += 1 + len(counts) * len(ranks)
        self.rows.append(({column: 1.0, 1 + option.kind: -1.0}, -np.inf, 0))
        for size, first in firsts.items():
            self.rows.append(({first + rank: 1.0 for rank in ranks} | {column: -float(counts[size])}, 0, 0))
        for rank in ranks:
            # At most one part of an item is on a rank.
            self.rows.append(({first + rank: 1.0 for first in firsts.values()} | {column: -1.0}, -np.inf, 0))
            self.cost[rank][column] = option.everywhere_cost / self.unit
            if option.everywhere_memory is not None:
                self.memory[rank][column] = float(option.everywhere_memory[rank]) / self.problem.capacity
            for (cost, memory), first in firsts.items():
                self.cost[rank][first + rank] = cost / self.unit
                self.memory[rank][first + rank] = memory / self.problem.capacity
        return column, firsts

    def solve(self, cutoff: float) -> Packing | None:
        """Returns a packing that costs less than ``cutoff``, or None if none is found."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        problem, objective = self.problem, np.zeros(self.num_columns)
        objective[0] = 1.0
        for kind, fixed in enumerate(problem.fixed):
            objective[1 + kind] = 0.0 if kind in problem.used else fixed / self.unit
        least = {column: float(objective[column]) for column in np.flatnonzero(objective).tolist()}
        rows: list[tuple[dict[int, float], float, float]] = [
            *self.rows,
            (least, -np.inf, (cutoff - problem.fixed_cost(())) / self.unit),
        ]
        starts = np.cumsum([0] + [len(coefficients) for coefficients, _, _ in rows])
        columns = [column for coefficients, _, _ in rows for column in coefficients]
        values = [value for coefficients, _, _ in rows for value in coefficients.values()]
        matrix = csr_array((values, columns, starts), shape=(len(rows), self.num_columns))
        is_z = np.arange(self.num_columns) == 0
        answer = milp(
            objective,
            constraints=LinearConstraint(matrix, [row[1] for row in rows], [row[2] for row in rows]),
            integrality=~is_z,
            bounds=Bounds(0, np.where(is_z, np.inf, 1)),
            options={"node_limit": _MOST_NODES, "mip_rel_gap": _GAP},
        )
        return None if answer.x is None else self._packing(answer.x > 0.5)

    def _packing(self, chosen: np.ndarray) -> Packing | None:
        packing, num_ranks = Packing(self.problem), self.problem.num_ranks
        for item, options in enumerate(self.options):
            number = next(number for number, (column, _) in enumerate(options) if chosen[column])
            option = self.problem.options[item][number]
            held = {
                size: np.flatnonzero(chosen[first : first + num_ranks]).tolist()
                for size, first in options[number][1].items()
            }
            ranks = [held[size].pop(0) for size in zip(option.part_costs, option.part_memory, strict=True)]
            packing.put(item, number, ranks)
        # The solver keeps limits to a tolerance only.
        return packing if packing.feasible else None
