"""Loading a checkpoint of any layout, into a sharded model and its optimizer or into the plain one of one process."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from dmt.collectives import run_on_all_or_raise
from dmt.errors import InputError
from dmt.formatting import shorten
from dmt.sptt.mesh import TowerMesh
from dmt.training.checkpoints.dcp import SafeReader, read_pieces
from dmt.training.checkpoints.files import Manifest, checkpoints, damaged_files, is_outdated, newest, read_manifest
from dmt.training.checkpoints.optimizer_state import MaterializedState
from dmt.training.checkpoints.saver import RNG
from dmt.training.checkpoints.state import Piece, State, collect_state

__all__ = ["Restored", "load_plain", "restore", "whole_checkpoint"]

logger = logging.getLogger(__name__)

_MODEL, _OPTIMIZER = "model.", "optimizer."


@dataclass(frozen=True, kw_only=True)
class Restored:
    """Where training goes on after `restore`."""

    folder: Path
    """The checkpoint."""
    step: int
    """Training steps behind it."""
    progress: Mapping[str, Any]
    """What `Checkpointer.save` was given."""


def load_plain(model: nn.Module, folder: Path) -> None:
    """Loads the weights of a checkpoint of any layout into the plain model in this process; needs no process group.

    Args:
        model: unsharded.
        folder: a checkpoint, or a folder of them, of which the newest whole one is taken. Every file of it is read.

    Raises:
        InputError: there is no checkpoint, it is damaged, holds anything but tensors, or is of another model.
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
    each table. Random number generators are set where the number of ranks is what it was. Nothing is changed before
    files, names and sizes have been checked. A rank has one saved shard in memory at a time, besides its own.

    Args:
        source: a checkpoint, or a folder of them, of which the newest whole one is taken: damaged ones that are newer
            are passed over with a warning.
        model: the sharded model, or one that every rank holds whole.
        optimizer: of everything; None loads weights only.
        mesh: the groups.
        moment_scales: factor c of the moments of this rank's tables, where it is not 1. Where it was another one, the
            moment v is multiplied by c / c_saved, so that v / c stays, which sets the size of a step (2D sparse
            parallelism, Algorithm 1, line 6).
        is_verified: whether ``source`` is what `whole_checkpoint` has just found, so that its files need not be read
            twice.

    Raises:
        InputError: there is no checkpoint, none is whole, it holds anything but tensors, or is of another model or
            optimizer; the same on every rank.
    """
    folder = source if is_verified else whole_checkpoint(source, mesh)
    group = mesh.global_group
    opened: list[_Open] = []

    def look() -> _Comparison:
        opened.append(_Open.of(folder, model, optimizer))
        return opened[0].compare()

    try:
        comparisons = run_on_all_or_raise(look, group)
        _refuse(folder, opened[0].saved_sizes, comparisons)
    except InputError:
        for one in opened:
            one.undo()
        raise
    one = opened[0]
    run_on_all_or_raise(partial(one.read, moment_scales or {}), group)
    _set_random_state(one, mesh)
    return Restored(folder=folder, step=one.manifest.step, progress=one.manifest.progress)


def whole_checkpoint(source: Path, mesh: TowerMesh) -> Path:
    """The newest whole checkpoint in a folder, or the folder itself where it is one; collective over the job.

    Each rank reads some of the files. Damaged checkpoints that are newer are passed over with a warning of rank 0.

    Args:
        source: all ranks see it; rank 0 says what is in it.
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
    """How what a rank holds of a model differs from a checkpoint."""

    missing: list[str]
    """Names that the checkpoint lacks."""
    sizes: list[str]
    """What differs in size, as texts."""
    known: bytes
    """One byte for each name of the checkpoint: whether this rank knows it."""


