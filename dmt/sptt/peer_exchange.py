"""`PeerExchange`: sends the outputs of towers to the peers, and their gradients back (SPTT step f).

Step f does not use TorchRec's pooled all-to-all. That is as fast over NCCL, but gloo's ``all_to_all`` posts receives
only after sends, so the two directions of a link take turns, and all exchanges in flight end together. Here CPU ranks
post their receives first, and exchanges end in the order in which they began.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.types import Awaitable, LazyAwaitable, NoOpQuantizedCommCodec, NoWait, QuantizedCommCodecs

from dmt._torchrec import is_fwd_grad_enabled
from dmt.collectives import PendingExchange, gather_objects, profiler_range, start_exchange
from dmt.errors import InputError
from dmt.sptt.precision import ExchangePrecision

__all__ = [
    "AgreedOutputs",
    "PeerExchange",
    "Pending",
    "Piece",
    "Rows",
    "TowerOutput",
    "codecs_of",
]

Piece = tuple[Any, int]
"""Name (a feature, or the index of a logical tower) and number of columns of a part of a tower's output."""


class Pending(LazyAwaitable[Any]):
    """A result in flight: its first use calls ``end(*arguments)``, which waits; later uses return the same result."""

    def __init__(self, end: Callable[..., Any], *arguments: Any) -> None:
        super().__init__()
        self._end: tuple[Callable[..., Any], tuple[Any, ...]] | None = (end, arguments)
        self._has_gradients = torch.is_grad_enabled()

    def __getitem__(self, key: Any) -> Any:
        # As in TorchRec, the embeddings of a key stay in flight. Other indices wait: a lazy result has no len().
        return Pending(lambda: self.wait()[key]) if isinstance(key, str) else self.wait()[key]

    @property
    def _result(self) -> Any:
        """The result, None before its first use; TorchRec reads it at each use. No autograd function may read it."""
        is_used = self._end is None and torch.is_inference_mode_enabled()  # reading metrics does no harm
        if self._has_gradients and not is_fwd_grad_enabled() and not is_used:
            raise InputError(
                "The result of a sharded module, still in flight, was passed to a torch.autograd.Function (such as a "
                "reentrant checkpoint or torch.distributed.nn.all_gather). This gives gradients to tensors only, so "
                "tables would not train. Pass result.clone() instead, or result.values() if it is a KeyedTensor."
            )
        return self._value

    @_result.setter
    def _result(self, value: Any) -> None:
        self._value = value

    def _wait_impl(self) -> Any:
        # TorchRec's exchange can be waited for only once, but a user may call wait() and use the result as well.
        if self._end is not None:
            end, arguments = self._end
            # With the grad mode of the forward pass: the first use may be logging under `no_grad`, before the loss.
            with torch.set_grad_enabled(self._has_gradients):
                self._value, self._end = end(*arguments), None
        return self._value


class TowerOutput(NamedTuple):
    """Output of this rank's tower for rows of all its peers."""

    columns_PO: Tensor
    """[P, O] floating-point numbers."""
    pieces: list[Piece]
    """Name and width of each piece of the columns, from left to right."""
    groups: list[int]
    """For each piece the index of its group of features in this tower; the piece has as many rows as that group."""


# Not in rows.py, which imports this file.
@dataclass(frozen=True)
class Rows:
    """How many rows one part of a batch has: T peers, G groups; the features of a group have equally many."""

    arrived: list[list[int]]
    """[T][G], number of rows from each peer for each group of this rank's tower."""
    sent: list[list[int]]
    """[T][G], number of rows that this rank has sent to each tower for each of its groups."""

    @functools.cached_property
    def by_group(self) -> list[int]:
        """[G], number of rows from all peers for each group of this rank's tower."""
        return [sum(of_group) for of_group in zip(*self.arrived, strict=True)]

    @functools.cached_property
    def num_rows(self) -> int:
        """P, number of rows of this tower's embeddings: that of the largest group, to which the others are padded."""
        return max(self.by_group)


