"""`Checkpointer`: saves a model in training so that neither a kill nor a full disk loses an earlier checkpoint.

The tensors are written by ``torch.distributed.checkpoint`` (DCP) into a scratch folder of `folder.py`.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import MetadataIndex
from torchrec.optim.keyed import KeyedOptimizer

from dmt.collectives import RankError, gather_objects, reason_of, run_on_all_or_raise
from dmt.errors import InputError
from dmt.files import fsync_path
from dmt.formatting import shorten
from dmt.replicas.sync import drifted, moment_scales
from dmt.sptt.mesh import TowerMesh
from dmt.training.checkpoints.folder import (
    FileRecord,
    Manifest,
    commit,
    make_scratch,
    prepare,
    prune,
    record_of,
    remove,
    write_manifest,
)
from dmt.training.checkpoints.state import Shards, State, chunks, collect_state, is_finite
from dmt.training.device import random_state
from dmt.training.records import versions

__all__ = ["RNG", "Checkpointer", "RecordedFile"]

logger = logging.getLogger(__name__)

RNG = "rng"
"""Name of the random number generators' states, uint8 [W, bytes]: one row for each of the W ranks."""


class _Files(FileSystem):
    """DCP's file system, with a record of every file that is written."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as plain:
                yield plain
            return
        with RecordedFile(path) as stream:
            yield stream
        self.records[Path(path).name] = stream.record()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class RecordedFile(io.RawIOBase):
    """A new file that hashes what is written, and raises faults in `record`: PyTorch's zip writer would abort."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = Path(path).open("wb", buffering=0)  # noqa: SIM115 - closed in close()
        self._sha256, self._length = hashlib.sha256(), 0
        self._fault: OSError | None = None

    def write(self, data: Any) -> int:
        """Writes all of the data, or nothing more after a fault; returns the number of bytes."""
        view = memoryview(data).cast("B")
        size = len(view)
        self._length += size
        self._sha256.update(view)
        try:
            while view and self._fault is None:
                view = view[self._file.write(view) :]
        except OSError as error:
            self._fault = error
        return size

    def tell(self) -> int:
        """Returns the number of bytes so far."""
        return self._length

    def close(self) -> None:
        """Writes the file through to the disk."""
        if not self.closed:
            try:
                with self._file:
                    os.fsync(self._file.fileno())
            except OSError as error:
                self._fault = self._fault or error
            super().close()

    def record(self) -> FileRecord:
        """Returns the record of the closed file, or raises the first fault since it was opened."""
        if self._fault is not None:
            raise self._fault
        return FileRecord(bytes=self._length, sha256=self._sha256.hexdigest())


