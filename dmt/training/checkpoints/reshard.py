"""Writes and reads pieces of tensors with ``torch.distributed.checkpoint`` (DCP), and runs nothing that a file says.

Each rank writes its pieces into a file that is hashed on the way; each rank reads its pieces for itself, in any layout,
from a checkpoint of any other. PyTorch's own reader unpickles the index of a checkpoint and every object in it, so a
file from elsewhere could run any program. `SafeReader` lets the index name the classes of an index only and reads
tensors by ``torch.load(weights_only=True)``, as PyTorch's reader does.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import pickle
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dmt.collectives import RankError, reason_of
from dmt.errors import InputError
from dmt.training.checkpoints.manifest import FileRecord
from dmt.training.checkpoints.state import Piece

__all__ = ["INDEX_NAME", "SafeReader", "read_pieces", "write_pieces"]

INDEX_NAME = ".metadata"
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


def write_pieces(pieces: Sequence[Piece], folder: Path, group: dist.ProcessGroup) -> Mapping[str, FileRecord]:
    """Writes the pieces of all ranks of a group into a folder, one file for each rank; collective.

    A piece that several ranks hold is written by one of them.

    Args:
        pieces: those of this rank.
        folder: seen by all ranks.
        group: of the CPU (gloo).

    Returns:
        The files that this rank wrote.

    Raises:
        RankError: a rank could not write; on every rank.
    """
    files = _RecordedFiles()
    # Its own fsync takes our streams for ones that need a sync of the whole machine.
    writer = dcp.FileSystemWriter(folder, sync_files=False)
    writer.fs = files
    # A path would be pickled as an object.
    writer.path = str(folder)
    try:
        dcp.save({}, storage_writer=writer, planner=_PiecePlanner(pieces), process_group=group)
    except dcp.CheckpointException as error:  # no Exception but a BaseException, with one failure for each rank
        rank, (cause, _) = next(iter(error.failures.items()))
        raise RankError(f"rank {rank}: {reason_of(cause)}") from error
    return files.records


class _PiecePlanner(dcp.DefaultSavePlanner):
    """Saves pieces, whatever the state dict."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {MetadataIndex(piece.name, piece.offsets): piece for piece in pieces}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(index, piece) for index, piece in self._pieces.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._pieces[index].tensor


def _write_item(index: MetadataIndex, piece: Piece) -> WriteItem:
    chunk = ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=piece.tensor.size())
    properties = TensorProperties.create_from_tensor(piece.tensor.detach())
    data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(piece.size))
    return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)


class _RecordedFiles(FileSystem):
    """The file system, with a record of every file that is written."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as plain:
                yield plain
            return
        with _HashedStream(path) as stream:
            yield stream
        self.records[Path(path).name] = stream.record()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class _HashedStream(io.RawIOBase):
    """A new file that raises its faults in `record`: raised inside PyTorch's zip writer they would end the process."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = Path(path).open("wb", buffering=0)  # noqa: SIM115 - closed in close()
        self._sha256 = hashlib.sha256()
        self._length = 0
        self._fault: OSError | None = None

    def write(self, data: Any) -> int:
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
        return self._length

    def close(self) -> None:
        """Writes the file through to the disk."""
        if self.closed:
            return
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


@dataclass(frozen=True, kw_only=True)
class _Region:
    """A region of a saved tensor and the live tensor that it is read into."""

    name: str
    offsets: tuple[int, ...]
    into: Tensor
    columns: int = 1
    """Weight of the region in a mean: the columns that its saved shard and the live one have in common."""


def read_pieces(
    reader: SafeReader,
    pieces: Sequence[Piece],
    *,
    column_shards: Mapping[str, Sequence[int]],
    factors: Mapping[str, float],
) -> None:
    """Fills live tensors with a checkpoint's values in their places.

    A state with one number for each row of each column shard holds for every column of the shard: a live shard takes
    the mean over its own columns. That is exact where the cuts are the same; a whole table gets what an optimizer of
    the whole table would have summed (a mean of means, weighted by columns); each shard of a table that was whole gets
    the row's number.

    Args:
        reader: of the checkpoint.
        pieces: what to fill; the checkpoint has them, with these sizes.
        column_shards: widths of the column shards of the saved states, see `Manifest.column_shards`.
        factors: by table, what its AdaGrad moments are multiplied by; 1 for tables left out.

    Raises:
        InputError: a file cannot be read after all.
    """
    direct: list[_Region] = []
    mixed: list[tuple[Piece, list[_Region]]] = []
    for piece in pieces:
        regions = list(_regions(piece, column_shards.get(piece.name)))
        if len(regions) > 1:
            mixed.append((piece, regions))
        else:
            direct += regions
    _read(reader, direct)
    # One piece at a time: its regions need memory beside the live tensors.
    for piece, regions in mixed:
        regions = [replace(region, into=torch.empty_like(piece.tensor)) for region in regions]
        _read(reader, regions)
        total = torch.stack([region.into.double() * region.columns for region in regions]).sum(dim=0)
        piece.tensor.copy_(total / sum(region.columns for region in regions))
    for piece in pieces:
        if piece.is_moment and (factor := factors.get(piece.table, 1.0)) != 1.0:
            piece.tensor.mul_(factor)


