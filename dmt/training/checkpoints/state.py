"""What a checkpoint holds of a model and its optimizer: tensors under names without ranks or layout.

``model.<parameter>`` and ``optimizer.<parameter>.<state>``, with parameters named as in the unsharded model: towers by
their number in the model, tables by name. Counts are 0-d tensors.

Row-wise AdaGrad keeps one number for each row of a table, but for a table cut column-wise one for each row of each
shard (the mean over *its* columns), which TorchRec concatenates. Here each column range has a name of its own,
``<state>.columns_0_64``, [rows], so that a table can be cut anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torchrec.optim.keyed import KeyedOptimizer

from dmt.errors import InputError
from dmt.sharding.schemes import column_widths

__all__ = ["Shards", "chunks", "collect_state", "column_range", "is_finite", "uncut"]

# Numbers looked at in one go: tables are too large for a copy.
_CHUNK = 2**20
_COLUMNS = re.compile(r"(optimizer\..+)\.columns_(\d+)_(\d+)")


@dataclass(kw_only=True)
class Shards:
    """This rank's shards of a tensor, as an entry of a state dict of ``torch.distributed.checkpoint`` (DCP).

    DCP asks for ``size`` and the methods with underscores, its protocol ``_Checkpointable``.
    """

    whole: tuple[int, ...]
    """Size of the whole tensor."""
    table: str = ""
    """The table whose optimizer state this is."""
    tensors: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    """The live tensors by their offsets in the whole one; none where only other ranks hold shards."""

    def size(self) -> torch.Size:
        """Returns the size of the whole tensor."""
        return torch.Size(self.whole)

    def copied(self) -> Shards:
        """Returns the shards with a copy of their numbers in the CPU's memory."""
        copies = {offsets: tensor.to("cpu", copy=True) for offsets, tensor in self.tensors.items()}
        return Shards(whole=self.whole, table=self.table, tensors=copies)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), one.size()) for offsets, one in self.tensors.items()]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        items = []
        for chunk, tensor in zip(self.__create_chunk_list__(), self.tensors.values(), strict=True):
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor), self.size())
            items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items


State = dict[str, Shards]


def collect_state(model: Mapping[str, Any], optimizer: KeyedOptimizer | None) -> State:
    """Names what this rank holds of a model's ``state_dict()`` and its optimizer; nothing is copied.

    Raises:
        InputError: something is no tensor.
    """
    state: State = {}
    for name, value in model.items():
        _add(state, f"model.{name}", value)
    if optimizer is not None:
        states = optimizer.state
        for key, weight in optimizer.params.items():
            # Not by get(): a defaultdict would make a state for every parameter.
            for name, value in states[weight].items() if weight in states else ():
                _add_optimizer(state, f"optimizer.{key}.{name}", value, weight)
    return state


def column_range(name: str) -> tuple[str, int, int] | None:
    """Splits the name of a row-wise state into that of the uncut table's state, first column and end; None for others.

    Example:
        >>> column_range("optimizer.t_a.weight.t_a.momentum1.columns_0_64")
        ('optimizer.t_a.weight.t_a.momentum1', 0, 64)
    """
    match = _COLUMNS.fullmatch(name)
    return None if match is None else (match[1], int(match[2]), int(match[3]))


def uncut(name: str) -> str:
    """Returns the name without a column range."""
    cut = column_range(name)
    return name if cut is None else cut[0]


def chunks(state: Mapping[str, Shards]) -> Iterator[tuple[str, Tensor]]:
    """Yields the shards in parts of about a million numbers, each with its name; views of the live tensors."""
    for name, shards in state.items():
        for tensor in shards.tensors.values():
            rows = tensor if tensor.dim() else tensor.unsqueeze(0)
            yield from ((name, chunk) for chunk in rows.split(max(1, _CHUNK * len(rows) // max(1, rows.numel()))))


def is_finite(numbers: Tensor) -> bool:
    """Returns whether no number is NaN or infinite; reads the tensor once."""
    # A sum takes a fortieth of the time; that of finite numbers may be infinite.
    return bool(numbers.sum().isfinite()) or bool(numbers.isfinite().all())


def _add(state: State, name: str, value: Any, table: str = "") -> None:
    if not isinstance(value, Tensor):
        raise InputError(
            f"{name} is a {type(value).__name__}; checkpoints hold tensors only. Register it as a tensor, or leave it "
            "out of the state dict."
        )
    whole = _size(value)
    # A rank can have an empty shard of a table.
    tensors = {offsets: tensor for offsets, tensor in _shards(value) if tensor.numel() or 0 in whole}
    state[name] = Shards(whole=whole, table=table, tensors=tensors)


def _add_optimizer(state: State, name: str, value: Any, weight: Tensor) -> None:
    # FBGEMM's and our own states are named after the table, those of PyTorch's optimizers are not.
    table = name.rpartition(".")[0].rpartition(".weight.")[2] if ".embedding_bags." in name else ""
    is_count = isinstance(value, ShardedTensor) and name.endswith(".iter")  # FBGEMM's Adam: one for each shard
    if not table or not isinstance(value, Tensor) or not (is_count or len(_size(value)) == 1):
        _add(state, name, value, table)
        return
    rows, ends = _size(weight)[0], [0, *accumulate(_column_widths(weight))]
    names = [f"{name}.columns_{first}_{end}" for first, end in pairwise(ends)]
    state.update({one: Shards(whole=() if is_count else (rows,), table=table) for one in names})
    if is_count:
        for (place, _), (_, count) in zip(_shards(weight), _shards(value), strict=True):
            state[names[ends.index(place[1])]].tensors[()] = count.reshape(())
        return
    for (offset,), tensor in _shards(value):
        if tensor.numel():
            number, row = divmod(offset, rows)
            state[names[number]].tensors[(row,)] = tensor


def _column_widths(weight: Tensor) -> tuple[int, ...]:
    """Returns the widths of a table's column shards from left to right; one width for a table not cut by columns."""
    if not isinstance(weight, ShardedTensor):
        return (_size(weight)[1],)
    return tuple(column_widths(weight.metadata().shards_metadata))


def _shards(value: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yields offsets and tensor of each part that this rank holds."""
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            yield tuple(shard.metadata.shard_offsets), shard.tensor.detach()
    else:
        yield (0,) * value.dim(), value.detach()


def _size(value: Tensor) -> tuple[int, ...]:
    # A sharded tensor warns when asked for its size itself.
    return tuple(value.metadata().size if isinstance(value, ShardedTensor) else value.size())
