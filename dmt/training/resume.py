"""The start of a run, from nothing or from a checkpoint, and the lock on its folder."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Annotated, Any

from pydantic import Field
from torchrec.distributed.model_parallel import DistributedModelParallel

from dmt.collectives import gather_objects, run_on_all_or_raise
from dmt.errors import InputError
from dmt.files import check_writable, from_record, read_toml
from dmt.formatting import shorten
from dmt.hot_rows.runtime import HotRows
from dmt.plan.towers import TowerPlan
from dmt.replicas.sync import ReplicaSync
from dmt.sptt.mesh import TowerMesh
from dmt.training.access import load_hot_rows
from dmt.training.build import ScheduledOptimizer, settle_gradient_buckets
from dmt.training.checkpoints import checkpoints, newest, read_manifest, restore
from dmt.training.config import TrainingConfig
from dmt.training.data.deal import rank_batch
from dmt.training.device import on_all_ranks
from dmt.training.job import Job
from dmt.training.records import unwritable

__all__ = [
    "Position",
    "Start",
    "checkpoint_folder",
    "find_start",
    "folder_lock",
    "open_lock",
    "restore_hot_rows",
    "restore_run",
    "source_states",
    "start_with",
    "starting_point",
    "step_rows",
]

# Sections that define the parameters; another value makes another model.
_SAME_MODEL = ("model", "optimizer.sparse", "optimizer.dense")
# Sections whose changes are told: another training, of the same model on the same rows.
_TRAINING = ("optimizer", "replicas", "sharding", "train.batch_size")
# Settings of the data that leave the training rows and their order alone.
_NOT_THE_ROWS = ("data.eval_split",)


@dataclass(frozen=True, kw_only=True)
class Position:
    """Position in training: enough to resume at the right sample, with any number of ranks."""

    step: int = 0
    """Training steps done."""
    epoch: int = 0
    """Completed passes over the training rows."""
    rows: int = 0
    """Rows of the current pass that all ranks together have trained on."""
    lanes: int | None = None
    """Ranks of the first run, by which rows are dealt; None for a run that begins."""

    def in_epoch(self, epoch: int) -> Position:
        """Returns the position at the beginning of an epoch, or itself if it is in that one."""
        return self if epoch == self.epoch else replace(self, epoch=epoch, rows=0)


@dataclass(frozen=True, kw_only=True)
class Start:
    """The beginning of a run, with a checkpoint or without one."""

    folder: Path | None = None
    """The checkpoint; None for a run without one."""
    position: Position = field(default_factory=Position)
    """Position to continue at; the first row with the checkpoint of another run."""
    files: Sequence[tuple[str, int, int]]
    """`ClickData.files` of what the run trains on, as it starts: they may grow while it reads them."""
    sources: Sequence[str | None] = ()
    """State of the user's source on each rank."""
    notes: tuple[str, ...] = ()
    """Settings that changed since the checkpoint."""

    @property
    def lines(self) -> list[str]:
        """Lines that tell the user which checkpoint it is, where it goes on, and what has changed."""
        at = self.position
        if self.folder is None:
            return []
        if at == Position():
            return [f"begins with the weights of {self.folder}", *self.notes]
        return [f"goes on from {self.folder}: step {at.step}, epoch {at.epoch}, row {at.rows}", *self.notes]


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """What a checkpoint keeps of a run's position, beside the step."""

    epoch: Annotated[int, Field(ge=0)]
    rows: Annotated[int, Field(ge=0)]
    files: list[tuple[str, int, int]]
    lanes: Annotated[int, Field(ge=1)] | None = None
    sources: list[str | None] = field(default_factory=list)


def checkpoint_folder(config: TrainingConfig) -> Path:
    """Returns the folder of a run's checkpoints."""
    return Path(config.train.output_dir) / "checkpoint"


