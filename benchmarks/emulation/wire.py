"""Speed of a bare exchange over an emulated wire: bytes by the counters and seconds, against bytes / rate.

Each exchange is made in two ways. ``receives first`` announces every receive to its sender before anything is sent; it
shows the wire. ``all_to_all_single`` is what trainers call: Gloo sends to a rank before it announces the receive from
it, so where the other rank is a moment ahead, the announcement waits behind the data and the two directions follow
one another instead of going at once. It takes 1 to 2 times as long as the wire needs, by chance, on any network.
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

__all__ = ["PATTERNS", "WireCheck", "check_table", "measure_wire", "sends", "wire_checks"]

PATTERNS = ("all-to-all", "pairs", "one flow", "two flows")
"""Every rank to every rank; each rank with the ranks of its place on the other hosts; rank 0 of host 0 to rank 0 of
host 1; ranks 0 and 1 of host 0, each to its counterpart on host 1."""


@dataclass(frozen=True, kw_only=True)
class WireCheck:
    """One pattern of exchange on the emulated wire, against what the rate allows."""

    pattern: str
    """Who sends to whom, one of `PATTERNS`."""
    mbit_per_s: float | None
    """Rate of every uplink; None for no limit."""
    bytes_per_rank: int
    """Bytes that a sending rank gives to all ranks together, itself included."""
    sent_bytes: list[int]
    """Per exchange by the counter of each host's uplink, with headers and acknowledgements."""
    needed_bytes: list[int]
    """Bytes that each host has for other hosts."""
    wire_seconds: float | None
    """The most that a host sends or receives, over the rate."""
    seconds: float
    """Median from the first rank's start to the last rank's end, receives announced first."""
    ratio: float | None
    """Seconds / wire seconds."""
    all_seconds: list[float]
    """Seconds of every exchange."""
    all_to_all_seconds: float
    """Median of ``all_to_all_single``."""
    all_to_all_ratio: float | None
    """That / wire seconds."""
    all_all_to_all_seconds: list[float]
    """Seconds of every ``all_to_all_single``."""
    header_overhead: float
    """Sent / needed bytes of the host that has most to send, less 1."""
    fairness: float
    """Seconds of the receiving rank that is done first / of the last; median, receives announced first."""


def sends(pattern: str, num_hosts: int, ranks_per_host: int, bytes_per_rank: int) -> list[list[int]]:
    """Bytes that each rank (row) sends to each rank (column) in one exchange of a pattern of `PATTERNS`.

    Example:
        >>> sends("pairs", 2, 2, 100)
        [[50, 0, 50, 0], [0, 50, 0, 50], [50, 0, 50, 0], [0, 50, 0, 50]]
    """
    assert pattern in PATTERNS, f"unknown pattern {pattern!r}"
    world = num_hosts * ranks_per_host
    flows = {"one flow": 1, "two flows": 2}.get(pattern, world)
    rows = [[0] * world for _ in range(world)]
    for source in range(world):
        for target in range(world):
            same_place = source % ranks_per_host == target % ranks_per_host
            if pattern == "all-to-all":
                rows[source][target] = bytes_per_rank // world
            elif pattern == "pairs" and same_place:
                rows[source][target] = bytes_per_rank // num_hosts
            elif flows <= 2 and same_place and source < min(flows, ranks_per_host) and target // ranks_per_host == 1:
                rows[source][target] = bytes_per_rank
    return rows


def measure_wire(
    hosts: EmulatedHosts,
    ranks_per_host: int,
    mbit_per_s: float | None,
    *,
    pattern: str = "all-to-all",
    bytes_per_rank: int = 25_000_000,
    exchanges: int = 7,
) -> WireCheck:
    """Sets the rate and times a bare exchange over all ranks, in both ways.

    Args:
        hosts: where it runs.
        ranks_per_host: ranks on every host.
        mbit_per_s: rate of every uplink from here on; None for no limit.
        pattern: who sends to whom, one of `PATTERNS`.
        bytes_per_rank: what a rank that sends gives to all ranks together, itself included.
        exchanges: timed ones of each way, after one that is not.
    """
    hosts.set_rate(mbit_per_s)
    matrix = sends(pattern, hosts.num_hosts, ranks_per_host, bytes_per_rank)
    needed, received = _across(matrix, ranks_per_host)
    wire = None if mbit_per_s is None else max(*needed, *received) * 8 / (mbit_per_s * 1e6)
    with tempfile.TemporaryDirectory(prefix="dmt-wire-") as folder:
        Path(folder, "spec.json").write_text(json.dumps({"sends": matrix, "exchanges": exchanges}))
        # Twice the wire's seconds and half as much again, for two ways; no limit counts as a second.
        timeout = 60 + 2 * 3 * (exchanges + 1) * (wire or 1.0)
        hosts.torchrun(["-m", "benchmarks.emulation.wire", folder], ranks_per_host=ranks_per_host, timeout=timeout)
        ranks = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(len(matrix))]
    first, library = _seconds(ranks, "receives first"), _seconds(ranks, "all_to_all_single")
    sent = [round(rank["sent_bytes"] / exchanges) for rank in ranks[::ranks_per_host]]
    most = max(range(len(needed)), key=needed.__getitem__)
    return WireCheck(
        pattern=pattern,
        mbit_per_s=mbit_per_s,
        bytes_per_rank=bytes_per_rank,
        sent_bytes=sent,
        needed_bytes=needed,
        wire_seconds=wire,
        seconds=statistics.median(first),
        ratio=None if wire is None else statistics.median(first) / wire,
        all_seconds=first,
        all_to_all_seconds=statistics.median(library),
        all_to_all_ratio=None if wire is None else statistics.median(library) / wire,
        all_all_to_all_seconds=library,
        header_overhead=sent[most] / needed[most] - 1,
        fairness=_fairness(ranks, [any(row[rank] for row in matrix) for rank in range(len(matrix))]),
    )


