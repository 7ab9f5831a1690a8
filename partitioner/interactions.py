"""`FeatureInteractions`: which pairs of features predict the label together better than each alone.

Legend: F features, S splits.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dmt.errors import InputError
from dmt.formatting import human_bytes
from dmt.partitioner.affinity import (
    FORMAT_VERSION,
    FORMS,
    FeatureAffinity,
    check_features,
    check_pooling_factors,
    check_tables,
    read_arrays,
    tables_from_arrays,
    tables_to_arrays,
    write_arrays,
)
from dmt.partitioner.interaction_gains import (
    Column,
    PairSums,
    Total,
    chosen_triples,
    fit_additive,
    largest_triple,
    log_losses,
    pair_gains,
    screen_pairs,
    single_gains,
    triple_gains,
)
from dmt.partitioner.pair_rows import PARTS, ReadRows, dense_columns, held_out, make_columns
from dmt.plan.tables import TableSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["FeatureInteractions", "Pair"]

_OWNER = "FeatureInteractions"
# Fewer rows hold out too few.
_LEAST_ROWS = 1000
# A triple counts from this many standard errors on: of thousands that gain nothing, hardly one does.
_TRIPLE_ERRORS, _TRIPLES_NAMED = 5.0, 10
# Of a triple's cells in the rows, each with its keys, row, share and sums; all of one triple are there at once.
_TRIPLE_BYTES, _MOST_TRIPLE_BYTES = 60, 4 * 10**9
_FORMS = {name: form for name, form in FORMS.items() if name not in ("num_samples", "measure")} | {
    "num_rows": (0, "iu", "one whole number"),
    "loss": (0, "f", "one number"),
    "notes": (1, "U", "texts"),
}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One pair of features."""

    features: tuple[str, str]
    gain: float
    """Nats of held-out log loss of a row."""
    error: float
    """Standard error of the gain."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureInteractions:
    """Gains of all pairs of features: what a pair tells about the label beyond the sum of what all features tell alone.

    The paper groups features by the resemblance of their embeddings (`FeatureAffinity`). Which towers train well
    depends on what is lost between towers instead: a tower module with cross terms keeps the interactions of its own
    features. They are measured on rows, without a model: an additive logistic model of all features is fitted, then for
    each pair one step for each cell of both features' values. The gain of the pair is by how much that step lowers the
    log loss of rows held out of both fits, the mean of several splits, and 0 where it does not.

    Raises:
        InputError: matrices and names do not fit together, a gain is negative or not finite, or the tables are not
            those of the features.

    Example:
        >>> gains = [[0.0, 0.02, 0.0], [0.02, 0.0, 0.001], [0.0, 0.001, 0.0]]
        >>> found = FeatureInteractions(gains=gains, features=["hour", "day", "city"])
        >>> found.top_pairs(1)[0].features
        ('hour', 'day')
    """

    gains: NDArray[np.float64]
    """W, [F, F] float64 in nats per row, symmetric, 0 on the diagonal; any array of numbers may be given."""
    features: tuple[str, ...]
    """The F names, in the order of rows and columns."""
    errors: NDArray[np.float64] | None = None
    """[F, F] standard errors of the gains, where known."""
    num_rows: int | None = None
    """Rows that were read, where known."""
    loss: float | None = None
    """Log loss of a row under the additive model, in nats: what a gain is a share of."""
    tables: tuple[TableSpec, ...] = ()
    """The tables that the features look up, where known; TorchRec ``EmbeddingBagConfig`` may be given."""
    pooling_factors: tuple[float, ...] | None = None
    """Mean number of ids per row of each feature, where known."""
    notes: tuple[str, ...] = ()
    """Warnings about the data in whole sentences, such as that a feature is constant."""

    def __post_init__(self) -> None:
        features = tuple(self.features)
        check_features(features, _OWNER)
        # A frozen dataclass sets its own cleaned fields this way.
        for name in ("gains", "errors"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _clean_matrix(name, getattr(self, name), features))
        object.__setattr__(self, "features", features)
        object.__setattr__(self, "tables", check_tables(self.tables, features, where=_OWNER))
        object.__setattr__(self, "pooling_factors", check_pooling_factors(self.pooling_factors, features, _OWNER))

    @classmethod
    def collect(
        cls,
        batches: Iterable[Any],
        *,
        tables: Sequence[Any] = (),
        seed: int = 0,
        num_splits: int = 3,
        max_rows: int = 2**20,
        max_pairs: int = 100_000,
        max_triples: int = 0,
        process_group: ProcessGroup | None = None,
    ) -> FeatureInteractions:
        """Measures the gains on training rows. No trained model and no TorchRec is needed.

        The rows are read once and kept in 4 bytes per value, 2 GiB at most. Values that one row has are taken together,
        bags count by their first 5 ids and in equal shares, dense columns take part in the additive model in 32 bins
        (no tower holds them). Cells of a pair beyond 4 million are hashed. On a terminal, the first rank shows a bar.

        Args:
            batches: of training rows only, each with ``labels`` [B] of 0 and 1, ``sparse_features`` (a
                ``KeyedJaggedTensor``, or whole numbers [B] by feature), and optionally ``dense_features`` [B, D] and
                ``weights`` [B], 0 for rows to leave out, such as the trainer's. Consumed one at a time.
            tables: those of the features, to be kept for the partitioner's limits.
            seed: of the splits.
            num_splits: S, 1 to 10: times that another tenth of the rows is held out and all is fitted to the rest.
            max_rows: rows to read on all ranks together, at most.
            max_pairs: pairs that are measured exactly. Of more (beyond 447 features), the most promising by sums over
                few joined values; the others gain 0.
            max_triples: triples of features that are measured too, of the features that gain most in pairs where there
                are more. What one tells beyond its pairs, if that is more than noise, is added to the three pairs in
                equal parts, and noted. A triple takes about as long as twelve pairs. With 0, interactions of three
                features count by what their pairs show, which is nothing where the label goes by their parity.
            process_group: the ranks that call this together, each with batches of its own; all get what one process
                with all of them gets.

        Raises:
            InputError: a batch is not of this form, there are too few rows, all have one label, or the pairs do not fit
                into memory. With a group, every rank raises what one of them found.
        """
        for name, value, least, most in (
            ("seed", seed, 0, 2**32 - 1),
            ("num_splits", num_splits, 1, PARTS),
            ("max_rows", max_rows, _LEAST_ROWS, 2**40),
            ("max_pairs", max_pairs, 1, 2**40),
            ("max_triples", max_triples, 0, 2**24),
        ):
            if not least <= value <= most:
                raise InputError(f"{_OWNER}.collect: {name}={value} must be at least {least} and at most {most}.")
        rows, largest = _read(batches, max_rows, process_group)
        features, total = rows.features, Total(process_group)
        _check_memory(len(features))
        columns = make_columns(rows, largest, total)
        dense = dense_columns(rows, total)
        sums, loss = _fit(rows, [*columns, *dense], held_out(rows, seed)[None] == np.arange(num_splits)[:, None], total)
        pairs = np.stack(np.triu_indices(len(features), k=1), axis=1)
        notes = _notes(columns, features, total)
        if len(pairs) > max_pairs:
            notes.append(
                f"Of {len(pairs):,} pairs of features the {max_pairs:,} most promising were measured; the others count "
                "as pairs without an interaction."
            )
            pairs = screen_pairs(columns, sums, max_pairs, total)
        found, error = pair_gains(columns, pairs, sums, total)
        # What the additive model, drawn to 0, leaves over of single features is no interaction.
        alone = np.maximum(single_gains(columns, sums, total), 0.0)
        gains, errors = np.zeros((2, len(features), len(features)))
        for matrix, values in ((gains, found - alone[pairs].sum(axis=1)), (errors, error)):
            matrix[pairs[:, 0], pairs[:, 1]] = matrix[pairs[:, 1], pairs[:, 0]] = values
        gains = np.maximum(gains, 0.0)
        if max_triples:
            notes += _add_triples(gains, errors, features, columns=columns, sums=sums, most=max_triples, total=total)
        return cls(
            gains=gains,
            features=features,
            errors=errors,
            num_rows=rows.num_rows,
            loss=loss,
            tables=check_tables(tables, features, where=_OWNER),
            pooling_factors=tuple(rows.num_ids[name] / rows.num_rows for name in features),
            notes=tuple(notes),
        )

    @property
    def num_features(self) -> int:
        """F."""
        return len(self.features)

    def top_pairs(self, count: int = 10) -> list[Pair]:
        """The pairs that gain most, those above 0, largest first."""
        first, second = np.triu_indices(self.num_features, k=1)
        gains = self.gains[first, second]
        order = [k for k in np.argsort(-gains, kind="stable")[:count].tolist() if gains[k] > 0]
        errors = self.errors
        return [
            Pair(
                features=(self.features[first[k]], self.features[second[k]]),
                gain=float(gains[k]),
                error=0.0 if errors is None else float(errors[first[k], second[k]]),
            )
            for k in order
        ]

    def to_affinity(self) -> FeatureAffinity:
        """The gains over the largest, within 0..1, as the partitioner and its pictures take them."""
        most = float(self.gains.max())
        return FeatureAffinity(
            matrix=self.gains / most if most > 0 else self.gains,
            features=self.features,
            num_samples=self.num_rows,
            tables=self.tables,
            pooling_factors=self.pooling_factors,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the measurement as a numpy ``.npz`` file; an existing file is replaced in one step.

        Raises:
            InputError: the file cannot be written.
        """
        arrays: dict[str, Any] = {
            "format": np.int64(FORMAT_VERSION),
            "gains": self.gains,
            "features": np.array(self.features, dtype=np.str_),
            "num_rows": np.int64(-1 if self.num_rows is None else self.num_rows),
            "loss": np.float64(-1.0 if self.loss is None else self.loss),
            "notes": np.array(self.notes, dtype=np.str_),
            **tables_to_arrays(self.tables, self.pooling_factors),
        }
        if self.errors is not None:
            arrays["errors"] = self.errors
        write_arrays(path, arrays, what="interactions")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FeatureInteractions:
        """Reads what `save` wrote, or any ``.npz`` file with the arrays ``gains`` and ``features``; unpickles nothing.

        Raises:
            InputError: the file is absent, damaged, not such a file, of another format version, or its contents are
                refused.
        """
        arrays = read_arrays(path, what="interactions", forms=_FORMS, main="gains")
        rows, loss = int(arrays.get("num_rows", -1)), float(arrays.get("loss", -1.0))
        try:
            return cls(
                gains=arrays["gains"],
                features=tuple(arrays["features"].tolist()),
                errors=arrays.get("errors"),
                num_rows=None if rows < 0 else rows,
                loss=None if loss < 0 else loss,
                tables=tables_from_arrays(arrays),
                pooling_factors=tuple(arrays["pooling_factors"].tolist()) if "pooling_factors" in arrays else None,
                notes=tuple(arrays["notes"].tolist()) if "notes" in arrays else (),
            )
        except InputError as error:
            raise InputError(f"Interactions file {path}: {error}") from error


