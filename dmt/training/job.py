"""`Job`: the config of a run with its data, tables and plans, opened and resolved once. Needs no TorchRec."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

from dmt.errors import InputError, did_you_mean
from dmt.formatting import shorten
from dmt.plan.split_across_towers import split_tables
from dmt.plan.tables import NUMBER_BYTES, TableSpec, feature_names
from dmt.plan.topology import TowerTopology
from dmt.plan.towers import TowerPlan
from dmt.sharding.costs import CostModel, Hardware, StepWorkload
from dmt.sharding.explanation import TowerShardingPlan
from dmt.sharding.optimizers import FBGEMM_NAMES, moment_scale_of
from dmt.sharding.outside import CrossingCosts, choose_outside
from dmt.sharding.plan_tables import plan_tables
from dmt.sharding.schemes import SCHEMES, Scheme, ShardingRules, rules_by_name, why_not
from dmt.simulator.cluster import load_cluster
from dmt.training.config import OptimizerConfig, ShardingConfig, TrainingConfig
from dmt.training.data.clicks import ClickData
from dmt.training.data.columns import tables_of
from dmt.training.data.config import read_tables

__all__ = [
    "PREPARED",
    "Job",
    "check_table_optimizer",
    "crossing_costs",
    "make_job",
    "open_job",
    "open_tables",
    "open_unsharded",
    "step_workload",
]

PREPARED = "prepared-cache"
"""Name of the folder in an output for rows that must be prepared; not ``prepared``, as users name their own."""
_CPU_OPTIMIZERS = ("rowwise_adagrad", "adagrad", "sgd")  # those with a CPU kernel in FBGEMM


@dataclass(frozen=True, kw_only=True)
class Job:
    """A resolved run: its config and all that follows from it; each plan file is read once.

    `open_job` makes a job, or `make_job` for tables without data. `dmt.training.build` builds the models of a job.
    """

    config: TrainingConfig
    """Settings of the run."""
    tables: tuple[TableSpec, ...]
    """Tables of the data, before the tower plan cuts any of them."""
    num_dense: int
    """Number of dense columns of the data."""
    towers: TowerPlan | None = None
    """The tower plan; None with the flat dataflow."""
    sharding: TowerShardingPlan | None = None
    """The plan of tables inside their towers; None with the flat dataflow, and for a job that is not sharded."""
    placement: tuple[int, ...] | None = None
    """For each tower of a multi-tower model, the tower of the mesh that holds it; None: tower i is on mesh tower i."""
    opened_data: ClickData | None = field(default=None, repr=False, compare=False)
    """The opened data; None for a job of tables without data."""

    @property
    def data(self) -> ClickData:
        """The opened data; for jobs with data only."""
        assert self.opened_data is not None, "made by open_job from a config with data"
        return self.opened_data

    @property
    def device_type(self) -> Literal["cpu", "cuda"]:
        """Kind of the ranks' devices: ``train.device``, where ``auto`` is resolved by the hardware of this host."""
        from dmt.training.device import device_type  # which loads torch

        wanted = self.config.train.device
        return device_type(wanted) if wanted == "auto" else wanted

    @property
    def topology(self) -> TowerTopology:
        """Sizes of the mesh."""
        return self.config.topology.build()

    @property
    def column_splits(self) -> Mapping[str, tuple[int, ...]]:
        """Widths of the column shards, by feature, of the tables that the tower plan cuts."""
        return {} if self.towers is None else self.towers.column_splits

    @property
    def split_tables(self) -> tuple[TableSpec, ...]:
        """The tables, with each table that the tower plan cuts replaced by its column shards."""
        return self.tables if self.towers is None else tuple(split_tables(self.tables, _cuts(self.towers, self.tables)))


def open_job(config: TrainingConfig) -> Job:
    """Opens the data of a run, or reads the tables that ``data.tables`` lists, and resolves its plans.

    Raises:
        InputError: the data cannot be read or do not fit the config, or a plan or rule does not fit tables or memory.
    """
    if config.data.tables is not None:
        # A list of tables has no dense columns, but models need some: assume as many as in the synthetic data.
        tables = read_tables(Path(config.data.tables))
        return make_job(_with_factors(config, tables, {}), tables, config.data.synthetic.num_dense)
    job = open_unsharded(config)
    return make_job(job.config, job.tables, job.num_dense, towers=job.towers, data=job.data)


