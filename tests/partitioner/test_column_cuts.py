"""Column shards: which tables are cut, and what the towers then hold."""

from __future__ import annotations

import numpy as np
import pytest

from dmt.errors import InputError
from dmt.partitioner import FeatureAffinity, Interaction, PartitionRules, TowerPartitioner
from dmt.partitioner.problem import choose_splits, members_of
from dmt.plan.tables import TableSpec
from dmt.plan.towers import TowerPlan
from tests.partitioner.instances import affinity_of, sets, tables_of

AFFINITY = affinity_of([f"C{i}" for i in range(26)])
ROWS = 10 ** np.random.default_rng(0).uniform(1, 7, 26)


def check_members(found, num_towers, dims):
    """Every tower is filled, shards of a table never meet, and their widths add up."""
    plan = found.plan
    assert plan.num_towers == num_towers
    assert sorted(plan.features) == sorted(found.affinity.features)
    for tower in plan.to_lists():
        owners = [name.partition("[")[0] for name in tower]
        assert len(set(owners)) == len(owners)
    for feature, widths in plan.column_splits.items():
        assert sum(widths) == dims[feature]
        assert all(width % 4 == 0 and width > 0 for width in widths)
        stops = np.cumsum(widths)
        names = {f"{feature}[{stop - width}:{stop}]" for width, stop in zip(widths, stops, strict=True)}
        assert names == {name for name in plan.features if name.startswith(f"{feature}[")}


@pytest.mark.parametrize("how", ["largest", "even"])
@pytest.mark.parametrize("num_towers", [32, 64])
def test_towers_may_outnumber_features(num_towers, how):
    tables = tables_of(AFFINITY.features, rows=ROWS, dims=16)
    found = TowerPartitioner(num_towers=num_towers, split_columns=how).partition(AFFINITY, tables=tables)
    check_members(found, num_towers, dict.fromkeys(AFFINITY.features, 16))
    sizes = [len(tower) for tower in found.plan.to_lists()]
    assert max(sizes) - min(sizes) <= 1
    splits = found.plan.column_splits
    if how == "largest":
        assert len(found.plan.features) == num_towers
        whole = [spec.num_bytes for spec in tables if spec.feature_names[0] not in splits]
        cut = [spec.num_bytes for spec in tables if spec.feature_names[0] in splits]
        assert min(cut) > max(whole, default=0) or num_towers > 52
    else:
        # Two shards of 8, or four of 4: three shards of 16 columns would not be of one width.
        assert set(splits.values()) == {(8, 8) if num_towers == 32 else (4, 4, 4, 4)}
        assert len(splits) == 26


def test_a_cut_plan_survives_its_file_and_splits_the_tables(tmp_path):
    tables = tables_of(AFFINITY.features, rows=ROWS, dims=16)
    plan = TowerPartitioner(num_towers=32, split_columns="largest").fit(AFFINITY, tables=tables)
    plan.save(tmp_path / "towers.json")
    loaded = TowerPlan.load(tmp_path / "towers.json")
    assert loaded == plan
    assert loaded.column_splits
    assert {spec.name for spec in loaded.split_tables(tables)} == {spec.name for spec in plan.tables}
    by_tower = loaded.tables_by_tower(loaded.split_tables(tables))
    assert [[f for spec in tower for f in spec.feature_names] for tower in by_tower] == plan.to_lists()
    with pytest.raises(
        InputError, match=r"cuts the table of feature 'C\d+' into column shards \['C\d+\[0:.*split_tables"
    ):
        loaded.tables_by_tower(tables)


def test_nothing_is_cut_where_nothing_need_be():
    tables = tables_of(AFFINITY.features, rows=ROWS, dims=16)
    for how in ("no", "largest", "even"):
        assert choose_splits(tables, 26, how) == {}
    assert choose_splits(tables, 32, "no") == {}
    with pytest.raises(InputError, match=r"num_towers=27 exceeds the 26 features.* split_columns='largest'"):
        TowerPartitioner(num_towers=27).fit(AFFINITY, tables=tables)


