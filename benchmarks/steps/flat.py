"""Contenders of TorchRec's own: a flat DLRM in five schemes, with plans by hand (its planner hides some on CPU).

Tables go round robin over hosts first, then over the ranks of a host, so hosts hold as many as can be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.sharding_plan import (
    calculate_shard_sizes_and_offsets,
    column_wise,
    construct_module_sharding_plan,
    placement,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)

from benchmarks.steps.contenders import Contender
from benchmarks.steps.setting import Setting

__all__ = ["codecs", "flat_plan", "flat_sharders", "plan_by_hand"]

Generator = Callable[..., Any]


def flat_sharders(contender: Contender, fused_params: dict[str, Any]) -> list[Any]:
    """TorchRec's sharder of the flat collection."""
    return [EmbeddingBagCollectionSharder(fused_params=fused_params, qcomm_codecs_registry=codecs(contender))]


def flat_plan(contender: Contender, setting: Setting, model: nn.Module, sharder: Any) -> ShardingPlan:
    """The plan of a flat contender.

    Args:
        contender: of the flat family.
        setting: sizes of the job.
        model: a `ClickTask` around DLRM.
        sharder: of the collection.
    """
    collection: Any = model.model.sparse_arch  # type: ignore[union-attr]
    names = list(sharder.shardable_parameters(collection))
    schemes = {name: _scheme(contender.scheme, i, setting) for i, name in enumerate(names)}
    return ShardingPlan(plan={"model.sparse_arch": plan_by_hand(collection, schemes, setting, sharder)})


def plan_by_hand(
    module: nn.Module, schemes: Mapping[str, Generator], setting: Setting, sharder: Any
) -> EmbeddingModuleShardingPlan:
    """TorchRec's plan from its own generators, with the fused kernel for every table.

    On its own it would take the dense kernel, whose tables the dense optimizer trains.
    """
    plan = construct_module_sharding_plan(
        module,
        dict(schemes),
        sharder,
        local_size=setting.ranks_per_host,
        world_size=setting.world_size,
        device_type="cpu",
    )
    for parameter in plan.values():
        parameter.compute_kernel = EmbeddingComputeKernel.FUSED.value
    return plan


def codecs(contender: Contender) -> dict[str, Any] | None:
    """TorchRec's quantised communication in both directions, None for FP32."""
    if contender.precision == "fp32":
        return None
    config = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16)
    return get_qcomm_codecs_registry(config, device=torch.device("cpu"))


def _scheme(scheme: str, table: int, setting: Setting) -> Generator:
    """Generator of the sharding of the table with this number."""
    host = table % setting.hosts
    first = host * setting.ranks_per_host
    slot = table // setting.hosts
    if scheme == "table_wise":
        return table_wise(rank=first + slot % setting.ranks_per_host)
    if scheme == "column_wise":
        return column_wise(ranks=_halves(table, setting))
    if scheme == "row_wise":
        return row_wise()
    if scheme == "table_row_wise":
        return table_row_wise(host_index=host)
    return partial(_grid, first_host=host)


def _grid(
    parameter: nn.Parameter, local_size: int, world_size: int, device_type: str, sharder: Any, *, first_host: int
) -> ParameterSharding:
    """Columns cut over all hosts, rows over the ranks of each; TorchRec's own generator never cuts 128 columns."""
    hosts = world_size // local_size
    sizes, offsets = calculate_shard_sizes_and_offsets(
        parameter, world_size, local_size, ShardingType.GRID_SHARD.value, col_wise_shard_dim=parameter.shape[1] // hosts
    )
    ranks = [(first_host + i // local_size) % hosts * local_size + i % local_size for i in range(len(sizes))]
    shards = [
        ShardMetadata(shard_offsets=offset, shard_sizes=size, placement=placement(device_type, rank, local_size))
        for size, offset, rank in zip(sizes, offsets, ranks, strict=True)
    ]
    return ParameterSharding(
        sharding_type=ShardingType.GRID_SHARD.value,
        compute_kernel=EmbeddingComputeKernel.FUSED.value,
        ranks=ranks,
        sharding_spec=EnumerableShardingSpec(shards),
    )


def _halves(table: int, setting: Setting) -> Sequence[int]:
    """Two ranks for the halves of a table, on one host if it has two. Its ids go to both."""
    if setting.ranks_per_host == 1:
        return [table % setting.hosts, (table + 1) % setting.hosts]
    slot = 2 * (table // setting.hosts)
    first = (table % setting.hosts) * setting.ranks_per_host
    return [first + (slot + half) % setting.ranks_per_host for half in (0, 1)]
