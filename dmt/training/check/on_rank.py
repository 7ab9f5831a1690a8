"""`check_on_rank`: the comparisons of one rank. Models are made one after the other, each from the same start."""

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
from dmt.training.check.expected import UNEVEN, Expected, compute_expected, draw_batch
from dmt.training.check.shrink import CheckedRun, with_values
from dmt.training.config import TrainingConfig

__all__ = ["Finding", "RankReport", "check_on_rank", "name_in_report"]

# Tables are updated in the backward pass: their gradient is read off one step of SGD. At this rate the step is as large
# as the weights or larger, so that its rounding tells nothing else.
_PROBE_RATE = 2.0**10
# Relative error of a sum of products: two ways to sum K of them differ by at most K units in the last place of the sum
# of their magnitudes, and typically by its square root; K is a few thousand in the widest layers here. A fault (a wrong
# row, a wrong divisor, a gradient twice) shows in the first or second digit.
_FP32_SUM = 64 * 2.0**-24
# Allowed share of logits and gradients with other formats than FP32, where only a fault of scale shows: a ReLU that
# rounding switches moves a gradient far.
_WIDE = 0.25
# Gradients pass through as many layers twice.
_LAYERS = 8
# A gradient smaller than this share of the largest of its kind is a sum of terms that cancel.
_CANCELS = 1 / 16
# Error of a step, as a share of its length. Adam and AdaGrad divide by the gradient's own size, so an element whose
# terms cancel to a share s of themselves errs by _FP32_SUM / s; with s spread evenly, the root mean square is about
# sqrt(_FP32_SUM) = 2e-3. SGD amplifies nothing; row-wise AdaGrad divides a row by its norm.
_STEP = {"sgd": 1e-4, "rowwise_adagrad": 1e-3, "adagrad": 1e-2, "adam": 1e-2, "adamw": 1e-2}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One comparison on one rank."""

    check: str
    """Name of the row it belongs to."""
    item: str
    """Table or parameter."""
    difference: float
    """Largest found."""
    allowed: float
    """Largest that rounding explains; 0: bitwise."""
    place: str = ""
    """Rank and step."""

    @property
    def agrees(self) -> bool:
        """Whether the difference is within the tolerance; NaN never is."""
        return self.difference <= self.allowed

    @property
    def share(self) -> float:
        """Difference over the allowed difference, to find the worst."""
        if self.agrees and self.difference == 0:
            return 0.0
        return self.difference / self.allowed if self.allowed and not math.isnan(self.difference) else math.inf


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Findings and checksums that a rank sends back."""

    findings: tuple[Finding, ...]
    checksums: Mapping[tuple[str, tuple[int, ...], tuple[int, ...]], int]
    """By (name, offsets, sizes): checksum of every tensor, or shard of one, that the rank holds after training."""
    outputs: tuple[float, float]
    """Least and greatest output of the plain model on this rank's samples, before training."""


def name_in_report(name: str) -> str:
    """Returns the name of a parameter in the report: a table's own name, others in full."""
    return f"table {table_name(name)}" if is_table(name) else name.removeprefix("model.")