@dataclass(kw_only=True)
class _Open:
    """A checkpoint and the live tensors of this rank that it is to fill."""

    reader: SafeReader
    manifest: Manifest
    model: nn.Module
    weights: Mapping[str, Any]
    optimizer: KeyedOptimizer | None
    made: MaterializedState | None
    state: State

    @classmethod
    def of(cls, folder: Path, model: nn.Module, optimizer: KeyedOptimizer | None) -> _Open:
        manifest = read_manifest(folder)
        reader = SafeReader(folder, manifest.files)
        weights = model.state_dict()
        state, made = collect_state(weights, optimizer), None
        if optimizer is not None:
            found, made = set(state.sizes), MaterializedState(optimizer)
            state = collect_state(weights, optimizer)
            if manifest.step == 0 and not (state.sizes.keys() - found) & reader.tensors.keys():
                # Saved before the first step made it.
                made.undo()
                state, made = collect_state(weights, optimizer), None
        return cls(
            reader=reader,
            manifest=manifest,
            model=model,
            weights=weights,
            optimizer=optimizer,
            made=made,
            state=state,
        )

    @property
    def saved_sizes(self) -> dict[str, tuple[int, ...]]:
        prefixes = (_MODEL,) if self.optimizer is None else (_MODEL, _OPTIMIZER)
        return _saved_sizes(self.reader, self.manifest, prefixes)

    def compare(self) -> _Comparison:
        return _compare(self.state, self.saved_sizes)

    def read(self, moment_scales: Mapping[str, float]) -> None:
        tables = {piece.table for piece in self.state.pieces if piece.table}
        factors = {t: moment_scales.get(t, 1.0) / self.manifest.moment_scales.get(t, 1.0) for t in tables}
        read_pieces(self.reader, self.state.pieces, column_shards=self.manifest.column_shards, factors=factors)
        # The tensors are there already; this is for what modules keep beside them.
        self.model.load_state_dict(self.weights)
        if self.optimizer is not None:
            # Schedules set their learning rates, and fused optimizers take them over.
            self.optimizer.post_load_state_dict()
            self.optimizer.zero_grad(set_to_none=True)

    def undo(self) -> None:
        if self.made is not None:
            self.made.undo()


def _damage(folder: Path, rank: int, world_size: int) -> list[str]:
    try:
        manifest = read_manifest(folder)
    except InputError as error:
        return [str(error)]
    wrong = damaged_files(folder, manifest, sorted(manifest.files)[rank::world_size])
    return [f"{folder} is damaged: {problem}. Use another checkpoint." for problem in wrong]


def _saved_sizes(reader: SafeReader, manifest: Manifest, prefixes: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Sizes of what a checkpoint has, as in `State.sizes`."""
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
    known = [any(of_ranks) for of_ranks in zip(*(rank.known for rank in ranks), strict=True)]
    unknown = sorted(name for name, is_known in zip(saved, known, strict=True) if not is_known)
    if missing or unknown:
        what = "model" if all(name.startswith(_MODEL) for name in (*missing, *unknown)) else "model or optimizer"
        raise InputError(
            f"{folder} is a checkpoint of another {what}: it lacks {_names(missing)} and has {_names(unknown)} "
            "besides. Use the config of the run that wrote it."
        )
    if sizes := list(dict.fromkeys(text for rank in ranks for text in rank.sizes)):
        raise InputError(
            f"{folder} is a checkpoint of another model: {shorten(sizes)}. Use the config of the run that wrote it."
        )


def _names(names: Sequence[str]) -> str:
    return f"[{shorten([repr(name) for name in names], ', ')}]" if names else "nothing"


def _set_random_state(one: _Open, mesh: TowerMesh) -> None:
    saved = one.reader.tensors.get(RNG)
    if saved is None or saved.size[0] != mesh.topology.world_size:
        return
    states = torch.empty(1, saved.size[1], dtype=torch.uint8)
    piece = Piece(name=RNG, tensor=states, size=tuple(saved.size), offsets=(mesh.rank, 0))
    read_pieces(one.reader, [piece], column_shards={}, factors={})
    torch.set_rng_state(states[0])


def _no_checkpoint(folder: Path) -> InputError:
    if is_outdated(folder):
        return InputError(
            f"{folder} holds a checkpoint of an older version of dmt, which cannot be read. Train the model again."
        )
    return InputError(f"{folder} holds no checkpoint. Give the output_dir of a training run that has saved one.")
