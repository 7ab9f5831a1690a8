"""`Job`: a run with its tables and plans, resolved once and passed on. Needs no TorchRec."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from dmt.errors import InputError, did_you_mean
from dmt.formatting import human_bytes
from dmt.plan.split_across_towers import shard_names, split_tables
from dmt.plan.tables import NUMBER_BYTES, TableSpec, feature_names
from dmt.plan.topology import TowerTopology
from dmt.plan.towers import TowerPlan
from dmt.sharding.costs import Hardware, StepWorkload
from dmt.sharding.optimizers import FBGEMM_NAMES, moment_scale_of
from dmt.sharding.outside import CrossingCosts, choose_outside
from dmt.sharding.plan import TowerShardingPlan
from dmt.sharding.plan_tables import plan_tables
from dmt.sharding.schemes import SCHEMES, Scheme, ShardingRules, why_not
from dmt.simulator.cluster import load_cluster
from dmt.training.config import OptimizerConfig, ShardingConfig, TrainingConfig
from dmt.training.data.clicks import ClickData
from dmt.training.data.columns import tables_of
from dmt.training.data.config import read_tables
from dmt.training.device import DeviceType, device_type

__all__ = [
    "PREPARED",
    "Job",
    "check_tables_on_ssd",
    "check_table_optimizer",
    "data_cache",
    "make_job",
    "open_data",
    "open_job",
    "open_tables",
    "step_workload",
]

PREPARED = "prepared"
"""Folder of an output for rows that had to be prepared."""
Splits = Mapping[str, tuple[int, ...]]
_CPU_OPTIMIZERS = ("rowwise_adagrad", "adagrad", "sgd")  # those with a CPU kernel in FBGEMM


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run, resolved: its config and everything that follows from it, each file of a plan read once.

    Made by `open_job`, or by `make_job` for tables without data. `dmt.training.build` makes the models of a job.
    """

    config: TrainingConfig
    """Settings of the run."""
    tables: tuple[TableSpec, ...]
    """Tables of the data, uncut."""
    num_dense: int
    """Number of dense columns of the data."""
    towers: TowerPlan | None = None
    """The tower plan; None with the flat dataflow."""
    sharding: TowerShardingPlan | None = None
    """The plan of tables inside their towers; None with the flat dataflow, and for a job that is not sharded."""
    placement: tuple[int, ...] | None = None
    """Mesh tower of each tower of a multi-tower model; None: one each, in order."""
    source: ClickData | None = field(default=None, repr=False, compare=False)
    """The opened data; None for a job about tables only."""

    @property
    def data(self) -> ClickData:
        """The opened data of a job that has some."""
        assert self.source is not None, "made by open_job from a config with data"
        return self.source

    @property
    def device_type(self) -> DeviceType:
        """Kind of the ranks' devices, ``train.device`` resolved on this host.

        Raises:
            InputError: GPUs are wanted and cannot be used.
        """
        return device_type(self.config.train.device)

    @property
    def topology(self) -> TowerTopology:
        """The mesh sizes."""
        return self.config.topology.build()

    @property
    def split_tables(self) -> tuple[TableSpec, ...]:
        """Tables with those that the tower plan cuts replaced by their column shards."""
        return self.tables if self.towers is None else tuple(split_tables(self.tables, _cuts(self.towers, self.tables)))


def open_job(config: TrainingConfig) -> Job:
    """Opens the data of a run, or reads the tables that ``data.tables`` lists, and resolves its plans.

    Raises:
        InputError: the data do not fit the config, or a plan or a rule does not fit the tables or the memory.
    """
    if config.data.tables is not None:
        # A list of tables has no dense columns, but models read some.
        return make_job(config, read_tables(Path(config.data.tables)), config.data.synthetic.num_dense)
    job = open_data(config)
    return make_job(job.config, job.tables, job.num_dense, towers=job.towers, source=job.source)


