"""`DataConfig` is section ``data`` of a run's configuration; `read_tables` reads the file ``data.tables``."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, ValidationError, model_validator

from dmt.errors import InputError
from dmt.files import explain, from_record, read_file
from dmt.plan.tables import TableSpec, table_specs

__all__ = [
    "MOST_IDS",
    "OF_READING",
    "DataConfig",
    "Float",
    "Int",
    "PathText",
    "Section",
    "SyntheticConfig",
    "data_section",
    "read_tables",
    "with_files",
]

_MOST_ROWS = 2**40
MOST_IDS = 1000
"""Largest number of ids in a sequence when ``data.max_length`` is not set."""
OF_READING = ("prepared", "shuffle_rows", "shuffle_seed", "shuffle_pieces")
"""Keys that control how prepared rows are read, not what they contain."""

# Pydantic would take true as 1, and text that holds a number.
Int = Annotated[int, Strict()]
Float = Annotated[float, Strict()]


def _expand(path: str) -> str:
    """Replaces ``~`` and environment variables as a shell does; raises `InputError` for a variable that is not set."""
    found = os.path.expanduser(os.path.expandvars(path))
    if not found or re.search(r"\$[{\w]", found):
        raise InputError(f"{path!r} is empty, or names an environment variable that is not set. Write out the path")
    return found


PathText = Annotated[str, AfterValidator(_expand)]


class Section(BaseModel):
    """Base class of the sections of a configuration: frozen; refuses unknown keys, NaN and infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class SyntheticConfig(Section):
    """The synthetic click log: columns like Criteo's, Zipf-distributed ids, planted groups of features."""

    num_dense: Int = Field(default=13, ge=0, le=10_000)
    """Number of dense features, I1, I2, ..."""
    num_features: Int = Field(default=26, ge=1, le=10_000)
    """Number of categorical features, C1, C2, ..."""
    num_rows: Int = Field(default=1_000_000, ge=1, le=2**32)
    """Number of training rows in an epoch."""
    num_eval_rows: Int = Field(default=65_536, ge=1, le=2**32)
    """Number of evaluation rows."""
    rows_per_table: Int = Field(default=1000, ge=2, le=2**24)
    """Number of rows of each table, and of ids of its feature."""
    num_groups: Int = Field(default=4, ge=1)
    """Number of feature groups; only features of the same group interact in the label."""
    num_multi_hot: Int = Field(default=0, ge=0)
    """Number of features with bags of 0 to 3 ids instead of one id: the last ones."""
    seed: Int = Field(default=0, ge=0, lt=2**32)
    """Seed of the rows."""

    @model_validator(mode="after")
    def _check(self) -> SyntheticConfig:
        for name in ("num_groups", "num_multi_hot"):
            if (number := getattr(self, name)) > self.num_features:
                raise InputError(f"{name}={number} exceeds num_features={self.num_features}. Lower {name}.")
        return self


