"""`DataConfig`, the data section of a run's configuration; `SyntheticConfig`; `read_tables` for ``data.tables``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dmt.errors import InputError, did_you_mean
from dmt.files import read_json
from dmt.formatting import human_bytes
from dmt.plan.tables import TableSpec, table_specs
from dmt.training.data.times import TimePartName

__all__ = ["DataConfig", "Section", "SyntheticConfig", "check_memory", "with_files", "read_tables"]

_TABLE_KEYS = ("name", "num_embeddings", "embedding_dim", "feature_names")
_DATA_TYPES = ("FP32", "FP16")
_MOST_ROWS = 2**40
OF_SOURCE = ("source", "options")
"""Keys of the section data that only a source has."""


class Section(BaseModel):
    """A section of a configuration; bounds every number and text in it, also where a field has no bound of its own.

    Raises:
        ValidationError: a whole number beyond 2**53, which JSON and TensorBoard would round; another number that is not
            0 and beyond 1e-30 to 1e30, whose squares 32-bit floats have no room for; a text with a NUL.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        for name, value in self:
            if isinstance(value, int) and abs(value) > 2**53:
                raise InputError(f"{name}={value} is beyond 2**53 = {2**53}. Give a smaller number.")
            if isinstance(value, float) and value and not 1e-30 <= abs(value) <= 1e30:
                raise InputError(f"{name}={value} is beyond 1e-30 to 1e30. Give a number between.")
            if isinstance(value, str) and "\0" in value:
                raise InputError(f"{name}={value!r} has a NUL character. Leave it out.")
        return self


def check_memory(num_bytes: float, what: str) -> None:
    """Raises `InputError` if something needs more memory than this machine has; ``what`` names it and its settings.

    Example:
        >>> check_memory(1e18, "The model (model.c=9)")
        Traceback (most recent call last):
        ...
        dmt.errors.InputError: The model (model.c=9) needs at least 1000 PB of memory, but this machine has ...
    """
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > there:
        raise InputError(
            f"{what} needs at least {human_bytes(num_bytes)} of memory, but this machine has {human_bytes(there)}. "
            "Lower the settings."
        )


class SyntheticConfig(Section):
    """The synthetic click log: Criteo's shape, Zipf ids, planted feature groups.

    Example:
        >>> SyntheticConfig(num_features=8, num_groups=2).num_rows
        1000000
    """

    num_dense: int = Field(default=13, ge=0, le=10_000)
    """Dense features, named I1, I2, ..."""
    num_features: int = Field(default=26, ge=1, le=10_000)
    """Categorical features, named C1, C2, ...; the last ``num_multi_hot`` of them have bags of ids."""
    num_rows: int = Field(default=1_000_000, ge=1, le=2**32)
    """Training rows of one epoch."""
    num_eval_rows: int = Field(default=65_536, ge=1, le=2**32)
    """Evaluation rows; they are drawn apart from the training rows."""
    rows_per_table: int = Field(default=1000, ge=2, le=2**32)
    """Ids of every categorical feature, and rows of its table."""
    zipf_exponent: float = Field(default=1.05, ge=0.0, le=20.0)
    """The i-th most frequent id has a probability in proportion to i ** -zipf_exponent; 0 is uniform."""
    num_groups: int = Field(default=4, ge=1)
    """Groups of features that share a hidden variable and interact in the label."""
    group_correlation: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Share of a feature's variance that comes from its group's hidden variable."""
    signal: float = Field(default=1.3, ge=0.0, le=1e6)
    """Standard deviation of the logit's predictable part; larger is easier."""
    noise: float = Field(default=0.3, ge=0.0, le=1e6)
    """Standard deviation of unpredictable noise added to the logit."""
    base_rate: float = Field(default=0.25, gt=0.0, lt=1.0)
    """Share of clicks."""
    num_multi_hot: int = Field(default=0, ge=0)
    """Number of features that have bags of 0 to ``max_bag`` ids instead of exactly one."""
    max_bag: int = Field(default=3, ge=1, le=65_536)
    """Largest bag of a multi-hot feature."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of all that is drawn."""

    @model_validator(mode="after")
    def _check(self) -> SyntheticConfig:
        for name in ("num_groups", "num_multi_hot"):
            if getattr(self, name) > self.num_features:
                raise InputError(f"{name}={getattr(self, name)} exceeds num_features={self.num_features}.")
        return self


