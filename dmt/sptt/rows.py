"""Rows in the place of samples: how many each feature sends in each part of a batch, and how they come back.

Without a `RowEncoder` every sample is a row of every feature. With one, features differ in their number of rows
(samples may share one, `dmt.sptt.unique`), and a batch may be cut into parts (`dmt.sptt.micro_batches`): a row crosses
with the first part that needs it. The encoder makes rows of the samples before they are sent; what it returns, a
`RowCode`, makes columns of samples of the rows that come back. TorchRec's KJT all-to-all carries the numbers of rows,
so both ends know all sizes from then on.

Shape suffixes: F features, G groups of one tower (features of a group have as many rows), T peers, K parts, B samples
of this rank, O columns of a tower's output, S of all towers'.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt.collectives import gather_objects
from dmt.errors import InputError
from dmt.sptt.peer_exchange import PeerExchange
from dmt.sptt.results import CachedAwaitable
from dmt.sptt.unique import distinct_inputs, samples_of_rows

__all__ = [
    "AgreedOutputs",
    "Piece",
    "RowCode",
    "RowEncoder",
    "Rows",
    "TowerOutput",
    "exchange_rows",
    "part_sizes",
    "rows_of_parts",
    "samples_of_parts",
    "wrap",
]

Piece = tuple[Any, int]
"""Name and number of columns of a part of a tower's output."""


class TowerOutput(NamedTuple):
    """Output of this rank's tower for some rows of its peers."""

    columns_PO: Tensor
    """[P, O]."""
    pieces: list[Piece]
    """Parts of its columns, from left to right."""


@dataclass(frozen=True)
class Rows:
    """Rows of one part of a batch."""

    arrived: list[list[int]]
    """[T][G], rows of each group of this rank's tower from each peer."""
    sent: list[list[int]]
    """[T][G], rows of each group of each tower from this rank."""

    @functools.cached_property
    def by_group(self) -> list[int]:
        """[G], rows of each group of this rank's tower from all peers."""
        return [sum(of_group) for of_group in zip(*self.arrived, strict=True)]

    @functools.cached_property
    def num_rows(self) -> int:
        """Rows of the embeddings of this rank's tower: those of the largest group."""
        return max(self.by_group)


@dataclass(frozen=True)
class AgreedOutputs:
    """Shapes and dtype of the outputs that the peers exchanged in the first batch; later batches must match."""

    own_pieces: list[Piece]
    """Pieces of this tower's output."""
    all_pieces: list[list[Piece]]
    """Pieces of all towers' outputs, in tower order."""
    groups: list[list[int]]
    """For each tower the group of features whose rows each piece has."""
    exchange: PeerExchange
    """The exchange made for them (step f); its dtype is the widest of all towers' outputs."""

    @functools.cached_property
    def widths(self) -> list[list[int]]:
        """For each tower the columns of each piece."""
        return [[width for _, width in pieces] for pieces in self.all_pieces]

    @staticmethod
    def gather(
        output: TowerOutput,
        groups: Sequence[int],
        connect: Callable[[list[int], torch.dtype], PeerExchange],
        peers: ProcessGroup,
    ) -> AgreedOutputs:
        """Gathers pieces, groups and dtypes of all peers, a group; only running a tower module shows what it returns.

        ``connect`` makes the exchange from the columns of each tower and the dtype of all. Collective.
        """
        everyone = gather_objects((output.pieces, list(groups), output.columns_PO.dtype), peers)
        all_pieces, all_groups, dtypes = (list(of_peers) for of_peers in zip(*everyone, strict=True))
        # Under autocast a tower with a matrix product has another output dtype than one that passes through.
        dtype = functools.reduce(torch.promote_types, dtypes)
        exchange = connect([sum(width for _, width in pieces) for pieces in all_pieces], dtype)
        return AgreedOutputs(list(output.pieces), all_pieces, all_groups, exchange)

    def check(self, output: TowerOutput, num_rows: int, tower: int) -> None:
        """Raises `InputError` for an output of other columns or a wider dtype than were agreed on."""
        columns_PO, pieces = output
        dtype = self.exchange.dtype
        if torch.promote_types(columns_PO.dtype, dtype) != dtype or pieces != self.own_pieces:
            now, before = ([width for _, width in some] for some in (pieces, self.own_pieces))
            raise InputError(
                f"Tower {tower} returned columns {now} of {columns_PO.dtype}, but {before} of {dtype} were agreed on "
                "with the other towers in the first batch; they must stay."
            )
        computed = columns_PO.shape[0]
        assert computed == num_rows, f"tower {tower} computed {computed} rows for {num_rows}"