def make_job(
    config: TrainingConfig,
    tables: Sequence[TableSpec],
    num_dense: int,
    *,
    towers: TowerPlan | None = None,
    data: ClickData | None = None,
    sharding: TowerShardingPlan | None = None,
) -> Job:
    """Resolves the plans of a run for given uncut tables; ``towers`` defaults to the plan that the config names.

    ``num_dense``: number of dense columns; ``data``: the opened data of the tables, None if there are none;
    ``sharding``: the plan of a job with equal tables, towers, topology and rules, None to make it.

    Raises:
        InputError: a plan cannot be read, a plan or rule does not fit, the optimizer has no moments to scale, or no
            column is dense.
    """
    if not num_dense and config.model.factory is None:
        raise InputError(
            "The data has no dense column, but the shipped models need at least one. Name some in data.dense, or use "
            "your own model (model.factory)."
        )
    if towers is None:
        towers, tables = _in_towers(config, tables, data)
    if towers is not None and towers.num_towers != config.topology.num_towers:
        raise InputError(
            f"The tower plan {config.towers.plan} has {towers.num_towers} towers, but topology.num_towers="
            f"{config.topology.num_towers}. Change the plan or num_towers."
        )
    fused = {"optimizer": FBGEMM_NAMES[config.optimizer.sparse]}
    moment_scale_of(config.replicas.moment_scale, fused, config.topology.num_replicas)
    sharding = sharding or (None if towers is None else _plan_sharding(config, tables, towers, data))
    return Job(
        config=config, tables=tuple(tables), num_dense=num_dense, towers=towers, sharding=sharding, opened_data=data
    )


def open_unsharded(config: TrainingConfig, data: ClickData | None = None) -> Job:
    """Opens the data of a run, unless ``data`` is given, and its tower plan; the job has no sharding plan.

    The mean numbers of ids per sample that ``dmt prepare`` counted become the job's ``sharding.pooling_factors``,
    except for features that the config lists there.

    Raises:
        InputError: the data or the tower plan cannot be read, or do not fit the config or each other.
    """
    data, tables = open_tables(config, data)
    config = _with_factors(config, tables, data.ids_per_row)
    towers, placed = _in_towers(config, tables, data)
    return Job(config=config, tables=tuple(placed), num_dense=len(data.columns.dense), towers=towers, opened_data=data)


def _with_factors(config: TrainingConfig, tables: Sequence[TableSpec], counted: Mapping[str, float]) -> TrainingConfig:
    """Returns the config with pooling factors by feature: those it has, by name or pattern, else the ``counted``."""
    factors = {**counted, **rules_by_name(config.sharding.pooling_factors, feature_names(tables))}
    return config.model_copy(update={"sharding": config.sharding.model_copy(update={"pooling_factors": factors})})


def open_tables(config: TrainingConfig, data: ClickData | None = None) -> tuple[ClickData, list[TableSpec]]:
    """Returns the data of a run, opened unless ``data`` is given, and the uncut tables of its columns.

    Raises `InputError` if the data cannot be read or do not fit the config.
    """
    output = Path(config.train.output_dir)
    # A demo's runs share a folder beside theirs. Their own comes first: `dmt score` may have made the shared one later.
    is_shared = (output.parent / PREPARED).is_dir() and not (output / PREPARED).is_dir()
    data = data or ClickData(config.data, cache=(output.parent if is_shared else output) / PREPARED)
    tables = tables_of(
        data.columns,
        embedding_dim=config.model.embedding_dim,
        embedding_dims=config.model.embedding_dims,
        data_type="FP16" if config.sharding.table_precision == "fp16" else "FP32",
    )
    return data, tables


def _in_towers(
    config: TrainingConfig, tables: Sequence[TableSpec], data: ClickData | None
) -> tuple[TowerPlan | None, Sequence[TableSpec]]:
    """Checks the config's tower plan against the uncut tables; returns the plan (flat dataflow: None) and the tables.

    `_narrowed_outside` sets the columns of returned tables outside towers, and `_with_sequences` sets ``is_sequence``.

    Raises:
        InputError: the plan file cannot be read, or does not fit the tables, their sequences or FBGEMM's kernels; there
            are more towers than tables; or a feature outside towers is unknown, or the plan cuts its table.
    """
    if config.dataflow == "flat":
        return None, tables
    place = f"towers.plan={config.towers.plan!r}"
    try:
        plan = _built_in_plan(config, tables, data) or TowerPlan.load(config.towers.plan)
        for feature, widths in plan.column_splits.items():
            if any(width % 4 for width in widths):
                raise InputError(
                    f"it cuts the table of feature {feature!r} into column shards of {list(widths)} columns; each must "
                    "be a multiple of 4 (FBGEMM's kernels). Make a plan with other shards."
                )
        if (given := config.towers.outside) != "none":
            place += f", towers.outside={given if isinstance(given, str) else shorten(given, ', ')}"
            outside = dict.fromkeys(_outside(config, plan, tables, data))
            inside = [table for table in tables if not outside.keys() >= set(table.feature_names)]
            plan = _built_in_plan(config, inside, data) or plan
            plan = plan.moved_outside(outside)
        tables, dim = _narrowed_outside(config, tables, plan.outside), config.model.outside_dim
        if dim is not None and dim % 4 and any(table.embedding_dim == dim for table in plan.outside_tables(tables)):
            raise InputError(
                f"tables outside towers would have model.tower_dim={dim} columns, but FBGEMM's kernels need a multiple "
                "of 4. Set model.tower_dim to a multiple of 4."
            )
        by_tower = plan.tables_by_tower(split_tables(tables, _cuts(plan, tables)))
        tables = _with_sequences(config, plan, tables, by_tower)
    except InputError as error:
        raise InputError(f"{place}: {error}") from error
    return plan, tables


