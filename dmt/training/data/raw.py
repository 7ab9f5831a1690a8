"""Raw rows of files, block by block in bounded memory, as relations of DuckDB.

Lines of text are checked one by one before DuckDB parses them: each has the right number of columns and whole quotes,
so a line is a row, and an open quote cannot swallow the line after it.

Legend: n rows of a block.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.training.data.columns import CRITEO_CATEGORICAL, CRITEO_DENSE, format_of, separator_of
from dmt.training.data.config import DataConfig
from dmt.training.data.storage import file_version, open_binary

__all__ = ["RawBlock", "Reject", "connect", "first_line", "raw_blocks", "schema_of", "sql_text"]

_BLOCK_BYTES = 16 << 20
_MOST_LINE_BYTES = 1 << 20
_PARQUET_ROWS = 1 << 16
_BOM = b"\xef\xbb\xbf"
_CRITEO = ("label", *CRITEO_DENSE, *CRITEO_CATEGORICAL)
# The block of text that DuckDB is about to parse, in fsspec's store in memory.
_PLACE = f"/dmt-{uuid.uuid4().hex}.csv"


class Reject(NamedTuple):
    """A row that cannot be used."""

    file: str
    number: int
    """Its line (Parquet: its row), counted from 1."""
    column: str
    """The column at fault; empty where the row as a whole is."""
    reason: str
    text: str
    """The row as it stands in the file, or its beginning."""


@dataclass(frozen=True, kw_only=True)
class RawBlock:
    """Consecutive rows of a file."""

    file: str
    numbers: NDArray[np.int64]
    """Line of each row (Parquet: its number), counted from 1 [n]."""
    texts: Sequence[bytes] | pa.Table
    """The rows as they stand in the file [n]."""
    columns: Mapping[str, str]
    """SQL expression of each column."""
    relation: str
    """SQL of the rows; those of ``rows`` are called ``block``."""
    rows: pa.Table | bytes
    rejects: Sequence[Reject] = ()
    """Lines before or among these rows that are none."""
    share: float
    """Part of the file that is read by now, 0 to 1."""

    def text(self, row: int) -> str:
        """Returns the row at this position as it stands in the file."""
        if isinstance(self.texts, pa.Table):
            return json.dumps(self.texts.slice(row, 1).to_pylist()[0], default=str)[:1000]
        return self.texts[row].decode(errors="replace")[:1000]

    def select(self, connection: duckdb.DuckDBPyConnection, expressions: Mapping[str, str]) -> pa.Table:
        """Returns the values of SQL expressions for the n rows, in their order; connection by `connect`."""
        chosen = ", ".join(f"{sql} AS {_name(name)}" for name, sql in expressions.items())
        store = MemoryFileSystem()
        if isinstance(self.rows, bytes):
            store.pipe_file(_PLACE, self.rows)
        else:
            connection.register("block", self.rows)
        try:
            table = connection.sql(f"SELECT {chosen} FROM {self.relation}").to_arrow_table()
        finally:
            if isinstance(self.rows, bytes):
                store.rm_file(_PLACE)
            else:
                connection.unregister("block")
        assert table.num_rows == len(self.numbers), f"{self.file}: {table.num_rows} rows of {len(self.numbers)} lines"
        return table


def connect(*, memory_gib: float, threads: int) -> duckdb.DuckDBPyConnection:
    """Opens a DuckDB that lives in memory, reads no file but the block it is given, and keeps the order of rows."""
    connection = duckdb.connect(config={"threads": threads, "memory_limit": f"{memory_gib * 1024:.0f}MiB"})
    connection.register_filesystem(MemoryFileSystem())
    return connection


def sql_text(text: str) -> str:
    """Returns a text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def _name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def schema_of(file: str, config: DataConfig) -> pa.Schema:
    """Returns the columns of a file, those of text as text.

    Raises:
        InputError: the file cannot be read, or has no line of names or no object of JSON first.
    """
    kind = format_of(file, config)
    if kind == "criteo":
        return pa.schema([(name, pa.string()) for name in _CRITEO])
    if kind == "parquet":
        with _parquet(file) as source:
            return source.schema_arrow
    _, first, _ = next(_lines(file, 1 << 16), (1, [], 0.0))
    if not first:
        raise InputError(
            f"{file}: is empty; expected {'JSON objects' if kind == 'json' else 'a line of column names'}."
        )
    if kind == "json":
        return _json_schema(file, first[:1000])
    try:
        names = next(csv.reader([first[0].decode()], delimiter=separator_of(file, config)), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{file}, line 1: cannot be read as column names ({error}).") from error
    if not names:
        raise InputError(f"{file}: expected a line of column names first, found an empty line.")
    return pa.schema([(name, pa.string()) for name in names])


def first_line(file: str) -> bytes:
    """Returns the first line of a text file, plain or gzip; errors as in `raw_blocks`."""
    _, lines, _ = next(_lines(file, 1 << 16), (1, [b""], 0.0))
    return lines[0] if lines else b""


def raw_blocks(
    file: str, config: DataConfig, used: Sequence[str], *, block_bytes: int = _BLOCK_BYTES
) -> Iterator[RawBlock]:
    """Reads a file as blocks of rows; of Parquet only the columns that are ``used``.

    Raises:
        InputError: the file cannot be read, is a damaged gzip or Parquet file, or has no columns.
    """
    kind, schema = format_of(file, config), schema_of(file, config)
    if kind == "parquet":
        yield from _parquet_blocks(file, list(used))
    elif kind == "json":
        yield from _json_blocks(file, schema, block_bytes)
    else:
        separator = "\t" if kind == "criteo" else separator_of(file, config)
        yield from _text_blocks(file, schema.names, separator, has_names=kind == "text", block_bytes=block_bytes)


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
                    chunk = chunk.removeprefix(_BOM)
                    if chunk[:2] in (b"\xff\xfe", b"\xfe\xff"):
                        raise InputError(f"{file}: is UTF-16, expected UTF-8. Convert it, such as with iconv.")
                lines = (rest + chunk).split(b"\n")
                rest = lines.pop()
                if len(rest) > 16 * _MOST_LINE_BYTES:
                    raise InputError(f"{file}, line {number + len(lines)}: longer than 16 MiB. Is this text?")
                if b"\r" in chunk:
                    lines = [line.removesuffix(b"\r") for line in lines]
                yield number, lines, raw.tell() / size
                number += len(lines)
            if rest:
                yield number, [rest.removesuffix(b"\r")], 1.0
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(
            f"{file}, line {number} or soon after: the gzip file is cut off or damaged ({error}). Fetch it again."
        ) from error
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror or error}).") from error


