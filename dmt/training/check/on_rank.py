"""`check_on_rank`: the comparisons of one rank. Models are made one after the other, each from the same start."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from dmt.errors import InputError, ReplicaMismatchError
from dmt.hot_rows.runtime import HotRows
from dmt.models.complexity import is_tower_module
from dmt.replicas.sync import ReplicaSync
from dmt.sptt.mesh import TowerMesh
from dmt.testing.plain import is_table
from dmt.testing.ranks import say
from dmt.testing.state import LocalPart, TableLayout, copy_parts, digest, load_plain_state, local_parts, table_layout
from dmt.training.build import (
    ClickTask,
    build_model,
    build_optimizer,
    in_micro_batches,
    replica_sync,
    shard_model,
)
from dmt.training.check.expected import (
    SINGLE_IDS,
    UNEVEN_BAGS,
    Expected,
    Seen,
    Watch,
    compute_expected,
    draw_batch,
    plain_task,
    sparse_part,
    table_of,
)
from dmt.training.check.rounding import (
    FoundGradient,
    allowed_gradient,
    allowed_logits,
    allowed_outputs,
    allowed_weights,
    step_error,
    unit_of,
)
from dmt.training.check.shrink import CheckedRun, with_values
from dmt.training.checkpoints import Checkpointer, load_plain
from dmt.training.config import TrainingConfig

__all__ = ["Finding", "RankReport", "Trained", "check_on_rank", "table_of"]

# Tables are updated in the backward pass: their gradient is read off one step of SGD. At this rate the step is as large
# as the weights or larger, so that its rounding tells nothing else.
_PROBE_RATE = 2.0**10


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One comparison on one rank."""

    check: str
    """Name of the row it belongs to."""
    item: str
    """Table, tower or parameter."""
    difference: float
    """Largest found."""
    allowed: float
    """Largest that rounding explains; 0: bitwise."""
    place: str = ""
    """Rank and step."""

    @property
    def agrees(self) -> bool:
        """Is true if the difference is allowed; NaN never is."""
        return self.difference <= self.allowed

    @property
    def share(self) -> float:
        """Difference over the allowed difference, to find the worst."""
        if math.isnan(self.difference):
            return math.inf
        if self.difference == 0:
            return 0.0
        return self.difference / self.allowed if self.allowed else math.inf


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Findings and digests that a rank sends back."""

    findings: tuple[Finding, ...]
    skipped: Mapping[str, str]
    """Reasons why checks were left out, by their names."""
    shards: tuple[tuple[str, tuple[int, ...], tuple[int, ...], str], ...]
    """(name, offsets, sizes, digest after training) of every shard that the rank holds."""
    whole: Mapping[str, str]
    """Digest of everything that the rank holds whole, by name, after training."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model after training, with its outputs during training."""

    model: DistributedModelParallel
    parts: list[LocalPart]
    """Weights of this rank after training, copied."""
    losses: list[float]
    """By step, and after the last."""
    replicas: ReplicaSync | None
    """Keeps the model equal to its replicas."""


def check_on_rank(rank: int, run: CheckedRun) -> RankReport:
    """Runs every check on this rank; collective.

    Raises:
        InputError: the run cannot be built as its config says.
    """
    checks = _Checks(rank, run, TowerMesh(run.topology))
    say("forward pass and gradients")
    checks.forward_and_gradients()
    say("training")
    trained = checks.training()
    say("checkpoint")
    checks.checkpoint(trained)
    return RankReport(
        findings=tuple(checks.findings),
        skipped=checks.skipped,
        shards=tuple(
            (part.name, tuple(side.start for side in part.where), tuple(part.tensor.shape), digest(part.tensor))
            for part in trained.parts
            if part.is_shard
        ),
        whole={part.name: digest(part.tensor) for part in trained.parts if not part.is_shard},
    )


