"""What one rank holds of a sharded model: `LocalPart`, read, written and told apart from others."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

__all__ = ["LocalPart", "TableKinds", "copy_parts", "digest", "load_start", "local_parts", "table_kinds"]


class LocalPart(NamedTuple):
    """A shard of a parameter, or a whole one."""

    name: str
    tensor: Tensor
    where: tuple[slice, ...]
    """Its place in the whole parameter."""
    is_shard: bool
    """False for what is whole on this rank."""

    def of(self, whole: Mapping[str, Tensor]) -> Tensor:
        """The same part of whole parameters."""
        return whole[self.name][self.where]


class TableKinds(NamedTuple):
    """What the training of a table depends on besides its numbers."""

    column_cuts: Mapping[str, Sequence[int]]
    """Widths of the shards of column-wise tables: under row-wise AdaGrad each has a state of its own."""
    data_parallel: frozenset[str]
    """Tables whose gradients, not weights, are averaged over replicas."""


def local_parts(model: DistributedModelParallel) -> list[LocalPart]:
    """All that this rank holds of a model's state, not copied."""
    parts = []
    for name, value in model.state_dict().items():
        if not isinstance(value, ShardedTensor):
            parts.append(LocalPart(name, value.detach(), (slice(None),) * value.dim(), False))
            continue
        for shard in value.local_shards():
            sides = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
            where = tuple(slice(offset, offset + size) for offset, size in sides)
            parts.append(LocalPart(name, shard.tensor.detach(), where, True))
    return parts


def copy_parts(model: DistributedModelParallel) -> list[LocalPart]:
    """As `local_parts`, copied."""
    return [part._replace(tensor=part.tensor.clone()) for part in local_parts(model)]


def load_start(model: DistributedModelParallel, start: Mapping[str, Tensor]) -> None:
    """Gives a sharded model the weights of the plain one."""
    with torch.no_grad():
        for part in local_parts(model):
            part.tensor.copy_(part.of(start))


def table_kinds(model: DistributedModelParallel) -> TableKinds:
    """How all tables of a sharded model are spread, those of other ranks too."""
    placed = [item for of_module in model.plan.plan.values() for item in of_module.items()]
    return TableKinds(
        column_cuts={
            name: [shard.shard_sizes[1] for shard in sharding.sharding_spec.shards]
            for name, sharding in placed
            if sharding.sharding_type == "column_wise"
        },
        data_parallel=frozenset(name for name, sharding in placed if sharding.sharding_type == "data_parallel"),
    )


def digest(tensor: Tensor) -> str:
    """Equal for tensors of equal bits only."""
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
