"""Triples of features that tell more together than their pairs do, for `FeatureInteractions.collect`.

Legend: R rows of this rank, F features, S splits, Q triples.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import comb

import numpy as np

from dmt.partitioner.interaction_gains import (
    Column,
    Floats,
    Ints,
    PairSums,
    Total,
    cell_steps,
    join,
    log_losses,
    mean_and_error,
    most_cells,
)

__all__ = ["chosen_triples", "largest_triple", "triple_gains"]


def chosen_triples(gains: Floats, most: int) -> Ints:
    """[Q, 3] triples of features: all, or those of the features with the largest gains in pairs.

    Args:
        gains: [F, F] of pairs.
        most: triples, at most.

    Example:
        >>> chosen_triples(np.zeros((4, 4)), 3)
        array([[0, 1, 2]])
    """
    count = len(gains)
    while comb(count, 3) > most:
        count -= 1
    features = np.sort(np.argsort(-gains.sum(axis=0), kind="stable")[:count])
    return np.array(list(combinations(features.tolist(), 3)), dtype=np.int64).reshape(-1, 3)


def largest_triple(columns: Sequence[Column]) -> int:
    """Bounds the cells that a triple has in all rows, of which a row of three bags has the product of their lengths.

    By Hoelder's inequality: the cube root of the product of the three largest sums of cubed lengths.

    Example:
        >>> bags = Column(values=np.zeros(8, np.int32), lengths=np.array([4, 4], np.int32), size=1)
        >>> largest_triple([bags] * 3)
        128
    """
    cubes = [
        float(len(own.values)) if own.lengths is None else float((own.lengths.astype(np.float64) ** 3).sum())
        for own in columns
    ]
    return round(float(np.prod(np.cbrt(sorted(cubes)[-3:]))))


def triple_gains(columns: Sequence[Column], triples: Ints, sums: PairSums, total: Total) -> tuple[Floats, Floats]:
    """Gains of triples beyond those of their pairs, on the rows that are held out.

    The additive model's log odds take the steps of the three pairs, one after the other on what the last one left,
    twice, and then those of the triple's cells. The gain is what the last ones lower the held-out log loss by.

    Returns:
        [Q] mean gains of a held-out row in nats, and their standard errors. Not clipped.
    """
    most, found = most_cells(sums.num_rows), np.zeros((len(triples), 3))
    for number, (i, j, k) in enumerate(total.steps(triples, "Measuring triples")):
        pairs = [join(columns[a], columns[b], most) for a, b in ((i, j), (i, k), (j, k))]
        # Twice, since what one step leaves of a strong pair would be found in every triple that has it.
        joined = [*pairs, *pairs, join(pairs[0], columns[k], most)]
        for odds, held in zip(sums.odds, sums.held, strict=True):
            before = now = odds
            for cells in joined:
                before, now = now, now + cell_steps(cells, now, held=held, labels=sums.labels, total=total)
            gain = log_losses(before[held], sums.labels[held]) - log_losses(now[held], sums.labels[held])
            found[number] += len(gain), gain.sum(), np.square(gain).sum()
    return mean_and_error(total(found))