class DataConfig(Section):
    """Source of the rows, their columns, and the encoding of values as inputs of a model.

    Example:
        >>> config = DataConfig(kind="columns", train_path="day_*.parquet", categorical=("c_*",), dense=("d_*",))
        >>> config.label, config.id_mode
        ('label', 'hash')
    """

    kind: Literal["synthetic", "criteo_tsv", "columns", "source"] = "synthetic"
    """``synthetic``: the built-in generator; ``criteo_tsv``: Criteo's click logs (label, I1-I13, C1-C26; also
    .gz); ``columns``: .parquet, .csv or .tsv files with named columns (text also .gz); ``source``: the function that
    ``source`` names, which sets it."""
    source: str | None = None
    """``package.module:function`` that yields batches of named columns
    ([Rows of your own](data.md#rows-of-your-own)), instead of files."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the function's own."""
    prepared: str | None = None
    """A folder that ``dmt prepare`` wrote ([Prepared data](data.md#prepare)). When the configuration is read,
    its paths, columns and rows of tables take the place of this key."""
    train_path: str | None = None
    """A file, a directory (all its data files) or a glob, also as a URL that fsspec knows (``s3://clicks/day_*.parquet``);
    several files are read in the order of their names."""
    eval_path: str | None = None
    """Files for evaluation, like ``train_path``. Without it, rows of ``train_path`` are set apart by
    ``split_column`` or ``eval_fraction``."""
    eval_fraction: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Share of rows set apart for evaluation, evenly spread over the files (about every tenth row at 0.1): row
    i, counted from 0, is one when ``floor((i + 1) * eval_fraction)`` exceeds ``floor(i * eval_fraction)``. With
    ``group_by``, about this share of the requests, whole, by a hash of their value. Not used with ``eval_path``,
    ``split_column`` or synthetic data."""
    split_column: str | None = None
    """Column that tells training rows from evaluation rows (``columns`` and ``source``)."""
    train_split: str = "train"
    """The value of ``split_column`` in training rows."""
    eval_split: str = "test"
    """The value of ``split_column`` in evaluation rows."""
    label: str | None = "label"
    """The column of 0/1 labels (``columns`` and ``source``). Only ``dmt score`` has rows without one."""
    dense: tuple[str, ...] = ()
    """Dense columns, by name or by glob such as ``"d_*"``, in this order. ``criteo_tsv``: empty is all 13."""
    categorical: tuple[str, ...] = ()
    """Categorical columns, by name or glob, in this order. ``criteo_tsv``: empty is all 26."""
    multi_hot: tuple[str, ...] = ()
    """Categorical columns whose text is a list of values, by name or glob. Parquet lists need no mention."""
    timestamps: tuple[str, ...] = ()
    """Columns of dates or times, by name or glob (``columns`` and ``source``): Arrow dates and timestamps, or ISO 8601
    text. Each becomes the features of ``timestamp_parts``, named ``<column>_hour`` and so on. Times with a zone are
    turned into UTC."""
    timestamp_parts: tuple[TimePartName, ...] = Field(default=("hour", "weekday"), min_length=1)
    """Parts of every time: the categories ``hour``, ``weekday``, ``day`` (of the month) and ``month``, each with a
    table of just its values, and ``years``, a dense column: seconds since 1970 in mean years of 31,556,952 s."""
    list_separator: str = Field(default="|", min_length=1)
    """Separates the values of a ``multi_hot`` text column."""
    csv_separator: str | None = Field(default=None, pattern=r"^[\x01-\x09\x0b\x0c\x0e-!#-\x7f]$")
    """Separates the columns of a text file; by default a comma, or a tab in .tsv files."""
    dense_transform: Literal["signed_log1p", "none"] = "signed_log1p"
    """``signed_log1p``: sign(x) * log(1 + abs(x)), but not of the years of ``timestamps``. A missing value becomes 0
    afterwards."""
    id_mode: Literal["hash", "index"] = "hash"
    """``hash``: any value is hashed into its table. ``index``: values are row numbers of the table, and checked.
    A missing value is row 0 in both; an empty or missing list is an empty bag."""
    num_embeddings: int = Field(default=100_000, ge=1, le=_MOST_ROWS)
    """Rows of every table (synthetic data: ``synthetic.rows_per_table`` instead)."""
    num_embeddings_per_feature: dict[str, int] = Field(default_factory=dict)
    """Rows of single tables, by feature, where they differ from ``num_embeddings``."""
    shared_tables: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Features that share a table, by its name: ``{ads = ["ad", "last_ad"]}``. A value has one row for all of them."""
    max_train_rows: int | None = Field(default=None, ge=1)
    """Training rows used at most, from the front."""
    max_eval_rows: int | None = Field(default=None, ge=1)
    """Evaluation rows used at most, from the front."""
    shuffle_rows: int = Field(default=100_000, ge=0)
    """Training rows are shuffled within consecutive blocks of this many rows, differently in each epoch; 0 keeps
    the order of the files. Synthetic rows are independent draws and are not shuffled."""
    shuffle_seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the shuffling."""
    group_by: str | None = None
    """Column of the request, session or user that a row belongs to; it need not be a feature. Whole requests are
    shuffled instead of rows: the rows of a block of ``shuffle_rows`` with one value follow one another, in their order
    in the files, and come into one batch of one rank. The only exception is a request that the end of a batch or of a
    block cuts in two: batches keep their size. A row without a value is a request of its own. With ``shuffle_rows = 0``
    and in evaluation the order of the files stays."""
    shuffle_pieces: bool = False
    """Training reads the pieces of its files (row groups; 4 MiB of text; whole gzip files) in an order of its own in
    each epoch, instead of that of the files, before rows are shuffled in blocks of ``shuffle_rows``. Needs
    ``eval_path`` or ``split_column``, and no ``max_train_rows``: both count rows in the order of the files."""
    tables: str | None = None
    """A JSON list of tables, or a ``towers.json`` that records its tables; ``dmt plan`` places them instead of those of
    the data ([Sharding](sharding.md)). Training refuses it."""
    synthetic: SyntheticConfig = SyntheticConfig()
    """Settings of ``kind="synthetic"``."""

    @model_validator(mode="before")
    @classmethod
    def _choose_kind(cls, values: Any) -> Any:
        """A source, or a prepared folder, takes the place of the synthetic clicks."""
        if not isinstance(values, dict):
            return values
        if values.get("prepared"):
            from dmt.training.data.prepared import with_prepared

            return with_prepared(values)
        if values.get("source") and values.get("kind", "synthetic") == "synthetic":
            return values | {"kind": "source"}
        return values

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        if self.kind in ("synthetic", "source"):
            (self._check_synthetic if self.kind == "synthetic" else self._check_source)()
            return self
        if given := self._given("source", "options"):
            raise InputError(f"{given[0]} has no meaning for kind={self.kind!r}. Leave out one of them.")
        if not self.train_path:
            raise InputError(f"kind={self.kind!r} needs train_path: a file, a directory or a glob.")
        if self.kind == "criteo_tsv":
            if self.id_mode == "index":
                raise InputError(
                    "id_mode='index' needs columns of row numbers, but Criteo's categories are hexadecimal text. "
                    "Use id_mode='hash', or kind='columns'."
                )
            if self.split_column or self.multi_hot or self.timestamps:
                raise InputError(
                    "split_column, multi_hot and timestamps are for kind='columns'; Criteo's format has none of them."
                )
        elif not self.categorical:
            raise InputError("kind='columns' needs categorical: names or globs of columns, such as ['c_*'].")
        if self.eval_path and self.split_column:
            raise InputError("eval_path and split_column both say what evaluation rows are; give one of them.")
        wrong = {name: rows for name, rows in self.num_embeddings_per_feature.items() if not 1 <= rows <= _MOST_ROWS}
        if wrong:
            raise InputError(
                f"num_embeddings_per_feature: {min(wrong)!r} has {wrong[min(wrong)]} rows; give 1 to {_MOST_ROWS}."
            )
        return self

    def split_value(self, split: Literal["train", "eval"] | None) -> str | None:
        """Returns the split column's value in the rows of a split; None for rows of both, or without such a column."""
        if not self.split_column or split is None:
            return None
        return self.train_split if split == "train" else self.eval_split

    def _given(self, *names: str) -> list[str]:
        """Returns those of the fields that differ from their defaults; a resolved config sets all."""
        fields = DataConfig.model_fields
        return [name for name in names if getattr(self, name) != fields[name].get_default(call_default_factory=True)]

    def _check_synthetic(self) -> None:
        names = ("train_path", "eval_path", "num_embeddings", "num_embeddings_per_feature", "group_by")
        if given := self._given(*names, "shuffle_pieces", "timestamps", "options"):
            raise InputError(
                f"{min(given)} has no meaning for kind='synthetic'; use the settings under `synthetic` "
                "(rows_per_table, num_rows, num_eval_rows), or set kind."
            )

    def _check_source(self) -> None:
        if not self.source:
            raise InputError("kind='source' needs source: package.module:function.")
        if given := self._given("train_path", "eval_path", "shuffle_pieces", "timestamps", "csv_separator"):
            raise InputError(
                f"{given[0]} has no meaning with source={self.source!r}: the function reads as it likes. Leave out one "
                "of them."
            )
        if not self.categorical:
            raise InputError("source needs categorical: names or globs of columns, such as ['c_*'].")