class _SavePlanner(dcp.DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Tensor:
        shards: Shards = self.state_dict[index.fqn]
        return shards.tensors[tuple(index.offset or ())]


def _write_tensors(state: State, folder: Path, group: dist.ProcessGroup) -> Mapping[str, FileRecord]:
    """Writes the shards of all ranks of a group, one file for each rank; collective. Returns this rank's files.

    A shard that several ranks hold is written by one of them. `RankError` on every rank if one could not write.
    """
    # Its own fsync takes our streams for ones that need a sync of the whole machine.
    writer = dcp.FileSystemWriter(folder, sync_files=False)
    writer.fs = files = _Files()
    # A path would be pickled as an object.
    writer.path = str(folder)
    planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        dcp.save(state, storage_writer=writer, planner=planner, process_group=group)
    except dcp.CheckpointException as error:  # no Exception but a BaseException, with one failure for each rank
        rank, (cause, _) = next(iter(error.failures.items()))
        raise RankError(f"rank {rank}: {reason_of(cause)}") from error
    return files.records


class Checkpointer:
    """Saves checkpoints into one folder that all ranks see; collective, also its constructor.

    The ranks of replica 0 write: each its shards and a part of what all hold. Rank 0 writes the manifest and renames
    the folder. A save that fails on any rank, because a disk is full or a folder may not be written, fails on all: what
    it wrote is deleted, earlier checkpoints stay, rank 0 logs the reason, and training can go on to the next save.

    Args:
        folder: where checkpoints are; leftovers of a killed save are removed.
        mesh: the groups.
        keep: how many checkpoints to keep.
        asynchronous: `save` returns once the state is copied to the CPU's memory; a thread writes it.

    Raises:
        InputError: ``keep`` is below 1, or rank 0 cannot write the folder; on every rank.

    Example::

        with contextlib.closing(Checkpointer(Path("runs/x/checkpoint"), mesh)) as checkpointer:
            ...
            checkpointer.save(model, optimizer, step=step, progress={"epoch": epoch, "row": row})
            ...
            checkpointer.wait()
    """

    def __init__(self, folder: Path, mesh: TowerMesh, *, keep: int = 3, asynchronous: bool = False) -> None:
        if keep < 1:
            raise InputError(f"keep={keep}: at least the checkpoint just written must stay. Give 1 or more.")
        self._folder, self._mesh, self._keep = folder, mesh, keep
        ranks = mesh.topology.sharding_groups()[0]
        # A group of its own: a thread may not use those that training uses at the same time.
        self._writers = dist.new_group(ranks, backend="gloo")
        self._writes, self._leads = mesh.rank in ranks, mesh.rank == ranks[0]
        self._thread = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._pending: Future[str | None] | None = None
        self._pending_step: int | None = None
        run_on_all_or_raise(partial(prepare, folder) if self._leads else lambda: None, mesh.global_group)

    def save(
        self,
        model: nn.Module,
        optimizer: KeyedOptimizer | None,
        *,
        step: int,
        progress: Mapping[str, Any],
        describe: Callable[[Path], None] | None = None,
    ) -> bool:
        """Saves the current state, between two training steps; collective over the job.

        Args:
            model: the sharded model, or one that every rank holds whole.
            optimizer: of all parameters, see `dmt.training.build.build_optimizer`; None saves weights only.
            step: training steps so far; an older checkpoint of the same step is replaced.
            progress: what the caller needs to go on; JSON takes it. Rank 0's is saved.
            describe: called on rank 0 with the folder being written, to add files beside the tensors; from the writing
                thread if saving is asynchronous.

        Returns:
            True if the checkpoint is whole and in place, the same on every rank; always True if saving is asynchronous
            (`wait` has the outcome).

        Raises:
            InputError: replicas were not averaged, ranks are at different steps, a number is NaN or infinite (nothing
                is saved and no checkpoint deleted), or something in the model is no tensor or in ``progress`` not plain
                data; on every rank.
        """
        self.wait()
        state: State = {}

        def stage() -> tuple[int, bytes]:
            try:
                json.dumps(progress)
            except (TypeError, ValueError) as error:
                raise InputError(f"progress={progress} is not plain data ({error}), which JSON takes.") from error
            if drifted(model):
                raise InputError(
                    f"Step {step} is not saved: the replicas have trained since they were last averaged, and a "
                    "checkpoint holds the tables of replica 0 only. Call ReplicaSync.sync() before you save."
                )
            # On every rank: before tables are read, all replicas settle.
            live = collect_state(model.state_dict(), optimizer)
            _check_finite(step, model, live, self._mesh.rank)
            if self._writes:
                state.update(live if self._thread is None else {name: one.copied() for name, one in live.items()})
            return step, random_state().numpy().tobytes()

        answers = run_on_all_or_raise(stage, self._mesh.global_group)
        steps = [other for other, _ in answers]
        if len(set(steps)) > 1:
            raise InputError(
                f"Ranks save the checkpoints of different steps, {min(steps)} to {max(steps)}. Agree first."
            )
        if self._leads:
            states = torch.stack([torch.frombuffer(bytearray(one), dtype=torch.uint8) for _, one in answers])
            state[RNG] = Shards(whole=tuple(states.shape), tensors={(0, 0): states})
        self._pending_step, self._pending = step, Future()
        if self._writes:
            scales = moment_scales(model)
            manifest = Manifest(step=step, progress=dict(progress), versions=versions(), files={}, moment_scales=scales)
            write = partial(self._write, state, manifest, describe)
            if self._thread is not None:
                self._pending = self._thread.submit(write)
                return True
            self._pending.set_result(write())
        else:
            self._pending.set_result(None)
        return True if self._thread is not None else self.wait()

    def wait(self) -> bool:
        """Waits for the pending save; collective over the job.

        Call it before the process group is destroyed, if saving is asynchronous.

        Returns:
            True if the save succeeded, the same on every rank, or if none was pending.
        """
        if self._pending is None:
            return True
        failures = [one for one in gather_objects(self._pending.result(), self._mesh.global_group) if one is not None]
        if failures:
            self._warn(failures[0], "; training goes on")
        self._pending = None
        return not failures

    def close(self) -> None:
        """Finishes this rank's part of the pending save, also after an error in training; not collective.

        A save in the background needs the other ranks' threads, not their training: it becomes whole if all ranks that
        write call this before the process group is destroyed. A failure is logged, nothing is raised. Nothing can be
        saved afterwards; calling it again does nothing.
        """
        if self._thread is not None:
            self._thread.shutdown()
        if self._pending is not None:
            error = self._pending.exception()
            failure = self._pending.result() if error is None else reason_of(error)
            if failure is not None:
                self._warn(failure)
        self._pending = None

    def _warn(self, reason: str, now: str = "") -> None:
        if self._leads:
            logger.warning(
                "The checkpoint of step %d was not saved to %s (%s). Earlier ones are as they were%s.",
                self._pending_step,
                self._folder,
                reason,
                now,
            )

    def _write(self, state: State, manifest: Manifest, describe: Callable[[Path], None] | None) -> str | None:
        """Writes on the ranks of replica 0 what each has; returns why it failed."""
        scratch = None
        try:
            make = partial(make_scratch, self._folder, manifest.step)
            scratch = run_on_all_or_raise(make if self._leads else lambda: self._folder, self._writers)[0]
            records = _write_tensors(state, scratch, self._writers)
            ranks = gather_objects((records, manifest.moment_scales), self._writers)
            files, scales = ({k: v for one in maps for k, v in one.items()} for maps in zip(*ranks, strict=True))
            finish = partial(self._finish, scratch, replace(manifest, files=files, moment_scales=scales), describe)
            run_on_all_or_raise(finish if self._leads else lambda: None, self._writers)
        except Exception as error:
            if self._leads and scratch is not None:
                try:
                    remove(scratch)
                except OSError as left:
                    logger.warning("What was written of a checkpoint, %s, cannot be deleted: %s", scratch, left)
            return reason_of(error)
        return None

    def _finish(self, scratch: Path, manifest: Manifest, describe: Callable[[Path], None] | None) -> None:
        if describe is not None:
            describe(scratch)
        unseen = [
            name
            for name, record in manifest.files.items()
            if not (scratch / name).is_file() or (scratch / name).stat().st_size != record.bytes
        ]
        if unseen:
            raise OSError(
                f"rank 0 does not see {shorten(unseen, ', ')} of another rank as it was written; the folder must be "
                "one that all hosts share"
            )
        files = dict(manifest.files)
        for path in scratch.iterdir():
            if path.name not in files:
                fsync_path(path)
                files[path.name] = record_of(path)
        write_manifest(scratch, replace(manifest, files=files))
        committed = commit(scratch, manifest.step)
        try:
            prune(committed, self._keep)
        except OSError as error:
            logger.warning("Old checkpoints in %s cannot be deleted: %s", self._folder, error)


def _check_finite(step: int, model: nn.Module, state: State, rank: int) -> None:
    # A buffer may be infinite: a mask, a running minimum.
    buffers = {f"model.{name}" for name, value in model.named_buffers() if type(value) is Tensor}
    numbers = chunks({name: shards for name, shards in state.items() if name not in buffers})
    if wrong := list(dict.fromkeys(name for name, chunk in numbers if not is_finite(chunk))):
        raise InputError(
            f"Step {step} is not saved: {shorten(wrong, ', ')} of rank {rank} holds NaN or an infinite number. Earlier "
            "checkpoints are as they were: go on from the last one, with smaller learning rates if training has "
            "diverged."
        )