def make_job(
    config: TrainingConfig,
    tables: Sequence[TableSpec],
    num_dense: int,
    *,
    towers: TowerPlan | None = None,
    source: ClickData | None = None,
) -> Job:
    """Resolves the plans of a run for given uncut tables; ``towers`` is by default the plan that the config names.

    Raises:
        InputError: a plan or a rule does not fit the tables or the memory, or the optimizer has no moments to scale.
    """
    if towers is None:
        towers, tables = _in_towers(config, tables)
    if towers is not None and towers.num_towers != config.topology.num_towers:
        raise InputError(
            f"The tower plan {config.towers.plan} has {towers.num_towers} towers, but topology.num_towers="
            f"{config.topology.num_towers}. Make them equal."
        )
    fused = {"optimizer": FBGEMM_NAMES[config.optimizer.sparse]}
    moment_scale_of(config.replicas.moment_scale, fused, config.topology.num_replicas)
    sharding = None if towers is None else _plan_sharding(config, tables, towers)
    return Job(
        config=config, tables=tuple(tables), num_dense=num_dense, towers=towers, sharding=sharding, source=source
    )


def open_data(config: TrainingConfig, data: ClickData | None = None) -> Job:
    """Opens the data of a run, unless ``data`` are given, and its tower plan: a job that is not sharded.

    Its config has the mean ids of lists that ``dmt prepare`` has counted, unless ``sharding.pooling_factors`` has them.

    Raises:
        InputError: the data do not fit the config, or the tower plan does not fit the data.
    """
    data, tables = open_tables(config, data)
    if counted := data.ids_per_row:
        factors = {"pooling_factors": counted | config.sharding.pooling_factors}
        config = config.model_copy(update={"sharding": config.sharding.model_copy(update=factors)})
    towers, placed = _in_towers(config, tables)
    return Job(config=config, tables=tuple(placed), num_dense=len(data.columns.dense), towers=towers, source=data)


def open_tables(config: TrainingConfig, data: ClickData | None = None) -> tuple[ClickData, list[TableSpec]]:
    """Opens the data of a run, unless given, and makes the tables of their columns, uncut.

    Raises:
        InputError: the data do not fit the config.
    """
    data = data or ClickData(config.data, cache=data_cache(config.train.output_dir))
    tables = tables_of(
        data.columns,
        embedding_dim=config.model.embedding_dim,
        embedding_dims=config.model.embedding_dims,
        data_type="FP16" if config.sharding.table_precision == "fp16" else "FP32",
    )
    return data, tables


def data_cache(output_dir: str) -> Path:
    """Returns the folder for rows that have to be prepared: in a run's output, or what a demo has for its runs."""
    in_output, shared = Path(output_dir) / PREPARED, Path(output_dir).parent / PREPARED
    # The one in the output wins: `dmt score` may have made the shared one later.
    return shared if shared.is_dir() and not in_output.is_dir() else in_output


def _in_towers(config: TrainingConfig, tables: Sequence[TableSpec]) -> tuple[TowerPlan | None, Sequence[TableSpec]]:
    """Returns the tower plan that the config names (flat dataflow: None), checked against the uncut tables, and these.

    Tables outside towers come back with as many columns as the model wants of them.

    Raises:
        InputError: the file is bad, does not fit the tables or cuts one into shards that FBGEMM cannot take, more
            towers are asked for than there are features, or a feature outside towers is unknown.
    """
    if config.dataflow == "flat":
        return None, tables
    place, is_strided = f"towers.plan={config.towers.plan!r}", config.towers.plan == "strided"
    plan = _strided(tables, config.topology.num_towers) if is_strided else TowerPlan.load(config.towers.plan)
    for feature, widths in plan.column_splits.items():
        if any(width % 4 for width in widths):
            raise InputError(
                f"{place} cuts the table of feature {feature!r} into column shards of {list(widths)} columns; each "
                "must be a multiple of 4 (FBGEMM's kernels). Make a plan with other shards."
            )
    try:
        if config.towers.outside != "none":
            place += f", towers.outside={config.towers.outside!r}"
            outside = _outside(config, plan, tables)
            inside = [table for table in tables if not set(outside).issuperset(table.feature_names)]
            plan = _strided(inside, config.topology.num_towers) if is_strided else plan
            plan = plan.moved_outside(outside)
        tables, dim = _as_vectors(config, tables, plan.outside), config.model.outside_dim
        if dim is not None and dim % 4 and any(table.embedding_dim == dim for table in plan.outside_tables(tables)):
            raise InputError(
                f"tables outside towers would have model.tower_dim={dim} columns, but FBGEMM's kernels take multiples "
                "of 4. Set model.tower_dim to one."
            )
        by_tower = plan.tables_by_tower(split_tables(tables, _cuts(plan, tables)))
        tables = _with_sequences(config, plan, tables, by_tower)
    except InputError as error:
        raise InputError(f"{place}: {error}") from error
    return plan, tables


