"""`prepare` turns raw rows into a folder of Parquet files with ids in place of values, as ``dmt prepare`` does.

With ``data.id_mode = "frequency"`` it first writes rows with hashes of their values, and counts the hashes unless there
is a ``data.vocabulary``. Then it writes rows with ids: 0 for a missing value, 1 for a rare or unknown value, others by
frequency (`dmt.training.data.hash.Vocabulary`).
"""

from __future__ import annotations

import csv
import fcntl
import fnmatch
import glob
import hashlib
import json
import logging
import math
import os
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.files import check_output, fsync_path
from dmt.formatting import shorten
from dmt.hot_rows.profile import AccessProfile, RowCounts
from dmt.plan.tables import TableSpec
from dmt.training.access import save_profile
from dmt.training.console import progress_bar
from dmt.training.data.columns import Columns, Feature, explicit_config, find_columns, tables_of
from dmt.training.data.config import OF_READING, DataConfig
from dmt.training.data.files import (
    FORMAT,
    MANIFEST,
    REQUEST,
    Manifest,
    expand_path,
    file_version,
    format_of,
    prepared_schema,
    read_manifest,
    starts_of,
)
from dmt.training.data.hash import COUNTED, Vocabulary
from dmt.training.data.raw import SPLIT, Converter, Reject, connect, literal, raw_blocks, schema_of, used_columns
from dmt.training.records import versions

__all__ = ["prepare", "prepare_once", "size_and_crc"]

logger = logging.getLogger(__name__)

_PARTS = ("train", "eval")
_FILE, _SCRATCH = "part-00000.parquet", "scratch"
_PROFILE, _REJECTS, _VOCABULARY, _LOCK = "access.parquet", "rejects.csv", "vocabulary.parquet", ".lock"
_WORDS = pa.schema([("table", pa.string()), ("value_hash", pa.int64()), ("row", pa.int64())])
_MILLIONTHS, _MOST_QUERIES = 1_000_000, 64
# Advice on an invalid row. Other commands prepare rows, too, but only `dmt prepare` has --max-rejects.
_SCORING = "Correct the row: every row needs a prediction. If labels are unknown, leave out their column."
_TRAINING = "Correct the row, or drop such rows with `dmt prepare --max-rejects N` and set data.prepared to its --out."
_FEW = 0.2  # share of used rows below which a note suggests a smaller table


def prepare_once(config: DataConfig, cache: Path | None, *, eval_only: bool = False) -> Path:
    """Returns the prepared folder of a config's raw files in ``cache``, and prepares it first if it does not exist.

    The ranks of a host take turns, by a file lock: the first prepares the folder, the others find it, or its error.

    Args:
        config: section ``data`` of the run's configuration, with raw files.
        cache: folder of prepared folders, each named by a hash of the settings and the versions of the files.
        eval_only: use all rows for evaluation, in file order unless there is a ``group_by``.

    Raises:
        InputError: see `prepare`; or ``cache`` is None or cannot be written or locked.
    """
    files = [file for paths in _files(config).values() for file in paths]
    if cache is None:
        raise InputError(f"{files[0]} must be prepared first. Run `dmt prepare` and set data.prepared to its --out.")
    if config.vocabulary and (manifest := Path(config.vocabulary, MANIFEST)).is_file():
        files.append(str(manifest))
    settings = config.model_dump(mode="json", exclude={*OF_READING, "synthetic"})
    inputs: list[Any] = [FORMAT, eval_only, settings, [(file, *file_version(file)) for file in files]]
    folder = cache / hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:12]
    if (folder / MANIFEST).exists():  # perhaps where nothing can be written
        return folder
    check_output("Prepared rows, in the run's folder or by `dmt score --data` beside --out,", cache, is_folder=True)
    with (cache / f".{folder.name}{_LOCK}").open("a+", encoding="utf-8") as lock:
        before = os.fstat(lock.fileno()).st_mtime_ns
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            reason = f"cannot be locked ({error.strerror})"
            remedy = "Write the output to a file system that supports locks."
            raise InputError(f"Folder for prepared rows {str(cache)!r} {reason}. {remedy}") from error
        if (folder / MANIFEST).exists():
            return folder
        lock.seek(0)
        # Reading all rows again, in each rank, would only delay the error that another rank had meanwhile.
        if (text := lock.read()) and os.fstat(lock.fileno()).st_mtime_ns != before:
            raise InputError(text)
        logger.warning("Preparing %s into %s; later runs on the same data reuse it.", files[0], folder)
        for path in cache.glob(f".*{_LOCK}"):  # also those of killed processes, which left work folders
            with suppress(OSError), path.open("ab") as other:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.with_suffix(".work"), ignore_errors=True)
        try:
            prepare(config, folder, eval_only=eval_only)
        except InputError as error:
            with suppress(OSError):  # the disk may be full
                os.truncate(lock.fileno(), 0)
                os.write(lock.fileno(), str(error).encode())
            raise
    return folder


