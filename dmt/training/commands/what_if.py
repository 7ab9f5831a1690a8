"""``dmt what-if``: what a step of a run would take on a described cluster, and what the alternatives would."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from dmt.errors import InputError
from dmt.formatting import human_bytes
from dmt.plan.tables import NUMBER_BYTES, feature_names
from dmt.simulator.cluster import Cluster, load_cluster
from dmt.simulator.steps import Kind, ModelWork, simulate, step_operations
from dmt.simulator.work import Workload, count_operators, step_work
from dmt.training.build import build_model
from dmt.training.commands import Shown
from dmt.training.config import TrainingConfig, load_config, to_override
from dmt.training.factory import without_tables
from dmt.training.job import Job, make_job, open_job

__all__ = [
    "Prediction",
    "alternatives",
    "changed_config",
    "count",
    "predict_step",
    "run_what_if",
    "workload_of",
]

_RATIOS = (2, 4, 16)
_FLAT = "flat (TorchRec)"
# What alternatives take over from a config, whole sections or keys of them; the rest is about its own towers.
_KEPT: dict[str, tuple[str, ...] | None] = {
    "data": None,
    "model": None,
    "optimizer": None,
    "sharding": (
        "memory_gib",
        "cluster",
        "pooling_factors",
        "forward_precision",
        "backward_precision",
        "table_precision",
    ),
    "train": ("batch_size", "prefetch_ids", "micro_batches", "device"),
}


class Prediction(NamedTuple):
    """The predicted step of a run, or of another way to train its tables."""

    name: str
    overrides: list[str]
    """Settings that make it of the run's config."""
    compression_ratio: float
    """1.0 where the model computes what the flat one does."""
    seconds: float
    exposed: dict[Kind, float]
    """Seconds by kind of operation."""
    samples_per_s: float
    """Of the whole job."""
    uplink_bytes: float
    """Bytes that the busiest host sends to others."""


def count(job: Job) -> ModelWork:
    """Builds a job's model on the meta device and counts it."""
    return count_operators(without_tables(build_model(job, device="meta")), job.num_dense)


def workload_of(job: Job) -> Workload:
    """Returns what the bytes of a job's step depend on."""
    sharding, train, is_flat = job.config.sharding, job.config.train, job.sharding is None
    tables = job.tables if is_flat else job.split_tables
    return Workload(
        topology=job.topology,
        tables=tables,
        towers=[feature_names(tables)] if job.towers is None or is_flat else job.towers.to_lists(),
        sharding=job.sharding,
        batch_size=train.batch_size,
        pooling=sharding.pooling_factors if job.sharding is None else job.sharding.workload.pooling_factors,
        number_bytes=(NUMBER_BYTES[sharding.forward_precision], NUMBER_BYTES[sharding.backward_precision]),
        is_table_wise=sharding.scheme == "table_wise",
        is_hierarchical=train.dense_reduce != "ring",
        sync_every=job.config.replicas.sync_every,
    )


def predict_step(job: Job, cluster: Cluster, name: str = "this config", overrides: Sequence[str] = ()) -> Prediction:
    """Predicts one training step of a job, whose topology may be of another size than the cluster."""
    train, model = job.config.train, count(job)
    work = step_work(workload_of(job), model)
    operations = step_operations(
        work,
        cluster,
        job.topology,
        flat=job.sharding is None,
        micro_batches=train.micro_batches,
        prefetch=train.prefetch_ids,
        hierarchical=train.dense_reduce != "ring",
    )
    timeline = simulate(operations)
    columns = sum(table.embedding_dim * len(table.feature_names) for table in job.split_tables)
    return Prediction(
        name=name,
        overrides=list(overrides),
        compression_ratio=columns / sum(model.widths) if model.widths else 1.0,
        seconds=timeline.seconds,
        exposed=timeline.exposed,
        samples_per_s=train.batch_size * job.topology.world_size / timeline.seconds,
        uplink_bytes=work.uplink_bytes,
    )


def alternatives(run: Job, cluster: Cluster) -> list[Prediction]:
    """Predicts a step flat, of the same model in towers, and of towers that compress; fastest first.

    A tower is a host (several where there are more hosts than features), and features are dealt to towers in turn: how
    they are grouped hardly changes what is sent. Everything else is as in the config, so like stands beside like. A
    model of the user's own (``model.factory``) has no alternatives: overrides say what it is in towers and without.
    """
    predictions = []
    for name, settings in _ways(run) if run.config.model.factory is None else ():
        overrides = [f"{key}={json.dumps(value).strip(chr(34))}" for key, value in settings.items()]
        job = make_job(changed_config(run.config, settings), run.tables, run.num_dense)
        predictions.append(predict_step(job, cluster, name, overrides))
    # Of equally fast ones, but for rounding, that which changes the model less.
    return sorted(predictions, key=lambda prediction: (round(prediction.seconds, 7), prediction.compression_ratio))


