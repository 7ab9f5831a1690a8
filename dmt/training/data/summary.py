"""`Summary`: what ``dmt prepare`` says about the columns: missing values, distinct ones, suggested rows of tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dmt.hot_rows.profile import AccessProfile, RowCounts
from dmt.plan.tables import TableSpec
from dmt.training.data.columns import Columns
from dmt.training.data.rows import Bags
from dmt.training.data.typed import TypedRows
from dmt.training.data.vocabulary import Vocabulary

__all__ = ["Summary"]

_FEW = 0.2  # a table this full or less has rows that nothing reads


class Summary:
    """Counts missing values of the training rows, column by column."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._rows = 0
        self._missing_dense = np.zeros(len(columns.dense), np.int64)
        self._missing = dict.fromkeys((feature.name for feature in columns.features), 0)

    def add(self, rows: TypedRows, ids: Mapping[str, Bags]) -> None:
        """Counts the missing values of a block: NaN and nothing in dense columns, row 0 and empty bags in features."""
        self._rows += len(rows.labels)
        self._missing_dense += rows.missing
        for name, bags in ids.items():
            empty = bags.values == 0 if bags.offsets is None else np.diff(bags.offsets) == 0
            self._missing[name] += int(empty.sum())

    def record(self, profile: AccessProfile, vocabularies: Mapping[str, Vocabulary]) -> dict[str, Any]:
        """Returns the summary as plain data.

        Distinct values of hashed features are estimated from the rows in use, by table.
        """
        features = {}
        for table in profile.tables:
            counts = profile[table.name]
            for feature in (f for f in self._columns.features if f.name in table.feature_names):
                words = vocabularies.get(feature.table)
                is_exact = feature.time is not None or feature.id_mode == "index"
                distinct = (
                    len(words.keys)
                    if words is not None and feature.time is None
                    else _used(counts)
                    if is_exact
                    else distinct_values(counts, table)
                )
                known = np.where(counts.rows == 0, 0, counts.counts)  # a missing value is none
                top = int(known.argmax()) if known.any() else None
                features[feature.name] = {
                    "missing": self._missing[feature.name],
                    "distinct": distinct,
                    "rows": table.num_embeddings,
                    "most_read_row": None if top is None else int(counts.rows[top]),
                    "its_share": 0.0 if top is None else round(float(counts.counts[top] / max(counts.total, 1)), 6),
                    "suggested_rows": _suggested(distinct, is_exact=is_exact or words is not None),
                }
        dense = {name: {"missing": int(n)} for name, n in zip(self._columns.dense, self._missing_dense, strict=True)}
        return {"rows": self._rows, "dense": dense, "features": features, "notes": self._notes(dense, features)}

    def _notes(self, dense: Mapping[str, Any], features: Mapping[str, Any]) -> list[str]:
        """Returns what a user should look at."""
        notes = [
            f"{name}: all {self._rows:,} values are missing. Leave the column out."
            for name, column in {**dense, **features}.items()
            if self._rows and column["missing"] == self._rows
        ]
        for name, column in features.items():
            distinct, rows = column["distinct"], column["rows"]
            if distinct is None:
                notes.append(f"{name}: its table of {rows:,} rows is full, so values share rows. Give it more.")
            elif distinct and column["suggested_rows"] < _FEW * rows:
                notes.append(
                    f"{name}: {distinct:,} distinct values in a table of {rows:,} rows. "
                    f"num_embeddings_per_feature.{name} = {column['suggested_rows']} is enough."
                )
        return notes


def _used(counts: RowCounts) -> int:
    return int((counts.rows != 0).sum())


def distinct_values(counts: RowCounts, table: TableSpec) -> int | None:
    """Returns an estimate of the values behind the hashed ids of a table, or None where too few rows are unused.

    Linear counting (Whang et al., TODS 1990): of m rows, n values leave m exp(-n / m) unused.
    """
    rows, used = table.num_embeddings - 1, _used(counts)  # row 0 is for missing values
    if counts.missed or used >= 0.99 * rows:
        return None
    return round(-rows * np.log1p(-used / rows))


def _suggested(distinct: int | None, *, is_exact: bool) -> int | None:
    """Returns rows for a table: exactly the values and a missing one, or, hashed, so many that 10 % share a row."""
    if distinct is None:
        return None
    return distinct + 2 if is_exact else max(2, 10 * distinct)
