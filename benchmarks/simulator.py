"""Predicted beside measured steps: every contender of a step benchmark, on a cluster that `dmt bench-comms` measured.

OMP_NUM_THREADS=1 python -m benchmarks.simulator --clusters runs/clusters --steps benchmarks/results/train_step.json
"""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from scipy.stats import kendalltau

from benchmarks.emulation.hosts import EmulatedHosts
from benchmarks.provenance import commit, processor
from benchmarks.steps.contenders import Contender, parse_contender
from benchmarks.steps.inputs import benchmark_tables
from benchmarks.steps.setting import Setting
from benchmarks.steps.towers import own_topology, own_towers
from dmt.models.presets import CRITEO_DENSE_FEATURES
from dmt.simulator.cluster import Cluster, load_cluster
from dmt.training.config import TrainingConfig
from dmt.training.job import Job, make_job
from dmt.training.what_if import predict_step

__all__ = ["job_of", "main"]

_STEPS = Path(__file__).parent / "results" / "train_step.json"
_OUT = _STEPS.with_name("simulator.md")
_MEGABYTES = ("4", "25")
_FLAT = {"table_wise": "table_wise", "column_wise": "column_wise"}


def job_of(contender: Contender, setting: Setting) -> Job | None:
    """The contender as a run of the trainer; None where the simulator has no such step."""
    is_flat = contender.family == "flat"
    if contender.family == "etc" or (is_flat and (contender.scheme not in _FLAT or contender.data_parallel_rows != 0)):
        return None
    values: dict[str, Any] = {
        "model": {"arch": "dlrm", "embedding_dim": 128},
        "sharding": {"dataflow": "flat" if is_flat else "sptt"},
        "train": {
            "batch_size": setting.batch_size,
            "prefetch_ids": contender.prefetch,
            "micro_batches": contender.num_micro_batches,
            "dense_reduce": "hierarchical" if contender.has_hierarchical_reduce and setting.hosts > 1 else "ring",
        },
    }
    if contender.has_towers:
        values["model"] |= {"arch": "dmt-dlrm", "tower_dim": 128 // contender.compression}
    if contender.precision == "fp16":
        values["sharding"] |= {"forward_precision": "fp16", "backward_precision": "fp16"}
    tables = benchmark_tables(setting)
    if is_flat:
        values["sharding"]["scheme"] = _FLAT[contender.scheme]
        values["topology"] = {"num_towers": setting.hosts, "ranks_per_tower": setting.ranks_per_host}
        return make_job(TrainingConfig.model_validate(values), tables, CRITEO_DENSE_FEATURES)
    topology = own_topology(contender, setting)
    values["topology"] = {
        name: getattr(topology, name)
        for name in ("num_towers", "ranks_per_tower", "num_replicas", "replica_placement", "ranks_per_host")
    }
    config = TrainingConfig.model_validate(values)
    return make_job(config, tables, CRITEO_DENSE_FEATURES, towers=own_towers(contender, setting))


def predictions(run: Mapping[str, Any], cluster: Cluster) -> list[tuple[str, float, float]]:
    """(contender, measured, predicted) seconds of the steps of one job."""
    known = {name: value for name, value in run["setting"].items() if name in Setting.__dataclass_fields__}
    setting = Setting(**known)
    rows = []
    for entry in run["contenders"]:
        job = job_of(parse_contender(entry["name"]), setting)
        if job is not None:
            measured = statistics.median(step["seconds"] for step in entry["steps"])
            rows.append((entry["name"], measured, predict_step(job, cluster).timeline.seconds))
    return rows


def measure(setting: Mapping[str, Any], out: Path) -> None:
    """Describes emulated hosts as a user would: `dmt bench-comms` under torchrun, on every host. Needs root."""
    ranks, program = setting["ranks_per_host"], shutil.which("dmt")
    assert program is not None, "the environment has the library installed"
    with EmulatedHosts(setting["hosts"], mbit_per_s=setting["mbit_per_s"]) as hosts:
        command = ["--no-python", program, "bench-comms", "--device", "cpu", "--out", str(out.resolve())]
        sizes = [argument for size in _MEGABYTES for argument in ("--megabytes", size)]
        hosts.torchrun([*command, *sizes], ranks_per_host=ranks, timeout=600)


def page(runs: Sequence[tuple[str, Sequence[tuple[str, float, float]]]]) -> str:
    """The table as Markdown, with the errors of all predictions."""
    rows = [row for _, of_run in runs for row in of_run]
    errors = sorted(abs(predicted / measured - 1) for _, measured, predicted in rows)
    order = kendalltau([row[1] for row in rows], [row[2] for row in rows]).statistic
    lines = [
        "# Predicted and measured steps",
        "",
        f"Made by `python -m benchmarks.simulator` at {commit()}, on {processor()}. Nothing is fitted to a step.",
        "",
        f"{len(rows)} steps: median error {statistics.median(errors):.1%}, worst {errors[-1]:.1%}, Kendall's tau "
        f"{order:.3f}.",
        "",
        "| job | contender | measured, s | predicted, s | error |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, of_run in runs:
        for contender, measured, predicted in of_run:
            error = predicted / measured - 1
            lines.append(f"| {name} | {contender} | {measured:.3f} | {predicted:.3f} | {error:+.1%} |")
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--clusters", type=click.Path(path_type=Path), required=True, help="Folder of cluster files.")
@click.option("--measure", "is_measured", is_flag=True, help="First measure those that are absent, as root.")
@click.option("--steps", type=click.Path(path_type=Path, exists=True), default=_STEPS, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=_OUT, show_default=True)
def main(*, clusters: Path, is_measured: bool, steps: Path, out: Path) -> None:
    """Writes predicted beside measured steps, of all jobs whose hosts have a cluster file."""
    runs = []
    for run in json.loads(steps.read_text())["runs"]:
        setting = run["setting"]
        file = clusters / f"{setting['hosts']}x{setting['ranks_per_host']}-{setting['mbit_per_s'] or 0:g}.toml"
        if is_measured and not file.exists():
            measure(setting, file)
        if file.exists():
            name = f"{run['part']}, {file.stem}, B={setting['batch_size']}"
            runs.append((name, predictions(run, load_cluster(file))))
    text = page(runs)
    out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
