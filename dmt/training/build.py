"""Models of a `Job`: plain and sharded, their optimizers, and the bytes that a step should send."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from dmt.collectives import run_on_all_or_raise
from dmt.formatting import human_bytes
from dmt.hot_rows.profile import AccessProfile
from dmt.hot_rows.runtime import HotRows
from dmt.models import (
    DCN,
    DLRM,
    DMTDCN,
    DMTDLRM,
    Complexity,
    DMTDLRMProducts,
    ModelOptions,
    flat_sparse_arch,
    tower_sparse_arch,
)
from dmt.models.complexity import MetaTables, MetaTowers, count_on_meta, dense_weight_bytes, is_tower_module
from dmt.models.sparse import JoinedShards
from dmt.plan.tables import feature_names
from dmt.plan.towers import TowerPlan
from dmt.replicas.dense_reduce import HierarchicalDataParallel
from dmt.replicas.sync import ReplicaSync
from dmt.sharding.costs import CostModel, Hardware, StepWorkload
from dmt.sharding.optimizers import FBGEMM_NAMES
from dmt.sharding.planner import TowerShardingPlanner
from dmt.sharding.schemes import Scheme
from dmt.sharding.user_rules import Tiers
from dmt.sptt.flat import SPTTEmbeddingBagCollectionSharder
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.micro_batches import MicroBatches, run_in_micro_batches
from dmt.sptt.towers import TowerCollectionSharder
from dmt.training.access import load_profile
from dmt.training.config import OptimizerConfig, ReplicasConfig, TrainConfig
from dmt.training.data.batch import ClickBatch
from dmt.training.data.config import check_memory
from dmt.training.device import DeviceType, current_device
from dmt.training.factory import check_outputs, make_model
from dmt.training.factory import without_tables as replace_tables
from dmt.training.flat import codecs_of_all_ranks, plan_flat, plan_notes, shard_flat, table_shardings
from dmt.training.job import Job, check_table_optimizer

__all__ = [
    "DENSE_OPTIMIZERS",
    "ClickTask",
    "build_model",
    "build_optimizer",
    "check_model",
    "check_rank_memory",
    "count_model",
    "flat_tables",
    "fused_params",
    "hot_rows",
    "in_micro_batches",
    "replica_sync",
    "shard_model",
    "sharding_result",
]

DENSE_OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}


class ClickTask(nn.Module):
    """A click model ``model(dense_features, sparse_features) -> logits [B, 1]`` with its loss, for train pipelines."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: ClickBatch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """The mean binary cross entropy of the batch, and (logits, labels, weights) of [B] each."""
        logits = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (logits.detach(), batch.labels, batch.weights)


def build_model(job: Job, *, device: str | None = None, without_tables: bool = False) -> nn.Module:
    """Builds the plain single-process model of a job.

    Tables that the tower plan cuts are column shards in it; a flat model concatenates their outputs again
    (`dmt.models.sparse`).

    Args:
        job: the run.
        device: where parameters are made; ``"meta"`` makes none.
        without_tables: use the complexity counter's stand-ins for TorchRec's tables.

    Raises:
        InputError: sizes or the tower plan do not fit.
    """
    model, plan = job.config.model, job.towers
    if model.factory is not None:
        own = make_model(job, device)
        return replace_tables(own) if without_tables else own
    options = ModelOptions(
        dense_arch_layer_sizes=model.dense_arch, over_arch_layer_sizes=model.over_arch, device=device
    )
    shared: dict[str, Any] = {"tables": job.tables, "dense_in_features": job.num_dense, "options": options}
    if "dcn" in model.arch:
        shared |= {"num_cross_layers": model.cross_layers, "cross_rank": model.cross_rank}
    if plan is None or not model.has_towers:
        flat = MetaTables if without_tables else flat_sparse_arch
        splits = {} if plan is None else plan.column_splits
        shared["make_sparse_arch"] = partial(JoinedShards, splits=splits, make_sparse_arch=flat) if splits else flat
        return DLRM(**shared) if model.arch == "dlrm" else DCN(**shared)
    shared |= {"tables": job.split_tables, "tower_plan": plan, "tower_dim": model.tower_dim}
    shared["make_sparse_arch"] = MetaTowers if without_tables else tower_sparse_arch
    if model.arch == "dmt-dcn":
        return DMTDCN(**shared)
    towers = DMTDLRM if model.arch == "dmt-dlrm" else DMTDLRMProducts
    return towers(**shared, c=model.c, p=model.p)


def count_model(job: Job) -> Complexity:
    """Counts MFLOPs per sample, parameters and compression ratio of a job's model, on the meta device."""
    return count_on_meta(build_model(job, device="meta", without_tables=True), job.num_dense)


