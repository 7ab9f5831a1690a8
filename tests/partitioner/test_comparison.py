"""Mean affinities within and between towers, beside other assignments."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from dmt.errors import InputError
from dmt.partitioner import FeatureAffinity, PartitionRules, TowerPartitioner, tower_affinity
from dmt.partitioner.partition import compare_towers
from dmt.plan.towers import TowerPlan
from tests.partitioner.instances import affinity_of


def by_pairs(affinity, towers):
    """The definition, pair by pair."""
    tower_of = {name: t for t, names in enumerate(towers) for name in names}
    within, between = [], []
    for i, j in itertools.combinations(range(affinity.num_features), 2):
        a, b = affinity.features[i], affinity.features[j]
        (within if tower_of[a] == tower_of[b] else between).append(float(affinity.matrix[i, j]))
    return tuple(pytest.approx(float(np.mean(values)), abs=1e-11) if values else None for values in (within, between))


@pytest.mark.parametrize("seed", range(4))
def test_within_between_and_strided_are_means_over_pairs(seed):
    affinity = affinity_of(11, seed=seed)
    order = np.random.default_rng(seed).permutation(affinity.features).tolist()
    towers = [order[:5], order[5:6], order[6:]]
    found = compare_towers(affinity, TowerPlan.from_lists(towers))
    assert (found.within, found.between) == by_pairs(affinity, towers)
    assert (found.within, found.between) == tower_affinity(affinity, TowerPlan.from_lists(towers))
    names = list(affinity.features)
    assert found.within_strided == by_pairs(affinity, [names[0::3], names[1::3], names[2::3]])[0]


def test_random_towers_are_as_the_mean_over_all_assignments():
    affinity = affinity_of(8, seed=1)
    plan = TowerPlan.from_lists([affinity.features[:5], affinity.features[5:]])
    every = []
    for chosen in itertools.combinations(affinity.features, 5):
        rest = [name for name in affinity.features if name not in chosen]
        every.append(tower_affinity(affinity, TowerPlan.from_lists([chosen, rest]))[0])
    found = compare_towers(affinity, plan, seed=4)
    # 200 draws: four standard errors of the mean, and a fifth of the deviation.
    assert found.within_random == pytest.approx(np.mean(every), abs=4 * np.std(every) / np.sqrt(200))
    assert found.std_random == pytest.approx(np.std(every), rel=0.2)


def test_the_seed_and_nothing_else_moves_the_random_towers():
    affinity = affinity_of(9)
    plan = TowerPlan.from_lists([affinity.features[:4], affinity.features[4:7], affinity.features[7:]])
    first = compare_towers(affinity, plan, seed=1)
    assert compare_towers(affinity, plan, seed=1) == first
    assert compare_towers(affinity, plan, seed=2).within_random != first.within_random
    turned = affinity.permuted(affinity.features[::-1])
    other = compare_towers(turned, TowerPlan.from_lists(plan.to_lists()[::-1]), seed=1)
    assert (other.within, other.between) == (first.within, first.between)
    assert (other.within_random, other.std_random) == (first.within_random, first.std_random)


def test_where_there_is_no_pair_there_is_no_mean():
    affinity = affinity_of(3)
    alone = compare_towers(affinity, TowerPlan.from_lists([["f0"], ["f1"], ["f2"]]))
    assert (alone.within, alone.within_strided, alone.within_random, alone.std_random) == (None,) * 4
    assert alone.between is not None
    one = compare_towers(affinity, TowerPlan.from_lists([["f0", "f1", "f2"]]))
    assert (one.between, one.std_random) == (None, 0.0)
    assert one.within == one.within_strided == one.within_random


def test_the_diagonal_does_not_count():
    matrix = np.array([[1.0, 0.25], [0.25, 0.5]])
    affinity = FeatureAffinity(matrix=matrix, features=["a", "b"])
    assert tower_affinity(affinity, TowerPlan.from_lists([["a", "b"]])) == (0.25, None)


def test_a_plan_of_other_features_is_refused():
    with pytest.raises(InputError, match=r"missing \['f2'\], unknown \['g'\]"):
        compare_towers(affinity_of(3), TowerPlan.from_lists([["f0", "f1"], ["g"]]))


# --- what other towers obey ------------------------------------------------------------------------------------------


def every_deal(sizes, names):
    """All ways to deal the names to towers of these sizes, in order."""
    if not sizes:
        yield []
        return
    for chosen in itertools.combinations(names, sizes[0]):
        rest = [name for name in names if name not in chosen]
        yield from ([list(chosen), *more] for more in every_deal(sizes[1:], rest))


def test_random_towers_are_drawn_inside_each_category():
    affinity = affinity_of([f"u{i}" for i in range(4)] + [f"i{i}" for i in range(5)], seed=3)
    # Categories that resemble themselves: random towers that mixed them would be far less alike.
    kind = np.array([name[0] for name in affinity.features])
    matrix = np.where(kind[:, None] == kind, 0.5 + affinity.matrix / 2, affinity.matrix / 10)
    affinity = FeatureAffinity(matrix=matrix, features=affinity.features)
    categories = {name: {"u": "user", "i": "item"}[name[0]] for name in affinity.features}
    users, items = affinity.features[:4], affinity.features[4:]
    plan = TowerPlan.from_lists([items[:3], users[:2], users[2:], items[3:]])
    every = [
        by_pairs(affinity, [*of_users, *of_items])[0].expected
        for of_users in every_deal([2, 2], users)
        for of_items in every_deal([3, 2], items)
    ]
    assert len(every) == 60
    found = compare_towers(affinity, plan, seed=2, categories=categories)
    assert found.within_random == pytest.approx(np.mean(every), abs=4 * np.std(every) / np.sqrt(200))
    assert found.std_random == pytest.approx(np.std(every), rel=0.2)
    mixed = compare_towers(affinity, plan, seed=2)
    assert mixed.within_random < min(every)
    # The naive towers are naive about categories too, and the plan's own means do not depend on them.
    assert (found.within, found.between, found.within_strided) == (mixed.within, mixed.between, mixed.within_strided)


def test_one_category_is_as_none():
    affinity = affinity_of(9)
    plan = TowerPlan.from_lists([affinity.features[:4], affinity.features[4:7], affinity.features[7:]])
    found = compare_towers(affinity, plan, seed=1)
    for categories in ({}, dict.fromkeys(affinity.features, ""), dict.fromkeys(affinity.features, "all")):
        assert compare_towers(affinity, plan, seed=1, categories=categories) == found


def test_features_without_category_form_one_more():
    affinity = affinity_of(4)
    plan = TowerPlan.from_lists([["f0", "f1"], ["f2", "f3"]])
    found = compare_towers(affinity, plan, categories={"f0": "user", "f1": "user"})
    assert (found.within_random, found.std_random) == (found.within, 0.0)
    with pytest.raises(InputError, match=r"tower 'tower_1' has features of the categories \['', 'user'\]"):
        compare_towers(affinity, plan, categories={"f0": "user", "f1": "user", "f3": "user"})


def test_pairs_of_shards_of_one_table_count_nowhere():
    shards = ["ad[0:2]", "ad[2:4]", "ad[4:6]", "user[0:4]", "user[4:6]", "city"]
    drawn = affinity_of(shards, seed=5).matrix
    table = np.array([name.split("[")[0] for name in shards])
    same = (table[:, None] == table) & ~np.eye(6, dtype=bool)
    towers = [["ad[0:2]", "user[0:4]"], ["ad[2:4]", "user[4:6]"], ["ad[4:6]", "city"]]
    plan = TowerPlan.from_lists(towers, column_splits={"ad": (2, 2, 2), "user": (4, 2)})

    def compared(of_shards):
        affinity = FeatureAffinity(matrix=np.where(same, of_shards, drawn), features=shards)
        return affinity, compare_towers(affinity, plan, seed=1)

    affinity, found = compared(1.0)
    # What two shards of a table have in common changes nothing.
    assert compared(0.0)[1] == found

    def mean(groups, inside):
        tower_of = {name: t for t, names in enumerate(groups) for name in names}
        values = [
            affinity.matrix[i, j]
            for i, j in itertools.combinations(range(6), 2)
            if not same[i, j] and (tower_of[shards[i]] == tower_of[shards[j]]) == inside
        ]
        return float(np.mean(values)) if values else None

    assert found.within == pytest.approx(mean(towers, inside=True))
    assert found.between == pytest.approx(mean(towers, inside=False))
    assert found.within_strided == pytest.approx(mean([shards[0::3], shards[1::3], shards[2::3]], inside=True))
    every = [value for deal in every_deal([2, 2, 2], shards) if (value := mean(deal, inside=True)) is not None]
    assert found.within_random == pytest.approx(np.mean(every), abs=4 * np.std(every) / np.sqrt(200))
    assert found.std_random == pytest.approx(np.std(every), rel=0.2)


def test_towers_of_shards_of_one_table_alone_have_no_pairs():
    shards = ["ad[0:2]", "ad[2:4]"]
    plan = TowerPlan.from_lists([shards], column_splits={"ad": (2, 2)})
    found = compare_towers(affinity_of(shards), plan)
    assert found == dataclasses.replace(
        found, within=None, between=None, within_strided=None, within_random=None, std_random=None
    )


def test_the_partitioner_compares_inside_its_categories():
    affinity = affinity_of(8, seed=2)
    categories = {"user": ["f0", "f1", "f2", "f3"], "item": ["f4", "f5", "f6", "f7"]}
    rules = PartitionRules(categories=categories)
    found = TowerPartitioner(num_towers=4, rules=rules).partition(affinity)
    assert [load.category for load in found.loads] == ["user", "user", "item", "item"]
    of_feature = {name: category for category, names in categories.items() for name in names}
    assert found.comparison == compare_towers(affinity, found.plan, categories=of_feature)
    assert found.comparison.within_random != compare_towers(affinity, found.plan).within_random
    bare = TowerPartitioner(num_towers=4).partition(affinity)
    assert {load.category for load in bare.loads} == {""}
