"""`PeerExchange` alone, on three ranks: what arrives where, what comes back, and exchanges that nobody waits for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torchrec.distributed.comm_ops import get_gradient_division, set_gradient_division
from torchrec.distributed.types import LazyAwaitable, NoWait

import dmt.collectives
import dmt.sptt.peer_exchange
from dmt.collectives import PendingExchange, start_exchange
from dmt.errors import InputError
from dmt.sptt.peer_exchange import AgreedOutputs, PeerExchange, Pending, TowerOutput
from tests.parity import fail
from tests.ranks import on_ranks

T = 3
WIDTHS = (2, 5, 1)
BATCHES = ((3, 0, 5), (0, 0, 2), (4, 4, 4), (0, 0, 0), (1, 6, 2))


def numbers(kind: str, rank: int, step: int, rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + len(kind))
    return torch.randn(rows, columns, generator=generator)


def sent_by(rank: int, step: int, sizes: Sequence[int]) -> Tensor:
    return numbers("outputs", rank, step, sum(sizes), WIDTHS[rank])


def gradients_of(rank: int, step: int, sizes: Sequence[int]) -> Tensor:
    return numbers("gradients", rank, step, sizes[rank], sum(WIDTHS))


def gathered(rank: int, step: int, sizes: Sequence[int]) -> Tensor:
    """Returns what a rank must receive: its rows of all towers' outputs, side by side."""
    return torch.cat([sent_by(tower, step, sizes).split(list(sizes))[rank] for tower in range(T)], dim=1)


def returned(rank: int, step: int, sizes: Sequence[int]) -> Tensor:
    """Returns what a rank must get back: its columns of all ranks' gradients, one below the other."""
    return torch.cat([gradients_of(peer, step, sizes).split(WIDTHS, dim=1)[rank] for peer in range(T)])


def check(exchange: PeerExchange, rank: int, step: int, sizes: Sequence[int], divisor: float = T) -> None:
    outputs = sent_by(rank, step, sizes).requires_grad_()
    columns = exchange(outputs, sizes).wait()
    assert torch.equal(columns, gathered(rank, step, sizes)), sizes
    columns.backward(gradients_of(rank, step, sizes))
    assert outputs.grad is not None
    assert torch.equal(outputs.grad, returned(rank, step, sizes) / divisor), sizes


def check_several_at_once(exchange: PeerExchange, rank: int) -> None:
    """Begins all exchanges before it waits for the first, forward and backward."""
    outputs = [sent_by(rank, step, sizes).requires_grad_() for step, sizes in enumerate(BATCHES)]
    started = [exchange(part, sizes) for part, sizes in zip(outputs, BATCHES, strict=True)]
    started[rank].wait()  # a rank may use any result first
    columns = [pending.wait() for pending in started]
    for step, sizes in enumerate(BATCHES):
        assert torch.equal(columns[step], gathered(rank, step, sizes))
    torch.autograd.backward(columns, [gradients_of(rank, step, sizes) for step, sizes in enumerate(BATCHES)])
    for step, sizes in enumerate(BATCHES):
        assert torch.equal(outputs[step].grad, returned(rank, step, sizes) / T)  # type: ignore[arg-type]


@pytest.mark.parametrize("in_one", [False, True], ids=["messages", "one all-to-all, as on GPUs"])
@on_ranks(T)
def test_rows_go_to_their_samples_and_gradients_come_back(rank: int, in_one: bool) -> None:
    calls: list[Tensor] = []
    exchange = PeerExchange(dist.group.WORLD, WIDTHS)
    with patch.object(dmt.collectives, "uses_all_to_all", lambda tensor: calls.append(tensor) or in_one):
        for step, sizes in enumerate(BATCHES):
            check(exchange, rank, step, sizes)
        assert get_gradient_division(), "TorchRec divides unless told otherwise"
        set_gradient_division(False)
        try:
            for step, sizes in enumerate(BATCHES):
                check(exchange, rank, step, sizes, divisor=1)
        finally:
            set_gradient_division(True)
        check_several_at_once(exchange, rank)
        with torch.no_grad():
            assert torch.equal(exchange(sent_by(rank, 1, (3, 0, 5)), (3, 0, 5)).wait(), gathered(rank, 1, (3, 0, 5)))
        assert len(exchange.begun) == 1, "exchanges that have ended would be kept"
        pending, arriving = start_exchange([torch.ones(2)] * T, [2] * T, dist.group.WORLD)
        held = {tensor.untyped_storage().data_ptr() for tensor in pending._tensors}
        assert {tensor.untyped_storage().data_ptr() for tensor in arriving} <= held, "a stream is told of all"
        pending.wait()
    assert len(calls) >= 4 * len(BATCHES)


@on_ranks(1)
def test_nothing_is_sent_where_there_is_one_tower(rank: int) -> None:
    outputs = torch.randn(4, 2)
    result = PeerExchange(dist.group.WORLD, [2])(outputs, [4])
    assert isinstance(result, NoWait)
    assert result.wait().data_ptr() == outputs.data_ptr()


@on_ranks(1)
def test_one_tower_may_change_its_dtype(rank: int) -> None:
    """For example after training under autocast; several towers must agree on a dtype."""
    first, then = (TowerOutput(torch.ones(4, 2, dtype=d), [("f", 2)], [0]) for d in (torch.bfloat16, torch.float32))
    agreed = AgreedOutputs.gather(first, dist.group.WORLD, precision=None, tag=1)
    assert agreed.exchange.tag == 1
    for output in (first, then):
        columns = agreed.exchange(agreed.checked(output, 4), [4]).wait()
        assert columns.dtype == output.columns_PO.dtype


