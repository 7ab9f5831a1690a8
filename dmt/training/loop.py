"""Training and evaluation, the same for flat and multi-tower models; AUC and normalized entropy over all ranks."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist

from dmt.collectives import gather_objects, sum_over_ranks, wait_for_all
from dmt.errors import InputError
from dmt.formatting import shorten
from dmt.hot_rows.runtime import HotRows
from dmt.replicas.sync import ReplicaSync
from dmt.sptt.mesh import TowerMesh
from dmt.traffic import Traffic, TrafficMeter
from dmt.training.config import TrainConfig
from dmt.training.console import progress_bar
from dmt.training.data import ClickData
from dmt.training.data.batch import ClickBatch
from dmt.training.data.dataset import Split
from dmt.training.device import current_device, device_type
from dmt.training.health import SoundnessCheck
from dmt.training.records import RunRecord
from dmt.training.save_times import SaveTimes
from dmt.training.stop import StopRequest

if TYPE_CHECKING:
    from dmt.training.data.workers import BatchThread

__all__ = ["ClickMetrics", "MetricValues", "Position", "Trainer", "TrainingTime", "metric_values"]

# Ranks end an epoch within seconds of each other, or never.
_END_OF_EPOCH = timedelta(minutes=5)
# Steps left out of the speed: the first ones allocate, compile and exchange sizes that never change again.
_WARM_UP_STEPS = 5
# Evaluated batches whose predictions stay on the device.
_BATCHES_ON_DEVICE = 64
_ETA = 1e-12  # keeps logarithms finite; TorchRec's own default


@dataclass(frozen=True, kw_only=True)
class Position:
    """Position in training: enough to resume at the right sample, with any number of ranks."""

    step: int = 0
    """Training steps done."""
    epoch: int = 0
    """Completed passes over the training rows."""
    row: int = 0
    """Rows of the current pass that all ranks together have trained on."""
    bookmark: Mapping[str, Any] | None = None
    """`ClickData.bookmark` of that row."""


@dataclass(frozen=True, kw_only=True)
class TrainingTime:
    """Duration and speed of training."""

    steps: int
    seconds: float
    """Wall time in seconds, including evaluations and checkpoints before the end."""
    samples_per_second: float
    """Rows of all ranks per second, without the first few steps and without evaluation; NaN after fewer steps."""


@dataclass(frozen=True, kw_only=True)
class MetricValues:
    """Metrics of one evaluation, over the rows of all ranks."""

    auc: float
    """Area under the ROC curve; 0.5 is chance. NaN when the labels are all equal."""
    ne: float
    """Normalized entropy (He et al., 2014): cross entropy over that of always predicting the mean; below 1 is better
    than the mean. NaN when the labels are all equal."""
    loss: float
    """Mean binary cross entropy in nats."""
    num_rows: int
    """Rows evaluated."""
    label_rate: float
    """Share of positive labels."""


class ClickMetrics:
    """Accumulates one evaluation on a rank; `compute` joins the ranks.

    AUC is exact, so every prediction is gathered: 8 bytes a row of host memory on every rank.

    Args:
        group: the ranks that evaluate together.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []
        self._pending: list[Tensor] = []

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor) -> None:
        """Adds a batch: logits, labels and weights of [B]; rows of weight 0 are padding and are left out."""
        # On the device, whose mask would be a wait; many batches go to the host's memory at once.
        self._pending.append(torch.stack([logits.float(), labels.float(), weights.float()]))
        if len(self._pending) == _BATCHES_ON_DEVICE:
            self._to_host()

    def _to_host(self) -> None:
        if self._pending:
            logits, labels, weights = torch.cat(self._pending, dim=1).cpu()
            self._pending = []
            self._logits.append(logits[weights > 0])
            self._labels.append(labels[weights > 0])

    def compute(self) -> MetricValues:
        """Joins all ranks of the group; collective, and right for ranks that saw no row."""
        self._to_host()
        mine = (torch.cat(self._logits or [torch.empty(0)]), torch.cat(self._labels or [torch.empty(0)]))
        parts = gather_objects(mine, self._group)
        logits, labels = (torch.cat([part[i] for part in parts]).double() for i in (0, 1))
        return metric_values(logits, labels)


