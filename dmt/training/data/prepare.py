"""`prepare`: raw rows to Parquet with ids in the place of values, and their counts; what ``dmt prepare`` does.

Rows are read, checked and transformed by the trainer's own reader, in one stream and bounded memory. With
``ids="config"`` they become the ids that training on the raw rows would have: batches are the same, bit for bit. With
``ids="frequency"`` a first pass over the training rows counts all values, and ids follow their frequency: 0 is a value
that is missing, 1 any that is rare or unknown, and 2 the most frequent one.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.files import fsync_path
from dmt.hot_rows.profile import AccessProfile, RowCounts
from dmt.plan.tables import TableSpec
from dmt.training.data.config import DataConfig
from dmt.training.data.dataset import ClickData, Split, open_source
from dmt.training.data.pieces import PIECE_ROWS
from dmt.training.data.prepared import FORMAT, MANIFEST, PARTS, read_manifest
from dmt.training.data.rows import Bags, Rows

__all__ = ["PrepareOptions", "prepare", "row_group_rows"]

logger = logging.getLogger(__name__)

_RARE, _FIRST = 1, 2
_VALUES = 2**62  # two values of a feature hardly ever hash alike
_GROUPS_OF_FILE = 64
_MOST_GROUP_ROWS = 4 * PIECE_ROWS
_VOCABULARY = "vocabulary.parquet"
_PROFILE = "access.parquet"


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """The choices of ``dmt prepare``."""

    ids: Literal["config", "frequency"] = "config"
    min_count: int = 1
    """Accesses in the training rows from which a value has an id of its own (``frequency``)."""
    vocabulary: Path | None = None
    """A prepared folder whose ids are used, for more rows of the same kind (``frequency``)."""
    ranks: int = 1
    """Ranks of the job that will read the rows."""
    group_rows: int | None = None
    """Rows of a row group; None: by the number of rows and ranks."""
    most_values: int = 2**24
    """Values counted of a table at most, 16 bytes each; rarer ones share an id beyond that."""


@dataclass(frozen=True)
class _Vocabulary:
    """The values of a table that have rows of their own."""

    keys: NDArray[np.int64]
    """Hashes of the values, ascending [n]."""
    rows: NDArray[np.int64]
    """The row of each [n]."""

    @staticmethod
    def of(counts: RowCounts, *, min_count: int, most_rows: int) -> _Vocabulary:
        """Gives rows to the values that are counted ``min_count`` times, the most frequent first."""
        known = (counts.counts >= min_count) & (counts.rows != 0)
        keys, numbers = counts.rows[known], counts.counts[known]
        # Equally frequent ones in the order of their hashes, which is the same everywhere.
        keys = keys[np.lexsort((keys, -numbers))][: max(most_rows - _FIRST, 0)]
        order = np.argsort(keys)
        return _Vocabulary(keys[order], _FIRST + order)

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return _FIRST + len(self.keys)

    def rows_of(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the row of each value by its hash, 0 of a missing one [n]."""
        if not len(self.keys):
            return np.where(keys == 0, 0, _RARE)
        place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        found = np.where(self.keys[place] == keys, self.rows[place], _RARE)
        return np.where(keys == 0, 0, found)


