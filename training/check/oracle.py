"""The plain single-process module, trained on the union of all ranks' batches: what the ranks must come to."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dmt.errors import InputError
from dmt.training.build import ClickTask, build_model
from dmt.training.check.batches import SINGLE_IDS, UNEVEN_BAGS, draw_batch
from dmt.training.check.rounding import as_sent
from dmt.training.check.shrink import CheckedRun
from dmt.training.check.watch import Watch
from dmt.training.config import OptimizerConfig

__all__ = ["Expected", "Forward", "compute_expected", "is_table", "is_tower_module", "plain_task", "table_of"]

State = dict[str, Tensor]
_DENSE = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}
_TOWER_MODULE = re.compile(r"\.towers\.(\d+)\.interaction\.")


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
    gradients: State
    """Mean over ranks of the gradients of their mean losses, for `UNEVEN_BAGS`."""
    rounding: dict[str, float]
    """Largest change of each gradient when outputs and their gradients are rounded as the exchange rounds them."""
    losses: list[list[float]]
    """By step and rank; one step more than is trained."""
    weights: State
    """After training."""


def plain_task(run: CheckedRun) -> ClickTask:
    """The model in one process, with FP32 tables."""
    tables = [replace(table, data_type="FP32") for table in run.tables]
    return ClickTask(build_model(run.config, tables, run.num_dense))


def compute_expected(run: CheckedRun, cuts: Mapping[str, Sequence[int]]) -> Expected:
    """Runs the plain module.

    Args:
        run: what is checked.
        cuts: widths of the shards of column-wise tables, by table: under row-wise AdaGrad each has a state of its own.

    Raises:
        InputError: a loss is not finite.
    """
    torch.manual_seed(run.config.train.seed)
    task = plain_task(run)
    half = run.config.sharding.table_precision == "fp16"
    with torch.no_grad():
        for name, weight in task.named_parameters():
            if half and is_table(name):
                weight.copy_(weight.half())  # a start that FP16 tables can hold
    start = {name: value.clone() for name, value in task.state_dict().items()}
    sent = _Sent(run)
    watch = Watch(task, sent)
    forward = {index: _forward(run, watch, sent, index) for index in (SINGLE_IDS, UNEVEN_BAGS)}
    gradients: State = {}
    rounded: State = {}
    for is_rounded, found in ((False, gradients), (True, rounded)):
        sent.is_rounded = is_rounded
        _backward(run, task, watch, UNEVEN_BAGS)
        found |= {name: p.grad.clone() for name, p in task.named_parameters() if p.grad is not None}
    sent.is_rounded = False
    trainer = _Trainer(run.config.optimizer, task, cuts, half)
    losses = []
    for step in range(run.limits.steps):
        losses.append(_backward(run, task, watch, step))
        trainer.step(step)
    with torch.no_grad():
        losses.append([float(watch.run(draw_batch(run, r, run.limits.steps))) for r in _ranks(run)])
    _check_finite(run, losses)
    return Expected(
        start=start,
        forward=forward,
        gradients=gradients,
        rounding={name: float((rounded[name] - exact).abs().max()) for name, exact in gradients.items()},
        losses=losses,
        weights={name: value.clone() for name, value in task.state_dict().items()},
    )


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


def is_table(name: str) -> bool:
    """Whether a parameter is a table."""
    return ".embedding_bags." in name


def is_tower_module(name: str) -> bool:
    """Whether a parameter belongs to a tower module."""
    return _TOWER_MODULE.search(name) is not None


def table_of(name: str) -> str:
    """What to call a parameter: a table by its own name, others in full."""
    return f"table {name.split('.')[-2]}" if is_table(name) else name.removeprefix("model.")


class _Trainer:
    """The optimizers of a config, written down plainly: tables as FBGEMM's fused ones, dense parts by PyTorch's."""

    def __init__(self, config: OptimizerConfig, task: nn.Module, cuts: Mapping[str, Sequence[int]], half: bool) -> None:
        self._config = config
        self._half = half
        self._tables = {name: p for name, p in task.named_parameters() if is_table(name)}
        self._cuts = {name: list(cuts.get(name.split(".")[-2], [p.shape[1]])) for name, p in self._tables.items()}
        self._states = {name: [torch.zeros(()) for _ in self._cuts[name]] for name in self._tables}
        tower_rate = config.dense_lr if config.tower_lr is None else config.tower_lr
        self._dense: list[tuple[Any, float]] = []
        for of_towers, rate in ((True, tower_rate), (False, config.dense_lr)):
            parameters = [
                p for name, p in task.named_parameters() if not is_table(name) and is_tower_module(name) is of_towers
            ]
            if parameters:
                self._dense.append((_DENSE[config.dense](parameters, lr=rate), rate))

    def step(self, step: int) -> None:
        """Updates everything from the gradients that are there."""
        config, share = self._config, _share_of_rate(self._config, step)
        for optimizer, rate in self._dense:
            optimizer.param_groups[0]["lr"] = rate * share
            optimizer.step()
        with torch.no_grad():
            for name, table in self._tables.items():
                assert table.grad is not None, f"{name} got no gradient"
                shards = zip(table.split(self._cuts[name], 1), table.grad.split(self._cuts[name], 1), strict=True)
                for i, (weight, grad) in enumerate(shards):
                    weight -= config.sparse_lr * share * self._direction(name, i, grad)
                if self._half:
                    table.copy_(table.half())

    def _direction(self, name: str, shard: int, grad: Tensor) -> Tensor:
        if self._config.sparse == "sgd":
            return grad
        square = grad.square()
        if self._config.sparse == "rowwise_adagrad":
            square = square.mean(dim=1, keepdim=True)
        self._states[name][shard] = self._states[name][shard] + square
        return grad / (self._states[name][shard].sqrt() + self._config.sparse_eps)


def _share_of_rate(config: OptimizerConfig, step: int) -> float:
    """Learning rates rise from 1/W of their value to all of it in W equal steps."""
    warmup = config.warmup_steps
    return 1.0 if step >= warmup else 1 / warmup + (1 - 1 / warmup) * step / warmup


def _ranks(run: CheckedRun) -> range:
    return range(run.topology.world_size)


class _Sent:
    """The way of the sparse part's output to the dense parts: exact, or rounded as the exchange rounds it."""

    def __init__(self, run: CheckedRun) -> None:
        self.is_rounded = False
        self._precision = run.config.sharding.precision
        self._world_size = run.topology.world_size

    def __call__(self, outputs: Tensor) -> Tensor:
        return as_sent(outputs, self._precision, self._world_size) if self.is_rounded else outputs


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


def _backward(run: CheckedRun, task: nn.Module, watch: Watch, index: int) -> list[float]:
    """Leaves the gradients of the mean over ranks of their losses; returns the losses."""
    task.zero_grad()
    losses = []
    for rank in _ranks(run):
        loss = watch.run(draw_batch(run, rank, index))
        (loss / run.topology.world_size).backward()
        losses.append(float(loss.detach()))
    return losses
