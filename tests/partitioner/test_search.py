"""The local search, compared with recomputed sums, with every move and swap, and with every assignment."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dmt.partitioner import search
from dmt.partitioner.points import embed_distances, group_points
from dmt.partitioner.problem import size_bounds
from dmt.partitioner.search import Bounds, Costs, even_start, local_search, search_towers
from tests.partitioner.instances import random_apart, random_bounds, random_labels, random_squares


def bounds_of(rng, num_blocks):
    """Weights other than 1, tight limits, and blocks that must be apart."""
    loads = np.stack([rng.integers(1, 5, num_blocks), rng.uniform(0, 9, num_blocks), rng.uniform(1, 1e9, num_blocks)])
    upper = np.array([loads[0].sum() / 2, loads[1].sum() / 2.5, loads[2].sum() / 2.5])
    apart = random_apart(rng, num_blocks, 0.15)
    return Bounds(loads=loads, lower=np.array([2.0, 0.0, 0.0]), upper=upper, apart=apart)


def costs_of(rng, num_blocks, kind):
    """Squared distances per feature, gains of pairs, or gains of pairs and triples."""
    pairs = random_squares(rng, num_blocks)
    if kind == "distances":
        return Costs(pairs=pairs, per_feature=True)
    triples = np.array(list(itertools.combinations(range(num_blocks), 3)))
    triples = rng.permuted(triples[rng.permutation(len(triples))[: 3 * num_blocks]], axis=1)
    if kind == "pairs":
        triples = triples[:0]
    return Costs(pairs=-pairs, per_feature=False, triples=triples, triple_costs=-3 * rng.random(len(triples)))


KINDS = pytest.mark.parametrize("kind", ["distances", "pairs", "triples"])


@KINDS
@pytest.mark.parametrize("seed", range(2))
def test_the_price_of_every_move_and_swap_is_what_it_changes(seed, kind):
    rng = np.random.default_rng(seed)
    bounds, costs, num_towers = bounds_of(rng, 11), costs_of(rng, 11, kind), 3
    labels = random_labels(rng, 11, num_towers)
    moves = search._MoveSearch(costs, labels, num_towers, bounds)
    before = bounds.violation(labels, num_towers), costs.of(labels, bounds.weights)

    def changes(changed):
        after = bounds.violation(changed, num_towers), costs.of(changed, bounds.weights)
        return pytest.approx(np.subtract(after, before), abs=1e-9)

    blocks = np.arange(11)
    limits, gains = moves.prices(blocks)
    for block in blocks:
        for tower in set(range(num_towers)) - {labels[block]}:
            moved = labels.copy()
            moved[block] = tower
            assert (limits[block, 11 + tower], gains[block, 11 + tower]) == changes(moved)
        for other in np.flatnonzero(labels != labels[block]):
            swapped = labels.copy()
            swapped[[block, other]] = labels[[other, block]]
            assert (limits[block, other], gains[block, other]) == changes(swapped)


@KINDS
def test_the_sums_kept_up_to_date_are_those_made_afresh(kind):
    rng = np.random.default_rng(1)
    bounds, costs, num_towers = bounds_of(rng, 24), costs_of(rng, 24, kind), 4
    kept = search._MoveSearch(costs, random_labels(rng, 24, num_towers), num_towers, bounds)
    for _ in range(200):
        block, other = rng.choice(24, 2, replace=False)
        here, there = kept.labels[block], kept.labels[other]
        if rng.random() < 0.5:
            kept.relabel([(block, here, there), (other, there, here)])
        elif kept.held[here] > 1:
            kept.relabel([(block, here, int(rng.integers(num_towers)))])
    fresh = search._MoveSearch(costs, kept.labels[:24], num_towers, bounds)
    names = ["to_tower", "pairs", "mass", "held", "loads", "excess", "conflicts"]
    for name in [*names, *(["joining", "counted_twice"] if kind == "triples" else [])]:
        np.testing.assert_allclose(getattr(kept, name), getattr(fresh, name), rtol=1e-9, atol=1e-9, err_msg=name)


@KINDS
@pytest.mark.parametrize("seed", range(3))
def test_feasible_and_best_exactly_where_trying_all_assignments_says_so(seed, kind):
    rng = np.random.default_rng(seed)
    num_towers = 2 + seed % 2
    bounds, costs = random_bounds(rng, 8, num_towers), costs_of(rng, 8, kind)
    violation, labels = search_towers(costs, [], num_towers=num_towers, bounds=bounds, seed=seed)
    every = [np.array(labels) for labels in itertools.product(range(num_towers), repeat=8)]
    used = [labels for labels in every if len(set(labels.tolist())) == num_towers]
    best = min((bounds.violation(labels, num_towers), costs.of(labels, bounds.weights)) for labels in used)
    assert len(set(labels.tolist())) == num_towers
    assert (violation == 0) == (best[0] == 0)
    if best[0] == 0:
        assert costs.of(labels, bounds.weights) == pytest.approx(best[1], abs=1e-9)


def test_held_limits_are_never_given_up():
    for seed in range(6):
        rng = np.random.default_rng(seed)
        start = random_labels(rng, 16, 4)
        loads = np.stack([np.ones(16), rng.uniform(0, 1, 16), rng.uniform(0, 1e9, 16)])
        free = Bounds(loads=loads, lower=np.array([1.0, 0, 0]), upper=np.full(3, np.inf))
        # The start holds its limits exactly, with no room to spare in the fullest tower.
        upper = free.tower_loads(start, 4).max(axis=1)
        apart = random_apart(rng, 16, 0.3) & (start[:, None] != start[None, :])
        bounds = Bounds(loads=loads, lower=np.array([4.0, 0, 0]), upper=upper, apart=apart)
        costs = Costs(pairs=random_squares(rng, 16), per_feature=True)
        improved = local_search(costs, start, num_towers=4, bounds=bounds)
        assert bounds.violation(start, 4) == bounds.violation(improved, 4) == 0
        assert costs.of(improved, bounds.weights) <= costs.of(start, bounds.weights)


def test_the_cost_is_the_sum_of_squared_distances_to_the_centers():
    rng = np.random.default_rng(0)
    points, weights, labels = rng.normal(size=(12, 3)), rng.integers(1, 4, 12), random_labels(rng, 12, 4)
    repeated, towers = np.repeat(points, weights, axis=0), np.repeat(labels, weights)
    centered = [repeated[towers == t] - repeated[towers == t].mean(axis=0) for t in range(4)]
    squared = np.square(points[:, None] - points).sum(axis=2)
    wanted = sum(float(np.square(rows).sum()) for rows in centered)
    assert Costs(pairs=squared, per_feature=True).of(labels, weights.astype(float)) == pytest.approx(wanted, rel=1e-12)


def test_the_excess_is_in_shares_of_each_resource_and_rounding_is_none():
    loads = np.array([[1.0, 1.0, 2.0], [10.0, 30.0, 60.0]])
    apart = np.zeros((3, 3), dtype=bool)
    apart[0, 1] = apart[1, 0] = True
    bounds = Bounds(loads=loads, lower=np.array([2.0, 0.0]), upper=np.array([3.0, 50.0]), apart=apart)
    assert bounds.violation(np.array([0, 0, 1]), 2) == pytest.approx(1.1)  # 10 of 100 too much, and one pair to part
    assert bounds.violation(np.array([0, 1, 1]), 2) == pytest.approx(0.25 + 0.4)  # one of 4 features short, 40 over
    loads = np.stack([np.ones(6), np.full(6, 0.1)])
    mean = loads[1].sum() / 6
    assert mean < 0.1, "by rounding, each block is over its share"
    assert Bounds(loads=loads, lower=np.array([1.0, 0.0]), upper=np.array([6.0, mean])).violation(np.arange(6), 6) == 0


@pytest.mark.parametrize("apart", [0.0, 0.4])
def test_a_start_by_load_leaves_no_tower_empty(apart):
    rng = np.random.default_rng(0)
    for _ in range(100):
        num_blocks = int(rng.integers(2, 9))
        num_towers = int(rng.integers(2, num_blocks + 1))
        bounds = random_bounds(rng, num_blocks, num_towers, apart=apart)
        assert len(set(even_start(bounds, num_towers).tolist())) == num_towers


@pytest.mark.parametrize("ratio", [1.0, 1.15, 2.0, 2.5, 4.0])
def test_the_sizes_obey_the_ratio_and_are_about_the_mean(ratio):
    for towers in range(1, 12):
        for features in range(towers, 60):
            least, most = size_bounds(features, towers, ratio)
            assert 1 <= least <= features / towers <= most <= features
            assert most <= max(ratio * least + 1e-9, -(-features // towers))
            wider = [(n, min(features, int(ratio * n + 1e-9))) for n in range(1, features // towers + 1)]
            middles = [abs(sum(pair) - 2 * features / towers) for pair in wider if pair[1] >= features / towers]
            assert not middles or abs(least + most - 2 * features / towers) == min(middles)


# --- points ----------------------------------------------------------------------------------------------------------


def test_distances_of_a_plane_are_found_again():
    points = np.random.default_rng(0).normal(size=(12, 2))
    distance = np.sqrt(np.square(points[:, None] - points).sum(axis=2))
    found, stress, wanted = embed_distances(distance, seed=0)
    again = np.sqrt(np.square(found[:, None] - found).sum(axis=2))
    np.testing.assert_allclose(again, distance, atol=1e-6)
    assert stress < 1e-9 * wanted
    assert wanted == pytest.approx(np.square(distance).sum() / 2)


def test_degenerate_distances():
    assert embed_distances(1.0 - np.eye(2), seed=0)[0].shape == (2, 2)
    assert not embed_distances(np.zeros((4, 4)), seed=0)[0].any()
    assert embed_distances(np.zeros((1, 1)), seed=0)[0].shape == (1, 2)
    # LAPACK's fastest driver finds no eigenvalue of this one.
    vectors = np.random.default_rng(1).normal(size=(60, 3))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = np.abs(vectors @ vectors.T) * (1 - np.eye(60))
    assert embed_distances((cosines + cosines.T) / 2, seed=0)[0].shape == (60, 2)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e9])
def test_clear_groups_of_points_are_found_whatever_their_scale(scale):
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(4, 2)) * 10
    group = np.arange(20) % 4
    labels = group_points((centers[group] + rng.normal(size=(20, 2)) * 0.1) * scale, 4, sizes=(5, 5), seed=0)
    assert all(len(set(labels[group == g].tolist())) == 1 for g in range(4))
    assert np.bincount(labels).tolist() == [5, 5, 5, 5]
