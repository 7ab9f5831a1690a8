"""``dmt what-if``: what a step of a run would take on a described cluster, and what the alternatives would."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np

from dmt.errors import InputError
from dmt.files import write_or_raise
from dmt.formatting import human_bytes
from dmt.plan.tables import NUMBER_BYTES, feature_names
from dmt.simulator.cluster import Cluster, load_cluster
from dmt.simulator.steps import ModelWork, Timeline, simulate, step_operations
from dmt.simulator.work import Inputs, Workload, count_operators, step_work
from dmt.sptt.rows import part_sizes
from dmt.sptt.unique import distinct_inputs
from dmt.training.build import build_model
from dmt.training.commands.plan import placed_by, placement_rates
from dmt.training.config import SHARDING_OF_TOWERS, SHARDING_RATES, TrainingConfig, to_toml
from dmt.training.console import make_table, table_console
from dmt.training.factory import without_tables
from dmt.training.job import Job, make_job, open_job

__all__ = [
    "Alternative",
    "Prediction",
    "alternatives",
    "changed_config",
    "count",
    "first_batches",
    "inputs_of",
    "predict_step",
    "print_what_if",
    "run_what_if",
    "workload_of",
]

_RATIOS = (2, 4, 16)
_MICRO_BATCHES = (1, 4)
_FLAT = "flat (TorchRec)"
_COUNTED_RANKS = 8  # whose first batch is read
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

    def to_record(self) -> dict[str, Any]:
        """Returns the numbers as JSON writes them."""
        seconds, exposed = self.timeline.seconds, self.timeline.exposed
        numbers = {"samples_per_s": self.samples_per_s, "uplink_bytes": self.uplink_bytes}
        return {"seconds": seconds, **numbers, "exposed": exposed}


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another way to train the same tables."""

    name: str
    settings: Mapping[str, Any]
    """Values of the keys, ``section.key``, that make it of the config."""
    ratio: float
    """Compression ratio; 1.0 where the model computes what the flat one does."""
    prediction: Prediction

    @property
    def is_flat(self) -> bool:
        """True for TorchRec's dataflow."""
        return self.name == _FLAT

    @property
    def exchange(self) -> str:
        """Format of numbers between towers, or between all ranks."""
        return str(self.settings["sharding.forward_precision"])

    @property
    def overrides(self) -> list[str]:
        """The settings as the command line has them."""
        shown = {key: json.dumps(value).strip('"') for key, value in self.settings.items()}
        return [f"{key}={value}" for key, value in shown.items()]

    def to_record(self) -> dict[str, Any]:
        """Returns the numbers as JSON writes them."""
        about: dict[str, Any] = {"name": self.name, "exchange": self.exchange}
        about |= {"micro_batches": self.settings.get("train.micro_batches", 1), "compression_ratio": self.ratio}
        return {**about, "overrides": self.overrides, **self.prediction.to_record()}


def count(job: Job) -> ModelWork:
    """Builds a job's model on the meta device and counts it."""
    return count_operators(without_tables(build_model(job, device="meta")), job.num_dense)


def workload_of(job: Job, inputs: Sequence[Inputs] = ()) -> Workload:
    """Returns what the bytes of a job's step depend on; ``inputs`` are distinct ones that are sent once."""
    own, train, is_flat = job.config.sharding, job.config.train, job.sharding is None
    tables = job.tables if is_flat else job.split_tables
    assert is_flat or job.towers is not None, "a sharding plan is made for towers"
    return Workload(
        topology=job.topology,
        tables=tables,
        towers=[feature_names(tables)] if job.towers is None or is_flat else job.towers.to_lists(),
        sharding=job.sharding,
        batch_size=train.batch_size,
        pooling=own.pooling_factors,
        number_bytes=(NUMBER_BYTES[own.forward_precision], NUMBER_BYTES[own.backward_precision]),
        is_table_wise=own.scheme == "table_wise",
        is_global_route=own.id_route == "global",
        is_hierarchical=train.dense_reduce == "hierarchical",
        sync_every=job.config.replicas.sync_every,
        inputs=inputs,
    )


def inputs_of(job: Job, batches: Sequence[Any]) -> list[Inputs]:
    """Counts the distinct inputs of each tower in the ids of some ranks; of a flat model, of each feature."""
    assert job.towers is not None, "the flat dataflow has no towers"
    towers = [(tower, tuple(names)) for tower, names in enumerate(job.towers.to_lists())]
    groups = towers if job.config.model.has_towers else [(tower, (name,)) for tower, names in towers for name in names]
    order, parts = [name for _, names in groups for name in names], job.config.train.micro_batches
    rows_KG, ids_F = np.zeros((parts, len(groups))), np.zeros(len(order))
    for ids in batches:
        ordered = ids.permute([ids.keys().index(name) for name in order])
        cuts = part_sizes(ids.stride(), parts)
        sent, distinct = distinct_inputs(ordered, [len(names) for _, names in groups], cuts=cuts)
        rows_KG += np.array(distinct.parts) / len(batches)
        ids_F += np.array(sent.length_per_key()).reshape(len(order), parts).sum(axis=1) / len(batches)
    found, numbers = [], iter(ids_F.tolist())
    for (tower, names), rows in zip(groups, rows_KG.T.tolist(), strict=True):
        shares = tuple(row / max(sum(rows), 1) for row in rows)
        found.append(Inputs(tower, names, sum(rows), tuple(islice(numbers, len(names))), shares))
    return found


