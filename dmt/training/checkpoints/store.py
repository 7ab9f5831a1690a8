"""Saves checkpoints so that neither a killed process nor a full disk costs an earlier one; loads them into any layout.

============================  ======================================================================================
``step-00001234``             a complete checkpoint; the next one of the same step ends in ``.1``
``.step-00001234.partial``    an incomplete one, being written or deleted, or left by a killed process
============================  ======================================================================================

The manifest, ``checkpoint.json``, has the SHA-256 of every other file and a digest of itself. It is written last; then
the folder is renamed. A kill or a loss of power at any moment thus leaves no partial checkpoint under a final name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, OptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dmt._torchrec import group_timeout
from dmt.collectives import gather_objects, reason_of, run_on_all_or_raise
from dmt.errors import InputError
from dmt.files import check_output, from_record, fsync_path, read_record
from dmt.formatting import shorten
from dmt.replicas.sync import drifted, moment_scales
from dmt.sptt.mesh import TowerMesh
from dmt.training.checkpoints.state import Shards, State, TensorReader, collect_state, split_name, write_tensors
from dmt.training.device import on_all_ranks, on_first_rank, random_state, set_random_state
from dmt.training.records import versions

__all__ = [
    "MANIFEST_NAME",
    "Checkpointer",
    "CheckpointManifest",
    "checkpoints",
    "load",
    "load_plain",
    "newest",
    "read_manifest",
    "restore",
    "verify",
    "write_manifest",
]

logger = logging.getLogger(__name__)
Value = TypeVar("Value")

MANIFEST_NAME = "checkpoint.json"
_FORMAT = 3
_REMEDY = "Use another checkpoint."
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_RNG = "rng"  # `random_state` of every rank, uint8 [W, bytes]


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """The ``checkpoint.json`` of a checkpoint; plain data."""

    step: int
    """Number of training steps before the checkpoint."""
    progress: dict[str, Any]
    """What the caller needs to resume, such as epoch and rows; JSON values."""
    versions: dict[str, str]
    """Versions of the packages that wrote the checkpoint."""
    files: dict[Annotated[str, Field(pattern=r"^[^/\x00]+$")], str]
    """SHA-256 of every other file of the checkpoint, as hexadecimal text, by name."""
    moment_scales: dict[str, float] = field(default_factory=dict)
    """Factor c of AdaGrad's moments, by table, where c is not 1 (2D sparse parallelism, Algorithm 1, line 6)."""


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Writes the manifest with a digest of itself, and syncs it to the disk; `OSError` if it cannot be written."""
    record = {"format": _FORMAT, **asdict(manifest)}
    path = folder / MANIFEST_NAME
    path.write_text(json.dumps({**record, "digest": _digest(record)}, indent=1))
    fsync_path(path)


def read_manifest(folder: Path) -> CheckpointManifest:
    """Reads a checkpoint's manifest; `InputError` if it is missing, cut off, altered, or of another format."""
    path = folder / MANIFEST_NAME
    record = read_record(path, what="Checkpoint", version=_FORMAT, remedy=_REMEDY)
    if record.pop("digest", None) != _digest(record):
        raise InputError(f"{folder} is damaged: {MANIFEST_NAME} was altered. {_REMEDY}")
    return from_record(CheckpointManifest, record, place=f"{folder} is damaged: {MANIFEST_NAME}", remedy=_REMEDY)


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file as hexadecimal text; `OSError` if it cannot be read."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def verify(folder: Path, share: slice = slice(None)) -> CheckpointManifest:
    """Compares the SHA-256 of a checkpoint's files, or of a slice of them sorted by name, with its manifest.

    Returns:
        The manifest.

    Raises:
        InputError: the manifest or a file is missing, cut off or altered; the message names the file.
    """
    manifest = read_manifest(folder)
    for name in sorted(manifest.files)[share]:
        try:
            is_whole = sha256_of(folder / name) == manifest.files[name]
        except OSError as error:
            raise InputError(f"{folder} is damaged: {name} cannot be read ({error.strerror}). {_REMEDY}") from error
        if not is_whole:
            raise InputError(f"{folder} is damaged: {name} was altered or cut off. {_REMEDY}")
    return manifest


