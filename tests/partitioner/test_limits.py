"""Rules and limits through `TowerPartitioner`: held, or refused with the reason, wherever the points are."""

from __future__ import annotations

import dataclasses
import re
import time

import numpy as np
import pytest

from dmt.errors import InputError
from dmt.partitioner import FeatureAffinity, PartitionRules, TowerPartitioner
from dmt.plan.tables import TableSpec
from tests.partitioner.instances import affinity_of, sets, tables_of
from tests.seeds import seeds


def random_model(seed, num_features=18):
    rng = np.random.default_rng(seed)
    affinity = affinity_of(num_features, seed=seed)
    rows = 10 ** rng.uniform(1, 7, num_features)
    tables = tables_of(affinity.features, rows=rows, dims=4 * rng.integers(1, 33, num_features))
    factors = dict(zip(affinity.features, rng.uniform(1, 50, num_features).tolist(), strict=True))
    return affinity, tables, factors


def loads_of(plan, tables, factors):
    """(work, bytes) of each tower, from the tables themselves."""
    of = {feature: table for table in tables for feature in table.feature_names}
    for tower in plan.to_lists():
        yield (
            sum(factors.get(name, 1.0) * of[name].embedding_dim for name in tower),
            sum(
                4 * table.num_embeddings * table.embedding_dim for table in {of[n].name: of[n] for n in tower}.values()
            ),
        )


REASONS = (
    r"TowerPartitioner: (feature 'f\d+' needs [\d,.e+]+ (work|bytes), but a tower may have [\d,.e+]+ at most\. Raise|"
    r"the features need .* in all, but|no assignment of the features to \d towers within all limits was found\. The "
    r"closest has a tower with .* where .*\. Raise balance_ratio or the limits)"
)


