"""Predicts a training step of a job, and of alternatives to it, on a described cluster (`dmt.simulator`)."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from dmt.errors import InputError
from dmt.plan.tables import TableSpec, feature_names
from dmt.plan.topology import TowerTopology
from dmt.sharding.costs import StepWorkload
from dmt.sharding.explanation import TowerShardingPlan
from dmt.simulator.cluster import Cluster, load_cluster
from dmt.simulator.steps import Kind, ModelWork, StepWork, simulate, step_operations
from dmt.simulator.work import Workload, count_operators, step_work
from dmt.training.build import build_model
from dmt.training.config import TrainingConfig
from dmt.training.console import progress_bar
from dmt.training.factory import without_tables
from dmt.training.job import Job, crossing_costs, make_job, step_workload

__all__ = [
    "FLAT",
    "Prediction",
    "alternatives",
    "changed_config",
    "check_hosts",
    "not_counted",
    "predict_step",
    "predicted_result",
    "work_of",
]

logger = logging.getLogger(__name__)

FLAT = "flat (TorchRec)"
"""Name of the alternative to which the others are compared."""
_SAME, _RATIOS = "SPTT, same model", (2, 4, 16)
# Sections of a config, or keys of sections, that its alternatives keep; the rest describes the run's towers.
_PRECISIONS = {"forward_precision", "backward_precision", "table_precision"}
_KEPT: dict[str, Any] = {
    **dict.fromkeys(("data", "model", "optimizer"), True),
    "sharding": {"memory_gib", "cluster", "pooling_factors", *_PRECISIONS},
    "replicas": {"sync_every"},
    "train": {"batch_size", "prefetch_ids", "micro_batches", "device"},
}
# What an alternative may change.
_CHANGED: dict[str, Any] = dict.fromkeys(("model", "topology", "sharding", "towers", "hot_rows", "replicas"), True)
_CHANGED["train"] = {"dense_reduce", "micro_batches"}


class Prediction(NamedTuple):
    """The predicted step of a run, or of an alternative way to train its tables."""

    name: str
    overrides: list[str]
    """Overrides of the run's config that give this alternative."""
    compression_ratio: float
    """Numbers in a sample's embeddings over the numbers that the towers send for it; 1.0 for a flat model."""
    num_replicas: int
    seconds: float
    exposed: dict[Kind, float]
    """By kind of operation, the seconds in which no other operation hides it; they add up to ``seconds``."""
    samples_per_s: float
    """Samples per second of the whole job."""
    lookup_seconds: float
    """Seconds that the lookups of the busiest rank take in the forward pass."""
    uplink_bytes: float
    """Bytes that the busiest host sends to other hosts in a step."""
    rank_bytes: float
    """Bytes on the fullest rank of tables, optimizer states, and looked-up embeddings with their gradients."""
    unique_rows: str | None
    """Where the number of distinct inputs sent comes from, in words; None unless `CrossingCosts.is_unique`."""


def work_of(job: Job, counted: dict[str, ModelWork] | None = None) -> StepWork:
    """Returns the work of a job's step, from the operators of its model, which it builds on the meta device.

    Jobs that differ only in model, towers and topology may share ``counted``, a cache of the operators by model.
    """
    sharding, train, is_flat = job.config.sharding, job.config.train, job.sharding is None
    counted = {} if counted is None else counted
    towers = job.towers.to_lists() if job.towers is not None and job.config.model.has_towers else job.column_splits
    key = f"{job.config.model!r} {towers}"
    if key not in counted:
        model = without_tables(build_model(job, device="meta"), sharding.pooling_factors)
        counted[key] = count_operators(model, job.num_dense)
    tables, lookups = job.tables if is_flat else job.split_tables, _lookups(job)
    costs = replace(crossing_costs(job.config, job.opened_data), workload=lookups)
    workload = Workload(
        topology=job.topology,
        tables=tables,
        towers=[feature_names(tables)] if job.towers is None or is_flat else job.towers.to_lists(),
        sharding=job.sharding,
        lookups=lookups,
        number_bytes=costs.number_bytes,
        is_table_wise=sharding.scheme == "table_wise",
        is_hierarchical=train.dense_reduce != "ring",
        rows={name: costs.rows(name, t) for t in tables for name in t.feature_names},
    )
    return step_work(workload, counted[key])


