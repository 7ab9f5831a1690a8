"""Packs items onto ranks under a memory limit by Neo's heuristics (section 4.1), greedy and largest differencing.

An item, such as a table, has options, and an option has parts that go to different ranks. The objective is the cost of
the busiest rank.
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
Ranks = NDArray[np.int64]

# Pairs of limits within which `greedy` takes an item's cheapest option: on the load of a rank and on the item's largest
# part, in units of the lowest possible mean load.
_TARGETS = (
    *((np.inf, 1.0), (np.inf, 0.5), (np.inf, 0.25)),
    *((1.5, 1.5), (1.1, 1.1), (1.05, 0.8), (1.0, 1.0), (0.5, 0.5)),
)
# Smaller sets of kinds that can save less than this share are not tried.
_KINDS_GAIN = 0.005
# No finer cuts are tried once a packing costs at most this share more than the lower bound.
_ENOUGH = 0.015


class Option(NamedTuple):
    """One way to cut an item into parts, which go to different ranks."""

    costs: Vector
    """Seconds of each part, float64 [parts], largest first."""
    memory: Vector
    """Bytes of each part, float64 [parts]."""
    kind: int
    """Index of the option's fixed cost in `Problem.fixed`."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Items with their options, and the load that the L ranks already have."""

    options: Sequence[Sequence[Option]]
    """Options of each item, at least one, sorted by their cost summed over ranks."""
    cost: Vector
    """Seconds that each rank already has, float64 [L]."""
    memory: Vector
    """Bytes that each rank already holds, float64 [L]."""
    capacity: float
    """Memory limit of a rank in bytes."""
    fixed: tuple[float, ...]
    """Seconds that each kind costs every rank, once, if any item uses the kind."""
    used: frozenset[int] = frozenset()
    """Kinds whose fixed cost is due anyway, because what ranks already have uses them."""
    avoided: int | None = None
    """Kind to give to as few items as possible, at up to 1 + `tolerance` times the lowest cost found; None: no kind."""
    tolerance: float = 0.0

    @cached_property
    def kinds(self) -> set[int]:
        """The kinds of all options."""
        return {option.kind for options in self.options for option in options}

    def fixed_cost(self, kinds: Iterable[int]) -> float:
        """Returns the fixed seconds of ``kinds`` and of the kinds in `used`."""
        return sum(self.fixed[kind] for kind in self.used.union(kinds))


