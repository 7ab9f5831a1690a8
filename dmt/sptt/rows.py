"""Rows that a batch makes cross between peers, micro-batch by micro-batch: their order, and where they go.

Without `dmt.sptt.unique` every sample is a row of every group of features. With it a group has a row for each of its
distinct inputs, so that groups differ in their number of rows, and a row may serve samples of several micro-batches: it
crosses with the first of them, so that a micro-batch waits for its own exchange and those before it.

Shape suffixes: F features, G groups of one tower, T peers, B samples of this rank.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = [
    "PartRows",
    "arrived_pieces",
    "by_micro_batch",
    "copied_rows",
    "filled_up",
    "in_micro_batches",
    "is_real",
    "joined_rows",
    "micro_batch_sizes",
    "numbers_of",
    "rows_by_part",
    "sent_numbers",
    "taken_rows",
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


def micro_batch_sizes(batch_size: int, num: int) -> list[int]:
    """Returns the samples of each micro-batch, the first ones one larger where it does not divide; any may be 0.

    Example:
        >>> micro_batch_sizes(10, 4), micro_batch_sizes(1, 2)
        ([3, 3, 2, 2], [1, 0])
    """
    small, rest = divmod(batch_size, num)
    return [small + 1] * rest + [small] * (num - rest)


def by_micro_batch(batch_sizes: Sequence[int], num: int) -> list[list[int]]:
    """Returns the samples of each peer in each micro-batch, [num][T]."""
    return [list(part) for part in zip(*(micro_batch_sizes(size, num) for size in batch_sizes), strict=True)]


def in_micro_batches(ids: KeyedJaggedTensor, batch_sizes: Sequence[int], num: int) -> KeyedJaggedTensor:
    """Arranges the samples that peers sent micro-batch by micro-batch, in each peer by peer.

    As with the peer permute, ids are permuted rather than the embeddings looked up with them (DMT section 3.1.3). They
    arrive feature by feature, in each peer by peer; batch sizes are B of every peer.

    Example:
        >>> ids = KeyedJaggedTensor(keys=["f"], values=torch.arange(5), lengths=torch.ones(5, dtype=torch.int64))
        >>> in_micro_batches(ids, [2, 3], 2).values().tolist()  # samples 0 1 | 2 3 4 -> 0 2 3 | 1 4
        [0, 2, 3, 1, 4]
    """
    blocks = torch.arange(sum(batch_sizes)).split(
        [part for size in batch_sizes for part in micro_batch_sizes(size, num)]
    )
    order = torch.cat([block for k in range(num) for block in blocks[k::num]])
    bags = torch.arange(len(ids.keys())).unsqueeze(1) * ids.stride() + order
    permuted = bags.flatten().to(device=ids.device(), dtype=torch.int32)
    lengths, values, weights = torch.ops.fbgemm.permute_1D_sparse_data(
        permuted, ids.lengths(), ids.values(), ids.weights_or_none(), ids.values().numel()
    )
    # No bag goes to another feature: ids per feature are as before. Counted again, a GPU would be waited for.
    per_key = ids.length_per_key_or_none()
    return KeyedJaggedTensor(
        keys=ids.keys(), values=values, weights=weights, lengths=lengths, stride=ids.stride(), length_per_key=per_key
    )


def rows_by_part(ids: KeyedJaggedTensor, sizes: Sequence[int], num: int) -> list[list[list[int]]]:
    """Reads the rows that arrived, [num][T][G], off ids with a key for each feature and micro-batch.

    Each key and peer has a batch size; ``sizes`` are the features of each group, which all have its rows.
    """
    strides, firsts = ids.stride_per_key_per_rank(), [0, *itertools.accumulate(sizes)][:-1]
    by_part = [[strides[first * num + k] for first in firsts] for k in range(num)]
    return [[list(of_peer) for of_peer in zip(*of_part, strict=True)] for of_part in by_part]


def filled_up(ids: KeyedJaggedTensor, parts: Sequence[PartRows], sizes: Sequence[int]) -> KeyedJaggedTensor:
    """Gives all features one batch size: empty bags fill up a micro-batch of a group that has fewer rows than another.

    The ids have a key for each feature and micro-batch, ``sizes`` features a group. They come out as bags [F, rows],
    micro-batch by micro-batch, in each peer by peer, as they came.
    """
    num, lengths, per_key = len(parts), ids.lengths(), ids.length_per_key_or_none()
    if any(number < part.num_rows for part in parts for number in part.by_group):
        is_row = is_real(parts).repeat_interleave(torch.tensor(sizes), dim=0).to(ids.device())
        lengths = lengths.new_zeros(is_row.shape).masked_scatter_(is_row, lengths).flatten()
    return KeyedJaggedTensor(
        keys=ids.keys()[::num],
        values=ids.values(),
        weights=ids.weights_or_none(),
        lengths=lengths,
        stride=sum(part.num_rows for part in parts),
        # Counted again, a GPU would be waited for.
        length_per_key=None if per_key is None else [sum(per_key[i : i + num]) for i in range(0, len(per_key), num)],
    )


def is_real(parts: Sequence[PartRows]) -> Tensor:
    """Returns which bags of `filled_up` are rows of their group, [G, rows] bool, on the CPU."""
    blocks = [torch.arange(part.num_rows) < torch.tensor(part.by_group).unsqueeze(1) for part in parts]
    return torch.cat(blocks, dim=1)


def sent_numbers(
    columns: Tensor, rows: Sequence[Sequence[int]], groups: Sequence[int], widths: Sequence[int]
) -> Tensor:
    """Returns the numbers that each peer is sent, peer by peer, from the columns of a tower [rows, O]; differentiable.

    To a peer all of whose groups have as many rows the columns are sent row by row, to others piece by piece.

    Columns have all rows, with those that fill up groups of fewer; ``rows`` [T][G] are those of a group for a peer,
    ``groups`` and ``widths`` those of each piece of the tower's output.
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

    Numbers come in the order of `sent_numbers`; ``rows`` [T][G] are those of each group that each tower was asked for,
    ``groups`` and ``widths`` by tower those of each piece.
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


def joined_rows(arriving: Sequence[Any]) -> list[Tensor]:
    """Waits for rows that several exchanges bring: of each piece those of the first exchange first; differentiable."""
    by_piece = zip(*(part.wait() for part in arriving), strict=True)
    return [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in by_piece]


def taken_rows(arriving: Sequence[Any], inverse: Tensor) -> Tensor:
    """Copies rows to the samples of a micro-batch that share them, [B, S]; differentiable.

    `arrived_pieces` of this micro-batch and all before it are waited for; ``inverse``, [pieces, B]: row of each sample.
    """
    pieces = zip(joined_rows(arriving), inverse, strict=True)
    return torch.cat([copied_rows(rows, samples) for rows, samples in pieces], dim=1)


def copied_rows(rows: Tensor, samples: Tensor) -> Tensor:
    """Copies rows [rows, width] to the samples that share them, [samples, width]; differentiable."""
    # Its gradient sums the samples of a row in a fixed order, on a GPU too; in BF16 it would stop growing.
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return F.embedding(samples, wide).to(rows.dtype)
