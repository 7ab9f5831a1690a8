"""One training run on this rank, top to bottom: from a config to ``result.json``."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel

from dmt.collectives import gather_objects, run_on_all_or_raise
from dmt.errors import InputError
from dmt.files import check_writable
from dmt.formatting import printable
from dmt.models import Complexity
from dmt.replicas.sync import ReplicaSync
from dmt.sharding.optimizers import moment_scale_of
from dmt.sptt.mesh import TowerMesh
from dmt.traffic import Traffic
from dmt.training.build import (
    build_model,
    build_optimizer,
    check_rank_memory,
    count_model,
    expected_traffic,
    fused_params,
    in_micro_batches,
    replica_sync,
    shard_model,
)
from dmt.training.checkpoints import Checkpointer, restore, whole_checkpoint
from dmt.training.config import TrainingConfig, to_toml
from dmt.training.console import sharding_sentence
from dmt.training.data import ValidationReport
from dmt.training.data.batch import ClickBatch
from dmt.training.health import check_same_input
from dmt.training.job import Job, make_job, open_data
from dmt.training.loop import MetricValues, Position, Trainer, TrainingTime
from dmt.training.partition import write_affinity
from dmt.training.records import RunRecord, result_warnings, versions
from dmt.training.resume import (
    Start,
    TrainingFiles,
    attempt_names,
    begin_anew,
    checkpoint_folder,
    folder_lock,
    restart_safe_store,
    start_with,
    starting_point,
)

__all__ = ["check_output_dir", "check_rows", "resolve", "rows_at_most", "train", "train_job"]

logger = logging.getLogger(__name__)
# Time that a rank waits for the others: rank 0 reads the data ahead.
_TIMEOUT = timedelta(minutes=30)


def train(config: TrainingConfig) -> dict[str, Any]:
    """Trains, evaluates, saves and measures; to be called on every rank that torchrun started.

    Returns:
        The result, also written to ``result.json``: metrics, complexity, speed and bytes per sample.

    Raises:
        InputError: anything the user can fix; raised before training wherever it can be known by then.
    """
    # Resolve. Rank 0 alone reads ahead; the others wait at the rendezvous, and torchrun stops them if it fails.
    rank, world_size = _place()
    job = None
    if rank == 0:
        job = resolve(config, world_size)
        check_rank_memory(job)
        check_rows(config, world_size, rows_at_most(config, job.data.validate()))
        check_output_dir(Path(config.train.output_dir))
        print(f"{to_toml(config)}\n# versions: {versions()}", flush=True)

    # Process group. A second job in the folder would delete what this one is writing.
    held = folder_lock(Path(config.train.output_dir)) if rank == 0 else nullcontext()
    with held, _process_group() as group:
        job = job or resolve(config, world_size)
        check_same_input(job, group)
        return train_job(job, TowerMesh(job.topology))


def train_job(job: Job, mesh: TowerMesh) -> dict[str, Any]:
    """Trains a resolved job on a mesh of its topology; collective. See `train`."""
    config = job.config
    complexity, sharding = count_model(job), _sharding_result(job)

    # The start, and the records. Files of data as they are now: they may grow while this run reads them.
    files = job.data.files("train")
    start = _find_start(job, files, mesh)
    record = _begin_record(job, start, mesh)

    # Model, optimizer, replicas.
    model = shard_model(job, mesh)
    micro_batches = in_micro_batches(config.train, model)
    optimizer = build_optimizer(config.optimizer, model)
    replicas = replica_sync(config.replicas, model, mesh)

    # Restore.
    if start is not None:
        own = {"rank": mesh.rank, "world_size": mesh.topology.world_size, "batch_size": config.train.batch_size}
        _settle_gradient_buckets(model, optimizer, job.data.batches("train", **own))
        restore(start.folder, model, optimizer, mesh=mesh, is_verified=True)
        if replicas is not None:
            replicas.restart(steps=start.position.step)

    # The loop, which saves on the way and at its end.
    trainer = Trainer(
        config=config.train,
        data=job.data,
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        record=record,
        position=None if start is None else start.position,
        replicas=replicas,
    )
    saver = _make_saver(job, mesh)

    def save() -> bool:
        if replicas is not None:
            replicas.sync()
            replicas.check()
        at = trainer.position
        progress = {"epoch": at.epoch, "row": at.row, "files": files}
        return saver.save(model, optimizer, step=at.step, progress=progress)

    try:
        time = trainer.train(save)
        is_saved = save() and saver.wait()
    finally:
        saver.close()

    # Evaluate and measure. Tables change in the measured pass: it comes last.
    metrics = trainer.evaluate()
    if config.train.affinity_rows:
        trainer.detach()
        if micro_batches is not None:
            micro_batches.detach()  # collecting needs all embeddings of a batch at once
        path = record.folder / "affinity.npz"
        write_affinity(model, job.data, mesh, config=config.train, steps=time.steps, path=path)
    traffic = trainer.measure_traffic()

    # Report.
    result = {
        **_result(job, metrics=metrics, complexity=complexity, time=time, traffic=traffic),
        **_replica_result(config, replicas, mesh),
        **sharding,
    }
    record.scalars(time.steps, {f"eval/{name}": float(value) for name, value in asdict(metrics).items()})
    run_on_all_or_raise(lambda: record.close(result), mesh.global_group)
    for text in result_warnings(result) if mesh.rank == 0 else ():
        logger.warning(text)
    if not is_saved:
        raise InputError(
            f"The model was trained, but its last checkpoint could not be saved to {checkpoint_folder(config)} (see "
            "the warning above). Make room and run again: it continues from the checkpoint before."
        )
    return result


def resolve(config: TrainingConfig, world_size: int) -> Job:
    """Opens the data, resolves the plans, and finds what is wrong with a run before any rank trains.

    Args:
        config: the run.
        world_size: ranks of the job.

    Raises:
        InputError: anything the user can fix: sizes, plans, data columns, layer sizes, optimizer.
    """
    config.topology.build().check_world_size(world_size)
    if config.train.affinity_rows and config.model.has_towers:
        raise InputError(
            f"train.affinity_rows={config.train.affinity_rows} needs a flat model, but model.arch is "
            f"{config.model.arch!r}: the embeddings of a tower's features stay on its ranks, so no rank ever sees "
            "those of all features of a sample. Train 'dlrm' or 'dcn' to learn towers, or leave it 0 and run "
            "dmt partition --checkpoint."
        )
    if config.data.tables is not None:
        raise InputError(
            f"data.tables={config.data.tables!r} lists tables without rows, for dmt plan. Leave it out to train."
        )
    data, towers = open_data(config)
    if config.train.affinity_rows and towers is not None and towers.column_splits:
        raise InputError(
            f"train.affinity_rows={config.train.affinity_rows} needs whole tables, but the tower plan "
            f"{config.towers.plan} cuts that of feature {next(iter(towers.column_splits))!r} into column shards. "
            "Leave it 0 and run dmt partition --checkpoint, which joins them."
        )
    if not data.dense_names:
        raise InputError("The data has no dense column, but the models need at least one. Name some in data.dense.")
    check_rows(config, world_size, data.num_rows("train"))
    moment_scale_of(config.replicas.moment_scale, fused_params(config.optimizer), config.topology.num_replicas)
    job = make_job(config, data.tables, len(data.dense_names), towers=towers, source=data)
    config.sharding.precision.check_device(torch.device("cpu"))
    build_model(job, device="meta")
    return job


def _find_start(job: Job, files: TrainingFiles, mesh: TowerMesh) -> Start | None:
    """Returns the checkpoint to start from, printed by rank 0; None for a new run. Collective."""
    ranks = gather_objects(attempt_names(), mesh.global_group)
    names, earlier = (set[str]().union(*of_ranks) for of_ranks in zip(*ranks, strict=True))

    def look() -> Path | None:
        begin_anew(job.config, names, earlier)
        return starting_point(job.config)

    # Rank 0 looks, or a checkpoint that another rank does not see yet would part them.
    source = run_on_all_or_raise(look if mesh.rank == 0 else lambda: None, mesh.global_group)[0]
    if source is None:
        return None
    start = start_with(whole_checkpoint(source, mesh), job.config, files, job.towers)
    if mesh.rank == 0:
        at = start.position
        begins = at == Position()
        how = "begins with the weights of" if begins else "goes on from"
        where = "" if begins else f": step {at.step}, epoch {at.epoch}, row {at.row}"
        _say([f"{how} {start.folder}{where}", *start.notes])
    return start


def _begin_record(job: Job, start: Start | None, mesh: TowerMesh) -> RunRecord:
    own_step = start.position.step if start is not None and start.is_own else None
    try:
        record = RunRecord(job.config, enabled=mesh.rank == 0, resumed_step=own_step)
    except OSError as error:
        raise _unwritable(job.config.train.output_dir, error) from error
    record.sharding(job.sharding)
    if mesh.rank == 0 and job.sharding is not None:
        _say([f"sharding: {sharding_sentence(job.sharding)}", *job.sharding.notes])
    if mesh.rank == 0 and job.config.train.affinity_rows:
        # A file of an earlier run would be taken for this one's, should none be written.
        (record.folder / "affinity.npz").unlink(missing_ok=True)
    return record


def _settle_gradient_buckets(model: DistributedModelParallel, optimizer: Any, batches: Iterator[ClickBatch]) -> None:
    """Runs three passes on a model that is about to be restored.

    After its second backward pass, DDP has laid out the gradients it reduces in the order in which they come, and with
    three ranks or more another layout adds numbers in another order. A run that goes on must add as the one before it.
    In the third forward pass it tells the layout to the other ranks, which `Trainer.measure_traffic` would count where
    nothing is left to train.
    """
    batch = next(batches, None)
    for _ in range(3 if batch is not None else 0):
        model(batch)[0].backward()
        optimizer.zero_grad()


def _result(
    job: Job, *, metrics: MetricValues, complexity: Complexity, time: TrainingTime, traffic: Traffic
) -> dict[str, Any]:
    rows = job.config.train.batch_size * job.topology.world_size
    return {
        "arch": job.config.model.arch,
        "dataflow": job.config.dataflow,
        "world_size": job.topology.world_size,
        **{f"eval_{name}": value for name, value in asdict(metrics).items()},
        **asdict(complexity),
        **asdict(time),
        "bytes_per_sample": {name: number / rows for name, number in asdict(traffic).items()},
        "bad_lines": job.data.bad_lines,
    }


def _replica_result(config: TrainingConfig, replicas: ReplicaSync | None, mesh: TowerMesh) -> dict[str, Any]:
    """The result's section on replicas; collective."""
    if replicas is None:
        return {}
    sizes = gather_objects(replicas.bytes_per_sync, mesh.global_group)
    rows = config.replicas.sync_every * config.train.batch_size * mesh.topology.world_size
    return {
        "replicas": {
            "num_replicas": mesh.topology.num_replicas,
            "bytes_per_sync": round(max(sizes)),  # of the largest rank; the others wait for it
            "bytes_per_sample": sum(sizes) / rows,
        }
    }


