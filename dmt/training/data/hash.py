"""Maps category values to rows of a table: `hash_rows`, and `Vocabulary` for ids by frequency. Needs no torch.

The row of a hashed value depends on its text, the table's name and the table's size; not on the platform, the process,
the file format (the number 12 and the text "12" agree) or other values in the data.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.partitioner.rows import mix_bits

__all__ = ["COUNTED", "HASH_KEY", "Vocabulary", "deal_rows", "hash_rows"]

HASH_KEY = "dmt-category-v01"
"""Key of the hash of categories, 16 bytes for SipHash. A trained model needs the key that made its ids."""
COUNTED = 2**62
"""Number of rows into which values are hashed for counting; large, so that two values hardly ever share a hash."""
_RARE, _FIRST = 1, 2
_STEP = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio


def hash_rows(values: pa.Array, *, feature: str, num_embeddings: int) -> NDArray[np.int64]:
    """Maps category values to table rows: missing -> 0, any other -> 1 + hash mod (rows - 1).

    Args:
        values: text (empty: null), integers, booleans or whole floats (NaN: missing), [n]; may be dictionary-encoded.
        feature: name that salts the hash (`Feature.table`), so that different values collide for each name.
        num_embeddings: number of rows of the table; with one row, every value gets row 0.

    Returns:
        The row of each value, int64 [n], from 0 to ``num_embeddings`` - 1.

    Raises:
        InputError: a floating-point value has a fraction, or is infinite or at least 2^63 in size.

    Example:
        >>> hash_rows(pa.array(["68fd1e64", None, "68fd1e64"]), feature="C1", num_embeddings=1000).tolist()
        [637, 0, 637]
    """
    if num_embeddings == 1:
        return np.zeros(len(values), dtype=np.int64)
    # Imported here: most runs hash nothing, and pandas takes long to load.
    from pandas.util import hash_array

    encoded = values.dictionary_encode()
    text = _text(encoded.dictionary, feature)
    hashed = hash_array(text.to_numpy(zero_copy_only=False).astype(object), hash_key=HASH_KEY, categorize=False)
    salt = hash_array(np.array([feature], dtype=object), hash_key=HASH_KEY, categorize=False)[0]
    rows = 1 + (mix_bits(hashed ^ salt) % np.uint64(num_embeddings - 1)).astype(np.int64)
    rows[text.is_null().to_numpy(zero_copy_only=False)] = 0
    return np.asarray(pa.array(rows).take(encoded.indices).fill_null(0))


def _text(values: pa.Array, feature: str) -> pa.Array:
    """Returns values as text [n], spelled the same for every type of column."""
    if pa.types.is_floating(values.type):
        numbers = values.to_numpy(zero_copy_only=False)
        whole = np.isnan(numbers) | (np.trunc(numbers) == numbers) & (np.abs(numbers) < 2.0**63)
        if not whole.all():
            value = float(numbers[~whole][0])
            raise InputError(f"Feature {feature!r}: category {value} is not a signed 64-bit integer. Store it as text.")
        values = pa.array(np.nan_to_num(numbers).astype(np.int64), mask=np.isnan(numbers))
    return values.cast(pa.string())


def deal_rows(number: int) -> NDArray[np.int64]:
    """Returns a row for each of a table's values, such that equal contiguous parts are read about equally often.

    Row-wise shards are contiguous, so ids in the order of frequency would put all hot rows on the first rank. The
    multiples of the golden ratio, modulo 1, fill [0, 1) evenly however many are taken (Kronecker sequence): with Zipf
    frequencies, a part is read at most 1.1 times as often as the mean, plus the share of the most frequent row.

    Args:
        number: number of values.

    Returns:
        The row of each value, the most frequent value first: a permutation of 0 to ``number`` - 1, int64 [number].

    Example:
        >>> deal_rows(6).tolist()
        [0, 4, 2, 5, 3, 1]
    """
    rows = np.empty(number, dtype=np.int64)
    rows[np.argsort(np.arange(number, dtype=np.uint64) * _STEP)] = np.arange(number)
    return rows


@dataclass(frozen=True)
class Vocabulary:
    """Rows of the frequent values of a table; missing values share row 0, rare and unknown values row 1."""

    keys: NDArray[np.int64]
    """Hashes of the frequent values, ascending, int64 [n]."""
    rows: NDArray[np.int64]
    """The row of each hash, from 2 on, int64 [n]."""

    @staticmethod
    def of(keys: NDArray[np.int64]) -> Vocabulary:
        """Assigns rows to ``keys``, the hashes of values in descending order of frequency, int64 [n]."""
        order = np.argsort(keys)
        return Vocabulary(keys[order], _FIRST + deal_rows(len(keys))[order])

    @property
    def num_rows(self) -> int:
        """Number of rows of the table, n + 2."""
        return _FIRST + len(self.keys)

    def rows_of(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the row of each value, int64 [m], by its hash, int64 [m]; the hash 0 stands for a missing value."""
        known_keys, known_rows = np.append(self.keys, -1), np.append(self.rows, _RARE)  # no key is below 0
        place = np.searchsorted(self.keys, keys)
        known = np.where(known_keys[place] == keys, known_rows[place], _RARE)
        return np.where(keys == 0, 0, known)
