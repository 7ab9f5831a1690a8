"""`PackedRows`: decoded rows as one matrix of 32-bit words, of which rows are picked, sent and joined at little cost.

Legend: n rows, D dense features, S features with one id in each row, M features with bags of ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmt.training.data.rows import Bags, Rows

__all__ = ["PackedRows", "RowLayout"]


@dataclass(frozen=True)
class RowLayout:
    """The parts of a packed row.

    Example:
        >>> layout = RowLayout(num_dense=1, is_bag=(False, True), wide=False)
        >>> rows = Rows(
        ...     np.ones(2, np.float32),
        ...     np.zeros((2, 1), np.float32),
        ...     (Bags(np.array([7, 8])), Bags(np.array([1, 2, 3]), np.array([0, 2, 3]))),
        ... )
        >>> packed = layout.pack(rows).take(np.array([1, 0]))
        >>> packed.words.shape, packed.ids.tolist(), [bags.values.tolist() for bags in layout.unpack(packed).bags]
        ((2, 4), [3, 1, 2], [[8, 7], [3, 1, 2]])
    """

    num_dense: int
    """D."""
    is_bag: tuple[bool, ...]
    """For each feature, True if it is one of the M, False if one of the S."""
    wide: bool
    """True: an id takes two words, since some table has more than 2**31 rows."""

    @property
    def num_words(self) -> int:
        """Words of a row: label, dense features, S ids, M lengths."""
        num_bags = sum(self.is_bag)
        return 1 + self.num_dense + (len(self.is_bag) - num_bags) * (2 if self.wide else 1) + num_bags

    @property
    def id_type(self) -> np.dtype[np.int32] | np.dtype[np.int64]:
        """The type of ids in their packed form."""
        return np.dtype(np.int64) if self.wide else np.dtype(np.int32)

    def pack(self, rows: Rows) -> PackedRows:
        """Packs rows."""
        words = np.empty((rows.num_rows, self.num_words), dtype=np.int32)
        words[:, 0] = rows.labels.view(np.int32)
        words[:, 1 : 1 + self.num_dense] = np.ascontiguousarray(rows.dense).view(np.int32)
        bags = [own for own, is_bag in zip(rows.bags, self.is_bag, strict=True) if is_bag]
        width, at = (2 if self.wide else 1), 1 + self.num_dense
        for own, is_bag in zip(rows.bags, self.is_bag, strict=True):
            if not is_bag:
                words[:, at : at + width] = own.values.astype(self.id_type).view(np.int32).reshape(-1, width)
                at += width
        for number, own in enumerate(bags):
            words[:, at + number] = own.lengths
        ids = np.empty(sum(len(own.values) for own in bags), dtype=self.id_type)
        if bags:
            ids[self._by_feature(words)] = np.concatenate([own.values for own in bags])
        return PackedRows(words, ids, self.num_ids(words))

    def unpack(self, packed: PackedRows) -> Rows:
        """Returns the rows that were packed."""
        labels = np.ascontiguousarray(packed.words[:, 0]).view(np.float32)
        dense = np.ascontiguousarray(packed.words[:, 1 : 1 + self.num_dense]).view(np.float32)
        bags = (
            Bags(values, None if lengths is None else np.concatenate([[0], np.cumsum(lengths)]))
            for values, lengths in self.ids(packed)
        )
        return Rows(labels, dense, tuple(bags))

    def ids(self, packed: PackedRows) -> list[tuple[NDArray[np.int64], NDArray[np.int64] | None]]:
        """Returns each feature's ids, row after row, int64, and how many each row has, int64 [n]; None: one in each."""
        first, last = 1 + self.num_dense, self.num_words - sum(self.is_bag)
        singles = np.ascontiguousarray(packed.words[:, first:last]).view(self.id_type).T.astype(np.int64, order="C")
        lengths = packed.words[:, last:].T.astype(np.int64, order="C")
        values = packed.ids[self._by_feature(packed.words)].astype(np.int64)
        bags = zip(np.split(values, np.cumsum(lengths.sum(axis=1))[:-1]), lengths, strict=False)
        single = iter(singles)
        return [next(bags) if is_bag else (next(single), None) for is_bag in self.is_bag]

    def num_ids(self, words: NDArray[np.int32]) -> NDArray[np.int64]:
        """Returns the number of ids in all bags of each row [n]."""
        lengths: NDArray[np.int64] = words[:, self.num_words - sum(self.is_bag) :].sum(axis=1, dtype=np.int64)
        return lengths

    def unflatten(self, flat: NDArray[np.int32], number: int) -> PackedRows:
        """Returns ``number`` rows from their one array of words (`PackedRows.flatten`), without a copy."""
        size = number * self.num_words
        words = flat[:size].reshape(number, self.num_words)
        return PackedRows(words, flat[size:].view(self.id_type), self.num_ids(words))

    def empty(self) -> PackedRows:
        """Returns no rows."""
        return self.zeros(0)

    def zeros(self, number: int) -> PackedRows:
        """Returns rows of zeros and empty bags."""
        words = np.zeros((number, self.num_words), np.int32)
        return PackedRows(words, np.zeros(0, self.id_type), np.zeros(number, np.int64))

    def _by_feature(self, words: NDArray[np.int32]) -> NDArray[np.int64]:
        """Places of the ids of all bags, feature after feature; they lie row after row, each in order of features."""
        num_bags = sum(self.is_bag)
        features = np.tile(np.arange(num_bags, dtype=np.uint16), len(words))
        # Numpy's stable sort of 16-bit numbers takes linear time.
        return np.argsort(np.repeat(features, words[:, self.num_words - num_bags :].reshape(-1)), kind="stable")