def _clean_matrix(name: str, matrix: ArrayLike, features: Sequence[str]) -> NDArray[np.float64]:
    """Checks a matrix of gains or errors; returns a read-only float64 copy, exactly symmetric, 0 on the diagonal."""
    size = len(features)
    given = np.asarray(matrix)
    if given.dtype.kind not in "fiu" or given.shape != (size, size):
        raise InputError(
            f"{_OWNER}: {name} is {given.dtype} of shape {list(given.shape)}; it must be real numbers of shape "
            f"[{size}, {size}], a row and a column for each feature."
        )
    cleaned = given.astype(np.float64)
    np.fill_diagonal(cleaned, 0.0)
    # Infinities first: they are not compared with their mirror images.
    wrong = ~np.isfinite(cleaned) | (cleaned < 0)
    if not wrong.any():
        wrong = np.abs(cleaned - cleaned.T) > 1e-5 * max(float(cleaned.max()), 1e-300)
    if wrong.any():
        row, column = divmod(int(np.argmax(wrong)), size)
        raise InputError(
            f"{_OWNER}: {name} of {features[row]!r} with {features[column]!r} is {cleaned[row, column]:g} (mirrored: "
            f"{cleaned[column, row]:g}); it must be finite, not negative and symmetric. Collect them again."
        )
    cleaned = (cleaned + cleaned.T) / 2
    cleaned.flags.writeable = False
    return cleaned


