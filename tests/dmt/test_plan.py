"""Tower plans (rules, files, the tables they are checked against) and rank arithmetic: no process starts here."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from dmt import InputError, TableSpec, TowerPlan, TowerTopology


def table(name: str, *features: str, rows: int = 10, dim: int = 8) -> TableSpec:
    return TableSpec(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features or (name,))


def test_strided_is_the_papers_naive_assignment() -> None:
    plan = TowerPlan.strided([str(i) for i in range(26)], 8)
    assert [[int(f) for f in tower] for tower in plan.to_lists()] == [
        [0, 8, 16, 24],
        [1, 9, 17, 25],
        [2, 10, 18],
        [3, 11, 19],
        [4, 12, 20],
        [5, 13, 21],
        [6, 14, 22],
        [7, 15, 23],
    ]
    with pytest.raises(InputError, match="num_towers=27 must lie between 1 and the number of features, 26"):
        TowerPlan.strided([str(i) for i in range(26)], 27)


def test_round_trip(tmp_path: Path) -> None:
    plan = TowerPlan.from_lists(
        [["b", "a"], ["c"]],
        strategy="coherent",
        seed=3,
        affinity={"within": 0.5},
        tables=(table("ta", "a", "b"), table("tc", "c")),
        command="dmt partition x",
    )
    plan.save(tmp_path / "deep" / "towers.json")
    assert TowerPlan.load(tmp_path / "deep" / "towers.json") == plan
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["towers.json"]


def test_a_feature_lives_in_one_tower() -> None:
    with pytest.raises(InputError, match=r"Feature 'a' occurs more than once.*tower_0, tower_1"):
        TowerPlan.from_lists([["a", "b"], ["a"]])
    with pytest.raises(InputError, match="Tower 'tower_1' has no feature"):
        TowerPlan.from_lists([["a"], []])
    with pytest.raises(InputError, match="at least one tower"):
        TowerPlan.from_lists([])


def test_a_name_that_no_file_can_hold_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Tower plan .*cannot be written \('utf-8' codec"):
        TowerPlan.from_lists([["b\ud800"]]).save(tmp_path / "p.json")
    (tmp_path / "p.json").write_text(r'{"format": 1, "towers": [{"name": "t", "features": ["\ud800"]}]}')
    with pytest.raises(InputError, match=r"Tower plan .*Invalid JSON: unexpected end of hex escape"):
        TowerPlan.load(tmp_path / "p.json")


def test_plan_against_the_model() -> None:
    plan = TowerPlan.from_lists([["item_id", "brand"], ["user_id"]])
    with pytest.raises(InputError, match=r"Features 'shop', 'city' are in no tower"):
        plan.check_features(["item_id", "brand", "user_id", "shop", "city"])
    with pytest.raises(InputError, match=r"'user_id' is in no tower.* Did you mean 'usr_id'\?"):
        TowerPlan.from_lists([["usr_id"]]).check_features(["user_id"])
    with pytest.raises(InputError, match=r"'brand' is in the tower plan but not in the model.*'brands'"):
        TowerPlan.from_lists([["brand", "brands"]]).check_features(["brands"])


def test_tables_follow_the_plans_order() -> None:
    plan = TowerPlan.from_lists([["c", "a"], ["b", "d"]])
    tables = [table("ta", "a"), table("tbd", "d", "b"), table("tc", "c")]
    assert [[t.name for t in tower] for tower in plan.tables_by_tower(tables)] == [["tc", "ta"], ["tbd"]]


def test_a_shared_table_stays_whole() -> None:
    plan = TowerPlan.from_lists([["a"], ["b"]])
    with pytest.raises(InputError, match=r"Table 'tab' is shared by features of different towers \('a' in tower_0"):
        plan.tables_by_tower([table("tab", "a", "b")])


def test_features_outside_towers(tmp_path: Path) -> None:
    plan = TowerPlan.from_lists([["a"], ["b"]], outside=("d", "c"))
    plan.save(tmp_path / "towers.json")
    assert TowerPlan.load(tmp_path / "towers.json") == plan
    tables = [table("tb", "b"), table("tcd", "c", "d"), table("ta", "a")]
    assert plan.tables_by_tower(tables) == [[tables[2]], [tables[0]]]
    assert plan.outside_tables(tables) == [tables[1]]
    with pytest.raises(
        InputError, match=r"Feature 'b' occurs more than once in the tower plan \(in tower_1, outside\)"
    ):
        TowerPlan.from_lists([["a"], ["b"]], outside=("b",))
    with pytest.raises(InputError, match=r"Feature 'c' occurs more than once .*outside"):
        TowerPlan.from_lists([["a"]], outside=("c", "c"))
    with pytest.raises(
        InputError, match=r"'tbc' is shared .*\('c' outside, 'b' in tower_1\)\. A table lives in one tower, or"
    ):
        plan.tables_by_tower([table("ta", "a"), table("tbc", "c", "b"), table("td", "d")])
    with pytest.raises(InputError, match="Feature 'd' is in the tower plan but not in the model"):
        plan.tables_by_tower([table("ta", "a"), table("tb", "b"), table("tc", "c")])


def test_a_plan_for_another_model_is_refused() -> None:
    plan = TowerPlan.from_lists([["a"]], tables=(table("ta", "a", rows=100),))
    with pytest.raises(InputError, match=r"Table 'ta' is 10 x 8 .* made for 100 x 8"):
        plan.tables_by_tower([table("ta", "a")])
    with pytest.raises(InputError, match="Table 'ta' is given 2 times"):
        plan.tables_by_tower([table("ta", "a"), table("ta", "a")])


def test_a_feature_may_look_up_in_two_tables() -> None:
    tables = [table("ta", "a"), table("tb", "a")]
    assert TowerPlan.from_lists([["a"]]).tables_by_tower(tables) == [tables]


WHOLE = '{"format": 1, "towers": [{"name": "t", "features": ["a"]}], %s}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "has format None; this version reads format 1"),
        ('{"format": 2, "towers": []}', "has format 2; this version reads format 1. Write it with `dmt partition`"),
        ('{"format": 1}', "towers.json: towers: Field required"),
        ('{"format": 1, "towers": [{"name": "t", "features": "abc"}]}', r"towers\.0\.features: .*array \(got 'abc'\)"),
        (WHOLE % '"affinity": [1, 2]', r"affinity: .*object \(got \[1, 2\]\). Write it with `dmt partition`"),
        (WHOLE % '"column_splits": {"a": [4, "4"]}', r"column_splits\.a\.1: Input should be a valid integer"),
        (WHOLE % '"tables": [{"name": "t"}]', r"tables\.0\.num_embeddings: Field required"),
        ('{"format": 1, "towers": [{"name": "t", "features": ["a", "a"]}]}', "towers.json: Feature 'a' occurs more"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "towers.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        TowerPlan.load(path)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"Tower plan .*nowhere\.json: cannot be read .* Write it with `dmt partition`"
    ):
        TowerPlan.load(tmp_path / "nowhere.json")


@pytest.mark.parametrize("placement", ["inter_host", "intra_host"])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 2), (2, 2, 3), (3, 1, 2), (2, 3, 1), (4, 3, 2)])
def test_every_place_has_one_rank(sizes: tuple[int, int, int], placement: str) -> None:
    replicas, towers, locals_ = sizes
    topology = TowerTopology(
        num_towers=towers, ranks_per_tower=locals_, num_replicas=replicas, replica_placement=placement
    )
    coordinates = [topology.coordinates(rank) for rank in range(topology.world_size)]
    assert sorted(coordinates) == list(itertools.product(range(replicas), range(towers), range(locals_)))
    for rank, (replica, tower, local) in enumerate(coordinates):
        assert rank in topology.tower_groups()[replica * towers + tower]
        assert topology.tower_groups()[replica * towers + tower][local] == rank


@pytest.mark.parametrize("placement", ["inter_host", "intra_host"])
def test_groups_partition_the_job(placement: str) -> None:
    topology = TowerTopology(num_towers=3, ranks_per_tower=2, num_replicas=2, replica_placement=placement)
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


def test_intra_host_replicas_are_neighbours() -> None:
    topology = TowerTopology(num_towers=2, ranks_per_tower=2, num_replicas=2, replica_placement="intra_host")
    assert topology.replica_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.tower_groups() == [[0, 2], [4, 6], [1, 3], [5, 7]]


def test_inter_host_replicas_are_blocks() -> None:
    topology = TowerTopology(num_towers=2, ranks_per_tower=2, num_replicas=2)
    assert topology.sharding_groups() == [[0, 1, 2, 3], [4, 5, 6, 7]]


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
    topology = TowerTopology(
        num_towers=sizes[0],
        ranks_per_tower=sizes[1],
        num_replicas=sizes[2],
        replica_placement="intra_host",
        ranks_per_host=ranks_per_host,
    )
    assert topology.host_groups() == hosts
    assert topology.across_host_groups() == [list(ranks) for ranks in zip(*hosts, strict=True)]
    assert topology.num_hosts == len(hosts)
    assert [topology.host(rank) for rank in range(topology.world_size)] == [
        number for number, ranks in enumerate(hosts) for _ in ranks
    ]
    assert topology.share_across_hosts(topology.peer_groups()) == pytest.approx(peers)
    assert topology.share_across_hosts(topology.tower_groups()) == pytest.approx(tower)


def test_links_of_a_ring_are_counted_from_host_to_host() -> None:
    # Of four towers with three replicas each, two on a host: rings over 0-2, 3-5, 6-8, 9-11 on hosts of 6 or 4 ranks.
    six, four = (
        TowerTopology(
            num_towers=4 if size == 6 else 1,
            ranks_per_tower=1 if size == 6 else 4,
            num_replicas=3,
            replica_placement="intra_host",
            ranks_per_host=size,
        )
        for size in (6, 4)
    )
    assert six.ring_share_across_hosts(six.replica_groups()) == 0
    assert four.ring_share_across_hosts(four.replica_groups()) == pytest.approx((0 + 2 + 2 + 0) / 12)
    assert six.ring_share_across_hosts([range(12)]) == pytest.approx(2 / 12)
    assert six.ring_share_across_hosts([]) == 0


@pytest.mark.parametrize(
    ("sizes", "ranks_per_host"), [((2, 2, 1), 3), ((2, 2, 1), 8), ((2, 6, 1), 4), ((4, 3, 1), 2), ((2, 2, 3), 4)]
)
def test_hosts_that_cut_towers_unevenly_are_refused(sizes: tuple[int, int, int], ranks_per_host: int) -> None:
    message = rf"ranks_per_host={ranks_per_host} must divide the .* a host holds whole towers, or a tower whole hosts"
    with pytest.raises(InputError, match=message):
        TowerTopology(
            num_towers=sizes[0],
            ranks_per_tower=sizes[1],
            num_replicas=sizes[2],
            replica_placement="intra_host",
            ranks_per_host=ranks_per_host,
        )


def test_a_host_has_at_least_a_rank_and_a_whole_number() -> None:
    for value in (0, 1.5, True):
        with pytest.raises(InputError, match=r"ranks_per_host=.* must be a whole number of at least 1"):
            TowerTopology(num_towers=2, ranks_per_tower=2, ranks_per_host=value)  # type: ignore[arg-type]


def test_peer_order_of_the_paper() -> None:
    assert TowerTopology(num_towers=2, ranks_per_tower=2).peer_order() == [0, 2, 1, 3]
    assert TowerTopology(num_towers=3, ranks_per_tower=2).peer_order() == [0, 2, 4, 1, 3, 5]


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_sizes_must_be_positive_whole_numbers(value: object) -> None:
    with pytest.raises(InputError, match=r"ranks_per_tower=.* must be a whole number of at least 1"):
        TowerTopology(num_towers=2, ranks_per_tower=value)


def test_wrong_use_is_named() -> None:
    topology = TowerTopology(num_towers=2, ranks_per_tower=2)
    with pytest.raises(InputError, match=r"1 \* 2 \* 2 = 4 ranks, but the job was started with WORLD_SIZE=6"):
        topology.check_world_size(6)
    with pytest.raises(InputError, match="replica_placement='diagonal' is unknown"):
        TowerTopology(num_towers=2, ranks_per_tower=2, replica_placement="diagonal")
