"""`replay`: plays back the collectives of a recorded step without its model (PARAM's idea; Neo, appendix A).

A step is recorded by a `TrafficMeter` with ``records=True``, or by a run with ``train.record_step``. Each rank starts
what it started in the step, in that order, over the same groups and with tensors of the same sizes. It waits where the
step's program waited at the call; all else may overlap and is waited for at the end, as nothing is computed meanwhile.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from dmt.collectives import gather_objects
from dmt.errors import InputError
from dmt.files import from_record, read_record
from dmt.traffic import TrafficMeter

__all__ = ["Call", "Replayed", "Sizes", "Step", "check_step", "read_step", "replay"]

_REMEDY = "Record a step again, with train.record_step=true."
_REPEATS = 10

Kind = Literal["ids", "forward", "backward", "dense"]
_KINDS: tuple[Kind, ...] = ("ids", "forward", "backward", "dense")
_Name = Literal[
    "alltoall_base_", "alltoall_", "send", "recv_", "allreduce_", "allreduce_coalesced_", "broadcast_", "allgather_",
    "_allgather_base_", "reduce_scatter_", "_reduce_scatter_base_",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A tensor without its numbers."""

    shape: list[int]
    dtype: Literal["float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise ValueError(f"shape {self.shape} has a negative size")


@dataclass(frozen=True, kw_only=True)
class Call:
    """A collective that a rank started."""

    name: _Name
    kind: Kind
    """The name under which `TrafficMeter` books it."""
    group: int
    """Index of its group."""
    tensors: list[Sizes | list[Sizes] | list[list[Sizes]]]
    """Sizes of the tensors that arrive, and of those that are sent; one where they are the same."""
    splits: list[list[int]]
    """Rows of an all-to-all from and for each rank of the group; none where all are equal."""
    peer: int
    """Group rank of a message's other end, or of the root."""
    tag: int
    is_waited_for: bool
    """True if the program waited for it at once."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A recorded step."""

    format: int
    hosts: list[int]
    """Host of each rank."""
    groups: list[list[int]]
    """Ranks of each group."""
    ranks: list[list[Call]]
    """The collectives that each rank started, in its order."""

    def __post_init__(self) -> None:
        world = len(self.hosts)
        if not world or len(self.ranks) != world:
            raise ValueError(f"it has {world} hosts of ranks, but calls of {len(self.ranks)} ranks")
        for group in self.groups:
            if not group or len(set(group)) < len(group) or not all(0 <= rank < world for rank in group):
                raise ValueError(f"group {group} is no group of {world} ranks")
        for rank, calls in enumerate(self.ranks):
            for number, call in enumerate(calls):
                if not 0 <= call.group < len(self.groups) or rank not in self.groups[call.group]:
                    raise ValueError(f"call {number} of rank {rank} is over group {call.group}, which it is not in")
                size = len(self.groups[call.group])
                if not 0 <= call.peer < size or any(len(rows) not in (0, size) for rows in call.splits):
                    raise ValueError(f"call {number} of rank {rank} does not fit its group of {size} ranks")


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """A kind of collectives, or all, played back alone."""

    kind: str
    calls: int
    """Number of collectives of the first rank."""
    across: int
    """Bytes between hosts, of all ranks."""
    inside: int
    """Bytes inside hosts."""
    seconds: float
    """Median over repetitions, of the slowest rank each."""
    least: float
    most: float


def read_step(path: Path) -> Step:
    """Reads a recorded step.

    Raises:
        InputError: it cannot be read, or is no recorded step; the message has the place in it.
    """
    record = read_record(path, what="Recorded step", version=1, remedy=_REMEDY)
    return from_record(Step, record, place=f"Recorded step {path}", remedy=_REMEDY)


def check_step(step: Step, path: Path, world_size: int, ranks_per_host: int) -> None:
    """Raises `InputError` if a job of these sizes is not one that the step can be played back in."""
    hosts = [rank // ranks_per_host for rank in range(world_size)]
    if len(step.hosts) != world_size:
        raise InputError(
            f"--replay {path} is a step of {len(step.hosts)} ranks, but the job has {world_size}. Start as many, with "
            "--nnodes and --nproc-per-node."
        )
    if world_size != ranks_per_host and step.hosts != hosts:
        raise InputError(
            f"--replay {path} is a step of ranks on hosts {step.hosts}, but those of the job are on {hosts}, so that "
            "other links would carry it. Start as many ranks on each host, or all on one machine."
        )


def replay(
    step: Step, device: torch.device, *, repeats: int = _REPEATS, meter: TrafficMeter | None = None
) -> list[Replayed]:
    """Plays a step back, whole and each kind by itself; collective, every rank gets the same result.

    Args:
        step: for the ranks of this job (`check_step`).
        device: of this rank.
        repeats: times that are measured, after one that counts bytes.
        meter: counts the first, whole one; by default one of its own, with the hosts of the step.

    Example::

        found = replay(read_step(Path("collectives.json")), torch.device("cpu"))
    """
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None, "the job has begun"
    # Every rank makes all groups, in one order.
    groups = [dist.new_group(ranks) for ranks in step.groups]
    calls = [(call, _tensors(call, device)) for call in step.ranks[rank]]
    results = []
    for kind in ("all", *_KINDS):
        own = [(call, tensors) for call, tensors in calls if kind in ("all", call.kind)]
        everyone = [len([call for call in theirs if kind in ("all", call.kind)]) for theirs in step.ranks]
        if not any(everyone):
            continue
        used = meter if meter is not None and kind == "all" else TrafficMeter(host_of=step.hosts.__getitem__)
        with used:
            _play(own, groups, used.phase)
        counted = used.total(world)
        spans = []
        for _ in range(repeats):
            _settle(device)
            dist.barrier()
            begin = time.perf_counter()
            _play(own, groups)
            _settle(device)
            spans.append(time.perf_counter() - begin)
        slowest = [max(times) for times in zip(*gather_objects(spans, world), strict=True)]
        results.append(
            Replayed(
                kind=kind,
                calls=everyone[0],
                across=counted.across,
                inside=counted.inside,
                seconds=statistics.median(slowest),
                least=min(slowest),
                most=max(slowest),
            )
        )
    return results


def _play(
    calls: Sequence[tuple[Call, list[Any]]],
    groups: Sequence[dist.ProcessGroup],
    phase: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> None:
    begun = []
    for call, tensors in calls:
        with phase("backward" if call.kind == "backward" else "forward"):
            work = getattr(groups[call.group], call.name.removesuffix("_"))(*tensors, *_options(call))
        if call.is_waited_for:
            work.wait()
        else:
            begun.append(work)
    for work in begun:
        work.wait()


def _options(call: Call) -> Iterator[Any]:
    """Yields the arguments after the tensors. All reductions are sums, which send as much as others."""
    if call.name == "broadcast_":
        options = dist.BroadcastOptions()
        options.rootRank = call.peer
        yield options
    elif call.name in ("send", "recv_"):
        yield from (call.peer, call.tag)
    else:
        yield from call.splits


def _tensors(call: Call, device: torch.device) -> list[Any]:
    return [_made(sizes, device) for sizes in call.tensors]


def _made(sizes: Any, device: torch.device) -> Any:
    if isinstance(sizes, Sizes):
        return torch.zeros(sizes.shape, dtype=getattr(torch, sizes.dtype), device=device)
    return [_made(part, device) for part in sizes]


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
