"""Towers from interactions: as good as by trying all assignments, within every rule, and what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dmt import TowerPlan
from dmt.errors import InputError
from dmt.partitioner import FeatureAffinity, FeatureInteractions, PartitionRules, TowerPartitioner, cluster
from dmt.partitioner.assignment import Bounds, local_search, sum_inside
from dmt.partitioner.cluster import group_by_sums
from dmt.partitioner.partition import share_within
from tests.partitioner.instances import affinity_of, random_bounds, random_labels, sets, tables_of


def random_costs(rng, size):
    costs = rng.normal(size=(size, size)) * (rng.random((size, size)) < 0.6)
    costs = costs + costs.T
    np.fill_diagonal(costs, 0)
    return costs


def interactions_of(pairs, features="abcdefgh", noise=0.0, **more):
    """Gains of the named pairs, and a little noise between all others."""
    names = list(features)
    gains = np.random.default_rng(0).uniform(0, noise, (len(names),) * 2)
    gains = gains + gains.T
    for (a, b), gain in pairs.items():
        i, j = names.index(a), names.index(b)
        gains[i, j] = gains[j, i] = gain
    return FeatureInteractions(gains=gains, features=names, **more)


def test_the_sum_inside_is_that_of_all_pairs():
    rng = np.random.default_rng(1)
    costs, weights, labels = random_costs(rng, 7), rng.integers(1, 3, 7).astype(float), rng.integers(0, 3, 7)
    expected = sum(
        weights[i] * weights[j] * costs[i, j] for i, j in itertools.combinations(range(7), 2) if labels[i] == labels[j]
    )
    assert sum_inside(costs + np.eye(7), weights, labels) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(8))
def test_no_assignment_within_the_limits_is_better(seed):
    rng = np.random.default_rng(seed)
    num_blocks, num_towers = 6, 3
    options = random_bounds(rng, num_blocks, num_towers)
    costs = random_costs(rng, num_blocks)
    values = []
    for labels in map(np.array, itertools.product(range(num_towers), repeat=num_blocks)):
        if len(set(labels.tolist())) == num_towers and any(b.violation(labels, num_towers) == 0 for b in options):
            values.append(sum_inside(costs, options[0].weights, labels))
    if not values:
        with pytest.raises(InputError, match="No assignment"):
            group_by_sums(costs, num_towers=num_towers, options=options, seed=0)
        return
    labels = group_by_sums(costs, num_towers=num_towers, options=options, seed=0).labels
    assert any(b.violation(labels, num_towers) == 0 for b in options)
    assert sum_inside(costs, options[0].weights, labels) == pytest.approx(min(values))


@pytest.mark.parametrize("seed", range(4))
def test_no_single_move_or_swap_improves_the_answer_of_the_search(seed):
    # The running sums price as the objective itself does.
    rng = np.random.default_rng(seed)
    bounds = random_bounds(rng, 9, 3)[0]
    costs, start = random_costs(rng, 9), random_labels(rng, 9, 3)
    labels = local_search(costs, start, num_towers=3, bounds=bounds, per_feature=False)
    rank = bounds.violation(labels, 3), sum_inside(costs, bounds.weights, labels)
    changes = [{i: t} for i in range(9) for t in range(3)]
    changes += [{i: labels[j], j: labels[i]} for i, j in itertools.combinations(range(9), 2)]
    for change in changes:
        other = labels.copy()
        other[list(change)] = list(change.values())
        if len(set(other.tolist())) == 3:
            violation, value = bounds.violation(other, 3), sum_inside(costs, bounds.weights, other)
            assert violation > rank[0] - 1e-9
            assert violation > rank[0] + 1e-9 or value > rank[1] - 1e-9


def test_together_and_apart():
    found = interactions_of({"ae": 0.03, "bf": 0.02, "cg": 0.02, "dh": 0.01}, noise=1e-4)
    together = TowerPartitioner(num_towers=4, strategy="together").partition(found)
    assert sets(together.plan) == {frozenset(pair) for pair in ("ae", "bf", "cg", "dh")}
    assert together.interactions is found
    assert together.plan.strategy == "together"
    summary = together.plan.affinity
    assert summary["measure"] == "interactions"
    assert summary["largest_gain"] == 0.03
    assert summary["share_within"] > 0.9
    assert summary["share_within_strided"] == share_within(found.to_affinity(), TowerPlan.strided("abcdefgh", 4))
    apart = TowerPartitioner(num_towers=2, strategy="apart").fit(found)
    assert not any({"a", "e"} <= tower or {"b", "f"} <= tower for tower in sets(apart))
    assert apart.affinity["share_within"] < 0.05
    assert sorted(map(len, apart.to_lists())) == [4, 4]


def test_the_order_of_a_clustering_is_a_start_from_which_planted_groups_come_out_whole():
    # From random starts, features end beside strangers.
    rng = np.random.default_rng(0)
    size, num_towers = 300, 50
    group = rng.permutation(np.arange(size) % num_towers)
    gains = np.triu(np.where(group[:, None] == group, 1.0, 0.0) * (rng.random((size, size)) < 0.6), 1)
    gains += np.triu(rng.exponential(0.1, (size, size)) * (rng.random((size, size)) < 0.05), 1)
    costs, ones = -gains - gains.T, np.ones((1, size))
    bounds = Bounds(loads=ones, lower=np.array([6.0]), upper=np.array([6.0]))
    starts = rng.permutation(group), cluster._neighbours(costs) * num_towers // size
    random, ordered = (
        sum_inside(costs, ones[0], local_search(costs, s, num_towers=num_towers, bounds=bounds, per_feature=False))
        for s in starts
    )
    assert ordered <= sum_inside(costs, ones[0], group) < random


def test_rules_and_limits_hold():
    pairs = {"ab": 0.5, "cd": 0.4, "ac": 0.1, "bd": 0.1}
    names = list("abcdef")
    found = interactions_of(pairs, names, tables=tables_of(names, rows=[9, 9, 1, 1, 1, 1]))

    def towers(**rules):
        partitioner = TowerPartitioner(num_towers=2, strategy="together", rules=PartitionRules(**rules))
        return sets(partitioner.fit(found))

    assert any({"a", "b"} <= tower for tower in towers())
    assert not any({"a", "b"} <= tower for tower in towers(apart=[["a", "b"]]))
    assert any({"a", "e", "f"} <= tower for tower in towers(together=[["a", "e", "f"]]))
    # The two large tables, which interact most, do not fit into one tower.
    assert not any({"a", "b"} <= tower for tower in towers(max_bytes_ratio=1.2))
    assert frozenset("ac") in towers(entities={"user": ["a", "c"]})


def test_features_without_interactions_are_noted():
    found = interactions_of({}, notes=("A note of the measurement.",))
    partition = TowerPartitioner(num_towers=2, strategy="together").partition(found)
    assert partition.notes[0] == "A note of the measurement."
    assert partition.notes[1].startswith("No pair of features tells more about the label than each alone")
    assert sorted(map(len, partition.plan.to_lists())) == [4, 4]
    assert partition.plan.affinity["share_within"] is None


def test_column_shards_share_the_interactions_of_their_feature():
    found = interactions_of({"ab": 0.1, "cd": 0.1}, "abcd", tables=tables_of("abcd", dims=8))
    partitioner = TowerPartitioner(num_towers=8, strategy="together", split_columns="even")
    assert [len(tower) for tower in partitioner.fit(found).to_lists()] == [1] * 8
    partitioner = TowerPartitioner(num_towers=2, strategy="together")
    assert sets(partitioner.fit(found)) == {frozenset("ab"), frozenset("cd")}


def test_a_strategy_of_another_measure_is_refused():
    with pytest.raises(
        InputError, match=r"strategy='coherent' does not go by FeatureInteractions; use one of 'together'"
    ):
        TowerPartitioner(num_towers=2).fit(interactions_of({}))
    with pytest.raises(InputError, match=r"strategy='apart' does not go by FeatureAffinity; use one of 'coherent'"):
        TowerPartitioner(num_towers=2, strategy="apart").fit(affinity_of(4))
    assert isinstance(interactions_of({}).to_affinity(), FeatureAffinity)
