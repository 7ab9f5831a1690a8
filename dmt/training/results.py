"""The sections of a run's result."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from torch import nn

from dmt.collectives import gather_objects
from dmt.hot_rows.runtime import HotRows
from dmt.replicas.sync import ReplicaSync
from dmt.sptt.mesh import TowerMesh
from dmt.traffic import Traffic
from dmt.training.job import Job
from dmt.training.metrics import MetricValues, StepTimer

__all__ = ["option_results", "result_of"]


def result_of(
    job: Job,
    step_rows: int,
    *,
    steps: int,
    seconds: float,
    timer: StepTimer,
    metrics: MetricValues,
    traffic: Traffic,
) -> dict[str, Any]:
    """Returns what every run's result has of its training and evaluation; ``step_rows`` are those of a step."""
    rows = job.config.train.batch_size * job.topology.world_size
    return {
        "arch": job.config.model.name,
        "dataflow": job.config.dataflow,
        "world_size": job.topology.world_size,
        "device": job.device_type,
        **{f"eval_{name}": value for name, value in asdict(metrics).items()},
        "steps": steps,
        "seconds": seconds,
        "samples_per_second": step_rows * timer.steps / timer.seconds if timer.steps else math.nan,
        "bytes_per_sample": traffic.per_sample(rows),
    }


def option_results(
    job: Job, mesh: TowerMesh, model: nn.Module, *, replicas: ReplicaSync | None, hot_rows: HotRows | None
) -> dict[str, Any]:
    """Returns the sections of a result on replicas, hot rows and unique inputs, where the run has them; collective."""
    config, found = job.config, dict[str, Any]()
    if replicas is not None:
        sizes = gather_objects(replicas.bytes_per_sync, mesh.global_group)
        rows = config.replicas.sync_every * config.train.batch_size * mesh.topology.world_size
        found["replicas"] = {
            "num_replicas": mesh.topology.num_replicas,
            "bytes_per_sync": round(max(sizes)),  # of the largest rank; the others wait for it
            "bytes_per_sample": sum(sizes) / rows,
        }
    if hot_rows is not None:
        by_table = {name: len(rows) for name, rows in hot_rows.rows.items()}
        found["hot_rows"] = {
            "rows": sum(by_table.values()),
            "bytes_per_rank": hot_rows.num_bytes,
            "rows_by_table": by_table,
            "left_out": hot_rows.left_out,
        }
    return found