def check_model(job: Job) -> None:
    """Raises `InputError` if the model of a job cannot be built, or its exchange has no kernels for its device.

    Or if the profile of its hot rows cannot be read.
    """
    job.config.sharding.precision.check_device(torch.device(job.device_type))
    build_model(job, device="meta")
    if job.config.model.factory is not None:
        check_outputs(job)
    _access_profile(job)


def check_rank_memory(job: Job) -> None:
    """Raises `InputError` if a rank needs more memory than this machine has, by a lower bound.

    Counted are its share of the tables, the copies of hot rows that it may have, the dense weights with their
    gradients, and a batch with its embeddings.
    """
    config, topology = job.config, job.topology
    towers, dense = dense_weight_bytes(build_model(job, device="meta", without_tables=True))
    tables = _table_bytes(job)
    # Of each copy the weight, its gradient and states; AdaGrad's single numbers of rows are left out.
    states = {"adagrad": 1, "adam": 2}.get(config.optimizer.sparse, 0)
    # On one host no row is ever chosen.
    is_across = topology.share_across_hosts(topology.sharding_groups()) > 0
    share = config.hot_rows.extra_memory if is_across else 0.0
    copies = (2 + states) * share * sum(table.num_bytes for table in job.tables)
    hot = f"{human_bytes(copies)} for copies of hot rows (hot_rows.extra_memory), " if copies else ""
    columns = job.num_dense + sum(table.embedding_dim * len(table.feature_names) for table in job.tables)
    batch = max(config.train.batch_size, config.train.eval_batch_size) * columns * 4
    check_memory(
        tables + copies + 2 * (dense + towers / topology.num_towers) + batch,
        f"A rank, with {human_bytes(tables)} of tables, {hot}dense layers (model: dense_arch, over_arch, tower_dim, c, "
        "p, cross_rank) and batches (train: batch_size, eval_batch_size),",
    )


def _table_bytes(job: Job) -> float:
    """Bytes of the fullest rank's tables in host memory: on GPUs of those that are not on the device."""
    if job.device_type == "cuda":
        return max((rank.host_memory for rank in job.sharding.ranks), default=0) if job.sharding else 0.0
    if job.sharding is None:
        topology, whole = job.topology, sum(table.num_bytes for table in job.tables)
        is_copied = job.config.sharding.scheme == "data_parallel"
        return whole if is_copied else whole / (topology.world_size // topology.num_replicas)
    # On a CPU every kernel is run as fused, without a cache.
    sharding, tables, held = job.sharding, {table.name: table for table in job.split_tables}, Counter[Any]()
    costs = CostModel(topology=sharding.topology, workload=sharding.workload, hardware=sharding.hardware)
    for own in sharding.tables:
        for rank, load in costs.shards(tables[own.name], replace(own.placement, kernel="fused")):
            held[own.tower, rank] += load.memory
    return max(held.values())


def build_optimizer(config: OptimizerConfig, model: DistributedModelParallel) -> CombinedOptimizer:
    """The optimizer of everything: the tables' fused ones, one for tower modules and one for the other dense parts.

    The three learning rates rise linearly over ``warmup_steps`` and fall from ``decay_start`` on.
    """
    trainable = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    rates = {"towers": config.dense_lr if config.tower_lr is None else config.tower_lr, "dense": config.dense_lr}
    parameters: dict[str, dict[str, nn.Parameter]] = {part: {} for part in rates}
    for name, parameter in in_backward_optimizer_filter(trainable):
        parameters["towers" if is_tower_module(name) else "dense"][name] = parameter
    parts: list[tuple[str, KeyedOptimizer, float]] = [("tables", model.fused_optimizer, config.sparse_lr)]
    for part, rate in rates.items():
        # A flat model has no tower modules, and PyTorch's optimizers refuse to have nothing to do.
        if parameters[part]:
            make = partial(DENSE_OPTIMIZERS[config.dense], lr=rate)
            parts.append((part, KeyedOptimizerWrapper(parameters[part], make), rate))
    return CombinedOptimizer([(part, _Scheduled(one, _stages(config), lr=rate)) for part, one, rate in parts])


def _stages(config: OptimizerConfig) -> list[WarmupStage]:
    """The schedule of the learning rates; a stage holds up to and with its last step, ``max_iters``."""
    # Also without a warm-up, at the full rate: a checkpoint then has the same state with and without.
    warmup = max(1, config.warmup_steps)
    stages = [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=warmup, value=1 / warmup)]
    if config.decay_start is not None and config.decay_steps is not None:
        start, end = config.decay_start, config.decay_start + config.decay_steps
        if start > warmup:
            stages.append(WarmupStage(policy=WarmupPolicy.NONE, max_iters=start))
        # TorchRec's falls from step 0 on; scaled, it is 1 where it starts.
        fall = WarmupStage(
            policy=WarmupPolicy.POLY,
            max_iters=end - 1,
            value=2.0,
            decay_iters=end,
            lr_scale=(end / config.decay_steps) ** 2,
        )
        stages += [fall, WarmupStage(policy=WarmupPolicy.CONSTANT, max_iters=2**62, value=config.decay_steps**-2.0)]
    return stages


