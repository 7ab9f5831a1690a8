"""``dmt what-if``: what a step of a run would take on a described cluster, and what the alternatives would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from dmt.errors import InputError
from dmt.files import write_or_raise
from dmt.formatting import human_bytes
from dmt.number_formats import NUMBER_FORMATS
from dmt.plan.tables import TableSpec, feature_names
from dmt.simulator.cluster import Cluster, load_cluster
from dmt.simulator.steps import Timeline, simulate, step_operations
from dmt.simulator.work import Inputs, ModelWork, Workload, count_inputs, count_operators, step_work
from dmt.training.build import build_model
from dmt.training.commands.outputs import check_output_files, files_of_config
from dmt.training.commands.plan import placement_rates
from dmt.training.config import SHARDING_OF_TOWERS, SHARDING_RATES, TrainingConfig, load_config, to_toml
from dmt.training.console import make_table, table_console
from dmt.training.job import Job, make_job, open_job

__all__ = [
    "Alternative",
    "Prediction",
    "WhatIf",
    "alternatives",
    "changed_config",
    "count",
    "inputs_of",
    "predict_step",
    "run_what_if",
    "workload_of",
]

_RATIOS = (2, 4, 8, 16)
_MICRO_BATCHES = (1, 4, 8)
_FLAGS = {"true": True, "false": False}
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

    overrides: tuple[str, ...]
    """Settings that make it of the config, as ``section.key=value``."""
    ratio: float
    """Compression ratio; 1.0 where the model computes what the flat one does."""
    prediction: Prediction

    def value(self, key: str) -> str:
        """The value of an override by the last part of its name; empty where there is none."""
        values = {o.partition("=")[0].rpartition(".")[2]: o.partition("=")[2] for o in self.overrides}
        return values.get(key, "")

    @property
    def way(self) -> str:
        """``flat``, ``sptt`` (the flat model over towers) or ``towers``."""
        in_towers = self.value("tower_dim") or self.value("in_towers") == "true"
        return "towers" if in_towers else self.value("dataflow")


def count(job: Job) -> ModelWork:
    """Builds a job's model on the meta device and counts it."""
    return count_operators(build_model(job, device="meta", without_tables=True), job.num_dense)