def _lookups(job: Job) -> StepWorkload:
    return job.sharding.workload if job.sharding else step_workload(job.config, job.config.sharding.pooling_factors)


def _unique_rows(job: Job) -> str | None:
    costs = crossing_costs(job.config, job.opened_data)
    fewer = "; whole requests (data.group_by) have fewer" if costs.distinct and job.data.raw.group_by else ""
    known = f"counted by dmt prepare{fewer}" if costs.distinct else "at most as many as the rows of a table"
    return known if costs.is_unique else None


def predict_step(job: Job, cluster: Cluster, counted: dict[str, ModelWork] | None = None) -> Prediction:
    """Predicts a step of a job; the job may have more or fewer hosts than the cluster. ``counted``: see `work_of`."""
    train, work = job.config.train, work_of(job, counted)
    exposed = simulate(step_operations(work, cluster, micro_batches=train.micro_batches, prefetch=train.prefetch_ids))
    seconds, widths = sum(exposed.values()), work.model.widths
    in_towers = job.split_tables if job.towers is None else chain(*job.towers.tables_by_tower(job.split_tables))
    columns = sum(map(_lookups(job).numbers, in_towers))
    return Prediction(
        name="this config",
        overrides=[],
        compression_ratio=columns / sum(widths) if widths else 1.0,
        num_replicas=job.topology.num_replicas,
        seconds=seconds,
        exposed=exposed,
        samples_per_s=train.batch_size * job.topology.world_size / seconds,
        lookup_seconds=work.lookup_bytes / 3 / cluster.lookup_bytes_per_s,
        uplink_bytes=work.uplink_bytes,
        rank_bytes=work.rank_bytes[0],
        unique_rows=_unique_rows(job),
    )


def predicted_result(job: Job) -> dict[str, Any] | None:
    """Returns the predictions that a run's result shows beside its measurements.

    None without ``sharding.cluster``, or, after a warning, if the step cannot be predicted.
    """
    config = job.config
    if config.sharding.cluster is None:
        return None
    try:
        cluster = load_cluster(config.sharding.cluster)
        check_hosts(config, cluster, is_given=False)
        prediction = predict_step(job, cluster)
    except InputError as error:
        # The run has trained by now: a failed prediction must not fail it.
        logger.warning(f"The result has no predicted numbers: {error}")
        return None
    return {
        "samples_per_second": prediction.samples_per_s,
        "lookup_seconds": prediction.lookup_seconds,
        "rank_bytes": prediction.rank_bytes,
        "not_counted": not_counted(config),
    }


def not_counted(config: TrainingConfig) -> list[str]:
    """Returns the settings of a run that `predict_step` ignores, as texts for the user."""
    sharding, train, is_flat = config.sharding, config.train, config.dataflow == "flat"
    ignored = {
        f"sharding.scheme={sharding.scheme!r}": is_flat
        and sharding.scheme not in ("auto", "table_wise", "column_wise"),
        "BF16 in train.dense_reduce": train.dense_reduce == "hierarchical_bf16",
        "sharding.unique=true": sharding.unique and config.model.has_towers,
        f"hot_rows.extra_memory={config.hot_rows.extra_memory}": config.hot_rows.extra_memory > 0,
        "tables in host memory": sharding.is_off_device,
        f"extra time for optimizer.sparse={config.optimizer.sparse!r}": config.optimizer.sparse in ("adagrad", "adam"),
    }
    return [what for what, is_set in ignored.items() if is_set]


