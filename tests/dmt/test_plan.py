"""Tower plans, rank arithmetic, and what is refused where no process starts: each case with the words that name it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from dmt import ExchangePrecision, InputError, TableSpec, TowerPlan, TowerTopology
from dmt.hot_rows.profile import AccessProfile
from dmt.plan.split_across_towers import split_tables
from dmt.sharding.costs import Hardware, StepWorkload
from dmt.sharding.schemes import ShardingRules, TablePlacement, TableShard, table_shards


def table(name: str, *features: str, rows: int = 10, dim: int = 8) -> TableSpec:
    return TableSpec(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features or (name,))


def test_strided_is_the_papers_naive_assignment() -> None:
    plan = TowerPlan.strided([str(i) for i in range(26)], 8)
    assert [[int(f) for f in tower] for tower in plan.to_lists()] == [[*range(i, 26, 8)] for i in range(8)]


def test_balanced_towers_and_hosts_send_about_equally_much() -> None:
    rows = {"a": 90, "b": 10, "c": 60, "d": 50, "e": 40, "f": 30, "g": 20}
    tables = [table(name, name, f"{name}2") if name == "c" else table(name) for name in rows]
    two_a_host = TowerTopology(num_towers=4, ranks_per_tower=1, ranks_per_host=2)
    plan = TowerPlan.balanced(tables, two_a_host, rows=rows)
    # Largest first: 90 | 60 + 10 | 50 + 20 | 40 + 30. Towers of 90 and 70 share a host, as do two of 70.
    assert plan.to_lists() == [["a"], ["e", "f"], ["c", "c2", "b"], ["d", "g"]]
    # A host takes no more towers than it has ranks for.
    heavy = {"a": 100, "b": 12, "c": 11, "d": 10}
    assert TowerPlan.balanced(list(map(table, heavy)), two_a_host, rows=heavy).features == [*"adbc"]
    # The middle one of three hosts has two towers of each replica: each host has two of three pairs that send 7.
    uneven = TowerTopology(num_towers=6, ranks_per_tower=1, num_replicas=2, ranks_per_host=4)
    six = {name: float(rank) for rank, name in enumerate("abcdef", start=1)}
    pairs = TowerPlan.balanced([table(name) for name in six], uneven, rows=six).features
    assert [six[first] + six[second] for first, second in zip(pairs[::2], pairs[1::2], strict=True)] == [7, 7, 7]
    # Without rows, features of equal width are dealt out in turn, but hosts with several towers get the same number.
    features = [str(i) for i in range(26)]
    dealt = TowerPlan.balanced([table(name) for name in features], two_a_host).to_lists()
    assert sorted(dealt) == sorted(TowerPlan.strided(features, 4).to_lists())
    assert [len(tower) for tower in dealt] == [7, 6, 7, 6]
    # A wide table counts as much as several narrow ones; tables that send nothing still fill every tower.
    wide = [table("w", dim=24), *map(table, "xyz")]
    two = TowerTopology(num_towers=2, ranks_per_tower=1)
    assert TowerPlan.balanced(wide, two).to_lists() == [["w"], ["x", "y", "z"]]
    assert all(TowerPlan.balanced(wide, two_a_host, rows=dict.fromkeys("wxyz", 0.0)).to_lists())
    # A tower without room for a table leaves it to one that sends more; if none has room, the least full one gets it.
    sizes = {"w": 5.0, "x": 6.0, "y": 3.0, "z": 2.0}
    for room in (8, 4):
        filled = TowerPlan.balanced(wide, two, num_bytes=sizes, max_tower_bytes=room)
        assert filled.to_lists() == [["w", "y"], ["x", "z"]]
    with pytest.raises(InputError, match="num_towers=4 must be at most the number of tables, 3"):
        TowerPlan.balanced(wide[1:], two_a_host)
    for rows_of_z, shown in (({}, "missing"), ({"z": math.nan}, "nan"), ({"z": -1.0}, "-1.0")):
        with pytest.raises(InputError, match=rf"rows\['z'\] is {shown}"):
            TowerPlan.balanced(wide, two, rows=dict.fromkeys("wxy", 1.0) | rows_of_z)
    with pytest.raises(InputError, match=r"num_bytes\['x'\] is missing"):
        TowerPlan.balanced(wide, two, num_bytes={"w": 1.0})


def test_round_trip(tmp_path: Path) -> None:
    plan = TowerPlan.from_lists(
        [["b", "a"], ["c"]],
        strategy="coherent",
        seed=3,
        affinity=MappingProxyType({"within": 0.5}),
        tables=(table("ta", "a", "b"), table("tc", "c")),
        command="dmt partition x",
    )
    plan.save(tmp_path / "deep" / "towers.json")
    assert TowerPlan.load(tmp_path / "deep" / "towers.json") == plan
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["towers.json"]


def test_tables_follow_the_plans_order() -> None:
    plan = TowerPlan.from_lists([["c", "a"], ["b", "d"]])
    tables = [table("ta", "a"), table("tbd", "d", "b"), table("tc", "c")]
    assert [[t.name for t in tower] for tower in plan.tables_by_tower(tables)] == [["tc", "ta"], ["tbd"]]


def test_features_outside_towers(tmp_path: Path) -> None:
    plan = TowerPlan.from_lists([["a"], ["b"]], outside=("d", "c"))
    plan.save(tmp_path / "towers.json")
    assert TowerPlan.load(tmp_path / "towers.json") == plan
    tables = [table("tb", "b"), table("tcd", "c", "d"), table("ta", "a")]
    assert plan.tables_by_tower(tables) == [[tables[2]], [tables[0]]]
    assert plan.outside_tables(tables) == [tables[1]]
    # Tables may have other rows than those that the plan was made for; outside towers, also other columns.
    made_for = replace(plan, tables=(table("tcd", "c", "d", dim=16), table("ta", "a", rows=9)))
    assert made_for.tables_by_tower(tables) == plan.tables_by_tower(tables)
    with pytest.raises(InputError, match=r"Table 'tcd' has .* features c, d, .* made for 8 and d, c"):
        replace(plan, tables=(table("tcd", "d", "c"),)).tables_by_tower(tables)


def test_a_feature_may_look_up_in_two_tables() -> None:
    tables = [table("ta", "a"), table("tb", "a")]
    assert TowerPlan.from_lists([["a"]]).tables_by_tower(tables) == [tables]


WHOLE = '{"format": 1, "towers": [{"name": "t", "features": ["a"]}], %s}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": 2, "towers": []}', "has format 2; this version reads format 1. Write it with `dmt partition`"),
        ('{"format": 1, "towers": [{"name": "t", "features": "abc"}]}', r"towers\.0\.features: .*array \(got 'abc'\)"),
        (WHOLE % '"column_splits": {"a": [4, "4"]}', r"column_splits\.a\.1: Input should be a valid integer"),
        ('{"format": 1, "towers": [{"name": "t", "features": ["a", "a"]}]}', "towers.json: Feature 'a' occurs more"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "towers.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        TowerPlan.load(path)


@pytest.mark.parametrize("placement", ["inter_host", "intra_host"])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 2), (2, 2, 3), (3, 1, 2), (2, 3, 1), (4, 3, 2)])
def test_every_place_has_one_rank(sizes: tuple[int, int, int], placement: str) -> None:
    replicas, towers, locals_ = sizes
    topology = mesh(towers, locals_, replicas, replica_placement=placement)
    coordinates = [topology.coordinates(rank) for rank in range(topology.world_size)]
    assert sorted(coordinates) == list(itertools.product(range(replicas), range(towers), range(locals_)))
    for rank, (replica, tower, local) in enumerate(coordinates):
        assert rank in topology.tower_groups()[replica * towers + tower]
        assert topology.tower_groups()[replica * towers + tower][local] == rank


@pytest.mark.parametrize("placement", ["inter_host", "intra_host"])
def test_groups_partition_the_job(placement: str) -> None:
    topology = mesh(3, 2, 2, replica_placement=placement)
    for groups, size in (
        (topology.tower_groups(), 2),
        (topology.peer_groups(), 3),
        (topology.sharding_groups(), 6),
        (topology.replica_groups(), 2),
        (topology.tower_module_groups(), 4),
    ):
        assert sorted(rank for group in groups for rank in group) == list(range(12))
        assert {len(group) for group in groups} == {size}
        assert all(group == sorted(group) for group in groups)


def test_replicas_are_blocks_or_neighbors() -> None:
    assert mesh(2, 2, 2).sharding_groups() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    topology = mesh(2, 2, 2, replica_placement="intra_host")
    assert topology.replica_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.tower_groups() == [[0, 2], [4, 6], [1, 3], [5, 7]]


@pytest.mark.parametrize(
    ("sizes", "ranks_per_host", "hosts", "peers", "tower"),
    [
        ((2, 2, 1), None, [[0, 1], [2, 3]], 1, 0),
        ((4, 1, 1), 2, [[0, 1], [2, 3]], 8 / 12, 0),
        ((2, 4, 1), 2, [[0, 1], [2, 3], [4, 5], [6, 7]], 1, 8 / 12),
        ((2, 2, 1), 4, [[0, 1, 2, 3]], 0, 0),
        ((2, 1, 3), 3, [[0, 1, 2], [3, 4, 5]], 1, 0),
        ((1, 4, 1), 1, [[0], [1], [2], [3]], 0, 1),
    ],
)
def test_hosts_hold_whole_towers_or_equal_parts_of_one(
    sizes: tuple[int, int, int], ranks_per_host: int | None, hosts: list[list[int]], peers: float, tower: float
) -> None:
    topology = on_host(*sizes, ranks_per_host)
    assert topology.host_groups() == hosts
    assert topology.across_host_groups() == [list(ranks) for ranks in zip(*hosts, strict=True)]
    assert topology.num_hosts == len(hosts)
    assert [topology.host(rank) for rank in range(topology.world_size)] == [
        number for number, ranks in enumerate(hosts) for _ in ranks
    ]
    assert topology.share_across_hosts(topology.peer_groups()) == pytest.approx(peers)
    assert topology.share_across_hosts(topology.tower_groups()) == pytest.approx(tower)


def test_one_replica_is_planned_on_equal_parts_of_hosts() -> None:
    assert mesh(2, 2, 2).one_replica == mesh(1, 4, ranks_per_host=2)
    # Of two hosts of three ranks, one has two ranks of a replica and the other has one.
    uneven = mesh(1, 3, 2, ranks_per_host=3, replica_placement="intra_host")
    assert uneven.one_replica == mesh(1, 3, ranks_per_host=1)


def test_links_of_a_ring_are_counted_from_host_to_host() -> None:
    # Of four towers with three replicas each, two on a host: rings over 0-2, 3-5, 6-8, 9-11 on hosts of 6 or 4 ranks.
    six, four = on_host(4, 1, 3, 6), on_host(1, 4, 3, 4)
    assert six.ring_share_across_hosts(six.replica_groups()) == 0
    assert four.ring_share_across_hosts(four.replica_groups()) == pytest.approx((0 + 2 + 2 + 0) / 12)
    assert six.ring_share_across_hosts([range(12)]) == pytest.approx(2 / 12)
    assert six.ring_share_across_hosts([]) == 0


def mesh(towers: Any = 2, ranks: Any = 2, replicas: int = 1, **options: Any) -> TowerTopology:
    return TowerTopology(num_towers=towers, ranks_per_tower=ranks, num_replicas=replicas, **options)


def on_host(towers: int, ranks: int, replicas: int, ranks_per_host: Any) -> TowerTopology:
    return mesh(towers, ranks, replicas, replica_placement="intra_host", ranks_per_host=ranks_per_host)


def plan(*towers: list[str], **options: Any) -> TowerPlan:
    return TowerPlan.from_lists(towers, **options)


def shards(scheme: Any, ranks: Any, rows: int = 10) -> list[TableShard]:
    return table_shards(table("t", rows=rows), TablePlacement(scheme=scheme, ranks=ranks))


def cut(feature: str, *widths: int) -> list[TableSpec]:
    return split_tables([table("t_ad", "ad", dim=16), table("t_xy", "x", "y", dim=16)], {feature: widths})


OUTSIDE = plan(["a"], ["b"], outside=("d", "c"))
# name -> attempt, words of the message
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "more towers than features": (lambda: TowerPlan.strided(["a", "b"], 3), "num_towers=3 must be 1 to the .* 2"),
    "feature in two towers": (lambda: plan(["a", "b"], ["a"]), "Feature 'a' occurs more than once.*tower_0, tower_1"),
    "empty tower": (lambda: plan(["a"], []), "Tower 'tower_1' has no feature"),
    "no tower": (plan, "at least one tower"),
    "text for a tower": (lambda: TowerPlan.from_lists(["user"]), r"Tower 0 is the string 'user'\. Give .*: \['user'\]"),
    "text outside": (lambda: TowerPlan.from_lists([["ad"]], outside="hour"), r"^outside is the string 'hour'\. Give "),
    "features in no tower": (lambda: plan(["a"]).check_features(["a", "b", "c"]), "Features 'b', 'c' are in no tower"),
    "feature in no tower": (lambda: plan(["usr_id"]).check_features(["user_id"]), "'user_id' .* mean 'usr_id'"),
    "one of several": (lambda: plan(["shp"]).check_features(["shop"], partly=True), "'shop' is in no .* mean 'shp'"),
    "feature in no model": (lambda: plan(["a", "bs"]).check_features(["bs"]), "'a' is in the tower plan but not in"),
    "shared table": (lambda: plan(["a"], ["b"]).tables_by_tower([table("tab", "a", "b")]),
                     r"'tab' is shared by features of different towers \('a' in tower_0"),
    "outside and inside": (lambda: plan(["a"], ["b"], outside=("b",)), r"'b' occurs .* \(in tower_1, outside\)"),
    "twice outside": (lambda: plan(["a"], outside=("c", "c")), "Feature 'c' occurs more than once .*outside"),
    "shared outside": (lambda: OUTSIDE.tables_by_tower([table("ta", "a"), table("tbc", "c", "b"), table("td", "d")]),
                       r"'tbc' is shared .*\('c' outside, 'b' in tower_1\)\. A table lives in one tower or"),
    "absent outside": (lambda: OUTSIDE.tables_by_tower([table("ta", "a"), table("tb", "b"), table("tc", "c")]),
                       "Feature 'd' is in the tower plan but not in the model"),
    "other table": (lambda: plan(["a"], tables=(table("ta", "a", dim=16),)).tables_by_tower([table("ta", "a")]),
                    "Table 'ta' has embedding_dim=8 .* made for 16 and a"),
    "table twice": (lambda: plan(["a"]).tables_by_tower([table("ta", "a")] * 2), "Table 'ta' occurs 2 times"),
    "no file": (lambda: TowerPlan.load("/nowhere.json"), r"plan /nowhere\.json: cannot be read .*`dmt partition`"),
    **{f"hosts {sizes}": (lambda sizes=sizes: on_host(*sizes),
                          f"ranks_per_host={sizes[-1]} must divide .* holds whole towers, or a tower spans whole")
       for sizes in ((2, 2, 1, 3), (2, 2, 1, 8), (2, 6, 1, 4), (4, 3, 1, 2), (2, 2, 3, 4))},
    **{f"ranks_per_host={value}": (lambda value=value: mesh(ranks_per_host=value),
                                   f"ranks_per_host={value} must be a whole number of at least 1")
       for value in (0, 1.5, True)},
    **{f"ranks={value!r}": (lambda value=value: mesh(2, value), f"ranks_per_tower={value!r} must be a whole number of")
       for value in (0, -1, 1.5, True, "2", None)},
    "world size": (lambda: mesh().check_world_size(6), r"1 \* 2 \* 2 = 4 ranks, .* started with WORLD_SIZE=6"),
    "replica placement": (lambda: mesh(replica_placement="diagonal"), "replica_placement='diagonal' is unknown"),
    "batch": (lambda: StepWorkload(batch_size=0), "batch_size=0 must be a finite number above 0"),
    "pooling": (lambda: StepWorkload(pooling_factors={"a": 0.0}), r"factors\['a'\]=0\.0 must be a finite number"),
    "optimizer": (lambda: StepWorkload(optimizer="lamb"), "optimizer='lamb' is unknown; use one of"),  # type: ignore[arg-type]
    "memory": (lambda: Hardware(memory_per_rank=0), "memory_per_rank=0 must be a finite number above 0"),
    "rate": (lambda: Hardware(intra_tower_gb_per_s=math.inf), "intra_tower_gb_per_s=inf must be a finite number"),
    "latency": (lambda: Hardware(collective_latency_us=-1.0), r"latency_us=-1\.0 must be .* at least 0"),
    "whole on two ranks": (lambda: shards("table_wise", (0, 1)), "Give one rank for table_wise"),
    "scheme": (lambda: shards("diagonal", (0,)), "scheme='diagonal' is unknown"),
    "no scheme": (lambda: ShardingRules(schemes=()), "schemes: '' is not one of"),
    "no cache": (lambda: TablePlacement(scheme="table_wise", ranks=(0,), cache_load_factor=0.0), "factor=0.0 must be"),
    "rows out of order": (lambda: shards("row_wise", (1, 0)), r"row_wise table cannot be on ranks=\[1, 0\]"),
    "columns twice": (lambda: shards("column_wise", (1, 1)), r"column_wise table cannot be on ranks=\[1, 1\]"),
    "few columns": (lambda: shards("column_wise", (0, 1, 2)), "'t': embedding_dim=8 cannot be cut into 3 column sh"),
    # Of four rows, blocks of two would leave the last rank none.
    **{f"{rows} rows": (lambda rows=rows: shards("row_wise", [0, 1, 2], rows),  # a list counts as a tuple
                        f"'t': num_embeddings={rows} cannot be cut into 3 row shards") for rows in (2, 4)},
    "sum of shards": (lambda: cut("ad", 8, 4), r"'t_ad' has embedding_dim=16, but its column shards are \[8, 4\];"),
    "empty shard": (lambda: cut("ad", 16, 0), r"column shards are \[16, 0\]"),
    "no shards": (lambda: cut("ad"), r"column shards are \[\]"),
    "shard in no tower": (lambda: plan(["a[0:4]"], column_splits={"a": (4, 4)}), r"in no tower: \['a\[4:8\]'\]"),
    "one shard": (lambda: plan(["a[0:4]"], column_splits={"a": (4,)}), r"\['a'\]=\[4\] .* must list at least two posi"),
    "whole table of shards": (
        lambda: plan(["a[0:4]"], ["a[4:8]"], column_splits={"a": (4, 4)}).tables_by_tower([table("ta", "a")]),
        r"cuts the table of feature 'a' into column shards .* plan\.split_tables"),
    "shards of a shared table": (lambda: cut("x", 8, 8), r"'t_xy' is shared by \['x', 'y'\] and cannot be cut"),
    "forward format": (lambda: ExchangePrecision(forward="f16"), "forward='f16' is unknown; .* mean 'fp16'"),  # type: ignore[arg-type]
    "backward format": (lambda: ExchangePrecision(backward="float32"), "backward='float32' is unknown"),  # type: ignore[arg-type]
    "names for tables": (lambda: TowerPlan.balanced(["a"], TowerTopology(num_towers=1, ranks_per_tower=1)),
                         "tables has 'a', which is not a table"),
    "balanced over a number": (lambda: TowerPlan.balanced([], 2), "topology is 2, but must be an instance of Tower"),  # type: ignore[arg-type]
    "lists in a tower": (lambda: TowerPlan.from_lists([[["a"], ["b"]]]), r"Feature \['a'\] of the tower plan is not a"),  # type: ignore[list-item]
    "one text": (lambda: TableSpec(name="t", num_embeddings=1, embedding_dim=4, feature_names="ad"), "names='ad'; gi"),  # type: ignore[arg-type]
    "counts of no table": (lambda: AccessProfile([table("t", "f")]).add({"g": [1]}, num_samples=1),
                           "no table has feature 'g'"),
    "float ids": (lambda: AccessProfile([table("t", "f")]).add({"f": [2.5]}, num_samples=1), "ids of 'f' are float64"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_named(name: str) -> None:
    attempt, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        attempt()
