"""Loads a checkpoint of any layout into a sharded model and optimizer, or the unsharded model, by ``reshard.py``."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dmt.collectives import run_on_all_or_raise
from dmt.errors import InputError
from dmt.formatting import shorten
from dmt.replicas.sync import moment_scales as scales_of
from dmt.sptt.mesh import TowerMesh
from dmt.training.checkpoints.manifest import Manifest, checkpoints, damaged_files, newest, read_manifest
from dmt.training.checkpoints.reshard import SafeReader, read_pieces
from dmt.training.checkpoints.saver import RNG
from dmt.training.checkpoints.state import Piece, State, collect_state
from dmt.training.device import set_random_state

__all__ = ["Restored", "load_plain", "restore", "resume", "whole_checkpoint"]

logger = logging.getLogger(__name__)

_MODEL, _OPTIMIZER = "model.", "optimizer."


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The checkpoint that `restore` loaded, and the position in training that it was saved at."""

    folder: Path
    """The checkpoint."""
    step: int
    """Number of training steps before it."""
    progress: Mapping[str, Any]
    """The ``progress`` that `Checkpointer.save` was given."""


def load_plain(model: nn.Module, folder: Path) -> None:
    """Loads the weights of a checkpoint of any layout into the unsharded model; needs no process group.

    Args:
        model: the unsharded model.
        folder: a checkpoint, or a folder of them, of which the newest whole one is taken. Every file of it is read.

    Raises:
        InputError: there is no checkpoint, or it is damaged, holds anything but tensors, or is of another model.
    """
    whole = newest(folder)
    if whole is None:
        raise _no_checkpoint(folder)
    manifest = read_manifest(whole)
    reader = SafeReader(whole, manifest.files)
    weights = model.state_dict()
    state = collect_state(weights, None)
    saved = _saved_sizes(reader, manifest, (_MODEL,))
    _refuse(whole, saved, [_compare(state, saved)])
    read_pieces(reader, state.pieces, column_shards={}, factors={})
    model.load_state_dict(weights)


def restore(
    source: Path,
    model: nn.Module,
    optimizer: KeyedOptimizer | None,
    *,
    mesh: TowerMesh,
    moment_scales: Mapping[str, float] | None = None,
    is_verified: bool = False,
) -> Restored:
    """Loads a checkpoint of any layout into a sharded model and its optimizer; collective over the job.

    The layout may have changed in any way: ranks, replicas, towers x ranks, the mesh tower of each tower, the scheme of
    each table. Random number generators are set if the number of ranks is what it was. Nothing is changed before
    files, names and sizes have been checked. A rank has one saved shard at a time in memory beside its own shards.

    Args:
        source: a checkpoint, or a folder of them, of which the newest whole one is taken: damaged ones that are newer
            are skipped with a warning.
        model: the sharded model, or one that every rank holds whole.
        optimizer: of all parameters; None loads weights only.
        mesh: the groups.
        moment_scales: factor c of the moments of this rank's tables, where it is not 1; None takes the model's. Where
            it was another one, the moment v is multiplied by c / c_saved, which keeps v / c, and with it the size of a
            step (2D sparse parallelism, Algorithm 1, line 6).
        is_verified: true if `whole_checkpoint` has just returned ``source``, so that its files need not be read twice.

    Raises:
        InputError: there is no checkpoint, none is whole, it holds anything but tensors, or is of another model or
            optimizer; the same on every rank.
    """
    folder = source if is_verified else whole_checkpoint(source, mesh)
    group = mesh.global_group
    opened: list[_Open] = []

    def compare() -> _Comparison:
        opened.append(_Open(folder, model, optimizer))
        return _compare(opened[0].state, opened[0].saved_sizes)

    try:
        comparisons = run_on_all_or_raise(compare, group)
        _refuse(folder, opened[0].saved_sizes, comparisons)
    except InputError:
        for checkpoint in opened:
            checkpoint.undo()
        raise
    checkpoint = opened[0]
    scales = scales_of(model) if moment_scales is None else moment_scales
    run_on_all_or_raise(partial(checkpoint.read, scales), group)
    _set_random_state(checkpoint.reader, mesh)
    return Restored(folder=folder, step=checkpoint.manifest.step, progress=checkpoint.manifest.progress)


