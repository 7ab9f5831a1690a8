"""`prepare`: raw rows to a folder of Parquet with ids in the place of values; what ``dmt prepare`` does.

DuckDB reads text, JSON lines and Parquet in bounded memory. With ``ids="config"`` values become the ids that the
settings say. With ``ids="frequency"`` a first pass over the training rows counts them, and ids follow their frequency:
0 is a value that is missing, 1 any that is rare or unknown, and 2 the most frequent one.
"""

from __future__ import annotations

import csv
import fcntl
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.files import fsync_path
from dmt.hot_rows.profile import AccessProfile
from dmt.plan.tables import TableSpec
from dmt.training.access import save_profile
from dmt.training.data.columns import Columns, Feature, expand_path, explicit_config, find_columns, is_list, tables_of
from dmt.training.data.config import DataConfig
from dmt.training.data.hash import HASH_KEY
from dmt.training.data.prepared import FORMAT, MANIFEST, PARTS, REQUEST
from dmt.training.data.raw import Reject, connect, raw_blocks, schema_of
from dmt.training.data.rows import Bags
from dmt.training.data.storage import file_version
from dmt.training.data.summary import Summary
from dmt.training.data.typed import TypedRows, typed_rows
from dmt.training.data.vocabulary import COUNTED, VOCABULARY, Vocabulary, load_vocabularies, save_vocabularies

__all__ = ["PrepareOptions", "prepare"]

logger = logging.getLogger(__name__)

Part = Literal["train", "eval"]
_GROUPS_OF_FILE = 64
_PROFILE = "access.parquet"
_REJECTS = "rejects.csv"
_MILLIONTHS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """The choices of ``dmt prepare``."""

    ids: Literal["config", "frequency"] = "config"
    min_count: int = 1
    """Accesses in the training rows from which a value has an id of its own (``frequency``)."""
    vocabulary: Path | None = None
    """A prepared folder whose ids are used, for more rows of the same kind (``frequency``)."""
    group_rows: int = 32_768
    """Rows of a row group."""
    most_values: int = 2**24
    """Values counted of a table at most, 16 bytes each; rarer ones share an id beyond that."""
    max_rejects: int = 0
    """Rows that may be left out because a value does not fit; one more ends the work with an error."""
    memory_gib: float = 2.0
    """Memory that DuckDB may use; what waits to be written comes on top."""
    threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    """Threads of DuckDB."""
    eval_only: bool = False
    """All rows of ``train_path`` are evaluation rows, in their order."""


@dataclass(kw_only=True)
class _Rejects:
    """Rows that were left out, in a file."""

    path: Path
    most: int
    number: int = 0

    def add(self, rejects: Sequence[Reject]) -> None:
        if not rejects:
            return
        first = rejects[0]
        self.number += len(rejects)
        if self.number > self.most:
            column = f"column {first.column!r}: " if first.column else ""
            raise InputError(
                f"{first.file}, line {first.number}: {column}{first.reason}. The line: {first.text[:200]!r}. Correct "
                f"it, or leave out and list up to N such rows with --max-rejects N ({self.number:,} or more here)."
            )
        is_new = not self.path.exists()
        with self.path.open("a", newline="", encoding="utf-8", errors="replace") as stream:
            writer = csv.writer(stream)
            writer.writerows([("source", "line", "column", "reason", "text")] if is_new else [])
            writer.writerows(rejects)


