"""Small tables, plans and batches that the tests of the models share."""

from __future__ import annotations

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt.plan.towers import TowerPlan

NUM_ROWS = 20


def make_tables(num_features=4, dim=8, **fields):
    return [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=NUM_ROWS, embedding_dim=dim, feature_names=[f"f{i}"], **fields)
        for i in range(num_features)
    ]


def make_batch(features, batch_size=5, max_ids=3, seed=0):
    """Multi-hot bags of 0 to ``max_ids`` ids, so empty bags occur."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, max_ids + 1, (len(features) * batch_size,), generator=generator, dtype=torch.int32)
    return KeyedJaggedTensor.from_lengths_sync(
        keys=list(features),
        values=torch.randint(0, NUM_ROWS, (int(lengths.sum()),), generator=generator),
        lengths=lengths,
    )


@pytest.fixture
def tables():
    return make_tables()


@pytest.fixture
def plan():
    return TowerPlan.from_lists([["f2", "f0"], ["f1"], ["f3"]])


@pytest.fixture
def sparse_features():
    return make_batch(["f0", "f1", "f2", "f3"])


@pytest.fixture
def dense_features():
    return torch.randn(5, 13, generator=torch.Generator().manual_seed(1))
