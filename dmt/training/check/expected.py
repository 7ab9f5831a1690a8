"""The expected results of all ranks: one plain module per replica trains on its ranks' batches (`PlainTraining`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt.errors import InputError
from dmt.testing.plain import PlainTraining, is_table
from dmt.training.build import DENSE_OPTIMIZERS, ClickTask, build_model, fused_params, warmup_factor
from dmt.training.check.shrink import CheckedRun
from dmt.training.config import OptimizerConfig
from dmt.training.data.batch import ClickBatch
from dmt.training.factory import check_samples
from dmt.training.job import Job

__all__ = ["UNEVEN", "Expected", "compute_expected", "draw_batch", "draw_samples", "without_dropout"]

State = dict[str, Tensor]

UNEVEN = 1
"""Index of the batch in which ranks have unequal numbers of samples."""

_MAX_BAG = 3
# Half of all ids are among the first rows, so that ranks and samples share ids, like the frequent ids of real data.
_FREQUENT_ROWS = 8


def draw_batch(run: CheckedRun, rank: int, step: int) -> ClickBatch:
    """Returns the batch of a global rank in a step, split for the run's column shards; the same in any process."""
    size = run.limits.batch_size if step != UNEVEN else max(1, run.limits.batch_size - rank % 3)
    batch = draw_samples(run.job, size, seed=1_000_003 * step + rank)
    return batch.split_columns(run.job.column_splits)


def draw_samples(job: Job, size: int, *, seed: int) -> ClickBatch:
    """Returns ``size`` random samples for the tables of a job, with bags of 0 to 3 ids, and targets of one id."""
    generator = torch.Generator().manual_seed(seed)
    targets = {target for table in job.tables for _, target in table.sequences}
    lengths, values = [], []
    for table in job.tables:
        for name in table.feature_names:
            fewest, most = (1, 1) if name in targets else (0, _MAX_BAG)
            count = torch.randint(fewest, most + 1, (size,), generator=generator)
            number, rows = int(count.sum()), table.num_embeddings
            anywhere = torch.randint(0, rows, (number,), generator=generator)
            frequent = torch.randint(0, min(rows, _FREQUENT_ROWS), (number,), generator=generator)
            lengths.append(count)
            values.append(torch.where(torch.rand(number, generator=generator) < 0.5, anywhere, frequent))
    ids = KeyedJaggedTensor(
        keys=[feature for table in job.tables for feature in table.feature_names],
        values=torch.cat(values),
        lengths=torch.cat(lengths),
    )
    return ClickBatch(
        dense_features=torch.randn(size, job.num_dense, generator=generator),
        sparse_features=ids,
        labels=torch.rand(size, generator=generator).round(),
        weights=torch.ones(size),
    )


def without_dropout(model: Any) -> Any:
    """Turns dropout off in place, because ranks draw other masks than one process does; returns the model."""

    def turn_off(part: nn.Module) -> None:
        if isinstance(part, _DropoutNd):
            part.p = 0.0
        elif isinstance(part, nn.MultiheadAttention | nn.RNNBase):
            part.dropout = 0.0

    return model.apply(turn_off)  # modules() leaves out what is inside sharded modules


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Everything that the ranks compare with; weights, gradients and logits are float32."""

    start: State
    """Initial weights of every model, by name."""
    logits: list[Tensor]
    """Logits of the batch `UNEVEN` before training, by rank, [B] each."""
    gradients: list[State]
    """Gradients of the batch `UNEVEN`, by replica and name. Each is the mean over ranks of the gradient of a rank's
    mean loss: over the replica's ranks for tables, over all ranks for data-parallel tables and all other parameters."""
    losses: list[list[float]]
    """Mean losses by step and rank, [steps + 1][ranks]; the last are computed with the weights after training."""
    weights: State
    """Weights after training and a final averaging of replicas, by name."""


