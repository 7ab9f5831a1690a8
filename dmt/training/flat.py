"""The flat dataflow: TorchRec's exchange over all ranks; the config or TorchRec's planner chooses the schemes."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import BaseEmbeddingSharder, EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import CommOp, ParameterSharding, ShardingEnv, ShardingPlan, ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from dmt.plan.tables import feature_names
from dmt.sharding.costs import StepWorkload
from dmt.sharding.planner import plan_by_torchrec
from dmt.sharding.schemes import SCHEMES, why_not
from dmt.sptt.group_sharded import GroupShardedEC, place_in_group
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.peer_exchange import codecs_of
from dmt.sptt.tower_lookup import GroupShardedEBC
from dmt.training.device import on_first_rank
from dmt.training.job import Job

__all__ = ["FlatSequenceSharder", "FlatSharder", "plan_flat", "shard_flat"]

_CHOICES = {"auto": ("table_wise", "column_wise"), "planner": SCHEMES}


class _OverAllRanks(BaseEmbeddingSharder[Any]):
    """Base class of the sharders of flat collections; ``mesh`` is the mesh of the run, None for planning only.

    ``kwargs`` are ``fused_params`` and ``qcomm_codecs_registry`` of TorchRec's class.
    """

    def __init__(self, mesh: TowerMesh | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._mesh = mesh

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Returns the only kernel of a scheme: dense for data-parallel tables, fused for all others."""
        is_dense = sharding_type == ShardingType.DATA_PARALLEL.value
        return [(EmbeddingComputeKernel.DENSE if is_dense else EmbeddingComputeKernel.FUSED).value]

    def _arguments(self, params: dict[str, ParameterSharding], device: torch.device | None) -> dict[str, Any]:
        """Returns the arguments that both sharded modules take; collective."""
        assert self._mesh is not None, "a sharder without a mesh is for planning"
        # TorchRec's planner numbers GPUs within each host of the topology, but a machine may emulate several hosts.
        placed = place_in_group(params, self._mesh.global_group, device)
        registry = self.qcomm_codecs_registry
        options = {"fused_params": self.fused_params, "device": device, "qcomm_codecs_registry": registry}
        return {"sharding": placed, "group": self._mesh.global_group, "moment_scales": {}, "options": options}


class FlatSharder(_OverAllRanks, EmbeddingBagCollectionSharder):
    """TorchRec's sharder of ``EmbeddingBagCollection`` over all ranks, with the fixes of `GroupShardedEBC`.

    Data-parallel tables keep their fused optimizer, and mean pooling of row-wise tables equals the plain module's.
    """

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns all schemes, even those that TorchRec offers on GPUs only."""
        return list(SCHEMES)

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> GroupShardedEBC:
        """Returns the collection sharded over all ranks; collective."""
        arguments = self._arguments(params, device)
        return GroupShardedEBC(module, data_parallel_group=arguments["group"], **arguments)


class FlatSequenceSharder(_OverAllRanks, EmbeddingCollectionSharder):
    """TorchRec's sharder of ``EmbeddingCollection`` (sequences) over all ranks, for table-wise and row-wise tables."""

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> GroupShardedEC:
        """Returns the collection sharded over all ranks; collective."""
        return GroupShardedEC(module, **self._arguments(params, device))


def shard_flat(
    job: Job, model: nn.Module, mesh: TowerMesh, fused_params: dict[str, Any]
) -> tuple[list[Any], ShardingPlan]:
    """Returns the sharders and the plan of a flat job; rank 0 makes the plan, and all ranks use it. Collective."""
    codecs = codecs_of(job.config.sharding.precision)
    operations = (
        CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL,
        CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER,
        CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,
    )
    registry = None if codecs is None else {operation.name: codecs for operation in operations}
    kinds: tuple[Any, ...] = (FlatSharder, FlatSequenceSharder)
    sharders = [kind(mesh, fused_params=fused_params, qcomm_codecs_registry=registry) for kind in kinds]
    return sharders, on_first_rank(partial(plan_flat, job, model, fused_params), mesh)


def plan_flat(job: Job, model: nn.Module, fused_params: dict[str, Any]) -> ShardingPlan:
    """Places a flat job's tables on the ranks of a replica by TorchRec's planner; ``model`` may be on the meta device.

    A table that supports none of the config's schemes stays whole (``table_wise``).

    Raises:
        InputError: the planner cannot place the tables, or a pooling factor names an unknown feature.
    """
    settings, topology = job.config.sharding, job.topology.one_replica
    ranks = topology.world_size
    StepWorkload(pooling_factors=settings.pooling_factors).check_features(set(feature_names(job.tables)))
    constraints = {}
    for table in job.tables:
        wanted = _CHOICES.get(settings.scheme, (settings.scheme,))
        possible = [name for name in wanted if not why_not(table, name, num_ranks=ranks, fused_params=fused_params)]
        constraints[table.name] = ParameterConstraints(
            sharding_types=possible or ["table_wise"],
            pooling_factors=[settings.pooling_factors.get(name, 1.0) for name in table.feature_names],
        )
    plan = plan_by_torchrec(
        model,
        [FlatSharder(None, fused_params=fused_params), FlatSequenceSharder(None, fused_params=fused_params)],
        topology,
        constraints=constraints,
        memory_per_rank=job.config.sharding.rank_memory,
        batch_size=job.config.train.batch_size,
        device_type=job.device_type,
    )
    # TorchRec tries the schemes in an order that differs by process, and one column shard costs what the table costs.
    for name, placed in (item for module in cast("Any", plan.plan).values() for item in module.items()):
        is_whole = placed.sharding_type == "column_wise" and len(placed.ranks) == 1
        if is_whole and "table_wise" in constraints[name].sharding_types:
            placed.sharding_type = "table_wise"
    return plan
