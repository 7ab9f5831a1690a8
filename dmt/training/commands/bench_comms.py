"""``dmt bench-comms``: measures the ranks and links of the job that torchrun started it in, for ``cluster.toml``.

It is PARAM's idea (Neo, appendix A): the collectives of a training step, over the groups of its mesh, by size.

Legend: H hosts, L ranks on each, W = H L ranks.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt.collectives import all_to_all_evenly, gather_objects, start_exchange, start_sum
from dmt.errors import InputError
from dmt.formatting import human_bytes
from dmt.plan.topology import TowerTopology
from dmt.processes import end_with
from dmt.simulator.cluster import Cluster, CollectiveKind, CollectiveRates, save_cluster
from dmt.simulator.work import operators_of
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.unique import distinct_inputs
from dmt.training.commands.outputs import check_output_files
from dmt.training.console import make_table, table_console
from dmt.training.device import backend, device_type, take_device

__all__ = ["MEGABYTES", "Measured", "Timing", "measure_cluster", "print_measured", "rate", "run_bench_comms"]

MEGABYTES = (1.0, 4.0, 16.0)
"""Sizes of what a rank sends in timed collectives by default, in 10^6 bytes."""
_SMALL_REPEATS, _REPEATS = 20, 5
_WIDTH, _SAMPLES = 1024, 2048  # of the layers that are timed
_LAYERS = 32  # that do next to nothing
_FEATURES = 26
_ROWS, _COLUMNS, _LOOKUPS = 200_000, 128, 65_536
_MOVED = 64_000_000  # bytes, more than caches hold
_MOST_MEGABYTES = 4096.0
_UNUSED = 1e12  # rate of links that one rank alone never uses


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One collective at one size, over all groups of its kind at once."""

    collective: CollectiveKind
    group: Literal["hosts", "host"]
    """Ranks of different hosts, or those of one host."""
    bytes_per_rank: int
    """Bytes of the tensor of each rank."""
    uplink_bytes: float
    """Bytes that a host sends to others."""
    inside_bytes: float
    """Bytes that a rank sends to others of its host."""
    seconds: float
    """Median over repetitions, of the slowest rank each."""
    least: float
    most: float
    core_s: float
    """Seconds that the cores of a rank worked in one; mean over ranks."""


