"""``dmt bench-comms``: measures the ranks and links of the job that torchrun started it in, for ``cluster.toml``.

It is PARAM's idea (Neo, appendix A): the collectives of a training step, over the groups of its mesh, with next to
nothing and with many bytes, of which the time of the first is the latency and the difference tells the rate.

Legend: H hosts, L ranks on each, W = H L ranks.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

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

__all__ = ["bytes_sent", "measure_cluster", "print_measured", "rate", "run_bench_comms"]

_SMALL_REPEATS, _REPEATS = 20, 5
_BYTES = 16_000_000  # that a rank sends in one collective
_WIDTH, _SAMPLES = 1024, 2048  # of the layers that are timed
_LAYERS = 32  # that do next to nothing
_FEATURES = 26
_ROWS, _COLUMNS, _LOOKUPS = 200_000, 128, 65_536
_MOVED = 64_000_000  # bytes, more than caches hold
_UNUSED = 1e12  # rate of links that one rank alone never uses


class _Timing(NamedTuple):
    """One collective, over all groups of its kind at once."""

    sent: float
    """Bytes that a host sends to others; inside hosts, that a rank sends to the others of its host."""
    rank_bytes: float
    """Bytes that a rank sends, to whichever ranks."""
    seconds: float
    """Median over repetitions, of the slowest rank each."""
    core_s: float
    """Seconds that the cores of a rank worked; mean over ranks."""


def measure_cluster(name: str, ranks_per_host: int, device: torch.device) -> Cluster:
    """Measures the job that this rank is part of; collective, every rank gets the same result.

    Args:
        name: of the cluster.
        ranks_per_host: L; W must be a multiple.
        device: of this rank.

    Raises:
        InputError: ``ranks_per_host`` does not divide the ranks of the job, or many bytes took no longer than few.
    """
    hosts = max(1, dist.get_world_size() // ranks_per_host)
    # A tower is a host here, so peers are one rank of each host.
    mesh = TowerMesh(TowerTopology(num_towers=hosts, ranks_per_tower=ranks_per_host))
    timings = {kind: _time_collective(kind, mesh, device) for kind in get_args(CollectiveKind)}
    layers, flops = _time_layers(device)
    seconds, busy = _time(layers, _REPEATS, mesh, device)
    # Cores that a rank has while all work: fewer than one where ranks share them. On a GPU a core only waits, in a loop
    # that would count as work.
    cores = 0.0 if device.type == "cuda" else busy / seconds
    return Cluster(
        name=name,
        hosts=hosts,
        ranks_per_host=ranks_per_host,
        matmul_flops=flops / seconds,
        memory_bytes_per_s=_speed(_time_copies(device), mesh, device),
        lookup_bytes_per_s=_speed(_time_lookups(device), mesh, device),
        all_to_all=_rates(*timings["all_to_all"], cores),
        exchange=_rates(*timings["exchange"], cores),
        all_reduce=_rates(*timings["all_reduce"], cores),
        operator_s=1 / _speed(_time_operators(device), mesh, device),
        told_apart_s=1 / _speed(_time_telling_apart(device), mesh, device),
        source="measured by dmt bench-comms" + (", on one host: no uplink was measured" if hosts == 1 else ""),
    )


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


def _time_collective(
    kind: CollectiveKind, mesh: TowerMesh, device: torch.device
) -> tuple[list[_Timing], list[_Timing]]:
    """Times a collective between hosts and inside them: with a number for every rank, and with many bytes."""
    found: tuple[list[_Timing], list[_Timing]] = ([], [])
    wide = mesh.peer_group if kind == "exchange" else mesh.global_group
    for timings, group, is_wide in zip(found, (wide, mesh.tower_group), (True, False), strict=True):
        if group.size() == 1 or (is_wide and mesh.topology.num_hosts == 1):
            continue
        for size, repeats in ((4 * group.size(), _SMALL_REPEATS), (_BYTES, _REPEATS)):
            value = torch.zeros(size // 4 // group.size() * group.size(), device=device)
            seconds, core = _time(partial(_COLLECTIVES[kind], group, value), repeats, mesh, device)
            uplink, inside = bytes_sent(kind, value.nbytes, mesh.topology, between_hosts=is_wide)
            rank_bytes = uplink / mesh.topology.ranks_per_tower + inside
            timings.append(_Timing(uplink if is_wide else inside, rank_bytes, seconds, core))
    return found


def bytes_sent(kind: CollectiveKind, size: int, topology: TowerTopology, *, between_hosts: bool) -> tuple[float, float]:
    """Returns the bytes that a host sends to others, and a rank to others of its host; of a reduction those of a ring.

    Args:
        kind: of the collective.
        size: bytes of the tensor of each rank.
        topology: of the job; a tower is a host.
        between_hosts: False for a collective of each host by itself.

    Example:
        >>> topology = TowerTopology(num_towers=2, ranks_per_tower=2)
        >>> [bytes_sent(kind, 4, topology, between_hosts=True) for kind in ("all_to_all", "exchange", "all_reduce")]
        [(4.0, 1.0), (4.0, 0.0), (6.0, 3.0)]
    """
    hosts, ranks, world = topology.num_hosts, topology.ranks_per_tower, topology.world_size
    if not between_hosts:
        return 0.0, size * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)
    if kind == "exchange":
        return size * ranks * (hosts - 1) / hosts, 0.0
    if kind == "all_reduce":
        return 2 * size * (world - 1) / world, 2 * size * (world - 1) / world * (ranks - 1) / ranks
    return size * ranks * (world - ranks) / world, size * (ranks - 1) / world


def _time(work: Callable[[], Any], repeats: int, mesh: TowerMesh, device: torch.device) -> tuple[float, float]:
    """Seconds of the slowest rank, the median over repetitions; and of the cores of a rank in one, the mean."""
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
    return statistics.median(slowest), statistics.mean(core for _, core in everyone)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _rates(across: list[_Timing], within: list[_Timing], cores: float) -> CollectiveRates:
    """Rates by what many bytes take longer than next to none, whose time is the latency."""
    timings = across or within
    if not timings:
        return CollectiveRates(latency_s=0.0, uplink_bytes_per_s=_UNUSED, host_bytes_per_s=_UNUSED)
    first, last = timings[0], timings[-1]
    more = max(last.core_s - first.core_s, 0.0)
    return CollectiveRates(
        latency_s=first.seconds,
        # Where there are no links of a kind, those of the other kind are taken.
        uplink_bytes_per_s=rate(timings),
        host_bytes_per_s=rate(within or across),
        core_s_per_byte=more / cores / last.rank_bytes if cores else 0.0,
    )


def rate(timings: list[_Timing]) -> float:
    """Returns the bytes per second by which the last timing is longer than the first.

    Raises:
        InputError: it is no longer.
    """
    small, large = timings[0], timings[-1]
    if large.seconds <= small.seconds:
        raise InputError(
            f"A collective of {large.sent:,.0f} bytes took {1e3 * large.seconds:.3f} ms, of {small.sent:,.0f} bytes "
            f"{1e3 * small.seconds:.3f} ms, which tells no rate. Measure on machines that do nothing else."
        )
    return (large.sent - small.sent) / (large.seconds - small.seconds)


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
    return units / _time(work, _REPEATS, mesh, device)[0]


def run_bench_comms(out: Path) -> Cluster | None:
    """Measures the job and writes ``out``; returns the result on its first rank, None on the others.

    Raises:
        InputError: it was not started by torchrun, hosts have unequal numbers of ranks, or ``out`` cannot be written.
    """
    place = {key: os.environ.get(key, "") for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    if not all(value.isdecimal() for value in place.values()):
        raise InputError(
            "dmt bench-comms measures the job that it is part of, and RANK or WORLD_SIZE says of none. Start it on "
            "every host: torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 --no-python dmt bench-comms"
        )
    rank, ranks_per_host = int(place["RANK"]), int(place["LOCAL_WORLD_SIZE"])
    if int(place["WORLD_SIZE"]) % ranks_per_host:
        raise InputError(
            f"The job has {place['WORLD_SIZE']} ranks, but {ranks_per_host} on this host: hosts must have equally many."
        )
    if rank == 0:
        check_output_files({"--out": (out, "cluster")}, [])
    kind = device_type("auto")
    here = take_device(kind, int(place["LOCAL_RANK"]))
    end_with(os.getppid())
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group(backend(kind))
    try:
        cluster = measure_cluster(out.stem, ranks_per_host, here)
        # A rank that leaves while a peer still sends can abort it.
        dist.barrier()
    finally:
        dist.destroy_process_group()
    if rank != 0:
        return None
    save_cluster(cluster, out)
    return cluster


def print_measured(cluster: Cluster, out: Path) -> None:
    """Prints the rates, and what to do with them."""
    console, rows = table_console(markup=False), []
    for kind in get_args(CollectiveKind):
        rates = cluster.rates(kind)
        speeds = [f"{human_bytes(speed)}/s" for speed in (rates.uplink_bytes_per_s, rates.host_bytes_per_s)]
        rows.append([kind, f"{1e3 * rates.latency_s:,.3f} ms", *speeds])
    title = f"{cluster.hosts} hosts x {cluster.ranks_per_host} ranks"
    console.print(make_table(["", "latency", "host to others", "rank inside its host"], rows, title=title))
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
