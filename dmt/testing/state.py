"""The weights of a sharded model as one unsharded state dict, both ways: `load_plain_state`, `gather_plain_state`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from dmt.collectives import gather_objects
from dmt.errors import InputError, ReplicaMismatchError
from dmt.formatting import shorten
from dmt.sharding.schemes import column_widths

__all__ = [
    "LocalPart",
    "TableLayout",
    "copy_parts",
    "gather_plain_state",
    "join_parts",
    "load_plain_state",
    "local_parts",
    "table_layout",
]


class LocalPart(NamedTuple):
    """A shard of a tensor, or a whole tensor, that this rank holds."""

    name: str
    tensor: Tensor
    where: tuple[slice, ...]
    """Its place in the whole tensor."""
    size: tuple[int, ...]
    """Shape of the whole tensor."""
    is_shard: bool
    """False for a tensor that this rank holds whole."""

    def of(self, whole: Mapping[str, Tensor]) -> Tensor:
        """Returns the same part of an unsharded state dict."""
        return whole[self.name][self.where]


def local_parts(model: nn.Module) -> list[LocalPart]:
    """Lists everything that this rank holds of a model's state dict, detached but not copied."""
    parts = []
    for name, value in model.state_dict().items():
        if not isinstance(value, ShardedTensor):
            whole = tuple(slice(0, length) for length in value.shape)
            parts.append(LocalPart(name, value.detach(), whole, tuple(value.shape), False))
            continue
        for shard in value.local_shards():
            sides = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
            where = tuple(slice(offset, offset + length) for offset, length in sides)
            parts.append(LocalPart(name, shard.tensor.detach(), where, tuple(value.metadata().size), True))
    return parts


def copy_parts(model: nn.Module) -> list[LocalPart]:
    """Lists the same as `local_parts`, copied."""
    return [part._replace(tensor=part.tensor.clone()) for part in local_parts(model)]


def load_plain_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copies the state dict of the unsharded module into a sharded model.

    Every rank copies its own parts, so nothing is sent. Any layout works: tower or flat dataflow, any sharding scheme,
    replicas, and TorchRec's own sharders. Call it after ``DistributedModelParallel`` is constructed, which draws the
    tables again, and before `dmt.ReplicaSync` or `dmt.HotRows` is (or call its ``restart()`` afterwards).

    Args:
        model: the sharded model.
        state: whole tensors by the names of the unsharded module. Numbers are converted to the model's dtypes.

    Raises:
        InputError: a name of the model is missing, or has a tensor of another shape.

    Example:
        On every rank, with ``sharded = DistributedModelParallel(...)`` around such a module:

        >>> load_plain_state(module := nn.Linear(2, 1), {"weight": torch.ones(1, 2), "bias": torch.zeros(1)})
        >>> module(torch.ones(1, 2)).item()
        2.0
    """
    parts = local_parts(model)
    for part in parts:
        if part.name not in state:
            raise InputError(
                f"load_plain_state: the state has no {part.name!r}, which this rank's model holds; its names are "
                f"{shorten(sorted(state), ', ')}. Give the state dict of the same module, unsharded."
            )
        if tuple(state[part.name].shape) != part.size:
            raise InputError(
                f"load_plain_state: {part.name!r} has shape {tuple(state[part.name].shape)}, in the sharded model "
                f"{part.size}. Give the state dict of the same module, unsharded."
            )
    for part in parts:
        part.tensor.copy_(part.of(state))


def gather_plain_state(
    model: nn.Module, *, num_replicas: int = 1, group: dist.ProcessGroup | None = None
) -> dict[str, Tensor]:
    """Returns the state dict of the unsharded module, on the CPU, on every rank; collective.

    It sends every shard to every rank: for tests and for models that fit in one process. To save large models use
    `dmt.training.checkpoints`.

    Args:
        model: the sharded model.
        num_replicas: M, copies of every shard in the job (2D sparse parallelism).
        group: all ranks that hold the model; the default group if None.

    Raises:
        ReplicaMismatchError: ranks hold different bits of the same numbers, or the shards do not cover a tensor
            ``num_replicas`` times.

    Example:
        >>> from dmt.testing import gather_plain_state  # doctest: +SKIP
        >>> after = gather_plain_state(sharded)  # doctest: +SKIP
        >>> all(torch.equal(value, after[name]) for name, value in plain.state_dict().items())  # doctest: +SKIP
        True
    """
    group = group or dist.group.WORLD
    assert group is not None, "torch.distributed is not initialized"
    mine = [part._replace(tensor=part.tensor.cpu()) for part in local_parts(model)]
    return join_parts([part for parts in gather_objects(mine, group) for part in parts], num_replicas=num_replicas)


def join_parts(parts: Iterable[LocalPart], *, num_replicas: int = 1) -> dict[str, Tensor]:
    """Joins the parts that all ranks hold to whole tensors.

    Raises:
        ReplicaMismatchError: parts differ where they overlap, or do not cover a tensor ``num_replicas`` times.
    """
    whole: dict[str, Tensor] = {}
    times: dict[str, Tensor] = {}
    for part in parts:
        if part.name not in whole:
            whole[part.name] = torch.empty(part.size, dtype=part.tensor.dtype)
            times[part.name] = torch.zeros(part.size, dtype=torch.int32)
        target, count = whole[part.name][part.where], times[part.name][part.where]
        held = count > 0
        if not torch.equal(_bits(target[held]), _bits(part.tensor[held])):
            raise ReplicaMismatchError(f"{part.name}: ranks hold different values of the same numbers.")
        target.copy_(part.tensor)
        if part.is_shard:
            count += 1
        else:
            count.fill_(num_replicas)
    for name, count in times.items():
        if wrong := int((count != num_replicas).sum()):
            found = shorten([str(number) for number in count.unique().tolist()], ", ")
            raise ReplicaMismatchError(
                f"{name}: {wrong} of its {count.numel()} numbers are held by {found} rank(s), not by num_replicas="
                f"{num_replicas}. Give it as the topology has it."
            )
    return whole


@dataclass(frozen=True, kw_only=True)
class TableLayout:
    """The part of a sharding plan that changes what tables learn."""

    column_widths: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Widths of the column shards of each table, from left to right. Under row-wise AdaGrad each shard has a state of
    its own. A table that is missing is not cut."""
    data_parallel: frozenset[str] = frozenset()
    """Tables whose gradients, not weights, are averaged over replicas."""


def table_layout(model: Any) -> TableLayout:
    """Returns the layout of all tables of a ``DistributedModelParallel``, also of those on other ranks."""
    placed = [item for module_plan in model.plan.plan.values() for item in module_plan.items()]
    return TableLayout(
        column_widths={
            table: column_widths(sharding.sharding_spec.shards)
            for table, sharding in placed
            if sharding.sharding_type != "data_parallel"
        },
        data_parallel=frozenset(table for table, sharding in placed if sharding.sharding_type == "data_parallel"),
    )


def _bits(tensor: Tensor) -> Tensor:
    # NaN equals itself only as bits.
    return tensor.contiguous().reshape(-1).view(torch.uint8)
