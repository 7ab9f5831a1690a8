"""``dmt plan``: what is planned and printed. Needs no TorchRec, but for flat runs and own models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from dmt.errors import InputError
from dmt.formatting import counted, human_bytes, natural, shorten
from dmt.sharding.costs import replicated_bytes
from dmt.sharding.plan import TowerShardingPlan
from dmt.simulator.cluster import Cluster, load_cluster
from dmt.training.config import TrainingConfig, load_config
from dmt.training.console import make_table, table_console
from dmt.training.device import device_type
from dmt.training.job import Job, check_table_optimizer, open_job

__all__ = ["PlannedTables", "placed_by", "placement_rates", "print_plan", "run_plan"]

_SHOWN_RANKS, _SHOWN_TABLES = 16, 20
# Columns of a narrow terminal in which no number is cut.
_LEAST_WIDTH = 90


@dataclass(frozen=True)
class PlannedTables:
    """The result of ``dmt plan``."""

    sharding: TowerShardingPlan
    """The plan of one replica."""
    replicated_bytes: int | None
    """Bytes of one copy of the tables, which replicas average; None where there is one replica."""

    def to_record(self) -> dict[str, Any]:
        """Returns the plan as JSON writes it, with the bytes that replicas average."""
        size = self.replicated_bytes
        return self.sharding.to_record() | ({} if size is None else {"replicated_bytes": size})


def run_plan(
    config: str, overrides: Sequence[str] = (), *, out: Path | None = None, cluster: str | None = None
) -> PlannedTables | dict[str, Any]:
    """Plans a run as the trainer will, or the tables of its ``data.tables``, and writes the plan to ``out``.

    A flat run has TorchRec's plan, and none of the options: the schemes of its tables by name, largest first, the ranks
    that hold a shard, and notes on tables that cannot have the scheme asked for.

    Raises:
        InputError: the config or a file cannot be read, or the tables cannot be placed as asked.
    """
    run = placed_by(None if cluster is None else load_cluster(cluster), config, overrides)
    if run.data.tables is None:
        check_table_optimizer(run.optimizer, "cuda" if run.train.device == "cuda" else device_type(run.train.device))
    job = open_job(run)
    if run.model.factory is not None:
        # The plans of other models need no TorchRec.
        from dmt.training.build import build_model
        from dmt.training.factory import check_outputs

        check_outputs(job, build_model(job, device="meta"))
    if run.dataflow == "flat":
        return _plan_flat(job, {"--out": out, "--cluster": cluster})
    assert job.sharding is not None, "the tower dataflow has a plan"
    if out:
        job.sharding.save(out)
    has_replicas = job.topology.num_replicas > 1
    return PlannedTables(job.sharding, replicated_bytes(job.sharding, job.split_tables) if has_replicas else None)


def placed_by(cluster: Cluster | None, config: str, overrides: Sequence[str]) -> TrainingConfig:
    """Loads a config whose tables are placed by the rates of a cluster, but for what ``overrides`` say."""
    run = load_config(config, overrides)
    if cluster is None or run.dataflow == "flat":
        return run
    rates = [f"{key}={rate:.6g}" for key, rate in placement_rates(cluster).items()]
    return load_config(config, [*rates, *overrides])


def placement_rates(cluster: Cluster) -> dict[str, float]:
    """Returns the keys by which the planner weighs lookups against sending inside a tower, which is on one host.

    Example:
        >>> placement_rates(load_cluster("v100"))["sharding.collective_latency_us"]
        30.0
    """
    rates = cluster.all_to_all
    return {
        "sharding.memory_gb_per_s": cluster.lookup_bytes_per_s / 1e9,
        "sharding.intra_tower_gb_per_s": rates.host_bytes_per_s / 1e9,
        "sharding.collective_latency_us": round(1e6 * rates.latency_s, 9),
    }


def _plan_flat(job: Job, options: dict[str, object]) -> dict[str, Any]:
    given = [name for name, value in options.items() if value is not None]
    if job.topology.num_replicas > 1:
        given.append(f"a plan of {job.topology.num_replicas} replicas")
    if given:
        raise InputError(
            f"The config has the flat dataflow ({job.config.model.chosen}), which TorchRec's planner places; "
            f"{', '.join(given)}: for the tower dataflow only. Append sharding.dataflow=sptt, or leave that out."
        )
    from dmt.training.build import flat_tables  # needs TorchRec
    from dmt.training.flat import holding_ranks, table_shardings

    plan, notes = flat_tables(job)
    placed = table_shardings(plan)
    names = [table.name for table in sorted(job.tables, key=lambda table: -table.num_bytes)]
    return {
        "schemes": {name: placed[name].sharding_type for name in names},
        "ranks": {name: holding_ranks(placed[name], job.topology.world_size) for name in names},
        "notes": notes,
    }


def print_plan(planned: PlannedTables | dict[str, Any], *, everything: bool, out: Path | None) -> None:
    """Prints a plan, with all ranks and tables or the most telling ones, and the file it was written to."""
    if isinstance(planned, PlannedTables):
        _print_sharding(planned, everything=everything, out=out)
    else:
        _print_flat(planned, everything=everything)


def _print_flat(found: dict[str, Any], *, everything: bool) -> None:
    console, schemes = _console(), found["schemes"]
    names = list(schemes)[: None if everything else _SHOWN_TABLES]
    rows = [(name, schemes[name], shorten([str(rank) for rank in found["ranks"][name]], ", ")) for name in names]
    title = _title("largest tables", len(names), len(schemes), "Tables")
    console.print(make_table(("table", "scheme", "on ranks"), rows, title=title))
    kinds = ", ".join(f"{count:,} {scheme}" for scheme, count in Counter(schemes.values()).most_common())
    console.print(f"{counted(len(schemes), 'table')} placed by TorchRec's planner: {kinds}.")
    _print_notes(console, found["notes"])


def _print_sharding(planned: PlannedTables, *, everything: bool, out: Path | None) -> None:
    console, found, topology = _console(), planned.sharding, planned.sharding.topology
    busiest = sorted(found.ranks, key=lambda rank: (-rank.seconds, rank.tower, rank.local))
    ranks = found.ranks if everything or len(busiest) <= _SHOWN_RANKS else busiest[:_SHOWN_RANKS]
    rows = [(str(rank.tower), str(rank.local), human_bytes(rank.memory), _time(rank.seconds)) for rank in ranks]
    title = _title("busiest ranks", len(rows), len(found.ranks), "Ranks, inside their towers")
    _print_numbers(console, title, ("tower", "rank", "memory", "cost"), rows)
    ranked = sorted(found.tables, key=lambda entry: (-entry.seconds, natural(entry.name)))
    tables = ranked if everything else ranked[:_SHOWN_TABLES]
    named = [(t.name, str(t.tower), human_bytes(t.memory), _time(t.seconds), t.reason) for t in tables]
    title = _title("costliest tables", len(named), len(ranked), "Tables, costliest first")
    _print_numbers(console, title, ("table", "tower", "memory", "cost", "why"), named)
    schemes = ", ".join(f"{count:,} {scheme}" for scheme, count in found.tables_by_scheme.items())
    console.print(f"{counted(len(found.tables), 'table')}: {schemes}.")
    console.print(f"Imbalance (busiest rank over mean): {found.imbalance:.2f} over all ranks.")
    copy = planned.replicated_bytes
    if copy is not None:
        others, world = topology.num_replicas - 1, topology.world_size
        console.print(
            f"{topology.num_replicas:,} replicas on {world:,} ranks: a copy of the tables that they average is "
            f"S = {human_bytes(copy)}; a rank holds S (M - 1) / T = {human_bytes(copy * others / world)} more than if "
            f"all shared one copy, and sends 2 S (M - 1) / T = {human_bytes(2 * copy * others / world)} every "
            "replicas.sync_every steps (dmt what-if says how long that takes)."
        )
    if found.hardware.memory_per_rank is None:
        fullest = human_bytes(max(rank.memory for rank in found.ranks))
        _print_notes(console, [f"no memory limit given; the fullest rank needs {fullest} (sharding.memory_gib)."])
    if out is not None:
        console.print(f"Written to {out}.", soft_wrap=True)


def _console() -> Console:
    console = table_console(markup=False)
    console.width = max(console.width, _LEAST_WIDTH)
    return console


def _print_numbers(console: Console, title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table in which names and reasons fold and numbers are never cut."""
    table = make_table(headers, rows, title=title)
    for column in table.columns:
        if column.header in ("table", "why"):
            column.overflow = "fold"
        else:
            column.justify, column.no_wrap = "right", True
    console.print(table)


def _print_notes(console: Console, notes: Sequence[str]) -> None:
    for note in notes:
        console.print(Text.assemble(("Note:", "yellow"), f" {note}"))


def _title(which: str, shown: int, number: int, of_all: str) -> str:
    return f"The {shown} {which}; --all shows {number - shown:,} more" if shown < number else of_all


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:,.1f} µs"