def checkpoints(folder: Path) -> list[Path]:
    """Lists the checkpoints in a folder, newest first and unverified, or the folder itself if it is a checkpoint."""
    if _NAME.fullmatch(folder.name) or (folder / MANIFEST_NAME).exists():
        return [folder] if folder.is_dir() else []
    return sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=_order, reverse=True)


def _order(path: Path) -> tuple[int, int]:
    """Returns the step of a checkpoint, and its number among the checkpoints of this step, from 0."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, f"{path} is listed by its name"
    return int(match[1]), int(match[2] or 0)


def newest(folder: Path, mesh: TowerMesh | None = None) -> Path | None:
    """Returns the newest intact checkpoint in a folder, or the folder itself if it is an intact checkpoint.

    Verifies every file, and skips damaged checkpoints with a warning that gives the reason. Collective if there is a
    mesh: rank 0 lists the folder, and each rank verifies some of the files.

    Returns:
        The folder of the checkpoint; None if there is no checkpoint at all.

    Raises:
        InputError: there are checkpoints, but all are damaged; the same on every rank.
    """
    share = slice(None) if mesh is None else slice(mesh.rank, None, mesh.topology.world_size)
    paths, damages = _listed(folder, mesh), list[str]()
    for path in paths:
        try:
            _on_all(partial(verify, path, share), mesh)
        except InputError as error:
            damages.append(str(error))
            if (mesh is None or mesh.rank == 0) and len(paths) > 1 and path.exists():
                logger.warning("Skipping a damaged checkpoint: %s", str(error).removesuffix(f" {_REMEDY}"))
        else:
            return path
    if not damages:
        return None
    if _listed(folder, mesh) != paths:
        # A running job has saved another checkpoint meanwhile and deleted the oldest.
        return newest(folder, mesh)
    raise InputError(damages[0] if paths == [folder] else f"{folder} holds no intact checkpoint: {damages[0]}")


def _listed(folder: Path, mesh: TowerMesh | None) -> list[Path]:
    return checkpoints(folder) if mesh is None else on_first_rank(partial(checkpoints, folder), mesh)


def _on_all(work: Callable[[], Value], mesh: TowerMesh | None) -> Value:
    return work() if mesh is None else on_all_ranks(work, mesh)


def prepare_folder(folder: Path) -> str:
    """Creates the folder of checkpoints and deletes partial ones in it; `InputError` if it cannot be written.

    Returns the name of a new empty folder in it, which only hosts that share the folder see.
    """
    check_output("Checkpoint folder", folder, is_folder=True)
    for path in folder.glob(".step-*.partial"):
        shutil.rmtree(path)
    mark = folder / f".step-{secrets.token_hex(8)}.partial"  # if a kill leaves it, the next start deletes it
    mark.mkdir()
    # Sync the entries of new folders to the disk. A folder that this process may not open is not new.
    for path in [folder, *folder.absolute().parents[:2]]:
        with suppress(PermissionError):
            fsync_path(path)
    return mark.name


def commit(scratch: Path, step: int) -> Path:
    """Gives a written checkpoint its final name, with a number if the step was saved before; returns the new path."""
    fsync_path(scratch)
    number = max((_order(path)[1] + 1 for path in checkpoints(scratch.parent) if _order(path)[0] == step), default=0)
    target = scratch.with_name(f"step-{step:08d}{f'.{number}' if number else ''}")
    os.rename(scratch, target)
    fsync_path(target.parent)
    return target


def prune(committed: Path, keep: int) -> None:
    """Deletes all checkpoints except the one just committed and the last ``keep`` - 1 of earlier steps.

    Checkpoints of later steps are deleted, too: training resumed before them and abandoned them.
    """
    paths = checkpoints(committed.parent)
    earlier = [path for path in paths if _order(path)[0] < _order(committed)[0]]
    for path in paths:
        if path not in [committed, *earlier[: keep - 1]]:
            # Rename it first, so that a kill during deletion leaves nothing that looks like a checkpoint.
            doomed = path.with_name(f".{path.name}.partial")
            os.rename(path, doomed)
            shutil.rmtree(doomed)


class Checkpointer:
    """Saves checkpoints into one folder that all ranks see. Methods and constructor are collective, except `close`.

    Each rank of replica 0 writes its shards and a part of the tensors that all ranks hold. Rank 0 writes the manifest
    and renames the folder. If a rank fails, because a disk is full or a folder is not writable, the save fails on all
    ranks: its files are deleted, earlier checkpoints stay, rank 0 logs the reason, and training can continue.

    Args:
        folder: folder of the checkpoints; partial checkpoints of a killed process are deleted.
        mesh: the process groups of the job.
        keep: number of checkpoints to keep, at least 1.
        asynchronous: let `save` return once the state is copied to CPU memory; a thread then writes the copy.

    Raises:
        InputError: rank 0 cannot write the folder, or another rank does not share it; raised on every rank.
    """

    def __init__(self, folder: str | Path, mesh: TowerMesh, *, keep: int = 3, asynchronous: bool = False) -> None:
        self._folder, self._mesh, self._keep = Path(folder), mesh, keep
        ranks = mesh.topology.sharding_groups()[0]
        # A separate group: the thread may not use a group that training uses at the same time.
        self._writers = dist.new_group(ranks, backend="gloo", timeout=group_timeout(mesh.global_group))
        self._writes, self._leads = mesh.rank in ranks, mesh.rank == 0
        self._thread, self._asynchronous = ThreadPoolExecutor(1, "checkpoint"), asynchronous
        self._pending: Future[str | None] | None = None
        mark = self._folder / on_first_rank(partial(prepare_folder, self._folder), mesh)
        sees = run_on_all_or_raise(mark.exists, mesh.global_group)  # raises without permission
        if self._leads:
            mark.rmdir()
        if unseen := [f"rank {rank}" for rank, is_seen in enumerate(sees) if not is_seen]:
            raise InputError(
                f"Checkpoint folder {self._folder}: {shorten(unseen, ', ')} cannot see what rank 0 writes there. All "
                "hosts must share it: name a folder of a shared file system (train.output_dir)."
            )

    def save(
        self,
        model: nn.Module,
        optimizer: KeyedOptimizer | None,
        *,
        step: int,
        progress: Mapping[str, Any],
        describe: Callable[[Path], None] = lambda folder: None,
    ) -> bool:
        """Saves the current state, between two training steps, after a pending save; collective over the job.

        Args:
            model: the sharded model, or a model that every rank holds whole.
            optimizer: the optimizer of all parameters (`dmt.training.build.build_optimizer`); None saves weights only.
            step: number of training steps so far. A save deletes older checkpoints of this or a later step.
            progress: what the caller needs to resume, as JSON values; rank 0's is saved.
            describe: adds files to the checkpoint. Called on rank 0 with the folder being written, in the writing
                thread, before the manifest is written.

        Returns:
            True if the checkpoint was saved, the same on every rank; always True if asynchronous (see `wait`).

        Raises:
            InputError: replicas were not averaged, a weight or an optimizer state is NaN or infinite, or see
                `collect_state`. Nothing is saved and no checkpoint deleted; raised on every rank.
        """
        self.wait()
        state: State = {}

        def stage() -> Tensor:
            if drifted(model):
                raise InputError(
                    f"Step {step} is not saved: the replicas have trained since they were last averaged, and a "
                    "checkpoint holds the tables of replica 0 only. Call ReplicaSync.sync() before save()."
                )
            # Also on ranks that write nothing: state_dict() brings tables up to date.
            live = collect_state(model.state_dict(), optimizer)
            _check_finite(step, model, live, self._mesh.rank)
            if self._writes:
                copies = self._asynchronous
                state.update({name: shards.copied() if copies else shards for name, shards in live.items()})
            return random_state()

        generators = torch.stack(run_on_all_or_raise(stage, self._mesh.global_group))
        state[_RNG] = Shards(whole=tuple(generators.shape), tensors={(0, 0): generators})
        scales = moment_scales(model)
        manifest = CheckpointManifest(
            step=step, progress=dict(progress), versions=versions(), files={}, moment_scales=scales
        )
        write = partial(self._write, state, manifest, describe) if self._writes else lambda: None
        self._pending = self._thread.submit(write)
        return True if self._asynchronous else self.wait()

    def wait(self) -> bool:
        """Waits for the pending save; collective over the job.

        Returns:
            True if the save succeeded or none was pending; the same on every rank.
        """
        if self._pending is None:
            return True
        failures = gather_objects(self._pending.result(), self._mesh.global_group)
        self._pending = None
        return not any(failures)

    def close(self) -> None:
        """Finishes this rank's part of the pending save, also after an error in training; not collective.

        The save succeeds if all ranks that write call `close` before the process group is destroyed. A failure is
        logged, not raised. Afterwards nothing can be saved.
        """
        self._thread.shutdown()
        self._pending = None

    def _write(self, state: State, manifest: CheckpointManifest, describe: Callable[[Path], None]) -> str | None:
        """Writes this rank's part of a checkpoint, on the ranks of replica 0; returns the reason if it failed."""
        scratch = self._folder / f".step-{manifest.step:08d}.partial"
        try:
            digests = write_tensors(state, scratch, self._writers)
            everyone = gather_objects((digests, manifest.moment_scales), self._writers)
            files, scales = ({k: v for part in parts for k, v in part.items()} for parts in zip(*everyone, strict=True))
            manifest = replace(manifest, files=files, moment_scales=scales)
            finish = partial(self._finish, scratch, manifest, describe) if self._leads else lambda: None
            run_on_all_or_raise(finish, self._writers)
        except Exception as error:
            if self._leads:
                logger.warning(
                    f"The checkpoint of step {manifest.step} was not saved to {self._folder} ({reason_of(error)}). "
                    "Earlier checkpoints are unchanged."
                )
                shutil.rmtree(scratch, ignore_errors=True)
            return reason_of(error)
        return None

    def _finish(self, scratch: Path, manifest: CheckpointManifest, describe: Callable[[Path], None]) -> None:
        describe(scratch)
        files, present = dict(manifest.files), {path.name for path in scratch.iterdir()}
        if unseen := sorted(files.keys() - present):
            raise OSError(f"rank 0 does not see {shorten(unseen, ', ')} of another rank: hosts must share the folder")
        for name in present - files.keys():
            fsync_path(scratch / name)
            files[name] = sha256_of(scratch / name)
        write_manifest(scratch, replace(manifest, files=files))
        committed = commit(scratch, manifest.step)
        try:
            prune(committed, self._keep)
        except OSError as error:
            logger.warning(f"Old checkpoints in {self._folder} cannot be deleted ({error}). Delete them by hand.")


