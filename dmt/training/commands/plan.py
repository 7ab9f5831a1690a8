"""The body of ``dmt plan``: what is read, planned and printed. Needs no TorchRec, unless a CONFIG names the tables."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from dmt.errors import InputError, did_you_mean
from dmt.formatting import human_bytes
from dmt.plan.column_shards import shard_names
from dmt.plan.tables import TableSpec, feature_names, table_specs
from dmt.plan.topology import TowerTopology
from dmt.plan.towers import TowerPlan
from dmt.sharding.costs import Hardware, StepWorkload
from dmt.sharding.plan import RankLoad, TowerShardingPlan
from dmt.sharding.plan_tables import plan_tables
from dmt.sharding.replica_costs import ReplicaCosts, replica_costs
from dmt.sharding.rules import Rule, ShardingRules
from dmt.sharding.schemes import SCHEMES
from dmt.training.console import table_console

if TYPE_CHECKING:
    from dmt.training.config import ReplicasConfig

__all__ = ["PlannedTables", "print_sharding", "read_tables", "run_plan"]

_SHOWN_RANKS = 16
_SHOWN_TABLES = 20
# Characters that names and reasons get at least, before columns of numbers are left out for them.
_FOLDED = {"table": 12, "why": 24, "replicas": 12}
_TABLE_KEYS = ("name", "num_embeddings", "embedding_dim", "feature_names")
_DATA_TYPES = ("FP32", "FP16")
Rows = Sequence[Sequence[str]]

# What a config says, so that an option cannot contradict it.
_CONFIG_KEYS = {
    "tables": "data",
    "towers": "towers.plan",
    "num_towers": "topology.num_towers",
    "ranks_per_tower": "topology.ranks_per_tower",
    "batch_size": "train.batch_size",
    "pooling": "sharding.pooling_factors",
    "memory_gib": "sharding.memory_gib",
    "optimizer": "optimizer.sparse",
    "memory_gb_per_s": "sharding.memory_gb_per_s",
    "intra_tower_gb_per_s": "sharding.intra_tower_gb_per_s",
    "collective_latency_us": "sharding.collective_latency_us",
    "scheme": "sharding.scheme",
    "pin": "sharding.tables",
}


@dataclass(frozen=True)
class PlannedTables:
    """What ``dmt plan`` found."""

    sharding: TowerShardingPlan
    replicas: ReplicaCosts | None
    """None where there is one replica and nobody asked."""

    def to_record(self) -> dict[str, Any]:
        """The plan as JSON writes it, with the costs of replicas under ``replicas``."""
        record = self.sharding.to_record()
        return record if self.replicas is None else record | {"replicas": self.replicas.to_record()}


def run_plan(config: str | None, overrides: Sequence[str], options: Mapping[str, Any]) -> PlannedTables:
    """Does what ``dmt plan`` was asked for; writes the plan where ``--out`` says.

    Args:
        config: a training config, whose run is planned as the trainer will, or None where the tables come from a file.
        overrides: ``section.key=value`` for the config.
        options: the command's options by name, with ``-`` as ``_``.

    Raises:
        InputError: options contradict each other, a file cannot be read, or the tables cannot be placed as asked.
    """
    number = options["num_replicas"]
    if number is not None and number < 1:
        raise InputError(f"--replicas {number}: must be a whole number of at least 1, the copies of the tables.")
    found, tables, own = _of_config(config, overrides, options) if config else _of_files(options)
    asked = {name: options[name] for name in ("sync_gb_per_s", "sync_every") if options.get(name) is not None}
    replicas = None
    if asked or number is not None or found.topology.num_replicas > 1:
        replicas = replica_costs(found, tables, precision=own.precision, **({"sync_every": own.sync_every} | asked))
    if options["out"]:
        found.save(options["out"])
    return PlannedTables(found, replicas)


def read_tables(path: Path, option: str = "--tables") -> tuple[TableSpec, ...]:
    """Tables from a JSON file: a list of {name, num_embeddings, embedding_dim, feature_names}, or a tower plan's.

    An entry may have a ``data_type``, ``"FP32"`` (as without it) or ``"FP16"``.

    Args:
        path: of the file.
        option: what the user gave it with, for messages.

    Raises:
        InputError: the file is absent, not JSON, or an entry is malformed; entries are counted from 1.
    """
    place = f"{option} {path}"
    try:
        record = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{place}: cannot be read ({error}). Name a JSON file.") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{place}, line {error.lineno}: not JSON ({error.msg}).") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise InputError(f"{place}: not JSON that can be read ({error}).") from error
    entries = record.get("tables") if isinstance(record, dict) else record
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{place}: holds no list of tables, as `dmt partition` records them in towers.json.")
    tables = [_table_of(f"{place}, entry {number}", entry) for number, entry in enumerate(entries, start=1)]
    with _naming(place):
        return table_specs(tables)


def _table_of(place: str, entry: Any) -> TableSpec:
    if not isinstance(entry, dict):
        raise InputError(f"{place}: {entry!r} must be an object with the keys {', '.join(_TABLE_KEYS)}.")
    if isinstance(entry.get("name"), str):
        place += f" ({entry['name']!r})"
    known = (*_TABLE_KEYS, "data_type")
    unknown, missing = [key for key in entry if key not in known], [key for key in _TABLE_KEYS if key not in entry]
    if unknown:
        raise InputError(
            f"{place}: the key {unknown[0]!r} is unknown; a table has {', '.join(known)}.{did_you_mean(unknown[0], known)}"
        )
    if missing:
        raise InputError(f"{place}: {missing[0]} is missing. Give {', '.join(_TABLE_KEYS)}.")
    if not _is_name(entry["name"]):
        raise InputError(f"{place}: name={entry['name']!r} must be a text that is not empty.")
    for size in ("num_embeddings", "embedding_dim"):
        value = entry[size]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{place}: {size}={value!r} must be a whole number of at least 1.")
        if value >= 2**63:
            raise InputError(f"{place}: {size}={value:.3e} must be below 2**63; ids are int64.")
    if entry["embedding_dim"] % 4:
        raise InputError(f"{place}: embedding_dim={entry['embedding_dim']} must be a multiple of 4 (FBGEMM's kernels).")
    features = entry["feature_names"]
    if not isinstance(features, list) or not features or not all(map(_is_name, features)):
        raise InputError(f"{place}: feature_names={features!r} must be a list of one text or more, such as ['ad'].")
    if entry.get("data_type", "FP32") not in _DATA_TYPES:
        raise InputError(f"{place}: data_type={entry['data_type']!r} is unknown; use one of {list(_DATA_TYPES)}.")
    return TableSpec(**{**entry, "feature_names": tuple(features)})


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Puts the file in front of what is wrong with its tables."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {error}") from error


def _of_config(
    config: str, overrides: Sequence[str], options: Mapping[str, Any]
) -> tuple[TowerShardingPlan, Sequence[TableSpec], ReplicasConfig]:
    """The plan of a run, its tables, and how its replicas are kept equal."""
    given = [name for name in _CONFIG_KEYS if options[name] not in (None, ())]
    if given:
        raise InputError(
            f"--{given[0].replace('_', '-')} and a CONFIG contradict each other: the config decides it. Change "
            f"{_CONFIG_KEYS[given[0]]} there, or append section.key=value."
        )
    from dmt.training.config import load_config
    from dmt.training.job import check_table_optimizer, open_job

    replicas = options["num_replicas"]
    run = load_config(config, overrides if replicas is None else [*overrides, f"topology.num_replicas={replicas}"])
    if run.dataflow == "flat":
        raise InputError(
            f"Config {config} has the flat dataflow (model.arch={run.model.arch!r}), which TorchRec's own planner "
            "places. Append sharding.dataflow=sptt to plan its towers."
        )
    # Refuses an optimizer that the trainer would.
    check_table_optimizer(run.optimizer)
    job = open_job(run)
    assert job.sharding is not None, "not flat"
    return job.sharding, job.split_tables, run.replicas


def _of_files(options: Mapping[str, Any]) -> tuple[TowerShardingPlan, Sequence[TableSpec], ReplicasConfig]:
    towers, tables = _towers_and_tables(options)
    split: list[Any] = list(tables)
    with _naming(" with ".join(f"--{name} {options[name]}" for name in ("towers", "tables") if options[name])):
        if any(feature in towers.column_splits for feature in feature_names(tables)):
            split = towers.split_tables(tables)
        by_tower = towers.tables_by_tower(split)
    known = {name: value for name, value in options.items() if value not in (None, ())}
    rates = {
        name: known[name]
        for name in ("memory_gb_per_s", "intra_tower_gb_per_s", "collective_latency_us")
        if name in known
    }
    shards = {
        t.name: shard_names(t.name, towers.column_splits[t.feature_names[0]])
        for t in tables
        if t.feature_names[0] in towers.column_splits
    }
    found = plan_tables(
        by_tower,
        TowerTopology(
            num_towers=towers.num_towers,
            ranks_per_tower=known.get("ranks_per_tower", 8),
            num_replicas=known.get("num_replicas", 1),
        ),
        workload=StepWorkload(
            batch_size=known.get("batch_size", StepWorkload.batch_size),
            pooling_factors=_pooling(options["pooling"], towers),
            optimizer=known.get("optimizer", StepWorkload.optimizer),
        ),
        hardware=Hardware(memory_per_rank=_memory(options["memory_gib"]), **rates),
        rules=ShardingRules(schemes=options["scheme"] or SCHEMES, tables=_pins(options["pin"], shards)),
    )
    from dmt.training.config import ReplicasConfig

    return found, split, ReplicasConfig()


def _towers_and_tables(options: Mapping[str, Any]) -> tuple[TowerPlan, tuple[TableSpec, ...]]:
    number = options["num_towers"]
    if number is not None and number < 1:
        raise InputError(f"--num-towers {number}: must be a whole number of at least 1.")
    towers = TowerPlan.load(options["towers"]) if options["towers"] else None
    if options["tables"]:
        tables = read_tables(options["tables"])
    elif towers is not None and towers.tables:
        tables = read_tables(options["towers"], "--towers")
    else:
        raise InputError(
            "There are no tables to plan. Give a CONFIG, or --tables FILE.json, or --towers with a plan that records "
            "its tables."
        )
    if towers is None:
        return _strided(tables, number or 1), tables
    if number not in (None, towers.num_towers):
        raise InputError(
            f"--num-towers {number} does not fit {options['towers']}, which has {towers.num_towers} towers. Drop it."
        )
    return towers, tables


def _strided(tables: Sequence[TableSpec], number: int) -> TowerPlan:
    """Table i in tower i mod T; over features, a shared table could fall to two towers."""
    if number > len(tables):
        raise InputError(f"--num-towers {number}: must not be more than the tables, which are {len(tables)}.")
    return TowerPlan.from_lists([feature_names(tables[i::number]) for i in range(number)], strategy="strided")


def _memory(gib: float | None) -> int | None:
    if gib is None:
        return None
    num_bytes = gib * 2**30
    if not 1 <= num_bytes < math.inf:
        raise InputError(f"--memory-gib {gib:g}: must be a finite number of GiB above 0. Leave it out for no limit.")
    return int(num_bytes)


def _pins(texts: Sequence[str], shards: Mapping[str, Sequence[str]]) -> dict[str, Rule]:
    """The rules; one for a table that is cut, by its name, holds for each of its shards that has none of its own."""
    pins: dict[str, Rule] = {}
    for text in texts:
        pattern, equals, schemes = text.rpartition("=")
        if not equals or not pattern or not schemes:
            raise InputError(f"--pin {text!r} is not of the form TABLES=SCHEME[,SCHEME], e.g. 't_ad*=row_wise'.")
        rule: Any = tuple(schemes.split(","))
        if pins.setdefault(pattern, rule) != rule:
            raise InputError(f"--pin gives {pattern!r} twice, with different schemes. Keep one.")
    of_shards = {shard: rule for name, rule in pins.items() for shard in shards.get(name, ())}
    return of_shards | {name: rule for name, rule in pins.items() if name not in shards}


def _pooling(texts: Sequence[str], towers: TowerPlan) -> dict[str, float]:
    """Ids per sample; of a feature whose table is cut, for each of its shards that has no number of its own."""
    factors: dict[str, float] = {}
    known = {*towers.features, *towers.column_splits}
    for text in texts:
        feature, _, number = text.rpartition("=")
        try:
            factor = float(number)
        except ValueError:
            factor = math.nan
        if not feature or not 0 < factor < math.inf:
            raise InputError(f"--pooling {text!r} is not of the form FEATURE=NUMBER, NUMBER above 0, e.g. 'ad=12.5'.")
        if feature not in known:
            raise InputError(
                f"--pooling {text!r}: no table has the feature {feature!r} ({len(towers.features)} features)."
                f"{did_you_mean(feature, known)} Drop it or fix the name."
            )
        if factors.setdefault(feature, factor) != factor:
            raise InputError(f"--pooling gives {feature!r} twice, with different numbers. Keep one.")
    of_shards = {
        shard: factors[feature]
        for feature, widths in towers.column_splits.items()
        for shard in shard_names(feature, widths)
        if feature in factors
    }
    return of_shards | {name: factor for name, factor in factors.items() if name not in towers.column_splits}


def print_sharding(planned: PlannedTables, *, everything: bool, out: Path | None) -> None:
    """Prints loads of ranks, the tables with their reasons, the imbalance, the costs of replicas and the notes.

    As wide as the terminal or as ``COLUMNS`` says. Where that is narrow, names fold and columns are left out; numbers
    are never cut.

    Args:
        planned: the plan.
        everything: all ranks and tables, not the most telling.
        out: where the plan was written.
    """
    console, found = table_console(markup=False), planned.sharding
    shown = _print_fitting(console, *_ranks(found, everything), leave_out=("lookups/step", "sent/step"))
    if "sent/step" in shown:
        console.print("sent/step: ids, embeddings, gradients and all-reduces that the rank sends inside its tower.")
    _print_fitting(console, *_tables(found, everything), leave_out=("memory", "tower", "cost"))
    schemes = ", ".join(f"{count:,} {scheme}" for scheme, count in found.tables_by_scheme.items())
    console.print(f"{len(found.tables):,} table{'' if len(found.tables) == 1 else 's'}: {schemes}.")
    worst = max(found.towers, key=lambda tower: tower.imbalance)
    console.print(
        f"Imbalance (busiest rank over mean): {found.imbalance:.2f} over all ranks; inside a tower at most "
        f"{worst.imbalance:.2f} (tower {worst.tower})."
    )
    console.print(
        f"To other towers: {human_bytes(sum(tower.peer_bytes for tower in found.towers))} of embeddings per forward "
        "pass, before tower modules make them smaller."
    )
    if planned.replicas is not None:
        _print_replicas(console, planned.replicas)
    for note in (*found.notes, *_notes(found)):
        console.print(Text.assemble(("Note:", "yellow"), f" {note}"))
    if out is not None:
        console.print(f"Written to {out}.", soft_wrap=True)


def _print_replicas(console: Console, costs: ReplicaCosts) -> None:
    """The paper's section 5; its formulas name the ranks of the job T."""
    rows = [
        ("memory, S (M - 1) / T", human_bytes(costs.overhead_bytes), human_bytes(costs.fullest_overhead_bytes)),
        ("a sync, 2 S (M - 1) / (T B)", _time(costs.sync_seconds), _time(costs.fullest_sync_seconds)),
        (f"a step, N = {costs.sync_every:,}", _time(costs.step_seconds), _time(costs.fullest_step_seconds)),
    ]
    title = f"M = {costs.num_replicas:,} replicas, T = {costs.num_ranks:,} ranks"
    known = rows if costs.sync_gb_per_s is not None else rows[:1]
    _print_fitting(console, title, ("replicas", "mean", "fullest rank"), known, leave_out=())
    left_out = f"; data-parallel tables ({costs.data_parallel_tables:,}), which no sync moves, are not counted"
    console.print(
        f"S = {human_bytes(costs.table_bytes)}: {human_bytes(costs.weight_bytes)} of weights and "
        f"{human_bytes(costs.state_bytes)} of optimizer state in one copy of the tables"
        f"{left_out if costs.data_parallel_tables else ''}."
    )
    if costs.sync_gb_per_s is None:
        console.print("How long a sync takes: give --sync-gb-per-s, what a rank sends to its replicas.")
    else:
        console.print(f"B = {costs.sync_gb_per_s:g} GB/s between replicas; they sync every N steps (--sync-every).")


