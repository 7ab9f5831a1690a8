"""Unique inputs: each distinct input of a batch is sent and looked up once, and its output is returned once.

Popular items, and users with many samples, make inputs repeat in a batch. A *group* of features is one feature for a
flat model in the SPTT dataflow, and all features of a tower for a model of towers. Samples with equal inputs of a group
share a row, and the exchange between hosts carries rows instead of samples (steps as in `dmt.sptt.dataflow`):

====== ==========================================================================================================
ids    only the distinct inputs of each group (`distinct_inputs`)
a to d rows of all peers side by side; groups with fewer rows are padded with empty bags (`dmt.sptt.rows`)
f      rows without padding; the receiver copies each row to its samples
====== ==========================================================================================================

The backward pass sums the gradients of the samples that share a row before it sends them. So sharing rows changes
gradients only by the order of that sum, and the outputs of a flat model not at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt.sptt.peer_exchange import Pending

__all__ = ["add_rows", "distinct_inputs", "samples_of_rows"]

_MIX = (-7046029254386353131, -4658895280553007687)
"""Odd multipliers of a 64-bit hash. Inputs with equal hashes are compared: a collision costs bytes, not results."""


def distinct_inputs(
    ids: KeyedJaggedTensor, sizes: Sequence[int], *, share: bool = True, cuts: Sequence[int] | None = None
) -> tuple[KeyedJaggedTensor, list[list[int]], Tensor]:
    """Finds the samples of a batch that have equal inputs.

    Args:
        ids: ids of all features of B samples, those of a group one after the other.
        sizes: number of features of each group.
        share: True: samples with equal inputs share a row; False: only those without any id do.
        cuts: number of samples of each part of the batch; None: one part.

    Returns:
        The ids of the first sample of each row: a feature has one key per part, in order, whose batch size is the
        number of rows that are new in that part. Then the number of new rows by part and group, [parts][groups]; and
        the row of each sample, int64 [groups, B], where rows are numbered in the order of their first samples.

    Example:
        >>> ids = KeyedJaggedTensor(["f"], torch.tensor([7, 8, 9, 7, 8]), lengths=torch.tensor([2, 1, 2]))
        >>> ids, parts, inverse = distinct_inputs(ids, [1])
        >>> ids.values().tolist(), parts, inverse.tolist()
        ([7, 8, 9], [[2]], [[0, 1, 0]])
    """
    device, num_samples = ids.device(), ids.stride()
    # output_size spares the host a wait for a GPU to sum the sizes.
    group_of = torch.arange(len(sizes), device=device).repeat_interleave(
        torch.tensor(sizes, device=device), output_size=sum(sizes)
    )
    samples = torch.arange(num_samples, device=device)
    first = samples.expand(len(sizes), -1)
    if num_samples and share:
        # Unequal inputs with equal hashes are so rare that a batch that contains some shares no rows.
        equal = _first_equal(_hashes(ids, group_of, len(sizes)))
        first = equal if _have_equal_inputs(ids, equal[group_of]) else first
    elif num_samples:
        num_ids = ids.lengths().view(-1, num_samples)
        is_empty = num_ids.new_zeros(first.shape).index_add_(0, group_of, num_ids) == 0
        first = torch.where(is_empty, is_empty.int().argmax(dim=1, keepdim=True), first)
    is_first = first == samples
    blocks = is_first.split([num_samples] if cuts is None else list(cuts), dim=1)
    parts: list[list[int]] = torch.stack([block.sum(dim=1) for block in blocks]).tolist()
    # The number of a row is the number of first samples before it.
    inverse = (is_first.cumsum(dim=1) - 1).gather(1, first)
    lengths, values, weights = ids.lengths(), ids.values(), ids.weights_or_none()
    if sum(map(sum, parts)) < len(sizes) * num_samples:
        # In a batch without repeats nothing is copied.
        kept = is_first[group_of].flatten().nonzero().flatten()
        lengths, values, weights = _bags(ids, kept)
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    sent = KeyedJaggedTensor(
        keys=[key for key in ids.keys() for _ in parts],  # noqa: SIM118 - a KeyedJaggedTensor is no dict
        values=values,
        weights=weights,
        lengths=lengths,
        stride_per_key_per_rank=[[part[group]] for group in groups for part in parts],
    )
    return sent, parts, inverse


def _hashes(ids: KeyedJaggedTensor, group_of: Tensor, num_groups: int) -> Tensor:
    """Returns a hash of each input, int64 [groups, B]; equal inputs have equal hashes."""
    lengths, numbers, weights = ids.lengths().long(), ids.values().long(), ids.weights_or_none()
    bags = torch.arange(len(lengths), device=lengths.device)
    bag_of = bags.repeat_interleave(lengths, output_size=numbers.numel())
    place = torch.arange(numbers.numel(), device=lengths.device) - (lengths.cumsum(0) - lengths)[bag_of]
    if weights is not None:
        numbers = _mix(numbers) + weights.float().view(torch.int32)
    # Lengths distinguish bags of zeros, places the order of ids, features the bags of a group; from 1, as mix(0) is 0.
    of_bags = lengths.index_add(0, bag_of, _mix(numbers + _mix(place + 1))).view(len(group_of), -1)
    features = torch.arange(len(group_of), device=lengths.device).unsqueeze(1)
    of_bags = _mix(of_bags + _mix(features + 1))
    return of_bags.new_zeros(num_groups, of_bags.shape[1]).index_add_(0, group_of, of_bags)


def _mix(numbers: Tensor) -> Tensor:
    numbers = numbers * _MIX[0]
    return (numbers ^ (numbers >> 31)) * _MIX[1]


def _first_equal(hashes: Tensor) -> Tensor:
    """Returns for each sample the first one with the same hash, [groups, B]."""
    # Stable: the first sample with a hash stays first.
    hashes, order = hashes.sort(dim=1, stable=True)
    places = torch.arange(hashes.shape[1], device=hashes.device).expand_as(hashes)
    begins = torch.ones_like(hashes, dtype=torch.bool)
    begins[:, 1:] = hashes[:, 1:] != hashes[:, :-1]
    begin = torch.where(begins, places, 0).cummax(dim=1).values
    return torch.empty_like(order).scatter_(1, order, order.gather(1, begin))


def _have_equal_inputs(ids: KeyedJaggedTensor, others: Tensor) -> bool:
    """Returns whether each bag equals, bit for bit, that of the sample whose number is in ``others`` [features, B]."""
    starts = torch.arange(len(others), device=others.device).unsqueeze(1) * ids.stride()
    ours, theirs = (ids.lengths(), ids.values(), ids.weights_or_none()), _bags(ids, (others + starts).flatten())
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    return all(torch.equal(a.contiguous().view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def _bags(ids: KeyedJaggedTensor, bags: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the lengths, ids and weights of the bags whose numbers are in ``bags`` [n]."""
    parts: tuple[Tensor, Tensor, Tensor | None] = torch.ops.fbgemm.permute_1D_sparse_data(
        bags.int(), ids.lengths(), ids.values(), ids.weights_or_none(), None
    )
    return parts


