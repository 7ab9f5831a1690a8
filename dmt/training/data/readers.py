"""Readers of click files: each turns files into blocks of well-formed rows, which are encoded only when asked for.

`ColumnReader` reads Parquet and CSV files with named columns, `CriteoReader` Criteo's click logs: label, 13 integers
and 26 hexadecimal categories, tab-separated, empty = missing, no header.

Legend: n rows of a part, which is what is read and checked at a time.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.training.data.config import DataConfig
from dmt.training.data.encode import Encoder, FileBlock, Place, is_list
from dmt.training.data.pieces import Piece
from dmt.training.data.schema import (
    CRITEO_CATEGORICAL,
    CRITEO_DENSE,
    Columns,
    check_types,
    csv_header,
    is_parquet,
    parquet_file,
    separator_of,
)
from dmt.training.data.textfile import TextFormat, parse_block, text_blocks
from dmt.training.data.times import EXPECTED, part_values, to_times

__all__ = ["ColumnReader", "CriteoReader", "FileReader", "Part", "count_value", "readable_part"]

_BATCH_ROWS = 16_384
# A value that occurs often in a block is checked and hashed once.
_DICTIONARY = pa.dictionary(pa.int32(), pa.string())
# How common writers spell a missing number; a missing category is only the empty text ("NA" may be Namibia).
_MISSING = ["nan", "na", "n/a", "null", "none", ""]  # an array of pyarrow would load pandas
_NUMBER = r"^-?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?$"
_CRITEO_FORMAT = TextFormat(
    names=("label", *CRITEO_DENSE, *CRITEO_CATEGORICAL),
    separator="\t",
    quotes=False,
    types=dict.fromkeys(("label", *CRITEO_DENSE, *CRITEO_CATEGORICAL), _DICTIONARY),
    expected="tab-separated: label, I1-I13, C1-C26",
)
_CRITEO_RULES = {
    "label": (r"^[01]$", "0 or 1"),
    **dict.fromkeys(CRITEO_DENSE, (r"^-?0*[0-9]{1,18}$", "a whole number or nothing")),
    **dict.fromkeys(CRITEO_CATEGORICAL, (r"^[0-9a-fA-F]{1,16}$", "a hexadecimal number or nothing")),
}
# Of good blocks, which most are: Arrow's own whole numbers, which need no rule. It would also take these characters.
_CRITEO_QUICK = replace(_CRITEO_FORMAT, types=_CRITEO_FORMAT.types | dict.fromkeys(CRITEO_DENSE, pa.int64()))
_NOT_QUICK = (b" ", b"x", b"X", b"+")
_IS_HEX = np.isin(np.arange(256), np.frombuffer(b"0123456789abcdefABCDEF", np.uint8))


class Part(NamedTuple):
    """Rows as they were read, and the lines that could not be read as rows."""

    table: pa.Table
    numbers: NDArray[np.int64]
    """1-based line or row number of each row [n]."""
    faults: dict[int, str]
    """Faults by line or row number."""

    def note(self, what: str, column: pa.Array, wrong: NDArray[np.bool_], told: Callable[[Any], str]) -> None:
        """Notes as a fault of these rows, unless they have one, ``what`` and what the column has; ``told`` tells it."""
        for row in np.flatnonzero(wrong):
            self.faults.setdefault(int(self.numbers[row]), f"{what}, found {told(column[int(row)].as_py())}")


@dataclass(kw_only=True)
class FileReader(ABC):
    """Reads files of one format in one pass; stops at the first malformed row, or counts those it leaves out."""

    encoder: Encoder
    """Turns columns into model inputs when a block is asked for rows."""
    skip_bad_lines: bool = False
    """Leave malformed rows out and count them."""
    counts: dict[str, int] = field(default_factory=dict)
    """Number of malformed rows left out of each file."""
    splits_seen: set[str] = field(default_factory=set)
    """Some values of the split column that were met, for the message when none fits."""

    def blocks(self, piece: Piece) -> Iterator[FileBlock]:
        """Reads a piece in constant memory (Parquet: one row group at a time), as blocks of well-formed rows.

        Raises:
            InputError: the file cannot be read or lacks a column, or a row is malformed and bad rows are not skipped:
                file, line or row number, what was expected, what was found.
        """
        self.counts.setdefault(piece.file, 0)
        unit, parts = self._open(piece)
        for part in parts:
            table, labels = self._check(part)
            place = self._place(piece, unit, part.numbers)
            if part.faults and not self.skip_bad_lines:
                first = min(part.faults)
                raise InputError(
                    f"{place.text(first)}: {part.faults[first]}. Fix the {unit}, or set "
                    "skip_bad_lines=true to leave out and count such rows."
                )
            self.counts[piece.file] += len(part.faults)
            kept = self._in_split(table) & ~np.isin(part.numbers, list(part.faults))
            if not kept.all():
                table, labels, place = table.filter(pa.array(kept)), labels[kept], place.take(np.flatnonzero(kept))
            if len(labels):
                yield FileBlock(table, labels.astype(np.float32), place, self.encoder)

    def _place(self, piece: Piece, unit: str, numbers: NDArray[np.int64]) -> Place:
        return Place(piece.file, unit, numbers, piece.start if unit == "line" else 0)

    @abstractmethod
    def _open(self, piece: Piece) -> tuple[str, Iterator[Part]]:
        """Opens a piece; returns what its rows are counted in, ``line`` or ``row``, and the rows part by part."""

    @abstractmethod
    def _check(self, part: Part) -> tuple[pa.Table, NDArray[np.float64]]:
        """Checks rows, and notes the first fault of each.

        Returns:
            The table with dense columns as numbers, and the labels, float64 [n] (NaN where the data have none).
        """

    def _in_split(self, table: pa.Table) -> NDArray[np.bool_]:
        """Tells for each row whether it is one to read, bool [n]."""
        return np.ones(table.num_rows, dtype=bool)


@dataclass(kw_only=True)
class ColumnReader(FileReader):
    """Reads files with named columns: .parquet, .csv or .tsv (text also .gz)."""

    config: DataConfig
    """Names the label and the split column."""
    split: str | None = None
    """Value of the split column in the rows to read; None: all rows."""

    def _open(self, piece: Piece) -> tuple[str, Iterator[Part]]:
        return ("row", self._parquet(piece)) if is_parquet(piece.file) else ("line", self._text(piece))

    @cached_property
    def _columns(self) -> Columns:
        """The columns of the file that become inputs; features made of times are none."""
        times = self.encoder.times
        return Columns(
            dense=tuple(name for name in self.encoder.dense if name not in times),
            categorical=tuple(name for name in self.encoder.num_embeddings if name not in times),
            multi_hot=self.encoder.multi_hot,
            timestamps=tuple(dict.fromkeys(time.column for time in times.values())),
        )

    @cached_property
    def used(self) -> list[str]:
        """All columns that are read, each once."""
        single = [name for name in (self.config.label, self.config.split_column, self.encoder.group_by) if name]
        columns = self._columns
        return list(dict.fromkeys([*single, *columns.dense, *columns.categorical, *columns.timestamps]))

    def _parquet(self, piece: Piece) -> Iterator[Part]:
        path = piece.file
        schema = parquet_file(path).schema_arrow
        self._require(schema.names, path)
        check_types(self._columns, schema, path, self.config)
        text = [n for n in self.used if pa.types.is_string(schema.field(n).type)]
        file = parquet_file(path, dictionaries=[n for n in text if n not in self.encoder.multi_hot])
        groups = range(file.metadata.num_row_groups)[piece.start : piece.stop]
        start = piece.first_row
        options = {"batch_size": _BATCH_ROWS, "columns": self.used, "use_threads": False}
        try:
            for batch in file.iter_batches(row_groups=list(groups), **options):
                yield readable_part(pa.Table.from_batches([batch]), np.arange(start, start + batch.num_rows))
                start += batch.num_rows
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{path}, row {start} or soon after: cannot be read as Parquet ({error}).") from error

    def _text(self, piece: Piece) -> Iterator[Part]:
        path = piece.file
        separator = separator_of(path, self.config)
        names = csv_header(path, separator)
        self._require(names, path)
        plain = {*self.encoder.dense, *self.encoder.multi_hot}
        form = TextFormat(
            names=tuple(names),
            separator=separator,
            quotes=True,
            types={n: pa.string() if n in plain else _DICTIONARY for n in self.used},
            expected="as in line 1",
        )
        return _text_parts(piece, form, header=piece.start == 0)

    def _require(self, names: Sequence[str], path: str) -> None:
        absent = [name for name in self.used if name not in names]
        if absent:
            raise InputError(f"{path}: column {absent[0]!r} is missing; all files must have the columns of the first.")

    def _check(self, part: Part) -> tuple[pa.Table, NDArray[np.float64]]:
        table, labels = part.table, np.full(part.table.num_rows, np.nan)
        # The label first: it tells an empty line from one that merely lacks a dense value.
        if (label := self.config.label) is not None:
            column = table.column(label).combine_chunks()
            labels, wrong = _to_numbers(column)
            part.note(f"label column {label!r}: expected 0 or 1", column, wrong | (labels != 0) & (labels != 1), _found)
        for name in self._columns.dense:
            column = table.column(name).combine_chunks()
            values, wrong = _to_numbers(column)
            part.note(f"dense column {name!r}: expected a number", column, wrong, _found_no_number)
            table = _with_numbers(table, name, values)
        for name in self._columns.timestamps:
            column = table.column(name).combine_chunks()
            times, wrong = to_times(column)
            part.note(f"timestamps column {name!r}: expected {EXPECTED}", column, wrong, _found)
            for time in (time for time in self.encoder.times.values() if time.column == name):
                table = table.append_column(time.name, part_values(times, time.part))
        return table, labels

    def _in_split(self, table: pa.Table) -> NDArray[np.bool_]:
        if self.split is None:
            return super()._in_split(table)
        column = _as_text(table.column(self.config.split_column))
        if len(self.splits_seen) < 5:
            self.splits_seen.update(str(value) for value in pc.unique(column).to_pylist()[:5])
        return pc.fill_null(pc.equal(column, self.split), False).to_numpy(zero_copy_only=False)


def count_value(table: pa.Table, column: str, value: str) -> int:
    """Counts the rows with a value in a column, which is compared as text."""
    return int(pc.sum(pc.equal(_as_text(table.column(column)), value)).as_py() or 0)


def _as_text(column: pa.ChunkedArray) -> pa.Array:
    found = column.combine_chunks()
    return (found.dictionary_decode() if pa.types.is_dictionary(found.type) else found).cast(pa.string())


@dataclass(kw_only=True)
class CriteoReader(FileReader):
    """Reads files in Criteo's format, plain or gzip; columns are named I1-I13 and C1-C26.

    All 40 columns of every line are checked, whichever are used.
    """

    def _open(self, piece: Piece) -> tuple[str, Iterator[Part]]:
        # A request is told by the text of its value ("07" is not "7"), which the quick parse does not keep.
        parse = parse_block if self.encoder.group_by in CRITEO_DENSE else _parse_criteo
        return "line", _text_parts(piece, _CRITEO_FORMAT, parse=parse)

    def _check(self, part: Part) -> tuple[pa.Table, NDArray[np.float64]]:
        table = part.table
        for name, (pattern, expected) in _CRITEO_RULES.items():
            column = table.column(name).combine_chunks()
            if pa.types.is_int64(column.type) or (name in CRITEO_CATEGORICAL and _all_hexadecimal(column.dictionary)):
                continue
            fits = pc.match_substring_regex(column.dictionary, pattern).to_numpy(zero_copy_only=False)
            wrong = ~_by_row(column, fits, name != "label")
            part.note(f"column {name}: expected {expected}", column, wrong, _found_start)
        labels, _ = _to_numbers(table.column("label").combine_chunks())
        request = [self.encoder.group_by] if self.encoder.group_by else []
        table = table.select(list(dict.fromkeys([*request, *self.encoder.dense, *self.encoder.num_embeddings])))
        for name in self.encoder.dense:
            # No -0.0: a whole number has no sign of zero, and the quick parse keeps none.
            table = _with_numbers(table, name, _to_numbers(table.column(name).combine_chunks())[0] + 0.0)
        return table, labels


def readable_part(table: pa.Table, numbers: NDArray[np.int64]) -> Part:
    """Leaves out rows with text that is not UTF-8: Parquet's writers need not check it, and its reader does not."""
    faults: dict[int, str] = {}
    for i, name in enumerate(table.column_names):
        column = table.column(i).combine_chunks()
        if _is_valid(column):
            continue
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        cells = [column.slice(row, 1) for row in range(len(column))]
        for row, cell in enumerate(cells):
            if not _is_valid(cell.flatten() if is_list(cell.type) else cell):
                faults.setdefault(int(numbers[row]), f"column {name!r}: expected text in UTF-8")
        table = table.set_column(i, name, column)  # a dictionary would keep what no row has any more
    if not faults:
        return Part(table, numbers, faults)
    good = ~np.isin(numbers, list(faults))
    return Part(table.filter(pa.array(good)), numbers[good], faults)


