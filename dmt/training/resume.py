"""The start of a run, from nothing or a checkpoint, the lock on its folder, and the last line of one that stopped."""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError
from torchrec.distributed.model_parallel import DistributedModelParallel

from dmt.collectives import gather_objects, run_on_all_or_raise
from dmt.errors import InputError
from dmt.files import atomic_write, check_writable, from_record, fsync_path, read_toml
from dmt.formatting import printable, shorten
from dmt.hot_rows.runtime import HotRows
from dmt.plan.towers import TowerPlan
from dmt.replicas.sync import ReplicaSync
from dmt.sptt.mesh import TowerMesh
from dmt.training.access import load_hot_rows
from dmt.training.build import ScheduledOptimizer, settle_gradient_buckets
from dmt.training.checkpoints import checkpoints, discard_checkpoints, newest, read_manifest, restore
from dmt.training.config import TrainConfig, TrainingConfig
from dmt.training.data.deal import rank_batch
from dmt.training.data.parquet import file_text
from dmt.training.device import on_all_ranks
from dmt.training.job import Job
from dmt.training.records import check_records, unwritable

__all__ = [
    "Position",
    "Start",
    "TrainingFiles",
    "begin_anew",
    "check_output_dir",
    "checkpoint_folder",
    "find_start",
    "folder_lock",
    "hold_folder",
    "job_attempt",
    "restore_hot_rows",
    "restore_run",
    "say_stopped",
    "source_states",
    "start_with",
    "starting_point",
    "step_rows",
]

# Sections that define the parameters; another value makes another model.
_SAME_MODEL = ("model", "optimizer.sparse", "optimizer.dense")
# Settings of the data that do not change the order of rows; with another value of the rest, a position among rows has
# no meaning.
_NOT_THE_ROWS = ("data.eval_split", "data.max_eval_rows")
# Settings of training that may change between two attempts.
_TRAINING = (
    "optimizer",
    "replicas",
    "sharding.forward_precision",
    "sharding.backward_precision",
    "sharding.table_precision",
    "train.batch_size",
)

TrainingFiles = Sequence[tuple[str, int, int]]


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
    """Position to continue at; the first step, where at most weights and optimizer states are taken over."""
    files: TrainingFiles
    """`ClickData.files` of what the run trains on, as it starts: they may grow while it reads them."""
    sources: Sequence[str | None] = ()
    """State of the user's source on each rank."""
    notes: tuple[str, ...] = ()
    """Settings that changed since the checkpoint."""
    is_own: bool = False
    """True if there is a checkpoint and it is this run's."""

    @property
    def lines(self) -> list[str]:
        """Lines that tell the user which checkpoint it is, where it goes on, and what has changed."""
        if self.folder is None:
            return []
        at = self.position
        if at == Position():
            return [f"begins with the weights of {self.folder}", *self.notes]
        return [f"goes on from {self.folder}: step {at.step}, epoch {at.epoch}, row {at.rows}", *self.notes]


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """What a checkpoint keeps of a run's position, beside the step."""

    epoch: Annotated[int, Field(ge=0)]
    rows: Annotated[int, Field(ge=0)]
    files: list[list[Any]]
    lanes: Annotated[int, Field(ge=1)] | None = None
    sources: list[str | None] = field(default_factory=list)


def checkpoint_folder(config: TrainingConfig) -> Path:
    """Returns the folder of a run's checkpoints."""
    return Path(config.train.output_dir) / "checkpoint"


