"""Clicks with pairs of features whose interaction is known."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np


def planted_clicks(num_features, pairs, *, rows, strength=1.0, singles=0.5, values=8, seed=0):
    """Ids [R, F] and labels [R]: log odds of one random weight per value of every feature and per cell of each pair.

    ``strength`` and ``singles`` are the standard deviations of a cell's and of a value's weight.
    """
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, values, (rows, num_features))
    odds = sum((rng.normal(0, singles, values)[column] for column in ids.T), start=np.full(rows, -1.0))
    for i, j in pairs:
        cells = rng.normal(0, strength, (values, values))
        # What is left of cells after their rows' and columns' means is the interaction alone.
        cells -= cells.mean(axis=0) + cells.mean(axis=1, keepdims=True) - cells.mean()
        odds += cells[ids[:, i], ids[:, j]]
    labels = (rng.random(rows) < 1 / (1 + np.exp(-odds))).astype(np.float32)
    return ids, labels


def parity_clicks(num_features, triples, *, rows, strength, seed=0):
    """Ids [R, F] of 4 values, and labels [R] whose log odds go by whether an even number of a triple's ids are even.

    No one or two of its features predict the label.
    """
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 4, (rows, num_features))
    sign = np.where(ids % 2 == 0, 1.0, -1.0)
    odds = -0.5 + sum(strength * sign[:, list(triple)].prod(axis=1) for triple in triples)
    return ids, (rng.random(rows) < 1 / (1 + np.exp(-odds))).astype(np.float32)


def drawn_pairs(num_features, count, *, seed):
    """Draws disjoint pairs of feature numbers, each in ascending order."""
    drawn = np.random.default_rng(seed).permutation(num_features)[: 2 * count].reshape(count, 2)
    return [tuple(sorted(map(int, pair))) for pair in drawn]


def batches_of(ids, labels, *, dense=None):
    """Batches of 1,000 rows, features named f0, f1, ..."""
    for start in range(0, len(labels), 1000):
        own = slice(start, start + 1000)
        yield SimpleNamespace(
            sparse_features={f"f{i}": ids[own, i] for i in range(ids.shape[1])},
            labels=labels[own],
            **({} if dense is None else {"dense_features": dense[own]}),
        )