@dataclass
class _Sent:
    """What was sent so far."""

    rows: list[int]
    samples: int = 0


@dataclass(frozen=True, eq=False)
class RowEncoder:
    """Makes rows of the samples of a batch; options wrap the exchange by changing one field each, see `wrap`."""

    groups: Sequence[Sequence[str]]
    """Groups of the features of all towers, in the order in which their ids are sent."""
    num_parts: int = 1
    """K, parts in which a batch crosses."""
    share: Literal["equal", "empty"] | None = None
    """Samples that share a row: those with equal inputs of a group, or those without ids there."""
    take_out: Callable[[KeyedJaggedTensor], tuple[KeyedJaggedTensor, Any]] | None = None
    """Takes ids out of a batch before it is sent. What it returns besides has ``columns(pieces)``, [B, S], to add to
    what comes back, and ``record_stream``; None if nothing was taken."""
    sent: _Sent = field(default_factory=lambda: _Sent([]))
    """Counts of all batches."""

    def encode(self, ids: KeyedJaggedTensor) -> RowCode:
        """Makes the rows of a batch, its features in the order in which they are sent; no gradient."""
        taken = None
        if self.take_out is not None:
            ids, taken = self.take_out(ids)
        sizes, cuts = [len(group) for group in self.groups], part_sizes(ids.stride(), self.num_parts)
        if self.share is not None:
            sent, (parts, inverse) = distinct_inputs(ids, sizes, share=self.share == "equal", cuts=cuts)
            rows = [sum(of_group) for of_group in zip(*parts, strict=True)]
            self.sent.rows[:] = map(sum, zip(self.sent.rows or [0] * len(rows), rows, strict=True))
            self.sent.samples += ids.stride()
            return RowCode(sent, parts, inverse, cuts, taken)
        # Every sample is a row: the peers know the sizes of all parts, and put samples in their order.
        return RowCode(ids, [[cut] * len(sizes) for cut in cuts], None, cuts, taken)

    @property
    def rows_per_sample(self) -> list[float]:
        """Rows of each group that this rank has sent for each sample so far."""
        return [rows / max(1, self.sent.samples) for rows in self.sent.rows]


@dataclass(frozen=True, eq=False)
class RowCode:
    """The rows of one batch of this rank."""

    ids: KeyedJaggedTensor
    """Ids of the rows. Where samples share rows, a feature has a key for each part, one after the other, with its rows
    as batch size."""
    parts: list[list[int]]
    """[K][groups], rows that no earlier part has."""
    inverse: Tensor | None
    """Row of each sample, [groups, B] int64; None if each is its own."""
    cuts: list[int]
    """Samples of each part."""
    taken: Any
    """What was taken out of the batch."""

    @property
    def is_ragged(self) -> bool:
        """True if groups may differ in their rows."""
        return self.inverse is not None

    def arrange(
        self,
        ids: KeyedJaggedTensor,
        batch_sizes: Sequence[int],
        groups: Sequence[Sequence[Sequence[str]]],
        tower: int,
    ) -> tuple[KeyedJaggedTensor, list[Rows]]:
        """Returns the ids that arrived from the peers with one batch size for all features, and the rows of each part.

        ``batch_sizes`` are B of every peer where each sample is a row, ``groups`` those of each tower's features.
        """
        if self.is_ragged:
            return rows_of_parts(self, ids, groups, tower)
        num_groups = [len(of_tower) for of_tower in groups]
        return samples_of_parts(ids, batch_sizes, len(self.parts), num_groups=num_groups, tower=tower)

    def decode(
        self, exchanges: Sequence[Awaitable[Any]], agreed: AgreedOutputs, num_groups: Sequence[int]
    ) -> list[Awaitable[Tensor]]:
        """Makes columns [B, S] of each part from what the exchanges bring; ``num_groups`` has G of each tower."""
        columns = list(exchanges)
        if self.inverse is not None:
            starts = [0, *itertools.accumulate(num_groups)]
            groups = [start + group for start, own in zip(starts, agreed.groups, strict=False) for group in own]
            rows = [[part[group] for group in groups] for part in self.parts]
            columns = samples_of_rows(exchanges, rows, self.inverse[groups].split(self.cuts, dim=1))
        if self.taken is None:
            return columns
        # Looked up here, while the others are on their way.
        added_BS = self.taken.columns([piece for pieces in agreed.all_pieces for piece in pieces])
        blocks = added_BS.split(self.cuts)
        return [CachedAwaitable(part, block.add) for part, block in zip(columns, blocks, strict=True)]

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory of the rows until a stream has done its work."""
        for part in (self.inverse, self.taken):
            if part is not None:
                part.record_stream(stream)


def wrap(module: Any, **changes: Any) -> None:
    """Changes fields of a sharded module's encoder, from its next batch on; every rank calls it between two batches."""
    groups = [group for of_tower in module.groups for group in of_tower]
    encoder = replace(module.encoder or RowEncoder(groups), **changes)
    module.encoder = encoder if encoder.num_parts > 1 or encoder.share or encoder.take_out else None


