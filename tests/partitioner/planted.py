"""Affinities and models with feature groups that are known in advance, and how well a plan finds them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from sklearn.metrics import adjusted_rand_score
from torch import nn

from dmt.partitioner import FeatureAffinity
from dmt.plan.towers import TowerPlan


def planted_affinity(num_features, num_groups, *, seed, within=0.8, between=0.1, noise=0.1):
    """Group sizes differ by one at most; returns the affinity and the group of each feature."""
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.arange(num_features) % num_groups)
    matrix = np.where(group[:, None] == group, within, between) + rng.normal(0, noise, (num_features, num_features))
    matrix = np.clip((matrix + matrix.T) / 2, 0, 1)
    np.fill_diagonal(matrix, 1)
    names = [f"f{i}" for i in range(num_features)]
    return FeatureAffinity(matrix=matrix, features=names), dict(zip(names, group.tolist(), strict=True))


def rand_index(plan: TowerPlan, groups: dict) -> float:
    """1.0 where the towers are the groups, about 0 where they are unrelated."""
    found = [(t, groups[name]) for t, names in enumerate(plan.to_lists()) for name in names]
    return adjusted_rand_score([g for _, g in found], [t for t, _ in found])


class FlatModel(nn.Module):
    """Embedding collections in a model that also has a layer with a training mode."""

    def __init__(self, *collections):
        super().__init__()
        self.sparse_arch = nn.ModuleDict({f"ebc_{i}": ebc for i, ebc in enumerate(collections)})
        self.dropout = nn.Dropout(0.5)

    def forward(self, dense_features, sparse_features):
        pooled = [ebc(sparse_features).values() for ebc in self.sparse_arch.values()]
        return self.dropout(torch.cat([dense_features, *pooled], dim=1))


def collection(names, *, dim=8, rows=20):
    """One table per feature."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=f"t_{n}", num_embeddings=rows, embedding_dim=dim, feature_names=[n]) for n in names
        ]
    )


def batch(names, num_samples, *, generator, rows=20, most=1, least=1):
    """A batch with bags of ``least`` to ``most`` ids."""
    from torchrec import KeyedJaggedTensor

    lengths = torch.randint(least, most + 1, (len(names) * num_samples,), generator=generator)
    ids = torch.randint(rows, (int(lengths.sum()),), generator=generator)
    return SimpleNamespace(
        dense_features=torch.zeros(num_samples, 1), sparse_features=KeyedJaggedTensor(list(names), ids, lengths=lengths)
    )
