"""Data sets of the studies, in memory: three public ones, and a generated one whose interactions are known.

Legend: R rows, D dense columns, F features, N embedding dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt.errors import InputError
from dmt.plan.tables import TableSpec
from dmt.training.data.batch import ClickBatch
from dmt.training.data.config import SyntheticConfig
from dmt.training.data.synthetic import SyntheticClicks

__all__ = ["Clicks", "Part", "read_clicks", "without_test_rows", "write_planted"]

Part = tuple[Tensor, Tensor, Tensor]
"""Dense [R, D] float32, ids [R, F] int64, labels [R] float32."""
_BLOCKS, _TEST_SHARE = 80, 0.2


@dataclass(frozen=True, kw_only=True)
class Clicks:
    """A data set in memory, with tables just large enough for its values."""

    tables: tuple[TableSpec, ...]
    """One table for each of the F features, ``t_<feature>``."""
    train: Part
    test: Part

    @property
    def features(self) -> list[str]:
        """Names of the F features, in the order of the columns of the ids."""
        return [table.feature_names[0] for table in self.tables]

    def batch(self, part: Part, rows: Tensor) -> ClickBatch:
        """Returns the given rows, int64 [B], of `train` or `test` as a batch of the trainer."""
        dense, ids, labels = (whole[rows] for whole in part)
        lengths = torch.ones(ids.numel(), dtype=torch.long)
        sparse = KeyedJaggedTensor(self.features, ids.T.reshape(-1), lengths=lengths, stride=len(rows))
        return ClickBatch(dense, sparse, labels, torch.ones(len(rows)))


@cache
def read_clicks(file: Path, *, dim: int = 16, max_rows: int | None = None) -> Clicks:
    """Reads a Parquet file with the columns ``label``, ``c_*``, ``d_*`` and ``split`` (``train`` or ``test``).

    Ids number the values in the training rows from 1; missing and unseen values have id 0. Dense values are
    sign(x) log(1 + |x|), missing ones 0.

    Args:
        file: the Parquet file.
        dim: N.
        max_rows: largest number of training rows; they are drawn at random with a fixed seed. None: all.

    Raises:
        InputError: the file is absent.
    """
    if not file.exists():
        raise InputError(f"{file} does not exist. Pass the folder of <data set>.parquet as --data.")
    table = pq.read_table(file)
    is_test = np.asarray(table["split"].to_pylist()) == "test"
    kept = np.flatnonzero(~is_test)
    if max_rows is not None:
        kept = np.random.default_rng(0).permutation(kept)[:max_rows]
    names = [name for name in table.column_names if name.startswith("c_")]
    ids, sizes = [], []
    for name in names:
        values = np.asarray(["" if value is None else value for value in table[name].to_pylist()])
        known = np.unique(values[kept])
        known = known[known != ""]
        place = np.searchsorted(known, values).clip(max=len(known) - 1)
        ids.append(np.where(known[place] == values, place + 1, 0))
        sizes.append(len(known) + 1)
    columns = [table[name].to_numpy().astype(np.float64) for name in table.column_names if name.startswith("d_")]
    numbers = np.nan_to_num(np.stack(columns, axis=1))
    dense = torch.from_numpy((np.sign(numbers) * np.log1p(np.abs(numbers))).astype(np.float32))
    whole = (
        dense,
        torch.from_numpy(np.stack(ids, axis=1)),
        torch.from_numpy(table["label"].to_numpy().astype(np.float32)),
    )
    train, test = (
        tuple(column[torch.from_numpy(rows)] for column in whole) for rows in (kept, np.flatnonzero(is_test))
    )
    tables = tuple(
        TableSpec(name=f"t_{name}", num_embeddings=size, embedding_dim=dim, feature_names=(name,))
        for name, size in zip(names, sizes, strict=True)
    )
    return Clicks(tables=tables, train=train, test=test)  # type: ignore[arg-type]


def without_test_rows(clicks: Clicks, *, parts: int) -> Clicks:
    """Returns the training rows only, of which a random 1 / ``parts`` (with a fixed seed) become test rows."""
    order = torch.randperm(len(clicks.train[2]), generator=torch.Generator().manual_seed(0))
    held, rest = order[: len(order) // parts], order[len(order) // parts :]
    train, test = (tuple(column[rows] for column in clicks.train) for rows in (rest, held))
    return replace(clicks, train=train, test=test)  # type: ignore[arg-type]


def write_planted(path: Path) -> None:
    """Writes 81,920 rows of the trainer's generator, with fixed seeds, of which about a fifth are test rows.

    Their 16 features of 50 ids are independent and in four groups; features of a group interact in pairs.
    """
    config = SyntheticConfig(num_features=16, num_groups=4, rows_per_table=50, num_dense=2)
    clicks = SyntheticClicks(config, correlation=0.0)
    rows = pa.concat_tables([clicks.draw("train", block) for block in range(_BLOCKS)])
    ids, dense = (
        np.stack([rows.column(name).to_numpy() for name in names], axis=1)
        for names in (clicks.feature_names, clicks.dense_names)
    )
    labels = rows.column("label").to_numpy()
    test = np.random.default_rng(1).random(len(labels)) < _TEST_SHARE
    columns = {f"c_{i + 1}": [str(value) for value in column] for i, column in enumerate(ids.T)}
    columns |= {f"d_{i + 1}": column.tolist() for i, column in enumerate(dense.T)}
    rest = {"label": labels.astype(np.int8).tolist(), "split": np.where(test, "test", "train").tolist()}
    pq.write_table(pa.table(columns | rest), path)
