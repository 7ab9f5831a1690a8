"""The data of the tower study: a Parquet file in memory, read through the trainer's own reader.

Legend: R rows, D dense columns, F features, N embedding dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt.plan.tables import TableSpec
from dmt.training.data import ClickBatch, open_source
from dmt.training.data.config import DataConfig

__all__ = ["Clicks", "read_clicks"]

# Values are hashed so widely that they hardly ever collide, then renumbered; see `read_clicks`.
_HASH_ROWS = 1_000_000
_READ_ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class Clicks:
    """A data set in memory, with tables just large enough for its values."""

    tables: tuple[TableSpec, ...]
    """One for each of the F features, ``t_<feature>``."""
    train: tuple[Tensor, Tensor, Tensor]
    """Dense [R, D] float32, ids [R, F] int64, labels [R] float32."""
    test: tuple[Tensor, Tensor, Tensor]
    """Rows that are tested on, in the same form."""

    @property
    def features(self) -> list[str]:
        """The F names, in the order of the columns of the ids."""
        return [table.feature_names[0] for table in self.tables]

    def batch(self, part: tuple[Tensor, Tensor, Tensor], rows: Tensor) -> ClickBatch:
        """The given rows of `train` or `test` as a batch of the trainer."""
        dense, ids, labels = (whole[rows] for whole in part)
        sparse = KeyedJaggedTensor(
            keys=self.features,
            values=ids.T.reshape(-1),
            lengths=torch.ones(ids.numel(), dtype=torch.long),
            stride=len(rows),
        )
        return ClickBatch(dense, sparse, labels, torch.ones(len(rows)))

    def plain_batch(self, part: tuple[Tensor, Tensor, Tensor], rows: Tensor) -> ClickBatch:
        """Returns what `batch` does with the ids [B, F] as they are, for `benchmarks.towers.joined`."""
        dense, ids, labels = (whole[rows] for whole in part)
        return ClickBatch(dense, cast("Any", ids), labels, torch.ones(len(rows)))


def read_clicks(file: Path, *, embedding_dim: int, max_rows: int | None = None) -> Clicks:
    """Reads a Parquet file with the columns ``label``, ``c_*``, ``d_*`` and ``split``, as the trainer would.

    Ids are then numbered by the values that training rows have; row 0 takes missing and unseen ones. The models are
    the same as with large hashed tables, less their collisions and their rows that are never looked up, which a dense
    optimizer would still have to visit in every step.

    Args:
        file: the data.
        embedding_dim: N.
        max_rows: training rows used at most, drawn at random (always the same ones).

    Raises:
        InputError: the file is absent or not of this form.
    """
    config = DataConfig(
        kind="columns",
        train_path=str(file),
        categorical=("c_*",),
        dense=("d_*",),
        split_column="split",
        num_embeddings=_HASH_ROWS,
        shuffle_rows=0,
    )
    data = open_source(config, embedding_dim=embedding_dim)
    (dense, ids, labels), test = (_columns(data, split) for split in ("train", "eval"))
    if max_rows is not None:
        rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:max_rows]
        dense, ids, labels = dense[rows], ids[rows], labels[rows]
    seen = [np.unique(np.append(column, 0)) for column in ids.T.numpy()]
    tables = tuple(
        TableSpec(name=f"t_{name}", num_embeddings=len(known), embedding_dim=embedding_dim, feature_names=(name,))
        for name, known in zip(data.feature_names, seen, strict=True)
    )
    return Clicks(
        tables=tables,
        train=(dense, _renumbered(ids, seen), labels),
        test=(test[0], _renumbered(test[1], seen), test[2]),
    )


def _columns(data: Any, split: str) -> tuple[Tensor, Tensor, Tensor]:
    """A split as whole columns; of the training rows, up to 1,023 at the end do not fill a batch and are left out."""
    parts = []
    for batch in data.batches(split, rank=0, world_size=1, batch_size=_READ_ROWS):
        real = batch.weights > 0
        ids = batch.sparse_features.values().reshape(-1, _READ_ROWS).T
        parts.append((batch.dense_features[real], ids[real], batch.labels[real]))
    dense, ids, labels = (torch.cat(column) for column in zip(*parts, strict=True))
    return dense, ids, labels


def _renumbered(ids: Tensor, seen: list[np.ndarray[Any, Any]]) -> Tensor:
    columns = []
    for column, known in zip(ids.T.numpy(), seen, strict=True):
        position = np.searchsorted(known, column).clip(max=len(known) - 1)
        columns.append(np.where(known[position] == column, position, 0))
    return torch.from_numpy(np.stack(columns, axis=1))
