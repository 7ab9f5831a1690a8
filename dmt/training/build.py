"""Builds the plain and the sharded model of a `Job`, with its optimizers, warm-up, replica averaging and hot rows."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
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
from dmt.sptt.micro_batches import run_in_micro_batches
from dmt.sptt.outside import OutsideCollectionSharder
from dmt.sptt.towers import TowerCollectionSharder
from dmt.training.config import OptimizerConfig, ReplicasConfig, TrainConfig
from dmt.training.data.batch import ClickBatch
from dmt.training.device import current_device, on_all_ranks
from dmt.training.factory import make_model, with_own_values, without_tables
from dmt.training.flat import shard_flat
from dmt.training.job import Job

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
# FBGEMM's default; the plain model of `dmt check` uses it too.
_SPARSE_EPS = 1e-8


class ClickTask(nn.Module):
    """A click model with its loss; ``model(dense_features, sparse_features)`` returns logits [B, 1] or [B]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: ClickBatch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Returns the mean binary cross entropy, unweighted, and (logits, labels, weights), float32 [B] each."""
        # squeeze would turn the logit of a single sample into a scalar.
        logits = self.model(batch.dense_features, batch.sparse_features).reshape(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (logits.detach(), batch.labels, batch.weights)


def build_model(job: Job, *, device: str | None = None) -> nn.Module:
    """Builds the plain single-process model of a job.

    A table that the tower plan cuts is replaced by its column shards; a flat model concatenates the outputs of the
    shards (`dmt.models.sparse`).

    Args:
        job: the run.
        device: device of the parameters, by default the CPU; ``"meta"`` allocates no memory.

    Raises:
        InputError: sizes do not fit the tables or the tower plan, or `make_model` raises it.
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
        if job.column_splits:
            shared["make_sparse_arch"] = partial(JoinedShards, splits=job.column_splits)
        return DLRM(**shared) if model.arch == "dlrm" else DCN(**shared)
    shared |= {"tables": job.split_tables, "tower_plan": plan, "tower_dim": model.output_dim}
    if model.arch == "dmt-dcn":
        return DMTDCN(**shared)
    towers = DMTDLRM if model.arch == "dmt-dlrm" else DMTDLRMProducts
    return towers(**shared, c=model.c, p=model.p)


def count_model(job: Job, model: nn.Module | None = None) -> Complexity:
    """Returns the MFLOPs per sample, parameters and compression ratio of a job's model.

    ``model`` is the job's plain model on the meta device and is not changed; None: it is built here.
    """
    model = build_model(job, device="meta") if model is None else copy.deepcopy(model)
    return count_on_meta(without_tables(model, job.config.sharding.pooling_factors), job.num_dense)


def build_optimizer(config: OptimizerConfig, model: DistributedModelParallel) -> ScheduledOptimizer:
    """Returns the optimizer of all parameters: the fused one of the tables, and one for tower modules and dense parts.

    Both learning rates rise linearly over ``warmup_steps``.
    """
    trainable = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    parameters = dict(in_backward_optimizer_filter(trainable))
    parts: list[tuple[str, KeyedOptimizer]] = [("tables", model.fused_optimizer)]
    # A rank may train tables only, and PyTorch's optimizers refuse an empty list of parameters.
    if parameters:
        parts.append(("dense", KeyedOptimizerWrapper(parameters, DENSE_OPTIMIZERS[config.dense])))
    return ScheduledOptimizer(parts, config)


def warmup_factor(config: OptimizerConfig, step: int) -> float:
    """Returns the factor of both learning rates at a 0-based step: it rises linearly from 1 / ``warmup_steps`` to 1.

    Example:
        >>> [warmup_factor(OptimizerConfig(warmup_steps=4), step) for step in (0, 1, 4, 9)]
        [0.25, 0.4375, 1.0, 1.0]
    """
    warmup = config.warmup_steps
    return 1.0 if step >= warmup else 1 / warmup + (1 - 1 / warmup) * step / warmup


class ScheduledOptimizer(CombinedOptimizer):
    """Combines the optimizers of all parts of a model; their learning rates follow `warmup_factor`.

    Args:
        parts: name and optimizer of each part: ``"tables"``, and ``"dense"`` on a rank with such parameters.
        config: the section ``optimizer``.
    """

    def __init__(self, parts: Sequence[tuple[str, KeyedOptimizer]], config: OptimizerConfig) -> None:
        super().__init__(list(parts))
        self._config = config
        self.set_step(0)

    def set_step(self, step: int) -> None:
        """Sets the learning rates of the 0-based step ``step``; fused optimizers adopt them at `zero_grad`."""
        self.steps = step
        share = warmup_factor(self._config, step)
        rates = {"tables": self._config.sparse_lr, "dense": self._config.dense_lr}
        for name, part in self.optimizers:
            for group in part.param_groups:
                group["lr"] = rates[name] * share

    def step(self, closure: Any = None) -> None:
        """Updates the dense parts and sets the next learning rates; the backward pass has updated the tables."""
        super().step(closure)
        self.set_step(self.steps + 1)


def fused_params(config: OptimizerConfig) -> dict[str, Any]:
    """Returns FBGEMM's settings for the fused optimizer of the tables.

    Data-parallel tables take the same settings (`dmt.sharding.data_parallel`).
    """
    optimizer = EmbOptimType(FBGEMM_NAMES[config.sparse])
    return {"optimizer": optimizer, "learning_rate": config.sparse_lr, "eps": _SPARSE_EPS}


