"""`Encoder`: Arrow columns of some rows -> `Rows`; `FileBlock`: rows of a file that are encoded when asked for.

`hash_rows` hashes category values into the rows of a table. A value's row depends on its text, the feature's name and
the table's size; not on the platform, the process, the rank, the file format (the number 12 and the text "12" agree) or
other values in the data.

Legend: n rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.plan.distinct import mix_bits
from dmt.training.data.packed import RowLayout
from dmt.training.data.rows import Bags, Rows
from dmt.training.data.textfile import lines_before
from dmt.training.data.times import TimePart

__all__ = ["HASH_KEY", "Encoder", "FileBlock", "FractionError", "Place", "hash_rows", "is_list", "out_of_range"]

HASH_KEY = "dmt-category-v01"
"""Key of the hash of categories; another one is another data set to a trained model. SipHash needs 16 bytes."""
# By salt and rows of the table: the last dictionary that was hashed, and its rows.
_LATEST: dict[tuple[str, int], tuple[pa.Array, NDArray[np.int64]]] = {}
_REQUESTS = 2**62  # two requests of a run hardly ever hash alike


def is_list(type_: pa.DataType) -> bool:
    """Tells whether an Arrow type is one of the list types."""
    return pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_)


def out_of_range(feature: str, value: int, num_embeddings: int, *, table: str, place: str) -> InputError:
    """Makes the error for an id that its table has no row for."""
    larger = f"num_embeddings_per_feature[{feature!r}] to more than the largest id, or "
    return InputError(
        f"Feature {feature!r}: id {value} is outside the table {table} of {num_embeddings} rows ({place}). "
        f"{'Ids begin at 0: set ' if value < 0 else f'Set {larger}'}id_mode='hash'."
    )


@dataclass(frozen=True)
class Place:
    """Positions of rows in their file, for messages."""

    file: str
    """The file's path as the user gave it."""
    unit: str
    """``line`` (text) or ``row`` (Parquet)."""
    numbers: NDArray[np.int64]
    """The line or row number of each row, counted from 1 at ``start``."""
    start: int = 0
    """Byte of a text file at which lines are counted from; finding out its own line takes a look at all before."""

    def __call__(self, row: int) -> str:
        """Returns the file and number of the row at this position."""
        return self.text(int(self.numbers[row]))

    def text(self, counted: int) -> str:
        """Returns the file and number of a line or row, whose number is counted from ``start``."""
        return f"{self.file}, {self.unit} {self.number(counted)}"

    def number(self, counted: int) -> int:
        """Returns the number in the whole file of a line or row, whose number is counted from ``start``."""
        return counted + (lines_before(self.file, self.start) if self.start else 0)

    def take(self, index: NDArray[np.int64]) -> Place:
        """Returns the places of the rows at these positions."""
        return replace(self, numbers=self.numbers[index])


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Turns columns into model inputs.

    Example:
        >>> encoder = Encoder(dense=("d",), num_embeddings={"c": 10}, multi_hot=frozenset(), list_separator="|",
        ...                   id_mode="index", signed_log1p=False)
        >>> table = pa.table({"d": [0.5, None], "c": [3, 9]})
        >>> rows = encoder.encode(table, np.zeros(2, np.float32), Place("a.csv", "line", np.array([1, 2])))
        >>> rows.dense.tolist(), rows.bags[0].values.tolist()
        ([[0.5], [0.0]], [3, 9])
    """

    dense: Sequence[str]
    """Dense columns."""
    num_embeddings: Mapping[str, int]
    """Categorical columns with the rows of their tables."""
    multi_hot: frozenset[str]
    """Categorical columns that have bags of ids."""
    list_separator: str
    """Separates the values of a bag in a text column."""
    id_mode: Literal["hash", "index"]
    """Hash values into the table, or take them as its row numbers."""
    signed_log1p: bool
    """True: dense values x become sign(x) * log(1 + abs(x)), but not those of ``times``."""
    group_by: str | None = None
    """Column that tells the rows of one request."""
    times: Mapping[str, TimePart] = field(default_factory=dict)
    """Sources of the dense and categorical columns that are parts of times; the latter hold rows of their tables."""
    salts: Mapping[str, str] = field(default_factory=dict)
    """Texts that salt the hashes of features whose own name does not: features with one salt hash alike."""

    @property
    def layout(self) -> RowLayout:
        """Layout of the rows in their packed form."""
        sizes = self.num_embeddings
        is_bag = tuple(name in self.multi_hot for name in sizes)
        return RowLayout(len(self.dense), is_bag, wide=max(sizes.values(), default=0) > 2**31)

    def encode(self, table: pa.Table, labels: NDArray[np.float32], place: Place) -> Rows:
        """Decodes all rows of a table of dense (numbers) and categorical columns; labels are float32 [n].

        Raises:
            InputError: an infinite dense value, an id outside its table, or a category that is no text, whole
                number or boolean; with file, row and column.
        """
        dense = np.empty((table.num_rows, len(self.dense)), dtype=np.float32)
        for i, name in enumerate(self.dense):
            dense[:, i] = self._dense(_array(table, name), name, place)
        bags = tuple(self._bags(_array(table, name), name, place) for name in self.num_embeddings)
        return Rows(labels, dense, bags)

    def _dense(self, column: pa.Array, name: str, place: Place) -> NDArray[np.float32]:
        numbers = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
        if self.signed_log1p and name not in self.times:
            numbers = np.sign(numbers) * np.log1p(np.abs(numbers))
        with np.errstate(over="ignore"):  # the overflow is what the next line looks for
            numbers = numbers.astype(np.float32)
        infinite = np.isinf(numbers)
        if infinite.any():
            raise InputError(
                f"{place(int(infinite.argmax()))}: dense column {name!r} is infinite as a 32-bit float. "
                "Clip the column or leave the value empty."
            )
        return np.nan_to_num(numbers, copy=False, nan=0.0)

    def _bags(self, column: pa.Array, name: str, place: Place) -> Bags:
        if name not in self.multi_hot:
            return Bags(self._ids(column, name, place, rows=None))
        if not is_list(column.type):  # text with separators; a missing text splits into a missing list
            column = pc.split_pattern(column.cast(pa.string()), self.list_separator)
        column = column.cast(pa.list_(column.type.value_type))
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        values = column.flatten()  # leaves out what lies under a missing list
        kept = pc.is_valid(values)
        if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
            kept = pc.and_(kept, pc.fill_null(pc.not_equal(values, ""), False))
        # A missing element is left out of its bag: count the kept ones before each boundary.
        before = np.concatenate([[0], np.cumsum(kept.to_numpy(zero_copy_only=False))])
        offsets = before[np.concatenate([[0], np.cumsum(lengths)])]
        rows = np.repeat(np.arange(len(lengths)), np.diff(offsets))
        return Bags(self._ids(values.filter(kept), name, place, rows), offsets)

    def _ids(self, values: pa.Array, name: str, place: Place, rows: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """Returns the ids of values, int64 [len(values)]; ``rows[i]`` is the row of value i (None: i)."""
        num_embeddings = self.num_embeddings[name]
        if pa.types.is_floating(values.type):
            values = values.cast(pa.float64())  # 16-bit floats compare with no number

        def where(wrong: NDArray[np.bool_]) -> str:
            first = int(wrong.argmax())
            return place(first if rows is None else int(rows[first]))

        if self.id_mode == "hash" and name not in self.times:
            try:
                return hash_rows(values, feature=self.salts.get(name, name), num_embeddings=num_embeddings)
            except FractionError as error:
                wrong = pc.fill_null(pc.equal(values, error.value), False).to_numpy(zero_copy_only=False)
                raise InputError(f"{where(wrong)}: {error}") from error
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        try:
            ids = pc.fill_null(values.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
        except pa.ArrowInvalid:
            wrong = np.array([not _is_whole(value) for value in values])
            value = values[int(wrong.argmax())].as_py()
            raise InputError(
                f"{where(wrong)}: column {name!r} has {value!r}, expected the number of a table row "
                "(id_mode='index'). Use id_mode='hash' for other values."
            ) from None
        wrong = (ids < 0) | (ids >= num_embeddings)
        if wrong.any():
            worst = int(ids[int(wrong.argmax())])
            raise out_of_range(name, worst, num_embeddings, table=f"t_{name}", place=where(wrong))
        return ids


@dataclass(frozen=True)
class FileBlock:
    """Rows of a file as Arrow columns; only rows that are asked for are encoded."""

    table: pa.Table
    """Dense columns as numbers, and categorical columns; n rows."""
    labels: NDArray[np.float32]
    """0 or 1, float32 [n]."""
    place: Place
    encoder: Encoder

    @property
    def num_rows(self) -> int:
        """Number of rows in the block."""
        return len(self.labels)

    @cached_property
    def requests(self) -> NDArray[np.int64]:
        """Number of each row's request: the hash of its value in the column ``group_by``, int64 [n].

        A row without a value has a number of its own, by its place in its file.

        Raises:
            InputError: see `Encoder.encode`.
        """
        name = self.encoder.group_by
        assert name is not None, "the encoder has no group_by"
        column = {name: _REQUESTS}
        hashing = replace(self.encoder, dense=(), num_embeddings=column, multi_hot=frozenset(), id_mode="hash")
        found = hashing.encode(self.table, self.labels, self.place).bags[0].values
        alone = np.flatnonzero(found == 0)
        before = self.place.number(0) if len(alone) else 0
        places = [f"{Path(self.place.file).name} {before + self.place.numbers[row]}" for row in alone]
        found[alone] = hash_rows(pa.array(places, pa.string()), feature=name, num_embeddings=_REQUESTS)
        return found

    def rows(self, index: NDArray[np.int64]) -> Rows:
        """Encodes the rows at these positions.

        Raises:
            InputError: see `Encoder.encode`.
        """
        if len(index) == self.num_rows and (np.diff(index) == 1).all():  # all of them, in order
            return self.encoder.encode(self.table, self.labels, self.place)
        return self.encoder.encode(self.table.take(pa.array(index)), self.labels[index], self.place.take(index))


def _array(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _is_whole(value: pa.Scalar) -> bool:
    try:
        value.cast(pa.int64())
    except pa.ArrowInvalid:
        return False
    return True


class FractionError(InputError):
    """A floating-point category, ``value``, that is not a whole number."""

    def __init__(self, feature: str, value: float) -> None:
        super().__init__(f"Feature {feature!r}: category {value} is not a whole number. Store categories as text.")
        self.value = value


def hash_rows(values: pa.Array, *, feature: str, num_embeddings: int) -> NDArray[np.int64]:
    """Maps category values to table rows: missing -> 0, any other -> 1 + hash mod (rows - 1).

    Args:
        values: text, whole numbers, booleans or whole-numbered floats (NaN is missing), [n]; may be dictionary-encoded.
        feature: salts the hash, so that equal values of two features collide with different ones.
        num_embeddings: rows of the feature's table; with one row everything is row 0.

    Returns:
        int64 [n], each within 0..num_embeddings - 1.

    Raises:
        FractionError: a floating-point value has a fraction.

    Example:
        >>> hash_rows(pa.array(["68fd1e64", None, "68fd1e64"]), feature="C1", num_embeddings=1000).tolist()
        [637, 0, 637]
    """
    if num_embeddings == 1 or len(values) == 0:
        return np.zeros(len(values), dtype=np.int64)
    encoded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
    indices = encoded.indices.fill_null(-1) if encoded.null_count else encoded.indices
    codes = indices.to_numpy(zero_copy_only=False)
    dictionary, key = encoded.dictionary, (feature, num_embeddings)
    latest = _LATEST.get(key)
    # All parts of a row group of Parquet have its dictionary.
    if latest is not None and latest[0].equals(dictionary):
        return latest[1][codes]
    if len(dictionary) > 2 * len(codes):  # few rows of a large dictionary: hash only what they use
        used, codes = np.unique(codes, return_inverse=True)
        return _hash_values(dictionary.take(pa.array(used, mask=used < 0)), feature, num_embeddings)[codes]
    rows = _hash_values(dictionary, feature, num_embeddings)
    if encoded is values:
        _LATEST[key] = dictionary, rows
    return rows[codes]


def _hash_values(dictionary: pa.Array, feature: str, num_embeddings: int) -> NDArray[np.int64]:
    """Returns the row of each value, and at the end that of a missing one, which its code -1 reads."""
    text = _text(dictionary, feature)
    missing = pc.is_null(text).to_numpy(zero_copy_only=False)
    words = pc.fill_null(text, "").to_numpy(zero_copy_only=False).astype(object)
    # Here, since most runs hash nothing and pandas takes long to load.
    from pandas.util import hash_array

    hashed = hash_array(words, hash_key=HASH_KEY, categorize=False)
    salt = hash_array(np.array([feature], dtype=object), hash_key=HASH_KEY, categorize=False)[0]
    rows = 1 + (mix_bits(hashed ^ salt) % np.uint64(num_embeddings - 1)).astype(np.int64)
    return np.append(np.where(missing, 0, rows), 0)


def _text(values: pa.Array, feature: str) -> pa.Array:
    """Returns one spelling per value, whatever the column's type."""
    if pa.types.is_floating(values.type):
        numbers = values.to_numpy(zero_copy_only=False)
        whole = np.isnan(numbers) | (np.trunc(numbers) == numbers) & (np.abs(numbers) < 2.0**63)
        if not whole.all():
            raise FractionError(feature, float(numbers[~whole][0]))
        values = pa.array(np.nan_to_num(numbers).astype(np.int64), mask=np.isnan(numbers))
    return values.cast(pa.string())