def prepare(
    config: DataConfig,
    out: Path,
    *,
    min_count: int = 1,
    group_rows: int = 32_768,
    max_rejects: int = 0,
    memory_gib: float = 2.0,
    eval_only: bool = False,
    dims: Mapping[str, Any] | None = None,
) -> Manifest:
    """Prepares the raw rows of a run: writes the folder ``out``, and returns its manifest.

    Args:
        config: section ``data`` of the run's configuration.
        out: folder to write, which must not exist; it appears when it is complete.
        min_count: with ids by frequency, values with fewer occurrences in the training rows share row 1.
        group_rows: number of rows in each row group of a Parquet file except its last.
        max_rejects: number of invalid rows that may be left out; one more raises an error.
        memory_gib: memory limit of DuckDB in GiB; the process also holds a few blocks of rows.
        eval_only: use all rows for evaluation, in file order unless there is a ``group_by``.
        dims: embedding dims for the access counts, as keyword arguments of `tables_of`; by default 4 for every table.

    Raises:
        InputError: the folder exists or cannot be written, the data cannot be read or do not fit ``config``, more than
            ``max_rejects`` rows are invalid, or options contradict each other.
    """
    _check(config, out, eval_only=eval_only, min_count=min_count)
    files = _files(config)
    first = files["train_path"][0]
    columns = find_columns(config, schema_of(first, config), first)
    raw, dims = explicit_config(config, columns), dims or {"embedding_dim": 4, "embedding_dims": {}}
    tables_of(columns, **dims)  # raises errors before the long work
    connection = connect(memory_gib=memory_gib, threads=os.cpu_count() or 1)
    with _work_folder(out) as folder, closing(connection):
        connection.sql(f"SET temp_directory = {literal(str(folder / _SCRATCH / 'spilled'))}")
        rejects = _Rejects(folder / _REJECTS, max_rejects, _SCORING if eval_only else _TRAINING)
        words, notes, missing = folder / _VOCABULARY, list[str](), Counter[str]()
        converted = columns
        if config.id_mode == "frequency":
            hashed = [feature if feature.time else replace(feature, rows=COUNTED) for feature in columns.features]
            converted = replace(columns, features=tuple(hashed))
        converter = Converter(config, converted, connection)
        parts = {"eval_path": [file for names in files.values() for file in names]} if eval_only else files
        schema, rows = converter.schema, _raw_rows(converter, parts, rejects, notes, missing)
        if config.id_mode == "frequency":
            _write(folder / _SCRATCH, schema, group_rows, rows)
            if config.vocabulary:
                _copy_vocabulary(config, columns, words)
            else:
                _count(_View(connection, schema, folder / _SCRATCH / "train" / _FILE), columns, min_count, words)
            vocabularies = _read_vocabularies(words, columns)
            raw = raw.model_copy(update={"vocabulary": f"{out.absolute()}#{size_and_crc(words)[1]:08x}"})
            sized = [replace(f, rows=v.num_rows) if (v := vocabularies.get(f.table)) else f for f in columns.features]
            columns = replace(columns, features=tuple(sized))
            schema = prepared_schema(config, columns)
            rows = _numbered_rows(folder / _SCRATCH, columns, schema, vocabularies)
        num_rows = _write(folder, schema, group_rows, rows)
        view = _View(connection, schema, folder / "train" / _FILE)
        profile, summary = _summary(view, config, columns, tables_of(columns, **dims), missing)
        if both := sorted(set(files["train_path"]).intersection(files.get("eval_path", ()))):
            notes.insert(0, f"Files of train_path also in eval_path inflate metrics: {shorten(both, ', ')}.")
        if config.split_column and not num_rows["eval"]:
            notes.insert(0, f"There are no evaluation rows: {config.split_column} is never 'test'.")
        summary["notes"][:0] = notes
        save_profile(profile, folder / _PROFILE)
        connection.close()
        shutil.rmtree(folder / _SCRATCH, ignore_errors=True)
        manifest = Manifest(
            format=FORMAT,
            files={},
            dense=columns.dense,
            features=columns.features,
            label=config.label,
            raw=raw.model_dump(mode="json", exclude_defaults=True),
            sources=tuple((file, *file_version(file)) for names in files.values() for file in names),
            access_counts=_PROFILE,
            vocabulary=_VOCABULARY if words.exists() else None,
            rows=num_rows,
            rejects=rejects.number,
            summary=summary,
            made_by=versions(),
        )
        return _seal(folder, manifest)


