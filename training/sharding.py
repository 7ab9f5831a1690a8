"""From a config to a sharding plan and a model spread over the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import CommOp, ShardingPlan

from dmt.costs import Hardware, StepWorkload
from dmt.errors import InputError
from dmt.mesh import TowerMesh
from dmt.planner import TowerShardingPlanner
from dmt.sharded_ebc import SPTTEmbeddingBagCollectionSharder
from dmt.sharded_towers import TowerCollectionSharder
from dmt.sharding_report import TowerSharding
from dmt.sharding_rules import Rule
from dmt.tables import TableSpec
from dmt.training.build import ClickTask, build_model, tower_plan
from dmt.training.config import OptimizerConfig, TrainingConfig

__all__ = ["fused_params", "shard_model", "sharding_planner", "tower_sharding"]

_FUSED = {
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "adam": EmbOptimType.ADAM,
    "sgd": EmbOptimType.EXACT_SGD,
}
_NOT_ON_CPU = ("adam",)
# What TorchRec's flat dataflow is given to choose from.
_FLAT_SCHEMES = ["table_wise", "column_wise"]


def fused_params(config: OptimizerConfig) -> dict[str, Any]:
    """FBGEMM's settings of the tables' fused optimizer; data-wise tables take the same (`dmt.data_wise`).

    Raises:
        InputError: FBGEMM has no kernel of this optimizer for the CPU, where the tables live.
    """
    if config.sparse in _NOT_ON_CPU:
        able = [name for name in _FUSED if name not in _NOT_ON_CPU]
        raise InputError(
            f"optimizer.sparse={config.sparse!r}: FBGEMM has no CPU kernel for it, and tables live on the CPU here. "
            f"Use one of {able}."
        )
    return {"optimizer": _FUSED[config.sparse], "learning_rate": config.sparse_lr, "eps": config.sparse_eps}


def sharding_planner(config: TrainingConfig) -> TowerShardingPlanner:
    """The planner with the config's rules, or with the placements of the plan that the config names.

    Raises:
        InputError: the plan's file is bad or was made for another topology.
    """
    sharding, topology = config.sharding, config.topology.build()
    rules: dict[str, Rule] = dict(sharding.tables)
    if sharding.plan is not None:
        loaded = TowerSharding.load(sharding.plan)
        if loaded.topology != topology:
            raise InputError(
                f"Sharding plan {sharding.plan} was made for {loaded.topology}, but the run has {topology}. Re-run "
                "`dmt plan` with this config."
            )
        rules |= loaded.placements
    return TowerShardingPlanner(
        topology,
        scheme=sharding.scheme,
        pinned=rules,
        workload=StepWorkload(
            batch_size=config.train.batch_size,
            pooling_factors=sharding.pooling_factors,
            optimizer=config.optimizer.sparse,
        ),
        hardware=Hardware(
            memory_per_rank=None if sharding.memory_gib is None else int(sharding.memory_gib * 2**30),
            lookup_gb_per_s=sharding.lookup_gb_per_s,
            link_gb_per_s=sharding.link_gb_per_s,
            exchange_us=sharding.exchange_us,
        ),
        id_route=sharding.id_route,
    )


def tower_sharding(config: TrainingConfig, tables: Sequence[TableSpec]) -> TowerSharding:
    """The sharding plan of a run with the tower dataflow, with loads and reasons; needs no process group.

    Args:
        config: the run.
        tables: of the data source, whole.

    Raises:
        InputError: the tower plan or a rule does not fit the tables, or they do not fit the memory.
    """
    towers = tower_plan(config, tables)
    return sharding_planner(config).plan_tables(towers.tables_by_tower(towers.split_tables(tables)))


def shard_model(
    config: TrainingConfig,
    tables: Sequence[TableSpec],
    num_dense: int,
    mesh: TowerMesh,
    *,
    placement: Sequence[int] | None = None,
) -> DistributedModelParallel:
    """Builds the model and distributes it over the mesh, ready to train.

    Everything is built on the meta device, so a rank never holds tables that are not its own. Dense parts start equal
    on all ranks (data parallel broadcasts them). Tables are drawn by the rank that holds them, each rank from a seed of
    its own: with a shared one, tables of equal size would start equal, and features look alike that are not.

    Args:
        config: the run.
        tables: of the data source, whole.
        num_dense: dense columns of the data source.
        mesh: the groups.
        placement: the mesh tower of each tower of a multi-tower model; by default one each, in order.
    """
    model = ClickTask(build_model(config, tables, num_dense, device="meta"))
    torch.manual_seed(1_000_003 * (config.train.seed + 1) + mesh.rank)
    if config.dataflow == "flat":
        sharders, plan = _flat(config, tables, model, mesh)
    else:
        options: dict[str, Any] = {
            "fused_params": fused_params(config.optimizer),
            "id_route": config.sharding.id_route,
            "peer_precision": config.sharding.precision,
        }
        if config.model.has_towers:
            sharders = [TowerCollectionSharder(mesh, placement=placement, **options)]
        else:
            sharders = [SPTTEmbeddingBagCollectionSharder(mesh, tower_plan(config, tables), **options)]
        plan = sharding_planner(config).plan(model, sharders)
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)


def _flat(
    config: TrainingConfig, tables: Sequence[TableSpec], model: ClickTask, mesh: TowerMesh
) -> tuple[list[Any], ShardingPlan]:
    """TorchRec's own sharding over all ranks."""
    codecs = config.sharding.precision.codecs(torch.device("cpu"))
    sharders: list[Any] = [
        EmbeddingBagCollectionSharder(
            fused_params=fused_params(config.optimizer),
            qcomm_codecs_registry=None if codecs is None else {CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name: codecs},
        )
    ]
    schemes = _FLAT_SCHEMES if config.sharding.scheme == "auto" else [config.sharding.scheme]
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=dist.get_world_size(),
            local_world_size=config.topology.ranks_per_tower,
            compute_device="cpu",
        ),
        # Left free, it makes small tables data parallel: TorchRec then drops their fused optimizer, and the dense
        # one trains them at the dense learning rate, without a word.
        constraints={table.name: ParameterConstraints(sharding_types=schemes) for table in tables},
    )
    return sharders, planner.collective_plan(model, sharders, mesh.global_group)
