"""Small partitioning problems made at random."""

from __future__ import annotations

import numpy as np

from dmt.partitioner.affinity import FeatureAffinity
from dmt.partitioner.problem import size_bounds
from dmt.partitioner.search import Bounds
from dmt.plan.tables import TableSpec


def affinity_of(features, *, seed=0):
    """Noise without groups; ``features`` is their number or their names."""
    names = [f"f{i}" for i in range(features)] if isinstance(features, int) else list(features)
    matrix = np.random.default_rng(seed).uniform(0, 1, (len(names), len(names)))
    matrix = (matrix + matrix.T) / 2
    np.fill_diagonal(matrix, 1)
    return FeatureAffinity(matrix=matrix, features=names)


def tables_of(names, *, rows=10, dims=8):
    """One table per feature; rows and dims for all, or one by one."""
    rows, dims = (np.broadcast_to(value, len(names)).tolist() for value in (rows, dims))
    return [
        TableSpec(name=f"t_{name}", num_embeddings=int(row), embedding_dim=int(dim), feature_names=(name,))
        for name, row, dim in zip(names, rows, dims, strict=True)
    ]


def sets(plan):
    return {frozenset(names) for names in plan.to_lists()}


def random_squares(rng, num_blocks):
    distance = rng.uniform(0, 1, (num_blocks, num_blocks))
    distance = (distance + distance.T) / 2
    np.fill_diagonal(distance, 0)
    return np.square(distance)


def random_apart(rng, num_blocks, share):
    above = np.triu(rng.random((num_blocks, num_blocks)) < share, 1)
    return above | above.T


def random_labels(rng, num_blocks, num_towers):
    """No tower is empty."""
    return rng.permutation(np.arange(num_blocks) % num_towers)


def random_bounds(rng, num_blocks, num_towers, *, slack=(1.0, 1.2, 1.5, 9.0), apart=0.2):
    """Bounds on blocks of one or two features with work and bytes."""
    weights = rng.integers(1, 3, num_blocks).astype(float) if rng.random() < 0.5 else np.ones(num_blocks)
    work = rng.choice([0.0, 1.0, 2.0, 5.5], num_blocks) * rng.choice([1.0, 0.1])
    loads = np.stack([weights, work, np.round(10 ** rng.uniform(1, 7, num_blocks))])
    upper = [loads[row].sum() / num_towers * rng.choice(slack) for row in (1, 2)]
    parted = random_apart(rng, num_blocks, apart) if rng.random() < 0.5 else None
    num_features = int(weights.sum())
    smallest, largest = 1, num_features
    if rng.random() < 0.6:
        smallest, largest = size_bounds(num_features, num_towers, float(rng.choice([1, 1.5, 2, 3])))
    return Bounds(loads=loads, lower=np.array([smallest, 0.0, 0.0]), upper=np.array([largest, *upper]), apart=parted)
