"""Runs one training job on this rank, from its config to ``result.json``."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist

from dmt.collectives import gather_objects, run_on_all_or_raise
from dmt.errors import InputError
from dmt.hot_rows.runtime import HotRows
from dmt.replicas.sync import ReplicaSync
from dmt.sptt.mesh import TowerMesh
from dmt.training.agreement import SIGNALS, Agreed, Agreement, Signals
from dmt.training.build import (
    ScheduledOptimizer,
    build_optimizer,
    hot_rows,
    in_micro_batches,
    replica_sync,
    shard_model,
    sharding_result,
)
from dmt.training.checkpoints.store import Checkpointer
from dmt.training.config import TrainConfig, TrainingConfig
from dmt.training.console import progress_bar
from dmt.training.data.batch import ClickBatch
from dmt.training.data.clicks import Split
from dmt.training.device import current_device, on_all_ranks, on_first_rank, peak_memory, process_group
from dmt.training.factory import probability_warning
from dmt.training.job import Job, open_job
from dmt.training.metrics import ClickMetrics, MetricValues, StepTimer, measure_lookups, measure_traffic
from dmt.training.preflight import preflight
from dmt.training.records import RunRecord, quality_warnings, settings_lines
from dmt.training.resume import (
    Position,
    checkpoint_folder,
    find_start,
    folder_lock,
    last_step,
    progress_of,
    restore_hot_rows,
    restore_run,
    step_rows,
)
from dmt.training.step_prediction import predicted_result
from dmt.training.trained import describe_run

__all__ = ["Run", "batches_of", "evaluate", "make_pipeline", "save", "train", "train_job", "train_steps"]

logger = logging.getLogger(__name__)

_MEET_EVERY = 8  # batches of an evaluation, which a signal must not wait for
_TIMED_STEPS = 4  # steps after training whose lookups are timed; the first one warms up


@dataclass(frozen=True, kw_only=True)
class Run:
    """The state of a run on one rank."""

    job: Job
    mesh: TowerMesh
    model: DistributedModelParallel
    """The sharded `ClickTask`."""
    optimizer: ScheduledOptimizer
    """Optimizer of all parameters: tables, tower modules and the other dense parts."""
    replicas: ReplicaSync | None
    hot_rows: HotRows | None
    record: RunRecord
    saver: Checkpointer
    pipeline: Any
    """TorchRec's pipeline of the model and the optimizer."""


def train(load: Callable[[], TrainingConfig]) -> dict[str, Any]:
    """Trains the config that ``load`` returns, evaluates, saves and measures, on every rank that torchrun started.

    Returns:
        The result, also written to ``result.json``: metrics, complexity, speed and bytes per sample. For a run that
        SIGTERM or Ctrl-C stopped: ``stopped_at``, its last step, which is saved unless a warning says why not;
        ``stopped_by`` and ``signal``, the name and number of the signal.

    Raises:
        InputError: anything the user can fix; raised before training wherever it can be known by then.
        ReplicaMismatchError: copies of a parameter differ between ranks.
    """
    with process_group(load) as (config, mesh), folder_lock(config, mesh):
        return train_job(on_all_ranks(lambda: open_job(config), mesh), mesh)


