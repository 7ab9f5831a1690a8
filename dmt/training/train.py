"""One training run on this rank, from a checked config to ``result.json``."""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

from dmt.collectives import gather_objects, run_on_all_or_raise
from dmt.errors import InputError
from dmt.files import check_writable
from dmt.plan.tables import TableSpec
from dmt.plan.towers import TowerPlan
from dmt.replicas.sync import ReplicaSync, moment_scales
from dmt.sharding.optimizers import moment_scale_of
from dmt.sharding.plan import TowerShardingPlan
from dmt.sptt.mesh import TowerMesh
from dmt.training.checkpoints import Checkpointer, restore, whole_checkpoint
from dmt.training.config import TrainingConfig, to_toml
from dmt.training.data import ClickData, ValidationReport
from dmt.training.data.batch import ClickBatch
from dmt.training.job import (
    build_model,
    build_optimizer,
    count_model,
    fused_params,
    in_micro_batches,
    open_data,
    replica_sync,
    shard_model,
    tower_plan,
    tower_sharding,
)
from dmt.training.loop import Position, Trainer
from dmt.training.partition import write_affinity
from dmt.training.planned import planned_traffic, traffic_warning
from dmt.training.records import RunRecord, sharding_summary, versions
from dmt.training.resume import (
    Start,
    TrainingFiles,
    begin_anew,
    checkpoint_folder,
    is_restart,
    start_with,
    starting_point,
)
from dmt.training.summary import sharding_sentence

__all__ = [
    "folder_lock",
    "auc_warning",
    "check_rows",
    "check_output_dir",
    "restart_safe_store",
    "preflight",
    "rows_at_most",
    "train",
    "train_on",
]

logger = logging.getLogger(__name__)
# Nearer to chance than this, an AUC is called chance.
_CHANCE = 0.02
# For a rank to wait for the others: rank 0 reads the data ahead.
_TIMEOUT = timedelta(minutes=30)


def preflight(config: TrainingConfig, world_size: int) -> ClickData:
    """Finds what is wrong with a run before any rank trains: sizes, plan, data columns, layer sizes, optimizer.

    Args:
        config: the run.
        world_size: ranks of the job.

    Returns:
        The opened data source.

    Raises:
        InputError: anything the user can fix.
    """
    config.topology.build().check_world_size(world_size)
    if config.train.affinity_rows and config.model.has_towers:
        raise InputError(
            f"train.affinity_rows={config.train.affinity_rows} needs a flat model, but model.arch is "
            f"{config.model.arch!r}: the embeddings of a tower's features stay on its ranks, so no rank ever sees "
            "those of all features of a sample. Train 'dlrm' or 'dcn' to learn towers, or leave it 0 and run "
            "dmt partition --checkpoint."
        )
    data = open_data(config)
    tables = data.tables
    if config.dataflow == "sptt":
        plan = tower_plan(config, tables)
        if config.train.affinity_rows and plan.column_splits:
            raise InputError(
                f"train.affinity_rows={config.train.affinity_rows} needs whole tables, but the tower plan "
                f"{config.towers.plan} cuts that of feature {next(iter(plan.column_splits))!r} into column shards. "
                "Leave it 0 and run dmt partition --checkpoint, which joins them."
            )
        if plan.num_towers != config.topology.num_towers:
            raise InputError(
                f"The tower plan {config.towers.plan} has {plan.num_towers} towers, but topology.num_towers="
                f"{config.topology.num_towers}. Make them equal."
            )
    if not data.dense_names:
        raise InputError("The data has no dense column, but the models need at least one. Name some in data.dense.")
    check_rows(config, world_size, data.num_rows("train"))
    moment_scale_of(config.replicas.moment_scale, fused_params(config.optimizer), config.topology.num_replicas)
    if config.dataflow == "sptt":
        tower_sharding(config, tables)
    config.sharding.precision.check_device(torch.device("cpu"))
    build_model(config, tables, len(data.dense_names), device="meta")
    return data