def _ways(run: Job) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and settings of each alternative."""
    family, topology = "dcn" if "dcn" in run.config.model.arch else "dlrm", run.topology
    hosts, size = topology.num_hosts, topology.host_size
    num_features = len(feature_names(run.tables))
    towers = max(number for number in range(1, hosts + 1) if hosts % number == 0 and number <= num_features)

    def shape(num_towers: int) -> dict[str, Any]:
        sizes = {"num_towers": num_towers, "ranks_per_tower": hosts * size // num_towers, "ranks_per_host": size}
        return {f"topology.{name}": number for name, number in {**sizes, "num_replicas": 1}.items()}

    in_towers = {"sharding.dataflow": "sptt", **shape(towers)}
    if hosts > 1:
        in_towers["train.dense_reduce"] = "hierarchical"
    yield _FLAT, {"model.arch": family, "sharding.dataflow": "flat", **shape(hosts)}
    yield "SPTT, same model", {"model.arch": family, **in_towers}
    columns = max(table.embedding_dim for table in run.tables)
    for ratio in _RATIOS:
        if columns % ratio == 0:
            compressed = {"model.arch": f"dmt-{family}", "model.tower_dim": columns // ratio}
            yield f"towers, ratio {ratio}", {**compressed, **in_towers}


def changed_config(config: TrainingConfig, settings: Mapping[str, Any]) -> TrainingConfig:
    """The config with these settings, and without what is about its own towers and tables."""
    own, values = config.model_dump(mode="json", exclude_none=True), {}
    for section, keys in _KEPT.items():
        values[section] = {key: value for key, value in own[section].items() if keys is None or key in keys}
    if settings["sharding.dataflow"] == "flat":
        del values["train"]["micro_batches"]
    for key, value in settings.items():
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = value
    return TrainingConfig.model_validate(values)


def _not_counted(config: TrainingConfig) -> list[str]:
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


def run_what_if(config: str, overrides: Sequence[str], *, cluster: str, uplink: float | None = None) -> Shown:
    """Predicts a step of a run, and of its alternatives, on a cluster file or a shipped cluster.

    Args:
        config: the run; tables in towers are placed by the cluster's rates.
        overrides: settings.
        cluster: file or name.
        uplink: 10^9 bits per second that a host sends to others, in place of the cluster's.

    Raises:
        InputError: the config, its data or the cluster cannot be read; hosts have another number of ranks than the
            cluster's; or the tables cannot be placed.
    """
    described = load_cluster(cluster)
    described = described if uplink is None else described.with_uplink(uplink)
    run = load_config(config, [*overrides, to_override("sharding.cluster", cluster)])
    _check_hosts(run, described, is_given=uplink is not None)
    job = open_job(run)
    if run.data.tables is not None:
        # A list of tables has no dense columns, but models read some.
        job = replace(job, num_dense=run.data.synthetic.num_dense)
    predictions = [predict_step(job, described), *alternatives(job, described)]
    own, *ways = (prediction._asdict() for prediction in predictions)
    record = {"cluster": asdict(described), "not_counted": _not_counted(run), "own": own, "alternatives": ways}
    topology, rate = job.topology, 8e-9 * described.exchange.uplink_bytes_per_s
    title = (
        f"{topology.num_hosts} hosts x {topology.host_size} ranks, {run.train.batch_size:,} samples a rank, "
        f"on {described.name}: {rate:,.4g} Gbit/s from a host to others ({rate / topology.host_size:,.4g} a rank)"
    )
    return _show(record, title)


def _check_hosts(run: TrainingConfig, cluster: Cluster, *, is_given: bool) -> None:
    topology = run.topology.build()
    if topology.host_size != cluster.ranks_per_host:
        raise InputError(
            f"Hosts of the run have {topology.host_size} ranks, those of cluster {cluster.name!r} have "
            f"{cluster.ranks_per_host}, for which its rates are. Set topology.ranks_per_host={cluster.ranks_per_host}."
        )
    if cluster.hosts == 1 < topology.num_hosts and not is_given:
        raise InputError(
            f"Cluster {cluster.name!r} was measured on one host, which tells nothing of the links between the "
            f"{topology.num_hosts} hosts of the run. Give their rate: --uplink-gbit-per-s."
        )


def _show(record: dict[str, Any], title: str) -> Shown:
    """Shows the run's own step and the alternatives: all in one row where they are equally fast."""
    own, ways, left_out = record["own"], record["alternatives"], record["not_counted"]
    flat = next((way["seconds"] for way in ways if way["name"] == _FLAT), math.nan)
    is_tie = bool(ways) and ways[-1]["seconds"] - ways[0]["seconds"] < 1e-7
    rows = []
    for way in [own, *([{**ways[0], "name": "every way to train"}] if is_tie else ways)]:
        seconds, spent = way["seconds"], way["exposed"]
        exposed = f"{1 - (spent['compute'] + spent['program']) / seconds:.0%}"
        numbers = f"{1e3 * seconds:,.1f} ms", f"{way['samples_per_s']:,.0f}", f"{flat / seconds:.2f}"
        rows.append((way["name"], *numbers, human_bytes(way["uplink_bytes"]), exposed))
    lines = [f"This config is predicted as if it had not {', '.join(left_out)}."] if left_out else []
    lines.append("Busiest host: that of the towers with the most columns. Exposed: waiting for exchanges only.")
    lines += [f"The fastest: {' '.join(ways[0]['overrides'])}"] if ways else []
    lines += ["All are bound by the program (step_s): a larger batch would tell them apart."] if is_tie else []
    headers = ["", "step", "samples/s", "x flat", "busiest host sends", "exposed"]
    return Shown(record, headers, rows, title, range(1, len(headers)), lines)
