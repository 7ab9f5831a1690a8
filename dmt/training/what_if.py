"""The work of a job's step for the simulator: `step_work`, and its time on a described cluster: `predict_step`.

Legend: B samples per rank, T towers, H hosts, W ranks, N columns of an embedding.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt.hot_rows.costs import HotLoad
from dmt.models.complexity import compression_ratio, dense_weight_bytes, tower_modules
from dmt.number_formats import NUMBER_FORMATS
from dmt.plan.tables import TableSpec, feature_names, number_bytes
from dmt.plan.topology import TowerTopology
from dmt.sharding.costs import replica_costs
from dmt.sharding.plan import imbalance_of
from dmt.simulator.cluster import Cluster
from dmt.simulator.steps import Load, PartWork, StepWork, flat_step, tower_step
from dmt.simulator.timeline import Timeline, simulate
from dmt.training.build import build_model
from dmt.training.cluster_rates import planner_rates
from dmt.training.config import SHARDING_OF_TOWERS, SHARDING_RATES, TrainingConfig
from dmt.training.distinct import InputGroup, distinct_inputs_of, first_ids
from dmt.training.exchanges import Exchange, flat_exchanges, step_exchanges
from dmt.training.job import Job, make_job
from dmt.training.operators import ModelWork, count_operators

__all__ = [
    "Alternative",
    "CountedModel",
    "Prediction",
    "Repeats",
    "alternatives",
    "changed_config",
    "count",
    "not_counted",
    "predict_step",
    "repeats_of",
    "step_work",
]

_RATIOS = (2, 4, 8, 16)
_MICRO_BATCHES = (1, 4, 8)
# Times that copies of hot rows, or their gradients, are read or written in an update, however few ids come.
_HELD_PASSES = 5
# What alternatives keep of [sharding]: what the machine and the tables are, not how they are used.
_KEPT = ("memory_gib", *SHARDING_RATES, "pooling_factors", "table_precision")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The step of a job on a cluster, predicted."""

    timeline: Timeline
    uplink_bytes: float
    """Bytes that the busiest host sends to others in a step."""
    samples_per_s: float
    """Samples per second of the whole job."""


def predict_step(job: Job, cluster: Cluster, work: StepWork | None = None) -> Prediction:
    """Predicts one training step of a job on a cluster.

    Args:
        job: the run; its topology may be of another size than the cluster that was measured.
        cluster: speed of its ranks and links.
        work: its `step_work`, where that is known; with `Repeats` for these micro-batches.
    """
    work, train = work or step_work(job, count(job)), job.config.train
    if job.sharding is None:
        operations = flat_step(work, cluster, job.topology, prefetch=train.prefetch_ids)
    else:
        operations = tower_step(
            work,
            cluster,
            job.topology,
            micro_batches=train.micro_batches,
            prefetch=train.prefetch_ids,
            hierarchical=train.dense_reduce == "hierarchical",
        )
    timeline = simulate(operations)
    return Prediction(
        timeline=timeline,
        uplink_bytes=work.uplink_bytes,
        samples_per_s=train.batch_size * job.topology.world_size / timeline.seconds,
    )


def not_counted(config: TrainingConfig, *, repeats: bool = False) -> list[str]:
    """Returns the settings of a run that `predict_step` does not know: it predicts the step as if they were not there.

    Example:
        >>> not_counted(TrainingConfig.model_validate({"sharding": {"dataflow": "sptt", "unique": True}}))
        ['sharding.unique=True']

    With ``repeats``, those of `repeats_of`, it knows unique inputs.
    """
    own, train, is_flat = config.sharding, config.train, config.dataflow == "flat"
    is_tiered = bool(own.kernels or own.host_memory_gib or own.ssd_gib)
    wrong = {
        f"sharding.scheme={own.scheme!r}": is_flat and own.scheme not in ("auto", "table_wise", "column_wise"),
        f"topology.num_replicas={config.topology.num_replicas}": is_flat and config.topology.num_replicas > 1,
        f"train.dense_reduce={train.dense_reduce!r}": is_flat and train.dense_reduce != "ring",
        f"sharding.unique={own.unique!r}": own.unique and not repeats,
        f"hot_rows.extra_memory={config.hot_rows.extra_memory}": config.hot_rows.extra_memory > 0,
        "tables in host memory or on SSDs": is_tiered,
        f"the state of optimizer.sparse={config.optimizer.sparse!r}": config.optimizer.sparse in ("adagrad", "adam"),
    }
    return [what for what, is_wrong in wrong.items() if is_wrong]


