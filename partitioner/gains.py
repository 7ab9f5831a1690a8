"""`FeatureAffinity.collect_interactions`: fits an additive model, then makes one Newton step for each cell.

A cell is a combination of values, one of each feature of a pair or triple. All quantities come from sums of g = y - p
and h = p (1 - p) over rows, for each value of a feature or each cell; y is the label, p its predicted probability.

Legend: R rows, F features, S splits, V values of a feature, P pairs or triples.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.partitioner.affinity import FeatureAffinity, Interaction, check_tables, noise_bound
from dmt.partitioner.rows import WHERE, Column, ReadRows, mix_bits, read_rows

__all__ = ["AdditiveFit", "fit_additive", "gains_of", "join", "log_losses", "measure_interactions"]

logger = logging.getLogger(__name__)

Floats = NDArray[np.float64]

# With fewer rows, too few would be held out.
_LEAST_ROWS = 1000
# Added to the sum of h of each value (additive model) and of each cell: shrinks weights and steps toward 0.
VALUE_PRIOR, CELL_PRIOR = 10.0, 30.0
# Number of splits; each holds out another tenth of the rows.
SPLITS = 3
# The fit of the additive model ends when a sweep lowers the mean loss by less than this, in nats per row.
DONE = 1e-5
MAX_SWEEPS = 60
MOST_CELLS = 2**22
# Limits on rows times pairs (10 to 15 minutes of one core) and rows times triples (a minute). More features use fewer
# rows; triples are left out if they would use fewer than the least.
PAIR_WORK, TRIPLE_WORK, LEAST_TRIPLE_ROWS = 2e10, 8e8, 20_000
# Rounds of steps for all pairs before triples are measured: what one round leaves of a pair would show in its triples.
_PAIR_ROUNDS = 3


def measure_interactions(batches: Iterable[Any], *, tables: Sequence[Any], seed: int, max_rows: int) -> FeatureAffinity:
    """Returns the measured gains; `FeatureAffinity.collect_interactions` describes arguments and errors."""
    for name, value, least, most in (("seed", seed, 0, 2**32 - 1), ("max_rows", max_rows, _LEAST_ROWS, 2**40)):
        if not least <= value <= most:
            raise InputError(f"{WHERE}: {name}={value} must be at least {least} and at most {most}.")
    rows = read_rows(batches, max_rows=max_rows, seed=seed)
    specs = check_tables(tables, rows.features)  # before measuring, which takes long
    _check_rows(rows)
    features, columns = rows.features, rows.columns[: len(rows.features)]
    fit, count = _fit(rows), math.comb(len(features), 2)
    notes = _constant_notes(rows) + _copy_notes(rows, fit)
    num_rows = int(min(len(rows.labels), max(_LEAST_ROWS, PAIR_WORK / max(count, 1))))
    if num_rows < len(rows.labels):
        notes.append(f"The {count:,} pairs were measured on {num_rows:,} of {len(rows.labels):,} rows.")
        fit, columns = _fewer(fit, columns, num_rows)
    gains, errors, _ = _pair_gains(columns, fit, title="Measuring pairs")
    measured = FeatureAffinity(
        matrix=gains,
        features=features,
        measure="interactions",
        errors=errors,
        num_samples=len(rows.labels),
        loss=fit.loss,
        tables=specs,
        pooling_factors=rows.pooling_factors,
    )
    interacting, more = _measure_triples(measured, columns, fit)
    return replace(measured, triples=interacting, notes=(*notes, *more))


def _check_rows(rows: ReadRows) -> None:
    num_rows, clicks = len(rows.labels), float(rows.labels.sum())
    if num_rows < _LEAST_ROWS or min(clicks, num_rows - clicks) < _LEAST_ROWS // 50:
        raise InputError(
            f"{WHERE}: batches have {num_rows:,} rows with a weight above 0, {clicks:,.0f} of them with the label 1; "
            f"at least {_LEAST_ROWS:,} rows with {_LEAST_ROWS // 50} of each label are needed. Give more, if possible "
            "tens of thousands, which tell weak interactions from noise."
        )


def _constant_notes(rows: ReadRows) -> list[str]:
    pairs = zip(rows.features, rows.columns, strict=False)
    if not (silent := [name for name, column in pairs if column.values.min() == column.values.max()]):
        return []
    shown = ", ".join(map(repr, silent[:5])) + (" ..." if len(silent) > 5 else "")
    return [
        f"{len(silent)} of {len(rows.features)} features are constant, or each of their values occurs once ({shown}): "
        "their interactions cannot be measured, so they are placed where there is room."
    ]


def _copy_notes(rows: ReadRows, fit: AdditiveFit) -> list[str]:
    """Returns a note if rows repeat others, label included: of copies, some would be fitted and others held out."""
    rng, p = np.random.default_rng(0), _probability(np.mean(fit.odds, axis=0))
    # Rows are equal if the sums of random numbers of their values are.
    key = sum((column.means(rng.random(column.size)) for column in rows.columns), start=np.zeros(len(p)))
    order = np.argsort(key)
    is_copy, differs = np.diff(key[order]) == 0, np.diff(rows.labels[order]) != 0
    # Rows that are alike by chance have different labels, as often as these vary.
    expected = (2 * p * (1 - p))[order[1:]][is_copy].sum()
    if is_copy.mean() < 0.01 or expected < 30 or differs[is_copy].sum() > expected / 5:
        return []
    return [
        f"{is_copy.sum():,} of {len(p):,} rows repeat another, almost always with its label. If these are copies (of "
        "rare labels, or by a loader that starts again), noise looks like interactions: give each row once."
    ]


def _fit(rows: ReadRows) -> AdditiveFit:
    """Fits the additive model once per split, on the rows that the split does not hold out."""
    held = [rows.parts == split for split in range(SPLITS)]
    odds = [fit_additive(rows.columns, rows.labels, ~part) for part in held]
    losses = [log_losses(fitted[part], rows.labels[part]) for fitted, part in zip(odds, held, strict=True)]
    return AdditiveFit(labels=rows.labels, odds=odds, held=held, loss=float(np.concatenate(losses).mean()))


def _pair_gains(columns: Sequence[Column], fit: AdditiveFit, *, title: str = "") -> tuple[Floats, Floats, Floats]:
    """Returns gains of pairs and their errors, both [F, F], and gains of single features [F]; gains are at least 0.

    The shrunk additive model leaves a residue of each feature's effect, which pairs do not count.
    """
    pairs = np.stack(np.triu_indices(len(columns), k=1), axis=1)
    alone = np.maximum(gains_of(columns, np.arange(len(columns))[:, None], fit)[0], 0.0)
    found, error = gains_of(columns, pairs, fit, title=title)
    gains, errors = np.zeros((2, len(columns), len(columns)))
    for matrix, values in ((gains, np.maximum(found - alone[pairs].sum(axis=1), 0.0)), (errors, error)):
        matrix[pairs[:, 0], pairs[:, 1]] = matrix[pairs[:, 1], pairs[:, 0]] = values
    return gains, errors, alone


def _measure_triples(
    measured: FeatureAffinity, columns: Sequence[Column], fit: AdditiveFit
) -> tuple[tuple[Interaction, ...], list[str]]:
    """Measures the gains of triples beyond all pairs; returns those that exceed the measuring error, and notes."""
    features, count = measured.features, math.comb(len(columns), 3)
    # A row with three bags has as many cells as the product of their lengths.
    per_row = max(len(column.values) / len(fit.labels) for column in columns) ** 3
    num_rows = min(len(fit.labels), int(TRIPLE_WORK / max(count, 1) / per_row))
    if not count or num_rows < min(LEAST_TRIPLE_ROWS, len(fit.labels)):
        note = f"The {count:,} triples of features were not measured, because that would take more than a minute."
        return (), [note] if count else []
    if num_rows < len(fit.labels):
        fit, columns = _fewer(fit, columns, num_rows)
    for pair in [*np.argwhere(np.triu(measured.significant(), k=1) > 0)] * _PAIR_ROUNDS:
        fit = fit.stepped(join([columns[i] for i in pair], fit.most_cells))
    triples = np.array(list(combinations(range(len(columns)), 3)), dtype=np.int64)
    found, error = gains_of(columns, triples, fit, title="Measuring triples")
    # What is left of single features and of pairs, weak ones above all, is no interaction of three.
    (a, b, c), (gains, _, alone) = triples.T, _pair_gains(columns, fit)
    found -= alone[triples].sum(axis=1) + gains[a, b] + gains[a, c] + gains[b, c]
    kept = [k for k in np.argsort(-found) if found[k] > noise_bound(count) * error[k]]
    interacting = tuple(
        Interaction(features=tuple(features[i] for i in triples[k]), gain=float(found[k]), error=float(error[k]))
        for k in kept
    )
    if num_rows == measured.num_samples:
        return interacting, []
    return interacting, [f"The {count:,} triples were measured on {num_rows:,} rows only, to take about a minute."]


def _fewer(fit: AdditiveFit, columns: Sequence[Column], num_rows: int) -> tuple[AdditiveFit, list[Column]]:
    """Returns ``num_rows`` random rows of the predictions and the columns: a log may change from its first rows on."""
    kept = np.zeros(len(fit.labels), np.bool_)
    kept[np.random.default_rng([num_rows, SPLITS]).permutation(len(kept))[:num_rows]] = True
    odds, held = [split[kept] for split in fit.odds], [split[kept] for split in fit.held]
    return replace(fit, labels=fit.labels[kept], odds=odds, held=held), [column.only(kept) for column in columns]


@dataclass(frozen=True, kw_only=True, eq=False)
class AdditiveFit:
    """Predictions of the additive model in each of S splits; the steps of cells start from them."""

    labels: Floats
    """[R] 0 or 1."""
    odds: list[Floats]
    """S arrays [R] of log odds."""
    held: list[NDArray[np.bool_]]
    """S arrays [R], True for rows that the split holds out."""
    loss: float
    """Mean log loss of held-out rows, in nats per row."""

    @property
    def most_cells(self) -> int:
        """Number of cells above which cells are hashed: about four per row, `MOST_CELLS` at most; a power of two."""
        return min(MOST_CELLS, 2 ** int(np.ceil(np.log2(4 * len(self.labels)))))

    @cached_property
    def gradients(self) -> list[tuple[Floats, Floats]]:
        """S pairs of g and h, each [R]; 0 for rows that are held out."""
        by_split = []
        for odds, held in zip(self.odds, self.held, strict=True):
            p = _probability(odds)
            by_split.append((np.where(held, 0.0, self.labels - p), np.where(held, 0.0, p * (1.0 - p))))
        return by_split

    def steps(self, cells: Column, *, split: int, some: Any = ...) -> Floats:
        """Returns the steps of ``some`` cells, or all: sum of g / (sum of h + `CELL_PRIOR`) over rows not held out."""
        g, h = self.gradients[split]
        # Picked before the division: there may be far more cells than rows.
        return cells.sums(g)[some] / (cells.sums(h)[some] + CELL_PRIOR)

    def stepped(self, cells: Column) -> AdditiveFit:
        """Returns the predictions after one step for each cell."""
        odds = [now + cells.means(self.steps(cells, split=split)) for split, now in enumerate(self.odds)]
        return replace(self, odds=odds)


def gains_of(
    columns: Sequence[Column], groups: NDArray[np.int64], fit: AdditiveFit, *, title: str = ""
) -> tuple[Floats, Floats]:
    """Measures, for each group of features, by how much one Newton step per cell lowers the held-out log loss.

    ``groups`` [P, 1 to 3] are indices into ``columns``; steps start from the predictions of ``fit``. A row with bags
    is in the cells of all combinations of their values, in equal shares. With a ``title``, a terminal shows a bar.

    Returns:
        [P] gains in nats per held-out row, which noise may make negative, and their [P] standard errors: computed from
        the spread of the gains over the rows, but at least the error to be expected if the features did not interact.
    """
    tested = [(np.flatnonzero(held), odds[held]) for odds, held in zip(fit.odds, fit.held, strict=True)]
    before = [log_losses(odds, fit.labels[rows]) for rows, odds in tested]
    spreads = [p * (1.0 - p) for p in (_probability(odds) for _, odds in tested)]
    sums = np.zeros((len(groups), 4))
    for number, group in enumerate(_with_bar(groups.tolist(), title)):
        cells = join([columns[i] for i in group], fit.most_cells)
        for split, ((rows, odds), losses) in enumerate(zip(tested, before, strict=True)):
            if cells.rows is None:  # without bags, it is enough to look at the held-out rows
                change = fit.steps(cells, split=split, some=cells.values[rows])
            else:
                change = cells.means(fit.steps(cells, split=split))[rows]
            gain = losses - log_losses(odds + change, fit.labels[rows])
            # A gain varies by its label times the change: over few rows of a rare label, more than can be seen.
            expected = spreads[split] @ np.square(change)
            sums[number] += len(gain), gain.sum(), np.square(gain).sum(), expected
    mean, squares, expected = sums[:, 1:].T / np.maximum(sums[:, 0], 1.0)
    return mean, np.sqrt(np.maximum(squares - mean**2, expected) / np.maximum(sums[:, 0], 1.0))


def _with_bar(items: list[list[int]], title: str) -> Iterable[list[int]]:
    from rich.console import Console
    from rich.progress import track

    is_hidden = not title or not sys.stderr.isatty()
    return track(items, title, console=Console(stderr=True), transient=True, disable=is_hidden)


def join(columns: Sequence[Column], most: int) -> Column:
    """Returns the cells of some features as one column; a row with bags has each combination of their values.

    More cells than ``most``, a power of two, are hashed to ``most``.

    Example:
        >>> one = Column(values=np.array([1, 0]), lengths=None, size=2)
        >>> bag = Column(values=np.array([1, 2, 3]), lengths=np.array([2, 1]), size=4)
        >>> cells = join([one, bag], most=2**10)
        >>> cells.values.tolist(), cells.lengths.tolist(), cells.size
        ([5, 6, 3], [2, 1], 8)
    """
    joined = columns[0]
    for other in columns[1:]:
        joined = _join_two(joined, other, most)
    return joined


def _join_two(first: Column, second: Column, most: int) -> Column:
    a, b, lengths = first.values.astype(np.int64), second.values.astype(np.int64), None
    if first.lengths is not None or second.lengths is not None:
        of_a, of_b = (
            np.ones(len(values), dtype=np.int64) if column.lengths is None else column.lengths.astype(np.int64)
            for column, values in ((first, a), (second, b))
        )
        lengths = of_a * of_b
        rows = np.repeat(np.arange(len(lengths)), lengths)
        place = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        start_a, start_b = (np.cumsum(counts) - counts for counts in (of_a, of_b))
        a, b = a[start_a[rows] + place // of_b[rows]], b[start_b[rows] + place % of_b[rows]]
    # A product may wrap around, which does no harm: it is hashed anyway.
    cells, size = a * np.int64(second.size) + b, first.size * second.size
    if size > most:
        cells, size = (mix_bits(cells.view(np.uint64)) & np.uint64(most - 1)).view(np.int64), most
    return Column(values=cells, lengths=lengths, size=size)


def fit_additive(columns: Sequence[Column], labels: Floats, counts: NDArray[np.bool_]) -> Floats:
    """Fits an additive logistic model, with one weight per value of each column, by Newton steps column after column.

    A sweep goes through all columns and updates g after each, but not h; its steps are halved while they raise the
    loss. Sweeps continue, at most 60, until one gains next to nothing: pairs would be credited with what is left over.

    ``columns`` has a column of each feature, dense ones in bins; ``labels`` [R] are 0 or 1; ``counts`` [R] is True for
    rows to fit.

    Returns:
        [R] log odds of all rows.
    """
    num_rows, clicks = float(counts.sum()), float(labels[counts].sum())
    # int64 once, instead of in every sweep.
    columns = [replace(column, values=column.values.astype(np.int64)) for column in columns]
    weights = [np.zeros(column.size) for column in columns]
    odds = np.full(len(labels), np.log(clicks / (num_rows - clicks)))
    loss = _loss(odds, labels, counts, weights)
    for _ in range(MAX_SWEEPS):
        p = _probability(odds)
        g, h = np.where(counts, labels - p, 0.0), np.where(counts, p * (1.0 - p), 0.0)
        steps, moved = [], np.zeros(len(labels))
        for column, values in zip(columns, weights, strict=True):
            steps.append((column.sums(g) - VALUE_PRIOR * values) / (column.sums(h) + VALUE_PRIOR))
            change = column.means(steps[-1])
            moved += change
            g -= h * change
        moved += g.sum() / max(h.sum(), 1e-12)  # the constant, which is not shrunk
        scale, before = 1.0, loss
        for _ in range(10):
            tried = [values + scale * step for values, step in zip(weights, steps, strict=True)]
            loss = _loss(odds + scale * moved, labels, counts, tried)
            if loss <= before:
                weights, odds = tried, odds + scale * moved
                break
            scale /= 2
        if before - loss < DONE:
            return odds
    logger.warning("The additive model did not converge in %d sweeps; gains of pairs may be too high.", MAX_SWEEPS)
    return odds


def _loss(odds: Floats, labels: Floats, counts: NDArray[np.bool_], weights: Sequence[Floats]) -> float:
    """Returns the mean log loss of the rows where ``counts`` is True, plus the weights' penalty per such row."""
    penalty = VALUE_PRIOR / 2 * sum(float(values @ values) for values in weights)
    return float(np.where(counts, log_losses(odds, labels), 0.0).sum() + penalty) / float(counts.sum())


def _probability(odds: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-np.clip(odds, -700.0, 700.0)))


def log_losses(odds: Floats, labels: Floats) -> Floats:
    """Returns the log losses [R] of rows in nats, from log odds [R] and labels [R] of 0 and 1."""
    signed = np.where(labels > 0, -odds, odds)
    # log(1 + e^x) without overflow, several times faster than logaddexp.
    return np.maximum(signed, 0.0) + np.log1p(np.exp(-np.abs(signed)))
