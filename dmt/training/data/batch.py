"""`ClickBatch`: the inputs and labels of a training step. No other module of this folder imports TorchRec.

Legend: B rows, D dense features, F categorical features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from dmt.plan.split_across_towers import split_ids
from dmt.training.data.columns import Columns
from dmt.training.data.parquet import Rows, pack_rows

__all__ = ["ClickBatch", "make_batch"]

_ones = lru_cache(maxsize=4)(partial(np.ones, dtype=np.int64))  # lengths, which are only read


@dataclass
class ClickBatch(Pipelineable):
    """The batch of one rank. TorchRec's train pipelines move it between devices and streams.

    Example:
        >>> ids = KeyedJaggedTensor(keys=["C1"], values=torch.tensor([3, 4]), lengths=torch.tensor([1, 1]))
        >>> batch = ClickBatch(torch.zeros(2, 13), ids, torch.tensor([0.0, 1.0]), torch.ones(2))
        >>> batch.to(torch.device("cpu")).sparse_features.keys()
        ['C1']
    """

    dense_features: Tensor
    """Dense features, float32 [B, D]."""
    sparse_features: KeyedJaggedTensor
    """Int64 ids of the F features (the keys) in B rows; batches may share the tensor of lengths: do not change it."""
    labels: Tensor
    """Labels, 0 or 1, float32 [B]; all are 0 if the rows have no labels."""
    weights: Tensor
    """1 for a row of the data, 0 for a padding row, which metrics ignore; float32 [B]."""

    def to(self, device: torch.device, non_blocking: bool = False) -> ClickBatch:
        """Returns the batch on ``device``; with ``non_blocking``, copies from page-locked memory are asynchronous."""
        return ClickBatch(*(part.to(device=device, non_blocking=non_blocking) for part in self._parts()))

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells PyTorch's allocator that ``stream`` uses the batch, so that its memory is not reused too early."""
        for part in self._parts():
            part.record_stream(stream)

    def pin_memory(self) -> ClickBatch:
        """Returns the batch in page-locked memory, from which copies to a GPU can be asynchronous."""
        return ClickBatch(*(part.pin_memory() for part in self._parts()))

    def _parts(self) -> tuple[Any, ...]:
        return self.dense_features, self.sparse_features, self.labels, self.weights

    def split_columns(self, splits: Mapping[str, Sequence[int]]) -> ClickBatch:
        """Returns the batch for tables that are split by columns, with a feature's ids repeated for each column shard.

        ``splits`` maps each such feature to the widths of its column shards. The ids are repeated in the batch, not in
        the model (`dmt.plan.split_across_towers.split_ids`): a train pipeline can start the id exchange of the next
        batch early only if the model uses the ids unchanged.
        """
        return replace(self, sparse_features=split_ids(self.sparse_features, splits)) if splits else self


def make_batch(parts: Sequence[Rows], columns: Columns, batch_size: int) -> ClickBatch:
    """Returns a batch of ``batch_size`` rows: all rows of ``parts`` (at most that many), then padding of weight 0.

    A padding row has label 0, dense features 0, id 0 in features with one id per row, and an empty bag in the others.

    Example:
        >>> from dmt.training.data.columns import Feature
        >>> columns = Columns(dense=(), features=(Feature(name="C1", rows=10, table="C1"),), label=None)
        >>> batch = make_batch([pack_rows(pa.table({"C1": [7]}), columns)], columns, batch_size=2)
        >>> batch.weights.tolist(), batch.sparse_features.values().tolist()
        ([1.0, 0.0], [7, 0])
    """
    parts = parts or [pack_rows(columns.schema.empty_table(), columns)]
    first, at = int(columns.label is not None), 0
    last = first + len(columns.dense)
    weights, labels = np.zeros((2, batch_size), np.float32)
    dense = np.zeros((batch_size, len(columns.dense)), np.float32)
    ids = np.empty((len(parts[0][0]) - last, batch_size), np.int64)
    assert sum(words.shape[1] for words, _ in parts) <= batch_size, f"too many rows for a batch of {batch_size}"
    for words, _ in parts:
        rows = slice(at, at := at + words.shape[1])
        weights[rows], labels[rows], ids[:, rows] = 1, words[0] if first else 0, words[last:]
        dense[rows] = words[first:last].astype(np.int32, copy=False).view(np.float32).T
    ids[:, at:] = 0
    bags = pa.concat_tables([bags for _, bags in parts])
    values, lengths = [*ids], [_ones(batch_size)] * len(ids)
    for place, feature in enumerate(columns.features):
        if feature.is_bag:
            lists = bags.column(feature.name).combine_chunks()
            values.insert(place, np.from_dlpack(lists.flatten()))
            lengths.insert(place, np.pad(np.diff(np.from_dlpack(lists.offsets)), (0, batch_size - at)))
    has_bags = bags.num_columns > 0  # without any, `ids` has all values in order
    sparse_features = KeyedJaggedTensor(
        keys=list(columns.feature_names),
        values=torch.from_numpy(np.concatenate(values, dtype=np.int64) if has_bags else ids.reshape(-1)),
        lengths=torch.from_numpy(np.concatenate(lengths, dtype=np.int64) if has_bags else _ones(ids.size)),
        stride=batch_size,
    )
    return ClickBatch(torch.from_numpy(dense), sparse_features, torch.from_numpy(labels), torch.from_numpy(weights))