class Packing:
    """An option and ranks for every item, with the resulting cost and memory of each rank."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.cost = problem.cost.copy()
        self.memory = problem.memory.copy()
        self.chosen: dict[int, Option] = {}
        """Option of each item that is placed."""
        self.ranks: dict[int, Ranks] = {}
        """Rank of each part of each item that is placed."""

    def put(self, item: int, option: Option, ranks: Ranks) -> None:
        """Places the parts of an item on ``ranks``."""
        self.chosen[item], self.ranks[item] = option, ranks
        self.cost[ranks] += option.costs
        self.memory[ranks] += option.memory

    @cached_property
    def objective(self) -> float:
        """Seconds of the busiest rank, with the fixed costs."""
        return float(self.cost.max()) + self.problem.fixed_cost({option.kind for option in self.chosen.values()})


def pack(problem: Problem) -> Packing | None:
    """Places all items by greedy and by largest differencing, and keeps the better packing (Neo, section 4.1).

    Repeats this with ever finer cuts (`greedy` chooses the options for both heuristics), and without some of the kinds,
    because each kind in use has a fixed cost. Of the packings that cost at most 1 + `Problem.tolerance` times the
    cheapest, keeps the one with the fewest items of the kind `Problem.avoided`.

    Returns:
        The packing; None if it finds none within the memory limit.
    """
    packings: list[Packing] = []
    for part in _by_kinds(problem):
        least = min((packing.objective for packing in packings), default=np.inf)
        # Leaving out kinds saves at most their fixed costs.
        if not packings or problem.fixed_cost(problem.kinds) - problem.fixed_cost(part.kinds) >= least * _KINDS_GAIN:
            packings += _with_finer_cuts(part, least * (1 + problem.tolerance))
    most = min((packing.objective for packing in packings), default=0.0) * (1 + problem.tolerance)
    good = [packing for packing in packings if packing.objective <= most]

    def num_avoided(packing: Packing) -> int:
        return sum(option.kind == problem.avoided for option in packing.chosen.values())

    return min(good, key=lambda packing: (num_avoided(packing), packing.objective), default=None)


def _by_kinds(problem: Problem) -> Iterator[Problem]:
    """Yields the problem with each set of kinds that leaves every item an option, starting with all kinds."""
    kinds = sorted(problem.kinds)
    for size in range(len(kinds), -1, -1):
        for kept in combinations(kinds, size):
            options = [[option for option in options if option.kind in kept] for options in problem.options]
            if all(options):
                yield replace(problem, options=options)


def _with_finer_cuts(problem: Problem, most: float) -> Iterator[Packing]:
    """Yields the better packing of the two heuristics for each pair of limits under which `greedy` finds one.

    Yields none if all would cost more than ``most`` or need more memory than all ranks have.
    """
    least = sum(float(options[0].costs.sum()) for options in problem.options)
    mean = (float(problem.cost.sum()) + least) / len(problem.cost)
    bound = mean + min((problem.fixed_cost([kind]) for kind in problem.kinds), default=0.0)  # no packing costs less
    if bound > most * (1 + 1e-9):  # by more than rounding
        return
    if np.isfinite(problem.capacity):
        needed = sum(min(float(option.memory.sum()) for option in options) for options in problem.options)
        if needed > float((problem.capacity - problem.memory).sum()) * (1 + 1e-9):  # no `greedy` would find room
            return
    for limits in [(target * mean, part * mean) for target, part in _TARGETS]:
        if (better := greedy(problem, *limits)) is None:
            continue
        second = differencing(problem, [better.chosen[item] for item in range(len(problem.options))])
        if (second.memory <= problem.capacity).all() and second.objective < better.objective:
            better = second
        yield better
        if better.objective <= bound * (1 + _ENOUGH):
            break


def greedy(problem: Problem, target: float, part: float = np.inf, *, by_memory: bool = False) -> Packing | None:
    """Places items largest first, each part on the cheapest rank with room (Neo, section 4.1).

    Tries the options of an item, cheapest first, up to one whose parts cost at most ``part`` seconds and load their
    ranks to at most ``target`` seconds, and takes the one with the lowest resulting load. If an item does not fit,
    starts again ``by_memory``, with the largest memory first; returns None if that fails, too.
    """
    packing = Packing(problem)
    sizes = [
        min(option.memory.max() for option in options) if by_memory else options[0].costs.sum()
        for options in problem.options
    ]
    for item in np.argsort([-size for size in sizes], kind="stable").tolist():
        best: tuple[float, Option, Ranks] | None = None
        # Cheapest rank first; among equals the one with most room.
        order = np.lexsort((packing.memory, packing.cost))
        for option in problem.options[item]:
            free = order[packing.memory[order] + option.memory.max() <= problem.capacity]
            if len(ranks := free[: len(option.costs)]) < len(option.costs):
                continue
            cost = float((packing.cost[ranks] + option.costs).max())
            if best is None or cost < best[0]:
                best = cost, option, ranks
            # One that is even enough is the last to be tried: finer cuts cost more in total.
            if cost <= target and option.costs[0] <= part:
                break
        if best is None:
            return None if by_memory else greedy(problem, target, part, by_memory=True)
        packing.put(item, best[1], best[2])
    return packing


def differencing(problem: Problem, preferred: Sequence[Option]) -> Packing:
    """Packs by largest differencing (Karmarkar-Karp): joins the two most uneven partial packings until one is left.

    Ignores memory. The load that ranks already have is a partial packing, too. ``preferred`` has each item's option.
    """
    num_ranks = len(problem.cost)
    # A partial packing: costs of its slots, largest first, and their nodes in the tree of joined slots. The leaves of
    # the tree are the ranks, then L slots of each item, of which the first ones are its parts.
    heap: list[tuple[float, int, Vector, Ranks]] = []
    every_slot = np.arange(num_ranks)
    joined: list[tuple[Ranks, Ranks, Ranks]] = []

    def push(costs: Vector, number: int) -> Ranks:
        nodes = every_slot + (number + 1) * num_ranks
        order = (-costs).argsort(kind="stable")
        ordered = costs[order]
        heapq.heappush(heap, (float(ordered[-1] - ordered[0]), number, ordered, nodes[order]))
        return nodes

    push(problem.cost, -1)
    for item, option in enumerate(preferred):
        costs = np.zeros(num_ranks)
        costs[: len(option.costs)] = option.costs
        push(costs, item)
    for number in range(len(preferred), 2 * len(preferred)):
        *_, first, left = heapq.heappop(heap)
        *_, second, right = heapq.heappop(heap)
        # The largest slot of one meets the smallest of the other: their difference is what remains (Karmarkar-Karp).
        joined.append((push(first + second[::-1], number), left, right[::-1]))
    slot = np.zeros((2 * len(preferred) + 1) * num_ranks, dtype=np.int64)
    slot[heap[0][3]] = every_slot
    # Back down the tree of joins: a slot is on the rank of the slot that it was joined into.
    for nodes, left, right in reversed(joined):
        slot[left] = slot[right] = slot[nodes]
    rank_of_slot = np.argsort(slot[:num_ranks])
    packing = Packing(problem)
    for item, option in enumerate(preferred):
        first_part = (item + 1) * num_ranks
        packing.put(item, option, rank_of_slot[slot[first_part : first_part + len(option.costs)]])
    return packing
