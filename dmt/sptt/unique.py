"""Unique inputs: each distinct input of a batch is sent, looked up, computed and returned once.

In one batch the same input occurs many times: popular items, and users with many samples. Where all ids of a *group* of
features repeat, so do the rows that come back for them. A group is one feature for a flat model in the SPTT dataflow,
and all features of a tower for a model of towers. Samples with equal inputs share a row, and the exchange between hosts
carries rows instead of samples:

====== ==========================================================================================================
ids    of each group the distinct inputs only (`distinct_inputs`); TorchRec's KJT all-to-all carries the
       number of rows of every feature along, so both ends know all sizes from then on
a to d rows of all peers side by side; groups with fewer rows get empty bags at the end (`dmt.sptt.rows`),
       which never leave the tower
f      only real rows are sent; the receiver copies each to its samples
====== ==========================================================================================================

The backward pass sums the gradients of the samples that share a row before it sends them. The forward pass is the
unsharded module's to the bit, its gradients but for the order of that sum.

A tower module must compute each sample on its own (`why_not_per_sample`): with dropout, samples that share a row would
drop the same numbers, and a batch norm would count them once.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dmt.sptt.id_routes import Deferred

__all__ = [
    "Bags",
    "DistinctInputs",
    "add_rows",
    "distinct_inputs",
    "samples_of_rows",
    "why_not_per_sample",
]

_MIX = (-7046029254386353131, -4658895280553007687)
"""Odd multipliers of a 64-bit hash. Equal hashes are compared value by value: a poor hash costs bytes, not results."""


class DistinctInputs(NamedTuple):
    """The distinct inputs of a batch."""

    parts: list[list[int]]
    """[K][groups], for each part of the batch the distinct inputs of each group that no earlier one has."""
    inverse: Tensor
    """The row of each sample, [groups, B] int64. Rows are numbered by the first sample that has them."""

    @property
    def rows(self) -> list[int]:
        """Number of distinct inputs of each group."""
        return [sum(of_group) for of_group in zip(*self.parts, strict=True)]


def distinct_inputs(
    ids: KeyedJaggedTensor, sizes: Sequence[int], *, share: bool = True, cuts: Sequence[int] | None = None
) -> tuple[KeyedJaggedTensor, DistinctInputs]:
    """Finds the samples of a batch that have equal inputs.

    Args:
        ids: ids of all features, those of a group one after the other.
        sizes: number of features of each group.
        share: True: samples with equal inputs share a row; False: only those without any id do.
        cuts: number of samples of each part of the batch; None: it is whole.

    Returns:
        The ids of the first sample of each row, and the rows. A feature has a key for each part, one after the other,
        with the rows first seen in it as its batch size.

    Example:
        >>> ids = KeyedJaggedTensor(["f"], torch.tensor([7, 8, 9, 7, 8]), lengths=torch.tensor([2, 1, 2]))
        >>> ids, distinct = distinct_inputs(ids, [1])
        >>> ids.values().tolist(), distinct.rows, distinct.inverse.tolist()
        ([7, 8, 9], [2], [[0, 1, 0]])
    """
    device, num_samples = ids.device(), ids.stride()
    group_of = torch.arange(len(sizes), device=device).repeat_interleave(
        torch.tensor(sizes, device=device), output_size=sum(sizes)
    )
    samples = torch.arange(num_samples, device=device)
    first = samples.expand(len(sizes), -1)
    if num_samples and share:
        first = _Inputs(ids, group_of, len(sizes)).first_equal()
    elif num_samples:
        num_ids = ids.lengths().view(-1, num_samples)
        is_empty = num_ids.new_zeros(first.shape).index_add_(0, group_of, num_ids) == 0
        first = torch.where(is_empty, is_empty.int().argmax(dim=1, keepdim=True), first)
    is_first = first == samples
    blocks = is_first.split([num_samples] if cuts is None else list(cuts), dim=1)
    parts: list[list[int]] = torch.stack([block.sum(dim=1) for block in blocks]).tolist()
    distinct = DistinctInputs(parts, (is_first.cumsum(dim=1) - 1).gather(1, first))
    lengths, values, weights = ids.lengths(), ids.values(), ids.weights_or_none()
    if any(number < num_samples for number in distinct.rows):
        kept = is_first[group_of].flatten().nonzero().flatten().int()
        lengths, values, weights = torch.ops.fbgemm.permute_1D_sparse_data(kept, lengths, values, weights, None)
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    sent = KeyedJaggedTensor(
        keys=[key for key in ids.keys() for _ in parts],  # noqa: SIM118 - a KeyedJaggedTensor is no dict
        values=values,
        weights=weights,
        lengths=lengths,
        stride_per_key_per_rank=[[part[group]] for group in groups for part in parts],
    )
    return sent, distinct


def samples_of_rows(
    exchanges: Sequence[Awaitable[list[Tensor]]], rows: Sequence[Sequence[int]], inverses: Sequence[Tensor]
) -> list[Awaitable[Tensor]]:
    """Copies the rows that several exchanges bring to the samples that share them; differentiable.

    Args:
        exchanges: bring for each part of the batch the rows [rows, width] of each piece that no earlier part has.
        rows: their numbers, [K][pieces].
        inverses: for each part the row of each of its samples among those of all parts, [pieces, samples] int64.

    Returns:
        Columns of the samples of each part, [samples, S]. One waits for its own exchange and those before it.
    """
    held = _HeldRows(exchanges, rows)
    return [Deferred(functools.partial(held.samples, k, inverse)) for k, inverse in enumerate(inverses)]


class _HeldRows:
    """Rows that arrive part by part in one buffer for each piece, so that no part copies those before it again."""

    def __init__(self, exchanges: Sequence[Awaitable[list[Tensor]]], rows: Sequence[Sequence[int]]) -> None:
        self._exchanges = list(exchanges)
        self.ends = [[0, *itertools.accumulate(of_piece)] for of_piece in zip(*rows, strict=True)]
        """For each piece the first row of each part, then the number of rows."""
        self.rows: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self._arrived: list[Tensor] = []  # what autograd orders the parts by: a part's rows come before their copies

    def samples(self, part: int, inverse: Tensor) -> Tensor:
        """Waits for the rows of a part and all before it, and copies them to its samples."""
        while len(self._arrived) <= part:
            k = len(self._arrived)
            self._arrived.append(_Arrive.apply(self, k, *self._exchanges[k].wait()))
        copied: Tensor = _Copy.apply(self, inverse, *self._arrived[: part + 1])
        return copied

    def part_of(self, tensors: Sequence[Tensor], part: int) -> list[Tensor]:
        """Returns the rows of a part of each piece."""
        return [tensor[ends[part] : ends[part + 1]] for tensor, ends in zip(tensors, self.ends, strict=True)]


class _Arrive(Function):
    @staticmethod
    def forward(ctx: Any, held: _HeldRows, part: int, *pieces: Tensor) -> Tensor:
        ctx.held, ctx.part, ctx.dtype = held, part, pieces[0].dtype
        if not part:
            shapes = [(ends[-1], piece.shape[1]) for piece, ends in zip(pieces, held.ends, strict=True)]
            held.rows = [pieces[0].new_empty(shape) for shape in shapes]
        for place, piece in zip(held.part_of(held.rows, part), pieces, strict=True):
            place.copy_(piece)
        return pieces[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        # Complete: the copies of this part and of all after it have gone back.
        gradients = ctx.held.part_of(ctx.held.gradients, ctx.part)
        return None, None, *(gradient.to(ctx.dtype) for gradient in gradients)


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, held: _HeldRows, inverse: Tensor, *_: Tensor) -> Tensor:
        ctx.held, ctx.inverse, ctx.num_parts = held, inverse, len(_)
        return torch.cat([rows[samples] for rows, samples in zip(held.rows, inverse, strict=True)], dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        held = ctx.held
        if not held.gradients:
            # In BF16 a sum of many would stop growing.
            dtype = torch.promote_types(held.rows[0].dtype, torch.float32)
            held.gradients = [torch.zeros_like(rows, dtype=dtype) for rows in held.rows]
        blocks = gradients[0].split([rows.shape[1] for rows in held.rows], dim=1)
        for total, samples, block in zip(held.gradients, ctx.inverse, blocks, strict=True):
            add_rows(total, samples, block)
        return None, None, *(gradients[0].new_empty(0) for _ in range(ctx.num_parts))


def add_rows(total: Tensor, rows: Tensor, added: Tensor) -> None:
    """Adds gradients [samples, width] to those of their rows, in place and in a fixed order, on a GPU too."""
    if total.is_cuda:
        total.index_put_((rows,), added.to(total.dtype), accumulate=True)
    else:
        total.index_add_(0, rows, added.to(total.dtype))


class Bags:
    """Bags of ids, with hashes that are the same for equal bags of any batch; weights that differ tell bags apart."""

    def __init__(self, lengths: Tensor, ids: Tensor, weights: Tensor | None) -> None:
        self.ids, self.weights, self.lengths = ids, weights, lengths.long()
        self.is_single = ids.numel() == lengths.numel() and bool((lengths == 1).all())
        """True if each bag has one id."""
        if self.is_single:
            return
        self.offsets = torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])
        self.bag_of = torch.arange(len(lengths), device=lengths.device).repeat_interleave(
            self.lengths, output_size=ids.numel()
        )
        self.place = torch.arange(ids.numel(), device=lengths.device) - self.offsets[self.bag_of]

    @functools.cached_property
    def numbers(self) -> Tensor:
        """A number for each id with its weight, [ids] int64: the id itself where there are no weights."""
        values = self.ids.long()
        return values if self.weights is None else values * _MIX[0] + self.weights.float().view(torch.int32)

    @functools.cached_property
    def hashes(self) -> Tensor:
        """Hash of each bag, [bags] int64."""
        if self.is_single:
            return _mix(self.numbers + _mix(self.numbers.new_ones(1))) + 1
        mixed = _mix(self.numbers + _mix(self.place + 1))
        sums = torch.cat([mixed.new_zeros(1), mixed.cumsum(0)])
        return sums[self.offsets[1:]] - sums[self.offsets[:-1]] + self.lengths


def hashes_of_features(hashes: Tensor, feature: Tensor) -> Tensor:
    """Mixes the number of its feature into each hash: sums of them, over a group, tell its features apart."""
    return _mix(hashes + _mix(feature + 1))


class _Inputs:
    """Inputs of the samples of a batch, which are found to be equal where they are, [groups, B]."""

    def __init__(self, ids: KeyedJaggedTensor, group_of: Tensor, num_groups: int) -> None:
        self._group_of = group_of
        self._num_groups = num_groups
        num_features, num_samples = len(group_of), ids.stride()
        self._shape = (num_features, num_samples)
        self._bags = bags = Bags(ids.lengths(), ids.values(), ids.weights_or_none())
        self._is_exact = bags.is_single and num_groups == num_features and bags.weights is None
        # Bags of this batch are compared with each other only, so that single ids need no hash.
        hashes = (bags.numbers if bags.is_single else bags.hashes).view(self._shape)
        if num_groups < num_features:
            mixed = hashes_of_features(hashes, torch.arange(num_features, device=hashes.device).unsqueeze(1))
            hashes = mixed.new_zeros(num_groups, num_samples).index_add_(0, group_of, mixed)
        self._hashes = hashes

    def first_equal(self) -> Tensor:
        """Returns for each sample the first one with the same input, [groups, B]."""
        hashes, order = self._hashes.sort(dim=1, stable=True)
        places = torch.arange(hashes.shape[1], device=hashes.device).expand_as(hashes)
        begins = torch.ones_like(hashes, dtype=torch.bool)
        begins[:, 1:] = hashes[:, 1:] != hashes[:, :-1]
        begin = torch.where(begins, places, 0).cummax(dim=1).values
        first = torch.empty_like(order).scatter_(1, order, order.gather(1, begin))
        return first if self._is_exact else torch.where(self._equals(first), first, places)

    def _equals(self, other: Tensor) -> Tensor:
        """Compares each input with that of another sample, value by value, [groups, B]."""
        num_features, num_samples = self._shape
        of_feature = other[self._group_of]
        starts = torch.arange(num_features, device=other.device).unsqueeze(1) * num_samples
        others, bags = (of_feature + starts).flatten(), self._bags
        if bags.is_single:
            differ = self._differ(others).view(self._shape)
        else:
            same_length = bags.lengths[others] == bags.lengths
            # A bag of another length is compared with itself.
            others = torch.where(same_length, others, torch.arange(len(others), device=others.device))
            unequal = self._differ(bags.offsets[others][bags.bag_of] + bags.place).cumsum(0)
            sums = torch.cat([unequal.new_zeros(1), unequal])
            differ = ((sums[bags.offsets[1:]] != sums[bags.offsets[:-1]]) | ~same_length).view(self._shape)
        if self._num_groups == num_features:
            return ~differ
        return other.new_zeros(other.shape).index_add_(0, self._group_of, differ.long()) == 0

    def _differ(self, places: Tensor) -> Tensor:
        ids, weights = self._bags.ids, self._bags.weights
        differ = ids[places] != ids
        if weights is not None:
            bits = weights.contiguous().view(_BITS[weights.element_size()])
            differ |= bits[places] != bits
        return differ


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _mix(numbers: Tensor) -> Tensor:
    numbers = numbers * _MIX[0]
    return (numbers ^ (numbers >> 31)) * _MIX[1]


def why_not_per_sample(module: nn.Module, keys: Sequence[str], widths: Sequence[int]) -> str | None:
    """Says why a tower module does not compute each sample on its own; None if a trial shows nothing against it.

    A copy of it is run on random embeddings of these names and widths.
    """
    for part in module.modules():
        if isinstance(part, _BatchNorm) or (isinstance(part, _DropoutNd) and part.p > 0):
            return f"holds a {type(part).__name__}"
    some = next(module.parameters(), torch.empty(0))
    with torch.no_grad(), torch.random.fork_rng(devices=[some.device] if some.is_cuda else []):
        trial = copy.deepcopy(module).train()  # sharded in eval mode, a model may be trained nevertheless
        # Many samples: a dropout of 1 % often spares a few.
        samples, others = torch.randn(2, 512, sum(widths), dtype=some.dtype, device=some.device)
        state = torch.get_rng_state()
        alone, again, beside = (
            trial(KeyedTensor(list(keys), list(widths), torch.cat([samples, rest])))[: len(samples)]
            for rest in (samples, samples, others)
        )
        after = torch.get_rng_state()
    # A matrix product of another number of rows may round otherwise.
    same, unmixed = (torch.allclose(alone, other, rtol=1e-3, atol=1e-5, equal_nan=True) for other in (again, beside))
    if not same or not torch.equal(state, after):
        return "draws random numbers"
    return None if unmixed else "mixes the samples of a batch"