def _text_blocks(
    file: str, names: Sequence[str], separator: str, *, has_names: bool, block_bytes: int
) -> Iterator[RawBlock]:
    mark, count = separator.encode(), len(names)
    plain, quoted = rb'[^"%b]*+' % re.escape(mark), rb'"(?:[^"]|"")*+"'
    column = rb"(?:%b|%b)" % (quoted, plain)
    is_row = re.compile(rb"%b(?:%b%b){%d}" % (column, re.escape(mark), column, count - 1)) if has_names else None
    quote = '"' if has_names else ""
    types = ", ".join(f"'c{i}': 'VARCHAR'" for i in range(count))
    relation = (
        f"read_csv('memory:/{_PLACE}', auto_detect=false, header=false, delim={sql_text(separator)}, quote='{quote}', "
        f"escape='{quote}', new_line='\\n', max_line_size={2 * _MOST_LINE_BYTES}, columns={{{types}}})"
    )
    for first, lines, share in _lines(file, block_bytes):
        start = int(has_names and first == 1)
        faults = _line_faults(lines[start:], mark, count, is_row)
        rejects = [
            Reject(file, first + start + row, "", reason, lines[start + row].decode(errors="replace")[:1000])
            for row, reason in faults.items()
        ]
        rows = [line for row, line in enumerate(lines[start:]) if row not in faults] if faults else lines[start:]
        yield RawBlock(
            file=file,
            numbers=np.delete(np.arange(first + start, first + len(lines)), list(faults)),
            texts=rows,
            columns={name: f"c{i}" for i, name in enumerate(names)},
            relation=relation,
            rows=b"\n".join(rows) + b"\n",
            rejects=rejects,
            share=share,
        )


