"""Files and columns of a run: paths, names and globs of the configuration against what the files have."""

from __future__ import annotations

import csv
import fnmatch
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dmt.errors import InputError, did_you_mean
from dmt.files import is_unicode
from dmt.formatting import shorten
from dmt.training.data.config import DataConfig
from dmt.training.data.encode import is_list
from dmt.training.data.hints import point_out_uses
from dmt.training.data.storage import file_version, is_remote, matching_files, open_binary
from dmt.training.data.textfile import text_blocks
from dmt.training.data.times import EXPECTED, TimePart

__all__ = [
    "CRITEO_CATEGORICAL",
    "CRITEO_DENSE",
    "Columns",
    "check_types",
    "csv_header",
    "expand_path",
    "is_parquet",
    "parquet_file",
    "resolve_columns",
    "separator_of",
]

logger = logging.getLogger(__name__)

CRITEO_DENSE = tuple(f"I{i}" for i in range(1, 14))
"""Criteo's integer columns."""
CRITEO_CATEGORICAL = tuple(f"C{i}" for i in range(1, 27))
"""Criteo's categorical columns."""
_FEATURES = """data.categorical='["user", "ad_*"]' (and data.dense, where there are numbers)"""
_REMEDIES = {
    "label": f" Name the column of 0/1 labels, data.label=NAME, and the features: {_FEATURES}.",
    "categorical": f" Name the features: {_FEATURES}.",
    "dense": """ Name the columns of numbers: data.dense='["age", "d_*"]'.""",
}
_PARQUET = (".parquet", ".pq")
_TEXT = (".csv", ".tsv", ".csv.gz", ".tsv.gz")


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of a run, in the order of the model's inputs."""

    dense: tuple[str, ...]
    categorical: tuple[str, ...]
    multi_hot: frozenset[str]
    """The categorical columns with bags of ids."""
    timestamps: tuple[str, ...] = ()
    """The columns of times, which are none of the others."""


def expand_path(setting: str, value: str, *, columns: bool) -> list[str]:
    """Lists the files that a file name, directory or glob matches, or a URL of these, in the order of their names.

    Hidden files of a directory and those that begin with ``_`` are left out; with ``columns`` also those whose ending
    says neither Parquet nor CSV.

    Raises:
        InputError: nothing matches, or a file has an unknown ending.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = [Path(folder, name).touch() for name in ("day_1.tsv", "day_0.tsv", "_SUCCESS")]
        ...     [Path(file).name for file in expand_path("train_path", folder, columns=True)]
        ['day_0.tsv', 'day_1.tsv']
    """
    try:
        files, is_folder = matching_files(value)
    except (OSError, RuntimeError) as error:  # a name that is too long, the home of nobody
        raise InputError(f"{setting}={value!r} cannot be read ({error}).") from error
    if is_folder and columns:
        files = [file for file in files if file.endswith(_PARQUET + _TEXT)]
    if not files:
        kind = f" ending in {', '.join(_PARQUET + _TEXT)}" if columns and is_folder else ""
        place = "" if is_remote(value) else f" (in {Path.cwd()})"
        raise InputError(f"{setting}={value!r} matches no file{kind}{place}.")
    for file in files:
        if not is_unicode(file):
            raise InputError(f"{setting}: the name of {file!r} is not UTF-8. Rename the file.")
        if columns and not file.endswith(_PARQUET + _TEXT):
            raise InputError(f"{setting}: {file} has an unknown ending; expected one of {', '.join(_PARQUET + _TEXT)}.")
    return files


def is_parquet(path: str) -> bool:
    """Tells from a file's name whether it is Parquet."""
    return path.endswith(_PARQUET)


def separator_of(path: str, config: DataConfig) -> str:
    """Returns the character that separates the columns of a text file."""
    return config.csv_separator or ("\t" if path.removesuffix(".gz").endswith(".tsv") else ",")


def parquet_file(path: str, *, dictionaries: Sequence[str] = ()) -> pq.ParquetFile:
    """Opens a Parquet file; columns in ``dictionaries`` are read as dictionaries.

    Raises:
        InputError: the file cannot be read or is not Parquet.
    """
    try:
        # The footer of a file with many row groups takes long to parse, and its pieces are read one by one.
        footer, remote = _footer(path, *file_version(path)), is_remote(path)
        place = open_binary(path) if remote else path
        # From a store, the columns of a row group come in few requests.
        file = pq.ParquetFile(place, metadata=footer, read_dictionary=list(dictionaries), pre_buffer=remote)
        _ = file.schema_arrow.names  # which pyarrow decodes here
        return file
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as Parquet ({error}).") from error


@lru_cache(maxsize=8)
def _footer(path: str, size: int, changed: int) -> pq.FileMetaData:
    """Reads the footer of a Parquet file of this size and time of change."""
    with open_binary(path) as file:
        return pq.read_metadata(file)


