"""One training run on this rank, top to bottom: from a config to ``result.json``."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel

from dmt.collectives import gather_objects, run_on_all_or_raise
from dmt.errors import InputError
from dmt.hot_rows.runtime import HotRows, HotRowsState
from dmt.replicas.sync import ReplicaSync
from dmt.sptt.dataflow import SPTTModule
from dmt.sptt.mesh import TowerMesh
from dmt.traffic import Traffic
from dmt.training.access import load_hot_rows, save_hot_rows
from dmt.training.build import (
    build_optimizer,
    check_rank_memory,
    count_model,
    hot_rows,
    in_micro_batches,
    replica_sync,
    shard_model,
    sharding_result,
)
from dmt.training.checkpoints import Checkpointer, restore
from dmt.training.config import TrainConfig, TrainingConfig, to_toml
from dmt.training.device import backend, current_device, device_type, take_device
from dmt.training.health import check_same_input
from dmt.training.job import Job, compare_hosts, resolve, validate_rows
from dmt.training.loop import MetricValues, Position, Trainer, TrainingTime
from dmt.training.partition import write_affinity
from dmt.training.records import RunRecord, print_settings, result_warnings
from dmt.training.resume import checkpoint_folder, find_start, folder_lock, restart_safe_store
from dmt.training.stop import SIGNALS, say_stopped
from dmt.training.trained import BAGS

__all__ = ["train", "train_job"]

logger = logging.getLogger(__name__)
# Time that a rank waits for the others: rank 0 reads the data ahead.
_TIMEOUT = timedelta(minutes=30)
# A rank says what it waits for: a wrong address looks like a long start.
_SAY_WAITING_S = 30.0


def train(config: TrainingConfig) -> dict[str, Any]:
    """Trains, evaluates, saves and measures; to be called on every rank that torchrun started.

    Returns:
        The result, also written to ``result.json``: metrics, complexity, speed and bytes per sample. Of a run that was
        stopped by SIGTERM or Ctrl-C, which is saved, just ``stopped_at``, its step, and ``signal``, the number.

    Raises:
        InputError: anything the user can fix; raised before training wherever it can be known by then.
    """
    # Resolve. Rank 0 alone reads ahead; the others wait at the rendezvous, and torchrun stops them if it fails.
    rank, world_size = _place()
    kind = device_type(config.train.device)
    take_device(kind, _number("LOCAL_RANK", "0"))
    job = None
    if rank == 0:
        job = resolve(config, world_size)
        check_rank_memory(job)
        validate_rows(job)
        print_settings(config)
        compare_hosts(job.topology, _number("LOCAL_WORLD_SIZE", "0"))

    # Process group. A second job in the folder would delete what this one is writing.
    held = folder_lock(Path(config.train.output_dir)) if rank == 0 else nullcontext()
    with held, _process_group(backend(kind)) as group:
        job = job or resolve(config, world_size)
        check_same_input(job, group)
        mesh = TowerMesh(job.topology)
        return train_job(job, mesh)


def train_job(job: Job, mesh: TowerMesh) -> dict[str, Any]:
    """Trains a resolved job on a mesh of its topology; collective. See `train`."""
    config = job.config

    # The start, and the records.
    start = find_start(job, mesh)
    record = RunRecord(config, enabled=mesh.rank == 0, resumed_step=start.position.step if start.is_own else None)
    record.say(start.lines)

    # Model, optimizer, replicas.
    model = shard_model(job, mesh)
    planned = asdict(count_model(job)) | {"sharding": sharding_result(job, model.plan)}
    record.sharding(job.sharding, planned["sharding"].get("notes", ()))
    micro_batches = in_micro_batches(config.train, model)
    optimizer = build_optimizer(config.optimizer, model)
    replicas = replica_sync(config.replicas, model, mesh)

    # Restore.
    if start.folder is not None:
        _settle_gradient_buckets(job, mesh, model, optimizer)
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
        position=start.position,
        replicas=replicas,
    )
    trainer.hot_rows = hot = hot_rows(job, model, mesh)
    if hot is not None and start.folder is not None and start.position != Position():
        _resume_hot_rows(hot, start.folder, mesh)
    saver = _make_saver(job, mesh)

    def save() -> bool:
        if replicas is not None:
            trainer.sync_replicas()
            replicas.check()
        at = trainer.position
        progress = {"epoch": at.epoch, "row": at.row, "files": start.files, "bookmark": at.bookmark}
        describe = partial(_describe, job, None if hot is None else hot.state())
        return saver.save(model, optimizer, step=at.step, progress=progress, describe=describe)

    with closing(saver), trainer:
        time = trainer.train(save)
        is_saved = save() and saver.wait()
    if trainer.stopped_by is not None:
        return _stopped(record, config.train, trainer.position.step, trainer.stopped_by)

    planned |= _unique_result(config, model, mesh)

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
    result = _result(job, metrics=metrics, time=time, traffic=traffic) | planned
    result |= _replica_result(config, replicas, mesh) | _hot_result(trainer.hot_rows)
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


def _resume_hot_rows(hot: HotRows, folder: Path, mesh: TowerMesh) -> None:
    read: list[HotRowsState | None] = []
    run_on_all_or_raise(lambda: read.append(load_hot_rows(folder)), mesh.global_group)
    if (state := read[0]) is not None:
        hot.load_state(state)


def _stopped(record: RunRecord, config: TrainConfig, step: int, signal: int) -> dict[str, Any]:
    record.end()
    if record.enabled:
        say_stopped(config, SIGNALS[signal])
    return {"stopped_at": step, "signal": signal}


def _settle_gradient_buckets(job: Job, mesh: TowerMesh, model: DistributedModelParallel, optimizer: Any) -> None:
    """Runs three passes on a model that is about to be restored.

    After its second backward pass, DDP has laid out the gradients it reduces in the order in which they come, and with
    three ranks or more another layout adds numbers in another order. A run that goes on must add as the one before it.
    In the third forward pass it tells the layout to the other ranks, which `Trainer.measure_traffic` would count where
    nothing is left to train.
    """
    size = job.config.train.batch_size
    batches = job.data.batches("train", rank=mesh.rank, world_size=mesh.topology.world_size, batch_size=size)
    for batch in itertools.islice(batches, 1):
        for _ in range(3):
            model(batch.to(current_device(job.device_type)))[0].backward()
            optimizer.zero_grad()


def _result(job: Job, *, metrics: MetricValues, time: TrainingTime, traffic: Traffic) -> dict[str, Any]:
    rows = job.config.train.batch_size * job.topology.world_size
    return {
        "arch": job.config.model.name,
        "dataflow": job.config.dataflow,
        "world_size": job.topology.world_size,
        "device": job.device_type,
        **{f"eval_{name}": value for name, value in asdict(metrics).items()},
        **asdict(time),
        "bytes_per_sample": traffic.per_sample(rows),
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


def _hot_result(hot: HotRows | None) -> dict[str, Any]:
    """The result's section on hot rows, as they were at the end."""
    if hot is None:
        return {}
    by_table = {name: len(rows) for name, rows in hot.rows.items()}
    of_all = {"rows": sum(by_table.values()), "bytes_per_rank": hot.num_bytes}
    left_out = {**hot.left_out, **hot.not_chosen}
    return {"hot_rows": {**of_all, "rows_by_table": by_table, "left_out": left_out}}


