"""Hashes of inputs against Python's own comparison: equal where the inputs are, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dmt.plan.distinct import bag_hashes, joint_hashes


def drawn(seed, samples=300, ids=4, longest=4):
    random = np.random.default_rng(seed)
    lengths = random.integers(0, longest, samples)
    return lengths, random.integers(0, ids, lengths.sum())


def bags_of(lengths, values):
    ends = np.cumsum(lengths)
    return [tuple(np.asarray(values)[end - n : end].tolist()) for n, end in zip(lengths, ends, strict=True)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("as_tensors", [False, True])
def test_equal_inputs_have_equal_hashes_and_others_do_not(seed, as_tensors):
    batch = {name: drawn(seed * 3 + i) for i, name in enumerate("abc")}
    bags = {name: bags_of(*own) for name, own in batch.items()}
    if as_tensors:
        batch = {name: tuple(map(torch.from_numpy, own)) for name, own in batch.items()}
    groups = [["a"], ["b", "c"], ["c", "b"], ["a", "b", "c"]]
    for group in groups:
        inputs = list(zip(*(bags[name] for name in group), strict=True))
        hashes = joint_hashes(bag_hashes(*batch[name]) for name in group).tolist()
        assert len(set(zip(inputs, hashes, strict=True))) == len(set(inputs)) == len(set(hashes))


def test_hashes_tell_apart_what_differs():
    # Order, splits between samples, empty bags, swapped features, and ids that wrap or are negative.
    bags = [[1, 2], [2, 1], [1], [2], [], [0], [0, 0], [1, 1], [2**62], [-1], [2**32 + 1]]
    lengths, values = [len(bag) for bag in bags], [value for bag in bags for value in bag]
    assert len(set(bag_hashes(lengths, values).tolist())) == len(bags)
    a, b = bag_hashes([1, 1], [5, 6]), bag_hashes([1, 1], [6, 5])
    assert len({*joint_hashes([a, b]).tolist()}) == 2
    assert (joint_hashes([a, b]) != joint_hashes([b, a])).all()
    numbers = np.arange(200_000)
    assert len(np.unique(bag_hashes(np.ones_like(numbers), numbers))) == len(numbers)
