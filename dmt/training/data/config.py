"""`DataConfig`, the data section of a run's configuration; `SyntheticConfig`; `read_tables` for ``data.tables``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dmt.errors import InputError
from dmt.files import from_record, read_file
from dmt.plan.tables import TableSpec, table_specs

__all__ = ["MOST_IDS", "OF_READING", "DataConfig", "Section", "SyntheticConfig", "read_tables", "with_files"]

_MOST_ROWS = 2**40
MOST_IDS = 1000
"""Ids of a sequence where ``data.max_length`` is not set."""
OF_READING = ("prepared", "shuffle_rows", "shuffle_seed", "shuffle_pieces")
"""Keys that say how prepared rows are read; the others say what is in them."""


class Section(BaseModel):
    """A section of a configuration; numbers are finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class SyntheticConfig(Section):
    """The synthetic click log: Criteo's shape, Zipf ids, planted feature groups.

    Example:
        >>> SyntheticConfig(num_features=8, num_groups=2).num_rows
        1000000
    """

    num_dense: int = Field(default=13, ge=0, le=10_000)
    """Dense features I1, I2, ..."""
    num_features: int = Field(default=26, ge=1, le=10_000)
    """Categorical features C1, C2, ..."""
    num_rows: int = Field(default=1_000_000, ge=1, le=2**32)
    """Training rows of one epoch."""
    num_eval_rows: int = Field(default=65_536, ge=1, le=2**32)
    """Evaluation rows."""
    rows_per_table: int = Field(default=1000, ge=2, le=2**24)
    """Ids of every feature, and rows of its table."""
    num_groups: int = Field(default=4, ge=1)
    """Groups of features that interact in the label."""
    num_multi_hot: int = Field(default=0, ge=0)
    """The last so many features have bags of 0 to 3 ids."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of all data."""

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

    kind: Literal["synthetic", "criteo_tsv", "columns", "source", "prepared"] = "synthetic"
    """``criteo_tsv``: Criteo's click logs; ``columns``: Parquet, CSV, TSV or JSON lines ([Data](data.md)). ``source``
    and ``prepared`` set it themselves."""
    source: str | None = None
    """``package.module:function`` that yields batches, instead of files ([Rows of your
    own](data.md#rows-of-your-own))."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings that the function reads."""
    prepared: str | None = None
    """A folder of [dmt prepare](data.md#prepare), which knows its columns and tables."""
    train_path: str | None = None
    """A file, folder or glob, or such a URL for fsspec; files are read in the order of their names."""
    eval_path: str | None = None
    """Evaluation files; otherwise ``split_column`` or ``eval_fraction`` takes rows of ``train_path``."""
    eval_fraction: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Share of rows (with ``group_by``: of requests) for evaluation, evenly spread; unused with ``eval_path`` or
    ``split_column``."""
    split_column: str | None = None
    """Column that is ``train`` or ``test`` (evaluation); other rows are left out."""
    label: str | None = "label"
    """The column of 0/1 labels."""
    dense: tuple[str, ...] = ()
    """Dense columns, by name or glob (``"d_*"``), in this order. ``criteo_tsv``: by default all 13."""
    categorical: tuple[str, ...] = ()
    """Categorical columns, likewise. ``criteo_tsv``: by default all 26."""
    multi_hot: tuple[str, ...] = ()
    """Those whose text is a list of values, ``a|b|c``."""
    timestamps: tuple[str, ...] = ()
    """Columns of times, by name or glob. Each becomes the features ``<column>_hour`` and ``<column>_weekday``."""
    csv_separator: str | None = Field(default=None, pattern=r"^[\x01-\x09\x0b\x0c\x0e-!#-\x7f]$")
    """Separator of columns; by default a comma, or a tab in .tsv files."""
    dense_transform: Literal["signed_log1p", "none"] = "signed_log1p"
    """``signed_log1p``: sign(x) * log(1 + abs(x))."""
    id_mode: Literal["hash", "index", "frequency"] = "hash"
    """How [values become ids](data.md#how-values-become-inputs); ``frequency`` takes a first pass over the rows."""
    vocabulary: str | None = None
    """A prepared folder whose ids by frequency are used."""
    num_embeddings: int = Field(default=100_000, ge=1, le=_MOST_ROWS)
    """Rows of every table; by frequency at most. Not for synthetic data."""
    num_embeddings_per_feature: dict[str, Annotated[int, Field(ge=1, le=_MOST_ROWS)]] = Field(default_factory=dict)
    """Rows of single tables, by feature."""
    shared_tables: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Features that share a table, by its name: ``{ads = ["ad", "last_ad"]}``."""
    sequences: dict[str, str] = Field(default_factory=dict)
    """Lists that a feature attends to, each with that feature: ``{history = "item"}``
    ([Data](data.md#how-values-become-inputs))."""
    max_length: int | None = Field(default=None, ge=1, le=2**20)
    """Keep at most so many last ids of a sequence; without it a row with more than 1,000 is invalid."""
    shuffle_rows: int = Field(default=100_000, ge=0)
    """Training rows are shuffled within windows of so many rows, anew in each epoch; 0 keeps the order of the files."""
    shuffle_seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the shuffling."""
    group_by: str | None = None
    """Column of the request, session or user of a row, which need not be a feature: whole requests are shuffled
    ([Data](data.md#which-rank-trains-on-which-row))."""
    shuffle_pieces: bool = False
    """Shuffle the row groups of an epoch too."""
    tables: str | None = None
    """A file of tables for ``dmt plan`` and ``dmt what-if``, instead of data
    ([Sharding](sharding.md#from-the-command-line))."""
    synthetic: SyntheticConfig = SyntheticConfig()
    """Settings of ``kind="synthetic"``."""

    @model_validator(mode="before")
    @classmethod
    def _choose_kind(cls, values: Any) -> Any:
        """A source, or a prepared folder, takes the place of the synthetic clicks."""
        if not isinstance(values, dict) or values.get("kind", "synthetic") != "synthetic":
            return values
        kind = next((kind for kind in ("source", "prepared") if values.get(kind)), "synthetic")
        return values | {"kind": kind}

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        """Refuses keys without a meaning for the kind, and those that are missing."""
        files = ("train_path", "eval_path", "split_column", "timestamps", "csv_separator")
        tables = ("num_embeddings", "num_embeddings_per_feature", "shared_tables", "vocabulary", "sequences")
        columns = ("label", "dense", "categorical", "multi_hot", "dense_transform", "id_mode", "group_by", "max_length")
        rest = ("prepared", "source", "options")
        defaults = DataConfig.model_construct()
        given = [name for name, value in self if value != getattr(defaults, name)]
        meaningless = {
            "synthetic": (*files, *rest, *tables[:2], "group_by", "dense_transform", "max_length"),
            "criteo_tsv": (*rest, "split_column", "multi_hot", "timestamps", "sequences", "max_length"),
            "source": (*files, "prepared", "group_by", "vocabulary"),
            "prepared": (*files, *tables, *columns, "source", "options"),
        }.get(self.kind, rest)
        if wrong := [name for name in given if name in meaningless]:
            raise InputError(f"{wrong[0]} does not apply to kind={self.kind!r}. Leave out one of them.")
        needed = {"criteo_tsv": ("train_path",), "columns": ("train_path", "categorical")}
        needed |= {"source": ("source", "categorical"), "prepared": ("prepared",)}
        if absent := [name for name in needed.get(self.kind, ()) if not getattr(self, name)]:
            raise InputError(f"kind={self.kind!r} needs {absent[0]}.")
        refusals = (
            (self.kind == "criteo_tsv" and self.id_mode == "index", "id_mode='index': Criteo's ids are hexadecimal."),
            (self.kind == "source" and self.id_mode == "frequency", "id_mode='frequency' needs files to count."),
            (self.eval_path and self.split_column, "eval_path and split_column both say what evaluation rows are."),
            (self.max_length and not self.sequences, "max_length is of sequences, but data.sequences names none."),
            (self.vocabulary and self.id_mode != "frequency", "vocabulary needs id_mode='frequency'."),
        )
        for is_wrong, message in refusals:
            if is_wrong:
                raise InputError(f"{message} Change one of them.")
        return self


def with_files(config: DataConfig, path: str) -> DataConfig:
    """Returns the settings for other files with the same columns, unchecked, or for a prepared folder."""
    if (Path(path) / "manifest.json").is_file():
        return DataConfig(prepared=path, shuffle_rows=config.shuffle_rows, shuffle_seed=config.shuffle_seed)
    kind = "criteo_tsv" if config.kind == "criteo_tsv" else "columns"
    changes: dict[str, Any] = {"kind": kind, "train_path": path, "eval_path": None, "source": None, "prepared": None}
    return config.model_copy(update={**changes, "options": {}})


class _Table(Section):
    """A table as ``data.tables`` lists it."""

    name: str = Field(min_length=1)
    num_embeddings: int = Field(ge=1)
    embedding_dim: int = Field(ge=1, multiple_of=4)  # FBGEMM's kernels
    feature_names: tuple[str, ...] = Field(min_length=1)
    data_type: Literal["FP32", "FP16"] = "FP32"
    sequences: tuple[tuple[str, str], ...] = ()
    is_sequence: bool = False


def read_tables(path: Path) -> tuple[TableSpec, ...]:
    """Reads tables from JSON: a list of {name, num_embeddings, embedding_dim, feature_names}, or a ``towers.json``.

    An entry may have a ``data_type``, ``"FP32"`` (the default) or ``"FP16"``, and ``sequences``, each with its target.

    Raises:
        InputError: the file is absent, not JSON, or an entry is malformed; entries are counted from 1.
    """
    place = f"data.tables={str(path)!r}"
    record = read_file(path, "JSON", place=place, remedy="Name a JSON file with a list of tables.")
    entries = record.get("tables") if isinstance(record, dict) else record
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{place}: holds no list of tables, as `dmt partition` records them in towers.json.")
    tables = [
        from_record(_Table, entry, place=f"{place}, entry {number}", remedy="Correct it.")
        for number, entry in enumerate(entries, start=1)
    ]
    try:
        return table_specs(tables)
    except InputError as error:
        raise InputError(f"{place}: {error}") from error
