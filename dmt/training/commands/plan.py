"""``dmt plan``: what is planned and printed. Needs no TorchRec."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.text import Text

from dmt.errors import InputError
from dmt.formatting import counted, human_bytes, natural, shorten
from dmt.sharding.costs import replicated_bytes
from dmt.sharding.plan import TowerShardingPlan
from dmt.simulator.cluster import Cluster, load_cluster
from dmt.training.commands.outputs import check_output_files, files_of_config
from dmt.training.config import load_config
from dmt.training.console import make_table, table_console
from dmt.training.device import device_type
from dmt.training.job import Job, check_table_optimizer, open_job

__all__ = ["PlannedFlat", "PlannedTables", "placement_rates", "print_sharding", "run_plan"]

_SHOWN_RANKS = 16
_SHOWN_TABLES = 20
# Characters that names and reasons get at least.
_FOLDED = {"table": 12, "features": 24, "why": 24}
Rows = Sequence[Sequence[str]]


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


@dataclass(frozen=True)
class PlannedFlat:
    """The result of ``dmt plan`` for a flat run."""

    schemes: dict[str, str]
    """TorchRec's name of the scheme of every table, the largest table first."""
    ranks: dict[str, tuple[int, ...]]
    """Ranks that hold a shard, by table."""
    notes: tuple[str, ...]
    """Tables that cannot have the scheme asked for, and why."""

    def to_record(self) -> dict[str, Any]:
        """Returns the plan as a JSON object."""
        return asdict(self)


def run_plan(
    config: str,
    overrides: Sequence[str] = (),
    *,
    out: Path | None = None,
    cluster: str | None = None,
) -> PlannedTables | PlannedFlat:
    """Plans a run as the trainer will, or the tables of its ``data.tables``, and writes the plan to ``out``.

    A flat run has TorchRec's plan, and none of the options. With a ``cluster``,
    rates are those of its file but for what ``overrides`` say.

    Raises:
        InputError: the config or a file cannot be read, or the tables cannot be placed as asked.
    """
    run = load_config(config, overrides)
    check_output_files({"--out": (out, "sharding plan")}, [config, cluster, *files_of_config(run)])
    if cluster is not None and run.dataflow != "flat":
        overrides = [*placement_rates(load_cluster(cluster)), *overrides]
        run = load_config(config, overrides)
    if run.data.tables is None:
        check_table_optimizer(run.optimizer, "cuda" if run.train.device == "cuda" else device_type(run.train.device))
    job = open_job(run)
    if run.model.factory is not None:
        # The plans of other models need no TorchRec.
        from dmt.training.build import build_model
        from dmt.training.factory import check_outputs

        check_outputs(job, build_model(job, device="meta"))
    if run.dataflow == "flat":
        given = {"--out": out, "--cluster": cluster}
        return _plan_flat(config, job, [name for name, value in given.items() if value is not None])
    assert job.sharding is not None, "the tower dataflow has a plan"
    if out:
        job.sharding.save(out)
    has_replicas = job.topology.num_replicas > 1
    return PlannedTables(job.sharding, replicated_bytes(job.sharding, job.split_tables) if has_replicas else None)


def placement_rates(cluster: Cluster) -> list[str]:
    """Returns the overrides of ``[sharding]`` by which the planner weighs lookups against sending inside a tower.

    A tower is taken to be on one host.

    Example:
        >>> placement_rates(load_cluster("a100"))
        ['sharding.memory_gb_per_s=1300', 'sharding.intra_tower_gb_per_s=252', 'sharding.collective_latency_us=30']
    """
    rates = cluster.all_to_all
    return [
        f"sharding.memory_gb_per_s={cluster.lookup_bytes_per_s / 1e9:.6g}",
        f"sharding.intra_tower_gb_per_s={rates.host_bytes_per_s / 1e9:.6g}",
        f"sharding.collective_latency_us={1e6 * rates.latency_s:.6g}",
    ]


def _plan_flat(config: str, job: Job, options: Sequence[str]) -> PlannedFlat:
    replicas = [f"a plan of {job.topology.num_replicas} replicas"] if job.topology.num_replicas > 1 else []
    if what := [*options, *replicas]:
        are, them = ("is", "it") if len(what) == 1 else ("are", "them")
        raise InputError(
            f"Config {config} has the flat dataflow ({job.config.model.chosen}), which TorchRec's planner places; "
            f"{', '.join(what)} {are} for the tower dataflow. Append sharding.dataflow=sptt, or leave {them} out."
        )
    from dmt.training.build import flat_tables  # needs TorchRec
    from dmt.training.flat import holding_ranks, table_shardings

    plan, notes = flat_tables(job)
    placed = table_shardings(plan)
    names = [table.name for table in sorted(job.tables, key=lambda table: -table.num_bytes)]
    return PlannedFlat(
        schemes={name: placed[name].sharding_type for name in names},
        ranks={name: holding_ranks(placed[name], job.topology.world_size) for name in names},
        notes=notes,
    )