def with_files(config: DataConfig, path: str) -> DataConfig:
    """Returns the settings for files with the columns of a source, or of other files, unchecked."""
    if config.kind != "source":
        return config.model_copy(update={"train_path": path})
    fields = {name: DataConfig.model_fields[name].get_default(call_default_factory=True) for name in OF_SOURCE}
    return config.model_copy(update={**fields, "kind": "columns", "train_path": path})


def read_tables(path: Path) -> tuple[TableSpec, ...]:
    """Reads tables from JSON: a list of {name, num_embeddings, embedding_dim, feature_names}, or a ``towers.json``.

    An entry may have a ``data_type``, ``"FP32"`` (the default) or ``"FP16"``.

    Raises:
        InputError: the file is absent, not JSON, or an entry is malformed; entries are counted from 1.
    """
    place = f"data.tables={str(path)!r}"
    record = read_json(path, place=place, remedy="Name a JSON file with a list of tables.")
    entries = record.get("tables") if isinstance(record, dict) else record
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{place}: holds no list of tables, as `dmt partition` records them in towers.json.")
    tables = [_table_of(f"{place}, entry {number}", entry) for number, entry in enumerate(entries, start=1)]
    try:
        return table_specs(tables)
    except InputError as error:
        raise InputError(f"{place}: {error}") from error