def wire_checks(
    hosts: EmulatedHosts, ranks_per_host: int, mbit_per_s: float | None, *, bytes_per_rank: int = 25_000_000
) -> list[WireCheck]:
    """`measure_wire` of every pattern."""
    return [
        measure_wire(hosts, ranks_per_host, mbit_per_s, pattern=pattern, bytes_per_rank=bytes_per_rank)
        for pattern in PATTERNS
    ]


def check_table(checks: Sequence[WireCheck]) -> str:
    """The checks as lines of text."""
    lines = [
        f"{'':<12}{'MB across':>10}{'headers':>9}{'bytes/rate':>11}"
        f"{'receives first':>16}{'ratio':>7}{'fair':>6}{'all_to_all_single':>19}{'ratio':>7}{'least':>7}{'most':>7}"
    ]
    for check in checks:
        library = check.all_all_to_all_seconds
        lines.append(
            f"{check.pattern:<12}{max(check.needed_bytes) / 1e6:>10.2f}{check.header_overhead:>9.2%}"
            f"{_figure(check.wire_seconds, 9)} s{check.seconds:>14.3f} s{_figure(check.ratio, 7)}{check.fairness:>6.2f}"
            f"{check.all_to_all_seconds:>17.3f} s{_figure(check.all_to_all_ratio, 7)}"
            f"{min(library):>7.3f}{max(library):>7.3f}"
        )
    return "\n".join(lines)


def _figure(value: float | None, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.3f}"


def _across(matrix: Sequence[Sequence[int]], ranks_per_host: int) -> tuple[list[int], list[int]]:
    """Bytes that each host sends to others, and that it receives from them."""
    num_hosts = len(matrix) // ranks_per_host
    sent, received = [0] * num_hosts, [0] * num_hosts
    for source, row in enumerate(matrix):
        for target, size in enumerate(row):
            if source // ranks_per_host != target // ranks_per_host:
                sent[source // ranks_per_host] += size
                received[target // ranks_per_host] += size
    return sent, received


def _seconds(ranks: Sequence[dict[str, Any]], way: str) -> list[float]:
    # The clock is the machine's, so one rank's time can be held against another's.
    spans = zip(*(rank[way] for rank in ranks), strict=True)
    return [max(end for _, end in exchange) - min(start for start, _ in exchange) for exchange in spans]


def _fairness(ranks: Sequence[dict[str, Any]], receives: Sequence[bool]) -> float:
    shares = []
    for exchange in zip(*(rank["receives first"] for rank in ranks), strict=True):
        begin = min(start for start, _ in exchange)
        seconds = [end - begin for (_, end), one in zip(exchange, receives, strict=True) if one]
        shares.append(min(seconds) / max(seconds))
    return statistics.median(shares)


def _receives_first(target: Tensor, source: Tensor, outputs: list[int], inputs: list[int]) -> None:
    import torch.distributed as dist

    rank = dist.get_rank()
    parts = list(zip(target.split(outputs), source.split(inputs), strict=True))
    parts[rank][0].copy_(parts[rank][1])
    pending = [dist.irecv(part, peer) for peer, (part, _) in enumerate(parts) if peer != rank and len(part)]
    pending += [dist.isend(part, peer) for peer, (_, part) in enumerate(parts) if peer != rank and len(part)]
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
    inputs, outputs = spec["sends"][rank], [row[rank] for row in spec["sends"]]
    source, target = torch.zeros(sum(inputs), dtype=torch.uint8), torch.zeros(sum(outputs), dtype=torch.uint8)
    ways: dict[str, Callable[..., Any]] = {
        "receives first": _receives_first,
        "all_to_all_single": dist.all_to_all_single,  # noqa: TID251
    }
    found: dict[str, Any] = {way: [] for way in ways} | {"sent_bytes": 0}
    for exchange in range(spec["exchanges"] + 1):
        for way, run in ways.items():
            dist.barrier()
            before = sent_bytes(uplink)
            # No neighbour sends before every rank has read its counter.
            dist.barrier()
            start = time.perf_counter()
            run(target, source, outputs, inputs)
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
