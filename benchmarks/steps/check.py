"""Checks every contender against the plain model, which `PlainModel` trains for one step in one process.

The check compares two losses on each rank's batch: before the step, from equal weights, and after it. The plain model
takes the step on the batches of all ranks together; with replicas, each replica on the batches of its ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.types import ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.steps.build import OPTIMIZER, Built, build_plain
from benchmarks.steps.contenders import Contender
from benchmarks.steps.inputs import random_batch
from benchmarks.steps.setting import Setting
from dmt.sharding.schemes import column_widths
from dmt.testing import PlainTraining, load_plain_state
from dmt.training.build import fused_params
from dmt.training.data.batch import ClickBatch

__all__ = [
    *("CHECK_STEPS", "PlainModel", "check_batches", "check_losses", "column_cuts", "load_weights", "losses_of"),
    "plain_weights",
]

CHECK_STEPS = 2
"""Number of steps in the check: one from equal weights, and one after it."""

# Rows of a rank's batch in the check; the plain model gets those of all ranks together.
_ROWS = 256
# FP32 sums differ in their order. FP16 rounds each number sent by 2^-11, and AdaGrad's first step depends only on the
# direction of a gradient, which may turn where numbers cancel.
_TOLERANCE = {"fp32": 1e-5, "fp16": 1e-2}


def check_batches(setting: Setting, rank: int) -> list[ClickBatch]:
    """Returns a rank's batches for the steps of the check."""
    rows = min(_ROWS, setting.batch_size)
    return [random_batch(setting, rows, 1_000 + step, rank) for step in range(CHECK_STEPS)]


def plain_weights(contender: Contender, setting: Setting) -> dict[str, Tensor]:
    """Returns the initial weights of all contenders of one plain model."""
    torch.manual_seed(setting.seed)
    return build_plain(contender, setting).state_dict()


def load_weights(built: Built, weights: Mapping[str, Tensor]) -> None:
    """Loads the weights of the plain model into a sharded one, with all its replicas."""
    load_plain_state(built.model, weights)
    if built.replicas is not None:
        built.replicas.restart()


def losses_of(built: Built) -> list[float]:
    """Trains the steps of the check with the contender's pipeline; returns the loss before each. Collective."""
    losses = []
    for _ in range(CHECK_STEPS):
        logits, labels, _ = built.step()
        losses.append(nn.functional.binary_cross_entropy_with_logits(logits, labels).item())
    return losses


def check_losses(contender: Contender, found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> str:
    """Returns a message on the first wrong loss of a contender; empty if all are right. Losses are by rank and step."""
    tolerance = _TOLERANCE[contender.precision]
    for rank, (ours, plain) in enumerate(zip(found, expected, strict=True)):
        for step, (a, b) in enumerate(zip(ours, plain, strict=True)):
            # Written so that NaN counts as wrong.
            if not abs(a - b) <= tolerance:
                return (
                    f"Contender {contender.name} is wrong: on rank {rank} its loss after {step} steps is "
                    f"{a:.7f}, that of the plain {contender.plain_model} {b:.7f} (tolerance {tolerance:g})."
                )
    return ""


def column_cuts(plan: ShardingPlan) -> dict[str, list[int]]:
    """Returns the widths of each table's column shards, by table name; an empty list for an unsharded table."""
    modules: Any = plan.plan.values()
    specs = {table: parameter.sharding_spec for module in modules for table, parameter in module.items()}
    return {table: column_widths([] if spec is None else spec.shards) for table, spec in specs.items()}


class PlainModel:
    """Trains the unsharded model for one step, once for all contenders that must give the same results.

    Args:
        contender: any of these contenders.
        setting: sizes of the job.
        weights: the initial weights, from `plain_weights`.
    """

    def __init__(self, contender: Contender, setting: Setting, weights: Mapping[str, Tensor]) -> None:
        self._setting = setting
        self._model = build_plain(contender, setting)
        self._model.load_state_dict(weights)
        self._losses: dict[Any, list[list[float]]] = {}

    def losses(self, built: Built) -> list[list[float]]:
        """Returns, for every rank, the losses on its batches before and after the step: [W][2]."""
        cuts = column_cuts(built.plan)
        replicas = [list(range(self._setting.world_size))]
        if built.topology is not None:
            replicas = built.topology.sharding_groups()
        key = (str(replicas), *chain.from_iterable((table, *widths) for table, widths in sorted(cuts.items())))
        if key not in self._losses:
            models = [copy.deepcopy(self._model) for _ in replicas]
            training = PlainTraining(
                models,
                fused_params=fused_params(OPTIMIZER),
                make_optimizer=lambda named: torch.optim.SGD(named.values(), lr=OPTIMIZER.dense_lr),
                layout=cuts,
            )
            before = self._losses_by_rank(models[0], step=0)
            for model, ranks in zip(models, replicas, strict=True):
                loss, _ = model(_joined([check_batches(self._setting, rank)[0] for rank in ranks]))
                loss.backward()
            training.step()
            self._losses[key] = [list(pair) for pair in zip(before, self._losses_by_rank(models[0], 1), strict=True)]
        return self._losses[key]

    @torch.no_grad()
    def _losses_by_rank(self, model: nn.Module, step: int) -> list[float]:
        return [model(check_batches(self._setting, r)[step])[0].item() for r in range(self._setting.world_size)]


def _joined(batches: Sequence[ClickBatch]) -> ClickBatch:
    """Returns the batches concatenated into one."""
    keys = batches[0].sparse_features.keys()
    ids = [batch.sparse_features[key] for key in keys for batch in batches]
    return ClickBatch(
        dense_features=torch.cat([batch.dense_features for batch in batches]),
        sparse_features=KeyedJaggedTensor(
            keys=keys,
            values=torch.cat([of_key.values() for of_key in ids]),
            lengths=torch.cat([of_key.lengths() for of_key in ids]),
        ),
        labels=torch.cat([batch.labels for batch in batches]),
        weights=torch.cat([batch.weights for batch in batches]),
    )
