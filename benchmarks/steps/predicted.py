"""`predictions`: steps on GPUs as `dmt.simulator` predicts them, for the page of measured steps."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.simulator import job_of
from benchmarks.steps.contenders import Contender, named
from benchmarks.steps.flat import most_data_parallel_rows
from benchmarks.steps.setting import Setting
from dmt.plan.tables import NUMBER_BYTES, feature_names
from dmt.simulator.cluster import load_cluster
from dmt.simulator.steps import StepWork, simulate, step_operations
from dmt.simulator.work import Workload, step_work
from dmt.training.job import step_workload
from dmt.training.step_prediction import work_of

__all__ = ["CLUSTER", "HOSTS", "Predicted", "predictions"]

CLUSTER = "a100"
"""Shipped cluster of hosts with eight GPUs (`dmt.simulator.cluster`)."""
HOSTS = (2, 4, 8, 16)
_SETTING = Setting(ranks_per_host=8, batch_size=16_384, rows_cap=20_000_000)
_CONTENDERS = ("flat-cw-dp+prefetch", *(f"{name}+all+outside" for name in ("dmt-cr2", "dmt-cr4", "dmt-cr16")))


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A predicted step of a contender on `CLUSTER`."""

    contender: str
    hosts: int
    seconds: float
    uplink_bytes: float
    """Bytes that the busiest host sends to others."""


def predictions() -> list[dict[str, Any]]:
    """Returns `Predicted` steps, as dicts, of the flat model and of towers on 2 to 16 hosts of eight GPUs."""
    cluster, found = load_cluster(CLUSTER), []
    for hosts in HOSTS:
        setting = replace(_SETTING, hosts=hosts)
        for contender in map(named, _CONTENDERS):
            work = _work(contender, setting)
            operations = step_operations(
                work, cluster, micro_batches=contender.micro_batches, prefetch=contender.prefetch
            )
            seconds = sum(simulate(operations).values())
            found.append(
                asdict(
                    Predicted(contender=contender.name, hosts=hosts, seconds=seconds, uplink_bytes=work.uplink_bytes)
                )
            )
    return found


def _work(contender: Contender, setting: Setting) -> StepWork:
    """Returns the work of a step; in a flat model, every rank holds the tables that send fewer bytes in this way."""
    if contender.family != "flat":
        job = job_of(contender, setting)
        assert job is not None, contender.name
        return work_of(job)
    job = job_of(replace(contender, data_parallel_rows=0), setting)
    assert job is not None, contender.name
    most = most_data_parallel_rows(setting, NUMBER_BYTES[contender.precision])
    workload = Workload(
        topology=job.topology,
        tables=job.tables,
        towers=[feature_names([table for table in job.tables if table.num_embeddings > most])],
        sharding=None,
        lookups=step_workload(job.config, {}),
    )
    return step_work(workload, work_of(job).model)
