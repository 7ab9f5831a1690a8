"""Rows for measuring interactions: batches read once and kept as columns of small numbers.

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

# Ids of a bag that count, in its order; ids of all rows together, 8 bytes each.
MOST_PER_BAG, MOST_KEPT = 5, 2**28
# Stands for an empty bag among the ids.
_EMPTY = np.iinfo(np.int64).min
PARTS = 10
"""A row is held out of split s where its hash is s modulo this."""
_DENSE_BINS = 32
WHERE = "FeatureAffinity.collect_interactions"


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
    def rows(self) -> NDArray[np.int64] | None:
        """The row of each value of bags."""
        return None if self.lengths is None else np.repeat(np.arange(len(self.lengths)), self.lengths)

    @cached_property
    def shares(self) -> NDArray[np.float64] | float:
        """The share of each value in its row: 1 / length."""
        return 1.0 if self.lengths is None else (1.0 / self.lengths)[self.rows]

    def sums(self, of_rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """[V] sums of a number of each row, [R], in the shares in which the row has the values."""
        weights = of_rows if self.rows is None else of_rows[self.rows] * self.shares
        return np.bincount(self.values, weights=weights, minlength=self.size).astype(np.float64, copy=False)

    def means(self, of_values: NDArray[np.float64]) -> NDArray[np.float64]:
        """[R] means of a number of each value, [V], over the values of each row."""
        if self.lengths is None or self.rows is None:
            return of_values[self.values]
        weights = of_values[self.values] * self.shares
        return np.bincount(self.rows, weights=weights, minlength=len(self.lengths)).astype(np.float64, copy=False)

    def first(self, num_rows: int) -> Column:
        """Only the first rows."""
        if self.lengths is None:
            return Column(values=self.values[:num_rows], lengths=None, size=self.size)
        lengths = self.lengths[:num_rows]
        return Column(values=self.values[: int(lengths.sum())], lengths=lengths, size=self.size)


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadRows:
    """The rows as columns."""

    features: tuple[str, ...]
    columns: list[Column]
    """Of the F features, then of the D dense columns in bins."""
    labels: NDArray[np.float64]
    """[R] 0 or 1."""
    parts: NDArray[np.int64]
    """[R] the part of each row, 0 to `PARTS` - 1, drawn from the seed."""
    pooling_factors: tuple[float, ...]
    """Mean ids of each feature, all of every bag."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    """The K rows of a batch that are kept."""

    labels: NDArray[np.float64]
    """[K]"""
    dense: NDArray[np.float32]
    """[K, D]"""
    bags: Mapping[str, tuple[NDArray[np.int32], NDArray[np.int64]]]
    """[K] lengths, at least 1, and ids."""
    num_ids: Mapping[str, int]
    """Ids of each feature, all of every bag."""


def read_rows(batches: Iterable[Any], *, max_rows: int, seed: int) -> ReadRows:
    """Reads batches until they end or there are enough rows.

    Raises:
        InputError: a batch has not what is needed, or other features than the first; a label is not 0 or 1.
    """
    parts: list[_Part] = []
    num_rows = 0
    for index, batch in enumerate(batches):
        part = _read(index, batch, max_rows - num_rows)
        first = parts[0] if parts else part
        if list(part.bags) != list(first.bags) or part.dense.shape[1] != first.dense.shape[1]:
            strange = sorted(set(part.bags) ^ set(first.bags)) or [f"{part.dense.shape[1]} dense features"]
            raise InputError(
                f"{WHERE}: batch {index} has other columns than the first, see {strange[0]!r}; all batches must have "
                "the same, in one order."
            )
        max_rows = max(1, min(max_rows, MOST_KEPT // (len(part.bags) + part.dense.shape[1])))
        parts.append(part)
        num_rows += len(part.labels)
        if num_rows >= max_rows:
            break
    if not num_rows:
        raise InputError(f"{WHERE}: batches gave 0 rows with a weight.")
    features = tuple(parts[0].bags)
    return ReadRows(
        features=features,
        columns=[
            *(_column([part.bags[name] for part in parts]) for name in features),
            *map(_dense_column, np.concatenate([part.dense for part in parts]).T),
        ],
        labels=np.concatenate([part.labels for part in parts]),
        # Not the seed alone: rows made with the generator of the same seed would go by the parts.
        parts=np.random.default_rng([seed, PARTS]).integers(PARTS, size=num_rows),
        pooling_factors=tuple(sum(part.num_ids[name] for part in parts) / num_rows for name in features),
    )


def _read(index: int, batch: Any, most_rows: int) -> _Part:
    absent = [name for name in ("sparse_features", "labels") if not hasattr(batch, name)]
    if absent:
        raise InputError(
            f"{WHERE}: batch {index} is a {type(batch).__name__} without {absent[0]}; it needs labels, "
            "sparse_features and, where there are any, dense_features."
        )
    labels = _array(batch.labels).astype(np.float64)
    weights = getattr(batch, "weights", None)
    real = np.ones(labels.shape, np.bool_) if weights is None else _array(weights) > 0
    dense = getattr(batch, "dense_features", None)
    columns = np.zeros((len(labels), 0), np.float32) if dense is None else _array(dense).astype(np.float32)
    if labels.ndim != 1 or real.shape != labels.shape or columns.ndim != 2 or len(columns) != len(labels):
        raise InputError(
            f"{WHERE}: batch {index} has labels of shape {list(labels.shape)}, weights of {list(real.shape)} and dense "
            f"features of {list(columns.shape)}; give one label, one weight and one row for each sample."
        )
    wrong = labels[real & (labels != 0) & (labels != 1)]
    if len(wrong):
        raise InputError(f"{WHERE}: batch {index} has the label {wrong[0]:g}; labels must be 0 or 1.")
    bags = _bags(batch.sparse_features, len(labels))
    other = [name for name, (lengths, _) in bags.items() if len(lengths) != len(labels)]
    if other:
        raise InputError(
            f"{WHERE}: batch {index} has {len(labels)} labels, but feature {other[0]!r} {len(bags[other[0]][0])} "
            "bags. Give one for each row."
        )
    kept = np.flatnonzero(real)[:most_rows]
    return _Part(
        labels=labels[kept],
        dense=columns[kept],
        bags={name: _shortened(lengths, ids, kept) for name, (lengths, ids) in bags.items()},
        num_ids={name: int(lengths[kept].sum()) for name, (lengths, _) in bags.items()},
    )


def _array(tensor: Any) -> NDArray[Any]:
    if hasattr(tensor, "detach"):  # of PyTorch; numpy knows no BF16
        tensor = (tensor.double() if tensor.is_floating_point() else tensor).detach().cpu()
    return np.asarray(tensor)


def _bags(sparse: Any, num_rows: int) -> Mapping[str, tuple[NDArray[Any], NDArray[Any]]]:
    """Lengths and ids of each feature; plain arrays have one id for each row."""
    if hasattr(sparse, "to_dict"):
        return {name: (_array(bags.lengths()), _array(bags.values())) for name, bags in sparse.to_dict().items()}
    if not isinstance(sparse, Mapping) or not sparse:
        raise InputError(
            f"{WHERE}: sparse_features is a {type(sparse).__name__}; give a KeyedJaggedTensor, or a dict, not "
            "empty, from the name of each feature to an array of one id for each row."
        )
    ids = {name: _array(values) for name, values in sparse.items()}
    for name, values in ids.items():
        if values.shape != (num_rows,) or values.dtype.kind not in "iu":
            raise InputError(
                f"{WHERE}: feature {name!r} is {values.dtype} of shape {list(values.shape)}; it must be whole numbers "
                f"of shape [{num_rows}], one for each label."
            )
    return {name: (np.ones(num_rows, np.int64), values) for name, values in ids.items()}


def _shortened(
    lengths: NDArray[Any], ids: NDArray[Any], kept: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Lengths and ids of the kept rows: of long bags the first ids, of empty ones `_EMPTY`."""
    starts = (np.cumsum(lengths) - lengths)[kept]
    used = np.clip(lengths[kept], 1, MOST_PER_BAG)
    place = np.arange(used.sum()) - np.repeat(np.cumsum(used) - used, used)
    # One more, so that an empty bag at the end has an id to replace.
    padded = np.append(ids.astype(np.int64), _EMPTY)
    values = np.where(np.repeat(lengths[kept] == 0, used), _EMPTY, padded[np.repeat(starts, used) + place])
    return used.astype(np.int32), values


def _column(parts: Sequence[tuple[NDArray[np.int32], NDArray[np.int64]]]) -> Column:
    """Numbers the values of a feature by those that occur; what is seen once is one value, 0."""
    bags, ids = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    _, numbers, counts = np.unique(ids, return_inverse=True, return_counts=True)
    again = np.cumsum(counts > 1) * (counts > 1)
    size = int(again.max(initial=0)) + 1
    return Column(values=again[numbers].astype(np.int32), lengths=None if bags.max() == 1 else bags, size=size)


def _dense_column(values: NDArray[np.float32]) -> Column:
    """A dense column in bins of about equally many rows; NaN is a bin of its own."""
    missing = np.isnan(values)
    known = values[~missing]
    edges = np.unique(np.quantile(known, np.linspace(0, 1, _DENSE_BINS + 1)[1:-1])) if len(known) else known
    bins = np.where(missing, len(edges) + 1, np.searchsorted(edges, values, side="right"))
    return Column(values=bins.astype(np.int32), lengths=None, size=len(edges) + 2)


def mix_bits(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64: every bit of the result depends on every bit of a number."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