def _unique_result(config: TrainingConfig, model: DistributedModelParallel, mesh: TowerMesh) -> dict[str, Any]:
    """The result's section on rows that samples share, means over ranks; collective."""
    if not config.sharding.unique:
        return {}
    modules = [part for part in model.modules() if isinstance(part, SPTTModule)]
    own = {name: rows for part in modules for name, rows in part.rows_sent.items()}
    everyone = gather_objects(own, mesh.global_group)
    rows = {name: sum(of_rank[name] for of_rank in everyone) / len(everyone) for name in own}
    return {"unique": {"rows_per_sample": rows, "mean": sum(rows.values()) / len(rows)}}


def _make_saver(job: Job, mesh: TowerMesh) -> Checkpointer:
    return Checkpointer(
        checkpoint_folder(job.config),
        mesh,
        keep=job.config.train.keep_checkpoints,
        asynchronous=job.config.train.async_save,
    )


def _describe(job: Job, hot: HotRowsState | None, folder: Path) -> None:
    """Writes the run's own config and plans into a checkpoint: its files elsewhere may change or move."""
    if hot is not None:
        save_hot_rows(hot, folder)
    if job.towers is not None:
        replace(job.towers, tables=job.split_tables).save(folder / "towers.json")
    if job.sharding is not None:
        job.sharding.save(folder / "sharding.json")
    if job.config.data.kind in ("columns", "source"):
        (folder / BAGS).write_text(json.dumps(sorted(job.data.multi_hot)), encoding="utf-8")
    (folder / "config.toml").write_text(to_toml(job.config), encoding="utf-8")


def _place() -> tuple[int, int]:
    _check_launched("RANK", "WORLD_SIZE")
    return _number("RANK"), _number("WORLD_SIZE")


def _check_launched(*names: str) -> None:
    absent = [name for name in names if name not in os.environ]
    if absent:
        raise InputError(
            f"{absent[0]} is not set: start training with torchrun, e.g. "
            "`torchrun --nproc-per-node 4 -m dmt.training CONFIG.toml`."
        )


def _number(name: str, default: str | None = None) -> int:
    text = os.environ[name] if default is None else os.environ.get(name, default)
    if not re.fullmatch("[0-9]{1,6}", text):
        raise InputError(f"The environment has {name}={text!r}, which must be a whole number. Set it, or leave it out.")
    return int(text)


def _say_waiting() -> None:
    rank, size, address, port = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    what = "the other ranks" if rank == "0" else "rank 0, which reads the data ahead,"
    print(
        f"rank {rank} of {size} waits for {what} at {address}:{port} (MASTER_ADDR and MASTER_PORT), "
        f"until {_TIMEOUT.seconds // 60} minutes have passed",
        file=sys.stderr,
        flush=True,
    )


@contextmanager
def _process_group(backends: str) -> Iterator[dist.ProcessGroup]:
    torch.set_num_threads(min(max(1, _number("OMP_NUM_THREADS", "1")), os.cpu_count() or 1))
    _check_launched("MASTER_ADDR", "MASTER_PORT")
    waiting = threading.Timer(_SAY_WAITING_S, _say_waiting)
    waiting.daemon = True
    waiting.start()
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=_TIMEOUT))
        store = restart_safe_store(store, rank, world_size, timeout=_TIMEOUT)
    finally:
        waiting.cancel()
    dist.init_process_group(backends, store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    assert dist.group.WORLD is not None, "it was just made"
    try:
        yield dist.group.WORLD
        # A rank that leaves while a peer still sends can abort it.
        dist.barrier()
    finally:
        dist.destroy_process_group()