class _Scheduled(WarmupOptimizer):
    """A `WarmupOptimizer` that goes on from a checkpoint by its step: the saved stage may be of another schedule."""

    def __init__(self, optimizer: KeyedOptimizer, stages: list[WarmupStage], *, lr: float) -> None:
        self._ends = [stage.max_iters for stage in stages]
        super().__init__(optimizer, stages, lr=lr)

    def post_load_state_dict(self) -> None:
        """Takes the learning rates of the step that was loaded."""
        saved = self.state.get(self.params["__warmup"], {}).get("warmup")
        if saved is not None:
            saved[1] = bisect_left(self._ends, int(saved[0]))
        super().post_load_state_dict()


def fused_params(config: OptimizerConfig, device: DeviceType = "cpu") -> dict[str, Any]:
    """Returns FBGEMM's settings of the tables' fused optimizer.

    Data-parallel tables take the same settings (`dmt.sharding.data_parallel`).

    Raises:
        InputError: FBGEMM has no kernel of this optimizer for the device where the tables live.
    """
    check_table_optimizer(config, device)
    optimizer = EmbOptimType(FBGEMM_NAMES[config.sparse])
    return {"optimizer": optimizer, "learning_rate": config.sparse_lr, "eps": config.sparse_eps}


def shard_model(job: Job, mesh: TowerMesh) -> DistributedModelParallel:
    """Builds the model of a job and distributes it over the mesh, ready to train.

    Everything is built on the meta device, so a rank never holds tables that are not its own. Dense parts start equal
    on all ranks (data parallel broadcasts them). Tables are drawn by the rank that holds them, each rank from a seed of
    its own: with a shared one, tables of equal size would start equal, and features look alike that are not.
    A job for GPUs is built on the rank's current one (`dmt.training.device.take_device`).
    """
    config = job.config
    model = ClickTask(build_model(job, device="meta"))
    torch.manual_seed(1_000_003 * (config.train.seed + 1) + mesh.rank)
    if config.dataflow == "flat":
        fused = fused_params(config.optimizer, job.device_type)
        is_single = config.topology.num_replicas == 1
        sharders, plan = shard_flat(job, model, mesh, fused) if is_single else _flat_replicas(job, model, mesh, fused)
    else:
        assert job.towers is not None, "resolved by make_job"
        assert job.sharding is not None, "resolved by make_job"
        options: dict[str, Any] = {
            "fused_params": fused_params(config.optimizer, job.device_type),
            "id_route": config.sharding.id_route,
            "unique": config.sharding.unique,
            "peer_precision": config.sharding.precision,
            "moment_scale": config.replicas.moment_scale,
        }
        if config.model.has_towers:
            sharders = [TowerCollectionSharder(mesh, placement=job.placement, **options)]
        else:
            sharders = [SPTTEmbeddingBagCollectionSharder(mesh, job.towers, **options)]
        # A planner that has nothing left to decide.
        planner = TowerShardingPlanner(
            job.sharding.topology,
            pinned=job.sharding.placements,
            workload=replace(job.sharding.workload, optimizer=config.optimizer.sparse),
            hardware=job.sharding.hardware,
            device_type=job.device_type,
            tiers=Tiers(cache_policy=config.sharding.cache_policy),
        )
        plan = planner.plan(model, sharders)
    # None: TorchRec's own, DDP's ring.
    reduce = None
    if config.train.dense_reduce == "hierarchical":
        reduce = HierarchicalDataParallel(mesh, precision=config.train.dense_reduce_precision)
    return DistributedModelParallel(
        model,
        device=current_device(job.device_type),
        plan=plan,
        sharders=sharders,
        data_parallel_wrapper=reduce,
    )


