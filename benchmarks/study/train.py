"""Builds a model of a study from a seed, trains it in one process, and tests it.

It trains the plain single-process model; ``tests/`` show that the distributed one equals it. Legend: B samples, F
features, T towers, N embedding dim, D tower dim, CR compression ratio, O_t numbers per sample that tower t returns.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from sklearn.metrics import log_loss, roc_auc_score
from torch import Tensor, nn

from benchmarks.study.data import Clicks
from benchmarks.study.tables import ReplicaAdagrad, join_tables
from dmt.partitioner import FeatureAffinity
from dmt.plan.towers import TowerPlan
from dmt.training.build import build_model, count_model
from dmt.training.config import TrainingConfig
from dmt.training.job import Job, make_job

__all__ = [
    *("FLAT", "SETTINGS", "Arm", "Settings", "build_model_of_seed", "bytes_across", "bytes_outside", "job_of"),
    *("measure_affinity", "row_order", "score", "tower_sizes", "train_and_test"),
]

FLAT = {"dlrm": "dlrm", "dlrm-each": "dlrm", "dlrm-products": "dlrm", "dcn": "dcn"}
"""The flat model with which each model in towers is compared. ``dlrm``: the paper's linear combinations of a tower's
features (c = 0); ``dlrm-each``: its projection of each feature (c = 1, p = 0); ``dlrm-products``: modules that keep
inner products."""
# TorchRec draws the weights of n rows from +-1/sqrt(n). Tables here have few rows, and such large random weights would
# hide what is learned, so they start like tables of 20,000 rows.
_TABLE_START = 1 / math.sqrt(20_000)
_AFFINITY_ROWS, _TEST_BATCH = 65_536, 8192


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Training settings of a data set, equal for all arms; chosen with flat models and a seed outside the studies."""

    num_towers: int
    """T, for studies with ``own_towers``."""
    epochs: int
    """Passes over the training rows."""
    sparse_lr: float
    """Learning rate of the tables, for AdaGrad."""
    dense_lr: float
    """Learning rate of all other parameters, for Adam."""
    batch_size: int
    """Number of rows in a step."""
    warmup_steps: int = 100
    """Number of steps in which both learning rates rise linearly from 0."""


SETTINGS = {
    "flights": Settings(num_towers=4, epochs=2, sparse_lr=0.2, dense_lr=5e-3, batch_size=512),
    "hotel": Settings(num_towers=4, epochs=4, sparse_lr=0.05, dense_lr=3e-3, batch_size=512),
    "census": Settings(num_towers=8, epochs=1, sparse_lr=0.05, dense_lr=3e-3, batch_size=1024),
    # Those of hotel, which were not tuned for generated data.
    "planted": Settings(num_towers=4, epochs=3, sparse_lr=0.05, dense_lr=3e-3, batch_size=512),
}


@dataclass(frozen=True, kw_only=True, order=True)
class Arm:
    """A model with its towers, sizes and learning rates."""

    model: str
    """Name of the model, a key of `FLAT`."""
    towers: str = "flat"
    """``flat``, or how the towers are made (`benchmarks.study.runs.Trials.plan_of`)."""
    num_towers: int = 4
    """T; unused for a flat model."""
    ratio: int = 4
    """Intended CR; unused for a flat model."""
    dim: int = 16
    """N."""
    sparse: float = 1.0
    """Factor that multiplies the tables' learning rate of the data set's settings."""
    dense: float = 1.0
    """Factor of the learning rate of all other parameters."""
    tuning: bool = False
    """True: train on nine tenths of the training rows, and test on the rest."""
    by_request: bool = False
    """True if batches hold whole requests."""
    batch: int = 1
    """Factor of the batch size in the data set's settings."""
    replicas: int = 0
    """M, replicas of the tables under row-wise AdaGrad; 0: no replicas, and AdaGrad by element."""
    moment_scale: float = 1.0
    """c, by which the moments of replicas are divided."""

    @property
    def flat(self) -> Arm:
        """The flat model with which the arm is compared."""
        same = {"dim": self.dim, "sparse": self.sparse, "dense": self.dense, "tuning": self.tuning, "batch": self.batch}
        same |= {"by_request": self.by_request, "replicas": min(self.replicas, 1)}
        return Arm(model=FLAT[self.model], **same)  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        """Model and towers, and batch, rates, replicas and moment scale if they vary."""
        varied = f", batch x {self.batch}" if self.batch > 1 else ""
        varied += f", rates x {self.sparse:g}, {self.dense:g}" if (self.sparse, self.dense) != (1, 1) else ""
        varied += f", M = {self.replicas}, c = {self.moment_scale:g}" if self.replicas else ""
        return f"{self.model}, {self.towers}{varied}"


