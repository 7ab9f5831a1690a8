"""Speed of a bare all-to-all over an emulated wire: bytes by the counters and seconds, against bytes / rate.

It is made in two ways. ``receives first`` announces every receive to its sender before anything is sent; it shows the
wire. ``all_to_all_single`` is what trainers call: Gloo sends to a rank before it announces the receive from it, so
where the other rank is a moment ahead, the announcement waits behind the data and the two directions follow one another
instead of going at once. It takes 1 to 2 times as long as the wire needs, by chance, on any network.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.emulation.hosts import EmulatedHosts

__all__ = ["WireCheck", "measure_wire"]


@dataclass(frozen=True, kw_only=True)
class WireCheck:
    """A bare all-to-all on the emulated wire, against what the rate allows."""

    mbit_per_s: float | None
    """Rate of every uplink; None for no limit."""
    bytes_per_rank: int
    """Bytes that a rank gives to all ranks together, itself included."""
    sent_bytes: list[int]
    """Per exchange by the counter of each host's uplink, with headers and acknowledgements."""
    needed_bytes: int
    """Bytes that each host has for other hosts."""
    wire_seconds: float | None
    """Needed bytes over the rate."""
    seconds: float
    """Median from the first rank's start to the last rank's end, receives announced first."""
    ratio: float | None
    """Seconds / wire seconds."""
    all_to_all_seconds: float
    """Median of ``all_to_all_single``."""
    all_to_all_ratio: float | None
    """That / wire seconds."""
    header_overhead: float
    """Sent / needed bytes of the host that sent most, less 1."""


def measure_wire(
    hosts: EmulatedHosts, ranks_per_host: int, *, bytes_per_rank: int = 25_000_000, exchanges: int = 7
) -> WireCheck:
    """Times a bare all-to-all over all ranks, in both ways.

    Args:
        hosts: where it runs.
        ranks_per_host: ranks on every host.
        bytes_per_rank: what a rank gives to all ranks together, itself included.
        exchanges: timed ones of each way, after one that is not.
    """
    mbit_per_s, world = hosts.mbit_per_s, hosts.num_hosts * ranks_per_host
    needed = ranks_per_host * (world - ranks_per_host) * (bytes_per_rank // world)
    wire = None if mbit_per_s is None else needed * 8 / (mbit_per_s * 1e6)
    with tempfile.TemporaryDirectory(prefix="dmt-wire-") as folder:
        Path(folder, "spec.json").write_text(json.dumps({"block": bytes_per_rank // world, "exchanges": exchanges}))
        # Twice the wire's seconds and half as much again, for two ways; no limit counts as a second.
        timeout = 60 + 2 * 3 * (exchanges + 1) * (wire or 1.0)
        hosts.torchrun(["-m", "benchmarks.emulation.wire", folder], ranks_per_host=ranks_per_host, timeout=timeout)
        ranks = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(world)]
    first, library = (statistics.median(_seconds(ranks, way)) for way in ("receives first", "all_to_all_single"))
    sent = [round(rank["sent_bytes"] / exchanges) for rank in ranks[::ranks_per_host]]
    return WireCheck(
        mbit_per_s=mbit_per_s,
        bytes_per_rank=bytes_per_rank,
        sent_bytes=sent,
        needed_bytes=needed,
        wire_seconds=wire,
        seconds=first,
        ratio=None if wire is None else first / wire,
        all_to_all_seconds=library,
        all_to_all_ratio=None if wire is None else library / wire,
        header_overhead=max(sent) / needed - 1 if needed else 0.0,
    )


def _seconds(ranks: Sequence[dict[str, Any]], way: str) -> list[float]:
    # The clock is the machine's, so one rank's time can be compared with another's.
    spans = zip(*(rank[way] for rank in ranks), strict=True)
    return [max(end for _, end in exchange) - min(start for start, _ in exchange) for exchange in spans]


def _receives_first(target: Tensor, source: Tensor) -> None:
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    parts = list(zip(target.chunk(world), source.chunk(world), strict=True))
    parts[rank][0].copy_(parts[rank][1])
    pending = [dist.irecv(part, peer) for peer, (part, _) in enumerate(parts) if peer != rank]
    pending += [dist.isend(part, peer) for peer, (_, part) in enumerate(parts) if peer != rank]
    for request in pending:
        assert request is not None, "every rank is in the group"
        request.wait()


def _rank_main(folder: Path) -> None:
    """One rank's part of `measure_wire`."""
    import torch
    import torch.distributed as dist

    from benchmarks.emulation.hosts import sent_bytes

    spec = json.loads((folder / "spec.json").read_text())
    dist.init_process_group("gloo")
    rank, uplink = dist.get_rank(), os.environ["GLOO_SOCKET_IFNAME"]
    source, target = (torch.zeros(spec["block"] * dist.get_world_size(), dtype=torch.uint8) for _ in range(2))
    ways: dict[str, Callable[..., Any]] = {
        "receives first": _receives_first,
        "all_to_all_single": dist.all_to_all_single,  # noqa: TID251
    }
    found: dict[str, Any] = {way: [] for way in ways} | {"sent_bytes": 0}
    for exchange in range(spec["exchanges"] + 1):
        for way, run in ways.items():
            dist.barrier()
            before = sent_bytes(uplink)
            # No neighbor sends before every rank has read its counter.
            dist.barrier()
            start = time.perf_counter()
            run(target, source)
            end = time.perf_counter()
            dist.barrier()
            # The first one opens connections and pages memory in.
            if exchange > 0:
                found[way].append((start, end))
                found["sent_bytes"] += sent_bytes(uplink) - before if way == "receives first" else 0
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank_main(Path(sys.argv[1]))