def _check_finite(step: int, model: nn.Module, state: State, rank: int) -> None:
    # Buffers are exempt: a mask or a running minimum may be infinite.
    buffers = {f"model.{name}" for name, value in model.named_buffers() if type(value) is Tensor}
    wrong = [
        name
        for name, shards in state.items()
        if name not in buffers and not all(_is_finite(tensor) for tensor in shards.tensors.values())
    ]
    if wrong:
        raise InputError(
            f"Step {step} is not saved: rank {rank} has NaN or infinity in {shorten(wrong, ', ')}. Earlier checkpoints "
            "are intact: resume from the last one, with smaller learning rates if training has diverged."
        )


def _is_finite(tensor: Tensor) -> bool:
    # isfinite() of the whole tensor would need a mask as large as a table. A NaN makes both extremes NaN.
    return not tensor.numel() or all(bool(edge.isfinite()) for edge in tensor.aminmax())


def load_plain(model: nn.Module, folder: str | Path) -> None:
    """Loads the weights of a checkpoint of any layout into the unsharded model; needs no process group.

    ``folder`` is a checkpoint, or a folder of checkpoints, of which the newest intact one is loaded.

    Raises:
        InputError: there is no checkpoint, or it is damaged, holds anything but tensors, or is of another model.
    """
    if restore(folder, model, None) is None:
        raise InputError(f"{folder} holds no checkpoint. Give one, or the folder `checkpoint` of a run's output_dir.")


