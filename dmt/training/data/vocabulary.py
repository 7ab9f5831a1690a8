"""Ids by frequency: 0 is a missing value, 1 any that is rare or unknown; the rest are dealt over the table.

Row-wise shards are contiguous, so ids in the order of frequency would put all hot rows on the first rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.hot_rows.profile import RowCounts
from dmt.training.data.columns import Columns
from dmt.training.data.prepared import read_manifest

__all__ = ["COUNTED", "VOCABULARY", "Vocabulary", "deal_rows", "load_vocabularies", "save_vocabularies"]

COUNTED = 2**62
"""Rows into which values are hashed to be counted: two values of a feature hardly ever hash alike."""
VOCABULARY = "vocabulary.parquet"
_RARE, _FIRST = 1, 2
# 2^64 over the golden ratio.
_STEP = np.uint64(0x9E3779B97F4A7C15)


def deal_rows(number: int) -> NDArray[np.int64]:
    """Returns a row for each value, the most frequent first, such that any contiguous part of the rows is read alike.

    The multiples of the golden ratio, modulo 1, fill [0, 1) evenly however many are taken (Kronecker sequence), so each
    of K equal parts gets about every K-th value. A part is read at most 1.1 times the mean, plus the share of the most
    frequent row: a single row cannot be cut (OPER, section 4; hot rows take those).

    Args:
        number: values.

    Returns:
        A permutation of 0 to ``number`` - 1, int64 [number].

    Example:
        >>> deal_rows(6).tolist()
        [0, 4, 2, 5, 3, 1]
    """
    rows = np.empty(number, dtype=np.int64)
    rows[np.argsort(np.arange(number, dtype=np.uint64) * _STEP)] = np.arange(number)
    return rows


@dataclass(frozen=True)
class Vocabulary:
    """The values of a table that have rows of their own."""

    keys: NDArray[np.int64]
    """Hashes of the values, ascending [n]."""
    rows: NDArray[np.int64]
    """The row of each [n]."""

    @staticmethod
    def of(counts: RowCounts, *, min_count: int, most_rows: int) -> Vocabulary:
        """Gives rows to the most frequent values, of those that are counted ``min_count`` times."""
        known = (counts.counts >= min_count) & (counts.rows != 0)
        keys, numbers = counts.rows[known], counts.counts[known]
        # Equally frequent ones in the order of their hashes, which is the same everywhere.
        keys = keys[np.lexsort((keys, -numbers))][: max(most_rows - _FIRST, 0)]
        order = np.argsort(keys)
        return Vocabulary(keys[order], _FIRST + deal_rows(len(keys))[order])

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return _FIRST + len(self.keys)

    def rows_of(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the row of each value by its hash, 0 of a missing one [m]."""
        if not len(self.keys):
            return np.where(keys == 0, 0, _RARE)
        place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        known = np.where(self.keys[place] == keys, self.rows[place], _RARE)
        return np.where(keys == 0, 0, known)


def save_vocabularies(vocabularies: Mapping[str, Vocabulary], path: Path) -> None:
    """Writes vocabularies by the names of their tables, without the ``t_``."""
    schema = pa.schema([("table", pa.string()), ("value_hash", pa.int64()), ("row", pa.int64())])
    with pq.ParquetWriter(path, schema) as writer:
        for name, words in vocabularies.items():
            columns = [pa.repeat(name, len(words.keys)), pa.array(words.keys), pa.array(words.rows)]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def load_vocabularies(folder: Path, columns: Columns) -> dict[str, Vocabulary]:
    """Reads the vocabularies of a prepared folder, which must be of the same tables.

    Raises:
        InputError: the folder has no vocabulary, is damaged, or has other features.
    """
    place = f"--vocabulary {str(folder)!r}"
    record = read_manifest(folder, place)
    if VOCABULARY not in record["files"]:
        raise InputError(f"{place} was prepared without ids by frequency, and has no vocabulary. Prepare it with them.")
    tables = {feature.name: feature.table for feature in columns.features}
    if {name: entry["table"] for name, entry in record["features"].items()} != tables:
        raise InputError(f"{place} has other tables or features than these data. Give the same columns and tables.")
    try:
        table = pq.read_table(folder / VOCABULARY)
        names = table["table"].combine_chunks()
        vocabularies = {}
        for name in dict.fromkeys(feature.table for feature in columns.features if feature.time is None):
            words = table.filter(pa.compute.equal(names, name))
            vocabularies[name] = Vocabulary(words["value_hash"].to_numpy(), words["row"].to_numpy())
    except (OSError, KeyError, pa.ArrowException) as error:
        raise InputError(f"{place}: its {VOCABULARY} cannot be read ({error}). Prepare it again.") from error
    return vocabularies