def _sharding_result(job: Job) -> dict[str, Any]:
    """The result's section on the sharding plan."""
    plan = job.sharding
    if plan is None:
        return {}
    rows = job.config.train.batch_size * job.topology.world_size
    return {
        "sharding": {
            "imbalance": plan.imbalance,
            "tables_by_scheme": plan.tables_by_scheme,
            "largest_rank_bytes": max(rank.memory for rank in plan.ranks),
            "planned_bytes_per_sample": {name: number / rows for name, number in asdict(expected_traffic(job)).items()},
        }
    }


def _say(lines: Iterable[str]) -> None:
    print("".join(f"# {printable(line)}\n" for line in lines), end="", flush=True)


def rows_at_most(config: TrainingConfig, report: ValidationReport) -> int | None:
    """Returns the number of training rows, after a check that saw them all; None after one that did not."""
    complete = report.train_rows and (config.data.validate_rows < 0 or report.train_rows < config.data.validate_rows)
    return report.train_rows if complete else None


def check_rows(config: TrainingConfig, world_size: int, rows: int | None) -> None:
    """Raises `InputError` when there are fewer rows than one training step takes; None is an unknown number."""
    needed = world_size * config.train.batch_size
    if rows is not None and rows < needed:
        raise InputError(
            f"There are {rows} training rows, fewer than one step takes: {world_size} ranks x train.batch_size="
            f"{config.train.batch_size} = {needed}. Lower train.batch_size or give more data."
        )