@dataclass(frozen=True, kw_only=True)
class CountedModel:
    """A job's model on the meta device, and its cost."""

    model: nn.Module
    work: ModelWork
    dense_bytes: int
    ratio: float
    """Compression ratio."""


def count(job: Job) -> CountedModel:
    """Builds a job's model on the meta device and counts it."""
    return _counted(job, build_model(job, device="meta", without_tables=True))


def _counted(job: Job, model: nn.Module) -> CountedModel:
    work, (_, dense_bytes) = count_operators(model, job.num_dense), dense_weight_bytes(model)
    return CountedModel(model=model, work=work, dense_bytes=dense_bytes, ratio=compression_ratio(model))


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """Repetitions in the ids of a job: equal inputs that share a row, and hot rows with copies."""

    distinct: Sequence[InputGroup]
    """Counts of `distinct_inputs_of`."""
    hot: HotLoad | None = None


def repeats_of(job: Job, batches: Sequence[KeyedJaggedTensor] | None = None) -> Repeats | None:
    """Returns how often inputs repeat in the data of a job that shares their rows; None for another, or without data.

    Args:
        job: the run.
        batches: ids of each rank, where they are read already; by default those of the first global batch.
    """
    own = job.config
    if not own.sharding.unique or own.hot_rows.extra_memory or (job.source is None and batches is None):
        return None
    return Repeats(distinct=distinct_inputs_of(job, batches=batches))


def step_work(job: Job, model: CountedModel, repeats: Repeats | None = None) -> StepWork:
    """Returns the work of one step of a job, of the busiest rank or host where they differ by plan.

    Args:
        job: the run.
        model: its counted model.
        repeats: what equal inputs of a rank's batch and hot rows change; None: every sample has a row of its own.
    """
    own, batch, topology = job.config.sharding, job.config.train.batch_size, job.topology
    tables = [(feature, table) for table in job.split_tables for feature in table.feature_names]
    columns = {feature: table.embedding_dim for feature, table in tables}
    samples = outputs = batch * sum(columns.values()) / model.ratio
    ids = {name: batch * own.pooling_factors.get(name, 1.0) for name in columns}
    rows = dict.fromkeys(columns, float(batch))
    peer_samples = float(batch)
    if repeats is not None:
        ids, rows, outputs = _shared_rows(repeats.distinct, columns, model)
        peer_samples = max(group.distinct.rows for group in repeats.distinct)
    row_bytes = sum(ids[name] * table.embedding_dim * number_bytes(table) for name, table in tables)
    skewed = ["peer_outputs", "peer_gradients"]
    if job.sharding is None:
        exchanges, held = flat_exchanges(job, model.model)
        lookups = wide = imbalance_of(held)
    else:
        distinct = None if repeats is None else repeats.distinct
        exchanges, lookups = step_exchanges(job, model.model, distinct), job.sharding.imbalance
        assert job.towers is not None, "a sharding plan is made for towers"
        of_towers = [float(sum(rows[name] * columns[name] for name in tower)) for tower in job.towers.to_lists()]
        held = [of_towers[topology.coordinates(rank).tower] for rank in range(topology.world_size)]
        wide = imbalance_of(held)
        skewed.append("tower_outputs")
    hosts = imbalance_of([sum(held[rank] for rank in ranks) for ranks in topology.host_groups()])
    loads: dict[str, Any] = {name: _load(exchange, topology) for name, exchange in vars(exchanges).items()}
    for name in skewed:
        uplink, inside = loads[name]
        loads[name] = Load(uplink * hosts, inside * (lookups if name == "tower_outputs" else wide))
    # Rows are copied to their samples, and the gradients of samples summed into those of their rows.
    shared = 0.0 if repeats is None else 4 * (outputs + samples)
    work = StepWork(
        lookup_bytes=3 * row_bytes * lookups,
        embedding_bytes=4 * sum(rows[name] * columns[name] for name in columns) * (wide if job.sharding else 1.0),
        output_bytes=4 * outputs,
        samples=batch,
        peer_samples=peer_samples * topology.num_towers,
        towers=max(model.work.towers, key=lambda part: part.flops, default=PartWork()),
        early=model.work.dense_arch,
        dense=model.work.rest,
        dense_bytes=model.dense_bytes,
        replicas=_replicas(job),
        added_bytes=(
            outputs * _conversion(own.forward_precision) + shared,
            outputs * _conversion(own.backward_precision) + shared,
        ),
        **loads,
    )
    if repeats is None:
        return work
    by_first: tuple[float, ...] = ()
    if any(group.distinct.rows < batch for group in repeats.distinct):
        sent = [group.distinct.rows * sum(columns[name] for name in group.features) for group in repeats.distinct]
        by_part = zip(*(group.parts for group in repeats.distinct), strict=True)
        by_first = tuple(sum(map(operator.mul, shares, sent)) / sum(sent) for shares in by_part)
    work = replace(work, told_apart=batch * len(columns), parts=by_first)
    return work if repeats.hot is None else _with_hot_rows(work, repeats.hot, samples, topology)


