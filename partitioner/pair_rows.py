"""Rows for `FeatureInteractions`: batches read once and kept as columns of small numbers.

Legend: R rows of this rank, F features, D dense columns, B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.partitioner.interaction_gains import Column, Floats, Total
from dmt.plan.distinct import mix_bits

__all__ = ["ReadRows", "dense_columns", "held_out", "make_columns"]

# Ids of a bag that count, in its order; values that all rows together may have, 4 bytes each; raw values of all
# features together.
MOST_PER_BAG, MOST_KEPT, MOST_RAW = 5, 2**29, 2**27
# A row is held out of split s where its hash is s modulo this.
PARTS = 10
_DENSE_BINS = 32
_WHERE = "FeatureInteractions.collect"


@dataclass(kw_only=True)
class ReadRows:
    """Rows of this rank as they were read: one list entry for each batch."""

    rank: int
    """This rank in the group; ranks number their batches in turn, as a single process reads them."""
    world_size: int
    max_rows: int
    """Rows kept at most."""
    features: tuple[str, ...] = ()
    num_dense: int = -1
    """D; -1 before the first batch."""
    num_rows: int = 0
    labels: list[Floats] = field(default_factory=list)
    numbers: list[NDArray[np.uint64]] = field(default_factory=list)
    """Hashable numbers of rows: batch and place in it."""
    dense: list[NDArray[np.float32]] = field(default_factory=list)
    """[B, D]"""
    values: dict[str, list[NDArray[np.int32]]] = field(default_factory=dict)
    """Raw values, 0 for an empty bag."""
    lengths: dict[str, list[NDArray[np.int32]]] = field(default_factory=dict)
    """[B], at least 1."""
    num_ids: dict[str, int] = field(default_factory=dict)
    """Ids of the rows, all of every bag."""

    def read(self, batches: Iterable[Any]) -> None:
        """Reads batches until they end or there are enough rows.

        Raises:
            InputError: a batch has not what is needed, or other features than the first; a label is not 0 or 1.
        """
        for index, batch in enumerate(batches):
            self._add(index, batch)
            if self.num_rows >= self.max_rows:
                return

    def _add(self, index: int, batch: Any) -> None:
        absent = [name for name in ("sparse_features", "labels") if not hasattr(batch, name)]
        if absent:
            raise InputError(
                f"{_WHERE}: batch {index} is a {type(batch).__name__} without {absent[0]}; it needs labels, "
                "sparse_features and, where there are any, dense_features."
            )
        labels = _array(batch.labels).astype(np.float64)
        weights = getattr(batch, "weights", None)
        real = np.ones(labels.shape, np.bool_) if weights is None else _array(weights) > 0
        if labels.ndim != 1 or real.shape != labels.shape:
            raise InputError(
                f"{_WHERE}: batch {index} has labels of shape {list(labels.shape)} and weights of {list(real.shape)}; "
                "give one number for each row."
            )
        wrong = labels[real & (labels != 0) & (labels != 1)]
        if len(wrong):
            raise InputError(f"{_WHERE}: batch {index} has the label {wrong[0]:g}; labels must be 0 or 1.")
        bags = _bags(batch.sparse_features, len(labels))
        dense = getattr(batch, "dense_features", None)
        columns = np.zeros((len(labels), 0), np.float32) if dense is None else _array(dense).astype(np.float32)
        if not self.features:
            self.features, self.num_dense = tuple(bags), columns.shape[1]
            self.max_rows = max(1, min(self.max_rows, MOST_KEPT // (len(bags) + self.num_dense)))
        if tuple(bags) != self.features or columns.shape != (len(labels), self.num_dense):
            strange = sorted(set(bags) ^ set(self.features)) or [f"dense features of shape {list(columns.shape)}"]
            raise InputError(
                f"{_WHERE}: batch {index} has other columns than the first, see {strange[0]!r}; all batches must have "
                "the same, in one order."
            )
        other = [name for name, (lengths, _) in bags.items() if len(lengths) != len(labels)]
        if other:
            raise InputError(
                f"{_WHERE}: batch {index} has {len(labels)} labels, but feature {other[0]!r} {len(bags[other[0]][0])} "
                "bags. Give one for each row."
            )
        kept = np.flatnonzero(real)[: self.max_rows - self.num_rows]
        number = np.uint64(index * self.world_size + self.rank) << np.uint64(32)
        self.labels.append(labels[kept])
        self.numbers.append(number + kept.astype(np.uint64))
        self.dense.append(columns[kept])
        most_raw = int(np.clip(2 ** int(np.log2(MOST_RAW // len(self.features))), 2**14, 2**22))
        for name, (lengths, ids) in bags.items():
            own, values = _shortened(lengths, ids, kept, most_raw)
            self.values.setdefault(name, []).append(values)
            self.lengths.setdefault(name, []).append(own)
            self.num_ids[name] = self.num_ids.get(name, 0) + int(lengths[kept].sum())
        self.num_rows += len(kept)


def _array(tensor: Any) -> NDArray[Any]:
    return tensor.detach().cpu().numpy() if hasattr(tensor, "detach") else np.asarray(tensor)


def _bags(sparse: Any, num_rows: int) -> Mapping[str, tuple[NDArray[Any], NDArray[Any]]]:
    """Lengths and ids of each feature; plain arrays have one id for each row."""
    if hasattr(sparse, "to_dict"):
        return {name: (_array(own.lengths()), _array(own.values())) for name, own in sparse.to_dict().items()}
    if not isinstance(sparse, Mapping) or not sparse:
        raise InputError(
            f"{_WHERE}: sparse_features is a {type(sparse).__name__}; give a KeyedJaggedTensor, or arrays of one id "
            "for each row by the names of features."
        )
    ids = {name: _array(own) for name, own in sparse.items()}
    for name, own in ids.items():
        if own.shape != (num_rows,) or own.dtype.kind not in "iu":
            raise InputError(
                f"{_WHERE}: feature {name!r} is {own.dtype} of shape {list(own.shape)}; it must be whole numbers of "
                f"shape [{num_rows}], one for each label."
            )
    return {name: (np.ones(num_rows, np.int64), own) for name, own in ids.items()}


def _shortened(
    lengths: NDArray[Any], ids: NDArray[Any], kept: NDArray[np.int64], most: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Lengths and raw values of the kept rows: of long bags the first ids, of empty ones the value 0."""
    ids = ids.astype(np.int64)
    hashed = (mix_bits(ids.view(np.uint64)) & np.uint64(most - 1)).view(np.int64)
    raw = np.where((ids >= 0) & (ids < most), ids, hashed) + 1
    if (lengths == 1).all():
        return np.ones(len(kept), np.int32), raw[kept].astype(np.int32)
    starts = (np.cumsum(lengths) - lengths)[kept]
    own = np.clip(lengths[kept], 1, MOST_PER_BAG)
    place = np.arange(own.sum()) - np.repeat(np.cumsum(own) - own, own)
    empty = np.repeat(lengths[kept] == 0, own)
    at = np.minimum(np.repeat(starts, own) + place, max(0, len(raw) - 1))
    values = np.where(empty, 0, raw[at] if len(raw) else 0)
    return own.astype(np.int32), values.astype(np.int32)


