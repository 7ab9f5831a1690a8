"""Starts a run from scratch or from its newest intact checkpoint, and locks its output folder.

`dmt.training.checkpoints.store.newest` verifies the files of a checkpoint; this module compares it with the run.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from torchrec.distributed.model_parallel import DistributedModelParallel

from dmt.collectives import gather_objects
from dmt.errors import InputError
from dmt.files import check_output, from_record, read_file
from dmt.formatting import shorten
from dmt.hot_rows.runtime import HotRows
from dmt.plan.towers import TowerPlan
from dmt.replicas.sync import ReplicaSync
from dmt.sptt.mesh import TowerMesh
from dmt.training.access import load_hot_rows
from dmt.training.build import ScheduledOptimizer, settle_gradient_buckets
from dmt.training.checkpoints.store import checkpoints, load, newest, read_manifest
from dmt.training.config import TrainingConfig
from dmt.training.data.deal import rank_batch
from dmt.training.device import on_all_ranks, on_first_rank, random_state, set_random_state
from dmt.training.job import Job
from dmt.training.preflight import check_rows
from dmt.training.trained import changed_settings, check_encoding

__all__ = [
    "Position",
    "Start",
    "checkpoint_folder",
    "find_start",
    "folder_lock",
    "last_step",
    "open_lock",
    "progress_of",
    "restore_hot_rows",
    "restore_run",
    "start_from",
    "starting_folder",
    "step_rows",
]

# Settings that define the parameters; another value makes another model.
_SAME_MODEL = ("model.", "optimizer.sparse:", "optimizer.dense:")
# Settings that define the rows and the first weights; with another value, a run would not be the one that is resumed.
_SAME_RUN = ("data.", "train.seed:")
# Settings that change the training, but not the model or the rows: changes are printed.
_TRAINING = ("optimizer.", "replicas.", "sharding.", "train.batch_size:", "train.dense_reduce:")
# A run may be evaluated on other rows: this change is printed, too.
_EVALUATION = "data.eval_path: '"


@dataclass(frozen=True, kw_only=True)
class Position:
    """Position in training: enough to resume at the right row of files, with any number of ranks."""

    step: int = 0
    """Training steps done."""
    epoch: int = 0
    """Completed passes over the training rows."""
    rows: int = 0
    """Rows of the current pass that all ranks together have trained on."""
    lanes: int | None = None
    """Number of ranks at the run's start: rows are dealt to as many lanes (`Deal`); None before the first step."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run starts; a checkpoint keeps ``position``, ``files`` and ``sources`` as its ``progress``."""

    position: Position = field(default_factory=Position)
    """Where to continue; the beginning if the checkpoint is another run's."""
    files: list[tuple[str, int, int]] = field(default_factory=list)
    """`ClickData.files` of the training rows; a run continues on the same files only."""
    sources: list[tuple[int, str] | None] = field(default_factory=list)
    """State of the user's source on each rank (`SourceState`)."""
    folder: Path | None = None
    """Folder of the checkpoint; None if there is none. A checkpoint does not keep it."""
    lines: tuple[str, ...] = ()
    """Lines for the user: the checkpoint, the position, and the settings that have changed."""


def checkpoint_folder(config: TrainingConfig) -> Path:
    """Returns the folder of a run's checkpoints."""
    return Path(config.train.output_dir) / "checkpoint"


def find_start(job: Job, mesh: TowerMesh) -> Start:
    """Returns where a run starts: at its newest intact checkpoint, else as ``train.resume`` says. Collective.

    ``auto`` means from scratch; another run's checkpoint gives weights and optimizer states. All ranks start the same.

    Raises:
        InputError: see `newest`, `starting_folder` and `start_from`; the same on every rank.
    """
    # Rank 0 looks: another rank may not see the newest checkpoint yet.
    folder = newest(on_first_rank(partial(starting_folder, job.config), mesh), mesh)
    if folder is None:
        return Start()
    # Rank 0 compares: the checkpoint has the data paths of rank 0's host; other hosts may have other paths.
    return on_first_rank(partial(start_from, folder, job), mesh)


