"""`TableSpec`: description of an embedding table for plans and costs, without TorchRec."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, cast, get_args

from dmt.errors import InputError

__all__ = [
    "ID_BYTES",
    "NUMBER_BYTES",
    "TABLE_FORMATS",
    "TableFormat",
    "TableSpec",
    "feature_names",
    "is_sequence",
    "number_bytes",
    "table_format",
    "table_specs",
]

TableFormat = Literal["FP32", "FP16"]
"""Number formats of table weights, by TorchRec's names; TorchRec silently builds tables of any other format as FP16."""
TABLE_FORMATS: tuple[TableFormat, ...] = get_args(TableFormat)
NUMBER_BYTES = MappingProxyType({"fp32": 4, "fp16": 2, "bf16": 2})
"""Bytes of a number, by the lower-case name of its format."""
ID_BYTES = 8
"""Bytes of an id and of a length where both are int64, as in the trainer; int32 ids or lengths take half as many."""


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """One embedding table: TorchRec's ``EmbeddingBagConfig`` with the additional ``sequences`` and ``is_sequence``.

    Raises:
        InputError: a size is not positive, ``feature_names`` is empty or a string, or ``data_type`` is not supported.
    """

    name: str
    num_embeddings: int
    """Rows."""
    embedding_dim: int
    """Columns."""
    feature_names: tuple[str, ...]
    """The features that are looked up in this table; usually one, more if the table is shared."""
    data_type: TableFormat = field(default="FP32", compare=False)
    """Number format of the weights. ``==`` ignores it: a plan is valid for both formats."""
    sequences: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """Pairs of a sequence feature and its target, the feature that attends to the sequence; both are of this table."""
    is_sequence: bool = field(default=False, compare=False)
    """True if lookups return an embedding per id instead of pooled bags: for all tables of a tower with sequences."""

    def __post_init__(self) -> None:
        for size in ("num_embeddings", "embedding_dim"):
            if getattr(self, size) < 1:
                raise InputError(f"Table {self.name!r} has {size}={getattr(self, size)}; it must be positive.")
        if not self.feature_names or isinstance(self.feature_names, str):
            names = self.feature_names
            raise InputError(f"Table {self.name!r} has feature_names={names!r}; give a tuple of one or more names.")
        number_bytes(self)
        if self.sequences:
            object.__setattr__(self, "is_sequence", True)

    @property
    def num_bytes(self) -> int:
        """Size of the weights in bytes."""
        return number_bytes(self) * self.num_embeddings * self.embedding_dim


def number_bytes(table: Any) -> int:
    """Returns the bytes per weight of a table, by its ``data_type``; 4 if it has none.

    Raises:
        InputError: the format is not FP32 or FP16, the two in which tables train.
    """
    kind = table_format(table)
    if kind not in TABLE_FORMATS:
        raise InputError(
            f"Table {table.name!r} has data_type={kind!r}, but tables train in {' or '.join(TABLE_FORMATS)} only. "
            "Change data_type."
        )
    return NUMBER_BYTES[kind.lower()]


def table_specs(tables: Iterable[Any], *, one_table_per_feature: bool = True) -> tuple[TableSpec, ...]:
    """Converts TorchRec's ``EmbeddingBagConfig`` (or any objects with the same fields) to `TableSpec`.

    Raises:
        InputError: two tables have the same name, or with ``one_table_per_feature`` the same feature; a table breaks a
            rule of `TableSpec`; or something in ``tables`` is not a table.
    """
    tables = list(tables) if isinstance(tables, Iterable) else [tables]
    if others := [table for table in tables if not hasattr(table, "feature_names")]:
        raise InputError(f"tables has {others[0]!r:.200}, which is not a table. Give EmbeddingBagConfig or TableSpec.")
    specs = tuple(
        TableSpec(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            feature_names=tuple(table.feature_names),
            data_type=cast("TableFormat", table_format(table)),
            sequences=getattr(table, "sequences", ()),
            is_sequence=is_sequence(table),
        )
        for table in tables
    )
    features = feature_names(specs) if one_table_per_feature else []
    for kind, names in (("Table", [s.name for s in specs]), ("Feature", features)):
        if doubled := [(name, count) for name, count in Counter(names).items() if count > 1]:
            raise InputError(f"{kind} {doubled[0][0]!r} occurs {doubled[0][1]} times in tables. Rename all but one.")
    return specs


def feature_names(tables: Sequence[Any]) -> list[str]:
    """Returns the features of all tables, table by table."""
    return [feature for table in tables for feature in table.feature_names]


def is_sequence(table: Any) -> bool:
    """Returns whether a lookup in the table yields an embedding per id, unpooled (TorchRec's ``EmbeddingConfig``)."""
    if hasattr(table, "is_sequence"):  # a `TableSpec`, or a record of one
        return bool(table.is_sequence)
    return hasattr(table, "init_fn") and not hasattr(table, "pooling")


def table_format(table: Any) -> str:
    """Returns the name of a table's ``data_type``, the number format of its weights; ``"FP32"`` if it has none."""
    kind = getattr(table, "data_type", "FP32")
    return str(getattr(kind, "value", kind))
