"""Reads the rows that interactions are measured on: each batch once, kept as columns of small integers.

Legend: R rows, F features, D dense columns, B rows of a batch, V values of a feature.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmt.errors import InputError

__all__ = ["WHERE", "Column", "ReadRows", "mix_bits", "read_rows"]

# Limits on ids used per bag (the first), and on rows times columns; with one id per column, these are 2 GiB of ids.
MOST_PER_BAG, MOST_KEPT = 5, 2**28
# The id that stands for an empty bag.
_EMPTY = np.iinfo(np.int64).min
PARTS = 10
"""Parts that rows are assigned to at random; split s holds out part s."""
_DENSE_BINS = 32
WHERE = "FeatureAffinity.collect_interactions"


@dataclass(frozen=True, kw_only=True, eq=False)
class Column:
    """The values of one feature in R rows, or the cells of several features; both are numbered from 0 to V - 1."""

    values: NDArray[np.integer]
    """[R], or [sum of lengths] bag after bag."""
    lengths: NDArray[np.integer] | None
    """[R] number of values in each bag, at least one; None if every row has one value."""
    size: int
    """V, the number of possible values or cells; some may not occur."""

    @cached_property
    def rows(self) -> NDArray[np.int64] | None:
        """[sum of lengths] the row of each value; None without bags."""
        return None if self.lengths is None else np.repeat(np.arange(len(self.lengths)), self.lengths)

    @cached_property
    def shares(self) -> NDArray[np.float64] | float:
        """[sum of lengths] the share of each value in its row, 1 / length; 1.0 without bags."""
        return 1.0 if self.lengths is None else (1.0 / self.lengths)[self.rows]

    def sums(self, of_rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns, for each value, the sum of ``of_rows`` [R] over its rows, weighted by its shares in them: [V]."""
        weights = of_rows if self.rows is None else of_rows[self.rows] * self.shares
        return np.bincount(self.values, weights=weights, minlength=self.size).astype(np.float64, copy=False)

    def means(self, of_values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns, for each row, the mean of ``of_values`` [V] over its values: [R]."""
        if self.lengths is None or self.rows is None:
            return of_values[self.values]
        weights = of_values[self.values] * self.shares
        return np.bincount(self.rows, weights=weights, minlength=len(self.lengths)).astype(np.float64, copy=False)

    def only(self, kept: NDArray[np.bool_]) -> Column:
        """Returns the rows where ``kept`` [R] is True."""
        if self.lengths is None or self.rows is None:
            return Column(values=self.values[kept], lengths=None, size=self.size)
        return Column(values=self.values[kept[self.rows]], lengths=self.lengths[kept], size=self.size)


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadRows:
    """All rows, as columns."""

    features: tuple[str, ...]
    columns: list[Column]
    """F columns of the features, then D of the dense columns, in bins."""
    labels: NDArray[np.float64]
    """[R] 0 or 1."""
    parts: NDArray[np.int64]
    """[R] the part of each row, 0 to `PARTS` - 1, drawn with the seed."""
    pooling_factors: tuple[float, ...]
    """[F] mean number of ids per row, whole bags counted."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    """The K kept rows of a batch."""

    labels: NDArray[np.float64]
    """[K] 0 or 1."""
    dense: NDArray[np.float32]
    """[K, D] values of the dense columns."""
    bags: Mapping[str, tuple[NDArray[np.int32], NDArray[np.int64]]]
    """[K] lengths, at least 1, and [sum of lengths] ids of each feature."""
    num_ids: Mapping[str, int]
    """Number of ids of each feature, counted before long bags are shortened."""


def read_rows(batches: Iterable[Any], *, max_rows: int, seed: int) -> ReadRows:
    """Reads batches until they end, ``max_rows`` rows are kept, or rows times columns reach `MOST_KEPT`.

    Raises:
        InputError: a batch lacks a field, has a wrong shape or other columns than the first, a label is not 0 or 1, or
            no row has a weight above 0.
    """
    parts: list[_Part] = []
    num_rows = 0
    for index, batch in enumerate(batches):
        part = _read(index, batch, max_rows - num_rows)
        first = parts[0] if parts else part
        if list(part.bags) != list(first.bags) or part.dense.shape[1] != first.dense.shape[1]:
            differing = sorted(set(part.bags) ^ set(first.bags))[:1] or ["their order, or the number of dense columns"]
            raise InputError(
                f"{WHERE}: batch {index} and the first batch differ in their columns ({differing[0]}). Give all "
                "batches the same features in one order, and the same number of dense columns."
            )
        max_rows = max(1, min(max_rows, MOST_KEPT // (len(part.bags) + part.dense.shape[1])))
        parts.append(part)
        num_rows += len(part.labels)
        if num_rows >= max_rows:
            break
    if not num_rows:
        raise InputError(f"{WHERE}: batches have 0 rows with a weight above 0. Give training rows.")
    features = tuple(parts[0].bags)
    return ReadRows(
        features=features,
        columns=[
            *(_column([part.bags[name] for part in parts]) for name in features),
            *map(_dense_column, np.concatenate([part.dense for part in parts]).T),
        ],
        labels=np.concatenate([part.labels for part in parts]),
        # Not the seed alone: rows generated with the same seed would be correlated with the parts.
        parts=np.random.default_rng([seed, PARTS]).integers(PARTS, size=num_rows),
        pooling_factors=tuple(sum(part.num_ids[name] for part in parts) / num_rows for name in features),
    )


def _read(index: int, batch: Any, most_rows: int) -> _Part:
    if absent := [name for name in ("sparse_features", "labels") if not hasattr(batch, name)]:
        raise InputError(
            f"{WHERE}: batch {index} is a {type(batch).__name__} without {absent[0]}. Give batches with labels, "
            "sparse_features and, if there are dense columns, dense_features."
        )
    labels = _array(batch.labels).astype(np.float64)
    weights = getattr(batch, "weights", None)
    real = np.ones(labels.shape, np.bool_) if weights is None else _array(weights) > 0
    dense = getattr(batch, "dense_features", None)
    columns = np.zeros((len(labels), 0), np.float32) if dense is None else _array(dense).astype(np.float32)
    if labels.ndim != 1 or real.shape != labels.shape or columns.ndim != 2 or len(columns) != len(labels):
        raise InputError(
            f"{WHERE}: batch {index} has labels of shape {list(labels.shape)}, weights of {list(real.shape)} and dense "
            f"features of {list(columns.shape)}. Give labels [B], weights [B] and dense features [B, D]."
        )
    if len(wrong := labels[real & (labels != 0) & (labels != 1)]):
        raise InputError(f"{WHERE}: batch {index} has the label {wrong[0]:g}; labels must be 0 or 1.")
    bags = _bags(index, batch.sparse_features, len(labels))
    if other := [name for name, (lengths, _) in bags.items() if len(lengths) != len(labels)]:
        raise InputError(
            f"{WHERE}: batch {index} has {len(labels)} labels, but feature {other[0]!r} has {len(bags[other[0]][0])} "
            "bags. Give one bag for each label."
        )
    kept = np.flatnonzero(real)[:most_rows]
    return _Part(
        labels=labels[kept],
        dense=columns[kept],
        bags={name: _shortened(lengths, ids, kept) for name, (lengths, ids) in bags.items()},
        num_ids={name: int(lengths[kept].sum()) for name, (lengths, _) in bags.items()},
    )


def _array(tensor: Any) -> NDArray[Any]:
    if hasattr(tensor, "detach"):  # a PyTorch tensor, perhaps BF16, which numpy lacks
        tensor = (tensor.double() if tensor.is_floating_point() else tensor).detach().cpu()
    return np.asarray(tensor)


def _bags(index: int, sparse: Any, num_rows: int) -> Mapping[str, tuple[NDArray[Any], NDArray[Any]]]:
    """Returns lengths and ids of each feature; a plain array has one id for each row."""
    if hasattr(sparse, "to_dict"):
        return {name: (_array(bags.lengths()), _array(bags.values())) for name, bags in sparse.to_dict().items()}
    if not isinstance(sparse, Mapping) or not sparse:
        raise InputError(
            f"{WHERE}: in batch {index}, sparse_features is {sparse!r:.60}; give a KeyedJaggedTensor, or a non-empty "
            "dict that maps each feature to an array with one id per row."
        )
    ids = {name: _array(values) for name, values in sparse.items()}
    for name, values in ids.items():
        if values.shape != (num_rows,) or values.dtype.kind not in "iu":
            raise InputError(
                f"{WHERE}: in batch {index}, feature {name!r} is {values.dtype} of shape {list(values.shape)}; give "
                f"integers of shape [{num_rows}], one for each label."
            )
    return {name: (np.ones(num_rows, np.int64), values) for name, values in ids.items()}


def _shortened(
    lengths: NDArray[Any], ids: NDArray[Any], kept: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Returns lengths and ids of the kept rows: the first ids of long bags, `_EMPTY` for empty ones."""
    starts = (np.cumsum(lengths) - lengths)[kept]
    used = np.clip(lengths[kept], 1, MOST_PER_BAG)
    place = np.arange(used.sum()) - np.repeat(np.cumsum(used) - used, used)
    # One id more, because an empty bag at the end indexes past the ids.
    padded = np.append(ids.astype(np.int64), _EMPTY)
    values = np.where(np.repeat(lengths[kept] == 0, used), _EMPTY, padded[np.repeat(starts, used) + place])
    return used.astype(np.int32), values


def _column(parts: Sequence[tuple[NDArray[np.int32], NDArray[np.int64]]]) -> Column:
    """Numbers a feature's distinct ids from 1, in ascending order; all ids that occur only once become 0."""
    bags, ids = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    _, numbers, counts = np.unique(ids, return_inverse=True, return_counts=True)
    again = np.cumsum(counts > 1) * (counts > 1)
    size = int(again.max()) + 1
    return Column(values=again[numbers].astype(np.int32), lengths=None if bags.max() == 1 else bags, size=size)


def _dense_column(values: NDArray[np.float32]) -> Column:
    """Puts a dense column into bins of about the same number of rows; NaN has a separate bin."""
    missing = np.isnan(values)
    known = values[~missing]
    shares = np.linspace(0, 1, _DENSE_BINS)[:-1]
    # From the least value on: others may be too few to move a quantile. "lower", because values may be infinite.
    edges = np.unique(np.quantile(known, shares, method="lower")) if len(known) else known
    bins = np.where(missing, len(edges) + 1, np.searchsorted(edges, values))
    return Column(values=bins.astype(np.int32), lengths=None, size=len(edges) + 2)


def mix_bits(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Applies SplitMix64's finalizer to each number: every output bit depends on every input bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
