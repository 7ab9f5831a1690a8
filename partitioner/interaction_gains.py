"""Measuring `FeatureInteractions`: an additive model of all features, then one step for each cell of a pair or triple.

Everything is a sum over rows of g = y - p and h = p (1 - p), for the values of a feature or the cells of a pair, so
that ranks add theirs up and get what one process gets.

Legend: R rows of this rank, F features, S splits, V values of a feature, P pairs, Q triples.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import comb
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
    "chosen_triples",
    "fit_additive",
    "join",
    "largest_triple",
    "log_losses",
    "pair_gains",
    "screen_pairs",
    "single_gains",
    "triple_gains",
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
    """The values of one feature, or the cells of several, in R rows, numbered from 0."""

    values: NDArray[np.integer]
    """[R], or of all bags one after the other."""
    lengths: NDArray[np.integer] | None
    """[R] values of each bag, at least one; None where every row has one."""
    size: int
    """V."""

    @cached_property
    def rows(self) -> Ints | None:
        """The row of each value of bags."""
        return None if self.lengths is None else np.repeat(np.arange(len(self.lengths)), self.lengths)

    @cached_property
    def shares(self) -> Floats | float:
        """The share of each value in its row: 1 / length."""
        return 1.0 if self.lengths is None else (1.0 / self.lengths)[self.rows]

    def sums(self, of_rows: Floats) -> Floats:
        """[V] sums of a number of each row, [R], in the shares in which the row has the values."""
        weights = of_rows if self.rows is None else of_rows[self.rows] * self.shares
        return np.bincount(self.values, weights=weights, minlength=self.size).astype(np.float64, copy=False)

    def means(self, of_values: Floats) -> Floats:
        """[R] means of a number of each value, [V], over the values of each row."""
        if self.lengths is None or self.rows is None:
            return of_values[self.values]
        found = np.bincount(self.rows, weights=of_values[self.values] * self.shares, minlength=len(self.lengths))
        return found.astype(np.float64, copy=False)


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

    ``columns`` are those of all features, dense ones in bins; ``labels`` [R] are 0 or 1, ``counts`` [R] the rows to
    fit, ``start`` the weights of an earlier fit on other rows, to begin with.

    Returns:
        [R] log odds, and the weights: [V] of each feature, then the constant.
    """
    num_rows, fitted = total(np.array([counts.sum(), labels[counts].sum()]))
    # Converted once, not in every sweep.
    columns = [replace(column, values=column.values.astype(np.int64)) for column in columns]
    if start is None:
        weights = [np.zeros(column.size) for column in columns]
        weights.append(np.array([np.log(fitted / (num_rows - fitted))]))
    else:
        weights = [own.copy() for own in start]
    odds = np.full(len(labels), weights[-1][0])
    for column, own in zip(columns, weights, strict=False):
        odds += column.means(own)
    loss = _mean_loss(odds, labels, counts, total) + _penalty(weights) / num_rows
    settled, sums_h = False, [own[:0] for own in weights]
    for _ in range(MAX_SWEEPS):
        p = _probability(odds)
        g, h = np.where(counts, labels - p, 0.0), np.where(counts, p * (1.0 - p), 0.0)
        steps, moved = [], np.zeros(len(labels))
        for i, (column, own) in enumerate(zip(columns, weights, strict=False)):
            if settled:
                sum_g = total(column.sums(g))
            else:
                sum_g, sums_h[i] = total(np.stack([column.sums(g), column.sums(h)]))
            steps.append((sum_g - VALUE_PRIOR * own) / (sums_h[i] + VALUE_PRIOR))
            change = column.means(steps[-1])
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


