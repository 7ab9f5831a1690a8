"""Packing of items on ranks under a memory limit: the heuristics of Neo (section 4.1), greedy and largest differencing.

Knows nothing of tables: an item has options, and an option has parts for different ranks plus a share on every rank.
The objective is the cost of the busiest rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Option", "Packing", "Problem", "differencing", "greedy", "pack"]

Vector = NDArray[np.float64]

_INF = np.inf
# The largest load of a rank, and the largest part of an item, up to which `greedy` takes the cheapest option; in mean
# loads that are possible at best.
_TARGETS = ((_INF, 1.0), (_INF, 0.5), (_INF, 0.25), (1.5, 1.5), (1.1, 1.1), (1.05, 0.8), (1.0, 1.0), (0.5, 0.5))
# Smaller sets of kinds that can save less than this share are not tried.
_KINDS_GAIN = 0.005
# Share above an even load at which no better places are looked for.
_CLOSE = 0.002
# Share above the lower bound at which no finer cuts are tried.
_ENOUGH = 0.015


class Option(NamedTuple):
    """One way to cut an item."""

    part_costs: tuple[float, ...]
    """Cost of each part in seconds, largest first; parts go to different ranks."""
    part_memory: tuple[float, ...]
    """Bytes of each part."""
    everywhere_cost: float
    """Cost on every rank."""
    everywhere_memory: float
    """Bytes on every rank."""
    kind: int
    """Index of its fixed cost in `Problem.fixed`."""

    def total(self, num_ranks: int) -> float:
        """Cost summed over ranks."""
        return sum(self.part_costs) + num_ranks * self.everywhere_cost

    def all_memory(self, num_ranks: int) -> float:
        """Bytes of all ranks together."""
        return sum(self.part_memory) + num_ranks * self.everywhere_memory

    @property
    def most_memory(self) -> float:
        """Largest memory on one rank."""
        return self.everywhere_memory + max(self.part_memory, default=0.0)


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
    tolerance: float = 0.0
    """Share by which a packing that cuts fewer items may cost more."""

    @property
    def num_ranks(self) -> int:
        """L."""
        return len(self.cost)

    @cached_property
    def cheapest_first(self) -> list[list[Option]]:
        """Options of each item by their cost summed over ranks."""
        return [sorted(options, key=lambda option: option.total(self.num_ranks)) for options in self.options]

    @cached_property
    def least_mean(self) -> float:
        """Mean cost of a rank if every item takes its cheapest option, without fixed costs."""
        least = sum(options[0].total(self.num_ranks) for options in self.cheapest_first)
        return (float(self.cost.sum()) + least) / self.num_ranks

    def fixed_cost(self, kinds: Iterable[int]) -> float:
        """The fixed costs of some kinds and of those in use already."""
        return sum(self.fixed[kind] for kind in self.used.union(kinds))

    @property
    def lower_bound(self) -> float:
        """No packing costs less: the mean over ranks plus the smallest fixed cost."""
        kinds = {option.kind for options in self.options for option in options}
        return self.least_mean + min(map(self.fixed_cost, [[kind] for kind in kinds] or [[]]))


class Packing:
    """An option and ranks for every item, with the sums they make."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.cost = problem.cost.copy()
        self.memory = problem.memory.copy()
        self.chosen: dict[int, Option] = {}
        """Option of each item that is placed."""
        self.ranks: dict[int, tuple[int, ...]] = {}
        """Rank of each part of each item that is placed."""

    def put(self, item: int, option: Option, ranks: Sequence[int]) -> None:
        """Places an item."""
        self.chosen[item], self.ranks[item] = option, tuple(ranks)
        self.cost += option.everywhere_cost
        self.memory += option.everywhere_memory
        for rank, cost, memory in zip(ranks, option.part_costs, option.part_memory, strict=True):
            self.cost[rank] += cost
            self.memory[rank] += memory

    def room_for(self, option: Option, order: NDArray[np.int64]) -> tuple[int, ...] | None:
        """The first ranks of ``order`` that have room for an option's parts, by part; None: there is no room."""
        room = self.problem.capacity - option.everywhere_memory
        if self.memory.max() > room:
            return None
        if self.problem.capacity < np.inf:
            order = order[self.memory[order] + max(option.part_memory, default=0.0) <= room]
        num_parts = len(option.part_costs)
        return tuple(order[:num_parts].tolist()) if len(order) >= num_parts else None

    @property
    def num_cut(self) -> int:
        """Items in more than one part."""
        return sum(len(ranks) > 1 for ranks in self.ranks.values())

    @cached_property
    def objective(self) -> float:
        """Cost of the busiest rank."""
        return float(self.cost.max()) + self.problem.fixed_cost({option.kind for option in self.chosen.values()})


