"""Small partitioning problems made at random, and their answers by trying every assignment."""

from __future__ import annotations

import itertools

import numpy as np

from dmt.partitioner.affinity import FeatureAffinity
from dmt.partitioner.assignment import Bounds, objective_of
from dmt.partitioner.cluster import evenly_picked, search_clusters, size_bounds, squared_distances
from dmt.partitioner.embed import Coordinates
from dmt.plan.tables import TableSpec


def affinity_of(features, *, seed=0):
    """Noise without groups between so many features, or those named."""
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


def quick_points(distance, *, dims=2, seed=0):
    """In place of `embed_distances`, where the points do not matter: classical scaling."""
    size = len(distance)
    centring = np.eye(size) - 1 / size
    values, vectors = np.linalg.eigh(-0.5 * centring @ np.square(distance) @ centring)
    points = np.zeros((size, dims))
    axes = vectors[:, ::-1][:, :dims] * np.sqrt(np.maximum(values[::-1][:dims], 0))
    points[:, : axes.shape[1]] = axes
    return Coordinates(points=points, stress=0.0, normalized_stress=0.0)


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
    """Blocks of one or two features with work and bytes; a list of bounds of which any may be held."""
    weights = rng.integers(1, 3, num_blocks).astype(float) if rng.random() < 0.5 else np.ones(num_blocks)
    work = rng.choice([0.0, 1.0, 2.0, 5.5], num_blocks) * rng.choice([1.0, 0.1])
    loads = np.stack([weights, work, np.round(10 ** rng.uniform(1, 7, num_blocks))])
    upper = [loads[row].sum() / num_towers * rng.choice(slack) for row in (1, 2)]
    parted = random_apart(rng, num_blocks, apart) if rng.random() < 0.5 else None
    num_features = int(weights.sum())
    sizes = [(1, num_features)]
    if rng.random() < 0.6:
        sizes = size_bounds(num_features, num_towers, float(rng.choice([1, 1.5, 2, 3])))
    return [
        Bounds(loads=loads, lower=np.array([smallest, 0.0, 0.0]), upper=np.array([largest, *upper]), apart=parted)
        for smallest, largest in sizes
    ]


def constrained_clusters(points, num_clusters, *, balance_ratio=1.0, seed=0):
    """[F] groups of points [F, n] with sizes within one of the pairs of `size_bounds`, numbered by first occurrence."""
    squared = squared_distances(points)
    ones = np.ones((1, len(points)))
    found = []
    for smallest, largest in evenly_picked(size_bounds(len(points), num_clusters, balance_ratio)):
        bounds = Bounds(loads=ones, lower=np.array([float(smallest)]), upper=np.array([float(largest)]))
        found.append(search_clusters(points, squared, num_clusters=num_clusters, bounds=bounds, seed=seed))
    labels = min(found, key=lambda labels: objective_of(squared, ones[0], labels)).tolist()
    return np.array([list(dict.fromkeys(labels)).index(label) for label in labels])


def best_by_trying(squared, num_towers, options):
    """The least objective over all assignments within one of the bounds; infinite where there is none."""
    least = np.inf
    for assignment in itertools.product(range(num_towers), repeat=len(squared)):
        labels = np.array(assignment)
        if len(set(assignment)) == num_towers and any(b.violation(labels, num_towers) == 0 for b in options):
            least = min(least, objective_of(squared, options[0].weights, labels))
    return least
