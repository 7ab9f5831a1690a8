"""Blocks: what stays together, what it takes, what must part, and column shards."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from dmt.errors import InputError
from dmt.partitioner import Interaction, PartitionRules, TowerPartitioner
from dmt.partitioner.problem import make_blocks, members_of, rules_of_members
from dmt.plan.tables import TableSpec
from dmt.plan.towers import TowerPlan
from tests.partitioner.instances import affinity_of, tables_of


def blocks_of(features, *, specs=(), factors=None, **rules):
    measured = affinity_of(list(features))
    named = PartitionRules(**rules).for_features(measured.features)
    measured = dataclasses.replace(measured, tables=tuple(specs), pooling_factors=factors)
    return make_blocks(measured, rules_of_members(named, {}))


def shared(*groups):
    return [
        TableSpec(name=f"t{i}", num_embeddings=10 * (i + 1), embedding_dim=4, feature_names=group)
        for i, group in enumerate(groups)
    ]


def test_chains_of_rules_and_shared_tables_join_to_one_block():
    specs = shared(("a", "b"), ("c",), ("d", "e"), ("f",))
    blocks = blocks_of("fedcba", specs=specs, together=[["b", "c"], ["c", "d", "d"]], factors=(5, 4, 3, 2, 1, 0))
    assert blocks.names == (("a", "b", "c", "d", "e"), ("f",))
    # Pooling 0 + 1 + 2 + 3 + 4 times 4 columns; each table is there once: 10 + 20 + 30 rows.
    assert blocks.loads.tolist() == [[5, 1], [40, 20], [60 * 4 * 4, 40 * 4 * 4]]
    assert blocks.apart is None
    assert blocks_of("ba", together=[[], ["a"]]).loads.tolist() == [[1, 1], [0, 0], [0, 0]]


def test_the_order_of_the_features_does_not_matter():
    specs = shared(("a", "b"), ("c",), ("d",))
    rules = {"apart": [["c", "d"], ["a", "d"]], "categories": {"x": ["a", "b", "c"], "y": ["d"]}}
    first, *others = (blocks_of(order, specs=specs, **rules) for order in itertools.permutations("abcd"))
    for other in others:
        assert other.names == first.names
        np.testing.assert_array_equal(other.loads, first.loads)
        np.testing.assert_array_equal(other.apart, first.apart)


def test_the_matrix_has_the_means_between_blocks():
    affinity = affinity_of(list("cadb"))
    blocks = blocks_of("cadb", together=[["a", "d"]])
    index = [[affinity.features.index(name) for name in names] for names in blocks.names]
    wanted = [[affinity.matrix[np.ix_(rows, columns)].mean() for columns in index] for rows in index]
    np.testing.assert_allclose(blocks.matrix(affinity.matrix, affinity.features), wanted, rtol=1e-15)
    single = blocks_of("cadb")
    np.testing.assert_array_equal(single.matrix(affinity.matrix, affinity.features), affinity.permuted("abcd").matrix)


def test_what_is_apart_is_so_for_whole_blocks_and_all_shards():
    blocks = blocks_of("abcd", together=[["a", "b"]], apart=[["b", "c"], ["d", "d"]])
    assert blocks.names == (("a", "b"), ("c",), ("d",))
    assert blocks.apart.tolist() == [[False, True, False], [True, False, False], [False, False, False]]
    part = blocks.within(["a", "b", "c"])
    assert (part.names, part.apart.tolist()) == (blocks.names[:2], [[False, True], [True, False]])
    named = PartitionRules(apart=[["a", "b"]]).for_features("abc")
    cut = members_of(dataclasses.replace(affinity_of("abc"), tables=tuple(tables_of("abc"))), {"a": (4, 4)})
    blocks = make_blocks(cut, rules_of_members(named, {"a": (4, 4)}))
    # Shards part from each other and from what their feature parts from.
    assert blocks.apart.astype(int).tolist() == [[0, 1, 1, 0], [1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"together": [["a", "b"], ["b", "c"]], "apart": [["a", "c"]]}, r"'a' and 'c' must not .* keeps 'a', 'b', 'c'"),
        ({"apart": [["d", "e"]]}, "'d' and 'e' must not share .* keeps 'd', 'e' in one"),
        ({"categories": {"x": ["a", "b", "c", "d"], "y": ["e"]}}, "'d' is of category 'x' and 'e' of 'y', but they"),
        ({"categories": {"x": ["a"], "y": ["b", "c", "d", "e"]}, "together": [["a", "b"]]}, "'a' is of category 'x'"),
    ],
)
def test_rules_that_contradict_each_other_are_refused(rules, message):
    with pytest.raises(InputError, match=message):
        blocks_of("abcde", specs=shared(("a",), ("b",), ("c",), ("d", "e")), **rules)


# --- column shards ---------------------------------------------------------------------------------------------------

AFFINITY = affinity_of([f"C{i}" for i in range(26)])
ROWS = 10 ** np.random.default_rng(0).uniform(1, 7, 26)


@pytest.mark.parametrize("shards", [{"*": 2}, {"C?": 4, "C10": 2, "C11": 1}])
def test_towers_may_outnumber_features(tmp_path, shards):
    tables = tables_of(AFFINITY.features, rows=ROWS, dims=16)
    factors = tuple(7.0 if name.startswith("C1") else 1.0 for name in AFFINITY.features)
    measured = dataclasses.replace(AFFINITY, pooling_factors=factors)
    partitioner = TowerPartitioner(num_towers=48, rules=PartitionRules(column_shards=shards))
    found = partitioner.partition(measured, tables=tables)
    plan = found.plan
    wanted = {f: shards.get(f, shards.get("*", 4 if len(f) == 2 else 1)) for f in AFFINITY.features}
    assert plan.column_splits == {f: (16 // count,) * count for f, count in wanted.items() if count > 1}
    assert plan.num_towers == 48
    assert len(plan.features) == sum(wanted.values())
    for tower in plan.to_lists():
        owners = [name.partition("[")[0] for name in tower]
        assert len(set(owners)) == len(owners), "shards of a table never meet"
    assert sum(load.num_bytes for load in found.loads) == sum(spec.num_bytes for spec in tables)
    assert sum(load.work for load in found.loads) == 16 * (11 * 7 + 15)
    plan.save(tmp_path / "towers.json")
    loaded = TowerPlan.load(tmp_path / "towers.json")
    assert loaded == plan
    by_tower = loaded.tables_by_tower(loaded.split_tables(tables))
    assert [[f for spec in tower for f in spec.feature_names] for tower in by_tower] == plan.to_lists()
    with pytest.raises(InputError, match=r"cuts the table of feature 'C\d+' into column shards \['C\d+\[0:.*split_"):
        loaded.tables_by_tower(tables)


def test_shards_relate_as_their_feature_does():
    affinity = dataclasses.replace(affinity_of(["a", "b", "c"]), tables=tuple(tables_of("abc", dims=12)))
    members = members_of(affinity, {"b": (8, 4)})
    assert members.features == ("a", "b[0:8]", "b[8:12]", "c")
    index = [0, 1, 1, 2]
    np.testing.assert_array_equal(members.matrix, affinity.matrix[np.ix_(index, index)])
    triple = Interaction(features=("a", "b", "c"), gain=0.5)
    interacting = dataclasses.replace(affinity, measure="interactions", triples=(triple,))
    cut = members_of(interacting, {"b": (8, 4)}).triples
    assert [found.features for found in cut] == [("a", "b[0:8]", "c"), ("a", "b[8:12]", "c")]
    assert {found.gain for found in cut} == {0.5}


@pytest.mark.parametrize(
    ("features", "rules", "message"),
    [
        (["s", "r"], {"column_shards": {"s": 2}}, "Table 'st' is shared by .* and cannot be cut"),
        (["a", "b"], {"column_shards": {"a": 3}}, "'a', but its 8 columns are not 3 equal shards of a multiple of 4"),
        (
            ["a", "b"],
            {"column_shards": {"a": 2}, "together": [["a", "b"]]},
            r"'a\[0:4\]' and 'a\[4:8\]' must not share",
        ),
        (["a", "a[0:4]"], {"column_shards": {"a": 2}}, r"feature 'a\[0:4\]' is given 2 times"),
        (["a", "b"], {"column_shards": {"c": 2}}, "column_shards has 'c', which matches none of the 2 features"),
    ],
)
def test_tables_that_cannot_be_cut_are_refused(features, rules, message):
    tables = tables_of(features)
    if features == ["s", "r"]:
        tables = [TableSpec(name="st", num_embeddings=9, embedding_dim=8, feature_names=("s", "r"))]
    with pytest.raises(InputError, match=message):
        TowerPartitioner(num_towers=2, rules=PartitionRules(**rules)).fit(affinity_of(features), tables=tables)


@pytest.mark.parametrize("rules", [{"column_shards": {"a": 2}}, {"max_work_ratio": 2}, {"max_tower_bytes": 9}])
def test_shards_and_limits_need_the_tables(rules):
    with pytest.raises(InputError, match=r"column_shards need the tables, .*Give tables=, or collect"):
        TowerPartitioner(num_towers=2, rules=PartitionRules(**rules)).fit(affinity_of(["a", "b", "c"]))