def _check(config: DataConfig, out: Path, *, eval_only: bool, min_count: int) -> None:
    if out.exists() or out.is_symlink():
        raise InputError(f"--out {str(out)!r} exists and is never overwritten. Name a new folder or remove this one.")
    if config.kind not in ("criteo_tsv", "columns"):
        raise InputError(f"data.kind={config.kind!r} has no raw files. Use 'criteo_tsv' or 'columns', with train_path.")
    if config.label is None and not eval_only:
        raise InputError("data.label is not set, but training rows need labels. Set it to the column of 0/1 labels.")
    if min_count > 1 and (config.id_mode != "frequency" or config.vocabulary):
        remedy = "Drop it, or set --ids frequency without --vocabulary."
        raise InputError(f"--min-count {min_count} needs ids by frequency, counted in these rows. {remedy}")
    if config.id_mode == "frequency" and eval_only and not config.vocabulary:
        raise InputError("data.id_mode='frequency' needs data.vocabulary. Set it to the prepared folder of training.")


def _files(config: DataConfig) -> dict[str, list[str]]:
    paths = {"train_path": config.train_path} | ({"eval_path": config.eval_path} if config.eval_path else {})
    return {key: expand_path(key, path or "", columns=config.kind != "criteo_tsv") for key, path in paths.items()}


def _raw_rows(
    converter: Converter, files: Mapping[str, Sequence[str]], rejects: _Rejects, notes: list[str], missing: Counter[str]
) -> Iterator[tuple[str, pa.Table, float]]:
    """Yields (part, rows, fraction of all files read so far) for each block and part, in the order of the files.

    Adds notes on unread columns to ``notes``, and to ``missing`` the missing values of training rows by dense column.
    """
    config, start = converter.config, 0
    used = used_columns(config, converter.columns)
    bags = {feature.name: feature.is_bag for feature in converter.columns.features}
    known = {*converter.columns.dense, *bags}
    in_order = [(setting, file) for setting, paths in files.items() for file in paths]

    # Each column once, and not by the log: a rank other than 0, which logs nothing, may be the one that reads.
    def note_unread(file: str, selected: set[str], first: str) -> None:
        if new := sorted(selected - known):
            known.update(new)
            notes.append(f"{file}: columns not in {first} are not read: {shorten(new, ', ')}.")

    for number, (setting, file) in enumerate(in_order):
        schema = schema_of(file, config)
        names = set(schema.names)  # once: pyarrow rebuilds the names on each access, seconds for thousands of columns
        if absent := [name for name in used if name not in names]:
            raise InputError(f"{file}: column {absent[0]!r} is missing. Give all files the columns of the first.")
        found = find_columns(config, schema, file)
        lists = {feature.name: feature.is_bag for feature in found.features}
        note_unread(file, {*found.dense, *lists}, in_order[0][1])
        if unlike := [name for name, is_bag in bags.items() if is_bag != lists[name]]:
            has, had = (("single values", "lists")[is_bag[unlike[0]]] for is_bag in (lists, bags))
            raise InputError(f"{file}: column {unlike[0]!r} has {has}, but {had} in {in_order[0][1]}. Use one form.")
        patterns = {*config.dense, *config.categorical, *config.timestamps}.difference(names)
        for block in raw_blocks(file, config, schema, used):
            rows, wrong = converter.convert(block)
            later = converter.keys(block).difference(names) if patterns else ()
            selected = {key for key in later if any(fnmatch.fnmatch(key, pattern) for pattern in patterns)}
            note_unread(file, selected, "its first 1,000 lines")
            rejects.add(wrong)
            for part in _PARTS:
                if "eval_path" in files:
                    is_chosen = np.full(rows.num_rows, (setting == "eval_path") == (part == "eval"))
                else:
                    is_chosen = _is_of(part, config, rows, start)
                if part == "train":
                    missing.update({name: int(is_na[is_chosen].sum()) for name, is_na in converter.is_missing.items()})
                chosen = rows.filter(pa.array(is_chosen)).select(converter.schema.names)
                yield part, chosen, (number + block.share) / len(in_order)
            start += rows.num_rows


