"""From an affinity, tables and rules to what the search solves: blocks with loads, limits, and towers per category.

Legend: F features, P blocks (features that stay together), T towers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.partitioner.affinity import FeatureAffinity, check_tables
from dmt.partitioner.partition import TowerLimits
from dmt.partitioner.rules import PartitionRules
from dmt.partitioner.search import Bounds, Costs, Floats, check_bounds, even_start, largest_clique, local_search
from dmt.plan.split_across_towers import shard_names, split_tables
from dmt.plan.tables import TableSpec, feature_names, table_specs

__all__ = [
    "Blocks",
    "Part",
    "SplitColumns",
    "Task",
    "choose_splits",
    "joined",
    "make_blocks",
    "members_of",
    "prepare",
    "size_bounds",
]

SplitColumns = Literal["no", "largest", "even"]

# FBGEMM's lookups need a multiple of this many columns.
STEP = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """The features of one category, or all if there are none, and the towers they go to."""

    category: str
    blocks: Blocks
    num_towers: int
    options: tuple[Bounds, ...]
    """Sets of limits of which any one must be held; they differ in the sizes of towers."""
    asked: tuple[int, int] | None = None
    """The requested sizes, if blocks of several features need others."""

    @property
    def where(self) -> str:
        """The beginning of a message about this part; empty if there are no categories."""
        return f"category {self.category!r}: " if self.category else ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """The problem that `TowerPartitioner` solves, once for each strategy."""

    source: FeatureAffinity
    """The affinity as given."""
    affinity: FeatureAffinity
    """Affinity of the members: features, with column shards in place of those that are cut."""
    specs: tuple[TableSpec, ...]
    """The members' tables; none if not known."""
    splits: Mapping[str, tuple[int, ...]]
    """Columns of each shard of the features that are cut."""
    limits: TowerLimits
    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()
    """Warnings for the user."""


