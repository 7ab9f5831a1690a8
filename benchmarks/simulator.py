"""Predicted beside measured steps: every contender of a step benchmark, on a cluster that `dmt bench-comms` measured.

OMP_NUM_THREADS=1 python -m benchmarks.simulator --clusters runs/clusters --steps benchmarks/results/train_step.json
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from scipy.stats import kendalltau

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
            "dense_reduce": "hierarchical" if contender.has_hierarchical_reduce else "ring",
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


@click.command()
@click.option(
    "--clusters", type=click.Path(path_type=Path, exists=True), required=True, help="Folder of cluster files."
)
@click.option(
    "--steps", type=click.Path(path_type=Path, exists=True), default=Path("benchmarks/results/train_step.json")
)
def main(*, clusters: Path, steps: Path) -> None:
    """Prints measured and predicted steps, and how far they are apart."""
    everything: list[tuple[str, float, float]] = []
    for run in json.loads(steps.read_text())["runs"]:
        setting = run["setting"]
        rate = setting["mbit_per_s"] or 0
        file = clusters / f"{setting['hosts']}x{setting['ranks_per_host']}-{rate:g}.toml"
        if not file.exists():
            print(f"# no {file.name}")
            continue
        print(f"# {run['part']}: {file.stem}, B={setting['batch_size']}")
        rows = predictions(run, load_cluster(file))
        for name, measured, predicted in rows:
            print(f"{name:34}{measured:9.3f}{predicted:9.3f}{predicted / measured - 1:+8.1%}")
        everything += rows
    summary(everything)


def summary(rows: Sequence[tuple[str, float, float]]) -> None:
    """Prints the errors of all predictions, and whether they are in the order of the measurements."""
    errors = sorted(abs(predicted / measured - 1) for _, measured, predicted in rows)
    order = kendalltau([row[1] for row in rows], [row[2] for row in rows]).statistic
    print(f"{len(rows)} steps: median error {statistics.median(errors):.1%}, worst {errors[-1]:.1%}, tau {order:.3f}")


if __name__ == "__main__":
    main()