def _shared_rows(
    groups: Sequence[InputGroup], columns: Mapping[str, int], model: CountedModel
) -> tuple[dict[str, float], dict[str, float], float]:
    """Returns of a rank's batch the ids and the rows of each feature, and the numbers that its towers send back."""
    modules = tower_modules(model.model)
    ids: dict[str, float] = {}
    rows: dict[str, float] = {}
    outputs = 0.0
    for group in groups:
        ids.update(zip(group.features, group.distinct.ids, strict=True))
        rows.update(dict.fromkeys(group.features, group.distinct.rows))
        width = modules[group.tower].out_features if modules else sum(columns[name] for name in group.features)
        outputs += group.distinct.rows * width
    return ids, rows, outputs


def _with_hot_rows(work: StepWork, hot: HotLoad, numbers: float, topology: TowerTopology) -> StepWork:
    # Copies are read and written to where the samples are, and added to what towers send: two read, one written.
    forward = 2 * hot.used_bytes + 3 * 4 * numbers
    # Their gradients are set to zero, added to, looked through, summed and added to the weights.
    backward = 3 * hot.used_bytes + _HELD_PASSES * hot.held_bytes
    return replace(
        work,
        hot_weights=_load(Exchange(hot.across, hot.inside), topology),
        hot_bytes=(forward, backward),
        told_apart=2 * work.told_apart,
    )


def _conversion(precision: str) -> float:
    """Bytes that a number is read and written with where it is sent in another format, and made FP32 again."""
    fp32 = NUMBER_FORMATS["fp32"].num_bytes
    return 0.0 if precision == "fp32" else 2 * (fp32 + NUMBER_FORMATS[precision].num_bytes)


def _load(exchange: Exchange, topology: TowerTopology) -> Load:
    """Returns what a host and a rank send of the bytes of all ranks."""
    return Load(exchange.across / topology.num_hosts, exchange.inside / topology.world_size)