def _is_of(part: str, config: DataConfig, rows: pa.Table, start: int) -> NDArray[np.bool_]:
    """Returns which of n rows belong to a part, bool [n]; the first row has number ``start``."""
    if config.split_column:
        value = "test" if part == "eval" else "train"
        return np.asarray(pc.fill_null(pc.equal(rows.column(SPLIT), value), False))
    share = round(config.eval_fraction * _MILLIONTHS)  # an integer, to be exact at any row number
    if config.group_by:
        apart = rows.column(REQUEST).to_numpy() % _MILLIONTHS < share
    else:
        numbers = np.arange(start, start + rows.num_rows)
        apart = (numbers + 1) * share // _MILLIONTHS > numbers * share // _MILLIONTHS
    return np.asarray(apart == (part == "eval"))


class _Rejects:
    """Counts invalid rows and writes them to a file. More than ``most`` raise an error that ends with ``remedy``."""

    def __init__(self, path: Path, most: int, remedy: str) -> None:
        self._path, self._most, self._remedy, self.number = path, most, remedy, 0

    def add(self, rejects: Sequence[Reject]) -> None:
        self.number += len(rejects)
        if self.number > self._most:
            first = rejects[0]
            column = f"column {first.column!r}: " if first.column else ""
            unit = "row" if format_of(first.source) == "parquet" else "line"
            raise InputError(
                f"{first.source}, {unit} {first.line}: {column}{first.reason}. The {unit}: {first.text[:200]!r}. "
                f"Invalid rows so far: {self.number:,}. {self._remedy}"
            )
        if rejects:
            is_new = not self._path.exists()
            with self._path.open("a", newline="", encoding="utf-8", errors="replace") as stream:
                csv.writer(stream).writerows([Reject._fields, *rejects] if is_new else rejects)


def _write(
    folder: Path, schema: pa.Schema, group_rows: int, rows: Iterable[tuple[str, pa.Table, float]]
) -> dict[str, int]:
    """Writes rows to the files of their parts, in groups of ``group_rows``; returns the number of rows by part."""
    num_rows, files = dict.fromkeys(_PARTS, 0), dict[str, pq.ParquetWriter]()
    waiting = dict.fromkeys(_PARTS, schema.empty_table())
    with ExitStack() as stack:
        for part in _PARTS:
            (path := folder / part / _FILE).parent.mkdir(parents=True)
            # Compressed files would be a tenth smaller, and reading slower by a quarter.
            writer = pq.ParquetWriter(path, schema, compression="none", write_page_checksum=True)
            files[part] = stack.enter_context(writer)
        bar = stack.enter_context(progress_bar(total=100, desc="prepare", unit="%"))
        for part, table, share in rows:
            num_rows[part] += table.num_rows
            waiting[part] = pa.concat_tables([waiting[part], table])
            while waiting[part].num_rows >= group_rows:
                files[part].write_table(_grouped(waiting[part].slice(0, group_rows)), row_group_size=group_rows)
                waiting[part] = waiting[part].slice(group_rows)
            bar.update(round(100 * share) - bar.n)
        for part, rest in waiting.items():
            if rest.num_rows:
                files[part].write_table(_grouped(rest), row_group_size=group_rows)
    return num_rows


def _grouped(rows: pa.Table) -> pa.Table:
    """Sorts rows so that those of a request are contiguous; requests keep the order of their first rows."""
    if REQUEST not in rows.schema.names:
        return rows
    _, first, number = np.unique(rows.column(REQUEST).to_numpy(), return_index=True, return_inverse=True)
    return rows.take(pa.array(np.argsort(first[number], kind="stable")))


