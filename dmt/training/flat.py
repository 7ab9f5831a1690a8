"""The flat dataflow: TorchRec's exchange over all ranks, in the scheme asked for or as TorchRec's planner chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.distributed.collective_utils import invoke_on_rank_and_broadcast_result
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import CommOp, ParameterSharding, ShardingEnv, ShardingPlan, ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dmt._torchrec import host_groups
from dmt.collectives import run_on_all_or_raise
from dmt.formatting import counted, shorten
from dmt.plan.tables import TableSpec, feature_names
from dmt.plan.topology import TowerTopology
from dmt.sharding.costs import StepWorkload
from dmt.sharding.planner import plan_by_torchrec
from dmt.sharding.schemes import why_not
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.peer_exchange import codecs_of
from dmt.sptt.tower_lookup import GroupShardedEBC
from dmt.training.job import Job

__all__ = [
    "FlatSharder",
    "codecs_of_all_ranks",
    "holding_ranks",
    "plan_flat",
    "plan_notes",
    "shard_flat",
    "table_shardings",
]

_BY_HOST = ("table_row_wise", "grid_shard")
_ALL = ("data_parallel", "table_wise", "column_wise", "table_column_wise", "row_wise", *_BY_HOST)
# TorchRec's planner leaves the last ones out on a CPU, where they run all the same.
_CHOICES = {"auto": ("table_wise", "column_wise"), "grid": ("grid_shard",), "planner": _ALL}


class FlatSharder(EmbeddingBagCollectionSharder):
    """TorchRec's sharder of flat collections, whose modules have the fixes of `GroupShardedEBC`.

    Data-parallel tables keep their fused optimizer, and mean pooling of row-wise tables is that of the plain module.

    Args:
        mesh: the groups; its `TowerTopology.host` is what TorchRec's schemes by host take for one.
        kwargs: ``fused_params`` and ``qcomm_codecs_registry`` of TorchRec's class.
    """

    def __init__(self, mesh: TowerMesh | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._mesh = mesh

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns every scheme, also those that TorchRec offers on GPUs only."""
        return list(_ALL)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Returns the one kernel: dense for data-parallel tables, fused for all others."""
        is_dense = sharding_type == ShardingType.DATA_PARALLEL.value
        return [(EmbeddingComputeKernel.DENSE if is_dense else EmbeddingComputeKernel.FUSED).value]

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> GroupShardedEBC:
        """Shards over all ranks; collective."""
        mesh = self._mesh
        assert mesh is not None, "a sharder without a mesh is for planning"
        make = partial(
            GroupShardedEBC,
            module,
            params,
            group=mesh.global_group,
            data_parallel_group=mesh.global_group,
            moment_scales={},
            options={
                "fused_params": self.fused_params,
                "device": device,
                "qcomm_codecs_registry": self.qcomm_codecs_registry,
            },
        )
        if not any(sharding.sharding_type in _BY_HOST for sharding in params.values()):
            return make()
        topology = mesh.topology
        with host_groups(mesh.new_group(topology.host_groups()), mesh.new_group(topology.across_host_groups())):
            return make()


def shard_flat(
    job: Job, model: nn.Module, mesh: TowerMesh, fused_params: dict[str, Any]
) -> tuple[list[Any], ShardingPlan]:
    """Returns the sharders and the plan of a flat job; rank 0 makes the plan, and all ranks use it. Collective."""
    sharder = FlatSharder(mesh, fused_params=fused_params, qcomm_codecs_registry=codecs_of_all_ranks(job))
    plans: list[ShardingPlan] = []
    if mesh.rank == 0:
        run_on_all_or_raise(lambda: plans.append(plan_flat(job, model, fused_params)), mesh.global_group)
    else:
        run_on_all_or_raise(lambda: None, mesh.global_group)
    return [sharder], invoke_on_rank_and_broadcast_result(mesh.global_group, 0, lambda: plans[0])


def codecs_of_all_ranks(job: Job) -> dict[str, Any] | None:
    """Returns TorchRec's quantised communication in the formats of the config; None where numbers travel as they are.

    Partial sums of rows are added in the format that they travel in.
    """
    codecs = codecs_of(job.config.sharding.precision)
    operations = (CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER)
    return None if codecs is None else {operation.name: codecs for operation in operations}


def table_shardings(plan: ShardingPlan) -> dict[str, ParameterSharding]:
    """Returns the placement of every table of a plan, by name."""
    modules: list[Any] = list(plan.plan.values())
    return {name: sharding for module in modules for name, sharding in module.items()}


def holding_ranks(sharding: ParameterSharding, world_size: int) -> tuple[int, ...]:
    """Returns the ranks that hold a shard of a table, or its copy."""
    if sharding.sharding_type == ShardingType.DATA_PARALLEL.value:
        return tuple(range(world_size))
    spec: Any = sharding.sharding_spec
    return tuple(shard.placement.rank() for shard in spec.shards)


def plan_notes(job: Job, plan: ShardingPlan, fused_params: Mapping[str, Any]) -> tuple[str, ...]:
    """Names the tables that are table-wise because they cannot have the scheme asked for, and says why."""
    asked, placed = _asked(job.config.sharding.scheme), table_shardings(plan)
    why = {
        # All bags are taken for means: it is the last obstacle, and the plan does not say which are.
        table.name: _obstacle(table, asked[0], job.topology, fused_params, is_mean=True)
        for table in sorted(job.tables, key=lambda table: -table.num_bytes)
        if placed[table.name].sharding_type not in asked
    }
    if not why:
        return ()
    shown = shorten([f"{name!r} ({reason})" for name, reason in why.items()], ", ")
    verb = "is" if len(why) == 1 else "are"
    return (f"{counted(len(why), 'table')} {verb} table_wise instead of {asked[0]}: {shown}.",)


def plan_flat(job: Job, model: nn.Module, fused_params: dict[str, Any]) -> ShardingPlan:
    """Places the tables of a flat job with one replica, whose model is on the meta device, by TorchRec's planner.

    Raises:
        InputError: the planner cannot place the tables, or a pooling factor is of no feature.
    """
    own, topology = job.config.sharding, job.topology
    StepWorkload(pooling_factors=own.pooling_factors).check_features(set(feature_names(job.tables)))
    means = [t for part in model.modules() if isinstance(part, EmbeddingBagCollection) for t in _means(part)]
    constraints = {}
    for table in job.tables:
        schemes = _schemes(table, own.scheme, topology, fused_params, is_mean=table.name in means)
        constraints[table.name] = ParameterConstraints(
            sharding_types=list(schemes),
            pooling_factors=[own.pooling_factors.get(name, 1.0) for name in table.feature_names],
            # Left alone, TorchRec cuts no table of 128 columns or fewer into a grid.
            min_partition=_grid_columns(table, topology) if "grid_shard" in schemes and len(schemes) == 1 else None,
        )
    return plan_by_torchrec(
        model,
        [FlatSharder(None, fused_params=fused_params, qcomm_codecs_registry=codecs_of_all_ranks(job))],
        topology,
        constraints=constraints,
        memory_per_rank=job.rank_memory,
        batch_size=job.config.train.batch_size,
        device_type=job.device_type,
    )


def _asked(scheme: str) -> Sequence[str]:
    """TorchRec's names of the schemes that ``sharding.scheme`` allows."""
    return _CHOICES.get(scheme, (scheme,))


