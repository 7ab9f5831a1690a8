"""The local search against sums made afresh, and against every move and swap there is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dmt.partitioner import assignment
from dmt.partitioner.assignment import Bounds, greedy_start, local_search, objective_of, perturbed_search
from dmt.partitioner.cluster import squared_distances
from tests.partitioner.instances import random_apart, random_bounds, random_labels, random_squares

FREE = np.array([1.0, 0.0, 0.0]), np.array([99.0, np.inf, np.inf])


def bounds_of(rng, num_blocks, *, apart=True):
    """Weights other than 1, limits that are tight, features to part."""
    loads = np.stack([rng.integers(1, 5, num_blocks), rng.uniform(0, 9, num_blocks), rng.uniform(1, 1e9, num_blocks)])
    upper = np.array([loads[0].sum() / 2, loads[1].sum() / 2.5, loads[2].sum() / 2.5])
    parted = random_apart(rng, num_blocks, 0.15) if apart else None
    return Bounds(loads=loads, lower=np.array([2.0, 0.0, 0.0]), upper=upper, apart=parted)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_sums_kept_up_to_date_are_those_made_afresh(seed, apart):
    rng = np.random.default_rng(seed)
    bounds, squared, num_towers = bounds_of(rng, 24, apart=apart), random_squares(rng, 24), 4
    kept = assignment._MoveSearch(squared, random_labels(rng, 24, num_towers), num_towers, bounds)
    for _ in range(200):
        block, other = rng.choice(24, 2, replace=False)
        here, there = kept.labels[block], kept.labels[other]
        if rng.random() < 0.5:
            kept._relabel([(block, here, there), (other, there, here)])
        elif kept.num_blocks[here] > 1:
            kept._relabel([(block, here, int(rng.integers(num_towers)))])
    fresh = assignment._MoveSearch(squared, kept.labels, num_towers, bounds)
    for name in ("to_tower", "pairs", "mass", "num_blocks", "loads", "excess"):
        np.testing.assert_allclose(getattr(kept, name), getattr(fresh, name), rtol=1e-9, atol=1e-9, err_msg=name)
    if apart:
        np.testing.assert_array_equal(kept.conflicts, fresh.conflicts)


@pytest.mark.parametrize("seed", range(4))
def test_the_price_of_every_move_and_swap_is_what_it_changes(seed):
    rng = np.random.default_rng(seed)
    bounds, squared, num_towers = bounds_of(rng, 11), random_squares(rng, 11), 3
    labels = random_labels(rng, 11, num_towers)
    search = assignment._MoveSearch(squared, labels, num_towers, bounds)
    before = bounds.violation(labels, num_towers), objective_of(squared, bounds.weights, labels)

    def changes(changed):
        after = bounds.violation(changed, num_towers), objective_of(squared, bounds.weights, changed)
        return pytest.approx(np.subtract(after, before), abs=1e-9)

    blocks = np.arange(11)
    move_limits, move_gains = search._moves(blocks)
    swap_limits, swap_gains = search._swaps(blocks)
    for block in blocks:
        for tower in set(range(num_towers)) - {labels[block]}:
            moved = labels.copy()
            moved[block] = tower
            assert (move_limits[block, tower], move_gains[block, tower]) == changes(moved)
        for other in np.flatnonzero(labels != labels[block]):
            swapped = labels.copy()
            swapped[[block, other]] = labels[[other, block]]
            assert (swap_limits[block, other], swap_gains[block, other]) == changes(swapped)


@pytest.mark.parametrize("seed", range(4))
def test_blocks_priced_together_end_as_blocks_priced_one_by_one(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    bounds, squared, start = bounds_of(rng, 40), random_squares(rng, 40), random_labels(rng, 40, 6)
    together = local_search(squared, start, num_towers=6, bounds=bounds)
    monkeypatch.setattr(assignment, "PRICED_TOGETHER", 1)
    assert local_search(squared, start, num_towers=6, bounds=bounds).tolist() == together.tolist()


def neighbours(labels, num_towers):
    for block, tower in itertools.product(range(len(labels)), range(num_towers)):
        if (labels == labels[block]).sum() > 1:
            yield np.where(np.arange(len(labels)) == block, tower, labels)
    for a, b in itertools.combinations(range(len(labels)), 2):
        swapped = labels.copy()
        swapped[[a, b]] = labels[[b, a]]
        yield swapped


@pytest.mark.parametrize("seed", range(8))
def test_it_ends_where_no_move_or_swap_is_better_and_never_empties_a_tower(seed):
    rng = np.random.default_rng(seed)
    num_towers = 2 + seed % 3
    bounds, squared = random_bounds(rng, 9, num_towers)[0], random_squares(rng, 9)
    start = random_labels(rng, 9, num_towers)
    labels = local_search(squared, start, num_towers=num_towers, bounds=bounds)
    assert len(set(labels.tolist())) == num_towers

    def rank(candidate):
        return bounds.violation(candidate, num_towers), objective_of(squared, bounds.weights, candidate)

    limits, objective = rank(labels)
    assert (limits, objective) <= rank(start)
    for neighbour in neighbours(labels, num_towers):
        other_limits, other_objective = rank(neighbour)
        assert other_limits > limits - 1e-9
        assert other_limits > limits + 1e-9 or other_objective > objective - 1e-9


@pytest.mark.parametrize("seed", range(6))
def test_held_limits_are_never_given_up(seed):
    rng = np.random.default_rng(seed)
    num_blocks, num_towers = 16, 4
    start = random_labels(rng, num_blocks, num_towers)
    loads = np.stack([np.ones(num_blocks), rng.uniform(0, 1, num_blocks), rng.uniform(0, 1e9, num_blocks)])
    free = Bounds(loads=loads, lower=FREE[0], upper=FREE[1])
    # The start holds its limits exactly, with no room to spare in the fullest tower.
    upper = free.tower_loads(start, num_towers).max(axis=1)
    together = start[:, None] == start[None, :]
    bounds = Bounds(
        loads=loads, lower=np.array([4.0, 0, 0]), upper=upper, apart=random_apart(rng, num_blocks, 0.3) & ~together
    )
    squared = random_squares(rng, num_blocks)
    assert bounds.violation(start, num_towers) == 0
    improved = local_search(squared, start, num_towers=num_towers, bounds=bounds)
    repeated = perturbed_search(squared, start, num_towers=num_towers, bounds=bounds, seed=seed)
    for labels in (improved, repeated):
        assert bounds.violation(labels, num_towers) == 0
        assert (bounds.tower_loads(labels, num_towers).max(axis=1) <= upper * (1 + 1e-12)).all()
    values = [objective_of(squared, bounds.weights, labels) for labels in (start, improved, repeated)]
    assert values == sorted(values, reverse=True)


def test_repeated_search_finds_better_answers_and_no_shakes_are_the_plain_search():
    better = 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        squared, start = random_squares(rng, 20), random_labels(rng, 20, 4)
        bounds = Bounds(loads=np.ones((1, 20)), lower=np.array([5.0]), upper=np.array([5.0]))
        once = local_search(squared, start, num_towers=4, bounds=bounds)
        none = perturbed_search(squared, start, num_towers=4, bounds=bounds, seed=seed, max_perturbations=0)
        assert none.tolist() == once.tolist()
        repeated = perturbed_search(squared, start, num_towers=4, bounds=bounds, seed=seed)
        ones = np.ones(20)
        change = objective_of(squared, ones, repeated) - objective_of(squared, ones, once)
        assert change <= 0
        better += change < -1e-9
    assert better >= 3


@pytest.mark.parametrize("seed", range(3))
def test_the_objective_is_the_sum_of_squared_distances_to_the_centres(seed):
    rng = np.random.default_rng(seed)
    points, weights, labels = rng.normal(size=(12, 3)), rng.integers(1, 4, 12), random_labels(rng, 12, 4)
    repeated, towers = np.repeat(points, weights, axis=0), np.repeat(labels, weights)
    centred = [repeated[towers == t] - repeated[towers == t].mean(axis=0) for t in range(4)]
    wanted = sum(float(np.square(rows).sum()) for rows in centred)
    assert objective_of(squared_distances(points), weights.astype(float), labels) == pytest.approx(wanted, rel=1e-12)


def test_the_excess_is_in_shares_of_each_resource():
    loads = np.array([[1.0, 1.0, 2.0], [10.0, 30.0, 60.0]])
    apart = np.zeros((3, 3), dtype=bool)
    apart[0, 1] = apart[1, 0] = True
    bounds = Bounds(loads=loads, lower=np.array([2.0, 0.0]), upper=np.array([3.0, 50.0]), apart=apart)
    labels = np.array([0, 0, 1])
    assert bounds.tower_loads(labels, 2).tolist() == [[2.0, 2.0], [40.0, 60.0]]
    assert bounds.excess(bounds.tower_loads(labels, 2)).tolist() == [0.0, pytest.approx(0.1)]
    assert bounds.violation(labels, 2) == pytest.approx(1.1)  # 10 of 100 too much, and one pair to part.
    assert bounds.violation(np.array([0, 1, 1]), 2) == pytest.approx(0.25 + 0.4)  # One of 4 features short, 40 over.
    assert bounds.oversized.tolist() == [[False, False, False], [False, False, True]]


def test_rounding_is_no_excess():
    loads = np.stack([np.ones(6), np.full(6, 0.1)])
    mean = loads[1].sum() / 6
    assert mean < 0.1  # By rounding: each block is over its share, if one counts like that.
    bounds = Bounds(loads=loads, lower=np.array([1.0, 0.0]), upper=np.array([6.0, mean]))
    assert bounds.violation(np.arange(6), 6) == 0
    assert not bounds.oversized.any()


@pytest.mark.parametrize("apart", [0.0, 0.4])
def test_a_start_by_load_leaves_no_tower_empty(apart):
    # Work that some features do not have, or one giant table, once left towers without any feature.
    rng = np.random.default_rng(0)
    for _ in range(150):
        num_blocks = int(rng.integers(2, 9))
        num_towers = int(rng.integers(2, num_blocks + 1))
        bounds = random_bounds(rng, num_blocks, num_towers, apart=apart)[0]
        assert len(set(greedy_start(bounds, num_towers).tolist())) == num_towers
    # One block has all the work and the other all the bytes: both would fit into the first tower as well.
    bounds = Bounds(loads=np.array([[1.0, 1.0], [0.0, 5.0], [7.0, 0.0]]), lower=FREE[0], upper=FREE[1])
    assert greedy_start(bounds, 2).tolist() == [0, 1]


def test_a_start_by_load_fits_where_there_is_some_room():
    rng = np.random.default_rng(0)
    loads = np.stack([np.ones(60), rng.uniform(0, 9, 60), 10 ** rng.uniform(1, 7, 60)])
    loads[2] = np.minimum(loads[2], loads[2].sum() / 8)
    bounds = Bounds(loads=loads, lower=np.array([1.0, 0, 0]), upper=np.array([60, *loads[1:].sum(axis=1) / 6 * 1.5]))
    labels = greedy_start(bounds, 6)
    assert bounds.violation(labels, 6) == 0
    assert np.ptp(bounds.tower_loads(labels, 6)[1]) < loads[1].sum() / 6


def test_exact_ties_end_the_search():
    # All distances equal: every balanced assignment is as good, and a search that took ties would go in circles.
    squared = np.full((30, 30), 0.1)
    np.fill_diagonal(squared, 0)
    bounds = Bounds(loads=np.full((1, 30), 1.0), lower=np.array([5.0]), upper=np.array([5.0]))
    start = np.arange(30) % 6
    assert local_search(squared, start, num_towers=6, bounds=bounds).tolist() == start.tolist()
    assert perturbed_search(np.zeros((30, 30)), start, num_towers=6, bounds=bounds, seed=0).tolist() == start.tolist()


def test_one_tower_and_as_many_towers_as_blocks_are_left_as_they_are():
    squared = random_squares(np.random.default_rng(0), 5)
    bounds = Bounds(loads=np.ones((1, 5)), lower=np.array([1.0]), upper=np.array([5.0]))
    for labels in ([0] * 5, [4, 2, 0, 1, 3]):
        num_towers = max(labels) + 1
        repeated = perturbed_search(squared, np.array(labels), num_towers=num_towers, bounds=bounds, seed=0)
        assert len(set(repeated.tolist())) == num_towers