class _Writer:
    """Writes the rows of a part in row groups of one size, in files of 64 of them."""

    def __init__(self, folder: Path, schema: pa.Schema, group_rows: int) -> None:
        folder.mkdir()
        self._folder, self._schema, self._group_rows = folder, schema, group_rows
        self._waiting: list[pa.Table] = []
        self._groups, self._file = 0, ExitStack()
        self.num_rows = 0

    def add(self, table: pa.Table) -> None:
        self._waiting.append(table)
        self.num_rows += table.num_rows
        while sum(table.num_rows for table in self._waiting) >= self._group_rows:
            joined = pa.concat_tables(self._waiting)
            self._write(joined.slice(0, self._group_rows))
            self._waiting = [joined.slice(self._group_rows)]

    def close(self) -> None:
        """Writes the rest; a part without rows is a file without rows."""
        rest = pa.concat_tables([self._schema.empty_table(), *self._waiting])
        if rest.num_rows or not self._groups:
            self._write(rest)
        self._file.close()

    def _write(self, group: pa.Table) -> None:
        if REQUEST in group.schema.names:  # the rows of a request stand together, in the order of their first ones
            _, first, number = np.unique(group.column(REQUEST).to_numpy(), return_index=True, return_inverse=True)
            group = group.take(pa.array(np.argsort(first[number], kind="stable")))
        if self._groups % _GROUPS_OF_FILE == 0:
            self._file.close()
            path = self._folder / f"part-{self._groups // _GROUPS_OF_FILE:05d}.parquet"
            self._writer = self._file.enter_context(pq.ParquetWriter(path, self._schema))
        self._writer.write_table(group, row_group_size=self._group_rows)
        self._groups += 1


@dataclass(frozen=True, kw_only=True)
class _Source:
    """The files of a run, and how their rows are divided into parts."""

    config: DataConfig
    columns: Columns
    files: dict[str, list[str]]
    """Files of ``train_path`` and of ``eval_path``."""
    options: PrepareOptions
    connection: duckdb.DuckDBPyConnection
    on_share: Callable[[float], object]

    def rows(self, columns: Columns, rejects: _Rejects | None) -> Iterator[tuple[Part, TypedRows]]:
        """Yields the rows of both parts, in the order of the files; without ``rejects`` they are not looked at."""
        used = _used(self.config, columns)
        sizes = {file: file_version(file)[0] for files in self.files.values() for file in files}
        whole, done, start = max(sum(sizes.values()), 1), 0, 0
        for setting, files in self.files.items():
            for file in files:
                config = self.config
                schema = schema_of(file, config)
                if absent := [name for name in used if name not in schema.names]:
                    raise InputError(
                        f"{file}: column {absent[0]!r} is missing; all files must have the columns of the first."
                    )
                find_columns(config, schema, file)
                for feature in columns.features:
                    if feature.time is None and is_list(schema.field(feature.name).type) and not feature.is_bag:
                        raise InputError(f"{file}: column {feature.name!r} is a list, but not in the first file.")
                for block in raw_blocks(file, config, used):
                    rows, wrong = typed_rows(block, self.connection, schema=schema, config=config, columns=columns)
                    if rejects is not None:
                        rejects.add(sorted([*block.rejects, *wrong], key=lambda reject: reject.number))
                    for part in PARTS:
                        if len(index := self._part(part, setting, rows, start)):
                            yield part, rows if len(index) == len(rows.labels) else rows.take(index)
                    start += len(rows.labels)
                    self.on_share((done + block.share * sizes[file]) / whole)
                done += sizes[file]

    def _part(self, part: Part, setting: str, rows: TypedRows, start: int) -> NDArray[np.int64]:
        """Returns the positions of the rows of a part, of rows that are number ``start`` and on."""
        config, every = self.config, np.arange(len(rows.labels))
        if setting == "eval_path" or self.options.eval_only or config.eval_path:
            own = "eval" if setting == "eval_path" or self.options.eval_only else "train"
            return every if part == own else every[:0]
        if rows.split is not None:
            chosen = pa.compute.equal(rows.split, config.split_value(part))
            return np.flatnonzero(chosen.fill_null(False).to_numpy(zero_copy_only=False))
        share = round(config.eval_fraction * _MILLIONTHS)  # whole numbers: exact at any row number
        if rows.requests is not None:
            apart = rows.requests % _MILLIONTHS < share
        else:
            numbers = start + every
            apart = (numbers + 1) * share // _MILLIONTHS > numbers * share // _MILLIONTHS
        return np.flatnonzero(apart == (part == "eval"))


