"""`typed_rows`: a block of raw rows as labels, numbers and ids, and the rows that cannot be used with their reasons.

Numbers, times and lists are SQL of DuckDB; ids are made of the distinct values of a block.

Legend: n rows of a block, D dense columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dmt.training.data.columns import CRITEO_CATEGORICAL, Columns, Feature, is_list, is_text
from dmt.training.data.config import DataConfig
from dmt.training.data.hash import hash_rows
from dmt.training.data.ids import bags_of, id_fault
from dmt.training.data.raw import RawBlock, Reject, sql_text
from dmt.training.data.rows import Bags

__all__ = ["TypedRows", "request_keys", "signed_log", "typed_rows"]

_MISSING = "('nan', 'na', 'n/a', 'null', 'none', 'nat', '')"
"""Spellings of a missing number or time, in lower case; a missing category is the empty text ("NA" may be Namibia)."""
_ZONE = r"[T ].*(Z|[+-]\d\d(:?\d\d)?) *$"
_PARTS = {
    "hour": "hour({0}) + 1",
    "weekday": "isodow({0})",
    "day": "day({0})",
    "month": "month({0})",
    "years": "epoch_us({0}) / 31556952000000.0",
}
_FAULT, _SPLIT, _REQUEST, _LABEL = "fault", "split", "request", "label"
_BETWEEN = "\x1f"


@dataclass(frozen=True)
class TypedRows:
    """Rows of a block that can be used."""

    labels: NDArray[np.float32]
    """0 or 1 [n]; 0 in data without labels."""
    dense: NDArray[np.float32]
    """Transformed dense columns, float32 [n, D]; 0 where missing."""
    missing: NDArray[np.int64]
    """Missing values of each dense column [D]."""
    bags: Mapping[str, Bags]
    """Ids of each feature."""
    split: pa.Array | None
    """Text of the split column [n]."""
    requests: NDArray[np.int64] | None
    """Key of each row's request [n]; None without ``data.group_by``."""

    def take(self, index: NDArray[np.int64]) -> TypedRows:
        """Returns the rows at these positions."""
        bags = {name: bag.take(index) for name, bag in self.bags.items()}
        split = None if self.split is None else self.split.take(pa.array(index))
        requests = None if self.requests is None else self.requests[index]
        return TypedRows(self.labels[index], self.dense[index], self.missing, bags, split, requests)


def typed_rows(
    block: RawBlock,
    connection: duckdb.DuckDBPyConnection,
    *,
    schema: pa.Schema,
    config: DataConfig,
    columns: Columns,
) -> tuple[TypedRows, list[Reject]]:
    """Reads the columns of a block; rows with a value that does not fit are left out and come as rejects."""
    table = block.select(connection, _expressions(block, schema, config, columns))
    number = len(block.numbers)
    faults: dict[int, tuple[str, str]] = {}
    told = table.column(_FAULT)
    if told.null_count < number:
        for row in np.flatnonzero(pc.is_valid(told).to_numpy()):
            column, _, reason = told[int(row)].as_py().partition(_BETWEEN)
            faults[int(row)] = (column, reason)
    dense = np.empty((number, len(columns.dense)), np.float32)
    missing = np.zeros(len(columns.dense), np.int64)
    for i, name in enumerate(columns.dense):
        values = _array(table, f"d{i}").to_numpy(zero_copy_only=False)
        with np.errstate(over="ignore"):  # the overflow is what the next line looks for
            dense[:, i] = values if config.dense_transform == "none" or name in columns.years else signed_log(values)
        for row in np.flatnonzero(np.isinf(dense[:, i])):
            faults.setdefault(int(row), (name, "infinite as a 32-bit float; clip the column or leave it empty"))
        missing[i] = np.isnan(dense[:, i]).sum()
    np.nan_to_num(dense, copy=False, nan=0.0)
    bags = {}
    for i, feature in enumerate(columns.features):
        column = _array(table, f"f{i}")
        if pa.types.is_string(column.type):
            column = column.dictionary_encode()  # a value that occurs often is checked and hashed once
        bags[feature.name], wrong = bags_of(column, feature)
        if config.kind == "criteo_tsv" and feature.name in CRITEO_CATEGORICAL:
            wrong = _not_hexadecimal(column)
        for row in () if wrong is None else np.flatnonzero(wrong):
            what = "expected a hexadecimal number" if config.kind == "criteo_tsv" else id_fault(feature)
            faults.setdefault(int(row), (feature.name, f"{what}, found {column[int(row)].as_py()!r}"[:300]))
    labels = np.zeros(number, np.float32)
    if config.label is not None:
        with np.errstate(over="ignore"):  # a label beyond 32-bit floats is a fault already
            labels = _array(table, _LABEL).to_numpy(zero_copy_only=False).astype(np.float32)
    split = _array(table, _SPLIT) if config.split_column else None
    requests = request_keys(_array(table, _REQUEST), config.group_by, block) if config.group_by else None
    rows = TypedRows(labels, dense, missing, bags, split, requests)
    if not faults:
        return rows, []
    rejects = [Reject(block.file, int(block.numbers[row]), *faults[row], block.text(row)) for row in sorted(faults)]
    return rows.take(np.delete(np.arange(number), list(faults))), rejects


