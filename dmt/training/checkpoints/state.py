"""The tensors in a checkpoint of a model and its optimizer: how they are named, written, and read in any layout.

Names are independent of ranks and layout: ``model.<name>`` for parameters and buffers, named as in the unsharded model
(towers by number in the model, tables by name), and ``optimizer.<parameter>.<state>``. Step counts are 0-d tensors.

Row-wise AdaGrad keeps one number for each row of a table. If the table is split by columns, it keeps one for each row
of each shard (the mean over the shard's columns), and TorchRec concatenates the shards' numbers. In a checkpoint each
column range has a separate tensor, ``<state>.columns_0_64`` [rows], so that the table can be loaded with another split.

DCP (``torch.distributed.checkpoint``) unpickles the index of a checkpoint and the objects in it, so an untrusted file
could run any code. `TensorReader` allows only the classes that an index needs, and reads tensors with
``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import pickle
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, OptimizerWrapper

from dmt.collectives import RankError, reason_of
from dmt.errors import InputError
from dmt.sharding.schemes import column_widths

__all__ = ["RecordedFile", "Shards", "State", "TensorReader", "collect_state", "split_name", "write_tensors"]

_COLUMNS = re.compile(r"(optimizer\..+)\.columns_(\d+)_(\d+)")
_TABLE_STATE = re.compile(r"\.(?:embedding_bags|embeddings)\.([^.]+)\.weight\.\1\.")
_INDEX = ".metadata"
_OTHER = "Use the config of the run that wrote the checkpoint, or another checkpoint."
_REMEDY = "Use a checkpoint from a source that you trust."
_ALLOWED = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
}
"""Names that an index may import, by module."""


@dataclass(kw_only=True)
class Shards:
    """This rank's shards of a tensor, as an entry of a DCP state dict.

    DCP calls ``size`` and the methods with underscores (its protocol ``_Checkpointable``).
    """

    whole: tuple[int, ...]
    """Size of the whole tensor."""
    table: str = ""
    """Name of the table, if this is the optimizer state of a table."""
    tensors: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    """The shards, by their offsets in the whole tensor; empty if only other ranks hold shards."""

    def size(self) -> torch.Size:
        """Returns the size of the whole tensor."""
        return torch.Size(self.whole)

    def copied(self) -> Shards:
        """Returns the shards with copies of the tensors in CPU memory."""
        copies = {offsets: tensor.to("cpu", copy=True) for offsets, tensor in self.tensors.items()}
        return Shards(whole=self.whole, table=self.table, tensors=copies)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), tensor.size()) for offsets, tensor in self.tensors.items()]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        items = []
        for chunk, tensor in zip(self.__create_chunk_list__(), self.tensors.values(), strict=True):
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor), self.size())
            items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items


State = dict[str, Shards]


def collect_state(model: Mapping[str, Any], optimizer: KeyedOptimizer | None) -> State:
    """Returns this rank's shards of a model's ``state_dict()`` and of its optimizer, by name; tensors are not copied.

    Raises:
        InputError: a value is not a tensor, or a wrapper such as ``WarmupOptimizer`` hides states of the optimizer.
    """
    state = {f"model.{name}": _shards_of(f"model.{name}", value) for name, value in model.items()}
    if optimizer is not None:
        states = optimizer.state
        for part in [p for _, p in optimizer.optimizers] if isinstance(optimizer, CombinedOptimizer) else [optimizer]:
            # TorchRec's wrappers copy the states of a CombinedOptimizer when they are made, before Adam has any.
            kind, held = type(part).__name__, part.state  # read once: it is put together anew for each reader
            known = {key for key, weight in part.params.items() if weight in held}
            if isinstance(part, OptimizerWrapper) and part.state_dict()["state"].keys() - known:
                raise InputError(
                    f"A checkpoint of a {kind} would lack states of the optimizers inside it. Wrap and name each "
                    f'one: CombinedOptimizer([("tables", {kind}(model.fused_optimizer, ...)), ("dense", {kind}(...))]).'
                )
        for key, weight in optimizer.params.items():
            # Looked up only if present: a defaultdict would create a state for every parameter.
            for name, value in states[weight].items() if weight in states else ():
                state |= _optimizer_state(f"optimizer.{key}.{name}", value, weight)
    return state


def split_name(name: str) -> tuple[str, int, int]:
    """Splits a name into (name without its column range, first column, end column); (name, 0, 0) without a range.

    Example:
        >>> split_name("optimizer.t_a.weight.t_a.momentum1.columns_0_64")
        ('optimizer.t_a.weight.t_a.momentum1', 0, 64)
    """
    match = _COLUMNS.fullmatch(name)
    return (name, 0, 0) if match is None else (match[1], int(match[2]), int(match[3]))


def _shards_of(name: str, value: Any, table: str = "") -> Shards:
    if not isinstance(value, Tensor):
        raise InputError(
            f"{name} is of type {type(value).__name__}, but checkpoints hold tensors only. Register a tensor, or leave "
            "it out of the state dict."
        )
    return Shards(whole=_size(value), table=table, tensors=dict(_parts(value)))


def _optimizer_state(name: str, value: Any, weight: Tensor) -> State:
    # State names of FBGEMM and of this library contain the table's name, those of PyTorch's optimizers do not.
    match = _TABLE_STATE.search(name)
    table = "" if match is None else match[1]
    if not table or not isinstance(value, Tensor) or len(_size(value)) != 1:
        return {name: _shards_of(name, value, table)}
    rows, columns = _size(weight)
    widths = column_widths(weight.metadata().shards_metadata) if isinstance(weight, ShardedTensor) else [columns]
    ends = [0, *accumulate(widths)]
    ranges = [Shards(whole=(rows,), table=table) for _ in widths]
    for (offset,), tensor in _parts(value):
        number, row = divmod(offset, rows)
        ranges[number].tensors[(row,)] = tensor
    names = [f"{name}.columns_{first}_{end}" for first, end in pairwise(ends)]
    return dict(zip(names, ranges, strict=True))


def _parts(value: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yields (offsets, tensor) for each part of a tensor that this rank holds."""
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            if shard.tensor.numel():  # TorchRec's row-wise tables may have empty shards, behind the last row
                yield tuple(shard.metadata.shard_offsets), shard.tensor.detach()
    else:
        yield (0,) * value.dim(), value.detach()