def test_tables_larger_than_a_tower_are_cut_into_shards_that_fit():
    # 2.5 towers' worth of 40 columns, and of 12, of which two shards would be 8 and 4: one still too large.
    for dims, most, widths in ((40, 4 * 100 * 16, (16, 12, 12)), (12, 4 * 100 * 7, (4, 4, 4)), (8, 4 * 100 * 8, None)):
        tables = tables_of(["big", "a", "b"], rows=[100, 5, 5], dims=[dims, 8, 8])
        splits = choose_splits(tables, 3, "largest", max_bytes=most)
        assert splits == ({"big": widths} if widths else {})
        rules = PartitionRules(max_tower_bytes=most + 500)
        partitioner = TowerPartitioner(num_towers=4, split_columns="largest", balance_ratio=None, rules=rules)
        found = partitioner.partition(affinity_of(["big", "a", "b"]), tables=tables)
        assert max(load.num_bytes for load in found.loads) <= most + 500


def test_a_shard_that_cannot_be_small_enough_is_refused():
    tables = tables_of(["big", "a"], rows=[100, 5], dims=8)
    partitioner = TowerPartitioner(
        num_towers=2, split_columns="largest", rules=PartitionRules(max_tower_bytes=4 * 100 * 4 - 1)
    )
    with pytest.raises(InputError, match=r"feature 'big\[0:4\]' needs 1,600 bytes, but a tower may have 1,599 at most"):
        partitioner.partition(affinity_of(["big", "a"]), tables=tables)


def test_more_shards_of_a_table_than_towers_of_its_category_are_refused():
    # 12 columns fit into two towers of 7, but only as three shards of 4.
    tables = tables_of(["big", "a"], rows=[100, 5], dims=[12, 8])
    rules = PartitionRules(
        max_tower_bytes=4 * 100 * 7, categories={"x": ["big"], "y": ["a"]}, towers_per_category={"x": 2, "y": 1}
    )
    partitioner = TowerPartitioner(num_towers=3, split_columns="largest", rules=rules)
    with pytest.raises(
        InputError, match=r"category 'x': 3 features must all be apart .*'big\[0:4\]'.*there are 2 towers"
    ):
        partitioner.partition(affinity_of(["big", "a"]), tables=tables)


def test_shared_tables_and_odd_widths_are_not_cut():
    tables = [
        TableSpec(name="shared", num_embeddings=900, embedding_dim=16, feature_names=("a", "b")),
        *tables_of(["odd", "even"], rows=[800, 10], dims=[6, 12]),
    ]
    assert choose_splits(tables, 5, "largest") == {"even": (4, 4, 4)}
    assert choose_splits(tables, 4, "even") == {"even": (4, 4, 4)}  # Two shards of 12 columns would be 8 and 4.
    with pytest.raises(InputError, match=r"num_towers=6, but the 3 tables can be cut into 5 members only \('largest'"):
        choose_splits(tables, 6, "largest")
    with pytest.raises(InputError, match=r"members only \('even'; .*or split_columns='largest'"):
        choose_splits(tables_of(["a", "b", "c", "d"], dims=[4, 4, 4, 8]), 6, "even")


def test_shards_resemble_what_their_feature_resembles():
    affinity = affinity_of(["a", "b", "c"])
    members = members_of(affinity, {"b": (8, 4)})
    assert members.features == ("a", "b[0:8]", "b[8:12]", "c")
    index = [0, 1, 1, 2]
    np.testing.assert_array_equal(members.matrix, affinity.matrix[np.ix_(index, index)])
    clash = FeatureAffinity(matrix=np.eye(2), features=["b", "b[0:8]"])
    with pytest.raises(InputError, match=r"Feature 'b\[0:8\]' has the name of a column shard of 'b'; rename it"):
        members_of(clash, {"b": (8, 4)})


