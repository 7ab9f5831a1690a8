"""Sums of gradients of copied rows between emulated hosts: all rows, the touched ones, those of hosts, those of ranks.

    sudo OMP_NUM_THREADS=1 python -m benchmarks.hot_sums

Two hosts of two ranks and four hosts of one at 200 Mbit/s, 10,000 rows of 128 columns. Each rank touches a share of the
rows, the same rows on all or its own draw. ``dense``, ``union`` (OPER's local-aggregated sparse all-reduce, section
5.3) and ``exchange`` are the ways of `dmt.sptt.hot_sum`, ``all-gather`` is that of each rank's rows, which the paper
compares with, and ``chosen`` is what training takes. All take turns in one job; seconds are medians of the slowest
rank, bytes those on the uplinks of all hosts, headers included.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.emulation.hosts import UPLINK, EmulatedHosts, sent_bytes
from benchmarks.provenance import commit, processor
from benchmarks.towers.report import markdown_table
from dmt import TowerMesh, TowerTopology
from dmt.collectives import gather_objects
from dmt.files import atomic_write
from dmt.sptt.hot_sum import TouchedRowsSum

__all__ = ["main"]

_RESULTS = Path(__file__).parent / "results"
_SHAPES = ((2, 2), (4, 1))
_SHARES = (0.1, 0.3, 0.6, 0.9)
_WAYS = ("dense", "union", "exchange", "all-gather", "chosen")
_ROWS, _COLUMNS, _MBIT = 10_000, 128, 200.0


def gradient_of(rank: int, share: float, *, alike: bool) -> Tensor:
    """[rows * columns]; zeros where the rank touched nothing."""
    draw = torch.Generator().manual_seed(0 if alike else rank)
    touched = torch.rand(_ROWS, 1, generator=draw) < share
    return (torch.ones(_ROWS, _COLUMNS) * touched).flatten()


def sums(mesh: TowerMesh) -> dict[str, TouchedRowsSum]:
    """The contenders."""
    inside, across, cpu = mesh.tower_group, mesh.peer_group, torch.device("cpu")
    alone, everyone = mesh.new_group([[rank] for rank in range(dist.get_world_size())]), mesh.global_group
    shape = [(_ROWS, _COLUMNS)]
    return {
        "dense": TouchedRowsSum(shape, inside, across, device=cpu, way="dense"),
        "union": TouchedRowsSum(shape, inside, across, device=cpu, way="union"),
        "exchange": TouchedRowsSum(shape, inside, across, device=cpu, way="exchange"),
        "all-gather": TouchedRowsSum(shape, alone, everyone, device=cpu, way="exchange"),
        "chosen": TouchedRowsSum(shape, inside, across, device=cpu),
    }


def measure(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Times the contenders in turns; on every rank."""
    mesh, found = TowerMesh(TowerTopology(num_towers=spec["hosts"], ranks_per_tower=spec["ranks"])), []
    contenders, told, world = sums(mesh), torch.zeros(2), mesh.global_group
    for alike in (False, True):
        for share in _SHARES:
            gradient = gradient_of(mesh.rank, share, alike=alike)
            seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
            sent: dict[str, list[int]] = {way: [] for way in _WAYS}
            for turn in range(spec["rounds"] + 1):
                for way, contender in contenders.items():
                    dist.barrier()
                    begun, before = time.perf_counter(), sent_bytes(UPLINK)
                    total, _ = contender.start(gradient, told)()
                    taken = time.perf_counter() - begun
                    dist.barrier()
                    # One rank of each host tells the bytes of its host.
                    own = (sent_bytes(UPLINK) - before) if mesh.local == 0 else 0
                    ranks = gather_objects((taken, own, float(total.sum())), world)
                    assert len({sum_of_rank for *_, sum_of_rank in ranks}) == 1, "ranks have other sums"
                    if turn:
                        seconds[way].append(max(one for one, *_ in ranks))
                        sent[way].append(sum(number for _, number, _ in ranks))
            row = {"hosts": spec["hosts"], "ranks": spec["ranks"], "alike": alike, "share": share}
            taken_way = contenders["chosen"].taken
            times = {way: {"seconds": statistics.median(seconds[way]), "all_seconds": seconds[way]} for way in _WAYS}
            found.append(
                {**row, "taken": taken_way, **{w: {**times[w], "bytes": statistics.median(sent[w])} for w in _WAYS}}
            )
            if mesh.rank == 0:
                print(f"# {spec['hosts']}x{spec['ranks']}, {share:.0%}, {'alike' if alike else 'apart'}", flush=True)
    return found


def run_rank(spec_path: Path) -> None:
    """One rank of a job."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        found = measure(json.loads(spec_path.read_text()))
        if dist.get_rank() == 0:
            spec_path.with_suffix(".out").write_text(json.dumps(found))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def page(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    rows = []
    for one in record["sums"]:
        best_bytes, best_time = (min(one[way][kind] for way in _WAYS[:4]) for kind in ("bytes", "seconds"))
        rows.append(
            [
                f"{one['hosts']} x {one['ranks']}",
                f"{one['share']:.0%} {'alike' if one['alike'] else 'apart'}",
                *(f"{one[way]['bytes'] / 1e6:.2f}, {1e3 * one[way]['seconds']:.0f}" for way in _WAYS),
                one["taken"],
                f"{one['chosen']['bytes'] / best_bytes - 1:+.1%}, {one['chosen']['seconds'] / best_time - 1:+.1%}",
            ]
        )
    header = ["hosts x ranks", "touched by a rank", *(f"{way}: MB, ms" for way in _WAYS), "took", "off the best"]
    words = __doc__.strip().split("\n\n", 2)[2]
    return "\n\n".join(
        ["# Sums of gradients of copied rows", words, record["provenance"], markdown_table(header, rows)]
    )


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=7, help="Measured turns of each way.")
@click.option("--out", type=click.Path(path_type=Path), default=_RESULTS, help="Folder of the record.")
def main(*, rounds: int, out: Path) -> None:
    """Writes hot_sums.json and hot_sums.md; needs root."""
    found: list[dict[str, Any]] = []
    for hosts, ranks in _SHAPES:
        with tempfile.TemporaryDirectory(prefix="dmt-sums-") as folder, EmulatedHosts(hosts, mbit_per_s=_MBIT) as made:
            spec = Path(folder, "spec.json")
            spec.write_text(json.dumps({"hosts": hosts, "ranks": ranks, "rounds": rounds}))
            command = ["-m", "benchmarks.hot_sums", "--rank", str(spec)]
            made.torchrun(command, ranks_per_host=ranks, timeout=1800)
            found += json.loads(spec.with_suffix(".out").read_text())
    record = {"provenance": f"{processor()}, torch {torch.__version__}, commit {commit()}.", "sums": found}
    with atomic_write(out / "hot_sums.json") as scratch:
        scratch.write_text(json.dumps(record, indent=1) + "\n")
    with atomic_write(out / "hot_sums.md") as scratch:
        scratch.write_text(page(record) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(Path(sys.argv[2]))
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        main()
