"""Packing numbers on ranks: the two heuristics."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from dmt.sharding.packing import Option, Packing, Problem, differencing, greedy, pack


def problem(costs: list[float], num_ranks: int, memory: list[float] | None = None, capacity: float = np.inf) -> Problem:
    sizes = memory or [0.0] * len(costs)
    options = [[Option((cost,), (size,), 0.0, 0.0, 0)] for cost, size in zip(costs, sizes, strict=True)]
    return Problem(options, np.zeros(num_ranks), np.zeros(num_ranks), capacity, (0.0,))


def sums(packing: Packing) -> np.ndarray:
    """Loads added up anew."""
    cost = packing.problem.cost.copy()
    for item, option in packing.chosen.items():
        ranks = packing.ranks[item]
        cost += option.everywhere_cost
        for rank, part in zip(ranks, option.part_costs, strict=True):
            cost[rank] += part
    return cost


def uses(found: Packing | None) -> list[int]:
    """Items of the first two kinds."""
    assert found is not None
    return [sum(option.kind == kind for option in found.chosen.values()) for kind in (0, 1)]


def test_the_textbook_example_of_largest_differencing() -> None:
    """8 7 6 5 4 on two ranks: differencing 16 to 14, greedy 17 to 13."""
    example = problem([8.0, 7.0, 6.0, 5.0, 4.0], 2)
    assert differencing(example, [options[0] for options in example.options]).cost.max() == 16
    assert greedy(example, np.inf).cost.max() == 17
    assert pack(example).objective == 16


def test_nothing_is_packed_on_ranks_that_are_loaded_already() -> None:
    empty = Problem([], np.array([3.0, 1.0]), np.zeros(2), np.inf, (0.5, 0.25), used=frozenset({1}))
    assert pack(empty).objective == 3.25


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_loads_are_what_the_parts_add_up_to(num_ranks: int) -> None:
    rng = np.random.default_rng(num_ranks)
    options = []
    for _ in range(30):
        cost = float(rng.random())
        cuts = [Option((cost,), (0.0,), 0.0, 0.0, 0), Option((cost / 1.9, cost / 2), (0.0, 0.0), 0.0, 0.0, 1)]
        options.append([*cuts, Option((), (), cost / num_ranks, 0.0, 2)])
    what = Problem(options, rng.random(num_ranks), np.zeros(num_ranks), np.inf, (0.0, 0.0, 0.0))
    whole, cut = greedy(what, np.inf), greedy(what, 0.0)
    assert {option.kind for option in cut.chosen.values()} != {option.kind for option in whole.chosen.values()}
    for packing in (whole, cut, differencing(what, [options[1] for options in options])):
        np.testing.assert_allclose(packing.cost, sums(packing), rtol=1e-12)
        assert all(len(set(ranks)) == len(ranks) for ranks in packing.ranks.values()), (
            "two parts of an item on one rank"
        )


def test_differencing_takes_what_is_there_into_account() -> None:
    what = Problem([[Option((3.0,), (0.0,), 0.0, 0.0, 0)]], np.array([3.0, 0.0]), np.zeros(2), np.inf, (0.0,))
    assert differencing(what, what.options[0]).cost.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("seed", range(20))
def test_small_packings_are_near_the_optimum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_ranks, costs = 2 + seed % 2, rng.random(7).round(3).tolist()
    sizes = rng.integers(1, 6, size=7).astype(float).tolist()
    room = float(np.ceil(1.3 * sum(sizes) / num_ranks))
    best = np.inf
    for ranks in product(range(num_ranks), repeat=7):
        if np.bincount(ranks, sizes, num_ranks).max() <= room:
            best = min(best, np.bincount(ranks, costs, num_ranks).max())
    found = pack(problem(costs, num_ranks, sizes, room))
    assert (found.memory <= room).all()
    assert best - 1e-12 <= found.cost.max() <= 1.15 * best


def test_a_tight_memory_is_found_and_an_impossible_one_is_not() -> None:
    # 4 2 | 3 3 is the only way; by cost alone the two of 3 come first, on a rank each.
    assert pack(problem([1.0, 10.0, 10.0, 1.0], 2, [4.0, 3.0, 3.0, 2.0], 6.0)).memory.tolist() == [6, 6]
    assert pack(problem([1.0] * 3, 2, [2.0, 2.0, 2.0], 3.0)) is None


def test_a_fixed_cost_is_paid_once_and_avoided_where_it_does_not_pay() -> None:
    options = [[Option((1.0,), (0.0,), 0.0, 0.0, 0), Option((0.5, 0.5), (0.0, 0.0), 0.0, 0.0, 1)] for _ in range(3)]
    free = Problem(options, np.zeros(2), np.zeros(2), np.inf, (0.0, 0.0))
    assert pack(free).objective == 1.5
    dear = Problem(options, np.zeros(2), np.zeros(2), np.inf, (0.1, 9.0))
    assert pack(dear).objective == 2.1
    # Both kinds would cost 1.4; one of them 1.7.
    both = Problem(options, np.zeros(2), np.zeros(2), np.inf, (0.2, 0.2))
    assert pack(both).objective == pytest.approx(1.7)
    assert uses(pack(both)) == [0, 3]


def test_finer_cuts_are_taken_for_a_gain_alone() -> None:
    """Four equal items on two ranks are even as they are; three are 2 to 1 whole, and 1.5 each if one is halved."""
    whole, halves = Option((1.0,), (1.0,), 0.0, 0.0, 0), Option((0.5, 0.5), (0.5, 0.5), 0.0, 0.0, 1)

    def taken(number: int, tolerance: float, capacity: float = np.inf, fixed: float = 0.0) -> list[int]:
        zeros = np.zeros(2)
        return uses(
            pack(Problem([[whole, halves]] * number, zeros, zeros, capacity, (0.0, fixed), tolerance=tolerance))
        )

    assert taken(4, 0.0) == [4, 0]
    assert taken(3, 0.34) == [3, 0]
    assert taken(3, 0.33)[1] > 0
    assert taken(3, 0.05, fixed=1.0) == [3, 0]
    assert taken(3, 0.34, capacity=1.5)[1] > 0, "whole they do not fit"
    forced = Problem([[halves]] * 3, np.zeros(2), np.zeros(2), np.inf, (0.0, 0.0), tolerance=9)
    assert uses(pack(forced)) == [0, 3]
