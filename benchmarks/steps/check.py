"""Every contender must compute what the plain model does: `PlainModel` trains it for one step in one process.

Two losses are compared on each rank's own batch: before the step, from equal weights, and after it. The plain model
takes the step on the batches of all ranks at once. With R replicas each of them takes it on its own ranks' batches,
moments scaled by R, and then tables are averaged (2D sparse parallelism, Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.steps.build import OPTIMIZER, Built, build_plain
from benchmarks.steps.contenders import Contender
from benchmarks.steps.inputs import benchmark_tables, random_batch
from benchmarks.steps.setting import Setting
from benchmarks.steps.shares import column_cuts
from dmt.training.data.batch import ClickBatch

__all__ = ["PlainModel", "CHECK_STEPS", "check_batches", "check_losses", "load_weights", "losses_of", "plain_weights"]

CHECK_STEPS = 2
"""One to compare from equal weights, one to compare after it."""

# Rows of a rank's batch in the check; the plain model sees those of all ranks at once.
_ROWS = 256
# float32 adds in another order; FP16 rounds each number sent by 2^-11, and AdaGrad's first step takes a gradient's
# direction only, so numbers that cancel may turn.
_TOLERANCE = {"fp32": 1e-5, "fp16": 1e-2}


def check_batches(setting: Setting, rank: int) -> list[ClickBatch]:
    """Batches of a rank in the steps of the check."""
    rows, tables = min(_ROWS, setting.batch_size), benchmark_tables(setting)
    return [random_batch(tables, rows, setting.seed, 1_000 + step, rank) for step in range(CHECK_STEPS)]


def plain_weights(contender: Contender, setting: Setting) -> dict[str, Tensor]:
    """The weights that all contenders of one plain model start from."""
    torch.manual_seed(setting.seed)
    return build_plain(contender, setting).state_dict()


def load_weights(built: Built, weights: Mapping[str, Tensor]) -> None:
    """Copies whole tables and dense weights into a sharded model, shard by shard."""
    with torch.no_grad():
        for name, value in built.model.state_dict().items():
            if not isinstance(value, ShardedTensor):
                value.copy_(weights[name])
                continue
            for shard in value.local_shards():
                at = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
                shard.tensor.copy_(weights[name][tuple(slice(first, first + size) for first, size in at)])
    if built.replicas is not None:
        built.replicas.restart()


def losses_of(built: Built) -> list[float]:
    """Trains the steps of the check with the contender's own pipeline; the losses before each. Collective."""
    losses = []
    for _ in range(CHECK_STEPS):
        logits, labels, _ = built.step()
        losses.append(nn.functional.binary_cross_entropy_with_logits(logits, labels).item())
        if built.replicas is not None:
            built.replicas.sync()
    return losses


def check_losses(contender: Contender, found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> str:
    """Describes wrong losses of a contender, by rank and step; empty if there are none."""
    tolerance = _TOLERANCE[contender.precision]
    for rank, (ours, plain) in enumerate(zip(found, expected, strict=True)):
        for step, (a, b) in enumerate(zip(ours, plain, strict=True)):
            # Written so that NaN is wrong too.
            if not abs(a - b) <= tolerance:
                return (
                    f"Contender {contender.name} is wrong: on rank {rank} its loss after {step} steps is "
                    f"{a:.7f}, that of the plain {contender.plain_model} {b:.7f} (tolerance {tolerance:g})."
                )
    return ""


class PlainModel:
    """The unsharded model, and what it computes for the contenders that stand for it.

    Args:
        contender: any of them.
        setting: sizes of the job.
        weights: `plain_weights`.
    """

    def __init__(self, contender: Contender, setting: Setting, weights: Mapping[str, Tensor]) -> None:
        self._setting = setting
        self._weights = weights
        self._model = build_plain(contender, setting)
        self._gradients: dict[int, list[dict[str, Tensor]]] = {}
        self._losses: dict[Any, list[list[float]]] = {}

    def losses(self, built: Built) -> list[list[float]]:
        """For every rank the losses on its batches before and after a step."""
        replicas, cuts = built.contender.num_replicas, column_cuts(built.plan)
        key = (replicas, *chain.from_iterable((table, *widths) for table, widths in sorted(cuts.items())))
        if key not in self._losses:
            self._model.load_state_dict(self._weights)
            before = self._losses_by_rank(step=0)
            if replicas not in self._gradients:
                self._gradients[replicas] = [self._gradient(ranks) for ranks in self._ranks_by_replica(built)]
            self._step(self._gradients[replicas], cuts)
            self._losses[key] = [list(pair) for pair in zip(before, self._losses_by_rank(step=1), strict=True)]
        return self._losses[key]

    def _ranks_by_replica(self, built: Built) -> list[list[int]]:
        if built.topology is None:
            return [list(range(self._setting.world_size))]
        return built.topology.sharding_groups()

    def _losses_by_rank(self, step: int) -> list[float]:
        losses = []
        with torch.no_grad():
            for rank in range(self._setting.world_size):
                loss, _ = self._model(check_batches(self._setting, rank)[step])
                losses.append(loss.item())
        return losses

    def _gradient(self, ranks: Sequence[int]) -> dict[str, Tensor]:
        """Gradient of the mean loss over the ranks' batches, from the starting weights."""
        self._model.zero_grad()
        loss, _ = self._model(_joined([check_batches(self._setting, rank)[0] for rank in ranks]))
        loss.backward()
        return {name: p.grad.clone() for name, p in self._model.named_parameters() if p.grad is not None}

    @torch.no_grad()
    def _step(self, gradients: Sequence[Mapping[str, Tensor]], cuts: Mapping[str, Sequence[int]]) -> None:
        replicas = len(gradients)
        for name, parameter in self._model.named_parameters():
            of_replicas = [gradient[name] for gradient in gradients]
            if "embedding_bags" in name:
                widths = cuts[name.split(".")[-2]]
                steps = [_table_step(gradient, widths, moment_scale=replicas) for gradient in of_replicas]
            else:
                steps = [OPTIMIZER.dense_lr * gradient for gradient in of_replicas]
            parameter -= torch.stack(steps).mean(dim=0)


def _table_step(gradient: Tensor, widths: Sequence[int], *, moment_scale: float) -> Tensor:
    """The first step of FBGEMM's row-wise AdaGrad: each column shard has a state, the mean of its squared gradients."""
    parts = []
    for part in gradient.split(list(widths), dim=1):
        moment = part.pow(2).mean(dim=1, keepdim=True) / moment_scale
        parts.append(OPTIMIZER.sparse_lr * part / (moment.sqrt() + OPTIMIZER.sparse_eps))
    return torch.cat(parts, dim=1)


def _joined(batches: Sequence[ClickBatch]) -> ClickBatch:
    """Batches one below the other."""
    first = batches[0].sparse_features
    ids = [batch.sparse_features.values().view(len(first.keys()), -1) for batch in batches]
    values = torch.cat(ids, dim=1)
    return ClickBatch(
        dense_features=torch.cat([batch.dense_features for batch in batches]),
        sparse_features=KeyedJaggedTensor(
            keys=first.keys(),
            values=values.flatten(),
            lengths=torch.ones(values.numel(), dtype=torch.int32),
            stride=values.shape[1],
        ),
        labels=torch.cat([batch.labels for batch in batches]),
        weights=torch.cat([batch.weights for batch in batches]),
    )
