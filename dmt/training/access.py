"""Saves and loads access profiles (counts by table row) and the state of a run's hot rows, as Parquet files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dmt.errors import InputError
from dmt.files import from_record, parse, write_or_raise
from dmt.hot_rows.profile import AccessProfile, RowCounts
from dmt.plan.tables import TableSpec

if TYPE_CHECKING:
    from dmt.hot_rows.runtime import HotRowsState

__all__ = ["load_hot_rows", "load_profile", "save_hot_rows", "save_profile"]

_FORMAT = 2
# Files of a checkpoint.
_COUNTS, _ROWS = "hot_rows_counts.parquet", "hot_rows.parquet"
_SCHEMA = pa.schema([("table", pa.int32()), ("row", pa.int64()), ("accesses", pa.int64())])


@dataclass(frozen=True, kw_only=True)
class _Header:
    """Metadata of a file, kept as JSON in its Parquet schema."""

    format: int
    num_samples: int
    tables: tuple[TableSpec, ...]
    numbers: dict[str, int] = field(default_factory=dict)


def save_profile(profile: AccessProfile, path: Path, **numbers: int) -> None:
    """Writes a profile as Parquet: columns table (its place in the profile), row, accesses; ``numbers`` are metadata.

    Raises `InputError` if the file cannot be written.
    """
    counts = [profile[table.name] for table in profile.tables]
    header = _Header(format=_FORMAT, num_samples=profile.num_samples, tables=profile.tables, numbers=numbers)
    columns = [
        np.repeat(np.arange(len(counts), dtype=np.int32), [len(c.rows) for c in counts]),
        np.concatenate([np.zeros(0, np.int64), *(c.rows for c in counts)]),
        np.concatenate([np.zeros(0, np.int64), *(c.counts for c in counts)]),
    ]
    table = pa.Table.from_arrays([pa.array(column) for column in columns], schema=_SCHEMA)
    with write_or_raise(path, "Access profile") as scratch:
        pq.write_table(table.replace_schema_metadata({"dmt": json.dumps(asdict(header))}), scratch)


def load_profile(path: Path) -> AccessProfile:
    """Reads a profile that `save_profile` wrote.

    Raises `InputError` if the file is absent, damaged, or not an access profile.
    """
    return _load(path, "Count the rows again with `dmt prepare`.")[0]


def _load(path: Path, remedy: str) -> tuple[AccessProfile, dict[str, int]]:
    place = f"Access profile {path}"
    try:
        table = pq.read_table(path)
        text = (table.schema.metadata or {}).get(b"dmt", b"{}").decode()
        number, rows, counts = (column.to_numpy() for column in table.cast(_SCHEMA).columns)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise InputError(f"{place}: cannot be read ({error}). {remedy}") from error
    header = from_record(_Header, parse(text, "JSON", place=place, remedy=remedy), place=place, remedy=remedy)
    if header.format != _FORMAT:
        raise InputError(f"{place} has format {header.format}; this version reads format {_FORMAT}. {remedy}")
    profile = AccessProfile(header.tables)
    profile.num_samples = header.num_samples
    ends = np.searchsorted(number, np.arange(len(header.tables) + 1))
    for i, spec in enumerate(profile.tables):
        part = slice(ends[i], ends[i + 1])
        profile.put(spec.name, RowCounts(rows[part], counts[part]))
    return profile, header.numbers


def save_hot_rows(state: HotRowsState, folder: Path) -> None:
    """Writes the state of `HotRows` into the folder of a checkpoint; `InputError` if a file cannot be written."""
    rows = AccessProfile(state.counts.tables)
    for name, table_rows in state.rows.items():
        rows.put(name, RowCounts(table_rows, np.ones_like(table_rows)))
    save_profile(state.counts, folder / _COUNTS)
    save_profile(rows, folder / _ROWS, steps=state.steps, batch_size=state.batch_size)


def load_hot_rows(folder: Path) -> HotRowsState | None:
    """Reads the state that `save_hot_rows` wrote; None if the checkpoint's run had no hot rows.

    Raises `InputError` if a file is damaged, or the file of counts is missing.
    """
    from dmt.hot_rows.runtime import HotRowsState

    if not (folder / _ROWS).exists():
        return None
    remedy = "Start from another checkpoint."
    rows, numbers = _load(folder / _ROWS, remedy)
    return HotRowsState(
        rows={table.name: rows[table.name].rows for table in rows.tables if len(rows[table.name].rows)},
        counts=_load(folder / _COUNTS, remedy)[0],
        **numbers,
    )