def resume(
    source: Path,
    model: nn.Module,
    optimizer: KeyedOptimizer | None,
    *,
    mesh: TowerMesh,
    moment_scales: Mapping[str, float] | None = None,
) -> Restored | None:
    """Does what `restore` does if there is a checkpoint; for the start of a loop of one's own. Collective over the job.

    Args:
        source: a folder that all ranks see; rank 0 looks whether it has checkpoints.
        model: see `restore`.
        optimizer: see `restore`.
        mesh: the groups.
        moment_scales: see `restore`.

    Returns:
        None where there is no checkpoint: training begins.

    Raises:
        InputError: there are checkpoints, but none is whole, so that training does not begin again unnoticed; or see
            `restore`.
    """
    found = run_on_all_or_raise(lambda: mesh.rank == 0 and bool(checkpoints(source)), mesh.global_group)
    if not found[0]:
        return None
    return restore(source, model, optimizer, mesh=mesh, moment_scales=moment_scales)


def whole_checkpoint(source: Path, mesh: TowerMesh) -> Path:
    """Finds the newest whole checkpoint in a folder, or the folder itself if it is one; collective over the job.

    Each rank reads some of the files. Damaged checkpoints that are newer are skipped with a warning of rank 0.

    Args:
        source: a folder that all ranks see; rank 0 lists it.
        mesh: the groups.

    Raises:
        InputError: there is none, or none is whole; the same on every rank.
    """
    group = mesh.global_group
    found = run_on_all_or_raise(lambda: [str(path) for path in checkpoints(source)] if mesh.rank == 0 else [], group)[0]
    if not found:
        raise _no_checkpoint(source)
    wrong = []
    for folder in map(Path, found):
        shares = run_on_all_or_raise(partial(_damage, folder, mesh.rank, mesh.topology.world_size), group)
        problems = list(dict.fromkeys(problem for share in shares for problem in share))
        if not problems:
            return folder
        wrong.append(shorten(problems))
        if mesh.rank == 0 and len(found) > 1:
            logger.warning("A checkpoint is passed over: %s", wrong[-1])
    if len(wrong) == 1:
        raise InputError(wrong[0])
    raise InputError(f"{source} holds no whole checkpoint: {wrong[0]}")


class _Comparison(NamedTuple):
    """Differences between what a rank holds of a model and a checkpoint."""

    missing: list[str]
    """Names that the checkpoint lacks."""
    sizes: list[str]
    """Sizes that differ, one text for each."""
    known: bytes
    """One byte for each name of the checkpoint: 1 if this rank knows it."""