def _table_of(place: str, entry: Any) -> TableSpec:
    if not isinstance(entry, dict):
        raise InputError(f"{place}: {entry!r} must be an object with the keys {', '.join(_TABLE_KEYS)}.")
    if isinstance(entry.get("name"), str):
        place += f" ({entry['name']!r})"
    known = (*_TABLE_KEYS, "data_type")
    unknown, missing = [key for key in entry if key not in known], [key for key in _TABLE_KEYS if key not in entry]
    if unknown:
        raise InputError(
            f"{place}: the key {unknown[0]!r} is unknown; a table has {', '.join(known)}."
            f"{did_you_mean(unknown[0], known)}"
        )
    if missing:
        raise InputError(f"{place}: {missing[0]} is missing. Give {', '.join(_TABLE_KEYS)}.")
    if not _is_name(entry["name"]):
        raise InputError(f"{place}: name={entry['name']!r} must be a text that is not empty.")
    for size in ("num_embeddings", "embedding_dim"):
        value = entry[size]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{place}: {size}={value!r} must be a whole number of at least 1.")
        if value >= 2**63:
            raise InputError(f"{place}: {size}={value:.3e} must be below 2**63; ids are int64.")
    if entry["embedding_dim"] % 4:
        raise InputError(f"{place}: embedding_dim={entry['embedding_dim']} must be a multiple of 4 (FBGEMM's kernels).")
    features = entry["feature_names"]
    if not isinstance(features, list) or not features or not all(map(_is_name, features)):
        raise InputError(f"{place}: feature_names={features!r} must be a list of one text or more, such as ['ad'].")
    if entry.get("data_type", "FP32") not in _DATA_TYPES:
        raise InputError(f"{place}: data_type={entry['data_type']!r} is unknown; use one of {list(_DATA_TYPES)}.")
    return TableSpec(**{**entry, "feature_names": tuple(features)})


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)