def train_job(job: Job, mesh: TowerMesh) -> dict[str, Any]:
    """Trains a job on a mesh of its topology; returns and raises what `train` does. Collective."""
    # Make every check, and find the checkpoint to start from.
    config = job.config
    plain, counts = preflight(job, mesh)
    train, folder = config.train, checkpoint_folder(config)
    # First, as it finds out whether all hosts share the folder.
    saver = Checkpointer(folder, mesh, keep=train.keep_checkpoints, asynchronous=train.async_save)
    start = find_start(job, mesh)
    record = on_all_ranks(partial(RunRecord, config, enabled=mesh.rank == 0, resumed_step=start.position.step), mesh)
    record.say([*settings_lines(config), *start.lines])
    on_all_ranks(lambda: record.sharding(job.sharding), mesh)

    # Build and restore the model, optimizer and replicas, then hot rows, which copy rows of the restored tables.
    model = shard_model(job, mesh, plain)
    placed = sharding_result(job, model.plan)
    in_micro_batches(config.train, model)
    optimizer = build_optimizer(config.optimizer, model)
    replicas = replica_sync(config.replicas, model, mesh)
    restore_run(start, job, mesh, model=model, optimizer=optimizer, replicas=replicas)
    hot = hot_rows(job, model, mesh)
    restore_hot_rows(start, hot, mesh)
    run = Run(
        job=job,
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        replicas=replicas,
        hot_rows=hot,
        record=record,
        saver=saver,
        pipeline=make_pipeline(job, model, optimizer),
    )

    # Train, and save the last step.
    began = time.perf_counter()
    with closing(saver), Signals() as signals:
        at, timer = train_steps(run, start.position, signals)
        seconds = time.perf_counter() - began
        if at.step == 0:
            raise InputError(
                f"No training step was possible: data.source yields fewer rows to a rank than its share of a step's "
                f"{step_rows(job, at)}. Lower train.batch_size, or let every rank's shard yield more rows."
            )
        # Without a new step, an earlier attempt finished the run and saved its last checkpoint.
        is_saved = at.step == start.position.step or (save(run, at) and saver.wait())
    if signals.stops:
        return {"stopped_at": at.step, "stopped_by": SIGNALS[signals.signal], "signal": signals.signal}

    # Evaluate, then measure: the measured passes update the tables.
    metrics = evaluate(run)
    record.evaluation(at.step, metrics)
    result = {"sharding": placed, **asdict(counts), **result_of(run, at, metrics, timer), "seconds": seconds}
    run_on_all_or_raise(lambda: record.close(result), mesh.global_group)
    for text in quality_warnings(metrics.auc, metrics.ne) if mesh.rank == 0 else ():
        logger.warning(text)
    if not is_saved:
        raise InputError(
            f"The model was trained, but its last checkpoint could not be saved to {folder} (see the warning above). "
            "Remove the cause, such as a full disk, and run this command again: it resumes from the one before, if any."
        )
    return result


def train_steps(run: Run, at: Position, signals: Signals) -> tuple[Position, StepTimer]:
    """Trains from a position to the end, or to the step at which the ranks agree to stop for a signal; collective.

    Evaluates and saves on the way, but leaves the last of both to the caller. Saving makes the replicas equal.

    Returns:
        The position reached, and the timer of the steps.

    Raises:
        InputError: training has diverged.
        ReplicaMismatchError: copies of a parameter differ between ranks.
    """
    config, mesh = run.job.config.train, run.mesh
    at = replace(at, lanes=at.lanes or mesh.topology.world_size)
    rows_per_step = step_rows(run.job, at)
    last = last_step(run.job, at)
    timer = StepTimer()
    agreement = Agreement(config, run.model, mesh, timer=timer, replicas=run.replicas, signals=signals)
    # Called after each step: they average the replicas, or choose hot rows again, when that is due.
    followers = [part for part in (run.replicas, run.hot_rows) if part is not None]
    warn_step = min(at.step + config.log_every, math.inf if last is None else last)
    with progress_bar(initial=at.step, total=last, enabled=mesh.rank == 0) as bar:
        while at.epoch < config.epochs:
            epoch_batches = batches_of(run.job, mesh, "train", at)
            # The pipeline reads ahead, so it gets only the batches before the next evaluation and is empty by then.
            while not signals.stops and (batches := up_to(_steps_until(config, at.step), epoch_batches)):
                if at.step and config.eval_every and at.step % config.eval_every == 0:
                    # This also makes up for an evaluation before which the run was killed.
                    bar.clear()
                    values = evaluate(run, partial(agreement.meet, at.step, torch.zeros(())))
                    if signals.stops:
                        break
                    run.record.evaluation(at.step, values)
                timer.restart()
                for logits, labels, _ in run_pipeline(run.pipeline, batches):
                    for part in followers:
                        part.step()
                    at = replace(at, step=at.step + 1, rows=at.rows + rows_per_step)
                    bar.update(1)
                    # A meeting waits for the GPU, which may be some steps behind; that wait is time of these steps.
                    is_due = agreement.is_due(at.step)
                    timer.step(awaits_gpu=is_due)
                    agreement.note(at.step, logits)
                    _warn_of_probabilities(run, logits, is_due=at.step == warn_step)
                    if not is_due:
                        continue
                    agreed = agreement.meet(at.step, binary_cross_entropy_with_logits(logits, labels))
                    if at.step % config.log_every == 0:
                        bar.set_postfix(loss=f"{agreed.loss:.4f}", refresh=False)
                        run.record.scalars(at.step, {"train/loss": agreed.loss})
                    if agreed.stops:
                        break
                    if agreed.saves and at.step != last:
                        save(run, at)
                    timer.restart()
            if signals.stops or _steps_until(config, at.step) <= 0:
                break
            at = replace(at, epoch=at.epoch + 1, rows=0)
    agreement.check(at.step)
    return at, timer


