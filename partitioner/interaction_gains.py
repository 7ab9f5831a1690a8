"""Measuring `FeatureInteractions`: rows as columns of small numbers, an additive model, one step for each pair.

Everything is a sum over rows of g = y - p and h = p (1 - p), for the values of a feature or the cells of a pair, so
that ranks add theirs up and get what one process gets. Rows are read once and kept in 4 bytes per value.

Legend: R rows of this rank, F features, S splits, V values of a feature.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dmt.plan.distinct import mix_bits

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "Column",
    "PairSums",
    "Total",
    "all_pairs",
    "cell_steps",
    "expand",
    "fit_additive",
    "join",
    "log_losses",
    "mean_and_error",
    "most_cells",
    "pair_gains",
    "screen_pairs",
    "single_gains",
]

logger = logging.getLogger(__name__)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Weights of the additive model are drawn to 0 as if each value had been seen with this much more h, steps of pairs too.
VALUE_PRIOR, CELL_PRIOR = 10.0, 30.0
# The additive model is done when a sweep lowers the loss of a row by less than this; nats.
DONE, SETTLED = 1e-5, 1e-3
MAX_SWEEPS = 60
MOST_CELLS = 2**22
# Screening: values that a feature and all features have after joining; rows and features of a block.
MOST_JOINED, SCREENED_VALUES, SCREENED_ROWS, SCREENED_FEATURES = 8, 2**14, 4096, 256


class Total:
    """Sums of arrays over the ranks of a group; of this process alone without one."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group

    def steps(self, items: Ints, title: str) -> Iterable[list[int]]:
        """The rows of ``items``, one after the other; on a terminal, the first rank shows a bar on stderr."""
        if not sys.stderr.isatty() or (self._group is not None and self._group.rank() > 0):
            return items.tolist()
        from rich.console import Console
        from rich.progress import track

        return track(items.tolist(), title, console=Console(stderr=True), transient=True)

    def __call__(self, value: NDArray[np.floating]) -> Floats:
        """The sum over ranks, float64 in the shape of ``value``."""
        if self._group is None:
            return np.asarray(value, dtype=np.float64)
        import torch

        from dmt.collectives import sum_over_ranks

        return sum_over_ranks(torch.from_numpy(np.asarray(value, dtype=np.float64)), self._group).numpy()


@dataclass(frozen=True, kw_only=True, eq=False)
class Column:
    """The values of one feature in R rows, numbered from 0."""

    values: NDArray[np.int32]
    """[R], or of all bags one after the other."""
    lengths: NDArray[np.int32] | None
    """[R] values of each bag, at least one; None where every row has one."""
    size: int
    """V."""

    def rows(self) -> tuple[Ints | None, Floats | float]:
        """The row of each value and its share in it (1 / length); None and 1.0 where every row has one."""
        if self.lengths is None:
            return None, 1.0
        rows = np.repeat(np.arange(len(self.lengths)), self.lengths)
        return rows, (1.0 / self.lengths)[rows]


def _summed(keys: Ints, rows: Ints | None, share: Floats | float, of_rows: Floats, size: int) -> Floats:
    """[size] sums of a number of each row, in the shares in which the row has the keys."""
    weights = of_rows if rows is None else of_rows[rows] * share
    return np.bincount(keys, weights=weights, minlength=size).astype(np.float64, copy=False)


def _mean_in_rows(of_keys: Floats, keys: Ints, rows: Ints | None, share: Floats | float, num_rows: int) -> Floats:
    """[R] mean over the keys of each row."""
    return of_keys[keys] if rows is None else _summed(rows, None, 1.0, of_keys[keys] * share, num_rows)


