"""From features and rules to blocks: what the partitioner places, what each takes, and what must part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.partitioner.affinity import FeatureAffinity
from dmt.partitioner.rules import PartitionRules
from dmt.tables import TableSpec

__all__ = ["Blocks", "joined", "make_blocks"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """P blocks of features that stay together, in the order of their names."""

    names: tuple[tuple[str, ...], ...]
    """The features of each block."""
    loads: NDArray[np.float64]
    """[3, P] features, work (elements read per sample) and bytes of each block; without tables the last two are 0."""
    apart: NDArray[np.bool_] | None
    """[P, P] which blocks must not share a tower; None where there are none."""
    category: tuple[str, ...]
    """The category of each block, ``""`` where there are none."""

    def matrix(self, affinity: FeatureAffinity) -> NDArray[np.float64]:
        """[P, P] mean affinity between the features of two blocks; for blocks of one feature just the affinity."""
        position = {name: i for i, name in enumerate(affinity.features)}
        order = [position[name] for names in self.names for name in names]
        ordered = affinity.matrix[np.ix_(order, order)]
        sizes = self.loads[0].astype(np.int64)
        if len(sizes) == len(order):
            return ordered
        starts = np.cumsum(sizes) - sizes
        total = np.add.reduceat(np.add.reduceat(ordered, starts, axis=0), starts, axis=1)
        return total / np.outer(sizes, sizes)

    def of_category(self, category: str) -> Blocks:
        """The blocks of one category."""
        index = [i for i, found in enumerate(self.category) if found == category]
        return Blocks(
            names=tuple(self.names[i] for i in index),
            loads=self.loads[:, index],
            apart=None if self.apart is None else self.apart[np.ix_(index, index)],
            category=(category,) * len(index),
        )


def make_blocks(
    features: Sequence[str],
    specs: Sequence[TableSpec],
    rules: PartitionRules,
    *,
    pooling: Mapping[str, float],
    shards: Mapping[str, Sequence[str]],
) -> Blocks:
    """Joins what must share a tower and adds up what it takes.

    Args:
        features: all members to place, column shards included.
        specs: their tables, or none.
        rules: with the features of the model named one by one (`PartitionRules.for_features`).
        pooling: mean ids per sample, by member.
        shards: the column shards of each feature that is cut.

    Raises:
        InputError: features that must share a tower must also part, or are of different categories.
    """
    members = {name: tuple(shards.get(name, (name,))) for name in dict.fromkeys([*shards, *features])}
    of_shards = {shard for names in shards.values() for shard in names}
    for group in rules.together:
        for feature in group:
            if feature in shards:
                raise InputError(
                    f"Partition rules: feature {feature!r} must share a tower with {_others(feature, group)}, but its "
                    "table is cut into column shards, which go to different towers. Drop the rule or do not split it."
                )
    groups = [*rules.together, *(spec.feature_names for spec in specs)]
    names = joined(features, groups)
    block_of = {name: i for i, block in enumerate(names) for name in block}
    home = {
        member: category
        for category, owned in rules.categories.items()
        for feature in owned
        for member in members[feature]
    }
    category = tuple(_one_category(block, home) for block in names)
    expanded = [[member for feature in group for member in members[feature]] for group in rules.apart]
    expanded += [list(found) for found in shards.values()]
    assert of_shards <= set(features), "every shard is a member"
    return Blocks(
        names=names, loads=_loads(names, specs, pooling), apart=_apart(expanded, block_of, names), category=category
    )


def _others(feature: str, group: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in group if name != feature)


def joined(features: Sequence[str], groups: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """The connected components of features that share a group, each sorted, all sorted.

    Example:
        >>> joined(["c", "b", "a", "d"], [["a", "c"], ["c", "d"]])
        (('a', 'c', 'd'), ('b',))
    """
    if not features:
        return ()
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    position = {name: i for i, name in enumerate(features)}
    edges = [(position[group[0]], position[name]) for group in groups for name in group[1:]]
    rows, columns = zip(*edges, strict=True) if edges else ((), ())
    size = len(features)
    ends = np.array(rows, dtype=int), np.array(columns, dtype=int)
    graph = coo_array((np.ones(len(edges)), ends), shape=(size, size))
    blocks: dict[int, list[str]] = {}
    for name, component in zip(features, connected_components(graph, directed=False)[1].tolist(), strict=True):
        blocks.setdefault(component, []).append(name)
    return tuple(sorted(tuple(sorted(block)) for block in blocks.values()))


def _one_category(block: Sequence[str], home: Mapping[str, str]) -> str:
    found = {home.get(name, ""): name for name in block}
    if len(found) > 1:
        (first, a), (second, b) = list(found.items())[:2]
        raise InputError(
            f"Partition rules: {a!r} is of category {first!r} and {b!r} of {second!r}, but they must share a tower (by "
            "a shared table or a rule of together). Put them into one category."
        )
    return next(iter(found))


def _loads(
    names: Sequence[Sequence[str]], specs: Sequence[TableSpec], pooling: Mapping[str, float]
) -> NDArray[np.float64]:
    table_of = {feature: spec for spec in specs for feature in spec.feature_names}
    loads = np.zeros((3, len(names)))
    for i, block in enumerate(names):
        loads[0, i] = len(block)
        if table_of:
            loads[1, i] = sum(pooling[name] * table_of[name].embedding_dim for name in block)
            # A shared table is there once.
            loads[2, i] = sum({table_of[name].name: table_of[name].num_bytes for name in block}.values())
    return loads


def _apart(
    groups: Sequence[Sequence[str]], block_of: Mapping[str, int], names: Sequence[Sequence[str]]
) -> NDArray[np.bool_] | None:
    if not groups:
        return None
    apart = np.zeros((len(names), len(names)), dtype=np.bool_)
    for group in groups:
        for a, b in combinations(group, 2):
            if block_of[a] == block_of[b]:
                raise InputError(
                    f"Partition rules: {a!r} and {b!r} must not share a tower (apart), but a shared table or a rule of "
                    f"together keeps {', '.join(map(repr, names[block_of[a]][:5]))} in one. Drop one of the rules."
                )
            apart[block_of[a], block_of[b]] = apart[block_of[b], block_of[a]] = True
    return apart
