"""`TowerPartitioner` end to end on affinities with known groups."""

from __future__ import annotations

import json

import numpy as np
import pytest

import dmt.partitioner
from dmt.errors import InputError
from dmt.partitioner import FeatureAffinity, TowerPartitioner, tower_affinity
from dmt.plan.tables import TableSpec
from dmt.plan.towers import TowerPlan
from tests.partitioner.planted import planted_affinity, rand_index
from tests.seeds import seeds, some_slow


def sets(plan):
    return {frozenset(names) for names in plan.to_lists()}


@pytest.mark.parametrize("seed", seeds(1, 6))
@pytest.mark.parametrize(("num_features", "num_groups"), some_slow([(26, 8), (24, 4), (48, 16)], [(24, 4), (48, 16)]))
def test_planted_groups_are_recovered(num_features, num_groups, seed):
    affinity, groups = planted_affinity(num_features, num_groups, seed=seed)
    plan = TowerPartitioner(num_towers=num_groups, seed=seed).fit(affinity)
    assert rand_index(plan, groups) == 1.0
    assert plan.affinity["within_towers"] > plan.affinity["within_strided_towers"] + 0.3


@pytest.mark.parametrize("strategy", ["coherent", "diverse"])
def test_the_same_input_gives_the_same_plan(strategy):
    affinity, _ = planted_affinity(14, 4, seed=1, noise=0.4)
    partitioner = TowerPartitioner(num_towers=4, strategy=strategy, seed=3)
    assert partitioner.fit(affinity) == partitioner.fit(affinity)


@pytest.mark.parametrize("strategy", ["coherent", "diverse"])
def test_permuting_the_features_permutes_the_answer_only(strategy):
    # Noise without groups: an answer that hangs on the order of rows anywhere would change.
    affinity, _ = planted_affinity(17, 5, seed=2, within=0.3, between=0.3, noise=0.3)
    partitioner = TowerPartitioner(num_towers=5, strategy=strategy)
    plan = partitioner.fit(affinity)
    for seed in range(1):
        order = np.random.default_rng(seed).permutation(affinity.features).tolist()
        turned = partitioner.fit(affinity.permuted(order))
        assert sets(turned) == sets(plan)
        assert turned.affinity["stress"] == plan.affinity["stress"]
        # Towers by their first feature in the given order, features inside likewise.
        places = [[order.index(name) for name in names] for names in turned.to_lists()]
        assert places == sorted(sorted(p) for p in places)


def test_another_seed_may_answer_otherwise():
    affinity, _ = planted_affinity(48, 8, seed=2, within=0.3, between=0.3, noise=0.3)
    plans = [TowerPartitioner(num_towers=8, seed=s, refine=False).fit(affinity) for s in range(2)]
    assert len({frozenset(sets(plan)) for plan in plans}) > 1


def test_coherent_gathers_and_diverse_spreads_the_groups():
    affinity, groups = planted_affinity(24, 6, seed=0)
    coherent = TowerPartitioner(num_towers=6, strategy="coherent").fit(affinity)
    diverse = TowerPartitioner(num_towers=6, strategy="diverse").fit(affinity)
    assert rand_index(coherent, groups) == 1.0
    assert rand_index(diverse, groups) < 0.1
    summary = diverse.affinity
    assert summary["within_towers"] < summary["within_strided_towers"] < coherent.affinity["within_towers"]
    assert (coherent.strategy, diverse.strategy) == ("coherent", "diverse")


@pytest.mark.parametrize("num_towers", some_slow([1, 2, 5, 25, 26], [2, 5]))
def test_sizes_differ_by_one_at_most(num_towers):
    affinity, _ = planted_affinity(26, 2, seed=0)
    sizes = [len(names) for names in TowerPartitioner(num_towers=num_towers).fit(affinity).to_lists()]
    assert len(sizes) == num_towers
    assert max(sizes) - min(sizes) <= 1