def _is_valid(column: pa.Array) -> bool:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _parse_criteo(block: bytes, form: TextFormat) -> tuple[pa.Table, NDArray[np.int64], dict[int, str]]:
    """Does as `parse_block`, with dense columns as int64 where all of them fit."""
    if not any(mark in block for mark in _NOT_QUICK):
        try:
            found = parse_block(block, _CRITEO_QUICK)
        except pa.ArrowInvalid:  # some value is none: the slow way names it
            return parse_block(block, form)
        bounds = [pc.min_max(found[0].column(name)).as_py().values() for name in CRITEO_DENSE]
        if all(value is None or abs(value) < 10**18 for pair in bounds for value in pair):
            return found
    return parse_block(block, form)


def _all_hexadecimal(words: pa.Array) -> bool:
    """Tells whether all texts have 1 to 16 hexadecimal digits."""
    if not len(words):
        return True
    _, places, text = words.buffers()
    ends = np.frombuffer(places, np.int32)[words.offset : words.offset + len(words) + 1]
    lengths = np.diff(ends)
    if lengths.min() < 1 or lengths.max() > 16:
        return False
    return bool(_IS_HEX[np.frombuffer(text, np.uint8)[ends[0] : ends[-1]]].all())


def _text_parts(
    piece: Piece, form: TextFormat, *, header: bool = False, parse: Callable[..., Any] = parse_block
) -> Iterator[Part]:
    for first_line, block in text_blocks(piece.file, start=piece.start, stop=piece.stop):
        if header and first_line == 1:
            first_line, block = 2, block.split(b"\n", 1)[1]
        if block:
            table, lines, faults = parse(block, form)
            yield Part(table, first_line + lines, {first_line + line: text for line, text in faults.items()})


