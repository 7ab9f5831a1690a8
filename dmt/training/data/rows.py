"""`Rows`: decoded rows as numpy arrays, between a reader and a batch.

Legend: n rows, D dense columns, F features, S of which have one id in each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bags", "Rows"]


@dataclass(frozen=True)
class Bags:
    """The ids of one feature in n rows.

    Example:
        >>> bags = Bags(np.array([7, 8, 9]), np.array([0, 2, 2, 3]))
        >>> bags.take(np.array([2, 0])).values.tolist(), bags.take(np.array([1, 0])).offsets.tolist()
        ([9, 7, 8], [0, 0, 2])
    """

    values: NDArray[np.int64]
    """Ids, row after row; rows of the feature's table."""
    offsets: NDArray[np.int64] | None = None
    """Row i has ``values[offsets[i]:offsets[i + 1]]`` (n + 1 entries); None: exactly one id in each row."""

    def take(self, order: NDArray[np.int64]) -> Bags:
        """Returns the rows at these positions, in their order."""
        if self.offsets is None:
            return Bags(self.values[order])
        lengths = np.diff(self.offsets)[order]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        # Position of every kept id: where its bag starts in the source, plus its place within the bag.
        places = np.arange(offsets[-1]) + np.repeat(self.offsets[order] - offsets[:-1], lengths)
        return Bags(self.values[places], offsets)

    def slice(self, start: int, stop: int) -> Bags:
        """Returns rows ``start`` to ``stop``."""
        if self.offsets is None:
            return Bags(self.values[start:stop])
        offsets = self.offsets[start : stop + 1]
        return Bags(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])

    @staticmethod
    def concat(parts: Sequence[Bags]) -> Bags:
        """Joins bags, at least one part."""
        if len(parts) == 1:
            return parts[0]
        lengths = [np.diff(part.offsets) for part in parts if part.offsets is not None]
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]) if lengths else None
        return Bags(np.concatenate([part.values for part in parts]), offsets)


@dataclass(frozen=True)
class Rows:
    """Decoded rows, column by column: a batch is a gather of short ranges of memory."""

    labels: NDArray[np.float32]
    """0 or 1, float32 [n]."""
    dense: NDArray[np.float32]
    """Transformed dense columns, float32 [D, n]."""
    ids: NDArray[Any]
    """Ids of the features with one id in each row, int32 or int64 [S, n]."""
    bags: tuple[Bags, ...] = ()
    """Ids of the other features."""
    requests: NDArray[np.int64] | None = None
    """Key of each row's request (``data.group_by``) [n]."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.labels)

    def take(self, index: NDArray[np.int64]) -> Rows:
        """Returns the rows at these positions, in their order."""
        requests = None if self.requests is None else self.requests[index]
        bags = tuple(bag.take(index) for bag in self.bags)
        return Rows(self.labels[index], _gathered(self.dense, index), _gathered(self.ids, index), bags, requests)

    def slice(self, start: int, stop: int) -> Rows:
        """Returns rows ``start`` to ``stop``, without a copy where they have no bags."""
        requests = None if self.requests is None else self.requests[start:stop]
        bags = tuple(bag.slice(start, stop) for bag in self.bags)
        return Rows(self.labels[start:stop], self.dense[:, start:stop], self.ids[:, start:stop], bags, requests)

    @staticmethod
    def concat(parts: Sequence[Rows]) -> Rows:
        """Joins rows of the same columns, at least one part."""
        if len(parts) == 1:
            return parts[0]
        bags = tuple(Bags.concat([part.bags[i] for part in parts]) for i in range(len(parts[0].bags)))
        requests = [part.requests for part in parts if part.requests is not None]
        return Rows(
            np.concatenate([part.labels for part in parts]),
            np.concatenate([part.dense for part in parts], axis=1),
            np.concatenate([part.ids for part in parts], axis=1),
            bags,
            np.concatenate(requests) if requests else None,
        )


def _gathered(columns: NDArray[Any], index: NDArray[np.int64]) -> NDArray[Any]:
    """Returns columns [k, n] at these positions [m], as [k, m]; column by column, each of which fits a cache."""
    found = np.empty((len(columns), len(index)), columns.dtype)
    for column, into in zip(columns, found, strict=True):
        np.take(column, index, out=into, mode="clip")  # which needs no buffer; positions come from a permutation
    return found
