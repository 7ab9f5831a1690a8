"""Writing pieces by ``torch.distributed.checkpoint``: what goes where, into files that are hashed on the way."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from dmt.training.checkpoints.manifest import FileRecord
from dmt.training.checkpoints.state import Piece

__all__ = ["write_pieces"]


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
