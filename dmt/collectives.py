"""Collectives of the library: small functions over PyTorch's, with the group as an explicit argument."""

from __future__ import annotations

import hashlib
import pickle
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
    "check_agreement",
    "gather_objects",
    "gather_on_first",
    "gather_parts",
    "max_over_ranks",
    "profiler_range",
    "reason_of",
    "run_on_all_or_raise",
    "start_exchange",
    "start_mean",
    "start_sum",
    "start_sum_over_hosts",
    "sum_over_ranks",
]

Value = TypeVar("Value")


@contextmanager
def profiler_range(step: str, *, backward: bool = False) -> Iterator[None]:
    """Names a step in profiles: ``## dmt:<step> ##`` or ``## dmt:<step>:bwd ##``; a context manager and decorator."""
    # As a decorator, record_function itself would be one object for the calls of all threads.
    with torch.profiler.record_function(f"## dmt:{step}{':bwd' if backward else ''} ##"):
        yield


def broadcast_tensor(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Copies the first rank's tensor to every rank of the group, in place."""
    dist.broadcast(tensor, group=group, group_src=0)


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Collects one small picklable object from every rank of the group, by group rank."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gather_on_first(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Collects one picklable object from every rank on the group's first, by group rank; others get an empty list."""
    values: list[Any] = [None] * group.size() if group.rank() == 0 else []
    dist.gather_object(value, values or None, group=group, group_dst=0)
    return values


def check_agreement(caller: str, arguments: Mapping[str, Any], group: dist.ProcessGroup) -> None:
    """Checks that all ranks of the group have the same arguments; collective.

    Args:
        caller: the function or class that has the arguments, for the message.
        arguments: by name, small and picklable; a mapping of values is compared value by value.
        group: the ranks.

    Raises:
        InputError: on every rank, with the argument, the ranks that differ from the first, and both values.
    """
    given = {"the call": caller} | _by_path(arguments)
    # Thousands of tables on hundreds of ranks are gathered only to say what differs.
    if len(set(gather_objects(hashlib.sha256(repr(given).encode()).digest(), group))) == 1:
        return
    everyone = gather_objects(given, group)
    ranks = dist.get_process_group_ranks(group)
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        values = [theirs.get(name, "absent") for theirs in everyone]
        others = [i for i, value in enumerate(values) if value != values[0]]
        if others:
            raise InputError(
                f"{caller}: {name} is {values[0]} on rank {ranks[0]}, but {values[others[0]]} on rank "
                f"{shorten([str(ranks[i]) for i in others], ', ')}. Give every rank the same."
            )


def _by_path(arguments: Mapping[str, Any]) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for name, value in arguments.items():
        inner = _by_path(value) if isinstance(value, Mapping) else {}
        paths |= {f"{name}.{path}": value for path, value in inner.items()} or {name: value}
    return paths


def start_sum(value: Tensor, group: dist.ProcessGroup) -> Any:
    """Starts the sum of a tensor over the group, in place; ``wait()`` on the result ends it."""
    return dist.all_reduce(value, group=group, async_op=True)


class PendingExchange:
    """Handle of an exchange that `start_exchange` began; keeps the tensors alive."""

    def __init__(self, works: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        self._works = works
        self._tensors = tensors

    @property
    def is_done(self) -> bool:
        """True once `wait` has returned."""
        return not self._tensors

    def wait(self) -> None:
        """Returns when everything has arrived and been sent; on a GPU the current stream waits instead."""
        for work in self._works:
            work.wait()
        for tensor in self._tensors:
            if tensor.is_cuda:
                # It may be waited for on another stream than it was begun on, where its memory would be free again.
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        self._works, self._tensors = (), ()


def start_exchange(
    sent: Sequence[Tensor], sizes: Sequence[int], group: dist.ProcessGroup, *, tag: int = 0
) -> tuple[PendingExchange, list[Tensor]]:
    """Starts to send a tensor to each rank of the group and to receive one from each.

    On the CPU each tensor is a message: gloo's all-to-all sends in turns. On GPUs it is one all-to-all, in which a rank
    that has nothing to send takes part too, as NCCL wants of the first exchange of a group.

    All ranks of the group must start their exchanges of one tag in one order, and keep the handle until they have
    waited for it.

    Args:
        sent: [n] tensors by group rank; contiguous, unchanged until the end.
        sizes: numbers that arrive from each rank, in the dtype that is sent.
        group: the ranks.
        tag: tag of the messages; an all-to-all has none.

    Returns:
        The handle, and what arrives by group rank, once it has been waited for; this rank's own is the tensor it sent.
    """
    rank = group.rank()
    if is_in_one(sent[rank]):
        counts = [len(part) if other != rank else 0 for other, part in enumerate(sent)]
        expected = [size if other != rank else 0 for other, size in enumerate(sizes)]
        inputs = torch.cat([part for other, part in enumerate(sent) if other != rank])
        outputs = inputs.new_empty(sum(expected))
        work = dist.all_to_all_single(outputs, inputs, expected, counts, group=group, async_op=True)
        arriving = list(outputs.split(expected))
        arriving[rank] = sent[rank]
        return PendingExchange([work], [inputs, outputs]), arriving
    arriving = [sent[rank] if other == rank else sent[rank].new_empty(size) for other, size in enumerate(sizes)]
    # Receives first: a gloo rank that is asked late sends late.
    calls = [
        dist.P2POp(call, part, group=group, group_peer=other, tag=tag)
        for call, parts in ((dist.irecv, arriving), (dist.isend, sent))
        for other, part in enumerate(parts)
        if other != rank and part.numel()
    ]
    return PendingExchange(dist.batch_isend_irecv(calls) if calls else [], [*sent, *arriving]), arriving


def all_to_all_evenly(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns what the ranks of the group sent to this one: [n] -> [n], of which each rank has an equal part."""
    received = torch.empty_like(value)
    dist.all_to_all_single(received, value, group=group)
    return received


def is_in_one(tensor: Tensor) -> bool:
    """Returns whether exchanges of such tensors are one all-to-all instead of a message to each rank."""
    return tensor.device.type != "cpu"


def gather_parts(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenates the parts of all ranks: [n] -> [n * size], the same on every rank."""
    if group.size() == 1:
        return part
    whole = part.new_empty(part.numel() * group.size())
    dist.all_gather_into_tensor(whole, part, group=group)
    return whole


def max_over_ranks(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the largest of each number over the group, on every rank, in place."""
    if group.size() > 1:
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return value


def start_sum_over_hosts(
    value: Tensor, inside: dist.ProcessGroup, across: dist.ProcessGroup, *, dtype: torch.dtype | None = None
) -> Callable[[], Tensor]:
    """Starts the sum of a tensor [n] over all ranks of all hosts, which crosses between hosts once.

    ``inside`` are the ranks of this host, ``across`` one rank of each host. The sum of a host travels to the others in
    ``dtype``, by default that of the value. What is returned waits, and returns the sum in the dtype of the value.
    """
    part = nn.functional.pad(value, (0, -value.numel() % inside.size()))
    if inside.size() > 1:
        sums = part.new_empty(part.numel() // inside.size())
        dist.reduce_scatter_tensor(sums, part, group=inside)
        part = sums
    # Alone on its host, a rank would sum into the caller's tensor.
    part = part.to(dtype or value.dtype, copy=inside.size() == 1)
    work = start_sum(part, across)

    def end() -> Tensor:
        work.wait()
        return gather_parts(part.to(value.dtype), inside)[: value.numel()]

    return end


def start_mean(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Any:
    """Starts the mean of tensors of one dtype over the group, in place, in one collective; ``wait()`` ends it."""
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
    return group.allreduce_coalesced(list(tensors), options)


def sum_over_ranks(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the sum of a tensor over the group, on every rank; the argument is left alone."""
    total = value.detach().clone().contiguous()
    dist.all_reduce(total, group=group)
    return total


class RankError(RuntimeError):
    """Something failed on a rank, maybe another one; says which and why."""


def run_on_all_or_raise(work: Callable[[], Value], group: dist.ProcessGroup) -> list[Value]:
    """Calls ``work`` on every rank of a group, so that either all get all results, or all raise; collective.

    Returns the results by group rank, which are pickled and sent to all, and so must be small.

    Raises:
        InputError: the first rank that failed raised one; the same everywhere.
        RankError: it raised something else, or its result does not pickle.
    """
    result, failed, is_input = b"", None, False
    try:
        # Here: a result that does not pickle would leave the others waiting for it.
        result = pickle.dumps(work())
    except Exception as error:
        failed, is_input = error, isinstance(error, InputError)
    answers = gather_objects((failed and reason_of(failed), is_input, result), group)
    for rank, (reason, is_input, _) in zip(dist.get_process_group_ranks(group), answers, strict=True):
        if reason is not None:
            raise (InputError(reason) if is_input else RankError(f"rank {rank}: {reason}")) from failed
    return [pickle.loads(answer) for *_, answer in answers]


def reason_of(error: BaseException) -> str:
    """Returns the reason of an error in one line."""
    return str(error) if isinstance(error, InputError | RankError) else f"{type(error).__name__}: {error}"
