"""Tables and random batches of the step benchmark: the shape of Criteo-1TB, one id per feature."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, cycle

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.steps.contenders import EMBEDDING_DIM
from benchmarks.steps.setting import Setting
from dmt.models import criteo_1tb_tables
from dmt.models.presets import CRITEO_DENSE_FEATURES
from dmt.plan.tables import TableSpec, feature_names
from dmt.training.data.batch import ClickBatch

__all__ = ["Batches", "benchmark_tables", "random_batch"]


def benchmark_tables(setting: Setting) -> list[TableSpec]:
    """Criteo-1TB's 26 tables, each cut to ``rows_cap`` rows."""
    return [
        replace(table, num_embeddings=min(table.num_embeddings, setting.rows_cap))
        for table in criteo_1tb_tables(EMBEDDING_DIM)
    ]


def random_batch(tables: Sequence[TableSpec], batch_size: int, *seed: int) -> ClickBatch:
    """Standard normal dense features, ids and labels drawn evenly; the same for the same numbers in ``seed``."""
    mixed = np.random.SeedSequence(seed).generate_state(1)[0]
    generator = torch.Generator().manual_seed(int(mixed))
    values = [torch.randint(0, t.num_embeddings, (batch_size,), generator=generator) for t in tables]
    ids = KeyedJaggedTensor(
        keys=feature_names(tables),
        values=torch.cat(values),
        lengths=torch.ones(len(tables) * batch_size, dtype=torch.int32),
        stride=batch_size,
    )
    return ClickBatch(
        dense_features=torch.randn(batch_size, CRITEO_DENSE_FEATURES, generator=generator),
        sparse_features=ids,
        labels=torch.randint(0, 2, (batch_size,), generator=generator).float(),
        weights=torch.ones(batch_size),
    )


class Batches(Iterator[ClickBatch]):
    """A few batches once, then those of a pool over and over, until it is closed.

    A train pipeline holds on to its iterator and runs ahead of the model, so each contender has one for its whole life.

    Args:
        opening: for the first steps.
        pool: for all others.
    """

    def __init__(self, opening: Sequence[ClickBatch], pool: Sequence[ClickBatch]) -> None:
        self._batches = chain(opening, cycle(pool))
        self._is_closed = False

    def __next__(self) -> ClickBatch:
        if self._is_closed:
            raise StopIteration
        return next(self._batches)

    def close(self) -> None:
        """Ends the iteration, so that a pipeline can finish the batches it has begun."""
        self._is_closed = True