def train(config: TrainingConfig) -> dict[str, Any]:
    """Trains, evaluates, saves and measures; to be called on every rank that torchrun started.

    Returns:
        The result, also written to ``result.json``: metrics, complexity, speed and bytes per sample.

    Raises:
        InputError: anything the user can fix; raised before training wherever it can be known by then.
    """
    rank, world_size = _place()
    if rank == 0:
        data = preflight(config, world_size)
        # Rank 0 alone reads ahead; the others wait at the rendezvous, and torchrun stops them if it fails.
        check_rows(config, world_size, rows_at_most(config, data.validate()))
        check_output_dir(Path(config.train.output_dir))
        print(f"{to_toml(config)}\n# versions: {versions()}", flush=True)
    # A second job in the folder would delete what this one is writing.
    held = folder_lock(Path(config.train.output_dir)) if rank == 0 else nullcontext()
    with held, _process_group():
        if rank != 0:
            data = preflight(config, world_size)
        return train_on(config, data, TowerMesh(config.topology.build()))


def train_on(config: TrainingConfig, data: ClickData, mesh: TowerMesh) -> dict[str, Any]:
    """The run itself, on a mesh that exists; collective. See `train`.

    Args:
        config: the run, which has passed `preflight`.
        data: what that opened.
        mesh: of the config's topology.
    """
    tables, num_dense = data.tables, len(data.dense_names)
    # Read before training: the files may change while this run trains with what they held.
    plan = tower_plan(config, tables) if config.dataflow == "sptt" else None
    sharding = tower_sharding(config, tables) if config.dataflow == "sptt" else None
    of_sharding = _of_sharding(config, tables, num_dense, sharding)
    complexity = count_model(config, tables, num_dense)
    # As they are now: they may grow while this run reads them.
    files = data.training_files()
    start = _start(config, files, plan, mesh)
    record = _begin_record(config, sharding, start, mesh)
    model = shard_model(config, tables, num_dense, mesh=mesh, sharding=sharding)
    micro_batches = in_micro_batches(config.train, model)
    optimizer = build_optimizer(config.optimizer, model)
    replicas = replica_sync(config.replicas, model, mesh)
    if start is not None:
        own = {"rank": mesh.rank, "world_size": mesh.topology.world_size, "batch_size": config.train.batch_size}
        _settle_gradient_buckets(model, optimizer, data.batches("train", **own))
        restore(start.folder, model, optimizer, mesh=mesh, moment_scales=moment_scales(model), is_verified=True)
        if replicas is not None:
            replicas.restart(steps=start.position.step)
    trainer = Trainer(
        config=config.train,
        data=data,
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        record=record,
        position=None if start is None else start.position,
        replicas=replicas,
    )
    saver = Checkpointer(
        checkpoint_folder(config),
        mesh,
        keep=config.train.keep_checkpoints,
        asynchronous=config.train.async_save,
        describe=partial(_describe, config, plan, sharding, tables),
    )
    save = partial(_save, saver, trainer, model=model, optimizer=optimizer, replicas=replicas, files=files)
    try:
        time = trainer.train(save)
        is_saved = save() and saver.wait()
    finally:
        saver.close()
    metrics = trainer.evaluate()
    if config.train.affinity_rows:
        trainer.detach()
        if micro_batches is not None:
            micro_batches.detach()  # collecting needs all embeddings of a batch at once
        write_affinity(model, data, mesh, config=config.train, steps=time.steps, path=record.folder / "affinity.npz")
    traffic = trainer.measure_traffic()
    rows = config.train.batch_size * mesh.topology.world_size
    result = {
        "arch": config.model.arch,
        "dataflow": config.dataflow,
        "world_size": mesh.topology.world_size,
        **{f"eval_{name}": value for name, value in asdict(metrics).items()},
        **asdict(complexity),
        **asdict(time),
        "bytes_per_sample": {name: number / rows for name, number in asdict(traffic).items()},
        "bad_lines": data.bad_lines,
        **_of_replicas(config, replicas, mesh),
        **of_sharding,
    }
    record.scalars(time.steps, {f"eval/{name}": float(value) for name, value in asdict(metrics).items()})
    _conclude(config, record, result, is_saved=is_saved, mesh=mesh)
    return result


