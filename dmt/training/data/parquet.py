"""`ParquetRows`: the rows of Parquet files, row group by row group; prepared ones (ids) and others (text, lists).

Legend: n rows of a row group, D dense columns, S features with one id.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.training.data.columns import Columns, Feature, is_list, is_number
from dmt.training.data.config import DataConfig
from dmt.training.data.hash import hash_rows
from dmt.training.data.ids import bags_of, id_fault
from dmt.training.data.rows import Bags, Rows
from dmt.training.data.storage import file_version, is_remote, open_binary
from dmt.training.data.typed import signed_log

__all__ = ["ParquetRows", "RawRows", "decode_rows", "file_text", "footer_identity", "is_direct", "parquet_schema"]

_MILLIONTHS = 1_000_000
_BLOCKS, _BLOCK_BYTES = 64, 2**12
_REQUESTS = 2**62  # two requests hardly ever hash alike


class _Group(NamedTuple):
    file: str
    number: int
    """Of the row group in its file."""
    first_row: int
    """Row of the file that it begins with."""
    num_rows: int
    start: int
    """Rows of all files before it."""


def parquet_schema(file: str) -> pa.Schema:
    """Returns the columns of a Parquet file.

    Raises:
        InputError: it cannot be read or is not Parquet.
    """
    return _footer(file, *_version(file)).schema.to_arrow_schema()


def file_text(name: str, size: int, checksum: int) -> str:
    """Describes a file of data by its name, bytes and CRC-32."""
    return f"{name} of {size:,} bytes (CRC-32 {checksum:08x})"


def is_direct(schema: pa.Schema, config: DataConfig, columns: Columns) -> bool:
    """Tells whether training can read such a file as it is; others, such as those with times, are prepared first."""
    numbers = [*columns.plain_dense, *([config.label] if config.label else [])]
    return (
        not columns.times
        and all(is_number(schema.field(name).type) for name in numbers)
        and all(is_list(schema.field(feature.name).type) == feature.is_bag for feature in columns.features)
    )


def footer_identity(file: str) -> tuple[str, int, int]:
    """Returns the name without folders, the bytes, and a CRC-32 of a Parquet file.

    It is that of the footer, which has the place and the bounds of every column of every row group, and of 64 blocks of
    4 KiB, spread evenly: all of a file of up to 256 KiB. Of a remote file it is a number that changes with the file, by
    what its store says.
    """
    size, version = _version(file)
    if is_remote(file):
        return Path(file).name, size, version
    with open(file, "rb") as stream:
        stream.seek(max(size - 8, 0))
        length = int.from_bytes(stream.read(4), "little")
        stream.seek(max(size - 8 - length, 0))
        checksum = zlib.crc32(stream.read())
        for number in range(_BLOCKS):
            stream.seek(size * number // _BLOCKS)
            checksum = zlib.crc32(stream.read(_BLOCK_BYTES), checksum)
        return Path(file).name, size, checksum


class ParquetRows:
    """The rows of one part of Parquet files.

    Args:
        config: the data section of the run's configuration.
        columns: its columns.
        files: the files, in order.
        split: the part.
        shares_files: the other part is in the same files, divided by ``split_column`` or ``eval_fraction``.

    Raises:
        InputError: a file cannot be read, lacks a column, or has another type of it than the first.
    """

    def __init__(
        self,
        config: DataConfig,
        columns: Columns,
        files: Sequence[str],
        split: Literal["train", "eval"],
        *,
        shares_files: bool,
    ) -> None:
        self._config, self._columns, self._split = config, columns, split
        self._divided = shares_files or config.split_column is not None
        single = [name for name in (config.label, config.split_column, config.group_by) if name]
        self._used = list(dict.fromkeys([*single, *columns.dense, *(feature.name for feature in columns.features)]))
        self._groups: list[_Group] = []
        start = 0
        for file in files:
            footer, first_row = _footer(file, *_version(file)), 0
            self._check_schema(file, footer.schema.to_arrow_schema())
            for number in range(footer.num_row_groups):
                rows = footer.row_group(number).num_rows
                self._groups.append(_Group(file, number, first_row, rows, start))
                first_row, start = first_row + rows, start + rows

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Rows of this part in each row group, int64; reads a column where that alone tells them."""
        if not self._divided:
            sizes = [group.num_rows for group in self._groups]
        elif self._config.split_column or self._config.group_by:
            name = self._config.split_column or self._config.group_by
            assert name is not None, "one of the two"
            sizes = [int(self._chosen(group, self._table(group, [name])).sum()) for group in self._groups]
        else:
            sizes = [int(self._chosen(group, None).sum()) for group in self._groups]
        most = self._config.max_train_rows if self._split == "train" else self._config.max_eval_rows
        ends = np.cumsum(np.array(sizes, dtype=np.int64))
        ends = ends if most is None else np.minimum(ends, most)
        return np.diff(ends, prepend=0)

    def read(self, number: int) -> RawRows:
        """Reads the rows of this part in a row group.

        Raises:
            InputError: it cannot be read.
        """
        group = self._groups[number]
        table = self._table(group, self._used)
        numbers = np.arange(group.first_row + 1, group.first_row + 1 + group.num_rows)
        if self._divided:
            chosen = self._chosen(group, table)
            table, numbers = table.filter(pa.array(chosen)), numbers[chosen]
        return RawRows(table, numbers, group.file)

    def decode(self, parts: Sequence[RawRows]) -> Rows:
        """Joins rows that were read; errors as in `decode_rows`."""
        return decode_rows(parts, self._config, self._columns)

    def _check_schema(self, file: str, schema: pa.Schema) -> None:
        for name in self._used:
            if name not in schema.names:
                raise InputError(f"{file}: column {name!r} is missing; all files must have the columns of the first.")
        for feature in self._columns.features:
            type_ = schema.field(feature.name).type
            if is_list(type_) != feature.is_bag:
                which = f"is a list ({type_}), but not in" if is_list(type_) else f"is no list ({type_}), but one in"
                raise InputError(f"{file}: column {feature.name!r} {which} the first file.")

    def _table(self, group: _Group, names: Sequence[str]) -> pa.Table:
        """Reads columns of a row group; text comes as dictionaries, whose values are hashed once."""
        try:
            footer = _footer(group.file, *_version(group.file))
            text = [f.name for f in footer.schema.to_arrow_schema() if f.name in names and pa.types.is_string(f.type)]
            place = open_binary(group.file) if is_remote(group.file) else group.file
            # From a store, the columns of a row group come in few requests.
            with pq.ParquetFile(
                place, metadata=footer, read_dictionary=text, pre_buffer=is_remote(group.file)
            ) as source:
                table = source.read_row_group(group.number, columns=list(names), use_threads=False)
            if text:
                table.validate(full=True)  # Parquet's writers need not check that text is UTF-8
        except (OSError, pa.ArrowException, IndexError) as error:
            row = group.first_row + 1
            raise InputError(f"{group.file}, row {row} or soon after: cannot be read as Parquet ({error}).") from error
        if table.num_rows != group.num_rows:
            raise InputError(f"{group.file} has changed since the run began. Give it back, or start the run anew.")
        return table

    def _chosen(self, group: _Group, table: pa.Table | None) -> NDArray[np.bool_]:
        """Tells which rows of a group are of this part, bool [n]."""
        config = self._config
        if config.split_column:
            assert table is not None, "read for its split column"
            text = _array(table, config.split_column)
            text = (text.dictionary_decode() if pa.types.is_dictionary(text.type) else text).cast(pa.string())
            equal = pc.equal(text, config.split_value(self._split)).fill_null(False)
            return np.asarray(equal.to_numpy(zero_copy_only=False))
        share = round(config.eval_fraction * _MILLIONTHS)  # whole numbers: exact at any row number
        if config.group_by:
            assert table is not None, "read for its requests"
            numbers = np.arange(group.first_row + 1, group.first_row + 1 + group.num_rows)
            keys = _requests(_array(table, config.group_by), config.group_by, group.file, numbers)
            return np.asarray((keys % _MILLIONTHS < share) == (self._split == "eval"))
        row = np.arange(group.start, group.start + group.num_rows)
        return np.asarray(((row + 1) * share // _MILLIONTHS > row * share // _MILLIONTHS) == (self._split == "eval"))


class RawRows(NamedTuple):
    """Rows as they are read."""

    table: pa.Table
    """The label, dense columns (numbers), features and requests."""
    numbers: NDArray[np.int64]
    """Row of each row in its place, counted from 1 [n]."""
    place: str
    """The file or batch, for messages."""

    def slice(self, start: int, stop: int) -> RawRows:
        """Returns rows ``start`` to ``stop``, without a copy."""
        if (start, stop) == (0, len(self.numbers)):
            return self
        return RawRows(self.table.slice(start, stop - start), self.numbers[start:stop], self.place)


def decode_rows(parts: Sequence[RawRows], config: DataConfig, columns: Columns) -> Rows:
    """Decodes rows, each column into one range of memory.

    Raises:
        InputError: a label is not 0 or 1, a dense value is infinite, or a feature has a value without a row; with file,
            row and column.
    """
    total = sum(len(part.numbers) for part in parts)
    single = sum(not feature.is_bag for feature in columns.features)
    is_wide = max((feature.rows for feature in columns.features), default=0) > 2**31
    labels = np.zeros(total, np.float32)
    dense = np.empty((len(columns.dense), total), np.float32)
    ids = np.empty((single, total), np.int64 if is_wide else np.int32)
    requests = np.empty(total, np.int64) if config.group_by else None
    bags, start = list[tuple[Bags, ...]](), 0
    for part in parts:
        stop = start + len(part.numbers)
        if config.label is not None:
            values = _numbers(_array(part.table, config.label))
            _check(part, (values != 0) & (values != 1), config.label, "expected 0 or 1")
            labels[start:stop] = values
        _decode_dense(part, config, columns, dense[:, start:stop])
        bags.append(_decode_features(part, columns, ids[:, start:stop]))
        if requests is not None and config.group_by:
            requests[start:stop] = _requests(
                _array(part.table, config.group_by), config.group_by, part.place, part.numbers
            )
        start = stop
    joined = tuple(Bags.concat([found[i] for found in bags]) for i in range(len(columns.features) - single))
    return Rows(labels, dense, ids, joined, requests)


def _check(part: RawRows, wrong: NDArray[np.bool_], name: str, expected: str) -> None:
    if wrong.any():
        row = int(wrong.argmax())
        value = part.table.column(name)[row].as_py()
        raise InputError(f"{part.place}, row {part.numbers[row]}: column {name!r}: {expected}, found {value!r}.")


def _decode_dense(part: RawRows, config: DataConfig, columns: Columns, into: NDArray[np.float32]) -> None:
    for i, name in enumerate(columns.dense):
        values = _numbers(_array(part.table, name))
        with np.errstate(over="ignore"):  # the overflow is what the next lines look for
            into[i] = values if config.dense_transform == "none" else signed_log(values.astype(np.float64))
        if not np.isfinite(into[i]).all():
            _check(part, np.isinf(into[i]), name, "expected a number that is finite as a 32-bit float")
            into[i] = np.nan_to_num(into[i], nan=0.0)


def _decode_features(part: RawRows, columns: Columns, into: NDArray[Any]) -> tuple[Bags, ...]:
    """Writes the ids of features that have one in each row, and returns those of the others."""
    at, bags = 0, list[Bags]()
    for feature in columns.features:
        column = _array(part.table, feature.name)
        if is_list(column.type) != feature.is_bag:
            raise InputError(f"{part.place}: column {feature.name!r} is {column.type}, but was otherwise at first.")
        if not feature.is_bag and _is_plain(column, feature):
            values = column.to_numpy()
            if len(values) and (values.min() < 0 or values.max() >= feature.rows):
                _check(part, (values < 0) | (values >= feature.rows), feature.name, id_fault(feature))
        else:
            found, wrong = bags_of(column, feature)
            if wrong is not None:
                _check(part, wrong, feature.name, id_fault(feature))
            values = found.values
            if feature.is_bag:
                bags.append(found)
                continue
        into[at] = values
        at += 1
    return tuple(bags)


def _is_plain(column: pa.Array, feature: Feature) -> bool:
    """Tells whether a column holds row numbers as they are to be used."""
    return feature.id_mode == "index" and pa.types.is_signed_integer(column.type) and not column.null_count


def _requests(column: pa.Array, name: str, place: str, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the key of each row's request; a row without a value is a request by itself."""
    if name.startswith("#"):  # keys that `dmt prepare` wrote
        return np.asarray(column.to_numpy())
    keys = hash_rows(column, feature=name, num_embeddings=_REQUESTS)
    alone = np.flatnonzero(keys == 0)
    places = [f"{Path(place).name} {number}" for number in numbers[alone]]
    keys[alone] = hash_rows(pa.array(places, pa.string()), feature=name, num_embeddings=_REQUESTS)
    return keys


def _numbers(column: pa.Array) -> NDArray[np.float64] | NDArray[np.float32]:
    """Returns numbers or booleans as floats, NaN where missing [n]."""
    if pa.types.is_float32(column.type) and not column.null_count:
        return np.asarray(column.to_numpy())
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return np.asarray(column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))


def _array(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _version(file: str) -> tuple[int, int]:
    try:
        return file_version(file)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror or error}).") from error


@lru_cache(maxsize=64)
def _footer(file: str, size: int, changed: int) -> pq.FileMetaData:
    """Reads the footer of a Parquet file of this size and time of change."""
    try:
        with open_binary(file) as stream:
            footer = pq.read_metadata(stream)
            _ = footer.schema.to_arrow_schema().names  # which pyarrow decodes here
            return footer
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read as Parquet ({error}).") from error