def compute_expected(run: CheckedRun, layout: Mapping[str, Sequence[int]]) -> Expected:
    """Trains the plain module in this process as the sharded run must train, and returns the expected results.

    ``layout`` has the widths of the column shards by table name, from `table_layout` of the sharded model; each shard
    has its own optimizer state. Seeds torch's global generator with ``train.seed``.

    Raises:
        InputError: logits are random, a loss is not finite, or a sample's logit depends on other samples of its batch.
    """
    torch.manual_seed(run.config.train.seed)
    # The plain module has FP32 tables.
    plain = replace(run.job, tables=tuple(replace(table, data_type="FP32") for table in run.job.tables))
    tasks = [ClickTask(without_dropout(build_model(plain))) for _ in range(run.job.topology.num_replicas)]
    with torch.no_grad():
        for name, weight in tasks[0].named_parameters():
            if run.config.sharding.table_precision == "fp16" and is_table(name):
                weight.copy_(weight.half())  # values that FP16 tables can represent
    start = _copy_of(tasks[0])
    for task in tasks[1:]:
        task.load_state_dict(start)
    with torch.no_grad():
        logits, again = ([tasks[0](batch)[1][0] for batch in _batches(run, UNEVEN)] for _ in range(2))
    if not torch.allclose(torch.cat(logits), torch.cat(again), rtol=1e-4, equal_nan=True):
        raise InputError(
            f"{run.config.model.chosen}: the model's logits are random even without the dropout of torch.nn's "
            "modules, so nothing can be compared. Turn off what else draws random numbers by an option of the factory."
        )
    training = _plain_training(run, tasks, layout)
    _backward(run, tasks, UNEVEN)
    training.average_gradients()
    gradients = [
        {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in task.named_parameters()}
        for task in tasks
    ]
    losses = []
    for step in range(run.limits.steps):
        losses.append(_backward(run, tasks, step))
        _set_rates(training, run.config.optimizer, step)
        training.step()
    training.sync()
    with torch.no_grad():
        losses.append([float(tasks[0](batch)[0]) for batch in _batches(run, run.limits.steps)])
    for step, by_rank in enumerate(losses):
        if not all(map(math.isfinite, by_rank)):
            raise InputError(
                f"The plain module diverges: its loss at step {step} is not finite. If that is step 0, correct "
                "the model's initial weights or forward pass; otherwise, lower optimizer.dense_lr="
                f"{run.config.optimizer.dense_lr} and optimizer.sparse_lr={run.config.optimizer.sparse_lr}."
            )
    check_samples(run.job, tasks[0].model.eval(), draw_batch(run, rank=0, step=0))
    return Expected(start=start, logits=logits, gradients=gradients, losses=losses, weights=_copy_of(tasks[0]))


def _copy_of(task: ClickTask) -> State:
    return {name: value.clone() for name, value in task.state_dict().items()}


def _plain_training(run: CheckedRun, tasks: Sequence[ClickTask], layout: Mapping[str, Sequence[int]]) -> PlainTraining:
    optimizer, replicas = run.config.optimizer, run.config.replicas
    return PlainTraining(
        tasks,
        fused_params=fused_params(optimizer),
        make_optimizer=lambda dense: DENSE_OPTIMIZERS[optimizer.dense](dense.values(), lr=optimizer.dense_lr),
        layout=layout,
        moment_scale=replicas.moment_scale,
        interval=replicas.sync_every,
        optimizer_state=replicas.optimizer_state,
        has_half_tables=run.config.sharding.table_precision == "fp16",
    )


def _set_rates(training: PlainTraining, config: OptimizerConfig, step: int) -> None:
    share = warmup_factor(config, step)
    training.learning_rate = config.sparse_lr * share
    for optimizer in training.dense_optimizers:
        for group in optimizer.param_groups:
            group["lr"] = config.dense_lr * share


def _batches(run: CheckedRun, step: int) -> list[ClickBatch]:
    return [draw_batch(run, rank, step) for rank in range(run.job.topology.world_size)]


def _backward(run: CheckedRun, tasks: Sequence[ClickTask], step: int) -> list[float]:
    """Computes gradients of the mean of the ranks' losses in each replica; returns the losses by rank."""
    batches, losses = _batches(run, step), [0.0] * run.job.topology.world_size
    for task, ranks in zip(tasks, run.job.topology.sharding_groups(), strict=True):
        task.zero_grad()
        for rank in ranks:
            loss, _ = task(batches[rank])
            (loss / len(ranks)).backward()
            losses[rank] = float(loss.detach())
    return losses