@pytest.mark.parametrize("seed", seeds(12, 30))
def test_limits_are_held_or_refused_with_the_reason(seed):
    affinity, tables, factors = random_model(seed)
    rng = np.random.default_rng(1000 + seed)
    num_towers = int(rng.integers(2, 7))
    total = [sum(column) for column in zip(*loads_of_all(tables, factors), strict=True)]
    work_ratio, bytes_ratio = rng.choice([1.05, 1.2, 1.6, 2.5], 2).tolist()
    rules = PartitionRules(
        pooling_factors=factors,
        max_work_ratio=work_ratio if seed % 3 else None,
        max_bytes_ratio=bytes_ratio if seed % 3 != 1 else None,
        max_tower_bytes=int(total[1] * 0.9) if seed % 2 else None,
    )
    partitioner = TowerPartitioner(num_towers=num_towers, rules=rules, balance_ratio=[1.0, 2.0, None][seed % 3])
    found = refusal = None
    try:
        found = partitioner.partition(affinity, tables=tables)
    except InputError as error:
        refusal = str(error)
    if refusal is not None:
        assert re.match(REASONS, refusal), refusal
        return
    loads = list(loads_of(found.plan, tables, factors))
    assert [load.num_bytes for load in found.loads] == [num_bytes for _, num_bytes in loads]
    assert [load.work for load in found.loads] == pytest.approx([work for work, _ in loads], rel=1e-12)
    assert [load.num_features for load in found.loads] == [len(tower) for tower in found.plan.to_lists()]
    work, num_bytes = (max(column) for column in zip(*loads, strict=True))
    if rules.max_work_ratio:
        assert work <= rules.max_work_ratio * total[0] / num_towers * (1 + 1e-9)
        assert found.limits.max_work == pytest.approx(rules.max_work_ratio * total[0] / num_towers)
    if rules.max_bytes_ratio:
        assert num_bytes <= rules.max_bytes_ratio * total[1] / num_towers
    if rules.max_tower_bytes:
        assert num_bytes <= rules.max_tower_bytes
    sizes = [len(tower) for tower in found.plan.to_lists()]
    if partitioner.balance_ratio is not None:
        assert max(sizes) <= max(-(-18 // num_towers), partitioner.balance_ratio * min(sizes))


def loads_of_all(tables, factors):
    for table in tables:
        yield factors[table.feature_names[0]] * table.embedding_dim, table.num_bytes


def test_both_outcomes_occur_among_the_random_models():
    outcomes = set()
    for seed in range(6):
        affinity, tables, factors = random_model(seed)
        rules = PartitionRules(pooling_factors=factors, max_work_ratio=1.1, max_bytes_ratio=1.6)
        try:
            TowerPartitioner(num_towers=2 + seed % 2, rules=rules, balance_ratio=None).fit(affinity, tables=tables)
            outcomes.add("held")
        except InputError:
            outcomes.add("refused")
    assert outcomes == {"held", "refused"}


def test_without_a_balance_ratio_work_alone_decides_the_sizes():
    affinity = affinity_of(9)
    rules = PartitionRules(pooling_factors={"f0": 8}, max_work_ratio=1.0)
    tables = tables_of(affinity.features)
    found = TowerPartitioner(num_towers=2, balance_ratio=None, rules=rules).partition(affinity, tables=tables)
    assert sets(found.plan) == {frozenset(["f0"]), frozenset(f"f{i}" for i in range(1, 9))}
    assert [load.work for load in found.loads] == [64, 64]
    assert found.limits.balance_ratio is None
    with pytest.raises(
        InputError, match=r"no assignment .* has a tower with .* where .*Raise balance_ratio or the lim"
    ):
        TowerPartitioner(num_towers=2, rules=rules).partition(affinity, tables=tables)


def test_measured_pooling_factors_count_and_rules_override_them():
    tables = tables_of(["a", "b", "c"], dims=4)
    affinity = dataclasses.replace(affinity_of(["a", "b", "c"]), tables=tuple(tables), pooling_factors=(10.0, 2.0, 3.0))
    found = TowerPartitioner(num_towers=3, rules=PartitionRules(pooling_factors={"b": 7})).partition(affinity)
    assert {load.name: load.work for load in found.loads} == {"tower_0": 40, "tower_1": 28, "tower_2": 12}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            {"max_work_ratio": 1.2},
            r"feature 'f0' needs 400 work, but a tower may have 261\.6 at most\. Raise max_work_rat",
        ),
        (
            {"max_bytes_ratio": 1.5},
            r"feature 'f1' needs 32,000 bytes, but a tower may have 24,840 at most\. Raise the lim",
        ),
        (
            {"max_tower_bytes": 9_000},
            "feature 'f1' needs 32,000 bytes, but a tower may have 9,000 at most.*split_columns",
        ),
        ({"max_tower_bytes": 1}, "but a tower may have 1 at most"),
    ],
)
def test_refusals_name_feature_number_limit_and_remedy(rules, message):
    affinity = affinity_of(6)
    tables = tables_of(affinity.features, rows=[10, 1000, 10, 10, 10, 10], dims=[8, 8, 8, 4, 4, 4])
    rules = PartitionRules(pooling_factors={"f0": 50, "f1": 2, "f2": 1}, **rules)
    with pytest.raises(InputError, match=message):
        TowerPartitioner(num_towers=2, rules=rules).partition(affinity, tables=tables)


def test_a_shared_table_too_large_is_named_with_its_features():
    tables = [
        TableSpec(name="t", num_embeddings=1000, embedding_dim=8, feature_names=("f0", "f1")),
        *tables_of(["f2", "f3"]),
    ]
    with pytest.raises(InputError, match=r"feature 'f0', 'f1' which share a table or must stay together, needs 32,000"):
        TowerPartitioner(num_towers=2, rules=PartitionRules(max_tower_bytes=31_999)).fit(affinity_of(4), tables=tables)


def test_limits_need_the_tables():
    with pytest.raises(InputError, match=r"a limit on work or bytes needs the tables, .*Give tables=, or collect"):
        TowerPartitioner(num_towers=2, rules=PartitionRules(max_work_ratio=2)).fit(affinity_of(3))