def _line_faults(lines: Sequence[bytes], mark: bytes, count: int, is_row: re.Pattern[bytes] | None) -> dict[int, str]:
    """Returns what is wrong with lines, by their position."""
    text = b"\n".join(lines)
    expected = f"expected {count} columns"
    numbers = np.array([line.count(mark) for line in lines], np.int64)
    faults = {
        int(row): f"{expected}, found {numbers[row] + 1}" if lines[int(row)] else "the line is empty"
        for row in np.flatnonzero((numbers != count - 1) | (np.array([not line for line in lines], bool)))
    }
    if is_row is not None and b'"' in text:
        for row, line in enumerate(lines):
            if b'"' not in line:
                continue
            faults.pop(row, None)  # separators inside quotes were counted
            if not is_row.fullmatch(line):
                faults[row] = f'{expected}, found others, or a quote that is open or inside a column (double it: "")'
    if b"\r" in text or b"\0" in text or len(text) > _MOST_LINE_BYTES:
        for row, line in enumerate(lines):
            if b"\r" in line or b"\0" in line or len(line) > _MOST_LINE_BYTES:
                faults[row] = "a carriage return or NUL inside the line, or more than 1 MiB"
    try:
        text.decode()
    except UnicodeDecodeError:
        for row, line in enumerate(lines):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                faults[row] = f"expected text in UTF-8 ({error.reason}); convert the file, such as with iconv"
    return faults


def _json_blocks(file: str, schema: pa.Schema, block_bytes: int) -> Iterator[RawBlock]:
    structure = json.dumps({field.name: ["VARCHAR"] if pa.types.is_list(field.type) else "VARCHAR" for field in schema})
    columns = {name: f"struct_extract(j, {sql_text(name)})" for name in schema.names}
    check = duckdb.connect()
    for first, lines, share in _lines(file, block_bytes):
        texts = pa.array([line.decode(errors="replace") for line in lines], pa.string())
        block = pa.table({"line": texts})
        check.register("block", block)
        is_object = "CASE WHEN json_valid(line) THEN json_type(line) = 'OBJECT' ELSE false END"
        good = np.array([row for (row,) in check.sql(f"SELECT {is_object} FROM block").fetchall()], dtype=bool)
        good &= np.array([_is_clean(line) for line in lines], dtype=bool)
        check.unregister("block")
        yield RawBlock(
            file=file,
            numbers=first + np.flatnonzero(good),
            texts=[lines[row] for row in np.flatnonzero(good)],
            columns=columns,
            relation=f"(SELECT json_transform(line, {sql_text(structure)}) AS j FROM block)",
            rows=block.filter(pa.array(good)),
            rejects=[
                Reject(file, first + int(row), "", "expected a JSON object on one line", texts[int(row)].as_py()[:1000])
                for row in np.flatnonzero(~good)
            ],
            share=share,
        )


def _is_clean(line: bytes) -> bool:
    try:
        return b"\0" not in line and line.decode() is not None
    except UnicodeDecodeError:
        return False


def _json_schema(file: str, lines: Sequence[bytes]) -> pa.Schema:
    """Finds the keys of the first objects; values that are lists make a column of lists."""
    kinds: dict[str, pa.DataType] = {}
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
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


@contextmanager
def _parquet(file: str) -> Iterator[pq.ParquetFile]:
    with ExitStack() as opened:
        try:
            source = pq.ParquetFile(opened.enter_context(open_binary(file)))
            _ = source.schema_arrow.names  # which pyarrow decodes here
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            raise InputError(f"{file}: cannot be read as Parquet ({error}).") from error
        yield source


def _parquet_blocks(file: str, used: list[str]) -> Iterator[RawBlock]:
    start, columns = 1, {name: f"c{i}" for i, name in enumerate(used)}
    with _parquet(file) as source:
        batches = source.iter_batches(batch_size=_PARQUET_ROWS, columns=used, use_threads=False)
        total = max(source.metadata.num_rows, 1)
        while True:
            try:
                batch = next(batches, None)
                if batch is None:
                    return
                batch.validate(full=True)
            except (OSError, pa.ArrowException) as error:
                raise InputError(f"{file}, row {start} or soon after: cannot be read as Parquet ({error}).") from error
            table = pa.Table.from_batches([batch]).select(used)
            yield RawBlock(
                file=file,
                numbers=np.arange(start, start + batch.num_rows),
                texts=table,
                columns=columns,
                relation="block",
                rows=pa.table([_plain(column) for column in table.columns], names=list(columns.values())),
                share=(start - 1 + batch.num_rows) / total,
            )
            start += batch.num_rows


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns a column without dictionaries, and timestamps as microseconds of UTC."""
    type_ = column.type
    if pa.types.is_dictionary(type_):
        return _plain(column.cast(type_.value_type))
    if pa.types.is_float16(type_):
        return column.cast(pa.float32())
    if pa.types.is_timestamp(type_):
        return column.cast(pa.timestamp("us"), safe=False)
    return column