def find_start(job: Job, mesh: TowerMesh) -> Start:
    """Finds the newest whole checkpoint that a run starts from, the same for all ranks; collective.

    Raises:
        InputError: no checkpoint there is whole, or `starting_point` or `start_with` raises it.
    """
    files = job.data.files("train")
    # Rank 0 looks: another rank may not see the newest one yet.
    places = run_on_all_or_raise(lambda: starting_point(job.config) if mesh.rank == 0 else None, mesh.global_group)
    if (place := places[0]) is None:
        return Start(files=files)
    folder = newest(place, mesh)
    assert folder is not None, "rank 0 has seen a checkpoint"
    return start_with(folder, job.config, files, job.towers)


def starting_point(config: TrainingConfig) -> Path | None:
    """Returns a checkpoint, or a folder of them, to start from; None for a run without one.

    Its own come before the one that ``train.resume`` names: a run that started from that and was interrupted continues.

    Raises:
        InputError: ``train.resume`` names a folder without a checkpoint.
    """
    own, asked = checkpoint_folder(config), config.train.resume
    places = [own] if asked == "auto" else [own, Path(asked), Path(asked) / "checkpoint"]
    for place in places:
        if checkpoints(place):
            return place
    if asked == "auto":
        return None
    raise InputError(
        f"train.resume={asked!r} holds no checkpoint. Give a checkpoint's folder, the output_dir of a run, or 'auto'."
    )


def start_with(
    folder: Path, config: TrainingConfig, files: Sequence[tuple[str, int, int]], plan: TowerPlan | None
) -> Start:
    """Checks a checkpoint against a run, and finds the position to continue at.

    A run goes on with its own checkpoint. That of another run gives it weights and optimizer states to begin with.

    Args:
        folder: whole, of `starting_point`.
        config: the run.
        files: `ClickData.files` of what it trains on.
        plan: its tower plan; None with the flat dataflow.

    Raises:
        InputError: the checkpoint cannot be read or is of a run with another model or other towers; it is this run's
            own and of other data; or it is finished, so that settings that have changed would never be used.
    """
    manifest, is_own = read_manifest(folder), folder.parent == checkpoint_folder(config)
    place, remedy = str(folder / "config.toml"), "Use another checkpoint."
    saved, now = _by_key(read_toml(place, place=place, remedy=remedy)), _by_key(config.model_dump(mode="json"))
    keys = [key for key in {**saved, **now} if saved.get(key) != now.get(key)]
    changes = {key: f"{key}: {saved.get(key)!r} -> {now.get(key)!r}" for key in keys}
    at = from_record(_Saved, manifest.progress, place=f"{folder}: its progress", remedy=remedy)
    refused = [text for key, text in changes.items() if _is_under(key, _SAME_MODEL)]
    if is_own:
        refused += [text for key, text in changes.items() if _changes_rows(key, saved, now)]
        apart = sorted({name for name, *_ in {*at.files} ^ {*files}})
        refused += [f"the training files have changed: {shorten(apart, ', ')}"] if at.files != [*files] else []
    if refused:
        raise InputError(
            f"{folder} is of another run: {shorten(refused)}. Undo that, or give "
            f"{'another train.output_dir' if is_own else 'train.resume a checkpoint of the same model'}."
        )
    if plan is not None and config.model.has_towers:
        towers = folder / "towers.json"
        if TowerPlan.load(towers).to_lists() != plan.to_lists():
            raise InputError(f"{folder} is of a run with other towers. Set towers.plan to {str(towers)!r}.")
    # Also learning rates: those of the config are used, not the saved ones.
    notes = [text for key, text in changes.items() if _is_under(key, _TRAINING)]
    if not is_own:
        return Start(folder=folder, files=files, notes=tuple(notes))
    most = config.train.max_steps
    if at.epoch >= config.train.epochs or (most is not None and manifest.step >= most):
        if notes:
            raise InputError(
                f"{folder} is of a run that is finished, with other settings ({shorten(notes)}): there is nothing left "
                "to train. Give more train.max_steps or train.epochs to go on, or another train.output_dir."
            )
        notes.append("nothing is left to train: it is evaluated again")
    position = Position(step=manifest.step, epoch=at.epoch, rows=at.rows, lanes=at.lanes)
    return Start(folder=folder, position=position, files=files, sources=at.sources, notes=tuple(notes))


