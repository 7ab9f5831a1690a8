"""``dmt bench-comms``: what it measures on ranks, and what it refuses."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from dmt.errors import InputError
from dmt.plan.topology import TowerTopology
from dmt.simulator.cluster import Cluster, load_cluster, save_cluster
from dmt.sptt.mesh import TowerMesh
from dmt.training.commands import bench_comms
from dmt.training.commands.bench_comms import _Timing, cut, measure_cluster, run_bench_comms, shapes_of
from tests.ranks import on_ranks, run_ranks


def measure() -> Cluster:
    topology = TowerTopology(num_towers=dist.get_world_size() // 2, ranks_per_tower=2)
    return measure_cluster("ranks", TowerMesh(topology), torch.device("cpu"))


def measured_on_rank(rank: int, folder: str) -> Cluster:
    # What is measured of a rank alone says nothing here, and takes seconds at its full size.
    sizes = {"_WIDTH": 64, "_SAMPLES": 64, "_ROWS": 1000, "_LOOKUPS": 256, "_MOVED": 64_000, "_BYTES": 4_000_000}

    def time(work: Any, *_: object) -> _Timing:
        """Seconds by the size of what is sent."""
        work()
        sent = work.args[2].nbytes if isinstance(work, partial) else 16
        return _Timing(seconds=0.5 + sent / 4e6, core_s=sent / 4e6)

    with patch.multiple(bench_comms, **sizes, _time=time):
        return measure()


@pytest.mark.ranks
def test_ranks_measure_their_collectives_and_all_get_the_same(tmp_path: Path) -> None:
    results = run_ranks(measured_on_rank, 4, "")
    cluster = results[0]
    assert all(result == cluster for result in results)
    assert (cluster.hosts, cluster.ranks_per_host) == (2, 2)
    # In half a second: two layers, each three products of 64 x 64 x 64; a copy; rows that are read twice and written.
    speeds = cluster.matmul_flops, cluster.memory_bytes_per_s, cluster.lookup_bytes_per_s
    assert speeds == pytest.approx((2 * 3 * 2 * 64**3 * 2, 2 * 64_000 * 2, 3 * 256 * 128 * 4 * 2), rel=1e-4)
    # Bytes between hosts and inside them for a second more.
    # Each byte of a value takes 1 / 4e6 s of 8e-6 cores; a rank sends .75, .5 and 1.5 times its value.
    for rates, uplink, inside, core_s in (
        (cluster.all_to_all, 4e6, 2e6, 1 / 24),
        (cluster.exchange, 4e6, 2e6, 1 / 16),
        (cluster.all_reduce, 6e6, 4e6, 1 / 48),
    ):
        assert (rates.uplink_rate(4), rates.host_rate(2)) == pytest.approx((uplink, inside))
        assert (set(rates.uplink_by_ranks), rates.host_by_ranks) == ({2, 4}, {2: 1.0})
        assert (rates.latency_s, rates.core_s_per_byte) == pytest.approx((0.5, core_s), rel=1e-4)
    # By seconds: a ring of two hosts sends each number twice over two links, one of four ranks 1.5 times over two.
    assert cluster.all_reduce.uplink_bytes_per_s == pytest.approx(8e6)
    assert cluster.all_reduce.uplink_by_ranks == pytest.approx({2: 1.0, 4: 0.75})
    save_cluster(cluster, tmp_path / "ranks.toml")
    assert load_cluster(tmp_path / "ranks.toml") == cluster


@on_ranks(2)
def test_one_host_tells_nothing_of_groups_over_several(rank: int) -> None:
    cluster = measured_on_rank(rank, "")
    assert [row[2] for row in bench_comms._show(cluster, Path("c.toml")).rows] == ["not measured"] * 3
    rates = cluster.exchange
    assert (rates.uplink_by_ranks, rates.host_by_ranks) == ({}, {2: 1.0})
    assert rates.uplink_rate(16) == rates.uplink_bytes_per_s == rates.host_bytes_per_s


@on_ranks(2)
def test_times_that_tell_no_rate_are_refused(rank: int) -> None:
    refused = pytest.raises(InputError, match=r"8 bytes 1\.000 ms, so no rate can be computed")
    with patch.object(bench_comms, "_time", lambda *_: _Timing(1e-3, 0.0)), refused:
        measure()


@on_ranks(4)
def test_ranks_dealt_to_machines_in_turn_are_refused(rank: int) -> None:
    refused = pytest.raises(InputError, match=r"hold ranks \[0, 2\], \[1, 3\], but .* with consecutive ranks on each")
    with patch.object(bench_comms, "this_machine", lambda: "ab"[rank % 2]), refused:
        measure()


@pytest.mark.parametrize(("hosts", "ranks"), [(1, 1), (1, 8), (2, 1), (4, 2), (3, 6)])
def test_each_size_is_measured_once_between_hosts_and_inside_them_by_all_ranks(hosts: int, ranks: int) -> None:
    topology = TowerTopology(num_towers=hosts, ranks_per_tower=ranks)
    shapes = shapes_of(topology)
    across, inside = ([h * r for h, r in shapes if (h > 1) == is_across] for is_across in (True, False))
    assert across == sorted(set(across))
    assert inside == [n for n in range(2, ranks + 1) if ranks % n == 0]
    assert hosts * ranks in [*across, *inside, 1]
    for shape in shapes:
        groups = cut(topology, *shape)
        assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))
        for group in groups:
            on_host = [topology.host(rank) for rank in group]
            assert {on_host.count(host) for host in on_host} == {shape[1]}
            assert len(set(on_host)) == shape[0]


def test_a_process_without_torchrun_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"measures its own torchrun job.*torchrun --nnodes 2"):
        run_bench_comms(tmp_path / "c.toml")
