"""`plan_tables`: places the tables of every tower on its ranks by cost and memory, and says why. Pure arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dmt.errors import InputError
from dmt.formatting import human_bytes
from dmt.plan.tables import feature_names, table_specs
from dmt.plan.topology import TowerTopology
from dmt.sharding.costs import CostModel, Hardware, ShardLoad, StepWorkload
from dmt.sharding.packing import Option, Packing, Problem, pack
from dmt.sharding.plan import RankLoad, TableSharding, TowerLoad, TowerShardingPlan, imbalance_of
from dmt.sharding.schemes import SCHEMES, Kernel, Scheme, TablePlacement, column_shards, row_shards
from dmt.sharding.user_rules import Allowed, ShardingRules

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
    limit. Where tables do not fit the devices and ``hardware`` has host memory or SSDs, those of fewest lookups by row
    are moved there. The result depends neither on the order of tables nor on the process.

    Args:
        tables_by_tower: ``EmbeddingBagConfig`` or `TableSpec` of every tower of the mesh, as from
            `TowerPlan.tables_by_tower`.
        topology: the mesh sizes.
        workload: batch size, ids per sample and optimizer.
        hardware: memory and rates of a rank.
        rules: what the user decided. With a placement for every table, this only computes the report.
        column_gain: a tower cuts tables into columns only where its busiest rank would otherwise cost more by more than
            this share, or nothing else fits the memory; 0 takes the cheapest plan. Under row-wise AdaGrad a column-wise
            table is trained a little differently, and the global id route sends its ids to other hosts once per shard.

    Raises:
        InputError: names or numbers are wrong, rules contradict each other or cannot be met, or tables do not fit.
    """
    model = CostModel(topology=topology, workload=workload or StepWorkload(), hardware=hardware or Hardware())
    rules = rules or ShardingRules()
    _check_names(tables_by_tower, model)
    allowed = rules.resolve_all(tables_by_tower, topology.ranks_per_tower)
    planners = [
        _TowerPlanner(n, tables, allowed, model, column_gain, rules) for n, tables in enumerate(tables_by_tower)
    ]
    towers = [planner.plan() for planner in planners]
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
    model.workload.check_features(set(feature_names(table_specs(tables, one_table_per_feature=False))))


class _NoRoomError(InputError):
    """A memory, the device's, the host's or the SSD's, is too small for a tower's tables."""

    def __init__(self, message: str, tier: str = "device") -> None:
        super().__init__(message)
        self.tier = tier