class DataConfig(Section):
    """Where the rows come from, which columns are used, and how values become inputs of the model.

    Example:
        >>> config = DataConfig(kind="columns", train_path="day_*.parquet", categorical=("c_*",), dense=("d_*",))
        >>> config.label, config.id_mode
        ('label', 'hash')
    """

    kind: Literal["synthetic", "criteo_tsv", "columns", "source", "prepared"] = "synthetic"
    """``criteo_tsv``: Criteo's click logs; ``columns``: Parquet, CSV, TSV or JSON lines ([Data](data.md)). Setting
    ``source`` or ``prepared`` selects the kind of that name."""
    source: str | None = None
    """A function ``package.module:function`` that yields batches, instead of files ([Rows of your
    own](data.md#rows-of-your-own))."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings that are passed to the function of ``source``."""
    prepared: PathText | None = None
    """A folder that [dmt prepare](data.md#prepare) wrote; its manifest names columns and tables."""
    train_path: PathText | None = None
    """Training files: a file, folder or glob, local or a URL for fsspec. Files are read in the order of their names."""
    eval_path: PathText | None = None
    """Evaluation files; without it, ``split_column`` or ``eval_fraction`` selects rows of ``train_path``."""
    eval_fraction: Float = Field(default=0.1, gt=0.0, lt=1.0)
    """Fraction of the rows for evaluation, at even intervals; with ``group_by``, of the requests, by their hash.
    Ignored with ``eval_path`` or ``split_column``."""
    split_column: str | None = None
    """Column with the values ``train`` and ``test`` (evaluation); rows with other values are left out."""
    label: str | None = "label"
    """Column of 0/1 labels."""
    dense: tuple[str, ...] = ()
    """Dense columns, by name or glob (``"d_*"``), in this order; with ``criteo_tsv``, all 13 by default."""
    categorical: tuple[str, ...] = ()
    """Categorical columns, by name or glob, in this order; with ``criteo_tsv``, all 26 by default."""
    multi_hot: tuple[str, ...] = ()
    """Categorical columns, by name or glob, whose text lists values, ``a|b|c``."""
    timestamps: tuple[str, ...] = ()
    """Columns of times, by name or glob. Each becomes the features ``<column>_hour`` and ``<column>_weekday``."""
    csv_separator: str | None = Field(default=None, pattern=r"^[\x01-\x09\x0b\x0c\x0e-!#-\x7f]$")
    """Separator of columns; by default a comma, or a tab in .tsv files."""
    dense_transform: Literal["signed_log1p", "none"] = "signed_log1p"
    """Transform of dense values; ``signed_log1p`` is sign(x) * log(1 + abs(x))."""
    id_mode: Literal["hash", "index", "frequency"] = "hash"
    """How [values become ids](data.md#how-values-become-inputs)."""
    vocabulary: PathText | None = None
    """A prepared folder whose vocabulary is reused; needs ``id_mode = "frequency"``."""
    num_embeddings: Int = Field(default=100_000, ge=1, le=_MOST_ROWS)
    """Rows of each table; with ``id_mode = "frequency"`` the maximum. Synthetic data has ``rows_per_table`` instead."""
    num_embeddings_per_feature: dict[str, Annotated[Int, Field(ge=1, le=_MOST_ROWS)]] = Field(default_factory=dict)
    """Rows of the table, by feature or pattern, as in ``sharding.tables``; overrides ``num_embeddings``."""
    shared_tables: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Features that share a table, by table name: ``{ads = ["ad", "last_ad"]}``."""
    sequences: dict[str, str] = Field(default_factory=dict)
    """List features, each with its target, the feature that attends to it: ``{history = "item"}``
    ([Data](data.md#how-values-become-inputs))."""
    max_length: Int | None = Field(default=None, ge=1, le=2**20)
    """Maximum length of a sequence; longer ones keep their last ids. By default, over 1,000 ids are invalid."""
    shuffle_rows: Int = Field(default=100_000, ge=0)
    """Number of training rows (of files) in a window. Each epoch shuffles rows within windows; 0 shuffles none."""
    shuffle_seed: Int = Field(default=0, ge=0, lt=2**32)
    """Seed of the shuffling."""
    group_by: str | None = None
    """Column that identifies a row's request, session or user; it need not be a feature. Whole requests are shuffled
    ([Data](data.md#which-rank-trains-on-which-row))."""
    shuffle_pieces: bool = False
    """Whether each epoch also shuffles the order of the row groups."""
    tables: PathText | None = None
    """A JSON file that lists tables, for ``dmt plan`` and ``dmt what-if`` without data
    ([Sharding](sharding.md#from-the-command-line))."""
    synthetic: SyntheticConfig = SyntheticConfig()
    """Settings of ``kind="synthetic"``."""

    @model_validator(mode="before")
    @classmethod
    def _choose_kind(cls, values: Any) -> Any:
        """Sets the kind to ``source`` or ``prepared`` if the key of that name is set and the kind is not."""
        if not isinstance(values, dict) or values.get("kind", "synthetic") != "synthetic":
            return values
        kind = next((kind for kind in ("source", "prepared") if values.get(kind)), "synthetic")
        return values | {"kind": kind}

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        """Refuses keys that do not apply to the kind or exclude each other, and a kind without the keys it needs."""
        named = ("split_column", "timestamps", "csv_separator")  # of files whose columns have names
        files = ("train_path", "eval_path", "eval_fraction", *named)
        sizes = ("num_embeddings", "num_embeddings_per_feature")
        columns = ("label", "dense", "categorical", "multi_hot", "dense_transform", "id_mode", "group_by", "max_length")
        tables = (*sizes, "shared_tables", "vocabulary", "sequences")
        rest = ("prepared", "source", "options")
        defaults = DataConfig.model_construct()
        given = [name for name, value in self if value != getattr(defaults, name)]
        meaningless = {
            "synthetic": (*files, *rest, *sizes, "group_by", "dense_transform", "max_length"),
            "criteo_tsv": (*rest, *named, "multi_hot", "sequences", "max_length"),
            "source": (*files, "prepared", "group_by", "vocabulary"),
            "prepared": (*files, *tables, *columns, "source", "options"),
        }.get(self.kind, rest)
        if wrong := [name for name in given if name in meaningless]:
            raise InputError(f"{wrong[0]} does not apply to kind={self.kind!r}. Remove {wrong[0]} or change the kind.")
        needed = {"criteo_tsv": ("train_path",), "columns": ("train_path", "categorical")}
        needed |= {"source": ("source", "categorical"), "prepared": ("prepared",)}
        if absent := [name for name in needed.get(self.kind, ()) if not getattr(self, name)]:
            raise InputError(f"kind={self.kind!r} needs {absent[0]}. Set it, or change the kind.")
        mode = f"id_mode={self.id_mode!r}"
        refusals = (
            (self.kind == "criteo_tsv" and self.id_mode == "index", f"{mode} does not fit kind='criteo_tsv' (hex ids)"),
            (self.kind == "source" and self.id_mode == "frequency", f"{mode} needs files, but kind='source' has none"),
            (self.eval_path and self.split_column, "eval_path and split_column both select the evaluation rows"),
            (self.max_length and not self.sequences, "max_length limits sequences, but data.sequences is empty"),
            (self.vocabulary and self.id_mode != "frequency", f"vocabulary needs id_mode='frequency', but {mode}"),
        )
        for is_wrong, message in refusals:
            if is_wrong:
                raise InputError(f"{message}. Change or remove one of the two settings.")
        return self


def data_section(record: Any, place: str, remedy: str) -> DataConfig:
    """Validates a section ``data`` read from a file; an `InputError` begins with ``place`` and ends with ``remedy``."""
    try:
        return DataConfig.model_validate(record)
    except ValidationError as error:
        raise InputError(f"{place}: {explain(error)} {remedy}") from error


def with_files(config: DataConfig, path: str) -> DataConfig:
    """Returns unvalidated settings to read ``path``, a prepared folder or raw files with the columns of ``config``.

    Raises:
        InputError: ``config`` has synthetic rows, or rows that another program prepared without saying from what.
    """
    if config.kind == "synthetic":
        raise InputError("The model was trained on synthetic clicks; rows of a file do not fit it. Leave out --data.")
    if (Path(path) / "manifest.json").is_file():
        return DataConfig(prepared=path, shuffle_rows=config.shuffle_rows, shuffle_seed=config.shuffle_seed)
    if config.kind == "prepared":
        raise InputError(f"data.prepared={config.prepared!r}: its manifest lacks `raw`, needed by --data. Omit --data.")
    changes = {"train_path": path, "eval_path": None, "source": None, "options": dict[str, Any]()}
    return config.model_copy(update={**changes, "kind": "columns" if config.kind == "source" else config.kind})


class _Table(Section):
    """An entry of the file ``data.tables``."""

    name: str = Field(min_length=1)
    num_embeddings: Int = Field(ge=1)
    embedding_dim: Int = Field(ge=1, multiple_of=4)  # as FBGEMM's kernels require
    feature_names: tuple[str, ...] = Field(min_length=1)
    data_type: Literal["FP32", "FP16"] = "FP32"
    sequences: tuple[tuple[str, str], ...] = ()
    is_sequence: bool = False


def read_tables(path: Path) -> tuple[TableSpec, ...]:
    """Reads tables from JSON: a list of {name, num_embeddings, embedding_dim, feature_names}, or a ``towers.json``.

    An entry may have a ``data_type``, ``"FP32"`` (default) or ``"FP16"``, and ``sequences``: [sequence, target] pairs.

    Raises:
        InputError: the file has no tables in JSON, entry N (from 1) is malformed, or tables or features share a name.
    """
    place = f"data.tables={str(path)!r}"
    record = read_file(path, "JSON", place=place, remedy="Name a JSON file with a list of tables.")
    entries = record.get("tables") if isinstance(record, dict) else record
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{place} holds no list of tables. Name a JSON file with one, or a plan of `dmt partition`.")
    tables = [
        from_record(_Table, entry, place=f"{place}, entry {number}", remedy="Correct the entry.")
        for number, entry in enumerate(entries, start=1)
    ]
    try:
        return table_specs(tables)
    except InputError as error:
        raise InputError(f"{place}: {error}") from error
