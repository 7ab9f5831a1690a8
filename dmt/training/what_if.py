"""The work of a job's step for the simulator: `step_work`, and its time on a described cluster: `predict_step`.

Legend: B samples per rank, T towers, H hosts, W ranks, N columns of an embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from dmt.models.complexity import PartFlops, compression_ratio, count_parts, dense_weight_bytes
from dmt.plan.tables import TableSpec, feature_names, number_bytes
from dmt.plan.topology import TowerTopology
from dmt.sharding.costs import replica_costs
from dmt.sharding.plan import imbalance_of
from dmt.simulator.cluster import Cluster
from dmt.simulator.steps import Load, StepWork, flat_step, tower_step
from dmt.simulator.timeline import Timeline, simulate
from dmt.training.build import build_model
from dmt.training.config import TrainingConfig
from dmt.training.exchanges import Exchange, flat_exchanges, step_exchanges
from dmt.training.job import Job, make_job

__all__ = ["Alternative", "CountedModel", "Prediction", "alternatives", "count", "predict_step", "step_work"]

_RATIOS = (2, 4, 8, 16)
_MICRO_BATCHES = (1, 4, 8)
# What alternatives keep of [sharding]: what the machine and the tables are, not how they are used.
_KEPT = ("memory_gib", "memory_gb_per_s", "intra_tower_gb_per_s", "collective_latency_us", "pooling_factors")


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
        work: its `step_work`, where that is known; micro-batches and prefetching do not change it.
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


@dataclass(frozen=True, kw_only=True)
class CountedModel:
    """A job's model on the meta device, and its cost."""

    model: nn.Module
    flops: PartFlops
    dense_bytes: int
    ratio: float
    """Compression ratio."""


def count(job: Job) -> CountedModel:
    """Builds a job's model on the meta device and counts it."""
    model = build_model(job, device="meta", without_tables=True)
    flops, (_, dense_bytes) = count_parts(model, job.num_dense), dense_weight_bytes(model)
    return CountedModel(model=model, flops=flops, dense_bytes=dense_bytes, ratio=compression_ratio(model))


def step_work(job: Job, model: CountedModel) -> StepWork:
    """Returns the work of one step of a job, of the busiest rank or host where they differ by plan."""
    batch, factors, topology = job.config.train.batch_size, job.config.sharding.pooling_factors, job.topology
    tables = [(feature, table) for table in job.split_tables for feature in table.feature_names]
    columns = {feature: table.embedding_dim for feature, table in tables}
    row_bytes = sum(factors.get(name, 1.0) * table.embedding_dim * number_bytes(table) for name, table in tables)
    tower_flops, skewed = 0.0, ["peer_outputs", "peer_gradients"]
    if job.sharding is None:
        exchanges, held = flat_exchanges(job, model.model)
        lookups = wide = imbalance_of(held)
    else:
        exchanges, lookups = step_exchanges(job, model.model), job.sharding.imbalance
        tower_flops = len(model.flops.towers) * max(model.flops.towers, default=0.0)
        assert job.towers is not None, "a sharding plan is made for towers"
        own = [float(sum(columns[name] for name in tower)) for tower in job.towers.to_lists()]
        held = [own[topology.coordinates(rank).tower] for rank in range(topology.world_size)]
        wide = imbalance_of(held)
        skewed.append("tower_outputs")
    hosts = imbalance_of([sum(held[rank] for rank in ranks) for ranks in topology.host_groups()])
    loads = {name: _load(exchange, topology) for name, exchange in vars(exchanges).items()}
    for name in skewed:
        uplink, inside = loads[name]
        loads[name] = Load(uplink * hosts, inside * (lookups if name == "tower_outputs" else wide))
    return StepWork(
        lookup_bytes=3 * batch * row_bytes * lookups,
        embedding_bytes=4 * batch * sum(columns.values()) * (1.0 if job.sharding is None else wide),
        output_bytes=4 * batch * sum(columns.values()) / model.ratio,
        tower_flops=batch * tower_flops,
        early_flops=batch * model.flops.dense_arch,
        dense_flops=batch * model.flops.rest,
        dense_bytes=model.dense_bytes,
        replicas=_replicas(job),
        **loads,
    )


def _load(exchange: Exchange, topology: TowerTopology) -> Load:
    """Returns what a host and a rank send of the bytes of all ranks."""
    return Load(exchange.across / topology.num_hosts, exchange.inside / topology.world_size)