def _time(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:,.3f} ms"


def _notes(found: TowerShardingPlan) -> Iterator[str]:
    if found.hardware.memory_per_rank is None:
        fullest = human_bytes(max(rank.memory for rank in found.ranks))
        yield (
            f"no memory limit given; the fullest rank needs {fullest} (--memory-gib, or sharding.memory_gib of a "
            "CONFIG)."
        )


def _print_fitting(
    console: Console, title: str, headers: Sequence[str], rows: Rows, *, leave_out: Sequence[str]
) -> list[str]:
    """Prints a table, without the first few columns of ``leave_out`` where the console is narrow.

    Returns:
        The headers that were printed.
    """
    for count in range(len(leave_out) + 1):
        keep = [i for i, header in enumerate(headers) if header not in leave_out[:count]]
        table = Table(*(headers[i] for i in keep), title=title)
        for row in rows:
            table.add_row(*(row[i] for i in keep))
        needed = Measurement.get(console, console.options.update(width=10**6), table).maximum
        for column in table.columns:
            folded = _FOLDED.get(str(column.header))
            if folded is None:
                column.justify, column.no_wrap = "right", True
            else:
                column.overflow = "fold"
                longest = max(len(cell) for cell in (str(column.header), *map(str, column.cells)))
                needed -= max(longest - folded, 0)
        if needed <= console.width:
            break
    console.width = max(console.width, needed)
    console.print(table)
    return [headers[i] for i in keep]