class _Checks:
    def __init__(self, rank: int, run: CheckedRun, mesh: TowerMesh) -> None:
        self.rank, self.run, self.mesh = rank, run, mesh
        self.findings: list[Finding] = []
        self.precision = run.config.sharding.precision
        self._exact = with_values(run.config, "sharding", forward_precision="fp32", backward_precision="fp32")
        self._hot_rows: HotRows | None = None
        self.expected = self._meet_expected(table_layout(shard_model(run.job, mesh)))
        self.skipped: dict[str, str] = {}

    # The checks, in order.

    def forward_and_gradients(self) -> None:
        """Embeddings, outputs and logits of two batches, gradients of one; no weight changes before they are taken."""
        model, _ = self._start(_probe(self.run.config))
        watch = Watch(model)
        for index, name in ((SINGLE_IDS, "embeddings"), (UNEVEN_BAGS, "bags")):
            loss = watch.run(draw_batch(self.run, self.rank, index))
            self._compare_forward(watch.seen, index, name)
        loss.backward()
        self._compare_gradients(self._gradients(model))

    def training(self) -> Trained:
        """A few steps against the plain module, with FP32 between towers; returns the run in its own formats."""
        trained = self._train(self._exact)
        expected = self.expected
        for step, loss in enumerate(trained.losses):
            mean = expected.losses[step][self.rank]
            # A step of Adam may differ in single weights, see `rounding`; a mean loss feels little of that.
            self._found("losses", "the loss", abs(loss - mean), 1e-5 * max(1.0, abs(mean)), f"step {step}")
        optimizer = self.run.config.optimizer
        table_error = step_error(optimizer.sparse, dense_optimizer=optimizer.dense)
        self._compare_weights("table weights", trained, table_error, "optimizer.sparse_lr")
        self._compare_weights("dense weights", trained, step_error(optimizer.dense), "optimizer.dense_lr and tower_lr")
        has_moved = any(not torch.equal(part.tensor.float(), part.of(expected.start)) for part in trained.parts)
        must_move = any(not torch.equal(part.of(expected.weights), part.of(expected.start)) for part in trained.parts)
        if must_move and not has_moved:
            self._found("table weights", "every weight", float("nan"), 0.0, "training moved nothing")
        own = trained if self._exact == self.run.config else self._train(self.run.config)
        try:
            # With optimizer states, which no other check sees at the end of training.
            if own.replicas is not None:
                own.replicas.check()
        except ReplicaMismatchError as error:
            self._found("replicas", "weights or states of tables", float("nan"), 0.0, str(error))
        return own

    def checkpoint(self, trained: Trained) -> None:
        """The trained weights, saved, and read into the plain module."""
        folder, steps = Path(self.run.folder) / "checkpoint", self.run.limits.steps
        if not Checkpointer(folder, self.mesh).save(trained.model, None, step=steps, progress={}):
            raise InputError(f"No checkpoint could be saved to {folder}. The warning before says why.")
        task = plain_task(self.run)
        load_plain(task, folder)
        saved = {name: value.detach() for name, value in task.state_dict().items()}
        for part in trained.parts:
            self._found("checkpoint", table_of(part.name), _distance(part.tensor, part.of(saved)), 0.0)

    # Their parts.

    def _compare_weights(self, check: str, trained: Trained, error: float, rates: str) -> None:
        """Compares the weights of a kind after training; skips those that it moves in the plain module neither."""
        start, after, steps = self.expected.start, self.expected.weights, self.run.limits.steps
        of_tables = check == "table weights"
        if all(torch.equal(after[name], start[name]) for name in after if is_table(name) is of_tables):
            self.skipped[check] = f"training moved nothing, in the plain module too; raise {rates}"
            return
        for part in trained.parts:
            if is_table(part.name) is not of_tables:
                continue
            allowed = allowed_weights(part.tensor, part.of(start), part.of(after), error=error, steps=steps)
            distance = float((part.tensor.float() - part.of(after)).norm())
            self._found(check, table_of(part.name), distance, allowed, f"after {steps} steps")

    def _start(self, config: TrainingConfig) -> tuple[DistributedModelParallel, ReplicaSync | None]:
        """Returns the sharded model of a config with the first weights, and its `ReplicaSync` if it has replicas."""
        model = shard_model(replace(self.run.job, config=config), self.mesh)
        load_plain_state(model, self.expected.start)
        self._hot_rows = None
        if config.hot_rows.extra_memory:
            self._hot_rows = HotRows(model, self.mesh, refresh_every=None)
            self._copy_rows(2)
        return model, replica_sync(config.replicas, model, self.mesh)

    def _copy_rows(self, every: int) -> None:
        """Copies rows that no count would choose in a few steps: each second, each third, of every table."""
        hot = self._hot_rows
        if hot is not None:
            tables = [table for table in self.run.job.split_tables if table.name not in hot.left_out]
            hot.replicate({table.name: range(0, table.num_embeddings, every) for table in tables})

    def _meet_expected(self, layout: TableLayout) -> Expected:
        """Runs the plain module on rank 0; the others read its results."""
        path = Path(self.run.folder) / "expected.pt"
        if self.rank == 0:
            torch.save(compute_expected(self.run, layout), path)
        dist.barrier()
        # Written a moment ago by this program.
        expected: Expected = torch.load(path, weights_only=False, mmap=True)
        return expected

    def _train(self, config: TrainingConfig) -> Trained:
        model, replicas = self._start(config)
        # Only in training: what is watched elsewhere is the whole batch.
        in_micro_batches(config.train, model)
        optimizer = build_optimizer(config.optimizer, model)
        steps, losses = self.run.limits.steps, []
        for step in range(steps):
            if step == steps // 2:
                self._copy_rows(3)
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
        return Trained(model=model, parts=parts, losses=losses, replicas=replicas)

    def _compare_forward(self, seen: Seen, index: int, check: str) -> None:
        has_towers = self.run.config.model.has_towers
        # A tower sees the samples of all its peers, tower by tower.
        ranks = dist.get_process_group_ranks(self.mesh.peer_group) if has_towers else [self.rank]
        of_ranks, wanted = self.expected.seen[index], self.expected.seen[index][self.rank]
        embeddings = {
            feature: torch.cat([of_ranks[rank].embeddings[feature] for rank in ranks]) for feature in seen.embeddings
        }
        # With one id per bag an embedding is a row; a sum of three may be added up in another order.
        self._compare_tables(check, seen.embeddings, embeddings, is_exact=index == SINGLE_IDS)
        if has_towers:
            self._compare_outputs(seen.outputs, wanted.outputs)
        allowed = allowed_logits(wanted.logits, self.expected.logit_rounding[index])
        batch = "one id per bag" if index == SINGLE_IDS else "bags of 0 to 3 ids"
        self._found("logits", "the logits", _distance(seen.logits, wanted.logits), allowed, batch)

    def _compare_tables(
        self, check: str, ours: Mapping[str, Tensor], wanted: Mapping[str, Tensor], *, is_exact: bool
    ) -> None:
        """Compares embeddings by feature: inputs of tower modules, or in a flat model what ranks exchanged."""
        forward = "fp32" if self.run.config.model.has_towers else self.precision.forward
        # Numbers of several tables can share a scale.
        of_all = max(float(value.abs().max()) for value in wanted.values()) if forward in ("int8", "fp8") else 0.0
        for feature, value in ours.items():
            largest = max(of_all, float(wanted[feature].abs().max()))
            allowed = allowed_outputs(largest, forward, is_exact=is_exact)
            self._found(check, f"table of {feature}", _distance(value, wanted[feature]), allowed)

    def _compare_outputs(self, ours: Tensor, wanted: Tensor) -> None:
        """Compares outputs of the sparse part, tower by tower."""
        towers = sparse_part(ClickTask(build_model(self.run.job, device="meta"))).towers
        widths = [tower.interaction.out_features for tower in towers]
        allowed = allowed_outputs(float(wanted.abs().max()), self.precision.forward, is_exact=False)
        for tower, (mine, its) in enumerate(zip(ours.split(widths, 1), wanted.split(widths, 1), strict=True)):
            self._found("tower outputs", f"output of tower {tower}", _distance(mine, its), allowed)

    def _gradients(self, model: DistributedModelParallel) -> list[FoundGradient]:
        expected = self.expected.gradients[self.mesh.replica]
        found = []
        for part in local_parts(model):
            if is_table(part.name):
                start = part.of(self.expected.start)
                after = part.tensor.float()
                # The step was rounded with the weights that it led to.
                rounding = 2 * unit_of(part.tensor) * float(after.abs().max()) / _PROBE_RATE
                found.append(FoundGradient(part.name, (start - after) / _PROBE_RATE, part.of(expected), rounding))
        for name, parameter in model.named_parameters():
            if not is_table(name) and parameter.grad is not None:
                found.append(FoundGradient(name, parameter.grad, expected[name], 0.0))
        return found

    def _compare_gradients(self, found: Sequence[FoundGradient]) -> None:
        kinds = {"dense gradients": 0.0, "tower gradients": 0.0, "table gradients": 0.0}
        for name, gradient in self.expected.gradients[self.mesh.replica].items():
            kinds[_kind(name)] = max(kinds[_kind(name)], float(gradient.abs().max()))
        for name, ours, wanted, rounding in found:
            kind = _kind(name)
            allowed = rounding + allowed_gradient(
                float(wanted.abs().max()), kinds[kind], self.expected.rounding[name], self.precision
            )
            self._found(kind, table_of(name), _distance(ours, wanted), allowed)

    def _found(self, check: str, item: str, difference: float, allowed: float, place: str = "") -> None:
        place = f"rank {self.rank}" + (f", {place}" if place else "")
        self.findings.append(Finding(check=check, item=item, difference=difference, allowed=allowed, place=place))


def _probe(config: TrainingConfig) -> TrainingConfig:
    # SGD has no moments to scale.
    config = with_values(config, "replicas", moment_scale="num_replicas")
    return with_values(config, "optimizer", sparse="sgd", sparse_lr=_PROBE_RATE, warmup_steps=0)


def _kind(name: str) -> str:
    if is_table(name):
        return "table gradients"
    return "tower gradients" if is_tower_module(name) else "dense gradients"


def _distance(ours: Tensor, wanted: Tensor) -> float:
    """Returns the largest difference; NaN where the shapes differ."""
    if ours.shape != wanted.shape:
        return float("nan")
    if ours.numel() == 0:
        return 0.0
    return float((ours.detach().float() - wanted.detach().float()).abs().max())
