"""Column shards of a table as members of different towers: which tables are cut, and the tables and ids that result.

When there are more towers than features, a table is cut into shards of some of its columns, and each shard is an
ordinary table with a feature of its own, ``ad[0:64]``, that is looked up with the same ids. (Inside a tower, tables are
cut column-wise too, DMT paper, section 4; here the shards are in several.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from dmt.errors import InputError

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor

__all__ = ["shard_names", "split_ids", "split_tables", "uncut_name"]

Splits = Mapping[str, Sequence[int]]


def shard_names(name: str, widths: Sequence[int]) -> list[str]:
    """Names of the column shards of a feature or table.

    Example:
        >>> shard_names("ad", [64, 32])
        ['ad[0:64]', 'ad[64:96]']
    """
    return [f"{name}[{start}:{stop}]" for start, stop in pairwise(accumulate(widths, initial=0))]


def uncut_name(name: str) -> str:
    """Name of the feature or table that a column shard is of; the name itself if it is no shard's."""
    return re.sub(r"\[\d+:\d+\]$", "", name)


def split_tables(tables: Sequence[Any], splits: Splits) -> list[Any]:
    """The tables with those that are cut replaced by their shards.

    Tables keep their order; a shard has the rows of its table and some of its columns. ``splits`` are the columns of
    each shard, by the name of the feature (`TowerPlan.column_splits`).

    Raises:
        InputError: a feature to cut shares its table, or the shards do not add up to the table.
    """
    split: list[Any] = []
    for table in tables:
        cut = [feature for feature in table.feature_names if feature in splits]
        if not cut:
            split.append(table)
            continue
        if len(table.feature_names) > 1:
            raise InputError(
                f"Table {table.name!r} is shared by {list(table.feature_names)} and cannot be cut into column shards."
            )
        widths = splits[cut[0]]
        if sum(widths) != table.embedding_dim or min(widths) < 1:
            raise InputError(
                f"Table {table.name!r} has embedding_dim={table.embedding_dim}, but its column shards are "
                f"{list(widths)}; they must add up to it."
            )
        split += [
            replace(table, name=name, embedding_dim=width, feature_names=type(table.feature_names)([feature]))
            for name, feature, width in zip(
                shard_names(table.name, widths), shard_names(cut[0], widths), widths, strict=True
            )
        ]
    return split


def split_ids(ids: KeyedJaggedTensor, splits: Splits) -> KeyedJaggedTensor:
    """The ids with each feature that is cut repeated once for each of its shards, under the shards' names.

    Raises:
        InputError: each feature has a batch size of its own.
    """
    from torchrec import KeyedJaggedTensor

    keys = ids.keys()
    if ids.variable_stride_per_key():
        raise InputError(
            "split_ids: the features have different batch sizes (stride_per_key). Give all the same number of samples."
        )
    order = [i for i, key in enumerate(keys) for _ in range(len(splits.get(key, (0,))))]
    names = [name for key in keys for name in (shard_names(key, splits[key]) if key in splits else [key])]
    repeated = ids.permute(order)
    return KeyedJaggedTensor(
        keys=names,
        values=repeated.values(),
        weights=repeated.weights_or_none(),
        lengths=repeated.lengths(),
        stride=repeated.stride(),
    )