def csv_header(path: str, separator: str) -> list[str]:
    """Reads the column names in the first line of a text file.

    Raises:
        InputError: the file is empty or unreadable, or two columns have one name.
    """
    block = next((block for _, block in text_blocks(path, block_bytes=1 << 16)), b"")
    try:
        line = block.split(b"\n")[0].decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}, line 1: expected text in UTF-8 ({error.reason}).") from error
    if not line:
        raise InputError(f"{path}: expected a line of column names first, found {'an empty' if block else 'no'} line.")
    try:
        names = next(csv.reader([line], delimiter=separator))
    except csv.Error as error:
        raise InputError(f"{path}, line 1: cannot be read as column names ({error}).") from error
    _check_unique(names, f"{path}, line 1")
    return names


def resolve_columns(config: DataConfig, path: str, schema: pa.Schema | None = None) -> Columns:
    """Finds the columns of a configuration in a file, or in the schema of the batch that ``path`` then names.

    Raises:
        InputError: a name or glob matches no column, a column is used twice, or its type does not fit its use.

    Example:
        >>> resolve_columns(DataConfig(kind="criteo_tsv", train_path="a.tsv", dense=("I[12]",)), "a.tsv").dense
        ('I1', 'I2')
    """
    if config.kind == "criteo_tsv":
        if config.group_by and config.group_by not in (*CRITEO_DENSE, *CRITEO_CATEGORICAL):
            raise _missing("group_by", config.group_by, (*CRITEO_DENSE, *CRITEO_CATEGORICAL), path)
        return Columns(
            dense=_select("dense", config.dense or CRITEO_DENSE, CRITEO_DENSE, path),
            categorical=_select("categorical", config.categorical or CRITEO_CATEGORICAL, CRITEO_CATEGORICAL, path),
            multi_hot=frozenset(),
        )
    if schema is not None:
        has_types = True
    elif has_types := is_parquet(path):
        schema = parquet_file(path).schema_arrow
    else:
        schema = pa.schema([(name, pa.string()) for name in csv_header(path, separator_of(path, config))])
    _check_unique(schema.names, path)
    for setting in ("label", "split_column", "group_by"):
        name = getattr(config, setting)
        if name is not None and name not in schema.names:
            raise _missing(setting, name, schema.names, path)
    free = [name for name in schema.names if name not in (config.label, config.split_column)]
    if config.kind == "source":
        free.sort()  # the order in its first batch may be another one in every process
    dense = _select("dense", config.dense, free, path)
    categorical = _select("categorical", config.categorical, free, path)
    timestamps = _select("timestamps", config.timestamps, free, path)
    _check_uses({"dense": dense, "categorical": categorical, "timestamps": timestamps}, config, path)
    unused = [name for name in free if name not in (*dense, *categorical, *timestamps, config.group_by)]
    if unused:
        logger.info("%s: columns not used: %s.", path, ", ".join(unused))
    listed = set(_select("multi_hot", config.multi_hot, categorical, path))
    multi_hot = frozenset(n for n in categorical if n in listed or is_list(schema.field(n).type))
    columns = Columns(dense=dense, categorical=categorical, multi_hot=multi_hot, timestamps=timestamps)
    if has_types:
        check_types(columns, schema, path, config)
    single = tuple(n for n in categorical if n not in multi_hot and _is_text(_plain(schema.field(n).type)))
    if single and config.kind != "source":
        point_out_uses(path, None if is_parquet(path) else separator_of(path, config), single)
    return columns


def _check_uses(uses: Mapping[str, Sequence[str]], config: DataConfig, path: str) -> None:
    """Raises `InputError` for a column with two uses, or with the name of a part of a time."""
    for (first, names), (second, others) in combinations(uses.items(), 2):
        if both := [name for name in names if name in others]:
            raise InputError(f"Column {both[0]!r} is in {first} and in {second}; it can be in one of them.")
    single = (config.label, config.split_column, config.group_by)
    for time in (TimePart(column, part) for column in uses["timestamps"] for part in config.timestamp_parts):
        if time.name in (*(name for names in uses.values() for name in names), *single):
            raise InputError(
                f"{path}: column {time.name!r} has the name that the {time.part} of {time.column!r} would have "
                "(data.timestamps). Leave one of them out, or rename the column."
            )