def _with_sequences(
    config: TrainingConfig, plan: TowerPlan, tables: Sequence[TableSpec], by_tower: Sequence[Sequence[TableSpec]]
) -> Sequence[TableSpec]:
    """Returns the tables, with ``is_sequence`` for all in a tower with sequences: they are one ``EmbeddingCollection``.

    Raises:
        InputError: a sequence is outside towers, in a flat model, or in a tower where a table is cut.
    """
    for sequence, _ in (pair for table in tables for pair in table.sequences):
        if not config.model.has_towers:
            raise InputError(
                f"{config.model.chosen} is flat, so in the tower dataflow the embedding of every item of {sequence!r} "
                "(data.sequences) would cross hosts. Set sharding.dataflow='flat', or choose a multi-tower model."
            )
        if sequence in plan.outside:
            raise InputError(
                f"{sequence!r} of data.sequences is outside towers, where every feature is a bag. Put it into a tower."
            )
    marked = {table.name for of_tower in by_tower if any(t.sequences for t in of_tower) for table in of_tower}
    if cut := marked.difference(table.name for table in tables):
        raise InputError(
            f"the shard {min(cut)!r} of a cut table is in a tower with sequences (data.sequences), whose tables "
            "must be whole. Make a plan that cuts no table there."
        )
    return [replace(table, is_sequence=table.name in marked) for table in tables]


def _outside(config: TrainingConfig, plan: TowerPlan, tables: Sequence[TableSpec], data: ClickData | None) -> list[str]:
    """Returns the features that ``towers.outside`` puts outside towers, in addition to those of the plan.

    Raises `InputError` if a feature is unknown, or the plan cuts its table.
    """
    wanted, features, cut = config.towers.outside, dict.fromkeys(feature_names(tables)), _cuts(plan, tables)
    if not isinstance(wanted, str):
        for feature in wanted:
            if feature not in features or feature in cut:
                unknown = f"no table has it.{did_you_mean(feature, features)} Correct the name."
                fault = "the plan cuts its table. Remove the feature from the list." if feature in cut else unknown
                raise InputError(f"feature {feature!r}: {fault}")
        return list(wanted)
    if plan.outside:
        return []
    vectors, dim = _narrowed_outside(config, split_tables(tables, cut), features), config.model.outside_dim
    ruled = rules_by_name(config.sharding.tables, [table.name for table in vectors])
    free = {
        table.name
        for table in vectors
        if features.keys() >= set(table.feature_names)  # false for shards
        and dim in (None, table.embedding_dim)
        and table.embedding_dim % 4 == 0  # FBGEMM's kernels
        and not (table.name in ruled or why_not(table, "data_parallel"))
    }
    placed = replace(plan, tables=()).tables_by_tower(vectors)
    costs = crossing_costs(config, data)
    chosen = set(choose_outside(placed, costs, memory_per_rank=config.sharding.rank_memory, candidates=free))
    return [name for table in tables if table.name in chosen for name in table.feature_names]


def _narrowed_outside(config: TrainingConfig, tables: Sequence[TableSpec], outside: Collection[str]) -> list[TableSpec]:
    """Returns the tables; those outside towers have as many columns as the vectors that they interact with."""
    dim, outside = config.model.outside_dim, set(outside)
    named = rules_by_name(config.model.embedding_dims, feature_names(tables))
    return [
        replace(table, embedding_dim=dim)
        if dim is not None
        and any(feature in outside for feature in table.feature_names)
        and named.keys().isdisjoint(table.feature_names)
        else table
        for table in tables
    ]


def crossing_costs(config: TrainingConfig, data: ClickData | None) -> CrossingCosts:
    """Returns the `CrossingCosts` of a run's tables; for a flat model with ``unique``, with the counts in ``data``."""
    model, sharding = config.model, config.sharding
    is_unique = sharding.unique and not model.has_towers
    # A tower of DMT-DCN sends the same with or without a feature; what a user's own towers send is unknown.
    sent_for_feature = model.c * model.output_dim if model.factory is None and "dlrm" in model.arch else 0
    return CrossingCosts(
        topology=config.topology.build(),
        workload=step_workload(config, sharding.pooling_factors),
        sent=sent_for_feature if model.has_towers else None,
        number_bytes=(NUMBER_BYTES[sharding.forward_precision], NUMBER_BYTES[sharding.backward_precision]),
        is_unique=is_unique,
        distinct=data.distinct_inputs(config.train.batch_size) if is_unique and data is not None else {},
    )