def test_a_balance_ratio_lets_towers_differ():
    # Groups of 5, 3 and 3 features: sizes of 3..4 must split the first, sizes of 3..6 need not.
    names = [f"f{i}" for i in range(11)]
    groups = {name: 0 if i < 5 else 1 + i % 2 for i, name in enumerate(names)}
    member = np.array([groups[name] for name in names])
    affinity = FeatureAffinity(matrix=np.where(member[:, None] == member, 0.9, 0.05), features=names)
    assert rand_index(TowerPartitioner(num_towers=3).fit(affinity), groups) < 1.0
    assert rand_index(TowerPartitioner(num_towers=3, balance_ratio=2.0).fit(affinity), groups) == 1.0


def test_one_feature():
    plan = TowerPartitioner(num_towers=1).fit(FeatureAffinity(matrix=[[1.0]], features=["only"]))
    assert plan.to_lists() == [["only"]]
    assert (plan.affinity["within_towers"], plan.affinity["between_towers"], plan.affinity["stress"]) == (None, None, 0)


@pytest.mark.parametrize("value", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("strategy", ["coherent", "diverse"])
def test_a_constant_affinity_still_gives_balanced_towers(value, strategy):
    affinity = FeatureAffinity(matrix=np.full((7, 7), value), features=list("abcdefg"))
    plan = TowerPartitioner(num_towers=3, strategy=strategy).fit(affinity)
    assert sorted(map(len, plan.to_lists())) == [2, 2, 3]


def test_other_numbers_of_dimensions():
    affinity, groups = planted_affinity(12, 3, seed=0)
    for dims in (3, 15):
        assert rand_index(TowerPartitioner(num_towers=3, dims=dims).fit(affinity), groups) == 1.0
    assert sorted(map(len, TowerPartitioner(num_towers=3, dims=1).fit(affinity).to_lists())) == [4] * 3


def test_the_plan_records_how_it_was_made_and_survives_a_file(tmp_path):
    affinity, _ = planted_affinity(8, 2, seed=0)
    tables = [
        TableSpec(name=f"t_{name}", num_embeddings=10, embedding_dim=4, feature_names=(name,))
        for name in affinity.features
    ]
    plan = TowerPartitioner(num_towers=2, seed=9).fit(affinity, tables=tables)
    assert (plan.strategy, plan.seed, plan.tables) == ("coherent", 9, tuple(tables))
    assert plan.affinity["digest"] == affinity.to_summary()["digest"]
    assert plan.affinity["stress"] > 0
    plan.save(tmp_path / "towers.json")
    assert TowerPlan.load(tmp_path / "towers.json") == plan
    json.loads((tmp_path / "towers.json").read_text(), parse_constant=pytest.fail)  # No NaN in the file.


def test_features_of_a_shared_table_stay_together():
    affinity, groups = planted_affinity(12, 3, seed=0)
    names = list(affinity.features)
    # The table joins two features of different groups, which would be parted without it.
    pair = next([a, b] for a in names for b in names if groups[a] != groups[b])
    rest = [name for name in names if name not in pair]
    tables = [TableSpec(name="shared", num_embeddings=10, embedding_dim=4, feature_names=tuple(pair))]
    tables += [TableSpec(name=f"t_{n}", num_embeddings=10, embedding_dim=4, feature_names=(n,)) for n in rest]
    plan = TowerPartitioner(num_towers=3).fit(affinity, tables=tables)
    assert sum(set(pair) <= set(tower) for tower in plan.to_lists()) == 1
    assert [len(t) for t in plan.tables_by_tower(tables)] in ([4, 4, 3], [4, 3, 4], [3, 4, 4])
    with pytest.raises(InputError, match=r"num_towers=12 exceeds the 11 tables \(shared tables are not split\)"):
        TowerPartitioner(num_towers=12).fit(affinity, tables=tables)


def test_a_shared_table_is_placed_by_its_mean_affinity():
    # d alone is neutral; c pulls the table (c, d) to a and b.
    matrix = np.eye(6)
    for i, j, value in ((0, 1, 0.9), (0, 2, 0.9), (1, 2, 0.9), (3, 4, 0.2), (3, 5, 0.2), (4, 5, 0.9)):
        matrix[i, j] = matrix[j, i] = value
    affinity = FeatureAffinity(matrix=matrix, features=list("abcdef"))
    owners = [("a",), ("b",), ("c", "d"), ("e",), ("f",)]
    tables = [TableSpec(name="_".join(o), num_embeddings=9, embedding_dim=4, feature_names=o) for o in owners]
    towers = TowerPartitioner(num_towers=2, balance_ratio=2.0).fit(affinity, tables=tables).to_lists()
    assert towers == [["a", "b", "c", "d"], ["e", "f"]]


def test_within_and_between_are_means_over_pairs():
    matrix = [[1, 0.1, 0.2, 0.3], [0.1, 1, 0.4, 0.5], [0.2, 0.4, 1, 0.6], [0.3, 0.5, 0.6, 1]]
    affinity = FeatureAffinity(matrix=matrix, features=list("abcd"))
    within, between = tower_affinity(affinity, TowerPlan.from_lists([["d", "a", "b"], ["c"]]))
    assert within == pytest.approx((0.3 + 0.5 + 0.1) / 3)
    assert between == pytest.approx((0.2 + 0.4 + 0.6) / 3)
    assert tower_affinity(affinity, TowerPlan.from_lists([list("abcd")]))[1] is None


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"num_towers": 0}, "num_towers=0 must be a whole number of at least 1"),
        ({"num_towers": 2.0}, r"num_towers=2\.0 must be a whole number"),
        ({"num_towers": True}, "num_towers=True must be a whole number"),
        ({"num_towers": 2, "dims": 0}, "dims=0 must be a whole number of at least 1"),
        ({"num_towers": 2, "dims": 10**9}, "dims=1000000000 must be a whole number of at least 1 and at most 1000"),
        ({"num_towers": 2, "seed": 2**64}, "seed=18446744073709551616 must be .* at most 4294967295"),
        ({"num_towers": 2, "balance_ratio": 1e308}, r"balance_ratio=1e\+308 must be at least 1 and finite"),
        ({"num_towers": 2, "seed": -1}, "seed=-1 must be a whole number of at least 0"),
        ({"num_towers": 2, "strategy": "coherant"}, r"strategy='coherant' is unknown\. Did you mean 'coherent'\?"),
        ({"num_towers": 2, "balance_ratio": 0.5}, r"balance_ratio=0\.5 must be at least 1"),
        ({"num_towers": 2, "balance_ratio": float("nan")}, "balance_ratio=nan must be at least 1"),
        ({"num_towers": 2, "balance_ratio": float("inf")}, "balance_ratio=inf must be at least 1 and finite"),
    ],
)
def test_wrong_arguments_are_refused(keywords, message):
    with pytest.raises(InputError, match=message):
        TowerPartitioner(**keywords)


