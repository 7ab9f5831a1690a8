"""How sizes are bounded, and how far blocks of several features loosen that."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dmt.partitioner.cluster import evenly_picked, fitting_sizes, size_bounds


def possible(weights, num_towers, pair):
    for assignment in itertools.product(range(num_towers), repeat=len(weights)):
        sizes = np.bincount(assignment, weights=weights, minlength=num_towers)
        if sizes.min() >= pair[0] and sizes.max() <= pair[1]:
            return True
    return False


@pytest.mark.parametrize("ratio", [1.0, 1.3, 2.0, 5.0])
@pytest.mark.parametrize(("size", "towers"), [(26, 8), (7, 7), (30, 1), (100, 9)])
def test_every_pair_obeys_the_ratio_and_none_is_forgotten(size, towers, ratio):
    pairs = size_bounds(size, towers, ratio)
    strict = size // towers, -(-size // towers)
    allowed = {
        (least, most)
        for least in range(1, strict[0] + 1)
        for most in [min(size, int(ratio * least + 1e-9))]
        if most >= strict[1]
    }
    assert set(pairs) == (allowed if pairs[0] in allowed else allowed | {strict})
    assert pairs[0][0] == strict[0]


def test_picking_keeps_both_ends():
    pairs = [(least, 100) for least in range(100, 86, -1)]
    picked = evenly_picked(pairs)
    assert (picked[0], picked[-1], len(picked)) == (pairs[0], pairs[-1], 4)
    assert evenly_picked(pairs[:2]) == pairs[:2]


def test_single_features_loosen_nothing():
    assert fitting_sizes(np.ones(26), 8, [(3, 4)]) == ([(3, 4)], 0)


def test_one_large_block_does_not_loosen_the_others():
    # 7 of 13 features are one block: the other six make three towers of two.
    assert fitting_sizes(np.array([7.0, 1, 1, 1, 1, 1, 1]), 4, [(3, 4)]) == ([(2, 7)], 3)


@pytest.mark.parametrize("seed", range(30))
def test_what_is_found_is_possible_and_hardly_looser_than_need_be(seed):
    rng = np.random.default_rng(seed)
    weights = rng.integers(1, 5, rng.integers(4, 8)).astype(float)
    towers = int(rng.integers(2, 4))
    total = int(weights.sum())
    strict = size_bounds(total, towers, 1.0)
    pairs, grown = fitting_sizes(weights, towers, strict)
    assert possible(weights, towers, pairs[0])
    (smallest, largest), (loose_smallest, loose_largest) = strict[0], pairs[0]
    assert loose_largest == largest + grown
    least = next(more for more in range(total) if possible(weights, towers, (1, largest + more)))
    # Dealing out by size is no perfect packing: one feature more at most on these.
    assert least <= grown <= least + 1
    assert loose_smallest <= smallest
