"""Raw rows of files, block by block in bounded memory, and `Converter`, which makes ids and numbers of them.

A line of text is a row: DuckDB splits each line for itself, so an open quote cannot swallow the line after it.

Legend: n rows of a block, D dense columns.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dmt.errors import InputError
from dmt.training.data.columns import CRITEO_CATEGORICAL, CRITEO_DENSE, Columns, Feature, kind_of
from dmt.training.data.config import DataConfig
from dmt.training.data.files import REQUEST, file_version, format_of, open_binary, starts_of
from dmt.training.data.hash import COUNTED, hash_rows

__all__ = [
    "Block",
    "Converter",
    "Reject",
    "first_line",
    "raw_blocks",
    "schema_of",
    "table_block",
    "used_columns",
]

_BLOCK_BYTES, _BLOCK_ROWS, _MOST_LINE_BYTES = 16 << 20, 1 << 16, 16 << 20
_CRITEO = ("label", *CRITEO_DENSE, *CRITEO_CATEGORICAL)
_CUT = "\x1f"
"""Separates the columns of lines that had quotes, and parts of what DuckDB tells."""
_MISSING = "('nan', 'na', 'n/a', 'null', 'none', 'nat', '')"
"""Spellings of a missing number or time, in lower case; a missing category is the empty text ("NA" may be Namibia)."""
_ZONE = r"[T ].*(Z|[+-]\d\d(:?\d\d)?) *$"
_PARTS = {"hour": "hour({0}) + 1", "weekday": "isodow({0})"}
SPLIT = "#split"
"""Text of the split column."""
_MOST_FLOAT = 3.4028235e38
_FREQUENT = 4  # values of a block whose names are kept for the summary


class Reject(NamedTuple):
    """A row that cannot be used."""

    source: str
    line: int
    """Its line (Parquet: its row), counted from 1."""
    column: str
    """The column at fault; empty where the row as a whole is."""
    reason: str
    text: str
    """The row as it stands in the file, or its beginning."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Consecutive rows of a file or source."""

    place: str
    """The file."""
    schema: pa.Schema
    """Columns of the file, those of text as text."""
    rows: pa.Table
    """The n rows, ``block`` in SQL."""
    relation: str = "block"
    """SQL of the rows with their columns."""
    columns: Mapping[str, str]
    """SQL of each column."""
    fault: str = ""
    """SQL cases of what is wrong with a row as a whole."""
    first: int = 1
    """Line of the first row (Parquet: its number), counted from 1."""
    share: float = 1.0
    """Part of the file that is read by now, 0 to 1."""
    text: Callable[[int], str]
    """Returns a row as it stands in the file."""


def used_columns(config: DataConfig, columns: Columns) -> list[str]:
    """Returns the columns of the files that are read, each once."""
    names = [config.label, config.split_column, config.group_by, *columns.dense]
    names += [feature.name if feature.time is None else feature.time[0] for feature in columns.features]
    return list(dict.fromkeys(name for name in names if name is not None))