def part_sizes(batch_size: int, num: int) -> list[int]:
    """Returns the samples of each part of a batch, the first ones one larger where it does not divide; any may be 0.

    Example:
        >>> part_sizes(10, 4), part_sizes(1, 2)
        ([3, 3, 2, 2], [1, 0])
    """
    small, rest = divmod(batch_size, num)
    return [small + 1] * rest + [small] * (num - rest)


def rows_of_parts(
    code: RowCode, ids: KeyedJaggedTensor, groups: Sequence[Sequence[Sequence[str]]], tower: int
) -> tuple[KeyedJaggedTensor, list[Rows]]:
    """Reads the rows of each part off the ids that arrived from the peers, a key for each feature and part.

    Returns the ids with one batch size for all features, [F, rows] bags, part by part, in each peer by peer: empty
    bags, which never leave the tower, fill up groups that have fewer rows than another.
    """
    num, sizes = len(code.parts), [len(group) for group in groups[tower]]
    strides, firsts = ids.stride_per_key_per_rank(), [0, *itertools.accumulate(sizes)][:-1]
    parts = []
    for k, of_part in enumerate(code.parts):
        arrived = zip(*(strides[first * num + k] for first in firsts), strict=True)
        asked = iter(of_part)
        sent = [[next(asked) for _ in of_tower] for of_tower in groups]
        parts.append(Rows([list(of_peer) for of_peer in arrived], sent))
    lengths, per_key = ids.lengths(), ids.length_per_key_or_none()
    if any(number < part.num_rows for part in parts for number in part.by_group):
        blocks = [torch.arange(part.num_rows) < torch.tensor(part.by_group).unsqueeze(1) for part in parts]
        is_row = torch.cat(blocks, dim=1).repeat_interleave(torch.tensor(sizes), dim=0).to(ids.device())
        lengths = lengths.new_zeros(is_row.shape).masked_scatter_(is_row, lengths).flatten()
    filled = KeyedJaggedTensor(
        keys=ids.keys()[::num],
        values=ids.values(),
        weights=ids.weights_or_none(),
        lengths=lengths,
        stride=sum(part.num_rows for part in parts),
        # Counted again, a GPU would be waited for.
        length_per_key=None if per_key is None else [sum(per_key[i : i + num]) for i in range(0, len(per_key), num)],
    )
    return filled, parts