def fit_additive(
    columns: Sequence[Column],
    labels: Floats,
    counts: NDArray[np.bool_],
    *,
    start: Sequence[Floats] | None,
    total: Total,
) -> tuple[Floats, list[Floats]]:
    """Fits log odds that are a sum of one weight per value, by Newton steps of one feature after another.

    A sweep goes through all features, on g as it changes and h as it was; it is taken back by halves while it raises
    the loss. It ends when a sweep gains next to nothing: what single features leave over would be found in pairs.

    Args:
        columns: of all features, dense ones in bins.
        labels: [R] 0 or 1.
        counts: [R] rows to fit.
        start: weights of an earlier fit on other rows, to begin with.
        total: sums over ranks.

    Returns:
        [R] log odds, and the weights: [V] of each feature, then the constant.
    """
    num_rows, fitted = total(np.array([counts.sum(), labels[counts].sum()]))
    keys = [column.values.astype(np.int64) for column in columns]
    bags = [column.rows() for column in columns]
    if start is None:
        weights = [np.zeros(column.size) for column in columns]
        weights.append(np.array([np.log(fitted / (num_rows - fitted))]))
    else:
        weights = [own.copy() for own in start]
    odds = np.full(len(labels), weights[-1][0])
    for key, (rows, share), own in zip(keys, bags, weights, strict=False):
        odds += _mean_in_rows(own, key, rows, share, len(labels))
    loss = _mean_loss(odds, labels, counts, total) + _penalty(weights) / num_rows
    settled, sums_h = False, [own[:0] for own in weights]
    for _ in range(MAX_SWEEPS):
        p = _probability(odds)
        g, h = np.where(counts, labels - p, 0.0), np.where(counts, p * (1.0 - p), 0.0)
        steps, moved = [], np.zeros(len(labels))
        for i, (key, (rows, share), own) in enumerate(zip(keys, bags, weights, strict=False)):
            if settled:
                sum_g = total(_summed(key, rows, share, g, len(own)))
            else:
                sum_g, sums_h[i] = total(np.stack([_summed(key, rows, share, x, len(own)) for x in (g, h)]))
            steps.append((sum_g - VALUE_PRIOR * own) / (sums_h[i] + VALUE_PRIOR))
            change = _mean_in_rows(steps[-1], key, rows, share, len(labels))
            moved += change
            g -= h * change
        sum_g, sum_h = total(np.array([g.sum(), h.sum()]))
        steps.append(np.array([sum_g / max(sum_h, 1e-12)]))
        moved += steps[-1][0]
        scale, before = 1.0, loss
        for _ in range(10):
            tried = [own + scale * step for own, step in zip(weights, steps, strict=True)]
            loss = _mean_loss(odds + scale * moved, labels, counts, total) + _penalty(tried) / num_rows
            if loss <= before:
                weights, odds = tried, odds + scale * moved
                break
            scale /= 2
        # Sums of h hardly change any more then; g stays exact.
        settled = before - loss < SETTLED
        if before - loss < DONE:
            return odds, weights
    logger.warning("The additive model was not done after %d sweeps; single effects may show in pairs.", MAX_SWEEPS)
    return odds, weights


def _penalty(weights: Sequence[Floats]) -> float:
    return VALUE_PRIOR / 2 * sum(float(own @ own) for own in weights[:-1])


def _probability(odds: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-np.clip(odds, -700.0, 700.0)))


def log_losses(odds: Floats, labels: Floats) -> Floats:
    """Log losses of rows in nats, [R]."""
    signed = np.where(labels > 0, -odds, odds)
    # log(1 + e^x) without overflow, several times faster than logaddexp.
    return np.maximum(signed, 0.0) + np.log1p(np.exp(-np.abs(signed)))