def restore(
    source: str | Path, model: nn.Module, optimizer: KeyedOptimizer | None, *, mesh: TowerMesh | None = None
) -> CheckpointManifest | None:
    """Loads the newest intact checkpoint in a folder, or the folder itself if it is one; see `newest` and `load`.

    Checkpoints hold no learning rates: the optimizer keeps its current rates.

    Returns:
        The manifest, with ``step`` and ``progress``; None if there is no checkpoint.

    Raises:
        InputError: see `newest` and `load`.
    """
    folder = newest(Path(source), mesh)
    return None if folder is None else load(folder, model, optimizer, mesh=mesh)


def load(
    folder: Path, model: nn.Module, optimizer: KeyedOptimizer | None, *, mesh: TowerMesh | None = None
) -> CheckpointManifest:
    """Loads a checkpoint of any layout into a model and its optimizer; returns its manifest. Collective with ``mesh``.

    If a table is split differently than in the checkpoint, a shard's row-wise state becomes the mean over its columns.
    If the factor c of a table's moments has changed, the moment v is multiplied by c / c_saved, which keeps the size of
    a step (2D sparse parallelism, Algorithm 1, line 6). With a mesh of as many ranks as saved, random number generators
    are restored. After an error, create a new model and optimizer: they may be partly loaded.

    Args:
        folder: a checkpoint that `newest` or `verify` has verified.
        model: the sharded model, or a model that every rank holds whole.
        optimizer: the optimizer of all parameters; None loads weights only.
        mesh: the process groups of the job; None for an unsharded model in one process.

    Raises:
        InputError: the checkpoint cannot be read, holds anything but tensors, or is of another model; on every rank.
    """
    manifest = _on_all(lambda: read_manifest(folder), mesh)
    reader = _on_all(lambda: TensorReader(folder, manifest.files), mesh)
    if optimizer is not None:
        _make_state(optimizer, reader.tensors)
    weights = model.state_dict()
    state = collect_state(weights, optimizer)
    _check_names(folder, reader, state, ("model.",) if optimizer is None else ("model.", "optimizer."), mesh)
    if mesh is not None and reader.tensors[_RNG].size[0] == mesh.topology.world_size:
        whole = tuple(reader.tensors[_RNG].size)
        generators = torch.empty(1, whole[1], dtype=torch.uint8)
        state[_RNG] = Shards(whole=whole, tensors={(mesh.rank, 0): generators})
    _on_all(lambda: reader.fill(state), mesh)
    _scale_moments(state, moment_scales(model), manifest.moment_scales)
    # The tensors are filled already; this updates what modules derive from them.
    model.load_state_dict(weights)
    if optimizer is not None:
        # Passes the learning rates to fused optimizers.
        optimizer.post_load_state_dict()
        optimizer.zero_grad(set_to_none=True)
    if _RNG in state:
        set_random_state(generators[0])
    return manifest