def batches_of(job: Job, mesh: TowerMesh, split: Split, at: Position | None = None) -> Iterator[ClickBatch]:
    """Yields this rank's batches from ``at`` (None: the start) to its epoch's end; collective with a user's source."""
    at = at or Position()
    batches = job.data.batches(
        split,
        rank=mesh.rank,
        world_size=mesh.topology.world_size,
        batch_size=step_rows(job, at) // mesh.topology.world_size,
        epoch=at.epoch,
        rows=at.rows,
        lanes=at.lanes,
        group=mesh.global_group,
    )
    batches = (batch.split_columns(job.column_splits) for batch in batches)
    # From page-locked memory, the pipeline can copy a batch to the GPU during the previous step.
    return (batch.pin_memory() for batch in batches) if job.device_type == "cuda" else batches


def _warn_of_probabilities(run: Run, logits: Tensor, *, is_due: bool) -> None:
    """Warns on rank 0, if it is due, that a factory's model seems to return probabilities instead of logits."""
    factory = run.job.config.model.factory
    if not is_due or factory is None or run.mesh.rank != 0:
        return
    if text := probability_warning(factory, float(logits.min()), float(logits.max())):
        logger.warning(text)


def up_to(number: int, batches: Iterator[ClickBatch]) -> Iterator[ClickBatch] | None:
    """Returns an iterator over the next ``number`` batches, of which it reads the first; None if there is none."""
    first = next(batches, None) if number > 0 else None
    return None if first is None else chain([first], islice(batches, number - 1))


def _steps_until(config: TrainConfig, step: int) -> int:
    """Returns the number of steps from ``step`` to the next evaluation or ``max_steps``; 0 or less at the end."""
    limits = [2**62]
    if config.max_steps is not None:
        limits.append(config.max_steps - step)
    if config.eval_every is not None:
        limits.append(config.eval_every - step % config.eval_every)
    return min(limits)


