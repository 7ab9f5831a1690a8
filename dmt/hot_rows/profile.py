"""`AccessProfile`: how often each row of each table was read (the A_k of OPER, section 3.2), counted exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.plan.tables import TableSpec, table_specs

__all__ = ["AccessProfile", "RowCounts"]


@dataclass(frozen=True)
class RowCounts:
    """Number of accesses to the rows of one table.

    Example:
        >>> RowCounts.of([2, 7, 7, 7]).merged(RowCounts.of([7, 9]))
        RowCounts(rows=array([2, 7, 9]), counts=array([1, 4, 1]))
    """

    rows: NDArray[np.int64]
    """The counted rows, int64 [n], ascending."""
    counts: NDArray[np.int64]
    """Accesses to each counted row, int64 [n]."""

    @property
    def total(self) -> int:
        """Accesses to all rows."""
        return int(self.counts.sum())

    @staticmethod
    def of(ids: Any) -> RowCounts:
        """Counts the rows in an array of ids, of any shape and integer dtype."""
        return RowCounts(*np.unique(np.asarray(ids, dtype=np.int64), return_counts=True))

    def chances(self, batch_size: float) -> NDArray[np.float64]:
        """Returns, for each counted row, the probability that any of ``batch_size`` accesses reads it: float64 [n]."""
        # Kept below one, since the logarithm of zero is infinite.
        shares = np.minimum(self.counts / max(self.total, 1), 1 - 1e-12)
        return np.asarray(-np.expm1(batch_size * np.log1p(-shares)))

    def merged(self, other: RowCounts) -> RowCounts:
        """Returns the counts of this and ``other``, added row by row."""
        # Often a few rows are added to many; the many are not sorted again.
        places = np.searchsorted(self.rows, other.rows)
        is_known = np.searchsorted(self.rows, other.rows, side="right") > places
        counts = self.counts.copy()
        counts[places[is_known]] += other.counts[is_known]
        new = places[~is_known]
        rows = np.insert(self.rows, new, other.rows[~is_known])
        return RowCounts(rows, np.insert(counts, new, other.counts[~is_known]))


class AccessProfile:
    """Counts the accesses to the rows of all tables, batch by batch.

    Args:
        tables: TorchRec ``EmbeddingBagConfig`` or `TableSpec`.

    Raises:
        InputError: two tables share a name or a feature, or `table_specs` refuses a table for another reason.

    Example:
        >>> table = TableSpec(name="t", num_embeddings=10, embedding_dim=8, feature_names=("f",))
        >>> profile = AccessProfile([table])
        >>> profile.add({"f": [1, 7, 7, 7]}, num_samples=4)
        >>> profile["t"].counts.tolist(), profile.ids_per_sample(table)
        ([1, 3], 1.0)
    """

    def __init__(self, tables: Sequence[Any]) -> None:
        self.tables: tuple[TableSpec, ...] = table_specs(tables)
        self.num_samples = 0
        self._counts = {table.name: RowCounts.of([]) for table in self.tables}
        self._table_of = {feature: table for table in self.tables for feature in table.feature_names}

    def add(self, ids: Mapping[str, Any], *, num_samples: int) -> None:
        """Counts a batch of ``num_samples`` samples: integer ids of any shape, by feature; features may be left out.

        Raises `InputError` for a feature of no table and for ids that are not integers; does not check their range.
        """
        for feature, values in ids.items():
            if feature not in self._table_of:
                raise InputError(f"AccessProfile: no table has feature {feature!r}. Count features of the tables only.")
            array = np.asarray(values)
            if array.size and array.dtype.kind not in "iu":
                raise InputError(f"AccessProfile: ids of {feature!r} are {array.dtype}. Give row numbers as integers.")
            self.put(self._table_of[feature].name, RowCounts.of(array))
        self.num_samples += num_samples

    def __getitem__(self, table: str) -> RowCounts:
        """Returns the accesses to a table's rows so far."""
        return self._counts[table]

    def ids_per_sample(self, table: TableSpec) -> float:
        """Returns the mean number of ids per sample and feature of the table."""
        return self[table.name].total / max(self.num_samples * len(table.feature_names), 1)

    def distinct_rows(self, batch_size: int) -> dict[str, float]:
        """Returns by table the expected number of distinct rows that a batch reads, summed over the table's features.

        Assumes that features have at most one id per sample, and that accesses are independent of one another.
        """
        sizes = {table: batch_size * self.ids_per_sample(table) for table in self.tables}
        return {t.name: len(t.feature_names) * float(self[t.name].chances(size).sum()) for t, size in sizes.items()}

    def put(self, table: str, counts: RowCounts) -> None:
        """Adds accesses that another rank or an earlier run has counted; add their samples to ``num_samples`` too."""
        self._counts[table] = self[table].merged(counts)
