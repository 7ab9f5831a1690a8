"""The live tensors of a rank's tables: weights and fused optimizer states, with their names and places."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from dmt.replica_check import HeldShard
from dmt.sptt import SPTTModule

__all__ = ["TableTensor", "table_tensors"]


@dataclass(frozen=True, kw_only=True)
class TableTensor:
    """A tensor that the fused optimizer of a table updates."""

    name: str
    """``t_ad.weight``, ``t_ad.momentum1``; a second shard of the table on this rank has ``#1`` after it."""
    tensor: Tensor
    """What the kernels read and write, not a copy."""
    is_weight: bool
    is_replicated: bool
    """Whether each replica trains its own; false for data-wise tables, whose gradients are averaged."""
    shard: HeldShard | None = None
    """Which part of the table a weight is; None for states and data-wise tables."""


def table_tensors(module: SPTTModule, prefix: str = "") -> list[TableTensor]:
    """Floating-point weights and states of this rank's tables, in the order of the module's collections.

    Args:
        module: made by a tower sharder.
        prefix: goes before the names, to tell modules of one model apart.
    """
    return [one for collection in module.collections for one in _of_collection(collection, prefix)]


def _of_collection(collection: Any, prefix: str) -> Iterator[TableTensor]:
    optimizer = collection.fused_optimizer
    for key, weight in optimizer.params.items():
        table = prefix + key.split(".")[-2]
        states = {prefix + name: value for name, value in optimizer.state.get(weight, {}).items()}
        values = {f"{table}.weight": weight, **states}
        for name, value in values.items():
            if not isinstance(value, ShardedTensor):
                if value.is_floating_point():
                    yield TableTensor(name=name, tensor=value.detach(), is_weight=value is weight, is_replicated=False)
                continue
            for number, shard in enumerate(value.local_shards()):
                if not shard.tensor.is_floating_point():
                    continue
                place = None
                if value is weight:
                    place = HeldShard(
                        table=table,
                        size=tuple(value.metadata().size),
                        offsets=tuple(shard.metadata.shard_offsets),
                        sizes=tuple(shard.tensor.shape),
                    )
                yield TableTensor(
                    name=f"{name}#{number}" if number else name,
                    tensor=shard.tensor.detach(),
                    is_weight=value is weight,
                    is_replicated=True,
                    shard=place,
                )