def _to_numbers(column: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Converts numbers, booleans or text to float64 [n] with NaN for missing; also returns which are no number [n]."""
    if pa.types.is_dictionary(column.type):
        values, wrong = _to_numbers(column.dictionary)
        return _by_row(column, values, np.nan), _by_row(column, wrong, False)
    wrong = np.zeros(len(column), dtype=bool)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = pc.utf8_lower(pc.utf8_trim_whitespace(column)).cast(pa.string())
        column = pc.if_else(pc.is_in(column, value_set=pa.array(_MISSING)), None, column)
        try:
            return _float64(column.cast(pa.float64())), wrong
        except pa.ArrowInvalid:  # find the few values that are no number
            column = pc.if_else(pc.equal(column, "true"), "1", pc.if_else(pc.equal(column, "false"), "0", column))
            fits = pc.fill_null(pc.match_substring_regex(column, _NUMBER), True)
            wrong = ~fits.to_numpy(zero_copy_only=False)
            column = pc.if_else(fits, column, None)
    try:
        # Integers above 2^53 are rounded; a safe cast refuses the whole column for one of them.
        return _float64(column.cast(pa.float64(), safe=False)), wrong
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return np.full(len(column), np.nan), np.ones(len(column), dtype=bool)


def _by_row(column: pa.DictionaryArray, values: NDArray[Any], missing: Any) -> NDArray[Any]:
    """Looks up each row's value by its dictionary code: [dictionary size] -> [n]."""
    # A missing value has code -1, which reads the appended last entry.
    return np.append(values, missing)[column.indices.fill_null(-1).to_numpy(zero_copy_only=False)]


def _float64(column: pa.Array) -> NDArray[np.float64]:
    return column.to_numpy(zero_copy_only=False)


def _with_numbers(table: pa.Table, name: str, values: NDArray[np.float64]) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, pa.array(values))


def _found(value: Any) -> str:
    return "nothing" if value is None else repr(value)


def _found_start(value: str | None) -> str:
    return _found(value if value is None or len(value) < 40 else value[:40] + "...")


def _found_no_number(value: Any) -> str:
    is_date = isinstance(value, str) and re.match(r"\d{4}-\d\d-\d\d", value)
    return _found(value) + (" (dates and times belong to data.timestamps)" if is_date else "")