def pack(problem: Problem) -> Packing | None:
    """Places all items by greedy and by largest differencing, and keeps the better packing (Neo, section 4.1).

    This is repeated with ever finer cuts (`greedy` chooses the options for both), and without some
    of the kinds, because each kind in use has a fixed cost. Of the packings that cost at most `Problem.tolerance` more
    than the cheapest, the one that cuts the fewest items is kept.

    Returns:
        None if no packing within the memory limit was found.
    """
    found = list(_with_finer_cuts(problem))
    most_fixed = problem.fixed_cost({option.kind for options in problem.options for option in options})
    for kinds, fewer in _fewer_kinds(problem):
        least = min((packing.objective for packing in found), default=0.0)
        # No more than the fixed costs of the other kinds can be saved.
        if most_fixed - problem.fixed_cost(kinds) >= least * _KINDS_GAIN:
            found += _with_finer_cuts(fewer)
    most = min((packing.objective for packing in found), default=0.0) * (1 + problem.tolerance)
    kept = [packing for packing in found if packing.objective <= most]
    return min(kept, key=lambda packing: (packing.num_cut, packing.objective), default=None)


def _with_finer_cuts(problem: Problem) -> Iterator[Packing]:
    """The better of the two heuristics for each target that has a packing."""
    mean, enough = problem.least_mean, problem.lower_bound * (1 + _ENOUGH)
    for target, part in _TARGETS:
        limits = target * mean, part * mean
        better = greedy(problem, *limits) or greedy(problem, *limits, by_memory=True)
        if better is None:
            continue
        if better.cost.max() > better.cost.mean() * (1 + _CLOSE):  # else it is even
            second = differencing(problem, [better.chosen[item] for item in range(len(problem.options))])
            if (second.memory <= problem.capacity).all() and second.objective < better.objective:
                better = second
        yield better
        if better.objective <= enough:
            break


def _fewer_kinds(problem: Problem) -> Iterator[tuple[tuple[int, ...], Problem]]:
    """The problem with each smaller set of kinds that leaves every item an option."""
    kinds = sorted({option.kind for options in problem.options for option in options})
    for size in range(len(kinds) - 1, 0, -1):
        for kept in combinations(kinds, size):
            options = [[option for option in options if option.kind in kept] for options in problem.options]
            if all(options):
                yield kept, replace(problem, options=options)


def greedy(problem: Problem, target: float, part: float = np.inf, *, by_memory: bool = False) -> Packing | None:
    """Places items largest first, each part on the cheapest rank with room (Neo, section 4.1).

    An item takes its cheapest option whose parts cost at most ``part`` seconds and leave their ranks at ``target`` or
    below; where there is none, the option that leaves them cheapest. ``by_memory`` places the largest memory first, for
    tight limits. None: an item finds no room.
    """
    packing, cheapest_first = Packing(problem), problem.cheapest_first

    def size(item: int) -> float:
        options = cheapest_first[item]
        return min(option.most_memory for option in options) if by_memory else options[0].total(problem.num_ranks)

    for item in sorted(range(len(cheapest_first)), key=lambda item: (-size(item), item)):
        best: tuple[float, Option, tuple[int, ...]] | None = None
        order = np.lexsort((packing.memory, packing.cost))
        for option in cheapest_first[item]:
            ranks = packing.room_for(option, order)
            if ranks is None:
                continue
            touched = packing.cost[list(ranks)] + option.part_costs if ranks else packing.cost
            cost = float(touched.max()) + option.everywhere_cost
            if best is None or cost < best[0]:
                best = cost, option, ranks
            if cost <= target and max(option.part_costs, default=0.0) <= part:
                break
        if best is None:
            return None
        packing.put(item, best[1], best[2])
    return packing


def differencing(problem: Problem, preferred: Sequence[Option]) -> Packing:
    """Largest differencing (Karmarkar-Karp): joins the two most uneven partial packings until one is left.

    Ignores memory. The load that ranks have already takes part as one partial packing.
    ``preferred`` is the option of each item.
    """
    num_ranks = problem.num_ranks
    # A partial packing: costs of its slots, largest first, and their nodes in the tree of joined slots. The leaves of
    # the tree are the ranks, then L slots of each item, of which the first ones are its parts.
    heap: list[tuple[float, int, Vector, NDArray[np.int64]]] = []
    every_slot = np.arange(num_ranks)
    joined: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = []

    def push(costs: Vector, nodes: NDArray[np.int64], number: int) -> None:
        order = np.argsort(-costs, kind="stable")
        heapq.heappush(heap, (float(costs.min() - costs.max()), number, costs[order], nodes[order]))

    push(problem.cost - problem.cost.min(), every_slot, -1)
    for item, option in enumerate(preferred):
        if option.part_costs:
            costs = np.zeros(num_ranks)
            costs[: len(option.part_costs)] = option.part_costs
            push(costs, every_slot + (item + 1) * num_ranks, item)
    number = len(preferred)
    while len(heap) > 1:
        *_, first, left = heapq.heappop(heap)
        *_, second, right = heapq.heappop(heap)
        nodes = every_slot + (number + 1) * num_ranks
        joined.append((nodes, left, right[::-1]))
        push(first + second[::-1], nodes, number)
        number += 1
    slot = np.zeros((number + 1) * num_ranks, dtype=np.int64)
    slot[heap[0][3]] = every_slot
    for nodes, left, right in reversed(joined):
        slot[left] = slot[right] = slot[nodes]
    rank_of_slot = np.argsort(slot[:num_ranks])
    packing = Packing(problem)
    for item, option in enumerate(preferred):
        first_part = (item + 1) * num_ranks
        packing.put(item, option, rank_of_slot[slot[first_part : first_part + len(option.part_costs)]].tolist())
    return packing
