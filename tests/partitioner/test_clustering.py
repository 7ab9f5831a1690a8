"""Constrained K-means on its own."""

from __future__ import annotations

import numpy as np
import pytest

from dmt.partitioner.assignment import objective_of
from dmt.partitioner.cluster import size_bounds, squared_distances
from tests.partitioner.instances import constrained_clusters
from tests.seeds import some_slow


@pytest.mark.parametrize(
    ("num_points", "num_clusters", "ratio", "bounds"),
    [
        (26, 8, 1.0, [(3, 4)]),
        (24, 8, 1.0, [(3, 3)]),
        (26, 8, 2.0, [(3, 6), (2, 4)]),
        (26, 8, 1.5, [(3, 4)]),
        (100, 1, 1.15, [(least, 100) for least in range(100, 86, -1)]),
        (200, 2, 1.15, [(least, int(1.15 * least + 1e-9)) for least in range(100, 86, -1)]),
        (3, 2, 9.0, [(1, 3)]),
        (80, 16, 4.0, [(5, 20), (4, 16), (3, 12), (2, 8)]),
    ],
)
def test_size_bounds(num_points, num_clusters, ratio, bounds):
    assert size_bounds(num_points, num_clusters, ratio) == bounds


# Daily, each ratio and each number of clusters.
@pytest.mark.parametrize(
    ("size", "clusters", "ratio"),
    some_slow(
        [(size, clusters, ratio) for size, clusters in ((26, 8), (17, 5), (40, 3), (9, 8)) for ratio in (1.0, 2.0)],
        [(26, 8, 2.0), (17, 5, 1.0), (40, 3, 2.0), (9, 8, 2.0)],
    ),
)
def test_sizes_keep_their_bounds(size, clusters, ratio):
    # One dense heap and a few strays: free K-means would make one big and many tiny clusters.
    points = np.random.default_rng(0).exponential(size=(size, 2)) ** 3
    counts = np.bincount(constrained_clusters(points, clusters, balance_ratio=ratio), minlength=clusters)
    assert any(
        smallest <= counts.min() and counts.max() <= most for smallest, most in size_bounds(size, clusters, ratio)
    )
    assert counts.max() <= max(-(-size // clusters), ratio * counts.min())


def test_a_larger_ratio_lets_a_heap_stay_whole():
    points = np.array([[0.0], [0.1], [0.2], [0.3], [5.0], [5.1], [9.0], [9.1]])
    assert constrained_clusters(points, 3, balance_ratio=2.0).tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    assert sorted(np.bincount(constrained_clusters(points, 3, balance_ratio=1.0))) == [2, 3, 3]


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_scale_of_the_points_does_not_matter(scale):
    points = scale * np.array([[0.0, 0], [1, 0], [0, 1], [1, 1], [0.05, 0], [1, 0.05], [0, 0.95], [0.95, 1]])
    assert constrained_clusters(points, 4).tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("size", "clusters", "seed"),
    [
        pytest.param(size, clusters, seed, marks=() if seed == number else pytest.mark.slow)
        for number, (size, clusters) in enumerate([(26, 8), (60, 16), (90, 7)])
        for seed in range(3)
    ],
)
def test_no_worse_than_the_package_with_as_many_starts(size, clusters, seed):
    from k_means_constrained import KMeansConstrained

    points = np.random.default_rng(seed).normal(size=(size, 2))
    squared, ones = squared_distances(points), np.ones(size)
    bounds = {"size_min": size // clusters, "size_max": -(-size // clusters)}
    theirs = KMeansConstrained(clusters, n_init=20, random_state=seed, **bounds).fit(points * 1000).labels_
    ours = constrained_clusters(points, clusters, seed=seed)
    # Equal answers may sum up differently.
    assert objective_of(squared, ones, ours) <= objective_of(squared, ones, theirs) * (1 + 1e-9)


def test_trivial_counts_need_no_solver(monkeypatch):
    points = np.random.default_rng(0).normal(size=(12, 2))
    monkeypatch.setitem(__import__("sys").modules, "k_means_constrained", None)
    assert constrained_clusters(points, 12).tolist() == list(range(12))
    assert constrained_clusters(points, 1).tolist() == [0] * 12
    with pytest.raises(ImportError):
        constrained_clusters(points, 2)