def check_hosts(run: TrainingConfig, cluster: Cluster, *, is_given: bool) -> None:
    """Raises `InputError` if a cluster lacks rates for a run's hosts; ``is_given``: the user gave the uplink's rate."""
    topology = run.topology.build()
    if topology.host_size != cluster.ranks_per_host:
        key = "ranks_per_tower" if topology.world_size % cluster.ranks_per_host else "ranks_per_host"
        raise InputError(
            f"Hosts of the run have {topology.host_size} ranks, but the rates of cluster {cluster.name!r} are for "
            f"hosts of {cluster.ranks_per_host}. Set topology.{key}={cluster.ranks_per_host}."
        )
    if cluster.hosts == 1 < topology.num_hosts and not is_given:
        raise InputError(
            f"Cluster {cluster.name!r} was measured on one host, which says nothing about the links between the "
            f"{topology.num_hosts} hosts of the run. Measure on two, or give a rate: dmt what-if --uplink-gbit-per-s."
        )


def alternatives(run: Job, cluster: Cluster) -> tuple[list[Prediction], list[str]]:
    """Predicts a step of the flat model, of the same model over towers, and of towers that compress.

    A tower is a host (several hosts if there are more hosts than tables). Tables are dealt to towers in turn,
    because their grouping barely changes what is sent; with ``unique`` it does, so there the towers are balanced.
    Alternatives over towers are also predicted with each possible number of replicas. All keep the settings in `_KEPT`.
    There are none for an own model (``model.factory``) in towers, or a shipped model with tables of several widths.

    Returns:
        The predictions, fastest first, and the names of the alternatives that do not fit ``sharding.memory_gib``.

    Raises:
        InputError: the tables of an alternative cannot be placed; with a memory limit, only if no alternative is left.
    """
    predictions: list[Prediction] = []
    left_out: list[str] = []
    counted: dict[str, ModelWork] = {}
    plans: dict[str, TowerShardingPlan | None] = {}
    reason, limit, tables = None, run.config.sharding.rank_memory, _plain_tables(run)
    is_own, in_towers = run.config.model.factory is not None, run.config.model.has_towers
    has_any = not in_towers if is_own else len({table.embedding_dim for table in tables}) == 1
    ways = list(_ways(run)) if has_any else []
    for name, settings in progress_bar(ways, total=len(ways), desc="what-if", unit="way", delay_s=5):
        changed = changed_config(run.config, settings)
        key = f"{changed.topology!r} {changed.towers!r} {changed.sharding!r}"  # models do not matter for a plan
        try:
            job = make_job(changed, tables, run.num_dense, data=run.opened_data, sharding=plans.get(key))
        except InputError as error:
            if limit is None:
                raise
            left_out.append(name)
            reason = reason or error
            continue
        plans[key], overrides = job.sharding, _overrides(run.config, changed, settings)
        prediction = predict_step(job, cluster, counted)._replace(name=name, overrides=overrides)
        if limit is not None and prediction.rank_bytes > limit:
            left_out.append(name)
        else:
            predictions.append(prediction)
    if reason is not None and not predictions:
        raise reason
    # Among equally fast ones (up to rounding), first those that change the model least, then with fewest replicas.
    predictions.sort(key=lambda way: (round(way.seconds, 7), way.compression_ratio, way.num_replicas))
    return predictions, left_out