def _replicas(job: Job) -> Load:
    """A step's share of the ring all-reduces that average the replicas."""
    topology, own = job.topology, job.config.replicas
    if job.sharding is None or topology.num_replicas == 1:
        return Load(0.0, 0.0)
    costs = replica_costs(job.sharding, job.split_tables, sync_every=own.sync_every)
    sent = 2 * (topology.num_replicas - 1) * costs.sent_bytes / own.sync_every
    across = topology.ring_share_across_hosts(topology.replica_groups())
    return _load(Exchange(across * sent, (1 - across) * sent), topology)


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another way to train the same tables."""

    overrides: tuple[str, ...]
    """Settings that make it of the config, as ``section.key=value``."""
    ratio: float
    """Compression ratio; 1.0 where the model computes what the flat one does."""
    prediction: Prediction


def alternatives(
    config: TrainingConfig,
    tables: Sequence[TableSpec],
    num_dense: int,
    *,
    cluster: Cluster,
    own: Job | None = None,
) -> list[Alternative]:
    """Predicts a step flat, in towers, and compressed by them, with the runtime's options; fastest first.

    Towers are strided: how features are grouped hardly changes what is sent. A tower is a host or a rank; where there
    are more hosts than features, it spans as many hosts as it takes. Where there are data to read, towers with unique
    inputs are among them, without micro-batches. Of the config they keep tables, batch, layers (of ``model.factory``
    the whole model, in towers only if the config has it so) and optimizers, and of the section sharding what is said of
    the machine; everything else is as by default.

    Args:
        config: the run: its batch size, its dense parts, its ranks, and the hosts that its topology has.
        tables: the tables, uncut.
        num_dense: dense columns.
        cluster: speed of ranks and links.
        own: the job of the config, whose plan is taken where an alternative has the same, and whose data are read.

    Raises:
        InputError: the tables cannot be placed.
    """
    found = []
    columns = max(table.embedding_dim for table in tables)
    jobs: dict[tuple[str, ...], Job] = {}
    models: dict[tuple[str, ...], CountedModel | None] = {}
    repeats: dict[tuple[object, ...], Repeats | None] = {}
    across = config.topology.build().num_hosts > 1
    batches = [] if own is None else _first_batches(own)
    for base, shape in _models(config, len(feature_names(tables)), columns):
        # Towers on several hosts sum their dense gradients inside hosts first.
        is_flat = "sharding.dataflow=flat" in base
        reduce = ("train.dense_reduce=hierarchical",) if across and not is_flat else ()
        changed = changed_config(config, (*base, *shape, *reduce), cluster)
        # Tables are placed once for all models of a dataflow and shape.
        key = (changed.dataflow, *shape)
        if key not in jobs:
            is_own = own is not None and _planned_by(own.config) == _planned_by(changed)
            jobs[key] = own if own is not None and is_own else make_job(changed, tables, num_dense)
        job = replace(jobs[key], config=changed)
        # A model without towers is the same in all shapes.
        of_model = (*base, *shape) if changed.model.has_towers else (changed.model.chosen,)
        if of_model not in models:
            is_whole = changed.model.in_towers or not config.model.in_towers
            models[of_model] = count(job) if is_whole else _count_flat(job)
        model = models[of_model]
        if model is None:
            continue
        plain = step_work(job, model)
        for precision in ("fp32", "fp16"):
            work = _in_format(plain, precision)
            formats = (f"sharding.forward_precision={precision}", f"sharding.backward_precision={precision}")
            for options in [()] if is_flat else [(f"train.micro_batches={parts}",) for parts in _MICRO_BATCHES]:
                overrides = (*base, *shape, *formats, *reduce, *options)
                way = replace(job, config=changed_config(config, overrides, cluster))
                prediction = predict_step(way, cluster, work)
                found.append(Alternative(overrides=overrides, ratio=model.ratio, prediction=prediction))
        if is_flat or not batches:
            continue
        shared = (*base, *shape, "sharding.unique=true", *reduce, "train.micro_batches=1")
        way = replace(job, config=changed_config(config, shared, cluster))
        # Inputs are those of whole towers, or of features, whatever the model makes of them.
        inputs = (*shape, changed.model.has_towers)
        if inputs not in repeats:
            repeats[inputs] = repeats_of(way, batches)
        plain = step_work(way, model, repeats[inputs])
        for precision in ("fp32", "fp16"):
            formats = (f"sharding.forward_precision={precision}", f"sharding.backward_precision={precision}")
            prediction = predict_step(way, cluster, _in_format(plain, precision))
            found.append(Alternative(overrides=(*shared, *formats), ratio=model.ratio, prediction=prediction))
    # Of equally fast ones, but for rounding, that which changes the model less, and then the settings.
    return sorted(found, key=lambda one: (round(one.prediction.timeline.seconds, 7), one.ratio, len(one.overrides)))


def _first_batches(job: Job) -> list[KeyedJaggedTensor]:
    """The ids of a job's first global batch; none without data, or where they are those of column shards."""
    if job.source is None or (job.towers is not None and job.towers.column_splits):
        return []
    batch = job.config.train.batch_size
    return list(first_ids(job.data, world_size=job.topology.world_size, batch_size=batch))