def prepare(
    affinity: FeatureAffinity,
    tables: Sequence[Any],
    *,
    num_towers: int,
    balance_ratio: float | None,
    rules: PartitionRules,
    split_columns: SplitColumns,
) -> Task:
    """Applies rules and limits to the features; `TowerPartitioner` describes the arguments.

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
            "collect the affinity again."
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
    members = members_of(affinity, splits)
    member_specs = table_specs(split_tables(specs, splits))
    blocks = make_blocks(members.features, member_specs, named, pooling=pooling, shards=shards)
    max_work = _limit(named.max_work_ratio, float(blocks.loads[1].sum()), num_towers)
    upper = np.array([np.inf, max_work, max_bytes])
    owned, counts = {"": blocks}, {"": num_towers}
    if named.categories:
        owned = {name: blocks.in_category(name) for name in named.categories}
        counts = dict(named.towers_per_category) or _allot(owned, num_towers, upper, entities=named.entities)
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
        parts=tuple(_part(name, own, counts[name], balance_ratio, upper) for name, own in owned.items()),
        notes=tuple(_notes(affinity, named, split_columns, splits)),
    )


def _splits(
    specs: Sequence[TableSpec], rules: PartitionRules, num_towers: int, how: SplitColumns, max_bytes: float
) -> dict[str, tuple[int, ...]]:
    """Cuts the tables of each category for its towers if their numbers are given; else all tables for all towers."""
    if not rules.towers_per_category:
        return choose_splits(specs, num_towers, how, max_bytes=max_bytes, together=rules.together)
    splits: dict[str, tuple[int, ...]] = {}
    for category, features in rules.categories.items():
        owned = [spec for spec in specs if set(spec.feature_names) <= set(features)]
        groups = [group for group in rules.together if set(group) <= set(features)]
        count = rules.towers_per_category[category]
        splits |= choose_splits(owned, count, how, max_bytes=max_bytes, together=groups)
    return splits


def _notes(
    affinity: FeatureAffinity, rules: PartitionRules, how: SplitColumns, splits: Mapping[str, tuple[int, ...]]
) -> list[str]:
    notes = []
    unknown = affinity.num_features - len(rules.pooling_factors)
    if rules.max_work_ratio is not None and not affinity.pooling_factors and unknown:
        notes.append(
            f"The work of {unknown} of {affinity.num_features} features is that of one id per sample: the affinity was "
            "collected without counting ids. Give pooling_factors where there are more."
        )
    whole = [feature for group in rules.together for feature in group]
    if how == "even" and splits and whole:
        notes.append(
            f"The tables of {', '.join(map(repr, whole[:5]))} must stay together and are not cut, so the shards of the "
            "others have another width; the models of dmt.models need one width."
        )
    return notes


def _limit(ratio: float | None, total: float, num_towers: int) -> float:
    return np.inf if ratio is None else ratio * total / num_towers


def _part(category: str, blocks: Blocks, num_towers: int, balance_ratio: float | None, upper: np.ndarray) -> Part:
    num_features = int(blocks.loads[0].sum())
    pairs, grown = [(1, num_features)], 0
    if balance_ratio is not None and num_towers <= num_features:
        strict = size_bounds(num_features, num_towers, balance_ratio)
        pairs, grown = _fitting_sizes(blocks.loads[0], num_towers, strict)

    limits = ((np.array([float(least), 0.0, 0.0]), np.array([float(most), *upper[1:]])) for least, most in pairs)
    part = Part(
        category=category,
        blocks=blocks,
        num_towers=num_towers,
        options=tuple(Bounds(loads=blocks.loads, lower=low, upper=high, apart=blocks.apart) for low, high in limits),
        asked=strict[0] if grown else None,
    )
    # The first set allows a tower most: what is too large for it is too large for all.
    check_bounds(blocks.names, part.options[0], num_towers, part.where)
    return part


def size_bounds(num_points: int, num_clusters: int, balance_ratio: float) -> list[tuple[int, int]]:
    """Lists the pairs (smallest, largest) that keep every group at most ``balance_ratio`` times the smallest.

    The first pair is that with the largest smallest group, floor(F / T); its largest is never below ceil(F / T).

    Example:
        >>> size_bounds(26, 8, 1.0), size_bounds(26, 8, 2.0), size_bounds(24, 8, 1.0)
        ([(3, 4)], [(3, 6), (2, 4)], [(3, 3)])
    """
    smallest, needed = num_points // num_clusters, -(-num_points // num_clusters)
    # The addend keeps 1.15 * 100 from falling to 114.
    pairs = [(least, int(balance_ratio * least + 1e-9)) for least in range(smallest, 0, -1)]
    allowed = [(least, min(num_points, most)) for least, most in pairs if most >= needed]
    if not allowed or allowed[0][0] != smallest:
        allowed.insert(0, (smallest, needed))
    return allowed


def _fitting_sizes(
    weights: Floats, num_towers: int, pairs: Sequence[tuple[int, int]]
) -> tuple[list[tuple[int, int]], int]:
    """Loosens the pairs just so far that blocks, of [P] ``weights`` features, can be dealt out within one of them.

    First the largest group is allowed more, then the smallest is kept as large as possible. A local search decides if
    blocks fit, so the pairs may be looser than a perfect packing needs.

    Returns:
        The pairs, and by how much the largest grew; 0 if all blocks are single features.
    """
    if (weights == 1).all() or num_towers > len(weights):
        return list(pairs), 0

    def loosened(more: int, less: int) -> list[tuple[int, int]]:
        return [(max(1, smallest - less), largest + more) for smallest, largest in pairs]

    def fits(more: int, less: int) -> bool:
        return any(_fit(weights, num_towers, pair) for pair in loosened(more, less))

    most = int(weights.max())
    # More room never hurts, so halving finds the least that is enough.
    more = bisect_left(range(most), True, key=lambda more: fits(more, most))
    less = bisect_left(range(most), True, key=lambda less: fits(more, less))
    return loosened(more, less), more


def _fit(weights: Floats, num_towers: int, pair: tuple[int, int]) -> bool:
    bounds = Bounds(loads=weights[None, :], lower=np.array([float(pair[0])]), upper=np.array([float(pair[1])]))
    nothing = Costs(pairs=np.zeros((len(weights), len(weights))), per_feature=False)
    labels = local_search(nothing, even_start(bounds, num_towers), num_towers=num_towers, bounds=bounds)
    return bounds.violation(labels, num_towers) == 0


def _allot(
    owned: Mapping[str, Blocks], num_towers: int, upper: np.ndarray, *, entities: Collection[str] = ()
) -> dict[str, int]:
    """Towers for each category: as many as its limits need, the others where the load per tower is largest.

    Entities get more only where the features of no entity cannot fill the others.
    """
    # The limited resource decides; without a limit, the number of features.
    resource = 2 if np.isfinite(upper[2]) else 1 if np.isfinite(upper[1]) else 0
    loads = {name: blocks.loads.sum(axis=1) for name, blocks in owned.items()}
    # A limit is 0 if nothing has any work; a category has no more towers than blocks, whatever it needs, and what is
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
        counts[max(open_to, key=lambda n: (n not in entities, *(loads[n][[resource, 0]] / counts[n])))] += 1
    return counts


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """P blocks of features that stay together, in the order of their names."""

    names: tuple[tuple[str, ...], ...]
    """The features of each block."""
    loads: NDArray[np.float64]
    """[3, P] features, work (elements read per sample) and bytes of each block; without tables the last two are 0."""
    apart: NDArray[np.bool_] | None
    """[P, P] which blocks must not share a tower; None if there are none."""
    category: tuple[str, ...]
    """The category of each block, ``""`` where there are none."""

    def matrix(self, matrix: Floats, features: Sequence[str]) -> Floats:
        """[P, P] means of [F, F] numbers over the features of two blocks; of blocks of one feature just the numbers."""
        position = {name: i for i, name in enumerate(features)}
        order = [position[name] for names in self.names for name in names]
        ordered = matrix[np.ix_(order, order)]
        sizes = self.loads[0].astype(np.int64)
        if len(sizes) == len(order):
            return ordered
        starts = np.cumsum(sizes) - sizes
        total = np.add.reduceat(np.add.reduceat(ordered, starts, axis=0), starts, axis=1)
        return total / np.outer(sizes, sizes)

    def costs(self, affinity: FeatureAffinity, sign: float) -> Costs:
        """The gains of interactions, times ``sign``, of pairs and triples of blocks."""
        pairs = sign * self.matrix(affinity.significant(), affinity.features)
        np.fill_diagonal(pairs, 0.0)
        block_of = {name: i for i, names in enumerate(self.names) for name in names}
        triples: dict[tuple[int, ...], float] = {}
        for triple in affinity.triples:
            blocks = tuple(sorted({block_of[name] for name in triple.features if name in block_of}))
            if all(name in block_of for name in triple.features) and len(blocks) == 3:
                triples[blocks] = triples.get(blocks, 0.0) + sign * triple.gain
            elif all(name in block_of for name in triple.features) and len(blocks) == 2:
                # Two of the three are one block: together where the two blocks are.
                weight = self.loads[0, blocks[0]] * self.loads[0, blocks[1]]
                pairs[blocks] += sign * triple.gain / weight
                pairs[blocks[::-1]] += sign * triple.gain / weight
        rows = np.array(list(triples), dtype=np.int64).reshape(-1, 3)
        return Costs(pairs=pairs, per_feature=False, triples=rows, triple_costs=np.array(list(triples.values())))

    def in_category(self, category: str) -> Blocks:
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
    """Joins features that must share a tower and adds up their loads.

    ``features`` are all members to place, column shards included, ``specs`` their tables, ``pooling`` their mean ids
    per sample, ``shards`` the column shards of each feature that is cut. ``rules`` name features one by one.

    Raises:
        InputError: features that must share a tower must also part, or are of different categories.
    """

    def members(group: Sequence[str]) -> list[str]:
        return [member for feature in group for member in shards.get(feature, (feature,))]

    cut = [name for group in rules.together for name in group if name in shards]
    if cut:
        raise InputError(
            f"Partition rules: feature {cut[0]!r} must share a tower with others, but its table is cut into column "
            "shards, which go to different towers. Drop the rule or do not split it."
        )
    names = joined(features, [*rules.together, *(spec.feature_names for spec in specs)])
    home = {member: category for category, owned in rules.categories.items() for member in members(owned)}
    category = tuple(_one_category(block, home) for block in names)
    apart = _apart([*(members(group) for group in rules.apart), *shards.values()], names)
    return Blocks(names=names, loads=_loads(names, specs, pooling), apart=apart, category=category)


def joined(features: Sequence[str], groups: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Returns the connected components of features that share a group, each sorted, all sorted."""
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
    loads = np.zeros((3, len(names)))
    loads[0] = list(map(len, names))
    table_of = {feature: spec for spec in specs for feature in spec.feature_names}
    for i, block in enumerate(names if table_of else ()):
        loads[1, i] = sum(pooling[name] * table_of[name].embedding_dim for name in block)
        # A shared table is there once.
        loads[2, i] = sum({table_of[name].name: table_of[name].num_bytes for name in block}.values())
    return loads


