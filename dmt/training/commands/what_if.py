"""``dmt what-if``: what a step of a run would take on a described cluster, and what the alternatives would."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dmt.errors import InputError
from dmt.files import write_or_raise
from dmt.formatting import human_bytes
from dmt.report.style import add_title, dress_axes, new_figure, save_figure
from dmt.simulator.cluster import Cluster, load_cluster
from dmt.training.cluster_rates import planner_rates
from dmt.training.commands.launch import train_here
from dmt.training.commands.outputs import Kind, check_output_files, files_of_config
from dmt.training.config import TrainingConfig, load_config, to_toml
from dmt.training.console import make_table, table_console
from dmt.training.device import device_type
from dmt.training.job import open_job
from dmt.training.report.curves import RUN_COLORS
from dmt.training.what_if import (
    Alternative,
    Prediction,
    alternatives,
    changed_config,
    count,
    not_counted,
    predict_step,
    repeats_of,
    step_work,
)

__all__ = ["WhatIf", "draw_what_if", "print_what_if", "run_what_if"]

_VERIFIED_STEPS = 30


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
    verified: list[tuple[Alternative, float]]
    """The fastest of their ways, and the seconds of a step that were measured."""

    def write(self, path: Path) -> None:
        """Writes the config of the fastest alternative."""
        with write_or_raise(path, "Config") as part:
            part.write_text(
                to_toml(changed_config(self.config, self.found[0].overrides, self.cluster)), encoding="utf-8"
            )

    def best(self) -> list[Alternative]:
        """The fastest of each way to train, number format, and with unique inputs or without, fastest first."""
        kept: dict[tuple[str, float, str, str], Alternative] = {}
        for alternative in self.found:
            settings = (_value(alternative, "forward_precision"), _value(alternative, "unique"))
            kept.setdefault((_way(alternative), alternative.ratio, *settings), alternative)
        return list(kept.values())

    def to_record(self) -> dict[str, Any]:
        """Returns the numbers as JSON writes them."""
        return {
            "cluster": asdict(self.cluster),
            "own": _record(self.own),
            "not_counted": self.left_out,
            "verified": [
                {"overrides": a.overrides, "measured_seconds": s, **_record(a.prediction)} for a, s in self.verified
            ],
            "alternatives": [
                {"overrides": a.overrides, "compression_ratio": a.ratio, **_record(a.prediction)} for a in self.found
            ],
        }


def run_what_if(
    config: str,
    overrides: Sequence[str],
    cluster: str,
    *,
    num_verified: int = 0,
    write: Path | None = None,
    picture: Path | None = None,
) -> WhatIf:
    """Predicts a step of a run, and of its alternatives, on a cluster file or a shipped cluster.

    Tables are placed by the cluster's rates, but for what ``overrides`` say. ``num_verified`` alternatives are trained
    for some steps on ranks of this machine, the fastest of each way to train first. The outputs are only
    checked here: ``write`` and ``picture``.

    Raises:
        InputError: the config, its data or the cluster cannot be read; hosts have another number of ranks than the
            cluster's; the tables cannot be placed; or there is nothing to train on.
    """
    run, described = load_config(config, overrides), load_cluster(cluster)
    if picture is not None:
        # Made and dropped: it refuses a suffix that is no picture format.
        new_figure(picture, size=(1.0, 1.0), caller="--picture")
    outputs: dict[str, tuple[Path | None, Kind]] = {"--write": (write, "config"), "--picture": (picture, "picture")}
    check_output_files(outputs, [config, cluster, *files_of_config(run)])
    if run.dataflow != "flat":
        run = load_config(config, [*planner_rates(described), *overrides])
    _check_verify(num_verified, run)
    size = run.topology.build().host_size
    if size != described.ranks_per_host:
        raise InputError(
            f"Hosts of the run have {size} ranks, those of cluster {described.name!r} have {described.ranks_per_host}, "
            f"for which its rates are. Set topology.ranks_per_host={described.ranks_per_host} and as many towers and "
            "ranks as it takes, or measure such hosts with `dmt bench-comms`."
        )
    if described.hosts == 1 < run.topology.build().num_hosts:
        raise InputError(
            f"Cluster {described.name!r} was measured on one host, which tells nothing of the links between the "
            f"{run.topology.build().num_hosts} hosts of the run. Measure two hosts or more with `dmt bench-comms`."
        )
    job = open_job(run)
    if run.data.tables is not None:
        # A list of tables has no dense columns, but models read some.
        job = replace(job, num_dense=run.data.synthetic.num_dense)
    repeats = repeats_of(job) if job.sharding is not None else None
    result = WhatIf(
        cluster=described,
        config=run,
        own=predict_step(job, described, step_work(job, count(job), repeats)),
        left_out=not_counted(run, repeats=repeats is not None),
        found=alternatives(run, job.tables, job.num_dense, cluster=described, own=job),
        verified=[],
    )
    chosen = result.best()[:num_verified]
    return replace(result, verified=[(one, _measure(changed_config(run, one.overrides, described))) for one in chosen])


def _check_verify(num: int, run: TrainingConfig) -> None:
    if num < 0 or (num and run.data.tables is not None):
        raise InputError(
            f"--verify {num}: give a number of alternatives to train, from 1 on, and data instead of "
            f"data.tables={run.data.tables!r}, which lists tables without rows."
        )
    if not num:
        return  # a cluster of GPUs may be asked about where there is none
    ranks, is_gpu = run.topology.build().world_size, device_type(run.train.device) == "cuda"
    places = torch.cuda.device_count() if is_gpu else os.cpu_count() or 1
    if ranks > places:
        raise InputError(
            f"--verify {num}: the run has {ranks} ranks, this machine {places} {'GPUs' if is_gpu else 'cores'}, which "
            "ranks would share unlike those of the cluster. Write the config with --write, and train it where it will "
            "run."
        )


def _measure(config: TrainingConfig) -> float:
    """Seconds of a training step on ranks of this machine, without the first ones."""
    with tempfile.TemporaryDirectory(prefix="dmt-what-if-") as folder:
        settings = {"output_dir": folder, "max_steps": _VERIFIED_STEPS, "eval_every": None, "resume": "never"}
        trained = train_here(config.model_copy(update={"train": config.train.model_copy(update=settings)}))
    speed = float(trained["samples_per_second"])
    if not 0 < speed < math.inf:
        raise InputError(
            f"--verify measured {speed} samples per second in {_VERIFIED_STEPS} steps. Give data for as many steps: at "
            f"least {_VERIFIED_STEPS} x {config.train.batch_size:,} rows for each rank."
        )
    return config.train.batch_size * config.topology.build().world_size / speed


def print_what_if(result: WhatIf) -> None:
    """Prints the run's own step, the fastest of each way to train, and how to choose one."""
    console, topology, train = table_console(markup=False), result.config.topology.build(), result.config.train
    # A factory of models in towers may make no flat one.
    flat = min((found.prediction.timeline.seconds for found in result.found if _way(found) == "flat"), default=None)
    of_config = (result.config.sharding.forward_precision, str(topology.num_towers), str(train.micro_batches))
    rows = [("this config", *of_config, *_numbers(result.own, flat))]
    for found in result.best():
        settings = (_value(found, key) for key in ("forward_precision", "num_towers", "micro_batches"))
        rows.append((_name(found), *settings, *_numbers(found.prediction, flat)))
    headers = ["", "exchange", "towers", "micro-batches", "step", "samples/s", "x flat", "a host sends", "exposed"]
    title = f"{topology.num_hosts} hosts x {topology.host_size} ranks, {train.batch_size:,} samples a rank"
    console.print(make_table(headers, rows, title=f"{title}, on {result.cluster.name}"))
    console.print(
        "exposed: the share of the step in which a rank only waits for exchanges. Towers with a ratio above 1 compute "
        "another model than the flat one; docs/quality.md shows what that costs. Left out: hot rows, "
        "and the reading of data. Inputs repeat as in the first batch. Measure the best two before you choose."
    )
    if result.config.data.tables is not None:
        number = result.config.data.synthetic.num_dense
        console.print(f"{number} dense columns are assumed beside the tables; set data.synthetic.num_dense for others.")
    if result.left_out:
        console.print(f"This config is predicted as if it had not {', '.join(result.left_out)}.")
    if result.config.model.factory is not None:
        words = f"{result.config.model.chosen} decides what its towers send, so no other ratio was tried. "
        if not result.config.model.in_towers:
            words += "Set model.in_towers=true to see its towers."
        elif flat is None:
            words += "It makes no model without towers; model.in_towers=false says why."
        console.print(words.strip())
    if result.verified:
        rows = []
        for one, measured in result.verified:
            step = one.prediction.timeline.seconds
            rows.append(
                (
                    _name(one),
                    _value(one, "forward_precision"),
                    f"{1e3 * step:,.1f} ms",
                    f"{1e3 * measured:,.1f} ms",
                    f"{step / measured - 1:+.0%}",
                )
            )
        title = f"{_VERIFIED_STEPS} steps on this machine"
        console.print(make_table(["", "exchange", "predicted", "measured", "error"], rows, title=title))
    fastest = result.found[0]
    if fastest.prediction.timeline.exposed["program"] > 0:
        console.print("The fastest ones are bound by the program (step_s): a larger batch would tell them apart.")
        equal = [one.prediction.timeline.seconds for one in result.best()]
        if max(equal) - min(equal) < 1e-7:
            console.print("No way to train is faster than another here.")
            return
    console.print(f"The fastest: {' '.join(fastest.overrides)}", soft_wrap=True)
    console.print(
        "With these, leave out what else the config has in [towers], [replicas], [hot_rows] and of exchanges in "
        "[sharding]."
    )