class Watched:
    """Weak references to the exchanges begun so far, in their order."""

    def __init__(self) -> None:
        self.begun: list[weakref.ref[PendingExchange]] = []
        self.start: Callable[..., tuple[PendingExchange, list[torch.Tensor]]] = dmt.sptt.peer_exchange.start_exchange
        dmt.sptt.peer_exchange.start_exchange = self  # type: ignore[assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[PendingExchange, list[torch.Tensor]]:
        pending, arriving = self.start(*args, **kwargs)
        self.begun.append(weakref.ref(pending))
        return pending, arriving

    @property
    def last(self) -> PendingExchange | None:
        gc.collect(1)  # recent objects only; a full collection takes long
        return self.begun[-1]()


def breaks(columns: Tensor) -> Tensor:
    """Returns the same numbers; their backward pass raises `ZeroDivisionError`."""
    same = columns.clone()
    same.register_hook(fail)
    return same


@on_ranks(T, fresh=True)
def test_exchanges_nobody_waits_for_disturb_no_other(rank: int) -> None:
    watched = Watched()
    exchange, sizes = PeerExchange(dist.group.WORLD, WIDTHS), BATCHES[2]

    # Dropped by all: alive until the next is begun, which waits for it first.
    exchange(sent_by(rank, 1, sizes), sizes)
    dropped = watched.last
    assert dropped is not None, "nobody holds what is under way"
    assert not dropped.is_done
    check(exchange, rank, 2, sizes)
    assert dropped.is_done, "the next exchange was begun while an abandoned one is under way"

    # Dropped by one only.
    kept = exchange(sent_by(rank, 3, sizes), sizes)
    if rank == 1:
        del kept
    else:
        assert torch.equal(kept.wait(), gathered(rank, 3, sizes))
    check(exchange, rank, 4, sizes)

    # One that is held is not waited for: several are to be under way at once.
    held = exchange(sent_by(rank, 5, sizes), sizes)
    first = watched.last
    other = exchange(sent_by(rank, 6, sizes), sizes)
    assert first is not None
    assert not first.is_done, "exchanges take turns"
    assert torch.equal(held.wait(), gathered(rank, 5, sizes))
    assert torch.equal(other.wait(), gathered(rank, 6, sizes))

    # Gradients that are on their way when the backward pass breaks off.
    before = len(watched.begun)
    parts = [exchange(sent_by(rank, step, sizes).requires_grad_(), sizes) for step in (7, 8)]
    broken = breaks(parts[0].wait())
    columns = parts[1].wait()  # what is computed last goes back first
    with pytest.raises(ZeroDivisionError):
        torch.autograd.backward([columns, broken], [gradients_of(rank, step, sizes) for step in (8, 7)])
    del parts, columns, broken
    back = watched.last
    assert back is not None
    assert len(watched.begun) == before + 3, "gradients of one exchange are on their way"
    assert not back.is_done
    for step in range(9, 12):
        check(exchange, rank, step, sizes)
    assert back.is_done, "PyTorch's engine lets go of it in the next backward pass"


@on_ranks(T)
def test_tags_tell_exchanges_of_two_modules_apart(rank: int) -> None:
    """Ranks may come to two modules' exchanges in different orders, as in a backward pass: each finds its own."""
    exchanges = [PeerExchange(dist.group.WORLD, WIDTHS, tag=tag) for tag in (1, 2)]
    order = (0, 1) if rank == 0 else (1, 0)
    sizes = BATCHES[2]
    started = {which: exchanges[which](sent_by(rank, which, sizes), sizes) for which in order}
    for which in (0, 1):
        assert torch.equal(started[which].wait(), gathered(rank, which, sizes)), which


def test_part_of_a_tensor_in_flight_is_a_tensor_and_a_feature_stays_in_flight() -> None:
    outputs = Pending(lambda: torch.arange(6).view(2, 3))
    assert len(outputs[:, 1:]) == 2
    assert [int(row.sum()) for row in outputs] == [3, 12]
    embeddings = Pending(lambda: {"ad": torch.ones(2)})
    assert isinstance(embeddings["ad"], LazyAwaitable)
    assert torch.equal(embeddings["ad"] + 1, torch.full((2,), 2.0))


def test_a_first_use_without_gradients_leaves_those_of_the_forward_pass() -> None:
    """For example, a loop logs the norm of embeddings under ``no_grad`` before it computes the loss."""
    weight = torch.ones(2, requires_grad=True)
    for outputs in (Pending(lambda: 3 * weight), Pending(lambda: {"ad": 3 * weight})["ad"]):
        with torch.no_grad():
            assert float(outputs.sum()) == 6
        with torch.inference_mode():
            assert float(torch.mean(outputs)) == 3
        checkpoint(torch.neg, outputs.clone(), use_reentrant=True).sum().backward()
        # Autograd gives gradients of a Function to arguments that are tensors, and to no others.
        with pytest.raises(InputError, match=r"Pass result\.clone\(\)"), pytest.warns(UserWarning, match="be None"):
            checkpoint(torch.neg, outputs, use_reentrant=True)
    assert torch.equal(weight.grad, torch.full((2,), -6.0))  # type: ignore[arg-type]
    with torch.inference_mode():
        evaluated = Pending(lambda: 3 * weight)
        assert float(torch.sum(evaluated)) == 6
    assert not evaluated.wait().requires_grad
