"""`prepare`: raw rows to a folder of Parquet with ids in the place of values; what ``dmt prepare`` does.

With ``data.id_mode = "frequency"`` a first pass over the training rows counts their values, and ids follow their
frequency: 0 is a value that is missing, 1 any that is rare or unknown (`dmt.training.data.hash.Vocabulary`).
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import json
import logging
import os
import shutil
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.files import fsync_path
from dmt.formatting import shorten
from dmt.hot_rows.profile import AccessProfile, RowCounts
from dmt.plan.tables import TableSpec
from dmt.training.access import save_profile
from dmt.training.data.columns import Columns, explicit_config, find_columns, tables_of
from dmt.training.data.config import OF_READING, DataConfig
from dmt.training.data.files import (
    FORMAT,
    MANIFEST,
    REQUEST,
    Manifest,
    expand_path,
    file_version,
    read_manifest,
    starts_of,
)
from dmt.training.data.hash import Vocabulary
from dmt.training.data.raw import SPLIT, Converter, Reject, raw_blocks, schema_of, used_columns

__all__ = ["PrepareOptions", "prepare", "prepare_once", "prepared_schema", "prepared_table"]

logger = logging.getLogger(__name__)

Part = Literal["train", "eval"]
_PARTS: tuple[Part, ...] = ("train", "eval")
_GROUPS_OF_FILE = 64
_PROFILE, _REJECTS, _VOCABULARY, _LOCK = "access.parquet", "rejects.csv", "vocabulary.parquet", ".lock"
_MILLIONTHS = 1_000_000
_FEW = 0.2  # a table this full or less has rows that nothing reads


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """The choices of ``dmt prepare``."""

    min_count: int = 1
    """Accesses in the training rows from which a value has an id of its own (by frequency)."""
    group_rows: int = 32_768
    """Rows of a row group."""
    max_rejects: int = 0
    """Rows that may be left out because a value does not fit; one more ends the work with an error."""
    memory_gib: float = 2.0
    """Memory that DuckDB may use; what waits to be written comes on top."""
    threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    """Threads of DuckDB."""
    eval_only: bool = False
    """All rows of ``train_path`` are evaluation rows, in their order."""


def prepare_once(config: DataConfig, cache: Path | None, *, eval_only: bool = False) -> Path:
    """Returns the folder in ``cache`` that has the rows of a config's files, which is prepared if it is not there yet.

    Ranks of one host wait for one another.

    Args:
        config: with files of raw rows.
        cache: a folder beside the output of the command.
        eval_only: all rows of ``train_path`` are to be evaluated, in their order, each of them.

    Raises:
        InputError: see `prepare`; or there is no ``cache``.
    """
    files = [file for of_setting in _files(config).values() for file in of_setting]
    if cache is None:
        raise InputError(f"{files[0]} has to be prepared. Run `dmt prepare`, and name its folder as data.prepared.")
    settings = config.model_dump(mode="json", exclude={*OF_READING, "synthetic"})
    told: list[Any] = [FORMAT, eval_only, settings, [(file, *file_version(file)) for file in files]]
    folder = cache / hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / _LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / MANIFEST).exists():
            logger.warning("Preparing %s, once, into %s (`dmt prepare` does so by itself).", files[0], folder)
            try:
                prepare(config, folder, PrepareOptions(eval_only=eval_only))
            except InputError:
                (cache / _LOCK).unlink(missing_ok=True)
                with suppress(OSError):  # of a cache with other rows
                    cache.rmdir()
                raise
    return folder


def prepare(
    config: DataConfig,
    out: Path,
    options: PrepareOptions,
    *,
    embedding_dim: int = 4,
    embedding_dims: Mapping[str, int] | None = None,
    on_share: Callable[[str, float], object] = lambda phase, share: None,
) -> Manifest:
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
    files = _files(config)
    first = files["train_path"][0]
    columns = find_columns(config, schema_of(first, config), first)
    dims: dict[str, Any] = {"embedding_dim": embedding_dim, "embedding_dims": embedding_dims or {}}
    source = _Source(config, columns, files, options)
    with _work_folder(out) as folder, closing(source.converter):
        vocabularies: dict[str, Vocabulary] = {}
        raw = explicit_config(config, columns)
        if config.id_mode == "frequency":
            if config.vocabulary:
                vocabularies = _load_vocabularies(config, columns)
            else:
                vocabularies = _count(source, folder / "counts.duckdb", lambda share: on_share("count", share))
            raw = raw.model_copy(update={"vocabulary": _save_vocabularies(vocabularies, folder, out)})
            sized = [replace(f, rows=v.num_rows) if (v := vocabularies.get(f.table)) else f for f in columns.features]
            columns = replace(columns, features=tuple(sized))
        tables = tables_of(columns, **dims)
        rejects, summary = _Rejects(folder / _REJECTS, options.max_rejects), _Summary(columns, source.converter)
        schema = prepared_schema(config, columns)
        writers = {part: _Writer(folder / part, schema, options.group_rows) for part in _PARTS}
        for part, rows in source.rows(rejects, lambda share: on_share("write", share)):
            table = prepared_table(rows, schema, columns, vocabularies)
            if part == "train":
                summary.add(rows, table)
            writers[part].add(table)
        for writer in writers.values():
            writer.close()
        profile = summary.profile(tables)
        save_profile(profile, folder / _PROFILE)
        manifest = Manifest(
            format=FORMAT,
            files={},
            dense=columns.dense,
            features=columns.features,
            label=config.label,
            raw=raw.model_dump(mode="json", exclude_defaults=True),
            sources=tuple((file, *file_version(file)) for names in files.values() for file in names),
            access_counts=_PROFILE,
            vocabulary=_VOCABULARY if vocabularies else None,
            rows={part: writer.num_rows for part, writer in writers.items()},
            rejects=rejects.number,
            summary=summary.record(tables, vocabularies, is_exact=config.id_mode != "hash"),
            made_by=_versions(),
        )
        return _seal(folder, manifest)


def _files(config: DataConfig) -> dict[str, list[str]]:
    paths = {"train_path": config.train_path} | ({"eval_path": config.eval_path} if config.eval_path else {})
    named = config.kind != "criteo_tsv"
    return {setting: expand_path(setting, path or "", columns=named) for setting, path in paths.items()}


def _check(config: DataConfig, out: Path, options: PrepareOptions) -> None:
    if out.exists() or out.is_symlink():
        raise InputError(f"--out {str(out)!r} exists, and nothing is overwritten. Name a new folder, or remove it.")
    if config.kind not in ("criteo_tsv", "columns"):
        raise InputError(f"data.kind={config.kind!r} has no raw files. Name some with data.train_path and data.kind.")
    if config.label is None and not options.eval_only:
        raise InputError("data.label is not set, and rows without labels cannot be prepared. Name their column.")
    if config.id_mode != "frequency" and options.min_count > 1:
        raise InputError("--min-count needs ids by frequency. Give --ids frequency, or leave it out.")
    if config.id_mode == "frequency" and options.eval_only and not config.vocabulary:
        raise InputError("Ids by frequency need the folder whose vocabulary is to be used. Name it: data.vocabulary.")
    least = {"min_count": 1, "group_rows": 1, "max_rejects": 0, "memory_gib": 0.25}
    for name, bound in least.items():
        if (value := getattr(options, name)) < bound:
            option = "row_group_rows" if name == "group_rows" else name
            raise InputError(f"--{option.replace('_', '-')}={value} must be at least {bound}.")


@dataclass(frozen=True)
class _Source:
    """The files of a run, and how their rows are divided into parts."""

    config: DataConfig
    columns: Columns
    files: Mapping[str, Sequence[str]]
    """Files of ``train_path`` and of ``eval_path``."""
    options: PrepareOptions
    converter: Converter = field(init=False)

    def __post_init__(self) -> None:
        options = self.options
        made = Converter(self.config, self.columns, memory_gib=options.memory_gib, threads=options.threads)
        object.__setattr__(self, "converter", made)

    def rows(self, rejects: _Rejects | None, on_share: Callable[[float], object]) -> Iterator[tuple[Part, pa.Table]]:
        """Yields the rows of both parts, in the order of the files; without ``rejects`` they are not looked at."""
        used = used_columns(self.config, self.columns)
        files = [(setting, file) for setting, of_setting in self.files.items() for file in of_setting]
        start = 0
        for number, (setting, file) in enumerate(files):
            schema = schema_of(file, self.config)
            if absent := [name for name in used if name not in schema.names]:
                raise InputError(
                    f"{file}: column {absent[0]!r} is missing; all files must have the columns of the first."
                )
            find_columns(self.config, schema, file)
            for block in raw_blocks(file, self.config, used):
                rows, wrong = self.converter.convert(block)
                if rejects is not None:
                    rejects.add(wrong)
                for part in _PARTS:
                    chosen = self._is_of(part, setting, rows, start)
                    if chosen.any():
                        yield part, rows.filter(pa.array(chosen))
                start += rows.num_rows
                on_share((number + block.share) / len(files))

    def _is_of(self, part: Part, setting: str, rows: pa.Table, start: int) -> NDArray[np.bool_]:
        """Tells which rows, number ``start`` and on, are of a part [n]."""
        config, number = self.config, rows.num_rows
        if self.options.eval_only or config.eval_path:
            own = "eval" if setting == "eval_path" or self.options.eval_only else "train"
            return np.full(number, part == own)
        if config.split_column:
            value = config.train_split if part == "train" else config.eval_split
            return np.asarray(pc.fill_null(pc.equal(rows.column(SPLIT), value), False))
        share = round(config.eval_fraction * _MILLIONTHS)  # whole numbers: exact at any row number
        if config.group_by:
            apart = rows.column(REQUEST).to_numpy() % _MILLIONTHS < share
        else:
            numbers = np.arange(start, start + number)
            apart = (numbers + 1) * share // _MILLIONTHS > numbers * share // _MILLIONTHS
        return apart == (part == "eval")


class _Rejects:
    """Rows that were left out, in a file."""

    def __init__(self, path: Path, most: int) -> None:
        self._path, self._most, self.number = path, most, 0

    def add(self, rejects: Sequence[Reject]) -> None:
        self.number += len(rejects)
        if self.number > self._most:
            first = rejects[0]
            column = f"column {first.column!r}: " if first.column else ""
            raise InputError(
                f"{first.source}, line {first.line}: {column}{first.reason}. The line: {first.text[:200]!r}. Correct "
                f"it, or leave out and list up to N such rows with --max-rejects N ({self.number:,} or more here)."
            )
        if rejects:
            is_new = not self._path.exists()
            with self._path.open("a", newline="", encoding="utf-8", errors="replace") as stream:
                csv.writer(stream).writerows([Reject._fields, *rejects] if is_new else rejects)


class _Writer:
    """Writes the rows of a part in row groups of one size, in files of 64 of them."""

    def __init__(self, folder: Path, schema: pa.Schema, group_rows: int) -> None:
        folder.mkdir()
        self.schema, self.num_rows = schema, 0
        self._folder, self._group_rows, self._groups, self._file = folder, group_rows, 0, ExitStack()
        self._waiting = schema.empty_table()

    def add(self, table: pa.Table) -> None:
        self.num_rows += table.num_rows
        self._waiting = pa.concat_tables([self._waiting, table])
        while self._waiting.num_rows >= self._group_rows:
            self._write(self._waiting.slice(0, self._group_rows))
            self._waiting = self._waiting.slice(self._group_rows)

    def close(self) -> None:
        """Writes the rest; a part without rows is a file without rows."""
        if self._waiting.num_rows or not self._groups:
            self._write(self._waiting)
        self._file.close()

    def _write(self, group: pa.Table) -> None:
        if REQUEST in group.schema.names:  # the rows of a request stand together, in the order of their first ones
            _, first, number = np.unique(group.column(REQUEST).to_numpy(), return_index=True, return_inverse=True)
            group = group.take(pa.array(np.argsort(first[number], kind="stable")))
        if self._groups % _GROUPS_OF_FILE == 0:
            self._file.close()
            path = self._folder / f"part-{self._groups // _GROUPS_OF_FILE:05d}.parquet"
            self._writer = self._file.enter_context(pq.ParquetWriter(path, self.schema))
        self._writer.write_table(group, row_group_size=self._group_rows)
        self._groups += 1


def prepared_schema(config: DataConfig, columns: Columns) -> pa.Schema:
    """Returns the columns of a prepared folder."""
    request = [pa.field(REQUEST, pa.int64())] if config.group_by else []
    return pa.schema([*columns.schema, *request])


def prepared_table(
    rows: pa.Table, schema: pa.Schema, columns: Columns, vocabularies: Mapping[str, Vocabulary]
) -> pa.Table:
    """Returns rows of a `Converter` as rows of a prepared folder."""
    tables = {feature.name: feature.table for feature in columns.features if feature.time is None}
    found = []
    for kind in schema:
        column = rows.column(kind.name).combine_chunks()
        if pa.types.is_floating(kind.type):
            column = pa.array(np.nan_to_num(column.to_numpy(), nan=0.0))
        elif (words := vocabularies.get(tables.get(kind.name, ""))) is not None:
            is_bag = pa.types.is_large_list(kind.type)
            ids = words.rows_of((column.flatten() if is_bag else column).to_numpy())
            column = pa.LargeListArray.from_arrays(starts_of(column), ids) if is_bag else pa.array(ids)
        found.append(column.cast(kind.type))
    return pa.table(found, schema=schema)


def _count(source: _Source, file: Path, on_share: Callable[[float], object]) -> dict[str, Vocabulary]:
    """Counts the values of the training rows in a file of DuckDB, in bounded memory, and gives them rows."""
    features = [feature for feature in source.columns.features if feature.time is None]
    vocabularies: dict[str, Vocabulary] = {}
    with duckdb.connect(file, config={"memory_limit": f"{source.options.memory_gib * 1024:.0f}MiB"}) as counts:
        counts.sql("CREATE TABLE counts (name VARCHAR, value BIGINT, n BIGINT)")
        for part, rows in source.rows(None, on_share):
            for feature in features if part == "train" else ():
                values, n = np.unique(_flat(rows, feature.name), return_counts=True)
                counts.register("block", pa.table({"name": pa.repeat(feature.table, len(n)), "value": values, "n": n}))
                counts.sql("INSERT INTO counts SELECT * FROM block")
        for feature in features:
            # Equally frequent ones in the order of their hashes, which is the same everywhere.
            chosen = "SELECT value FROM counts WHERE name = ? AND value <> 0 GROUP BY value"
            ordered = f"{chosen} HAVING sum(n) >= ? ORDER BY sum(n) DESC, value LIMIT ?"
            names = [feature.table, source.options.min_count, max(feature.rows - 2, 0)]
            values = counts.sql(ordered, params=names).to_arrow_table()["value"].to_numpy()
            vocabularies[feature.table] = Vocabulary.of(values)
    file.unlink()
    return vocabularies


def _save_vocabularies(vocabularies: Mapping[str, Vocabulary], folder: Path, out: Path) -> str:
    """Writes vocabularies by the names of their tables, without the ``t_``; returns what names them."""
    schema = pa.schema([("table", pa.string()), ("value_hash", pa.int64()), ("row", pa.int64())])
    with pq.ParquetWriter(folder / _VOCABULARY, schema) as writer:
        for name, words in vocabularies.items():
            columns = [pa.repeat(name, len(words.keys)), pa.array(words.keys), pa.array(words.rows)]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
    return f"{out.absolute()}#{_checksum(vocabularies):08x}"


def _checksum(vocabularies: Mapping[str, Vocabulary]) -> int:
    checksum = 0
    for name in sorted(vocabularies):
        for part in (name.encode(), vocabularies[name].keys.tobytes(), vocabularies[name].rows.tobytes()):
            checksum = zlib.crc32(part, checksum)
    return checksum


def _load_vocabularies(config: DataConfig, columns: Columns) -> dict[str, Vocabulary]:
    """Reads the vocabularies of the prepared folder that a config names, which must be of the same tables.

    Raises:
        InputError: the folder has no vocabulary or another one, is damaged, or has other features.
    """
    name, _, checksum = str(config.vocabulary).partition("#")
    place, folder = f"data.vocabulary={name!r}", Path(name)
    manifest = read_manifest(folder, place)
    if manifest.vocabulary is None:
        raise InputError(f"{place} was prepared without ids by frequency, and has no vocabulary. Prepare it with them.")
    tables = {feature.name: feature.table for feature in columns.features}
    if {feature.name: feature.table for feature in manifest.features} != tables:
        raise InputError(f"{place} has other tables or features than these data. Give the same columns and tables.")
    try:
        table = pq.read_table(folder / manifest.vocabulary)
        vocabularies = {}
        for name in dict.fromkeys(feature.table for feature in columns.features if feature.time is None):
            words = table.filter(pc.equal(table["table"], name))
            vocabularies[name] = Vocabulary(words["value_hash"].to_numpy(), words["row"].to_numpy())
    except (OSError, KeyError, pa.ArrowException) as error:
        raise InputError(f"{place}: its vocabulary cannot be read ({error}). Prepare it again.") from error
    if checksum and int(checksum, 16) != _checksum(vocabularies):
        raise InputError(f"{place} has another vocabulary than the model was trained with. Give that folder back.")
    return vocabularies


class _Summary:
    """What ``dmt prepare`` says about the columns of the training rows."""

    def __init__(self, columns: Columns, converter: Converter) -> None:
        self._columns, self._converter, self._rows = columns, converter, 0
        self._missing = Counter[str]()
        by_feature = [
            TableSpec(name=f.name, num_embeddings=f.rows, embedding_dim=4, feature_names=(f.name,))
            for f in columns.features
        ]
        self._counts = AccessProfile(by_feature)

    def add(self, rows: pa.Table, table: pa.Table) -> None:
        """Counts rows of a `Converter` and their ids: missing are NaN in dense columns, row 0, and empty bags."""
        self._rows += rows.num_rows
        for name in self._columns.dense:
            self._missing[name] += int(np.isnan(rows.column(name).to_numpy()).sum())
        ids = {feature.name: _flat(table, feature.name) for feature in self._columns.features}
        self._counts.add(ids, num_samples=rows.num_rows)
        for feature in self._columns.features:
            lengths = (
                pc.list_value_length(table.column(feature.name)).to_numpy() if feature.is_bag else ids[feature.name]
            )
            self._missing[feature.name] += int((lengths == 0).sum())

    def profile(self, tables: Sequence[TableSpec]) -> AccessProfile:
        """Returns the access counts of tables."""
        profile = AccessProfile(tables)
        profile.num_samples = self._rows
        for table in tables:
            for name in table.feature_names:
                profile.put(table.name, self._counts[name])
        return profile

    def record(
        self, tables: Sequence[TableSpec], vocabularies: Mapping[str, Vocabulary], *, is_exact: bool
    ) -> dict[str, Any]:
        """Returns the summary as plain data; distinct values of hashed features are estimated from the rows in use."""
        features, notes = dict[str, Any](), list[str]()
        for feature in self._columns.features:
            counts, exact = self._counts[feature.name], is_exact or feature.time is not None
            names = self._converter.names[feature.name]
            if words := vocabularies.get(feature.table):
                names = dict(zip(words.rows_of(np.array([*names], np.int64)).tolist(), names.values(), strict=True))
                counts = replace(counts, rows=np.where(counts.rows == 1, 0, counts.rows))  # rare ones are none
            distinct = _distinct(counts, feature.rows, exact=exact)
            suggested = None if distinct is None else distinct + 2 if exact else max(2, 10 * distinct)
            known = np.where(counts.rows == 0, 0, counts.counts)  # a missing value is none
            top = int(known.argmax()) if known.any() else None
            row = None if top is None else int(counts.rows[top])
            features[feature.name] = {
                "missing": self._missing[feature.name],
                "distinct": distinct,
                "negative": self._converter.negative[feature.name],
                "rows": feature.rows,
                "most_frequent": None if row is None else names.get(row, f"row {row}"),
                "its_share": 0.0 if top is None else round(float(known[top] / max(counts.total, 1)), 6),
                "suggested_rows": suggested,
            }
            if distinct is None:
                notes.append(f"{feature.name}: its table of {feature.rows:,} rows is full. Give it more.")
            elif distinct and suggested is not None and suggested < _FEW * feature.rows:
                notes.append(
                    f"{feature.name}: {distinct:,} distinct values in a table of {feature.rows:,} rows. "
                    f"num_embeddings_per_feature.{feature.name} = {suggested} is enough."
                )
            if number := self._converter.negative[feature.name]:
                notes.append(f"{feature.name}: {number:,} values below 0 have ids of their own. Are they missing ones?")
        dense = {name: {"missing": self._missing[name]} for name in self._columns.dense}
        for name, column in {**dense, **features}.items():
            if self._rows and column["missing"] == self._rows:
                notes.insert(0, f"{name}: all {self._rows:,} values are missing. Leave the column out.")
        notes += [note for table in tables for note in self._apart(table)]
        return {"rows": self._rows, "dense": dense, "features": features, "notes": notes}

    def _apart(self, table: TableSpec) -> Iterator[str]:
        """Yields features of a shared table that have no value in common with another."""
        rows = {name: np.setdiff1d(self._counts[name].rows, [0, 1]) for name in table.feature_names}
        for name, own in rows.items():
            others = [other for each, other in rows.items() if each != name]
            if others and len(own) and not any(len(np.intersect1d(own, other)) for other in others):
                yield f"{name}: shares {table.name} with {shorten([n for n in rows if n != name], ', ')}, but no value."


def _flat(table: pa.Table, name: str) -> NDArray[np.int64]:
    """Returns the ids of a column, also of one of bags."""
    column = table.column(name).combine_chunks()
    return np.asarray(column.flatten() if pa.types.is_large_list(column.type) else column)


def _distinct(counts: RowCounts, rows: int, *, exact: bool) -> int | None:
    """Returns the values behind the ids of a feature: exactly, or an estimate; None where too few rows are unused.

    Linear counting (Whang et al., TODS 1990): of m rows, n values leave m exp(-n / m) unused.
    """
    used = int((counts.rows != 0).sum())
    if exact:
        return used
    rows -= 1  # row 0 is for missing values
    return None if used >= 0.99 * rows else round(-rows * np.log1p(-used / rows))


def _versions() -> dict[str, str]:
    from dmt.training.records import versions

    return versions()


def _seal(folder: Path, manifest: Manifest) -> Manifest:
    """Writes the manifest, which makes the folder whole, when all else is on the disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _LOCK)
    found = {}
    for path in files:
        fsync_path(path)
        with path.open("rb") as stream:
            checksum = 0
            while block := stream.read(1 << 20):
                checksum = zlib.crc32(block, checksum)
        found[str(path.relative_to(folder))] = (path.stat().st_size, checksum)
    manifest = replace(manifest, files=found)
    (folder / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1) + "\n", encoding="utf-8")
    fsync_path(folder / MANIFEST)
    return manifest


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
    finally:
        shutil.rmtree(work, ignore_errors=True)
