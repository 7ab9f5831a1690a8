"""`SafeReader`: reads what ``torch.distributed.checkpoint`` wrote without running anything a file says.

PyTorch's own reader unpickles the index of a checkpoint as it comes, and whatever a state dict held besides tensors: a
file from elsewhere can run any program. Here the index may name the classes of an index only, and all else is refused.
Tensors are read by ``torch.load(weights_only=True)``, by PyTorch's reader already.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from dmt.errors import InputError

__all__ = ["INDEX_NAME", "SafeReader"]

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