def schema_of(file: str, config: DataConfig) -> pa.Schema:
    """Returns the columns of a file, those of text as text.

    Raises:
        InputError: the file cannot be read, or has no line of names or no object of JSON first.
    """
    if config.kind == "criteo_tsv":
        return pa.schema([(name, pa.string()) for name in _CRITEO])
    kind = format_of(file)
    if kind == "parquet":
        try:
            with open_binary(file) as stream:
                schema = pq.read_schema(stream)
                _ = schema.names  # which pyarrow decodes here
                return schema
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            raise InputError(f"{file}: cannot be read as Parquet ({error}).") from error
    _, lines, _ = next(_lines(file, 1 << 16), (1, [], 0.0))
    if not lines:
        wanted = "JSON objects" if kind == "json" else "a line of column names"
        raise InputError(f"{file}: is empty; expected {wanted}.")
    if kind == "json":
        return _json_schema(file, lines[:1000])
    try:
        names = next(csv.reader([lines[0].decode()], delimiter=_separator(file, config)), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{file}, line 1: cannot be read as column names ({error}).") from error
    if not names:
        raise InputError(f"{file}: expected a line of column names first, found an empty line.")
    return pa.schema([(name, pa.string()) for name in names])


def first_line(file: str) -> bytes:
    """Returns the first line of a text file, plain or gzip; errors as in `raw_blocks`."""
    _, lines, _ = next(_lines(file, 1 << 16), (1, [b""], 0.0))
    return lines[0] if lines else b""


def raw_blocks(file: str, config: DataConfig, used: Sequence[str]) -> Iterator[Block]:
    """Reads a file as blocks of rows; of Parquet only the columns that are ``used``.

    Raises:
        InputError: the file cannot be read, is a damaged gzip or Parquet file, or has no columns.
    """
    schema, is_criteo = schema_of(file, config), config.kind == "criteo_tsv"
    if not is_criteo and format_of(file) == "parquet":
        yield from _parquet_blocks(file, schema, used)
        return
    is_json = not is_criteo and format_of(file) == "json"
    separator, has_names = "\t" if is_criteo else _separator(file, config), not (is_criteo or is_json)
    for first, lines, share in _lines(file, _BLOCK_BYTES):
        skipped = int(has_names and first == 1)
        own, cut = lines[skipped:], separator
        texts = _texts(own)
        if has_names and any(text is not None and '"' in text for text in texts):
            texts, cut = [_unquoted(text, separator) for text in texts], _CUT
        yield Block(
            place=file,
            schema=schema,
            rows=pa.table({"line": pa.array(texts, pa.string())}),
            first=first + skipped,
            share=share,
            text=partial(_text_of, own),
            **(_json_sql(schema) if is_json else _text_sql(schema, cut)),
        )


def _text_of(lines: Sequence[bytes], row: int) -> str:
    return lines[row].decode(errors="replace")[:1000]


def _separator(file: str, config: DataConfig) -> str:
    return config.csv_separator or ("\t" if file.removesuffix(".gz").endswith(".tsv") else ",")


def _lines(file: str, block_bytes: int) -> Iterator[tuple[int, list[bytes], float]]:
    """Yields whole lines without their ends, with the number of the first and the share of the file read by then."""
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
                    if chunk[:2] in (b"\xff\xfe", b"\xfe\xff"):
                        raise InputError(f"{file}: is UTF-16, expected UTF-8. Convert it, such as with iconv.")
                lines = (rest + chunk).split(b"\n")
                rest = lines.pop()
                if len(rest) > _MOST_LINE_BYTES:
                    raise InputError(f"{file}, line {number + len(lines)}: longer than 16 MiB. Is this text?")
                yield (
                    number,
                    [line.removesuffix(b"\r") for line in lines] if b"\r" in chunk else lines,
                    raw.tell() / size,
                )
                number += len(lines)
            if rest:
                yield number, [rest.removesuffix(b"\r")], 1.0
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(
            f"{file}, line {number} or soon after: the gzip file is cut off or damaged ({error}). Fetch it again."
        ) from error
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror or error}).") from error


def _texts(lines: Sequence[bytes]) -> list[str | None]:
    """Returns lines as text; None where one is not UTF-8."""
    try:
        return list(b"\n".join(lines).decode().split("\n")) if lines else []
    except UnicodeDecodeError:
        texts = [line.decode(errors="ignore") for line in lines]
        return [text if text.encode() == line else None for text, line in zip(texts, lines, strict=True)]


def _unquoted(line: str | None, separator: str) -> str | None:
    """Separates the columns of a line of CSV by `_CUT`; None where a quote is open."""
    if line is None or '"' not in line:
        return line and line.replace(separator, _CUT)
    try:
        return _CUT.join(next(csv.reader([line], delimiter=separator, strict=True)))
    except csv.Error:
        return None


def _text_sql(schema: pa.Schema, separator: str) -> dict[str, Any]:
    number = len(schema)
    cases = {
        "line IS NULL": "'expected text in UTF-8, and quotes that end before the line or the next column does'",
        "line = ''": "'the line is empty'",
        f"len(f) <> {number}": f"'expected {number} columns, found ' || len(f)",
    }
    return {
        "relation": f"(SELECT line, string_split(line, {_literal(separator)}) AS f FROM block)",
        "columns": {name: f"nullif(f[{i}], '')" for i, name in enumerate(schema.names, start=1)},
        "fault": " ".join(f"WHEN {condition} THEN {_literal(_CUT)} || {reason}" for condition, reason in cases.items()),
    }


def _json_sql(schema: pa.Schema) -> dict[str, Any]:
    kinds = json.dumps({field.name: ["VARCHAR"] if pa.types.is_list(field.type) else "VARCHAR" for field in schema})
    good = "CASE WHEN json_valid(line) THEN json_type(line) = 'OBJECT' ELSE false END"
    return {
        "relation": f"(SELECT CASE WHEN {good} THEN json_transform(line, {_literal(kinds)}) END AS j FROM block)",
        "columns": {name: f"struct_extract(j, {_literal(name)})" for name in schema.names},
        "fault": f"WHEN j IS NULL THEN {_literal(_CUT + 'expected a JSON object on one line, in UTF-8')}",
    }