@dataclass(frozen=True)
class AgreedOutputs:
    """The layout of all towers' outputs: peers agree on it in the first batch, and later batches must have the same."""

    pieces: list[list[Piece]]
    """Pieces of each tower's output."""
    groups: list[list[int]]
    """For each piece of each tower the index of its group of features in that tower."""
    exchange: PeerExchange
    """The exchange of these outputs (step f), in the dtype to which ``torch.promote_types`` promotes them."""

    @functools.cached_property
    def widths(self) -> list[list[int]]:
        """Columns of each piece of each tower."""
        return [[width for _, width in pieces] for pieces in self.pieces]

    @staticmethod
    def gather(
        output: TowerOutput, peers: dist.ProcessGroup, *, precision: ExchangePrecision | None, tag: int
    ) -> AgreedOutputs:
        """Gathers pieces, groups and dtypes of all peers, once the tower of each has run. Collective."""
        everyone = gather_objects((output.pieces, output.groups, output.columns_PO.dtype), peers)
        all_pieces, all_groups, dtypes = (list(of_peers) for of_peers in zip(*everyone, strict=True))
        # Under autocast a tower with a matrix product has another output dtype than a pass-through tower.
        dtype = functools.reduce(torch.promote_types, dtypes)
        # O of each tower: towers may compress their features by different factors (section 3.2).
        sizes = [sum(width for _, width in pieces) for pieces in all_pieces]
        exchange = PeerExchange(peers, sizes, dtype=dtype, precision=precision, tag=tag)
        return AgreedOutputs(all_pieces, all_groups, exchange)

    def checked(self, output: TowerOutput, num_rows: int) -> Tensor:
        """Returns the columns [P, O], in the agreed dtype if there are several towers.

        Raises `InputError` unless the pieces are the agreed ones and the agreed dtype can represent the columns'.
        """
        columns_PO, pieces, _ = output
        tower, num_towers = self.exchange.group.rank(), self.exchange.group.size()
        dtype = self.exchange.dtype if num_towers > 1 else columns_PO.dtype  # one tower sends nothing
        if torch.promote_types(columns_PO.dtype, dtype) != dtype or pieces != self.pieces[tower]:
            raise InputError(
                f"Mesh tower {tower} returned outputs of widths {[width for _, width in pieces]!s:.100} in "
                f"{columns_PO.dtype}, but in the first batch the towers agreed on {self.widths[tower]!s:.100} in "
                f"{dtype}. Return the same widths and dtype in every batch, all under the same autocast."
            )
        assert columns_PO.shape[0] == num_rows, f"tower {tower} computed {columns_PO.shape[0]} rows for {num_rows}"
        return columns_PO.to(dtype)


