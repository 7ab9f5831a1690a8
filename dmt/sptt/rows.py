"""Rows that a batch makes cross between peers, micro-batch by micro-batch: their order, and where they go.

Without `dmt.sptt.unique` every sample is a row of every group of features. With it a group has a row for each of its
distinct inputs, so that groups differ in their number of rows, and a row may serve samples of several micro-batches: a
micro-batch waits for the parts up to the last one that holds a row of its samples.

Shape suffixes: F features, G groups of one tower, T peers, B samples of this rank.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt.sptt.unique import DistinctInputs

__all__ = [
    "PartRows",
    "TakenRows",
    "arrange_rows",
    "arrived_pieces",
    "copied_rows",
    "micro_batch_sizes",
    "numbers_of",
    "parts_needed",
    "rows_in_parts",
    "sent_numbers",
]


@dataclass(frozen=True)
class PartRows:
    """Rows of one micro-batch, or of a whole batch."""

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


def rows_in_parts(rows: Sequence[Sequence[int]], num: int) -> list[list[list[int]]]:
    """Splits numbers of rows [T][G] over micro-batches, [num][T][G]."""
    parts = [[micro_batch_sizes(of_group, num) for of_group in of_peer] for of_peer in rows]
    return [[[of_group[k] for of_group in of_peer] for of_peer in parts] for k in range(num)]


def micro_batch_sizes(batch_size: int, num: int) -> list[int]:
    """Returns the samples of each micro-batch, the first ones one larger where it does not divide; any may be 0.

    Example:
        >>> micro_batch_sizes(10, 4), micro_batch_sizes(1, 2)
        ([3, 3, 2, 2], [1, 0])
    """
    small, rest = divmod(batch_size, num)
    return [small + 1] * rest + [small] * (num - rest)


def arrange_rows(ids: KeyedJaggedTensor, parts: Sequence[PartRows], sizes: Sequence[int]) -> KeyedJaggedTensor:
    """Arranges the rows that peers sent as bags [F, rows], micro-batch by micro-batch, in each peer by peer.

    As with the peer permute, ids are permuted rather than the embeddings looked up with them (DMT section 3.1.3). Where
    groups differ in their number of rows, empty bags fill up a micro-batch.

    Args:
        ids: ids as they arrived, of each feature peer by peer.
        parts: rows of each micro-batch.
        sizes: number of features of each group.

    Returns:
        The ids, all features with one batch size.

    Example:
        >>> ids = KeyedJaggedTensor(keys=["f"], values=torch.arange(5), lengths=torch.ones(5, dtype=torch.int64))
        >>> parts = [PartRows(arrived, sent=[]) for arrived in rows_in_parts([[2], [3]], 2)]
        >>> arrange_rows(ids, parts, [1]).values().tolist()  # samples 0 1 | 2 3 4 -> 0 2 3 | 1 4
        [0, 2, 3, 1, 4]
    """
    device, num = ids.device(), len(parts)
    lengths, values, weights = ids.lengths(), ids.values(), ids.weights_or_none()
    if num > 1:
        by_peer = list(zip(*(part.arrived for part in parts), strict=True))
        bags, start = [], 0
        for group, size in enumerate(sizes):
            cuts = [of_peer[group] for of_parts in by_peer for of_peer in of_parts]
            blocks = torch.arange(sum(cuts)).split(cuts)
            order = torch.cat([block for k in range(num) for block in blocks[k::num]])
            for _ in range(size):
                bags.append(order + start)
                start += len(order)
        permuted = torch.cat(bags).to(device=device, dtype=torch.int32)
        lengths, values, weights = torch.ops.fbgemm.permute_1D_sparse_data(
            permuted, lengths, values, weights, values.numel()
        )
    if any(number < part.num_rows for part in parts for number in part.by_group):
        blocks_of_rows = [torch.arange(part.num_rows) < torch.tensor(part.by_group).unsqueeze(1) for part in parts]
        is_row = torch.cat(blocks_of_rows, dim=1)
        is_row = is_row.repeat_interleave(torch.tensor(sizes), dim=0)
        lengths = lengths.new_zeros(is_row.shape).masked_scatter_(is_row.to(device), lengths).flatten()
    # No bag goes to another feature: ids per feature are as before. Counted again, a GPU would be waited for.
    stride, per_key = sum(part.num_rows for part in parts), ids.length_per_key_or_none()
    return KeyedJaggedTensor(
        keys=ids.keys(), values=values, weights=weights, lengths=lengths, stride=stride, length_per_key=per_key
    )


def sent_numbers(
    columns: Tensor, rows: Sequence[Sequence[int]], groups: Sequence[int], widths: Sequence[int]
) -> Tensor:
    """Returns the numbers that each peer is sent, peer by peer, from the columns of a tower [rows, O]; differentiable.

    To a peer all of whose groups have as many rows the columns are sent row by row, to others piece by piece.

    Args:
        columns: those of all rows, with those that fill up groups of fewer rows.
        rows: [T][G], rows of each group for each peer.
        groups: group of each piece of the tower's output.
        widths: columns of each piece.
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


