"""The start of a run: a checkpoint of its own or of another run, and what keeps attempts at one run apart."""

from __future__ import annotations

import errno
import fcntl
import os
import time
import uuid
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
from pydantic import Field, ValidationError

from dmt.collectives import gather_objects, run_on_all_or_raise
from dmt.errors import InputError
from dmt.files import atomic_write, check_writable, from_record, fsync_path, read_toml
from dmt.formatting import shorten
from dmt.plan.towers import TowerPlan
from dmt.sptt.mesh import TowerMesh
from dmt.training.checkpoints import checkpoints, discard_checkpoints, newest, read_manifest
from dmt.training.config import TrainingConfig
from dmt.training.data.dataset import file_text
from dmt.training.job import Job
from dmt.training.loop import Position
from dmt.training.records import check_records, unwritable

__all__ = [
    "Start",
    "TrainingFiles",
    "attempt_names",
    "begin_anew",
    "check_output_dir",
    "checkpoint_folder",
    "find_start",
    "folder_lock",
    "restart_safe_store",
    "start_with",
    "starting_point",
]

# Sections that define the parameters; another value makes another model.
_SAME_MODEL = ("model", "optimizer.sparse", "optimizer.dense")
# Settings of the data that do not change the order of rows; with another value of the rest, a position among rows has
# no meaning.
_NOT_THE_ROWS = ("data.eval_split", "data.max_eval_rows", "data.validate_rows", "data.reading", "data.workers")
# Settings of training that may change between two attempts.
_TRAINING = (
    "optimizer",
    "replicas",
    "sharding.forward_precision",
    "sharding.backward_precision",
    "sharding.table_precision",
    "train.batch_size",
)

TrainingFiles = Sequence[tuple[str, int, int, int]]


@dataclass(frozen=True, kw_only=True)
class Start:
    """The beginning of a run, with a checkpoint or without one."""

    folder: Path | None = None
    """The checkpoint; None for a run without one."""
    position: Position = field(default_factory=Position)
    """Position to continue at; the first step, where at most weights and optimizer states are taken over."""
    files: TrainingFiles
    """`ClickData.files` of what the run trains on, as it starts: they may grow while it reads them."""
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
        return [f"goes on from {self.folder}: step {at.step}, epoch {at.epoch}, row {at.row}", *self.notes]


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """What a checkpoint keeps of a run's position, beside the step."""

    epoch: Annotated[int, Field(ge=0)]
    row: Annotated[int, Field(ge=0)]
    files: list[list[Any]]
    bookmark: Any = None


def checkpoint_folder(config: TrainingConfig) -> Path:
    """Returns the folder of a run's checkpoints."""
    return Path(config.train.output_dir) / "checkpoint"


def find_start(job: Job, mesh: TowerMesh) -> Start:
    """Finds the beginning of a run, after `begin_anew`; collective.

    Raises:
        InputError: see `begin_anew`, `starting_point` and `start_with`; or no checkpoint there is whole.
    """
    files = job.data.files("train")
    ranks = gather_objects(attempt_names(), mesh.global_group)
    names, earlier = (set[str]().union(*of_ranks) for of_ranks in zip(*ranks, strict=True))

    def look() -> Path | None:
        begin_anew(job.config, names, earlier)
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


def attempt_names() -> tuple[set[str], set[str]]:
    """Returns names for this attempt at a job, and names that earlier attempts at it have; join those of all ranks.

    An attempt restarted by torchrun (``--max-restarts``) has the name of the torchrun of its host, which not every
    host need have in common. Slurm counts how often a job was requeued: within one count, another command is another
    job.
    """
    own = set()
    parents = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parents
    if len(parents) > 2:
        # <folder of this torchrun>/attempt_<n>/<rank>/error.json. Its run id is "none" in most jobs.
        own.add(f"torchrun {parents[2]}")
    earlier = set(own)
    if job := os.environ.get("SLURM_JOB_ID"):
        count = os.environ.get("SLURM_RESTART_COUNT", "0")
        requeued = int(count) if count.isdecimal() else 0
        own.add(f"slurm {job}.{requeued}")
        earlier |= {f"slurm {job}.{count}" for count in range(requeued)}
    return own, earlier


def begin_anew(config: TrainingConfig, names: Iterable[str], earlier: Container[str]) -> None:
    """Removes the run's checkpoints if ``train.resume`` is ``"never"`` and no earlier attempt at this job has done so.

    Files that `RunRecord` will delete or replace are checked before, whatever ``train.resume`` says.

    Args:
        config: the run.
        names: of this attempt, see `attempt_names`; left in ``output_dir/.begun`` for later attempts.
        earlier: names of earlier attempts at the same job.

    Raises:
        InputError: something there is not ours to delete.
    """
    check_records(config)
    if config.train.resume != "never":
        return
    mark, folder = Path(config.train.output_dir, ".begun"), checkpoint_folder(config)
    if mark.is_file() and any(name in earlier for name in mark.read_text(errors="replace").splitlines()):
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
        scratch.write_text("".join(f"{name}\n" for name in sorted(names)))
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
    notes = [f"{key}: {old!r} -> {new!r}" for key, (old, new) in changed.items() if _is_under(key, _TRAINING)]
    if of_rows and not is_own:
        return Start(folder=folder, files=files, notes=("other data: from the first row on", *notes))
    _refuse(folder, of_rows, is_own=is_own)
    position = Position(step=manifest.step, epoch=at.epoch, row=at.row, bookmark=at.bookmark)
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
    return Start(folder=folder, position=position, files=files, notes=tuple(notes), is_own=is_own)


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
        # Keys that are newer than the checkpoint have their defaults.
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


def restart_safe_store(store: dist.Store, rank: int, world_size: int, *, timeout: timedelta) -> dist.Store:
    """Returns a part of a store that only the ranks of this attempt know; every rank of the attempt calls it.

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
        time.sleep(0.05 if waiting else 0)
    return dist.PrefixStore(own, store)


def check_output_dir(folder: Path) -> None:
    """Creates the folder if it is absent; raises `InputError` if nothing can be written there."""
    try:
        check_writable(folder)
    except OSError as error:
        raise unwritable(folder, error) from error


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
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