def starting_folder(config: TrainingConfig) -> Path:
    """Returns the folder to start from: one that holds a run's checkpoints, or a checkpoint itself.

    The run's own checkpoints take precedence over ``train.resume``: a killed run continues from its last checkpoint.

    Raises `InputError` if ``train.resume`` names a folder without a checkpoint, or a checkpoint of this run.
    """
    own_folder, wanted = checkpoint_folder(config), config.train.resume
    if wanted != "auto" and own_folder.resolve() in Path(wanted).resolve().parents:
        raise InputError(
            f"train.resume={wanted!r} is a checkpoint of this run, which resumes from its newest. To go back, "
            "delete the later ones and leave train.resume out, or give another train.output_dir."
        )
    if wanted == "auto" or checkpoints(own_folder):
        return own_folder
    for place in (Path(wanted), Path(wanted) / "checkpoint"):
        if checkpoints(place):
            return place
    raise InputError(f"train.resume={wanted!r} holds no checkpoint. Give a checkpoint, a run's output_dir, or 'auto'.")


def start_from(folder: Path, job: Job) -> Start:
    """Checks a checkpoint against a run, and returns where the run starts.

    A run continues from its own checkpoint. From one of another run, it takes only weights and optimizer states.
    The files of the checkpoint in ``folder`` must have been verified (`newest`).

    Raises:
        InputError: the checkpoint cannot be read; its run had another model, other towers or another encoding of rows;
            or the checkpoint is this run's own, and the data or the seed have changed, a step now takes more rows than
            there are, or settings of the optimizer have changed after the last step.
    """
    config, files, plan = job.config, job.data.files("train"), job.towers
    is_own, remedy = folder.parent == checkpoint_folder(config), "Use another checkpoint."
    progress = read_manifest(folder).progress
    saved = from_record(Start, progress, place=f"{folder}: its progress", remedy=remedy)
    place = str(folder / "config.toml")
    changes = changed_settings(read_file(place, "TOML", place=place, remedy=remedy), config.model_dump(mode="json"))
    wrong = [text for text in changes if text.startswith(_SAME_MODEL)]
    if is_own:
        wrong += [text for text in changes if text.startswith(_SAME_RUN) and not text.startswith(_EVALUATION)]
        if saved.files != files:
            changed_files = sorted({name for name, *_ in {*saved.files} ^ {*files}})
            onward = f"for new rows, set train.resume={config.train.output_dir!r} and another train.output_dir"
            wrong.append(f"the training files have changed: {shorten(changed_files, ', ')} ({onward})")
    if plan is not None and config.model.has_towers:
        towers = folder / "towers.json"
        saved_plan = TowerPlan.load(towers)
        if (saved_plan.to_lists(), saved_plan.outside) != (plan.to_lists(), plan.outside):
            wrong.append(f"the towers (the checkpoint has towers.plan={str(towers)!r}, towers.outside='none')")
    if wrong:
        other = "another train.output_dir" if is_own else "train.resume a checkpoint of the same model"
        raise InputError(f"{folder} does not fit this run: {shorten(wrong)}. Undo these changes, or give {other}.")
    check_encoding(folder, job, lengths=False)
    # Also learning rates: the config's rates are used, not the saved ones.
    notes = [text for text in changes if text.startswith((*_TRAINING, _EVALUATION))]
    notes[20:] = [f"and {len(notes) - 20} more changes"] if len(notes) > 20 else []
    if not is_own:
        return Start(folder=folder, lines=(f"weights and optimizer states from {folder}", *notes))
    at, last = saved.position, last_step(job, saved.position)
    check_rows(config, step_rows(job, at) // config.train.batch_size, job.data.num_rows("train"))
    unused = [text for text in notes if text.startswith("optimizer.")]
    if unused and last is not None and last <= at.step:
        raise InputError(
            f"The run in {config.train.output_dir} has ended, so {shorten(unused)} would change nothing. Raise "
            "train.max_steps or train.epochs, or give another train.output_dir."
        )
    line = f"resumes from {folder}: step {at.step}, epoch {at.epoch}, row {at.rows}"
    return replace(saved, folder=folder, lines=(line, *notes))


def restore_run(
    start: Start,
    job: Job,
    mesh: TowerMesh,
    *,
    model: DistributedModelParallel,
    optimizer: ScheduledOptimizer,
    replicas: ReplicaSync | None,
) -> None:
    """Restores model, optimizer and replicas from the checkpoint that a run starts from, if there is one; collective.

    Random generators and the user's source are restored, too, if the checkpoint is the run's own and the number of
    ranks is unchanged. Learning rates are the config's at the step where the run starts, 0 after another run's.

    Raises:
        InputError: the checkpoint does not fit the model, or is damaged; the same on every rank.
    """
    if start.folder is None:
        return
    if job.data.source is not None and len(start.sources) == mesh.topology.world_size:
        job.data.source.start_state = start.sources[mesh.rank]
    settle_gradient_buckets(job, model, optimizer, start.position.step)
    generators = random_state()
    load(start.folder, model, optimizer, mesh=mesh)
    if not start.position.step:  # from another run, whose seed is not this one's
        set_random_state(generators)
    optimizer.set_step(start.position.step)
    if replicas is not None:
        replicas.restart(steps=start.position.step)


def restore_hot_rows(start: Start, hot: HotRows | None, mesh: TowerMesh) -> None:
    """Restores the copies and counts of hot rows from the checkpoint that a run resumes from, if any; collective."""
    if hot is not None and start.folder is not None and start.position.step:
        state = on_all_ranks(partial(load_hot_rows, start.folder), mesh)
        if state is not None:
            hot.load_state(state)


def progress_of(job: Job, at: Position, mesh: TowerMesh) -> dict[str, Any]:
    """Returns the ``progress`` that a checkpoint keeps, see `Start`; collective with a user's source."""
    sources = []
    if job.data.source is not None:
        state = job.data.source.state(at.epoch, at.rows // mesh.topology.world_size)
        sources = gather_objects(state, mesh.global_group)
    columns = [*job.data.columns.dense, *job.data.columns.feature_names]
    return {"position": asdict(at), "files": job.data.files("train"), "sources": sources, "columns": columns}


def step_rows(job: Job, at: Position) -> int:
    """Returns the number of rows that all ranks together use in a step after a position."""
    world_size = job.topology.world_size
    return rank_batch(at.lanes or world_size, world_size, job.config.train.batch_size) * world_size


def last_step(job: Job, at: Position) -> int | None:
    """Returns the last step of training from a position on; None if no limit is known."""
    config, rows, rows_per_step = job.config.train, job.data.num_rows("train"), step_rows(job, at)
    limits = [] if config.max_steps is None else [config.max_steps]
    if rows is not None:
        later_epochs = config.epochs - at.epoch - 1
        limits.append(at.step + (rows - at.rows) // rows_per_step + later_epochs * (rows // rows_per_step))
    return min(limits, default=None)


@contextmanager
def folder_lock(config: TrainingConfig, mesh: TowerMesh) -> Iterator[None]:
    """Locks a run's output folder on rank 0 for a ``with`` block; collective. Errors are those of `open_lock`."""
    with ExitStack() as stack:
        folder = Path(config.train.output_dir)
        on_all_ranks(lambda: stack.enter_context(open_lock(folder)) if mesh.rank == 0 else None, mesh)
        yield


def open_lock(folder: Path) -> IO[bytes]:
    """Makes a folder if needed, and locks it until the returned file is closed or the process ends, even by a kill.

    Without the lock, a second job would delete what the first writes. On a file system without locks, none is taken.

    Raises `InputError` if the folder cannot be written to, or another job has locked it.
    """
    check_output("train.output_dir", folder, is_folder=True)
    file = (folder / ".lock").open("ab")
    with suppress(OSError):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            remedy = "Wait until it ends, or give another train.output_dir."
            raise InputError(f"Another job is running in {folder}. {remedy}") from None
    return file