def make_columns(rows: ReadRows, largest: Mapping[str, int], total: Total) -> list[Column]:
    """Numbers the values of each feature by those that any rank has; what is seen once is one value, 0.

    ``largest`` is the largest raw value of each feature on any rank.
    """
    columns = []
    for name in rows.features:
        raw = _joined(rows.values.get(name, ()), np.int32)
        lengths = _joined(rows.lengths.get(name, ()), np.int32)
        counts = total(np.bincount(raw, minlength=largest[name] + 1).astype(np.float64))
        number = np.cumsum(counts > 1) * (counts > 1)
        columns.append(
            Column(
                values=number[raw].astype(np.int32),
                lengths=None if not len(lengths) or lengths.max() == 1 else lengths,
                size=int(number.max()) + 1,
            )
        )
    return columns


def _joined(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def dense_columns(rows: ReadRows, total: Total) -> list[Column]:
    """Dense columns in bins of about equally many rows; NaN is a bin of its own.

    Quantiles are those of the upper 16 bits of the number less its mean, whose counts add up over ranks.
    """
    dense = np.concatenate([np.zeros((0, rows.num_dense), np.float32), *rows.dense])
    columns = []
    for values in dense.T:
        finite = np.isfinite(values)
        count, added = total(np.array([finite.sum(), values[finite].sum(dtype=np.float64)]))
        bits = (values - np.float32(added / max(count, 1.0))).astype(np.float32).view(np.uint32)
        # In the order of the numbers: negative ones reversed, below the others.
        ordered = np.where(bits >> 31, ~bits, bits | np.uint32(2**31)) >> np.uint32(16)
        code = np.where(np.isnan(values), 2**16 - 1, ordered).astype(np.int64)
        counts = total(np.bincount(code, minlength=2**16).astype(np.float64))
        known = counts[:-1]
        middle = np.cumsum(known) - known / 2
        bins = np.minimum((middle * _DENSE_BINS / max(known.sum(), 1.0)).astype(np.int64), _DENSE_BINS - 1)
        number = np.append(np.unique(bins, return_inverse=True)[1], 0)
        number[-1] = number.max() + 1
        columns.append(Column(values=number[code].astype(np.int32), lengths=None, size=int(number[-1]) + 1))
    return columns


def held_out(rows: ReadRows, seed: int) -> NDArray[np.int64]:
    """[R] the part, 0 to `PARTS` - 1, of each row: by a hash of its batch, its place in it, and the seed."""
    start = mix_bits(np.array([seed], dtype=np.uint64) + np.uint64(1))
    hashes = mix_bits(_joined(rows.numbers, np.uint64) ^ start)
    return (hashes % np.uint64(PARTS)).astype(np.int64)
