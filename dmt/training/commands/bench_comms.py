"""``dmt bench-comms``: measures the job that torchrun has started it in, and writes ``cluster.toml``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from dmt.errors import InputError
from dmt.formatting import human_bytes
from dmt.simulator.cluster import Cluster, save_cluster
from dmt.testing.ranks import end_with
from dmt.training.bench_comms import MEGABYTES, Timing, measure_cluster
from dmt.training.commands.outputs import check_output_files
from dmt.training.console import make_table, table_console
from dmt.training.device import backend, device_type, take_device

__all__ = ["Measured", "print_measured", "run_bench_comms"]

_MOST_MEGABYTES = 4096.0


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
    name: str,
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
        cluster, timings = measure_cluster(name, ranks_per_host, here, megabytes=sorted(megabytes) or MEGABYTES)
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
