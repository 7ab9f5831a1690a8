"""Parquet and CSV files with named columns, as blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.training.data.config import DataConfig
from dmt.training.data.encode import Encoder, FileBlock
from dmt.training.data.rows import BadRows, Place
from dmt.training.data.schema import Columns, check_types, csv_header, is_parquet, parquet_file, separator_of
from dmt.training.data.textfile import TextFormat, parse_block, text_blocks

__all__ = ["ColumnReader"]

_BATCH_ROWS = 16_384
_DICTIONARY = pa.dictionary(pa.int32(), pa.string())
# How common writers spell a missing number; a missing category is only the empty text ("NA" may be Namibia).
_MISSING = pa.array(["nan", "na", "n/a", "null", "none", ""])
_NUMBER = r"^-?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?$"


@dataclass(kw_only=True)
class ColumnReader:
    r"""Reads files with named columns.

    Example:
        >>> import tempfile
        >>> config = DataConfig(kind="columns", train_path="a.csv", categorical=("c",))
        >>> encoder = Encoder(dense=(), num_embeddings={"c": 10}, multi_hot=frozenset(), list_separator="|",
        ...                   id_mode="index", signed_log1p=False)
        >>> reader = ColumnReader(config=config, encoder=encoder, bad=BadRows(skip=False))
        >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        ...     _ = file.write("label,c\n1,3\n0,4\n")
        ...     file.flush()
        ...     [block.labels.tolist() for block in reader.blocks([file.name])]
        [[1.0, 0.0]]
    """

    config: DataConfig
    """Names the label and the split column."""
    encoder: Encoder
    """How to turn columns into model inputs."""
    bad: BadRows
    """Takes malformed rows."""
    splits_seen: set[str] = field(default_factory=set)
    """Some values of the split column that were met, for the message when none fits."""

    def blocks(self, paths: Sequence[str], *, split: str | None = None, quiet: bool = False) -> Iterator[FileBlock]:
        """Reads the files one after another, in constant memory (Parquet: one row group at a time).

        Args:
            paths: .parquet, .csv or .tsv files (text also .gz).
            split: only rows with this value in the split column.
            quiet: no warning about left-out rows (every rank but the first).

        Yields:
            Blocks of well-formed rows.

        Raises:
            InputError: a file cannot be read or lacks a column; a row is malformed (label not 0 or 1, dense value
                not a number, wrong number of columns) and bad rows are not skipped: file, line or row number.
        """
        for path in paths:
            self.bad.start(path)
            unit = "row" if is_parquet(path) else "line"
            pieces = self._parquet(path) if is_parquet(path) else self._text(path)
            for table, numbers, faults in pieces:
                # The label first: it tells an empty line from one that merely lacks a dense value.
                labels, good = self._labels(table, numbers, faults)
                table = self._dense(table, numbers, faults, good)
                self.bad.record(path, unit, faults)
                if split is not None:
                    good = good & self._in_split(table, split)
                if good.all():
                    yield FileBlock(table, labels, Place(path, unit, numbers), self.encoder)
                elif good.any():
                    place = Place(path, unit, numbers[good])
                    yield FileBlock(table.filter(pa.array(good)), labels[good], place, self.encoder)
            self.bad.finish(path, quiet=quiet)

    def _used(self) -> list[str]:
        split = [self.config.split_column] if self.config.split_column else []
        return [self.config.label, *split, *self.encoder.dense, *self.encoder.num_embeddings]

    def _parquet(self, path: str) -> Iterator[tuple[pa.Table, NDArray[np.int64], dict[int, str]]]:
        schema = parquet_file(path).schema_arrow
        columns = Columns(
            dense=tuple(self.encoder.dense),
            categorical=tuple(self.encoder.num_embeddings),
            multi_hot=self.encoder.multi_hot,
        )
        check_types(columns, schema, path)
        self._need(schema.names, path)
        text = [n for n in self._used() if pa.types.is_string(schema.field(n).type)]
        file = parquet_file(path, dictionaries=[n for n in text if n not in self.encoder.multi_hot])
        start = 1
        try:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=self._used(), use_threads=False):
                yield pa.Table.from_batches([batch]), np.arange(start, start + batch.num_rows), {}
                start += batch.num_rows
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{path}, row {start} or soon after: cannot be read as Parquet ({error}).") from error

    def _text(self, path: str) -> Iterator[tuple[pa.Table, NDArray[np.int64], dict[int, str]]]:
        separator = separator_of(path, self.config)
        names = csv_header(path, separator)
        self._need(names, path)
        plain = {*self.encoder.dense, *self.encoder.multi_hot}
        form = TextFormat(
            names=tuple(names),
            separator=separator,
            quotes=True,
            types={n: pa.string() if n in plain else _DICTIONARY for n in self._used()},
            expected="as in line 1",
        )
        for first_line, block in text_blocks(path):
            if first_line == 1:
                first_line, block = 2, block.split(b"\n", 1)[1]
            if block:
                table, lines, faults = parse_block(block, form)
                yield table, first_line + lines, {first_line + line: text for line, text in faults.items()}

    def _need(self, names: Sequence[str], path: str) -> None:
        absent = [name for name in self._used() if name not in names]
        if absent:
            raise InputError(f"{path}: column {absent[0]!r} is missing; all files must have the columns of the first.")

    def _labels(
        self, table: pa.Table, numbers: NDArray[np.int64], faults: dict[int, str]
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        column = table.column(self.config.label).combine_chunks()
        labels, wrong = _to_numbers(column)
        wrong |= (labels != 0) & (labels != 1)
        for row in np.flatnonzero(wrong):
            found = _found(column, int(row))
            faults[int(numbers[row])] = f"label column {self.config.label!r}: expected 0 or 1, found {found}"
        return labels.astype(np.float32), ~wrong

    def _dense(
        self, table: pa.Table, numbers: NDArray[np.int64], faults: dict[int, str], good: NDArray[np.bool_]
    ) -> pa.Table:
        """Turns dense text columns into numbers; rows where that fails are marked in ``good`` and ``faults``."""
        for name in self.encoder.dense:
            column = table.column(name).combine_chunks()
            values, wrong = _to_numbers(column)
            for row in np.flatnonzero(wrong & good):
                faults[int(numbers[row])] = (
                    f"dense column {name!r}: expected a number, found {_found(column, int(row))}"
                )
            good &= ~wrong
            table = table.set_column(table.column_names.index(name), name, pa.array(values))
        return table

    def _in_split(self, table: pa.Table, split: str) -> NDArray[np.bool_]:
        column = table.column(self.config.split_column).combine_chunks()
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        column = column.cast(pa.string())
        if len(self.splits_seen) < 5:
            self.splits_seen.update(str(value) for value in pc.unique(column).to_pylist()[:5])
        return pc.fill_null(pc.equal(column, split), False).to_numpy(zero_copy_only=False)


def _to_numbers(column: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Numbers, booleans or text as float64 [n] with NaN for missing, and which are no number [n]."""
    if pa.types.is_dictionary(column.type):
        values, wrong = _to_numbers(column.dictionary)
        codes = column.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        return np.append(values, np.nan)[codes], np.append(wrong, False)[codes]
    wrong = np.zeros(len(column), dtype=bool)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = pc.utf8_lower(pc.utf8_trim_whitespace(column)).cast(pa.string())
        column = pc.if_else(pc.is_in(column, value_set=_MISSING), None, column)
        try:
            return _float64(column.cast(pa.float64())), wrong
        except pa.ArrowInvalid:  # find the few values that are no number
            column = pc.if_else(pc.equal(column, "true"), "1", pc.if_else(pc.equal(column, "false"), "0", column))
            fits = pc.fill_null(pc.match_substring_regex(column, _NUMBER), True)
            wrong = ~fits.to_numpy(zero_copy_only=False)
            column = pc.if_else(fits, column, None)
    try:
        return _float64(column.cast(pa.float64())), wrong
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return np.full(len(column), np.nan), np.ones(len(column), dtype=bool)


def _float64(column: pa.Array) -> NDArray[np.float64]:
    return column.to_numpy(zero_copy_only=False)


def _found(column: pa.Array, row: int) -> str:
    value = column[row].as_py()
    return "nothing" if value is None else repr(value)
