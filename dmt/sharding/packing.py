"""Packing of items on ranks under a memory limit: the heuristics of Neo (section 4.1), greedy and largest differencing.

Knows nothing of tables: an item has options, and an option has parts for different ranks plus a share on every rank.
The objective is the cost of the busiest rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Option", "Packing", "Problem", "differencing", "greedy"]

Vector = NDArray[np.float64]


class Option(NamedTuple):
    """One way to cut an item."""

    part_costs: tuple[float, ...]
    """Cost of each part in seconds, largest first; parts go to different ranks."""
    part_memory: tuple[float, ...]
    """Bytes of each part."""
    everywhere_cost: float
    """Cost on every rank."""
    everywhere_memory: Vector | None
    """[L] memory on each rank; None: none."""
    kind: int
    """Index of its fixed cost in `Problem.fixed`."""

    def total(self, num_ranks: int) -> float:
        """Cost summed over ranks."""
        return sum(self.part_costs) + num_ranks * self.everywhere_cost

    @property
    def most_memory(self) -> float:
        """Largest memory on one rank."""
        spread = 0.0 if self.everywhere_memory is None else float(self.everywhere_memory.max())
        return spread + max(self.part_memory, default=0.0)


@dataclass(frozen=True, eq=False)
class Problem:
    """Items with their options, and the load that ranks have already."""

    options: Sequence[Sequence[Option]]
    """Options of each item; at least one."""
    cost: Vector
    """[L] seconds of the load that ranks have already."""
    memory: Vector
    """[L] bytes of the load that ranks have already."""
    capacity: float
    """Bytes of a rank."""
    fixed: tuple[float, ...]
    """Seconds that each kind costs every rank, once, if any item uses it."""
    used: frozenset[int] = frozenset()
    """Kinds in use already."""
    penalized: frozenset[int] = frozenset()
    """Kinds that items with other options take only for a gain above ``tolerance``."""
    tolerance: float = 0.0
    """Share by which a packing without penalized kinds may cost more."""

    @property
    def num_ranks(self) -> int:
        """L."""
        return len(self.cost)

    @property
    def least_mean(self) -> float:
        """Mean cost of a rank if every item takes its cheapest option, without fixed costs."""
        least = sum(min(option.total(self.num_ranks) for option in options) for options in self.options)
        return (float(self.cost.sum()) + least) / self.num_ranks

    def fixed_cost(self, kinds: Iterable[int]) -> float:
        """The fixed costs of some kinds and of those in use already."""
        return sum(self.fixed[kind] for kind in self.used.union(kinds))


class Packing:
    """An option and ranks for every item, with the sums they make; items can be taken out and put back."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.cost = problem.cost.copy()
        self.memory = problem.memory.copy()
        self.chosen: list[int] = [-1] * len(problem.options)
        self.ranks: list[tuple[int, ...]] = [()] * len(problem.options)
        self.on_rank: list[set[tuple[int, int]]] = [set() for _ in range(problem.num_ranks)]
        """(item, part) on each rank."""
        self.uses = [0] * len(problem.fixed)
        """Items of each kind."""

    def put(self, item: int, option: int, ranks: Sequence[int]) -> None:
        """Places an item that is out."""
        self.chosen[item], self.ranks[item] = option, tuple(ranks)
        self._add(item, 1.0)
        self.uses[self.option_of(item).kind] += 1
        for part, rank in enumerate(ranks):
            self.on_rank[rank].add((item, part))

    def take(self, item: int) -> None:
        """Takes an item out."""
        self._add(item, -1.0)
        self.uses[self.option_of(item).kind] -= 1
        for part, rank in enumerate(self.ranks[item]):
            self.on_rank[rank].remove((item, part))
        self.chosen[item], self.ranks[item] = -1, ()

    def option_of(self, item: int) -> Option:
        """The chosen option of an item that is placed."""
        return self.problem.options[item][self.chosen[item]]

    def _add(self, item: int, sign: float) -> None:
        option = self.option_of(item)
        if option.everywhere_cost:
            self.cost += sign * option.everywhere_cost
        if option.everywhere_memory is not None:
            self.memory += sign * option.everywhere_memory
        for rank, cost, memory in zip(self.ranks[item], option.part_costs, option.part_memory, strict=True):
            self.cost[rank] += sign * cost
            self.memory[rank] += sign * memory

    def room_for(self, option: Option) -> tuple[int, ...] | None:
        """The cheapest ranks that have room for an option's parts, largest part to cheapest; None: there is no room."""
        memory = self.memory if option.everywhere_memory is None else self.memory + option.everywhere_memory
        limit = self.problem.capacity
        if (memory > limit).any():
            return None
        if not option.part_costs:
            return ()
        free = np.flatnonzero(memory + max(option.part_memory) <= limit)
        if len(free) < len(option.part_costs):
            return None
        order = free[np.lexsort((free, self.memory[free], self.cost[free]))]
        return tuple(order[: len(option.part_costs)].tolist())

    @property
    def feasible(self) -> bool:
        """True if no rank holds more than its memory."""
        return bool((self.memory <= self.problem.capacity).all())

    @property
    def busiest(self) -> float:
        """Cost of the busiest rank, without fixed costs."""
        return float(self.cost.max())

    @property
    def fixed(self) -> float:
        """Fixed cost of the kinds in use."""
        return self.problem.fixed_cost(kind for kind, uses in enumerate(self.uses) if uses)

    @property
    def objective(self) -> float:
        """Cost of the busiest rank."""
        return self.busiest + self.fixed


