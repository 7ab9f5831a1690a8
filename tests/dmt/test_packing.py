"""Packing numbers on ranks: the two heuristics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dmt.sharding.packing import Option, Packing, Problem, differencing, greedy, pack


def option(*costs: float, memory: float = 0.0, kind: int = 0) -> Option:
    return Option(np.array(costs), np.full(len(costs), memory), kind)


def problem(options: list[list[Option]], ranks: int | np.ndarray, capacity: float = np.inf, **settings: Any) -> Problem:
    cost = np.zeros(ranks) if isinstance(ranks, int) else ranks
    options = [sorted(of_item, key=lambda option: option.costs.sum()) for of_item in options]
    return Problem(options, cost, np.zeros(len(cost)), capacity, **{"fixed": (0.0, 0.0), **settings})


def uses(found: Packing | None) -> list[int]:
    """Items of the first two kinds."""
    assert found is not None
    return [sum(option.kind == kind for option in found.chosen.values()) for kind in (0, 1)]


def test_the_textbook_example_of_largest_differencing() -> None:
    """8 7 6 5 4 on two ranks: differencing 16 to 14, greedy 17 to 13."""
    example = problem([[option(cost)] for cost in (8.0, 7.0, 6.0, 5.0, 4.0)], 2)
    assert differencing(example, [options[0] for options in example.options]).cost.max() == 16
    assert greedy(example, np.inf).cost.max() == 17
    assert pack(example).objective == 16


def test_load_that_is_there_already_counts() -> None:
    empty = problem([], np.array([3.0, 1.0]), fixed=(0.5, 0.25), used=frozenset({1}))
    assert pack(empty).objective == 3.25
    what = problem([[option(3.0)]], np.array([3.0, 0.0]))
    assert differencing(what, what.options[0]).cost.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_loads_are_what_the_parts_add_up_to(num_ranks: int) -> None:
    rng = np.random.default_rng(num_ranks)
    costs = rng.random(30).tolist()
    options = [[option(c), option(c / 1.9, c / 2, kind=1), option(*[c / num_ranks] * num_ranks, kind=2)] for c in costs]
    what = problem(options, rng.random(num_ranks), fixed=(0.0, 0.0, 0.0))
    whole, cut = greedy(what, np.inf), greedy(what, 0.0)
    assert {option.kind for option in cut.chosen.values()} != {option.kind for option in whole.chosen.values()}
    for packing in (whole, cut, differencing(what, [of_item[1] for of_item in options])):
        added = what.cost.copy()
        for item, chosen in packing.chosen.items():
            assert len(set(packing.ranks[item].tolist())) == len(chosen.costs), "two parts of an item on one rank"
            for rank, part in zip(packing.ranks[item], chosen.costs, strict=True):
                added[rank] += part
        np.testing.assert_allclose(packing.cost, added, rtol=1e-12)


def test_a_tight_memory_is_found_and_an_impossible_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    # 4 2 | 3 3 is the only way; by cost alone the two of 3 come first, on a rank each.
    items = [[option(c, memory=m)] for c, m in ((1.0, 4.0), (10.0, 3.0), (10.0, 3.0), (1.0, 2.0))]
    assert pack(problem(items, 2, 6.0)).memory.tolist() == [6, 6]
    assert pack(problem([[option(1.0, memory=2.0)]] * 3, 2, 3.0)) is None
    monkeypatch.setattr("dmt.sharding.packing.greedy", None)
    assert pack(problem([[option(1.0, memory=2.0)]] * 3, 2, 2.9)) is None, "more than all ranks have, without a try"


def test_a_fixed_cost_is_paid_once_and_avoided_where_it_does_not_pay() -> None:
    options = [[option(1.0), option(0.5, 0.5, kind=1)]] * 3
    assert pack(problem(options, 2)).objective == 1.5
    assert pack(problem(options, 2, fixed=(0.1, 9.0))).objective == 2.1
    # Both kinds would cost 1.4; one of them 1.7.
    both = pack(problem(options, 2, fixed=(0.2, 0.2)))
    assert both.objective == pytest.approx(1.7)
    assert uses(both) == [0, 3]


def test_a_kind_that_is_avoided_is_taken_for_a_gain_alone() -> None:
    """Four equal items on two ranks are even as they are; three are 2 to 1 whole, and 1.5 each if one is halved."""
    whole, halves = option(1.0, memory=1.0), option(0.5, 0.5, memory=0.5, kind=1)

    def taken(number: int, tolerance: float, capacity: float = np.inf, fixed: float = 0.0) -> list[int]:
        settings = {"fixed": (0.0, fixed), "avoided": 1, "tolerance": tolerance}
        return uses(pack(problem([[whole, halves]] * number, 2, capacity, **settings)))

    assert taken(4, 0.0) == [4, 0]
    assert taken(3, 0.34) == [3, 0]
    assert taken(3, 0.33)[1] > 0
    assert taken(3, 0.05, fixed=1.0) == [3, 0]
    assert taken(3, 0.34, capacity=1.5)[1] > 0, "whole they do not fit"
    assert uses(pack(problem([[halves]] * 3, 2, avoided=1, tolerance=9))) == [0, 3]