def check_types(columns: Columns, schema: pa.Schema, path: str, config: DataConfig) -> None:
    """Checks that the types of a Parquet file's columns fit their use; the config names the label and split column.

    Raises:
        InputError: a column is absent, a dense one is not a number, a categorical one neither text, whole number,
            boolean nor a list of these, one of times holds numbers, or one is a list here but not in the first file, or
            the other way round; the label is neither text nor a number, or the split column or ``group_by`` neither of
            them nor a time.

    Example:
        >>> columns = Columns(dense=("x",), categorical=(), multi_hot=frozenset())
        >>> check_types(columns, pa.schema([("x", pa.list_(pa.float32()))]), "a.parquet", DataConfig())
        Traceback (most recent call last):
        ...
        dmt.errors.InputError: a.parquet: dense column 'x' is a list (list<item: float>); lists can only be categorical.
    """
    types = pa.types
    _check_single_values(schema, path, config)
    used = (("dense", columns.dense), ("categorical", columns.categorical), ("timestamps", columns.timestamps))
    for setting, names in used:
        for name in names:
            if name not in schema.names:
                raise _missing(setting, name, schema.names, path)
    for name in columns.dense:
        type_ = _plain(schema.field(name).type)
        if is_list(type_):
            raise InputError(f"{path}: dense column {name!r} is a list ({type_}); lists can only be categorical.")
        if not _is_number(type_):
            raise InputError(
                f"{path}: dense column {name!r} has type {type_}, expected a number. List it under "
                f"{'timestamps' if _is_time(type_) else 'categorical'}, or leave it out."
            )
    for name in columns.categorical:
        type_ = schema.field(name).type
        value = _plain(type_.value_type if is_list(type_) else type_)
        if is_list(type_) and name not in columns.multi_hot:
            raise InputError(f"{path}: column {name!r} is a list ({type_}), but not in the first file.")
        if types.is_decimal(value) or not (_is_text(value) or _is_number(value)):
            raise InputError(
                f"{path}: categorical column {name!r} has type {type_}, expected text, whole numbers, booleans or "
                f"lists of these.{' List it under timestamps for its hour and weekday.' if _is_time(type_) else ''}"
            )
        if name in columns.multi_hot and not (is_list(type_) or _is_text(value) or types.is_null(value)):
            raise InputError(f"{path}: multi_hot column {name!r} has type {type_}, expected a list or text.")
    for name in columns.timestamps:
        _check_time(_plain(schema.field(name).type), name, path)


def _check_time(type_: pa.DataType, name: str, path: str) -> None:
    if not (_is_time(type_) or _is_text(type_) or pa.types.is_null(type_)):
        # A number could be seconds, milliseconds or 20261122.
        raise InputError(
            f"{path}: timestamps column {name!r} has type {type_}, expected dates, timestamps, or text: {EXPECTED}. "
            "Convert numbers by their unit, such as with pandas.to_datetime(column, unit='s')."
        )


def _check_single_values(schema: pa.Schema, path: str, config: DataConfig) -> None:
    for setting in ("label", "split_column", "group_by"):
        name = getattr(config, setting)
        type_ = _plain(schema.field(name).type) if name in schema.names else pa.null()
        # Dates and times have a text that tells rows apart, but are no label.
        has_text = setting != "label" and pa.types.is_temporal(type_) and not pa.types.is_interval(type_)
        if not (has_text or _is_text(type_) or _is_number(type_)):
            raise InputError(f"{path}: {setting} {name!r} has type {type_}, expected text or a number.")


def _is_text(type_: pa.DataType) -> bool:
    return pa.types.is_string(type_) or pa.types.is_large_string(type_)


def _is_time(type_: pa.DataType) -> bool:
    return pa.types.is_timestamp(type_) or pa.types.is_date(type_)


def _is_number(type_: pa.DataType) -> bool:
    types = pa.types
    number = types.is_integer(type_) or types.is_floating(type_) or types.is_decimal(type_)
    return number or types.is_boolean(type_) or types.is_null(type_)


def _check_unique(names: Sequence[str], place: str) -> None:
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise InputError(f"{place}: column {doubled[0]!r} is named {names.count(doubled[0])} times.")


def _select(setting: str, patterns: Sequence[str], names: Sequence[str], path: str) -> tuple[str, ...]:
    """Returns the columns that names and globs match, each once, in the order of the patterns, then of ``names``."""
    found: dict[str, None] = {}
    for pattern in patterns:
        matches = [pattern] if pattern in names else [n for n in names if fnmatch.fnmatchcase(n, pattern)]
        if not matches:
            raise _missing(setting, pattern, names, path)
        found.update(dict.fromkeys(matches))
    return tuple(found)


def _missing(setting: str, pattern: str, names: Sequence[str], path: str) -> InputError:
    shown = shorten(names, ", ", most=12)
    return InputError(
        f"{path}: {setting} {pattern!r} matches no column.{did_you_mean(pattern, names)} Columns: {shown}."
        f"{_REMEDIES.get(setting, '')}"
    )


def _plain(type_: pa.DataType) -> pa.DataType:
    return type_.value_type if pa.types.is_dictionary(type_) else type_