def metric_values(logits: Tensor, labels: Tensor) -> MetricValues:
    """Computes the metrics of predictions: logits and labels, float64 [n] each.

    Raises:
        InputError: there is no row, or a logit is not finite.
    """
    # torchmetrics takes longer to load than all the rest: a rank that only trains does without.
    from torchmetrics.functional.classification import binary_auroc
    from torchrec.metrics.ne import compute_cross_entropy, compute_ne

    if not len(labels):
        raise InputError("There is no row to evaluate; check data.eval_path, split_column or eval_fraction.")
    if not bool(logits.isfinite().all()):
        raise InputError(
            "The model predicts NaN: training has diverged. Lower optimizer.sparse_lr or optimizer.dense_lr, "
            "lengthen optimizer.warmup_steps, or look for huge values in the dense columns."
        )
    predictions, ones = torch.sigmoid(logits), torch.ones_like(labels)
    bits = compute_cross_entropy(labels, predictions.clone(), ones, _ETA).sum()
    positive = labels.sum()
    both_labels = 0 < int(positive) < len(labels)
    ne = compute_ne(bits, ones.sum(), positive, len(labels) - positive, _ETA)
    return MetricValues(
        auc=float(binary_auroc(predictions, labels.long())) if both_labels else math.nan,
        ne=float(ne) if both_labels else math.nan,
        loss=float(binary_cross_entropy_with_logits(logits, labels)),
        num_rows=len(labels),
        label_rate=float(positive) / len(labels),
    )


