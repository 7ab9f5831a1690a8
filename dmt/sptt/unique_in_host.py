"""Rows of a host: each distinct input of all ranks of a tower's group crosses hosts once (``unique="host"``).

With ``unique="rank"`` (`dmt.sptt.unique`) the ranks of a host ask the towers for the same inputs, popular ones above
all. Here they unite them over the fast links first: of each distinct input one of the L ranks asks, told by a hash.

====== =======================================================================================  =====
ids    distinct inputs of a rank to the ranks of its host that ask for them (`HostRows.unite`)    tower
a to f as with ``unique="rank"``, for the distinct inputs of what a rank was asked for             peer
f      rows to the ranks that asked, and there to the samples (`HostRows.send_back`)              tower
====== =======================================================================================  =====

The backward pass goes the same way back: samples of a rank are summed, then the ranks of a host, then they are sent.

Legend: G groups of features of all towers, L ranks of the host, R rows of the group that has most, B samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt.sptt.id_routes import exchange_keys
from dmt.sptt.peer_exchange import PeerExchange
from dmt.sptt.rows import PartRows, copied_rows, filled_up, is_real, numbers_of, rows_by_part
from dmt.sptt.unique import Bags, DistinctInputs, distinct_inputs, hashes_of_features

__all__ = ["HostRows", "UnitedRows"]


class UnitedRows(NamedTuple):
    """Rows of one batch that the ranks of a host ask of each other."""

    parts: list[PartRows]
    """For each micro-batch the rows that each rank asks of this one, and those that this rank asks of each."""
    place: Tensor
    """Place of each sample's row among those that arrive for its group, by micro-batch and rank: [G, B] int64."""


