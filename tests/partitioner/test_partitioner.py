"""`TowerPartitioner` end to end on affinities with known groups."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from scipy.spatial.distance import pdist
from threadpoolctl import threadpool_limits

import dmt.partitioner.partitioner
from dmt.errors import InputError
from dmt.partitioner import FeatureAffinity, Interaction, PartitionRules, TowerPartitioner, tower_affinity
from dmt.partitioner.partition import compare_towers, judge_meaning
from dmt.partitioner.points import group_points
from dmt.plan.tables import TableSpec
from dmt.plan.towers import TowerPlan
from tests.partitioner.instances import sets, tables_of
from tests.partitioner.planted import planted_affinity, rand_index
from tests.seeds import seeds, some_slow


@pytest.mark.parametrize("seed", seeds(1, 6))
@pytest.mark.parametrize(("num_features", "num_groups"), some_slow([(26, 8), (24, 4), (48, 16)], [(24, 4), (48, 16)]))
def test_planted_groups_are_recovered(num_features, num_groups, seed):
    affinity, groups = planted_affinity(num_features, num_groups, seed=seed)
    plan = TowerPartitioner(num_towers=num_groups, seed=seed).fit(affinity)
    assert rand_index(plan, groups) == 1.0
    assert plan.affinity["within"] > plan.affinity["within_strided"] + 0.3


@pytest.mark.parametrize("strategy", ["coherent", "diverse"])
def test_permuting_the_features_permutes_the_answer_only(strategy):
    # Noise without groups: an answer that hangs on the order of rows anywhere would change.
    affinity, _ = planted_affinity(17, 5, seed=2, within=0.3, between=0.3, noise=0.3)
    partitioner = TowerPartitioner(num_towers=5, strategy=strategy)
    plan = partitioner.fit(affinity)
    assert partitioner.fit(affinity) == plan
    order = np.random.default_rng(0).permutation(affinity.features).tolist()
    turned = partitioner.fit(affinity.permuted(order))
    assert sets(turned) == sets(plan)
    # Towers by their first feature in the given order, features inside likewise.
    places = [[order.index(name) for name in names] for names in turned.to_lists()]
    assert places == sorted(sorted(p) for p in places)


def test_coherent_gathers_and_diverse_spreads_the_groups():
    affinity, groups = planted_affinity(24, 6, seed=0)
    coherent = TowerPartitioner(num_towers=6, strategy="coherent").fit(affinity)
    diverse = TowerPartitioner(num_towers=6, strategy="diverse").fit(affinity)
    assert rand_index(coherent, groups) == 1.0
    assert rand_index(diverse, groups) < 0.1
    summary = diverse.affinity
    assert summary["within"] < summary["within_strided"] < coherent.affinity["within"]
    assert (coherent.strategy, diverse.strategy) == ("coherent", "diverse")


def test_a_balance_ratio_lets_towers_differ():
    # Groups of 6, 4 and 4 features: sizes of 4..5 must split the first, sizes of 3..6 need not.
    names = [f"f{i}" for i in range(14)]
    groups = {name: 0 if i < 6 else 1 + i % 2 for i, name in enumerate(names)}
    member = np.array([groups[name] for name in names])
    affinity = FeatureAffinity(matrix=np.where(member[:, None] == member, 0.9, 0.05), features=names)
    assert rand_index(TowerPartitioner(num_towers=3).fit(affinity), groups) < 1.0
    assert rand_index(TowerPartitioner(num_towers=3, balance_ratio=2.0).fit(affinity), groups) == 1.0


def test_features_outside_are_left_out_and_the_plan_names_them():
    affinity, _ = planted_affinity(26, 6, seed=1)
    outside = affinity.features[3:6:2]
    others = [name for name in affinity.features if name not in outside]
    given = dataclasses.replace(affinity, tables=tables_of(affinity.features))
    plan = TowerPartitioner(num_towers=6, rules=PartitionRules(outside=outside[::-1])).fit(given)
    assert (plan.outside, plan.tables) == (outside, given.tables)
    alone = TowerPartitioner(num_towers=6).fit(given.without(outside))
    assert plan.to_lists() == alone.to_lists()
    assert sorted(plan.features) == sorted(others)
    assert plan.affinity == alone.affinity | {
        "notes": [f"Every rank holds the tables of the features outside towers: {', '.join(outside)}."]
    }
    assert plan.affinity["within"] > plan.affinity["within_strided"] + 0.3
    shared = TableSpec(name="t", num_embeddings=4, embedding_dim=8, feature_names=("a", "b"))
    pair = FeatureAffinity(matrix=np.eye(2), features=["a", "b"], tables=[shared])
    with pytest.raises(InputError, match=r"table 't' is shared by \['a', 'b'\], of which only some are to be left out"):
        TowerPartitioner(num_towers=1, rules=PartitionRules(outside=["b"])).fit(pair)


def test_without_refine_towers_are_the_groups_of_points():
    affinity, _ = planted_affinity(10, 3, seed=2, within=0.3, between=0.3, noise=0.3)
    refined, found = (TowerPartitioner(num_towers=3, refine=refine).partition(affinity) for refine in (True, False))
    labels = group_points(found.points, 3, sizes=(3, 4), seed=0)
    groups = TowerPlan.from_lists([[affinity.features[i] for i in np.flatnonzero(labels == t)] for t in range(3)])
    assert sets(found.plan) == sets(groups) != sets(refined.plan)
    made, wanted = pdist(found.points), 1 - affinity.matrix[np.triu_indices(10, k=1)]
    assert found.normalized_stress == pytest.approx(np.linalg.norm(made - wanted) / np.linalg.norm(wanted))


def test_one_feature():
    plan = TowerPartitioner(num_towers=1).fit(FeatureAffinity(matrix=[[1.0]], features=["only"]))
    assert plan.to_lists() == [["only"]]
    assert (plan.affinity["within"], plan.affinity["between"], plan.affinity["normalized_stress"]) == (None, None, 0)


def test_the_plan_records_how_it_was_made_and_survives_a_file(tmp_path):
    affinity, _ = planted_affinity(8, 2, seed=0)
    tables = tables_of(affinity.features)
    plan = TowerPartitioner(num_towers=2, seed=9).fit(affinity, tables=tables)
    assert (plan.strategy, plan.seed, plan.tables) == ("coherent", 9, tuple(tables))
    assert plan.affinity["digest"] == affinity.digest
    assert plan.affinity["normalized_stress"] > 0
    plan.save(tmp_path / "towers.json")
    assert TowerPlan.load(tmp_path / "towers.json") == plan
    json.loads((tmp_path / "towers.json").read_text(), parse_constant=pytest.fail)  # No NaN in the file.


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"num_towers": 0}, r"num_towers: .* \(got 0\)"),
        ({"num_towers": 2, "seed": 2**32}, r"seed: .* \(got 4294967296\)"),
        ({"num_towers": 2, "strategy": "coherant"}, r"strategy: .*'coherent'.* \(got 'coherant'\)"),
        ({"num_towers": 2, "balance_ratio": 0.5}, r"balance_ratio: .* \(got 0\.5\)"),
        ({"num_towers": 2, "balance_ratio": "2"}, r"balance_ratio: .* \(got '2'\)"),
        ({"num_towers": 2, "rules": {}}, "rules: .*PartitionRules"),
    ],
)
def test_wrong_arguments_are_refused(keywords, message):
    partitioner = TowerPartitioner(**keywords)  # parameters are kept as given
    with pytest.raises(InputError, match=f"TowerPartitioner: {message}"):
        partitioner.fit(FeatureAffinity(matrix=np.eye(3), features=list("abc")))


def interactions_of(pairs, triples=(), names="abcdefgh", error=0.001):
    gains, row = np.zeros((len(names), len(names))), {name: i for i, name in enumerate(names)}
    for pair, gain in pairs.items():
        i, j = (row[name] for name in pair)
        gains[i, j] = gains[j, i] = gain
    triples = tuple(Interaction(features=tuple(names), gain=gain) for names, gain in dict(triples).items())
    errors = np.full(gains.shape, error)
    return FeatureAffinity(matrix=gains, features=list(names), measure="interactions", errors=errors, triples=triples)


def test_auto_is_resolved_by_the_measure_and_the_tower_modules():
    measured = interactions_of({"af": 0.2, "bg": 0.2})
    for keeps, strategy, together in ((True, "together", True), (False, "apart", False)):
        plan = TowerPartitioner(num_towers=2, keeps_interactions=keeps).fit(measured)
        assert plan.strategy == strategy
        assert any({"a", "f"} <= set(tower) for tower in plan.to_lists()) == together
    cosines = TowerPartitioner(num_towers=2, keeps_interactions=False).fit(planted_affinity(8, 2, seed=0)[0])
    assert cosines.strategy == "coherent"
    with pytest.raises(InputError, match="measure is TowerPlan"):
        TowerPartitioner(num_towers=2).fit(plan)
    for strategy, measure in (("together", planted_affinity(8, 2, seed=0)[0]), ("coherent", measured)):
        with pytest.raises(InputError, match=f"strategy='{strategy}' does not fit the measure"):
            TowerPartitioner(num_towers=2, strategy=strategy).fit(measure)


def test_a_triple_counts_where_all_three_are_together():
    measured = interactions_of({}, {"adg": 0.3})
    found = TowerPartitioner(num_towers=2).partition(measured)
    assert any({"a", "d", "g"} <= set(tower) for tower in found.plan.to_lists())
    assert (found.comparison.within, found.comparison.within_strided) == (1.0, 0.0)
    assert tower_affinity(measured, TowerPlan.from_lists([list("adbc"), list("gefh")])) == (0.0, 1.0)
    apart = TowerPartitioner(num_towers=2, strategy="apart").partition(measured)
    assert apart.comparison.within == 0.0
    # A triple of which two share a table is together where the third joins them.
    tables = [TableSpec(name="t", num_embeddings=9, embedding_dim=4, feature_names=("a", "d"))]
    tables += tables_of("bcefgh")
    assert TowerPartitioner(num_towers=4, balance_ratio=3).partition(measured, tables=tables).comparison.within == 1.0


def test_gains_within_their_error_are_no_interaction():
    found = TowerPartitioner(num_towers=2).partition(interactions_of({"af": 0.0033, "bg": 0.0030}))
    assert found.comparison.within is None
    assert "the towers are balanced but otherwise arbitrary" in found.notes[0]
    sentence = judge_meaning(found)
    assert "beyond the measuring error, so the towers are arbitrary" in sentence
    assert TowerPartitioner(num_towers=2).partition(interactions_of({"af": 0.0035})).comparison.within == 1.0


@pytest.mark.parametrize("strategy", ["coherent", "diverse"])
def test_features_of_a_table_that_resemble_each_other_lift_nothing(strategy):
    rng = np.random.default_rng(0)
    matrix = rng.uniform(0.2, 0.4, (24, 24))
    matrix = (matrix + matrix.T) / 2
    owners = [*(tuple(range(first, first + 4)) for first in (0, 4, 8, 12)), *((i,) for i in range(16, 24))]
    for owned in owners:
        matrix[np.ix_(owned, owned)] = 0.95
    names = [f"f{i}" for i in range(24)]
    tables = [
        TableSpec(name=f"t{o[0]}", num_embeddings=9, embedding_dim=4, feature_names=tuple(names[i] for i in o))
        for o in owners
    ]
    measured = FeatureAffinity(matrix=matrix, features=names, tables=tuple(tables))
    found = TowerPartitioner(num_towers=6, strategy=strategy).partition(measured)
    assert "These towers may be no better than random" in judge_meaning(found)
    # Without the tables, the same affinities have structure.
    alone = TowerPartitioner(num_towers=6).partition(dataclasses.replace(measured, tables=()))
    assert "the affinities have structure" in judge_meaning(alone)


def test_random_towers_obey_the_rules():
    measured, _ = planted_affinity(18, 3, seed=0)
    names = measured.features
    tables = tables_of(names, rows=10 + 40 * (np.arange(18) % 3), dims=4)
    mean = sum(table.num_bytes for table in tables) / 3
    rules = PartitionRules(apart=[["f0", "f1", "f2"]], together=[["f3", "f4"]], max_tower_bytes=1.2 * mean)
    partitioner = TowerPartitioner(num_towers=3, rules=rules, balance_ratio=2)
    seen = []

    def spy(affinity, plan, random):
        seen.extend(random)
        return compare_towers(affinity, plan, random)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dmt.partitioner.partitioner, "compare_towers", spy)
        partitioner.partition(measured, tables=tables)
        under_limits, seen = seen, []
        TowerPartitioner(num_towers=4, rules=PartitionRules(categories={"x": names[:9]})).partition(measured)
    assert all({towers[name] for name in names[:9]}.isdisjoint(towers[name] for name in names[9:]) for towers in seen)
    seen = under_limits
    assert len(seen) > 50
    assert len({tuple(sorted(towers.items())) for towers in seen}) > 50
    for towers in seen:
        assert len({towers[name] for name in ("f0", "f1", "f2")}) == 3
        assert towers["f3"] == towers["f4"]
        held = [sum(t.num_bytes for t in tables if towers[t.feature_names[0]] == tower) for tower in range(3)]
        assert max(held) <= 1.2 * mean


def test_plans_do_not_depend_on_the_number_of_threads():
    affinity, _ = planted_affinity(90, 6, seed=3, within=0.3, between=0.3, noise=0.3)
    plans = []
    for number in (1, 2):
        with threadpool_limits(number):
            plans.append(TowerPartitioner(num_towers=6).fit(affinity).to_lists())
    assert plans[0] == plans[1]


@pytest.mark.slow
@pytest.mark.parametrize(("num_features", "num_towers"), [(80, 16), (300, 50), (1000, 64)])
def test_large_planted_groups_are_recovered(num_features, num_towers):
    affinity, groups = planted_affinity(num_features, num_towers, seed=0)
    assert rand_index(TowerPartitioner(num_towers=num_towers).fit(affinity), groups) == 1.0