def _ranks(found: TowerShardingPlan, everything: bool) -> tuple[str, Sequence[str], Rows]:
    title, numbers = "Ranks, inside their towers", ("memory", "lookups/step", "sent/step", "cost")
    ranks = list(found.ranks)
    if everything or len(ranks) <= _SHOWN_RANKS:
        return title, ("tower", "rank", *numbers), [(str(r.tower), str(r.local), *_cells(r)) for r in ranks]
    ranks.sort(key=lambda rank: (-rank.seconds, rank.tower, rank.local))
    fullest = max(ranks, key=lambda rank: rank.memory)
    shown = (("busiest", ranks[0]), ("idlest", ranks[-1]), ("fullest", fullest))
    rows = [(name, f"{rank.tower}/{rank.local}", *_cells(rank)) for name, rank in shown]
    fields = ("memory", "lookups", "bytes_sent", "seconds")
    mean = {name: sum(getattr(rank, name) for rank in ranks) / len(ranks) for name in fields}
    mean["memory"] = int(mean["memory"])
    rows.append((f"mean of {len(ranks):,}", "", *_cells(RankLoad(tower=0, local=0, **mean))))
    return title, ("", "tower/rank", *numbers), rows


def _cells(rank: RankLoad) -> tuple[str, ...]:
    return (
        human_bytes(rank.memory),
        f"{rank.lookups:,.0f}",
        human_bytes(rank.bytes_sent),
        _time(rank.seconds),
    )


def _tables(found: TowerShardingPlan, everything: bool) -> tuple[str, Sequence[str], Rows]:
    ranked = sorted(found.tables, key=lambda entry: (-entry.seconds, entry.name))
    shown = ranked if everything else ranked[:_SHOWN_TABLES]
    rows = [(t.name, str(t.tower), human_bytes(t.memory), _time(t.seconds), t.reason) for t in shown]
    more = len(ranked) - len(shown)
    title = f"The {len(shown)} costliest tables; --all shows {more:,} more" if more else "Tables, costliest first"
    return title, ("table", "tower", "memory", "cost", "why"), rows