def categories_of(plan):
    return [tower.name for tower in plan.towers]


def test_categories_get_towers_in_proportion_to_their_features():
    affinity = affinity_of([*(f"u{i}" for i in range(12)), *(f"i{i}" for i in range(5)), "x"])
    rules = PartitionRules(categories={"user": ["u*"], "item": ["i*"], "both": ["x"]})
    plan = TowerPartitioner(num_towers=6, rules=rules).fit(affinity)
    assert categories_of(plan) == ["user_0", "user_1", "user_2", "item_0", "item_1", "both_0"]
    assert [{name[0] for name in tower} for tower in plan.to_lists()] == [{"u"}] * 3 + [{"i"}] * 2 + [{"x"}]
    given = rules.model_copy(update={"towers_per_category": {"user": 1, "item": 4, "both": 1}})
    plan = TowerPartitioner(num_towers=6, rules=given).fit(affinity)
    assert [len(tower) for tower in plan.to_lists()] == [12, 1, 1, 1, 2, 1] or sorted(
        len(tower) for tower in plan.to_lists()
    ) == [1, 1, 1, 1, 2, 12]


def test_categories_get_towers_by_what_is_limited():
    # Many small user features, few large item ones.
    affinity = affinity_of([*(f"u{i}" for i in range(8)), *(f"i{i}" for i in range(4))])
    tables = tables_of(affinity.features, rows=[10] * 8 + [1000] * 4)
    categories = {"user": ["u*"], "item": ["i*"]}

    def towers(**limits):
        rules = PartitionRules(categories=categories, **limits)
        plan = TowerPartitioner(num_towers=4, rules=rules, balance_ratio=None).fit(affinity, tables=tables)
        return sum(name.startswith("item") for name in categories_of(plan))

    assert towers() == 1
    assert towers(max_bytes_ratio=2.0) == 3
    assert towers(max_work_ratio=1.6) == 1
    assert towers(max_work_ratio=2.0, pooling_factors={"i*": 30}) == 3


@pytest.mark.parametrize(
    ("num_towers", "rules", "message"),
    [
        (2, {}, r"the categories need 3 towers at least \('u' 1, 'i' 1, 'x' 1\), but num_towers=2\. Use more towers"),
        (9, {}, r"num_towers=9 exceeds what the categories can fill, .*'u': 4, 'i': 3, 'x': 1.* Use fewer towers"),
        (4, {"max_tower_bytes": 900}, r"the categories need 5 towers at least \('u' 2, 'i' 2, 'x' 1\)"),
        (5, {"max_tower_bytes": 300}, r"need 8 towers at least \('u' 4, 'i' 3, 'x' 1\)"),
        (8, {"max_tower_bytes": 300}, r"category 'u': feature 'u0' needs 320 bytes, but a tower may have 300"),
        (
            6,
            {"towers_per_category": {"u": 1, "i": 4, "x": 1}},
            r"category 'i': num_towers=4 exceeds the 3 features to place",
        ),
        (4, {"apart": [["i0", "i1", "i2"]]}, r"the categories need 5 towers at least \('u' 1, 'i' 3, 'x' 1\)"),
        (
            5,
            {"apart": [["i0", "i1", "i2"]], "towers_per_category": {"u": 3, "i": 1, "x": 1}},
            r"category 'i': 3 features must all be apart .*there are 1 towers",
        ),
    ],
)
def test_categories_that_do_not_fit_are_refused(num_towers, rules, message):
    affinity = affinity_of(["u0", "u1", "u2", "u3", "i0", "i1", "i2", "x0"])
    rules = PartitionRules(categories={"u": ["u*"], "i": ["i*"], "x": ["x*"]}, **rules)
    with pytest.raises(InputError, match=message):
        TowerPartitioner(num_towers=num_towers, rules=rules).fit(affinity, tables=tables_of(affinity.features))


