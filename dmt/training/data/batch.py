"""`ClickBatch`: the inputs and labels of a training step; the only module here that imports TorchRec.

Legend: B rows, D dense features, F categorical features.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from dmt.errors import InputError, did_you_mean
from dmt.plan.split_across_towers import split_ids
from dmt.training.data.deal import Bags, Rows

__all__ = ["ClickBatch", "check_ids", "make_batch"]


@dataclass
class ClickBatch(Pipelineable):
    """A rank's batch, which TorchRec's train pipelines move between devices and streams.

    Example:
        >>> ids = KeyedJaggedTensor(keys=["C1"], values=torch.tensor([3, 4]), lengths=torch.tensor([1, 1]))
        >>> batch = ClickBatch(torch.zeros(2, 13), ids, torch.tensor([0.0, 1.0]), torch.ones(2))
        >>> batch.to(torch.device("cpu")).sparse_features.keys()
        ['C1']
    """

    dense_features: Tensor
    """float32 [B, D]."""
    sparse_features: KeyedJaggedTensor
    """F keys; ids int64, lengths int64."""
    labels: Tensor
    """0 or 1, float32 [B]."""
    weights: Tensor
    """1, or 0 for a row that only fills up the batch and must not count; float32 [B]."""

    def to(self, device: torch.device, non_blocking: bool = False) -> ClickBatch:
        """Returns the batch on another device."""
        return ClickBatch(*(part.to(device=device, non_blocking=non_blocking) for part in self._parts()))

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that a stream uses the batch's memory."""
        for part in self._parts():
            part.record_stream(stream)

    def pin_memory(self) -> ClickBatch:
        """Returns the batch in page-locked memory, from which copies to a GPU can be non-blocking."""
        return ClickBatch(*(part.pin_memory() for part in self._parts()))

    def _parts(self) -> tuple[Any, ...]:
        return self.dense_features, self.sparse_features, self.labels, self.weights

    def split_columns(self, splits: Mapping[str, Sequence[int]]) -> ClickBatch:
        """Returns the batch for a model whose tables are cut: with the ids once for each column shard.

        The batch is split, and not the model's input (`dmt.plan.split_across_towers.split_ids`): a train pipeline
        starts the id exchange of the next batch early only if the model passes its ids on as they are.
        """
        return replace(self, sparse_features=split_ids(self.sparse_features, splits)) if splits else self


def make_batch(rows: Rows, feature_names: Sequence[str], is_bag: Sequence[bool], batch_size: int) -> ClickBatch:
    """Makes a batch of rows, filled up to ``batch_size`` with rows of weight 0.

    A filling row has label 0, dense features 0, id 0 in features with one id per row and an empty bag in the others.

    Example:
        >>> rows = Rows(np.ones(1, np.float32), np.ones((2, 1), np.float32), np.array([[7]]))
        >>> batch = make_batch(rows, ["C1"], [False], batch_size=2)
        >>> batch.weights.tolist(), batch.sparse_features.values().tolist()
        ([1.0, 0.0], [7, 0])
    """
    num_rows, fill = rows.num_rows, batch_size - rows.num_rows
    assert fill >= 0, f"{num_rows} rows in a batch of {batch_size}"
    labels, dense, ids = rows.labels, rows.dense, rows.ids
    if fill:
        labels, dense, ids = (np.pad(part, (*[(0, 0)] * (part.ndim - 1), (0, fill))) for part in (labels, dense, ids))
    all_ids, all_lengths = ids.reshape(-1).astype(np.int64), np.ones(ids.size, np.int64)
    if any(is_bag):
        bags, single, ones = iter(rows.bags), iter(ids), np.ones(batch_size, np.int64)
        pairs = [_padded(next(bags), fill) if has_bags else (next(single), ones) for has_bags in is_bag]
        all_ids = np.concatenate([values for values, _ in pairs]).astype(np.int64)
        all_lengths = np.concatenate([lengths for _, lengths in pairs])
    weights = torch.zeros(batch_size)
    weights[:num_rows] = 1
    return ClickBatch(
        dense_features=torch.from_numpy(np.ascontiguousarray(dense.T)),
        sparse_features=KeyedJaggedTensor(
            keys=list(feature_names),
            values=torch.from_numpy(all_ids),
            lengths=torch.from_numpy(all_lengths),
            stride=batch_size,
        ),
        labels=torch.from_numpy(np.ascontiguousarray(labels)),
        weights=weights,
    )


def _padded(bags: Bags, fill: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Returns the ids of a feature, and the lengths of its bags with ``fill`` empty ones after them."""
    values, offsets = bags
    return values, np.concatenate([np.diff(offsets), np.zeros(fill, np.int64)])


def check_ids(sparse_features: KeyedJaggedTensor, tables: Iterable[Any]) -> None:
    """Checks that every id of a batch has a row in its table. Reads the values: not for every step on a GPU.

    Args:
        sparse_features: F keys.
        tables: TorchRec ``EmbeddingBagConfig`` or `dmt.TableSpec`.

    Raises:
        InputError: a feature of a table is not in the batch, or an id is negative or beyond its table.

    Example:
        >>> from dmt.plan.tables import TableSpec
        >>> ids = KeyedJaggedTensor(keys=["C3"], values=torch.tensor([5, 120]), lengths=torch.tensor([1, 1]))
        >>> tables = [TableSpec(name="t_C3", num_embeddings=100, embedding_dim=8, feature_names=("C3",))]
        >>> try: check_ids(ids, tables)
        ... except InputError as error: print(str(error)[:62])
        Feature 'C3': id 120 is outside the table t_C3 of 100 rows (ro
    """
    keys = list(sparse_features.keys())
    for table in tables:
        for feature in table.feature_names:
            if feature not in keys:
                raise InputError(
                    f"Feature {feature!r} of table {table.name} is not in the batch ({len(keys)} features)."
                    f"{did_you_mean(feature, keys)}"
                )
            bags = sparse_features[feature]
            values = bags.values()
            wrong = (values < 0) | (values >= table.num_embeddings)
            if bool(wrong.any()):
                first = int(wrong.nonzero()[0])
                row = int(torch.searchsorted(bags.lengths().cumsum(0), torch.tensor(first), right=True))
                value, rows = int(values[first]), table.num_embeddings
                larger = f"num_embeddings_per_feature[{feature!r}] to more than the largest id, or "
                raise InputError(
                    f"Feature {feature!r}: id {value} is outside the table {table.name} of {rows} rows (row {row} of "
                    f"the batch, counted from 0). {'Ids begin at 0: set ' if value < 0 else f'Set {larger}'}"
                    "id_mode='hash'."
                )
