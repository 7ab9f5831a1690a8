"""Counts of distinct inputs against counts by Python's sets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dmt.plan.distinct import bag_hashes, count_distinct, distinct_share, joint_hashes


def drawn(seed, samples=300, ids=4, longest=4):
    random = np.random.default_rng(seed)
    lengths = random.integers(0, longest, samples)
    return lengths, random.integers(0, ids, lengths.sum())


def bags_of(lengths, values):
    ends = np.cumsum(lengths)
    return [tuple(np.asarray(values)[end - n : end].tolist()) for n, end in zip(lengths, ends, strict=True)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("as_tensors", [False, True])
def test_counts_are_those_of_sets(seed, as_tensors):
    batch = {name: drawn(seed * 3 + i) for i, name in enumerate("abc")}
    bags = {name: bags_of(*own) for name, own in batch.items()}
    if as_tensors:
        batch = {name: tuple(map(torch.from_numpy, own)) for name, own in batch.items()}
    groups = [["a"], ["b", "c"], ["c", "b"], ["a", "b", "c"]]
    for group, found in zip(groups, count_distinct([batch], groups), strict=True):
        joint = {tuple(row) for row in zip(*(bags[name] for name in group), strict=True)}
        assert found.rows == len(joint)
        assert found.ids == tuple(sum(map(len, own)) for own in zip(*joint, strict=True))
        assert distinct_share(joint_hashes(bag_hashes(*batch[name]) for name in group)) == len(joint) / 300


def test_hashes_tell_apart_what_differs():
    # Order, splits between samples, empty bags, swapped features, and ids that wrap or are negative.
    bags = [[1, 2], [2, 1], [1], [2], [], [0], [0, 0], [1, 1], [2**62], [-1], [2**32 + 1]]
    lengths, values = [len(bag) for bag in bags], [value for bag in bags for value in bag]
    assert len(set(bag_hashes(lengths, values).tolist())) == len(bags)
    a, b = bag_hashes([1, 1], [5, 6]), bag_hashes([1, 1], [6, 5])
    assert len({*joint_hashes([a, b]).tolist()}) == 2
    assert (joint_hashes([a, b]) != joint_hashes([b, a])).all()
    numbers = np.arange(200_000)
    assert distinct_share(bag_hashes(np.ones_like(numbers), numbers)) == 1


def test_means_over_batches():
    one, two = ({"f": ([1, 1], values)} for values in ([3, 3], [3, 4]))
    assert count_distinct([one, two], [["f"]]) == [(1.5, (1.5,))]