def draw_what_if(result: WhatIf, path: Path) -> None:
    """Draws samples per second against the compression ratio; a line joins those that no other one beats in both.

    Raises:
        InputError: ``path`` is no picture format or cannot be written.
    """
    figure = new_figure(path, size=(7.0, 4.4), caller="--picture")
    axes = figure.subplots()
    for (precision, marker), color in zip((("fp32", "o"), ("fp16", "s")), RUN_COLORS, strict=False):
        points = [
            (a.ratio, a.prediction.samples_per_s) for a in result.best() if _value(a, "forward_precision") == precision
        ]
        axes.plot(*zip(*points, strict=True), marker, color=color, label=f"exchange in {precision.upper()}", zorder=3)
    front, speed = [], 0.0
    for one in sorted(result.found, key=lambda a: (a.ratio, -a.prediction.samples_per_s)):
        if one.prediction.samples_per_s > speed:
            speed = one.prediction.samples_per_s
            front.append((one.ratio, speed))
    axes.plot(*zip(*front, strict=True), "-", color="#999999", linewidth=1.2, label="no other is faster at this ratio")
    own = result.own.samples_per_s
    axes.axhline(own, color="#999999", linestyle=":", linewidth=1.2, label="this config")
    axes.set_xscale("log", base=2)
    ratios = sorted({round(a.ratio, 2) for a in result.found})
    axes.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios], minor=False)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("compression ratio (1: the flat model)", fontsize=9)
    axes.set_ylabel("samples per second, predicted", fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    dress_axes(axes, grid="y")
    topology = result.config.topology.build()
    hosts = f"{topology.num_hosts} hosts of {topology.host_size} ranks"
    add_title(axes, [f"Speed against compression on {result.cluster.name}", hosts])
    save_figure(figure, path, caller="--picture")


def _numbers(found: Prediction, flat: float | None) -> tuple[str, ...]:
    seconds, spent = found.timeline.seconds, found.timeline.exposed
    exposed = 1 - (spent["compute"] + spent["program"]) / seconds
    step, speed = f"{1e3 * seconds:,.1f} ms", f"{found.samples_per_s:,.0f}"
    faster = "" if flat is None else f"{flat / seconds:.2f}"
    return step, speed, faster, human_bytes(found.uplink_bytes), f"{exposed:.0%}"


def _record(found: Prediction) -> dict[str, Any]:
    return {
        "seconds": found.timeline.seconds,
        "samples_per_s": found.samples_per_s,
        "uplink_bytes": found.uplink_bytes,
        "exposed": found.timeline.exposed,
    }


def _value(alternative: Alternative, key: str) -> str:
    """The value of an override by the last part of its name; empty where there is none."""
    values = {o.partition("=")[0].rpartition(".")[2]: o.partition("=")[2] for o in alternative.overrides}
    return values.get(key, "")


def _way(alternative: Alternative) -> str:
    in_towers = _value(alternative, "tower_dim") or _value(alternative, "in_towers") == "true"
    return "towers" if in_towers else _value(alternative, "dataflow")


def _name(alternative: Alternative) -> str:
    way = _way(alternative)
    name = {"flat": "flat (TorchRec)", "sptt": "SPTT, same model"}.get(way, f"towers, ratio {alternative.ratio:.3g}")
    return f"{name}, unique inputs" if _value(alternative, "unique") else name
