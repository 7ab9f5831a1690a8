"""`plan_tables`: places the tables of every tower on its ranks by cost and memory, and says why. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dmt.errors import InputError
from dmt.formatting import counted, human_bytes
from dmt.plan.tables import feature_names, table_specs
from dmt.plan.topology import TowerTopology
from dmt.sharding.costs import CostModel, Hardware, ShardLoad, StepWorkload
from dmt.sharding.explanation import RankLoad, TableSharding, TowerShardingPlan
from dmt.sharding.packing import Option, Problem, Vector, pack
from dmt.sharding.schemes import EVERYWHERE, SCHEMES, Allowed, ShardingRules, TablePlacement, check_columns

__all__ = ["plan_tables"]

# A tower cuts tables into columns only if its busiest rank would otherwise cost over this share more, or if nothing
# else fits into memory: ids are sent once per shard, and under row-wise AdaGrad the table trains a little differently.
_COLUMN_GAIN = 0.05


def plan_tables(
    tables_by_tower: Sequence[Sequence[Any]],
    topology: TowerTopology,
    *,
    outside: Sequence[Any] = (),
    workload: StepWorkload | None = None,
    hardware: Hardware | None = None,
    rules: ShardingRules | None = None,
) -> TowerShardingPlan:
    """Places every table inside its tower (Neo, sections 4 and 4.1).

    Plans each tower separately and keeps the cost of its busiest rank low, with a rank's memory as a hard limit.
    Placements do not depend on the order of tables or on the process.

    Args:
        tables_by_tower: ``EmbeddingBagConfig`` or `TableSpec` of every tower of the mesh, as from
            `TowerPlan.tables_by_tower`.
        topology: the mesh sizes.
        outside: tables that every rank holds, as from `TowerPlan.outside_tables`.
        workload: batch size, ids per sample and optimizer.
        hardware: memory and rates of a rank.
        rules: the user's decisions. If they place every table, this function only computes costs and reasons.

    Raises:
        InputError: there is not one list for each tower, `table_specs` or `check_columns` refuses a table, a name in a
            rule or in ``pooling_factors`` is unknown, a rule cannot be met, or the tables do not fit into memory.
    """
    model = CostModel(topology=topology, workload=workload or StepWorkload(), hardware=hardware or Hardware())
    if len(tables_by_tower) != topology.num_towers:
        raise InputError(
            f"Tables are given for {counted(len(tables_by_tower), 'tower')}, but the topology has "
            f"num_towers={topology.num_towers}. Give one list of tables for each tower of the mesh."
        )
    tables = [*(table for tower in tables_by_tower for table in tower), *outside]
    for table in tables:
        check_columns(table)
    model.workload.check_features(set(feature_names(table_specs(tables, one_table_per_feature=False))))
    allowed = (rules or ShardingRules()).resolve(tables_by_tower, topology.ranks_per_tower, outside)
    everywhere, held = _on_every_rank(outside, model)
    planned = [_Tower(number, tables, allowed, model, held).plan() for number, tables in enumerate(tables_by_tower)]
    return TowerShardingPlan(
        topology=topology,
        workload=model.workload,
        hardware=model.hardware,
        tables=(*(table for tables, _ in planned for table in tables), *everywhere),
        ranks=tuple(rank for _, ranks in planned for rank in ranks),
    )


def _on_every_rank(tables: Sequence[Any], model: CostModel) -> tuple[list[TableSharding], Vector]:
    """Returns the plan of the tables outside towers, and their load on a rank, [4]: `ShardLoad`'s first fields."""
    room, alone = model.hardware.memory_per_rank, replace(model, topology=model.topology.outside_towers)
    placement = TablePlacement(scheme="data_parallel", ranks=tuple(range(model.topology.ranks_per_tower)))
    loads = [alone.shard(table, "data_parallel", table.num_embeddings, table.embedding_dim) for table in tables]
    if room is not None and (needed := sum(load.needed for load in loads)) > room:
        largest, table = max(zip(loads, tables, strict=True), key=lambda pair: pair[0].needed)
        raise InputError(
            f"The {counted(len(tables), 'table')} outside towers need {human_bytes(needed)} on every rank, "
            f"{human_bytes(largest.needed)} of it for table {table.name!r}, but memory_per_rank={human_bytes(room)}. "
            "Put the features of large tables into towers."
        )
    held = np.zeros(4) + sum(np.array(load[:4]) for load in loads)
    return [
        TableSharding(
            name=table.name,
            tower=None,
            placement=placement,
            reason=f"on every rank: {'its features are' if len(table.feature_names) > 1 else 'its feature is'} in no "
            "tower",
            seconds=load.seconds,
            memory=load.memory,
        )
        for table, load in zip(tables, loads, strict=True)
    ], held