def _apart(groups: Sequence[Sequence[str]], names: Sequence[Sequence[str]]) -> NDArray[np.bool_] | None:
    if not groups:
        return None
    block_of = {name: i for i, block in enumerate(names) for name in block}
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


def choose_splits(
    specs: Sequence[TableSpec],
    num_towers: int,
    how: SplitColumns,
    *,
    max_bytes: float = np.inf,
    together: Sequence[Sequence[str]] = (),
) -> dict[str, tuple[int, ...]]:
    """Chooses the tables to cut; returns the columns of each shard, by feature.

    ``"largest"`` cuts tables larger than a tower may hold, and then, one shard at a time, the table with the largest
    shards, until there is a feature or shard for every tower. ``"even"`` cuts every table into shards of equal width.

    Tables that several features share and those of the groups ``together`` are not cut. ``max_bytes`` is what a tower
    may hold.

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
    by_feature = {spec.feature_names[0]: spec for spec in specs if len(spec.feature_names) == 1}
    by_feature = {feature: spec for feature, spec in by_feature.items() if feature not in whole}
    most = {f: spec.embedding_dim // STEP if spec.embedding_dim % STEP == 0 else 1 for f, spec in by_feature.items()}
    uncut = [feature for feature in feature_names(specs) if feature not in by_feature]
    held = set(uncut)
    groups = [*(spec.feature_names for spec in specs), *together]
    num_whole = len(joined(uncut, [[feature for feature in group if feature in held] for group in groups]))
    pieces = dict.fromkeys(most, 1)
    if how == "even":
        wanted = max(1, -(-(num_towers - num_whole) // max(1, len(most))))
        # The least number of equal pieces, ``wanted`` or more; else single steps of columns.
        for feature, steps in most.items():
            pieces[feature] = next((count for count in range(wanted, steps + 1) if steps % count == 0), steps)
    else:
        for feature, spec in by_feature.items():
            if spec.num_bytes > max_bytes:
                # Whole steps of columns that a tower can hold; where not even one fits, the limit is refused later.
                steps = max(1, int(max_bytes // (4 * STEP * spec.num_embeddings)))
                pieces[feature] = -(-most[feature] // steps)
    missing = num_towers - num_whole - sum(pieces.values())
    while how == "largest" and missing > 0:
        # The table with the largest shards, the first by name of equals.
        sizes = [(-by_feature[f].num_bytes / pieces[f], f) for f in most if pieces[f] < most[f]]
        if not sizes:
            break
        pieces[min(sizes)[1]] += 1
        missing -= 1
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


def members_of(affinity: FeatureAffinity, splits: dict[str, tuple[int, ...]]) -> FeatureAffinity:
    """Affinity of features and column shards; a shard has that of its feature."""
    if not splits:
        return affinity
    known = set(affinity.features)
    members: list[tuple[str, int]] = []
    for i, feature in enumerate(affinity.features):
        shards = shard_names(feature, splits[feature]) if feature in splits else [feature]
        clash = [name for name in shards if name in known and name != feature]
        if clash:
            raise InputError(f"Feature {clash[0]!r} has the name of a column shard of {feature!r}; rename it.")
        members += [(name, i) for name in shards]
    names, index = zip(*members, strict=True)
    square = np.ix_(index, index)
    cut = {feature: shard_names(feature, widths) for feature, widths in splits.items()}
    return FeatureAffinity(
        matrix=affinity.matrix[square],
        features=names,
        measure=affinity.measure,
        errors=None if affinity.errors is None else affinity.errors[square],
        triples=tuple(
            replace(triple, features=shards)
            for triple in affinity.triples
            for shards in product(*(cut.get(name, [name]) for name in triple.features))
        ),
        num_samples=affinity.num_samples,
        loss=affinity.loss,
    )


def _widths(dim: int, count: int) -> tuple[int, ...]:
    steps = dim // STEP
    return tuple(STEP * (steps // count + (i < steps % count)) for i in range(count))