def pair_gains(columns: Sequence[Column], pairs: Ints, sums: PairSums, total: Total) -> tuple[Floats, Floats]:
    """Gains of pairs of features: by how much one step for each cell of the pair lowers the held-out log loss.

    A cell is one value of each of both; its step is the sum of g over the sum of h + 30, over the fitted rows. Cells
    are hashed to at most four for each row and `MOST_CELLS`. A row with bags has all pairs of their values, in equal
    shares.

    Returns:
        [P] mean gains of a held-out row in nats, and their standard errors. Not clipped: below 0 where steps are noise.
    """
    gradients, most = [], _most_cells(sums.num_rows)
    for odds, held in zip(sums.odds, sums.held, strict=True):
        p = _probability(odds)
        gradients += [np.where(held, 0.0, sums.labels - p), np.where(held, 0.0, p * (1.0 - p))]
    tested = [(np.flatnonzero(held), odds[held]) for odds, held in zip(sums.odds, sums.held, strict=True)]
    before = [log_losses(odds, sums.labels[rows]) for rows, odds in tested]
    found = np.zeros((len(pairs), 3))
    for number, (i, j) in enumerate(total.steps(pairs, "Measuring pairs")):
        cells = join(columns[i], columns[j], most)
        found_sums = total(np.stack([cells.sums(own) for own in gradients]))
        for split, (own, odds) in enumerate(tested):
            steps = found_sums[2 * split] / (found_sums[2 * split + 1] + CELL_PRIOR)
            # Without bags, only the rows that are held out are looked at.
            change = steps[cells.values[own]] if cells.rows is None else cells.means(steps)[own]
            gain = before[split] - log_losses(odds + change, sums.labels[own])
            found[number] += len(gain), gain.sum(), np.square(gain).sum()
    return _mean_and_error(total(found))


def _mean_and_error(sums: Floats) -> tuple[Floats, Floats]:
    """Means and their standard errors, from the number, the sum and the sum of squares of what was measured, [P, 3]."""
    num, gains, squares = sums.T
    mean = gains / np.maximum(num, 1.0)
    return mean, np.sqrt(np.maximum(squares / np.maximum(num, 1.0) - mean**2, 0.0) / np.maximum(num, 1.0))


def single_gains(columns: Sequence[Column], sums: PairSums, total: Total) -> Floats:
    """[F] gains of each feature alone, as `pair_gains` finds them with one that is constant: above 0 by little."""
    nothing = Column(values=np.zeros(len(sums.labels), np.int32), lengths=None, size=1)
    pairs = np.stack([np.arange(len(columns)), np.full(len(columns), len(columns))], axis=1)
    return pair_gains([*columns, nothing], pairs, sums, total)[0]


def _most_cells(num_rows: int) -> int:
    """Cells beyond which they are hashed: four for each row, and `MOST_CELLS`."""
    return min(MOST_CELLS, 2 ** int(np.ceil(np.log2(max(4 * num_rows, 2**10)))))


