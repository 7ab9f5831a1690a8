"""Distinct inputs of a batch, each of which need be sent only once (``unique``): exact counts, by hashes. Pure.

A rank sends a tower the distinct rows of a group of features: of all features of a tower together, because its tower
module reads them together, or of each feature alone where nothing is computed from several (a flat model over SPTT).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["bag_hashes", "joint_hashes", "mix_bits"]

Hashes = NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio, odd: the step of SplitMix64


def mix_bits(x: Hashes) -> Hashes:
    """The finaliser of SplitMix64: every bit of the result depends on every bit of a number."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def bag_hashes(lengths: Any, values: Any) -> Hashes:
    """Hashes the bag of each of B samples, uint64 [B]: bags with the same ids in the same order have the same hash.

    Args:
        lengths: ids of each sample, [B]; an array or a tensor.
        values: ids, sample after sample, [sum of lengths].

    Example:
        >>> a, b, c, d = bag_hashes([2, 1, 2, 2], [7, 8, 7, 7, 8, 8, 7]).tolist()
        >>> a == c, a == b, a == d
        (True, False, False)
    """
    counts, ids = np.asarray(lengths, dtype=np.int64), np.asarray(values, dtype=np.int64).view(np.uint64)
    ends = np.cumsum(counts)
    within = np.arange(len(ids)) - np.repeat(ends - counts, counts)
    # The sum of an id's mix with its place in the bag: the difference of two running sums, exact modulo 2**64.
    mixed = mix_bits(mix_bits(ids) + within.astype(np.uint64) * _STEP)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed)])
    return mix_bits(sums[ends] - sums[ends - counts] + counts.astype(np.uint64) * _STEP)


def joint_hashes(hashes: Iterable[Hashes]) -> Hashes:
    """Hashes the inputs of several features together, uint64 [B], from the `bag_hashes` of each."""
    first, *others = hashes
    for other in others:
        first = mix_bits(first + _STEP) ^ other
    return first
