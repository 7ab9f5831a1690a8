"""`TowerPartitioner` holds all rules and limits, or says which it cannot hold."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest

from dmt.errors import InputError
from dmt.partitioner import PartitionRules, TowerPartitioner
from dmt.plan.tables import TableSpec
from tests.partitioner.instances import affinity_of, sets, tables_of
from tests.seeds import seeds

REFUSAL = r"TowerPartitioner: found no assignment of the features to \d towers within all limits\. The closest has "


def random_model(seed, num_features=18):
    rng = np.random.default_rng(seed)
    affinity = affinity_of(num_features, seed=seed)
    rows = 10 ** rng.uniform(1, 7, num_features)
    tables = tables_of(affinity.features, rows=rows, dims=4 * rng.integers(1, 33, num_features))
    factors = dict(zip(affinity.features, rng.uniform(1, 50, num_features).tolist(), strict=True))
    return affinity, tables, factors


def loads_of(names, tables, factors):
    """(work, bytes) of a tower, from the tables themselves."""
    of = {feature: table for table in tables for feature in table.feature_names}
    held = {of[name].name: of[name] for name in names}.values()
    work = sum(factors.get(name, 1.0) * of[name].embedding_dim for name in names)
    return work, sum(4 * table.num_embeddings * table.embedding_dim for table in held)


@pytest.mark.parametrize("seed", seeds(8, 30))
def test_limits_are_held_or_refused_with_the_reason(seed):
    affinity, tables, factors = random_model(seed)
    affinity = dataclasses.replace(affinity, pooling_factors=tuple(factors[name] for name in affinity.features))
    rng = np.random.default_rng(1000 + seed)
    num_towers = int(rng.integers(2, 7))
    total = loads_of(affinity.features, tables, factors)
    work_ratio, bytes_ratio = rng.choice([1.05, 1.2, 1.6, 2.5], 2).tolist()
    rules = PartitionRules(
        max_work_ratio=work_ratio if seed % 3 else None,
        max_tower_bytes=bytes_ratio * total[1] / num_towers if seed % 3 != 1 else None,
    )
    partitioner = TowerPartitioner(
        num_towers=num_towers, rules=rules, balance_ratio=[1.0, 2.0, math.inf][seed % 3], refine=bool(seed % 4)
    )
    found = refusal = None
    try:
        found = partitioner.partition(affinity, tables=tables)
    except InputError as error:
        refusal = str(error)
    if found is None:
        assert re.match(REFUSAL + ".*a tower with .*[(].*Raise balance_ratio or the limits", refusal)
        return
    loads = [loads_of(names, tables, factors) for names in found.plan.to_lists()]
    assert [load.num_bytes for load in found.loads] == [num_bytes for _, num_bytes in loads]
    assert [load.work for load in found.loads] == pytest.approx([work for work, _ in loads], rel=1e-12)
    assert [load.num_features for load in found.loads] == [len(tower) for tower in found.plan.to_lists()]
    work, num_bytes = (max(column) for column in zip(*loads, strict=True))
    if rules.max_work_ratio:
        assert work <= rules.max_work_ratio * total[0] / num_towers * (1 + 1e-9)
    if rules.max_tower_bytes:
        assert num_bytes <= rules.max_tower_bytes
    sizes = [len(tower) for tower in found.plan.to_lists()]
    assert max(sizes) <= max(-(-18 // num_towers), partitioner.balance_ratio * min(sizes))


def with_factors(affinity, *first):
    """Mean ids of the first features, 1 of the others."""
    factors = (*first, *[1.0] * (affinity.num_features - len(first)))
    return dataclasses.replace(affinity, pooling_factors=factors)


def test_with_open_sizes_work_alone_decides_them():
    affinity = with_factors(affinity_of(9), 8.0)
    partitioner = TowerPartitioner(num_towers=2, balance_ratio=math.inf, rules=PartitionRules(max_work_ratio=1.0))
    found = partitioner.partition(affinity, tables=tables_of(affinity.features))
    assert sets(found.plan) == {frozenset(["f0"]), frozenset(f"f{i}" for i in range(1, 9))}
    assert [load.work for load in found.loads] == [64, 64]
    assert found.plan.affinity["balance_ratio"] is None, "JSON has no infinity"


def test_measured_pooling_factors_count():
    tables = tables_of(["a", "b", "c"], dims=4)
    affinity = dataclasses.replace(affinity_of(["a", "b", "c"]), tables=tuple(tables), pooling_factors=(10.0, 2.0, 3.0))
    found = TowerPartitioner(num_towers=3).partition(affinity)
    assert [load.work for load in found.loads] == [40, 8, 12]
    unmeasured = dataclasses.replace(affinity, pooling_factors=None)
    (note,) = TowerPartitioner(num_towers=3, rules=PartitionRules(max_work_ratio=2.5)).partition(unmeasured).notes
    assert note.startswith("Work assumes one id per sample and feature")


@pytest.mark.parametrize(
    ("num_towers", "rules", "message"),
    [
        (2, {"max_work_ratio": 1.2}, r"a tower with 4\d\d\.?\d* work \(limit 261\.6\)"),
        (2, {"max_tower_bytes": 24_840}, r"a tower with 32,.* bytes \(limit 24,840\)"),
        (2, {"max_tower_bytes": 9_000}, r"bytes \(limit 9,000\)"),
        (2, {"apart": [["f0", "f1", "f2"]]}, "a tower with features that must be apart"),
        (2, {"apart": [["f0", "f1"], ["f1", "f2"], ["f2", "f0"]]}, "a tower with features that must be apart"),
        (1, {"apart": [["f0", "f1"]]}, "a tower with features that must be apart"),
    ],
)
def test_limits_that_cannot_be_held_are_refused(num_towers, rules, message):
    affinity = with_factors(affinity_of(6), 50.0, 2.0)
    tables = tables_of(affinity.features, rows=[10, 1000, 10, 10, 10, 10], dims=[8, 8, 8, 4, 4, 4])
    with pytest.raises(InputError, match=REFUSAL + f".*{message}"):
        TowerPartitioner(num_towers=num_towers, rules=PartitionRules(**rules)).partition(affinity, tables=tables)


@pytest.mark.parametrize("rules", [{"max_work_ratio": 2}, {"max_tower_bytes": 9}])
def test_limits_need_the_tables(rules):
    with pytest.raises(InputError, match=r"max_tower_bytes need the tables, .* has none.*Pass tables= to fit"):
        TowerPartitioner(num_towers=2, rules=PartitionRules(**rules)).fit(affinity_of(["a", "b", "c"]))


def test_all_features_in_one_table_fit_one_tower():
    affinity = affinity_of(6)
    shared = [TableSpec(name="t", num_embeddings=9, embedding_dim=4, feature_names=affinity.features)]
    rules = PartitionRules(max_work_ratio=1.0, max_tower_bytes=9 * 4 * 4, together=[["*"]])
    found = TowerPartitioner(num_towers=1, rules=rules).partition(affinity, tables=shared)
    assert found.loads[0].num_bytes == 9 * 4 * 4
    with pytest.raises(InputError, match=r"num_towers=2 exceeds the 1 groups of features \(of a shared table"):
        TowerPartitioner(num_towers=2).fit(affinity, tables=shared)


# --- categories -----------------------------------------------------------------------------------------


def names_of(plan):
    return [tower.name for tower in plan.towers]


def test_categories_get_towers_in_proportion_to_their_features():
    affinity = affinity_of([*(f"u{i}" for i in range(12)), *(f"i{i}" for i in range(5)), "x"])
    rules = PartitionRules(categories={"user": ["u*"], "item": ["i*"], "both": ["x"]})
    plan = TowerPartitioner(num_towers=6, rules=rules).fit(affinity)
    assert names_of(plan) == ["user_0", "user_1", "user_2", "item_0", "item_1", "both_0"]
    assert [{name[0] for name in tower} for tower in plan.to_lists()] == [{"u"}] * 3 + [{"i"}] * 2 + [{"x"}]
    given = rules.model_copy(update={"towers_per_category": {"user": 1, "item": 4}})
    plan = TowerPartitioner(num_towers=6, rules=given).fit(affinity)
    assert sorted(len(tower) for tower in plan.to_lists()) == [1, 1, 1, 1, 2, 12]


@pytest.mark.parametrize(
    ("num_towers", "rules", "message"),
    [
        (2, {}, r"num_towers=2, but the categories need at least 3 .*'u': 4, 'i': 3, 'x': 1"),
        (9, {}, "num_towers=9, but the categories .* can fill at most 8 .*Give a number in that range"),
        (6, {"towers_per_category": {"u": 1, "i": 4}}, r"towers_per_category\['i'\]=4 exceeds the 3 feat"),
        (6, {"towers_per_category": {"u": 1, "i": 2, "x": 1}}, "num_towers=6, but .* can fill at most 4"),
        (3, {"apart": [["i0", "i1"]]}, "category 'i': found no assignment .* to 1 towers .* must be apart"),
        (3, {"max_tower_bytes": 300}, r"category 'u': found no assignment .* bytes \(limit 300\)"),
    ],
)
def test_categories_that_do_not_fit_are_refused(num_towers, rules, message):
    affinity = affinity_of(["u0", "u1", "u2", "u3", "i0", "i1", "i2", "x0"])
    rules = PartitionRules(categories={"u": ["u*"], "i": ["i*"], "x": ["x*"]}, **rules)
    with pytest.raises(InputError, match=message):
        TowerPartitioner(num_towers=num_towers, rules=rules).fit(affinity, tables=tables_of(affinity.features))


# --- together, apart, order ------------------------------------------------------------------------------------------


def test_together_and_apart_are_held():
    affinity = affinity_of(16)
    rules = PartitionRules(together=[["f0", "f5"], ["f5", "f9"]], apart=[["f0", "f1", "f2", "f3"], ["f9", "f15"]])
    found = TowerPartitioner(num_towers=4, rules=rules).partition(affinity)
    home = {name: t for t, tower in enumerate(found.plan.to_lists()) for name in tower}
    assert home["f0"] == home["f5"] == home["f9"] != home["f15"]
    assert len({home[f"f{i}"] for i in range(4)}) == 4
    assert [load.num_features for load in found.loads] == [4, 4, 4, 4]
    assert not found.notes
    apart = PartitionRules(apart=[["*"]])
    assert TowerPartitioner(num_towers=9, rules=apart).fit(affinity_of(9)).num_towers == 9


def test_blocks_too_large_for_even_towers_are_noted():
    rules = PartitionRules(together=[[f"f{i}" for i in range(7)]])
    found = TowerPartitioner(num_towers=4, rules=rules).partition(affinity_of(13))
    assert sorted(load.num_features for load in found.loads) == [2, 2, 2, 7]
    assert found.notes == (
        "Towers have 2 to 7 features instead of 3 to 4, because features that share a table or must stay together are "
        "not separated.",
    )
