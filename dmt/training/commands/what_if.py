"""``dmt what-if``: what a step of a run would take on a described cluster, and what the alternatives would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dmt.errors import InputError
from dmt.formatting import human_bytes
from dmt.simulator.cluster import Cluster, load_cluster
from dmt.training.config import TrainingConfig, load_config
from dmt.training.console import make_table, table_console
from dmt.training.job import open_job
from dmt.training.what_if import Alternative, Prediction, alternatives, predict_step

__all__ = ["WhatIf", "print_what_if", "run_what_if"]


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The result of ``dmt what-if``."""

    cluster: Cluster
    config: TrainingConfig
    own: Prediction
    """The run as its config has it."""
    found: list[Alternative]
    """Fastest first."""

    def best(self) -> list[Alternative]:
        """The fastest of each way to train and number format, fastest first."""
        kept: dict[tuple[str, float, str], Alternative] = {}
        for alternative in self.found:
            kept.setdefault(
                (_way(alternative), alternative.ratio, _value(alternative, "forward_precision")), alternative
            )
        return list(kept.values())

    def to_record(self) -> dict[str, Any]:
        """Returns the numbers as JSON writes them."""
        return {
            "cluster": asdict(self.cluster),
            "own": _record(self.own),
            "alternatives": [
                {"overrides": a.overrides, "compression_ratio": a.ratio, **_record(a.prediction)} for a in self.found
            ],
        }


def run_what_if(config: str, overrides: Sequence[str], cluster: str) -> WhatIf:
    """Predicts a step of a run, and of its alternatives, on a cluster file or a shipped cluster.

    Raises:
        InputError: the config, its data or the cluster cannot be read; hosts have another number of ranks than the
            cluster's; or the tables cannot be placed.
    """
    run, described = load_config(config, overrides), load_cluster(cluster)
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
    return WhatIf(
        cluster=described,
        config=run,
        own=predict_step(job, described),
        found=alternatives(run, job.tables, job.num_dense, described),
    )


def print_what_if(result: WhatIf) -> None:
    """Prints the run's own step, the fastest of each way to train, and how to choose one."""
    console, topology, train = table_console(markup=False), result.config.topology.build(), result.config.train
    flat = min(found.prediction.timeline.seconds for found in result.found if _way(found) == "flat")
    of_config = (result.config.sharding.forward_precision, str(topology.num_towers), str(train.micro_batches))
    rows = [("this config", *of_config, *_numbers(result.own, flat))]
    for found in result.best():
        settings = (_value(found, key) for key in ("forward_precision", "num_towers", "micro_batches"))
        rows.append((_name(found), *settings, *_numbers(found.prediction, flat)))
    headers = ["", "exchange", "towers", "micro-batches", "step", "samples/s", "x flat", "a host sends", "exposed"]
    title = f"{topology.num_hosts} hosts x {topology.host_size} ranks, {train.batch_size:,} samples a rank"
    console.print(make_table(headers, rows, title=f"{title}, on {result.cluster.name}"))
    console.print(
        "exposed: the share of the step in which a rank computes nothing. Towers with a ratio above 1 compute another "
        "model than the flat one; docs/quality.md shows what that costs. Left out: skewed and repeated ids, and the "
        "reading of data. Measure the best two before you choose."
    )
    fastest = result.found[0]
    if fastest.prediction.timeline.exposed["program"] > 0:
        console.print("The fastest ones are bound by the program (step_s): a larger batch would tell them apart.")
    console.print(f"The fastest: {' '.join(fastest.overrides)}", soft_wrap=True)
    console.print(
        "With these, leave out what else the config has in [towers], [replicas], [hot_rows] and of exchanges in "
        "[sharding]."
    )


def _numbers(found: Prediction, flat: float) -> tuple[str, ...]:
    seconds = found.timeline.seconds
    exposed = 1 - found.timeline.exposed["compute"] / seconds
    step, speed = f"{1e3 * seconds:,.1f} ms", f"{found.samples_per_s:,.0f}"
    return step, speed, f"{flat / seconds:.2f}", human_bytes(found.uplink_bytes), f"{exposed:.0%}"


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
    return "towers" if "tower_dim" in " ".join(alternative.overrides) else _value(alternative, "dataflow")


def _name(alternative: Alternative) -> str:
    way = _way(alternative)
    return {"flat": "flat (TorchRec)", "sptt": "SPTT, same model"}.get(way, f"towers, ratio {alternative.ratio:.3g}")
