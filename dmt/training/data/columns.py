"""`find_columns`: the columns of a configuration in a schema, as dense columns, features and their tables.

Formats are told by the endings of names: Parquet, JSON lines, and text, which is Criteo's or has a line of names first.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from dmt.errors import InputError, did_you_mean
from dmt.files import is_unicode
from dmt.formatting import shorten
from dmt.plan.tables import TableSpec
from dmt.training.data.config import DataConfig
from dmt.training.data.storage import is_remote, matching_files
from dmt.training.data.times import PART_ROWS, TimePart

__all__ = [
    "CRITEO_CATEGORICAL",
    "CRITEO_DENSE",
    "Columns",
    "Feature",
    "check_features",
    "expand_path",
    "explicit_config",
    "find_columns",
    "format_of",
    "is_list",
    "is_number",
    "is_text",
    "separator_of",
    "table_name",
    "shared_tables",
    "tables_of",
]

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
_JSON = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")
_TEXT = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
_ENDINGS = (*_PARQUET, *_TEXT, *_JSON)


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A categorical feature."""

    name: str
    """Key of its ids in a batch."""
    rows: int
    """Rows of its table."""
    table: str
    """Name of its table, without the ``t_``: its own, or that of ``data.shared_tables``."""
    salt: str
    """Text that salts its hash: its name, or that of a table that it shares."""
    id_mode: Literal["hash", "index"] = "hash"
    """Values are hashed, or are row numbers."""
    is_bag: bool = False
    """True: a row has any number of ids; false: exactly one."""
    time: TimePart | None = None
    """Source of a feature that is part of a time."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of a run, in the order of the model's inputs."""

    dense: tuple[str, ...]
    """Dense columns, the years of times last."""
    features: tuple[Feature, ...]
    """Categorical features, the parts of times last."""
    years: Mapping[str, TimePart]
    """Sources of the dense columns that are years of times."""

    @property
    def times(self) -> dict[str, TimePart]:
        """Sources of the dense columns and features that are parts of times."""
        return {**self.years, **{feature.name: feature.time for feature in self.features if feature.time}}

    @property
    def plain_dense(self) -> tuple[str, ...]:
        """Dense columns that the rows have themselves."""
        return tuple(name for name in self.dense if name not in self.years)


def format_of(path: str, config: DataConfig) -> Literal["parquet", "json", "criteo", "text"]:
    """Tells the format of a file by the configuration and its name."""
    if config.kind == "criteo_tsv":
        return "criteo"
    return "parquet" if path.endswith(_PARQUET) else "json" if path.endswith(_JSON) else "text"


def separator_of(path: str, config: DataConfig) -> str:
    """Returns the character that separates the columns of a text file."""
    return config.csv_separator or ("\t" if path.removesuffix(".gz").endswith(".tsv") else ",")