def run_pipeline(pipeline: Any, batches: Iterator[ClickBatch]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields (logits, labels, weights), float32 [B] each, of every batch, after its step."""
    if not isinstance(pipeline, TrainPipelineSparseDist):
        # Without this, `TrainPipelineBase` remembers that the previous iterator has ended.
        pipeline.reset()
    while True:
        try:
            yield pipeline.progress(batches)
        except StopIteration:
            return


def evaluate(run: Run, meet: Callable[[], Agreed] | None = None) -> MetricValues:
    """Returns metrics on the evaluation rows (until ``meet``, called every 8 batches, says to stop); collective."""
    metrics = ClickMetrics(run.mesh.global_group)
    run.model.eval()
    with torch.no_grad():
        for number, output in enumerate(run_pipeline(run.pipeline, batches_of(run.job, run.mesh, "eval")), start=1):
            metrics.update(*output)
            if meet is not None and number % _MEET_EVERY == 0 and meet().stops:
                break
    run.model.train()
    return metrics.compute()


def save(run: Run, at: Position) -> bool:
    """Saves the state at a position, and returns what `Checkpointer.save` does; collective.

    Raises:
        InputError: the state has NaN or infinity.
        ReplicaMismatchError: replicas differ after they were averaged.
    """
    _settle_replicas(run, at.step)
    if run.replicas is not None:
        run.replicas.check()
    progress = progress_of(run.job, at, run.mesh)
    describe = partial(describe_run, run.job, None if run.hot_rows is None else run.hot_rows.state())
    return run.saver.save(run.model, run.optimizer, step=at.step, progress=progress, describe=describe)


def _settle_replicas(run: Run, step: int) -> None:
    """Averages the replicas, if there are any and ``step`` has not left them equal; collective.

    Equal replicas are not averaged again: that can round them, so a save would change the training after it.
    """
    if run.replicas is not None and (run.replicas.delays_states or step % run.replicas.interval):
        run.replicas.sync()


def make_pipeline(job: Job, model: DistributedModelParallel, optimizer: Any) -> Any:
    """Returns TorchRec's pipeline of a model; with ``train.prefetch_ids``, it exchanges the next batch's ids early."""
    device = current_device(job.device_type)
    if job.config.train.prefetch_ids:
        return TrainPipelineSparseDist(model, optimizer, device, execute_all_batches=True)
    return TrainPipelineBase(model, optimizer, device)


def result_of(run: Run, at: Position, metrics: MetricValues, timer: StepTimer) -> dict[str, Any]:
    """Returns the entries of a run's result about training, evaluation and options; collective.

    Measuring lookups and the bytes of a step updates the tables.
    """
    job, mesh, replicas, hot = run.job, run.mesh, run.replicas, run.hot_rows
    rows, options = step_rows(job, at), dict[str, Any]()
    if hot is not None:
        number = sum(map(len, hot.rows.values()))
        options["hot_rows"] = {"rows": number, "bytes_per_rank": hot.num_bytes, "left_out": hot.left_out}
    if isinstance(run.pipeline, TrainPipelineSparseDist):
        run.pipeline.detach()
    peaks = gather_objects(peak_memory(job.device_type), mesh.global_group)
    device = current_device(job.device_type)
    start = Position(lanes=at.lanes)  # with batches as large as those of the last steps
    batches = [batch.to(device) for batch in islice(batches_of(job, mesh, "train", start), _TIMED_STEPS)]
    lookups = measure_lookups(run.model, run.optimizer, batches, mesh)
    slowest, mean = max(lookups), sum(lookups) / len(lookups)
    run.optimizer.zero_grad()
    traffic = measure_traffic(lambda: run.model(batches[0])[0].backward(), mesh)
    if replicas is not None:
        sync = measure_traffic(replicas.sync, mesh).per_sample(rows * replicas.interval)
        options["replicas"] = {"bytes_per_sample": sync["across"] + sync["inside"]}
    speed = rows * timer.steps / timer.seconds if timer.steps else math.nan
    predicted = on_first_rank(partial(predicted_result, job), mesh)
    if predicted is not None:
        options["predicted"] = predicted
    return {
        "arch": job.config.model.name,
        "dataflow": job.config.dataflow,
        "world_size": mesh.topology.world_size,
        "device": job.device_type,
        **{f"eval_{name}": value for name, value in asdict(metrics).items()},
        "steps": at.step,
        "samples_per_second": speed,
        "samples_per_second_per_rank": speed / mesh.topology.world_size,
        "lookups": {"by_rank": lookups, "largest": slowest, "imbalance": slowest / mean if mean else math.nan},
        "peak_memory": {"largest": max(peaks), "mean": round(sum(peaks) / len(peaks))},
        "bytes_per_sample": traffic.per_sample(rows),
        **options,
    }