def _start(config: TrainingConfig, files: TrainingFiles, plan: TowerPlan | None, mesh: TowerMesh) -> Start | None:
    """The checkpoint to begin with, said to the user by rank 0; None to begin anew. Collective."""
    restarted = any(gather_objects(is_restart(), mesh.global_group))

    def look() -> Path | None:
        if not restarted:
            begin_anew(config)
        return starting_point(config)

    # Rank 0 looks, or a checkpoint that another rank does not see yet would part them.
    source = run_on_all_or_raise(look if mesh.rank == 0 else lambda: None, mesh.global_group)[0]
    if source is None:
        return None
    start = start_with(whole_checkpoint(source, mesh), config, files, plan)
    if mesh.rank == 0:
        at = start.position
        begins = at == Position()
        how = "begins with the weights of" if begins else "goes on from"
        where = "" if begins else f": step {at.step}, epoch {at.epoch}, row {at.row}"
        _say([f"{how} {start.folder}{where}", *start.notes])
    return start


def _begin_record(
    config: TrainingConfig, sharding: TowerShardingPlan | None, start: Start | None, mesh: TowerMesh
) -> RunRecord:
    own_step = start.position.step if start is not None and start.is_own else None
    try:
        record = RunRecord(config, enabled=mesh.rank == 0, resumed_step=own_step)
    except OSError as error:
        raise _unwritable(config.train.output_dir, error) from error
    record.sharding(sharding)
    if mesh.rank == 0 and sharding is not None:
        _say([f"sharding: {sharding_sentence(sharding)}", *sharding.notes])
    if mesh.rank == 0 and config.train.affinity_rows:
        # What an earlier run left would be taken for this one's, should none be written.
        (record.folder / "affinity.npz").unlink(missing_ok=True)
    return record


def _save(
    saver: Checkpointer,
    trainer: Trainer,
    *,
    model: DistributedModelParallel,
    optimizer: CombinedOptimizer,
    replicas: ReplicaSync | None,
    files: TrainingFiles,
) -> bool:
    """Saves a checkpoint of this moment, with all replicas equal; collective."""
    if replicas is not None:
        replicas.sync()
        replicas.check()
    at = trainer.position
    progress = {"epoch": at.epoch, "row": at.row, "files": files}
    return saver.save(model, optimizer, step=at.step, progress=progress, moment_scales=moment_scales(model))


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


def _conclude(
    config: TrainingConfig, record: RunRecord, result: dict[str, Any], *, is_saved: bool, mesh: TowerMesh
) -> None:
    """Writes the result and says what should give its reader pause; collective."""
    run_on_all_or_raise(partial(record.close, result), mesh.global_group)
    if mesh.rank == 0:
        _warn(result)
    if not is_saved:
        raise InputError(
            f"The model was trained, but its last checkpoint could not be saved to {checkpoint_folder(config)} (see "
            "the warning above). Make room and run again: it goes on from the checkpoint before."
        )


def _of_replicas(config: TrainingConfig, replicas: ReplicaSync | None, mesh: TowerMesh) -> dict[str, Any]:
    """What the result says of replicas; collective."""
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


def _of_sharding(
    config: TrainingConfig, tables: Sequence[TableSpec], num_dense: int, sharding: TowerShardingPlan | None
) -> dict[str, Any]:
    """What the result says of the sharding plan."""
    if sharding is None:
        return {}
    rows = config.train.batch_size * sharding.topology.world_size
    planned = asdict(planned_traffic(config, tables, num_dense, sharding))
    per_sample = {name: number / rows for name, number in planned.items()}
    return {"sharding": {**sharding_summary(sharding), "planned_bytes_per_sample": per_sample}}


def _warn(result: Mapping[str, Any]) -> None:
    """Logs what should give a reader of the result pause."""
    warnings = [auc_warning(result["eval_auc"])]
    if "sharding" in result:
        warnings.append(traffic_warning(result["sharding"]["planned_bytes_per_sample"], result["bytes_per_sample"]))
    for warning in filter(None, warnings):
        logger.warning(warning)


def _say(lines: Iterable[str]) -> None:
    print("".join(f"# {line}\n" for line in lines), end="", flush=True)