def greedy(problem: Problem, preferred: Sequence[int], *, by_memory: bool = False) -> Packing | None:
    """Places items largest first, each part on the cheapest rank with room (Neo, section 4.1).

    An item takes its ``preferred`` option, or its cheapest one that fits; None: an item finds no room. ``by_memory``
    places the largest memory first, for tight limits.
    """
    packing = Packing(problem)

    def size(item: int) -> float:
        option = problem.options[item][preferred[item]]
        return max(option.part_memory if by_memory else option.part_costs, default=0.0)

    for item in sorted(range(len(preferred)), key=lambda item: (-size(item), item)):
        options = problem.options[item]
        others = sorted(range(len(options)), key=lambda o: (options[o].total(problem.num_ranks), o))
        for option in (preferred[item], *others):
            ranks = packing.room_for(options[option])
            if ranks is not None:
                packing.put(item, option, ranks)
                break
        else:
            return None
    return packing


def differencing(problem: Problem, preferred: Sequence[int]) -> Packing:
    """Largest differencing (Karmarkar-Karp): joins the two most uneven partial packings until one is left.

    Ignores memory: see `Packing.feasible`. The load that ranks have already takes part as one partial packing.
    ``preferred`` is the option of each item.
    """
    num_ranks = problem.num_ranks
    # A partial packing: slot costs, largest first, and (item, part) of each slot; (-1, rank) stands for the rank.
    heap: list[tuple[float, int, Vector, list[list[tuple[int, int]]]]] = []

    def push(costs: Vector, slots: Sequence[list[tuple[int, int]]], number: int) -> None:
        order = np.argsort(-costs, kind="stable")
        heapq.heappush(heap, (float(costs.min() - costs.max()), number, costs[order], [slots[i] for i in order]))

    push(problem.cost - problem.cost.min(), [[(-1, rank)] for rank in range(num_ranks)], -1)
    for item, option in enumerate(preferred):
        parts = problem.options[item][option].part_costs
        if parts:
            costs = np.zeros(num_ranks)
            costs[: len(parts)] = parts
            push(costs, [[(item, slot)] if slot < len(parts) else [] for slot in range(num_ranks)], item)
    number = len(preferred)
    while len(heap) > 1:
        *_, first, left = heapq.heappop(heap)
        *_, second, right = heapq.heappop(heap)
        push(first + second[::-1], [_joined(*slots) for slots in zip(left, reversed(right), strict=True)], number)
        number += 1
    rank_of: dict[tuple[int, int], int] = {}
    for slot in heap[0][3]:
        rank = next(part for item, part in slot if item < 0)
        rank_of.update(dict.fromkeys(slot, rank))
    packing = Packing(problem)
    for item, option in enumerate(preferred):
        parts = problem.options[item][option].part_costs
        packing.put(item, option, [rank_of[item, part] for part in range(len(parts))])
    return packing


def _joined(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Extends the longer list by the shorter: joining n items one by one must not copy n lists."""
    short, long = sorted((one, other), key=len)
    long += short
    return long
