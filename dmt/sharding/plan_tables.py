"""`plan_tables`: places the tables of every tower on its ranks by cost and memory, and says why. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dmt.errors import InputError
from dmt.formatting import counted, human_bytes
from dmt.plan.tables import feature_names, table_specs
from dmt.plan.topology import TowerTopology
from dmt.sharding.costs import CostModel, Hardware, StepWorkload
from dmt.sharding.packing import Option, Problem, pack
from dmt.sharding.plan import RankLoad, TableSharding, TowerShardingPlan
from dmt.sharding.schemes import SCHEMES, Allowed, Scheme, ShardingRules, TablePlacement, check_columns

__all__ = ["plan_tables"]


def plan_tables(
    tables_by_tower: Sequence[Sequence[Any]],
    topology: TowerTopology,
    *,
    workload: StepWorkload | None = None,
    hardware: Hardware | None = None,
    rules: ShardingRules | None = None,
    column_gain: float = 0.05,
) -> TowerShardingPlan:
    """Places every table inside its tower (Neo, sections 4 and 4.1).

    Each tower is planned alone; what is made small is the cost of its busiest rank, with the memory of a rank as a hard
    limit. The result depends neither on the order of tables nor on the process.

    Args:
        tables_by_tower: ``EmbeddingBagConfig`` or `TableSpec` of every tower of the mesh, as from
            `TowerPlan.tables_by_tower`.
        topology: the mesh sizes.
        workload: batch size, ids per sample and optimizer.
        hardware: memory and rates of a rank.
        rules: what the user decided. With a placement for every table, this only computes the report.
        column_gain: a tower cuts tables into columns only where its busiest rank would otherwise cost more by more than
            this share, or nothing else fits the memory; 0 takes the cheapest plan. Under row-wise AdaGrad a column-wise
            table is trained a little differently, and ids are sent once per shard.

    Raises:
        InputError: names or numbers are wrong, rules contradict each other or cannot be met, or tables do not fit.
    """
    model = CostModel(topology=topology, workload=workload or StepWorkload(), hardware=hardware or Hardware())
    rules = rules or ShardingRules()
    _check_names(tables_by_tower, model)
    allowed = rules.resolve(tables_by_tower, topology.ranks_per_tower)
    towers = [
        _Tower(number, tables, allowed, rules.cache_load_factor, model, column_gain)
        for number, tables in enumerate(tables_by_tower)
    ]
    planned = [tower.plan() for tower in towers]
    placed = tuple(table for tables, _ in planned for table in tables)
    return TowerShardingPlan(
        topology=model.topology,
        workload=model.workload,
        hardware=model.hardware,
        tables=placed,
        ranks=tuple(rank for _, ranks in planned for rank in ranks),
        notes=_notes(placed, model),
    )


def _check_names(tables_by_tower: Sequence[Sequence[Any]], model: CostModel) -> None:
    if len(tables_by_tower) != model.topology.num_towers:
        raise InputError(
            f"Tables are given for {len(tables_by_tower)} towers, but the topology has "
            f"num_towers={model.topology.num_towers}. Give one list of tables for each tower of the mesh."
        )
    tables = [table for tower in tables_by_tower for table in tower]
    for table in tables:
        check_columns(table)
    model.workload.check_features(set(feature_names(table_specs(tables, one_table_per_feature=False))))


@dataclass(frozen=True, eq=False)
class _Tower:
    """The tables of one tower, to be placed on its ranks."""

    number: int
    tables: Sequence[Any]
    allowed: Mapping[str, Allowed]
    cache_load_factor: float
    model: CostModel
    column_gain: float

    def plan(self) -> tuple[list[TableSharding], list[RankLoad]]:
        """Places the tables and reports the loads of the tower's ranks."""
        num_ranks = self.model.topology.ranks_per_tower
        pinned = {t.name: p for t in self.tables if (p := self.allowed[t.name].placement) is not None}
        # By name: the order in which tables come must not matter.
        free = sorted((table for table in self.tables if table.name not in pinned), key=lambda table: table.name)
        cost, memory = np.zeros(num_ranks), np.zeros(num_ranks)
        for table in sorted(self.tables, key=lambda table: table.name):
            for rank, load in self.model.shards(table, pinned[table.name]) if table.name in pinned else ():
                cost[rank] += load.seconds
                memory[rank] += load.memory
        problem = Problem(
            options=[[self._option(table, placement) for placement in self._cuts(table)] for table in free],
            cost=cost,
            memory=memory,
            capacity=self.model.hardware.memory_per_rank or np.inf,
            fixed=tuple(self.model.fixed_seconds(scheme) for scheme in SCHEMES),
            used=frozenset(SCHEMES.index(placement.scheme) for placement in pinned.values()),
            tolerance=self.column_gain,
        )
        packing = pack(problem) if memory.max() <= problem.capacity else None
        if packing is None:
            raise self._no_room(problem)
        placements = dict(pinned)
        for item, table in enumerate(free):
            scheme = SCHEMES[packing.chosen[item].kind]
            placements[table.name] = self._placement(table, scheme, packing.ranks[item] or tuple(range(num_ranks)))
        return self._report(placements)

    def _placement(self, table: Any, scheme: Scheme, ranks: tuple[int, ...]) -> TablePlacement:
        kernel = self.allowed[table.name].kernel
        cache = {} if kernel == "fused" else {"cache_load_factor": self.cache_load_factor}
        return TablePlacement(scheme=scheme, ranks=ranks, kernel=kernel, **cache)

    def _cuts(self, table: Any) -> Iterator[TablePlacement]:
        """The ways to cut a table, fewest parts first, on the first ranks."""
        num_ranks = self.model.topology.ranks_per_tower
        for scheme in self.allowed[table.name].schemes:
            counts = [1] if scheme == "table_wise" else [num_ranks]
            if scheme == "column_wise":
                counts = _shard_counts(table.embedding_dim, num_ranks)
            for count in counts:
                yield self._placement(table, scheme, tuple(range(count)))

    def _option(self, table: Any, placement: TablePlacement) -> Option:
        kind, loads = SCHEMES.index(placement.scheme), [load for _, load in self.model.shards(table, placement)]
        if placement.scheme in ("table_wise", "column_wise"):
            costs, memory = tuple(load.seconds for load in loads), tuple(float(load.memory) for load in loads)
            return Option(costs, memory, 0.0, 0.0, kind)
        # The last block of rows is shorter; it is counted as one of the others.
        return Option((), (), loads[0].seconds, float(loads[0].memory), kind)

    def _no_room(self, problem: Problem) -> InputError:
        """Names the table of which a rank must hold the most, and what all tables need."""
        least: dict[str, tuple[int, str]] = {}
        for table in self.tables:
            pinned = self.allowed[table.name].placement
            cuts = self._cuts(table) if pinned is None else [pinned]
            sizes = ((max(load.memory for _, load in self.model.shards(table, cut)), cut.scheme) for cut in cuts)
            least[table.name] = min(sizes)
        name = max(least, key=lambda table: least[table])
        memory, scheme = least[name]
        needed = problem.memory.sum() + sum(
            min(option.all_memory(problem.num_ranks) for option in options) for options in problem.options
        )
        room = problem.capacity
        return InputError(
            f"No placement was found for the {counted(len(self.tables), 'table')} of tower {self.number}: they need at "
            f"least {human_bytes(needed)} of the {human_bytes(problem.num_ranks * room)} of device memory that "
            f"{counted(problem.num_ranks, 'rank')} of memory_per_rank={human_bytes(room)} have; of table {name!r} a "
            f"rank must hold {human_bytes(memory)} even {scheme}. Let large tables be row_wise, use more ranks per "
            "tower, a smaller data type or optimizer state, or move tables to other towers."
        )

    def _report(self, placements: Mapping[str, TablePlacement]) -> tuple[list[TableSharding], list[RankLoad]]:
        num_ranks, model = self.model.topology.ranks_per_tower, self.model
        shards = {table.name: model.shards(table, placements[table.name]) for table in self.tables}
        memory = [0] * num_ranks
        seconds = [sum(map(model.fixed_seconds, {placement.scheme for placement in placements.values()}))] * num_ranks
        for name in sorted(shards):
            for rank, load in shards[name]:
                memory[rank] += load.memory
                seconds[rank] += load.seconds
        mean = sum(seconds) / num_ranks
        tables = [
            TableSharding(
                name=table.name,
                tower=self.number,
                placement=placements[table.name],
                reason=self._reason(table, placements[table.name], mean),
                seconds=sum(load.seconds for _, load in shards[table.name]),
                memory=sum(load.memory + load.elsewhere for _, load in shards[table.name]),
            )
            for table in self.tables
        ]
        loads = zip(range(num_ranks), memory, seconds, strict=True)
        return tables, [RankLoad(tower=self.number, local=r, memory=m, seconds=s) for r, m, s in loads]

    def _reason(self, table: Any, placement: TablePlacement, mean: float) -> str:
        """Returns why a table is placed so; ``mean``: cost of a rank in seconds."""
        allowed, room = self.allowed[table.name], self.model.hardware.memory_per_rank
        words = f"{placement.scheme} on rank {placement.ranks[0]}"
        if placement.scheme != "table_wise":
            words = f"{placement.scheme} over {len(placement.ranks)} ranks"
        if placement.kernel != "fused":
            words += f" as {placement.kernel}"
        if allowed.why and len(allowed.schemes) == 1:
            return f"{words}: {allowed.why}"
        whole = self.model.shard(table, "table_wise", table.num_embeddings, table.embedding_dim)
        if placement.scheme in ("row_wise", "column_wise") and room is not None and whole.memory > room:
            return f"{words}: {human_bytes(whole.memory)} do not fit a rank's {human_bytes(room)}"
        share = f"{whole.seconds / mean if mean else 0.0:.2f} x the mean load of a rank"
        return f"{words}: {share}" if placement.scheme == "table_wise" else f"{words}: on one rank it would be {share}"


def _notes(tables: Sequence[TableSharding], model: CostModel) -> tuple[str, ...]:
    number = sum(table.placement.scheme == "column_wise" for table in tables)
    if not number or model.workload.optimizer != "rowwise_adagrad":
        return ()
    return (
        f"{counted(number, 'table')}, column-wise: row-wise AdaGrad keeps one state per shard and row, so training "
        "differs a little from that of the uncut table.",
    )


def _shard_counts(columns: int, num_ranks: int) -> list[int]:
    """Numbers of column shards worth trying: all up to 8, then doubling, and the most there can be."""
    most = min(num_ranks, columns // 4)
    doubled = [2**power for power in range(4, 16) if 2**power < most]
    return sorted({*range(2, min(most, 8) + 1), *doubled, most} - {0, 1})