def check_output_dir(folder: Path) -> None:
    """Creates the folder if it is absent; raises `InputError` if nothing can be written there."""
    try:
        check_writable(folder)
    except OSError as error:
        raise _unwritable(str(folder), error) from error


def _unwritable(folder: str, error: OSError) -> InputError:
    return InputError(f"train.output_dir={folder!r} cannot be written: {error.strerror}.")


def _make_saver(job: Job, mesh: TowerMesh) -> Checkpointer:
    return Checkpointer(
        checkpoint_folder(job.config),
        mesh,
        keep=job.config.train.keep_checkpoints,
        asynchronous=job.config.train.async_save,
        describe=lambda folder: _describe(job, folder),
    )


def _describe(job: Job, folder: Path) -> None:
    """Writes the run's own config and plans into a checkpoint: its files elsewhere may change or move."""
    if job.towers is not None:
        replace(job.towers, tables=job.split_tables).save(folder / "towers.json")
    if job.sharding is not None:
        job.sharding.save(folder / "sharding.json")
    (folder / "config.toml").write_text(to_toml(job.config), encoding="utf-8")


def _place() -> tuple[int, int]:
    try:
        return _number("RANK"), _number("WORLD_SIZE")
    except KeyError as error:
        raise InputError(
            f"{error.args[0]} is not set: start training with torchrun, e.g. "
            "`torchrun --nproc-per-node 4 -m dmt.training CONFIG.toml`."
        ) from error


def _number(name: str, default: str | None = None) -> int:
    text = os.environ[name] if default is None else os.environ.get(name, default)
    if not re.fullmatch("[0-9]{1,6}", text):
        raise InputError(f"The environment has {name}={text!r}, which must be a whole number. Set it, or leave it out.")
    return int(text)


@contextmanager
def _process_group() -> Iterator[dist.ProcessGroup]:
    torch.set_num_threads(min(max(1, _number("OMP_NUM_THREADS", "1")), os.cpu_count() or 1))
    store, rank, world_size = next(dist.rendezvous("env://", timeout=_TIMEOUT))
    store = restart_safe_store(store, rank, world_size, timeout=_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    assert dist.group.WORLD is not None, "it was just made"
    try:
        yield dist.group.WORLD
        # A rank that leaves while a peer still sends can abort it.
        dist.barrier()
    finally:
        dist.destroy_process_group()