def measure_cluster(
    name: str, ranks_per_host: int, device: torch.device, *, megabytes: Sequence[float] = MEGABYTES
) -> tuple[Cluster, list[Timing]]:
    """Measures the job that this rank is part of; collective, every rank gets the same result.

    Args:
        name: of the cluster.
        ranks_per_host: L; W must be a multiple.
        device: of this rank.
        megabytes: sizes of the timed collectives.

    Returns:
        The description, and every collective that was timed.

    Raises:
        InputError: ``ranks_per_host`` does not divide the ranks of the job, or more bytes took no longer than fewer.
    """
    hosts = max(1, dist.get_world_size() // ranks_per_host)
    # A tower is a host here, so peers are one rank of each host.
    mesh = TowerMesh(TowerTopology(num_towers=hosts, ranks_per_tower=ranks_per_host))
    sizes = [round(1e6 * size) for size in megabytes]
    timings = [timing for kind in _COLLECTIVES for timing in _time_collective(kind, mesh, device, sizes)]
    layers, flops = _time_layers(device)
    seconds, busy = _time(layers, _REPEATS, mesh, device)
    # Cores that a rank has while all work: fewer than one where ranks share them.
    cores = busy / statistics.median(seconds)
    rates = {
        kind: _rates([t for t in timings if t.collective == kind], ranks_per_host, device.type, cores)
        for kind in _COLLECTIVES
    }
    cluster = Cluster(
        name=name,
        hosts=hosts,
        ranks_per_host=ranks_per_host,
        matmul_flops=flops / statistics.median(seconds),
        memory_bytes_per_s=_speed(_time_copies(device), mesh, device),
        lookup_bytes_per_s=_speed(_time_lookups(device), mesh, device),
        all_to_all=rates["all_to_all"],
        exchange=rates["exchange"],
        all_reduce=rates["all_reduce"],
        operator_s=1 / _speed(_time_operators(device), mesh, device),
        told_apart_s=1 / _speed(_time_telling_apart(device), mesh, device),
        source="measured by dmt bench-comms" + (", on one host: no uplink was measured" if hosts == 1 else ""),
    )
    return cluster, timings


def _all_to_all(group: dist.ProcessGroup, value: Tensor) -> None:
    all_to_all_evenly(value, group)


def _exchange(group: dist.ProcessGroup, value: Tensor) -> None:
    parts = list(value.split(len(value) // group.size()))
    pending, _ = start_exchange(parts, [len(part) for part in parts], group)
    pending.wait()


def _all_reduce(group: dist.ProcessGroup, value: Tensor) -> None:
    start_sum(value, group).wait()


_COLLECTIVES: dict[CollectiveKind, Callable[[dist.ProcessGroup, Tensor], None]] = {
    "all_to_all": _all_to_all,
    "exchange": _exchange,
    "all_reduce": _all_reduce,
}


def _time_collective(kind: CollectiveKind, mesh: TowerMesh, device: torch.device, sizes: Sequence[int]) -> list[Timing]:
    run, hosts = _COLLECTIVES[kind], mesh.topology.num_hosts
    wide = mesh.peer_group if kind == "exchange" else mesh.global_group
    groups: list[tuple[Literal["hosts", "host"], dist.ProcessGroup]] = [("hosts", wide), ("host", mesh.tower_group)]
    timings = []
    for name, group in groups:
        if group.size() == 1 or (name == "hosts" and hosts == 1):
            continue
        # First next to nothing: a number for every rank.
        for size in (4 * group.size(), *sizes):
            value = torch.zeros(size // 4 // group.size() * group.size(), device=device)
            repeats = _REPEATS if size in sizes else _SMALL_REPEATS
            seconds, core = _time(partial(run, group, value), repeats, mesh, device)
            uplink, inside = _sent(kind, name, value.nbytes, hosts, mesh.topology.ranks_per_tower)
            timings.append(
                Timing(
                    collective=kind,
                    group=name,
                    bytes_per_rank=value.nbytes,
                    uplink_bytes=uplink,
                    inside_bytes=inside,
                    seconds=statistics.median(seconds),
                    least=min(seconds),
                    most=max(seconds),
                    core_s=core,
                )
            )
    return timings


def _sent(kind: CollectiveKind, group: str, size: int, hosts: int, ranks: int) -> tuple[float, float]:
    """Bytes that a host sends to others, and a rank to others of its host; of a reduction those of a ring."""
    if group == "host":
        return 0.0, size * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)
    if kind == "exchange":
        return size * ranks * (hosts - 1) / hosts, 0.0
    world = hosts * ranks
    if kind == "all_reduce":
        return 2 * size * (world - 1) / world, 2 * size * (world - 1) / world * (ranks - 1) / ranks
    return size * ranks * (world - ranks) / world, size * (ranks - 1) / world


def _time(work: Callable[[], Any], repeats: int, mesh: TowerMesh, device: torch.device) -> tuple[list[float], float]:
    """Seconds of every repetition, of the slowest rank; and seconds of the cores of a rank in one, the mean."""
    work()  # the first one opens connections and touches memory
    spans, core = [], 0.0
    for _ in range(repeats):
        _settle(device)
        dist.barrier(mesh.global_group)
        begin, cpu = time.perf_counter(), time.process_time()
        work()
        _settle(device)
        core += time.process_time() - cpu
        spans.append(time.perf_counter() - begin)
    everyone = gather_objects((spans, core / repeats), mesh.global_group)
    slowest = [max(of_ranks) for of_ranks in zip(*(spans for spans, _ in everyone), strict=True)]
    return slowest, statistics.mean(core for _, core in everyone)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _rates(timings: Sequence[Timing], ranks: int, device_type: str, cores: float) -> CollectiveRates:
    """Rates at the largest size, less the latency, which is the time of the smallest."""
    across, within = ([t for t in timings if t.group == group] for group in ("hosts", "host"))
    if not timings:
        return CollectiveRates(latency_s=0.0, uplink_bytes_per_s=_UNUSED, host_bytes_per_s=_UNUSED)
    first, last = (across or within)[0], (across or within)[-1]
    more, sent = max(last.core_s - first.core_s, 0.0), last.uplink_bytes / ranks + last.inside_bytes
    # Where there are no links of a kind, those of the other kind are taken.
    uplink = rate(across, "uplink_bytes") or rate(within, "inside_bytes")
    return CollectiveRates(
        latency_s=first.seconds,
        uplink_bytes_per_s=uplink,
        host_bytes_per_s=rate(within, "inside_bytes") or uplink,
        # On a GPU the core only waits, in a loop that would count as work.
        core_s_per_byte=0.0 if device_type == "cuda" else more / cores / sent,
    )


def rate(timings: Sequence[Timing], counted: str) -> float:
    """Returns the bytes per second by which the last timing is longer than the first, 0 without timings.

    Raises:
        InputError: it is no longer, or has no more bytes.
    """
    if not timings:
        return 0.0
    small, large = timings[0], timings[-1]
    more: float = getattr(large, counted) - getattr(small, counted)
    if more <= 0 or large.seconds <= small.seconds:
        raise InputError(
            f"{large.collective} of {large.bytes_per_rank:,} bytes took {1e3 * large.seconds:.3f} ms, of "
            f"{small.bytes_per_rank:,} bytes {1e3 * small.seconds:.3f} ms, which tells no rate. Give larger "
            "--megabytes, and measure on machines that do nothing else."
        )
    return more / (large.seconds - small.seconds)


def _time_layers(device: torch.device) -> tuple[Callable[[], Any], float]:
    """A forward and backward pass of two layers, and its FLOPs."""
    layers = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH)).to(device)
    batch = torch.randn(_SAMPLES, _WIDTH, device=device, requires_grad=True)
    return lambda: layers(batch).sum().backward(), 2 * 3 * 2 * _SAMPLES * _WIDTH * _WIDTH


def _time_operators(device: torch.device) -> tuple[Callable[[], Any], float]:
    """A forward and backward pass of many layers next to which nothing is computed, and its operators."""

    def small(device: torch.device) -> Callable[[], Any]:
        layers = nn.Sequential(*[module for _ in range(_LAYERS) for module in (nn.Linear(8, 8), nn.ReLU())]).to(device)
        batch = torch.randn(8, 8, device=device)
        return lambda: layers(batch).sum().backward()

    return small(device), operators_of(small(torch.device("cpu")))


def _time_copies(device: torch.device) -> tuple[Callable[[], Any], float]:
    """A copy, and the bytes that it reads and writes."""
    source = torch.zeros(_MOVED // 4, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * source.nbytes


def _time_lookups(device: torch.device) -> tuple[Callable[[], Any], float]:
    """A lookup with the update of its rows by row-wise AdaGrad, and the bytes of rows that are read and written."""
    on_gpu = device.type == "cuda"
    place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if on_gpu else (EmbeddingLocation.HOST, ComputeDevice.CPU)
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(_ROWS, _COLUMNS, *place)], optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.01, device=device
    )
    ids = torch.randint(_ROWS, (_LOOKUPS,), device=device)
    offsets = torch.arange(_LOOKUPS + 1, device=device)
    return lambda: tables(ids, offsets).sum().backward(), 3 * _LOOKUPS * _COLUMNS * 4


