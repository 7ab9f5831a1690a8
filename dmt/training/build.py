"""Models of a `Job`, plain and sharded, and their optimizers, with the warm-up of the learning rates."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt.hot_rows.runtime import HotRows
from dmt.models import DCN, DLRM, DMTDCN, DMTDLRM, Complexity, DMTDLRMProducts, ModelOptions
from dmt.models.complexity import count_on_meta
from dmt.models.sparse import JoinedShards
from dmt.replicas.dense_reduce import HierarchicalDataParallel
from dmt.replicas.sync import ReplicaSync
from dmt.sharding.optimizers import FBGEMM_NAMES
from dmt.sharding.planner import TowerShardingPlanner
from dmt.sptt.flat import SPTTEmbeddingBagCollectionSharder
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.micro_batches import MicroBatches, run_in_micro_batches
from dmt.sptt.outside import OutsideCollectionSharder
from dmt.sptt.towers import TowerCollectionSharder
from dmt.training.config import OptimizerConfig, ReplicasConfig, TrainConfig
from dmt.training.data.batch import ClickBatch
from dmt.training.device import DeviceType, current_device
from dmt.training.factory import make_model, without_tables
from dmt.training.flat import shard_flat
from dmt.training.job import Job, check_table_optimizer

__all__ = [
    "DENSE_OPTIMIZERS",
    "ClickTask",
    "ScheduledOptimizer",
    "build_model",
    "build_optimizer",
    "count_model",
    "fused_params",
    "hot_rows",
    "in_micro_batches",
    "replica_sync",
    "shard_model",
    "warmup_factor",
    "settle_gradient_buckets",
    "sharding_result",
]

DENSE_OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}
# FBGEMM's default, which `dmt check` computes with, too.
_SPARSE_EPS = 1e-8


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


def build_model(job: Job, *, device: str | None = None) -> nn.Module:
    """Builds the plain single-process model of a job.

    Tables that the tower plan cuts are column shards in it; a flat model concatenates their outputs again
    (`dmt.models.sparse`).

    Args:
        job: the run.
        device: where parameters are made; ``"meta"`` makes none.

    Raises:
        InputError: sizes or the tower plan do not fit.
    """
    model, plan = job.config.model, job.towers
    if model.factory is not None:
        return make_model(job, device)
    options = ModelOptions(
        dense_arch_layer_sizes=model.dense_arch, over_arch_layer_sizes=model.over_arch, device=device
    )
    shared: dict[str, Any] = {"tables": job.tables, "dense_in_features": job.num_dense, "options": options}
    if "dcn" in model.arch:
        shared |= {"num_cross_layers": model.cross_layers, "cross_rank": model.cross_rank}
    if plan is None or not model.has_towers:
        if plan is not None and plan.column_splits:
            shared["make_sparse_arch"] = partial(JoinedShards, splits=plan.column_splits)
        return DLRM(**shared) if model.arch == "dlrm" else DCN(**shared)
    shared |= {"tables": job.split_tables, "tower_plan": plan, "tower_dim": model.output_dim}
    if model.arch == "dmt-dcn":
        return DMTDCN(**shared)
    towers = DMTDLRM if model.arch == "dmt-dlrm" else DMTDLRMProducts
    return towers(**shared, c=model.c, p=model.p)


def count_model(job: Job, model: nn.Module | None = None) -> Complexity:
    """Counts MFLOPs per sample, parameters and compression ratio of a job's model, on the meta device.

    ``model`` is the plain one on the meta device, which stays as it is; None: it is built.
    """
    model = build_model(job, device="meta") if model is None else copy.deepcopy(model)
    return count_on_meta(without_tables(model, job.config.sharding.pooling_factors), job.num_dense)


def build_optimizer(config: OptimizerConfig, model: DistributedModelParallel) -> ScheduledOptimizer:
    """Returns the optimizer of all parameters: the tables' fused one, and one for tower modules and other dense parts.

    Both learning rates rise linearly over ``warmup_steps``.
    """
    trainable = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    parameters = dict(in_backward_optimizer_filter(trainable))
    parts: list[tuple[str, KeyedOptimizer]] = [("tables", model.fused_optimizer)]
    # A rank may have nothing to train but tables, and PyTorch's optimizers refuse to have no parameter.
    if parameters:
        make = partial(DENSE_OPTIMIZERS[config.dense], lr=config.dense_lr)
        parts.append(("dense", KeyedOptimizerWrapper(parameters, make)))
    return ScheduledOptimizer(parts, [config.sparse_lr, config.dense_lr], config)


def warmup_factor(config: OptimizerConfig, step: int) -> float:
    """Returns the factor of the learning rates in a step, counted from 0; it rises from 1 / ``warmup_steps`` to 1.

    Example:
        >>> [warmup_factor(OptimizerConfig(warmup_steps=4), step) for step in (0, 1, 4, 9)]
        [0.25, 0.4375, 1.0, 1.0]
    """
    warmup = config.warmup_steps
    return 1.0 if step >= warmup else 1 / warmup + (1 - 1 / warmup) * step / warmup


class ScheduledOptimizer(CombinedOptimizer):
    """The optimizers of all parts, whose learning rates follow `warmup_factor` of the steps done.

    Args:
        parts: each with its name.
        rates: the full learning rate of each.
        config: its warm-up.
    """

    def __init__(
        self, parts: Sequence[tuple[str, KeyedOptimizer]], rates: Sequence[float], config: OptimizerConfig
    ) -> None:
        super().__init__(list(parts))
        self._rates, self._config = rates, config
        self.set_step(0)

    def set_step(self, step: int) -> None:
        """Sets the learning rates once ``step`` steps are done; fused optimizers get theirs at the next `zero_grad`."""
        self.steps = step
        share = warmup_factor(self._config, step)
        # Not strict: a rank without dense parameters has no optimizer for the second rate.
        for (_, part), rate in zip(self.optimizers, self._rates, strict=False):
            for group in part.param_groups:
                group["lr"] = rate * share

    def step(self, closure: Any = None) -> None:
        """Updates dense parts; tables have been updated in the backward pass."""
        super().step(closure)
        self.set_step(self.steps + 1)


def fused_params(config: OptimizerConfig, device: DeviceType = "cpu") -> dict[str, Any]:
    """Returns FBGEMM's settings of the tables' fused optimizer.

    Data-parallel tables take the same settings (`dmt.sharding.data_parallel`).

    Raises:
        InputError: FBGEMM has no kernel of this optimizer for the device where the tables live.
    """
    check_table_optimizer(config, device)
    optimizer = EmbOptimType(FBGEMM_NAMES[config.sparse])
    return {"optimizer": optimizer, "learning_rate": config.sparse_lr, "eps": _SPARSE_EPS}


def shard_model(job: Job, mesh: TowerMesh, model: nn.Module | None = None) -> DistributedModelParallel:
    """Distributes the model of a job over the mesh, ready to train.

    ``model`` is the plain one on the meta device, which is changed; None: it is built. So a rank never holds tables
    that are not its own. Dense parts start equal on all ranks (data parallel broadcasts them). Tables are drawn by the
    rank that holds them, each rank from a seed of its own: with a shared one, tables of equal size would start equal,
    and unlike features would look alike.
    A job for GPUs is built on the rank's current one (`dmt.training.device.take_device`).
    """
    config = job.config
    task = ClickTask(build_model(job, device="meta") if model is None else model)
    torch.manual_seed(1_000_003 * (config.train.seed + 1) + mesh.rank)
    if config.dataflow == "flat":
        fused = fused_params(config.optimizer, job.device_type)
        sharders, plan = shard_flat(job, task, mesh, fused)
    else:
        assert job.towers is not None, "resolved by make_job"
        assert job.sharding is not None, "resolved by make_job"
        options: dict[str, Any] = {
            "fused_params": fused_params(config.optimizer, job.device_type),
            "unique": config.sharding.unique,
            "peer_precision": config.sharding.precision,
            "moment_scale": config.replicas.moment_scale,
        }
        if config.model.has_towers:
            sharders = [
                TowerCollectionSharder(mesh, placement=job.placement, **options),
                OutsideCollectionSharder(mesh, fused_params=options["fused_params"]),
            ]
        else:
            sharders = [SPTTEmbeddingBagCollectionSharder(mesh, job.towers, **options)]
        # Every placement is pinned: the planner only hands them on to TorchRec.
        planner = TowerShardingPlanner(
            job.sharding.topology,
            pinned=job.sharding.placements,
            workload=replace(job.sharding.workload, optimizer=config.optimizer.sparse),
            hardware=job.sharding.hardware,
            device_type=job.device_type,
        )
        plan = planner.plan(task, sharders)
    # None is the wrapper of TorchRec, DDP, whose all-reduce is a ring.
    reduce = None
    if config.train.dense_reduce != "ring":
        is_half = config.train.dense_reduce == "hierarchical_bf16"
        reduce = HierarchicalDataParallel(mesh, precision="bf16" if is_half else "fp32")
    return DistributedModelParallel(
        task, device=current_device(job.device_type), plan=plan, sharders=sharders, data_parallel_wrapper=reduce
    )


def settle_gradient_buckets(job: Job, model: DistributedModelParallel, optimizer: CombinedOptimizer) -> None:
    """Runs three passes over rows of zeros on a model that is about to be restored; reads no data.

    After its second backward pass, DDP arranges gradients in its buckets in the order in which they arrived. With three
    ranks or more, another arrangement adds numbers in another order, so a resumed run needs the one before it.
    In the third forward pass it sends the layout to the other ranks, which `dmt.training.metrics.measure_traffic` would
    count where nothing is left to train.
    """
    # Two rows for each micro-batch: batch normalization refuses to train on one.
    rows, names = 2 * job.config.train.micro_batches, list(job.data.columns.feature_names)
    zeros = torch.zeros(rows * len(names), dtype=torch.int64)
    ids = KeyedJaggedTensor(names, zeros, lengths=torch.ones_like(zeros))
    batch = ClickBatch(torch.zeros(rows, job.num_dense), ids, torch.zeros(rows), torch.ones(rows))
    if job.towers is not None:
        batch = batch.split_columns(job.towers.column_splits)
    for _ in range(3):
        optimizer.zero_grad()
        model(batch.to(current_device(job.device_type)))[0].backward()
    optimizer.zero_grad()


def in_micro_batches(config: TrainConfig, model: DistributedModelParallel) -> MicroBatches | None:
    """Makes the model of a sharded `ClickTask` run in the config's micro-batches; None where that is the whole batch.

    Raises:
        InputError: the model was sharded with the flat dataflow.
    """
    if config.micro_batches == 1:
        return None
    task: Any = model.module
    return run_in_micro_batches(task.model, config.micro_batches)


def replica_sync(config: ReplicasConfig, model: nn.Module, mesh: TowerMesh) -> ReplicaSync | None:
    """Returns the sync of a sharded model's replicas, None for a single one; after loading weights `restart` it."""
    if mesh.topology.num_replicas == 1:
        return None
    return ReplicaSync(model, mesh, interval=config.sync_every, optimizer_state=config.optimizer_state)


def hot_rows(job: Job, model: nn.Module, mesh: TowerMesh) -> HotRows | None:
    """Returns the hot rows of a sharded model, None where the config has none; `HotRows.step` chooses them."""
    settings = job.config.hot_rows
    if settings.extra_memory == 0:
        return None
    return HotRows(model, mesh, extra_memory=settings.extra_memory, refresh_every=settings.refresh_every)


def sharding_result(job: Job, plan: ShardingPlan) -> dict[str, Any]:
    """Returns the section of a run's result on the plan of its tables; ``plan`` is that of the sharded model."""
    if job.sharding is None:
        modules: list[Any] = list(plan.plan.values())
        schemes = Counter(placed.sharding_type for module in modules for placed in module.values())
        return {"tables_by_scheme": dict(schemes.most_common())}
    return {
        "imbalance": job.sharding.imbalance,
        "tables_by_scheme": job.sharding.tables_by_scheme,
        "largest_rank_bytes": max(rank.memory for rank in job.sharding.ranks),
    }
