"""Exchanges between towers: ids to the peers (`IdExchange`, SPTT steps a, c), outputs back (`PeerExchange`, step f).

Step f does not use TorchRec's pooled all-to-all. That is as fast over NCCL, but gloo's ``all_to_all`` posts receives
only after sends, so the two directions of a link take turns, and all exchanges in flight end together. Here every rank
posts its receives first, and exchanges end in the order in which they began.
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
from torch import Tensor, nn
from torch.autograd import Function
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    LazyGetItemMixin,
    NoOpQuantizedCommCodec,
    NoWait,
    QuantizedCommCodecs,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt.collectives import (
    PendingExchange,
    check_agreement,
    gather_objects,
    profiler_range,
    run_on_all_or_raise,
    start_exchange,
)
from dmt.errors import InputError, did_you_mean
from dmt.sptt.precision import ExchangePrecision

__all__ = [
    "AgreedIds",
    "AgreedOutputs",
    "IdExchange",
    "PeerExchange",
    "PeerIdRoute",
    "Pending",
    "Piece",
    "Rows",
    "TowerOutput",
    "codecs_of",
]

Piece = tuple[Any, int]
"""Name (a feature, or the index of a logical tower) and number of columns of a part of a tower's output."""


class Pending(LazyGetItemMixin[Any, Any], LazyAwaitable[Any]):
    """A result in flight: its first use calls ``end(*arguments)``, which waits; later uses return the same result."""

    def __init__(self, end: Callable[..., Any], *arguments: Any) -> None:
        super().__init__()
        self._end: tuple[Callable[..., Any], tuple[Any, ...]] | None = (end, arguments)
        self._value: Any = None
        self._has_gradients = torch.is_grad_enabled()

    def __getitem__(self, key: Any) -> Any:
        # As in TorchRec, the embeddings of a key stay in flight. Other indices wait: a lazy result has no len().
        return super().__getitem__(key) if isinstance(key, str) else self.wait()[key]

    def _wait_impl(self) -> Any:
        # TorchRec's exchange can be waited for only once, but a user may call wait() and use the result as well.
        if self._end is not None:
            end, arguments = self._end
            # With the grad mode of the forward pass: the first use may be logging under `no_grad`, before the loss.
            with torch.set_grad_enabled(self._has_gradients):
                self._value, self._end = end(*arguments), None
        return self._value


