"""From an affinity, tables and rules to what is to be solved: blocks with loads, limits, and towers per category."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dmt.columns import shard_names, split_tables
from dmt.errors import InputError
from dmt.partitioner.affinity import FeatureAffinity
from dmt.partitioner.assignment import Bounds
from dmt.partitioner.blocks import Blocks, make_blocks
from dmt.partitioner.checks import check_tables
from dmt.partitioner.column_cuts import SplitColumns, choose_splits, members_affinity
from dmt.partitioner.feasibility import check_bounds, largest_clique
from dmt.partitioner.partition import TowerLimits
from dmt.partitioner.rules import PartitionRules
from dmt.partitioner.sizes import evenly_picked, fitting_sizes, size_bounds
from dmt.tables import TableSpec, table_specs

__all__ = ["Part", "Task", "prepare"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """The features of one category, or all where there are none, and the towers they go to."""

    category: str
    blocks: Blocks
    num_towers: int
    options: tuple[Bounds, ...]
    """Sets of limits of which one must be held; at most four, of different sizes."""
    spare: tuple[Bounds, ...] = ()
    """Further sets, tried where none of the options can be held."""
    asked: tuple[int, int] | None = None
    """The sizes that were asked for, where blocks of several features need others."""

    @property
    def where(self) -> str:
        """The beginning of a message about this part; empty where there are no categories."""
        return f"category {self.category!r}: " if self.category else ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """What `TowerPartitioner` solves, once for each strategy."""

    source: FeatureAffinity
    """As it was given."""
    affinity: FeatureAffinity
    """Of the members: features, with column shards in place of those that are cut."""
    specs: tuple[TableSpec, ...]
    """The members' tables; none if not known."""
    splits: Mapping[str, tuple[int, ...]]
    """Columns of each shard of the features that are cut."""
    limits: TowerLimits
    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()
    """What the user should know."""

    @property
    def num_blocks(self) -> int:
        """P over all parts."""
        return sum(len(part.blocks.names) for part in self.parts)


def prepare(
    affinity: FeatureAffinity,
    tables: Sequence[Any],
    *,
    num_towers: int,
    balance_ratio: float | None,
    rules: PartitionRules,
    split_columns: SplitColumns,
) -> Task:
    """Applies rules and limits to the features; see `TowerPartitioner` for the arguments.

    Raises:
        InputError: tables, rules and affinity do not fit together, or a limit cannot be held whatever the assignment.
    """
    specs = table_specs(tables) or affinity.tables
    if specs:
        check_tables(specs, affinity.features, where="TowerPartitioner")
    elif rules.need_tables or split_columns != "no":
        needs = "split_columns" if split_columns != "no" else "a limit on work or bytes"
        raise InputError(
            f"TowerPartitioner: {needs} needs the tables, but the affinity was saved without them. Give tables=, or "
            "collect the affinity anew."
        )
    named = rules.for_features(affinity.features)
    total_bytes = float(sum(spec.num_bytes for spec in specs))
    max_bytes = _limit(named.max_bytes_ratio, total_bytes, num_towers)
    if named.max_tower_bytes is not None:
        max_bytes = min(max_bytes, float(named.max_tower_bytes))
    splits = _splits(specs, named, num_towers, split_columns, max_bytes)
    measured = affinity.pooling_factors or (1.0,) * affinity.num_features
    of_feature = dict(zip(affinity.features, measured, strict=True)) | dict(named.pooling_factors)
    shards = {feature: shard_names(feature, widths) for feature, widths in splits.items()}
    pooling = {member: factor for f, factor in of_feature.items() for member in shards.get(f, [f])}
    members = members_affinity(affinity, splits)
    member_specs = table_specs(split_tables(specs, splits))
    blocks = make_blocks(members.features, member_specs, named, pooling=pooling, shards=shards)
    max_work = _limit(named.max_work_ratio, float(blocks.loads[1].sum()), num_towers)
    upper = np.array([np.inf, max_work, max_bytes])
    return Task(
        source=affinity,
        affinity=members,
        specs=member_specs,
        splits=splits,
        limits=TowerLimits(
            balance_ratio=balance_ratio,
            max_work=None if np.isinf(max_work) else max_work,
            max_bytes=None if np.isinf(max_bytes) else int(max_bytes),
        ),
        parts=tuple(_parts(blocks, named, num_towers, balance_ratio, upper)),
        notes=(*_pooling_notes(affinity, named), *_split_notes(named, split_columns, splits)),
    )


def _splits(
    specs: Sequence[TableSpec], rules: PartitionRules, num_towers: int, how: SplitColumns, max_bytes: float
) -> dict[str, tuple[int, ...]]:
    """Where the towers of every category are given, its tables are cut for them; else all tables for all towers."""
    if not rules.towers_per_category:
        return choose_splits(specs, num_towers, how, max_bytes=max_bytes, together=rules.together)
    splits: dict[str, tuple[int, ...]] = {}
    for category, features in rules.categories.items():
        owned = [spec for spec in specs if set(spec.feature_names) <= set(features)]
        groups = [group for group in rules.together if set(group) <= set(features)]
        count = rules.towers_per_category[category]
        splits |= choose_splits(owned, count, how, max_bytes=max_bytes, together=groups)
    return splits


