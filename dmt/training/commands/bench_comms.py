"""``dmt bench-comms``: measures the ranks and links of its torchrun job, and writes them as ``cluster.toml``.

Like PARAM (Neo, appendix A), it times the collectives of a training step over groups of 2 and more ranks (DMT, section
2.3.1), with few bytes and with many: the time with few is the latency, and the difference gives the rate.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn

from dmt.collectives import all_to_all_evenly, gather_objects, start_exchange, start_sum
from dmt.errors import InputError
from dmt.formatting import human_bytes
from dmt.plan.topology import TowerTopology
from dmt.simulator.cluster import Cluster, CollectiveKind, CollectiveRates, save_cluster
from dmt.simulator.work import operators_of
from dmt.sptt.mesh import TowerMesh
from dmt.training.commands import Shown
from dmt.training.config import TopologyConfig, TrainingConfig
from dmt.training.device import compare_hosts, current_device, device_type, process_group, this_machine
from dmt.training.metrics import settled_time

__all__ = ["bytes_sent", "cut", "measure_cluster", "run_bench_comms", "shapes_of"]

_REPEATS = 7
_BYTES = 16_000_000  # of a rank, in the larger of the two collectives that are timed
_WIDTH, _SAMPLES = 1024, 2048  # of the layers that are timed
_LAYERS = 32  # tiny layers, whose time is that of starting their operators
_ROWS, _COLUMNS, _LOOKUPS = 200_000, 128, 65_536
_MOVED = 64_000_000  # bytes, more than caches hold
_UNUSED = 1e12  # bytes per second, for links that a job of one rank never uses

Shape = tuple[int, int]
"""Number of hosts in a group, and number of its ranks on each host."""


class _Timing(NamedTuple):
    """The time of work that all ranks do at once."""

    seconds: float
    """Seconds of the slowest rank; median over repetitions."""
    core_s: float
    """CPU seconds that a rank used on all cores; mean over ranks and repetitions."""


def measure_cluster(name: str, mesh: TowerMesh, device: torch.device) -> Cluster:
    """Measures a job's ranks and links; returns a `Cluster` called ``name``, the same on all ranks. Collective.

    Each tower of the mesh must be a host, so that peers are one rank of each host.

    Raises:
        InputError: the ranks of a machine are not those of a host, or a large message took no longer than a small one,
            so that no rate can be computed.
    """
    topology = mesh.topology
    if problem := compare_hosts(topology, gather_objects(this_machine(), mesh.global_group)):
        raise InputError(problem)
    groups = {shape: mesh.new_group(cut(topology, *shape)) for shape in shapes_of(topology)}
    layers = _layers(device, 2, _WIDTH, _SAMPLES)
    small_layers, operators = _layers(device, _LAYERS, 8, 8), operators_of(_layers(torch.device("cpu"), _LAYERS, 8, 8))
    computing = _time(layers, mesh)
    # Cores per rank while all ranks work: below 1 if ranks share cores. On a GPU, a core only waits, in a loop that
    # would count as work.
    cores = 0.0 if device.type == "cuda" else computing.core_s / computing.seconds
    source = torch.zeros(_MOVED // 4, device=device)
    target = torch.empty_like(source)
    return Cluster(
        name=name,
        hosts=topology.num_hosts,
        ranks_per_host=topology.host_size,
        # Two layers, each of one product forward and two backward.
        matmul_flops=2 * 3 * 2 * _SAMPLES * _WIDTH * _WIDTH / computing.seconds,
        memory_bytes_per_s=2 * source.nbytes / _time(lambda: target.copy_(source), mesh).seconds,
        lookup_bytes_per_s=3 * _LOOKUPS * _COLUMNS * 4 / _time(_lookups(device), mesh).seconds,
        operator_s=_time(small_layers, mesh).seconds / operators,
        all_to_all=_rates("all_to_all", groups, mesh, device, cores),
        exchange=_rates("exchange", groups, mesh, device, cores),
        all_reduce=_rates("all_reduce", groups, mesh, device, cores),
        source="measured by dmt bench-comms"
        + (", on one host: no uplink was measured" if topology.num_hosts == 1 else ""),
    )


def _layers(device: torch.device, number: int, width: int, samples: int) -> Callable[[], Any]:
    """Returns a function that runs a forward and backward pass of ``number`` layers."""
    pairs = [(nn.Linear(width, width), nn.ReLU()) for _ in range(number)]
    layers = nn.Sequential(*[module for pair in pairs for module in pair]).to(device)
    batch = torch.randn(samples, width, device=device, requires_grad=True)
    return lambda: layers(batch).sum().backward()


def _lookups(device: torch.device) -> Callable[[], Any]:
    """Returns a function that looks up rows and updates them (row-wise AdaGrad): two reads and one write of each."""
    on_gpu = device.type == "cuda"
    place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if on_gpu else (EmbeddingLocation.HOST, ComputeDevice.CPU)
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(_ROWS, _COLUMNS, *place)], optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.01, device=device
    )
    ids = torch.randint(_ROWS, (_LOOKUPS,), device=device)
    offsets = torch.arange(_LOOKUPS + 1, device=device)
    return lambda: tables(ids, offsets).sum().backward()


def _collective(kind: CollectiveKind, group: dist.ProcessGroup, value: Tensor) -> None:
    if kind == "all_to_all":
        all_to_all_evenly(value, group)
    elif kind == "all_reduce":
        start_sum(value, group).wait()
    else:
        parts = list(value.split(len(value) // group.size()))
        pending, _ = start_exchange(parts, [len(part) for part in parts], group)
        pending.wait()


def _rates(
    kind: CollectiveKind, groups: Mapping[Shape, dist.ProcessGroup], mesh: TowerMesh, device: torch.device, cores: float
) -> CollectiveRates:
    """Measures rates between hosts and inside them; a job without links of one kind gets the rate of the other kind.

    Latency and work of the cores are measured on the widest group: of peers for an exchange, else of all ranks.
    """
    topology = mesh.topology
    widest = (topology.num_hosts, 1 if kind == "exchange" and topology.num_hosts > 1 else topology.host_size)
    latency, core_s_per_byte = 0.0, 0.0
    across: dict[int, float] = {}
    within: dict[int, float] = {}
    for shape, group in groups.items():
        numbers = [number // group.size() * group.size() for number in (group.size(), _BYTES // 4)]
        values = [torch.zeros(number, device=device) for number in numbers]
        few, many = (_time(partial(_collective, kind, group, value), mesh) for value in values)
        uplink, inside = bytes_sent(kind, values[1].nbytes - values[0].nbytes, topology, cut(topology, *shape))
        if many.seconds <= few.seconds:
            raise InputError(
                f"{kind}: {values[1].nbytes:,} bytes took {1e3 * many.seconds:.3f} ms, {values[0].nbytes:,} bytes "
                f"{1e3 * few.seconds:.3f} ms, so no rate can be computed. Measure on otherwise idle machines."
            )
        rates = across if uplink else within
        rates[group.size()] = (uplink or inside) / (many.seconds - few.seconds)
        if shape == widest:
            by_rank = uplink / topology.host_size + inside
            core_s_per_byte = max(many.core_s - few.core_s, 0.0) / cores / by_rank if cores else 0.0
            latency = few.seconds
    best_across, best_within = (max(rates.values(), default=None) for rates in (across, within))
    return CollectiveRates(
        latency_s=latency,
        uplink_bytes_per_s=best_across or best_within or _UNUSED,
        host_bytes_per_s=best_within or best_across or _UNUSED,
        core_s_per_byte=core_s_per_byte,
        uplink_by_ranks={ranks: rate / max(across.values()) for ranks, rate in across.items()},
        host_by_ranks={ranks: rate / max(within.values()) for ranks, rate in within.items()},
    )


def shapes_of(topology: TowerTopology) -> list[Shape]:
    """Returns the shapes of groups to measure: one rank on each of several hosts, or several on every host or on one.

    Example:
        >>> shapes_of(TowerTopology(num_towers=4, ranks_per_tower=2))
        [(2, 1), (4, 1), (4, 2), (1, 2)]
    """
    hosts, ranks = (
        [number for number in range(2, size + 1) if size % number == 0]
        for size in (topology.num_hosts, topology.host_size)
    )
    shapes = [*((number, 1) for number in hosts), *((topology.num_hosts, number) for number in ranks)]
    return list(dict.fromkeys([*shapes, *((1, number) for number in ranks)]))


def cut(topology: TowerTopology, hosts: int, ranks: int) -> list[list[int]]:
    """Divides the ranks of a job into groups: ``ranks`` neighboring ranks on each of ``hosts`` neighboring hosts.

    Example:
        >>> cut(TowerTopology(num_towers=2, ranks_per_tower=4), hosts=2, ranks=2)
        [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    places = np.arange(topology.world_size).reshape(-1, hosts, topology.host_size // ranks, ranks)
    groups: list[list[int]] = places.transpose(0, 2, 1, 3).reshape(-1, hosts * ranks).tolist()
    return groups


def bytes_sent(
    kind: CollectiveKind, size: int, topology: TowerTopology, groups: list[list[int]]
) -> tuple[float, float]:
    """Returns the bytes that a host sends to other hosts, and those that a rank sends inside its host.

    All ``groups`` run the collective at once, with ``size`` bytes on each rank; an all-reduce is a ring.

    Example:
        >>> topology = TowerTopology(num_towers=2, ranks_per_tower=2)
        >>> [bytes_sent(kind, 4, topology, topology.sharding_groups()) for kind in ("all_to_all", "all_reduce")]
        [(4.0, 1.0), (6.0, 3.0)]
    """
    number, world = len(groups[0]), topology.world_size
    is_ring = kind == "all_reduce"
    across = topology.ring_share_across_hosts(groups) if is_ring else topology.share_across_hosts(groups)
    total = (2 if is_ring else 1) * world * size * (number - 1) / number
    return total * across / topology.num_hosts, total * (1 - across) / world


def _time(work: Callable[[], Any], mesh: TowerMesh) -> _Timing:
    """Times work that all ranks do at once, each repetition after a barrier; collective."""
    work()  # the first call opens connections and touches memory
    spans, core = [], 0.0
    for _ in range(_REPEATS):
        settled_time()
        dist.barrier(mesh.global_group)
        begin, cpu = time.perf_counter(), time.process_time()
        work()
        end = settled_time()
        core += time.process_time() - cpu
        spans.append(end - begin)
    ranks = gather_objects((spans, core / _REPEATS), mesh.global_group)
    slowest = [max(times) for times in zip(*(spans for spans, _ in ranks), strict=True)]
    return _Timing(statistics.median(slowest), statistics.mean(core for _, core in ranks))


def run_bench_comms(out: Path) -> Shown | None:
    """Measures this job and writes the cluster file ``out``; returns what to print on rank 0, None on other ranks.

    Raises:
        InputError: torchrun did not start it, with as many ranks on each host; `process_group` or `measure_cluster`
            raises it; or ``out`` cannot be written.
    """
    keys = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if unset := [key for key in keys if not os.environ.get(key, "").isdecimal()]:
        raise InputError(
            f"dmt bench-comms measures its own torchrun job, but {unset[0]} is not set to a number. Start it on "
            "every host: torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
            "--no-python dmt bench-comms"
        )
    world_size, ranks_per_host = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    topology = TopologyConfig(num_towers=world_size // ranks_per_host, ranks_per_tower=ranks_per_host)
    with process_group(lambda: TrainingConfig(topology=topology)) as (config, mesh):
        cluster = measure_cluster(out.stem, mesh, current_device(device_type(config.train.device)))
    if mesh.rank != 0:
        return None
    save_cluster(cluster, out)
    return _show(cluster, out)


def _show(cluster: Cluster, out: Path) -> Shown:
    rows = []
    for kind in get_args(CollectiveKind):
        rates = cluster.rates(kind)
        links = ((rates.uplink_bytes_per_s, rates.uplink_by_ranks), (rates.host_bytes_per_s, rates.host_by_ranks))
        speeds = []
        for speed, shares in links:
            words = ", ".join(f"{ranks}: {share:.0%}" for ranks, share in shares.items())
            speeds.append(f"{human_bytes(speed)}/s ({words})" if shares else "not measured")
        rows.append([kind, f"{1e3 * rates.latency_s:,.3f} ms", *speeds])
    lines = [f"A rank computes {cluster.matmul_flops / 1e9:,.1f} GFLOP/s in matrix products; {out} has all rates."]
    if cluster.hosts == 1:
        lines.append("No link between hosts was measured: run it on two or more hosts before dmt what-if.")
    lines.append("In brackets: number of ranks in a group, and the share of the rate that such groups reach.")
    headers = ["", "latency", "host to others", "rank inside its host"]
    return Shown(cluster, headers, rows, f"{cluster.hosts} hosts x {cluster.ranks_per_host} ranks", range(1, 4), lines)