def _numbered_rows(
    folder: Path, columns: Columns, schema: pa.Schema, vocabularies: Mapping[str, Vocabulary]
) -> Iterator[tuple[str, pa.Table, float]]:
    """Replaces hashes in the rows of a folder by ids; yields what `_raw_rows` yields."""
    types = dict(zip(schema.names, schema.types, strict=True))
    for part in _PARTS:
        with pq.ParquetFile(folder / part / _FILE) as source:
            for number in range(source.num_row_groups):
                table = source.read_row_group(number)
                by_name = dict(zip(table.column_names, table.columns, strict=True))
                for feature in columns.features:
                    if feature.time is None:
                        hashes = by_name[feature.name].combine_chunks()
                        values = (hashes.flatten() if feature.is_bag else hashes).to_numpy()
                        ids = pa.array(vocabularies[feature.table].rows_of(values))
                        if feature.is_bag:
                            ids = pa.LargeListArray.from_arrays(starts_of(hashes), ids)
                        by_name[feature.name] = ids.cast(types[feature.name])
                yield part, pa.table(by_name, schema=schema), (number + 1) / source.num_row_groups


class _View:
    """A prepared file as an SQL relation. Columns are read by number, since DuckDB ignores the case of names."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, schema: pa.Schema, file: Path) -> None:
        self.connection = connection
        self.columns = {name: f"#{i}" for i, name in enumerate(schema.names, start=1)}
        self.rows = f"read_parquet({literal(glob.escape(str(file)))})"

    def counts(
        self, groups: Sequence[Sequence[Feature]], having: str = "true", order: str = "id", most: Sequence[int] = ()
    ) -> Iterator[pa.Table]:
        """Yields the ids of each group of features (-1: empty bag), in column ``id``, and counts of them, column ``n``.

        Many groups share a query, which takes time for each column of the file. ``having`` selects ids, in SQL, and
        ``most`` limits the number of each group's ids.
        """
        size = 1 + len(groups) // _MOST_QUERIES
        for start in range(0, len(groups), size):
            part = groups[start : start + size]
            ids = self._ids({feature: number for number, group in enumerate(part) for feature in group})
            limits = [*most[start : start + size]]
            limit = f"QUALIFY row_number() OVER (PARTITION BY f ORDER BY {order}) <= {limits}[f + 1]" if most else ""
            grouped = f"SELECT f, id, count(*) AS n FROM ({ids}) GROUP BY f, id HAVING {having}"
            counts = self.query(f"{grouped} {limit} ORDER BY f, {order}")
            for first, end in pairwise(np.searchsorted(counts["f"].to_numpy(), range(len(part) + 1))):
                yield counts.slice(first, end - first)

    def _ids(self, numbers: Mapping[Feature, int]) -> str:
        """Returns SQL for the ids of features, in column ``id``, with each feature's number, in column ``f``."""
        columns = [(self.columns[feature.name], feature.is_bag) for feature in numbers]
        lists = [f"CASE WHEN len({c}) = 0 THEN [-1] ELSE {c} END" if is_bag else f"[{c}]" for c, is_bag in columns]
        if len(columns) == 1:  # several times as fast as lists of one id
            ((column, is_bag),) = columns
            return f"SELECT 0 AS f, {f'unnest({lists[0]})' if is_bag else column} AS id FROM {self.rows}"
        each = f"SELECT unnest({[*numbers.values()]}) AS f, unnest([{', '.join(lists)}]) AS ids FROM {self.rows}"
        return f"SELECT f, unnest(ids) AS id FROM ({each})"

    def query(self, sql: str) -> pa.Table:
        """Returns the rows that ``sql`` selects."""
        return self.connection.sql(sql).to_arrow_table()


