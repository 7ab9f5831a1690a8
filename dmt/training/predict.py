"""Predicts one step of a job on a described cluster; `commands.what_if` compares the alternatives to a job."""

from __future__ import annotations

import logging
from itertools import chain
from typing import Any, NamedTuple

from dmt.errors import InputError
from dmt.plan.tables import NUMBER_BYTES, feature_names
from dmt.sharding.costs import StepWorkload
from dmt.simulator.cluster import Cluster, load_cluster
from dmt.simulator.steps import Kind, ModelWork, StepWork, simulate, step_operations
from dmt.simulator.work import Workload, count_operators, step_work
from dmt.training.build import build_model
from dmt.training.config import TrainingConfig
from dmt.training.factory import without_tables
from dmt.training.job import Job, step_workload

__all__ = ["Prediction", "check_hosts", "not_counted", "predict_step", "predicted_result", "work_of"]

logger = logging.getLogger(__name__)


class Prediction(NamedTuple):
    """The predicted step of a run, or of another way to train its tables."""

    name: str
    overrides: list[str]
    """Settings that make it of the run's config."""
    compression_ratio: float
    """1.0 where the model computes what the flat one does."""
    num_replicas: int
    seconds: float
    exposed: dict[Kind, float]
    """Seconds by kind of operation."""
    samples_per_s: float
    """Of the whole job."""
    lookup_seconds: float
    """Of these, the busiest rank's lookups, forward."""
    uplink_bytes: float
    """Bytes that the busiest host sends to others."""
    rank_bytes: float
    """Memory of the fullest rank for tables, their optimizer states, and what lookups return with its gradients."""
    activation_bytes: float
    """The last of these alone."""
    host_bytes: float
    """The same memory of the ranks of the fullest host."""


def work_of(job: Job, counted: dict[str, ModelWork] | None = None) -> StepWork:
    """Builds a job's model on the meta device, counts it, and returns the work of a step.

    Jobs that differ in nothing but model, towers and topology may share ``counted``: equal models are counted once.
    """
    sharding, train, is_flat = job.config.sharding, job.config.train, job.sharding is None
    counted, key = {} if counted is None else counted, f"{job.config.model!r} {job.towers and job.towers.to_lists()}"
    if key not in counted:
        model = without_tables(build_model(job, device="meta"), sharding.pooling_factors)
        counted[key] = count_operators(model, job.num_dense)
    tables = job.tables if is_flat else job.split_tables
    workload = Workload(
        topology=job.topology,
        tables=tables,
        towers=[feature_names(tables)] if job.towers is None or is_flat else job.towers.to_lists(),
        sharding=job.sharding,
        lookups=_lookups(job),
        number_bytes=(NUMBER_BYTES[sharding.forward_precision], NUMBER_BYTES[sharding.backward_precision]),
        is_table_wise=sharding.scheme == "table_wise",
        is_hierarchical=train.dense_reduce != "ring",
    )
    return step_work(workload, counted[key])


def _lookups(job: Job) -> StepWorkload:
    return job.sharding.workload if job.sharding else step_workload(job.config, job.config.sharding.pooling_factors)


def predict_step(job: Job, cluster: Cluster, counted: dict[str, ModelWork] | None = None) -> Prediction:
    """Predicts one training step of a job, whose topology may be of another size than the cluster; see `work_of`."""
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
        activation_bytes=work.rank_bytes[1],
        host_bytes=work.host_bytes,
    )


def predicted_result(job: Job) -> dict[str, Any] | None:
    """Returns the prediction for the result of a run, beside what was measured; None without sharding.cluster."""
    config = job.config
    if config.sharding.cluster is None:
        return None
    try:
        cluster = load_cluster(config.sharding.cluster)
        check_hosts(config, cluster, is_given=False)
        own = predict_step(job, cluster)
    except InputError as error:
        # The run is done: this cannot fail it.
        logger.warning(f"The result has no prediction beside it: {error}")
        return None
    return {
        "samples_per_second": own.samples_per_s,
        "lookup_seconds": own.lookup_seconds,
        "rank_bytes": own.rank_bytes,
        "not_counted": not_counted(config),
    }


def not_counted(config: TrainingConfig) -> list[str]:
    """The settings of a run that `predict_step` does not know, and predicts as if they were not there."""
    sharding, train, is_flat = config.sharding, config.train, config.dataflow == "flat"
    wrong = {
        f"sharding.scheme={sharding.scheme!r}": is_flat
        and sharding.scheme not in ("auto", "table_wise", "column_wise"),
        f"train.dense_reduce={train.dense_reduce!r}": is_flat and train.dense_reduce != "ring",
        "BF16 in train.dense_reduce": not is_flat and train.dense_reduce == "hierarchical_bf16",
        "sharding.unique=true": sharding.unique,
        f"hot_rows.extra_memory={config.hot_rows.extra_memory}": config.hot_rows.extra_memory > 0,
        "tables in host memory or on SSDs": sharding.is_off_device,
        f"the state of optimizer.sparse={config.optimizer.sparse!r}": config.optimizer.sparse in ("adagrad", "adam"),
    }
    return [what for what, is_wrong in wrong.items() if is_wrong]


def check_hosts(run: TrainingConfig, cluster: Cluster, *, is_given: bool) -> None:
    """Raises `InputError` where a cluster lacks rates for the hosts of a run; ``is_given``: the uplink's is given."""
    topology = run.topology.build()
    if topology.host_size != cluster.ranks_per_host:
        key = "ranks_per_tower" if topology.world_size % cluster.ranks_per_host else "ranks_per_host"
        raise InputError(
            f"Hosts of the run have {topology.host_size} ranks, but the rates of cluster {cluster.name!r} hold for "
            f"hosts of {cluster.ranks_per_host}. Set topology.{key}={cluster.ranks_per_host}."
        )
    if cluster.hosts == 1 < topology.num_hosts and not is_given:
        raise InputError(
            f"Cluster {cluster.name!r} was measured on one host, which says nothing about the links between the "
            f"{topology.num_hosts} hosts of the run. Give their rate: --uplink-gbit-per-s."
        )
