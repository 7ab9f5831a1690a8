"""`Checkpointer`: saves a model in training so that neither a kill nor a full disk loses an earlier checkpoint."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.optim.keyed import KeyedOptimizer

from dmt.collectives import gather_objects, reason_of, run_on_all_or_raise
from dmt.errors import InputError
from dmt.files import fsync_path
from dmt.formatting import shorten
from dmt.replicas.sync import drifted
from dmt.replicas.sync import moment_scales as scales_of
from dmt.sptt.mesh import TowerMesh
from dmt.training.checkpoints.manifest import (
    PROBE,
    CheckpointStore,
    FileRecord,
    Manifest,
    check_plain,
    record_of,
    write_manifest,
)
from dmt.training.checkpoints.reshard import write_pieces
from dmt.training.checkpoints.state import Piece, collect_state, non_finite
from dmt.training.device import random_state
from dmt.training.records import versions

__all__ = ["RNG", "Checkpointer"]

logger = logging.getLogger(__name__)

RNG = "rng"
"""Name of the random number generators' states, uint8 [W, bytes]: one row for each of the W ranks."""


class Checkpointer:
    """Saves checkpoints into one folder that all ranks see; collective, also its constructor.

    ==============  ===========================================================================================
    replica 0       each rank writes its shards and a part of what all hold, and hashes what it writes
    other replicas  write nothing (replicas are equal after a sync: save then) and learn the outcome
    global rank 0   writes the manifest, calls ``describe``, and renames the folder: the checkpoint is whole
    ==============  ===========================================================================================

    A save that fails on any rank, because a disk is full or a folder may not be written, fails on all: what it wrote
    is deleted, earlier checkpoints stay, rank 0 logs the reason, and training can go on to the next save.

    Args:
        folder: where checkpoints are (`dmt.training.checkpoints.manifest`); leftovers of a killed save are removed.
        mesh: the groups.
        keep: how many checkpoints to keep.
        asynchronous: `save` returns once the state is copied to the CPU's memory; a thread writes it.
        describe: called on rank 0 with the folder being written, to add files that describe the tensors; called from
            the writing thread if saving is asynchronous.

    Raises:
        InputError: ``keep`` is below 1, rank 0 cannot write the folder, or a rank does not see what rank 0 writes
            there; on every rank.

    Example::

        checkpointer = Checkpointer(Path("runs/x/checkpoint"), mesh)
        try:
            ...
            checkpointer.save(model, optimizer, step=step, progress={"epoch": epoch, "row": row})
            ...
            checkpointer.wait()
        finally:
            checkpointer.close()
    """

    def __init__(
        self,
        folder: Path,
        mesh: TowerMesh,
        *,
        keep: int = 3,
        asynchronous: bool = False,
        describe: Callable[[Path], None] | None = None,
    ) -> None:
        self._store = CheckpointStore(folder, keep)
        self._mesh = mesh
        self._describe = describe
        ranks = mesh.topology.sharding_groups()[0]
        # A group of their own: a thread may not use those that training uses at the same time.
        self._writers = dist.new_group(ranks, backend="gloo")
        self._writes = mesh.rank in ranks
        self._leads = mesh.rank == ranks[0]
        self._thread = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._pending: Future[str | None] | None = None
        self._pending_step: int | None = None
        run_on_all_or_raise(self._store.prepare if self._leads else _nothing, mesh.global_group)
        _check_shared(folder, mesh.global_group)

    def save(
        self,
        model: nn.Module,
        optimizer: KeyedOptimizer | None,
        *,
        step: int,
        progress: Mapping[str, Any],
        moment_scales: Mapping[str, float] | None = None,
        describe: Callable[[Path], None] | None = None,
    ) -> bool:
        """Saves the current state, between two training steps; collective over the job.

        Args:
            model: the sharded model, or one that every rank holds whole.
            optimizer: of all parameters, see `dmt.training.build.build_optimizer`; None saves weights only.
            step: training steps so far; an older checkpoint of the same step is replaced.
            progress: what the caller needs to go on; JSON takes it. Rank 0's is saved.
            moment_scales: factor c of the moments of this rank's tables, where it is not 1; None takes the model's.
            describe: adds files of this checkpoint, as that of the constructor does.

        Returns:
            True if the checkpoint is whole and in place, the same on every rank; always True if saving is asynchronous
            (`wait` tells the outcome).

        Raises:
            InputError: replicas were not averaged, ranks are at different steps, a number is NaN or infinite (nothing
                is saved and no checkpoint deleted), or something in the model is no tensor or in ``progress`` not plain
                data; on every rank.
        """
        self.wait()
        pieces: list[Piece] = []
        column_shards: dict[str, tuple[int, ...]] = {}

        def stage() -> tuple[int, bytes]:
            check_plain(progress)
            if drifted(model):
                raise InputError(
                    f"Step {step} is not saved: the replicas have trained since they were last averaged, and a "
                    "checkpoint holds the tables of replica 0 only. Call ReplicaSync.sync() before you save."
                )
            # On every rank: before tables are read, all replicas settle.
            state = collect_state(model.state_dict(), optimizer)
            # A buffer may: a mask, a running minimum.
            buffers = {f"model.{name}" for name, value in model.named_buffers() if type(value) is Tensor}
            if wrong := non_finite(piece for piece in state.pieces if piece.name not in buffers):
                raise InputError(
                    f"Step {step} is not saved: {shorten(wrong, ', ')} of rank {self._mesh.rank} holds NaN or an "
                    "infinite number. Earlier checkpoints are as they were: go on from the last one, with smaller "
                    "learning rates if training has diverged."
                )
            if self._writes:
                pieces.extend(state.pieces if self._thread is None else [piece.copied() for piece in state.pieces])
                column_shards.update(state.column_shards)
            return step, random_state().numpy().tobytes()

        answers = run_on_all_or_raise(stage, self._mesh.global_group)
        steps = [other for other, _ in answers]
        if len(set(steps)) > 1:
            raise InputError(
                f"Ranks save the checkpoints of different steps, {min(steps)} to {max(steps)}. Agree first."
            )
        self._pending_step = step
        if self._leads:
            states = torch.stack([torch.frombuffer(bytearray(state), dtype=torch.uint8) for _, state in answers])
            pieces.append(Piece(name=RNG, tensor=states, size=tuple(states.shape), offsets=(0, 0)))
        if self._writes:
            manifest = Manifest(
                step=step,
                progress=progress,
                versions=versions(),
                files={},
                column_shards=column_shards,
                moment_scales=scales_of(model) if moment_scales is None else moment_scales,
            )
            job = partial(self._write, pieces, manifest, describe or _nothing)
            if self._thread is not None:
                self._pending = self._thread.submit(job)
            else:
                self._pending = Future()
                self._pending.set_result(job())
        return True if self._thread is not None else self.wait()

    def wait(self) -> bool:
        """Waits for the pending save; collective over the job.

        Call it before the process group is destroyed, if saving is asynchronous.

        Returns:
            True if the save succeeded, the same on every rank, or if none was pending.
        """
        if self._pending_step is None:
            return True
        failure = None if self._pending is None else self._pending.result()
        failures = [reason for reason in gather_objects(failure, self._mesh.global_group) if reason is not None]
        if failures:
            self._tell(failures[0], "; training goes on")
        self._pending, self._pending_step = None, None
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
                self._tell(failure)
        self._pending, self._pending_step = None, None

    def _tell(self, reason: str, now: str = "") -> None:
        if self._leads:
            logger.warning(
                "The checkpoint of step %d was not saved to %s (%s). Earlier ones are as they were%s.",
                self._pending_step,
                self._store.folder,
                reason,
                now,
            )

    def _write(self, pieces: Sequence[Piece], manifest: Manifest, describe: Callable[[Path], None]) -> str | None:
        """Writes on the ranks of replica 0 what each has; returns why it failed."""
        scratch = None
        try:
            make = partial(self._store.scratch, manifest.step) if self._leads else _nothing
            scratch = run_on_all_or_raise(make, self._writers)[0]
            assert scratch is not None, "the rank that leads has made it"
            records = write_pieces(pieces, scratch, self._writers)
            ranks = gather_objects((records, manifest.column_shards, manifest.moment_scales), self._writers)
            files, column_shards, scales = (
                {k: v for part in parts for k, v in part.items()} for parts in zip(*ranks, strict=True)
            )
            manifest = replace(manifest, files=files, column_shards=column_shards, moment_scales=scales)
            finish = partial(self._finish, scratch, manifest, describe)
            run_on_all_or_raise(finish if self._leads else _nothing, self._writers)
        except Exception as error:
            if self._leads and scratch is not None:
                try:
                    self._store.drop(scratch)
                except OSError as left:
                    logger.warning("What was written of a checkpoint, %s, cannot be deleted: %s", scratch, left)
            return reason_of(error)
        return None

    def _finish(self, scratch: Path, manifest: Manifest, describe: Callable[[Path], None]) -> None:
        describe(scratch)
        if self._describe is not None:
            self._describe(scratch)
        if unseen := [name for name, record in manifest.files.items() if not _is_seen(scratch / name, record)]:
            raise OSError(
                f"rank 0 does not see {shorten(unseen, ', ')} of another rank as it was written; the folder must be "
                "one that all hosts share"
            )
        others = {}
        for path in scratch.iterdir():
            if path.name not in manifest.files:
                fsync_path(path)
                others[path.name] = record_of(path)
        write_manifest(scratch, replace(manifest, files={**manifest.files, **others}))
        self._store.commit(scratch, manifest.step)
        try:
            self._store.prune(manifest.step)
        except OSError as error:
            logger.warning("Old checkpoints in %s cannot be deleted: %s", self._store.folder, error)


