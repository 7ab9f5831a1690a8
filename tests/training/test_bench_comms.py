"""``dmt bench-comms``: what it measures on ranks, and what it refuses."""

from __future__ import annotations

import importlib
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dmt.errors import InputError
from dmt.plan.topology import TowerTopology
from dmt.simulator.cluster import Cluster, load_cluster, save_cluster
from dmt.training.commands.bench_comms import _Timing, bytes_sent, measure_cluster, rate, run_bench_comms
from tests.ranks import run_ranks


def measured_on_rank(rank: int, folder: str) -> Cluster:
    # What is measured of a rank alone says nothing here, and takes seconds at its full size. Beside other tests more
    # bytes may take no longer.
    module = importlib.import_module("dmt.training.commands.bench_comms")  # the package has a command of that name
    sizes = {"_WIDTH": 64, "_SAMPLES": 64, "_ROWS": 1000, "_LOOKUPS": 256, "_MOVED": 64_000, "_BYTES": 4_000_000}
    with patch.multiple(module, **sizes, rate=lambda timings: timings[-1].sent):
        return measure_cluster("ranks", 2, torch.device("cpu"))


@pytest.mark.ranks
def test_ranks_measure_their_collectives_and_all_get_the_same(tmp_path: Path) -> None:
    results = run_ranks(measured_on_rank, 4, "")
    cluster = results[0]
    assert all(result == cluster for result in results)
    assert (cluster.hosts, cluster.ranks_per_host) == (2, 2)
    # The bytes that the stand-in for a rate was given.
    assert (cluster.all_to_all.uplink_bytes_per_s, cluster.all_to_all.host_bytes_per_s) == (4e6, 2e6)
    assert (cluster.exchange.uplink_bytes_per_s, cluster.exchange.host_bytes_per_s) == (4e6, 2e6)
    assert (cluster.all_reduce.uplink_bytes_per_s, cluster.all_reduce.host_bytes_per_s) == (6e6, 4e6)
    assert min(asdict(cluster.exchange).values()) >= 0
    save_cluster(cluster, tmp_path / "ranks.toml")
    assert load_cluster(tmp_path / "ranks.toml") == cluster


def test_the_bytes_of_collectives_inside_hosts_stay_there() -> None:
    topology = TowerTopology(num_towers=2, ranks_per_tower=4)
    sent = [bytes_sent(kind, 8, topology, between_hosts=False) for kind in ("all_to_all", "exchange", "all_reduce")]
    assert sent == [(0, 6), (0, 6), (0, 12)]


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "measures the job that it is part of.*torchrun --nnodes 2"),
        ({"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "has 3 ranks, but 2 on this"),
    ],
)
def test_what_cannot_be_measured_is_told(
    environment: dict[str, str], words: str, tmp_path: Path, monkeypatch: Any
) -> None:
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(InputError, match=words):
        run_bench_comms(tmp_path / "c.toml")


def test_times_that_tell_no_rate_are_refused() -> None:
    small = _Timing(sent=16.0, rank_bytes=4.0, seconds=1e-3, core_s=0.0)
    with pytest.raises(InputError, match=r"of 1,016 bytes took 1\.000 ms, of 16 bytes 1\.000 ms, which tells no rate"):
        rate([small, small._replace(sent=1016.0)])
    assert rate([small, small._replace(sent=1016.0, seconds=2e-3)]) == 1e6
