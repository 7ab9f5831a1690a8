"""``dmt what-if``: shows the predicted step of a run, and of alternatives to it, on a described cluster."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dmt.formatting import human_bytes, shorten
from dmt.simulator.cluster import load_cluster
from dmt.training.commands import Shown
from dmt.training.config import load_config, to_override
from dmt.training.job import open_job
from dmt.training.step_prediction import FLAT, Prediction, alternatives, check_hosts, not_counted, predict_step

__all__ = ["run_what_if"]


def run_what_if(config: str, overrides: Sequence[str], *, cluster: str, uplink: float | None = None) -> Shown:
    """Predicts a step of a run, and of alternatives to it, on a described cluster; returns what to print.

    Args:
        config: config of the run, a file or a shipped name; ``cluster`` replaces its ``sharding.cluster``.
        overrides: ``section.key=value`` settings.
        cluster: path of a cluster file or name of a shipped cluster; its rates also place the run's tables.
        uplink: rate of a host's link to others in 10^9 bits per second, finite and above 0, in place of the cluster's
            rate; required if the cluster was measured on one host and the run has several.

    Raises:
        InputError: the config, its data or the cluster cannot be read; ``uplink`` is absent or out of range; the hosts
            of run and cluster have different numbers of ranks; or the tables cannot be placed.
    """
    described = load_cluster(cluster)
    described = described if uplink is None else described.with_uplink(uplink)
    run = load_config(config, [*overrides, to_override("sharding.cluster", cluster)])
    check_hosts(run, described, is_given=uplink is not None)
    job = open_job(run)
    current = predict_step(job, described)
    ways, left_out = alternatives(job, described)
    record: dict[str, Any] = {"cluster": asdict(described), "not_counted": not_counted(run), "own": current._asdict()}
    record |= {"alternatives": [way._asdict() for way in ways], "left_out": left_out}
    record["measured_ranks"] = max(described.all_reduce.uplink_by_ranks, default=None)
    topology, rate = job.topology, 8e-9 * described.exchange.uplink_bytes_per_s
    title = (
        f"{topology.num_hosts} hosts x {topology.host_size} ranks, {run.train.batch_size:,} samples a rank, "
        f"on {described.name}: {rate:,.4g} Gbit/s from a host to others ({rate / topology.host_size:,.4g} a rank)"
    )
    return _show(record, title, current, ways, topology.world_size)


def _show(record: dict[str, Any], title: str, current: Prediction, ways: Sequence[Prediction], num_ranks: int) -> Shown:
    """Returns a table: the run, and each alternative without replicas and with their best number."""
    flat = next((way.seconds for way in ways if way.name == FLAT), math.nan)
    best: dict[tuple[str, bool], Prediction] = {}
    for way in ways:
        best.setdefault((re.sub(", [0-9]+ replicas.*", "", way.name), way.num_replicas > 1), way)
    shown, rows = [*best.values()], []
    for way in [current, *shown]:
        exposed = f"{1 - (way.exposed['compute'] + way.exposed['program']) / way.seconds:.0%}"
        step, faster = f"{1e3 * way.seconds:,.1f} ms", f"{flat / way.seconds:.2f}".replace("nan", "-")
        numbers = step, f"{way.samples_per_s:,.0f}", faster
        rows.append((way.name, *numbers, human_bytes(way.uplink_bytes), exposed, human_bytes(way.rank_bytes)))
    ignored, known = ", ".join(record["not_counted"]), {way.unique_rows for way in (current, *ways)}
    lines = [f"The prediction of this config ignores {ignored}."] if ignored else []
    lines.append("Busiest host: the one with the widest towers. Exposed: share of the step that waits for exchanges.")
    lines += [f"Distinct inputs that unique sends: {text}." for text in known if text]
    if record["left_out"]:
        lines.append(f"Left out, as they exceed sharding.memory_gib: {shorten(record['left_out'], '; ')}.")
    if (measured := record["measured_ranks"]) is not None and measured < num_ranks:
        lines.append(f"Groups of more than {measured} ranks were not measured; they get the rate of {measured} ranks.")
    if len(shown) > 1 and shown[-1].seconds - shown[0].seconds < 1e-7:
        lines.append("All alternatives take the minimum time of a step (step_s); a larger batch would tell them apart.")
    elif shown:
        remark = "" if shown[0].compression_ratio == current.compression_ratio else " (another AUC: docs/quality.md)"
        lines.append(f"Fastest: {' '.join(shown[0].overrides)}{remark}")
    headers = ["", "step", "samples/s", "x flat", "busiest host sends", "exposed", "fullest rank"]
    return Shown(record, headers, rows, title, range(1, len(headers)), lines)
