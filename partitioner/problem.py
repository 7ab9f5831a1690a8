"""Turns an affinity, tables and rules into the search problem: blocks with loads, limits, and towers per category.

Legend: F features, P blocks (features that stay together), T towers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.formatting import shorten
from dmt.partitioner.affinity import FeatureAffinity
from dmt.partitioner.rules import PartitionRules
from dmt.partitioner.search import Bounds, Costs, Floats, even_start, local_search

__all__ = ["Blocks", "Part", "make_blocks", "prepare", "size_bounds"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """P blocks of features that stay together, in the order of their names."""

    names: tuple[tuple[str, ...], ...]
    """The features of each block."""
    loads: NDArray[np.float64]
    """[3, P] features, work (elements read per sample) and bytes of each block; without tables the last two are 0."""
    apart: NDArray[np.bool_] | None
    """[P, P] True for blocks that must not share a tower; None without such a rule."""

    def within(self, features: Collection[str]) -> Blocks:
        """Returns the blocks of ``features``, which contains either all features of a block or none."""
        index = [i for i, names in enumerate(self.names) if names[0] in features]
        return Blocks(
            names=tuple(self.names[i] for i in index),
            loads=self.loads[:, index],
            apart=None if self.apart is None else self.apart[np.ix_(index, index)],
        )

    def matrix(self, matrix: Floats, features: Sequence[str]) -> Floats:
        """Returns the [P, P] means of ``matrix`` [F, F] over the features of each pair of blocks."""
        position = {name: i for i, name in enumerate(features)}
        order = [position[name] for names in self.names for name in names]
        ordered = matrix[np.ix_(order, order)]
        sizes = self.loads[0].astype(np.int64)
        starts = np.cumsum(sizes) - sizes
        total = np.add.reduceat(np.add.reduceat(ordered, starts, axis=0), starts, axis=1)
        return total / np.outer(sizes, sizes)

    def costs(self, affinity: FeatureAffinity, sign: float) -> Costs:
        """Returns the costs for the search: the gains of pairs and triples of blocks, times ``sign``.

        ``sign`` is -1 to keep interacting blocks in one tower, 1 to separate them. The cost of a pair of blocks is the
        mean over their pairs of features, where gains that may be noise count as 0, plus triples inside the two blocks.
        """
        pairs = sign * self.matrix(affinity.significant(), affinity.features)
        np.fill_diagonal(pairs, 0.0)
        block_of = {name: i for i, names in enumerate(self.names) for name in names}
        triples: dict[tuple[int, ...], float] = {}
        for triple in affinity.triples:
            if not block_of.keys() >= set(triple.features):
                continue
            if len(blocks := tuple(sorted({block_of[name] for name in triple.features}))) == 3:
                triples[blocks] = triples.get(blocks, 0.0) + sign * triple.gain
            elif len(blocks) == 2:
                # Two of its features are in one block, so its three features are together if the two blocks are.
                gain = sign * triple.gain / (self.loads[0, blocks[0]] * self.loads[0, blocks[1]])
                pairs[blocks] += gain
                pairs[blocks[::-1]] += gain
        rows = np.array(list(triples), dtype=np.int64).reshape(-1, 3)
        return Costs(pairs=pairs, per_feature=False, triples=rows, triple_costs=np.array(list(triples.values())))


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """The features of a category, or all features without categories, and the number of their towers."""

    category: str
    blocks: Blocks
    num_towers: int
    bounds: Bounds
    """Limits for every tower. Those on its features are looser than ``asked`` if blocks of several features need it."""
    asked: tuple[int, int]
    """Minimum and maximum number of features in a tower, by the balance ratio."""

    @property
    def where(self) -> str:
        """Start of a message about this part; empty without categories."""
        return f"category {self.category!r}: " if self.category else ""


def prepare(
    measure: FeatureAffinity, *, num_towers: int, balance_ratio: float, rules: PartitionRules
) -> tuple[list[Part], list[str]]:
    """Applies rules and limits to the features; see `TowerPartitioner`, but ``rules`` must not contain patterns.

    Returns:
        The parts to solve, one per category, and warnings for the user.

    Raises:
        InputError: a limit needs tables, rules conflict, or ``num_towers`` does not suit blocks or categories.
    """
    is_limited = rules.max_work_ratio is not None or rules.max_tower_bytes is not None
    if not measure.tables and is_limited:
        raise InputError(
            "TowerPartitioner: max_work_ratio and max_tower_bytes need the tables, but the affinity has none. Pass "
            "tables= to fit() or partition(), or use an affinity that has tables."
        )
    blocks = make_blocks(measure, rules)
    max_work = np.inf if rules.max_work_ratio is None else rules.max_work_ratio * blocks.loads[1].sum() / num_towers
    upper = max_work, np.inf if rules.max_tower_bytes is None else rules.max_tower_bytes
    parted, counts = {"": blocks}, {"": num_towers}
    if rules.categories:
        parted = {name: blocks.within(inside) for name, inside in rules.categories.items()}
        counts = _allot(parted, num_towers, rules.towers_per_category)
    notes = []
    if rules.max_work_ratio is not None and measure.pooling_factors is None:
        notes.append(
            "Work assumes one id per sample and feature, because the affinity has no pooling_factors. Set them if "
            "features have more ids."
        )
    return [_part(name, inside, counts[name], balance_ratio, upper) for name, inside in parted.items()], notes


def make_blocks(measure: FeatureAffinity, rules: PartitionRules) -> Blocks:
    """Joins features that must share a tower into blocks, and adds up their loads; ``rules`` contain no patterns.

    Raises:
        InputError: features must be both together and apart, or together but are in different categories.
    """
    names = _joined(measure.features, [*rules.together, *(spec.feature_names for spec in measure.tables)])
    home = {feature: category for category, inside in rules.categories.items() for feature in inside}
    for block in names:
        if (other := next((name for name in block if home.get(name) != home.get(block[0])), None)) is not None:
            raise InputError(
                f"Partition rules: {block[0]!r} is in category {home[block[0]]!r} and {other!r} in {home[other]!r}, "
                "but a shared table or the rule 'together' joins them. Put them into the same category."
            )
    factors = dict(zip(measure.features, measure.pooling_factors or (1.0,) * measure.num_features, strict=True))
    table_of = {feature: spec for spec in measure.tables for feature in spec.feature_names}
    loads = np.zeros((3, len(names)))
    loads[0] = list(map(len, names))
    for i, block in enumerate(names if table_of else ()):
        loads[1, i] = sum(factors[name] * table_of[name].embedding_dim for name in block)
        # A shared table counts once.
        loads[2, i] = sum({table_of[name].name: table_of[name].num_bytes for name in block}.values())
    return Blocks(names=names, loads=loads, apart=_apart(rules.apart, names))


def _joined(features: Sequence[str], groups: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Returns the blocks: sets of features that groups link, directly or through others; all sorted."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    position = {name: i for i, name in enumerate(features)}
    edges = np.array(
        [(position[group[0]], position[name]) for group in groups for name in group[1:]], dtype=np.int64
    ).reshape(-1, 2)
    graph = coo_array((np.ones(len(edges)), tuple(edges.T)), shape=(len(features), len(features)))
    blocks: dict[int, list[str]] = {}
    for name, component in zip(features, connected_components(graph, directed=False)[1].tolist(), strict=True):
        blocks.setdefault(component, []).append(name)
    return tuple(sorted(tuple(sorted(block)) for block in blocks.values()))


def _apart(groups: Sequence[Sequence[str]], names: Sequence[Sequence[str]]) -> NDArray[np.bool_] | None:
    if not groups:
        return None
    block_of = {name: i for i, block in enumerate(names) for name in block}
    apart = np.zeros((len(names), len(names)), dtype=np.bool_)
    for group in groups:
        for a, b in combinations(group, 2):
            if block_of[a] == block_of[b]:
                raise InputError(
                    f"Partition rules: {a!r} and {b!r} must not share a tower (rule 'apart'), but a shared table or "
                    f"the rule 'together' joins {shorten([*map(repr, names[block_of[a]])], ', ')}. Change the rules."
                )
            apart[block_of[a], block_of[b]] = apart[block_of[b], block_of[a]] = True
    return apart


def _allot(parted: Mapping[str, Blocks], num_towers: int, given: Mapping[str, int]) -> dict[str, int]:
    """Returns the number of towers of each category: as ``given``, else in proportion to its features."""
    most = {name: given.get(name, len(blocks.names)) for name, blocks in parted.items()}
    counts = {name: given.get(name, 1) for name in parted}
    if not sum(counts.values()) <= num_towers <= sum(most.values()):
        raise InputError(
            f"TowerPartitioner: num_towers={num_towers}, but the categories need at least {sum(counts.values())} "
            f"({counts}) and can fill at most {sum(most.values())} ({most}; features that stay together count once). "
            "Give a number in that range, or change towers_per_category."
        )
    features = {name: float(blocks.loads[0].sum()) for name, blocks in parted.items()}
    for _ in range(num_towers - sum(counts.values())):
        unfilled = [name for name in parted if counts[name] < most[name]]
        counts[max(unfilled, key=lambda name: features[name] / counts[name])] += 1
    return counts


def _part(category: str, blocks: Blocks, num_towers: int, balance_ratio: float, upper: tuple[float, float]) -> Part:
    num_features, num_blocks = int(blocks.loads[0].sum()), len(blocks.names)
    if num_towers > num_blocks:
        what = "features" if num_features == num_blocks else "groups of features (of a shared table or rule 'together')"
        name = f"towers_per_category[{category!r}]" if category else "num_towers"
        raise InputError(
            f"TowerPartitioner: {name}={num_towers} exceeds the {num_blocks} {what} to place, but every "
            "tower needs one. Use fewer towers, or write a plan that cuts tables (TowerPlan.column_splits)."
        )
    asked = size_bounds(num_features, num_towers, balance_ratio)
    least, most = _fitting_sizes(blocks.loads[0], num_towers, asked)
    bounds = Bounds(
        loads=blocks.loads,
        lower=np.array([float(least), 0.0, 0.0]),
        upper=np.array([float(most), *upper]),
        apart=blocks.apart,
    )
    return Part(category=category, blocks=blocks, num_towers=num_towers, bounds=bounds, asked=asked)


def size_bounds(num_features: int, num_towers: int, balance_ratio: float) -> tuple[int, int]:
    """Returns the minimum and maximum number of features in a tower.

    Each minimum has the largest maximum that ``balance_ratio`` allows. Of these pairs, returns the one around F / T
    whose middle is nearest to it; if there is none, floor(F / T) and ceil(F / T). An infinite ratio allows any size.

    Example:
        >>> size_bounds(26, 8, 1.0), size_bounds(24, 8, 1.0), size_bounds(26, 8, 2.0), size_bounds(26, 8, 4.0)
        ((3, 4), (3, 3), (2, 4), (1, 4))
    """
    if math.isinf(balance_ratio):
        return 1, num_features
    mean = num_features / num_towers
    # 1e-9, because 1.15 * 100 is slightly less than 115 in floating point.
    pairs = [(least, int(min(num_features, balance_ratio * least + 1e-9))) for least in range(int(mean), 0, -1)]
    allowed = [(least, most) for least, most in pairs if most >= mean]
    return min(allowed, key=lambda pair: abs(sum(pair) - 2 * mean), default=(int(mean), math.ceil(mean)))


def _fitting_sizes(weights: Floats, num_towers: int, asked: tuple[int, int]) -> tuple[int, int]:
    """Loosens the ``asked`` sizes until blocks of [P] ``weights`` features fit; returns minimum and maximum.

    First raises the maximum, by as little as possible, then lowers the minimum. A local search decides whether blocks
    fit, so the sizes may be looser than a perfect packing needs.
    """
    nothing = Costs(pairs=np.zeros((len(weights), len(weights))), per_feature=False)

    def loosened(more: int, less: int) -> tuple[int, int]:
        return max(1, asked[0] - less), asked[1] + more

    def fits(more: int, less: int) -> bool:
        lower, upper = np.array(loosened(more, less), dtype=np.float64).reshape(2, 1)
        bounds = Bounds(loads=weights[None, :], lower=lower, upper=upper)
        labels = local_search(nothing, even_start(bounds, num_towers), num_towers=num_towers, bounds=bounds)
        return not bounds.violation(labels, num_towers)

    most = int(weights.max()) - 1  # always enough, if the largest block is dealt first
    # More room never hurts, so bisection finds the least that is enough.
    more = bisect_left(range(most), True, key=lambda more: fits(more, most))
    return loosened(more, bisect_left(range(most), True, key=lambda less: fits(more, less)))
