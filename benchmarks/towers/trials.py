"""Trials of the tower study: flat and multi-tower models on one data set, trained in one process each.

The plain single-process model is trained; that the distributed one equals it is what ``tests/`` show.

Legend: R rows, D dense columns, F features, T towers, N embedding dim.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.towers.clicks import Clicks
from benchmarks.towers.joined import JoinedTables
from dmt.models.complexity import Complexity
from dmt.partitioner import FeatureAffinity
from dmt.plan.towers import TowerPlan
from dmt.training.build import ClickTask, build_model, count_model
from dmt.training.config import ModelConfig, OptimizerConfig, TopologyConfig, TowersConfig, TrainConfig, TrainingConfig
from dmt.training.job import Job, tower_plan
from dmt.training.loop import ClickMetrics, MetricValues

__all__ = [
    "STUDY_SETS",
    "StudySet",
    "build_trial_model",
    "count_trial",
    "measure_affinity",
    "row_order",
    "run_trial",
    "train_and_test",
    "trial_config",
]

# TorchRec draws a table of n rows from +-1/sqrt(n). Tables here have few rows, and so large a random start would hide
# what is learned: they start as `dmt demo`'s tables of 20,000 rows do.
_TABLE_START = 1 / math.sqrt(20_000)
_AFFINITY_ROWS = 65_536


@dataclass(frozen=True, kw_only=True)
class StudySet:
    """Training settings of a data set, common to all arms; chosen on the flat models with a seed outside the study."""

    num_towers: int
    """T."""
    epochs: int
    """Passes over the training rows."""
    sparse_lr: float
    """Learning rate of the tables, AdaGrad."""
    dense_lr: float
    """Learning rate of everything else, Adam."""
    batch_size: int
    """Rows of a step."""
    warmup_steps: int = 100
    """Steps over which both learning rates rise from 0."""


STUDY_SETS = {
    "flights": StudySet(num_towers=4, epochs=2, sparse_lr=0.2, dense_lr=5e-3, batch_size=512),
    "hotel": StudySet(num_towers=4, epochs=4, sparse_lr=0.05, dense_lr=3e-3, batch_size=512),
    "census": StudySet(num_towers=8, epochs=1, sparse_lr=0.05, dense_lr=3e-3, batch_size=1024),
}


def trial_config(name: str, arch: str, *, study_set: StudySet, plan: str | None) -> TrainingConfig:
    """The config of one model.

    The sizes follow the paper's: D = N, so that T towers compress F features F / T times (4.0 to 4.25 here), one
    combination a tower for DMT-DLRM (c = 0, p = 1, the setting of its Table 6), MLPs in proportion.

    Args:
        name: of the data set, for error messages.
        arch: ``dlrm``, ``dcn``, or ``dlrm-products``: towers whose modules hear inner products.
        study_set: how to train.
        plan: None for the flat model, else ``strided`` or the path of a tower plan.
    """
    model = ModelConfig(
        arch=arch if plan is None else f"dmt-{arch}",  # type: ignore[arg-type]
        embedding_dim=16,
        dense_arch=(64,),
        over_arch=(64, 32, 1),
        tower_dim=16,
        c=0,
        p=1,
        cross_layers=2,
        cross_rank=16,
    )
    return TrainingConfig(
        model=model,
        topology=TopologyConfig(num_towers=study_set.num_towers),
        towers=TowersConfig(plan=plan or "strided"),
        optimizer=OptimizerConfig(
            sparse="adagrad",
            sparse_lr=study_set.sparse_lr,
            dense_lr=study_set.dense_lr,
            warmup_steps=study_set.warmup_steps,
        ),
        train=TrainConfig(batch_size=study_set.batch_size, epochs=study_set.epochs, output_dir=f"study/{name}"),
    )


def count_trial(config: TrainingConfig, clicks: Clicks) -> Complexity:
    """MFLOPs per sample, parameters and compression ratio of a trial's model."""
    return count_model(_job(config, clicks))


def _job(config: TrainingConfig, clicks: Clicks) -> Job:
    towers = tower_plan(config, clicks.tables)
    return Job(config=config, tables=tuple(clicks.tables), num_dense=clicks.train[0].shape[1], towers=towers)


def build_trial_model(config: TrainingConfig, clicks: Clicks, seed: int) -> nn.Module:
    """The plain model, its weights drawn module by module from the seed and the module's name.

    So two models of one seed start equal wherever they have the same module with the same shapes: all tables and MLPs
    of the arms, whatever their towers are.
    """
    model = build_model(_job(config, clicks))
    for name, module in model.named_modules():
        if isinstance(module, nn.EmbeddingBag):
            torch.manual_seed(_seed_of(seed, name.rpartition(".")[2]))
            nn.init.uniform_(module.weight, -_TABLE_START, _TABLE_START)
        elif hasattr(module, "reset_parameters"):
            torch.manual_seed(_seed_of(seed, name))
            module.reset_parameters()
    return model