@dataclass(frozen=True, eq=False)
class _TowerPlanner:
    """Plans one tower."""

    number: int
    tables: Sequence[Any]
    allowed: Mapping[str, Allowed]
    model: CostModel
    column_gain: float
    rules: ShardingRules
    kernels: dict[str, Kernel] = field(default_factory=dict)
    """Kernel of each table in this attempt."""
    by_rows: frozenset[str] = frozenset()
    """Tables that are row-wise if they can be."""

    def plan(self) -> _Planned:
        """Plans with as few tables off the devices as possible: first in host memory, of these the fewest on SSDs."""
        asked = {table.name: self.rules.tiers.kernel_of(table.name) for table in self.tables}
        pinned: dict[str, Kernel] = {name: kernel or "fused" for name, kernel in asked.items()}
        coldest = sorted(self.tables, key=lambda t: (self.model.pooling(t) / t.num_embeddings, t.name))
        movable = [
            table.name
            for table in coldest
            if asked[table.name] is None
            and self.allowed[table.name].placement is None
            and self.allowed[table.name].schemes != ("data_parallel",)
            and self._is_smaller_with_a_cache(table)
        ]
        hardware = self.model.hardware
        tiers: list[Kernel] = ["fused_uvm_caching"] if hardware.host_memory_per_rank else []
        tiers += ["key_value"] if hardware.ssd_per_rank else []

        def attempt(moved: int, to_last: int = 0) -> _Planned | _NoRoomError:
            names = movable[:moved] if tiers else []
            kernels = pinned | {name: tiers[-1 if i < to_last else 0] for i, name in enumerate(names)}
            try:
                return replace(self, kernels=kernels).attempt()
            except _NoRoomError as error:
                if error.tier == "device" or not names:
                    return error
            try:  # so that each rank has an equal part
                return replace(self, kernels=kernels, by_rows=frozenset(names)).attempt()
            except _NoRoomError as error:
                return error

        moved, found = _fewest(len(movable), attempt, "device")
        if isinstance(found, _NoRoomError) and found.tier == "host" and len(tiers) == 2:
            _, found = _fewest(moved, lambda number: attempt(moved, number), "host")
        if isinstance(found, _NoRoomError):
            raise found
        return found

    def _is_smaller_with_a_cache(self, table: Any) -> bool:
        """Narrow tables take more of a device with their weights elsewhere: a cache has a map of all rows."""
        rows, columns, cache = table.num_embeddings, table.embedding_dim, self.rules.tiers.cache_load_factor
        fused, cached = (
            self.model.shard(table, "table_wise", rows, columns, kernel=kernel, cache=cache).memory
            for kernel in ("fused", "fused_uvm_caching")
        )
        return cached < fused

    def attempt(self) -> _Planned:
        """Plans with the kernels as they are."""
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
            if self.rules.tiers.kernel_of(table.name) is not None:
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

    def _with_kernel(self, name: str, placement: TablePlacement) -> TablePlacement:
        return replace(placement, kernel=self.kernels[name], cache_load_factor=self.rules.tiers.cache_load_factor)

    def _options(self, table: Any) -> list[Option]:
        """The ways to cut a table, fewest parts first."""
        num_ranks, rows, columns = self.model.topology.ranks_per_tower, table.num_embeddings, table.embedding_dim
        schemes, kernel = self.allowed[table.name].schemes, self.kernels[table.name]
        if kernel != "fused":  # a copy for every rank would be no way to save memory
            schemes = tuple(scheme for scheme in schemes if scheme != "data_parallel")
            if not schemes:
                raise InputError(
                    f"Table {table.name!r} in tower {self.number} cannot be data_parallel with kernel={kernel!r}, "
                    "which is for tables that are too large for every device. Allow it another scheme, or leave out "
                    "its kernel."
                )
        if table.name in self.by_rows and "row_wise" in schemes:
            schemes = ("row_wise",)
        cuts: list[tuple[Scheme, list[tuple[int, int]]]] = []
        for scheme in schemes:
            if scheme == "column_wise":
                widths = [column_shards(columns, count) for count in _shard_counts(columns, num_ranks)]
                cuts += [(scheme, [(rows, width) for width in of_cut]) for of_cut in widths]
            elif scheme == "row_wise":
                cuts.append((scheme, [(height, columns) for height in row_shards(rows, num_ranks)]))
            else:
                cuts.append((scheme, [(rows, columns)] * (1 if scheme == "table_wise" else num_ranks)))
        options, cache = [], self.rules.tiers.cache_load_factor
        for scheme, shapes in cuts:
            loads = {s: self.model.shard(table, scheme, *s, kernel=kernel, cache=cache) for s in set(shapes)}
            costs, sizes = tuple(loads[s].seconds for s in shapes), tuple(float(loads[s].memory) for s in shapes)
            kind = SCHEMES.index(scheme)
            if scheme in ("table_wise", "column_wise"):
                options.append(Option(costs, sizes, 0.0, None, kind))
            else:
                options.append(Option((), (), costs[0], np.array(sizes), kind))
        return options

    def _check_memory(self, free: Sequence[Any], problem: Problem, pinned: Mapping[str, TablePlacement]) -> None:
        """Refuses tables that cannot fit however they are placed."""
        where, ranks, room = f"tower {self.number}", problem.num_ranks, problem.capacity
        if problem.memory.max() > room:
            rank = int(problem.memory.argmax())
            sizes = {
                table.name: sum(
                    load.memory for own, load in self.model.shards(table, pinned[table.name]) if own == rank
                )
                for table in self.tables
                if table.name in pinned
            }
            raise _NoRoomError(
                f"The tables pinned to local rank {rank} of {where} need {human_bytes(problem.memory[rank])} of device "
                f"memory, but memory_per_rank is {human_bytes(room)}; {_largest(sizes)}. Pin some of them elsewhere.",
            )
        for table, options in zip(free, problem.options, strict=True):
            smallest = min(options, key=lambda option: option.most_memory)
            if smallest.most_memory > room:
                kernel = self.kernels[table.name]
                cache = "" if kernel == "fused" else f" and {kernel}, for what a device keeps of it (cache_load_factor)"
                raise _NoRoomError(
                    f"Table {table.name!r} in {where} needs {human_bytes(smallest.most_memory)} of device memory on a "
                    f"rank even {SCHEMES[smallest.kind]}{cache}, but memory_per_rank is {human_bytes(room)}. Use more "
                    "ranks per tower or a smaller data type or optimizer state, or allow it other schemes.",
                )
        if (needed := _least_memory(problem)) > ranks * room:
            raise _NoRoomError(
                f"The {len(self.tables)} tables of {where} need at least {human_bytes(needed)} of device memory, which "
                f"is {human_bytes(needed - ranks * room)} more than its ranks_per_tower={ranks} ranks of "
                f"memory_per_rank={human_bytes(room)} have; {_largest_of(free, problem)}. Use more ranks per tower, or "
                "move tables to other towers.",
            )

    def _no_room(self, free: Sequence[Any], problem: Problem) -> _NoRoomError:
        needed, room = _least_memory(problem), problem.capacity
        return _NoRoomError(
            f"No placement was found for the {len(self.tables)} tables of tower {self.number}: they need at least "
            f"{human_bytes(needed)} of the {human_bytes(problem.num_ranks * room)} of device memory that "
            f"{problem.num_ranks} ranks of memory_per_rank={human_bytes(room)} have, but the pieces do not fit beside "
            f"each other; {_largest_of(free, problem)}. Let large tables be row_wise, or use more ranks per tower.",
        )

    def _check_tiers(self, held: Sequence[Sequence[tuple[str, ShardLoad]]], kernels: Mapping[str, Kernel]) -> None:
        """Raises `_NoRoomError` where a rank has less host memory, or a smaller SSD, than the tables that it holds."""
        for tier, kind, what in (("host", "host_memory", "host memory"), ("ssd", "ssd", "SSD")):
            room = getattr(self.model.hardware, f"{kind}_per_rank")
            on_rank = [sum(getattr(load, kind) for _, load in own) for own in held]
            if room is not None and max(on_rank) > room:
                fullest = on_rank.index(max(on_rank))
                sizes: Counter[str] = Counter()
                for table, load in held[fullest]:
                    sizes[table] += getattr(load, kind)
                raise _NoRoomError(
                    f"Local rank {fullest} of tower {self.number} needs {human_bytes(on_rank[fullest])} of {what} for "
                    f"tables that do not fit its device, but {kind}_per_rank is {human_bytes(room)}; "
                    f"{_largest(sizes, kernels)}. Use more ranks per tower or a smaller data type, or give it more.",
                    tier,
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
        self._check_tiers(held, {name: placement.kernel for name, placement in placements.items()})
        fixed = self._fixed_seconds({placement.scheme for placement in placements.values()})
        ranks = [
            RankLoad(
                tower=self.number,
                local=rank,
                memory=sum(load.memory for _, load in own),
                lookups=float(sum(load.lookups for _, load in own)),
                bytes_sent=float(sent[rank]),
                seconds=sum((load.seconds for _, load in own), start=fixed),
                host_memory=sum(load.host_memory for _, load in own),
                ssd=sum(load.ssd for _, load in own),
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
                    reason=self._reason(table, placements, total, mean) + self._place(placement),
                    seconds=total,
                    memory=sum(load.memory + load.host_memory + load.ssd for load in loads),
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

    def _reason(self, table: Any, placements: Mapping[str, TablePlacement], total: float, mean: float) -> str:
        """Returns the numbers that speak for a placement; total: cost of the table, mean: of a rank, in seconds."""
        placement, allowed = placements[table.name], self.allowed[table.name]
        scheme, room = placement.scheme, self.model.hardware.memory_per_rank
        words = f"{scheme} on rank {placement.ranks[0]}"
        if scheme != "table_wise":
            words = f"{scheme} over {len(placement.ranks)} ranks"
        if allowed.placement is not None or (allowed.why and len(allowed.schemes) == 1):
            return f"{words}: {allowed.why}"
        whole = self.model.shard(table, "table_wise", table.num_embeddings, table.embedding_dim)
        if scheme in ("row_wise", "column_wise") and room is not None and whole.memory > room:
            return f"{words}: {human_bytes(whole.memory)} do not fit a rank's {human_bytes(room)}"
        if "table_wise" not in allowed.schemes:
            return f"{words}: {allowed.why}, of which it evens out the ranks best"
        if scheme == "table_wise":
            if self.model.topology.ranks_per_tower == 1:
                return "table_wise: its tower has one rank"
            if len(allowed.schemes) == 1:
                return "table_wise: too few rows and columns to cut"
            share = whole.seconds / mean if mean else 0.0
            return f"table_wise: its ids and embeddings travel once; {share:.2f} x the mean load of a rank"
        if whole.seconds > mean:
            return f"{words}: on one rank it would be {whole.seconds / mean:.1f} x the mean load of a rank"
        schemes: set[Scheme] = {other.scheme for other in placements.values()}
        more = self._fixed_seconds(schemes | {"table_wise"}) - self._fixed_seconds(schemes)
        if scheme == "data_parallel" and (total <= whole.seconds or more > 0):
            own = self.model.shard(table, "data_parallel", table.num_embeddings, table.embedding_dim)
            exchanged = (whole.id_bytes + 2 * whole.output_bytes) / self.model.topology.ranks_per_tower
            words = f"data_parallel: all-reduce of {human_bytes(own.reduced_bytes)} a rank"
            if total <= whole.seconds:
                return f"{words} costs less than {human_bytes(exchanged)} a rank of ids, embeddings and gradients"
            return (
                f"{words} instead of {human_bytes(exchanged)} of ids, embeddings and gradients, whose collectives "
                f"take {1e6 * more:.0f} us"
            )
        collectives = f", with {1e6 * more:.0f} us of collectives that no other table needs" if more > 0 else ""
        share = whole.seconds / mean
        return f"{words}: evens out the ranks; on one it would be {share:.2f} x their mean load{collectives}"

    @staticmethod
    def _place(placement: TablePlacement) -> str:
        """Returns where weights are that are not on the device."""
        if placement.kernel == "fused":
            return ""
        where = "on the SSD" if placement.kernel == "key_value" else "in host memory"
        cached = "" if placement.kernel == "fused_uvm" else f", {placement.cache_load_factor:.0%} of it cached"
        return f"; {placement.kernel}: {where}{cached}"

    def _fixed_seconds(self, schemes: Set[Scheme]) -> float:
        return sum(self.model.fixed_seconds(scheme) for scheme in schemes)


def _notes(tables: Sequence[TableSharding], model: CostModel) -> tuple[str, ...]:
    count = Counter(table.placement.scheme for table in tables)
    notes = []
    if count["column_wise"] and model.workload.optimizer == "rowwise_adagrad":
        notes.append(
            f"{_count(count['column_wise'])} column-wise: row-wise AdaGrad keeps one state per shard and row, so "
            "training differs a little from that of the uncut table."
        )
    if elsewhere := sum(table.placement.kernel != "fused" for table in tables):
        notes.append(
            f"{_count(elsewhere)} in host memory or on SSDs. A cache is taken to answer the share of lookups that it "
            "holds of the rows; popular rows make it answer more. On a CPU all tables are in host memory: TorchRec "
            "runs them as fused, and has no key_value there."
        )
    if count["data_parallel"] and model.topology.num_replicas > 1:
        notes.append(
            f"{_count(count['data_parallel'])} data-parallel: the all-reduce also crosses the "
            f"{model.topology.num_replicas} replicas, and is counted at the tower's link rate."
        )
    return tuple(notes)


def _fewest(
    most: int, attempt: Callable[[int], _Planned | _NoRoomError], tier: str
) -> tuple[int, _Planned | _NoRoomError]:
    """Returns the smallest number of moved tables that leaves room in a tier, and its plan or another tier's error.

    Where all are too few, the error of the tier.
    """

    def is_short(found: _Planned | _NoRoomError) -> bool:
        return isinstance(found, _NoRoomError) and found.tier == tier

    first = attempt(0)
    if not is_short(first) or most == 0:
        return 0, first
    low, high, best = 0, most, attempt(most)
    while high - low > 1 and not is_short(best):
        found = attempt(middle := (low + high) // 2)
        if is_short(found):
            low = middle
        else:
            high, best = middle, found
    return high, best


def _count(tables: int) -> str:
    return "1 table is" if tables == 1 else f"{tables:,} tables are"


def _placement(packing: Packing, item: int) -> TablePlacement:
    scheme: Scheme = SCHEMES[packing.chosen[item].kind]
    spread = scheme in ("row_wise", "data_parallel")
    return TablePlacement(
        scheme=scheme, ranks=tuple(range(packing.problem.num_ranks)) if spread else packing.ranks[item]
    )


def _largest(sizes: Mapping[str, float], kernels: Mapping[str, Kernel] | None = None) -> str:
    name = max(sizes, key=lambda table: sizes[table])
    kernel = f" ({kernels[name]})" if kernels else ""
    return f"the largest is table {name!r}{kernel} with {human_bytes(sizes[name])}"


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
