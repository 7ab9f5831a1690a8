"""`find_columns` matches a configuration with the columns of a file: dense columns, features, and their tables."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import pyarrow as pa

from dmt.errors import InputError, did_you_mean
from dmt.formatting import shorten
from dmt.plan.tables import TableFormat, TableSpec
from dmt.sharding.schemes import rules_by_name
from dmt.training.data.config import DataConfig

__all__ = [
    "CRITEO_CATEGORICAL",
    "CRITEO_DENSE",
    "Columns",
    "Feature",
    "explicit_config",
    "find_columns",
    "kind_of",
    "tables_of",
]

Kind = Literal["text", "number", "decimal", "time", "list", "other"]
CRITEO_DENSE = tuple(f"I{i}" for i in range(1, 14))
"""Names of Criteo's 13 integer columns, in file order."""
CRITEO_CATEGORICAL = tuple(f"C{i}" for i in range(1, 27))
"""Names of Criteo's 26 categorical columns, in file order."""
# Number of table rows for each part of a time; row 0 stands for a missing time.
_PART_ROWS = {"hour": 25, "weekday": 8}
_INPUTS = ("dense", "categorical", "timestamps")
# Kinds of columns that each setting may name.
_KINDS = {
    "label": ("text", "number"),
    "split_column": ("text",),
    "group_by": ("text", "number", "time"),
    "dense": ("text", "number", "decimal"),
    "categorical": ("text", "number", "list"),
    "multi_hot": ("text", "list"),
    "timestamps": ("text", "time"),  # a number could be seconds, milliseconds or 20261122
}
# Kinds of the Arrow types: a column without any value is text, booleans are numbers.
_TYPES: dict[Kind, tuple[Callable[[pa.DataType], bool], ...]] = {
    "text": (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null),
    "number": (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean),
    "time": (pa.types.is_timestamp, pa.types.is_date),
    "decimal": (pa.types.is_decimal,),
}


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A categorical feature and the table of its embeddings."""

    name: str
    """Name of the feature, and the key of its ids in a batch."""
    rows: int
    """Number of rows of the table."""
    table: str
    """Name of the table without ``t_``: that of a feature, or a key of ``data.shared_tables``. It salts the hash."""
    is_bag: bool = False
    """True if a row has any number of ids; False if exactly one."""
    target: str | None = None
    """For a sequence (``data.sequences``), the feature that attends to it; None for other features."""
    time: tuple[str, str] | None = None
    """For a part of a time, the column of times and the part, ``"hour"`` or ``"weekday"``; None for other features."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of a run, in the order of the model's inputs."""

    dense: tuple[str, ...]
    """Names of the dense columns."""
    features: tuple[Feature, ...]
    """Categorical features, with the parts of times last."""
    label: str | None
    """Name of the column of 0/1 labels; None if rows have no labels."""

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the categorical features."""
        return tuple(feature.name for feature in self.features)

    @cached_property
    def schema(self) -> pa.Schema:
        """Schema of prepared rows: label int8, dense float32, ids (or lists of ids) int32, int64 above 2^31 rows."""
        fields = [] if self.label is None else [pa.field(self.label, pa.int8())]
        fields += [pa.field(name, pa.float32()) for name in self.dense]
        for feature in self.features:
            type_ = pa.int64() if feature.rows > 2**31 else pa.int32()
            fields.append(pa.field(feature.name, pa.large_list(type_) if feature.is_bag else type_))
        return pa.schema([field.with_nullable(False) for field in fields])  # nulls would take a third longer to read


def find_columns(config: DataConfig, schema: pa.Schema, place: str) -> Columns:
    """Finds the columns of a configuration in the schema of a file or batch, which ``place`` names in messages.

    Raises:
        InputError: a name or glob matches no column, a column is used twice or has an unsuitable type, or the settings
            of tables name an unknown feature or contradict each other.

    Example:
        >>> config = DataConfig(kind="columns", train_path="a.csv", dense=("d",), categorical=("c_*",))
        >>> columns = find_columns(config, pa.schema({name: pa.string() for name in ("label", "d", "c_1")}), "a.csv")
        >>> columns.schema.names
        ['label', 'd', 'c_1']
    """
    is_criteo = config.kind == "criteo_tsv"
    wanted: dict[str, tuple[str, ...]]
    wanted = {s: (name,) for s in ("label", "split_column", "group_by") if (name := getattr(config, s)) is not None}
    wanted["dense"] = config.dense or (CRITEO_DENSE if is_criteo else ())
    wanted["categorical"] = config.categorical or (CRITEO_CATEGORICAL if is_criteo else ())
    wanted["timestamps"] = config.timestamps
    # The order of columns in a source's first batch may differ between processes.
    names = sorted(schema.names) if config.kind == "source" else schema.names
    inputs = [name for name in names if name not in (config.label, config.split_column)]
    for setting in _INPUTS:
        if taken := [name for name in wanted[setting] if name in (config.label, config.split_column)]:
            use = "label" if taken[0] == config.label else "split_column"
            raise InputError(f"{place}: {setting} column {taken[0]!r} is data.{use}, not an input. Take it out.")
    chosen = {s: _select(s, patterns, inputs if s in _INPUTS else names, place) for s, patterns in wanted.items()}
    types, numbers = dict(zip(schema.names, schema.types, strict=True)), Counter(schema.names)
    for setting, columns in chosen.items():
        for name in columns:
            _check_use(setting, name, types[name], numbers[name], place)
    used = Counter(name for setting in _INPUTS for name in chosen[setting])
    times = {f"{column}_{part}": (column, part) for column in chosen["timestamps"] for part in _PART_ROWS}
    if taken := [name for name in times if name in (*used, config.label)]:
        raise InputError(f"{place}: column {taken[0]!r} has the name of a feature of data.timestamps. Rename it.")
    if doubled := [name for name in used if used[name] > 1]:
        raise InputError(f"{place}: column {doubled[0]!r} is in more than one of {', '.join(_INPUTS)}. Name it in one.")
    rows = dict.fromkeys(chosen["categorical"], config.num_embeddings)
    sizes = rules_by_name(config.num_embeddings_per_feature, rows)
    _check_features("data.num_embeddings_per_feature", sizes, rows)
    _check_features("data.sequences", [*config.sequences, *config.sequences.values()], chosen["categorical"])
    rows |= {name: sizes.get(target, rows[target]) for name, target in config.sequences.items()}
    rows |= sizes | {name: _PART_ROWS[part] for name, (_, part) in times.items()}
    tables = _table_names(config, rows)
    bags = _select("multi_hot", config.multi_hot, chosen["categorical"], place)
    for name in bags:
        _check_use("multi_hot", name, types[name], 1, place)
    features = tuple(
        Feature(
            name=name,
            rows=rows[name],
            table=tables[name],
            is_bag=name in bags or (name not in times and kind_of(types[name]) == "list"),
            target=config.sequences.get(name),
            time=times.get(name),
        )
        for name in rows
    )
    _check_sequences(features, place)
    return Columns(dense=chosen["dense"], features=features, label=config.label)


def _select(setting: str, patterns: Sequence[str], names: Sequence[str], place: str) -> tuple[str, ...]:
    """Returns the columns that names and globs match, each once, ordered by pattern and then as in ``names``."""
    chosen: dict[str, None] = {}
    known, known_as = set(names), "Columns of data.categorical" if setting == "multi_hot" else "Columns"
    for pattern, number in Counter(patterns).items():
        if number > 1:
            raise InputError(f"{place}: {setting} names {pattern!r} {number} times. Name it once.")
        matches = [pattern] if pattern in known else fnmatch.filter(names, pattern)
        if not matches:
            raise InputError(
                f"{place}: {setting} {pattern!r} matches no column.{did_you_mean(pattern, names)} "
                f"{known_as}: {shorten(names, ', ', most=12)}. Correct data.{setting}."
            )
        chosen.update(dict.fromkeys(matches))
    return tuple(chosen)


def _check_use(setting: str, name: str, type_: pa.DataType, number: int, place: str) -> None:
    """Raises `InputError` for a column whose name occurs more than once or whose type does not suit the setting."""
    if number > 1:
        raise InputError(f"{place}: {number} columns have the name {name!r}. Rename all but one.")
    if kind_of(type_) not in _KINDS[setting]:
        raise InputError(
            f"{place}: {setting} column {name!r} has type {type_}, but must hold {' or '.join(_KINDS[setting])}. "
            "Convert the column, or name lists in data.categorical, dates and times in data.timestamps."
        )


def kind_of(type_: pa.DataType) -> Kind:
    """Returns what an Arrow type holds: ``"list"`` for lists of text or numbers, ``"other"`` if no setting takes it."""
    if pa.types.is_dictionary(type_):
        return kind_of(type_.value_type)
    if any(is_list(type_) for is_list in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)):
        return "list" if kind_of(type_.value_type) in ("text", "number") else "other"
    return next((kind for kind, tests in _TYPES.items() if any(test(type_) for test in tests)), "other")


def _table_names(config: DataConfig, names: Iterable[str]) -> dict[str, str]:
    """Returns the name of each feature's table, without the prefix ``t_``; see `Feature.table`."""
    tables = {name: name for name in names}
    for table, members in config.shared_tables.items():
        _check_features(f"data.shared_tables.{table}", members, tables)
        if table in tables and table not in members:
            raise InputError(f"data.shared_tables.{table} has the name of a feature outside it. Rename the table.")
        tables |= dict.fromkeys(members, table)
    shared = [name for members in config.shared_tables.values() for name in members]
    for name, target in config.sequences.items():
        if name in shared and tables[name] != tables[target]:
            raise InputError(
                f"data.shared_tables: sequence {name!r} is in table {tables[name]!r}, but its target {target!r} "
                f"(data.sequences) is in {tables[target]!r}. Put both in one table or take the sequence out."
            )
        tables[name] = tables[target]
    if doubled := [name for name, number in Counter(shared).items() if number > 1]:
        raise InputError(f"data.shared_tables: feature {doubled[0]!r} is named more than once. Name it once.")
    return tables