class _Open:
    """A checkpoint and the live tensors of this rank that it is to fill; makes optimizer state that is missing."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: KeyedOptimizer | None) -> None:
        self.manifest = read_manifest(folder)
        self.reader = SafeReader(folder, self.manifest.files)
        self._model, self._optimizer = model, optimizer
        self._weights = model.state_dict()
        self.state = collect_state(self._weights, optimizer)
        self._made: _MaterializedState | None = None
        if optimizer is not None:
            found = set(self.state.sizes)
            self._made = _MaterializedState(optimizer)
            self.state = collect_state(self._weights, optimizer)
            if self.manifest.step == 0 and not (self.state.sizes.keys() - found) & self.reader.tensors.keys():
                # Saved before the first step made it.
                self.undo()
                self.state, self._made = collect_state(self._weights, optimizer), None
        prefixes = (_MODEL,) if optimizer is None else (_MODEL, _OPTIMIZER)
        self.saved_sizes = _saved_sizes(self.reader, self.manifest, prefixes)

    def read(self, moment_scales: Mapping[str, float]) -> None:
        tables = {piece.table for piece in self.state.pieces if piece.table}
        factors = {t: moment_scales.get(t, 1.0) / self.manifest.moment_scales.get(t, 1.0) for t in tables}
        read_pieces(self.reader, self.state.pieces, column_shards=self.manifest.column_shards, factors=factors)
        # The tensors are filled already; this is for what modules keep beside them.
        self._model.load_state_dict(self._weights)
        if self._optimizer is not None:
            # Schedules set their learning rates, and fused optimizers take them over.
            self._optimizer.post_load_state_dict()
            self._optimizer.zero_grad(set_to_none=True)

    def undo(self) -> None:
        if self._made is not None:
            self._made.undo()


class _MaterializedState:
    """Makes the state that PyTorch's optimizers and schedules have only after a step, such as Adam's moments.

    If state is missing, takes a step with gradients of zero and puts the weights back, since weight decay moves them
    even so. Tables are not touched: their state exists from the beginning.
    """

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        self._optimizer = optimizer
        self._before: list[tuple[MutableMapping[Any, Any], dict[Any, Any]]] = []
        states = optimizer.state
        if all(parameter in states for parameter in optimizer.params.values()):
            return
        parts = optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else [("", optimizer)]
        for _, part in parts:
            state: Any = part.state
            self._before.append((state, dict(state)))
        dense = list(_dense_parameters(optimizer))
        kept = [(parameter.detach().clone(), parameter.grad) for parameter in dense]
        for parameter in dense:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        with torch.no_grad():
            for parameter, (weight, gradient) in zip(dense, kept, strict=True):
                parameter.copy_(weight)
                parameter.grad = gradient

    def undo(self) -> None:
        """Removes the state that was made."""
        for state, before in self._before:
            state.clear()
            state.update(before)
        self._optimizer.post_load_state_dict()


def _dense_parameters(optimizer: KeyedOptimizer) -> Iterator[Tensor]:
    unsharded = ((name, p) for name, p in optimizer.params.items() if not isinstance(p, ShardedTensor))
    for _, parameter in in_backward_optimizer_filter(unsharded):
        # A schedule keeps its count under an empty parameter.
        if parameter.requires_grad and parameter.numel():
            yield parameter


def _damage(folder: Path, rank: int, world_size: int) -> list[str]:
    try:
        manifest = read_manifest(folder)
    except InputError as error:
        return [str(error)]
    wrong = damaged_files(folder, manifest, sorted(manifest.files)[rank::world_size])
    return [f"{folder} is damaged: {problem}. Use another checkpoint." for problem in wrong]


def _saved_sizes(reader: SafeReader, manifest: Manifest, prefixes: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Returns the sizes of a checkpoint's tensors by name, as in `State.sizes`."""
    sizes = {name: tuple(entry.size) for name, entry in reader.tensors.items() if name.startswith(prefixes)}
    for name, widths in manifest.column_shards.items():
        if name in sizes:
            sizes[name] = (sizes[name][0] // max(1, len(widths)),)
    return sizes


def _compare(state: State, saved: Mapping[str, tuple[int, ...]]) -> _Comparison:
    return _Comparison(
        missing=sorted(name for name in state.sizes if name not in saved),
        sizes=[
            f"its {name.removeprefix(_MODEL)} is {list(saved[name])}, the model's is {list(size)}"
            for name, size in state.sizes.items()
            if name in saved and saved[name] != size
        ],
        known=bytes(name in state.sizes for name in saved),
    )


def _refuse(folder: Path, saved: Iterable[str], ranks: Sequence[_Comparison]) -> None:
    """Raises `InputError` unless all ranks together have what the checkpoint has, in its sizes."""
    missing = sorted({name for rank in ranks for name in rank.missing})
    known = [any(marks) for marks in zip(*(rank.known for rank in ranks), strict=True)]
    unknown = sorted(name for name, is_known in zip(saved, known, strict=True) if not is_known)
    if missing or unknown:
        what = "model" if all(name.startswith(_MODEL) for name in (*missing, *unknown)) else "model or optimizer"
        raise InputError(
            f"{folder} is a checkpoint of another {what}: it lacks {_names(missing)} and has {_names(unknown)} "
            "in addition. Use the config of the run that wrote it."
        )
    if sizes := list(dict.fromkeys(text for rank in ranks for text in rank.sizes)):
        raise InputError(
            f"{folder} is a checkpoint of another model: {shorten(sizes)}. Use the config of the run that wrote it."
        )


def _names(names: Sequence[str]) -> str:
    return f"[{shorten([repr(name) for name in names], ', ')}]" if names else "nothing"


def _set_random_state(reader: SafeReader, mesh: TowerMesh) -> None:
    saved = reader.tensors.get(RNG)
    if saved is None or saved.size[0] != mesh.topology.world_size:
        return
    states = torch.empty(1, saved.size[1], dtype=torch.uint8)
    piece = Piece(name=RNG, tensor=states, size=tuple(saved.size), offsets=(mesh.rank, 0))
    read_pieces(reader, [piece], column_shards={}, factors={})
    set_random_state(states[0])


def _no_checkpoint(folder: Path) -> InputError:
    return InputError(f"{folder} holds no checkpoint. Give the output_dir of a training run that has saved one.")
