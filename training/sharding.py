"""From a config to a sharding plan and a model spread over the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import CommOp, ShardingPlan

from dmt.columns import shard_names, split_tables
from dmt.costs import Hardware, StepWorkload
from dmt.dense_reduce import HierarchicalDataParallel
from dmt.errors import InputError
from dmt.mesh import TowerMesh
from dmt.micro_batches import MicroBatches
from dmt.placement import Scheme, TablePlacement
from dmt.plan import TowerPlan
from dmt.planner import TowerShardingPlanner
from dmt.replicas import ReplicaSync
from dmt.sharded_ebc import SPTTEmbeddingBagCollectionSharder
from dmt.sharded_towers import TowerCollectionSharder
from dmt.sharding_report import TowerSharding
from dmt.sharding_rules import Rule
from dmt.tables import TableSpec, feature_names
from dmt.topology import TowerTopology
from dmt.training.build import ClickTask, build_model, tower_plan
from dmt.training.config import OptimizerConfig, ReplicasConfig, TrainConfig, TrainingConfig

__all__ = ["fused_params", "in_micro_batches", "replica_sync", "shard_model", "sharding_planner", "tower_sharding"]

_FUSED = {
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "adam": EmbOptimType.ADAM,
    "sgd": EmbOptimType.EXACT_SGD,
}
_NOT_ON_CPU = ("adam",)
Splits = Mapping[str, tuple[int, ...]]
# What TorchRec's flat dataflow is given to choose from.
_FLAT_SCHEMES: list[Scheme] = ["table_wise", "column_wise"]


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


def sharding_planner(config: TrainingConfig, tables: Sequence[TableSpec]) -> TowerShardingPlanner:
    """The planner with the config's rules, or with the placements of the plan that the config names.

    Where the tower plan cuts tables into column shards, what the config says of a whole table or feature holds for each
    of its shards that has no rule or factor of its own.

    Args:
        config: the run.
        tables: of the data source, whole.

    Raises:
        InputError: the plan's file is bad, or was made for another topology or other tables.
    """
    sharding, topology = config.sharding, config.topology.build()
    splits = tower_plan(config, tables).column_splits
    rules = _rules_of_shards(sharding.tables, tables, splits)
    if sharding.plan is not None:
        rules |= _loaded_placements(sharding.plan, topology, split_tables(tables, splits))
    factors: dict[str, float] = {}
    for feature, factor in sharding.pooling_factors.items():
        if feature in splits:
            factors = dict.fromkeys(shard_names(feature, splits[feature]), factor) | factors
        else:
            factors[feature] = factor
    return TowerShardingPlanner(
        topology,
        scheme=sharding.scheme,
        pinned=rules,
        workload=StepWorkload(
            batch_size=config.train.batch_size,
            pooling_factors=factors,
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


def _rules_of_shards(rules: Mapping[str, Rule], tables: Sequence[TableSpec], splits: Splits) -> dict[str, Rule]:
    """The rules with those for the name, or for a pattern of the name, of a table that is cut given to its shards.

    Example:
        >>> table = TableSpec(name="t_ad", num_embeddings=9, embedding_dim=8, feature_names=("ad",))
        >>> _rules_of_shards({"t_ad": "row_wise", "t_ad[4:8]": "table_wise"}, [table], {"ad": (4, 4)})
        {'t_ad[4:8]': 'table_wise', 't_ad[0:4]': 'row_wise'}
    """
    names = [table.name for table in split_tables(tables, splits)]
    cut = {t.name: shard_names(t.name, splits[t.feature_names[0]]) for t in tables if t.feature_names[0] in splits}
    of_shards: dict[str, Rule] = {}
    for table, shards in cut.items():
        for shard in shards:
            keys = [key for key in (shard, table) if key in rules][:1]
            keys = keys or [key for key in rules if fnmatchcase(table, key) or fnmatchcase(shard, key)]
            for key in keys:
                if of_shards.setdefault(shard, rules[key]) != rules[key]:
                    raise InputError(
                        f"Table {table!r}, which the tower plan cuts into {shards}, matches the rules {keys[0]!r} "
                        f"({rules[keys[0]]}) and {key!r} ({rules[key]}) of sharding.tables, which differ. Give it a "
                        "rule by name, or narrow the patterns."
                    )
    # What was for nothing but tables that are cut is done with; what matches no table at all stays, to be refused.
    others = {
        key: rule
        for key, rule in rules.items()
        if not any(fnmatchcase(table, key) for table in cut) or any(fnmatchcase(name, key) for name in names)
    }
    return others | of_shards


def _loaded_placements(file: str, topology: TowerTopology, tables: Sequence[TableSpec]) -> dict[str, TablePlacement]:
    """The placements of a saved plan, which must be for just these tables on this topology."""
    loaded = TowerSharding.load(file)
    if loaded.topology != topology:
        raise InputError(
            f"Sharding plan {file} was made for {loaded.topology}, but the run has {topology}. Re-run `dmt plan` with "
            "this config."
        )
    placements, names = loaded.placements, {table.name for table in tables}
    for what, some in (("lacks", names - set(placements)), ("places", set(placements) - names)):
        if some:
            which = ", ".join(repr(name) for name in sorted(some)[:3]) + (", ..." if len(some) > 3 else "")
            raise InputError(
                f"Sharding plan {file} {what} tables that the run {'has' if what == 'lacks' else 'lacks'}: {which}. "
                "Re-run `dmt plan` with this config."
            )
    return placements


def tower_sharding(config: TrainingConfig, tables: Sequence[TableSpec]) -> TowerSharding:
    """The sharding plan of a run with the tower dataflow, with loads and reasons; needs no process group.

    Args:
        config: the run.
        tables: of the data source, whole.

    Raises:
        InputError: the tower plan or a rule does not fit the tables, or they do not fit the memory.
    """
    towers = tower_plan(config, tables)
    return sharding_planner(config, tables).plan_tables(towers.tables_by_tower(towers.split_tables(tables)))


def shard_model(
    config: TrainingConfig,
    tables: Sequence[TableSpec],
    num_dense: int,
    *,
    mesh: TowerMesh,
    placement: Sequence[int] | None = None,
    sharding: TowerSharding | None = None,
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
        sharding: the plan to carry out, as `tower_sharding` made it; without it, the tables are planned here.
    """
    model = ClickTask(build_model(config, tables, num_dense, device="meta"))
    torch.manual_seed(1_000_003 * (config.train.seed + 1) + mesh.rank)
    if config.dataflow == "flat":
        flat = _flat if config.topology.num_replicas == 1 else _flat_replicas
        sharders, plan = flat(config, tables, model, mesh)
    else:
        options: dict[str, Any] = {
            "fused_params": fused_params(config.optimizer),
            "id_route": config.sharding.id_route,
            "peer_precision": config.sharding.precision,
            "moment_scale": config.replicas.moment_scale,
        }
        if config.model.has_towers:
            sharders = [TowerCollectionSharder(mesh, placement=placement, **options)]
        else:
            sharders = [SPTTEmbeddingBagCollectionSharder(mesh, tower_plan(config, tables), **options)]
        planner = sharding_planner(config, tables) if sharding is None else _carrying_out(sharding)
        plan = planner.plan(model, sharders)
    return DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=plan,
        sharders=sharders,
        data_parallel_wrapper=_dense_reduce(config.train, mesh),
    )


