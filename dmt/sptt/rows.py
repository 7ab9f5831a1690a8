"""Encodes samples as rows before they are sent, counts the rows, and decodes what comes back.

A row (not a row of a table) is one entry of a feature, or of a group of features, that is sent once and may serve
several samples. Without a `RowEncoder`, each sample has its own row in every feature. With one, samples may share a row
(`dmt.sptt.unique`); where a batch is cut into parts (`dmt.sptt.micro_batches`), a row is sent only with the first part
that needs it. The encoder returns a `RowCode`, which turns the rows that come back into columns of samples. TorchRec's
KJT all-to-all also sends the numbers of rows, so both ends then know all sizes.

Legend as in `dmt.sptt.dataflow`; also F features, K parts, G groups of a tower's features with the same number of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt.sptt.peer_exchange import AgreedOutputs, Pending, Rows
from dmt.sptt.unique import distinct_inputs, samples_of_rows

__all__ = ["RowCode", "RowEncoder", "exchange_rows", "part_sizes", "rows_of_parts", "wrap"]


@dataclass(frozen=True, eq=False)
class RowEncoder:
    """Turns the samples of a batch into rows; each option that wraps the exchange sets a field with `wrap`."""

    groups: Sequence[Sequence[str]]
    """Groups of the features of all towers, in the order in which their ids are sent."""
    num_parts: int = 1
    """K, the number of parts in which a batch crosses between towers."""
    shares_equal: bool = False
    """True: samples with equal inputs in a group of features share a row of that group."""
    take_out: Callable[[KeyedJaggedTensor], tuple[KeyedJaggedTensor, Any]] | None = None
    """Takes ids out of a batch before it is sent; samples with no ids left in a group share a row of that group.
    Returns the other ids, and an object with ``record_stream`` and ``columns(pieces)``, which gives [B, S] to add."""

    def encode(self, ids: KeyedJaggedTensor) -> RowCode | None:
        """Returns the rows of a batch; ``ids`` has the features in the order in which they are sent.

        Returns None where every sample is a row: then the peers derive the sizes of all parts from the batch size.
        """
        taken = None
        if self.take_out is not None:
            ids, taken = self.take_out(ids)
        elif not self.shares_equal:
            return None
        # Rows are found over the whole batch: a part sends only rows that no earlier part has sent.
        sizes, cuts = [len(group) for group in self.groups], part_sizes(ids.stride(), self.num_parts)
        sent, parts, inverse = distinct_inputs(ids, sizes, share=self.shares_equal, cuts=cuts)
        return RowCode(sent, parts, inverse, cuts, taken)


@dataclass(frozen=True, eq=False)
class RowCode:
    """The samples of one batch of this rank, encoded as rows."""

    ids: KeyedJaggedTensor
    """Ids of the rows. A feature has one key per part, in order; the batch size of a key is its number of rows."""
    parts: list[list[int]]
    """[K][groups], number of rows of each part that no earlier part has."""
    inverse: Tensor
    """Row of each sample, [groups, B] int64."""
    cuts: list[int]
    """[K], number of samples of each part."""
    taken: Any
    """The object that `RowEncoder.take_out` returned; None without it."""

    def decode(
        self, exchanges: Sequence[Awaitable[Any]], agreed: AgreedOutputs, num_groups: Sequence[int]
    ) -> list[Awaitable[Tensor]]:
        """Returns each part's columns [B, S] in flight; ``exchanges`` deliver rows, ``num_groups`` is G per tower."""
        # Pieces come tower by tower; each tower numbers its groups from 0.
        starts = [0, *itertools.accumulate(num_groups)]
        groups = [start + group for start, tower in zip(starts, agreed.groups, strict=False) for group in tower]
        rows = [[part[group] for group in groups] for part in self.parts]
        # Not self.inverse[groups], which would copy the list to a GPU and wait for it.
        by_group, widths = self.inverse.unbind(), list(itertools.chain(*agreed.widths))
        inverse = torch.stack([by_group[group] for group in groups])
        columns = samples_of_rows(exchanges, rows, widths, inverse.split(self.cuts, dim=1))
        if self.taken is None:
            return columns
        # Looked up while the other columns are in flight.
        added_BS = self.taken.columns([piece for pieces in agreed.pieces for piece in pieces])
        blocks = added_BS.split(self.cuts)
        return [Pending(lambda part, block: part.wait() + block, *pair) for pair in zip(columns, blocks, strict=True)]

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory of the rows until ``stream`` has used it."""
        for part in (self.inverse, self.taken):
            if part is not None:
                part.record_stream(stream)


def wrap(module: Any, **changes: Any) -> None:
    """Changes fields of a module's `RowEncoder`, given by keyword, with effect from the module's next lookup.

    All ranks must make the same change between the same two batches. Defaults for every option remove the encoder.
    """
    groups = [group for of_tower in module.groups for group in of_tower]
    encoder = replace(module.encoder or RowEncoder(groups), **changes)
    is_plain = encoder.num_parts == 1 and not encoder.shares_equal and encoder.take_out is None
    module.encoder = None if is_plain else encoder


def part_sizes(batch_size: int, num: int) -> list[int]:
    """Returns the number of samples of each of ``num`` parts: as equal as possible, larger ones first; some may be 0.

    Example:
        >>> part_sizes(10, 4), part_sizes(1, 2)
        ([3, 3, 2, 2], [1, 0])
    """
    small, rest = divmod(batch_size, num)
    return [small + 1] * rest + [small] * (num - rest)


def rows_of_parts(
    code: RowCode, ids: KeyedJaggedTensor, groups: Sequence[Sequence[Any]], tower: int
) -> tuple[KeyedJaggedTensor, list[Rows]]:
    """Reads the numbers of rows of each part from ids that arrived from the peers, with a key per feature and part.

    Returns the ids with one batch size for all features, [F, rows] bags, part by part and in each part peer by peer;
    then the numbers of rows. Groups with fewer rows are padded with empty bags, which never leave the tower.
    """
    num, sizes = len(code.parts), [len(group) for group in groups[tower]]
    strides, firsts = ids.stride_per_key_per_rank(), [0, *itertools.accumulate(sizes)][:-1]
    parts = []
    for k, of_part in enumerate(code.parts):
        # The features of a group have the same number of rows, so that of the first is enough.
        arrived = zip(*(strides[first * num + k] for first in firsts), strict=True)
        asked = iter(of_part)
        sent = [[next(asked) for _ in of_tower] for of_tower in groups]
        parts.append(Rows([list(of_peer) for of_peer in arrived], sent))
    # TorchRec's sharded collections take one batch size for all features of a tower.
    lengths, per_key = ids.lengths(), ids.length_per_key_or_none()
    if any(number < part.num_rows for part in parts for number in part.by_group):
        numbers = torch.tensor([part.by_group for part in parts]).repeat_interleave(torch.tensor(sizes), dim=1)
        pairs = zip(parts, numbers.to(ids.device()).unsqueeze(2), strict=True)
        is_row = torch.cat([torch.arange(p.num_rows, device=ids.device()) < of_part for p, of_part in pairs], dim=1)
        lengths = lengths.new_zeros(is_row.shape).masked_scatter_(is_row, lengths).flatten()
    filled = KeyedJaggedTensor(
        keys=ids.keys()[::num],
        values=ids.values(),
        weights=ids.weights_or_none(),
        lengths=lengths,
        # Passed because TorchRec would wait for the GPU to count the ids.
        length_per_key=None if per_key is None else [sum(per_key[i : i + num]) for i in range(0, len(per_key), num)],
    )
    return filled, parts


def exchange_rows(outputs_PO: Tensor, rows: Rows, agreed: AgreedOutputs) -> Awaitable[Tensor]:
    """Starts step f where groups differ in rows, and sends these peer by peer, piece by piece, unpadded; 1-D."""
    tower = agreed.exchange.group.rank()
    # Both ends count the same numbers: rows crossed with the ids, widths in the first batch.
    sizes = [sum(_counts(of_peer, agreed, tower)) for of_peer in rows.arrived]
    arriving = [(sum(_counts(of_tower, agreed, number)),) for number, of_tower in enumerate(rows.sent)]
    sent = _sent_numbers(outputs_PO, rows, agreed.groups[tower], agreed.widths[tower])
    return agreed.exchange.exchange(sent, sizes, arriving)


def _counts(rows: Sequence[int], agreed: AgreedOutputs, tower: int) -> list[int]:
    """Returns how many numbers each piece of a tower's output has; ``rows`` has the number of rows of each group."""
    return [rows[group] * width for group, width in zip(agreed.groups[tower], agreed.widths[tower], strict=True)]


def _sent_numbers(columns_PO: Tensor, rows: Rows, groups: Sequence[int], widths: Sequence[int]) -> Tensor:
    """Returns the numbers of a tower's columns in sending order, peer by peer, piece by piece; differentiable."""
    if len(widths) == 1:  # already in this order
        return columns_PO
    by_group = [list(of_group) for of_group in zip(*rows.arrived, strict=True)]
    # One split of all columns, then one of all rows: the gradient of each split is one copy.
    by_piece = [
        piece.split([*by_group[group], rows.num_rows - rows.by_group[group]])[:-1]
        for group, piece in zip(groups, columns_PO.split(list(widths), dim=1), strict=True)
    ]
    blocks = [block for pieces in zip(*by_piece, strict=True) for block in pieces]
    # Blocks of equal width are copied once.
    return torch.cat(blocks if len(set(widths)) == 1 else [block.flatten() for block in blocks]).flatten()
