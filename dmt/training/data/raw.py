"""Reads raw files in blocks of rows, in bounded memory; `Converter` turns a block into ids and numbers by DuckDB's SQL.

A line of text is a row. Each line is split separately, so that an open quote cannot swallow the next line.

Legend: n rows of a block.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.training.data.columns import CRITEO_CATEGORICAL, CRITEO_DENSE, Columns, Feature, kind_of
from dmt.training.data.config import MOST_IDS, DataConfig
from dmt.training.data.files import REQUEST, file_version, format_of, open_binary, prepared_schema, starts_of
from dmt.training.data.hash import COUNTED, hash_rows

__all__ = ["SPLIT", "Block", "Converter", "Reject", "connect", "literal", "raw_blocks", "schema_of", "used_columns"]

_BLOCK_BYTES, _BLOCK_ROWS, _MOST_LINE_BYTES = 16 << 20, 1 << 16, 16 << 20
_BLOCK_VALUES = 1 << 25  # values are text until they are hashed: less than a GiB, even with thousands of columns
_CRITEO = ("label", *CRITEO_DENSE, *CRITEO_CATEGORICAL)
_CUT = "\x1f"
"""Separates the columns of a line whose quotes were removed, and the column and the reason in the fault of a row."""
_MISSING = r"'\p{Zs}*(nan|na|n/a|null|none|nat|)\p{Zs}*'"
"""Spellings of a missing number or time, in any case. For categories only empty text is missing: "NA" is Namibia."""
_PARTS = {"hour": "hour({0}) + 1", "weekday": "isodow({0})"}
_WHOLE = "CASE WHEN {0} = trunc({0}) THEN CAST(TRY_CAST({0} AS BIGINT) AS VARCHAR) END"  # NULL unless a float is whole
SPLIT = "#split"
"""Name of the column that holds the text of ``data.split_column`` in converted rows."""


class Reject(NamedTuple):
    """An invalid row; `dmt.training.data.prepare` writes it to ``rejects.csv``."""

    source: str
    """Path of the file, or name of the batch of a user's function."""
    line: int
    """Number of the line (in Parquet and batches, of the row), from 1."""
    column: str
    """Name of the invalid column; empty if the row as a whole is invalid."""
    reason: str
    """What was expected and what was found."""
    text: str
    """The line as it stands in a text file, or the used columns as JSON; at most 1,000 characters."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Consecutive rows of a file or of a user's function."""

    place: str
    """Path of the file, or name of the batch, for messages."""
    rows: pa.Table
    """The n rows as read; SQL knows them as ``block``."""
    relation: str = "block"
    """SQL for ``FROM``: the relation that has the ``columns``."""
    columns: Mapping[str, tuple[str, pa.DataType]]
    """SQL expression and Arrow type of each column, by name; text files have text, JSON lines also lists of text."""
    fault: str = ""
    """SQL ``WHEN`` clauses for rows that cannot be read. Their value: the column (or empty), `_CUT`, and the reason."""
    keys: str = ""
    """SQL expression of the names of all columns of a row, also unused ones; empty if all rows have the same."""
    first: int = 1
    """Number of the first row's line (in Parquet and batches, of the first row), from 1."""
    share: float = 1.0
    """Fraction of the file read so far, 0 to 1."""
    lines: Sequence[bytes] = ()
    """The n rows as they stand in a text file; empty for other formats."""

    @staticmethod
    def of(place: str, table: pa.Table, *, first: int = 1, share: float = 1.0) -> Block:
        """Returns a block with the rows of an Arrow table."""
        names = [f"c{i}" for i in range(table.num_columns)]  # column names may differ only in case, which SQL ignores
        rows = pa.table([_plain(column) for column in table.columns], names=names)
        columns = dict(zip(table.column_names, zip(names, rows.schema.types, strict=True), strict=True))
        return Block(place=place, rows=rows, columns=columns, first=first, share=share)

    def reject(self, row: int, column: str, reason: str) -> Reject:
        """Returns the `Reject` for the row with index ``row`` in the block."""
        if self.lines:
            text = self.lines[row].decode(errors="replace")
        else:
            values = [column[row].as_py() for column in self.rows.columns]
            text = json.dumps(dict(zip(self.columns, values, strict=True)), default=str)
        return Reject(self.place, self.first + row, column, reason, text[:1000])


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns a column in a type that DuckDB reads: no dictionary of numbers, no float16, times in UTC microseconds."""
    if pa.types.is_dictionary(column.type) and kind_of(column.type) != "text":
        return _plain(column.cast(column.type.value_type))
    if pa.types.is_float16(column.type):
        return column.cast(pa.float32())
    return column.cast(pa.timestamp("us"), safe=False) if pa.types.is_timestamp(column.type) else column


def used_columns(config: DataConfig, columns: Columns) -> list[str]:
    """Returns the names of the columns that are read from files, each once."""
    names = [config.label, config.split_column, config.group_by, *columns.dense]
    names += [feature.name if feature.time is None else feature.time[0] for feature in columns.features]
    return list(dict.fromkeys(name for name in names if name is not None))


def schema_of(file: str, config: DataConfig) -> pa.Schema:
    """Returns the schema of a raw file; columns of text files are text, JSON lists are lists of text.

    Raises:
        InputError: the file cannot be read, lacks column names or JSON objects, or JSON keys differ only in case.
    """
    kind = "criteo" if config.kind == "criteo_tsv" else format_of(file)
    if kind == "parquet":
        try:
            with open_binary(file) as stream:
                schema = pq.read_schema(stream)
                _ = schema.names  # pyarrow decodes names here, and raises on invalid UTF-8
                return schema
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            raise InputError(f"{file}: cannot be read as Parquet ({error}). Repair or replace the file.") from error
    # With thousands of names, a line may be longer than a block.
    blocks = chain.from_iterable(lines for _, lines, _ in _lines(file, 1 << 16))
    lines = list(islice(blocks, 1000 if kind == "json" else 1))
    if kind == "criteo":
        fields = lines[0].split(b"\t") if lines else []
        # In a row that lacks its last column instead, field 13 is a number; all categories have 8 hexadecimal digits.
        lacks_label = config.label is None and len(fields) == len(_CRITEO) - 1 and len(fields[13]) == 8
        return pa.schema([(name, pa.string()) for name in _CRITEO[lacks_label:]])
    if kind == "json":
        return _json_schema(file, lines)
    try:
        names = next(csv.reader([lines[0].decode()] if lines else [], delimiter=_separator(file, config)), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{file}, line 1: cannot be read as column names ({error}). Correct the line.") from error
    if not names:
        raise InputError(f"{file}: the first line is missing or empty. Begin the file with a line of column names.")
    return pa.schema([(name, pa.string()) for name in names])


def _json_schema(file: str, lines: Sequence[bytes]) -> pa.Schema:
    """Returns the keys of the given lines as columns of text, or of lists where a value is a list."""
    kinds: dict[str, pa.DataType] = {}
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        for name, value in row.items() if isinstance(row, dict) else ():
            if isinstance(value, list):
                kinds[name] = pa.list_(pa.string())
            kinds.setdefault(name, pa.string())
    if not kinds:
        raise InputError(f"{file} has no JSON object in its first lines ({len(lines)} read). Write one per line.")
    if len(first := {name.lower(): name for name in reversed(kinds)}) < len(kinds):
        names = next((first[name.lower()], name) for name in kinds if first[name.lower()] != name)
        raise InputError(f"{file}: keys {names[0]!r} and {names[1]!r} differ only in case. Rename one of them.")
    return pa.schema(list(kinds.items()))


def raw_blocks(file: str, config: DataConfig, schema: pa.Schema, used: Sequence[str]) -> Iterator[Block]:
    """Yields the ``used`` columns of a file in blocks of rows; ``schema`` is its `schema_of`.

    Raises:
        InputError: the file cannot be read, is damaged, or has a line of more than 16 MiB.
    """
    kind = "criteo" if config.kind == "criteo_tsv" else format_of(file)
    if kind == "parquet":
        yield from _parquet_blocks(file, used)
        return
    separator = "\t" if kind == "criteo" else _separator(file, config)
    for first, lines, share in _lines(file, _BLOCK_BYTES):
        if kind == "text" and first == 1:
            first, lines = 2, lines[1:]
        texts, cut = _texts(lines), separator
        if kind == "text" and any(b'"' in line for line in lines):
            texts, cut = pa.array([_unquoted(text.as_py(), separator) for text in texts], pa.string()), _CUT
        sql = _json_sql(schema, used, texts) if kind == "json" else _text_sql(schema, used, texts, cut)
        yield Block(place=file, first=first, share=share, lines=lines, **sql)


def _parquet_blocks(file: str, used: Sequence[str]) -> Iterator[Block]:
    first = 1
    try:
        # Spark writes times as INT96 by default. As nanoseconds, years after 2262 would be other times.
        with open_binary(file) as stream, pq.ParquetFile(stream, coerce_int96_timestamp_unit="us") as source:
            total = max(source.metadata.num_rows, 1)
            rows = max(min(_BLOCK_ROWS, _BLOCK_VALUES // len(used)), 1)
            for batch in source.iter_batches(batch_size=rows, columns=list(used), use_threads=False):
                batch.validate(full=True)  # writers of Parquet need not check that text is UTF-8
                done = first - 1 + batch.num_rows
                yield Block.of(file, pa.table(batch), first=first, share=done / total)
                first += batch.num_rows
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{file} is not valid Parquet at or after row {first} ({error}). Replace the file.") from error


def _separator(file: str, config: DataConfig) -> str:
    return config.csv_separator or ("\t" if file.removesuffix(".gz").endswith(".tsv") else ",")


def _lines(file: str, block_bytes: int) -> Iterator[tuple[int, list[bytes], float]]:
    """Yields (number of the first line, lines without line ends, fraction of the file read so far) for each block."""
    number, rest = 1, b""
    try:
        size = max(file_version(file)[0], 1)
        with open_binary(file) as raw:
            is_gzip = raw.read(2) == b"\x1f\x8b" or file.endswith(".gz")
            raw.seek(0)
            stream = gzip.GzipFile(fileobj=raw) if is_gzip else raw
            while chunk := stream.read(block_bytes):
                if number == 1 and not rest:
                    chunk = chunk.removeprefix(b"\xef\xbb\xbf")
                lines = (rest + chunk).split(b"\n")
                rest = lines.pop()
                if len(rest) > _MOST_LINE_BYTES:
                    raise InputError(f"{file}: line {number + len(lines)} is over 16 MiB. Write one row per line.")
                if b"\r" in chunk or chunk.startswith(b"\n"):  # "\r\n" may be cut between two chunks
                    lines = [line.removesuffix(b"\r") for line in lines]
                yield number, lines, raw.tell() / size
                number += len(lines)
            if rest:
                yield number, [rest.removesuffix(b"\r")], 1.0
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(
            f"{file}, at or after line {number}: the gzip file is cut off or damaged ({error}). Fetch the file again."
        ) from error
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror or error}). Check path and permissions.") from error


def _texts(lines: Sequence[bytes]) -> pa.StringArray:
    """Returns n lines as text [n]; a line that is not UTF-8 becomes null."""
    try:
        return pa.array(lines, pa.binary()).cast(pa.string())
    except pa.ArrowInvalid:
        texts = [line.decode(errors="ignore") for line in lines]
        known = [text if text.encode() == line else None for text, line in zip(texts, lines, strict=True)]
        return pa.array(known, pa.string())


def _unquoted(line: str | None, separator: str) -> str | None:
    """Returns a line of CSV with its columns separated by `_CUT`, without quotes; None if a quote is misplaced."""
    if line is None or '"' not in line:
        return line and line.replace(separator, _CUT)
    try:
        return _CUT.join(next(csv.reader([line], delimiter=separator, strict=True)))
    except csv.Error:
        return None


def _text_sql(schema: pa.Schema, used: Sequence[str], texts: pa.StringArray, separator: str) -> dict[str, Any]:
    number, wrong_number = len(schema), literal(_CUT + f"expected {len(schema)} columns, found ")
    unread = literal(_CUT + "expected UTF-8 text, and a closing quote at the end of each quoted column")
    places, lists = {name: i for i, name in enumerate(schema.names)}, pc.split_pattern(texts, separator)
    found, starts = lists.value_lengths(), lists.offsets.to_numpy()[:-1]
    is_wrong = np.asarray(pc.fill_null(pc.not_equal(found, number), True))
    # Not in SQL, where nullif() takes a second for thousands of columns.
    values = pc.if_else(pc.equal(lists.values, ""), pa.scalar(None, pa.string()), lists.values)
    columns = {f"t{i}": values.take(pa.array(starts + i, mask=is_wrong)) for i in map(places.__getitem__, used)}
    return {
        "rows": pa.table({"found": found, **columns}),
        "columns": {name: (f"t{places[name]}", pa.string()) for name in used},
        "fault": f"WHEN found IS NULL THEN {unread} WHEN found <> {number} THEN {wrong_number} || found",
    }


def _json_sql(schema: pa.Schema, used: Sequence[str], texts: pa.StringArray) -> dict[str, Any]:
    kinds = json.dumps({field.name: ["VARCHAR"] if pa.types.is_list(field.type) else "VARCHAR" for field in schema})
    good = "CASE WHEN json_valid(line) THEN json_type(line) = 'OBJECT' ELSE false END"
    faults = [f"WHEN j IS NULL THEN {literal(_CUT + 'expected a JSON object on one line, in UTF-8')}"]
    for field in (schema.field(name) for name in used):
        value = f"struct_extract(j, {literal(field.name)})"
        json_kind = f"json_type(line, {literal('/' + field.name.replace('~', '~0').replace('/', '~1'))})"
        # DuckDB turns a list into text where text is expected, and other values into NULL where a list is expected.
        unlike = f"left({value}, 1) IN ('[', '{{') AND {json_kind} IN ('ARRAY', 'OBJECT')"
        if pa.types.is_list(field.type):
            unlike = f"{value} IS NULL AND {json_kind} <> 'NULL'"
        reason = literal(f"{field.name}{_CUT}expected a list in all rows or in none (an empty one is []), found ")
        faults.append(f"WHEN {unlike} THEN {reason} || {json_kind}")
    return {
        "rows": pa.table({"line": texts}),
        "relation": f"(SELECT line, CASE WHEN {good} THEN json_transform(line, {literal(kinds)}) END AS j FROM block)",
        "columns": {field.name: (f"struct_extract(j, {literal(field.name)})", field.type) for field in schema},
        "fault": " ".join(faults),
        "keys": "CASE WHEN json_valid(line) THEN json_keys(line) END",
    }


def connect(*, memory_gib: float = 1.0, threads: int = 1) -> duckdb.DuckDBPyConnection:
    """Returns a new in-memory DuckDB that reads times without a zone as UTC; `InputError` for over 1e6 GiB or NaN."""
    if not memory_gib <= 1e6:  # true of NaN, too, which click lets pass
        raise InputError(f"--memory-gib {memory_gib} must be a number of at most 1e6. Give the GiB to use.")
    connection = duckdb.connect(config={"threads": threads, "memory_limit": f"{memory_gib * 1024:.0f}MiB"})
    connection.sql("SET TimeZone = 'UTC'; SET parquet_metadata_cache = true")
    connection.sql("SET disabled_optimizers = 'common_subexpressions'")  # takes seconds for thousands of columns
    return connection


class Converter:
    """Converts blocks of raw rows to prepared rows, by SQL in DuckDB.

    Args:
        config: section ``data`` of the run's configuration.
        columns: the columns of the run.
        connection: the DuckDB connection, see `connect`.
    """

    def __init__(self, config: DataConfig, columns: Columns, connection: duckdb.DuckDBPyConnection) -> None:
        self.config, self.columns, self.connection = config, columns, connection
        self.schema = prepared_schema(config, columns)
        self.is_missing = dict[str, NDArray[np.bool_]]()
        """Which of the rows that `convert` last returned have no value, bool [n], by dense column."""
        self._features = {feature.name: feature for feature in columns.features}
        if config.group_by is not None:
            self._features[REQUEST] = Feature(name=REQUEST, rows=COUNTED, table=config.group_by)

    def convert(self, block: Block) -> tuple[pa.Table, list[Reject]]:
        """Returns a block's valid rows as prepared rows (with `SPLIT` for ``data.split_column``), and its rejects.

        Raises:
            InputError: DuckDB does not support a type, or needs more memory.
        """
        sql = _Sql(self.config, self.columns, block)
        try:
            self.connection.register("block", block.rows)
            table = self.connection.sql(sql.query).to_arrow_table()
            self.connection.unregister("block")
        except duckdb.Error as error:  # such as an Arrow type that DuckDB does not know
            reason = str(error).partition("\n")[0] + "). Convert the column, or give `dmt prepare` more --memory-gib."
            raise InputError(f"{block.place}: DuckDB cannot read the rows ({reason}") from error
        faults, rejects = table.column(table.num_columns - 1), []
        for row in np.flatnonzero(faults.is_valid().to_numpy()).tolist():
            rejects.append(block.reject(row, *faults[row].as_py().split(_CUT, 1)))
        return self._typed(table.filter(faults.is_null()) if rejects else table), rejects

    def keys(self, block: Block) -> set[str]:
        """Returns the names of all columns of a block whose rows may have different ones; else an empty set."""
        if not block.keys:
            return set()
        self.connection.register("block", block.rows)
        rows = self.connection.sql(f"SELECT DISTINCT unnest({block.keys}) FROM block").fetchall()
        self.connection.unregister("block")
        return {name for (name,) in rows}

    def _typed(self, table: pa.Table) -> pa.Table:
        columns = {}
        for kind, column in zip(self.schema, table.combine_chunks().columns, strict=False):
            values = column.combine_chunks()
            if pa.types.is_floating(kind.type):
                numbers = values.to_numpy(zero_copy_only=False)
                self.is_missing[kind.name] = np.isnan(numbers)
                if self.config.dense_transform == "signed_log1p":
                    numbers = np.sign(numbers) * np.log1p(np.abs(numbers))
                values = pa.array(np.nan_to_num(numbers, nan=0.0).astype(np.float32))
            elif kind.name in self._features:
                values = _ids(self._features[kind.name], values)
            columns[kind.name] = values.cast(kind.type)
        rows = pa.table(columns, schema=self.schema)
        return rows.append_column(SPLIT, table.column(len(self.schema))) if self.config.split_column else rows


def _ids(feature: Feature, column: pa.Array) -> pa.Array:
    """Returns the ids of a feature's values, or lists of ids for a feature with bags."""
    values = column.flatten() if feature.is_bag else column
    if pa.types.is_integer(values.type):
        ids = values.fill_null(0).cast(pa.int64())
    else:
        ids = pa.array(hash_rows(values, feature=feature.table, num_embeddings=feature.rows))
    return pa.LargeListArray.from_arrays(starts_of(column), ids) if feature.is_bag else ids