def prepare(
    config: DataConfig,
    out: Path,
    options: PrepareOptions,
    *,
    embedding_dim: int = 4,
    embedding_dims: Mapping[str, int] | None = None,
    on_share: Callable[[str, float], object] = lambda phase, share: None,
) -> dict[str, Any]:
    """Writes the rows of a run's data, and returns the manifest.

    Args:
        config: the data section of the run's configuration.
        out: the folder, which must not exist; it appears when all is written.
        options: ids and sizes.
        embedding_dim: columns of the tables, for the access counts.
        embedding_dims: columns of single tables, by feature.
        on_share: called with the part of the work and the share of it that is done, for a bar.

    Raises:
        InputError: the folder exists or cannot be written, the data cannot be read, more rows than
            ``max_rejects`` cannot be used, or options contradict each other.
    """
    _check(config, out, options)
    is_criteo = config.kind == "criteo_tsv"
    paths = {"train_path": config.train_path} | ({"eval_path": config.eval_path} if config.eval_path else {})
    files = {setting: expand_path(setting, path or "", columns=not is_criteo) for setting, path in paths.items()}
    first = files["train_path"][0]
    columns = find_columns(config, schema_of(first, config), first)
    tables = tables_of(columns, embedding_dim=embedding_dim, embedding_dims=embedding_dims or {})
    phase = "count"
    source = _Source(
        config=config,
        columns=columns,
        files=files,
        options=options,
        connection=connect(memory_gib=options.memory_gib, threads=options.threads),
        on_share=lambda share: on_share(phase, share),
    )
    with _work_folder(out) as folder, source.connection:
        vocabularies: dict[str, Vocabulary] = {}
        read = columns
        if options.ids == "frequency":
            read = _counted(columns)
            vocabularies = (
                load_vocabularies(options.vocabulary, columns)
                if options.vocabulary is not None
                else _count(source, read, tables, options)
            )
            save_vocabularies(vocabularies, folder / VOCABULARY)
            columns = _with_rows(columns, vocabularies)
            tables = tables_of(columns, embedding_dim=embedding_dim, embedding_dims=embedding_dims or {})
        phase = "write"
        rejects = _Rejects(path=folder / _REJECTS, most=options.max_rejects)
        profile, summary = AccessProfile(tables), Summary(columns)
        writers = {part: _Writer(folder / part, _schema(config, columns), options.group_rows) for part in PARTS}
        for part, rows in source.rows(read, rejects):
            ids = _ids(rows, columns, vocabularies)
            if part == "train":
                profile.add({name: bags.values for name, bags in ids.items()}, num_samples=len(rows.labels))
                summary.add(rows, ids)
            writers[part].add(_table(rows, ids, _schema(config, columns), columns))
        for writer in writers.values():
            writer.close()
        save_profile(profile, folder / _PROFILE)
        record = _manifest(source, columns, tables, profile, vocabularies)
        record |= {"rows": {part: writer.num_rows for part, writer in writers.items()}, "rejects": rejects.number}
        record["summary"] = summary.record(profile, vocabularies)
        _seal(folder, record)
    return record


def _check(config: DataConfig, out: Path, options: PrepareOptions) -> None:
    if out.exists() or out.is_symlink():
        raise InputError(f"--out {str(out)!r} exists, and nothing is overwritten. Name a new folder, or remove it.")
    if config.kind in ("synthetic", "source"):
        raise InputError(f"data.kind={config.kind!r} has no files. Name some with data.train_path and data.kind.")
    if config.tables is not None:
        raise InputError(f"data.tables={config.tables!r} cannot be prepared. Leave it out.")
    if config.label is None and not options.eval_only:
        raise InputError("data.label is not set, and rows without labels cannot be prepared. Name their column.")
    if options.ids != "frequency" and (options.min_count > 1 or options.vocabulary is not None):
        name = "--min-count" if options.min_count > 1 else "--vocabulary"
        raise InputError(f"{name} needs ids by frequency. Give --ids frequency, or leave it out.")
    for option, value, least in (
        ("--min-count", options.min_count, 1),
        ("--group-rows", options.group_rows, 1),
        ("most_values", options.most_values, 1),
        ("--max-rejects", options.max_rejects, 0),
        ("--memory-gib", options.memory_gib, 0.25),
    ):
        if value < least:
            raise InputError(f"{option}={value} must be at least {least}.")