def test_the_towers_of_categories_must_add_up():
    rules = PartitionRules(categories={"u": ["u"]}, towers_per_category={"u": 3})
    with pytest.raises(InputError, match=r"num_towers=4, but towers_per_category adds up to 3 \({'u': 3}\)"):
        TowerPartitioner(num_towers=4, rules=rules).fit(affinity_of(["u", "v", "w", "x"]))


def test_together_and_apart_are_held():
    affinity = affinity_of(16)
    rules = PartitionRules(together=[["f0", "f5"], ["f5", "f9"]], apart=[["f0", "f1", "f2", "f3"], ["f9", "f15"]])
    found = TowerPartitioner(num_towers=4, rules=rules).partition(affinity)
    home = {name: t for t, tower in enumerate(found.plan.to_lists()) for name in tower}
    assert home["f0"] == home["f5"] == home["f9"] != home["f15"]
    assert len({home[f"f{i}"] for i in range(4)}) == 4
    assert [load.num_features for load in found.loads] == [4, 4, 4, 4]
    assert not found.notes


def test_blocks_too_large_for_even_towers_are_noted():
    rules = PartitionRules(together=[[f"f{i}" for i in range(7)]])
    found = TowerPartitioner(num_towers=4, rules=rules).partition(affinity_of(13))
    sizes = sorted(load.num_features for load in found.loads)
    assert sizes[-1] == 7
    assert found.notes == (
        f"Towers have {sizes[0]} to 7 features instead of 3 to 4, because features that share a table or must stay "
        "together are not parted.",
    )


def full_rules():
    return PartitionRules(
        categories={"a": ["f?"], "b": ["f1?"]},
        together=[["f0", "f3"]],
        apart=[["f1", "f2"], ["f11", "f12"]],
        pooling_factors={"f1*": 3.5},
        max_work_ratio=2.0,
        max_bytes_ratio=2.5,
    )


@pytest.mark.parametrize("split_columns", ["no", "largest"])
def test_permuting_everything_permutes_the_answer_only(split_columns):
    affinity = affinity_of(18, seed=5)
    tables = tables_of(affinity.features, rows=np.arange(18) % 3 * 40 + 20)
    partitioner = TowerPartitioner(num_towers=6, rules=full_rules(), split_columns=split_columns, seed=3)
    found = partitioner.partition(affinity, tables=tables)
    assert partitioner.partition(affinity, tables=tables).plan == found.plan
    for seed in range(2):
        order = np.random.default_rng(seed).permutation(18)
        turned = partitioner.partition(
            affinity.permuted([affinity.features[i] for i in order]), tables=[tables[i] for i in order[::-1]]
        )
        assert sets(turned.plan) == sets(found.plan)
        assert sorted(load.num_bytes for load in turned.loads) == sorted(load.num_bytes for load in found.loads)


# What could break it.


def test_work_that_nobody_has_is_no_division_by_zero():
    affinity = affinity_of(10)
    rules = PartitionRules(pooling_factors={"*": 0}, max_work_ratio=1.5, categories={"a": ["f0", "f1"], "b": ["f[2]"]})
    with pytest.raises(InputError, match=r"category 'b' has 'f\[2\]', which matches none"):
        TowerPartitioner(num_towers=4, rules=rules).fit(affinity, tables=tables_of(affinity.features))
    rules = rules.model_copy(update={"categories": {"a": ["f0", "f1"], "b": [f"f{i}" for i in range(2, 10)]}})
    plan = TowerPartitioner(num_towers=4, rules=rules).fit(affinity, tables=tables_of(affinity.features))
    # Where work says nothing, features do: 1 tower for 2 and 3 for 8.
    assert len(plan.towers[0].features) == 2
    assert sum(name.startswith("b") for name in categories_of(plan)) == 3


@pytest.mark.parametrize("num_features", [6, 7, 11])
def test_equal_features_fill_equal_towers_exactly(num_features):
    # A share that is a rounding below the load of a feature must not refuse what is exactly even.
    affinity = affinity_of(num_features)
    rules = PartitionRules(pooling_factors={"*": 1.1}, max_work_ratio=1.0, max_bytes_ratio=1.0)
    tables = tables_of(affinity.features, dims=1)
    assert (
        TowerPartitioner(num_towers=num_features, rules=rules).fit(affinity, tables=tables).num_towers == num_features
    )


