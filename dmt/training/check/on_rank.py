"""`check_on_rank` makes all comparisons of one rank; each model it trains starts from the same weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from dmt.errors import ReplicaMismatchError
from dmt.hot_rows.runtime import HotRows
from dmt.replicas.sync import ReplicaSync
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.state import checksum
from dmt.testing.plain import is_table, table_name
from dmt.testing.state import LocalPart, copy_parts, load_plain_state, local_parts, table_layout
from dmt.training.build import build_optimizer, in_micro_batches, replica_sync, shard_model
from dmt.training.check.expected import UNEVEN, Expected, compute_expected, draw_batch, without_dropout
from dmt.training.check.shrink import CheckedRun, with_values
from dmt.training.config import TrainingConfig

__all__ = ["Finding", "RankReport", "check_on_rank", "name_in_report"]

# Tables are updated in the backward pass, so their gradients are computed from one step of SGD. At this rate the step
# is at least about as large as the weights, so that the rounding of the new weights barely affects the result.
_PROBE_RATE = 2.0**10
# Relative error of a sum of products: two ways to sum K products differ by at most K units in the last place of the sum
# of their magnitudes, and typically by sqrt(K) units; K is a few thousand in the widest layers here. A fault (a wrong
# row, a wrong divisor, a gradient counted twice) shows in the first or second digit.
_FP32_SUM = 64 * 2.0**-24
# Allowed relative error of logits and gradients if the formats are not FP32. It exposes only faults of scale: where
# rounding switches a ReLU, a gradient changes a lot.
_WIDE = 0.25
# Number of layers that gradients pass through, forward and backward.
_LAYERS = 8
# A gradient smaller than this share of the largest of its kind is a sum of terms that cancel.
_CANCELS = 1 / 16
# Error of a step, as a share of its length. Adam and AdaGrad divide a gradient by its magnitude, so if the terms of an
# element cancel to a share s, its error is _FP32_SUM / s; with s uniform, the root mean square is about
# sqrt(_FP32_SUM) = 2e-3. SGD amplifies no error; row-wise AdaGrad divides a row by its norm.
_STEP = {"sgd": 1e-4, "rowwise_adagrad": 1e-3, "adagrad": 1e-2, "adam": 1e-2, "adamw": 1e-2}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One comparison: on one rank, or of the copies on several ranks."""

    check: str
    """Name of the check, which is a row of the report."""
    item: str
    """Name of what was compared: a table, a parameter, the logits or the loss."""
    difference: float
    """Largest absolute difference, norm of the difference, or number of ranks that differ; NaN if it is unknown."""
    allowed: float
    """Largest difference that rounding explains; 0 requires equal bits."""
    place: str = ""
    """Rank and, in training, step of the comparison; for copies, the ranks that differ, if any."""

    @property
    def agrees(self) -> bool:
        """Whether the difference is at most the allowed one; False for NaN."""
        return self.difference <= self.allowed

    @property
    def share(self) -> float:
        """``difference / allowed``, by which the worst finding is chosen.

        0 if the difference is 0; infinity if the difference is NaN, or is above 0 where ``allowed`` is 0.
        """
        if self.agrees and self.difference == 0:
            return 0.0
        return self.difference / self.allowed if self.allowed and not math.isnan(self.difference) else math.inf


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Results that a rank returns to the process that started it."""

    findings: tuple[Finding, ...]
    """All comparisons of the rank."""
    checksums: Mapping[tuple[str, tuple[int, ...], tuple[int, ...]], int]
    """Checksum of each tensor or shard that the rank holds after training, by (name, offsets, sizes)."""
    outputs: tuple[float, float]
    """Smallest and largest output of the plain model on this rank's samples, before training."""


def name_in_report(name: str) -> str:
    """Returns the name of a parameter in the report: ``table <name>`` for tables, else its name without ``model.``."""
    return f"table {table_name(name)}" if is_table(name) else name.removeprefix("model.")


