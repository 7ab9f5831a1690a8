"""``dmt bench-comms``: what it measures on ranks, and what it refuses."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dmt.errors import InputError
from dmt.training.commands.bench_comms import Timing, measure_cluster, rate, run_bench_comms
from tests.ranks import run_ranks


def any_rate(timings: list[Timing], counted: str) -> float:
    """Stands in for `rate`: beside other tests more bytes may take no longer."""
    return 1.0 if timings else 0.0


def measured_on_rank(rank: int, folder: str) -> list[Any]:
    # What is measured of a rank alone says nothing here, and takes seconds at its full size.
    module = importlib.import_module("dmt.training.commands.bench_comms")  # the package has a command of that name
    with patch.multiple(module, _WIDTH=64, _SAMPLES=64, _ROWS=1000, _LOOKUPS=256, _MOVED=64_000, rate=any_rate):
        cluster, timings = measure_cluster("ranks", 2, torch.device("cpu"), megabytes=(4.0,))
    return [cluster, timings]


@pytest.mark.ranks
def test_ranks_measure_their_collectives_and_all_get_the_same() -> None:
    results = run_ranks(measured_on_rank, 4, "")
    cluster, timings = results[0]
    assert all(result == results[0] for result in results)
    assert (cluster.hosts, cluster.ranks_per_host) == (2, 2)
    counted = {(t.collective, t.group, t.bytes_per_rank): (t.uplink_bytes, t.inside_bytes) for t in timings}
    # All-to-all over 4 ranks: half of what a rank has goes to the other host, a quarter to its neighbour.
    assert counted["all_to_all", "hosts", 4_000_000] == (4_000_000, 1_000_000)
    assert counted["exchange", "hosts", 4_000_000] == (4_000_000, 0)
    assert counted["exchange", "host", 4_000_000] == (0, 2_000_000)
    assert counted["all_reduce", "hosts", 4_000_000] == (6_000_000, 3_000_000)
    assert len(counted) == 3 * 2 * 2
    assert all(t.least <= t.seconds <= t.most for t in timings)


@pytest.mark.parametrize(
    ("environment", "megabytes", "words"),
    [
        ({}, (), "measures the job that it is part of.*torchrun --nnodes 2"),
        (
            {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
            (),
            "has 3 ranks, but 2 on this",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, (0.0,), "--megabytes 0: give"),
    ],
)
def test_what_cannot_be_measured_is_told(
    environment: dict[str, str], megabytes: tuple[float, ...], words: str, tmp_path: Path, monkeypatch: Any
) -> None:
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(InputError, match=words):
        run_bench_comms(tmp_path / "c.toml", device="cpu", megabytes=megabytes)


def test_sizes_that_tell_no_rate_are_refused() -> None:
    small_one = Timing(
        collective="all_to_all",
        group="hosts",
        bytes_per_rank=16,
        uplink_bytes=16.0,
        inside_bytes=4.0,
        seconds=1e-3,
        least=1e-3,
        most=1e-3,
        core_s=0.0,
    )
    with pytest.raises(InputError, match=r"all_to_all of 16 bytes took 1\.000 ms, .* Give larger --megabytes"):
        rate([small_one, small_one], "uplink_bytes")
    assert rate([small_one, replace(small_one, uplink_bytes=1016.0, seconds=2e-3)], "uplink_bytes") == 1e6
