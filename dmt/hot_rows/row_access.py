"""`plan_by_access`: what an access profile changes about a sharding plan: lookups of row-wise shards, and their cuts.

The planner cuts a row-wise table into equal blocks and takes its rows to be read equally often. Popular rows are not
spread evenly: a block that has them is read several times as often as another (OPER, section 3.2). Unequal contiguous
blocks may even that out, at the price of rows: the ranks of rare rows then hold most of the table. They are taken only
where the busiest rank of the tower gains at least a twentieth and every rank still fits its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.formatting import counted, shorten
from dmt.hot_rows.costs import has_single_ids, saved_bytes
from dmt.hot_rows.profile import AccessProfile, RowCounts
from dmt.plan.split_across_towers import uncut_name
from dmt.plan.tables import TableSpec, table_specs
from dmt.sharding.costs import CostModel, ShardLoad
from dmt.sharding.plan import RankLoad, TableSharding, TowerShardingPlan, imbalance_of
from dmt.sharding.schemes import TablePlacement, table_shards

__all__ = ["access_heights", "access_shares", "counted_tables", "plan_by_access"]

_GAIN = 0.05
# Between equal rows and equal accesses: the way of the cut from one to the other.
_MIXES = (0.25, 0.5, 0.75, 1.0)
# Fields of `RankLoad` that a shard adds to; what a rank of a row-wise table sends is ids and outputs.
_FIELDS = ("seconds", "memory", "lookups", "bytes_sent")


def access_shares(counts: RowCounts, rows: int, heights: Sequence[int]) -> NDArray[np.float64]:
    """Returns the share of a table's accesses that goes to each of its contiguous blocks, float64 [blocks].

    Blocks have these heights, from the first of the table's ``rows`` on. Accesses of rows that are not counted are
    spread evenly.

    Example:
        >>> access_shares(RowCounts.of([0, 0, 0, 5]), 6, [3, 3])
        array([0.75, 0.25])
    """
    ends = np.concatenate([[0], np.cumsum(heights)])
    if not counts.total:
        return np.diff(ends) / rows
    before = np.concatenate([[0], np.cumsum(counts.counts)])
    rest = counts.total - before[-1]
    return np.diff(before[np.searchsorted(counts.rows, ends)] + rest * ends / rows) / counts.total


def access_heights(counts: RowCounts, rows: int, num_blocks: int, *, mix: float) -> list[int]:
    """Returns the heights of contiguous blocks that have equal parts of rows and accesses, at least one row each.

    ``mix`` is the weight of accesses, 0 to 1; rows have the rest.

    Example:
        >>> [access_heights(RowCounts.of([0, 0, 0, 5]), 6, 2, mix=mix) for mix in (0, 1)]
        [[3, 3], [1, 5]]
    """
    ends = [0]
    for block in range(1, num_blocks):
        low, high = ends[-1] + 1, rows - (num_blocks - block)
        while low < high:
            middle = (low + high) // 2
            share = mix * access_shares(counts, rows, [middle, rows - middle])[0] + (1 - mix) * middle / rows
            low, high = (low, middle) if share >= block / num_blocks - 1e-12 else (middle + 1, high)
        ends.append(low)
    return np.diff([*ends, rows]).tolist()


def counted_tables(tables: Sequence[Any], profile: AccessProfile) -> dict[str, TableSpec]:
    """Returns the tables of a profile with the rows and features of these, by the name of the one here.

    The width does not matter: column shards of a table are read like the whole table, under names of their own.

    Example:
        >>> from dmt.plan.tables import TableSpec
        >>> whole = TableSpec(name="t", num_embeddings=10, embedding_dim=8, feature_names=("f",))
        >>> shard = replace(whole, name="t[0:4]", embedding_dim=4, feature_names=("f[0:4]",))
        >>> list(counted_tables([shard], AccessProfile([whole])))
        ['t[0:4]']
    """
    known = {_what_is_read(table): table for table in profile.tables}
    read = {table.name: known.get(_what_is_read(table)) for table in table_specs(tables)}
    return {name: source for name, source in read.items() if source is not None}


def _what_is_read(table: TableSpec) -> tuple[str, int, tuple[str, ...]]:
    return uncut_name(table.name), table.num_embeddings, tuple(map(uncut_name, table.feature_names))


def plan_by_access(plan: TowerShardingPlan, tables: Sequence[Any], profile: AccessProfile) -> TowerShardingPlan:
    """Returns a plan with the lookups of a profile, and with unequal row-wise shards where those help.

    Shards whose sizes the plan gives stay as they are; tables that the profile does not have are taken to be read
    evenly.

    Raises:
        InputError: the profile has no table of the plan with the same rows and features.
    """
    by_name = {table.name: table for table in tables}
    known = counted_tables(tables, profile)
    if not known:
        raise InputError(
            f"The profile has no table of this plan ({counted(len(by_name), 'table')}, the first is "
            f"{next(iter(by_name))!r}) with the same rows and features. Count it with `dmt prepare` from the "
            "same config."
        )
    planned = {entry.name: entry for entry in plan.tables}
    ranks: list[RankLoad] = []
    cut: list[str] = []
    row_wise_tables = 0
    for tower in plan.towers:
        own = [rank for rank in plan.ranks if rank.tower == tower.tower]
        loads = np.array([[getattr(rank, name) for name in _FIELDS] for rank in own], dtype=np.float64)
        of_tower = [entry for entry in plan.tables if entry.tower == tower.tower and entry.name in known]
        row_wise = [entry for entry in of_tower if entry.placement.scheme == "row_wise"]
        for entry in row_wise:
            even = _numbers(plan, by_name[entry.name], entry.placement, None)
            counts = profile[known[entry.name].name]
            loads += _numbers(plan, by_name[entry.name], entry.placement, counts) - even
        for entry in sorted(row_wise, key=lambda entry: -entry.seconds):
            planned[entry.name], loads = _cut(plan, by_name[entry.name], entry, known[entry.name], profile, loads)
        cut += [entry.name for entry in row_wise if planned[entry.name].placement != entry.placement]
        row_wise_tables += len(row_wise)
        ranks += [
            replace(rank, seconds=float(s), memory=round(m), lookups=float(n), bytes_sent=float(b))
            for rank, (s, m, n, b) in zip(own, loads, strict=True)
        ]
    towers = [
        replace(tower, imbalance=imbalance_of([rank.seconds for rank in ranks if rank.tower == tower.tower]))
        for tower in plan.towers
    ]
    absent = len(plan.tables) - len(known)
    notes = [
        f"access profile: {len(cut)} of {counted(row_wise_tables, 'row-wise table')} cut into unequal rows"
        + (f" ({shorten(cut, ', ')})." if cut else ".")
    ]
    if absent:
        notes.append(f"{counted(absent, 'table')} not in the profile with its rows and features: read evenly.")
    return replace(
        plan,
        tables=tuple(planned[entry.name] for entry in plan.tables),
        ranks=tuple(ranks),
        towers=tuple(towers),
        notes=(*plan.notes, *notes),
    )


def _cut(
    plan: TowerShardingPlan,
    table: Any,
    entry: TableSharding,
    source: TableSpec,
    profile: AccessProfile,
    loads: NDArray[np.float64],
) -> tuple[TableSharding, NDArray[np.float64]]:
    """Returns a row-wise table's entry, cut otherwise where that helps, and the loads of its tower's ranks, [L, 4]."""
    counts, rows, placement = profile[source.name], table.num_embeddings, entry.placement
    heights = [shard.rows for shard in table_shards(table, placement)]
    others = loads - _numbers(plan, table, placement, counts)
    can_change = not placement.sizes and placement.kernel == "fused"  # other memories have limits of their own
    tried = [access_heights(counts, rows, len(heights), mix=mix) for mix in _MIXES] if can_change else []
    placements = [replace(placement, sizes=tuple(sizes)) for sizes in tried]
    ways = {one: others + _numbers(plan, table, one, counts) for one in placements}
    room = plan.hardware.memory_per_rank or np.inf
    fitting = {one: way for one, way in ways.items() if way[:, 1].max() <= room}
    words = f"; by the profile its ranks have {_spread(access_shares(counts, rows, heights))} the mean lookups"
    if (cold := _without_hot(plan, table, source, profile)) is not None:
        left = _spread(access_shares(cold, rows, heights))
        words += f"; if all rows that pay without unique ids had copies, {left}"
    busiest, best = loads[:, 0].max(), min(fitting, key=lambda one: fitting[one][:, 0].max(), default=None)
    if best is None:
        return replace(entry, reason=entry.reason + words), loads
    gain = fitting[best][:, 0].max() / busiest
    most = max(best.sizes) * len(heights) / rows
    words += f"; shards of unequal rows (up to {most:.1f} x the mean) make the busiest rank cost {gain:.2f} x"
    if gain > 1 - _GAIN:
        return replace(entry, reason=f"{entry.reason}{words}: not worth it"), loads
    return replace(entry, placement=best, reason=entry.reason + words), fitting[best]


def _numbers(
    plan: TowerShardingPlan, table: Any, placement: TablePlacement, counts: RowCounts | None
) -> NDArray[np.float64]:
    """Returns what a row-wise table adds to `_FIELDS` of the ranks of its tower, [L, 4]; without counts evenly read."""
    model = CostModel(topology=plan.topology, workload=plan.workload, hardware=plan.hardware)
    found, shards = np.zeros((plan.topology.ranks_per_tower, len(_FIELDS))), table_shards(table, placement)
    heights = [shard.rows for shard in shards]
    shares = [None] * len(heights) if counts is None else access_shares(counts, table.num_embeddings, heights)
    for shard, share in zip(shards, shares, strict=True):
        tier: dict[str, Any] = {"kernel": placement.kernel, "cache": placement.cache_load_factor}
        load: ShardLoad = model.shard(table, "row_wise", shard.rows, table.embedding_dim, share=share, **tier)
        found[shard.rank] += (load.seconds, load.memory, load.lookups, load.id_bytes + load.output_bytes)
    return found


def _without_hot(plan: TowerShardingPlan, table: Any, source: TableSpec, profile: AccessProfile) -> RowCounts | None:
    """Returns the accesses that would be left to a table if all its rows that pay had copies; None where none pays.

    Rows are those that pay without unique ids, however many bytes they take.
    """
    if not has_single_ids(profile, source):
        return None
    counts = profile[source.name]
    num_ids = plan.workload.batch_size * profile.ids_per_sample(source)
    cold = saved_bytes(counts, table, plan.topology, num_ids=num_ids, distinct=False) <= 0
    if cold.all():
        return None
    left = counts.total - int(counts.counts[~cold].sum())
    return RowCounts(counts.rows[cold], counts.counts[cold], left, counts.missed)


def _spread(shares: NDArray[np.float64]) -> str:
    return f"{len(shares) * shares.min():.2f} to {len(shares) * shares.max():.2f} x"