def expand_path(setting: str, value: str, *, columns: bool) -> list[str]:
    """Lists the files that a file name, directory or glob matches, or a URL of these, in the order of their names.

    Hidden files of a directory and those that begin with ``_`` are left out; with ``columns`` also those of a directory
    whose ending says no format with named columns.

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
        files = [file for file in files if file.endswith(_ENDINGS)]
    if not files:
        kind = f" ending in {', '.join(_ENDINGS)}" if columns and is_folder else ""
        place = "" if is_remote(value) else f" (in {Path.cwd()})"
        raise InputError(f"{setting}={value!r} matches no file{kind}{place}.")
    for file in files:
        if not is_unicode(file):
            raise InputError(f"{setting}: the name of {file!r} is not UTF-8. Rename the file.")
        if columns and not file.endswith(_ENDINGS):
            raise InputError(f"{setting}: {file} has an unknown ending; expected one of {', '.join(_ENDINGS)}.")
    return files


def find_columns(config: DataConfig, schema: pa.Schema, place: str) -> Columns:
    """Finds the columns of a configuration in the schema of a file or batch, which ``place`` names.

    Raises:
        InputError: a name or glob matches no column, a column is used twice, its type does not fit its use, or
            settings of tables name no feature or contradict each other.

    Example:
        >>> config = DataConfig(kind="columns", train_path="a.csv", dense=("d",), categorical=("c_*",))
        >>> columns = find_columns(config, pa.schema({name: pa.string() for name in ("label", "d", "c_1")}), "a.csv")
        >>> columns.dense, [feature.name for feature in columns.features]
        (('d',), ['c_1'])
    """
    _check_unique(schema.names, place)
    for setting in ("label", "split_column", "group_by"):
        name = getattr(config, setting)
        if name is not None and name not in schema.names:
            raise _missing(setting, name, schema.names, place)
    free = [name for name in schema.names if name not in (config.label, config.split_column)]
    if config.kind == "source":
        free.sort()  # the order in its first batch may be another one in every process
    is_criteo = config.kind == "criteo_tsv"
    dense = _select("dense", config.dense or (CRITEO_DENSE if is_criteo else ()), free, place)
    named = config.categorical or (CRITEO_CATEGORICAL if is_criteo else ())
    categorical = _select("categorical", named, free, place)
    timestamps = _select("timestamps", config.timestamps, free, place)
    uses = {"dense": dense, "categorical": categorical, "timestamps": timestamps}
    _check_uses(uses, config, place)
    _check_types(uses, schema, config, place)
    listed = set(_select("multi_hot", config.multi_hot, categorical, place))
    bags = {name for name in categorical if name in listed or is_list(schema.field(name).type)}
    times = [TimePart(column, part) for column in timestamps for part in config.timestamp_parts]
    parts = {time.name: time for time in times if time.part in PART_ROWS}
    years = {time.name: time for time in times if time.part not in PART_ROWS}
    rows = _table_rows(config, categorical, parts)
    tables = shared_tables(config, rows)
    features = tuple(
        Feature(
            name=name,
            rows=rows[name],
            table=tables[name],
            salt=tables[name] if tables[name] in config.shared_tables else name,
            id_mode="index" if name in parts else config.id_mode,
            is_bag=name in bags,
            time=parts.get(name),
        )
        for name in rows
    )
    return Columns(dense=(*dense, *years), features=features, years=years)


def tables_of(
    columns: Columns,
    *,
    embedding_dim: int,
    embedding_dims: Mapping[str, int],
    data_type: Literal["FP32", "FP16"] = "FP32",
) -> list[TableSpec]:
    """Returns one table ``t_<feature>`` for each feature, ``t_<name>`` for those of ``data.shared_tables``.

    Raises:
        InputError: features that share a table have other numbers of columns (``embedding_dims``, by feature).
    """
    members: dict[str, list[Feature]] = {}
    for feature in columns.features:
        members.setdefault(feature.table, []).append(feature)
    tables = []
    for table, features in members.items():
        names = tuple(feature.name for feature in features)
        dims = {embedding_dims.get(name, embedding_dim) for name in names}
        if len(dims) > 1:
            raise InputError(
                f"model.embedding_dims: the features {list(names)} share a table, but have {sorted(dims)} columns. "
                "Give all of them the same number."
            )
        tables.append(
            TableSpec(
                name=table_name(table),
                num_embeddings=features[0].rows,
                embedding_dim=dims.pop(),
                feature_names=names,
                data_type=data_type,
            )
        )
    return tables


def table_name(feature: str) -> str:
    """Returns a feature's table name; dots, which PyTorch forbids in a module's name, are percent-encoded.

    Example:
        >>> table_name("user.country")
        't_user%2Ecountry'
    """
    return "t_" + feature.replace("%", "%25").replace(".", "%2E")


def explicit_config(config: DataConfig, columns: Columns) -> DataConfig:
    """Returns the settings with every column by name, which read other files of the same kind in the same way."""
    plain = [feature for feature in columns.features if feature.time is None]
    changes: dict[str, Any] = {
        "dense": columns.plain_dense,
        "categorical": tuple(feature.name for feature in plain),
        "multi_hot": tuple(feature.name for feature in plain if feature.is_bag),
        "timestamps": tuple(dict.fromkeys(time.column for time in columns.times.values())),
        "num_embeddings_per_feature": {feature.name: feature.rows for feature in columns.features},
    }
    return config.model_copy(update=changes)


def is_list(type_: pa.DataType) -> bool:
    """Tells whether an Arrow type is one of the list types."""
    return pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_)


def is_text(type_: pa.DataType) -> bool:
    """Tells whether an Arrow type is text, which may be dictionary-encoded."""
    type_ = _plain(type_)
    return pa.types.is_string(type_) or pa.types.is_large_string(type_)


def is_number(type_: pa.DataType) -> bool:
    """Tells whether an Arrow type is a number, a boolean or always missing."""
    types, type_ = pa.types, _plain(type_)
    number = types.is_integer(type_) or types.is_floating(type_) or types.is_decimal(type_)
    return number or types.is_boolean(type_) or types.is_null(type_)


def _is_time(type_: pa.DataType) -> bool:
    return pa.types.is_timestamp(type_) or pa.types.is_date(type_)


def _plain(type_: pa.DataType) -> pa.DataType:
    return type_.value_type if pa.types.is_dictionary(type_) else type_


def _check_uses(uses: Mapping[str, Sequence[str]], config: DataConfig, place: str) -> None:
    """Raises `InputError` for a column with two uses, or with the name of a part of a time."""
    seen: dict[str, str] = {}
    for use, names in uses.items():
        for name in names:
            if name in seen:
                raise InputError(f"Column {name!r} is in {seen[name]} and in {use}; it can be in one of them.")
            seen[name] = use
    taken = (*seen, config.label, config.split_column, config.group_by)
    for time in (TimePart(column, part) for column in uses["timestamps"] for part in config.timestamp_parts):
        if time.name in taken:
            raise InputError(
                f"{place}: column {time.name!r} has the name that the {time.part} of {time.column!r} would have "
                "(data.timestamps). Leave one of them out, or rename the column."
            )


def _check_types(uses: Mapping[str, Sequence[str]], schema: pa.Schema, config: DataConfig, place: str) -> None:
    """Raises `InputError` for a column whose type does not fit its use."""
    for setting in ("label", "split_column", "group_by"):
        name = getattr(config, setting)
        type_ = schema.field(name).type if name is not None else pa.null()
        # Dates and times have a text that tells rows apart, but are no label.
        if not (is_text(type_) or is_number(type_) or (setting != "label" and _is_time(type_))):
            raise InputError(f"{place}: {setting} {name!r} has type {type_}, expected text or a number.")
    for name in uses["dense"]:
        type_ = schema.field(name).type
        if is_list(type_):
            raise InputError(f"{place}: dense column {name!r} is a list ({type_}); lists can only be categorical.")
        if not (is_number(type_) or is_text(type_)):
            raise InputError(
                f"{place}: dense column {name!r} has type {type_}, expected a number. List it under "
                f"{'timestamps' if _is_time(type_) else 'categorical'}, or leave it out."
            )
    for name in uses["categorical"]:
        type_ = schema.field(name).type
        value = type_.value_type if is_list(type_) else type_
        if pa.types.is_decimal(value) or not (is_text(value) or is_number(value)):
            raise InputError(
                f"{place}: categorical column {name!r} has type {type_}, expected text, whole numbers, booleans or "
                f"lists of these.{' List it under timestamps for its hour and weekday.' if _is_time(type_) else ''}"
            )
    for name in uses["timestamps"]:
        type_ = _plain(schema.field(name).type)
        if not (_is_time(type_) or is_text(type_) or pa.types.is_null(type_)):
            # A number could be seconds, milliseconds or 20261122.
            raise InputError(
                f"{place}: timestamps column {name!r} has type {type_}, expected dates, timestamps, or text such as "
                "2026-11-22T20:15:00. Convert numbers by their unit, such as with pandas.to_datetime(column, unit='s')."
            )


def _table_rows(config: DataConfig, categorical: Iterable[str], parts: Mapping[str, TimePart]) -> dict[str, int]:
    """Returns the rows of the table of each feature."""
    fixed = {name: PART_ROWS[time.part] for name, time in parts.items()}
    rows = {**dict.fromkeys(categorical, config.num_embeddings), **fixed}
    check_features("num_embeddings_per_feature", config.num_embeddings_per_feature, rows)
    for name, number in config.num_embeddings_per_feature.items():
        if number < fixed.get(name, 0):
            raise InputError(
                f"num_embeddings_per_feature: {name!r} has {number} rows, but a table of it has {fixed[name]}: one for "
                "each of its values and one for a missing time. Leave it out."
            )
    return {**rows, **config.num_embeddings_per_feature}


def shared_tables(config: DataConfig, rows: Mapping[str, int]) -> dict[str, str]:
    """Returns the name of each feature's table, without the ``t_``: its own, or that in ``shared_tables``."""
    tables = {name: name for name in rows}
    for table, features in config.shared_tables.items():
        check_features(f"shared_tables.{table}", features, rows)
        if table in rows and table not in features:
            raise InputError(f"shared_tables: {table!r} is the name of another feature. Name the table otherwise.")
        sizes = {rows[name] for name in features}
        if len(sizes) > 1:
            raise InputError(
                f"shared_tables.{table}: its features have {sorted(sizes)} rows. Give all of them the same number "
                "(num_embeddings_per_feature)."
            )
        for name in features:
            if tables[name] != name or (name != table and name in config.shared_tables):
                raise InputError(f"shared_tables: feature {name!r} is in more than one table. Name it once.")
            tables[name] = table
    return tables


