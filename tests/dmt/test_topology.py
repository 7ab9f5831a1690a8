"""Rank arithmetic: no process starts here."""

from __future__ import annotations

import itertools

import pytest

from dmt import InputError, TowerTopology


@pytest.mark.parametrize("placement", ["inter_host", "intra_host"])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 2), (2, 2, 3), (3, 1, 2), (2, 3, 1), (4, 3, 2)])
def test_rank_and_coordinates_are_inverse(sizes: tuple[int, int, int], placement: str) -> None:
    replicas, towers, locals_ = sizes
    topology = TowerTopology(
        num_towers=towers, ranks_per_tower=locals_, num_replicas=replicas, replica_placement=placement
    )
    seen = set()
    for where in itertools.product(range(replicas), range(towers), range(locals_)):
        rank = topology.rank(*where)
        assert topology.coordinates(rank) == where
        seen.add(rank)
    assert seen == set(range(topology.world_size))


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
    with pytest.raises(InputError, match=r"rank=4 is outside 0\.\.3"):
        topology.coordinates(4)
    with pytest.raises(InputError, match=r"tower=2 is outside 0\.\.1"):
        topology.rank(0, 2, 0)
    with pytest.raises(InputError, match="replica_placement='diagonal' is unknown"):
        TowerTopology(num_towers=2, ranks_per_tower=2, replica_placement="diagonal")