def auc_warning(auc: float) -> str:
    """A text that says so, and why, when an AUC is no better than chance; else an empty string."""
    if math.isnan(auc):
        return "AUC is undefined: the evaluation rows have one label only. Check data.label and the split."
    if abs(auc - 0.5) > _CHANCE:
        return ""
    return (
        f"AUC {auc:.4f} is close to chance (0.5). Likely causes: too few training steps or too small a learning rate "
        "(train.max_steps, optimizer.*_lr); labels not aligned with the features or drawn from another column "
        "(data.label); categorical values that never repeat, so nothing can be learned of them; training and "
        "evaluation files from unrelated sources."
    )


def rows_at_most(config: TrainingConfig, report: ValidationReport) -> int | None:
    """How many training rows there can be, after a check that saw them all; None after one that did not."""
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
    """Makes the folder where it is absent; raises `InputError` when nothing can be written there."""
    try:
        check_writable(folder)
    except OSError as error:
        raise _unwritable(str(folder), error) from error


def _unwritable(folder: str, error: OSError) -> InputError:
    return InputError(f"train.output_dir={folder!r} cannot be written: {error.strerror}.")


def _describe(
    config: TrainingConfig,
    plan: TowerPlan | None,
    sharding: TowerShardingPlan | None,
    tables: Sequence[TableSpec],
    folder: Path,
) -> None:
    """Lays the run's own config and plans into a checkpoint: its files elsewhere may change or move."""
    if plan is not None:
        replace(plan, tables=tuple(plan.split_tables(tables))).save(folder / "towers.json")
    if sharding is not None:
        sharding.save(folder / "sharding.json")
    (folder / "config.toml").write_text(to_toml(config))


def _place() -> tuple[int, int]:
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except KeyError as error:
        raise InputError(
            f"{error.args[0]} is not set: start training with torchrun, e.g. "
            "`torchrun --nproc-per-node 4 -m dmt.training CONFIG.toml`."
        ) from error


@contextmanager
def _process_group() -> Iterator[None]:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    store, rank, world_size = next(dist.rendezvous("env://", timeout=_TIMEOUT))
    store = restart_safe_store(store, rank, world_size, timeout=_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    try:
        yield
        # Leaving while a peer still talks aborts it now and then.
        dist.barrier()
    finally:
        dist.destroy_process_group()


_POLL_S = 0.05


def restart_safe_store(store: dist.Store, rank: int, world_size: int, *, timeout: timedelta) -> dist.Store:
    """A part of a store that only the ranks of this attempt know; every rank of the attempt calls it.

    Rank 0 names the part. It answers each greeting that it finds, also one that an earlier attempt has left, until
    all ranks have thanked it for the name.

    Args:
        store: shared with earlier attempts.
        rank: of this process.
        world_size: ranks of the attempt.
        timeout: how long rank 0 waits for the others; they wait as long as the store does.

    Raises:
        TimeoutError: on rank 0, some rank has not come.
    """
    own = uuid.uuid4().hex
    if rank != 0:
        store.set(f"dmt/greeting/{rank}", own)
        name = store.get(f"dmt/answer/{own}").decode()
        store.set(f"dmt/thanks/{name}/{rank}", "")
        return dist.PrefixStore(name, store)
    waiting = set(range(1, world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while waiting:
        if time.monotonic() > deadline:
            raise TimeoutError(f"Ranks {sorted(waiting)[:8]} of {world_size} have not come within {timeout}.")
        for other in sorted(waiting):
            if store.check([f"dmt/thanks/{own}/{other}"]):
                waiting.remove(other)
            elif store.check([f"dmt/greeting/{other}"]):
                store.set(f"dmt/answer/{store.get(f'dmt/greeting/{other}').decode()}", own)
        time.sleep(_POLL_S if waiting else 0)
    return dist.PrefixStore(own, store)


_HELD = (errno.EWOULDBLOCK, errno.EACCES)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Holds a folder, which exists, for this process; the end of the process frees it, also a kill.

    A file system without locks cannot be held; then nothing is checked.

    Raises:
        InputError: another job holds it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, folder_lock(Path(folder)):
        ...     with folder_lock(Path(folder)):
        ...         pass
        Traceback (most recent call last):
        ...
        dmt.errors.InputError: Another job is running in ...
    """
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                raise InputError(
                    f"Another job is running in {folder}. Wait for its end, or give another train.output_dir."
                ) from error
        yield
