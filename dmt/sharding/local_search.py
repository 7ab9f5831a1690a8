"""`pack`: the better of two heuristics, improved by local search; small problems are solved by integer programming."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

import numpy as np

from dmt.sharding.packing import Option, Packing, Problem, differencing, greedy

__all__ = ["Packed", "improve", "pack", "solve_exactly"]

# Relative; below it, a change is rounding.
_GAIN = 1e-9
# Ranks that a part of the busiest rank is moved to or swapped with, cheapest first.
_PARTNERS = 16
# Approximate number of pairs of parts that one step looks at.
_MOST_SWAPS = 20_000
# The start of `_starts` that minimises memory only.
_LAST_RESORT = 2
# A smaller set of kinds must be better by this share: it cuts tables that could stay whole.
_KINDS_GAIN = 0.005
# Options of all items times ranks up to which a packing is also sought exactly: at most a second.
_MOST_EXACT = 200
# The integer program does not search for a packing that is better by less than this share.
_EXACT_GAIN = 0.003
# A count and not a time, so that all ranks of a job find the same packing.
_MOST_NODES = 200


class Packed(NamedTuple):
    """Packing that `pack` found."""

    packing: Packing
    method: str
    """Names the heuristic and what improved its result; for the report."""


def pack(problem: Problem) -> Packed | None:
    """Places all items so that the busiest rank costs little.

    Greedy and largest differencing (Neo, section 4.1) start from the cheapest options and from options cut to the mean
    load; the better result is improved by local search. Smaller sets of kinds are tried too, as each kind has a fixed
    cost. If options times ranks are few, a mixed integer program looks for a better packing.

    Penalized kinds are first left out for all items that have other options, then allowed for items above the mean
    load or the memory of a rank, then for all. The first packing wins that costs at most `Problem.tolerance` more than
    the last one.

    Returns:
        None if no packing within the memory limit was found.
    """
    candidates = []
    for fewer in _with_few_penalized(problem):
        candidates.append(_pack(fewer))
        if _cost(candidates[-1]) <= _floor(problem) * (1 + problem.tolerance):
            return candidates[-1]
    candidates.append(_pack(problem))
    most = _cost(candidates[-1]) * (1 + problem.tolerance)
    return next((found for found in candidates if found is not None and _cost(found) <= most), None)


def _cost(found: Packed | None) -> float:
    return np.inf if found is None else found.packing.objective


def _with_few_penalized(problem: Problem) -> Iterator[Problem]:
    """Yields the problem without penalized kinds, then with them only for items above the mean load or the memory.

    An item that has nothing else keeps what it has.
    """
    mean = problem.least_mean
    for is_strict in (True, False):
        kept = []
        for options in problem.options:
            others = [option for option in options if option.kind not in problem.penalized]
            fits = others and (is_strict or _fits_whole(others, mean, problem))
            kept.append(others if fits else options)
        if all(len(fewer) == len(options) for fewer, options in zip(kept, problem.options, strict=True)):
            return
        yield replace(problem, options=kept)


def _fits_whole(options: Sequence[Option], mean: float, problem: Problem) -> bool:
    cheapest = options[_least(options, range(len(options)), problem.num_ranks)]
    return max(cheapest.part_costs, default=0.0) <= mean and cheapest.most_memory <= problem.capacity


def _pack(problem: Problem) -> Packed | None:
    best = _heuristics(problem)
    for without in _fewer_kinds(problem):
        # No more can be saved than the fixed costs in use, and nothing costs less than the mean over ranks.
        if _floor(without) < _cost(best) * (1 - _KINDS_GAIN):
            found = _heuristics(without)
            best = found if _cost(found) < _cost(best) * (1 - _KINDS_GAIN) else best
    is_large = sum(map(len, problem.options)) * problem.num_ranks > _MOST_EXACT
    if is_large or _floor(problem) >= _cost(best) * (1 - _EXACT_GAIN):
        return best
    exact = solve_exactly(problem, best and best.packing)
    return best if exact is None or (best and exact is best.packing) else Packed(exact, "milp")


def _heuristics(problem: Problem) -> Packed | None:
    best: Packed | None = None
    for number, preferred in enumerate(_starts(problem)):
        if _floor(problem) >= _cost(best) * (1 - _GAIN) or (number == _LAST_RESORT and best is not None):
            break
        firsts = [("largest differencing", differencing(problem, preferred)), ("greedy", greedy(problem, preferred))]
        fitting = [(name, first) for name, first in firsts if first is not None and first.feasible]
        if not fitting:
            tight = greedy(problem, preferred, by_memory=True)
            fitting = [("greedy by memory", tight)] if tight else []
        for name, first in fitting:
            before = first.objective
            improve(first)
            if first.objective < _cost(best) * (1 - _GAIN):
                best = Packed(first, name + (", local search" if first.objective < before * (1 - _GAIN) else ""))
    return best


def _starts(problem: Problem) -> Iterator[list[int]]:
    """Options of all items to begin with: the cheapest; none above the mean load; those of least memory."""
    num_ranks = problem.num_ranks
    least = [_least(options, range(len(options)), num_ranks) for options in problem.options]
    yield least
    mean, cut = problem.least_mean, []
    for options, cheapest in zip(problem.options, least, strict=True):
        fitting = [o for o, option in enumerate(options) if max(option.part_costs, default=0.0) <= mean]
        cut.append(_least(options, fitting, num_ranks) if fitting else cheapest)
    yield cut
    yield [min(range(len(options)), key=lambda o: (options[o].most_memory, o)) for options in problem.options]


def _least(options: Sequence[Option], among: Sequence[int], num_ranks: int) -> int:
    return min(among, key=lambda o: (options[o].total(num_ranks), o))


def _fewer_kinds(problem: Problem) -> Iterator[Problem]:
    """The problem with each smaller set of kinds that leaves every item an option."""
    kinds = sorted({option.kind for options in problem.options for option in options})
    for size in range(len(kinds) - 1, 0, -1):
        for kept in combinations(kinds, size):
            options = [[option for option in options if option.kind in kept] for options in problem.options]
            if all(options):
                yield replace(problem, options=options)


def _floor(problem: Problem) -> float:
    """Lower bound of the cost of the busiest rank: the mean over ranks plus the smallest fixed cost."""
    kinds = {option.kind for options in problem.options for option in options}
    return problem.least_mean + min(map(problem.fixed_cost, [[kind] for kind in kinds] or [[]]))


def improve(packing: Packing, max_steps: int = 20_000) -> Packing:
    """Changes one or two items at a time, in place, while that relieves the busiest rank.

    Tries the best move of a part to another rank or swap with a part there, then the best other option for an item of
    the busiest rank, then parts instead of a share on every rank. Deterministic; memory limits are kept.
    """
    for _ in range(max_steps):
        if not (_move_or_swap(packing) or _cut_another_way(packing) or _gather(packing)):
            break
    return packing


def _move_or_swap(packing: Packing) -> bool:
    cost, memory, limit = packing.cost, packing.memory, packing.problem.capacity
    top = int(cost.argmax())
    bar = float(cost[top]) * (1 - _GAIN)
    own = _loads(packing, top)
    if not own:
        return False
    # A move is a swap with nothing.
    partners = [int(rank) for rank in np.argsort(cost, kind="stable")[:_PARTNERS] if rank != top]
    others: list[tuple[int, int, int, float, float]] = []
    for rank in partners:
        if len(own) * len(others) > _MOST_SWAPS:
            break
        others += [(rank, -1, -1, 0.0, 0.0), *((rank, *load) for load in _loads(packing, rank))]
    if not others:
        return False
    ranks = np.array([other[0] for other in others])
    _, _, costs, sizes = (np.array(column)[:, None] for column in zip(*own, strict=True))
    _, _, _, other_costs, other_sizes = (np.array(column)[None, :] for column in zip(*others, strict=True))
    after = np.maximum(cost[top] - costs + other_costs, cost[ranks] + costs - other_costs)
    after[(memory[ranks] + sizes - other_sizes > limit) | (memory[top] - sizes + other_sizes > limit)] = np.inf
    for flat in np.argsort(after, axis=None, kind="stable")[:_PARTNERS]:
        mine, theirs = divmod(int(flat), len(others))
        if after[mine, theirs] >= bar:
            return False
        item, part, *_ = own[mine]
        rank, other, other_part, *_ = others[theirs]
        if rank in packing.ranks[item] or (other >= 0 and top in packing.ranks[other]):
            continue
        _relocate(packing, item, part, rank)
        if other >= 0:
            _relocate(packing, other, other_part, top)
        return True
    return False


def _relocate(packing: Packing, item: int, part: int, rank: int) -> None:
    ranks, option = list(packing.ranks[item]), packing.chosen[item]
    ranks[part] = rank
    packing.take(item)
    packing.put(item, option, ranks)


def _loads(packing: Packing, rank: int) -> list[tuple[int, int, float, float]]:
    """(item, part, cost, memory) on a rank, in an order of their own."""
    found = []
    for item, part in sorted(packing.on_rank[rank]):
        option = packing.option_of(item)
        found.append((item, part, option.part_costs[part], option.part_memory[part]))
    return found


def _cut_another_way(packing: Packing) -> bool:
    top = int(packing.cost.argmax())
    fixed = packing.fixed
    best, action = packing.objective * (1 - _GAIN), None
    for item in sorted({item for item, _ in packing.on_rank[top]}):
        before, before_ranks = packing.chosen[item], packing.ranks[item]
        packing.take(item)
        for number, option in enumerate(packing.problem.options[item]):
            ranks = packing.room_for(option) if number != before else None
            if ranks is None:
                continue
            packing.put(item, number, ranks)
            # Other ranks may be as busy as the busiest: they are relieved in their turn.
            everywhere = option.everywhere_cost or packing.fixed != fixed
            touched = packing.cost if everywhere else packing.cost[[*before_ranks, *ranks]]
            after = float(touched.max()) + packing.fixed
            if after < best:
                best, action = after, (item, number, ranks)
            packing.take(item)
        packing.put(item, before, before_ranks)
    if action is not None:
        packing.take(action[0])
        packing.put(*action)
    return action is not None


def _gather(packing: Packing, tries: int = 8) -> bool:
    """Puts items that are spread over all ranks onto some of them, which relieves all others."""
    cheap = np.sort(packing.cost)
    top = cheap[-1]
    found = []
    for item in range(len(packing.chosen)):
        share = packing.option_of(item).everywhere_cost
        for number, option in enumerate(packing.problem.options[item]) if share else ():
            if option.everywhere_cost == 0:
                after = max(cheap[k] + cost for k, cost in enumerate(option.part_costs)) - share
                if after < top:
                    found.append((max(after, top - share), item, number))
    gathered, failed = False, 0
    for _, item, number in sorted(found):
        if packing.option_of(item).everywhere_cost == 0:
            continue  # gathered already, another way
        before, before_ranks, objective = packing.chosen[item], packing.ranks[item], packing.objective
        packing.take(item)
        ranks = packing.room_for(packing.problem.options[item][number])
        if ranks is not None:
            packing.put(item, number, ranks)
            if packing.objective < objective * (1 - _GAIN):
                gathered = True
                continue
            packing.take(item)
        packing.put(item, before, before_ranks)
        failed += 1
        if failed == tries:
            break
    return gathered


def solve_exactly(problem: Problem, best: Packing | None = None) -> Packing | None:
    """Returns a packing that costs at least 0.3 % less than ``best``, or ``best`` if none is found.

    Minimises z + the fixed costs of the used kinds, where z is the cost of the busiest rank. Binary variables tell
    which option each item takes and which ranks hold its parts; parts of equal size are interchangeable. Meant for at
    most some 16 items and 8 ranks.
    """
    found = _Program(problem).solve(np.inf if best is None else best.objective * (1 - _EXACT_GAIN))
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
        # The solver's tolerances are absolute: costs are shares of a rank's least load, memory of its capacity.
        self.unit = problem.least_mean or 1.0
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
        total = {column: float(objective[column]) for column in np.flatnonzero(objective).tolist()}
        rows = [*self.rows, (total, -np.inf, (cutoff - problem.fixed_cost(())) / self.unit)]
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
            options={"node_limit": _MOST_NODES, "mip_rel_gap": _EXACT_GAIN},
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