def workload_of(job: Job, inputs: Sequence[Inputs] = ()) -> Workload:
    """Returns what the bytes of a job's step depend on; ``inputs`` are distinct ones that are sent once."""
    own, train, is_flat = job.config.sharding, job.config.train, job.sharding is None
    tables = job.tables if is_flat else job.split_tables
    assert is_flat or job.towers is not None, "a sharding plan is made for towers"
    formats = (own.forward_precision, own.backward_precision)
    return Workload(
        topology=job.topology,
        tables=tables,
        towers=[feature_names(tables)] if job.towers is None or is_flat else job.towers.to_lists(),
        sharding=job.sharding,
        batch_size=train.batch_size,
        pooling=own.pooling_factors,
        number_bytes=(NUMBER_FORMATS[formats[0]].num_bytes, NUMBER_FORMATS[formats[1]].num_bytes),
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
    bags = [{name: (own.lengths(), own.values()) for name, own in ids.to_dict().items()} for ids in batches]
    return count_inputs(bags, groups, job.config.train.micro_batches)


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
    inputs are among them. Of the config they keep tables, batch, layers (of ``model.factory`` the whole model, in
    towers only if the config has it so) and optimizers, and of the section sharding what is said of the machine;
    everything else is as by default.

    Args:
        config: the run: its batch size, its dense parts, its ranks, and the hosts that its topology has.
        tables: the tables, uncut.
        num_dense: dense columns.
        cluster: speed of ranks and links.
        own: the job of the config, whose data are read.

    Raises:
        InputError: the tables cannot be placed.
    """
    found = []
    batches = [] if own is None else first_batches(own)
    reduce = ("train.dense_reduce=hierarchical",) if config.topology.build().num_hosts > 1 else ()

    jobs: dict[tuple[str, ...], Job] = {}
    for base, shape in _models(config, len(feature_names(tables)), max(table.embedding_dim for table in tables)):
        is_flat = "sharding.dataflow=flat" in base
        changed = changed_config(config, (*base, *shape), cluster)
        # Tables are placed once for all models of a dataflow and shape.
        key = (changed.dataflow, *shape)
        if key not in jobs:
            jobs[key] = make_job(changed, tables, num_dense)
        job = replace(jobs[key], config=changed)
        model = _count_or_none(job, config)
        if model is None:
            continue
        ratio = _ratio(job, model)
        for unique in [False] if is_flat or not batches else [False, True]:
            for parts in (1,) if is_flat else _MICRO_BATCHES:
                options = () if is_flat else (*reduce, f"train.micro_batches={parts}")
                options += ("sharding.unique=true",) if unique else ()
                way = replace(job, config=changed_config(config, (*base, *shape, *options), cluster))
                inputs = inputs_of(way, batches) if unique else []
                for name in ("fp32", "fp16"):
                    formats = (f"sharding.forward_precision={name}", f"sharding.backward_precision={name}")
                    overrides = (*base, *shape, *formats, *options)
                    way = replace(job, config=changed_config(config, overrides, cluster))
                    prediction = predict_step(way, cluster, model, inputs)
                    found.append(Alternative(overrides=overrides, ratio=ratio, prediction=prediction))
    # Of equally fast ones, but for rounding, that which changes the model less, and then the settings.
    return sorted(found, key=lambda one: (round(one.prediction.timeline.seconds, 7), one.ratio, len(one.overrides)))


def _ratio(job: Job, model: ModelWork) -> float:
    columns = sum(table.embedding_dim * len(table.feature_names) for table in job.split_tables)
    return columns / sum(model.widths) if model.widths else 1.0


def _count_or_none(job: Job, config: TrainingConfig) -> ModelWork | None:
    """Counts a model; None for the flat form of a factory that makes none."""
    if job.config.model.in_towers or not config.model.in_towers:
        return count(job)
    try:
        model = build_model(job, device="meta", without_tables=True)
    except Exception:  # the user's function, given towers=None, may fail in any way
        return None
    return count_operators(model, job.num_dense)


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
    rates = placement_rates(cluster) if config.dataflow == "flat" and not is_flat else []
    for override in (*rates, *overrides):
        key, _, value = override.partition("=")
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = int(value) if value.isdecimal() else _FLAGS.get(value, value)
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


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The result of ``dmt what-if``."""

    cluster: Cluster
    config: TrainingConfig
    own: Prediction
    """The run as its config has it."""
    left_out: list[str]
    """Its settings that the prediction does not know."""
    found: list[Alternative]
    """Fastest first."""

    def write(self, path: Path) -> None:
        """Writes the config of the fastest alternative."""
        with write_or_raise(path, "Config") as part:
            part.write_text(
                to_toml(changed_config(self.config, self.found[0].overrides, self.cluster)), encoding="utf-8"
            )

    def best(self) -> list[Alternative]:
        """The fastest of each way to train, number format, and with unique inputs or without, fastest first."""
        kept: dict[tuple[str, float, str, str], Alternative] = {}
        for one in self.found:
            kept.setdefault((one.way, one.ratio, one.value("forward_precision"), one.value("unique")), one)
        return list(kept.values())

    def to_record(self) -> dict[str, Any]:
        """Returns the numbers as JSON writes them."""
        return {
            "cluster": asdict(self.cluster),
            "own": self.own.to_record(),
            "not_counted": self.left_out,
            "alternatives": [
                {"overrides": a.overrides, "compression_ratio": a.ratio, **a.prediction.to_record()} for a in self.found
            ],
        }

    def print_out(self) -> None:
        """Prints the run's own step, the fastest of each way to train, and how to choose one."""
        console, topology, train = table_console(markup=False), self.config.topology.build(), self.config.train
        # Like beside like: towers in FP16 beside the flat model in FP16. A factory of models in towers may make none.
        flat = {
            one.value("forward_precision"): one.prediction.timeline.seconds
            for one in self.found[::-1]
            if one.way == "flat"
        }
        own = (self.config.sharding.forward_precision, str(topology.num_towers), str(train.micro_batches))
        rows = [("this config", *own, *_numbers(self.own, flat.get(own[0])))]
        best = self.best()
        seconds = [one.prediction.timeline.seconds for one in best]
        if max(seconds) - min(seconds) < 1e-7:
            rows.append(("every way to train", "any", "any", "any", *_numbers(best[0].prediction, seconds[0])))
            best = []
        for one in best:
            settings = [one.value(key) for key in ("forward_precision", "num_towers", "micro_batches")]
            rows.append((_name(one), *settings, *_numbers(one.prediction, flat.get(settings[0]))))
        headers = ["", "exchange", "towers", "micro-batches", "step", "samples/s"]
        headers += ["x flat, same exchange", "busiest host sends", "exposed"]
        rate = 8e-9 * self.cluster.exchange.uplink_bytes_per_s
        title = f"{topology.num_hosts} hosts x {topology.host_size} ranks, {train.batch_size:,} samples a rank, on "
        title += (
            f"{self.cluster.name}: {rate:,.4g} Gbit/s from a host to others ({rate / topology.host_size:,.4g} a rank)"
        )
        console.print(make_table(headers, rows, title=title))
        for line in self._notes(flat):
            console.print(line, soft_wrap=True)

    def _notes(self, flat: object) -> Iterator[str]:
        model, data = self.config.model, self.config.data
        yield (
            "exposed: the share of the step in which a rank only waits for exchanges. busiest host: that of the towers "
            "with the most columns; towers of equally many columns (dmt partition --balance-ratio 1, --split-columns "
            "even) send equally much. Towers with a ratio above 1 compute another model than the flat one; "
            "docs/quality.md shows what that costs. Left out: hot rows, and the reading of data. Inputs repeat as in "
            "the first batch. Measure the best two before you choose."
        )
        if data.tables is not None:
            number = data.synthetic.num_dense
            yield f"{number} dense columns are assumed beside the tables; set data.synthetic.num_dense for others."
        if self.left_out:
            yield f"This config is predicted as if it had not {', '.join(self.left_out)}."
        if model.factory is not None:
            yield f"{model.chosen} decides what its towers send, so no other ratio was tried."
            if not model.in_towers:
                yield "Set model.in_towers=true to see its towers."
            elif not flat:
                yield "It makes no model without towers; model.in_towers=false says why."
        if self.found[0].prediction.timeline.exposed["program"] > 0:
            yield "The fastest ones are bound by the program (step_s): a larger batch would tell them apart."
        yield f"The fastest: {' '.join(self.found[0].overrides)}"
        yield (
            "With these, leave out what else the config has in [towers], [replicas], [hot_rows] and of exchanges in "
            "[sharding]."
        )


def run_what_if(
    config: str, overrides: Sequence[str], *, cluster: str, uplink: float | None = None, write: Path | None = None
) -> WhatIf:
    """Predicts a step of a run, and of its alternatives, on a cluster file or a shipped cluster.

    Args:
        config: the run; tables are placed by the cluster's rates, but for what ``overrides`` say.
        overrides: settings.
        cluster: file or name.
        uplink: 10^9 bits per second that a host sends to others, in place of the cluster's.
        write: file for the config of the fastest alternative.

    Raises:
        InputError: the config, its data or the cluster cannot be read; hosts have another number of ranks than the
            cluster's; or the tables cannot be placed.
    """
    run, described = load_config(config, overrides), load_cluster(cluster)
    check_output_files({"--write": (write, "config")}, [config, cluster, *files_of_config(run)])
    if uplink is not None:
        described = described.with_uplink(uplink)
    if run.dataflow != "flat":
        run = load_config(config, [*placement_rates(described), *overrides])
    _check_hosts(run, described, is_given=uplink is not None)
    job = open_job(run)
    if run.data.tables is not None:
        # A list of tables has no dense columns, but models read some.
        job = replace(job, num_dense=run.data.synthetic.num_dense)
    batches = first_batches(job) if run.sharding.unique and not run.hot_rows.extra_memory else []
    found = WhatIf(
        cluster=described,
        config=run,
        own=predict_step(job, described, inputs=inputs_of(job, batches) if batches else []),
        left_out=not_counted(run, has_data=bool(batches)),
        found=alternatives(run, job.tables, job.num_dense, cluster=described, own=job),
    )
    if write is not None:
        found.write(write)
    return found


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


def _numbers(found: Prediction, flat: float | None) -> tuple[str, ...]:
    seconds, spent = found.timeline.seconds, found.timeline.exposed
    exposed = 1 - (spent["compute"] + spent["program"]) / seconds
    step, speed = f"{1e3 * seconds:,.1f} ms", f"{found.samples_per_s:,.0f}"
    faster = "" if flat is None else f"{flat / seconds:.2f}"
    return step, speed, faster, human_bytes(found.uplink_bytes), f"{exposed:.0%}"


def _name(one: Alternative) -> str:
    names = {"flat": "flat (TorchRec)", "sptt": "SPTT, same model"}
    name = names.get(one.way, f"towers, ratio {one.ratio:.3g}")
    return f"{name}, unique inputs" if one.value("unique") else name
