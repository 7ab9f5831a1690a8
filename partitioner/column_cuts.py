"""Which tables to cut into column shards when towers outnumber features, or a table outgrows a tower."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Literal

import numpy as np

from dmt.columns import shard_names
from dmt.errors import InputError
from dmt.partitioner.affinity import FeatureAffinity
from dmt.partitioner.blocks import joined
from dmt.tables import TableSpec, feature_names

__all__ = ["SplitColumns", "choose_splits", "members_affinity"]

SplitColumns = Literal["no", "largest", "even"]

# FBGEMM's lookups need a multiple of this many columns.
STEP = 4


def choose_splits(
    specs: Sequence[TableSpec],
    num_towers: int,
    how: SplitColumns,
    *,
    max_bytes: float = np.inf,
    together: Sequence[Sequence[str]] = (),
) -> dict[str, tuple[int, ...]]:
    """The columns of each shard, by feature, of the tables to cut; empty where nothing need be cut.

    ``"largest"`` cuts tables larger than a tower may hold, and then, one shard at a time, the table with the largest
    shards, until there is a feature or shard for every tower. ``"even"`` cuts every table into shards of
    equal width, at least as many as there are towers to a table; if the tables are of one width, so are all shards.

    Args:
        specs: the tables; a table that several features share is never cut.
        num_towers: T.
        how: ``"no"``, ``"largest"`` or ``"even"``.
        max_bytes: what a tower may hold.
        together: groups of features that share a tower, whose tables are therefore not cut.

    Raises:
        InputError: the tables cannot be cut into enough shards.

    Example:
        >>> rows = {"a": 9, "b": 5}
        >>> tables = [TableSpec(name=n, num_embeddings=r, embedding_dim=8, feature_names=(n,)) for n, r in rows.items()]
        >>> choose_splits(tables, 3, "largest"), choose_splits(tables, 3, "even")
        ({'a': (4, 4)}, {'a': (4, 4), 'b': (4, 4)})
    """
    if how == "no":
        return {}
    whole = {feature for group in together for feature in group}
    by_feature = {
        spec.feature_names[0]: spec
        for spec in specs
        if len(spec.feature_names) == 1 and spec.feature_names[0] not in whole
    }
    most = {
        feature: spec.embedding_dim // STEP if spec.embedding_dim % STEP == 0 else 1
        for feature, spec in by_feature.items()
    }
    uncut = [feature for feature in feature_names(specs) if feature not in by_feature]
    held = set(uncut)
    groups = [*(spec.feature_names for spec in specs), *together]
    num_whole = len(joined(uncut, [[feature for feature in group if feature in held] for group in groups]))
    pieces = dict.fromkeys(most, 1)
    if how == "even":
        wanted = max(1, -(-(num_towers - num_whole) // max(1, len(most))))
        pieces = {feature: _even_pieces(most[feature], wanted) for feature in most}
    else:
        for feature, spec in by_feature.items():
            if spec.num_bytes > max_bytes:
                # Whole steps of columns that a tower can hold; where not even one fits, the limit is refused later.
                steps = max(1, int(max_bytes // (4 * STEP * spec.num_embeddings)))
                pieces[feature] = -(-most[feature] // steps)
    missing = num_towers - num_whole - sum(pieces.values())
    if how == "largest":
        heap = [(-by_feature[f].num_bytes / pieces[f], f) for f in most if pieces[f] < most[f]]
        heapq.heapify(heap)
        while missing > 0 and heap:
            _, feature = heapq.heappop(heap)
            pieces[feature] += 1
            missing -= 1
            if pieces[feature] < most[feature]:
                heapq.heappush(heap, (-by_feature[feature].num_bytes / pieces[feature], feature))
    if missing > 0:
        raise InputError(
            f"TowerPartitioner: num_towers={num_towers}, but the {len(specs)} tables can be cut into "
            f"{num_towers - missing} members only ({how!r}; shards are multiples of {STEP} columns, and shared tables "
            "and features that must stay together are not cut). Use fewer towers"
            + (", or split_columns='largest'." if how == "even" else ".")
        )
    return {
        feature: _widths(by_feature[feature].embedding_dim, count) for feature, count in pieces.items() if count > 1
    }


def members_affinity(affinity: FeatureAffinity, splits: dict[str, tuple[int, ...]]) -> FeatureAffinity:
    """The affinity of features and column shards: a shard resembles what its feature resembles."""
    if not splits:
        return affinity
    known = set(affinity.features)
    names: list[str] = []
    index: list[int] = []
    for i, feature in enumerate(affinity.features):
        shards = shard_names(feature, splits[feature]) if feature in splits else [feature]
        clash = [name for name in shards if feature in splits and name in known]
        if clash:
            raise InputError(f"Feature {clash[0]!r} has the name of a column shard of {feature!r}; rename it.")
        names += shards
        index += [i] * len(shards)
    return FeatureAffinity(
        matrix=affinity.matrix[np.ix_(index, index)], features=tuple(names), num_samples=affinity.num_samples
    )


def _even_pieces(steps: int, wanted: int) -> int:
    """The least number of equal pieces, ``wanted`` or more, of so many steps of width; else single steps."""
    return next((count for count in range(wanted, steps + 1) if steps % count == 0), steps)


def _widths(dim: int, count: int) -> tuple[int, ...]:
    steps = dim // STEP
    return tuple(STEP * (steps // count + (i < steps % count)) for i in range(count))
