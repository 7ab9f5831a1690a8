"""`Checkpointer`: saves a model in training, so that neither a kill nor a full disk costs what was saved before."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torchrec.optim.keyed import KeyedOptimizer

from dmt.collectives import gather_objects, reason_of, run_on_all_or_raise
from dmt.errors import InputError
from dmt.files import fsync_path
from dmt.formatting import shorten
from dmt.sptt.mesh import TowerMesh
from dmt.training.checkpoints.dcp import write_pieces
from dmt.training.checkpoints.files import CheckpointStore, FileRecord, Manifest, check_plain, record_of, write_manifest
from dmt.training.checkpoints.shared import check_shared
from dmt.training.checkpoints.state import Piece, collect_state
from dmt.training.records import versions

__all__ = ["RNG", "Checkpointer"]

logger = logging.getLogger(__name__)

RNG = "rng"
"""Name of the random number generators' states, uint8 [W, bytes]: one row for each of the W ranks."""


@dataclass(frozen=True, kw_only=True)
class _Snapshot:
    """What a rank has to write of one moment of training."""

    step: int
    progress: Mapping[str, Any]
    pieces: Sequence[Piece]
    column_shards: Mapping[str, tuple[int, ...]]
    moment_scales: Mapping[str, float]


class Checkpointer:
    """Saves checkpoints into one folder that all ranks see; collective, and so is making it.

    ==============  ===================================================================================
    replica 0       each rank writes its shards and a part of what all hold, and hashes what it writes
    the others      write nothing (replicas are equal after a sync: save then) and learn the outcome
    global rank 0   the manifest, ``describe``, the rename that makes the checkpoint whole
    ==============  ===================================================================================

    A save that fails on any rank, because a disk is full or a folder may not be written, fails on all: what was written
    of it is deleted, what was saved before stays, rank 0 logs the reason, and training can go on to the next save.

    Args:
        folder: where checkpoints are (`dmt.training.checkpoints.files`); what a killed save left there is cleared away.
        mesh: the groups.
        keep: how many checkpoints to keep.
        asynchronous: `save` returns once the state is copied to the CPU's memory; a thread writes it.
        describe: called on rank 0 with the folder being written, to lay files beside the tensors that say what they
            are of; from that thread, where saving is asynchronous.

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
        # Of their own: a thread may not use the groups that training uses at the same time.
        self._writers = dist.new_group(ranks, backend="gloo")
        self._writes = mesh.rank in ranks
        self._leads = mesh.rank == ranks[0]
        self._thread = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._pending: Future[str | None] | None = None
        self._pending_step: int | None = None
        run_on_all_or_raise(self._store.prepare if self._leads else _nothing, mesh.global_group)
        check_shared(folder, mesh.global_group)

    def save(
        self,
        model: nn.Module,
        optimizer: KeyedOptimizer | None,
        *,
        step: int,
        progress: Mapping[str, Any],
        moment_scales: Mapping[str, float] | None = None,
    ) -> bool:
        """Saves the state of this moment, between two training steps; collective over the job.

        Args:
            model: the sharded model, or one that every rank holds whole.
            optimizer: of everything, see `dmt.training.job.build_optimizer`; None saves weights only.
            step: training steps so far; an older checkpoint of the same step is replaced.
            progress: what the caller needs to go on; JSON takes it. Rank 0's is saved.
            moment_scales: factor c of the moments of this rank's tables, where it is not 1.

        Returns:
            Whether the checkpoint is whole and in place, the same on every rank; when saving asynchronously, whether it
            is on its way (`wait` tells how it ended).

        Raises:
            InputError: ranks are at different steps, or something in the model is no tensor or in ``progress`` not
                plain data; on every rank.
        """
        self.wait()
        staged: list[_Snapshot] = []

        def stage() -> tuple[int, bytes]:
            check_plain(progress)
            # On every rank: before tables are read, all replicas settle.
            state = collect_state(model.state_dict(), optimizer)
            pieces = state.pieces if self._writes else []
            if self._thread is not None:
                pieces = [piece.copied() for piece in pieces]
            staged.append(
                _Snapshot(
                    step=step,
                    progress=progress,
                    pieces=pieces,
                    column_shards=state.column_shards,
                    moment_scales=moment_scales or {},
                )
            )
            return step, torch.get_rng_state().numpy().tobytes()

        answers = run_on_all_or_raise(stage, self._mesh.global_group)
        steps = [other for other, _ in answers]
        if len(set(steps)) > 1:
            raise InputError(
                f"Ranks save the checkpoints of different steps, {min(steps)} to {max(steps)}. Agree first."
            )
        random_states = torch.stack([torch.frombuffer(bytearray(state), dtype=torch.uint8) for _, state in answers])
        self._pending_step = step
        if self._writes:
            job = partial(self._write, staged[0], random_states)
            if self._thread is not None:
                self._pending = self._thread.submit(job)
            else:
                self._pending = Future()
                self._pending.set_result(job())
        return True if self._thread is not None else self.wait()

    def wait(self) -> bool:
        """Waits for the save under way; collective over the job.

        To be called before the process group is destroyed, where saving is asynchronous.

        Returns:
            Whether it succeeded, the same on every rank; True where there was none.
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
        """Lets this rank's part of the save under way end, also after an error in training; not collective.

        A save in the background needs the other ranks' threads, not their training: it becomes whole where all ranks
        that write call this, before the process group is destroyed. A failure is logged, nothing is raised. Nothing can
        be saved afterwards; calling it again does nothing.
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

    def _write(self, snapshot: _Snapshot, random_states: Tensor) -> str | None:
        """Writes on the ranks of replica 0; returns why it failed."""
        scratch = None
        try:
            make = partial(self._store.scratch, snapshot.step) if self._leads else _nothing
            scratch = run_on_all_or_raise(make, self._writers)[0]
            assert scratch is not None, "the rank that leads has made it"
            pieces = [*snapshot.pieces, *([_piece_of(random_states)] if self._leads else [])]
            records = write_pieces(pieces, scratch, self._writers)
            written = gather_objects((records, snapshot.column_shards, snapshot.moment_scales), self._writers)
            files, cuts, scales = (
                {k: v for part in some for k, v in part.items()} for some in zip(*written, strict=True)
            )
            manifest = Manifest(
                step=snapshot.step,
                progress=snapshot.progress,
                versions=versions(),
                files=files,
                column_shards=cuts,
                moment_scales=scales,
            )
            run_on_all_or_raise(partial(self._finish, scratch, manifest) if self._leads else _nothing, self._writers)
        except (Exception, CheckpointException) as error:
            if self._leads and scratch is not None:
                self._drop(scratch)
            return reason_of(error)
        return None

    def _finish(self, scratch: Path, manifest: Manifest) -> None:
        if self._describe is not None:
            self._describe(scratch)
        if unseen := [name for name, record in manifest.files.items() if not _is_seen(scratch / name, record)]:
            raise OSError(
                f"rank 0 does not see {shorten(unseen, ', ')} of another rank as it was written; the folder must be one "
                "that all hosts share"
            )
        beside = [path for path in scratch.iterdir() if path.name not in manifest.files]
        for path in beside:
            fsync_path(path)
        others = {path.name: record_of(path) for path in beside}
        write_manifest(scratch, replace(manifest, files={**manifest.files, **others}))
        self._store.commit(scratch, manifest.step)
        try:
            self._store.prune(manifest.step)
        except OSError as error:
            logger.warning("Old checkpoints in %s cannot be deleted: %s", self._store.folder, error)

    def _drop(self, scratch: Path) -> None:
        try:
            self._store.drop(scratch)
        except OSError as error:
            logger.warning("What was written of a checkpoint, %s, cannot be deleted: %s", scratch, error)


def _nothing() -> None:
    return None


def _is_seen(path: Path, record: FileRecord) -> bool:
    try:
        return path.stat().st_size == record.bytes
    except FileNotFoundError:
        return False


def _piece_of(random_states: Tensor) -> Piece:
    return Piece(name=RNG, tensor=random_states, size=tuple(random_states.shape), offsets=(0, 0))