def _used(config: DataConfig, columns: Columns) -> list[str]:
    """Returns the columns of the files that are read, each once."""
    single = [name for name in (config.label, config.split_column, config.group_by) if name]
    features = [feature.name for feature in columns.features if feature.time is None]
    times = [time.column for time in columns.times.values()]
    return list(dict.fromkeys([*single, *columns.plain_dense, *features, *times]))


def _counted(columns: Columns) -> Columns:
    """Returns the columns with values hashed so widely that two hardly ever hash alike; times as they are."""
    wide = [feature if feature.time else replace(feature, rows=COUNTED, id_mode="hash") for feature in columns.features]
    return replace(columns, features=tuple(wide))


def _with_rows(columns: Columns, vocabularies: Mapping[str, Vocabulary]) -> Columns:
    """Returns the columns with tables of the sizes of their vocabularies."""

    def resized(feature: Feature) -> Feature:
        own = vocabularies.get(feature.table)
        return feature if own is None or feature.time else replace(feature, rows=own.num_rows)

    return replace(columns, features=tuple(map(resized, columns.features)))


def _count(
    source: _Source, columns: Columns, tables: Sequence[TableSpec], options: PrepareOptions
) -> dict[str, Vocabulary]:
    """Counts the values of the training rows, and gives them rows."""
    counted = [replace(table, num_embeddings=COUNTED) for table in tables]
    profile = AccessProfile(counted, most_rows=options.most_values)
    for part, rows in source.rows(columns, None):
        if part == "train":
            ids = {name: bags.values for name, bags in rows.bags.items()}
            profile.add(ids, num_samples=len(rows.labels))
    vocabularies = {}
    for feature in columns.features:
        if feature.time is not None or feature.table in vocabularies:
            continue
        table = next(table for table in tables if feature.name in table.feature_names)
        counts = profile[table.name]
        vocabularies[feature.table] = Vocabulary.of(counts, min_count=options.min_count, most_rows=table.num_embeddings)
        if counts.missed:
            logger.warning(
                "%s has more values than most_values=%d: their counts are too low by up to %d.",
                *(table.name, options.most_values, counts.missed),
            )
    return vocabularies


def _ids(rows: TypedRows, columns: Columns, vocabularies: Mapping[str, Vocabulary]) -> dict[str, Bags]:
    ids = {}
    for feature in columns.features:
        bags, own = rows.bags[feature.name], vocabularies.get(feature.table)
        ids[feature.name] = bags if own is None or feature.time else replace(bags, values=own.rows_of(bags.values))
    return ids


def _schema(config: DataConfig, columns: Columns) -> pa.Schema:
    fields = [] if config.label is None else [pa.field(config.label, pa.int8())]
    fields += [pa.field(name, pa.float32()) for name in columns.dense]
    for feature in columns.features:
        type_ = pa.int64() if feature.rows > 2**31 else pa.int32()
        fields.append(pa.field(feature.name, pa.large_list(type_) if feature.is_bag else type_))
    return pa.schema([*fields, *([pa.field(REQUEST, pa.int64())] if config.group_by else [])])