def check_features(setting: str, given: Iterable[str], names: Iterable[str]) -> None:
    """Raises `InputError` for a name that is no categorical feature."""
    known = list(names)
    for name in given:
        if name not in known:
            raise InputError(
                f"{setting}: {name!r} is not a categorical feature.{did_you_mean(name, known)} "
                f"Features: {shorten(known, ', ', most=12)}."
            )


def _check_unique(names: Sequence[str], place: str) -> None:
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise InputError(f"{place}: column {doubled[0]!r} is named {names.count(doubled[0])} times.")


def _select(setting: str, patterns: Sequence[str], names: Sequence[str], place: str) -> tuple[str, ...]:
    """Returns the columns that names and globs match, each once, in the order of the patterns, then of ``names``."""
    chosen: dict[str, None] = {}
    for pattern in patterns:
        matches = [pattern] if pattern in names else [n for n in names if fnmatch.fnmatchcase(n, pattern)]
        if not matches:
            raise _missing(setting, pattern, names, place)
        chosen.update(dict.fromkeys(matches))
    return tuple(chosen)


def _missing(setting: str, pattern: str, names: Sequence[str], place: str) -> InputError:
    return InputError(
        f"{place}: {setting} {pattern!r} matches no column.{did_you_mean(pattern, names)} "
        f"Columns: {shorten(names, ', ', most=12)}.{_REMEDIES.get(setting, '')}"
    )