def signed_log(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns sign(x) * log(1 + abs(x)) of values x, [n]."""
    return np.asarray(np.sign(values) * np.log1p(np.abs(values)))


def request_keys(column: pa.Array, name: str, block: RawBlock) -> NDArray[np.int64]:
    """Returns a number for each row's request, its value's hash, int64 [n]; a row without a value is one by itself."""
    keys = hash_rows(column, feature=name, num_embeddings=2**62)
    alone = np.flatnonzero(keys == 0)
    places = [f"{Path(block.file).name} {block.numbers[row]}" for row in alone]
    keys[alone] = hash_rows(pa.array(places, pa.string()), feature=name, num_embeddings=2**62)
    return keys


def _expressions(block: RawBlock, schema: pa.Schema, config: DataConfig, columns: Columns) -> dict[str, str]:
    """Returns the SQL of every column that is needed, by the names that `typed_rows` reads."""
    wanted: dict[str, str] = {}
    faults: list[str] = []
    sql = block.columns

    def is_fault(column: str, expected: str, condition: str) -> None:
        prefix = sql_text(f"{column}{_BETWEEN}{expected}, found ")
        told = f"{prefix} || coalesce(left(CAST({sql[column]} AS VARCHAR), 60), 'nothing')"
        faults.append(f"WHEN {condition} THEN {told}")

    if config.label is not None:
        value = sql[config.label]
        if is_text(schema.field(config.label).type):
            value = f"CASE lower(trim({value})) WHEN 'true' THEN 1 WHEN 'false' THEN 0 ELSE {_number(value)} END"
        wanted[_LABEL] = f"CAST({value} AS DOUBLE)"
        is_fault(config.label, "expected 0 or 1", f"coalesce(CAST({value} AS DOUBLE) NOT IN (0, 1), true)")
    for i, name in enumerate(columns.dense):
        if (time := columns.years.get(name)) is not None:
            wanted[f"d{i}"] = f"CAST({_PARTS['years'].format(_time(sql[time.column], schema, time.column))} AS DOUBLE)"
            continue
        wanted[f"d{i}"] = f"CAST({sql[name]} AS DOUBLE)"
        if is_text(schema.field(name).type):
            wanted[f"d{i}"] = value = _number(sql[name])
            given = f"{sql[name]} IS NOT NULL AND {value} IS NULL AND lower(trim({sql[name]})) NOT IN {_MISSING}"
            is_fault(name, "expected a number", given)
    for column in dict.fromkeys(time.column for time in columns.times.values()):
        if is_text(schema.field(column).type):
            given = f"{sql[column]} IS NOT NULL AND {_time(sql[column], schema, column)} IS NULL"
            expected = "expected a date or time such as 2026-11-22 or 2026-11-22T20:15:00"
            is_fault(column, expected, f"{given} AND lower(trim({sql[column]})) NOT IN {_MISSING}")
    for i, feature in enumerate(columns.features):
        wanted[f"f{i}"] = _values(feature, sql, schema, config)
    if config.split_column:
        wanted[_SPLIT] = f"CAST({sql[config.split_column]} AS VARCHAR)"
    if config.group_by:
        wanted[_REQUEST] = sql[config.group_by]
    wanted[_FAULT] = f"CASE {' '.join(faults)} END" if faults else "CAST(NULL AS VARCHAR)"
    return wanted


def _number(text: str) -> str:
    # DuckDB takes an underscore between digits.
    return f"CASE WHEN contains({text}, '_') THEN NULL ELSE TRY_CAST({text} AS DOUBLE) END"


def _time(sql: str, schema: pa.Schema, column: str) -> str:
    """Returns the SQL of a time without a zone; one that is given is turned into UTC."""
    if not is_text(schema.field(column).type):
        return f"CAST({sql} AS TIMESTAMP)"
    zoned = f"regexp_matches({sql}, {sql_text(_ZONE)})"
    # Each cast gives microseconds since 1970; that of a time without a zone would else take the zone of this machine.
    cast = {kind: f"epoch_us(TRY_CAST({sql} AS {kind}))" for kind in ("TIMESTAMPTZ", "TIMESTAMP")}
    return f"make_timestamp(CASE WHEN {zoned} THEN {cast['TIMESTAMPTZ']} ELSE {cast['TIMESTAMP']} END)"


def _values(feature: Feature, sql: Mapping[str, str], schema: pa.Schema, config: DataConfig) -> str:
    if feature.time is not None:
        return _PARTS[feature.time.part].format(_time(sql[feature.time.column], schema, feature.time.column))
    column = sql[feature.name]
    if feature.is_bag and not is_list(schema.field(feature.name).type):
        return f"string_split(CAST({column} AS VARCHAR), {sql_text(config.list_separator)})"
    return column


def _not_hexadecimal(column: pa.Array) -> NDArray[np.bool_] | None:
    fits = pc.match_substring_regex(column.dictionary, "^[0-9a-fA-F]{1,16}$")
    if pc.all(fits).as_py() is not False:
        return None
    wrong = np.append(~fits.to_numpy(zero_copy_only=False), False)
    return np.asarray(wrong[column.indices.fill_null(-1).to_numpy(zero_copy_only=False)])


def _array(table: pa.Table, name: str) -> pa.Array:
    return table.column(name).combine_chunks()
