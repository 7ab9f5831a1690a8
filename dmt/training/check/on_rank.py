"""`check_on_rank`: the comparisons of one rank. Models are made one after the other, each from the same start."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

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
    format_error,
    format_use,
    rounded,
    scale_error,
    step_error,
    unit_of,
)
from dmt.training.check.shrink import CheckedRun, with_values
from dmt.training.checkpoints import Checkpointer, load_plain, restore
from dmt.training.config import TrainingConfig

__all__ = ["Finding", "RankReport", "Trained", "check_on_rank", "table_of"]

# Tables are updated in the backward pass: their gradient is read off one step of SGD. At this rate the step is as large
# as the weights or larger, so that its rounding tells nothing else.
_PROBE_RATE = 2.0**10
# Rounding by a format over what was found. Forward it is about 1, over 100 where only sums were rounded. Backward it
# grows with the square root of the samples that are summed up, to about 200 for a thousand per rank; an unused format
# leaves equal bits there.
_FORWARD_USED, _BACKWARD_USED = 10.0, 1000.0


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
    """By step; empty where a pipeline trained."""
    logits: list[Tensor]
    """By step."""
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
    say("train pipeline")
    checks.pipeline(trained)
    say("id routes")
    checks.routes(trained)
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
        fp32 = with_values(run.config, "sharding", forward_precision="fp32", backward_precision="fp32")
        self._exact = with_values(fp32, "replicas", precision="fp32")
        self._hot_rows: HotRows | None = None
        self.expected = self._meet_expected(table_layout(shard_model(run.job, mesh)))
        self._crosses = run.config.dataflow == "flat" or run.topology.num_towers > 1
        why = "the formats change none of these numbers" if self._crosses else "a single tower sends nothing to others"
        if self.precision.forward == self.precision.backward == "fp32":
            why = "fp32 rounds nothing"
        # A check that finds something to compare is not skipped.
        self.skipped = {"formats": why}

    # The checks, in order.

    def forward_and_gradients(self) -> None:
        """Embeddings, outputs and logits of two batches, gradients of one; no weight changes before they are taken."""
        model, _ = self._start(_probe(self.run.config))
        watch = Watch(model)
        for index, name in ((SINGLE_IDS, "embeddings"), (UNEVEN_BAGS, "bags")):
            loss = watch.run(draw_batch(self.run, self.rank, index))
            self._compare_forward(watch.seen, index, name)
        loss.backward()
        found = self._gradients(model)
        self._compare_gradients(found)
        self._compare_backward_format(found)

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

    def pipeline(self, plain: Trained) -> None:
        """TorchRec's train pipeline, which exchanges ids a batch ahead, against the plain loop."""
        self._compare_bits("pipeline", plain, self._train(self.run.config, in_pipeline=True))

    def routes(self, plain: Trained) -> None:
        """The other id route."""
        if self.run.config.dataflow == "flat":
            self.skipped["id routes"] = "the flat dataflow has one route"
            return
        other = "peer" if self.run.config.sharding.id_route == "global" else "global"
        try:
            trained = self._train(with_values(self.run.config, "sharding", id_route=other))
        except InputError as error:
            # Every rank raises: what a route cannot carry is agreed on before anything is sent.
            self.skipped["id routes"] = f"id_route={other!r} cannot: {str(error).partition(', but')[0]}"
            return
        self._compare_bits("id routes", plain, trained)

    def checkpoint(self, trained: Trained) -> None:
        """The trained weights, saved, read into the plain module, and loaded under another placement."""
        folder = Path(self.run.folder) / "checkpoint"
        # Weights only: the plain module and the other placement take no step with them.
        if not Checkpointer(folder, self.mesh).save(trained.model, None, step=len(trained.logits), progress={}):
            raise InputError(f"No checkpoint could be saved to {folder}. The warning before says why.")
        task = plain_task(self.run)
        load_plain(task, folder)
        saved = {name: value.detach() for name, value in task.state_dict().items()}
        for part in trained.parts:
            self._found("checkpoint", table_of(part.name), _distance(part.tensor, part.of(saved)), 0.0)
        model = shard_model(self.run.other, self.mesh)
        restore(folder, model, None, mesh=self.mesh)
        for part in local_parts(model):
            self._found("reload", table_of(part.name), _distance(part.tensor, part.of(saved)), 0.0)
        replica_sync(self.run.other.config.replicas, model, self.mesh)
        ours, plain = Watch(model), Watch(task)
        seen = [watch.run_and_see(draw_batch(self.run, self.rank, SINGLE_IDS)) for watch in (ours, plain)]
        if self.run.config.model.has_towers:
            self._compare_outputs("reload", seen[0].outputs, seen[1].outputs)
        else:
            self._compare_tables("reload", seen[0].embeddings, seen[1].embeddings, is_exact=True)

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

    def _train(self, config: TrainingConfig, *, in_pipeline: bool = False) -> Trained:
        model, replicas = self._start(config)
        # Only in training: what is watched elsewhere is the whole batch.
        in_micro_batches(config.train, model)
        optimizer = build_optimizer(config.optimizer, model)
        steps, losses, logits = self.run.limits.steps, [], []
        batches = (draw_batch(self.run, self.rank, step) for step in range(steps))
        pipeline: Any = None
        if in_pipeline:
            pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"), execute_all_batches=True)
        for step in range(steps):
            if step == steps // 2:
                self._copy_rows(3)
            if in_pipeline:
                logits.append(pipeline.progress(batches)[0])
            else:
                optimizer.zero_grad()
                loss, (of_batch, _, _) = model(next(batches))
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
                logits.append(of_batch)
            if replicas is not None:
                replicas.step()
        if replicas is not None:
            replicas.sync()
        parts = copy_parts(model)
        if not in_pipeline:
            with torch.no_grad():
                losses.append(float(model(draw_batch(self.run, self.rank, steps))[0]))
        return Trained(model=model, parts=parts, losses=losses, logits=logits, replicas=replicas)

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
            self._compare_outputs("tower outputs", seen.outputs, wanted.outputs)
            self._compare_forward_format(seen.outputs, wanted.outputs)
        else:
            self._compare_forward_format(*(torch.cat([*some.values()], 1) for some in (seen.embeddings, embeddings)))
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

    def _compare_outputs(self, check: str, ours: Tensor, wanted: Tensor) -> None:
        """Compares outputs of the sparse part, tower by tower."""
        towers = sparse_part(ClickTask(build_model(self.run.job, device="meta"))).towers
        widths = [tower.interaction.out_features for tower in towers]
        allowed = allowed_outputs(float(wanted.abs().max()), self.precision.forward, is_exact=False)
        for tower, (mine, its) in enumerate(zip(ours.split(widths, 1), wanted.split(widths, 1), strict=True)):
            self._found(check, f"output of tower {tower}", _distance(mine, its), allowed)

    def _compare_forward_format(self, ours: Tensor, wanted: Tensor) -> None:
        """Checks that outputs that crossed between ranks were rounded at all."""
        name = self.precision.forward
        if self._crosses and name != "fp32":
            self._compare_use(f"{name} forward", (rounded(wanted, name) - wanted).norm(), ours, wanted, _FORWARD_USED)

    def _compare_backward_format(self, found: Sequence[FoundGradient]) -> None:
        """Checks that gradients were rounded, against a run with the same forward pass and FP32 gradients."""
        name = self.precision.backward
        if not self._crosses or name == "fp32":
            return
        model, _ = self._start(with_values(_probe(self.run.config), "sharding", backward_precision="fp32"))
        model(draw_batch(self.run, self.rank, UNEVEN_BAGS))[0].backward()
        ours, plain = (
            [g.ours.detach().reshape(-1) for g in some if _kind(g.name) != "dense gradients"]
            for some in (found, self._gradients(model))
        )
        if ours:
            exact = torch.cat(plain)
            rounding = format_error(name) * exact.norm()
            self._compare_use(f"{name} backward", rounding, torch.cat(ours), exact, _BACKWARD_USED)

    def _compare_use(self, name: str, rounding: Tensor, ours: Tensor, exact: Tensor, most: float) -> None:
        ratio = format_use(rounding, ours, exact)
        if ratio is not None:
            self._found("formats", f"the exchange did not use its format ({name})", ratio, most)

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
        for kind in kinds:
            error = scale_error([gradient for gradient in found if _kind(gradient.name) == kind], self.precision)
            if error is not None:
                self._found("gradient scales", kind, *error)

    def _compare_bits(self, check: str, plain: Trained, other: Trained) -> None:
        for step, (ours, wanted) in enumerate(zip(other.logits, plain.logits, strict=True)):
            self._found(check, "the logits", _distance(ours, wanted), 0.0, f"step {step}")
        for part, same in zip(other.parts, plain.parts, strict=True):
            assert part.name == same.name, f"{part.name} is in the place of {same.name}"
            self._found(check, table_of(part.name), _distance(part.tensor, same.tensor), 0.0, "after training")

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
