"""Compares predicted with measured steps: contenders of a step benchmark, on clusters that `dmt bench-comms` measured.

OMP_NUM_THREADS=1 python -m benchmarks.simulator --clusters runs/clusters --measure

A contender that two jobs measured at the same setting counts once, with the median over the steps of both.
"""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import click
from scipy.stats import kendalltau

from benchmarks.emulation.hosts import EmulatedHosts
from benchmarks.report import commit, markdown_table, processor
from benchmarks.steps.build import own_tables, own_topology, own_towers, tower_sizes
from benchmarks.steps.contenders import Contender, named
from benchmarks.steps.inputs import benchmark_tables, distinct_rows
from benchmarks.steps.setting import Setting
from dmt.errors import InputError
from dmt.models.complexity import CRITEO_DENSE_FEATURES
from dmt.simulator.cluster import Cluster, load_cluster
from dmt.training.config import TrainingConfig
from dmt.training.data.config import DataConfig
from dmt.training.job import Job, make_job
from dmt.training.step_prediction import predict_step

__all__ = ["job_of", "main", "setting_of"]

_RESULTS = Path(__file__).parent / "results"
_STEPS = _RESULTS / "replica_steps.json"
_OUT = _RESULTS / "replica_steps.md"
_FLAT = ("table_wise", "column_wise")


def job_of(contender: Contender, setting: Setting) -> Job | None:
    """Returns the contender as a job of the trainer; None if the simulator cannot predict its step."""
    is_flat = contender.family == "flat"
    has_other_plan = is_flat and (contender.scheme not in _FLAT or contender.data_parallel_rows != 0)
    is_unique_elsewhere = contender.unique and contender.family != "sptt"
    if contender.family == "etc" or contender.hot_rows or has_other_plan or is_unique_elsewhere:
        return None
    values: dict[str, Any] = {
        "model": {"arch": "dlrm", "embedding_dim": 128},
        "sharding": {"dataflow": "flat" if is_flat else "sptt", "unique": contender.unique},
        "train": {
            "batch_size": setting.batch_size,
            "prefetch_ids": contender.prefetch,
            "micro_batches": contender.micro_batches,
            "dense_reduce": "hierarchical" if contender.dense_reduce != "ring" and setting.hosts > 1 else "ring",
        },
    }
    if contender.has_towers:
        arch = "dmt-dlrm-products" if contender.family == "products" else "dmt-dlrm"
        values["model"] |= {"arch": arch, **tower_sizes(contender, setting)}
    if contender.precision == "fp16":
        values["sharding"] |= {"forward_precision": "fp16", "backward_precision": "fp16"}
    tables = benchmark_tables(setting)
    if is_flat:
        values["sharding"]["scheme"] = contender.scheme
        values["topology"] = {"num_towers": setting.hosts, "ranks_per_tower": setting.ranks_per_host}
        return make_job(TrainingConfig.model_validate(values), tables, CRITEO_DENSE_FEATURES)
    topology = own_topology(contender, setting)
    values["topology"] = {
        name: getattr(topology, name)
        for name in ("num_towers", "ranks_per_tower", "num_replicas", "replica_placement", "ranks_per_host")
    }
    config = TrainingConfig.model_validate(values)
    tables = own_tables(contender, setting)
    data: Any = None
    if contender.unique:  # what a job reads of data whose ids `dmt prepare` has counted
        rows = {name: distinct_rows(setting)[table.name] for table in tables for name in table.feature_names}
        data = SimpleNamespace(raw=DataConfig(), distinct_inputs=lambda _: rows)
    return make_job(config, tables, CRITEO_DENSE_FEATURES, towers=own_towers(contender, setting), data=data)


class Row(NamedTuple):
    """Measured and predicted seconds of a contender's step at a setting."""

    job: str
    contender: str
    measured: float
    predicted: float


