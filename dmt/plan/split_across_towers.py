"""Cuts tables into column shards that different towers can hold: names, tables and ids of the shards.

A model can thus have more towers than features. A shard has all rows and some columns of its table. It is an ordinary
table with a new feature, ``ad[0:64]``, which is looked up with the same ids. Column-wise sharding inside a tower (DMT
paper, section 4) is separate: its shards stay in one tower, and `dmt.sharding.schemes` cuts them.
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
    """Returns the names of the column shards of a feature or table, ``widths`` columns each.

    Example:
        >>> shard_names("ad", [64, 32])
        ['ad[0:64]', 'ad[64:96]']
    """
    return [f"{name}[{start}:{stop}]" for start, stop in pairwise(accumulate(widths, initial=0))]


def uncut_name(name: str) -> str:
    """Returns the name of the feature or table that a column shard was cut from; other names are returned unchanged."""
    return re.sub(r"\[\d+:\d+\]$", "", name)


def split_tables(tables: Sequence[Any], splits: Splits) -> list[Any]:
    """Returns the tables in the given order; the shards of a table to cut take its place.

    ``splits`` maps a feature to the number of columns of each shard (`TowerPlan.column_splits`).

    Raises:
        InputError: a table to cut has several features, or numbers of columns that are not positive or do not add up to
            its ``embedding_dim``.
    """
    split: list[Any] = []
    for table in tables:
        cut = [feature for feature in table.feature_names if feature in splits]
        if not cut:
            split.append(table)
            continue
        if len(table.feature_names) > 1:
            raise InputError(
                f"Table {table.name!r} is shared by {list(table.feature_names)!s:.200} and cannot be cut into column "
                f"shards. Remove {cut[0]!r} from column_splits, or give that feature a separate table."
            )
        widths = splits[cut[0]]
        if sum(widths) != table.embedding_dim or min(widths) < 1:
            raise InputError(
                f"Table {table.name!r} has embedding_dim={table.embedding_dim}, but its column shards are "
                f"{list(widths)}; these must be positive and add up to embedding_dim. Change column_splits[{cut[0]!r}]."
            )
        names, features = shard_names(table.name, widths), shard_names(cut[0], widths)
        split += [
            replace(table, name=name, embedding_dim=width, feature_names=type(table.feature_names)([feature]))
            for name, feature, width in zip(names, features, widths, strict=True)
        ]
    return split


def split_ids(ids: KeyedJaggedTensor, splits: Splits) -> KeyedJaggedTensor:
    """Returns the ids with every feature in ``splits`` repeated for each of its shards, under the shards' names.

    Raises:
        InputError: the batch size varies by feature.
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
