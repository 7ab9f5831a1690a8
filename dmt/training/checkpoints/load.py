"""Loads a checkpoint of any layout into a sharded model and optimizer, or the unsharded model; runs nothing from it.

PyTorch's own reader unpickles the index of a checkpoint and every object in it, so a file from elsewhere could run any
program. `SafeReader` lets the index name the classes of an index only, and tensors are read by
``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import importlib
import io
import pickle
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dmt.collectives import run_on_all_or_raise
from dmt.errors import InputError
from dmt.formatting import shorten
from dmt.replicas.sync import moment_scales
from dmt.sptt.mesh import TowerMesh
from dmt.training.checkpoints.folder import newest, read_manifest
from dmt.training.checkpoints.state import Shards, State, collect_state, column_range, uncut
from dmt.training.checkpoints.store import RNG
from dmt.training.device import set_random_state

__all__ = ["Restored", "SafeReader", "load_plain", "restore"]

_INDEX = ".metadata"
_REMEDY = "Do not use it, unless you know better where it comes from."
_ALLOWED = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The checkpoint that `restore` loaded, and the position in training that it was saved at."""

    folder: Path
    """The checkpoint."""
    step: int
    """Number of training steps before it."""
    progress: Mapping[str, Any]
    """The ``progress`` that `Checkpointer.save` was given."""


@runtime_checkable
class FollowsSteps(Protocol):
    """An optimizer whose learning rates are those of a step."""

    def set_step(self, step: int) -> None:
        """Takes the rates for the step after ``step`` steps."""


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
        raise InputError(f"{folder} holds no checkpoint. Give the output_dir of a training run that has saved one.")
    reader, weights = SafeReader(whole), model.state_dict()
    state, saved = collect_state(weights, None), reader.sizes("model.")
    _refuse(whole, saved, [_compare(state, saved)])
    _read(reader, state, {})
    model.load_state_dict(weights)


def restore(
    source: Path, model: nn.Module, optimizer: KeyedOptimizer | None, *, mesh: TowerMesh, is_verified: bool = False
) -> Restored | None:
    """Loads a checkpoint of any layout into a sharded model and its optimizer; collective over the job.

    The layout may have changed in any way: ranks, replicas, towers x ranks, the mesh tower of each tower, the scheme of
    each table. Where a table is cut anew, a shard's row-wise state is the mean over its columns. Where the factor c of
    a table's moments changed, the moment v is multiplied by c / c_saved, which keeps v / c, and with it the size of a
    step (2D sparse parallelism, Algorithm 1, line 6). Random number generators are set if the number of ranks is what
    it was. Weights are not changed before files, names and sizes have been checked.

    Args:
        source: a checkpoint, or a folder of them, of which the newest whole one is taken: damaged ones that are newer
            are skipped with a warning.
        model: the sharded model, or one that every rank holds whole.
        optimizer: of all parameters; None loads weights only. One with `set_step`, whose learning rates follow the
            steps, goes on from that of the checkpoint. After an error, make a new one: its state may exist.
        mesh: the groups.
        is_verified: true if `newest` has just returned ``source``, so that its files need not be read twice.

    Returns:
        None where there is no checkpoint: training begins.

    Raises:
        InputError: there are checkpoints but none is whole, so that training does not begin again unnoticed; or it
            holds anything but tensors, or is of another model or optimizer; the same on every rank.
    """
    folder = source if is_verified else newest(source, mesh)
    if folder is None:
        return None
    group = mesh.global_group
    opened: list[tuple[SafeReader, State]] = []
    weights: dict[str, Any] = {}

    def compare() -> tuple[list[str], bytes]:
        reader = SafeReader(folder)
        if optimizer is not None:
            _make_state(optimizer, reader.tensors)
        weights.update(model.state_dict())
        opened.append((reader, collect_state(weights, optimizer)))
        return _compare(opened[0][1], reader.sizes(*prefixes))

    prefixes = ("model.",) if optimizer is None else ("model.", "optimizer.")
    comparisons = run_on_all_or_raise(compare, group)
    reader, state = opened[0]
    _refuse(folder, reader.sizes(*prefixes), comparisons)
    run_on_all_or_raise(partial(_read, reader, state, moment_scales(model)), group)
    # The tensors are filled already; this is for what modules keep beside them.
    model.load_state_dict(weights)
    if optimizer is not None:
        # Schedules set their learning rates, and fused optimizers take them over.
        optimizer.post_load_state_dict()
        if isinstance(optimizer, FollowsSteps):
            optimizer.set_step(reader.manifest.step)
        optimizer.zero_grad(set_to_none=True)
    states = reader.tensors.get(RNG)
    if states is not None and states.size[0] == mesh.topology.world_size:
        random_state = torch.empty(1, states.size[1], dtype=torch.uint8)
        _load(reader, {RNG: Shards(whole=tuple(states.size), tensors={(mesh.rank, 0): random_state})})
        set_random_state(random_state[0])
    return Restored(folder=folder, step=reader.manifest.step, progress=reader.manifest.progress)


