"""From a config to data, a plain PyTorch model and the optimizers of its sharded form (`dmt.training.job`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import CommOp, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from dmt.errors import InputError
from dmt.models import (
    DCN,
    DLRM,
    DMTDCN,
    DMTDLRM,
    Complexity,
    ModelOptions,
    count_complexity,
    flat_sparse_arch,
    tower_sparse_arch,
)
from dmt.models.complexity import MetaTables, MetaTowers
from dmt.models.sparse import joined_sparse_arch
from dmt.plan.column_shards import shard_names, split_tables
from dmt.plan.tables import TableSpec, feature_names
from dmt.plan.topology import TowerTopology
from dmt.plan.towers import TowerPlan
from dmt.replicas.dense_reduce import HierarchicalDataParallel
from dmt.replicas.sync import ReplicaSync
from dmt.sharding.costs import Hardware, StepWorkload
from dmt.sharding.plan import TowerShardingPlan
from dmt.sharding.planner import TowerShardingPlanner
from dmt.sharding.rules import Rule
from dmt.sharding.schemes import Scheme, TablePlacement
from dmt.sptt.flat import SPTTEmbeddingBagCollectionSharder
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.micro_batches import MicroBatches, run_in_micro_batches
from dmt.sptt.towers import TowerCollectionSharder
from dmt.training.config import OptimizerConfig, ReplicasConfig, TrainConfig, TrainingConfig
from dmt.training.data import ClickData, open_source
from dmt.training.data.batch import ClickBatch

__all__ = [
    "ClickTask",
    "build_model",
    "build_optimizer",
    "count_model",
    "fused_params",
    "in_micro_batches",
    "open_data",
    "replica_sync",
    "shard_model",
    "sharding_planner",
    "tower_plan",
    "tower_sharding",
]

_DENSE = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}
# The parameters of tower modules, by name as in the unsharded model.
_TOWER_MODULE = re.compile(r"\.towers\.\d+\.interaction\.")


class ClickTask(nn.Module):
    """A click model with its loss, in the form TorchRec's train pipelines take.

    Args:
        model: ``model(dense_features, sparse_features) -> logits [B, 1]``.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: ClickBatch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """The mean binary cross entropy of the batch, and (logits, labels, weights) of [B] each."""
        logits = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (logits.detach(), batch.labels, batch.weights)


def open_data(config: TrainingConfig) -> ClickData:
    """The data of a run, with ids for the column shards of the tables that its tower plan cuts.

    `ClickData.tables` are whole; `build_model` and `shard_model` cut them themselves.

    Raises:
        InputError: the data do not fit the config, or the tower plan's file is bad or cuts what is not there.
    """
    # A flat dataflow has no towers, and a strided plan no cuts.
    reads_plan = config.dataflow == "sptt" and config.towers.plan != "strided"
    splits = TowerPlan.load(config.towers.plan).column_splits if reads_plan else {}
    return open_source(
        config.data,
        embedding_dim=config.model.embedding_dim,
        data_type="FP16" if config.sharding.table_precision == "fp16" else "FP32",
        column_splits=splits,
    )


def tower_plan(config: TrainingConfig, tables: Sequence[TableSpec]) -> TowerPlan:
    """The tower plan the config names, checked against the tables, which are whole.

    Raises:
        InputError: the file is bad, does not fit the tables or cuts one into shards that FBGEMM cannot take, or more
            towers are asked for than there are features.
    """
    if config.towers.plan == "strided":
        plan = TowerPlan.strided(feature_names(tables), config.topology.num_towers)
    else:
        plan = TowerPlan.load(config.towers.plan)
    for feature, widths in plan.column_splits.items():
        if any(width % 4 for width in widths):
            raise InputError(
                f"Tower plan {config.towers.plan} cuts the table of feature {feature!r} into column shards of "
                f"{list(widths)} columns; each must be a multiple of 4 (FBGEMM's kernels). Make a plan with other "
                "shards."
            )
    plan.tables_by_tower(plan.split_tables(tables))
    return plan