def _read(batches: Iterable[Any], max_rows: int, group: ProcessGroup | None) -> tuple[ReadRows, dict[str, int]]:
    """Reads this rank's rows, with the counts of all ranks; raises `InputError` on every rank for what one found.

    Returns:
        The rows, whose ``features``, ``num_dense``, ``num_rows`` and ``num_ids`` are those of all ranks, and the
        largest raw value of each feature on any rank.
    """
    from dmt.partitioner.measure_affinity import Lockstep  # loads torch

    ranks, rank, world_size = Lockstep(group), 0, 1
    if group is not None:
        rank, world_size = group.rank(), group.size()
    rows = ReadRows(rank=rank, world_size=world_size, max_rows=max(1, max_rows // world_size))
    failed: Exception | None = None
    try:
        rows.read(batches)
    except Exception as error:
        failed = error
    largest = {name: max(int(part.max(initial=0)) for part in parts) for name, parts in rows.values.items()}
    clicks = float(sum(own.sum() for own in rows.labels))
    mine = (rows.features, rows.num_dense, rows.num_rows, clicks, largest, rows.num_ids)
    everyone = [record for record in ranks.share("the rows read", mine, failed) if record[0]]
    num_rows, num_clicks = (sum(record[k] for record in everyone) for k in (2, 3))
    if num_rows < _LEAST_ROWS:
        raise InputError(
            f"{_OWNER}.collect: batches gave {num_rows:,} rows with a weight; at least {_LEAST_ROWS:,} are needed, and "
            "tens of thousands to tell weak interactions from noise."
        )
    rarer = min(num_clicks, num_rows - num_clicks)
    if rarer < _LEAST_ROWS // 50:
        raise InputError(
            f"{_OWNER}.collect: {num_clicks:,.0f} of {num_rows:,} rows have the label 1; at least "
            f"{_LEAST_ROWS // 50} of either label are needed. Give more rows, or check the label's column."
        )
    features, num_dense = everyone[0][0], everyone[0][1]
    if any(record[:2] != (features, num_dense) for record in everyone):
        raise InputError(
            f"{_OWNER}.collect: ranks read other columns than the first. Give all batches of one data set."
        )
    rows.features, rows.num_dense, rows.num_rows = features, num_dense, num_rows
    rows.num_ids = {name: sum(record[5][name] for record in everyone) for name in features}
    return rows, {name: max(record[4][name] for record in everyone) for name in features}


def _check_memory(num_features: int) -> None:
    needed, there = 64 * num_features**2, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise InputError(
            f"{_OWNER}.collect: {num_features:,} features have {num_features**2 // 2:,} pairs, which need "
            f"{human_bytes(needed)} of memory, but this machine has {human_bytes(there)}. Measure fewer "
            "features at once."
        )


def _fit(rows: ReadRows, columns: Sequence[Column], held: NDArray[np.bool_], total: Total) -> tuple[PairSums, float]:
    """Fits the additive model without each of the [S, R] held-out parts; also the mean held-out loss."""
    labels = np.concatenate(rows.labels) if rows.labels else np.zeros(0)
    weights, every = None, []
    losses = np.zeros(2)
    for part in held:
        # Each fit is done when it is done, so where it begins only saves time.
        odds, weights = fit_additive(columns, labels, ~part, start=weights, total=total)
        losses += part.sum(), log_losses(odds[part], labels[part]).sum()
        every.append(odds)
    num_rows, num_held, loss = total(np.array([float(len(labels)), *losses]))
    return PairSums(labels=labels, odds=every, held=list(held), num_rows=int(num_rows)), float(loss / num_held)


def _add_triples(
    gains: NDArray[np.float64],
    errors: NDArray[np.float64],
    features: Sequence[str],
    *,
    columns: Sequence[Column],
    sums: PairSums,
    most: int,
    total: Total,
) -> list[str]:
    """Adds what triples tell beyond their pairs to the gains, in place; returns notes on them, the largest first."""
    triples = chosen_triples(gains, most)
    needed = largest_triple(columns[: len(features)]) * _TRIPLE_BYTES
    # Every rank raises where one has too much.
    if total(np.array([float(needed > _MOST_TRIPLE_BYTES)]))[0]:
        raise InputError(
            f"{_OWNER}.collect: a triple of bags of several ids may need {human_bytes(needed)} of memory in one "
            f"process; at most {human_bytes(_MOST_TRIPLE_BYTES)} is allowed. Read fewer rows "
            "(max_rows), or leave max_triples=0."
        )
    found, own = triple_gains(columns, triples, sums, total)
    kept = [number for number in np.argsort(-found) if found[number] > _TRIPLE_ERRORS * own[number]]
    notes = []
    for number in kept:
        for i, j in permutations(triples[number].tolist(), 2):
            gains[i, j] += found[number] / 3
            errors[i, j] = np.hypot(errors[i, j], own[number] / 3)
        names = ", ".join(repr(features[i]) for i in triples[number])
        notes.append(f"The triple {names} gains {found[number]:.6f} nats a row beyond its pairs.")
    if len(notes) > _TRIPLES_NAMED:
        notes[_TRIPLES_NAMED:] = [f"And {len(notes) - _TRIPLES_NAMED:,} more triples gain beyond their pairs."]
    return notes


def _notes(columns: Sequence[Column], features: Sequence[str], total: Total) -> list[str]:
    """Notes on features that cannot interact with any."""
    silent = []
    for name, column in zip(features, columns, strict=True):
        there = total(np.bincount(column.values, minlength=column.size).astype(np.float64))
        if (there > 0).sum() < 2:
            silent.append(name)
    if not silent:
        return []
    shown = ", ".join(map(repr, silent[:5])) + (" ..." if len(silent) > 5 else "")
    return [
        f"{len(silent)} of {len(features)} features are constant, or have values that are each seen once ({shown}): "
        "they interact with none and are placed where there is room."
    ]