def _mean_loss(odds: Floats, labels: Floats, counts: NDArray[np.bool_], total: Total) -> float:
    losses = np.where(counts, log_losses(odds, labels), 0.0)
    sum_losses, num_rows = total(np.array([losses.sum(), float(counts.sum())]))
    return float(sum_losses / num_rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class PairSums:
    """The additive model's answers, from which steps of pairs are made, for each of S splits."""

    labels: Floats
    """[R]"""
    odds: list[Floats]
    """S times [R] log odds of the additive model."""
    held: list[NDArray[np.bool_]]
    """S times [R] rows that are held out."""
    num_rows: int
    """Rows of all ranks."""


def all_pairs(num_features: int) -> Ints:
    """[F (F - 1) / 2, 2] pairs of features, in the order of a matrix's upper triangle."""
    return np.stack(np.triu_indices(num_features, k=1), axis=1).astype(np.int64)


def pair_gains(columns: Sequence[Column], pairs: Ints, sums: PairSums, total: Total) -> tuple[Floats, Floats]:
    """Gains of pairs of features: by how much one step for each cell of the pair lowers the held-out log loss.

    A cell is one value of each of both; its step is the sum of g over the sum of h + 30, over the fitted rows. Cells
    are hashed to at most four for each row and `MOST_CELLS`. A row with bags has all pairs of their values, in equal
    shares.

    Returns:
        [P] mean gains of a held-out row in nats, and their standard errors. Not clipped: below 0 where steps are noise.
    """
    gradients, most = [], most_cells(sums.num_rows)
    for odds, held in zip(sums.odds, sums.held, strict=True):
        p = _probability(odds)
        gradients += [np.where(held, 0.0, sums.labels - p), np.where(held, 0.0, p * (1.0 - p))]
    tested = [(np.flatnonzero(held), odds[held]) for odds, held in zip(sums.odds, sums.held, strict=True)]
    before = [log_losses(odds, sums.labels[rows]) for rows, odds in tested]
    found = np.zeros((len(pairs), 3))
    for number, (i, j) in enumerate(total.steps(pairs, "Measuring pairs")):
        keys, size, rows, share = _cells(columns[i], columns[j], most)
        cells = total(np.stack([_summed(keys, rows, share, own, size) for own in gradients]))
        for split, (own, odds) in enumerate(tested):
            steps = cells[2 * split] / (cells[2 * split + 1] + CELL_PRIOR)
            change = (
                steps[keys[own]] if rows is None else _mean_in_rows(steps, keys, rows, share, len(sums.labels))[own]
            )
            gain = before[split] - log_losses(odds + change, sums.labels[own])
            found[number] += len(gain), gain.sum(), np.square(gain).sum()
    return mean_and_error(total(found))


def cell_steps(cells: Column, odds: Floats, *, held: NDArray[np.bool_], labels: Floats, total: Total) -> Floats:
    """[R] change of the log odds by one step for each cell, made on the rows that are not held out."""
    rows, share = cells.rows()
    keys, p = cells.values.astype(np.int64), _probability(odds)
    gradients = np.where(held, 0.0, labels - p), np.where(held, 0.0, p * (1.0 - p))
    sum_g, sum_h = total(np.stack([_summed(keys, rows, share, own, cells.size) for own in gradients]))
    return _mean_in_rows(sum_g / (sum_h + CELL_PRIOR), keys, rows, share, len(odds))


def mean_and_error(sums: Floats) -> tuple[Floats, Floats]:
    """Means and their standard errors, from the number, the sum and the sum of squares of what was measured, [P, 3]."""
    num, gains, squares = sums.T
    mean = gains / np.maximum(num, 1.0)
    return mean, np.sqrt(np.maximum(squares / np.maximum(num, 1.0) - mean**2, 0.0) / np.maximum(num, 1.0))


def single_gains(columns: Sequence[Column], sums: PairSums, total: Total) -> Floats:
    """[F] gains of each feature alone, as `pair_gains` finds them with one that is constant: above 0 by little."""
    nothing = Column(values=np.zeros(len(sums.labels), np.int32), lengths=None, size=1)
    pairs = np.stack([np.arange(len(columns)), np.full(len(columns), len(columns))], axis=1)
    return pair_gains([*columns, nothing], pairs, sums, total)[0]


def most_cells(num_rows: int) -> int:
    """Cells beyond which they are hashed: four for each row, and `MOST_CELLS`."""
    return min(MOST_CELLS, 2 ** int(np.ceil(np.log2(max(4 * num_rows, 2**10)))))


def join(first: Column, second: Column, most: int) -> Column:
    """The cells of two features as the values of one.

    Example:
        >>> one = Column(values=np.array([1, 0], np.int32), lengths=None, size=2)
        >>> join(one, one, most=2**10).values
        array([3, 0], dtype=int32)
    """
    keys, size, rows, _ = _cells(first, second, most)
    lengths = None if rows is None else np.bincount(rows).astype(np.int32)
    return Column(values=keys.astype(np.int32), lengths=lengths, size=size)


def _cells(first: Column, second: Column, most: int) -> tuple[Ints, int, Ints | None, Floats | float]:
    """The cells of a pair: of each row or, with bags, of each pair of values; their number, rows and shares."""
    rows: Ints | None
    a, b, rows, share = expand(first, second)
    # The wrap-around of a product that is too large does no harm: it is hashed.
    keys, size = a * np.int64(second.size) + b, first.size * second.size
    if size > most:
        keys = (mix_bits(keys.view(np.uint64)) & np.uint64(most - 1)).view(np.int64)
        size = most
    return keys, size, rows, share


def expand(first: Column, second: Column) -> tuple[Ints, Ints, Ints | None, Floats | float]:
    """Pairs of values that share a row: both values, the row, and the share that the row gives to the pair.

    Rows are None, and the share is 1, where every row has one value of each.

    Example:
        >>> one = Column(values=np.array([5, 6], np.int32), lengths=None, size=7)
        >>> bag = Column(values=np.array([1, 2, 3], np.int32), lengths=np.array([2, 1], np.int32), size=4)
        >>> a, b, rows, share = expand(one, bag)
        >>> a.tolist(), b.tolist(), rows.tolist(), share.tolist()
        ([5, 5, 6], [1, 2, 3], [0, 0, 1], [0.5, 0.5, 1.0])
    """
    a, b = first.values.astype(np.int64), second.values.astype(np.int64)
    if first.lengths is None and second.lengths is None:
        return a, b, None, 1.0
    num = len(a if first.lengths is None else first.lengths)
    of_a, of_b = (
        np.ones(num, dtype=np.int64) if column.lengths is None else column.lengths.astype(np.int64)
        for column in (first, second)
    )
    counts = of_a * of_b
    rows = np.repeat(np.arange(num), counts)
    place = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    start_a, start_b = (np.cumsum(lengths) - lengths for lengths in (of_a, of_b))
    return (
        a[start_a[rows] + place // of_b[rows]],
        b[start_b[rows] + place % of_b[rows]],
        rows,
        (1.0 / counts)[rows],
    )


def screen_pairs(columns: Sequence[Column], sums: PairSums, most: int, total: Total) -> Ints:
    """Picks the ``most`` promising of too many pairs, on the fitted rows of the first split.

    The values of each feature are joined into a few, the most frequent ones alone, so that all cells of many pairs are
    one matrix product. A pair's promise is the sum over these cells of (sum of g)^2 / (sum of h + 30) less what noise
    would give. An interaction that cancels within all joined values is overlooked.

    Returns:
        [most, 2] pairs, in the order of `all_pairs`.
    """
    joined = max(2, min(MOST_JOINED, SCREENED_VALUES // len(columns)))
    codes = [_joined_values(column, joined, total) for column in columns]
    p = _probability(sums.odds[0])
    weights = [np.where(sums.held[0], 0.0, own).astype(np.float32) for own in (sums.labels - p, p * (1.0 - p))]
    blocks = [range(i, min(i + SCREENED_FEATURES, len(columns))) for i in range(0, len(columns), SCREENED_FEATURES)]
    best: list[tuple[Floats, Ints]] = []
    for number, some in enumerate(blocks):
        for others in blocks[number:]:
            promise = _promise(codes, some, others, joined, weights=weights, total=total)
            first, second = (
                np.array(block)[index] for block, index in zip((some, others), np.indices(promise.shape), strict=True)
            )
            new = first < second
            best.append((promise[new], np.stack([first[new], second[new]], axis=1)))
            if len(best) > 8:
                best = [_largest(best, most)]
    found = _largest(best, most)[1]
    return found[np.lexsort((found[:, 1], found[:, 0]))]


def _largest(parts: Sequence[tuple[Floats, Ints]], most: int) -> tuple[Floats, Ints]:
    promise, pairs = (np.concatenate(column) for column in zip(*parts, strict=True))
    kept = np.argsort(-promise, kind="stable")[:most]
    return promise[kept], pairs[kept]


def _joined_values(column: Column, joined: int, total: Total) -> tuple[NDArray[np.int32], Ints | None, Floats | float]:
    """The column with its values joined into ``joined`` ones: the most frequent alone, the others in turn."""
    counts = total(np.bincount(column.values, minlength=column.size).astype(np.float64))
    code = np.empty(column.size, dtype=np.int32)
    code[np.argsort(-counts, kind="stable")] = np.arange(column.size) % joined
    return (code[column.values], *column.rows())


def _promise(
    codes: Sequence[tuple[NDArray[np.int32], Ints | None, Floats | float]],
    some: range,
    others: range,
    joined: int,
    *,
    weights: Sequence[NDArray[np.float32]],
    total: Total,
) -> Floats:
    """[I, J] promise of each pair of a feature of ``some`` with one of ``others``."""
    sums = np.zeros((2, len(some) * joined, len(others) * joined), dtype=np.float32)
    for rows in _row_blocks(len(weights[0])):
        left = _indicators([codes[i] for i in some], joined, rows)
        right = left if others == some else _indicators([codes[j] for j in others], joined, rows)
        for own, into in zip(weights, sums, strict=True):
            into += (left * own[rows, None]).T @ right
    shape = (len(some), joined, len(others), joined)
    sum_g, sum_h = (own.reshape(shape) for own in total(sums))
    return ((sum_g**2 - sum_h) / (sum_h + CELL_PRIOR)).sum(axis=(1, 3))


def _row_blocks(num_rows: int) -> Iterator[slice]:
    return (slice(start, min(start + SCREENED_ROWS, num_rows)) for start in range(0, num_rows, SCREENED_ROWS))


def _indicators(
    codes: Sequence[tuple[NDArray[np.int32], Ints | None, Floats | float]], joined: int, block: slice
) -> NDArray[np.float32]:
    """[rows, features * joined] the share in which each row has each value."""
    num = block.stop - block.start
    dense = np.zeros((num, len(codes) * joined), dtype=np.float32)
    for place, (values, rows, share) in enumerate(codes):
        if rows is None:
            dense[np.arange(num), place * joined + values[block]] = 1.0
        else:
            first, last = np.searchsorted(rows, [block.start, block.stop])
            np.add.at(dense, (rows[first:last] - block.start, place * joined + values[first:last]), share[first:last])  # type: ignore[index]
    return dense