def build_model(
    config: TrainingConfig,
    tables: Sequence[TableSpec],
    num_dense: int,
    *,
    device: str | None = None,
    without_tables: bool = False,
) -> nn.Module:
    """The plain single-process model of the config.

    Args:
        config: the run.
        tables: the tables of the data source, whole; the model has them cut where its tower plan cuts them. A flat
            model puts their shards side by side again (`dmt.models.sparse`).
        num_dense: dense columns of the data source.
        device: where parameters are made; ``"meta"`` makes none.
        without_tables: use the complexity counter's stand-ins for TorchRec's tables.

    Raises:
        InputError: sizes or the tower plan do not fit.
    """
    model = config.model
    options = ModelOptions(
        dense_arch_layer_sizes=model.dense_arch, over_arch_layer_sizes=model.over_arch, device=device
    )
    shared: dict[str, Any] = {"tables": tables, "dense_in_features": num_dense, "options": options}
    if "dcn" in model.arch:
        shared |= {"num_cross_layers": model.cross_layers, "cross_rank": model.cross_rank}
    plan = tower_plan(config, tables) if config.dataflow == "sptt" else None
    if plan is None or not model.has_towers:
        flat = MetaTables if without_tables else flat_sparse_arch
        splits = {} if plan is None else plan.column_splits
        shared["make_sparse_arch"] = joined_sparse_arch(splits, flat) if splits else flat
        return DLRM(**shared) if model.arch == "dlrm" else DCN(**shared)
    shared |= {"tables": plan.split_tables(tables), "tower_plan": plan, "tower_dim": model.tower_dim}
    shared["make_sparse_arch"] = MetaTowers if without_tables else tower_sparse_arch
    return DMTDLRM(**shared, c=model.c, p=model.p) if model.arch == "dmt-dlrm" else DMTDCN(**shared)


def count_model(config: TrainingConfig, tables: Sequence[TableSpec], num_dense: int) -> Complexity:
    """MFLOPs per sample, parameters and compression ratio of the config's model, counted on the meta device."""
    model = build_model(config, tables, num_dense, device="meta", without_tables=True)
    ids = torch.empty(1, dtype=torch.long, device="meta")
    return count_complexity(model, torch.empty(1, num_dense, device="meta"), ids)


def build_optimizer(config: OptimizerConfig, model: DistributedModelParallel) -> CombinedOptimizer:
    """The optimizer of everything: the tables' fused ones, one for tower modules and one for the other dense parts.

    The three learning rates rise linearly over ``warmup_steps``.
    """
    trainable = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    rates = {"towers": config.dense_lr if config.tower_lr is None else config.tower_lr, "dense": config.dense_lr}
    parameters: dict[str, dict[str, nn.Parameter]] = {part: {} for part in rates}
    for name, parameter in in_backward_optimizer_filter(trainable):
        parameters["towers" if _TOWER_MODULE.search(name) else "dense"][name] = parameter
    parts: list[tuple[str, KeyedOptimizer, float]] = [("tables", model.fused_optimizer, config.sparse_lr)]
    for part, rate in rates.items():
        # A flat model has no tower modules, and PyTorch's optimizers refuse to have nothing to do.
        if parameters[part]:
            make = partial(_DENSE[config.dense], lr=rate)
            parts.append((part, KeyedOptimizerWrapper(parameters[part], make), rate))
    # Also without a warm-up, at the full rate: a checkpoint then has the same state with and without.
    steps = max(1, config.warmup_steps)
    stages = [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=steps, value=1 / steps)]
    return CombinedOptimizer([(part, WarmupOptimizer(optimizer, stages, lr=rate)) for part, optimizer, rate in parts])


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
    """FBGEMM's settings of the tables' fused optimizer; data-parallel tables take the same (`dmt.sharding.data_parallel`).

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
            memory_gb_per_s=sharding.memory_gb_per_s,
            intra_tower_gb_per_s=sharding.intra_tower_gb_per_s,
            collective_latency_us=sharding.collective_latency_us,
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
    loaded = TowerShardingPlan.load(file)
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


def tower_sharding(config: TrainingConfig, tables: Sequence[TableSpec]) -> TowerShardingPlan:
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
    sharding: TowerShardingPlan | None = None,
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
    return run_in_micro_batches(task.model, config.micro_batches)


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


def _carrying_out(sharding: TowerShardingPlan) -> TowerShardingPlanner:
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
        # Its own choice would have data-parallel tables too, which the flat dataflow has not.
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
