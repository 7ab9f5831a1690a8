"""Small wrappers around PyTorch's collectives that take the process group as an explicit argument."""

from __future__ import annotations

import hashlib
import pickle
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dmt.errors import InputError
from dmt.formatting import shorten

__all__ = [
    "PendingExchange",
    "RankError",
    "all_to_all_evenly",
    "broadcast_tensor",
    "by_path",
    "check_agreement",
    "from_rank",
    "gather_objects",
    "gather_on_first",
    "gather_parts",
    "max_over_ranks",
    "profiler_range",
    "reason_of",
    "run_on_all_or_raise",
    "start_exchange",
    "start_sum",
    "start_sum_over_hosts",
    "start_together",
    "sum_over_ranks",
]

Value = TypeVar("Value")


@contextmanager
def profiler_range(step: str, *, backward: bool = False) -> Iterator[None]:
    """Context manager or decorator that labels a step in profiles: ``## dmt:<step> ##`` or ``## dmt:<step>:bwd ##``."""
    # With record_function itself as the decorator, all threads would share one object.
    with torch.profiler.record_function(f"## dmt:{step}{':bwd' if backward else ''} ##"):
        yield


def broadcast_tensor(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Copies the tensor of the group's first rank, of any shape and dtype, to its other ranks, in place."""
    dist.broadcast(tensor, group=group, group_src=0)


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns the ``value`` of every rank of the group, a small picklable object, by group rank; collective."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gather_on_first(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns the picklable ``value`` of every rank on the group's first rank, an empty list on others; collective."""
    values: list[Any] = [None] * group.size() if group.rank() == 0 else []
    dist.gather_object(value, values or None, group=group, group_dst=0)
    return values


def check_agreement(caller: str, arguments: Mapping[str, Any], group: dist.ProcessGroup) -> None:
    """Checks that all ranks of the group have the same arguments; collective.

    Args:
        caller: name of the function or class that takes the arguments, for the message.
        arguments: values by argument name, small and picklable; compared by their ``repr``, mappings entry by entry.
        group: the ranks.

    Raises:
        InputError: on every rank; names the first argument that differs, two of its values and ranks that have them.
    """
    given = {"the call": caller} | by_path(arguments)
    # Digests first: the arguments themselves, of thousands of tables, are gathered only if they differ.
    if len(set(gather_objects(hashlib.sha256(repr(given).encode()).digest(), group))) == 1:
        return
    everyone = gather_objects(given, group)
    ranks = dist.get_process_group_ranks(group)
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        values = [theirs.get(name, "absent") for theirs in everyone]
        if others := [value for value in values if value != values[0]]:
            where = shorten([f"rank {r}" for r, value in zip(ranks, values, strict=True) if value == others[0]], ", ")
            raise InputError(
                f"{caller}: {name} is {values[0]} on rank {ranks[0]}, but {others[0]} on {where}. Give every rank "
                "the same value."
            )


def by_path(arguments: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns the values in nested mappings by dotted path (``a.b``), and those in lists of over 8 items (``a.0``)."""
    paths: dict[str, Any] = {}
    for name, value in arguments.items():
        value = dict(enumerate(value)) if isinstance(value, list | tuple) and len(value) > 8 else value
        inner = by_path(value) if isinstance(value, Mapping) else {}
        paths |= {f"{name}.{path}": value for path, value in inner.items()} or {name: value}
    return paths


def start_sum(value: Tensor, group: dist.ProcessGroup) -> Any:
    """Starts the in-place sum of ``value``, of any shape, over the group; ``wait()`` on the result ends it."""
    return dist.all_reduce(value, group=group, async_op=True)


class PendingExchange:
    """Handle of an exchange begun by `start_exchange`; keeps the exchanged tensors alive until `wait` returns."""

    def __init__(self, works: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        self._works = works
        self._tensors = tensors

    @property
    def is_done(self) -> bool:
        """True once `wait` has returned."""
        return not self._tensors

    def wait(self) -> None:
        """Waits until all tensors are sent and received; on a GPU with NCCL, only the current stream waits."""
        for work in self._works:
            work.wait()
        for tensor in self._tensors:
            if tensor.is_cuda:
                # The exchange may have started on another stream, which could reuse the memory too early.
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        self._works, self._tensors = (), ()


def start_exchange(
    sent: Sequence[Tensor], sizes: Sequence[int], group: dist.ProcessGroup, *, tag: int = 0
) -> tuple[PendingExchange, list[Tensor]]:
    """Starts sending one tensor to each rank of the group, and receiving one from each.

    On the CPU each tensor is one message, because gloo's all-to-all sends and receives in turns. On a GPU the exchange
    is one all-to-all, even on a rank with nothing to send: NCCL needs all ranks in a group's first exchange.

    All ranks must start the exchanges of one tag in the same order, and keep each handle until they have waited on it.

    Args:
        sent: a contiguous 1-D tensor for each group rank, all of one dtype; must not change until the exchange ends.
        sizes: number of elements that arrive from each group rank.
        group: the ranks.
        tag: tag of the messages; unused on a GPU.

    Returns:
        The handle, and a tensor [size] from each group rank, filled after ``wait()``; the rank's own is ``sent[rank]``.
    """
    rank = group.rank()
    if uses_all_to_all(sent[rank]):
        counts = [len(part) if other != rank else 0 for other, part in enumerate(sent)]
        expected = [size if other != rank else 0 for other, size in enumerate(sizes)]
        inputs = torch.cat([part for other, part in enumerate(sent) if other != rank])
        outputs = inputs.new_empty(sum(expected))
        work = dist.all_to_all_single(outputs, inputs, expected, counts, group=group, async_op=True)
        arriving = list(outputs.split(expected))
        arriving[rank] = sent[rank]
        return PendingExchange([work], [inputs, outputs, sent[rank]]), arriving
    arriving = [sent[rank] if other == rank else sent[rank].new_empty(size) for other, size in enumerate(sizes)]
    # Receives first: gloo sends only once the receiver has asked.
    calls = [
        dist.P2POp(call, part, group=group, group_peer=other, tag=tag)
        for call, parts in ((dist.irecv, arriving), (dist.isend, sent))
        for other, part in enumerate(parts)
        if other != rank and part.numel()
    ]
    return PendingExchange(dist.batch_isend_irecv(calls) if calls else [], [*sent, *arriving]), arriving


def all_to_all_evenly(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Cuts ``value`` [n] evenly and sends part i to group rank i; returns the parts received [n], by group rank."""
    received = torch.empty_like(value)
    dist.all_to_all_single(received, value, group=group)
    return received


def uses_all_to_all(tensor: Tensor) -> bool:
    """Returns whether `start_exchange` uses one all-to-all on the device of ``tensor``, not one message per rank."""
    return tensor.device.type != "cpu"


def gather_parts(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenates the parts of all ranks, of equal length: [n] -> [n * group size], the same on every rank."""
    if group.size() == 1:
        return part
    whole = part.new_empty(part.numel() * group.size())
    dist.all_gather_single(whole, part, group=group)
    return whole


def max_over_ranks(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Replaces each element of ``value``, of any shape, by its maximum over the group, in place; returns ``value``."""
    if group.size() > 1:
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return value


def start_sum_over_hosts(
    value: Tensor, inside: dist.ProcessGroup, across: dist.ProcessGroup, *, dtype: torch.dtype | None = None
) -> Callable[[], Tensor]:
    """Starts the sum of ``value`` [n] over all ranks of all hosts: first inside each host, then between hosts.

    ``inside`` has the ranks of this host, ``across`` those in this rank's position on every host. Hosts send sums in
    ``dtype``, by default that of ``value``. Returns a function that waits and returns the sum [n] in ``value``'s dtype.
    """
    part = nn.functional.pad(value, (0, -value.numel() % inside.size()))
    if inside.size() > 1:
        sums = part.new_empty(part.numel() // inside.size())
        dist.reduce_scatter_single(sums, part, group=inside)
        part = sums
    # Copied for a rank alone on its host, which would otherwise sum into the caller's tensor.
    part = part.to(dtype or value.dtype, copy=inside.size() == 1)
    work = start_sum(part, across)

    def end() -> Tensor:
        work.wait()
        return gather_parts(part.to(value.dtype), inside)[: value.numel()]

    return end


def start_together(tensors: Sequence[Tensor], group: dist.ProcessGroup, *, mean: bool) -> Any:
    """Starts the in-place mean or sum of tensors of one dtype over the group, in one collective; ``wait()`` ends it."""
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM)
    return group.allreduce_coalesced(list(tensors), options)


def sum_over_ranks(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the sum of ``value``, of any shape, over the group, on every rank; does not change ``value``."""
    total = value.detach().clone().contiguous()
    dist.all_reduce(total, group=group)
    return total


class RankError(RuntimeError):
    """Work failed on a rank of the group, perhaps not this one; the message names the rank and the reason."""


def run_on_all_or_raise(work: Callable[[], Value], group: dist.ProcessGroup) -> list[Value]:
    """Calls ``work`` on every rank of a group; either all ranks return all results, or all raise. Collective.

    Returns the results by group rank. Results are pickled and sent to every rank, so they should be small.

    Raises:
        InputError: the lowest rank that failed raised an `InputError`; all ranks raise it with that rank's message,
            after its number and host unless it is the first of the group.
        RankError: the lowest rank that failed raised another exception, or its result cannot be pickled.
    """
    result, failed, reason, is_input = b"", None, None, False
    try:
        # Pickled in the `try`: the other ranks would wait for a rank whose result cannot be pickled.
        result = pickle.dumps(work())
    except Exception as error:
        failed, reason, is_input = error, reason_of(error), isinstance(error, InputError)
        if is_input and group.rank():
            # Others may see no such fault: a file may be absent on one host only.
            reason = from_rank(dist.get_rank(), reason)
    answers = gather_objects((reason, is_input, result), group)
    for rank, (reason, is_input, _) in zip(dist.get_process_group_ranks(group), answers, strict=True):
        if reason is not None:
            raise (InputError(reason) if is_input else RankError(f"rank {rank}: {reason}")) from failed
    return [pickle.loads(answer) for *_, answer in answers]


def from_rank(rank: int, text: str) -> str:
    """Returns a message of this process, which is ``rank``, preceded by the rank and the name of its host."""
    return f"rank {rank} on {socket.gethostname()}: {text}"


def reason_of(error: BaseException) -> str:
    """Returns an error's message, preceded by the name of its type unless it is an `InputError` or `RankError`."""
    return str(error) if isinstance(error, InputError | RankError) else f"{type(error).__name__}: {error}"