def _overrides(config: TrainingConfig, changed: TrainingConfig, settings: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns ``settings``, and the other keys in which an alternative differs from ``config``, as overrides."""
    before, after = config.model_dump(mode="json"), changed.model_dump(mode="json", exclude_none=True, include=_CHANGED)
    return [
        f"{section}.{key}={json.dumps(value).strip(chr(34))}"
        for section in {**settings, **after}
        for key, value in after[section].items()
        if key in settings.get(section, ()) or value != before[section][key]
    ]


def _plain_tables(run: Job) -> list[TableSpec]:
    """Returns the tables of the flat model: tables outside towers get their full width, bags are no sequences."""
    model, outside = run.config.model, () if run.towers is None else run.towers.outside_tables(run.tables)
    narrow = {table.name for table in outside if table.embedding_dim == model.outside_dim}
    tables = [replace(table, is_sequence=bool(table.sequences)) for table in run.tables]
    width = next(table.embedding_dim for table in tables if table.name not in narrow)  # of all: DLRM needs equal ones
    return [replace(table, embedding_dim=width) if table.name in narrow else table for table in tables]


def _models(run: Job, num_towers: int) -> dict[str, dict[str, Any]]:
    """Returns settings of ``[model]`` for the alternatives in ``num_towers`` towers, by name."""
    model, tables, outputs = run.config.model, _plain_tables(run), {}
    if model.factory is not None:
        return {_SAME: {}}
    if "dcn" in model.arch:
        # A tower of DMT-DCN sends tower_dim numbers for all its features.
        family, columns = "dcn", sum(table.embedding_dim * len(table.feature_names) for table in tables) // num_towers
    else:
        # With c = 1 and p = 0, a tower of DMT-DLRM sends tower_dim numbers for each of its features.
        family, columns = "dlrm", max(table.embedding_dim for table in tables)
        outputs = {} if (model.c, model.p) == (1, 0) else {"c": 1, "p": 0}
    # A flat model with sequences cannot train over towers.
    models: dict[str, dict[str, Any]] = {} if any(t.sequences for t in tables) else {_SAME: {"arch": family}}
    for ratio in _RATIOS:
        if 1 <= columns // ratio <= 65_536 and (columns % ratio == 0 or family == "dcn"):
            models[f"towers, ratio {ratio}"] = {"arch": f"dmt-{family}", "tower_dim": columns // ratio, **outputs}
    return models


def _ways(run: Job) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """Yields the name of each alternative, and its settings by section and key."""
    is_own = run.config.model.factory is not None
    flat = {"model": {} if is_own else {"arch": "dcn" if "dcn" in run.config.model.arch else "dlrm"}}
    num_hosts, ranks = run.topology.num_hosts, run.topology.host_size
    reduced = {"train": {"dense_reduce": "hierarchical"}} if num_hosts > 1 else {}
    for replicas, placement in _replicas(run.topology):
        mesh = {"num_replicas": replicas, "replica_placement": placement, "ranks_per_host": ranks}
        hosts, size = (num_hosts // replicas, ranks) if placement == "inter_host" else (num_hosts, ranks // replicas)
        suffix = f", {replicas} replicas ({placement})" if replicas > 1 else ""
        number = max(number for number in range(1, hosts + 1) if hosts % number == 0 and number <= len(run.tables))
        shapes = {t: {"num_towers": t, "ranks_per_tower": hosts * size // t, **mesh} for t in (hosts, 1, number)}
        models = _models(run, number)
        if replicas == 1:
            yield FLAT, {**flat, "sharding": {"dataflow": "flat"}, "topology": shapes[hosts]}
        if (number > 1 or replicas > 1) and _SAME in models:
            # The trainer replicates a flat model only in this way: all ranks of a replica are one tower.
            yield f"flat (one tower){suffix}", {**flat, "sharding": {"dataflow": "sptt"}, "topology": shapes[1]}
        for name, model in models.items() if number > 1 or replicas == 1 else ():
            settings = {"model": model, "sharding": {"dataflow": "sptt"}, "topology": shapes[number], **reduced}
            yield name + suffix, settings
            if name == _SAME and number > 1:
                sharding = {"dataflow": "sptt", "unique": True}
                yield f"{_SAME}, unique{suffix}", {**settings, "sharding": sharding, "towers": {"plan": "balanced"}}


def _replicas(topology: TowerTopology) -> list[tuple[int, str]]:
    """Returns the possible (number, placement) of replicas: each on whole hosts, or all of them on each host."""
    between = [number for number in range(1, topology.num_hosts + 1) if topology.num_hosts % number == 0]
    inside = [number for number in range(2, topology.host_size + 1) if topology.host_size % number == 0]
    return [*((number, "inter_host") for number in between), *((number, "intra_host") for number in inside)]


def changed_config(config: TrainingConfig, settings: Mapping[str, Mapping[str, Any]]) -> TrainingConfig:
    """Returns the default config with ``config``'s keys of `_KEPT` (flat: no micro-batches), then ``settings``."""
    values = config.model_dump(mode="json", exclude_none=True, include=_KEPT)
    if settings["sharding"]["dataflow"] == "flat":
        del values["train"]["micro_batches"]
    for section, changed in settings.items():
        values[section] = {**values.get(section, {}), **changed}
    return TrainingConfig.model_validate(values)