def arrived_pieces(
    numbers: Tensor, rows: Sequence[Sequence[int]], groups: Sequence[Sequence[int]], widths: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Returns the rows [rows of the group, width] of each piece, tower by tower, from the numbers that arrive.

    Args:
        numbers: those of all towers, in the order of `sent_numbers`.
        rows: [T][G], rows of each group that each tower was asked for.
        groups: for each tower the group of each piece.
        widths: for each tower the columns of each piece.
    """
    pieces: list[Tensor] = []
    sizes = [numbers_of(*of_tower) for of_tower in zip(rows, groups, widths, strict=True)]
    for block, of_tower, own, columns in zip(numbers.split(sizes), rows, groups, widths, strict=True):
        if _is_even(of_tower):
            pieces += block.view(of_tower[0], sum(columns)).split(list(columns), dim=1)
        else:
            cut = block.split([of_tower[group] * width for group, width in zip(own, columns, strict=True)])
            pieces += [piece.view(-1, width) for piece, width in zip(cut, columns, strict=True)]
    return pieces


def numbers_of(rows: Sequence[int], groups: Sequence[int], widths: Sequence[int]) -> int:
    """Returns how many numbers a tower's output has for some rows of each group."""
    return sum(rows[group] * width for group, width in zip(groups, widths, strict=True))


def _is_even(rows: Sequence[int]) -> bool:
    return len(set(rows)) == 1


def parts_needed(distinct: DistinctInputs, rows: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """For each micro-batch the number of parts, from the first on, that hold the rows of all its samples.

    Args:
        distinct: the rows that this rank asked for.
        rows: [parts][T][G], rows of each group of each tower in each part.
    """
    num = len(rows)
    if num == 1:
        return [1]
    by_group = zip(*([number for of_tower in part for number in of_tower] for part in rows), strict=True)
    ends = [list(itertools.accumulate(of_group)) for of_group in by_group]
    blocks = distinct.inverse.split(micro_batch_sizes(distinct.inverse.shape[1], num), dim=1)
    nothing = distinct.inverse.new_full((len(ends), 1), -1)
    last = torch.stack([torch.cat([nothing, block], dim=1).amax(dim=1) for block in blocks])
    needed = [
        max(bisect.bisect_right(of_group, row) + 1 for row, of_group in zip(of_block, ends, strict=True))
        for of_block in last.tolist()
    ]
    # The last one waits for all: peers have rows in parts where this rank has none, and send gradients for them.
    return [*itertools.accumulate(needed[:-1], max), num]


class TakenRows(Awaitable[Tensor]):
    """Copies the rows that arrive to the samples of a micro-batch that share them, [B, S]; differentiable.

    Args:
        arriving: awaitables of the `arrived_pieces` of this micro-batch and those before, in order.
        inverse: row of each sample for each piece, [pieces, B].
    """

    def __init__(self, arriving: Sequence[Any], inverse: Tensor) -> None:
        super().__init__()
        self._arriving = arriving
        self._inverse = inverse

    def _wait_impl(self) -> Tensor:
        by_piece = zip(*(part.wait() for part in self._arriving), strict=True)
        columns = []
        for parts, samples in zip(by_piece, self._inverse, strict=True):
            columns.append(copied_rows(torch.cat(parts) if len(parts) > 1 else parts[0], samples))
        return torch.cat(columns, dim=1)


def copied_rows(rows: Tensor, samples: Tensor) -> Tensor:
    """Copies rows [rows, width] to the samples that share them, [samples, width]; differentiable."""
    # Its gradient sums the samples of a row in a fixed order, on a GPU too; in BF16 it would stop growing.
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return F.embedding(samples, wide).to(rows.dtype)
