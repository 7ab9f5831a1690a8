"""The plain single-process module on the union of the ranks' batches, one for each replica: what they must come to."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dmt.errors import InputError
from dmt.testing.plain import PlainTraining, is_table, table_name, warmup_share
from dmt.testing.state import TableLayout
from dmt.training.build import ClickTask, build_model, fused_params
from dmt.training.check.batches import SINGLE_IDS, UNEVEN_BAGS, draw_batch
from dmt.training.check.rounding import as_sent
from dmt.training.check.shrink import CheckedRun
from dmt.training.check.watch import Watch
from dmt.training.config import OptimizerConfig

__all__ = ["Expected", "Forward", "compute_expected", "is_tower_module", "plain_task", "table_of"]

State = dict[str, Tensor]

_DENSE = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}


@dataclass(frozen=True, kw_only=True)
class Forward:
    """One forward pass over the batches of all ranks."""

    embeddings: list[State]
    """By rank and feature: [B, N]."""
    outputs: list[Tensor]
    """By rank: [B, columns] of the sparse part."""
    logits: list[Tensor]
    """By rank: [B]."""
    rounding: float
    """Largest change of a logit when the outputs of the sparse part are rounded as the exchange rounds them."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """All that the ranks compare with."""

    start: State
    """The first weights, that every model starts from."""
    forward: dict[int, Forward]
    """By batch (`SINGLE_IDS`, `UNEVEN_BAGS`)."""
    gradients: list[State]
    """By replica, for `UNEVEN_BAGS`: means over ranks of the gradients of their mean losses. The ranks are those of the
    replica for tables that it trains by itself, and all for the rest."""
    rounding: dict[str, float]
    """Largest change of each gradient when outputs and their gradients are rounded as the exchange rounds them."""
    losses: list[list[float]]
    """By step and rank; one step more than is trained."""
    weights: State
    """After training, and the averaging of replicas at its end."""


def plain_task(run: CheckedRun) -> ClickTask:
    """The model in one process, with FP32 tables."""
    tables = tuple(replace(table, data_type="FP32") for table in run.tables)
    return ClickTask(build_model(replace(run.job, tables=tables)))


class _Replica(NamedTuple):
    """A copy of the plain module, and the ranks whose batches it sees."""

    task: ClickTask
    watch: Watch
    ranks: Sequence[int]


def compute_expected(run: CheckedRun, layout: TableLayout) -> Expected:
    """Runs the plain module.

    Args:
        run: what is checked.
        layout: of its tables.

    Raises:
        InputError: a loss is not finite.
    """
    torch.manual_seed(run.config.train.seed)
    tasks = [plain_task(run) for _ in range(run.topology.num_replicas)]
    with torch.no_grad():
        for name, weight in tasks[0].named_parameters():
            if run.config.sharding.table_precision == "fp16" and is_table(name):
                weight.copy_(weight.half())  # a start that FP16 tables can hold
    start = {name: value.clone() for name, value in tasks[0].state_dict().items()}
    for task in tasks[1:]:
        task.load_state_dict(start)
    sent = _Sent(run)
    replicas = [
        _Replica(task, Watch(task, sent), ranks)
        for task, ranks in zip(tasks, run.topology.sharding_groups(), strict=True)
    ]
    watch = replicas[0].watch
    forward = {index: _forward(run, watch, sent, index) for index in (SINGLE_IDS, UNEVEN_BAGS)}
    training = _plain_training(run, tasks, layout)
    gradients: list[list[State]] = []
    for sent.is_rounded in (True, False):
        _backward(run, replicas, UNEVEN_BAGS)
        training.average_gradients()
        gradients.append(
            [{name: p.grad.clone() for name, p in task.named_parameters() if p.grad is not None} for task in tasks]
        )
    rounded, exact = gradients
    losses = []
    for step in range(run.limits.steps):
        losses.append(_backward(run, replicas, step))
        _set_rates(training, run.config.optimizer, step)
        training.step()
    training.sync()
    with torch.no_grad():
        losses.append([float(watch.run(draw_batch(run, r, run.limits.steps))) for r in _ranks(run)])
    _check_finite(run, losses)
    return Expected(
        start=start,
        forward=forward,
        gradients=exact,
        rounding={
            name: max(float((a[name] - b[name]).abs().max()) for a, b in zip(rounded, exact, strict=True))
            for name in exact[0]
        },
        losses=losses,
        weights={name: value.clone() for name, value in tasks[0].state_dict().items()},
    )


def _plain_training(run: CheckedRun, tasks: Sequence[ClickTask], layout: TableLayout) -> PlainTraining:
    optimizer, replicas = run.config.optimizer, run.config.replicas
    return PlainTraining(
        tasks,
        fused_params=fused_params(optimizer),
        make_optimizer=partial(_dense_optimizer, optimizer),
        layout=layout,
        moment_scale=replicas.moment_scale,
        interval=replicas.sync_every,
        optimizer_state=replicas.optimizer_state,
        has_half_tables=run.config.sharding.table_precision == "fp16",
    )


def _dense_optimizer(config: OptimizerConfig, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    groups = []
    for of_towers, rate in ((True, config.tower_lr), (False, config.dense_lr)):
        rate = config.dense_lr if rate is None else rate
        members = [p for name, p in parameters.items() if is_tower_module(name) is of_towers]
        groups += [{"params": members, "lr": rate, "initial_lr": rate}] if members else []
    return _DENSE[config.dense](groups)


def _set_rates(training: PlainTraining, config: OptimizerConfig, step: int) -> None:
    share = warmup_share(step, config.warmup_steps)
    training.learning_rate = config.sparse_lr * share
    for optimizer in training.dense_optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * share


def _check_finite(run: CheckedRun, losses: Sequence[Sequence[float]]) -> None:
    for step, by_rank in enumerate(losses):
        for rank, loss in enumerate(by_rank):
            if not math.isfinite(loss):
                rates = {name: getattr(run.config.optimizer, name) for name in ("dense_lr", "tower_lr", "sparse_lr")}
                given = ", ".join(f"optimizer.{name}={rate:g}" for name, rate in rates.items() if rate is not None)
                raise InputError(
                    f"{given}: the plain module diverges (loss {loss:g} at step {step}, batch of rank {rank}), so "
                    "there is nothing to compare with; a loss must stay finite. Lower optimizer.*_lr."
                )


def is_tower_module(name: str) -> bool:
    """Returns whether a parameter of this name belongs to a tower module."""
    return re.search(r"\.towers\.\d+\.interaction\.", name) is not None


def table_of(name: str) -> str:
    """What to call a parameter: a table by its own name, others in full."""
    return f"table {table_name(name)}" if is_table(name) else name.removeprefix("model.")


def _ranks(run: CheckedRun) -> range:
    return range(run.topology.world_size)


class _Sent:
    """The way of the sparse part's output to the dense parts: exact, or rounded as the exchange rounds it."""

    def __init__(self, run: CheckedRun) -> None:
        self.is_rounded = False
        self._precision = run.config.sharding.precision
        self._ranks = run.topology.world_size // run.topology.num_replicas

    def __call__(self, outputs: Tensor) -> Tensor:
        return as_sent(outputs, self._precision, self._ranks) if self.is_rounded else outputs


def _forward(run: CheckedRun, watch: Watch, sent: _Sent, index: int) -> Forward:
    exact, logits = [], []
    with torch.no_grad():
        for is_rounded in (True, False):
            sent.is_rounded = is_rounded
            exact = [watch.run_and_see(draw_batch(run, rank, index)) for rank in _ranks(run)]
            logits.append([seen.logits for seen in exact])
    moved = [float((rounded - plain).abs().max()) for rounded, plain in zip(*logits, strict=True)]
    return Forward(
        embeddings=[seen.embeddings for seen in exact],
        outputs=[seen.outputs for seen in exact],
        logits=logits[-1],
        rounding=max(moved),
    )


def _backward(run: CheckedRun, replicas: Sequence[_Replica], index: int) -> list[float]:
    """Leaves in every replica the gradients of the mean over its ranks of their losses; returns the losses by rank."""
    losses = {}
    for task, watch, ranks in replicas:
        task.zero_grad()
        for rank in ranks:
            loss = watch.run(draw_batch(run, rank, index))
            (loss / len(ranks)).backward()
            losses[rank] = float(loss.detach())
    return [losses[rank] for rank in _ranks(run)]