class Trainer:
    """Trains a sharded click model.

    Args:
        config: the loop's settings.
        data: source of batches.
        mesh: the groups.
        model: the sharded `ClickTask`.
        optimizer: of everything.
        record: takes the numbers.
        position: start of training; by default the first step.
        replicas: keeps the replicas equal, if there are any.
    """

    def __init__(
        self,
        *,
        config: TrainConfig,
        data: ClickData,
        mesh: TowerMesh,
        model: DistributedModelParallel,
        optimizer: Any,
        record: RunRecord,
        position: Position | None = None,
        replicas: ReplicaSync | None = None,
    ) -> None:
        self._config = config
        self._data = data
        self._mesh = mesh
        self._model = model
        self._optimizer = optimizer
        self._record = record
        self._replicas = replicas
        self.hot_rows: HotRows | None = None
        """Copies of hot rows that are told of each step; set by the caller."""
        self._device = current_device(device_type(config.device))
        self._pipeline = _pipeline(config, model, optimizer, self._device)
        self._thread: BatchThread | None = None
        self._reading_group = mesh.global_group
        if data.config.workers:
            from dmt.training.data.workers import BatchThread  # takes a while to import

            self._thread = BatchThread()
            if mesh.topology.world_size > 1:
                self._reading_group = mesh.new_group([list(range(mesh.topology.world_size))])
        self._soundness = SoundnessCheck(model, mesh.global_group)
        self._checked: int | None = None
        start = position or Position()
        self._step, self._epoch, self._row = start.step, start.epoch, start.row
        self._bookmark = start.bookmark
        self._warm_up = start.step + _WARM_UP_STEPS
        self._interval = interval = 1 if replicas is None else replicas.interval
        self._stop = StopRequest(mesh.global_group)
        self.stopped_by: int | None = None
        """The signal for which training ended before its time, after the step that a `StopRequest` named."""
        changes = replicas is not None and replicas.delays_states
        self._saves = SaveTimes(config, interval=interval, leads=mesh.rank == 0, changes_results=changes)
        self._stretch_ends = 0  # the step after which the pipeline is to be empty
        self._logged = 0, 0.0  # timed steps and seconds at the last record
        self._timed_steps = 0
        self._timed_seconds = self._last_step_ended = 0.0

    @property
    def position(self) -> Position:
        """Position in training."""
        bookmark = self._data.bookmark("train", epoch=self._epoch, row=self._row)
        return Position(step=self._step, epoch=self._epoch, row=self._row, bookmark=bookmark)

    def __enter__(self) -> Trainer:
        """Takes SIGTERM and Ctrl-C from here on; the caller leaves when all is saved."""
        self._stop.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.__exit__(*error)

    def train(self, save: Callable[[], object] | None = None) -> TrainingTime:
        """Trains for the epochs or steps of the config, evaluating and saving at the intervals it gives.

        On SIGTERM or Ctrl-C, where `stop` is entered, all ranks end it after the same step; the caller is to save, and
        `stopped_by` is set.

        Args:
            save: called on every rank where `SaveTimes` says so, between steps; not at the end.

        Raises:
            InputError: there are fewer rows than one step needs, training has diverged, or ranks read other rows.
            ReplicaMismatchError: copies of a parameter differ between ranks.
        """
        config, began, resumed = self._config, time.perf_counter(), self._step
        bar = progress_bar(initial=resumed, total=self._total_steps(), enabled=self._mesh.rank == 0)
        with bar, suppress(_StoppedError):
            while self._epoch < config.epochs and self._budget() > 0:
                batches = self._training_batches()
                while (budget := self._budget()) > 0:
                    # The pipeline runs a batch ahead; ending each stretch lets it drain before an evaluation.
                    first = next(batches, None)
                    if first is None:
                        self._epoch, self._row = self._epoch + 1, 0
                        # Of files, the rows are known after the first pass.
                        bar.total = self._total_steps()
                        break
                    # Only once it is known that training goes on: the caller evaluates and saves at the end.
                    if self._step > resumed:
                        if config.eval_every and self._step % config.eval_every == 0:
                            self._report(self.evaluate(), bar)
                        if save is not None and self._saves.is_due(self._step):
                            self._check()
                            save()
                            self._saves.restart()
                    self._last_step_ended = time.perf_counter()
                    self._stretch_ends = self._step + budget
                    for logits, labels, _ in self._progress(self._stretch(first, batches)):
                        self._end_step(logits, labels, bar)
        self._check()
        self.sync_replicas()
        if self._step == 0:
            raise InputError(
                f"No training step was possible: the data has fewer rows than one step of "
                f"{self._mesh.topology.world_size} ranks x train.batch_size={config.batch_size}. Lower batch_size."
            )
        rows = config.batch_size * self._mesh.topology.world_size
        speed = rows * self._timed_steps / self._timed_seconds if self._timed_steps else math.nan
        return TrainingTime(steps=self._step, seconds=time.perf_counter() - began, samples_per_second=speed)

    def sync_replicas(self) -> None:
        """Averages the replicas, if there are any that this step has not made equal; collective.

        The mean of equal values is not always exact: another one would let a save change what comes after it.
        """
        replicas = self._replicas
        if replicas is None:
            return
        if replicas.delays_states or self._step % self._interval:
            replicas.sync()

    def evaluate(self) -> MetricValues:
        """Evaluates on the evaluation rows of all ranks; collective."""
        metrics = ClickMetrics(self._mesh.global_group)
        self._model.eval()
        with torch.no_grad():
            for output in self._progress(self._batches("eval", self._config.eval_batch_size)):
                metrics.update(*output)
        self._model.train()
        self._checked = None  # it takes its time, in which a number may change
        return metrics.compute()

    def detach(self) -> None:
        """Detaches the pipeline from the model, which can then be run on its own but not be trained further here."""
        if isinstance(self._pipeline, TrainPipelineSparseDist):
            self._pipeline.detach()

    def measure_traffic(self) -> Traffic:
        """Runs one more forward and backward pass and counts its bytes between hosts and inside them. Collective.

        The tables update in their backward pass, and the pipeline is detached: call it when all is trained and saved.
        """
        # Of one batch, every rank reads what it needs by itself; but not all shards of a source are its own.
        is_shared = self._data.config.kind == "source"
        batch = next(self._batches("train", self._config.batch_size, is_shared=is_shared)).to(self._device)
        self.detach()
        meter = TrafficMeter(host_of=self._mesh.topology.host)
        self._optimizer.zero_grad()
        with meter:
            loss, _ = self._model(batch)
            loss.backward()
        return meter.total(self._mesh.global_group)

    def _batches(
        self,
        split: Split,
        batch_size: int,
        epoch: int = 0,
        start_row: int = 0,
        bookmark: Any = None,
        *,
        is_shared: bool = True,
    ) -> Iterator[ClickBatch]:
        batches = self._data.batches(
            split,
            rank=self._mesh.rank,
            world_size=self._mesh.topology.world_size,
            batch_size=batch_size,
            epoch=epoch,
            start_row=start_row,
            bookmark=bookmark,
            group=self._reading_group if is_shared else None,
        )
        if self._device.type == "cuda":
            # From page-locked memory, the pipelines' copies to a GPU run beside the step before.
            batches = (batch.pin_memory() for batch in batches)
        return batches if self._thread is None else self._thread.ahead(batches)

    def _training_batches(self) -> Iterator[ClickBatch]:
        """Yields the rest of the epoch; at its end, waits for the other ranks to come to theirs at the same batch.

        Pipelines ask ahead for batches, at the same points on all ranks: one that got another batch waits for this one.
        """
        number, row, bookmark = 0, self._row, self._bookmark
        self._bookmark = None
        for batch in self._batches("train", self._config.batch_size, self._epoch, row, bookmark):
            yield batch
            number += 1
        try:
            wait_for_all(self._mesh.global_group, _END_OF_EPOCH)
        except RuntimeError as error:
            if "timed out" not in str(error).lower():  # another rank has died
                raise
            files = [name for name, *_ in self._data.files("train")]
            raise InputError(
                f"Rank {self._mesh.rank} on host {socket.gethostname()} has come to the end of epoch {self._epoch}, "
                f"{number} batches after row {row}, but other ranks have rows left. Give every host the same "
                f"files, which must not change in training: {shorten(files, ', ')}."
            ) from error

    def _total_steps(self) -> int | None:
        """Steps of the whole training, as far as the number of rows is known."""
        config, rows = self._config, self._data.num_rows("train")
        limits = [] if config.max_steps is None else [config.max_steps]
        if rows is not None:
            limits.append(config.epochs * (rows // (config.batch_size * self._mesh.topology.world_size)))
        return min(limits, default=None)

    def _report(self, values: MetricValues, bar: Any) -> None:
        """Records and prints an evaluation between steps."""
        self._record.scalars(self._step, _named("eval", values))
        bar.clear()
        self._record.say([f"step {self._step:,}: AUC {values.auc:.4f}, NE {values.ne:.4f}, loss {values.loss:.4f}"])

    def _budget(self) -> int:
        """Steps until the next evaluation, checkpoint or the end."""
        config = self._config
        left = [2**62 if config.max_steps is None else config.max_steps - self._step]
        left += [config.eval_every - self._step % config.eval_every] if config.eval_every else []
        return min(*left, self._saves.steps_left(self._step))

    def _stretch(self, first: ClickBatch, batches: Iterator[ClickBatch]) -> Iterator[ClickBatch]:
        """Yields the batches up to the end of the stretch, which may come nearer while they are trained on."""
        number, batch = self._step, first
        while True:
            yield batch
            number += 1
            if number >= self._stretch_ends or (after := next(batches, None)) is None:
                return
            batch = after

    def _end_step(self, logits: Tensor, labels: Tensor, bar: Any) -> None:
        """Averages replicas, chooses hot rows and records the loss where it is time to, and counts the step."""
        if self._replicas is not None:
            self._replicas.step()
        if self.hot_rows is not None:
            self.hot_rows.step()
        self._step += 1
        self._row += self._config.batch_size * self._mesh.topology.world_size
        bar.update(1)
        now = time.perf_counter()
        if self._step > self._warm_up:
            self._timed_steps += 1
            self._timed_seconds += now - self._last_step_ended
        self._last_step_ended = now
        self._soundness.note(self._step, logits)
        if self._step % self._config.log_every == 0:
            self._check()
            loss = binary_cross_entropy_with_logits(logits, labels)
            told = torch.stack([loss, loss.new_tensor(float(self._saves.asks()))])
            total, asked = sum_over_ranks(told, self._mesh.global_group).tolist()
            if asked:
                self._saves.agree(self._step)
                self._stretch_ends = min(self._stretch_ends, self._step + self._saves.steps_left(self._step))
            mean = total / self._mesh.topology.world_size
            bar.set_postfix(loss=f"{mean:.4f}", refresh=False)
            self._record.scalars(self._step, {"train/loss": mean})
            self._log_rate()
            self._last_step_ended = time.perf_counter()
        if self._stop.is_due(self._step, self._interval):
            self.stopped_by = self._stop.signal
            raise _StoppedError

    def _log_rate(self) -> None:
        """Draws the rows per second of all ranks since the last time, without what came between steps."""
        steps, seconds = self._timed_steps - self._logged[0], self._timed_seconds - self._logged[1]
        if steps:
            rows = steps * self._config.batch_size * self._mesh.topology.world_size
            self._record.draw(self._step, {"train/samples_per_second": rows / seconds})
        self._logged = self._timed_steps, self._timed_seconds

    def _check(self) -> None:
        if self._checked != self._step:  # it may be due for several reasons
            self._soundness.check(self._step)
            self._checked = self._step

    def _progress(self, batches: Iterator[ClickBatch]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        if not self._config.prefetch_ids:
            # This pipeline stays at the end of the batches that it was given before.
            self._pipeline.reset()
        while True:
            try:
                yield self._pipeline.progress(batches)
            except StopIteration:
                return


class _StoppedError(Exception):
    """Ends the loop from inside of it."""


def _pipeline(
    config: TrainConfig, model: DistributedModelParallel, optimizer: Any, device: torch.device
) -> TrainPipelineSparseDist[Any, Any] | TrainPipelineBase[Any, Any]:
    if config.prefetch_ids:
        return TrainPipelineSparseDist(model, optimizer, device, execute_all_batches=True)
    return TrainPipelineBase(model, optimizer, device)


def _named(prefix: str, values: MetricValues) -> dict[str, float]:
    return {f"{prefix}/{name}": float(value) for name, value in asdict(values).items()}
