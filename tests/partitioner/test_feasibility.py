"""Reasons why limits cannot be held, and the exact search, against trying every assignment."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from dmt.errors import InputError
from dmt.partitioner import assignment
from dmt.partitioner.assignment import Bounds, Infeasible, check_bounds, solve_exactly
from tests.partitioner.instances import best_by_trying, random_bounds


def bounds_of(loads, upper, *, lower=(1.0, 0.0, 0.0), apart=None):
    return Bounds(loads=np.array(loads, dtype=float), lower=np.array(lower), upper=np.array(upper), apart=apart)


THREE = [[1, 1, 1], [4, 8, 0.5], [100, 5_000, 900]]
FREE = (3.0, np.inf, np.inf)
NAMES = (("a",), ("b",), ("c",))


@pytest.mark.parametrize(
    ("names", "loads", "upper", "num_towers", "message"),
    [
        (NAMES, THREE, FREE, 4, r"num_towers=4 exceeds the 3 features to place, and no tower may be empty\. Use fewer"),
        ((("a", "b"), ("c",)), [[2, 1], [0, 0], [0, 0]], FREE, 3, r"num_towers=3 exceeds the 2 tables \(shared tables"),
        (
            NAMES,
            THREE,
            (3.0, 7.5, np.inf),
            2,
            r"feature 'b' needs 8 work, .* may have 7\.5 at most\. Raise max_work_rat",
        ),
        (
            NAMES,
            THREE,
            (3.0, np.inf, 4999.0),
            2,
            r"feature 'b' needs 5,000 bytes, .*4,999 at most.*split_columns='large",
        ),
        (
            (("a", "b", "c", "d", "e", "f"), ("g",)),
            [[6, 1], [0, 0], [9_000, 1]],
            (7.0, np.inf, 8_000),
            2,
            r"feature 'a', 'b', 'c', 'd', 'e' \.\.\. which share a table or must stay together, needs 9,000 bytes, but "
            r"a tower may have 8,000 at most\. Raise the limit, use more towers\.$",
        ),
        (NAMES, THREE, (3.0, np.inf, 5_500.0), 1, r"need 6,000 bytes in all, but 1 towers of at most 5,500 hold 5,500"),
        (NAMES, [[3, 1, 1], [0] * 3, [0] * 3], (2.0, np.inf, np.inf), 3, "needs 3 features, .* Raise balance_ratio"),
    ],
)
def test_limits_that_no_assignment_holds_are_refused_with_the_reason(names, loads, upper, num_towers, message):
    with pytest.raises(InputError, match=message):
        check_bounds(names, bounds_of(loads, upper), num_towers, "")
    with pytest.raises(InputError, match=r"^TowerPartitioner: category 'user': "):
        check_bounds(names, bounds_of(loads, upper), num_towers, "category 'user': ")


def test_more_features_to_part_than_towers_are_refused():
    apart = ~np.eye(4, dtype=bool)
    apart[3, :] = apart[:, 3] = False
    bounds = bounds_of([[1] * 4, [0] * 4, [0] * 4], (4.0, np.inf, np.inf), apart=apart)
    check_bounds([*NAMES, ("d",)], bounds, 3, "")
    with pytest.raises(InputError, match=r"3 features must all be apart from each other \('a', 'b', 'c' .*2 towers"):
        check_bounds([*NAMES, ("d",)], bounds, 2, "")


@pytest.mark.parametrize("num_features", [3, 6, 7, 10, 11, 13])
@pytest.mark.parametrize("work", [0.1, 0.3, 0.7, 1.1, 3.3])
def test_an_equal_share_is_not_refused_for_rounding(work, num_features):
    loads = np.stack([np.ones(num_features), np.full(num_features, work), np.zeros(num_features)])
    upper = (1.0, loads[1].sum() / num_features, 0.0)
    check_bounds([(str(i),) for i in range(num_features)], bounds_of(loads, upper), num_features, "")


@pytest.mark.parametrize("seed", range(40))
def test_the_exact_search_finds_an_answer_where_there_is_one(seed):
    rng = np.random.default_rng(seed)
    num_blocks, num_towers = int(rng.integers(3, 7)), int(rng.integers(2, 4))
    bounds = random_bounds(rng, num_blocks, num_towers, slack=(1.0, 1.1, 1.4))[0]
    possible = np.isfinite(best_by_trying(np.zeros((num_blocks, num_blocks)), num_towers, [bounds]))
    cost = rng.uniform(size=(num_blocks, num_towers))
    if possible:
        assert bounds.violation(solve_exactly(cost, bounds), num_towers) == 0
    else:
        with pytest.raises(Infeasible, match=f"to {num_towers} towers holds all limits"):
            solve_exactly(cost, bounds)


def test_the_exact_search_picks_the_cheapest():
    cost = np.array([[0.0, 1.0], [0.1, 1.0], [0.2, 1.0], [0.9, 1.0]])
    bounds = bounds_of([[1] * 4, [0] * 4, [0] * 4], (2.0, np.inf, np.inf), lower=(2.0, 0.0, 0.0))
    assert solve_exactly(cost, bounds).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("seed", range(4))
def test_large_tables_are_not_lost_in_the_tolerance_of_the_solver(seed):
    # Gigabytes, and a limit that the best assignment misses by a single byte; the solver alone would let that pass.
    num_bytes = np.round(np.random.default_rng(seed).uniform(1e8, 9e8, 8))
    least = min(
        max(num_bytes[labels].sum(), num_bytes[~labels].sum())
        for labels in (np.array(choice) for choice in itertools.product([False, True], repeat=8))
    )
    loads = [[1.0] * 8, [0.0] * 8, num_bytes]
    exact = bounds_of(loads, (8.0, np.inf, least))
    assert exact.violation(solve_exactly(np.ones((8, 2)), exact), 2) == 0
    with pytest.raises(Infeasible):
        solve_exactly(np.ones((8, 2)), bounds_of(loads, (8.0, np.inf, least - 1)))


def test_what_must_part_is_parted_exactly_or_refused():
    cycle = np.zeros((5, 5), dtype=bool)
    for i in range(5):
        cycle[i, (i + 1) % 5] = cycle[(i + 1) % 5, i] = True
    bounds = bounds_of([[1] * 5, [0] * 5, [0] * 5], (5.0, np.inf, np.inf), apart=cycle)
    assert bounds.violation(solve_exactly(np.ones((5, 3)), bounds), 3) == 0
    with pytest.raises(Infeasible, match="2 towers holds all limits"):  # Proven: a cycle of 5 has no two colours.
        solve_exactly(np.ones((5, 2)), bounds)


def test_no_tower_is_empty_even_where_that_is_cheapest_and_allowed():
    bounds = bounds_of([[1] * 3, [0] * 3, [0] * 3], FREE, lower=(0.0, 0.0, 0.0))
    labels = solve_exactly(np.array([[0.0, 1.0]] * 3), bounds)
    assert sorted(np.bincount(labels)) == [1, 2]


def test_an_answer_beyond_the_limits_by_the_tolerance_of_the_solver_is_not_taken(monkeypatch):
    bounds = bounds_of([[1, 1, 1], [0] * 3, [5, 5, 2]], (3.0, np.inf, 8.0))
    margins = []
    answers = [np.array([1.0, 0, 1, 0, 0, 1]), np.array([1.0, 0, 0, 1, 0, 1]), np.array([1.0, 0, 1, 0, 0, 1])]

    def solve(cost, bounds, margin):
        margins.append(margin)
        return SimpleNamespace(x=answers[len(margins) - 1], status=0)

    monkeypatch.setattr(assignment, "_solve", solve)
    assert solve_exactly(np.zeros((3, 2)), bounds).tolist() == [0, 1, 1]
    assert margins[0] == 0 < margins[1]
    monkeypatch.setattr(assignment, "_solve", lambda *_: SimpleNamespace(x=answers[0], status=0))
    with pytest.raises(Infeasible, match="to 2 towers within all limits was found"):
        solve_exactly(np.zeros((3, 2)), bounds)


def test_problems_too_large_or_too_slow_are_said_to_be_unsolved_not_unsolvable(monkeypatch):
    bounds = bounds_of([[1] * 3, [0] * 3, [0] * 3], FREE)
    monkeypatch.setattr(assignment, "MOST_VARIABLES", 5)
    with pytest.raises(Infeasible, match="to 2 towers within all limits was found"):
        solve_exactly(np.zeros((3, 2)), bounds)