def test_one_tower_takes_all_whatever_the_rules_but_apart():
    affinity = affinity_of(5)
    tables = tables_of(affinity.features)
    rules = PartitionRules(max_work_ratio=1.0, max_bytes_ratio=1.0, together=[["*"]])
    assert len(TowerPartitioner(num_towers=1, rules=rules).fit(affinity, tables=tables).features) == 5
    with pytest.raises(InputError, match=r"2 features must all be apart from each other \('f0', 'f1'.*1 towers"):
        TowerPartitioner(num_towers=1, rules=PartitionRules(apart=[["f0", "f1"]])).fit(affinity)


def test_all_features_in_one_table_fit_one_tower():
    affinity = affinity_of(6)
    shared = [TableSpec(name="t", num_embeddings=9, embedding_dim=4, feature_names=affinity.features)]
    found = TowerPartitioner(num_towers=1).partition(affinity, tables=shared)
    assert found.loads[0].num_bytes == 9 * 4 * 4
    with pytest.raises(InputError, match=r"num_towers=2 exceeds the 1 tables"):
        TowerPartitioner(num_towers=2).fit(affinity, tables=shared)


def test_as_many_features_to_part_as_towers():
    affinity = affinity_of(9)
    plan = TowerPartitioner(num_towers=3, rules=PartitionRules(apart=[["f0", "f4", "f8"]])).fit(affinity)
    assert [len(tower) for tower in plan.to_lists()] == [3, 3, 3]
    assert all(len({"f0", "f4", "f8"} & set(tower)) == 1 for tower in plan.to_lists())
    assert TowerPartitioner(num_towers=9, rules=PartitionRules(apart=[["*"]])).fit(affinity).num_towers == 9
    cycle = PartitionRules(apart=[[f"f{i}", f"f{(i + 1) % 5}"] for i in range(5)])
    with pytest.raises(
        InputError, match=r"to 2 towers within all limits was found.*has a tower with features that are to be apart"
    ):
        TowerPartitioner(num_towers=2, rules=cycle).fit(affinity)


def test_names_may_be_of_any_script_and_hold_patterns():
    names = ["用户", "объявление", "*", "a?", "[b]", "ß"]
    rules = PartitionRules(
        categories={"一": ["用户", "[b]", "ß"], "二": ["*", "a?", "объявление"]}, apart=[["[b]", "ß"]]
    )
    plan = TowerPartitioner(num_towers=3, rules=rules).fit(affinity_of(names), tables=tables_of(names))
    assert sorted(plan.features) == sorted(names)
    assert categories_of(plan) == ["一_0", "一_1", "二_0"]


def test_exact_ties_are_broken_the_same_way_every_time():
    names = [f"f{i}" for i in range(12)]
    matrix = np.kron(np.eye(2), np.ones((6, 6))) * 0.5
    rules = PartitionRules(max_bytes_ratio=1.0, apart=[["f0", "f1"]])
    partitioner = TowerPartitioner(num_towers=4, rules=rules)
    affinity = FeatureAffinity(matrix=matrix, features=names)
    first = partitioner.fit(affinity, tables=tables_of(names))
    turned = partitioner.fit(affinity.permuted(names[::-1]), tables=tables_of(names))
    assert sets(first) == sets(turned)


def test_a_large_block_does_not_take_minutes():
    # Each of 19 levels of sizes that cannot hold the block was once searched in full.
    begin = time.process_time()
    rules = PartitionRules(together=[[f"f{i}" for i in range(25)]])
    found = TowerPartitioner(num_towers=6, rules=rules).partition(affinity_of(40))
    assert max(load.num_features for load in found.loads) == 25
    assert time.process_time() - begin < 5.0  # 0.1 s here.