def _seed_of(seed: int, name: str) -> int:
    return zlib.crc32(f"{seed}/{name}".encode())


def train_and_test(
    config: TrainingConfig, clicks: Clicks, seed: int, requests: Tensor | None = None, *, joined: bool = False
) -> tuple[nn.Module, MetricValues]:
    """Trains one model from the seed's weights, on rows in the seed's order (see `row_order`), and tests it.

    With ``joined`` its tables are one while it trains (`JoinedTables`): the same arithmetic in about half of the time.
    """
    model: Any = build_trial_model(config, clicks, seed)
    batch_of = clicks.batch
    if joined:
        model.sparse_arch = JoinedTables(model, clicks.features)
        batch_of = clicks.plain_batch
    task = ClickTask(model)
    optimizer, warm_up = config.optimizer, max(1, config.optimizer.warmup_steps)
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in task.named_parameters():
        groups["embedding_bags" in name].append(parameter)
    optimizers = [
        torch.optim.Adagrad(groups[True], lr=optimizer.sparse_lr, eps=optimizer.sparse_eps, fused=True),
        torch.optim.Adam(groups[False], lr=optimizer.dense_lr, fused=True),
    ]
    rates = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / warm_up)) for o in optimizers]
    for rows in row_order(len(clicks.train[2]), config.train, seed, requests):
        loss, _ = task(batch_of(clicks.train, rows))
        task.zero_grad()
        loss.backward()
        for part in optimizers:
            part.step()
        for rate in rates:
            rate.step()
    metrics = ClickMetrics(this_process_alone())
    task.eval()
    with torch.no_grad():
        for rows in torch.arange(len(clicks.test[2])).split(config.train.eval_batch_size):
            metrics.update(*task(batch_of(clicks.test, rows))[1])
    if joined:
        model.sparse_arch.put_back(model)
    return model, metrics.compute()


def row_order(num_rows: int, train: TrainConfig, seed: int, requests: Tensor | None = None) -> Iterator[Tensor]:
    """Batches of rows, shuffled in each epoch; by request, where ``requests`` numbers that of each row from 0."""
    generator = torch.Generator().manual_seed(_seed_of(seed, "rows"))
    for _ in range(train.epochs):
        order = torch.randperm(num_rows if requests is None else int(requests.max()) + 1, generator=generator)
        if requests is not None:
            order = order[requests].argsort(stable=True)
        yield from (rows for rows in order.split(train.batch_size) if len(rows) == train.batch_size)


def this_process_alone() -> dist.ProcessGroup:
    """The group that the trainer's metrics ask for; made on first use."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None, "a default group exists once init_process_group returns"
    return group


def measure_affinity(model: nn.Module, clicks: Clicks, seed: int) -> FeatureAffinity:
    """The affinity of a trained model over at most 65,536 of its training rows."""
    order = torch.randperm(len(clicks.train[2]), generator=torch.Generator().manual_seed(seed))[:_AFFINITY_ROWS]
    return FeatureAffinity.collect(model, (clicks.batch(clicks.train, rows) for rows in order.split(4096)))


def run_trial(
    name: str, arch: str, seed: int, *, clicks: Clicks, study_set: StudySet, plan: TowerPlan | None = None
) -> dict[str, Any]:
    """Trains and tests one model.

    Args:
        name: of the data set.
        arch: as for `trial_config`.
        seed: of the weights and of the order of rows.
        clicks: the data.
        study_set: how to train.
        plan: the towers; None trains the flat model and measures its affinity.

    Returns:
        A record ready for JSON: metrics, size, seconds, the towers, or the affinity of a flat model (its upper
        triangle by rows, without the diagonal).
    """
    began = time.perf_counter()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "towers.json"
        if plan is not None:
            plan.save(path)
        config = trial_config(name, arch, study_set=study_set, plan=None if plan is None else str(path))
        model, metrics = train_and_test(config, clicks, seed)
        size = count_trial(config, clicks)
    record: dict[str, Any] = {
        "auc": metrics.auc,
        "ne": metrics.ne,
        "mflops_per_sample": round(size.mflops_per_sample, 6),
        "seconds": round(time.perf_counter() - began, 2),
    }
    if plan is not None:
        return record | {"towers": plan.to_lists(), "compression_ratio": size.compression_ratio}
    affinity = measure_affinity(model, clicks, seed)
    pairs = affinity.matrix[np.triu_indices(affinity.num_features, k=1)]
    return record | {"affinity": [round(float(value), 6) for value in pairs]}