@dataclass(frozen=True)
class PackedRows:
    """Packed rows of a `RowLayout`."""

    words: NDArray[np.int32]
    """Label, dense features, single ids and lengths of bags; int32 [n, words of a row]."""
    ids: NDArray[Any]
    """Ids of all bags, row after row; int32 or int64."""
    lengths: NDArray[np.int64]
    """Number of ids in all bags of each row [n]."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.words)

    def flatten(self) -> NDArray[np.int32]:
        """Returns words and ids as one array, from which `RowLayout.unflatten` makes the rows again."""
        return np.concatenate([self.words.reshape(-1), self.ids.view(np.int32)])

    def slice(self, start: int, stop: int) -> PackedRows:
        """Returns rows start to stop, without a copy."""
        ids = self.ids
        if len(ids):
            first = int(self.lengths[:start].sum())
            ids = ids[first : first + int(self.lengths[start:stop].sum())]
        return PackedRows(self.words[start:stop], ids, self.lengths[start:stop])

    def take(self, order: NDArray[np.int64]) -> PackedRows:
        """Returns the rows at these positions, in their order."""
        words, lengths = self.words.take(order, axis=0), self.lengths.take(order)
        if not len(self.ids):
            return PackedRows(words, self.ids, lengths)
        bags = Bags(self.ids, np.concatenate([[0], np.cumsum(self.lengths)])).take(order)
        return PackedRows(words, bags.values, lengths)

    @staticmethod
    def take_from(parts: Sequence[PackedRows], order: NDArray[np.int64]) -> PackedRows:
        """Returns the rows at these positions of all parts (at least one), counted one part after another."""
        if len(parts) == 1 or any(len(part.ids) for part in parts):
            return PackedRows.concat(parts).take(order)
        # Without a copy of all parts, of which few rows may be asked for.
        words = np.empty((len(order), parts[0].words.shape[1]), np.int32)
        lengths, first = np.zeros(len(order), np.int64), 0
        for part in parts:
            own = np.flatnonzero((first <= order) & (order < first + part.num_rows))
            words[own] = part.words[order[own] - first]
            first += part.num_rows
        return PackedRows(words, parts[0].ids, lengths)

    @staticmethod
    def concat(parts: Sequence[PackedRows]) -> PackedRows:
        """Returns the rows of all parts (at least one), one after another."""
        if len(parts) == 1:
            return parts[0]
        return PackedRows(
            np.concatenate([part.words for part in parts]),
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.lengths for part in parts]),
        )