def _make_state(optimizer: KeyedOptimizer, saved: Collection[str]) -> None:
    """Makes state that PyTorch's optimizers and schedules have only after a step, if the checkpoint has some of it.

    Weights stay: weight decay would move them in the step without gradients that `KeyedOptimizer.init_state` takes.
    """
    made = optimizer.state
    absent = tuple(f"optimizer.{key}." for key, parameter in optimizer.params.items() if parameter not in made)
    if not any(name.startswith(absent) for name in saved):
        return
    for part in [one for _, one in optimizer.optimizers] if isinstance(optimizer, CombinedOptimizer) else [optimizer]:
        unfused = in_backward_optimizer_filter(part.params.items())
        dense = [parameter for _, parameter in unfused if not isinstance(parameter, ShardedTensor)]
        if len(dense) < len(part.params):
            # The state of tables exists from the beginning: this is for the count of the schedule.
            part.step()
            continue
        weights = [one.detach().clone() for one in dense]
        part.init_state()
        with torch.no_grad():
            for parameter, weight in zip(dense, weights, strict=True):
                parameter.copy_(weight)


def _compare(state: State, saved: Mapping[str, tuple[int, ...]]) -> tuple[list[str], bytes]:
    """Returns what is wrong for this rank, a text each, and one byte for each saved name: 1 if this rank knows it."""
    live = {uncut(name): shards.whole for name, shards in state.items()}
    wrong = [
        f"its {name} is {list(saved[name])}, not {list(size)}" if name in saved else f"it lacks {name}"
        for name, size in live.items()
        if saved.get(name) != size
    ]
    return wrong, bytes(name in live for name in saved)


def _refuse(folder: Path, saved: Collection[str], ranks: Sequence[tuple[list[str], bytes]]) -> None:
    """Raises `InputError` unless all ranks together have what the checkpoint has, in its sizes."""
    wrong = [text for texts, _ in ranks for text in texts]
    known = [any(marks) for marks in zip(*(marks for _, marks in ranks), strict=True)]
    wrong += [f"it has {name} in addition" for name, is_known in zip(saved, known, strict=True) if not is_known]
    if wrong:
        raise InputError(
            f"{folder} is a checkpoint of another model or optimizer: {shorten(sorted(set(wrong)))}. Use the config of "
            "the run that wrote it."
        )


def _read(reader: SafeReader, state: State, scales: Mapping[str, float]) -> None:
    """Fills live tensors with a checkpoint's values in their places; not collective.

    Raises:
        InputError: a file cannot be read after all.
    """
    _load(reader, {name: shards for name, shards in state.items() if name in reader.tensors})
    for name, shards in state.items():
        if name not in reader.tensors:
            _mix(reader, name, shards)
        factor = scales.get(shards.table, 1.0) / reader.manifest.moment_scales.get(shards.table, 1.0)
        if factor != 1.0 and uncut(name).endswith(f".{shards.table}.momentum1"):
            for tensor in shards.tensors.values():
                tensor.mul_(factor)