def _split_notes(rules: PartitionRules, how: SplitColumns, splits: Mapping[str, tuple[int, ...]]) -> list[str]:
    whole = [feature for group in rules.together for feature in group]
    if how != "even" or not splits or not whole:
        return []
    return [
        f"The tables of {', '.join(map(repr, whole[:5]))} must stay together and are not cut, so the shards of the "
        "others have another width; the models of dmt.models need one width."
    ]


def _pooling_notes(affinity: FeatureAffinity, rules: PartitionRules) -> list[str]:
    unknown = affinity.num_features - len(rules.pooling_factors)
    if rules.max_work_ratio is None or affinity.pooling_factors or not unknown:
        return []
    return [
        f"The work of {unknown} of {affinity.num_features} features is that of one id per sample: the affinity was "
        "collected without counting ids. Give pooling_factors where there are more."
    ]


def _limit(ratio: float | None, total: float, num_towers: int) -> float:
    return np.inf if ratio is None else ratio * total / num_towers


def _parts(
    blocks: Blocks, rules: PartitionRules, num_towers: int, balance_ratio: float | None, upper: np.ndarray
) -> list[Part]:
    if not rules.categories:
        return [_part("", blocks, num_towers, balance_ratio, upper)]
    owned = {name: blocks.of_category(name) for name in rules.categories}
    counts = dict(rules.towers_per_category) or _allot(owned, num_towers, upper)
    return [_part(name, owned[name], counts[name], balance_ratio, upper) for name in rules.categories]


def _part(category: str, blocks: Blocks, num_towers: int, balance_ratio: float | None, upper: np.ndarray) -> Part:
    num_features = int(blocks.loads[0].sum())
    pairs, grown = [(1, num_features)], 0
    if balance_ratio is not None and num_towers <= num_features:
        strict = size_bounds(num_features, num_towers, balance_ratio)
        pairs, grown = fitting_sizes(blocks.loads[0], num_towers, strict)
    picked = evenly_picked(pairs)

    def bounds(pair: tuple[int, int]) -> Bounds:
        return Bounds(
            loads=blocks.loads,
            lower=np.array([float(pair[0]), 0.0, 0.0]),
            upper=np.array([float(pair[1]), *upper[1:]]),
            apart=blocks.apart,
        )

    part = Part(
        category=category,
        blocks=blocks,
        num_towers=num_towers,
        options=tuple(bounds(pair) for pair in picked),
        spare=tuple(bounds(pair) for pair in pairs if pair not in picked),
        asked=strict[0] if grown else None,
    )
    # The first set allows a tower most: what is too large for it is too large for all.
    check_bounds(blocks.names, part.options[0], num_towers, part.where)
    return part


def _allot(owned: Mapping[str, Blocks], num_towers: int, upper: np.ndarray) -> dict[str, int]:
    """Towers for each category: as many as its limits need, the others where a tower would have most to carry."""
    # What is limited is what counts; otherwise the number of features.
    resource = 2 if np.isfinite(upper[2]) else 1 if np.isfinite(upper[1]) else 0
    loads = {name: blocks.loads.sum(axis=1) for name, blocks in owned.items()}
    # A limit is 0 where nothing has any work; a category has no more towers than blocks, whatever it needs, and what is
    # too large for a tower is refused by name later.
    limits = np.maximum(upper[1:], 1e-300)
    counts = {
        name: min(
            len(owned[name].names),
            max(1, int(np.ceil((load[1:] / limits).max() - 1e-9)), len(largest_clique(owned[name].apart))),
        )
        for name, load in loads.items()
    }
    if sum(counts.values()) > num_towers:
        needs = ", ".join(f"{name!r} {count}" for name, count in counts.items())
        raise InputError(
            f"TowerPartitioner: the categories need {sum(counts.values())} towers at least ({needs}), but num_towers="
            f"{num_towers}. Use more towers, raise the limits, or join categories."
        )
    for _ in range(num_towers - sum(counts.values())):
        open_to = [name for name in owned if counts[name] < len(owned[name].names)]
        if not open_to:
            raise InputError(
                f"TowerPartitioner: num_towers={num_towers} exceeds what the categories can fill, "
                f"{ {name: len(blocks.names) for name, blocks in owned.items()} } features or shared tables. Use fewer "
                "towers."
            )
        # By features where the resource says nothing, such as the work of features that are never there.
        counts[max(open_to, key=lambda name: tuple(loads[name][[resource, 0]] / counts[name]))] += 1
    return counts
