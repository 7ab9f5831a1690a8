"""Writing pieces by ``torch.distributed.checkpoint``: what goes where, into files that are hashed on the way."""

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
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dmt.errors import InputError
from dmt.training.checkpoints.files import FileRecord
from dmt.training.checkpoints.state import Piece

__all__ = [
    "INDEX_NAME",
    "SafeReader",
    "read_pieces",
    "write_pieces",
]


def write_pieces(pieces: Sequence[Piece], folder: Path, group: dist.ProcessGroup) -> Mapping[str, FileRecord]:
    """Writes what the ranks of a group hold into a folder, each a file; what several hold is written by one of them.

    Args:
        pieces: of this rank.
        folder: all ranks see it.
        group: the ranks, on the CPU (gloo).

    Returns:
        The files that this rank wrote.

    Raises:
        torch.distributed.checkpoint.CheckpointException: a rank could not write; on every rank.
    """
    files = _RecordedFiles()
    # Its own fsync would take our streams for ones that it must sync the whole machine for.
    writer = dcp.FileSystemWriter(folder, sync_files=False)
    writer.fs = files
    # A path would be pickled as an object.
    writer.path = str(folder)
    dcp.save({}, storage_writer=writer, planner=_PiecePlanner(pieces), process_group=group)
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
    """The file system with a record of every file that is written, made on the way."""

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
    """A new file whose faults show at `record`: raised inside PyTorch's zip writer they would end the process."""

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
        """What was written; raises what went wrong since the file was opened."""
        if self._fault is not None:
            raise self._fault
        return FileRecord(bytes=self._length, sha256=self._sha256.hexdigest())


@dataclass(frozen=True, kw_only=True)
class _Region:
    """A part of a saved tensor, and the live tensor that it goes into."""

    name: str
    offsets: tuple[int, ...]
    into: Tensor


@dataclass(frozen=True, kw_only=True)
class _Share:
    """A column shard of a saved table whose rows' numbers are wanted, and how many of the wanted columns it has."""

    region: _Region
    columns: int


def read_pieces(
    reader: SafeReader,
    pieces: Sequence[Piece],
    *,
    column_shards: Mapping[str, Sequence[int]],
    factors: Mapping[str, float],
) -> None:
    """Fills live tensors with what a checkpoint has in their places.

    A state with one number for each row of each column shard belongs to each of the shard's columns: a new shard takes
    the mean over its own columns. That is exact where the cuts are the same, gives a whole table what an optimizer of
    the whole table would have summed (a mean of means, weighted by columns), and each shard of a table that was whole
    the row's number.

    Args:
        reader: of the checkpoint.
        pieces: what to fill; they are in it, with these sizes.
        column_shards: widths of the column shards of the saved states, see `Manifest.column_shards`.
        factors: what the AdaGrad moments of a table are multiplied by, by table; 1 for others.

    Raises:
        InputError: a file cannot be read after all.
    """
    direct, mixed = [], []
    for piece in pieces:
        shares = list(_shares(piece, column_shards.get(piece.name)))
        if len(shares) > 1:
            mixed.append((piece, shares))
        else:
            direct.append(replace(shares[0].region, into=piece.tensor))
    _read(reader, direct)
    # One at a time: they need room beside the live tensors.
    for piece, shares in mixed:
        shares = [replace(s, region=replace(s.region, into=torch.empty_like(piece.tensor))) for s in shares]
        _read(reader, [share.region for share in shares])
        total = torch.stack([share.region.into.double() * share.columns for share in shares]).sum(dim=0)
        piece.tensor.copy_(total / sum(share.columns for share in shares))
    for piece in pieces:
        if piece.is_moment and (factor := factors.get(piece.table, 1.0)) != 1.0:
            piece.tensor.mul_(factor)


def _shares(piece: Piece, widths: Sequence[int] | None) -> Iterator[_Share]:
    """The saved column shards that a piece has columns of; one for what was not saved shard by shard."""
    if piece.columns is None or widths is None:
        offsets = piece.offsets if piece.columns is None else (piece.first_row,)
        yield _Share(region=_Region(name=piece.name, offsets=offsets, into=piece.tensor), columns=1)
        return
    start, stop = piece.columns
    for shard, (first, end) in enumerate(pairwise(accumulate(widths, initial=0))):
        if start < end and first < stop:
            region = _Region(name=piece.name, offsets=(shard * piece.num_rows + piece.first_row,), into=piece.tensor)
            yield _Share(region=region, columns=min(stop, end) - max(start, first))


def _read(reader: SafeReader, regions: Sequence[_Region]) -> None:
    with warnings.catch_warnings():
        # That each rank reads for itself is the point here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load({}, storage_reader=reader, planner=_RegionPlanner(regions), no_dist=True)
        except dcp.CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            raise InputError(f"{reader.path} cannot be read ({cause}). Use another checkpoint.") from error


class _RegionPlanner(LoadPlanner):
    """Reads regions, whatever the state dict."""

    def __init__(self, regions: Sequence[_Region]) -> None:
        self._regions = list(regions)
        self._tensors: Mapping[str, Any] = {}

    def set_up_planner(
        self, state_dict: dict[str, object], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None, "PyTorch gives the index that the reader read"
        self._tensors = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for number, region in enumerate(self._regions):
            chunk = ChunkStorageMetadata(offsets=torch.Size(region.offsets), sizes=region.into.size())
            for item in create_read_items_for_chunk_list(region.name, self._tensors[region.name], [chunk]):
                place = MetadataIndex(region.name, region.offsets, number)
                items.append(replace(item, dest_index=place))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        return new_plan

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        number = read_item.dest_index.index
        assert number is not None, "every item has the number of its region"
        part = self._regions[number].into
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, offset, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """The tensor is a view of the live one."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("regions are of tensors")


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


class SafeReader(FileSystemReader):
    """Reads a checkpoint of tensors, and nothing but tensors.

    Args:
        folder: the checkpoint.
        files: names of the files that tensors may be read from.

    Raises:
        InputError: the index is absent, no index, holds code, names another file, or an entry that is no tensor.
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
        """The index, read when this was made."""
        return self._metadata


def _read_index(folder: Path) -> Metadata:
    path = folder / INDEX_NAME
    try:
        with path.open("rb") as stream:
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
        if name not in _ALLOWED.get(module, ()):
            raise InputError(f"it names {module}.{name}, which an index has no use for.")
        return getattr(importlib.import_module(module), name)