def shard_model(job: Job, mesh: TowerMesh, model: nn.Module | None = None) -> DistributedModelParallel:
    """Shards the model of a job over the mesh, ready to train; collective.

    ``model`` is the job's plain model on the meta device and is changed in place; None: it is built here, as is every
    model of a factory (`with_own_values`). Each rank allocates only its shards, on its current GPU in a job for GPUs
    (`take_device`). Seeds torch's global generator, differently on each rank: with one seed, tables of equal size would
    start equal, and unrelated features would look alike. Data parallelism then makes dense parts equal on all ranks.
    Raises what `build_model`, `fused_params` and `plan_flat` raise.
    """
    config = job.config
    if config.model.factory is not None:
        model = on_all_ranks(lambda: with_own_values(job), mesh)
    task = ClickTask(build_model(job, device="meta") if model is None else model)
    torch.manual_seed(1_000_003 * (config.train.seed + 1) + mesh.rank)
    fused = fused_params(config.optimizer)
    if config.dataflow == "flat":
        sharders, plan = shard_flat(job, task, mesh, fused)
    else:
        assert job.towers is not None, "resolved by make_job"
        assert job.sharding is not None, "resolved by make_job"
        options: dict[str, Any] = {
            "fused_params": fused,
            "unique": config.sharding.unique,
            "peer_precision": config.sharding.precision,
            "moment_scale": config.replicas.moment_scale,
        }
        if config.model.has_towers:
            sharders = [
                TowerCollectionSharder(mesh, placement=job.placement, **options),
                OutsideCollectionSharder(mesh, fused_params=fused),
            ]
        else:
            sharders = [SPTTEmbeddingBagCollectionSharder(mesh, job.towers, **options)]
        # Every placement is pinned: this planner only translates the job's plan for TorchRec.
        planner = TowerShardingPlanner(
            job.sharding.topology, pinned=job.sharding.placements, device_type=job.device_type
        )
        plan = planner.plan(task, sharders)
    # None selects TorchRec's own wrapper, DDP, whose all-reduce is a ring.
    reduce = None
    if config.train.dense_reduce != "ring":
        is_half = config.train.dense_reduce == "hierarchical_bf16"
        reduce = HierarchicalDataParallel(mesh, precision="bf16" if is_half else "fp32")
    return DistributedModelParallel(
        task, device=current_device(job.device_type), plan=plan, sharders=sharders, data_parallel_wrapper=reduce
    )


def settle_gradient_buckets(job: Job, model: DistributedModelParallel, optimizer: CombinedOptimizer, step: int) -> None:
    """Gives DDP its gradient buckets of ``step`` by up to three passes over zeros, which change tables; collective.

    After its second backward pass, DDP rearranges its buckets by the order in which gradients arrived. With three ranks
    or more, this changes the order of summation, so call it before restoring a model that continues a run. In the third
    forward pass DDP broadcasts the new layout; `measure_traffic` would count that in a resumed run with no step left.
    """
    # Two rows for each micro-batch: batch normalization cannot train on one.
    rows, names = 2 * job.config.train.micro_batches, list(job.data.columns.feature_names)
    zeros = torch.zeros(rows * len(names), dtype=torch.int64)
    ids = KeyedJaggedTensor(names, zeros, lengths=torch.ones_like(zeros))
    batch = ClickBatch(torch.zeros(rows, job.num_dense), ids, torch.zeros(rows), torch.ones(rows))
    batch = batch.split_columns(job.column_splits)
    for _ in range(min(step, 3)):
        optimizer.zero_grad()
        model(batch.to(current_device(job.device_type)))[0].backward()
    optimizer.zero_grad()


def in_micro_batches(config: TrainConfig, model: DistributedModelParallel) -> None:
    """Makes a sharded `ClickTask` cut batches into ``train.micro_batches`` parts.

    Raises `InputError` if the model was sharded with the flat dataflow.
    """
    if config.micro_batches > 1:
        task: Any = model.module
        run_in_micro_batches(task.model, config.micro_batches)


def replica_sync(config: ReplicasConfig, model: nn.Module, mesh: TowerMesh) -> ReplicaSync | None:
    """Returns the `ReplicaSync` of a sharded model, None for one replica; call its `restart` after loading weights."""
    if mesh.topology.num_replicas == 1:
        return None
    return ReplicaSync(model, mesh, interval=config.sync_every, optimizer_state=config.optimizer_state)


def hot_rows(job: Job, model: nn.Module, mesh: TowerMesh) -> HotRows | None:
    """Returns the `HotRows` of a sharded model, None if the config has none; `HotRows.step` chooses the rows."""
    settings = job.config.hot_rows
    if settings.extra_memory == 0:
        return None
    return HotRows(model, mesh, extra_memory=settings.extra_memory, refresh_every=settings.refresh_every)


def sharding_result(job: Job, plan: ShardingPlan) -> dict[str, Any]:
    """Returns the section ``sharding`` of a run's result; ``plan`` is TorchRec's plan of the sharded model."""
    if job.sharding is None:
        modules: list[Any] = list(plan.plan.values())
        schemes = Counter(placed.sharding_type for module in modules for placed in module.values())
        return {"tables_by_scheme": dict(schemes.most_common())}
    return {
        "imbalance": job.sharding.imbalance,
        "tables_by_scheme": job.sharding.tables_by_scheme,
        "largest_rank_bytes": max(rank.memory for rank in job.sharding.ranks),
    }