def _time_telling_apart(device: torch.device) -> tuple[Callable[[], Any], float]:
    """A search for the distinct inputs of a batch of one id in each of some features, and the number of its ids."""
    features = [f"f{i}" for i in range(_FEATURES)]
    lengths = torch.ones(_FEATURES * _SAMPLES, dtype=torch.int32, device=device)
    ids = KeyedJaggedTensor(features, torch.randint(_SAMPLES, (len(lengths),), device=device), lengths=lengths)
    return lambda: distinct_inputs(ids, [1] * _FEATURES), len(lengths)


def _speed(made: tuple[Callable[[], Any], float], mesh: TowerMesh, device: torch.device) -> float:
    """Units per second of a rank while all ranks work."""
    work, units = made
    seconds, _ = _time(work, _REPEATS, mesh, device)
    return units / statistics.median(seconds)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The result of ``dmt bench-comms``."""

    cluster: Cluster
    timings: list[Timing]

    def to_record(self) -> dict[str, Any]:
        """Returns the numbers as JSON writes them."""
        return {"cluster": asdict(self.cluster), "timings": [asdict(timing) for timing in self.timings]}


def run_bench_comms(
    out: Path,
    *,
    device: Literal["auto", "cpu", "cuda"],
    megabytes: Sequence[float],
) -> Measured | None:
    """Measures the job and writes ``out``; returns the result on its first rank, None on the others.

    Raises:
        InputError: it was not started by torchrun, hosts have unequal numbers of ranks, a size is out of range, or
            ``out`` cannot be written.
    """
    place = {key: os.environ.get(key, "") for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    if not all(value.isdecimal() for value in place.values()):
        raise InputError(
            "dmt bench-comms measures the job that it is part of, and RANK or WORLD_SIZE says of none. Start it on "
            "every host: torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 --no-python dmt bench-comms"
        )
    for size in megabytes:
        if not 0.001 <= size <= _MOST_MEGABYTES:
            raise InputError(f"--megabytes {size:g}: give 0.001 to {_MOST_MEGABYTES:g}, what a rank sends at once.")
    rank, ranks_per_host = int(place["RANK"]), int(place["LOCAL_WORLD_SIZE"])
    if int(place["WORLD_SIZE"]) % ranks_per_host:
        raise InputError(
            f"The job has {place['WORLD_SIZE']} ranks, but {ranks_per_host} on this host: hosts must have equally many."
        )
    if rank == 0:
        check_output_files({"--out": (out, "cluster")}, [])
    kind = device_type(device)
    here = take_device(kind, int(place["LOCAL_RANK"]))
    end_with(os.getppid())
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group(backend(kind))
    try:
        cluster, timings = measure_cluster(out.stem, ranks_per_host, here, megabytes=sorted(megabytes) or MEGABYTES)
        # A rank that leaves while a peer still sends can abort it.
        dist.barrier()
    finally:
        dist.destroy_process_group()
    if rank != 0:
        return None
    save_cluster(cluster, out)
    return Measured(cluster=cluster, timings=timings)


def print_measured(found: Measured, out: Path) -> None:
    """Prints every collective that was timed, and the rates."""
    console, cluster = table_console(markup=False), found.cluster
    rows = [
        [
            timing.collective,
            "between hosts" if timing.group == "hosts" else "inside a host",
            human_bytes(timing.bytes_per_rank),
            f"{1e3 * timing.seconds:,.2f} ms",
            f"{1e3 * timing.least:,.2f} to {1e3 * timing.most:,.2f}",
            f"{human_bytes((timing.uplink_bytes or timing.inside_bytes) / timing.seconds)}/s",
        ]
        for timing in found.timings
    ]
    title = f"{cluster.hosts} hosts x {cluster.ranks_per_host} ranks"
    console.print(make_table(["", "", "of a rank", "median", "least to most", "rate"], rows, title=title))
    console.print("rate: what a host sends to others; inside a host, what a rank sends.")
    console.print(
        f"A rank: {cluster.matmul_flops / 1e9:,.1f} GFLOP/s in matrix products, copies at "
        f"{human_bytes(cluster.memory_bytes_per_s)}/s, lookups with updates at "
        f"{human_bytes(cluster.lookup_bytes_per_s)}/s, {1e6 * cluster.operator_s:,.1f} us to start an operator, "
        "while all ranks work."
    )
    console.print(f"Written to {out}.", soft_wrap=True)
    if cluster.hosts > 1:
        console.print(f"Next: dmt what-if CONFIG.toml --cluster {out}", soft_wrap=True)
    else:
        console.print(
            "One host tells nothing of the links to others, which decide whether towers pay: the uplink in the file is "
            "no measurement. Run it on two hosts or more (torchrun --nnodes 2 ...) before dmt what-if."
        )