def first_batches(job: Job) -> list[Any]:
    """Returns the ids in the first global batch of some ranks; none without data, or where tables are cut."""
    if job.source is None or (job.towers is not None and job.towers.column_splits):
        return []
    size, world = job.config.train.batch_size, job.topology.world_size
    batches = job.data.batches("train", rank=0, world_size=1, batch_size=size)
    return [batch.sparse_features for batch in islice(batches, min(world, _COUNTED_RANKS))]


def predict_step(
    job: Job, cluster: Cluster, model: ModelWork | None = None, inputs: Sequence[Inputs] = ()
) -> Prediction:
    """Predicts one training step of a job on a cluster.

    Args:
        job: the run; its topology may be of another size than the cluster that was measured.
        cluster: speed of its ranks and links.
        model: its operators, where they are counted already.
        inputs: distinct inputs of a job that sends each once (``sharding.unique``).
    """
    train = job.config.train
    work = step_work(workload_of(job, inputs), model or count(job))
    operations = step_operations(
        work,
        cluster,
        job.topology,
        flat=job.sharding is None,
        micro_batches=train.micro_batches,
        prefetch=train.prefetch_ids,
        hierarchical=train.dense_reduce == "hierarchical",
    )
    timeline = simulate(operations)
    samples = train.batch_size * job.topology.world_size
    return Prediction(timeline=timeline, uplink_bytes=work.uplink_bytes, samples_per_s=samples / timeline.seconds)


def alternatives(own: Job, cluster: Cluster, batches: Sequence[Any] = ()) -> list[Alternative]:
    """Predicts a step flat, in towers, and compressed by them, with 32 and 16 bits between them; fastest first.

    A tower is a host (several where there are more hosts than features), and features are dealt to towers in turn: how
    they are grouped hardly changes what is sent. Of the config they keep tables, batch, layers (of ``model.factory``
    the whole model, in towers only if the config has it so) and optimizers, and of the section sharding what is said of
    the machine; everything else is as by default. Each has the number of micro-batches in which it is fastest.

    Args:
        own: the run.
        cluster: speed of its ranks and links.
        batches: ids of some ranks; with some, towers with unique inputs are among the alternatives.
    """
    found: list[Alternative] = []
    placed: dict[str, Job] = {}
    for name, way in _ways(own):
        config = changed_config(own.config, way, cluster)
        if config.dataflow not in placed:
            placed[config.dataflow] = make_job(config, own.tables, own.num_dense)
        job = replace(placed[config.dataflow], config=config)
        try:
            model = count(job)
        except Exception:
            # The user's function may fail in any way where it is given towers=None.
            if job.config.model.in_towers or not own.config.model.in_towers:
                raise
            continue
        columns = sum(table.embedding_dim * len(table.feature_names) for table in job.split_tables)
        ratio = columns / sum(model.widths) if model.widths else 1.0
        is_flat = config.dataflow == "flat"
        for unique, parts, number in product((False, True), _MICRO_BATCHES, ("fp32", "fp16")):
            if (is_flat and parts > 1) or (unique and (is_flat or not batches)):
                continue
            formats = {"sharding.forward_precision": number, "sharding.backward_precision": number}
            options = {} if is_flat else {"train.micro_batches": parts}
            options |= {"sharding.unique": True} if unique else {}
            settings = {**way, **formats, **options}
            run = replace(job, config=changed_config(own.config, settings, cluster))
            prediction = predict_step(run, cluster, model, inputs_of(run, batches) if unique else [])
            full = (f"{name}, ratio {ratio:.3g}" if model.widths else name) + (", unique inputs" if unique else "")
            found.append(Alternative(name=full, settings=settings, ratio=ratio, prediction=prediction))
    # Of equally fast ones, but for rounding, that which changes the model less, and then the settings.
    found.sort(key=lambda one: (round(one.prediction.timeline.seconds, 7), one.ratio, len(one.settings)))
    fastest: dict[tuple[str, str], Alternative] = {}
    for one in found:
        fastest.setdefault((one.name, one.exchange), one)
    return list(fastest.values())