def _json_schema(file: str, lines: Sequence[bytes]) -> pa.Schema:
    """Finds the keys of the first objects; values that are lists make a column of lists."""
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
        raise InputError(f"{file}: none of its first {len(lines)} lines is a JSON object.")
    if len({name.lower() for name in kinds}) < len(kinds):
        raise InputError(f"{file}: two keys differ only in upper and lower case. Rename one of them.")
    return pa.schema(list(kinds.items()))


def _parquet_blocks(file: str, schema: pa.Schema, used: Sequence[str]) -> Iterator[Block]:
    first = 1
    try:
        with open_binary(file) as stream, pq.ParquetFile(stream) as source:
            total = max(source.metadata.num_rows, 1)
            for batch in source.iter_batches(batch_size=_BLOCK_ROWS, columns=list(used), use_threads=False):
                batch.validate(full=True)  # Parquet's writers need not check that text is UTF-8
                done = first - 1 + batch.num_rows
                yield table_block(file, pa.table(batch), first=first, share=done / total)
                first += batch.num_rows
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{file}, row {first} or soon after: cannot be read as Parquet ({error}).") from error


def table_block(place: str, table: pa.Table, *, first: int = 1, share: float = 1.0) -> Block:
    """Returns the rows of a table of Arrow as a block."""
    columns = {name: f"c{i}" for i, name in enumerate(table.column_names)}
    return Block(
        place=place,
        schema=table.schema,
        rows=pa.table([_plain(column) for column in table.columns], names=list(columns.values())),
        columns=columns,
        first=first,
        share=share,
        text=lambda row: json.dumps(table.slice(row, 1).to_pylist()[0], default=str)[:1000],
    )


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns a column without dictionaries, and timestamps as microseconds of UTC."""
    if pa.types.is_dictionary(column.type):
        return _plain(column.cast(column.type.value_type))
    if pa.types.is_float16(column.type):
        return column.cast(pa.float32())
    return column.cast(pa.timestamp("us"), safe=False) if pa.types.is_timestamp(column.type) else column


class Converter:
    """Makes ids and numbers of blocks by SQL of DuckDB, which lives in memory and reads no file.

    Args:
        config: the data section of a run's configuration.
        columns: its columns.
        memory_gib: memory of DuckDB.
        threads: threads of DuckDB.
    """

    def __init__(self, config: DataConfig, columns: Columns, *, memory_gib: float = 1.0, threads: int = 1) -> None:
        self._config, self._columns = config, columns
        self._connection = duckdb.connect(config={"threads": threads, "memory_limit": f"{memory_gib * 1024:.0f}MiB"})
        self.names: dict[str, dict[int, str]] = {feature.name: {} for feature in columns.features}
        """Some ids of each feature, those that are frequent among them, and the values that have them."""
        self.negative: Counter[str] = Counter()
        """Values of each feature that are whole numbers below 0."""

    def close(self) -> None:
        """Closes DuckDB."""
        self._connection.close()

    def convert(self, block: Block) -> tuple[pa.Table, list[Reject]]:
        """Reads the columns of a block; rows with a value that does not fit are left out and come as rejects.

        The table has the label, dense columns (transformed, NaN where missing), ids (by frequency: hashes of values),
        and where the config names them `SPLIT` and `dmt.training.data.files.REQUEST`.

        Raises:
            InputError: DuckDB cannot read a type, or needs more memory.
        """
        sql = _Sql(self._config, self._columns, block)
        self._connection.register("block", block.rows)
        try:
            chosen = ", ".join(f'{expression} AS "{name}"' for name, expression in sql.wanted.items())
            table = self._connection.sql(f"SELECT {chosen} FROM {block.relation}").to_arrow_table()
        except duckdb.OutOfMemoryException as error:
            raise InputError(f"DuckDB needs more memory than --memory-gib allows ({error}). Give it more.") from error
        except duckdb.Error as error:  # such as a type of Arrow that it does not know
            raise InputError(f"{block.place}: DuckDB cannot read it ({error})".partition("\n")[0]) from error
        finally:
            self._connection.unregister("block")
        table, rejects, faults = table.combine_chunks(), [], table.column("fault")
        if faults.null_count < len(faults):
            for row in np.flatnonzero(faults.is_valid().to_numpy()).tolist():
                column, _, reason = faults[row].as_py().partition(_CUT)
                rejects.append(Reject(block.place, block.first + row, column, reason, block.text(row)))
            table = table.filter(faults.is_null())
        return self._typed(table, block.place), rejects

    def _typed(self, table: pa.Table, place: str) -> pa.Table:
        config, columns = self._config, dict[str, Any]()
        if config.label is not None:
            columns[config.label] = table.column("label").cast(pa.int8())
        for i, name in enumerate(self._columns.dense):
            values = table.column(f"d{i}").to_numpy()
            if config.dense_transform == "signed_log1p":
                values = np.sign(values) * np.log1p(np.abs(values))
            columns[name] = pa.array(values.astype(np.float32))
        for i, feature in enumerate(self._columns.features):
            columns[feature.name] = self._ids(feature, table.column(f"f{i}").combine_chunks())
        if config.split_column:
            columns[SPLIT] = table.column("split")
        if config.group_by is not None:
            keys = table.column("request").combine_chunks()
            # A row without a value is a request by itself.
            alone = pa.array([f"{Path(place).name} {row}" for row in table.column("row").to_pylist()], pa.string())
            keys = pc.if_else(keys.is_null(), alone, keys)
            columns[REQUEST] = hash_rows(keys, feature=config.group_by, num_embeddings=COUNTED)
        return pa.table(columns)

    def _ids(self, feature: Feature, column: pa.Array) -> pa.Array:
        """Returns the ids of a feature's values, or lists of them."""
        values = column.flatten() if feature.is_bag else column
        if pa.types.is_integer(values.type):
            ids = values.fill_null(0).to_numpy().astype(np.int64)
        else:
            encoded = values.dictionary_encode()
            rows = COUNTED if self._config.id_mode == "frequency" else feature.rows
            ids = hash_rows(encoded, feature=feature.table, num_embeddings=rows)
            self._note(feature, encoded, rows)
        return pa.LargeListArray.from_arrays(starts_of(column), ids) if feature.is_bag else pa.array(ids)

    def _note(self, feature: Feature, encoded: pa.DictionaryArray, rows: int) -> None:
        """Keeps what the summary of the columns says of values."""
        codes, words = encoded.indices.drop_null().to_numpy(), encoded.dictionary
        counts = np.bincount(codes, minlength=len(words))
        frequent = words.take(pa.array(np.argsort(-counts, kind="stable")[:_FREQUENT]))
        of_words = hash_rows(frequent, feature=feature.table, num_embeddings=rows)
        for id_, word in zip(of_words.tolist(), frequent.to_pylist(), strict=True):
            self.names[feature.name].setdefault(id_, word)
        if pc.any(pc.starts_with(words, "-")).as_py():
            is_negative = pc.match_substring_regex(words, "^-[0-9]+$").to_numpy(zero_copy_only=False)
            self.negative[feature.name] += int(counts[is_negative].sum())