class _Sql:
    """SQL that prepares a block: ``query`` selects the columns of prepared rows, then the fault of each row or NULL."""

    def __init__(self, config: DataConfig, columns: Columns, block: Block) -> None:
        self._config, self._columns = config, block.columns
        self._values, self._faults = list[str](), [block.fault] if block.fault else []
        if config.label is not None:
            self._add(config.label, self._number(config.label), "0 or 1", "coalesce({v} NOT IN (0, 1), true)")
        for name in columns.dense:
            self._add_dense(name)
        for feature in columns.features:
            if feature.time is None:
                self._add_feature(feature)
            else:
                self._add_part(*feature.time)
        if config.group_by:  # a row without a value (NaN in pandas) is a separate request
            alone = f"{literal(block.place)} || ' ' || ({block.first} + row_number() OVER ())"
            sql, type_ = block.columns[config.group_by]
            whole, missing = (_WHOLE.format(sql), "'nan'") if pa.types.is_floating(type_) else ("NULL", "''")
            self._values.append(f"coalesce({whole}, nullif(CAST({sql} AS VARCHAR), {missing}), {alone})")
        if config.split_column:
            self._values.append(f"CAST({block.columns[config.split_column][0]} AS VARCHAR)")
        names = [f"v{i}" for i in range(len(self._values))]
        values = ", ".join(f"{value} AS {name}" for name, value in zip(names, self._values, strict=True))
        fault = f"CASE {' '.join(self._faults)} END" if self._faults else "CAST(NULL AS VARCHAR)"
        # Values have names, so that the faults reuse them and do not compute them again.
        self.query = f"SELECT {', '.join(names)}, {fault} FROM (SELECT *, {values} FROM {block.relation})"

    def _add(self, column: str, value: str, expected: str, is_bad: str) -> None:
        """Adds a value to the query, and a fault for rows that meet a condition on the value ``{v}`` ("": none do)."""
        name = f"v{len(self._values)}"
        self._values.append(value)
        if not is_bad:  # thousands of conditions that no row meets would take seconds
            return
        value_text = f"coalesce(left(CAST({self._columns[column][0]} AS VARCHAR), 60), 'nothing')"
        reason = literal(f"{column}{_CUT}expected {expected}, found ")
        # Without format(): column names may have braces.
        self._faults.append(f"WHEN {is_bad.replace('{v}', name)} THEN {reason} || {value_text}")

    def _is_text(self, column: str) -> bool:
        return kind_of(self._columns[column][1]) == "text"

    def _is_unread(self, column: str) -> str:
        """Returns SQL that is true for text that was not converted and does not spell a missing value."""
        sql = self._columns[column][0]
        # DuckDB would compare all rows with a list of texts, by a join, but matches only those that need it.
        return f"{{v}} IS NULL AND NOT regexp_full_match({sql}, {_MISSING}, 'i')"

    def _number(self, column: str) -> str:
        """Returns SQL for a column's numbers, 1 for true and 0 for false; NULL for text that is none of them."""
        sql = self._columns[column][0]
        if not self._is_text(column):
            return f"CAST({sql} AS DOUBLE)"
        # DuckDB would accept an underscore between digits.
        number = f"CASE WHEN NOT contains({sql}, '_') THEN TRY_CAST({sql} AS DOUBLE) END"
        return f"coalesce({number}, CASE lower(trim({sql})) WHEN 'true' THEN 1 WHEN 'false' THEN 0 END)"

    def _add_dense(self, column: str) -> None:
        is_log = self._config.dense_transform == "signed_log1p"
        most, kind = ("'infinity'::DOUBLE", "finite") if is_log else ("3.4028235e38", "finite 32-bit")
        is_unread = f"{self._is_unread(column)} OR " if self._is_text(column) else ""
        is_bad = f"{is_unread}abs({{v}}) >= {most} AND NOT isnan({{v}})"
        self._add(column, self._number(column), f"a {kind} number", is_bad)

    def _add_part(self, column: str, part: str) -> None:
        """Adds a part of a time, such as its hour."""
        time, is_bad = self._columns[column][0], ""
        if self._is_text(column):  # DuckDB would read 22-11-26 as a day of the year 22
            time = f"TRY_CAST(regexp_extract({time}, '^ *[0-9]{{4}}.*') AS TIMESTAMPTZ)"
            is_bad = self._is_unread(column)
        value = f"CAST({_PARTS[part].format(f'CAST({time} AS TIMESTAMP)')} AS INT)"
        self._add(column, value, "a date or time such as 2026-11-22 or 2026-11-22T20:15:00", is_bad)

    def _add_feature(self, feature: Feature) -> None:
        """Adds a feature's values: text for hashing, or row numbers."""
        sql, type_ = self._columns[feature.name]
        if kind_of(type_) == "list":
            type_ = type_.value_type
        elif feature.is_bag:
            sql = f"string_split({sql}, '|')"
        is_text, is_float = kind_of(type_) == "text", pa.types.is_floating(type_)
        if is_text and not feature.is_bag:
            sql = f"nullif({sql}, '')"
        value, is_bad = "CAST({0} AS VARCHAR)", ""
        expected = "text or a whole number (store fractions as text)"
        if is_float:
            value, is_bad = _WHOLE, "{v} IS NULL"
        if self._config.id_mode == "index":
            is_digits = f"regexp_full_match({value}, ' *[+-]?[0-9]+ *')"
            value = f"CASE WHEN {is_digits} THEN TRY_CAST({value} AS BIGINT) END"
            is_bad = f"coalesce({{v}} NOT BETWEEN 0 AND {feature.rows - 1}, true)"
            expected = (
                f"a row of table t_{feature.table}, 0 to {feature.rows - 1}, since id_mode='index' (for larger numbers "
                "raise num_embeddings_per_feature, for other values set id_mode='hash')"
            )
        is_known = "{0} IS NOT NULL AND NOT isnan({0})" if is_float else "{0} IS NOT NULL"
        if is_text and feature.is_bag:
            is_known += " AND {0} <> ''"
        if feature.is_bag:
            kept = f"list_filter({sql}, lambda v: {is_known.format('v')})"
            if feature.target is not None and self._config.max_length is not None:
                kept = f"list_slice({kept}, -{self._config.max_length}, -1)"
            value = f"coalesce(list_transform({kept}, lambda v: {value.format('v')}), [])"
            if is_bad:
                is_bad = f"len(list_filter({{v}}, lambda v: {is_bad.format(v='v')})) > 0"
            self._add(feature.name, value, expected, is_bad)
            if feature.target is not None and self._config.max_length is None:
                most = f"expected at most {MOST_IDS} ids (data.max_length=L keeps the last L of a sequence), found "
                length, reason = f"len(v{len(self._values) - 1})", literal(f"{feature.name}{_CUT}{most}")
                self._faults.append(f"WHEN {length} > {MOST_IDS} THEN {reason} || {length}")
        else:
            self._add(feature.name, value.format(sql), expected, is_bad and f"{is_known.format(sql)} AND {is_bad}")


def literal(text: str) -> str:
    """Returns text as an SQL string literal, quoted and escaped."""
    return "'" + text.replace("'", "''") + "'"