def row_group_rows(rows: int, ranks: int) -> int:
    """Returns the rows of a row group: eight or more groups for each rank where there are rows enough.

    Example:
        >>> row_group_rows(1_000_000, 4), row_group_rows(10**9, 64), row_group_rows(1000, 64)
        (32768, 131072, 32768)
    """
    return min(max(rows // (8 * ranks) // PIECE_ROWS, 1) * PIECE_ROWS, _MOST_GROUP_ROWS)


def prepare(
    config: DataConfig,
    out: Path,
    options: PrepareOptions,
    *,
    embedding_dim: int = 4,
    embedding_dims: Mapping[str, int] | None = None,
    on_rows: Callable[[str, int], object] = lambda phase, rows: None,
) -> dict[str, Any]:
    """Writes the rows of a run's data, and returns the manifest.

    Args:
        config: the data section of the run's configuration.
        out: the folder, which must not exist; it appears when all is written.
        options: ids and sizes.
        embedding_dim: columns of the tables, for the access profile.
        embedding_dims: columns of single tables, by feature.
        on_rows: told of each part of the work and of the rows that it has done, for a bar.

    Raises:
        InputError: the folder exists or cannot be written, the data cannot be read, or options do not go together.
    """
    _check(config, out, options)
    config = config.model_copy(update={"shuffle_rows": 0, "shuffle_pieces": False, "workers": 0})
    data = open_source(config, embedding_dim=embedding_dim, embedding_dims=embedding_dims)
    tables, rows = data.tables, data.estimated_rows()
    vocabularies: dict[str, _Vocabulary] = {}
    distinct: dict[str, int | None] = {}
    if options.ids == "frequency":
        keyed = data.with_hashes(_VALUES)
        if options.vocabulary is not None:
            vocabularies = _load_vocabularies(options.vocabulary, tables)
        else:
            counts, rows = _count(keyed, tables, options.most_values, on_rows)
            for table in tables:
                most = table.num_embeddings
                vocabularies[table.name] = _Vocabulary.of(
                    counts[table.name], min_count=options.min_count, most_rows=most
                )
                whole = counts[table.name].missed == 0
                distinct[table.name] = int((counts[table.name].rows != 0).sum()) if whole else None
                if not whole:
                    logger.warning(
                        "%s has more values than --most-values=%d: their counts are too low by up to %d.",
                        *(table.name, options.most_values, counts[table.name].missed),
                    )
        tables = [replace(table, num_embeddings=vocabularies[table.name].num_rows) for table in tables]
        data = keyed
    group_rows = options.group_rows or row_group_rows(rows, options.ranks)
    profile = AccessProfile(tables)
    with _scratch_folder(out) as folder:
        numbers = {
            part: _write(data, part, folder / part, tables, vocabularies, profile, group_rows, on_rows)
            for part in PARTS
        }
        from dmt.training.access import save_profile

        save_profile(profile, folder / _PROFILE)
        if vocabularies:
            _save_vocabularies(vocabularies, folder / _VOCABULARY)
        record = _manifest(config, data, tables, profile, options)
        record |= {"rows": numbers, "row_group_rows": group_rows}
        for table in tables:
            record["tables"][table.name]["distinct"] = distinct.get(
                table.name, _distinct(data, table, profile) if not vocabularies else None
            )
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for path in files:
            fsync_path(path)
        record["files"] = {str(path.relative_to(folder)): path.stat().st_size for path in files}
        (folder / MANIFEST).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        fsync_path(folder / MANIFEST)
    return record


def _check(config: DataConfig, out: Path, options: PrepareOptions) -> None:
    if out.exists() or out.is_symlink():
        raise InputError(f"--out {str(out)!r} exists, and nothing is overwritten. Name a new folder, or remove it.")
    given = {"tables": config.tables, "group_by": config.group_by}
    if wrong := [name for name, value in given.items() if value is not None]:
        raise InputError(f"data.{wrong[0]}={given[wrong[0]]!r} cannot be prepared. Leave it out.")
    if config.label is None:
        raise InputError("data.label is not set, and rows without labels cannot be prepared. Name their column.")
    if options.ids == "frequency" and config.kind == "synthetic":
        raise InputError("Synthetic clicks are ids already. Leave out --ids frequency.")
    if options.ids != "frequency" and (options.min_count > 1 or options.vocabulary is not None):
        name = "--min-count" if options.min_count > 1 else "--vocabulary"
        raise InputError(f"{name} needs ids by frequency. Give --ids frequency, or leave it out.")
    for option, value in (
        ("--min-count", options.min_count),
        ("--ranks", options.ranks),
        ("--row-group-rows", options.group_rows or 1),
        ("--most-values", options.most_values),
    ):
        if value < 1:
            raise InputError(f"{option}={value} must be at least 1.")


def _count(
    data: ClickData, tables: Sequence[TableSpec], most_values: int, on_rows: Callable[[str, int], object]
) -> tuple[AccessProfile, int]:
    """Counts the values of the training rows, by their hashes."""
    profile = AccessProfile([replace(table, num_embeddings=_VALUES) for table in tables], most_rows=most_values)
    for rows in data.rows("train"):
        profile.add(_ids(data, rows), num_samples=rows.num_rows)
        on_rows("count", rows.num_rows)
    return profile, profile.num_samples


def _ids(data: ClickData, rows: Rows) -> dict[str, NDArray[np.int64]]:
    return {name: bags.values for name, bags in zip(data.feature_names, rows.bags, strict=True)}


def _write(
    data: ClickData,
    part: Split,
    folder: Path,
    tables: Sequence[TableSpec],
    vocabularies: Mapping[str, _Vocabulary],
    profile: AccessProfile,
    group_rows: int,
    on_rows: Callable[[str, int], object],
) -> int:
    """Writes the rows of a split in row groups of this size, in files of 64 of them; returns how many there are."""
    folder.mkdir()
    table_of = {name: table for table in tables for name in table.feature_names}

    def encoded() -> Iterator[pa.Table]:
        for rows in data.rows(part):
            bags = []
            for name, own in zip(data.feature_names, rows.bags, strict=True):
                vocabulary = vocabularies.get(table_of[name].name)
                bags.append(own if vocabulary is None else Bags(vocabulary.rows_of(own.values), own.offsets))
            rows = replace(rows, bags=tuple(bags))
            if part == "train":
                profile.add(_ids(data, rows), num_samples=rows.num_rows)
            on_rows(part, rows.num_rows)
            yield _columns(data, rows, table_of)

    number = 0
    writer = None
    try:
        for at, group in enumerate(_regrouped(encoded(), group_rows)):
            if at % _GROUPS_OF_FILE == 0:
                if writer is not None:
                    writer.close()
                writer = pq.ParquetWriter(folder / f"part-{at // _GROUPS_OF_FILE:05d}.parquet", group.schema)
            assert writer is not None, "opened for the first group"
            writer.write_table(group, row_group_size=group_rows)
            number += group.num_rows
    finally:
        if writer is not None:
            writer.close()
    return number


def _columns(data: ClickData, rows: Rows, table_of: Mapping[str, TableSpec]) -> pa.Table:
    columns: dict[str, pa.Array] = {data.config.label or "label": pa.array(rows.labels.astype(np.int8))}
    columns |= {name: pa.array(rows.dense[:, i]) for i, name in enumerate(data.dense_names)}
    for name, bags in zip(data.feature_names, rows.bags, strict=True):
        wide = table_of[name].num_embeddings > 2**31
        values = pa.array(bags.values.astype(np.int64 if wide else np.int32))
        columns[name] = values if bags.offsets is None else pa.LargeListArray.from_arrays(bags.offsets, values)
    return pa.table(columns)


def _regrouped(tables: Iterable[pa.Table], rows: int) -> Iterator[pa.Table]:
    """Cuts a stream of tables into tables of this many rows; the last may have fewer."""
    waiting: list[pa.Table] = []
    number = 0
    for table in tables:
        waiting.append(table)
        number += table.num_rows
        while number >= rows:
            joined = pa.concat_tables(waiting)
            yield joined.slice(0, rows)
            waiting, number = [joined.slice(rows)], number - rows
    if number:
        yield pa.concat_tables(waiting)


def _manifest(
    config: DataConfig,
    data: ClickData,
    tables: Sequence[TableSpec],
    profile: AccessProfile,
    options: PrepareOptions,
) -> dict[str, Any]:
    rows = {name: table.num_embeddings for table in tables for name in table.feature_names}
    return {
        "format": FORMAT,
        "data": {
            "id_mode": "index",
            "label": config.label or "label",
            "dense": list(data.dense_names),
            "dense_transform": "none",
            "categorical": list(data.feature_names),
            "num_embeddings_per_feature": {name: rows[name] for name in data.feature_names},
            "shared_tables": {name: list(features) for name, features in config.shared_tables.items()},
        },
        "tables": {
            table.name: {
                "features": list(table.feature_names),
                "rows": table.num_embeddings,
                "rows_read": len(profile[table.name].rows),
                "accesses": profile[table.name].total,
            }
            for table in tables
        },
        "access_counts": _PROFILE,
        "malformed_rows": sum(data.bad_lines.values()),
        "ids": options.ids,
        "min_count": options.min_count,
        "source": config.model_dump(mode="json", exclude_defaults=True),
    }


def _distinct(data: ClickData, table: TableSpec, profile: AccessProfile) -> int | None:
    """Returns the rows of a table in use; for hashed ids, an estimate of the values, or None where too few are unused.

    Linear counting (Whang et al., TODS 1990): of m rows, n values leave m exp(-n / m) unused.
    """
    counts, rows = profile[table.name], table.num_embeddings - 1  # row 0 is for missing values
    used = int((counts.rows != 0).sum())
    if all(name in data.times for name in table.feature_names):
        return used
    if data.config.kind == "synthetic" or data.config.id_mode == "index":
        # Row 0 is as well the value 0.
        return None if counts.missed else len(counts.rows)
    if counts.missed or used >= 0.99 * rows:
        return None
    return round(-rows * np.log1p(-used / rows))


def _save_vocabularies(vocabularies: Mapping[str, _Vocabulary], path: Path) -> None:
    schema = pa.schema([("table", pa.string()), ("value_hash", pa.int64()), ("row", pa.int64())])
    with pq.ParquetWriter(path, schema) as writer:
        for name, own in vocabularies.items():
            columns = [pa.repeat(name, len(own.keys)), pa.array(own.keys), pa.array(own.rows)]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def _load_vocabularies(folder: Path, tables: Sequence[TableSpec]) -> dict[str, _Vocabulary]:
    """Reads the vocabularies of a prepared folder, which must be of the same tables."""
    place = f"--vocabulary {str(folder)!r}"
    record = read_manifest(folder, place)
    if _VOCABULARY not in record["files"]:
        raise InputError(f"{place} was prepared without ids by frequency, and has no vocabulary. Prepare it with them.")
    told = {name: own["features"] for name, own in record["tables"].items()}
    if told != {table.name: list(table.feature_names) for table in tables}:
        raise InputError(f"{place} has other tables or features than these data. Give the same columns and tables.")
    found = pq.read_table(folder / _VOCABULARY)
    names = found["table"].combine_chunks()
    vocabularies = {}
    for table in tables:
        own = found.filter(pa.compute.equal(names, table.name))
        vocabularies[table.name] = _Vocabulary(own["value_hash"].to_numpy(), own["row"].to_numpy())
    return vocabularies


@contextmanager
def _scratch_folder(out: Path) -> Iterator[Path]:
    """Yields a folder beside ``out`` that becomes it at the end; after an error it is removed."""
    scratch = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        scratch.mkdir(parents=True)
        yield scratch
        scratch.rename(out)
        fsync_path(out.parent)
    except OSError as error:
        raise InputError(f"--out {str(out)!r} cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