def check_on_rank(rank: int, run: CheckedRun) -> RankReport:
    """Runs every check on this rank; collective.

    Raises:
        InputError: the run cannot be built as its config says.
    """
    checks = _Checks(rank, run, TowerMesh(run.topology))
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
        """Runs the plain module on rank 0; the others read its results."""
        path, layout = Path(self.run.folder) / "expected.pt", table_layout(shard_model(self.run.job, self.mesh))
        if self.rank == 0:
            torch.save(compute_expected(self.run, layout), path)
        dist.barrier()
        # Written a moment ago by this program.
        expected: Expected = torch.load(path, weights_only=False, mmap=True)
        return expected

    def logits_and_gradients(self, config: TrainingConfig) -> None:
        """Compares logits and gradients of one batch; no weight changes before they are taken."""
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
        """Compares a few steps, with FP32 between towers; returns the weights of the run in its own formats."""
        expected = self.expected
        parts, losses, replicas = self._train(self.exact)
        for step, loss in enumerate(losses):
            mean = expected.losses[step][self.rank]
            # A step of Adam may differ in single weights, see `_STEP`; a mean loss feels little of that.
            self._found("training", "the loss", abs(loss - mean), 1e-5 * max(1.0, abs(mean)), f"step {step}")
        self._compare_weights(parts)
        if self.exact != self.run.config:
            parts, _, replicas = self._train(self.run.config)
        try:
            # With optimizer states, which no other check sees at the end of training.
            if replicas is not None:
                replicas.check()
        except ReplicaMismatchError as error:
            self._found("replicas", "weights or states of tables", float("nan"), 0.0, str(error))
        return parts

    def _compare_weights(self, parts: list[LocalPart]) -> None:
        """Compares the weights after training."""
        optimizer, steps = self.run.config.optimizer, self.run.limits.steps
        dense_error = _STEP[optimizer.dense]
        # Errors of the other weights reach tables in the next gradient.
        table_error = max(_STEP[optimizer.sparse], 0.1 * dense_error)
        for part in parts:
            start, wanted = part.of(self.expected.start), part.of(self.expected.weights)
            moved, distance = (float((wanted - other).norm()) for other in (start, part.tensor.float()))
            error = table_error if is_table(part.name) else dense_error
            # In FP16 a sum near the middle between two numbers may be rounded to either of them, in any step.
            units = (2 if part.tensor.dtype == torch.float16 else 1) * math.sqrt(steps)
            allowed = error * moved + units * _unit_of(part.tensor) * float(wanted.norm())
            self._found("training", name_in_report(part.name), distance, allowed, f"after {steps} steps")

    def _start(self, config: TrainingConfig) -> tuple[DistributedModelParallel, ReplicaSync | None]:
        """Returns the sharded model of a config with the first weights, and its `ReplicaSync` if it has replicas."""
        model = shard_model(replace(self.run.job, config=config), self.mesh)
        load_plain_state(model, self.expected.start)
        if config.hot_rows.extra_memory:
            # Each second row of every table: counts would choose none in a few steps.
            hot = HotRows(model, self.mesh, refresh_every=None)
            tables = [table for table in self.run.job.split_tables if table.name not in hot.left_out]
            hot.replicate({table.name: range(0, table.num_embeddings, 2) for table in tables})
        return model, replica_sync(config.replicas, model, self.mesh)

    def _train(self, config: TrainingConfig) -> tuple[list[LocalPart], list[float], ReplicaSync | None]:
        """Returns this rank's weights after training, copied, and the losses of all steps and one more."""
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
        """Compares gradients; ``share`` of a parameter's largest element is allowed."""
        expected = self.expected.gradients[self.mesh.replica]
        largest = {"dense gradients": 0.0, "table gradients": 0.0}
        for name, gradient in expected.items():
            largest[_kind(name)] = max(largest[_kind(name)], float(gradient.abs().max()))
        found: list[tuple[str, Tensor, Tensor, float]] = []
        for part in local_parts(model):
            if is_table(part.name):
                after = part.tensor.float()
                # The step was rounded with the weights that it led to.
                rounding = 2 * _unit_of(part.tensor) * float(after.abs().max()) / _PROBE_RATE
                gradient = (part.of(self.expected.start) - after) / _PROBE_RATE
                found.append((part.name, gradient, part.of(expected), rounding))
        for name, parameter in model.named_parameters():
            if not is_table(name) and parameter.grad is not None:
                found.append((name, parameter.grad, expected[name], 0.0))
        for name, ours, wanted, rounding in found:
            size = max(float(wanted.abs().max()), _CANCELS * largest[_kind(name)])
            self._found(_kind(name), name_in_report(name), _distance(ours, wanted), rounding + share * size)

    def _found(self, check: str, item: str, difference: float, allowed: float, place: str = "") -> None:
        place = f"rank {self.rank}" + (f", {place}" if place else "")
        self.findings.append(Finding(check=check, item=item, difference=difference, allowed=allowed, place=place))


def _kind(name: str) -> str:
    return "table gradients" if is_table(name) else "dense gradients"


def _unit_of(weights: Tensor) -> float:
    """Returns the largest relative rounding error of a weight, FP16 or FP32."""
    return 2.0**-11 if weights.dtype == torch.float16 else 2.0**-24


def _distance(ours: Tensor, wanted: Tensor) -> float:
    """Returns the largest difference; NaN where the shapes differ."""
    if ours.shape != wanted.shape:
        return float("nan")
    if ours.numel() == 0:
        return 0.0
    return float((ours.detach().float() - wanted.detach().float()).abs().max())