class IdExchange(nn.Module):
    """Sends each feature's ids to the ranks of a group that want it (SPTT steps a and c; no gradient).

    ========= ==========================================================================================
    before    every rank: ids of all features for its own B samples
    after     every rank: the ids of the features that it wants, in the order in which it wants them, for
              the samples of all ranks of the group, in peer order. Ids from the peer group arrive in this
              order (DMT section 3.1.3, "virtual process group"); those from the sharding group are
              sorted by (local index, tower): the peer permute of step c, on ids, before the lookup
    ========= ==========================================================================================

    Ids cross in the dtype of the batch: int32 takes half the bytes of int64. Lengths always cross, even where every bag
    has one id: TorchRec rebuilds the ids from them (``KeyedJaggedTensor.dist_init``).

    Args:
        group: the ranks.
        wanted: features that each rank of the group wants; a feature may be listed several times (column shards).
        input_features: keys of the batch, in the order of its ids; may hold more features than are used.
        stagger: T for the sharding group, whose rank (tower, local) is tower * ranks_per_tower + local; else 1.
        device: device of the ids.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        wanted: Sequence[Sequence[str]],
        input_features: Sequence[str],
        *,
        stagger: int = 1,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._group, self._stagger = group, stagger
        self._sizes = [len(of_rank) for of_rank in wanted]
        position = {feature: i for i, feature in enumerate(input_features)}
        # A feature with column shards on several ranks goes to each of them (section 3.1.3).
        self._order = [position[feature] for of_rank in wanted for feature in of_rank]
        # Kept on the device: a copy in each batch would make the host wait for the GPU.
        order = torch.tensor(self._order, dtype=torch.int32, device=device)
        self.register_buffer("_order_tensor", order, persistent=False)

    def in_order(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns the ids of the features that each rank wants, rank after rank."""
        return ids.permute(self._order, self._order_tensor)

    def forward(self, ids: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Starts the exchange of ids from `in_order`; the first ``wait()`` waits for sizes, the second for the ids.

        With a `RowEncoder` a feature has a key for each part of the batch, and batch sizes differ between keys.
        """
        num_keys = len(ids.keys()) // max(1, sum(self._sizes))  # keys of each feature, one for each part
        # Not kept as self._dist: TorchRec's train pipeline looks for that name and would delay the exchange of sizes.
        return KJTAllToAll(self._group, [size * num_keys for size in self._sizes], stagger=self._stagger)(ids)


class PeerIdRoute:
    """The peer id route: `IdExchange` among peers, then TorchRec's id exchange inside the tower.

    ``collections`` are this rank's, one per logical tower; ``wanted`` lists the features of each mesh tower, each once.
    ``note_rows`` records how many rows each peer has sent, and returns the ids with one batch size for all features.
    """

    stagger = 1
    peers = slice(None)
    """Selects this rank's peers, in tower order, from the ranks of the id exchange's group."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        collections: Sequence[Any],
        note_rows: Callable[[Any, KeyedJaggedTensor], KeyedJaggedTensor],
        wanted: Sequence[Sequence[str]],
    ) -> None:
        self._group, self._collections, self._note_rows, self._wanted = group, collections, note_rows, wanted

    def exchange(self, input_features: Sequence[str], device: torch.device | None = None) -> IdExchange:
        """Makes the id exchange for batches with the keys ``input_features``."""
        return IdExchange(self._group, self._wanted, input_features, stagger=self.stagger, device=device)

    def carry_on(self, started: Any, ctx: Any) -> Awaitable[Awaitable[KJTList]]:
        """Forwards the ids of a started exchange inside the tower (SPTT step a) once they have arrived.

        A train pipeline waits twice, for sizes and then for ids, but two hops need four waits: this method waits for
        the sizes of hop 1, the first wait for the ids of hop 1 and the sizes of hop 2, the second for the ids of hop 2.
        """
        first = KJTListSplitsAwaitable([started], ctx).wait()

        @torch.no_grad()
        def start() -> Awaitable[KeyedJaggedTensor]:
            ids_P = first.wait()[0]
            in_tower = self._note_rows(ctx, ids_P)
            # The end of step a: the table's scheme says which ranks of the tower need the ids (Neo, section 4).
            contexts = [collection.create_context() for collection in self._collections]
            by_collection = list(zip(self._collections, contexts, strict=True))
            # The sizes of all collections are sent before the first wait.
            sizes = [collection.input_dist(context, in_tower) for collection, context in by_collection]
            pending = [of_collection.wait() for of_collection in sizes]

            def end() -> KeyedJaggedTensor:
                ctx.in_tower = [(context, ids.wait()) for context, ids in zip(contexts, pending, strict=True)]
                return ids_P

            return Pending(end)

        return KJTListSplitsAwaitable([Pending(start)], ctx)

    def look_up(self, ctx: Any) -> list[Any]:
        """Starts lookups and the exchange of partial embeddings inside the tower (SPTT steps b, d, e).

        Returns for each collection a lazy ``KeyedTensor`` [P, columns], or a lazy dict of the sequences of P rows,
        peers in tower order.
        """
        collections = zip(self._collections, ctx.in_tower, strict=True)
        return [collection.compute_and_output_dist(*of_collection) for collection, of_collection in collections]