def _size(value: Tensor) -> tuple[int, ...]:
    # ShardedTensor.size() would warn.
    return tuple(value.metadata().size if isinstance(value, ShardedTensor) else value.size())


class RecordedFile(io.FileIO):
    """A file opened for writing that hashes its content.

    Errors of writing and syncing are not raised at once, because PyTorch calls `write` from C++, where an exception
    would terminate the process. The first one is kept, and `digest` raises it: always call `digest` after closing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "wb")
        self._sha256, self._length = hashlib.sha256(), 0
        self._fault: OSError | None = None

    def write(self, data: Any) -> int:
        """Writes the data and returns their size in bytes, also if this or an earlier write fails."""
        view = memoryview(data).cast("B")
        size = len(view)
        self._length += size
        self._sha256.update(view)
        try:
            while self._fault is None and len(view):
                view = view[super().write(view) :]
        except OSError as error:
            self._fault = error
        return size

    def tell(self) -> int:
        """Returns the number of bytes that were passed to `write`."""
        return self._length

    def close(self) -> None:
        """Syncs the file to the disk and closes it."""
        try:
            if not self.closed:
                os.fsync(self.fileno())
        except OSError as error:
            self._fault = self._fault or error
        super().close()

    def digest(self) -> str:
        """Returns the SHA-256 of the closed file as hexadecimal text, or raises its first `OSError`."""
        if self._fault is not None:
            raise self._fault
        return self._sha256.hexdigest()


class _Files(FileSystem):
    """DCP's file system; records the SHA-256 of every file it writes."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb", "a writer reads nothing"
        with RecordedFile(path) as stream:
            yield stream
        # DCP renames the index after writing it.
        self.digests[Path(path).name.removesuffix(".tmp")] = stream.digest()


class _SavePlanner(dcp.DefaultSavePlanner):
    """Writes the tensors of `Shards`."""

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        shards: Shards = self.state_dict[index.fqn]
        return shards.tensors[tuple(index.offset or ())]


def write_tensors(state: State, folder: Path, group: dist.ProcessGroup) -> Mapping[str, str]:
    """Writes the shards of all ranks of a group into a folder, one file per rank; collective.

    If several ranks hold a shard, one of them writes it; one rank also writes the index. Returns the SHA-256 of the
    files that this rank wrote, by name. Raises `RankError` on every rank if a rank could not write.
    """
    # DCP would sync the whole machine for streams that it did not open; `RecordedFile` syncs each file. To copy ahead,
    # it would wait for GPU 0, the current one of a new thread, and write what other GPUs have not copied yet.
    writer = dcp.FileSystemWriter(folder, sync_files=False, per_thread_copy_ahead=0)
    writer.fs = files = _Files()
    # DCP would pickle a Path as an object.
    writer.path = str(folder)
    planner = _SavePlanner(flatten_state_dict=False)
    try:
        dcp.save(state, storage_writer=writer, planner=planner, process_group=group)
    except dcp.CheckpointException as error:  # a BaseException, with a failure for each rank
        rank, (cause, _) = next(iter(error.failures.items()))
        raise RankError(f"rank {rank}: {reason_of(cause)}") from error
    return files.digests