def _check_names(
    folder: Path, reader: TensorReader, state: State, prefixes: tuple[str, ...], mesh: TowerMesh | None
) -> None:
    """Raises `InputError` on every rank if the checkpoint has tensors that are in no rank's state."""
    known = {split_name(name)[0] for name in state}
    unknown = [name for name in reader.tensors if name.startswith(prefixes) and split_name(name)[0] not in known]
    everyone = [unknown] if mesh is None else gather_objects(unknown, mesh.global_group)
    if unknown := [name for name in unknown if all(name in names for names in everyone)]:
        raise InputError(
            f"{folder} is a checkpoint of another model or optimizer: yours lacks {shorten(unknown, ', ')}. Use the "
            "config of the run that wrote the checkpoint."
        )


def _scale_moments(state: State, now: Mapping[str, float], saved: Mapping[str, float]) -> None:
    """Multiplies the moments of each table by c / c_saved; see `load`."""
    for shards in state.values():
        factor = now.get(shards.table, 1.0) / saved.get(shards.table, 1.0)
        if factor != 1.0:  # moments are the only states of AdaGrad's tables
            for tensor in shards.tensors.values():
                tensor.mul_(factor)


def _make_state(optimizer: KeyedOptimizer, saved: Collection[str]) -> None:
    """Creates the state that PyTorch's optimizers lack before their first step, where the checkpoint has such state.

    This takes a step with zero gradients; weight decay then changes weights, so load them afterwards.
    """
    made, parts = optimizer.state, {name.rpartition(".")[0] for name in saved}
    absent = {f"optimizer.{key}": parameter for key, parameter in optimizer.params.items() if parameter not in made}
    if parts.isdisjoint(absent):
        return
    for part in [part for _, part in optimizer.optimizers] if isinstance(optimizer, CombinedOptimizer) else [optimizer]:
        if len(list(in_backward_optimizer_filter(part.params.items()))) == len(part.params):
            part.init_state()
        elif isinstance(part, OptimizerWrapper):
            # Fused optimizers have their state from the beginning, but a warm-up around them has not.
            part.step()
        # A parameter that never had a gradient, such as one that no output uses, has no saved state.
        for name in absent.keys() - parts:
            part.state.pop(absent[name], None)