def _built_in_plan(config: TrainingConfig, tables: Sequence[TableSpec], data: ClickData | None) -> TowerPlan | None:
    """Returns the strided or balanced plan of the tables, or None if the config names a file."""
    if config.towers.plan == "balanced":
        costs = crossing_costs(config, data)
        rows = {table.name: sum(costs.rows(name, table) for name in table.feature_names) for table in tables}
        model = CostModel(topology=costs.topology, workload=costs.workload)
        needed = {t.name: model.shard(t, "table_wise", t.num_embeddings, t.embedding_dim).needed for t in tables}
        # Tables never fill ranks to the last byte.
        room = 0.9 * (config.sharding.rank_memory or math.inf) * costs.topology.ranks_per_tower
        return TowerPlan.balanced(tables, costs.topology, rows=rows, num_bytes=needed, max_tower_bytes=room)
    if config.towers.plan != "strided":
        return None
    # Table i is in tower i mod T; dealing features instead could split a shared table between two towers.
    features = {table.name: table.feature_names for table in tables}
    towers = TowerPlan.strided([table.name for table in tables], config.topology.num_towers).to_lists()
    groups = [[feature for name in names for feature in features[name]] for names in towers]
    return TowerPlan.from_lists(groups, strategy="strided")


def _cuts(plan: TowerPlan, tables: Sequence[TableSpec]) -> Mapping[str, tuple[int, ...]]:
    """Returns the plan's column splits; none if the tables are already cut, as in a ``towers.json``."""
    features = set(feature_names(tables))
    return plan.column_splits if any(feature in features for feature in plan.column_splits) else {}


def check_table_optimizer(config: OptimizerConfig, device: str) -> None:
    """Raises `InputError` if FBGEMM has no kernel for the tables' optimizer on the device where the tables live."""
    if device == "cpu" and config.sparse not in _CPU_OPTIMIZERS:
        raise InputError(
            f"optimizer.sparse={config.sparse!r}: FBGEMM has no CPU kernel for it, and tables live on the CPU here. "
            f"Use one of {list(_CPU_OPTIMIZERS)}, or GPUs (train.device='cuda')."
        )


def _plan_sharding(
    config: TrainingConfig, tables: Sequence[TableSpec], towers: TowerPlan, data: ClickData | None
) -> TowerShardingPlan:
    """Plans the tables inside their towers by the config's rules.

    If the tower plan cuts a table into column shards, the pooling factor of its feature applies to every shard that
    has none itself.
    """
    sharding, topology = config.sharding, config.topology.build()
    tables = split_tables(tables, _cuts(towers, tables))
    outside = towers.outside_tables(tables)
    planned = plan_tables(
        towers.tables_by_tower(tables),
        topology,
        outside=outside,
        workload=step_workload(config, rules_by_name(sharding.pooling_factors, feature_names(tables))),
        hardware=_hardware(sharding),
        rules=ShardingRules(
            schemes=SCHEMES if sharding.scheme == "auto" else (cast("Scheme", sharding.scheme),),
            tables=dict(sharding.tables),
            hot_rows=config.hot_rows.extra_memory > 0,
        ),
    )
    if not outside:
        return planned
    costs = crossing_costs(config, data)
    reasons = {table.name: f"on every rank: {costs.of(table).reason}" for table in outside}
    entries = (replace(entry, reason=reasons.get(entry.name, entry.reason)) for entry in planned.tables)
    return replace(planned, tables=tuple(entries))


def step_workload(config: TrainingConfig, pooling_factors: Mapping[str, float]) -> StepWorkload:
    """Returns the work of a run's tables in a step; ``pooling_factors``: mean ids per sample, by feature."""
    return StepWorkload(
        batch_size=config.train.batch_size,
        pooling_factors=pooling_factors,
        optimizer=config.optimizer.sparse,
        sync_every=config.replicas.sync_every,
    )


def _hardware(config: ShardingConfig) -> Hardware:
    """Returns the memory of a rank, and its rates if the config names a cluster."""
    hardware = Hardware(memory_per_rank=config.rank_memory)
    if config.cluster is None:
        return hardware
    cluster = load_cluster(config.cluster)
    return replace(
        hardware,
        memory_gb_per_s=cluster.lookup_bytes_per_s / 1e9,
        intra_tower_gb_per_s=cluster.all_to_all.host_rate(cluster.ranks_per_host) / 1e9,
        collective_latency_us=1e6 * cluster.all_to_all.latency_s,
    )