class PeerExchange:
    """Exchanges rows of one tower's outputs for columns of all towers; differentiable.

    ========= ==================================================================================================
    before    every peer: [sum over peers of B, O_t], the columns of its tower t for the samples of all peers
    after     every peer: [B, sum over towers of O_t], all columns for its own samples,
              towers in peer order
    backward  the transposed exchange, divided by the group size T (TorchRec's gradient division): with the
              mean over the tower group that follows, gradients are means over the ranks of a replica
    ========= ==================================================================================================

    Args:
        group: the peer group.
        output_sizes: O_t for each tower (rank of the group).
        dtype: dtype of every tower's outputs, and so of the result and of gradients.
        precision: number formats in which outputs and gradients are sent; None sends numbers unchanged.
        tag: tag of the messages on the CPU, the same on all ranks; tells exchanges over one group apart. On GPUs an
            exchange is an all-to-all without a tag: all ranks must start the exchanges of a group in the same order.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        output_sizes: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        precision: ExchangePrecision | None = None,
        tag: int = 0,
    ) -> None:
        self.group, self.tag, self.dtype = group, tag, dtype
        self.output_sizes = list(output_sizes)
        codecs = codecs_of(precision or ExchangePrecision(), dtype)
        self.forward_codec = None if codecs is None else codecs.forward
        self.backward_codec = None if codecs is None else codecs.backward
        self.begun: list[tuple[weakref.ref[_Transfer], PendingExchange]] = []
        """Exchanges in flight, each with the transfer that waits for it. If a result is dropped, the next call of
        `exchange` waits for its messages; else those of later exchanges would be received in their place."""
        self._results: weakref.WeakValueDictionary[int, Pending] = weakref.WeakValueDictionary()
        """Results of `exchange`, numbered in the order of its calls."""

    def __call__(self, outputs: Tensor, batch_sizes: Sequence[int]) -> Awaitable[Tensor]:
        """Starts the exchange of outputs [sum(batch_sizes), O_t], which must not change until it has ended.

        ``batch_sizes`` has B of every peer, in group order; they may differ. The result is [B, sum of O_t].
        """
        # A block has one peer's rows and one tower's columns: blocks of all peers leave, those of all towers arrive.
        rows, columns = batch_sizes[self.group.rank()], self.output_sizes[self.group.rank()]
        return self.exchange(outputs, [size * columns for size in batch_sizes], [(rows, o) for o in self.output_sizes])

    def exchange(self, numbers: Tensor, sizes: Sequence[int], arriving: Sequence[tuple[int, ...]]) -> Awaitable[Tensor]:
        """Starts the exchange of blocks of any shapes.

        Args:
            numbers: blocks for all peers one after another, of any shape, in the exchange's dtype; must not change
                until the exchange has ended.
            sizes: number of elements of the block for each peer, in group order.
            arriving: shape of the block from each peer; the result has the blocks side by side in the last dimension.
        """
        # One tower has no peers, and its rows are in the order of its own samples.
        if self.group.size() == 1:
            return NoWait(numbers.reshape(arriving[0]))
        assert numbers.dtype == self.dtype, f"the exchange was made for {self.dtype}, not {numbers.dtype}"
        for owner, begun in self.begun:
            if owner() is None:  # a result was dropped, or something raised before its use
                begun.wait()
        transfer = _Transfer(self, list(sizes), list(arriving))
        # Requires a gradient even if a frozen tower does not: peers wait for this rank in the backward pass.
        anchor = torch.empty(0, device=numbers.device, requires_grad=torch.is_grad_enabled())
        with profiler_range("exchange_outputs"):
            started = _Start.apply(numbers, anchor, transfer)
        number = max(self._results, default=0) + 1
        result = self._results[number] = Pending(self._wait_in_order, number, started, transfer)
        return result

    def _wait_in_order(self, number: int, started: Tensor, transfer: _Transfer) -> Any:
        # Gradients go back in the reverse order of the calls of `_Wait`, which must be the same on all ranks, even if
        # one of them uses a later result first.
        for earlier in sorted(n for n in self._results if n < number):
            if (result := self._results.pop(earlier, None)) is not None:
                result.wait()
        return _Wait.apply(started, transfer)


class _Transfer:
    """One exchange and its receive buffers, in the forward and then in the backward pass."""

    def __init__(self, exchange: PeerExchange, sizes: list[int], shapes: list[tuple[int, ...]]) -> None:
        self.exchange, self.sizes, self.shapes = exchange, sizes, shapes
        self._pending: PendingExchange | None = None
        self._arriving: list[Tensor] = []

    def start(self, blocks: Sequence[Tensor], sizes: Sequence[int], codec: Any) -> None:
        """Starts to send a block to each peer, and to receive blocks of these sizes."""
        sent = list(blocks) if codec is None else [codec.encode(block) for block in blocks]
        exchange = self.exchange
        self._pending, self._arriving = start_exchange(sent, sizes, exchange.group, tag=exchange.tag)
        exchange.begun = [(owner, begun) for owner, begun in exchange.begun if not begun.is_done]
        exchange.begun.append((weakref.ref(self), self._pending))

    def end(self, codec: Any) -> list[Tensor]:
        """Waits; returns the blocks of all peers, 1-D."""
        assert self._pending is not None, "an exchange ends only once"
        self._pending.wait()
        arrived, self._pending, self._arriving = self._arriving, None, []
        return arrived if codec is None else [codec.decode(block) for block in arrived]


# `_Wait` begins the backward exchange and `_Start` ends it: in between autograd does other work.
class _Start(Function):
    @staticmethod
    def forward(ctx: Any, numbers: Tensor, anchor: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer, ctx.shape = transfer, numbers.shape
        blocks = numbers.contiguous().view(-1).split(transfer.sizes)
        transfer.start(blocks, [math.prod(shape) for shape in transfer.shapes], transfer.exchange.forward_codec)
        return torch.empty_like(anchor)

    @staticmethod
    def backward(ctx: Any, *unused: Tensor) -> Any:
        gradients = torch.cat(ctx.transfer.end(ctx.transfer.exchange.backward_codec)).view(ctx.shape)
        # Each of the T peers sent the gradient of its own mean loss; tables get the mean over all ranks. In place,
        # since `cat` made a new tensor.
        return gradients.div_(len(ctx.transfer.sizes)) if get_gradient_division() else gradients, None, None


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, started: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        blocks = transfer.end(transfer.exchange.forward_codec)
        return torch.cat([block.view(shape) for block, shape in zip(blocks, transfer.shapes, strict=True)], dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        transfer = ctx.transfer
        # The transposed exchange: blocks that arrived side by side go back one after another.
        blocks = gradients[0].split([shape[-1] for shape in transfer.shapes], dim=-1)
        with profiler_range("exchange_outputs", backward=True):
            sent = [block.contiguous().view(-1) for block in blocks]
            transfer.start(sent, transfer.sizes, transfer.exchange.backward_codec)
        # An empty gradient only makes autograd call `_Start.backward` later, and do other work until then.
        return gradients[0].new_empty(0), None


def codecs_of(precision: ExchangePrecision, dtype: torch.dtype = torch.float32) -> QuantizedCommCodecs | None:
    """Returns TorchRec's pair of codecs for an exchange, or None if both directions send numbers unchanged.

    ``dtype`` is the dtype that the codecs encode from, and decode to.
    """
    as_is: Any = NoOpQuantizedCommCodec()
    as_is.quantized_dtype = dtype  # TorchRec's class has a method here, but its planner reads an attribute
    dtypes = {"fp32": dtype, "fp16": torch.float16, "bf16": torch.bfloat16}
    forward, backward = (
        as_is if dtypes[name] == dtype else _Cast(dtypes[name], scale, dtype)
        for name, scale in ((precision.forward, 1.0), (precision.backward, precision.backward_scale))
    )
    return None if forward is backward else QuantizedCommCodecs(forward, backward)


class _Cast(NoOpQuantizedCommCodec[None]):
    """Codec that sends numbers multiplied by ``scale``, a power of two, in a 16-bit dtype.

    TorchRec's own FP16 codec turns infinity into 65504, and divides by its scale while still in FP16.
    """

    def __init__(self, wire: torch.dtype, scale: float, dtype: torch.dtype) -> None:
        self.quantized_dtype = wire
        self._wire, self._scale, self._dtype = wire, scale, dtype

    def encode(self, input_tensor: Tensor, ctx: Any = None) -> Tensor:
        """Returns ``input_tensor`` times the scale, computed in FP32, in the dtype that is sent."""
        largest = torch.finfo(self._wire).max
        numbers = input_tensor.float() * self._scale
        # Turns infinity into NaN, which `clamp` keeps; a branch on the values would make the host wait for a GPU.
        return (numbers + numbers * 0).clamp(-largest, largest).to(self._wire)

    def decode(self, input_grad: Tensor, ctx: Any = None) -> Tensor:
        """Returns ``input_grad`` divided by the scale, computed in FP32, in the dtype of the outputs."""
        return (input_grad.float() / self._scale).to(self._dtype)