def _regions(piece: Piece, widths: Sequence[int] | None) -> Iterator[_Region]:
    """Yields the saved region of a piece; one for each column shard it shares columns with, if cut into shards."""
    if piece.columns is None or widths is None:
        offsets = piece.offsets if piece.columns is None else (piece.first_row,)
        yield _Region(name=piece.name, offsets=offsets, into=piece.tensor)
        return
    start, stop = piece.columns
    for shard, (first, end) in enumerate(pairwise(accumulate(widths, initial=0))):
        if start < end and first < stop:
            offsets = (shard * piece.num_rows + piece.first_row,)
            columns = min(stop, end) - max(start, first)
            yield _Region(name=piece.name, offsets=offsets, into=piece.tensor, columns=columns)


def _read(reader: SafeReader, regions: Sequence[_Region]) -> None:
    with warnings.catch_warnings():
        # Each rank is meant to read for itself.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load({}, storage_reader=reader, planner=_RegionPlanner(regions), no_dist=True)
        except dcp.CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            raise InputError(f"{reader.path} cannot be read ({cause}). Use another checkpoint.") from error


class _RegionPlanner(dcp.DefaultLoadPlanner):
    """Reads regions, whatever the state dict."""

    def __init__(self, regions: Sequence[_Region]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._regions = regions

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None, "PyTorch gives the index that the reader read"
        tensors: Mapping[str, Any] = self.metadata.state_dict_metadata
        items: list[ReadItem] = []
        for number, region in enumerate(self._regions):
            chunk = ChunkStorageMetadata(offsets=torch.Size(region.offsets), sizes=region.into.size())
            for item in create_read_items_for_chunk_list(region.name, tensors[region.name], [chunk]):
                items.append(replace(item, dest_index=MetadataIndex(region.name, region.offsets, number)))
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.index is not None, "every item has the number of its region"
        return self._regions[index.index].into

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # PyTorch's would unpickle them.
        raise AssertionError("regions are of tensors")


class SafeReader(dcp.FileSystemReader):
    """Reads a checkpoint of tensors, and nothing but tensors.

    Args:
        folder: the checkpoint.
        files: names of the files that tensors may be read from.

    Raises:
        InputError: the index is absent or no index, holds code, or names another file or an entry that is no tensor.
    """

    def __init__(self, folder: Path, files: Collection[str]) -> None:
        super().__init__(folder)
        self._metadata = _read_index(folder)
        for name, entry in self._metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise InputError(f"{folder} holds a pickled object, {name!r}, which could run code. {_REMEDY}")
        for index, place in self._metadata.storage_data.items():
            if not isinstance(index, MetadataIndex) or place.relative_path not in files:
                raise InputError(f"{folder}: {INDEX_NAME} reads from a file that is not in the manifest. {_REMEDY}")

    @property
    def tensors(self) -> dict[str, Any]:
        """Size, dtype and chunks of every tensor (``TensorStorageMetadata``), by name."""
        return dict(self._metadata.state_dict_metadata)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the index that the constructor read."""
        return self._metadata


def _read_index(folder: Path) -> Metadata:
    try:
        with (folder / INDEX_NAME).open("rb") as stream:
            metadata = _IndexUnpickler(stream).load()
    except InputError as error:
        raise InputError(f"{folder}: {INDEX_NAME} holds code: {error} {_REMEDY}") from error
    except FileNotFoundError as error:
        raise InputError(f"{folder} is no checkpoint: {INDEX_NAME} is absent. Use another one.") from error
    except Exception as error:  # an unpickler raises whatever the bytes make it
        raise InputError(f"{folder}: {INDEX_NAME} cannot be read ({error}). Use another checkpoint.") from error
    if not isinstance(metadata, Metadata):
        raise InputError(f"{folder}: {INDEX_NAME} is a {type(metadata).__name__}, no index. {_REMEDY}")
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