def print_sharding(planned: PlannedTables | PlannedFlat, *, everything: bool, out: Path | None) -> None:
    """Prints a plan, with all ranks and tables or the most telling ones, and the file it was written to.

    In a narrow terminal (or ``COLUMNS``) names and reasons fold; numbers are never cut.
    """
    console = table_console(markup=False)
    if not isinstance(planned, PlannedTables):
        _print_flat(console, planned, everything)
        return
    found = planned.sharding
    _print_table(console, *_ranks(found, everything))
    _print_table(console, *_tables(found, everything))
    schemes = ", ".join(f"{count:,} {scheme}" for scheme, count in found.tables_by_scheme.items())
    console.print(f"{counted(len(found.tables), 'table')}: {schemes}.")
    console.print(f"Imbalance (busiest rank over mean): {found.imbalance:.2f} over all ranks.")
    topology, copy = found.topology, planned.replicated_bytes
    if copy is not None:
        others, ranks = topology.num_replicas - 1, topology.world_size
        console.print(
            f"{topology.num_replicas:,} replicas on {ranks:,} ranks: a copy of the tables that they average is "
            f"S = {human_bytes(copy)}; a rank holds S (M - 1) / T = {human_bytes(copy * others / ranks)} more than if "
            f"all shared one copy, and sends 2 S (M - 1) / T = {human_bytes(2 * copy * others / ranks)} every "
            "replicas.sync_every steps (dmt what-if says how long that takes)."
        )
    notes = list(found.notes)
    if found.hardware.memory_per_rank is None:
        fullest = human_bytes(max(rank.memory for rank in found.ranks))
        notes.append(f"no memory limit given; the fullest rank needs {fullest} (sharding.memory_gib).")
    _print_notes(console, notes)
    if out is not None:
        console.print(f"Written to {out}.", soft_wrap=True)


def _print_flat(console: Console, found: PlannedFlat, everything: bool) -> None:
    names = list(found.schemes)[: None if everything else _SHOWN_TABLES]
    rows = [(name, found.schemes[name], shorten([str(rank) for rank in found.ranks[name]], ", ")) for name in names]
    title = _title("largest tables", len(names), len(found.schemes), "Tables")
    _print_table(console, title, ("table", "scheme", "on ranks"), rows)
    schemes = ", ".join(f"{count:,} {scheme}" for scheme, count in Counter(found.schemes.values()).most_common())
    console.print(f"{counted(len(found.schemes), 'table')} placed by TorchRec's planner: {schemes}.")
    _print_notes(console, found.notes)


def _print_notes(console: Console, notes: Sequence[str]) -> None:
    for note in notes:
        console.print(Text.assemble(("Note:", "yellow"), f" {note}"))


def _title(which: str, shown: int, number: int, of_all: str) -> str:
    return f"The {shown} {which}; --all shows {number - shown:,} more" if shown < number else of_all


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:,.1f} µs"


def _print_table(console: Console, title: str, headers: Sequence[str], rows: Rows) -> None:
    """Prints a table, on a console that is too narrow for its numbers wider than that."""
    table = make_table(headers, rows, title=title)
    needed = Measurement.get(console, console.options.update(width=10**6), table).maximum
    for column in table.columns:
        folded = _FOLDED.get(str(column.header))
        if folded is None:
            column.justify, column.no_wrap = "right", True
        else:
            column.overflow = "fold"
            longest = max(len(cell) for cell in (str(column.header), *map(str, column.cells)))
            needed -= max(longest - folded, 0)
    console.width = max(console.width, needed)
    console.print(table)


def _ranks(found: TowerShardingPlan, everything: bool) -> tuple[str, Sequence[str], Rows]:
    ranks = list(found.ranks)
    if len(ranks) > _SHOWN_RANKS and not everything:
        ranks = sorted(ranks, key=lambda rank: (-rank.seconds, rank.tower, rank.local))[:_SHOWN_RANKS]
    title = _title("busiest ranks", len(ranks), len(found.ranks), "Ranks, inside their towers")
    rows = []
    for r in ranks:
        rows.append((str(r.tower), str(r.local), human_bytes(r.memory), _time(r.seconds)))
    return title, ("tower", "rank", "memory", "cost"), rows


def _tables(found: TowerShardingPlan, everything: bool) -> tuple[str, Sequence[str], Rows]:
    ranked = sorted(found.tables, key=lambda entry: (-entry.seconds, natural(entry.name)))
    shown = ranked if everything else ranked[:_SHOWN_TABLES]
    rows = [(t.name, str(t.tower), human_bytes(t.memory), _time(t.seconds), t.reason) for t in shown]
    title = _title("costliest tables", len(shown), len(ranked), "Tables, costliest first")
    return title, ("table", "tower", "memory", "cost", "why"), rows