def samples_of_parts(
    ids: KeyedJaggedTensor, batch_sizes: Sequence[int], num: int, *, num_groups: Sequence[int], tower: int
) -> tuple[KeyedJaggedTensor, list[Rows]]:
    """Arranges samples, each of which is a row, part by part, in each peer by peer; they arrive peer by peer.

    As with the peer permute, ids are permuted rather than the embeddings looked up with them (DMT section 3.1.3).
    ``batch_sizes`` are B of every peer, ``num_groups`` G of every tower.

    Example:
        >>> ids = KeyedJaggedTensor(keys=["f"], values=torch.arange(5), lengths=torch.ones(5, dtype=torch.int64))
        >>> arranged, parts = samples_of_parts(ids, [2, 3], 2, num_groups=[1, 1], tower=0)
        >>> arranged.values().tolist(), parts[0].arrived  # samples 0 1 | 2 3 4 -> 0 2 3 | 1 4
        ([0, 2, 3, 1, 4], [[1], [2]])
    """
    of_peers = [part_sizes(size, num) for size in batch_sizes]
    parts = [
        Rows(
            [[sizes[k]] * num_groups[tower] for sizes in of_peers],
            [[of_peers[tower][k]] * groups for groups in num_groups],
        )
        for k in range(num)
    ]
    blocks = torch.arange(sum(batch_sizes)).split([size for sizes in of_peers for size in sizes])
    order = torch.cat([block for k in range(num) for block in blocks[k::num]])
    bags = torch.arange(len(ids.keys())).unsqueeze(1) * ids.stride() + order
    permuted = bags.flatten().to(device=ids.device(), dtype=torch.int32)
    lengths, values, weights = torch.ops.fbgemm.permute_1D_sparse_data(
        permuted, ids.lengths(), ids.values(), ids.weights_or_none(), ids.values().numel()
    )
    # No bag goes to another feature: ids per feature are as before. Counted again, a GPU would be waited for.
    per_key = ids.length_per_key_or_none()
    arranged = KeyedJaggedTensor(
        keys=ids.keys(), values=values, weights=weights, lengths=lengths, stride=ids.stride(), length_per_key=per_key
    )
    return arranged, parts


def exchange_rows(outputs_PO: Tensor, rows: Rows, agreed: AgreedOutputs, tower: int) -> Awaitable[list[Tensor]]:
    """Starts step f where groups differ in their rows; the result has the rows of each piece, [rows, width].

    Only real rows are sent, peer by peer. To a peer all of whose groups have as many rows they are sent row by row, to
    others piece by piece.
    """
    own = agreed.groups[tower], agreed.widths[tower]
    sizes = [_count(of_peer, *own) for of_peer in rows.arrived]
    by_tower = list(zip(rows.sent, agreed.groups, agreed.widths, strict=True))
    arriving: list[tuple[int, ...]] = [(_count(*of_tower),) for of_tower in by_tower]
    started = agreed.exchange.exchange(_sent_numbers(outputs_PO, rows.arrived, *own), sizes, arriving)
    return CachedAwaitable(started, functools.partial(_arrived_pieces, by_tower=by_tower))


def _sent_numbers(
    columns: Tensor, rows: Sequence[Sequence[int]], groups: Sequence[int], widths: Sequence[int]
) -> Tensor:
    """Returns the numbers that each peer is sent, peer by peer, from the columns of a tower [rows, O]; differentiable.

    ``rows`` [T][G] are those of a group for a peer, ``groups`` and ``widths`` those of each piece of the output.
    """
    if all(_is_even(of_peer) for of_peer in rows):
        return columns
    by_group = [list(of_group) for of_group in zip(*rows, strict=True)]
    # One split of all columns, then one of all rows: their gradients are one copy each.
    by_piece = [
        piece.split([*by_group[group], len(columns) - sum(by_group[group])])[:-1]
        for group, piece in zip(groups, columns.split(list(widths), dim=1), strict=True)
    ]
    blocks: list[Tensor] = []
    for of_peer, pieces in zip(rows, zip(*by_piece, strict=True), strict=True):
        blocks += [torch.cat(pieces, dim=1)] if _is_even(of_peer) else pieces
    return torch.cat([block.flatten() for block in blocks])


def _arrived_pieces(
    numbers: Tensor, by_tower: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]
) -> list[Tensor]:
    """Returns the rows of each piece, tower by tower, from the numbers that arrive in the order of `_sent_numbers`."""
    pieces: list[Tensor] = []
    blocks = numbers.split([_count(*of_tower) for of_tower in by_tower])
    for block, (rows, groups, widths) in zip(blocks, by_tower, strict=True):
        if _is_even(rows):
            pieces += block.view(rows[0], sum(widths)).split(list(widths), dim=1)
        else:
            cut = block.split([rows[group] * width for group, width in zip(groups, widths, strict=True)])
            pieces += [piece.view(-1, width) for piece, width in zip(cut, widths, strict=True)]
    return pieces


def _count(rows: Sequence[int], groups: Sequence[int], widths: Sequence[int]) -> int:
    """Returns how many numbers a tower's output has for some rows of each group."""
    return sum(rows[group] * width for group, width in zip(groups, widths, strict=True))


def _is_even(rows: Sequence[int]) -> bool:
    return len(set(rows)) == 1