class HostRows:
    """Unites the rows of the ranks of a host, and returns what the towers answered; collective over the group.

    The ranks are those of the host that share a tower, each with a peer in every tower; ``sizes`` are the numbers of
    features of all towers' groups, ``tag`` is that of the messages, the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, sizes: Sequence[int], *, tag: int) -> None:
        self._group, self._sizes, self._tag = group, list(sizes), tag
        self._rows: PeerExchange | None = None

    def unite(
        self, ids: KeyedJaggedTensor, distinct: DistinctInputs
    ) -> tuple[KeyedJaggedTensor, DistinctInputs, UnitedRows]:
        """Sends the distinct inputs of this rank to the ranks that ask for them, and unites those that arrive.

        Returns:
            The distinct inputs that this rank asks the towers for, the rows of [G, R] that arrived which have them, and
            who asked. A row that several ranks ask for belongs to the first micro-batch in which one does.
        """
        num_ranks, num = self._group.size(), len(distinct.parts)
        ids, sent, place = self._by_rank(ids, distinct.parts)
        starts = torch.tensor([0, *itertools.accumulate(distinct.rows)][:-1], device=place.device)
        own = place[distinct.inverse + starts.unsqueeze(1)]
        arrived = exchange_keys(self._group, [sum(self._sizes)] * num_ranks, ids).wait().wait()
        asked = rows_by_part(arrived, self._sizes, num)
        parts = [PartRows(*rows) for rows in zip(asked, sent, strict=True)]
        ids, united = distinct_inputs(
            filled_up(arrived, parts, self._sizes),
            self._sizes,
            wanted=[True] * len(self._sizes),
            is_row=is_real(parts).to(place.device),
            micro_batches=[part.num_rows for part in parts],
        )
        return ids, united, UnitedRows(parts, own)

    def _by_rank(
        self, ids: KeyedJaggedTensor, parts: Sequence[Sequence[int]]
    ) -> tuple[KeyedJaggedTensor, list[list[list[int]]], Tensor]:
        """Sorts rows, of which there are ``parts`` [K][G], by the rank that asks for them: all features of each rank.

        Returns these ids, the number of rows [K][L][G], and each row's place in its group, by micro-batch and rank.
        """
        device, num_ranks, num_groups, num_features = ids.device(), self._group.size(), len(parts[0]), sum(self._sizes)
        lengths, values, weights = ids.lengths(), ids.values(), ids.weights_or_none()
        sizes, by_part = (torch.tensor(numbers, device=device) for numbers in (self._sizes, parts))
        num_rows, num = by_part.sum(dim=0), len(parts)
        total = sum(map(sum, parts))
        group_of = torch.arange(num_groups, device=device).repeat_interleave(sizes, output_size=num_features)
        num_bags = num_rows[group_of]
        first_row, first_bag = num_rows.cumsum(0) - num_rows, num_bags.cumsum(0) - num_bags
        cells = torch.arange(num_groups * num, device=device).repeat_interleave(by_part.T.flatten(), output_size=total)
        group, part = cells // num, cells % num
        feature = torch.arange(num_features, device=device).repeat_interleave(num_bags, output_size=len(lengths))
        row = torch.arange(len(lengths), device=device) - first_bag[feature] + first_row[group_of[feature]]
        hashes = Bags(lengths, values, weights).hashes
        if num_groups < num_features:
            mixed = hashes_of_features(hashes, feature)
            hashes = mixed.new_zeros(len(group)).index_add_(0, row, mixed)
        rank = (hashes >> 33) % num_ranks
        # Stable sorts, so that rows of one rank keep their order.
        order = (rank[row] * num_features + feature).argsort(stable=True).int()
        place = torch.empty_like(group)
        place[(cells * num_ranks + rank).argsort(stable=True)] = torch.arange(total, device=device)
        counts = torch.bincount((part * num_ranks + rank) * num_groups + group, minlength=num * num_ranks * num_groups)
        sent: list[list[list[int]]] = counts.view(num, num_ranks, num_groups).tolist()
        lengths, values, weights = torch.ops.fbgemm.permute_1D_sparse_data(
            order, lengths, values, weights, values.numel()
        )
        of_features = [number for number, size in enumerate(self._sizes) for _ in range(size)]
        by_key = [[of_part[to][own]] for to in range(num_ranks) for own in of_features for of_part in sent]
        sorted_ids = KeyedJaggedTensor(
            keys=ids.keys() * num_ranks,
            values=values,
            weights=weights,
            lengths=lengths,
            stride_per_key_per_rank=by_key,
        )
        return sorted_ids, sent, place - first_row[group]

    def send_back(
        self,
        pieces: Sequence[Tensor],
        united: UnitedRows,
        part: int,
        *,
        distinct: DistinctInputs,
        groups: Sequence[int],
        widths: Sequence[int],
    ) -> list[Tensor]:
        """Sends rows to the ranks that asked for them; differentiable, their gradients are summed.

        Args:
            pieces: of all towers, [rows of the group, width] each, of this micro-batch and those before it.
            united: who asked.
            part: number of the micro-batch that asked.
            distinct: which of the rows answers.
            groups: group of each piece.
            widths: columns of each piece.

        Returns:
            The pieces with the rows that this rank asked for, rank by rank.
        """
        asked_rows, sent_rows = united.parts[part].arrived, united.parts[part].sent
        start = sum(before.num_rows for before in united.parts[:part])
        by_piece = []
        for piece, group in zip(pieces, groups, strict=True):
            of_ranks = [of_rank[group] for of_rank in asked_rows]
            rows = distinct.inverse[group, start : start + sum(of_ranks)]
            by_piece.append(copied_rows(piece, rows).split(of_ranks))
        numbers = torch.cat([block.flatten() for of_rank in zip(*by_piece, strict=True) for block in of_rank])
        asked, sent = ([numbers_of(rows, groups, widths) for rows in by_rank] for by_rank in (asked_rows, sent_rows))
        if self._rows is None:
            self._rows = PeerExchange(self._group, asked, dtype=numbers.dtype, tag=self._tag, divides_gradients=False)
        arrived = self._rows.exchange(numbers, asked, [(number,) for number in sent]).wait()
        cuts = [rows[group] * width for rows in sent_rows for group, width in zip(groups, widths, strict=True)]
        blocks = arrived.split(cuts)
        return [
            torch.cat([block.view(-1, width) for block in blocks[piece :: len(widths)]])
            for piece, width in enumerate(widths)
        ]