def _count(view: _View, columns: Columns, min_count: int, file: Path) -> None:
    """Writes each table's vocabulary: the most frequent hashes of at least ``min_count`` uses, as many as have rows."""
    members: dict[str, list[Feature]] = {}
    for feature in (feature for feature in columns.features if feature.time is None):
        members.setdefault(feature.table, []).append(feature)
    having, most = f"id > 0 AND count(*) >= {min_count}", [max(group[0].rows - 2, 0) for group in members.values()]
    # Ties are broken by the hash, which is the same on every platform.
    counts = view.counts([*members.values()], having, "count(*) DESC, id", most)
    with pq.ParquetWriter(file, _WORDS) as writer:
        for table, hashes in zip(members, counts, strict=True):
            words = Vocabulary.of(hashes["id"].to_numpy())
            rows = [pa.repeat(table, len(words.keys)), pa.array(words.keys), pa.array(words.rows)]
            writer.write_table(pa.Table.from_arrays(rows, schema=_WORDS))


def _copy_vocabulary(config: DataConfig, columns: Columns, file: Path) -> None:
    """Copies the vocabulary of ``data.vocabulary``; `InputError` if it is of other features or has been changed."""
    name, *checksum = re.split(r"#(?=[0-9a-f]{8}$)", str(config.vocabulary))
    place, folder = f"data.vocabulary={name!r}", Path(name)
    remedy = "The model needs the vocabulary in this prepared folder. Restore it to this path." if checksum else None
    manifest = read_manifest(folder, place, remedy=remedy)
    if manifest.vocabulary is None:
        raise InputError(f"{place} has no vocabulary. Prepare that folder again with `dmt prepare --ids frequency`.")
    known, given = ({(f.name, f.table) for f in features} for features in (manifest.features, columns.features))
    if unlike := sorted(known ^ given):
        remedy = "Set data.categorical, timestamps, sequences and shared_tables as for that folder."
        raise InputError(f"{place} has other features or tables: {unlike[0][0]!r} differs. {remedy}")
    shutil.copyfile(folder / manifest.vocabulary, file)
    if size_and_crc(file)[1] != (int(checksum[0], 16) if checksum else manifest.files[manifest.vocabulary][1]):
        origin = "used in training" if checksum else "that was written with the folder"
        raise InputError(f"{place}: {manifest.vocabulary} is not the file {origin}. Restore the prepared folder.")


def _read_vocabularies(file: Path, columns: Columns) -> dict[str, Vocabulary]:
    words = pq.read_table(file).group_by("table", use_threads=False)
    by_table = words.aggregate([("value_hash", "list"), ("row", "list")])
    vocabularies = {f.table: Vocabulary.of(np.empty(0, np.int64)) for f in columns.features if f.time is None}
    for name, keys, rows in zip(*(by_table[c] for c in ("table", "value_hash_list", "row_list")), strict=True):
        vocabularies[name.as_py()] = Vocabulary(keys.values.to_numpy(), rows.values.to_numpy())
    return vocabularies


def _summary(
    view: _View, config: DataConfig, columns: Columns, tables: Sequence[TableSpec], absent: Counter[str]
) -> tuple[AccessProfile, dict[str, Any]]:
    """Returns access counts and a summary of the training rows; ``absent``: their missing values by dense column."""
    by_name = {feature.name: feature for feature in columns.features}
    profile, features, notes, few = AccessProfile(tables), dict[str, Any](), [], dict[str, int]()
    ones = "NULL" if columns.label is None else f"count(*) FILTER ({view.columns[columns.label]} = 1)"
    counted = view.query(f"SELECT count(*) AS rows, {ones} AS ones FROM {view.rows}")
    profile.num_samples, positives = counted.to_pylist()[0].values()
    num_rows = profile.num_samples
    id_counts = view.counts([[by_name[name]] for table in tables for name in table.feature_names])
    for table in tables:
        known: dict[str, NDArray[np.int64]] = {}
        for name in table.feature_names:
            feature, found = by_name[name], next(id_counts)
            rows, uses = (found[column].to_numpy().astype(np.int64) for column in ("id", "n"))
            missing = int(uses[rows == (-1 if feature.is_bag else 0)].sum())
            rows, uses = rows[rows >= 0], uses[rows >= 0]
            profile.put(table.name, RowCounts(rows, uses))
            # Row 0 is for missing values, row 1 by frequency for rare values.
            is_known = rows > (1 if config.id_mode == "frequency" and feature.time is None else 0)
            known[name] = rows[is_known]
            features[name] = {
                "missing": missing,
                "rows_in_use": len(known[name]),
                "rows": feature.rows,
                "ids_per_row": round(float(uses.sum()) / max(num_rows, 1), 6),
                "most_frequent_share": round(float(uses[is_known].max(initial=0) / max(uses.sum(), 1)), 6),
            }
            if missing == num_rows > 0:
                notes.append(f"{name}: all {num_rows:,} values are missing{' or 0' * (config.id_mode == 'index')}.")
        if by_name[table.feature_names[0]].time is None and not config.vocabulary:
            notes += _notes(table.num_embeddings, known, few, is_hashed=config.id_mode == "hash")
    dense = {name: {"missing": absent[name]} for name in columns.dense}
    notes += [f"{name}: all {num_rows:,} values are missing." for name in dense if absent[name] == num_rows > 0]
    if few:
        smaller = ", ".join(f"{json.dumps(name)} = {enough}" for name, enough in few.items())
        notes.append(f"To save memory, prepare again with `num_embeddings_per_feature = {{ {smaller} }}` in [data].")
    if positives in (0, num_rows):
        same = f"All {num_rows:,} training rows have the label {int(positives > 0)}; a model needs both labels."
        notes.append(same if num_rows else "There are no training rows.")
    return profile, {"rows": num_rows, "positives": positives, "dense": dense, "features": features, "notes": notes}


