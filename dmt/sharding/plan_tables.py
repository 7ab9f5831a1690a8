"""`plan_tables`: places the tables of every tower on its ranks by cost and memory, and says why. Pure arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dmt.errors import InputError
from dmt.formatting import counted, human_bytes
from dmt.plan.tables import feature_names, table_specs
from dmt.plan.topology import TowerTopology
from dmt.sharding.costs import CostModel, Hardware, ShardLoad, StepWorkload
from dmt.sharding.packing import Option, Packing, Problem, pack
from dmt.sharding.plan import RankLoad, TableSharding, TowerLoad, TowerShardingPlan, imbalance_of
from dmt.sharding.schemes import SCHEMES, Kernel, Scheme, TablePlacement, check_columns, column_shards, row_shards
from dmt.sharding.user_rules import Allowed, ShardingRules, Tiers

__all__ = ["plan_tables"]

_Planned = tuple[list[TableSharding], list[RankLoad], TowerLoad]


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
    allowed = rules.resolve_all(tables_by_tower, topology.ranks_per_tower)
    towers = [
        _TowerPlanner(number, own, allowed, model, column_gain, rules.tiers).plan()
        for number, own in enumerate(tables_by_tower)
    ]
    tables = tuple(table for tower in towers for table in tower[0])
    return TowerShardingPlan(
        topology=model.topology,
        workload=model.workload,
        hardware=model.hardware,
        tables=tables,
        ranks=tuple(rank for tower in towers for rank in tower[1]),
        towers=tuple(tower[2] for tower in towers),
        notes=_notes(tables, model),
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
class _TowerPlanner:
    """Plans one tower."""

    number: int
    tables: Sequence[Any]
    allowed: Mapping[str, Allowed]
    model: CostModel
    column_gain: float
    tiers: Tiers

    def plan(self) -> _Planned:
        """Places the tables and reports the loads of the tower's ranks."""
        num_ranks = self.model.topology.ranks_per_tower
        placements: dict[str, TablePlacement] = {}
        free = []
        cost, memory = np.zeros(num_ranks), np.zeros(num_ranks)
        # By name: the order in which tables come must not matter.
        for table in sorted(self.tables, key=lambda table: table.name):
            pinned = self.allowed[table.name].placement
            if pinned is None:
                free.append(table)
                continue
            if self.tiers.kernel_of(table.name) is not None:
                pinned = self._with_kernel(table.name, pinned)
            placements[table.name] = pinned
            for rank, load in self.model.shards(table, pinned):
                cost[rank] += load.seconds
                memory[rank] += load.memory
        problem = Problem(
            options=[self._options(table) for table in free],
            cost=cost,
            memory=memory,
            capacity=self.model.hardware.memory_per_rank or np.inf,
            fixed=tuple(self.model.fixed_seconds(scheme) for scheme in SCHEMES),
            used=frozenset(SCHEMES.index(placement.scheme) for placement in placements.values()),
            tolerance=self.column_gain,
        )
        self._check_memory(free, problem, placements)
        packed = pack(problem)
        if packed is None:
            raise self._no_room(free, problem)
        for item, table in enumerate(free):
            placements[table.name] = self._with_kernel(table.name, _placement(packed.packing, item))
        return self._report(placements, packed.method if free else "pinned by the user")

    def _kernel(self, name: str) -> Kernel:
        return self.tiers.kernel_of(name) or "fused"

    def _with_kernel(self, name: str, placement: TablePlacement) -> TablePlacement:
        return replace(placement, kernel=self._kernel(name), cache_load_factor=self.tiers.cache_load_factor)

    def _options(self, table: Any) -> list[Option]:
        """The ways to cut a table, fewest parts first."""
        num_ranks, rows, columns = self.model.topology.ranks_per_tower, table.num_embeddings, table.embedding_dim
        schemes, kernel = self.allowed[table.name].schemes, self._kernel(table.name)
        if kernel != "fused":  # a copy for every rank would be no way to save memory
            schemes = tuple(scheme for scheme in schemes if scheme != "data_parallel")
            if not schemes:
                raise InputError(
                    f"Table {table.name!r} in tower {self.number} cannot be data_parallel with kernel={kernel!r}, "
                    "which is for tables that are too large for every device. Allow it another scheme, or leave out "
                    "its kernel."
                )
        cuts: list[tuple[Scheme, list[tuple[int, int]]]] = []
        for scheme in schemes:
            if scheme == "column_wise":
                widths = [column_shards(columns, count) for count in _shard_counts(columns, num_ranks)]
                cuts += [(scheme, [(rows, width) for width in of_cut]) for of_cut in widths]
            elif scheme == "row_wise":
                cuts.append((scheme, [(height, columns) for height in row_shards(rows, num_ranks)]))
            else:
                cuts.append((scheme, [(rows, columns)] * (1 if scheme == "table_wise" else num_ranks)))
        options, cache = [], self.tiers.cache_load_factor
        for scheme, shapes in cuts:
            loads = {s: self.model.shard(table, scheme, *s, kernel=kernel, cache=cache) for s in set(shapes)}
            kind, sizes = SCHEMES.index(scheme), [float(loads[shape].memory) for shape in shapes]
            if scheme in ("table_wise", "column_wise"):
                costs = tuple(loads[shape].seconds for shape in shapes)
                options.append(Option(costs, tuple(sizes), 0.0, None, kind))
            else:
                options.append(Option((), (), loads[shapes[0]].seconds, np.array(sizes), kind))
        return options

    def _check_memory(self, free: Sequence[Any], problem: Problem, pinned: Mapping[str, TablePlacement]) -> None:
        """Refuses tables that cannot fit however they are placed."""
        where, room = f"tower {self.number}", problem.capacity
        if problem.memory.max() > room:
            rank = int(problem.memory.argmax())
            sizes = {
                table.name: sum(
                    load.memory for own, load in self.model.shards(table, pinned[table.name]) if own == rank
                )
                for table in self.tables
                if table.name in pinned
            }
            raise InputError(
                f"The tables pinned to local rank {rank} of {where} need {human_bytes(problem.memory[rank])} of device "
                f"memory, but memory_per_rank is {human_bytes(room)}; {_largest(sizes)}. Pin some of them elsewhere.",
            )
        for table, options in zip(free, problem.options, strict=True):
            smallest = min(options, key=lambda option: option.most_memory)
            if smallest.most_memory > room:
                kernel = self._kernel(table.name)
                cache = "" if kernel == "fused" else f" and {kernel}, for what a device keeps of it (cache_load_factor)"
                raise InputError(
                    f"Table {table.name!r} in {where} needs {human_bytes(smallest.most_memory)} of device memory on a "
                    f"rank even {SCHEMES[smallest.kind]}{cache}, but memory_per_rank is {human_bytes(room)}. Use more "
                    "ranks per tower or a smaller data type or optimizer state, or allow it other schemes.",
                )

    def _no_room(self, free: Sequence[Any], problem: Problem) -> InputError:
        needed, room = _least_memory(problem), problem.capacity
        return InputError(
            f"No placement was found for the {len(self.tables)} tables of tower {self.number}: they need at least "
            f"{human_bytes(needed)} of the {human_bytes(problem.num_ranks * room)} of device memory that "
            f"{problem.num_ranks} ranks of memory_per_rank={human_bytes(room)} have; {_largest_of(free, problem)}. Let "
            "large tables be row_wise, use more ranks per tower, or move tables to other towers.",
        )

    def _report(self, placements: Mapping[str, TablePlacement], method: str) -> _Planned:
        num_ranks = self.model.topology.ranks_per_tower
        shards = {table.name: self.model.shards(table, placements[table.name]) for table in self.tables}
        held: list[list[tuple[str, ShardLoad]]] = [[] for _ in range(num_ranks)]
        sent = np.zeros(num_ranks)
        for name in sorted(shards):
            exchanged = placements[name].scheme in ("table_wise", "column_wise")
            for rank, load in shards[name]:
                held[rank].append((name, load))
                sent[rank] += load.output_bytes + load.reduced_bytes
                if exchanged and num_ranks > 1:  # the others send it their ids and gradients
                    others = (load.id_bytes + load.output_bytes) / (num_ranks - 1)
                    sent += others
                    sent[rank] -= others
                else:
                    sent[rank] += load.id_bytes + load.output_bytes
        fixed = sum(map(self.model.fixed_seconds, {placement.scheme for placement in placements.values()}))
        ranks = [
            RankLoad(
                tower=self.number,
                local=rank,
                memory=sum(load.memory for _, load in own),
                lookups=float(sum(load.lookups for _, load in own)),
                bytes_sent=float(sent[rank]),
                seconds=sum((load.seconds for _, load in own), start=fixed),
            )
            for rank, own in enumerate(held)
        ]
        mean = float(np.mean([rank.seconds for rank in ranks]))
        tables = []
        for table in self.tables:
            placement, loads = placements[table.name], [load for _, load in shards[table.name]]
            total = sum(load.seconds for load in loads)
            tables.append(
                TableSharding(
                    name=table.name,
                    tower=self.number,
                    placement=placement,
                    reason=self._reason(table, placement, mean) + _place(placement),
                    seconds=total,
                    memory=sum(load.memory + load.elsewhere for load in loads),
                )
            )
        width = sum(table.embedding_dim * len(table.feature_names) for table in self.tables)
        num_towers, number_bytes = self.model.topology.num_towers, self.model.hardware.exchange_bytes
        tower = TowerLoad(
            tower=self.number,
            num_tables=len(self.tables),
            method=method,
            imbalance=imbalance_of([rank.seconds for rank in ranks]),
            peer_bytes=self.model.global_batch * (num_towers - 1) / num_towers * width * number_bytes,
        )
        return tables, ranks, tower

    def _reason(self, table: Any, placement: TablePlacement, mean: float) -> str:
        """Returns why a table is placed so; ``mean``: cost of a rank in seconds."""
        allowed, room = self.allowed[table.name], self.model.hardware.memory_per_rank
        words = f"{placement.scheme} on rank {placement.ranks[0]}"
        if placement.scheme != "table_wise":
            words = f"{placement.scheme} over {len(placement.ranks)} ranks"
        if allowed.placement is not None or (allowed.why and len(allowed.schemes) == 1):
            return f"{words}: {allowed.why}"
        whole = self.model.shard(table, "table_wise", table.num_embeddings, table.embedding_dim)
        if placement.scheme in ("row_wise", "column_wise") and room is not None and whole.memory > room:
            return f"{words}: {human_bytes(whole.memory)} do not fit a rank's {human_bytes(room)}"
        share = whole.seconds / mean if mean else 0.0
        if placement.scheme == "table_wise":
            return f"{words}: {share:.2f} x the mean load of a rank"
        return f"{words}: on one rank it would be {share:.2f} x the mean load of a rank"