class TensorReader(dcp.FileSystemReader):
    """Reads the tensors of a checkpoint, and refuses anything else.

    Args:
        folder: the checkpoint.
        files: names of the files that may be read.

    Raises:
        InputError: the index is missing or damaged, or refers to code, to a file not in ``files``, or to an object.
    """

    def __init__(self, folder: Path, files: Collection[str]) -> None:
        super().__init__(folder)
        self._metadata = _read_index(folder)
        self.tensors: Mapping[str, Any] = self._metadata.state_dict_metadata
        """Size, dtype and chunks of each tensor (``TensorStorageMetadata``), by name."""
        for name, entry in self.tensors.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise InputError(f"{folder} holds a pickled object, {name!r}, which could run code. {_REMEDY}")
        for place in self._metadata.storage_data.values():
            if place.relative_path not in files:
                raise InputError(f"{folder}: {_INDEX} refers to a file that is not in the manifest. {_REMEDY}")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the index that the constructor read."""
        return self._metadata

    def fill(self, state: State) -> None:
        """Loads values of the checkpoint into the tensors of ``state``, in place; not collective.

        Row-wise state has one number per row for all columns of a shard. A column range that no saved range equals gets
        the mean of the saved numbers, weighted by the number of common columns. For a table that is no longer split,
        this is what its optimizer would have accumulated; a shard of a table that was whole gets the table's numbers.

        Raises:
            InputError: the checkpoint lacks a tensor or holds it with a different size, or a file cannot be read.
        """
        ranges: dict[str, list[tuple[str, int, int]]] = {}
        for saved in self.tensors:
            uncut, start, stop = split_name(saved)
            ranges.setdefault(uncut, []).append((saved, start, stop))
        overlaps: dict[str, dict[str, int]] = {}
        for name in state.keys() - self.tensors.keys():
            uncut, first, end = split_name(name)
            columns = {saved: min(end, stop) - max(first, start) for saved, start, stop in ranges.get(uncut, ())}
            overlaps[name] = {saved: number for saved, number in columns.items() if number > 0}
            if not overlaps[name]:
                raise InputError(f"{self.path} is a checkpoint of another model or optimizer, without {name}. {_OTHER}")
        self._load({name: shards for name, shards in state.items() if name not in overlaps})
        for name, columns in overlaps.items():
            for offsets, tensor in state[name].tensors.items():
                total = torch.zeros_like(tensor, dtype=torch.float64)
                for saved, number in columns.items():
                    part = torch.empty_like(tensor)
                    self._load({saved: Shards(whole=state[name].whole, tensors={offsets: part})})
                    total += part.double() * number
                tensor.copy_(total / sum(columns.values()))

    def _load(self, state: State) -> None:
        with warnings.catch_warnings():
            # Intended: each rank reads independently.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            try:
                dcp.load(state, storage_reader=self, planner=_TensorPlanner(), no_dist=True)
            except dcp.CheckpointException as error:
                cause, _ = next(iter(error.failures.values()))
                raise InputError(f"{self.path} cannot be read into this model ({cause}). {_OTHER}") from error


class _TensorPlanner(dcp.DefaultLoadPlanner):
    """Reads tensors into `Shards`."""

    def set_up_planner(self, state_dict: State, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        # PyTorch's version looks for meta tensors in the state dict, and removes entries it does not know.
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        shards: Shards = self.state_dict[index.fqn]
        return shards.tensors[tuple(index.offset or ())]


def _read_index(folder: Path) -> Metadata:
    try:
        with (folder / _INDEX).open("rb") as stream:
            metadata = _IndexUnpickler(stream).load()
    except InputError as error:
        raise InputError(f"{folder}: {_INDEX} holds code: {error} {_REMEDY}") from error
    except Exception as error:  # on damaged bytes, an unpickler may raise anything
        raise InputError(f"{folder}: {_INDEX} cannot be read ({error}). Use another checkpoint.") from error
    if not isinstance(metadata, Metadata):
        raise InputError(f"{folder}: {_INDEX} is a {type(metadata).__name__}, not an index. {_REMEDY}")
    return metadata


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _ALLOWED.get(module, ()):
            raise InputError(f"it imports {module}.{name}, which no index needs.")
        return getattr(importlib.import_module(module), name)


def _member(owner: Any, name: str) -> Enum:
    """Returns a member of an enum, in place of ``getattr``, by which Python up to 3.11.2 pickles such members."""
    if not isinstance(owner, type) or not issubclass(owner, Enum):
        raise InputError("it calls builtins.getattr on something other than an enum, which no index needs.")
    return owner[name]