def restore_run(
    start: Start,
    job: Job,
    mesh: TowerMesh,
    *,
    model: DistributedModelParallel,
    optimizer: ScheduledOptimizer,
    replicas: ReplicaSync | None,
) -> None:
    """Loads the checkpoint that a run starts from, if there is one, into what was just made; collective.

    Learning rates are those of the config at that step, also where the checkpoint's run had others.

    Raises:
        InputError: it does not fit the model, or is damaged; the same on every rank.
    """
    if start.folder is None:
        return
    if len(start.sources) == mesh.topology.world_size:
        job.data.load_source_state(start.sources[mesh.rank])
    settle_gradient_buckets(job, model, optimizer)
    restore(start.folder, model, optimizer, mesh=mesh, is_verified=True)
    optimizer.set_step(start.position.step)
    if replicas is not None:
        replicas.restart(steps=start.position.step)


def restore_hot_rows(start: Start, hot: HotRows | None, mesh: TowerMesh) -> None:
    """Gives hot rows the copies and counts of the checkpoint that a run goes on from, if it has some; collective."""
    folder = start.folder
    if hot is None or folder is None or start.position == Position():
        return
    if (state := on_all_ranks(lambda: load_hot_rows(folder), mesh)) is not None:
        hot.load_state(state)


def step_rows(job: Job, at: Position) -> int:
    """Returns the rows that all ranks together use in a step from a position on."""
    world_size = job.topology.world_size
    return rank_batch(at.lanes or world_size, world_size, job.config.train.batch_size) * world_size


def source_states(job: Job, at: Position, mesh: TowerMesh) -> list[str | None]:
    """Returns the states of the user's source on all ranks; collective with such rows."""
    if job.config.data.kind != "source":
        return []
    state = job.data.source_state(at.epoch, at.rows, world_size=mesh.topology.world_size)
    return gather_objects(state, mesh.global_group)


def _by_key(values: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Values by their whole keys; None equals a key that was not saved."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _by_key(value, f"{section}{key}.") if isinstance(value, Mapping) else {f"{section}{key}": value}
    return found


def _changes_rows(key: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Returns whether a changed setting changes the training rows or their order."""
    if key == "data.eval_path":
        # Without one, rows of the training files are set apart for evaluation.
        return None in (saved.get(key), now.get(key))
    return _is_under(key, ("data",)) and not _is_under(key, _NOT_THE_ROWS)


def _is_under(key: str, sections: tuple[str, ...]) -> bool:
    return any(f"{key}.".startswith(f"{section}.") for section in sections)


@contextmanager
def folder_lock(config: TrainingConfig, mesh: TowerMesh) -> Iterator[None]:
    """Holds the output folder of a run on rank 0; collective, and raises on every rank. See `open_lock`."""
    with ExitStack() as stack:
        folder = Path(config.train.output_dir)
        on_all_ranks(lambda: stack.enter_context(open_lock(folder)) if mesh.rank == 0 else None, mesh)
        yield


def open_lock(folder: Path) -> IO[bytes]:
    """Holds a folder, and makes it if need be, until the result is closed or the process ends, also by a kill.

    A second job would delete what the first is writing. A file system without locks cannot be held; then nothing is
    checked.

    Raises:
        InputError: it cannot be written to, or another job holds it.
    """
    try:
        check_writable(folder)
        file = (folder / ".lock").open("ab")
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            file.close()
            raise InputError(
                f"Another job is running in {folder}. Wait for its end, or give another train.output_dir."
            ) from error
    return file