def _check_sequences(features: Sequence[Feature], place: str) -> None:
    """Raises `InputError` for a sequence that is not a list, or whose target is a list."""
    lists = {feature.name: feature.is_bag for feature in features}
    for name, target in ((feature.name, feature.target) for feature in features if feature.target is not None):
        if not lists[name]:
            raise InputError(
                f"{place}: data.sequences: column {name!r} is not a list. Store lists, or text such as 'a|b|c' in a "
                "column of data.multi_hot."
            )
        if lists[target]:
            raise InputError(
                f"{place}: data.sequences: target {target!r} of {name!r} is a list. Choose one with one id per row."
            )


def _check_features(setting: str, given: Iterable[str], names: Iterable[str]) -> None:
    """Raises `InputError` for a name in ``given`` that is not one of the categorical features ``names``."""
    known = dict.fromkeys(names)
    if unknown := [name for name in given if name not in known]:
        raise InputError(
            f"{setting}: {unknown[0]!r} matches no categorical feature.{did_you_mean(unknown[0], known)} "
            f"Use one of {shorten(list(known), ', ', most=12)}."
        )


def tables_of(
    columns: Columns, *, embedding_dim: int, embedding_dims: Mapping[str, int], data_type: TableFormat = "FP32"
) -> list[TableSpec]:
    """Returns a table ``t_<name>`` for each of ``data.shared_tables``, and ``t_<feature>`` for each other feature.

    A sequence is in the table of its target. ``embedding_dims`` overrides ``embedding_dim`` by feature or pattern; the
    number format is ``data_type``. Dots in a name are percent-encoded, as PyTorch forbids them in names of modules.

    Raises:
        InputError: ``embedding_dims`` names an unknown feature, or features that share a table have different numbers
            of rows or columns.
    """
    embedding_dims = rules_by_name(embedding_dims, columns.feature_names)
    _check_features("model.embedding_dims", embedding_dims, columns.feature_names)
    members: dict[str, list[Feature]] = {}
    for feature in columns.features:
        members.setdefault(feature.table, []).append(feature)
    tables = []
    for table, features in members.items():
        names = tuple(feature.name for feature in features)
        sizes = {(feature.rows, embedding_dims.get(feature.name, embedding_dim)) for feature in features}
        if len(sizes) > 1:
            raise InputError(
                f"data.shared_tables or data.sequences: {shorten(names, ', ')} share a table, but have (rows, columns) "
                f"{shorten([*map(str, sorted(sizes))], ', ')}. Make them equal in data.num_embeddings_per_feature and "
                "model.embedding_dims."
            )
        rows, dim = sizes.pop()
        name = "t_" + table.replace("%", "%25").replace(".", "%2E")
        tables.append(
            TableSpec(
                name=name,
                num_embeddings=rows,
                embedding_dim=dim,
                feature_names=names,
                data_type=data_type,
                sequences=tuple((feature.name, feature.target) for feature in features if feature.target is not None),
            )
        )
    return tables


def explicit_config(config: DataConfig, columns: Columns) -> DataConfig:
    """Returns the settings with names in place of globs, and each table's size, to read other files in the same way."""
    plain = [feature for feature in columns.features if feature.time is None]
    times = [feature.time[0] for feature in columns.features if feature.time is not None]
    changes: dict[str, Any] = {
        "dense": columns.dense,
        "categorical": tuple(feature.name for feature in plain),
        "multi_hot": tuple(feature.name for feature in plain if feature.is_bag),
        "timestamps": tuple(dict.fromkeys(times)),
        "num_embeddings_per_feature": {feature.name: feature.rows for feature in plain},
    }
    return config.model_copy(update=changes)
