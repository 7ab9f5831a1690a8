"""From a config to data, a plain PyTorch model and the optimizers of its sharded form (`dmt.training.sharding`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
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
from dmt.models.shards import joined_sparse_arch
from dmt.plan import TowerPlan
from dmt.tables import TableSpec, feature_names
from dmt.training.config import OptimizerConfig, TrainingConfig
from dmt.training.data import ClickData, open_source
from dmt.training.data.batch import ClickBatch

__all__ = [
    "ClickTask",
    "build_model",
    "build_optimizer",
    "count_model",
    "open_data",
    "tower_plan",
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
            model puts their shards side by side again (`dmt.models.shards`).
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