def tower_sizes(arm: Arm, num_features: int) -> tuple[int, int, int]:
    """Returns D, c and p of an arm.

    ``dlrm-each`` projects each feature to N / CR numbers. The others send as many numbers as the largest power of two
    that keeps the ratio: DCN as one vector, DLRM as vectors of at most N.

    Example:
        >>> tower_sizes(Arm(model="dlrm", towers="strided", ratio=2), 17)
        (16, 0, 2)
        >>> tower_sizes(Arm(model="dcn", towers="strided", ratio=2), 17)
        (32, 0, 1)
        >>> tower_sizes(Arm(model="dlrm-each", towers="strided", ratio=2), 17)
        (8, 1, 0)
    """
    if arm.towers == "flat":
        return arm.dim, 0, 1
    if arm.model == "dlrm-each":
        return arm.dim // arm.ratio, 1, 0
    outputs = 1 << (num_features * arm.dim // (arm.num_towers * arm.ratio)).bit_length() - 1
    dim = outputs if arm.model == "dcn" else min(arm.dim, outputs)
    return dim, 0, outputs // dim


def job_of(data: str, arm: Arm, clicks: Clicks, plan: TowerPlan | None) -> Job:
    """Returns the arm as a job of the trainer, in the paper's proportions; ``plan`` is None for the flat model."""
    tower_dim, c, p = tower_sizes(arm, len(clicks.features if plan is None else plan.features))
    family = FLAT[arm.model] if plan is None or arm.model == "dlrm-each" else arm.model
    sizes = {"embedding_dim": arm.dim, "tower_dim": tower_dim, "c": c, "p": p, "cross_layers": 2, "cross_rank": 16}
    model = {"arch": family if plan is None else f"dmt-{family}", "dense_arch": (64,), "over_arch": (64, 32, 1)}
    topology = {"num_towers": 1 if plan is None else plan.num_towers}
    config = TrainingConfig.model_validate({"model": model | sizes, "topology": topology})
    job = make_job(config, clicks.tables, clicks.train[0].shape[1], towers=plan)
    outside = [] if plan is None else plan.outside_tables(clicks.tables)
    # After `make_job`, which refuses sizes that FBGEMM does not support, such as one column; the plain model runs them.
    dim = config.model.outside_dim
    tables = (replace(table, embedding_dim=dim) if table in outside and dim else table for table in job.tables)
    return replace(job, tables=tuple(tables))


def bytes_across(arm: Arm, clicks: Clicks, plan: TowerPlan | None, num_towers: int) -> dict[str, float]:
    """Returns bytes per sample across T hosts, each with one rank and one tower: (T - 1) / T of all bytes sent.

    ``ids`` has an id and a length of 8 bytes each per feature, ``embeddings`` the outputs and their gradients in FP32.
    The all-reduce of dense gradients is left out, because it occurs per step, not per sample.
    """
    features = len(clicks.features if plan is None else plan.features)
    dim, c, p = tower_sizes(arm, features)
    outputs = features * arm.dim if plan is None else dim * (c * features + p * len(plan.to_lists()))
    share = (num_towers - 1) / num_towers
    return {"ids": 16 * features * share, "embeddings": 2 * 4 * outputs * share}


def bytes_outside(data: str, arm: Arm, clicks: Clicks, plan: TowerPlan) -> float:
    """Returns bytes per sample across hosts for gradients of tables outside towers, which T hosts sum by a ring."""
    rows = sum(table.num_embeddings for table in plan.outside_tables(clicks.tables))
    numbers = rows * tower_sizes(arm, len(plan.features))[0]
    return 2 * 4 * numbers * (arm.num_towers - 1) / (SETTINGS[data].batch_size * arm.batch)


def build_model_of_seed(job: Job, seed: int) -> nn.Module:
    """Returns the plain model, with the weights of each module drawn from the seed and the module's name.

    Two models of a seed thus start equal in all modules with the same name and shapes: in all tables and MLPs of the
    arms, whatever their towers.
    """
    model = build_model(job)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            torch.manual_seed(_seed_of(seed, name.rpartition(".")[2]))
            nn.init.uniform_(module.weight, -_TABLE_START, _TABLE_START)
        elif hasattr(module, "reset_parameters"):
            torch.manual_seed(_seed_of(seed, name))
            module.reset_parameters()
    return model


def _seed_of(seed: int, name: str) -> int:
    return zlib.crc32(f"{seed}/{name}".encode())


def train_and_test(
    data: str, arm: Arm, clicks: Clicks, seed: int, *, plan: TowerPlan | None, requests: Tensor | None = None
) -> tuple[nn.Module, dict[str, float]]:
    """Trains a model from the seed's weights on rows in the seed's order (`row_order`), and tests it.

    Returns:
        The trained model, and a record: AUC, normalized entropy, MFLOPs per sample, and actual compression ratio.
    """
    job = job_of(data, arm, clicks, plan)
    model: Any = build_model_of_seed(job, seed)
    joined = join_tables(model, clicks.features)
    metrics = _fit(model, SETTINGS[data], arm, clicks, seed, requests=requests)
    for name, table in joined.items():
        setattr(model, name, table.restored())
    size = count_model(job)
    metrics["mflops_per_sample"] = round(size.mflops_per_sample, 6)
    return model, metrics | {"compression_ratio": round(size.compression_ratio, 4)}


def _fit(
    model: Any, settings: Settings, arm: Arm, clicks: Clicks, seed: int, *, requests: Tensor | None = None
) -> dict[str, float]:
    """Trains a model (tables by AdaGrad, all else by Adam); returns its test metrics (`score`)."""
    # The warm-up has the same number of rows at every batch size.
    warm_up = max(1, settings.warmup_steps // arm.batch)
    settings = replace(settings, batch_size=settings.batch_size * arm.batch)
    tables, dense = (
        [parameter for name, parameter in model.named_parameters() if ("embedding" in name) is is_table]
        for is_table in (True, False)
    )
    sparse: dict[str, Any] = {"lr": settings.sparse_lr * arm.sparse, "eps": 1e-8}
    if arm.replicas:
        sparse |= {"num_replicas": arm.replicas, "moment_scale": arm.moment_scale}
        adagrad: torch.optim.Optimizer = ReplicaAdagrad(model.sparse_arch, **sparse)
    else:
        adagrad = torch.optim.Adagrad(tables, fused=True, **sparse)
    optimizers = [adagrad, torch.optim.Adam(dense, lr=settings.dense_lr * arm.dense, fused=True)]
    rates = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / warm_up)) for o in optimizers]
    for rows in row_order(len(clicks.train[2]), settings, seed, requests):
        numbers, ids, labels = (column[rows] for column in clicks.train)
        loss = nn.functional.binary_cross_entropy_with_logits(model(numbers, ids).squeeze(-1), labels)
        model.zero_grad()
        loss.backward()
        for part in (*optimizers, *rates):
            part.step()
    model.eval()
    return score(model, clicks)


