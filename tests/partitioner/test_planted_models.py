"""Models whose feature groups are known, measured and partitioned: every group must come out as one tower."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dmt.partitioner import FeatureAffinity, TowerPartitioner
from tests.partitioner.planted import FlatModel, collection, rand_index

ROWS, DIM = 50, 16


def planted_model(sizes, *, seed, noise):
    """A model with one table per feature, batches for it, and the group of each feature.

    The features of a group see the same id in a sample, as the fields of one product do, and their tables hold the same
    random vectors of length about 1 (half of the tables negated), each with noise of its own of length ``noise``.
    """
    from torchrec import KeyedJaggedTensor

    rng = np.random.default_rng(seed)
    group = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    names = [f"f{i}" for i in range(len(group))]
    codes = rng.normal(size=(len(sizes), ROWS, DIM)) / np.sqrt(DIM)
    ebc = collection(names, dim=DIM, rows=ROWS)
    with torch.no_grad():
        for name, g in zip(names, group.tolist(), strict=True):
            own = rng.normal(size=(ROWS, DIM)) * noise / np.sqrt(DIM)
            weight = rng.choice([-1, 1]) * codes[g] + own
            ebc.embedding_bags[f"t_{name}"].weight.copy_(torch.from_numpy(weight))
    batches = []
    for _ in range(4):
        ids = rng.integers(ROWS, size=(len(sizes), 128))[group]
        features = KeyedJaggedTensor(
            names, torch.from_numpy(ids.ravel()), lengths=torch.ones(ids.size, dtype=torch.int64)
        )
        batches.append(SimpleNamespace(dense_features=torch.zeros(128, 1), sparse_features=features))
    return FlatModel(ebc), batches, dict(zip(names, group.tolist(), strict=True))


def eight_groups(seed):
    return [3] * 6 + [4] * 2


def sixteen_groups(seed):
    """The smallest and the largest are there, whatever is drawn for the others."""
    return [2, 8, *np.random.default_rng(seed).integers(2, 9, 14).tolist()]


# At noise 1 half of an embedding is its group's and the affinity within a group about 0.5; at noise 2 it is about 0.2.
@pytest.mark.parametrize(
    ("sizes_of", "balance_ratio", "seed"),
    [
        (eight_groups, 1.0, 0),
        *(pytest.param(eight_groups, 1.0, seed, marks=pytest.mark.slow) for seed in range(1, 10)),
        *(pytest.param(sixteen_groups, 4.0, seed, marks=pytest.mark.slow) for seed in range(10, 20)),
    ],
)
def test_planted_groups_are_recovered(sizes_of, balance_ratio, seed):
    for noise in (1.0, 2.0):
        model, batches, groups = planted_model(sizes_of(seed), seed=seed, noise=noise)
        affinity = FeatureAffinity.collect(model, batches)
        partitioner = TowerPartitioner(num_towers=len(sizes_of(seed)), balance_ratio=balance_ratio, seed=seed)
        assert rand_index(partitioner.fit(affinity), groups) == 1.0
