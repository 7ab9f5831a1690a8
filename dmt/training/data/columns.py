"""`find_columns`: the columns of a configuration in a schema, as dense columns, features and their tables."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from dmt.errors import InputError, did_you_mean
from dmt.formatting import shorten
from dmt.plan.tables import TableSpec
from dmt.training.data.config import DataConfig

__all__ = [
    "CRITEO_CATEGORICAL",
    "CRITEO_DENSE",
    "PART_ROWS",
    "Columns",
    "Feature",
    "check_features",
    "explicit_config",
    "find_columns",
    "kind_of",
    "shared_tables",
    "table_name",
    "tables_of",
]

CRITEO_DENSE = tuple(f"I{i}" for i in range(1, 14))
"""Criteo's integer columns."""
CRITEO_CATEGORICAL = tuple(f"C{i}" for i in range(1, 27))
"""Criteo's categorical columns."""
PART_ROWS: Mapping[str, int] = {"hour": 25, "weekday": 8}
"""Rows of the table of each part of a time; row 0 is that of a missing time."""
_KINDS = {
    "label": ("text", "number"),
    "split_column": ("text", "number", "time"),
    "group_by": ("text", "number", "time"),
    "dense": ("text", "number", "decimal"),
    "categorical": ("text", "number", "list"),
    # A number could be seconds, milliseconds or 20261122.
    "timestamps": ("text", "time"),
}
"""Kinds of columns that each setting can name."""
_REMEDIES = {
    "dense": "Lists can only be categorical; dates and times belong to data.timestamps.",
    "categorical": "Dates and times belong to data.timestamps; store numbers with fractions as text, or list them as "
    "dense.",
    "timestamps": "Convert numbers by their unit, such as with pandas.to_datetime(column, unit='s').",
}
_FEATURES = """data.categorical='["user", "ad_*"]' (and data.dense, where there are numbers)"""
_MISSING = {
    "label": f" Name the column of 0/1 labels, data.label=NAME, and the features: {_FEATURES}.",
    "categorical": f" Name the features: {_FEATURES}.",
    "dense": """ Name the columns of numbers: data.dense='["age", "d_*"]'.""",
}


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A categorical feature."""

    name: str
    """Key of its ids in a batch."""
    rows: int
    """Rows of its table."""
    table: str
    """Name of its table, without the ``t_``: its own, or that of ``data.shared_tables``."""
    salt: str = ""
    """Text that salts its hash: its name, or that of a table that it shares."""
    is_bag: bool = False
    """True: a row has any number of ids; false: exactly one."""
    time: tuple[str, str] | None = None
    """Column and part of a time that it is; None of others."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of a run, in the order of the model's inputs."""

    dense: tuple[str, ...]
    """Dense columns."""
    features: tuple[Feature, ...]
    """Categorical features, the parts of times last."""


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
    names: list[str] = schema.names
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"{place}: column {doubled[0]!r} is named {names.count(doubled[0])} times.")
    uses = {s: (name,) for s in ("label", "split_column", "group_by") if (name := getattr(config, s)) is not None}
    is_criteo = config.kind == "criteo_tsv"
    wanted = {
        "dense": config.dense or (CRITEO_DENSE if is_criteo else ()),
        "categorical": config.categorical or (CRITEO_CATEGORICAL if is_criteo else ()),
        "timestamps": config.timestamps,
    }
    free = [name for name in names if name not in (config.label, config.split_column)]
    # The order in a source's first batch may be another one in every process.
    free = sorted(free) if config.kind == "source" else free
    _check_uses(uses, (), schema, place)
    inputs = {setting: _select(setting, patterns, free, place) for setting, patterns in wanted.items()}
    _check_uses(inputs, inputs, schema, place)
    categorical, timestamps = inputs["categorical"], inputs["timestamps"]
    listed = set(_select("multi_hot", config.multi_hot, categorical, place))
    times = {f"{column}_{part}": (column, part) for column in timestamps for part in PART_ROWS}
    for name in times:
        if name in names:
            raise InputError(f"{place}: column {name!r} has the name of a part of a time. Rename the column.")
    rows = {name: config.num_embeddings for name in categorical} | {n: PART_ROWS[t[1]] for n, t in times.items()}
    check_features("num_embeddings_per_feature", config.num_embeddings_per_feature, rows)
    for name in times.keys() & config.num_embeddings_per_feature:
        if config.num_embeddings_per_feature[name] < rows[name]:
            raise InputError(f"num_embeddings_per_feature: {name!r} needs {rows[name]} rows. Leave it out.")
    rows |= config.num_embeddings_per_feature
    tables = shared_tables(config, rows)
    features = tuple(
        Feature(
            name=name,
            rows=rows[name],
            table=tables[name],
            salt=tables[name] if tables[name] in config.shared_tables else name,
            is_bag=name in listed or (name not in times and kind_of(schema.field(name).type) == "list"),
            time=times.get(name),
        )
        for name in rows
    )
    return Columns(dense=inputs["dense"], features=features)


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
    times = [feature.time[0] for feature in columns.features if feature.time is not None]
    changes: dict[str, Any] = {
        "dense": columns.dense,
        "categorical": tuple(feature.name for feature in plain),
        "multi_hot": tuple(feature.name for feature in plain if feature.is_bag),
        "timestamps": tuple(dict.fromkeys(times)),
        "num_embeddings_per_feature": {feature.name: feature.rows for feature in columns.features},
    }
    return config.model_copy(update=changes)


def kind_of(type_: pa.DataType) -> Literal["text", "number", "decimal", "time", "list", "other"]:
    """Tells what values of an Arrow type are; a column that is always missing is text, booleans are numbers."""
    types = pa.types
    if types.is_dictionary(type_):
        return kind_of(type_.value_type)
    if types.is_string(type_) or types.is_large_string(type_) or types.is_string_view(type_) or types.is_null(type_):
        return "text"
    if types.is_integer(type_) or types.is_floating(type_) or types.is_boolean(type_):
        return "number"
    if types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_):
        return "list" if kind_of(type_.value_type) in ("text", "number") else "other"
    if types.is_timestamp(type_) or types.is_date(type_):
        return "time"
    return "decimal" if types.is_decimal(type_) else "other"


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


def _check_uses(uses: Mapping[str, Sequence[str]], inputs: Collection[str], schema: pa.Schema, place: str) -> None:
    """Raises `InputError` for a column that is absent, is two inputs, or whose type does not fit its use."""
    seen: dict[str, str] = {}
    for setting, names in uses.items():
        for name in names:
            if name not in schema.names:
                raise _missing(setting, name, schema.names, place)
            if setting in inputs and name in seen:
                raise InputError(f"Column {name!r} is in {seen[name]} and in {setting}; it can be in one of them.")
            if setting in inputs:
                seen[name] = setting
            type_ = schema.field(name).type
            if kind_of(type_) not in _KINDS[setting]:
                raise InputError(
                    f"{place}: {setting} column {name!r} has type {type_}, expected {' or '.join(_KINDS[setting])}. "
                    f"{_REMEDIES.get(setting, '')}"
                )


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
        f"Columns: {shorten(names, ', ', most=12)}.{_MISSING.get(setting, '')}"
    )