def _replicas(job: Job) -> Load:
    """A step's share of the ring all-reduces that average the replicas."""
    topology, own = job.topology, job.config.replicas
    if job.sharding is None or topology.num_replicas == 1:
        return Load(0.0, 0.0)
    costs = replica_costs(job.sharding, job.split_tables, precision=own.precision, sync_every=own.sync_every)
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
    config: TrainingConfig, tables: Sequence[TableSpec], num_dense: int, cluster: Cluster
) -> list[Alternative]:
    """Predicts a step flat, in towers, and compressed by them, with the runtime's options; fastest first.

    Towers are strided: how features are grouped hardly changes what is sent. A tower is a host or a rank; where there
    are more hosts than features, it spans as many hosts as it takes. Of the config they keep tables, batch, layers and
    optimizers, and of the section sharding what is said of the machine; everything else is as by default.

    Args:
        config: the run: its batch size, its dense parts, its ranks, and the hosts that its topology has.
        tables: the tables, uncut.
        num_dense: dense columns.
        cluster: speed of ranks and links.

    Raises:
        InputError: the tables cannot be placed.
    """
    found = []
    columns = max(table.embedding_dim for table in tables)
    jobs: dict[tuple[str, ...], Job] = {}
    models: dict[tuple[str, ...], CountedModel] = {}
    for base, shape in _models(config, len(feature_names(tables)), columns):
        changed = _changed(config, (*base, *shape))
        # Tables are placed once for all models of a dataflow and shape.
        key = (changed.dataflow, *shape)
        if key not in jobs:
            jobs[key] = make_job(changed, tables, num_dense)
        job = replace(jobs[key], config=changed)
        # A model without towers is the same in all shapes.
        own = (*base, *shape) if changed.model.has_towers else (changed.model.arch,)
        if own not in models:
            models[own] = count(job)
        model = models[own]
        for precision in ("fp32", "fp16"):
            formats = (f"sharding.forward_precision={precision}", f"sharding.backward_precision={precision}")
            work = None
            for options in _options(job):
                overrides = (*base, *shape, *formats, *options)
                way = replace(job, config=_changed(config, overrides))
                work = work or step_work(way, model)
                prediction = predict_step(way, cluster, work)
                found.append(Alternative(overrides=overrides, ratio=model.ratio, prediction=prediction))
    # Of equally fast ones, but for rounding, that which changes the model less, and then the settings.
    return sorted(found, key=lambda one: (round(one.prediction.timeline.seconds, 7), one.ratio, len(one.overrides)))


def _models(
    config: TrainingConfig, num_features: int, columns: int
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Overrides of the model and its dataflow, and those of the topology: flat, and towers with several ratios."""
    topology = config.topology.build()
    hosts, size = topology.num_hosts, topology.host_size
    family = "dcn" if "dcn" in config.model.arch else "dlrm"
    yield (f"model.arch={family}", "sharding.dataflow=flat"), _shape(hosts, size, size)
    towers_of_hosts = max(towers for towers in range(1, hosts + 1) if hosts % towers == 0 and towers <= num_features)
    shapes = [_shape(towers_of_hosts, hosts * size // towers_of_hosts, size)]
    if size > 1 and hosts * size <= num_features:
        shapes.append(_shape(hosts * size, 1, size))
    for shape in shapes:
        yield (f"model.arch={family}", "sharding.dataflow=sptt"), shape
        for ratio in _RATIOS:
            if columns % ratio == 0:
                tower_dim = f"model.tower_dim={columns // ratio}"
                yield (f"model.arch=dmt-{family}", "sharding.dataflow=sptt", tower_dim), shape


def _shape(towers: int, ranks: int, ranks_per_host: int) -> tuple[str, ...]:
    sizes = {"num_towers": towers, "ranks_per_tower": ranks, "ranks_per_host": ranks_per_host, "num_replicas": 1}
    return tuple(f"topology.{name}={size}" for name, size in sizes.items())


def _options(job: Job) -> list[tuple[str, ...]]:
    if job.sharding is None:
        return [()]
    reduce = ("train.dense_reduce=hierarchical",) if job.topology.num_hosts > 1 else ()
    return [(*reduce, f"train.micro_batches={parts}") for parts in _MICRO_BATCHES]


def _changed(config: TrainingConfig, overrides: Sequence[str]) -> TrainingConfig:
    """The config with these settings, and with what concerns the dataflow as by default."""
    values = config.model_dump(mode="json", exclude_none=True)
    for section in ("towers", "replicas", "hot_rows", "topology"):
        values.pop(section, None)
    for name in ("factory", "in_towers", "options"):
        values["model"].pop(name, None)
    for name in ("micro_batches", "dense_reduce", "dense_reduce_precision", "affinity_rows"):
        values["train"].pop(name, None)
    kept = () if "sharding.dataflow=flat" in overrides else _KEPT
    values["sharding"] = {name: value for name, value in values["sharding"].items() if name in kept}
    for override in overrides:
        key, _, value = override.partition("=")
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = int(value) if value.isdecimal() else value
    return TrainingConfig.model_validate(values)
