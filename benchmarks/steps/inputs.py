"""Tables and random batches of the step benchmark, with the sizes of Criteo-Kaggle and one id per feature.

==============  ======================================================================================================
``ids``         distribution of the ids in a batch
==============  ======================================================================================================
``skewed``      as unevenly distributed as in Criteo's sample (`benchmarks.steps.criteo_ids`), independently by feature;
                in a table with fewer rows than Criteo's, popularity ranks are mapped to rows modulo their number
``uniform``     distributed evenly
==============  ======================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, cycle

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.steps.contenders import EMBEDDING_DIM
from benchmarks.steps.criteo_ids import CRITEO_KAGGLE_ROWS, criteo_skews
from benchmarks.steps.setting import Setting
from dmt.hot_rows.profile import AccessProfile
from dmt.models import criteo_1tb_tables
from dmt.models.complexity import CRITEO_DENSE_FEATURES
from dmt.plan.tables import TableSpec, feature_names
from dmt.training.data.batch import ClickBatch

__all__ = ["Batches", "access_profile", "benchmark_tables", "distinct_rows", "random_batch"]

# A prime larger than any table: it spreads the most frequent ids, which come first, over the rows of their table.
_SPREAD = 2_654_435_761


def benchmark_tables(setting: Setting) -> list[TableSpec]:
    """Returns Criteo's 26 tables, with Criteo-Kaggle's rows up to ``rows_cap``."""
    tables = zip(criteo_1tb_tables(EMBEDDING_DIM), CRITEO_KAGGLE_ROWS, strict=True)
    return [replace(table, num_embeddings=min(rows, setting.rows_cap)) for table, rows in tables]


def random_batch(setting: Setting, batch_size: int, step: int, rank: int) -> ClickBatch:
    """Returns a random batch that depends only on the arguments: normal dense features, ids by setting, even labels."""
    tables = benchmark_tables(setting)
    mixed = np.random.SeedSequence((setting.seed, step, rank)).generate_state(1)[0]
    generator = torch.Generator().manual_seed(int(mixed))
    values = [_ids(setting, i, table.num_embeddings, batch_size, generator) for i, table in enumerate(tables)]
    lengths = torch.ones(batch_size * len(tables), dtype=torch.int32)
    ids = KeyedJaggedTensor(keys=feature_names(tables), values=torch.cat(values), lengths=lengths, stride=batch_size)
    return ClickBatch(
        dense_features=torch.randn(batch_size, CRITEO_DENSE_FEATURES, generator=generator),
        sparse_features=ids,
        labels=torch.randint(0, 2, (batch_size,), generator=generator).float(),
        weights=torch.ones(batch_size),
    )


def access_profile(setting: Setting) -> AccessProfile:
    """Returns the job's accesses in 25 steps, on other ids than those of training; the same on all ranks."""
    tables, size = benchmark_tables(setting), 25 * setting.batch_size * setting.world_size
    profile, generator = AccessProfile(tables), torch.Generator().manual_seed(setting.seed + 1)
    for i, table in enumerate(tables):
        ids = _ids(setting, i, table.num_embeddings, size, generator)
        profile.add({feature: ids.numpy() for feature in table.feature_names}, num_samples=0)
    profile.num_samples = size
    return profile


@cache
def distinct_rows(setting: Setting) -> dict[str, float]:
    """Returns by table the expected number of distinct rows that a rank reads in a step."""
    return access_profile(setting).distinct_rows(setting.batch_size)


def _ids(setting: Setting, feature: int, rows: int, size: int, generator: torch.Generator) -> Tensor:
    if setting.ids == "uniform":
        return torch.randint(0, rows, (size,), generator=generator)
    return criteo_skews()[feature].draw(size, generator) * _SPREAD % rows


class Batches(Iterator[ClickBatch]):
    """Yields a few batches once, then those of a pool in a cycle, until it is closed.

    A train pipeline keeps its iterator and reads ahead of the model, so each contender has one iterator throughout.

    Args:
        opening: batches of the first steps.
        pool: batches of all later steps.
        unique: True: each distinct id of a feature is in a batch once, as TorchRec's variable batch per feature. The
            ids are found for every batch, as part of its step.
    """

    def __init__(self, opening: Sequence[ClickBatch], pool: Sequence[ClickBatch], *, unique: bool = False) -> None:
        batches = chain(opening, cycle(pool))
        self._batches = map(_each_id_once, batches) if unique else batches
        self._is_closed = False

    def __next__(self) -> ClickBatch:
        if self._is_closed:
            raise StopIteration
        return next(self._batches)

    def close(self) -> None:
        """Ends the iteration, so that a pipeline can finish the batches that it has read."""
        self._is_closed = True


def _each_id_once(batch: ClickBatch) -> ClickBatch:
    """Replaces ids, one per feature and sample, by each feature's distinct ids and each sample's index into them."""
    keys = batch.sparse_features.keys()
    found = [torch.unique(batch.sparse_features[key].values(), return_inverse=True) for key in keys]
    values = torch.cat([ids for ids, _ in found])
    once = KeyedJaggedTensor(
        keys=keys,
        values=values,
        lengths=torch.ones(len(values), dtype=torch.int32),
        stride_per_key_per_rank=[[len(ids)] for ids, _ in found],
        inverse_indices=(keys, torch.stack([samples for _, samples in found])),
    )
    return replace(batch, sparse_features=once)
