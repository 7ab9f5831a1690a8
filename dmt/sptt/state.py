"""The live tensors of a rank's tables: weights and fused optimizer states, with their names and places."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from dmt.sptt.dataflow import SPTTModule

__all__ = ["TableTensor", "checksum", "table_tensors"]

_CHUNK = 2**16
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class TableTensor:
    """A tensor that the fused optimizer of a table updates."""

    name: str
    """``t_ad.weight``, ``t_ad.momentum1``; the n-th further shard on this rank gets the suffix ``#n``."""
    table: str
    """Table, with the prefix of its module."""
    part: str
    """``weight``, or the state's own name, such as ``momentum1``."""
    tensor: Tensor
    """Live tensor that the kernels read and write, not a copy."""
    is_weight: bool
    """True for the table's weights, False for optimizer state."""
    is_replicated: bool
    """True if each replica trains its own copy; False for data-parallel tables, whose gradients are averaged."""
    offsets: tuple[int, ...]
    """First row, and first column unless it has one number for each row, of this part of the table."""


def table_tensors(module: SPTTModule, prefix: str = "") -> list[TableTensor]:
    """Floating-point weights and states of this rank's tables, by collection; names begin with ``prefix``."""
    return [tensor for collection in module.collections for tensor in _collection_tensors(collection, prefix)]


def _collection_tensors(collection: Any, prefix: str) -> Iterator[TableTensor]:
    optimizer = collection.fused_optimizer
    for key, weight in optimizer.params.items():
        table = prefix + key.split(".")[-2]
        states = {prefix + name: value for name, value in optimizer.state.get(weight, {}).items()}
        for name, value in {f"{table}.weight": weight, **states}.items():
            is_sharded = isinstance(value, ShardedTensor)
            shards = (
                [(shard.tensor, tuple(shard.metadata.shard_offsets)) for shard in value.local_shards()]
                if is_sharded
                else [(value, (0,) * value.dim())]
            )
            for number, (tensor, offsets) in enumerate(shards):
                if tensor.is_floating_point():
                    yield TableTensor(
                        name=f"{name}#{number}" if number else name,
                        table=table,
                        part=name.removeprefix(f"{table}."),
                        tensor=tensor.detach(),
                        is_weight=value is weight,
                        is_replicated=is_sharded,
                        offsets=offsets,
                    )


def checksum(tensor: Tensor) -> int:
    """Position-dependent checksum of a floating-point tensor's bits, modulo 2**64; equal for equal tensors.

    Example:
        >>> a = torch.tensor([1.0, 2.0])
        >>> checksum(a) == checksum(a.clone()), checksum(a) == checksum(a.flip(0)), checksum(-a) == checksum(a)
        (True, False, False)
    """
    bits = tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    # Each place has an odd weight of its own: no change of a single number is lost modulo a power of two.
    weights = 2 * torch.arange(min(_CHUNK, bits.numel()), dtype=torch.int64, device=tensor.device) + 1
    for number, chunk in enumerate(bits.split(_CHUNK)):
        total = total + (chunk.to(torch.int64) * (weights[: chunk.numel()] + 2 * _CHUNK * number)).sum()
    return int(total)