@torch.no_grad()
def score(model: nn.Module, clicks: Clicks) -> dict[str, float]:
    """Returns AUC and normalized entropy on the test rows."""
    dense, ids, labels = clicks.test
    parts = torch.arange(len(labels)).split(_TEST_BATCH)
    logits = torch.cat([model(dense[rows], ids[rows]).flatten() for rows in parts]).double()
    mean = labels.double().mean()
    entropy = -(mean * mean.log() + (1 - mean) * (1 - mean).log())
    loss = log_loss(labels.numpy(), torch.sigmoid(logits).numpy())
    return {"auc": float(roc_auc_score(labels.numpy(), logits.numpy())), "ne": loss / float(entropy)}


def row_order(num_rows: int, settings: Settings, seed: int, requests: Tensor | None = None) -> Iterator[Tensor]:
    """Yields full batches of row numbers, reshuffled each epoch; rows with equal ``requests`` [rows] stay adjacent."""
    generator = torch.Generator().manual_seed(_seed_of(seed, "rows"))
    for _ in range(settings.epochs):
        order = torch.randperm(num_rows if requests is None else int(requests.max()) + 1, generator=generator)
        if requests is not None:
            order = order[requests].argsort(stable=True)
        yield from (rows for rows in order.split(settings.batch_size) if len(rows) == settings.batch_size)


def measure_affinity(model: nn.Module, clicks: Clicks, seed: int) -> list[float]:
    """Returns a trained flat model's affinity on at most 65,536 training rows: the upper triangle by rows."""
    order = torch.randperm(len(clicks.train[2]), generator=torch.Generator().manual_seed(seed))[:_AFFINITY_ROWS]
    batches = (clicks.batch(clicks.train, rows) for rows in order.split(4096))
    found = FeatureAffinity.collect(model, batches)
    return [round(float(value), 6) for value in found.matrix[np.triu_indices(found.num_features, k=1)]]