def test_more_towers_than_features_are_refused():
    affinity, _ = planted_affinity(5, 2, seed=0)
    with pytest.raises(InputError, match="num_towers=6 exceeds the 5 features to place"):
        TowerPartitioner(num_towers=6).fit(affinity)


@pytest.mark.parametrize(
    ("owned", "message"),
    [
        (["user", "shop", "ad"], "'ad' is in the tables but not in the affinity"),
        (["user"], r"'shop' is in the affinity but not in the tables \(1 features in the tables, 2 in the affinity\)"),
        (["user", "shopp"], "'shopp' is in the tables .*Did you mean 'shop'"),
    ],
)
def test_tables_of_another_model_are_refused(owned, message):
    affinity = FeatureAffinity(matrix=np.eye(2), features=["user", "shop"])
    tables = [TableSpec(name=f"t_{n}", num_embeddings=3, embedding_dim=4, feature_names=(n,)) for n in owned]
    with pytest.raises(InputError, match=message):
        TowerPartitioner(num_towers=1).fit(affinity, tables=tables)


def test_exported_names_are_sorted_and_real():
    assert dmt.partitioner.__all__ == sorted(dmt.partitioner.__all__)
    assert all(hasattr(dmt.partitioner, name) for name in dmt.partitioner.__all__)
