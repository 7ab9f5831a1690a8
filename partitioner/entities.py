"""`find_entities`: features whose values repeat together, from the hashes of some batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dmt.plan.distinct import joint_hashes

__all__ = ["find_entities"]

# Numbers sorted at most, about a minute: beyond, fewer rows of each batch are used.
_MOST_WORK = 3e8
_MOST_SHARE = 0.5


def find_entities(batches: Sequence[Mapping[str, NDArray[np.uint64]]], *, num_towers: int) -> dict[str, list[str]]:
    """Finds groups of features whose joint inputs repeat, so that a tower of such a group has few distinct inputs.

    A tower of n features sends n s of what it would send of every sample, where s is the distinct share of its whole
    input. Features are merged into ``num_towers`` groups, always the two groups whose merging adds least to the sum of
    n s over all. Cost: F^2 unions of two groups are counted in every batch.

    ``batches`` are `bag_hashes` of every feature, [B]; of batches as one rank has them, because shares depend on B.

    Returns:
        The groups of two features or more whose inputs repeat twice at least, by the name of their feature with most
        values.

    Example:
        >>> user, item = np.repeat(np.arange(4), 4).astype(np.uint64), np.arange(16, dtype=np.uint64)
        >>> find_entities([{"user": user, "item": item, "age": user % 2, "shop": item % 8}], num_towers=2)
        {'user': ['age', 'user']}
    """
    names = sorted(batches[0])  # ties do not depend on the order in which features are listed
    rows = max(2, int(_MOST_WORK / (len(names) ** 2 * len(batches))))
    hashes = [np.stack([batch[name][:rows] for name in names]) for batch in batches]
    own, groups = _shares(hashes), [[f] for f in range(len(names))]
    shares = own.copy()
    union = np.full((len(names), len(names)), np.inf)
    for i in range(len(names)):
        union[i, i + 1 :] = _joint_shares(hashes, i)[i + 1 :]
    alive = np.ones(len(names), dtype=bool)
    for _ in range(len(names) - num_towers):
        sizes = np.array([len(group) for group in groups])
        added = np.add.outer(sizes, sizes) * union - np.add.outer(sizes * shares, sizes * shares)
        a, b = np.unravel_index(int(added.argmin()), added.shape)
        shares[a], alive[b] = union[a, b], False
        groups[a] += groups[b]
        for batch in hashes:
            batch[a] = joint_hashes([batch[a], batch[b]])
        union[b], union[:, b] = np.inf, np.inf
        others = _joint_shares(hashes, int(a))
        union[a, a + 1 :] = np.where(alive[a + 1 :], others[a + 1 :], np.inf)
        union[:a, a] = np.where(alive[:a], others[:a], np.inf)
    found = [g for g, share, there in zip(groups, shares, alive, strict=True) if there and share <= _MOST_SHARE]
    return {names[max(g, key=lambda f: float(own[f]))]: [names[f] for f in sorted(g)] for g in found if len(g) > 1}


def _joint_shares(hashes: Sequence[NDArray[np.uint64]], row: int) -> NDArray[np.float64]:
    return _shares([joint_hashes([batch[row], batch]) for batch in hashes])


def _shares(hashes: Sequence[NDArray[np.uint64]]) -> NDArray[np.float64]:
    """Mean distinct share of each of F rows of B hashes, [F]."""
    ordered = [np.sort(batch, axis=1) for batch in hashes]
    return np.mean([(1 + (o[:, 1:] != o[:, :-1]).sum(axis=1)) / o.shape[1] for o in ordered], axis=0)