def in_micro_batches(config: TrainConfig, model: DistributedModelParallel) -> MicroBatches | None:
    """Makes the model of a sharded `ClickTask` run in the config's micro-batches; None where that is the whole batch.

    Raises:
        InputError: the model was sharded with the flat dataflow or the global id route.
    """
    if config.micro_batches == 1:
        return None
    task: Any = model.module
    return run_in_micro_batches(task.model, config.micro_batches)


def replica_sync(config: ReplicasConfig, model: nn.Module, mesh: TowerMesh) -> ReplicaSync | None:
    """Returns the sync of the replicas of a sharded model, None for a single one; call it once weights are loaded."""
    if mesh.topology.num_replicas == 1:
        return None
    return ReplicaSync(
        model,
        mesh,
        interval=config.sync_every,
        optimizer_state=config.optimizer_state,
    )


def _flat_replicas(
    job: Job, model: ClickTask, mesh: TowerMesh, fused: dict[str, Any]
) -> tuple[list[Any], ShardingPlan]:
    """Shards with TorchRec's exchange over all ranks of a replica: one tower that spans them."""
    config, topology = job.config, mesh.topology.as_one_tower()
    sharder = SPTTEmbeddingBagCollectionSharder(
        TowerMesh(topology),
        TowerPlan.from_lists([feature_names(job.tables)]),
        fused_params=fused,
        qcomm_codecs_registry=codecs_of_all_ranks(job),
        moment_scale=config.replicas.moment_scale,
    )
    planner = TowerShardingPlanner(
        topology,
        # With one replica "auto" chooses no data-parallel tables either.
        scheme="table_wise" if config.sharding.scheme == "auto" else cast("Scheme", config.sharding.scheme),
        workload=StepWorkload(
            batch_size=config.train.batch_size,
            pooling_factors=config.sharding.pooling_factors,
            optimizer=config.optimizer.sparse,
        ),
        hardware=Hardware(memory_per_rank=job.rank_memory),
        device_type=job.device_type,
    )
    return [sharder], planner.plan(model, [sharder])


def hot_rows(job: Job, model: nn.Module, mesh: TowerMesh) -> HotRows | None:
    """Returns the copies of hot rows of a sharded model, None where the config has none."""
    own = job.config.hot_rows
    if own.extra_memory == 0:
        return None
    read: list[AccessProfile | None] = []
    # A rank whose file is gone must not leave the others waiting.
    run_on_all_or_raise(lambda: read.append(_access_profile(job)), mesh.global_group)
    return HotRows(model, mesh, extra_memory=own.extra_memory, refresh_every=own.refresh_every, profile=read[0])


def _access_profile(job: Job) -> AccessProfile | None:
    path = job.config.hot_rows.profile
    return None if path is None else load_profile(Path(path))


def flat_tables(job: Job) -> tuple[ShardingPlan, tuple[str, ...]]:
    """Returns TorchRec's plan of the tables of a flat job without replicas, and notes on it.

    Raises:
        InputError: TorchRec's planner cannot place the tables.
    """
    fused = fused_params(job.config.optimizer, job.device_type)
    plan = plan_flat(job, ClickTask(build_model(job, device="meta")), fused)
    return plan, plan_notes(job, plan, fused)


def sharding_result(job: Job, plan: ShardingPlan) -> dict[str, Any]:
    """Returns the section of a run's result on the plan of its tables; ``plan`` is that of the sharded model."""
    if job.sharding is None:
        schemes = Counter(sharding.sharding_type for sharding in table_shardings(plan).values())
        fused = fused_params(job.config.optimizer, job.device_type)
        notes = plan_notes(job, plan, fused) if job.topology.num_replicas == 1 else ()
        return {"tables_by_scheme": dict(schemes.most_common()), "notes": list(notes)}
    return {
        "imbalance": job.sharding.imbalance,
        "tables_by_scheme": job.sharding.tables_by_scheme,
        "largest_rank_bytes": max(rank.memory for rank in job.sharding.ranks),
    }