def _schemes(
    table: TableSpec, scheme: str, topology: TowerTopology, fused_params: Mapping[str, Any], *, is_mean: bool
) -> Sequence[str]:
    """TorchRec's names of the schemes that a table may have; ``table_wise`` where it can have none of those asked."""
    asked = _asked(scheme)
    possible = [own for own in asked if not _obstacle(table, own, topology, fused_params, is_mean=is_mean)]
    return possible or ["table_wise"]  # `plan_notes` says so


def _obstacle(
    table: TableSpec, scheme: str, topology: TowerTopology, fused_params: Mapping[str, Any], *, is_mean: bool
) -> str:
    """Returns the reason why a table cannot have a scheme of TorchRec, or an empty string if it can."""
    parts = {"row_wise": topology.world_size} | dict.fromkeys(_BY_HOST, topology.host_size)
    if scheme in parts and _has_empty_shard(table.num_embeddings, parts[scheme]):
        return f"cut for {parts[scheme]} ranks, its {counted(table.num_embeddings, 'row')} would leave one without any"
    if scheme == "data_parallel":
        return why_not(table, scheme, fused_params=fused_params)
    if scheme == "grid_shard" and is_mean:
        return "its bags are averaged, where each rank would divide by the ids of its own rows"
    return ""


def _has_empty_shard(rows: int, parts: int) -> bool:
    return rows <= -(-rows // parts) * (parts - 1)


def _grid_columns(table: TableSpec, topology: TowerTopology) -> int:
    """Columns of a table's parts on the hosts: as many equal multiples of four as there can be."""
    most = max(1, min(topology.num_hosts, table.embedding_dim // 4))
    parts = next(number for number in range(most, 0, -1) if table.embedding_dim % (4 * number) == 0)
    return table.embedding_dim // parts


def _means(collection: EmbeddingBagCollection) -> list[str]:
    return [table.name for table in collection.embedding_bag_configs() if table.pooling.value == "MEAN"]