def _notes(rows: int, known: Mapping[str, NDArray[np.int64]], few: dict[str, int], *, is_hashed: bool) -> Iterator[str]:
    """Yields notes on a full or needlessly shared table; ``known``: rows used by feature; ``few`` gets enough rows."""
    names = shorten([*known], ", ", most=8)
    all_rows, holders = np.unique(np.concatenate([*known.values()]), return_counts=True)
    used = len(all_rows)
    enough = max(2, 10 * used if is_hashed else used + 2)
    if is_hashed and used >= 0.99 * (rows - 1):
        yield f"{names}: the table of {rows:,} rows is full. Raise data.num_embeddings."
    elif used and enough < _FEW * rows:
        few |= dict.fromkeys(known, enough)
    for name, used_rows in known.items() if len(known) > 1 else ():
        common = int(np.sum(holders[np.searchsorted(all_rows, used_rows)] > 1))
        # Different values share some hashes by chance.
        chance = len(used_rows) * (used - len(used_rows) + common) / rows if is_hashed else 0.0
        most = chance + 3 * math.sqrt(chance)
        if common <= most < min(len(used_rows), int(holders.sum()) - len(used_rows)) / 2:
            yield f"{name}: shares no value with the other features of its table. Give {name} a separate table."


def size_and_crc(path: Path) -> tuple[int, int]:
    """Returns the size in bytes and the CRC-32 of a file, as a manifest has them."""
    checksum = 0
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return path.stat().st_size, checksum


def _seal(folder: Path, manifest: Manifest) -> Manifest:
    """Writes the manifest, which marks the folder as complete, once all other files are on the disk; returns it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _LOCK)
    for path in files:
        fsync_path(path)
    manifest = replace(manifest, files={str(path.relative_to(folder)): size_and_crc(path) for path in files})
    (folder / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1) + "\n", encoding="utf-8")
    fsync_path(folder / MANIFEST)
    return manifest


@contextmanager
def _work_folder(out: Path) -> Iterator[Path]:
    """Yields an empty folder beside ``out``, renamed to ``out`` at the end; an error or the next start removes it."""
    work = out.with_name(f".{out.name}.work")
    try:
        work.mkdir(parents=True, exist_ok=True)
        with (work / _LOCK).open("wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(f"Another `dmt prepare` is writing --out {str(out)!r}. Wait until it ends.") from None
            for left in (path for path in work.iterdir() if path.name != _LOCK):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            try:
                yield work
                (work / _LOCK).unlink()
                work.rename(out)
                fsync_path(out.parent)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except (OSError, duckdb.Error) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        remedy = "Free space there or name another folder; if DuckDB lacks memory, raise --memory-gib of `dmt prepare`."
        raise InputError(f"Prepared folder {str(out)!r} cannot be written: {reason}. {remedy}") from error
    except RuntimeError as error:
        if "Query interrupted" not in str(error):
            raise
        # DuckDB raises this in place of what the handler of Ctrl-C or SIGTERM raised.
        raise KeyboardInterrupt from None