def _mix(reader: SafeReader, name: str, shards: Shards) -> None:
    """Fills row-wise state of a column range that was not saved as one.

    A number holds for every column of its shard, so a range takes the mean over its own columns. That is exact where
    the cuts are the same; a whole table gets what an optimizer of the whole table would have summed; each shard of a
    table that was whole gets the row's number.
    """
    _, start, stop = column_range(name) or ("", 0, 0)
    columns = {}
    for saved in reader.tensors:
        if uncut(saved) == uncut(name) and (cut := column_range(saved)) is not None:
            columns[saved] = min(stop, cut[2]) - max(start, cut[1])
    columns = {saved: number for saved, number in columns.items() if number > 0}
    for offsets, tensor in shards.tensors.items():
        parts = {saved: torch.empty_like(tensor) for saved in columns}
        _load(reader, {saved: Shards(whole=shards.whole, tensors={offsets: part}) for saved, part in parts.items()})
        total = torch.stack([part.double() * columns[saved] for saved, part in parts.items()]).sum(dim=0)
        tensor.copy_(total / sum(columns.values()))


def _load(reader: SafeReader, state: State) -> None:
    with warnings.catch_warnings():
        # Each rank is meant to read for itself.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(state, storage_reader=reader, planner=_TensorPlanner(flatten_state_dict=False), no_dist=True)
        except dcp.CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            raise InputError(f"{reader.path} cannot be read ({cause}). Use another checkpoint.") from error


class _TensorPlanner(dcp.DefaultLoadPlanner):
    """Reads tensors into `Shards`, and nothing else."""

    def set_up_planner(self, state_dict: State, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        # PyTorch's looks for meta tensors in it, and takes out what it does not know.
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        shards: Shards = self.state_dict[index.fqn]
        return shards.tensors[tuple(index.offset or ())]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # PyTorch's would unpickle them.
        raise AssertionError("entries are tensors")


class SafeReader(dcp.FileSystemReader):
    """Reads a checkpoint of tensors, and nothing but tensors.

    Raises:
        InputError: manifest or index are absent or damaged, the index holds code, or names a file that the manifest
            lacks or an entry that is no tensor.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.manifest = read_manifest(folder)
        self._metadata = _read_index(folder)
        for name, entry in self._metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise InputError(f"{folder} holds a pickled object, {name!r}, which could run code. {_REMEDY}")
        for index, place in self._metadata.storage_data.items():
            if not isinstance(index, MetadataIndex) or place.relative_path not in self.manifest.files:
                raise InputError(f"{folder}: {_INDEX} reads from a file that is not in the manifest. {_REMEDY}")

    @property
    def tensors(self) -> Mapping[str, Any]:
        """Size, dtype and chunks of every tensor (``TensorStorageMetadata``), by name."""
        return self._metadata.state_dict_metadata

    def sizes(self, *prefixes: str) -> dict[str, tuple[int, ...]]:
        """Returns sizes of tensors by name, those of row-wise state under its name without column ranges."""
        return {uncut(name): tuple(one.size) for name, one in self.tensors.items() if name.startswith(prefixes)}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the index that the constructor read."""
        return self._metadata


def _read_index(folder: Path) -> Metadata:
    try:
        with (folder / _INDEX).open("rb") as stream:
            metadata = _IndexUnpickler(stream).load()
    except InputError as error:
        raise InputError(f"{folder}: {_INDEX} holds code: {error} {_REMEDY}") from error
    except FileNotFoundError as error:
        raise InputError(f"{folder} is no checkpoint: {_INDEX} is absent. Use another one.") from error
    except Exception as error:  # an unpickler raises whatever the bytes make it
        raise InputError(f"{folder}: {_INDEX} cannot be read ({error}). Use another checkpoint.") from error
    if not isinstance(metadata, Metadata):
        raise InputError(f"{folder}: {_INDEX} is a {type(metadata).__name__}, no index. {_REMEDY}")
    return metadata


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _ALLOWED.get(module, ()):
            raise InputError(f"it names {module}.{name}, which an index has no use for.")
        return getattr(importlib.import_module(module), name)


def _member(owner: Any, name: str) -> Enum:
    """Takes the place of ``getattr``, by which Python 3.11.2 and older versions of it name the member of an enum."""
    if not isinstance(owner, type) or not issubclass(owner, Enum):
        raise InputError("it names builtins.getattr, which an index has no use for.")
    return owner[name]