def _with_sequences(
    config: TrainingConfig, plan: TowerPlan, tables: Sequence[TableSpec], by_tower: Sequence[Sequence[TableSpec]]
) -> Sequence[TableSpec]:
    """Marks all tables of a tower with sequences: such a tower looks up one ``EmbeddingCollection``.

    Raises:
        InputError: a sequence is outside towers, in a flat model, or in a tower where a table is cut.
    """
    for sequence, _ in (pair for table in tables for pair in table.sequences):
        if not config.model.has_towers:
            raise InputError(
                f"{config.model.chosen} is flat, and {sequence!r} of data.sequences is looked up by TorchRec over all "
                "ranks: the tower dataflow would compress nothing. Set sharding.dataflow='flat', or use a model in "
                "towers."
            )
        if sequence in plan.outside:
            raise InputError(
                f"{sequence!r} of data.sequences is outside towers, where all features are bags. Put it into a tower."
            )
    marked = {table.name for of_tower in by_tower if any(t.sequences for t in of_tower) for table in of_tower}
    if cut := marked.difference(table.name for table in tables):
        raise InputError(
            f"the shard {min(cut)!r} of a cut table is in a tower with sequences (data.sequences), whose tables stay "
            "whole. Make a plan without shards there."
        )
    return [replace(table, is_sequence=table.name in marked) for table in tables]


def _outside(config: TrainingConfig, plan: TowerPlan, tables: Sequence[TableSpec]) -> list[str]:
    """Returns the features that are to be outside towers besides those of the plan.

    Raises:
        InputError: one is unknown, or of a table that the plan cuts.
    """
    wanted, features, cut = config.towers.outside, feature_names(tables), _cuts(plan, tables)
    if not isinstance(wanted, str):
        for feature in wanted:
            if feature not in features or feature in cut:
                fault = "its table is cut by the plan." if feature in cut else "no table has it."
                raise InputError(f"feature {feature!r}: {fault}{did_you_mean(feature, features)}")
        return list(wanted)
    if plan.outside:
        return []
    rules = ShardingRules(tables=dict(config.sharding.tables))
    vectors, dim = _as_vectors(config, split_tables(tables, cut), features), config.model.outside_dim
    free = [
        table.name
        for table in vectors
        if set(table.feature_names) <= set(features)  # shards are in none
        and dim in (None, table.embedding_dim)
        and table.embedding_dim % 4 == 0  # FBGEMM's kernels
        and not (rules.names(table.name) or why_not(table, "data_parallel"))
    ]
    placed = replace(plan, tables=()).tables_by_tower(vectors)
    chosen = choose_outside(placed, _crossing_costs(config), hardware=_hardware(config.sharding), candidates=free)
    return [name for table in tables if table.name in chosen for name in table.feature_names]


def _as_vectors(config: TrainingConfig, tables: Sequence[TableSpec], outside: Collection[str]) -> list[TableSpec]:
    """Returns the tables, those of features outside towers as wide as the vectors that they interact with."""
    dim, named = config.model.outside_dim, config.model.embedding_dims
    return [
        replace(table, embedding_dim=dim)
        if dim is not None
        and set(outside).intersection(table.feature_names)
        and named.keys().isdisjoint(table.feature_names)
        else table
        for table in tables
    ]


def _crossing_costs(config: TrainingConfig) -> CrossingCosts:
    model, sharding = config.model, config.sharding
    # A tower of DMT-DCN sends as much with a feature as without; of towers of the user's own nothing is known.
    sent_for_feature = model.c * model.output_dim if model.factory is None and "dlrm" in model.arch else 0
    return CrossingCosts(
        topology=config.topology.build(),
        workload=step_workload(config, sharding.pooling_factors),
        sent=sent_for_feature if model.has_towers else None,
        number_bytes=(NUMBER_BYTES[sharding.forward_precision], NUMBER_BYTES[sharding.backward_precision]),
        is_unique=sharding.unique and not model.has_towers,
    )