def _planned_by(config: TrainingConfig) -> tuple[object, ...]:
    """Returns what `make_job` reads of a config: with the same of it, and the same tables, plans are the same."""
    not_read = {"dataflow", "unique", "forward_precision", "backward_precision", "cache_policy"}
    topology = config.topology.build()
    return (
        config.dataflow,
        replace(topology, ranks_per_host=topology.host_size),
        config.sharding.model_dump(exclude=not_read),
        config.towers,
        config.optimizer,
        config.train.batch_size,
        config.hot_rows.profile,
        config.replicas.moment_scale,
    )


def _count_flat(job: Job) -> CountedModel | None:
    """Counts the flat model of a factory whose run is in towers; None where it makes none."""
    try:
        model = build_model(job, device="meta", without_tables=True)
    except Exception:  # the user's function, given towers=None, may fail in any way
        return None
    return _counted(job, model)


def _in_format(work: StepWork, precision: str) -> StepWork:
    """The work of a step whose outputs and gradients travel in FP32, with another number format."""
    share = NUMBER_FORMATS[precision].num_bytes / NUMBER_FORMATS["fp32"].num_bytes
    added = work.output_bytes / NUMBER_FORMATS["fp32"].num_bytes * _conversion(precision)
    outputs, gradients = (
        Load(share * load.uplink, share * load.inside) for load in (work.peer_outputs, work.peer_gradients)
    )
    both = (work.added_bytes[0] + added, work.added_bytes[1] + added)
    return replace(work, added_bytes=both, peer_outputs=outputs, peer_gradients=gradients)


def _models(
    config: TrainingConfig, num_features: int, columns: int
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Overrides of the model and its dataflow, and those of the topology: flat, and towers with several ratios."""
    topology = config.topology.build()
    hosts, size = topology.num_hosts, topology.host_size
    family = "dcn" if "dcn" in config.model.arch else "dlrm"
    # A model of the user's own stays what it is: its towers have the outputs that they have.
    own = config.model.factory is not None
    plain = "model.in_towers=false" if own else f"model.arch={family}"
    yield (plain, "sharding.dataflow=flat"), _shape(hosts, size, size)
    towers_of_hosts = max(towers for towers in range(1, hosts + 1) if hosts % towers == 0 and towers <= num_features)
    shapes = [_shape(towers_of_hosts, hosts * size // towers_of_hosts, size)]
    if size > 1 and hosts * size <= num_features:
        shapes.append(_shape(hosts * size, 1, size))
    for shape in shapes:
        yield (plain, "sharding.dataflow=sptt"), shape
        if own and config.model.in_towers:
            yield ("model.in_towers=true", "sharding.dataflow=sptt"), shape
        for ratio in () if own else _RATIOS:
            if columns % ratio == 0:
                tower_dim = f"model.tower_dim={columns // ratio}"
                yield (f"model.arch=dmt-{family}", "sharding.dataflow=sptt", tower_dim), shape


def _shape(towers: int, ranks: int, ranks_per_host: int) -> tuple[str, ...]:
    sizes = {"num_towers": towers, "ranks_per_tower": ranks, "ranks_per_host": ranks_per_host, "num_replicas": 1}
    return tuple(f"topology.{name}={size}" for name, size in sizes.items())


def changed_config(config: TrainingConfig, overrides: Sequence[str], cluster: Cluster) -> TrainingConfig:
    """The config with these settings, and with what concerns the dataflow as by default.

    Towers that a flat config gets are placed by the rates of the cluster; it has none of its own.
    """
    values = config.model_dump(mode="json", exclude_none=True)
    for section in ("towers", "replicas", "hot_rows", "topology"):
        values.pop(section, None)
    for name in ("micro_batches", "dense_reduce", "dense_reduce_precision", "affinity_rows"):
        values["train"].pop(name, None)
    is_flat = "sharding.dataflow=flat" in overrides
    kept = [name for name in _KEPT if not is_flat or name not in SHARDING_OF_TOWERS]
    values["sharding"] = {name: value for name, value in values["sharding"].items() if name in kept}
    rates = planner_rates(cluster) if config.dataflow == "flat" and not is_flat else []
    for override in (*rates, *overrides):
        key, _, value = override.partition("=")
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = int(value) if value.isdecimal() else value
    return TrainingConfig.model_validate(values)