def samples_of_rows(
    exchanges: Sequence[Awaitable[Tensor]], rows: list[list[int]], widths: list[int], inverses: Sequence[Tensor]
) -> list[Awaitable[Tensor]]:
    """Copies arriving rows to the samples that share them; differentiable.

    Args:
        exchanges: for each part, the exchange that brings the rows not in earlier parts, 1-D, piece by piece.
        rows: number of these rows, [parts][pieces].
        widths: number of columns of each piece.
        inverses: for each part the row of each sample, int64 [pieces, samples]; rows are numbered over all parts.

    Returns:
        Columns of each part, [samples, columns of all pieces], in flight; a part waits for all exchanges up to its own.
    """
    held = _HeldRows(list(exchanges), rows, widths, inverses[0].device)
    return [Pending(held.samples, k, inverse) for k, inverse in enumerate(inverses)]


class _HeldRows:
    """Rows that arrive part by part in one buffer, cut into units as wide as the common divisor of all widths.

    So one operation copies the rows of all pieces, of which there may be thousands, and no part copies earlier ones.
    """

    def __init__(self, exchanges: list[Any], rows: list[list[int]], widths: list[int], device: torch.device) -> None:
        self.exchanges, self.width = exchanges, math.gcd(*widths)
        self.sizes = [sum(n * w for n, w in zip(part, widths, strict=True)) // self.width for part in rows]  # in units
        units, counts = torch.tensor(widths) // self.width, torch.tensor(rows)
        sizes, begins = counts * units, counts.cumsum(0) - counts
        # A part's rows of a piece follow those of other pieces, but are numbered on from its rows in earlier parts.
        shifts = sizes.flatten().cumsum(0).view_as(sizes) - sizes - begins * units
        piece = torch.arange(len(units)).repeat_interleave(units, output_size=sum(widths) // self.width)
        place = torch.arange(len(piece)) - (units.cumsum(0) - units)[piece]  # of each unit of a sample, in its piece
        fixed = [begins.unsqueeze(2), shifts.unsqueeze(2), units.unsqueeze(1), piece, place]
        # Pinned, so that the host does not wait for a GPU.
        fixed = [t.pin_memory().to(device, non_blocking=True) for t in fixed] if device.type == "cuda" else fixed
        self._begins, self._shifts, self._units, self._piece, self._place = fixed
        self.rows = self.gradients = torch.empty(0)
        self._arrived: list[Tensor] = []  # empty tensors; they tell autograd that copies depend on the rows of a part

    def samples(self, part: int, inverse: Tensor) -> Tensor:
        """Waits for the rows of a part and of all earlier ones; returns their copies, [samples, columns]."""
        for k in range(len(self._arrived), part + 1):
            self._arrived.append(_Arrive.apply(self, k, self.exchanges[k].wait()))
        shifts = self._shifts[0]
        for k in range(1, part + 1):
            shifts = torch.where(inverse < self._begins[k], shifts, self._shifts[k])
        places = (inverse * self._units + shifts).t().index_select(1, self._piece).add_(self._place)
        copied: Tensor = _Copy.apply(self, places, *self._arrived[: part + 1])
        return copied


class _Arrive(Function):
    @staticmethod
    def forward(ctx: Any, held: _HeldRows, part: int, numbers: Tensor) -> Tensor:
        ctx.held, ctx.part, ctx.dtype = held, part, numbers.dtype
        units = numbers.detach().view(-1, held.width)
        if len(held.sizes) == 1:  # nothing to put together
            held.rows = units
        else:
            held.rows = held.rows if part else units.new_empty(sum(held.sizes), held.width)
            held.rows.split(held.sizes)[part].copy_(units)
        return numbers.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        held = ctx.held
        # These sums are complete: the copies of this part and of all later ones have gone back.
        gradients = held.gradients.split(held.sizes)[ctx.part].flatten()
        if not ctx.part:
            # Autograd reaches the first part last. Another pass through a retained graph starts from zero.
            held.gradients = torch.empty(0)
        return None, None, gradients.to(ctx.dtype)


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, held: _HeldRows, places: Tensor, *_: Tensor) -> Tensor:
        ctx.held, ctx.places, ctx.num_parts = held, places, len(_)
        return held.rows.index_select(0, places.flatten()).view(len(places), held.width * places.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        held = ctx.held
        if not len(held.gradients):
            # In BF16, a sum of many numbers would stop growing.
            held.gradients = torch.zeros_like(held.rows, dtype=torch.promote_types(held.rows.dtype, torch.float32))
        # A row was looked up once for all its samples, so its gradient is the sum of theirs.
        add_rows(held.gradients, ctx.places.flatten(), gradients[0].reshape(-1, held.width))
        return None, None, *(gradients[0].new_empty(0) for _ in range(ctx.num_parts))


def add_rows(total: Tensor, rows: Tensor, added: Tensor) -> None:
    """Adds ``added`` [samples, width] to ``total[rows]`` in place and in a fixed order, on a GPU too."""
    if total.is_cuda:
        total.index_put_((rows,), added.to(total.dtype), accumulate=True)
    else:
        total.index_add_(0, rows, added.to(total.dtype))