def _strided(tables: Sequence[TableSpec], num_towers: int) -> TowerPlan:
    """Puts table i into tower i mod T; by features instead, a shared table could fall to two towers."""
    features = {table.name: table.feature_names for table in tables}
    towers = TowerPlan.strided([table.name for table in tables], num_towers).to_lists()
    groups = [[feature for name in names for feature in features[name]] for names in towers]
    return TowerPlan.from_lists(groups, strategy="strided")


def _cuts(plan: TowerPlan, tables: Sequence[TableSpec]) -> Splits:
    """Returns the plan's column splits; none if the tables are cut already, as a ``towers.json`` records them."""
    features = set(feature_names(tables))
    return plan.column_splits if any(feature in features for feature in plan.column_splits) else {}


def check_table_optimizer(config: OptimizerConfig, device: DeviceType = "cpu") -> None:
    """Raises `InputError` if FBGEMM has no kernel of the tables' optimizer for the device where the tables live."""
    if device == "cpu" and config.sparse not in _CPU_OPTIMIZERS:
        raise InputError(
            f"optimizer.sparse={config.sparse!r}: FBGEMM has no CPU kernel for it, and tables live on the CPU here. "
            f"Use one of {list(_CPU_OPTIMIZERS)}, or GPUs (train.device='cuda')."
        )


def check_tables_on_ssd(job: Job) -> None:
    """Raises `InputError` if the plan has tables on SSDs that the job's optimizer or devices cannot use."""
    placed = () if job.sharding is None else job.sharding.tables
    on_ssd = [
        f"{t.name!r} ({human_bytes(t.memory)} with its cache)" for t in placed if t.placement.kernel == "key_value"
    ]
    for is_wrong, needed, actual in (
        (
            job.config.optimizer.sparse not in ("rowwise_adagrad", "adam"),
            "FBGEMM has only row-wise AdaGrad and Adam",
            f"optimizer.sparse={job.config.optimizer.sparse!r}",
        ),
        (job.device_type == "cpu", "FBGEMM keeps tables behind caches of GPUs (train.device='cuda')", "CPUs"),
    ):
        if on_ssd and is_wrong:
            raise InputError(
                f"The plan has table {on_ssd[0]} on an SSD (key_value), where {needed}, but this run has {actual}. "
                "Change sharding.tables, or use one of those."
            )


def _plan_sharding(config: TrainingConfig, tables: Sequence[TableSpec], towers: TowerPlan) -> TowerShardingPlan:
    """Plans the tables inside their towers by the rules of the config.

    Where the tower plan cuts a table into column shards, a pooling factor of its feature holds for each shard that has
    none of its own.
    """
    sharding, topology = config.sharding, config.topology.build()
    splits, tables = towers.column_splits, split_tables(tables, _cuts(towers, tables))
    factors: dict[str, float] = {}
    for feature, factor in sharding.pooling_factors.items():
        if feature in splits:
            factors = dict.fromkeys(shard_names(feature, splits[feature]), factor) | factors
        else:
            factors[feature] = factor
    planned = plan_tables(
        towers.tables_by_tower(tables),
        topology,
        outside=towers.outside_tables(tables),
        workload=step_workload(config, factors),
        hardware=_hardware(sharding),
        rules=ShardingRules(
            schemes=SCHEMES if sharding.scheme == "auto" else (cast("Scheme", sharding.scheme),),
            tables=dict(sharding.tables),
            hot_rows=config.hot_rows.extra_memory > 0,
        ),
    )
    costs, by_name = _crossing_costs(config), {table.name: table for table in tables}
    entries = (
        replace(entry, reason=f"on every rank: {costs.of(by_name[entry.name]).reason}")
        if entry.tower is None
        else entry
        for entry in planned.tables
    )
    return replace(planned, tables=tuple(entries))


def step_workload(config: TrainingConfig, pooling_factors: Mapping[str, float]) -> StepWorkload:
    """Returns the work of the tables in a step of a run, whose features have these numbers of ids per sample."""
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