def _nothing(*_: Path) -> None:
    return None


def _is_seen(path: Path, record: FileRecord) -> bool:
    try:
        return path.stat().st_size == record.bytes
    except FileNotFoundError:
        return False


def _check_shared(folder: Path, group: dist.ProcessGroup) -> None:
    """Checks that every rank sees what rank 0 writes into a folder; collective, and raises on every rank.

    Hosts that each have a disk of their own at the same path would all write, and no checkpoint would ever be whole.
    """
    rank = dist.get_rank(group)
    name = run_on_all_or_raise(partial(_make_probe, folder) if rank == 0 else str, group)[0]
    try:
        run_on_all_or_raise(partial(_find_probe, folder, name, rank), group)
    finally:
        if rank == 0:
            (folder / name).unlink(missing_ok=True)


def _make_probe(folder: Path) -> str:
    try:
        # A new name each time: hosts of a network file system remember which names were absent.
        descriptor, path = tempfile.mkstemp(prefix=PROBE, dir=folder)
        os.close(descriptor)
    except OSError as error:
        raise InputError(f"Checkpoint folder {folder} cannot be written: {error.strerror}.") from error
    return Path(path).name


def _find_probe(folder: Path, name: str, rank: int) -> None:
    # Not Path.exists: that raises where a folder may not be entered.
    if not os.path.exists(folder / name):
        raise InputError(
            f"Checkpoint folder {folder}: rank {rank} does not see what rank 0 writes there, but all ranks read and "
            "write one checkpoint together. Set train.output_dir to a folder that all hosts share."
        )
