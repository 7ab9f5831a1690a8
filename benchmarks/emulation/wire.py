"""Measures a bare all-to-all over emulated links: bytes by the interfaces' counters, and seconds against bytes / rate.

It runs in two ways. ``receives first`` posts every receive before anything is sent, and so measures the link.
``all_to_all_single`` is what trainers call: gloo sends to a rank before it posts the receive from that rank. If the
other rank is slightly ahead, the notice of the receive waits behind the data, and the two directions take turns instead
of overlapping. By chance, this takes 1 to 2 times as long as the link needs, on any network.
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
    """Measurements of a bare all-to-all over emulated links."""

    mbit_per_s: float | None
    """Rate of every uplink in Mbit/s; None: no limit."""
    bytes_per_rank: int
    """Bytes that a rank sends to all ranks together, including itself."""
    sent_bytes: list[int]
    """Bytes per exchange by the counter of each host's uplink, including headers and acknowledgements."""
    needed_bytes: int
    """Bytes that each host must send to other hosts in an exchange."""
    wire_seconds: float | None
    """Seconds that ``needed_bytes`` take at the rate; None without a limit."""
    seconds: float
    """Seconds from the first rank's start to the last rank's end with receives posted first; median over exchanges."""
    ratio: float | None
    """``seconds`` divided by ``wire_seconds``."""
    all_to_all_seconds: float
    """Seconds of ``all_to_all_single``; median over exchanges."""
    all_to_all_ratio: float | None
    """``all_to_all_seconds`` divided by ``wire_seconds``."""
    header_overhead: float
    """Bytes beyond ``needed_bytes`` of the host that sent most, as a share of ``needed_bytes``."""


def measure_wire(
    hosts: EmulatedHosts, ranks_per_host: int, *, bytes_per_rank: int = 25_000_000, exchanges: int = 7
) -> WireCheck:
    """Times a bare all-to-all over all ranks in both ways.

    Args:
        hosts: the emulated hosts.
        ranks_per_host: number of ranks on every host.
        bytes_per_rank: bytes that a rank sends to all ranks together, including itself.
        exchanges: number of timed exchanges of each way, after one that is not timed.
    """
    mbit_per_s, world = hosts.mbit_per_s, hosts.num_hosts * ranks_per_host
    needed = ranks_per_host * (world - ranks_per_host) * (bytes_per_rank // world)
    wire = None if mbit_per_s is None else needed * 8 / (mbit_per_s * 1e6)
    with tempfile.TemporaryDirectory(prefix="dmt-wire-") as folder:
        Path(folder, "spec.json").write_text(json.dumps({"block": bytes_per_rank // world, "exchanges": exchanges}))
        # Three times the link's seconds, for each of two ways; without a limit, an exchange counts a second.
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
    # All ranks read the same clock, so their times can be compared.
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
    """Runs the exchanges of `measure_wire` on one rank, and writes its times and bytes into ``folder``."""
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
            # No rank sends before all ranks have read their counters.
            dist.barrier()
            start = time.perf_counter()
            run(target, source)
            end = time.perf_counter()
            dist.barrier()
            # The first exchange opens connections and touches memory.
            if exchange > 0:
                found[way].append((start, end))
                found["sent_bytes"] += sent_bytes(uplink) - before if way == "receives first" else 0
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank_main(Path(sys.argv[1]))