class _Sql:
    """The SQL of every column that a `Converter` reads, and of what is wrong with a row."""

    def __init__(self, config: DataConfig, columns: Columns, block: Block) -> None:
        self._block, self._config, self._faults = block, config, [block.fault]
        self.wanted: dict[str, str] = {"label": "0.0::DOUBLE"}
        if config.label is not None:
            value = self._number(config.label)
            if self._kind(config.label) == "text":
                spelled = f"lower(trim({block.columns[config.label]}))"
                value = f"CASE {spelled} WHEN 'true' THEN 1 WHEN 'false' THEN 0 ELSE {value} END"
            self.wanted["label"] = f"CAST({value} AS DOUBLE)"
            self._add_fault(config.label, "expected 0 or 1", f"coalesce(({value}) NOT IN (0, 1), true)")
        for i, name in enumerate(columns.dense):
            self.wanted[f"d{i}"] = value = self._number(name)
            self._add_fault(name, "expected a number", self._is_unread(name, value))
            limit = "'infinity'::DOUBLE" if config.dense_transform == "signed_log1p" else str(_MOST_FLOAT)
            is_infinite = f"abs({value}) >= {limit} AND NOT isnan({value})"
            self._add_fault(name, "infinite as a 32-bit float; clip the column or leave it empty", is_infinite)
        for name in dict.fromkeys(f.time[0] for f in columns.features if f.time):
            expected = "expected a date or time such as 2026-11-22 or 2026-11-22T20:15:00"
            self._add_fault(name, expected, self._is_unread(name, self._time(name)))
        for i, feature in enumerate(columns.features):
            if feature.time is not None:
                self.wanted[f"f{i}"] = f"CAST({_PARTS[feature.time[1]].format(self._time(feature.time[0]))} AS INT)"
            else:
                self.wanted[f"f{i}"] = self._values(feature)
        if config.split_column:
            self.wanted["split"] = f"CAST({block.columns[config.split_column]} AS VARCHAR)"
        if config.group_by:
            self.wanted["request"] = f"CAST({block.columns[config.group_by]} AS VARCHAR)"
            self.wanted["row"] = f"{block.first - 1} + row_number() OVER ()"
        cases = " ".join(filter(None, self._faults))
        self.wanted["fault"] = f"CASE {cases} ELSE NULL END" if cases else "CAST(NULL AS VARCHAR)"

    def _kind(self, column: str) -> str:
        return kind_of(self._block.schema.field(column).type)

    def _add_fault(self, column: str, expected: str, condition: str) -> None:
        told = f"coalesce(left(CAST({self._block.columns[column]} AS VARCHAR), 60), 'nothing')"
        self._faults.append(f"WHEN {condition} THEN {_literal(f'{column}{_CUT}{expected}, found ')} || {told}")

    def _is_unread(self, column: str, value: str) -> str:
        """Returns the SQL of a column whose text is none of its values and not spelled as missing."""
        sql = self._block.columns[column]
        if self._kind(column) != "text":
            return "false"
        return f"({value}) IS NULL AND {sql} IS NOT NULL AND lower(trim({sql})) NOT IN {_MISSING}"

    def _number(self, column: str) -> str:
        sql = self._block.columns[column]
        if self._kind(column) != "text":
            return f"CAST({sql} AS DOUBLE)"
        # DuckDB takes an underscore between digits.
        return f"CASE WHEN contains({sql}, '_') THEN NULL ELSE TRY_CAST({sql} AS DOUBLE) END"

    def _time(self, column: str) -> str:
        """Returns the SQL of a time without a zone; one that is given is turned into UTC."""
        sql = self._block.columns[column]
        if self._kind(column) != "text":
            return f"CAST({sql} AS TIMESTAMP)"
        zoned = f"regexp_matches({sql}, {_literal(_ZONE)})"
        # Each cast gives microseconds since 1970; that of a time without a zone would else take the zone of the host.
        cast = {kind: f"epoch_us(TRY_CAST({sql} AS {kind}))" for kind in ("TIMESTAMPTZ", "TIMESTAMP")}
        return f"make_timestamp(CASE WHEN {zoned} THEN {cast['TIMESTAMPTZ']} ELSE {cast['TIMESTAMP']} END)"

    def _values(self, feature: Feature) -> str:
        """Returns the SQL of a feature's values: text to be hashed or counted, or row numbers."""
        sql, type_, config = (
            self._block.columns[feature.name],
            self._block.schema.field(feature.name).type,
            self._config,
        )
        kind = kind_of(type_)
        if kind == "list":
            type_ = type_.value_type
        elif feature.is_bag:
            sql = f"string_split({sql}, {_literal(config.list_separator)})"
        is_text, is_float = kind_of(type_) == "text", pa.types.is_floating(type_)
        known = "{0} IS NOT NULL" + (
            " AND {0} <> ''" if is_text and feature.is_bag else " AND NOT isnan({0})" * is_float
        )
        value, is_bad, expected = (
            "CAST({0} AS VARCHAR)",
            "",
            "expected text or a whole number (store fractions as text)",
        )
        whole = "CASE WHEN {0} = trunc({0}) THEN TRY_CAST({0} AS BIGINT) END"
        if config.id_mode == "index":
            digits = "CASE WHEN regexp_full_match({0}, ' *[+-]?[0-9]+ *') THEN TRY_CAST({0} AS BIGINT) END"
            value = whole if is_float else digits if is_text else "TRY_CAST({0} AS BIGINT)"
            is_bad = f"coalesce(({value}) NOT BETWEEN 0 AND {feature.rows - 1}, true)"
            expected = (
                f"expected the number of a row of the table t_{feature.table} of {feature.rows} rows "
                "(id_mode='index'; set num_embeddings_per_feature for more of them, id_mode='hash' for other values)"
            )
        elif is_float:
            value, is_bad = f"CAST({whole} AS VARCHAR)", f"({whole}) IS NULL"
        if feature.is_bag:
            kept = f"list_filter({sql}, lambda v: {known.format('v')})"
            if is_bad:
                self._add_fault(feature.name, expected, f"len(list_filter({kept}, lambda v: {is_bad.format('v')})) > 0")
            return f"coalesce(list_transform({kept}, lambda v: {value.format('v')}), [])"
        if is_bad:
            self._add_fault(feature.name, expected, f"{known} AND {is_bad}".format(sql))
        return value.format(sql)


def _literal(text: str) -> str:
    """Returns a text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"
