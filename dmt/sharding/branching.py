"""Branch and bound over all packings of a few items: what the heuristics miss in small towers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from dmt.sharding.packing import Option, Packing, Problem

__all__ = ["branch_and_bound"]

# What cannot better the best by so much is left out.
_TOLERANCE = 0.003


def branch_and_bound(problem: Problem, best: Packing | None, max_steps: int = 20_000) -> Packing | None:
    """Looks through all packings of few items that could be better than ``best``, by depth first search.

    Ranks with equal loads are tried once. A branch ends where its busiest rank, or the mean over ranks with the least
    that the other items can cost, is no longer better than the best packing by 0.3 %.

    Args:
        problem: a few items and ranks; more than that and ``max_steps`` stops it early.
        best: the best known, if any.
        max_steps: partial packings that are looked at, at most; a count and not a time, so that all ranks of a job
            find the same.

    Returns:
        A better packing, or ``best``.
    """
    search = _Search(problem, best, max_steps)
    search.descend(0, problem.cost.tolist(), problem.memory.tolist(), problem.used)
    return search.best


class _Search:
    def __init__(self, problem: Problem, best: Packing | None, max_steps: int) -> None:
        self.problem, self.best, self.steps_left = problem, best, max_steps
        num_ranks = problem.num_ranks
        least = [min(option.total(num_ranks) for option in options) for options in problem.options]
        self.order = sorted(range(len(least)), key=lambda item: (-least[item], item))
        self.rest = np.cumsum([0.0] + [least[item] for item in reversed(self.order)])[::-1].tolist()
        self.taken: list[tuple[int, tuple[int, ...]]] = []

    def descend(self, depth: int, cost: list[float], memory: list[float], kinds: frozenset[int]) -> None:
        if depth == len(self.order):
            self._keep()
            return
        children = sorted(self._children(depth, cost, memory, kinds), key=lambda child: child[:2])
        for bound, _, option, ranks, *state in children:
            if self.steps_left <= 0 or bound >= self._bar():
                return
            self.taken.append((option, ranks))
            self.descend(depth + 1, *state)
            self.taken.pop()

    def _bar(self) -> float:
        return np.inf if self.best is None else self.best.objective * (1 - _TOLERANCE)

    def _keep(self) -> None:
        packing = Packing(self.problem)
        for item, (option, ranks) in zip(self.order, self.taken, strict=True):
            packing.put(item, option, ranks)
        if self.best is None or packing.objective < self.best.objective:
            self.best = packing

    def _children(
        self, depth: int, cost: list[float], memory: list[float], kinds: frozenset[int]
    ) -> Iterator[tuple[Any, ...]]:
        bar, limit, num_ranks = self._bar(), self.problem.capacity, len(cost)
        for number, option in enumerate(self.problem.options[self.order[depth]]):
            new_kinds = kinds | {option.kind}
            fixed = self.problem.fixed_cost(new_kinds)
            mean = (sum(cost) + option.total(num_ranks) + self.rest[depth + 1]) / num_ranks
            if mean + fixed >= bar:
                continue
            spread = option.everywhere_memory
            for ranks in _unlike_ranks(option, cost, memory):
                self.steps_left -= 1
                if self.steps_left < 0:
                    return
                new_cost = [c + option.everywhere_cost for c in cost]
                new_memory = memory.copy() if spread is None else [m + s for m, s in zip(memory, spread, strict=True)]
                for rank, c, m in zip(ranks, option.part_costs, option.part_memory, strict=True):
                    new_cost[rank] += c
                    new_memory[rank] += m
                bound = max(mean, max(new_cost)) + fixed
                if bound < bar and max(new_memory) <= limit:
                    yield bound, sum(c * c for c in new_cost), number, ranks, new_cost, new_memory, new_kinds


def _unlike_ranks(option: Option, cost: Sequence[float], memory: Sequence[float]) -> Iterator[tuple[int, ...]]:
    """Ranks for an option's parts, once for each set of loads; `column_shards` cuts parts of one or two sizes."""
    loads = [(round(c, 12), m) for c, m in zip(cost, memory, strict=True)]
    order = sorted(range(len(cost)), key=loads.__getitem__)
    num_parts = len(option.part_costs)
    num_large = option.part_costs.count(option.part_costs[0]) if num_parts else 0
    seen = set()
    for ranks in combinations(order, num_parts):
        for large in combinations(ranks, num_large):
            small = tuple(rank for rank in ranks if rank not in large)
            signature = (tuple(loads[rank] for rank in large), tuple(loads[rank] for rank in small))
            if signature not in seen:
                seen.add(signature)
                yield large + small