def test_work_and_bytes_of_shards_add_up_to_their_table():
    tables = tables_of(AFFINITY.features, rows=ROWS, dims=16)
    rules = PartitionRules(pooling_factors={"C1*": 7.0})
    found = TowerPartitioner(num_towers=32, split_columns="even", rules=rules).partition(AFFINITY, tables=tables)
    assert sum(load.num_bytes for load in found.loads) == sum(spec.num_bytes for spec in tables)
    assert sum(load.work for load in found.loads) == 16 * (11 * 7 + 15)


@pytest.mark.parametrize("how", ["largest", "even"])
def test_permuting_the_features_and_tables_permutes_the_answer_only(how):
    affinity = affinity_of(12, seed=3)
    tables = tables_of(affinity.features, rows=[100] * 6 + [50] * 6, dims=8)  # Ties in size.
    partitioner = TowerPartitioner(num_towers=16, split_columns=how)
    plan = partitioner.fit(affinity, tables=tables)
    order = np.random.default_rng(0).permutation(12)
    turned = partitioner.fit(
        affinity.permuted([affinity.features[i] for i in order]), tables=[tables[i] for i in order[::-1]]
    )
    assert sets(turned) == sets(plan)
    assert turned.column_splits == plan.column_splits


def test_splitting_needs_the_tables():
    with pytest.raises(InputError, match="split_columns needs the tables, but the affinity was saved without them"):
        TowerPartitioner(num_towers=3, split_columns="even").fit(affinity_of(2))


def test_features_that_stay_together_count_as_one_and_others_are_cut_for_it():
    tables = [TableSpec(name=n, num_embeddings=100, embedding_dim=32, feature_names=(n,)) for n in "abcd"]
    splits = choose_splits(tables, 4, "largest", together=[["a", "b"]])
    assert set(splits) <= {"c", "d"}
    assert 1 + sum(len(splits.get(n, (32,))) for n in "cd") == 4


def test_tables_are_cut_in_the_category_that_needs_it():
    names = ["u0", "u1", "i0", "i1", "i2", "i3"]
    affinity = FeatureAffinity(matrix=np.eye(6), features=names)
    # The items' tables are the larger ones, but it is the users that lack members.
    tables = [
        TableSpec(name=n, num_embeddings=10 if n < "j" else 5, embedding_dim=16, feature_names=(n,)) for n in names
    ]
    rules = PartitionRules(categories={"u": ["u?"], "i": ["i?"]}, towers_per_category={"u": 5, "i": 4})
    plan = TowerPartitioner(num_towers=9, rules=rules, split_columns="largest").fit(affinity, tables=tables)
    assert set(plan.column_splits) == {"u0", "u1"}
    assert [len(t.features) for t in plan.towers] == [1] * 9


def test_even_shards_beside_whole_tables_are_noted():
    names = ["a", "b", "c"]
    affinity = FeatureAffinity(matrix=np.eye(3), features=names)
    tables = [TableSpec(name=n, num_embeddings=10, embedding_dim=16, feature_names=(n,)) for n in names]
    rules = PartitionRules(together=[["a", "b"]])
    found = TowerPartitioner(num_towers=3, rules=rules, split_columns="even").partition(affinity, tables=tables)
    assert any("must stay together and are not cut" in note for note in found.notes)


def test_shards_share_the_interactions_of_their_feature():
    gains = np.array([[0, 0.2, 0.0], [0.2, 0, 0.0], [0.0, 0.0, 0]])
    triple = Interaction(features=("a", "b", "c"), gain=0.5)
    found = FeatureAffinity(
        matrix=gains, features=list("abc"), measure="interactions", errors=gains / 9, triples=(triple,)
    )
    members = members_of(found, {"b": (8, 4)})
    assert members.features == ("a", "b[0:8]", "b[8:12]", "c")
    assert members.matrix[0].tolist() == [0, 0.2, 0.2, 0]
    assert [own.features for own in members.triples] == [("a", "b[0:8]", "c"), ("a", "b[8:12]", "c")]