def _place(placement: TablePlacement) -> str:
    """Returns where weights are that are not on the device."""
    if placement.kernel == "fused":
        return ""
    where = "on the SSD" if placement.kernel == "key_value" else "in host memory"
    cached = "" if placement.kernel == "fused_uvm" else f", {placement.cache_load_factor:.0%} of it cached"
    return f"; {placement.kernel}: {where}{cached}"


def _notes(tables: Sequence[TableSharding], model: CostModel) -> tuple[str, ...]:
    count = Counter(table.placement.scheme for table in tables)
    notes = []
    if count["column_wise"] and model.workload.optimizer == "rowwise_adagrad":
        notes.append(
            f"{counted(count['column_wise'], 'table')}, column-wise: row-wise AdaGrad keeps one state per shard and "
            "row, so training differs a little from that of the uncut table."
        )
    if count["data_parallel"] and model.topology.num_replicas > 1:
        notes.append(
            f"{counted(count['data_parallel'], 'table')}, data-parallel: the all-reduce also crosses the "
            f"{model.topology.num_replicas} replicas, and is counted at the tower's link rate."
        )
    return tuple(notes)


def _placement(packing: Packing, item: int) -> TablePlacement:
    scheme: Scheme = SCHEMES[packing.chosen[item].kind]
    spread = scheme in ("row_wise", "data_parallel")
    return TablePlacement(
        scheme=scheme, ranks=tuple(range(packing.problem.num_ranks)) if spread else packing.ranks[item]
    )


def _largest(sizes: Mapping[str, float]) -> str:
    name = max(sizes, key=lambda table: sizes[table])
    return f"the largest is table {name!r} with {human_bytes(sizes[name])}"


def _largest_of(free: Sequence[Any], problem: Problem) -> str:
    least = [min(map(_option_memory, options)) for options in problem.options]
    return _largest({table.name: size for table, size in zip(free, least, strict=True)})


def _option_memory(option: Option) -> float:
    """Bytes of all ranks together."""
    spread = 0.0 if option.everywhere_memory is None else float(option.everywhere_memory.sum())
    return spread + sum(option.part_memory)


def _least_memory(problem: Problem) -> float:
    """Bytes of all ranks together if every item takes its smallest option."""
    return sum(min(map(_option_memory, options)) for options in problem.options) + float(problem.memory.sum())


def _shard_counts(columns: int, num_ranks: int) -> list[int]:
    """Numbers of column shards worth trying: all up to 8, then doubling, and the most there can be."""
    most = min(num_ranks, columns // 4)
    doubled = [2**power for power in range(4, 16) if 2**power < most]
    return sorted({*range(2, min(most, 8) + 1), *doubled, most} - {0, 1})