def predictions(runs: Sequence[Mapping[str, Any]], clusters: Mapping[str, Cluster]) -> list[Row]:
    """Returns measured and predicted steps of all runs whose hosts have a cluster file."""
    steps: dict[tuple[str, str], list[float]] = {}
    found: dict[tuple[str, str], float] = {}
    for run in runs:
        setting = setting_of(run)
        if cluster_name(setting) not in clusters:
            continue
        rows = "" if setting.rows_cap == 40_000 else f", {setting.rows_cap:,} rows"
        name = f"{cluster_name(setting)}, B={setting.batch_size}{rows}, {setting.ids} ids"
        for entry in run["contenders"]:
            key, job = (name, entry["name"]), job_of(named(entry["name"]), setting)
            if job is None:
                continue
            steps.setdefault(key, []).extend(step["seconds"] for step in entry["steps"])
            found[key] = predict_step(job, clusters[cluster_name(setting)]).seconds
    return [Row(*key, statistics.median(steps[key]), predicted) for key, predicted in found.items()]


def setting_of(run: Mapping[str, Any]) -> Setting:
    """Returns the setting of a run; older records also have the sizes of requests and histories, which are gone."""
    sizes = dict(run["setting"])
    if sizes.pop("group", 1) > 1 or sizes.pop("history", 0) > 0:
        raise InputError(f"The run at {run['setting']} has requests or histories. Leave its record out of --steps.")
    return Setting(**sizes)


def cluster_name(setting: Setting) -> str:
    """Returns the name, without ending, of the cluster file for a setting's hosts."""
    return f"{setting.hosts}x{setting.ranks_per_host}-{setting.mbit_per_s or 0:g}"


def measure(setting: Mapping[str, Any], out: Path) -> None:
    """Writes the cluster file of emulated hosts by running `dmt bench-comms` on them, as a user would. Needs root."""
    ranks, program = setting["ranks_per_host"], shutil.which("dmt")
    assert program is not None, "the environment has the library installed"
    with EmulatedHosts(setting["hosts"], mbit_per_s=setting["mbit_per_s"]) as hosts:
        command = ["--no-python", program, "bench-comms", "--out", str(out.resolve())]
        hosts.torchrun(command, ranks_per_host=ranks, timeout=600)


def page(rows: Sequence[Row]) -> str:
    """Returns the page in Markdown: a summary of the errors, and a table of all predictions."""
    errors = sorted(abs(row.predicted / row.measured - 1) for row in rows)
    order = kendalltau([row.measured for row in rows], [row.predicted for row in rows]).statistic
    cells = [
        [*row[:2], f"{row.measured:.3f}", f"{row.predicted:.3f}", f"{row.predicted / row.measured - 1:+.1%}"]
        for row in rows
    ]
    lines = [
        "# Predicted and measured steps",
        "",
        f"Made by `python -m benchmarks.simulator` at {commit()}, on {processor()}. Nothing is fitted to a step.",
        "",
        f"{len(rows)} steps: median error {statistics.median(errors):.1%}, worst {errors[-1]:.1%}, Kendall's tau "
        f"{order:.3f}. The fastest by prediction took at most {_worst_pick(rows):.1%} longer than the fastest measured "
        "one of the same job.",
        "",
        markdown_table(["job", "contender", "measured, s", "predicted, s", "error"], cells),
    ]
    return "\n".join(lines) + "\n"


def _worst_pick(rows: Sequence[Row]) -> float:
    jobs: dict[str, list[Row]] = {}
    for row in rows:
        jobs.setdefault(row.job, []).append(row)
    picks = ((min(own, key=lambda row: row.predicted), min(row.measured for row in own)) for own in jobs.values())
    return max(pick.measured / best - 1 for pick, best in picks)


@click.command()
@click.option("--clusters", type=click.Path(path_type=Path), required=True, help="Folder of cluster files.")
@click.option("--measure", "is_measured", is_flag=True, help="First measure absent clusters; needs root.")
@click.option("--steps", multiple=True, type=click.Path(path_type=Path, exists=True), default=[_STEPS], help="Records.")
@click.option("--out", type=click.Path(path_type=Path), default=_OUT, show_default=True)
def main(*, clusters: Path, is_measured: bool, steps: Sequence[Path], out: Path) -> None:
    """Writes a page that compares predicted with measured steps of all jobs whose hosts have a cluster file."""
    runs = [run for path in steps for run in json.loads(path.read_text())["runs"]]
    known = {}
    for run in runs:
        name = cluster_name(setting_of(run))
        file = clusters / f"{name}.toml"
        if is_measured and not file.exists():
            measure(run["setting"], file)
        if file.exists():
            known[name] = load_cluster(file)
    text = page(predictions(runs, known))
    out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
