"""Batches to check with, drawn from the tables: single ids, bags, empty bags, equal and unequal local batches."""

from __future__ import annotations

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt.training.check.shrink import CheckedRun
from dmt.training.data.batch import ClickBatch

__all__ = ["SINGLE_IDS", "UNEVEN_BAGS", "draw_batch"]

SINGLE_IDS = 0
"""The batch in which every bag has one id, so that an embedding is a row of a table, bit by bit."""
UNEVEN_BAGS = 1
"""The batch in which ranks have unequal numbers of samples; from it on bags have 0 to 3 ids."""

_MAX_BAG = 3
# Half of all ids are among the first rows: ranks and samples meet in them, as they do in the frequent ids of real data.
_FREQUENT_ROWS = 8


def draw_batch(run: CheckedRun, rank: int, index: int) -> ClickBatch:
    """The batch of a rank in step ``index``, the same in every process.

    Args:
        run: sizes and tables.
        rank: global.
        index: of the step, or `SINGLE_IDS`, or `UNEVEN_BAGS`.
    """
    generator = torch.Generator().manual_seed(1_000_003 * index + rank)
    size = run.limits.batch_size
    if index == UNEVEN_BAGS:
        size = max(1, size - rank % 3)
    lengths, values = [], []
    for table in run.tables:
        for _ in table.feature_names:
            if index == SINGLE_IDS:
                count = torch.ones(size, dtype=torch.int64)
            else:
                count = torch.randint(0, _MAX_BAG + 1, (size,), generator=generator)
            number, rows = int(count.sum()), table.num_embeddings
            anywhere = torch.randint(0, rows, (number,), generator=generator)
            frequent = torch.randint(0, min(rows, _FREQUENT_ROWS), (number,), generator=generator)
            lengths.append(count)
            values.append(torch.where(torch.rand(number, generator=generator) < 0.5, anywhere, frequent))
    ids = KeyedJaggedTensor(
        keys=[feature for table in run.tables for feature in table.feature_names],
        values=torch.cat(values),
        lengths=torch.cat(lengths),
        stride=size,
    )
    return ClickBatch(
        dense_features=torch.randn(size, run.job.num_dense, generator=generator),
        sparse_features=ids,
        labels=torch.rand(size, generator=generator).round(),
        weights=torch.ones(size),
    ).split_columns(run.splits)
