"""Access profiles of a run's data, and the state of its hot rows, kept as Parquet files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dmt.errors import InputError
from dmt.files import from_record, open_file, parse_json, write_or_raise
from dmt.hot_rows.profile import AccessProfile, RowCounts
from dmt.plan.tables import TableSpec

if TYPE_CHECKING:
    from dmt.hot_rows.runtime import HotRowsState

__all__ = [
    "load_hot_rows",
    "load_profile",
    "save_hot_rows",
    "save_profile",
]

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class _Header:
    """The numbers of a file besides the counts."""

    format: int
    num_samples: int
    most_rows: int
    tables: tuple[TableSpec, ...]
    totals: tuple[int, ...]
    missed: tuple[int, ...]


# Files of a checkpoint.
_COUNTS, _ROWS, _NUMBERS = "hot_rows_counts.parquet", "hot_rows.parquet", "hot_rows.json"
_SCHEMA = pa.schema([("table", pa.int32()), ("row", pa.int64()), ("accesses", pa.int64())])


def save_profile(profile: AccessProfile, path: Path) -> None:
    """Writes a profile as Parquet: a row for each counted row of a table.

    Raises:
        InputError: the file cannot be written.
    """
    counts = [profile[table.name] for table in profile.tables]
    header = _Header(
        format=_FORMAT,
        num_samples=profile.num_samples,
        most_rows=profile.most_rows,
        tables=profile.tables,
        totals=tuple(c.total for c in counts),
        missed=tuple(c.missed for c in counts),
    )
    columns = [
        np.repeat(np.arange(len(counts), dtype=np.int32), [len(c.rows) for c in counts]),
        np.concatenate([np.zeros(0, np.int64), *(c.rows for c in counts)]),
        np.concatenate([np.zeros(0, np.int64), *(c.counts for c in counts)]),
    ]
    table = pa.Table.from_arrays([pa.array(column) for column in columns], schema=_SCHEMA)
    with write_or_raise(path, "Access profile") as scratch:
        pq.write_table(table.replace_schema_metadata({"dmt": json.dumps(asdict(header))}), scratch)


def load_profile(path: Path, *, remedy: str = "Count the rows again with `dmt prepare`.") -> AccessProfile:
    """Reads what `save_profile` wrote.

    Args:
        path: the file.
        remedy: what the message of an error tells the reader to do.

    Raises:
        InputError: the file is absent, damaged, or no access profile.
    """
    place = f"Access profile {path}"
    try:
        with open_file(path) as file:
            table = pq.read_table(file)
        text = (table.schema.metadata or {}).get(b"dmt", b"{}").decode()
        number, rows, counts = (column.to_numpy() for column in table.cast(_SCHEMA).columns)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise InputError(f"{place}: cannot be read ({error}). {remedy}") from error
    header = from_record(_Header, parse_json(text, place=place, remedy=remedy), place=place, remedy=remedy)
    if header.format != _FORMAT:
        raise InputError(f"{place} has format {header.format}; this version reads format {_FORMAT}. {remedy}")
    ends = np.searchsorted(number, np.arange(len(header.tables) + 1))
    lengths = {len(header.tables), len(header.totals), len(header.missed)}
    if len(lengths) > 1 or header.most_rows < 1 or ends[0] != 0 or ends[-1] != len(number):
        raise InputError(f"{place}: its header and its rows do not fit together. {remedy}")
    profile = AccessProfile(header.tables, most_rows=header.most_rows)
    profile.num_samples = header.num_samples
    of_tables = zip(profile.tables, ends, ends[1:], header.totals, header.missed, strict=False)
    for spec, first, last, total, missed in of_tables:
        found = RowCounts(rows[first:last], counts[first:last], total, missed)
        is_sorted = (number[first:last] == number[first : first + 1]).all() and (np.diff(found.rows) > 0).all()
        inside = not len(found.rows) or (found.rows[0] >= 0 and found.rows[-1] < spec.num_embeddings)
        if not (is_sorted and inside and (found.counts >= 0).all() and found.counts.sum() <= total):
            raise InputError(f"{place}: its counts of table {spec.name!r} do not fit together. {remedy}")
        profile.put(spec.name, found)
    return profile


@dataclass(frozen=True, kw_only=True)
class _Numbers:
    """The numbers of `HotRowsState`."""

    steps: int
    batches: int
    samples: int


def save_hot_rows(state: HotRowsState, folder: Path) -> None:
    """Writes what `HotRows` knows into the folder of a checkpoint."""
    tables = state.counts.tables
    rows = AccessProfile(tables, most_rows=max(table.num_embeddings for table in tables))
    for name, of_table in state.rows.items():
        rows.put(name, RowCounts(of_table, np.ones_like(of_table), len(of_table)))
    save_profile(state.counts, folder / _COUNTS)
    save_profile(rows, folder / _ROWS)
    numbers = _Numbers(steps=state.steps, batches=state.batches, samples=state.samples)
    (folder / _NUMBERS).write_text(json.dumps(asdict(numbers)), encoding="utf-8")


def load_hot_rows(folder: Path) -> HotRowsState | None:
    """Reads what `save_hot_rows` wrote; None from a checkpoint of a run without hot rows.

    Raises:
        InputError: a file is damaged.
    """
    from dmt.hot_rows.runtime import HotRowsState

    path = folder / _NUMBERS
    if not path.exists():
        return None
    remedy = "Start from another checkpoint."
    record = parse_json(path.read_text(encoding="utf-8"), place=str(path), remedy=remedy)
    numbers = from_record(_Numbers, record, place=str(path), remedy=remedy)
    rows = load_profile(folder / _ROWS, remedy=remedy)
    chosen = {table.name: rows[table.name].rows for table in rows.tables}
    return HotRowsState(
        rows={name: of_table for name, of_table in chosen.items() if len(of_table)},
        counts=load_profile(folder / _COUNTS, remedy=remedy),
        **asdict(numbers),
    )