def _ways(own: Job) -> Iterator[tuple[str, dict[str, Any]]]:
    """Settings of the model, its dataflow and the topology: flat, the same model in towers, and several ratios."""
    model, topology = own.config.model, own.config.topology.build()
    hosts, size = topology.num_hosts, topology.host_size
    family = "dcn" if "dcn" in model.arch else "dlrm"
    num_features = len(feature_names(own.tables))
    towers = max(number for number in range(1, hosts + 1) if hosts % number == 0 and number <= num_features)

    def shape(num_towers: int) -> dict[str, Any]:
        sizes = {"num_towers": num_towers, "ranks_per_tower": hosts * size // num_towers, "ranks_per_host": size}
        return {f"topology.{name}": number for name, number in {**sizes, "num_replicas": 1}.items()}

    # A model of the user's own stays what it is: its towers have the outputs that they have.
    plain = {"model.arch": family} if model.factory is None else {"model.in_towers": False}
    over_towers = {"sharding.dataflow": "sptt", **shape(towers)}
    if hosts > 1:
        over_towers["train.dense_reduce"] = "hierarchical"
    yield _FLAT, {**plain, "sharding.dataflow": "flat", **shape(hosts)}
    yield "SPTT, same model", {**plain, **over_towers}
    if model.factory is not None and model.in_towers:
        yield "towers", {"model.in_towers": True, **over_towers}
    columns = max(table.embedding_dim for table in own.tables)
    for ratio in _RATIOS if model.factory is None else ():
        if columns % ratio == 0:
            tower_module = {"model.arch": f"dmt-{family}", "model.tower_dim": columns // ratio}
            yield "towers", {**tower_module, **over_towers}


def changed_config(config: TrainingConfig, settings: Mapping[str, Any], cluster: Cluster) -> TrainingConfig:
    """The config with these settings, and with what concerns the dataflow as by default.

    Towers that a flat config gets are placed by the rates of the cluster; it has none of its own.
    """
    values = config.model_dump(mode="json", exclude_none=True)
    for section in ("towers", "replicas", "hot_rows", "topology"):
        values.pop(section, None)
    for name in ("micro_batches", "dense_reduce", "dense_reduce_precision"):
        values["train"].pop(name, None)
    is_flat = settings["sharding.dataflow"] == "flat"
    kept = [name for name in _KEPT if not is_flat or name not in SHARDING_OF_TOWERS]
    values["sharding"] = {name: value for name, value in values["sharding"].items() if name in kept}
    rates = placement_rates(cluster) if config.dataflow == "flat" and not is_flat else {}
    for key, value in {**rates, **settings}.items():
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = value
    return TrainingConfig.model_validate(values)


def not_counted(config: TrainingConfig, *, has_data: bool) -> list[str]:
    """Returns the settings of a run that `predict_step` does not know, and predicts as if they were not there."""
    own, train, is_flat = config.sharding, config.train, config.dataflow == "flat"
    wrong = {
        f"sharding.scheme={own.scheme!r}": is_flat and own.scheme not in ("auto", "table_wise", "column_wise"),
        f"topology.num_replicas={config.topology.num_replicas}": is_flat and config.topology.num_replicas > 1,
        f"train.dense_reduce={train.dense_reduce!r}": is_flat and train.dense_reduce != "ring",
        "sharding.unique=true": own.unique and not has_data,
        f"hot_rows.extra_memory={config.hot_rows.extra_memory}": config.hot_rows.extra_memory > 0,
        "tables in host memory or on SSDs": bool(own.kernels),
        f"the state of optimizer.sparse={config.optimizer.sparse!r}": config.optimizer.sparse in ("adagrad", "adam"),
    }
    return [what for what, is_wrong in wrong.items() if is_wrong]


def run_what_if(
    config: str, overrides: Sequence[str], *, cluster: str, uplink: float | None = None, write: Path | None = None
) -> dict[str, Any]:
    """Predicts a step of a run, and of its alternatives, on a cluster file or a shipped cluster.

    Args:
        config: the run; tables are placed by the cluster's rates, but for what ``overrides`` say.
        overrides: settings.
        cluster: file or name.
        uplink: 10^9 bits per second that a host sends to others, in place of the cluster's.
        write: file for the config of the fastest alternative.

    Returns:
        The cluster, the run's own prediction, those of the alternatives, fastest first, and what to know of them.

    Raises:
        InputError: the config, its data or the cluster cannot be read; hosts have another number of ranks than the
            cluster's; or the tables cannot be placed.
    """
    described = load_cluster(cluster)
    if uplink is not None:
        described = described.with_uplink(uplink)
    run = placed_by(described, config, overrides)
    _check_hosts(run, described, is_given=uplink is not None)
    job = open_job(run)
    if run.data.tables is not None:
        # A list of tables has no dense columns, but models read some.
        job = replace(job, num_dense=run.data.synthetic.num_dense)
    batches = first_batches(job)
    inputs = inputs_of(job, batches) if batches and run.sharding.unique and not run.hot_rows.extra_memory else []
    own, found = predict_step(job, described, inputs=inputs), alternatives(job, described, batches)
    if write is not None:
        with write_or_raise(write, "Config") as part:
            part.write_text(to_toml(changed_config(run, found[0].settings, described)), encoding="utf-8")
    topology, rate = job.topology, 8e-9 * described.exchange.uplink_bytes_per_s
    left_out = not_counted(run, has_data=bool(inputs))
    return {
        "title": f"{topology.num_hosts} hosts x {topology.host_size} ranks, {run.train.batch_size:,} samples a rank, "
        f"on {described.name}: {rate:,.4g} Gbit/s from a host to others ({rate / topology.host_size:,.4g} a rank)",
        "cluster": asdict(described),
        "own": {
            "exchange": run.sharding.forward_precision,
            "micro_batches": run.train.micro_batches,
            **own.to_record(),
        },
        "not_counted": left_out,
        "alternatives": [one.to_record() for one in found],
        "notes": list(_notes(run, found, left_out)),
    }


def _check_hosts(run: TrainingConfig, cluster: Cluster, *, is_given: bool) -> None:
    topology = run.topology.build()
    if topology.host_size != cluster.ranks_per_host:
        raise InputError(
            f"Hosts of the run have {topology.host_size} ranks, those of cluster {cluster.name!r} have "
            f"{cluster.ranks_per_host}, for which its rates are. Set topology.ranks_per_host={cluster.ranks_per_host} "
            "and as many towers and ranks as it takes, or measure such hosts with `dmt bench-comms`."
        )
    if cluster.hosts == 1 < topology.num_hosts and not is_given:
        raise InputError(
            f"Cluster {cluster.name!r} was measured on one host, which tells nothing of the links between the "
            f"{topology.num_hosts} hosts of the run. Measure two hosts or more with `dmt bench-comms`, or give the "
            "rate: --uplink-gbit-per-s."
        )


def _notes(run: TrainingConfig, found: Sequence[Alternative], left_out: Sequence[str]) -> Iterator[str]:
    yield (
        "exposed: the share of the step in which a rank only waits for exchanges. busiest host: that of the towers "
        "with the most columns. Towers with a ratio above 1 compute another model than the flat one: see "
        "docs/quality.md. Left out: hot rows, and the reading of data. Measure the best two before you choose."
    )
    if run.data.tables is not None:
        number = run.data.synthetic.num_dense
        yield f"{number} dense columns are assumed beside the tables; set data.synthetic.num_dense for others."
    if left_out:
        yield f"This config is predicted as if it had not {', '.join(left_out)}."
    if run.model.factory is not None:
        yield f"{run.model.chosen} decides what its towers send, so no other ratio was tried."
        if not run.model.in_towers:
            yield "Set model.in_towers=true to see its towers."
        elif not any(one.is_flat for one in found):
            yield "It makes no model without towers; model.in_towers=false says why."
    if found[0].prediction.timeline.exposed["program"] > 0:
        yield "The fastest ones are bound by the program (step_s): a larger batch would tell them apart."
    yield f"The fastest: {' '.join(found[0].overrides)}"
    yield (
        "With these, leave out what else the config has in [towers], [replicas], [hot_rows] and of exchanges in "
        "[sharding], or let --write do that."
    )


def print_what_if(record: Mapping[str, Any]) -> None:
    """Prints the run's own step, the alternatives, and how to choose one."""
    console, found = table_console(markup=False), record["alternatives"]
    # Like beside like: towers in FP16 beside the flat model in FP16. A factory of models in towers may make none.
    flat = {one["exchange"]: one["seconds"] for one in found if one["name"] == _FLAT}
    shown = [{"name": "this config", **record["own"]}, *found]
    if found[-1]["seconds"] - found[0]["seconds"] < 1e-7:
        shown[1:] = [{**found[0], "name": "every way to train", "exchange": "any", "micro_batches": "any"}]
    rows = []
    for one in shown:
        seconds, spent = one["seconds"], one["exposed"]
        faster = f"{flat[one['exchange']] / seconds:.2f}" if one["exchange"] in flat else ""
        exposed = f"{1 - (spent['compute'] + spent['program']) / seconds:.0%}"
        numbers = f"{1e3 * seconds:,.1f} ms", f"{one['samples_per_s']:,.0f}", faster, human_bytes(one["uplink_bytes"])
        rows.append((one["name"], one["exchange"], str(one["micro_batches"]), *numbers, exposed))
    headers = ["", "exchange", "micro-batches", "step", "samples/s", "x flat, same exchange", "busiest host sends"]
    console.print(make_table([*headers, "exposed"], rows, title=record["title"]))
    for line in record["notes"]:
        console.print(line, soft_wrap=True)