def in_micro_batches(config: TrainConfig, model: DistributedModelParallel) -> MicroBatches | None:
    """Makes the model of a sharded `ClickTask` run in the config's micro-batches; None where that is the whole batch.

    Raises:
        InputError: the model was sharded with the flat dataflow or the global id route.
    """
    if config.micro_batches == 1:
        return None
    task: Any = model.module  # the loss is of the whole batch
    return MicroBatches(task.model, num_micro_batches=config.micro_batches)


def replica_sync(config: ReplicasConfig, model: nn.Module, mesh: TowerMesh) -> ReplicaSync | None:
    """What keeps the replicas of a sharded model equal, None for a single one; to be made once weights are loaded."""
    if mesh.topology.num_replicas == 1:
        return None
    return ReplicaSync(
        model,
        mesh,
        interval=config.sync_every,
        optimizer_state=config.optimizer_state,
        asynchronous=config.asynchronous,
        precision=config.precision,
    )


def _dense_reduce(config: TrainConfig, mesh: TowerMesh) -> HierarchicalDataParallel | None:
    """What averages the gradients of the dense part; None is TorchRec's own, DDP's ring. Collective."""
    if config.dense_reduce == "ring":
        return None
    return HierarchicalDataParallel(mesh, precision=config.dense_reduce_precision)


def _carrying_out(sharding: TowerSharding) -> TowerShardingPlanner:
    """A planner that has nothing left to decide."""
    return TowerShardingPlanner(
        sharding.topology, pinned=sharding.placements, workload=sharding.workload, hardware=sharding.hardware
    )


def _flat(
    config: TrainingConfig, tables: Sequence[TableSpec], model: ClickTask, mesh: TowerMesh
) -> tuple[list[Any], ShardingPlan]:
    """TorchRec's own sharding over all ranks."""
    sharders: list[Any] = [
        EmbeddingBagCollectionSharder(
            fused_params=fused_params(config.optimizer), qcomm_codecs_registry=_codecs_of_all_ranks(config)
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


def _flat_replicas(
    config: TrainingConfig, tables: Sequence[TableSpec], model: ClickTask, mesh: TowerMesh
) -> tuple[list[Any], ShardingPlan]:
    """TorchRec's exchange over all ranks of a replica: one tower that spans them."""
    topology = _flat_topology(mesh.topology)
    sharder = SPTTEmbeddingBagCollectionSharder(
        TowerMesh(topology),
        TowerPlan.from_lists([feature_names(tables)]),
        fused_params=fused_params(config.optimizer),
        qcomm_codecs_registry=_codecs_of_all_ranks(config),
        moment_scale=config.replicas.moment_scale,
    )
    planner = TowerShardingPlanner(
        topology,
        # Its own choice would have data-wise tables too, which the flat dataflow has not.
        scheme=_FLAT_SCHEMES[0] if config.sharding.scheme == "auto" else config.sharding.scheme,
        workload=StepWorkload(batch_size=config.train.batch_size, optimizer=config.optimizer.sparse),
    )
    return [sharder], planner.plan(model, [sharder])


def _codecs_of_all_ranks(config: TrainingConfig) -> dict[str, Any] | None:
    codecs = config.sharding.precision.codecs(torch.device("cpu"))
    return None if codecs is None else {CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name: codecs}


def _flat_topology(topology: TowerTopology) -> TowerTopology:
    """The same replicas on the same ranks, each one tower of all its ranks.

    Example:
        >>> _flat_topology(TowerTopology(num_replicas=2, num_towers=2, ranks_per_tower=4)).tower_groups()
        [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]
    """
    return replace(topology, num_towers=1, ranks_per_tower=topology.num_towers * topology.ranks_per_tower)