def _table(rows: TypedRows, ids: Mapping[str, Bags], schema: pa.Schema, columns: Columns) -> pa.Table:
    values: dict[str, pa.Array] = {name: pa.array(rows.dense[:, i]) for i, name in enumerate(columns.dense)}
    for feature in columns.features:
        bags, type_ = ids[feature.name], schema.field(feature.name).type
        numbers = pa.array(bags.values.astype(np.int32) if feature.rows <= 2**31 else bags.values)
        values[feature.name] = numbers if bags.offsets is None else pa.LargeListArray.from_arrays(bags.offsets, numbers)
        assert values[feature.name].type == type_, f"{feature.name}: {values[feature.name].type}, expected {type_}"
    if rows.requests is not None:
        values[REQUEST] = pa.array(rows.requests)
    for name in schema.names:
        if name not in values:
            values[name] = pa.array(rows.labels.astype(np.int8))
    return pa.table([values[name] for name in schema.names], schema=schema)


def _manifest(
    source: _Source,
    columns: Columns,
    tables: Sequence[TableSpec],
    profile: AccessProfile,
    vocabularies: Mapping[str, Vocabulary],
) -> dict[str, Any]:
    from dmt.training.records import versions

    config, options = source.config, source.options
    return {
        "format": FORMAT,
        "made_by": versions(),
        "sources": [[file, *file_version(file)] for files in source.files.values() for file in files],
        "data": {
            "id_mode": "index",
            "label": config.label,
            "dense": list(columns.dense),
            "dense_transform": "none",
            "categorical": [feature.name for feature in columns.features],
            "num_embeddings_per_feature": {feature.name: feature.rows for feature in columns.features},
            "shared_tables": {name: list(features) for name, features in config.shared_tables.items()},
            "group_by": REQUEST if config.group_by else None,
        },
        "features": {feature.name: asdict(feature) for feature in columns.features},
        "tables": {
            table.name: {
                "features": list(table.feature_names),
                "rows": table.num_embeddings,
                "rows_read": len(profile[table.name].rows),
                "accesses": profile[table.name].total,
            }
            for table in tables
        },
        "hash_key": HASH_KEY,
        "access_counts": _PROFILE,
        "ids": options.ids,
        "min_count": options.min_count,
        "row_group_rows": options.group_rows,
        "vocabulary": VOCABULARY if vocabularies else None,
        # With ids by frequency, raw rows need the vocabulary: they are prepared with it.
        "raw": None
        if vocabularies
        else explicit_config(config, source.columns).model_dump(mode="json", exclude_defaults=True),
    }


def _seal(folder: Path, record: dict[str, Any]) -> None:
    """Writes the manifest, which makes the folder whole, when all else is on the disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _LOCK)
    for path in files:
        fsync_path(path)
    record["files"] = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    (folder / MANIFEST).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    fsync_path(folder / MANIFEST)


_LOCK = ".lock"


@contextmanager
def _work_folder(out: Path) -> Iterator[Path]:
    """Yields a folder beside ``out`` that becomes it at the end; what an error or a kill leaves is removed."""
    work = out.with_name(f".{out.name}.{uuid.uuid4().hex}.work")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for left in out.parent.glob(f".{out.name}.*.work"):
            with suppress(OSError), (left / _LOCK).open("rb") as lock:  # whoever works there holds it
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
        # Under its name only once it is held: another start takes what nobody holds for left over.
        new = work.with_suffix(".new")
        new.mkdir()
        with (new / _LOCK).open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            new.rename(work)
            yield work
            (work / _LOCK).unlink()
            work.rename(out)
            fsync_path(out.parent)
    except (OSError, duckdb.IOException) as error:
        raise InputError(
            f"--out {str(out)!r} cannot be written: {getattr(error, 'strerror', None) or error}."
        ) from error
    except duckdb.OutOfMemoryException as error:
        raise InputError(f"DuckDB needs more memory than --memory-gib allows ({error}). Give it more.") from error
    except duckdb.Error as error:  # such as a type of Arrow that it does not know
        raise InputError(f"DuckDB cannot read the data: {error}".partition("\n")[0]) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