def check_on_rank(rank: int, run: CheckedRun) -> RankReport:
    """Runs all checks of a shrunk run on this rank; collective.

    Raises:
        InputError: the run cannot be built from its config, or `compute_expected` raises it.
    """
    checks = _Checks(rank, run, TowerMesh(run.job.topology))
    checks.logits_and_gradients(checks.exact)
    if run.config != checks.exact:
        checks.logits_and_gradients(run.config)
    parts = checks.training()
    logits = checks.expected.logits[rank]
    return RankReport(
        findings=tuple(checks.findings),
        checksums={
            (part.name, tuple(side.start for side in part.where), tuple(part.tensor.shape)): checksum(part.tensor)
            for part in parts
        },
        outputs=(float(logits.min()), float(logits.max())),
    )


class _Checks:
    def __init__(self, rank: int, run: CheckedRun, mesh: TowerMesh) -> None:
        self.rank, self.run, self.mesh = rank, run, mesh
        self.findings: list[Finding] = []
        self.exact = with_values(run.config, "sharding", forward_precision="fp32", backward_precision="fp32")
        self.expected = self._meet_expected()

    def _meet_expected(self) -> Expected:
        """Runs the plain module on rank 0; the other ranks read its results from a file."""
        path, layout = Path(self.run.folder) / "expected.pt", table_layout(shard_model(self.run.job, self.mesh))
        if self.rank == 0:
            torch.save(compute_expected(self.run, layout), path)
        dist.barrier()
        # Safe to unpickle: rank 0 has just written it.
        expected: Expected = torch.load(path, weights_only=False, mmap=True)
        return expected

    def logits_and_gradients(self, config: TrainingConfig) -> None:
        """Compares one batch's logits and gradients, under ``config`` at initial weights, with the plain module's."""
        # SGD has no moments to scale.
        probe = with_values(config, "replicas", moment_scale="num_replicas")
        probe = with_values(probe, "optimizer", sparse="sgd", sparse_lr=_PROBE_RATE, warmup_steps=0)
        model, _ = self._start(probe)
        loss, (logits, _, _) = model(draw_batch(self.run, self.rank, UNEVEN))
        wide, wanted = 0.0 if config == self.exact else _WIDE, self.expected.logits[self.rank]
        allowed = (_FP32_SUM + wide) * max(1.0, float(wanted.abs().max()))
        self._found("logits", "the logits", _distance(logits, wanted), allowed)
        loss.backward()
        self._compare_gradients(model, _LAYERS * _FP32_SUM + wide)

    def training(self) -> list[LocalPart]:
        """Compares a training with FP32 exchanges; repeats it if the config has other formats; returns the weights."""
        expected = self.expected
        parts, losses, replicas = self._train(self.exact)
        for step, loss in enumerate(losses):
            mean = expected.losses[step][self.rank]
            # A step of Adam may differ in single weights, see `_STEP`; that barely changes a mean loss.
            self._found("training", "the loss", abs(loss - mean), 1e-5 * max(1.0, abs(mean)), f"step {step}")
        self._compare_weights(parts)
        if self.exact != self.run.config:
            parts, _, replicas = self._train(self.run.config)
        try:
            # Includes optimizer states, which no other check compares after training.
            if replicas is not None:
                replicas.check()
        except ReplicaMismatchError as error:
            self._found("replicas", "weights or states of tables", float("nan"), 0.0, str(error))
        return parts

    def _compare_weights(self, parts: list[LocalPart]) -> None:
        """Compares the weights after training with those of the plain module."""
        optimizer, steps = self.run.config.optimizer, self.run.limits.steps
        dense_error = _STEP[optimizer.dense]
        # Errors of dense weights reach the tables by the next gradient.
        table_error = max(_STEP[optimizer.sparse], 0.1 * dense_error)
        for part in parts:
            start, wanted = part.of(self.expected.start), part.of(self.expected.weights)
            moved, distance = (float((wanted - other).norm()) for other in (start, part.tensor.float()))
            error = table_error if is_table(part.name) else dense_error
            # In FP16, a sum close to halfway between two numbers may be rounded to either, in any step.
            units = (2 if part.tensor.dtype == torch.float16 else 1) * math.sqrt(steps)
            allowed = error * moved + units * _unit_of(part.tensor) * float(wanted.norm())
            self._found("training", name_in_report(part.name), distance, allowed, f"after {steps} steps")

    def _start(self, config: TrainingConfig) -> tuple[DistributedModelParallel, ReplicaSync | None]:
        """Returns the sharded model of a config with the initial weights, and its `ReplicaSync` if it has replicas."""
        model = without_dropout(shard_model(replace(self.run.job, config=config), self.mesh))
        load_plain_state(model, self.expected.start)
        if config.hot_rows.extra_memory:
            # Every second row of each table: access counts would choose no row in so few steps.
            hot = HotRows(model, self.mesh, refresh_every=None)
            tables = [table for table in self.run.job.split_tables if table.name not in hot.left_out]
            hot.replicate({table.name: range(0, table.num_embeddings, 2) for table in tables})
        return model, replica_sync(config.replicas, model, self.mesh)

    def _train(self, config: TrainingConfig) -> tuple[list[LocalPart], list[float], ReplicaSync | None]:
        """Trains a new model; returns this rank's weights, losses by step and after training, and any `ReplicaSync`."""
        model, replicas = self._start(config)
        in_micro_batches(config.train, model)
        optimizer = build_optimizer(config.optimizer, model)
        steps, losses = self.run.limits.steps, []
        for step in range(steps):
            optimizer.zero_grad()
            loss, _ = model(draw_batch(self.run, self.rank, step))
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if replicas is not None:
                replicas.step()
        if replicas is not None:
            replicas.sync()
        parts = copy_parts(model)
        with torch.no_grad():
            losses.append(float(model(draw_batch(self.run, self.rank, steps))[0]))
        return parts, losses, replicas

    def _compare_gradients(self, model: DistributedModelParallel, share: float) -> None:
        """Compares gradients, whose allowed difference is ``share`` times the parameter's largest gradient.

        That gradient counts as at least `_CANCELS` times the largest of its kind. Tables may differ by rounding, too.
        """
        expected = self.expected.gradients[self.mesh.replica]
        largest = {"dense gradients": 0.0, "table gradients": 0.0}
        for name, gradient in expected.items():
            largest[_kind(name)] = max(largest[_kind(name)], float(gradient.abs().max()))
        compared: list[tuple[str, Tensor, Tensor, float]] = []
        for part in local_parts(model):
            if is_table(part.name):
                after = part.tensor.float()
                # The step was rounded when it was added to the weights.
                rounding = 2 * _unit_of(part.tensor) * float(after.abs().max()) / _PROBE_RATE
                gradient = (part.of(self.expected.start) - after) / _PROBE_RATE
                compared.append((part.name, gradient, part.of(expected), rounding))
        for name, parameter in model.named_parameters():
            if not is_table(name) and parameter.grad is not None:
                compared.append((name, parameter.grad, expected[name], 0.0))
        for name, ours, wanted, rounding in compared:
            size = max(float(wanted.abs().max()), _CANCELS * largest[_kind(name)])
            self._found(_kind(name), name_in_report(name), _distance(ours, wanted), rounding + share * size)

    def _found(self, check: str, item: str, difference: float, allowed: float, place: str = "") -> None:
        place = f"rank {self.rank}" + (f", {place}" if place else "")
        self.findings.append(Finding(check=check, item=item, difference=difference, allowed=allowed, place=place))


def _kind(name: str) -> str:
    return "table gradients" if is_table(name) else "dense gradients"


def _unit_of(weights: Tensor) -> float:
    """Returns the largest relative rounding error of the format of weights, FP16 or FP32."""
    return 2.0**-11 if weights.dtype == torch.float16 else 2.0**-24


def _distance(ours: Tensor, wanted: Tensor) -> float:
    """Returns the largest absolute difference of two tensors; NaN if their shapes differ."""
    if ours.shape != wanted.shape:
        return float("nan")
    if ours.numel() == 0:
        return 0.0
    return float((ours.detach().float() - wanted.detach().float()).abs().max())