class AgreedIds:
    """Checks that all batches of all ranks have the same dtypes, and all batches of a rank the same keys, in order."""

    def __init__(self, features: Sequence[str], *, is_weighted: bool, group: dist.ProcessGroup) -> None:
        self._features, self._is_weighted, self._group = list(features), is_weighted, group
        self._keys: list[str] = []
        self._dtypes: dict[str, torch.dtype | None] = {}

    def checked(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns the ids, without weights unless the bags are weighted; collective for the first batch.

        Raises:
            InputError: a feature is missing, weights are missing or require a gradient, ids are neither int32 nor
                int64, keys or dtypes differ from those of the first batch, or the batch size varies by feature. If the
                first batch of one rank is refused, all ranks raise; later, only the rank with the refused batch does.
        """
        if self._keys:
            self._check(ids)
        else:
            # The first batch decides, since a plan knows neither the order of the keys nor the dtypes.
            run_on_all_or_raise(lambda: self._check(ids), self._group)
            dtypes = self._dtypes_of(ids)
            # A rank would misread the bytes of another dtype as other ids.
            named = {f"dtype of {name}": dtype for name, dtype in dtypes.items()}
            check_agreement("The first batch", named, self._group)
            # A copy: a caller may reorder the list of the keys in place.
            self._keys, self._dtypes = list(ids.keys()), dtypes
        # TorchRec's sharded lookups would apply weights where the unsharded module does not.
        if self._is_weighted or ids.weights_or_none() is None:
            return ids
        return KeyedJaggedTensor(keys=ids.keys(), values=ids.values(), lengths=ids.lengths(), stride=ids.stride())

    def _check(self, ids: KeyedJaggedTensor) -> None:
        keys, dtype = list(ids.keys()), ids.values().dtype
        weights = ids.weights_or_none() if self._is_weighted else None
        if missing := [] if self._keys else sorted(set(self._features).difference(keys)):
            raise InputError(
                f"The batch lacks feature {missing[0]!r} ({len(missing)} missing, {len(keys)} present)."
                f"{did_you_mean(missing[0], keys)} Pass ids of all features of the model."
            )
        at = next((i for i, key in enumerate(keys) if self._keys[i : i + 1] != [key]), len(keys))
        refusals = {
            "has a batch size per feature; pass ids with one batch size for all.": ids.variable_stride_per_key(),
            f"has ids of {dtype}; ids must be torch.int32 or torch.int64.": dtype not in (torch.int32, torch.int64),
            "lacks weights, but bags are weighted; pass weights.": self._is_weighted and weights is None,
            # The unsharded module would pass their gradient on.
            "has weights that require a gradient, which does not cross ranks; pass weights.detach().": (
                weights is not None and weights.requires_grad
            ),
            f"has {len(keys)} features, {keys[at : at + 1]} at {at}, but the first had {len(self._keys)} and "
            f"{self._keys[at : at + 1]}; keys and their order must not change.": self._keys not in ([], keys),
        }
        for message, is_refused in refusals.items():
            if is_refused:
                raise InputError(f"The batch {message}")
        for name, dtype in self._dtypes_of(ids).items():
            if dtype != (first := self._dtypes.get(name, dtype)):
                raise InputError(
                    f"The batch has {name} of {dtype}, but the first batch had {first}. Give all batches {name} of one "
                    "dtype."
                )

    def _dtypes_of(self, ids: KeyedJaggedTensor) -> dict[str, torch.dtype | None]:
        weights = ids.weights_or_none() if self._is_weighted else None
        parts = {"ids": ids.values(), "lengths": ids.lengths(), "weights": weights}
        return {name: None if part is None else part.dtype for name, part in parts.items()}


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
    """Numbers of rows of one part of a batch: T peers, G groups; features of a group have the same number of rows."""

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
    """The exchange of these outputs (step f); its dtype is the widest of all outputs' dtypes."""

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
        """Returns the columns [P, O] in the agreed dtype; raises `InputError` for other pieces or a wider dtype."""
        columns_PO, pieces, _ = output
        tower, num_towers = self.exchange.group.rank(), self.exchange.group.size()
        dtype = self.exchange.dtype if num_towers > 1 else columns_PO.dtype  # one tower sends nothing
        if torch.promote_types(columns_PO.dtype, dtype) != dtype or pieces != self.pieces[tower]:
            raise InputError(
                f"Tower {tower} returned columns {[width for _, width in pieces]} of {columns_PO.dtype}, but towers "
                f"agreed on {self.widths[tower]} of {dtype} in the first batch. Return the same columns and dtype in "
                "every batch, and run every batch under the same autocast."
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
              mean over the tower group that follows, gradients are means over the ranks of the job
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
        return Pending(_Wait.apply, started, transfer)


class _Transfer:
    """One exchange and its receive buffers, in the forward and then in the backward pass."""

    def __init__(self, exchange: PeerExchange, sizes: list[int], shapes: list[tuple[int, ...]]) -> None:
        self.exchange = exchange
        self._sizes, self._shapes = sizes, shapes
        self._pending: PendingExchange | None = None
        self._arriving: list[Tensor] = []

    def start_forward(self, numbers: Tensor) -> None:
        """Sends each peer its block."""
        blocks = numbers.contiguous().view(-1).split(self._sizes)
        self._start(blocks, [math.prod(shape) for shape in self._shapes], self.exchange.forward_codec)

    def end_forward(self) -> Tensor:
        """Waits; returns the blocks of all peers side by side."""
        blocks = self._end(self.exchange.forward_codec)
        return torch.cat([block.view(shape) for block, shape in zip(blocks, self._shapes, strict=True)], dim=-1)

    def start_backward(self, gradients: Tensor) -> None:
        """Sends each peer the gradients of its block."""
        # The transposed exchange: blocks that arrived side by side go back one after another.
        blocks = gradients.split([shape[-1] for shape in self._shapes], dim=-1)
        self._start([block.contiguous().view(-1) for block in blocks], self._sizes, self.exchange.backward_codec)

    def end_backward(self) -> Tensor:
        """Waits; returns the gradients of all numbers that this rank sent, 1-D, peer by peer."""
        gradients = torch.cat(self._end(self.exchange.backward_codec))
        # Each of the T peers sent the gradient of its own mean loss; tables get the mean over all ranks. In place,
        # since `cat` made a new tensor.
        return gradients.div_(len(self._sizes)) if get_gradient_division() else gradients

    def _start(self, blocks: Sequence[Tensor], sizes: Sequence[int], codec: Any) -> None:
        """Starts to send a block to each peer, and to receive blocks of these sizes."""
        sent = list(blocks) if codec is None else [codec.encode(block) for block in blocks]
        exchange = self.exchange
        self._pending, self._arriving = start_exchange(sent, sizes, exchange.group, tag=exchange.tag)
        exchange.begun = [(owner, begun) for owner, begun in exchange.begun if not begun.is_done]
        exchange.begun.append((weakref.ref(self), self._pending))

    def _end(self, codec: Any) -> list[Tensor]:
        assert self._pending is not None, "an exchange ends only once"
        self._pending.wait()
        arrived, self._pending, self._arriving = self._arriving, None, []
        return arrived if codec is None else [codec.decode(block) for block in arrived]


# `_Wait` begins the backward exchange and `_Start` ends it: in between autograd does other work.
class _Start(Function):
    @staticmethod
    def forward(ctx: Any, numbers: Tensor, anchor: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer, ctx.shape = transfer, numbers.shape
        transfer.start_forward(numbers)
        return torch.empty_like(anchor)

    @staticmethod
    def backward(ctx: Any, *unused: Tensor) -> Any:
        return ctx.transfer.end_backward().view(ctx.shape), None, None


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, started: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.end_forward()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with profiler_range("exchange_outputs", backward=True):
            ctx.transfer.start_backward(gradients[0])
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
