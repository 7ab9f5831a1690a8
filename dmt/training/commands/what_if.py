"""``dmt what-if``: what a step of a run would take on a described cluster, and what the alternatives would."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from dmt.errors import InputError
from dmt.formatting import human_bytes, shorten
from dmt.plan.tables import TableSpec, feature_names
from dmt.plan.topology import TowerTopology
from dmt.simulator.cluster import Cluster, load_cluster
from dmt.simulator.steps import ModelWork
from dmt.training.commands import Shown
from dmt.training.config import TrainingConfig, load_config, to_override
from dmt.training.job import Job, make_job, open_job
from dmt.training.predict import Prediction, check_hosts, not_counted, predict_step

__all__ = ["alternatives", "changed_config", "run_what_if"]

_RATIOS = (2, 4, 16)
_FLAT = "flat (TorchRec)"
# What alternatives take over from a config, whole sections or keys of them; the rest is about its own towers.
_SHARDING = "memory_gib cluster pooling_factors forward_precision backward_precision table_precision"
_KEPT: dict[str, Any] = {
    **{"data": True, "model": True, "optimizer": True, "sharding": set(_SHARDING.split()), "replicas": {"sync_every"}},
    "train": {"batch_size", "prefetch_ids", "micro_batches", "device"},
}


def alternatives(run: Job, cluster: Cluster) -> tuple[list[Prediction], list[str]]:
    """Predicts a step of the flat model, of the same model in towers, and of towers that compress, by replicas.

    A tower is a host (several where there are more hosts than features), and features are dealt to towers in turn: how
    they are grouped hardly changes what is sent. Everything else is as in the config. A model of the user's own
    (``model.factory``) has no alternatives: overrides of the config compare it flat and in towers.

    Returns:
        The predictions, fastest first, and the names of those that do not fit ``sharding.memory_gib``.

    Raises:
        InputError: the tables fit in none of them.
    """
    predictions: list[Prediction] = []
    left_out: list[str] = []
    counted: dict[str, ModelWork] = {}
    reason, limit, tables = None, run.config.sharding.rank_memory, _plain_tables(run)
    for name, settings in _ways(run) if run.config.model.factory is None else ():
        keys = [(f"{section}.{key}", value) for section, own in settings.items() for key, value in own.items()]
        overrides = [f"{key}={json.dumps(value).strip(chr(34))}" for key, value in keys]
        try:
            job = make_job(changed_config(run.config, settings), tables, run.num_dense)
        except InputError as error:
            if limit is None:
                raise
            left_out.append(name)
            reason = reason or error
            continue
        prediction = predict_step(job, cluster, counted)._replace(name=name, overrides=overrides)
        if limit is not None and prediction.rank_bytes > limit:
            left_out.append(name)
        else:
            predictions.append(prediction)
    if reason is not None and not predictions:
        raise reason
    # Of equally fast ones, but for rounding, that which changes the model less, and needs less memory.
    predictions.sort(key=lambda way: (round(way.seconds, 7), way.compression_ratio, way.num_replicas))
    return predictions, left_out


def _plain_tables(run: Job) -> list[TableSpec]:
    """Returns the tables as a model without features outside towers has them: with all columns, bags as bags."""
    model, outside = run.config.model, () if run.towers is None else run.towers.outside_tables(run.tables)
    return [
        replace(
            table,
            embedding_dim=model.embedding_dim
            if table in outside and table.embedding_dim == model.outside_dim
            else table.embedding_dim,
            is_sequence=bool(table.sequences),
        )
        for table in run.tables
    ]


def _ways(run: Job) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """Name and settings of each alternative, by section."""
    family, num_hosts = "dcn" if "dcn" in run.config.model.arch else "dlrm", run.topology.num_hosts
    columns, num_features = max(table.embedding_dim for table in _plain_tables(run)), len(feature_names(run.tables))
    # Over towers a flat model's sequences would be compressed by nothing: it is refused.
    has_sequences = any(table.sequences for table in run.tables)
    models: dict[str, dict[str, Any]] = {} if has_sequences else {"SPTT, same model": {"arch": family}}
    for ratio in _RATIOS:
        if columns % ratio == 0:
            models[f"towers, ratio {ratio}"] = {"arch": f"dmt-{family}", "tower_dim": columns // ratio}
    reduced = {"train": {"dense_reduce": "hierarchical"}} if num_hosts > 1 else {}
    for replicas, placement in _replicas(run.topology):
        hosts, size = num_hosts, run.topology.host_size
        mesh = {"num_replicas": replicas, "replica_placement": placement, "ranks_per_host": size}
        hosts, size = (hosts // replicas, size) if placement == "inter_host" else (hosts, size // replicas)
        suffix = f", {replicas} replicas ({placement})" if replicas > 1 else ""
        number = max(number for number in range(1, hosts + 1) if hosts % number == 0 and number <= num_features)
        shapes = {
            towers: {"num_towers": towers, "ranks_per_tower": hosts * size // towers, **mesh}
            for towers in (hosts, 1, number)
        }
        flat = {"model": {"arch": family}}
        if replicas == 1:
            yield _FLAT, {**flat, "sharding": {"dataflow": "flat"}, "topology": shapes[hosts]}
        if (number > 1 or replicas > 1) and not has_sequences:
            # As the trainer has replicas of a flat model: all ranks of a replica are one tower.
            yield f"flat (one tower){suffix}", {**flat, "sharding": {"dataflow": "sptt"}, "topology": shapes[1]}
        for name, model in models.items() if number > 1 or replicas == 1 else ():
            yield (
                name + suffix,
                {"model": model, "sharding": {"dataflow": "sptt"}, "topology": shapes[number], **reduced},
            )


def _replicas(topology: TowerTopology) -> list[tuple[int, str]]:
    """Numbers of replicas for the hosts of a run: of whole hosts each, or all of them on each host."""
    between = [number for number in range(1, topology.num_hosts + 1) if topology.num_hosts % number == 0]
    inside = [number for number in range(2, topology.host_size + 1) if topology.host_size % number == 0]
    return [*((number, "inter_host") for number in between), *((number, "intra_host") for number in inside)]


def changed_config(config: TrainingConfig, settings: Mapping[str, Mapping[str, Any]]) -> TrainingConfig:
    """Returns the config with these settings by section, without those about its own towers and tables."""
    values = config.model_dump(mode="json", exclude_none=True, include=_KEPT)
    if settings["sharding"]["dataflow"] == "flat":
        del values["train"]["micro_batches"]
    for section, changed in settings.items():
        values[section] = {**values.get(section, {}), **changed}
    return TrainingConfig.model_validate(values)


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
    check_hosts(run, described, is_given=uplink is not None)
    job = open_job(run)
    own = predict_step(job, described)
    ways, left_out = alternatives(job, described)
    record: dict[str, Any] = {"cluster": asdict(described), "not_counted": not_counted(run), "own": own._asdict()}
    record |= {"alternatives": [way._asdict() for way in ways], "left_out": left_out}
    record["measured_ranks"] = max(described.all_reduce.uplink_by_ranks, default=None)
    topology, rate = job.topology, 8e-9 * described.exchange.uplink_bytes_per_s
    title = (
        f"{topology.num_hosts} hosts x {topology.host_size} ranks, {run.train.batch_size:,} samples a rank, "
        f"on {described.name}: {rate:,.4g} Gbit/s from a host to others ({rate / topology.host_size:,.4g} a rank)"
    )
    return _show(record, title, own, ways, topology.world_size)


def _show(record: dict[str, Any], title: str, own: Prediction, ways: Sequence[Prediction], num_ranks: int) -> Shown:
    """Shows the run's own step and the alternatives: each without replicas and with the best number of them.

    All are in one row where they are equally fast.
    """
    flat = next((way.seconds for way in ways if way.name == _FLAT), math.nan)
    is_tie = bool(ways) and ways[-1].seconds - ways[0].seconds < 1e-7
    best: dict[tuple[str, bool], Prediction] = {}
    for way in ways:
        best.setdefault((way.name.partition(",")[0] + str(way.compression_ratio), way.num_replicas > 1), way)
    rows = []
    for way in [own, *([ways[0]._replace(name="every way to train")] if is_tie else best.values())]:
        exposed = f"{1 - (way.exposed['compute'] + way.exposed['program']) / way.seconds:.0%}"
        step, faster = f"{1e3 * way.seconds:,.1f} ms", f"{flat / way.seconds:.2f}".replace("nan", "-")
        numbers = step, f"{way.samples_per_s:,.0f}", faster
        rows.append((way.name, *numbers, human_bytes(way.uplink_bytes), exposed, human_bytes(way.rank_bytes)))
    wrong = ", ".join(record["not_counted"])
    lines = [f"This config is predicted as if it had not {wrong}."] if wrong else []
    lines.append("Busiest host: that of the towers with the most columns. Exposed: waiting for exchanges only.")
    if record["left_out"]:
        lines.append(f"Left out, for sharding.memory_gib: {shorten(record['left_out'], '; ')}.")
    if (measured := record["measured_ranks"]) is not None and measured < num_ranks:
        lines.append(f"Groups of more than {measured} ranks, the largest measured, are predicted at the rate of those.")
    lines += [f"The fastest: {' '.join(ways[0].overrides)}"] if ways else []
    lines += ["All are bound by the program (step_s): a larger batch would tell them apart."] if is_tie else []
    headers = ["", "step", "samples/s", "x flat", "busiest host sends", "exposed", "fullest rank"]
    return Shown(record, headers, rows, title, range(1, len(headers)), lines)
