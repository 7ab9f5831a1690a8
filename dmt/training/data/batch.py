"""`ClickBatch`: the inputs and labels of a training step; the only module here that imports TorchRec.

Legend: B rows, D dense features, F categorical features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from dmt.plan.split_across_towers import split_ids
from dmt.training.data.columns import Columns

__all__ = ["ClickBatch", "make_batch"]


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
    """Ids of the F categorical features (its keys) in B rows; values and lengths int64."""
    labels: Tensor
    """Labels, 0 or 1, float32 [B]."""
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


def make_batch(rows: pa.Table, columns: Columns, batch_size: int) -> ClickBatch:
    """Returns a batch of ``batch_size`` rows: the prepared ``rows``, then padding rows of weight 0.

    A padding row has label 0, dense features 0, id 0 in features with one id per row, and an empty bag in the others.

    Example:
        >>> from dmt.training.data.columns import Feature
        >>> columns = Columns(dense=(), features=(Feature(name="C1", rows=10, table="C1"),), label=None)
        >>> batch = make_batch(pa.table({"C1": [7]}), columns, batch_size=2)
        >>> batch.weights.tolist(), batch.sparse_features.values().tolist()
        ([1.0, 0.0], [7, 0])
    """
    num_rows, fill = rows.num_rows, batch_size - rows.num_rows
    assert fill >= 0, f"{num_rows} rows in a batch of {batch_size}"
    weights, labels = np.zeros((2, batch_size), np.float32)
    weights[:num_rows] = 1
    if columns.label is not None:
        labels[:num_rows] = rows.column(columns.label)
    dense = np.zeros((batch_size, len(columns.dense)), np.float32)
    for i, name in enumerate(columns.dense):
        dense[:num_rows, i] = rows.column(name)
    values, lengths, ones = [], [], np.ones(batch_size, np.int64)
    for feature in columns.features:
        column = rows.column(feature.name)
        if feature.is_bag:
            bags = column.combine_chunks()
            values.append(bags.flatten().to_numpy())
            lengths.append(np.pad(np.diff(bags.offsets), (0, fill)))
        else:
            ids = column.to_numpy()
            values.append(np.pad(ids, (0, fill)) if fill else ids)
            lengths.append(ones)
    return ClickBatch(
        dense_features=torch.from_numpy(dense),
        sparse_features=KeyedJaggedTensor(
            keys=list(columns.feature_names),
            values=torch.from_numpy(np.concatenate(values, dtype=np.int64)),
            lengths=torch.from_numpy(np.concatenate(lengths, dtype=np.int64)),
            stride=batch_size,
        ),
        labels=torch.from_numpy(labels),
        weights=torch.from_numpy(weights),
    )
