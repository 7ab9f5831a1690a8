"""`load_plain_state`, `gather_plain_state`: move weights between a sharded model and an unsharded state dict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from dmt.collectives import gather_objects
from dmt.errors import InputError, ReplicaMismatchError
from dmt.formatting import shorten
from dmt.sharding.schemes import column_widths
from dmt.sptt.state import TowerState

__all__ = ["copy_parts", "gather_plain_state", "join_parts", "load_plain_state", "local_parts", "table_layout"]


class LocalPart(NamedTuple):
    """A shard of a tensor, or a whole tensor, on this rank."""

    name: str
    tensor: Tensor
    where: tuple[slice, ...]
    """Place of the part in the whole tensor, one slice per dimension."""
    size: tuple[int, ...]
    """Shape of the whole tensor."""

    def of(self, whole: Mapping[str, Tensor]) -> Tensor:
        """Returns the same part of an unsharded state dict."""
        return whole[self.name][self.where]


def local_parts(model: nn.Module) -> list[LocalPart]:
    """Returns this rank's parts of all tensors in a model's state dict, detached but not copied."""
    parts = []
    for name, value in model.state_dict().items():
        if not isinstance(value, ShardedTensor):
            whole = tuple(slice(0, length) for length in value.shape)
            parts.append(LocalPart(name, value.detach(), whole, tuple(value.shape)))
            continue
        for shard in value.local_shards():
            sides = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
            where = tuple(slice(offset, offset + length) for offset, length in sides)
            parts.append(LocalPart(name, shard.tensor.detach(), where, tuple(value.metadata().size)))
    return parts


def copy_parts(model: nn.Module) -> list[LocalPart]:
    """Returns copies of `local_parts`."""
    return [part._replace(tensor=part.tensor.clone()) for part in local_parts(model)]


def load_plain_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copies the state dict of the unsharded module into a sharded model.

    Every rank copies its own parts, so nothing is sent. Any layout works: tower or flat dataflow, any sharding scheme,
    replicas, and TorchRec's own sharders. Call it after ``DistributedModelParallel`` is constructed, which
    initializes the tables again, and before `dmt.ReplicaSync` (or call its ``restart()`` afterwards).

    Args:
        model: the sharded model.
        state: whole tensors by the names of the unsharded module; they are converted to the dtypes of the model.

    Raises:
        InputError: a name of the model is missing in ``state``, or its tensor there has another shape.
    """
    parts = local_parts(model)
    for part in parts:
        shape = tuple(state[part.name].shape) if part.name in state else "absent"
        if shape != part.size:
            raise InputError(
                f"load_plain_state: {part.name!r} is {part.size} in the sharded model, but {shape} in the state, whose "
                f"names are {shorten(sorted(state), ', ')}. Pass the state dict of the same module, unsharded."
            )
    for part in parts:
        part.tensor.copy_(part.of(state))
    for module in model.modules():
        if isinstance(module, TowerState):
            module.read_again()


def gather_plain_state(model: nn.Module) -> dict[str, Tensor]:
    """Returns the state dict of the unsharded module, on the CPU, on every rank; collective.

    It sends every shard to every rank, so use it for small models only; `dmt.training.checkpoints` saves large ones.

    Raises:
        ReplicaMismatchError: ranks hold different values of an element, or some elements are on more ranks than others.
    """
    assert dist.group.WORLD is not None, "torch.distributed is not initialized"
    mine = [part._replace(tensor=part.tensor.cpu()) for part in local_parts(model)]
    return join_parts(part for parts in gather_objects(mine, dist.group.WORLD) for part in parts)


def join_parts(parts: Iterable[LocalPart]) -> dict[str, Tensor]:
    """Joins the parts of all ranks into whole tensors.

    Raises:
        ReplicaMismatchError: parts differ where they overlap, or some elements are in more parts than others.
    """
    whole: dict[str, Tensor] = {}
    times: dict[str, Tensor] = {}
    for part in parts:
        if part.name not in whole:
            whole[part.name] = torch.empty(part.size, dtype=part.tensor.dtype)
            times[part.name] = torch.zeros(part.size, dtype=torch.int32)
        target, count = whole[part.name][part.where], times[part.name][part.where]
        held = count > 0
        if not torch.allclose(target[held], part.tensor[held], rtol=0, atol=0, equal_nan=True):
            raise ReplicaMismatchError(
                f"{part.name}: ranks hold different values. For tables, call ReplicaSync.sync() first; average buffers."
            )
        target.copy_(part.tensor)
        count += 1
    for name, count in times.items():
        if len(ranks := count.unique().tolist()) > 1 or 0 in ranks:
            raise ReplicaMismatchError(
                f"{name}: elements are on {ranks[0]} to {ranks[-1]} ranks, not equally many. Correct the sharding plan."
            )
    return whole


def table_layout(model: Any) -> dict[str, list[int]]:
    """Returns the widths of the column shards of every table of a ``DistributedModelParallel``, from left to right.

    This part of a sharding plan changes what tables learn: under row-wise AdaGrad each shard has one state per row. A
    data-parallel table has an empty list: replicas average its gradients, not its weights.
    """
    return {
        table: [] if sharding.sharding_type == "data_parallel" else column_widths(sharding.sharding_spec.shards)
        for module_plan in model.plan.plan.values()
        for table, sharding in module_plan.items()
    }