def find_start(job: Job, mesh: TowerMesh) -> Start:
    """Finds the beginning of a run, after `begin_anew`; collective.

    Raises:
        InputError: see `begin_anew`, `starting_point` and `start_with`; or no checkpoint there is whole.
    """
    files = job.data.files("train")
    attempts = gather_objects(job_attempt(), mesh.global_group)
    # A restart is counted by the torchrun of the host where a rank failed, and by no other.
    is_restart = any(restarted for _, restarted in attempts)

    def look() -> Path | None:
        begin_anew(job.config, attempts[0][0], is_restart=is_restart)
        return starting_point(job.config)

    # Rank 0 looks, or a checkpoint that another rank does not see yet would part them.
    source = run_on_all_or_raise(look if mesh.rank == 0 else lambda: None, mesh.global_group)[0]
    if source is None:
        return Start(files=files)
    try:
        folder = newest(source, mesh)
    except InputError as error:  # the same on every rank
        if source != checkpoint_folder(job.config):
            raise
        raise InputError(f"{error} To start over, set train.resume=never, which removes them.") from error
    assert folder is not None, "rank 0 has seen a checkpoint"
    return start_with(folder, job.config, files, job.towers)


def job_attempt() -> tuple[str, bool]:
    """Returns a name of this job, and whether torchrun (``--max-restarts``) or Slurm has started it again."""
    environ = os.environ
    counts = [environ.get(name, "") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")]
    name = environ.get("SLURM_JOB_ID") or environ.get("TORCHELASTIC_RUN_ID", "")
    return name, any(count.isdecimal() and int(count) > 0 for count in counts)


def begin_anew(config: TrainingConfig, name: str, *, is_restart: bool) -> None:
    """Removes the run's checkpoints if ``train.resume`` is ``"never"`` and no earlier attempt at this job has done so.

    Files that `RunRecord` will delete or replace are checked before, whatever ``train.resume`` says.

    Args:
        config: the run.
        name: of the job, see `job_attempt`; left in ``output_dir/.begun`` for later attempts at it.
        is_restart: whether this is not the job's first attempt, on any host.

    Raises:
        InputError: something there is not ours to delete.
    """
    check_records(config)
    if config.train.resume != "never":
        return
    mark, folder = Path(config.train.output_dir, ".begun"), checkpoint_folder(config)
    if is_restart and mark.is_file() and mark.read_text(errors="replace") == name:
        return
    remedy = "Remove what is there yourself, or give another train.output_dir."
    if folder.is_symlink() and checkpoints(folder):
        raise InputError(
            f"{folder} is a link to {folder.resolve()}: train.resume=never deletes nothing through a link. {remedy}"
        )
    if foreign := discard_checkpoints(folder):
        raise InputError(
            f"{foreign[0]} has no checkpoint.json: train.resume=never deletes only checkpoints that dmt wrote. {remedy}"
        )
    # After the deletion, and on the disk before the first checkpoint that a later attempt might delete for want of it.
    with atomic_write(mark) as scratch:
        scratch.write_text(name)
        fsync_path(scratch)
    fsync_path(mark.parent)


def starting_point(config: TrainingConfig) -> Path | None:
    """Returns a checkpoint, or a folder of them, to start from; None for a run without one.

    Its own come before the one that ``train.resume`` names: a run that started from that and was interrupted continues.

    Raises:
        InputError: ``train.resume`` names a folder without a checkpoint.
    """
    own, asked = checkpoint_folder(config), config.train.resume
    if checkpoints(own):
        return own
    if asked in ("auto", "never"):
        return None
    for folder in (Path(asked), Path(asked) / "checkpoint"):
        if checkpoints(folder):
            return folder
    raise InputError(
        f"train.resume={asked!r} holds no checkpoint. Give a checkpoint's folder, the output_dir of a run, 'auto' or "
        "'never'."
    )


def start_with(folder: Path, config: TrainingConfig, files: TrainingFiles, plan: TowerPlan | None) -> Start:
    """Checks a checkpoint against a run, and finds the position to continue at.

    Args:
        folder: whole, of `starting_point`.
        config: the run.
        files: `ClickData.files` of what it trains on.
        plan: its tower plan; None with the flat dataflow.

    Raises:
        InputError: the checkpoint cannot be read or is of a run with another model or other towers; it is this run's
            own and of other data; or it is finished, so that settings that have changed would never be used.
    """
    manifest, saved, now = read_manifest(folder), _saved_config(folder), config.model_dump(mode="json")
    is_own = folder.parent == checkpoint_folder(config)
    changed = {key: (old, new) for key, old, new in _differences(saved, now)}
    _refuse(folder, {key: pair for key, pair in changed.items() if _is_under(key, _SAME_MODEL)}, is_own=is_own)
    if plan is not None and config.model.has_towers:
        _check_towers(folder, plan)
    of_rows = {key: pair for key, pair in changed.items() if _changes_rows(key, *pair)}
    at = from_record(_Saved, manifest.progress, place=f"{folder}: its progress", remedy="Use another checkpoint.")
    saved_files = at.files
    own_files = [list(file) for file in files]
    if saved_files != own_files:
        of_rows["the training files"] = _first_difference(saved_files, own_files)
    # Also learning rates: those of the config are used, not the saved ones.
    notes = [f"{key}: {old!r} -> {new!r}" for key, (old, new) in changed.items() if _is_under(key, _TRAINING)]
    if of_rows and not is_own:
        return Start(folder=folder, files=files, notes=("other data: from the first row on", *notes))
    _refuse(folder, of_rows, is_own=is_own)
    position = Position(step=manifest.step, epoch=at.epoch, rows=at.rows, lanes=at.lanes)
    most = config.train.max_steps
    if position.epoch >= config.train.epochs or (most is not None and position.step >= most):
        if notes or not is_own:
            settings = f", with other settings ({shorten(notes)})" if notes else ""
            others = ", another train.output_dir, or train.resume=never to start over and remove its checkpoints"
            raise InputError(
                f"{folder} is of a run that is finished{settings}: there is nothing left to train. Give more "
                f"train.max_steps or train.epochs to go on{others if is_own else ''}."
            )
        notes.append("nothing is left to train: it is evaluated again")
    if is_own and config.train.resume not in ("auto", "never"):
        notes.append(f"train.resume={config.train.resume!r} is not read: the run has checkpoints of its own")
    return Start(folder=folder, position=position, files=files, sources=at.sources, notes=tuple(notes), is_own=is_own)


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


def restore_hot_rows(start: Start, hot: HotRows | None, mesh: TowerMesh) -> None:
    """Gives hot rows the copies and counts of the checkpoint that a run goes on from, if it has some; collective."""
    if hot is None or start.folder is None or start.position == Position():
        return
    folder = start.folder
    if (state := on_all_ranks(lambda: load_hot_rows(folder), mesh)) is not None:
        hot.load_state(state)


def _refuse(folder: Path, changed: Mapping[str, tuple[Any, Any]], *, is_own: bool) -> None:
    if not changed:
        return
    shown = [f"{key} = {old!r}, not {new!r}" for key, (old, new) in changed.items()]
    remedy = (
        "Give another train.output_dir, or train.resume=never to start over and remove the checkpoints there."
        if is_own
        else "Give train.resume a checkpoint of the same model."
    )
    raise InputError(f"{folder} is of a run with {shorten(shown)}. {remedy}")


def _check_towers(folder: Path, plan: TowerPlan) -> None:
    file = folder / "towers.json"
    saved, now = TowerPlan.load(file).to_lists(), plan.to_lists()
    if saved == now:
        return
    number = next((i for i, (old, new) in enumerate(zip(saved, now, strict=False)) if old != new), None)
    apart = (
        f"{len(saved)} towers, not {len(now)}"
        if number is None
        else f"other towers: tower {number} has features {saved[number]}, not {now[number]}"
    )
    raise InputError(f"{folder} is of a run with {apart}. Set towers.plan to {str(file)!r}.")


def _saved_config(folder: Path) -> dict[str, Any]:
    saved = read_toml(folder / "config.toml", place=str(folder / "config.toml"), remedy="Use another checkpoint.")
    try:
        return TrainingConfig.model_validate(saved).model_dump(mode="json")
    except ValidationError:
        return saved


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields keys whose values differ, with both; None now equals a key that was not saved."""
    for key in {**saved, **now}:
        old, new = saved.get(key), now.get(key)
        where = f"{path}.{key}" if path else key
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, where)
        elif old != new:
            yield where, old, new


def _first_difference(old: Sequence[Any], new: Sequence[Any]) -> tuple[str, str]:
    """Describes both lists by their lengths and the first (name, bytes, fingerprints) that differs."""
    number = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))

    def text(files: Sequence[Any]) -> str:
        if number == len(files):
            return f"{number:,} of them"
        return f"{len(files):,} of them, with {file_text(*files[number])}"

    return text(old), text(new)


def _changes_rows(key: str, old: Any, new: Any) -> bool:
    """Returns whether a changed setting changes the training rows or their order."""
    if key == "data.eval_path":
        # Without one, rows of the training files are set apart for evaluation.
        return old is None or new is None
    return _is_under(key, ("data",)) and not _is_under(key, _NOT_THE_ROWS)


def _is_under(key: str, sections: tuple[str, ...]) -> bool:
    return any(f"{key}.".startswith(f"{section}.") for section in sections)


def check_output_dir(folder: Path) -> None:
    """Creates the folder if it is absent; raises `InputError` if nothing can be written there."""
    try:
        check_writable(folder)
    except OSError as error:
        raise unwritable(folder, error) from error


@contextmanager
def folder_lock(config: TrainingConfig, mesh: TowerMesh) -> Iterator[None]:
    """Holds the output folder of a run on rank 0; collective, and raises on every rank. See `hold_folder`."""
    # A second job in the folder would delete what this one is writing.
    with ExitStack() as stack:
        hold = hold_folder(Path(config.train.output_dir)) if mesh.rank == 0 else nullcontext()
        on_all_ranks(lambda: stack.enter_context(hold), mesh)
        yield


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Holds a folder for this process, and makes it if need be; the end of the process frees it, also a kill.

    A file system without locks cannot be held; then nothing is checked.

    Raises:
        InputError: it cannot be written to, another job holds it, or its ``.lock`` is a link or no file.
    """
    check_output_dir(folder)
    path = folder / ".lock"
    try:
        # Neither followed nor cut off: a link may lead to somebody's file.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise InputError(
            f"{path} cannot be opened as a lock ({error.strerror}). Remove it, or give another train.output_dir."
        ) from error
    with open(descriptor, "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise InputError(
                    f"Another job is running in {folder}. Wait for its end, or give another train.output_dir."
                ) from error
        yield


def say_stopped(config: TrainConfig, by: str) -> str:
    """Prints and returns the last line of a run that a signal or an error ended: its newest checkpoint, how to go on.

    It is printed on stderr, since a demo keeps what its runs print on stdout in a file.
    """
    saved = checkpoints(Path(config.output_dir) / "checkpoint")
    what = f"the newest checkpoint is {saved[0]}. To go on" if saved else "nothing was saved yet. To start again"
    line = printable(f"stopped by {by}: {what}: {_command(config.resume)}")
    print(line, file=sys.stderr, flush=True)
    return line


def _command(resume: str) -> str:
    """The command of this run, as far as a rank knows it, with what makes it go on instead of starting over."""
    arguments = [*sys.argv[1:], *(["train.resume=auto"] if resume == "never" else [])]
    environ = os.environ
    if "TORCHELASTIC_RUN_ID" not in environ or environ.get("GROUP_WORLD_SIZE") != "1":
        return "the same command again" + (", with train.resume=auto" if resume == "never" else "")
    ranks = environ.get("LOCAL_WORLD_SIZE", "1")
    return shlex.join(["torchrun", "--nproc-per-node", ranks, "-m", "dmt.training", *arguments])