@dataclass(frozen=True, eq=False)
class _Tower:
    """The tables of one tower, to be placed on its ranks."""

    number: int
    tables: Sequence[Any]
    allowed: Mapping[str, Allowed]
    model: CostModel
    held: Vector
    """Load that tables outside towers put on a rank, [4]."""

    def plan(self) -> tuple[list[TableSharding], list[RankLoad]]:
        """Places the tables; returns their entries and the ranks' loads."""
        # Sorted by name, so that the order in which they were given does not matter.
        tables = sorted(self.tables, key=lambda table: table.name)
        placements = {t.name: p for t in tables if (p := self.allowed[t.name].placement) is not None}
        seconds, memory, activations, _ = self._loads([t for t in tables if t.name in placements], placements)
        free = [table for table in tables if table.name not in placements]
        problem = Problem(
            options=[sorted(self._options(table), key=lambda option: float(option.costs.sum())) for table in free],
            cost=seconds,
            memory=memory + activations,
            capacity=self.model.hardware.memory_per_rank or np.inf,
            fixed=tuple(self.model.fixed_seconds(scheme) for scheme in SCHEMES),
            used=frozenset(SCHEMES.index(placement.scheme) for placement in placements.values()),
            avoided=SCHEMES.index("column_wise"),
            tolerance=_COLUMN_GAIN,
        )
        packing = pack(problem) if problem.memory.max() <= problem.capacity else None
        if packing is None:
            raise InputError(self._no_room(problem))
        for item, table in enumerate(free):
            scheme, ranks = SCHEMES[packing.chosen[item].kind], packing.ranks[item].tolist()
            ranks = sorted(ranks) if scheme in EVERYWHERE else ranks
            placements[table.name] = self.allowed[table.name].place(scheme, ranks)
        loads = self._loads(tables, placements)
        loads[0] += sum(map(self.model.fixed_seconds, {placement.scheme for placement in placements.values()}))
        entries = [self._entry(table, placements[table.name], loads[0].mean()) for table in self.tables]
        ranks = [
            RankLoad(
                tower=self.number,
                local=local,
                memory=int(memory),
                activations=int(activations),
                averaged_bytes=averaged,
                seconds=seconds,
            )
            for local, (seconds, memory, activations, averaged) in enumerate(loads.T.tolist())
        ]
        return entries, ranks

    def _loads(self, tables: Sequence[Any], placements: Mapping[str, TablePlacement]) -> Vector:
        """Returns the loads of ``tables`` and the tables outside towers on every rank, [4, L], without fixed costs."""
        loads = np.tile(self.held[:, None], self.model.topology.ranks_per_tower)
        for table in tables:
            shards = self.model.shards(table, placements[table.name])
            loads[:, [rank for rank, _ in shards]] += np.transpose([load[:4] for _, load in shards])
        return loads

    def _cuts(self, table: Any) -> Iterator[TablePlacement]:
        """Yields the possible placements of a table on the tower's first ranks, by scheme, fewest parts first."""
        num_ranks, allowed = self.model.topology.ranks_per_tower, self.allowed[table.name]
        for scheme in allowed.schemes:
            counts = [num_ranks] if scheme in EVERYWHERE else [1]
            if scheme == "column_wise":
                counts = _shard_counts(table.embedding_dim, num_ranks)
            for count in counts:
                yield allowed.place(scheme, range(count))

    def _options(self, table: Any) -> Iterator[Option]:
        for placement in self._cuts(table):
            scheme, parts = placement.scheme, len(placement.ranks)
            loads = [load for _, load in self.model.shards(table, placement)]
            if scheme in EVERYWHERE:
                # The last block of rows may be shorter, but counts like the others.
                loads = loads[:1]
            seconds, memory = [load.seconds for load in loads], [float(load.needed) for load in loads]
            yield Option(np.zeros(parts) + seconds, np.zeros(parts) + memory, SCHEMES.index(scheme))

    def _no_room(self, problem: Problem) -> str:
        """Returns a message: what all tables need, and which table needs most on one rank."""
        largest = 0, "", ""
        needed = activations = 0
        for table in self.tables:
            pinned = self.allowed[table.name].placement
            cuts = self._cuts(table) if pinned is None else [pinned]
            loads = [([load for _, load in self.model.shards(table, cut)], cut.scheme) for cut in cuts]
            least = min((max(load.needed for load in shards), scheme) for shards, scheme in loads)
            largest = max(largest, (*least, table.name), key=lambda entry: entry[:2])
            size, part = min((sum(s.needed for s in shards), sum(s.activations for s in shards)) for shards, _ in loads)
            needed, activations = needed + size, activations + part
        memory, scheme, name = largest
        limit, num_ranks, batch = problem.capacity, len(problem.cost), self.model.workload.batch_size
        _, weights, looked_up, _ = self.held
        room = limit - weights - looked_up
        beside = f" besides {human_bytes(weights + looked_up)} each for tables outside towers" if weights else ""
        return (
            f"No placement was found for the {counted(len(self.tables), 'table')} of tower {self.number}: they need at "
            f"least {human_bytes(needed)}, {human_bytes(activations)} of it for the embeddings looked up with "
            f"batch_size={batch}, but {counted(num_ranks, 'rank')} with memory_per_rank={human_bytes(limit)} have "
            f"{human_bytes(num_ranks * room)}{beside}. A rank must hold {human_bytes(memory)} of table {name!r}, even "
            f"if it is {scheme}. Let large tables be row_wise, lower batch_size, allow more memory "
            "(sharding.memory_gib), use more ranks per tower, a smaller data type or optimizer state, or move tables "
            "to other towers."
        )

    def _entry(self, table: Any, placement: TablePlacement, mean: float) -> TableSharding:
        """Returns the plan's entry of a table; ``mean`` is the mean cost of the tower's ranks in seconds."""
        loads: list[ShardLoad] = [load for _, load in self.model.shards(table, placement)]
        return TableSharding(
            name=table.name,
            tower=self.number,
            placement=placement,
            reason=self._reason(table, placement, mean),
            seconds=sum(load.seconds for load in loads),
            memory=sum(load.memory + load.elsewhere for load in loads),
        )

    def _reason(self, table: Any, placement: TablePlacement, mean: float) -> str:
        allowed, room = self.allowed[table.name], self.model.hardware.memory_per_rank
        scheme, ranks = placement.scheme, placement.ranks
        where = f"on rank {ranks[0]}" if scheme == "table_wise" else f"over {counted(len(ranks), 'rank')}"
        words = f"{scheme} {where}" + (f" as {placement.kernel}" if placement.kernel != "fused" else "")
        if allowed.why and len(allowed.schemes) == 1:
            return f"{words}: {allowed.why}"
        whole = self.model.shard(table, "table_wise", table.num_embeddings, table.embedding_dim)
        share = f"{whole.seconds / mean:.3g} x the mean load of a rank"
        reason = share if scheme == "table_wise" else f"on one rank it would be {share}"
        if scheme in ("row_wise", "column_wise") and room is not None and whole.needed > room:
            reason = f"{human_bytes(whole.needed)} do not fit a rank's {human_bytes(room)}"
        return "; ".join(filter(None, [f"{words}: {reason}", allowed.why]))


def _shard_counts(columns: int, num_ranks: int) -> list[int]:
    """Returns the numbers of column shards to try: 2 to 8, then powers of two, and the largest possible."""
    most = min(num_ranks, columns // 4)
    doubled = [2**power for power in range(4, 16) if 2**power < most]
    return sorted({*range(2, min(most, 8) + 1), *doubled, most})