def join(first: Column, second: Column, most: int) -> Column:
    """The cells of two features as the values of one: in a row with bags, each pair of their values.

    ``most``, a power of two, is the number of cells beyond which they are hashed.

    Example:
        >>> one = Column(values=np.array([1, 0]), lengths=None, size=2)
        >>> bag = Column(values=np.array([1, 2, 3]), lengths=np.array([2, 1]), size=4)
        >>> cells = join(one, bag, most=2**10)
        >>> cells.values.tolist(), cells.lengths.tolist(), cells.size
        ([5, 6, 3], [2, 1], 8)
    """
    a, b, lengths = first.values.astype(np.int64), second.values.astype(np.int64), None
    if first.lengths is not None or second.lengths is not None:
        of_a, of_b = (
            np.ones(len(own), dtype=np.int64) if column.lengths is None else column.lengths.astype(np.int64)
            for column, own in ((first, a), (second, b))
        )
        lengths = of_a * of_b
        rows = np.repeat(np.arange(len(lengths)), lengths)
        place = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        start_a, start_b = (np.cumsum(own) - own for own in (of_a, of_b))
        a, b = a[start_a[rows] + place // of_b[rows]], b[start_b[rows] + place % of_b[rows]]
    # The wrap-around of a product that is too large does no harm: it is hashed.
    cells, size = a * np.int64(second.size) + b, first.size * second.size
    if size > most:
        cells, size = (mix_bits(cells.view(np.uint64)) & np.uint64(most - 1)).view(np.int64), most
    return Column(values=cells, lengths=lengths, size=size)


def chosen_triples(gains: Floats, most: int) -> Ints:
    """[Q, 3] triples of features, at most ``most``: all, or those of the features with the largest [F, F] ``gains``.

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
    most, found = _most_cells(sums.num_rows), np.zeros((len(triples), 3))
    for number, (i, j, k) in enumerate(total.steps(triples, "Measuring triples")):
        pairs = [join(columns[a], columns[b], most) for a, b in ((i, j), (i, k), (j, k))]
        # Twice, since what one step leaves of a strong pair would be found in every triple that has it.
        joined = [*pairs, *pairs, join(pairs[0], columns[k], most)]
        for odds, held in zip(sums.odds, sums.held, strict=True):
            before = now = odds
            for cells in joined:
                before, now = now, now + _cell_steps(cells, now, held=held, labels=sums.labels, total=total)
            gain = log_losses(before[held], sums.labels[held]) - log_losses(now[held], sums.labels[held])
            found[number] += len(gain), gain.sum(), np.square(gain).sum()
    return _mean_and_error(total(found))


def _cell_steps(cells: Column, odds: Floats, *, held: NDArray[np.bool_], labels: Floats, total: Total) -> Floats:
    """[R] change of the log odds by one step for each cell, made on the rows that are not held out."""
    p = _probability(odds)
    gradients = np.where(held, 0.0, labels - p), np.where(held, 0.0, p * (1.0 - p))
    sum_g, sum_h = total(np.stack([cells.sums(own) for own in gradients]))
    return cells.means(sum_g / (sum_h + CELL_PRIOR))


def screen_pairs(columns: Sequence[Column], sums: PairSums, most: int, total: Total) -> Ints:
    """Picks the ``most`` promising of too many pairs, on the fitted rows of the first split.

    The values of each feature are joined into a few, the most frequent ones alone, so that all cells of many pairs are
    one matrix product. A pair's promise is the sum over these cells of (sum of g)^2 / (sum of h + 30) less what noise
    would give. An interaction that cancels within all joined values is overlooked.

    Returns:
        [most, 2] pairs, ordered.
    """
    joined = max(2, min(MOST_JOINED, SCREENED_VALUES // len(columns)))
    codes = [_joined_values(column, joined, total) for column in columns]
    p = _probability(sums.odds[0])
    weights = [np.where(sums.held[0], 0.0, own).astype(np.float32) for own in (sums.labels - p, p * (1.0 - p))]
    blocks = [codes[i : i + SCREENED_FEATURES] for i in range(0, len(codes), SCREENED_FEATURES)]
    best: list[tuple[Floats, Ints]] = []
    for number, some in enumerate(blocks):
        for other, others in enumerate(blocks[number:], start=number):
            promise = _promise(some, others, weights=weights, total=total)
            grid = np.indices(promise.shape)
            first, second = grid[0] + number * SCREENED_FEATURES, grid[1] + other * SCREENED_FEATURES
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


def _joined_values(column: Column, joined: int, total: Total) -> Column:
    """The column with its values joined into ``joined`` ones: the most frequent alone, the others in turn."""
    counts = total(np.bincount(column.values, minlength=column.size).astype(np.float64))
    code = np.empty(column.size, dtype=np.int32)
    code[np.argsort(-counts, kind="stable")] = np.arange(column.size) % joined
    return replace(column, values=code[column.values], size=joined)


def _promise(
    some: Sequence[Column], others: Sequence[Column], *, weights: Sequence[NDArray[np.float32]], total: Total
) -> Floats:
    """[I, J] promise of each pair of a feature of ``some`` with one of ``others``, all with as many values."""
    shape = (len(some), some[0].size, len(others), some[0].size)
    sums = np.zeros((2, shape[0] * shape[1], shape[2] * shape[3]), dtype=np.float32)
    for start in range(0, len(weights[0]), SCREENED_ROWS):
        rows = slice(start, min(start + SCREENED_ROWS, len(weights[0])))
        left = _indicators(some, rows)
        right = left if others is some else _indicators(others, rows)
        for own, into in zip(weights, sums, strict=True):
            into += (left * own[rows, None]).T @ right
    sum_g, sum_h = (own.reshape(shape) for own in total(sums))
    return ((sum_g**2 - sum_h) / (sum_h + CELL_PRIOR)).sum(axis=(1, 3))


def _indicators(columns: Sequence[Column], block: slice) -> NDArray[np.float32]:
    """[rows, features * V] the share in which each row has each value."""
    num, size = block.stop - block.start, columns[0].size
    dense = np.zeros((num, len(columns) * size), dtype=np.float32)
    for place, column in enumerate(columns):
        if column.rows is None:
            dense[np.arange(num), place * size + column.values[block]] = 1.0
        else:
            first, last = np.searchsorted(column.rows, [block.start, block.stop]).tolist()
            at = column.rows[first:last] - block.start, place * size + column.values[first:last]
            np.add.at(dense, at, np.asarray(column.shares)[first:last])
    return dense
