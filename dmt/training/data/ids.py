"""`bags_of`: a column's values as rows of a feature's table; one id in each row, or a bag of them.

Legend: n rows, m values.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.training.data.columns import Feature, is_text
from dmt.training.data.hash import hash_rows
from dmt.training.data.rows import Bags

__all__ = ["bags_of", "id_fault", "ids_of", "out_of_range"]


def out_of_range(feature: str, value: int, num_embeddings: int, *, table: str, place: str) -> InputError:
    """Makes the error for an id that its table has no row for."""
    larger = f"num_embeddings_per_feature[{feature!r}] to more than the largest id, or "
    return InputError(
        f"Feature {feature!r}: id {value} is outside the table {table} of {num_embeddings} rows ({place}). "
        f"{'Ids begin at 0: set ' if value < 0 else f'Set {larger}'}id_mode='hash'."
    )


def id_fault(feature: Feature) -> str:
    """Describes the values that a feature's table has rows for."""
    if feature.id_mode == "hash":
        return "expected text or a whole number (store categories with fractions as text)"
    return (
        f"expected the number of a row of the table t_{feature.table} of {feature.rows} rows (id_mode='index'); for "
        "more of them set num_embeddings_per_feature, for other values id_mode='hash'"
    )


def bags_of(column: pa.Array, feature: Feature) -> tuple[Bags, NDArray[np.bool_] | None]:
    """Turns a column of n rows into ids; missing values are row 0, and left out of bags.

    Args:
        column: values, or lists of them for a feature with bags.
        feature: the feature.

    Returns:
        The ids, and which of the n rows have a value without a row (whose id is 0); None where none has.
    """
    if not feature.is_bag:
        ids, wrong = ids_of(column, feature)
        return Bags(ids), wrong
    column = column.cast(pa.large_list(column.type.value_type))
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    values = column.flatten()  # leaves out what lies under a missing list
    kept = pc.is_valid(values)
    if is_text(values.type):
        kept = pc.and_(kept, pc.fill_null(pc.not_equal(values.cast(pa.string()), ""), False))
    # A missing element is left out of its bag: count the kept ones before each boundary.
    before = np.concatenate([[0], np.cumsum(kept.to_numpy(zero_copy_only=False))])
    offsets = before[np.concatenate([[0], np.cumsum(lengths)])]
    ids, wrong = ids_of(values.filter(kept), feature)
    if wrong is not None:
        row_of = np.repeat(np.arange(len(lengths)), np.diff(offsets))
        wrong = np.isin(np.arange(len(lengths)), row_of[wrong])
    return Bags(ids, offsets), wrong


def ids_of(values: pa.Array, feature: Feature) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    """Returns the row of each value, int64 [m], and which of the m values have none (None: all have one)."""
    wrong = np.zeros(len(values), dtype=bool)
    if pa.types.is_floating(values.type):
        numbers = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
        wrong = ~np.isnan(numbers) & ((np.trunc(numbers) != numbers) | (np.abs(numbers) >= 2.0**63))
        missing = np.isnan(numbers) | wrong
        values = pa.array(np.where(missing, 0, numbers).astype(np.int64), mask=missing)
    if feature.id_mode == "hash":
        ids = hash_rows(values, feature=feature.salt, num_embeddings=feature.rows)
        return ids, wrong if wrong.any() else None
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if is_text(values.type):
        whole = pc.fill_null(pc.match_substring_regex(values, r"^ *[+-]?0*[0-9]{1,18} *$"), True)
        wrong |= ~whole.to_numpy(zero_copy_only=False)
        values = pc.utf8_trim_whitespace(pc.if_else(whole, values, None))
        values = pc.replace_substring_regex(values, r"^\+", "")
    elif pa.types.is_uint64(values.type):
        large = pc.fill_null(pc.greater(values, pa.scalar(2**63 - 1, pa.uint64())), False)
        wrong |= large.to_numpy(zero_copy_only=False)
        values = pc.if_else(large, None, values)
    ids = pc.fill_null(values.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    wrong |= (ids < 0) | (ids >= feature.rows)
    return (ids, None) if not wrong.any() else (np.where(wrong, 0, ids), wrong)
