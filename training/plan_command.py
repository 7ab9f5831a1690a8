"""The body of ``dmt plan``: what is read, planned and printed. Needs no TorchRec, unless a CONFIG names the tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dmt.costs import Hardware, StepWorkload
from dmt.errors import InputError
from dmt.placement import SCHEMES
from dmt.plan import TowerPlan
from dmt.sharding_report import RankLoad, TowerSharding
from dmt.sharding_rules import Rule, ShardingRules
from dmt.tables import TableSpec, feature_names, table_specs
from dmt.topology import TowerTopology
from dmt.tower_sharding import plan_tables
from dmt.words import human_bytes

__all__ = ["print_sharding", "read_tables", "run_plan"]

_SHOWN_RANKS = 16
_SHOWN_TABLES = 20
_PIPE_WIDTH = 140


# What a config says, so that an option cannot contradict it.
_CONFIG_KEYS = {
    "tables": "data",
    "towers": "towers.plan",
    "num_towers": "topology.num_towers",
    "ranks_per_tower": "topology.ranks_per_tower",
    "num_replicas": "topology.num_replicas",
    "batch_size": "train.batch_size",
    "pooling": "sharding.pooling_factors",
    "memory_gib": "sharding.memory_gib",
    "optimizer": "optimizer.sparse",
    "lookup_gb_per_s": "sharding.lookup_gb_per_s",
    "link_gb_per_s": "sharding.link_gb_per_s",
    "exchange_us": "sharding.exchange_us",
    "scheme": "sharding.scheme",
    "pin": "sharding.tables",
}


def run_plan(config: str | None, overrides: Sequence[str], options: Mapping[str, Any]) -> TowerSharding:
    """Does what ``dmt plan`` was asked for; writes the plan where ``--out`` says.

    Args:
        config: a training config, whose run is planned as the trainer will, or None where the tables come from a file.
        overrides: ``section.key=value`` for the config.
        options: the command's options by name, with ``-`` as ``_``.

    Raises:
        InputError: options contradict each other, a file cannot be read, or the tables cannot be placed as asked.
    """
    found = _of_config(config, overrides, options) if config else _of_files(options)
    if options["out"]:
        found.save(options["out"])
    return found


def read_tables(path: Path) -> tuple[TableSpec, ...]:
    """Tables from a JSON file: a list of {name, num_embeddings, embedding_dim, feature_names}, or a tower plan's.

    Raises:
        InputError: the file is absent, not JSON, or an entry is malformed.
    """
    try:
        record = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--tables {path}: cannot be read ({error}). Name a JSON file.") from error
    except json.JSONDecodeError as error:
        raise InputError(f"--tables {path}, line {error.lineno}: not JSON ({error.msg}).") from error
    entries = record.get("tables") if isinstance(record, dict) else record
    if not isinstance(entries, list) or not entries:
        raise InputError(f"--tables {path}: holds no list of tables, as `dmt partition` records them in towers.json.")
    try:
        return table_specs(TableSpec(**{**entry, "feature_names": tuple(entry["feature_names"])}) for entry in entries)
    except (KeyError, TypeError) as error:
        raise InputError(
            f"--tables {path}: an entry is malformed ({error}); expected name, num_embeddings, embedding_dim and "
            "feature_names."
        ) from error


def _of_config(config: str, overrides: Sequence[str], options: Mapping[str, Any]) -> TowerSharding:
    given = [name for name in _CONFIG_KEYS if options[name] not in (None, ())]
    if given:
        raise InputError(
            f"--{given[0].replace('_', '-')} and a CONFIG contradict each other: the config decides it. Change "
            f"{_CONFIG_KEYS[given[0]]} there, or append section.key=value."
        )
    from dmt.training.build import open_data
    from dmt.training.config import load_config
    from dmt.training.sharding import tower_sharding

    run = load_config(config, overrides)
    if run.dataflow == "flat":
        raise InputError(
            f"Config {config} has the flat dataflow (model.arch={run.model.arch!r}), which TorchRec's own planner "
            "places. Append sharding.dataflow=sptt to plan its towers."
        )
    return tower_sharding(run, open_data(run).tables)


def _of_files(options: Mapping[str, Any]) -> TowerSharding:
    towers = TowerPlan.load(options["towers"]) if options["towers"] else None
    if options["tables"]:
        tables = read_tables(options["tables"])
    elif towers is not None and towers.tables:
        tables = towers.tables
    else:
        raise InputError(
            "There are no tables to plan. Give a CONFIG, or --tables FILE.json, or --towers with a plan that records "
            "its tables."
        )
    number = options["num_towers"] or (towers.num_towers if towers else 1)
    if towers is None:
        towers = TowerPlan.strided(feature_names(tables), number)
    elif towers.num_towers != number:
        raise InputError(
            f"--num-towers {number} does not fit {options['towers']}, which has {towers.num_towers} towers. Drop it."
        )
    known = {name: value for name, value in options.items() if value not in (None, ())}
    memory = known.get("memory_gib")
    rates = {name: known[name] for name in ("lookup_gb_per_s", "link_gb_per_s", "exchange_us") if name in known}
    return plan_tables(
        towers.tables_by_tower(tables),
        TowerTopology(
            num_towers=number,
            ranks_per_tower=known.get("ranks_per_tower", 8),
            num_replicas=known.get("num_replicas", 1),
        ),
        workload=StepWorkload(
            batch_size=known.get("batch_size", StepWorkload.batch_size),
            pooling_factors=_pooling(options["pooling"]),
            optimizer=known.get("optimizer", StepWorkload.optimizer),
        ),
        hardware=Hardware(memory_per_rank=None if memory is None else int(memory * 2**30), **rates),
        rules=ShardingRules(schemes=options["scheme"] or SCHEMES, tables=_pins(options["pin"])),
    )


def _pins(texts: Sequence[str]) -> dict[str, Rule]:
    pins: dict[str, Rule] = {}
    for text in texts:
        pattern, equals, schemes = text.rpartition("=")
        if not equals or not pattern or not schemes:
            raise InputError(f"--pin {text!r} is not of the form TABLES=SCHEME[,SCHEME], e.g. 't_ad*=row_wise'.")
        rule: Any = tuple(schemes.split(","))
        if pins.setdefault(pattern, rule) != rule:
            raise InputError(f"--pin gives {pattern!r} twice, with different schemes. Keep one.")
    return pins


def _pooling(texts: Sequence[str]) -> dict[str, float]:
    factors = {}
    for text in texts:
        feature, _, number = text.rpartition("=")
        try:
            factors[feature] = float(number)
        except ValueError as error:
            raise InputError(f"--pooling {text!r} is not of the form FEATURE=NUMBER, e.g. 'ad=12.5'.") from error
    return factors


def print_sharding(found: TowerSharding, *, everything: bool, out: Path | None) -> None:
    """Prints loads of ranks, the tables with their reasons, the imbalance and the notes.

    Args:
        found: the plan.
        everything: all ranks and tables, not the most telling.
        out: where the plan was written.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        # A pipe has no width; 80 columns would cut what a file has room for.
        console = Console(highlight=False, markup=False, emoji=False, width=_PIPE_WIDTH)
    console.print(_ranks(found, everything))
    console.print(_tables(found, everything))
    counts = {scheme: sum(t.placement.scheme == scheme for t in found.tables) for scheme in SCHEMES}
    schemes = ", ".join(f"{count:,} {scheme}" for scheme, count in counts.items() if count)
    console.print(f"{len(found.tables):,} tables: {schemes}.")
    worst = max(found.towers, key=lambda tower: tower.imbalance)
    console.print(
        f"Imbalance (busiest rank over mean): {found.imbalance:.2f} over all ranks; inside a tower at most "
        f"{worst.imbalance:.2f} (tower {worst.tower})."
    )
    console.print(
        f"To other towers: {human_bytes(sum(tower.peer_bytes for tower in found.towers))} of embeddings per forward "
        "pass, before tower modules make them smaller."
    )
    for note in found.notes:
        console.print(Text.assemble(("Note:", "yellow"), f" {note}"))
    if out is not None:
        console.print(f"Written to {out}.", soft_wrap=True)


def _ranks(found: TowerSharding, everything: bool) -> Table:
    table = Table("tower", "rank", "memory", "lookups/step", "sent/step", "cost", title="Ranks, inside their towers")
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    ranks = list(found.ranks)
    if everything or len(ranks) <= _SHOWN_RANKS:
        for rank in ranks:
            table.add_row(str(rank.tower), str(rank.local), *_cells(rank))
        return table
    table.columns[0].header = ""
    ranks.sort(key=lambda rank: (-rank.seconds, rank.tower, rank.local))
    fullest = max(ranks, key=lambda rank: rank.memory)
    for name, rank in (("busiest", ranks[0]), ("idlest", ranks[-1]), ("fullest", fullest)):
        table.add_row(name, f"{rank.tower}/{rank.local}", *_cells(rank))
    fields = ("memory", "lookups", "bytes_sent", "seconds")
    mean = {name: sum(getattr(rank, name) for rank in ranks) / len(ranks) for name in fields}
    mean["memory"] = int(mean["memory"])
    table.add_row(f"mean of {len(ranks):,}", "", *_cells(RankLoad(tower=0, local=0, **mean)))
    table.columns[1].header = "tower/rank"
    return table


def _cells(rank: RankLoad) -> tuple[str, ...]:
    return (
        human_bytes(rank.memory),
        f"{rank.lookups:,.0f}",
        human_bytes(rank.bytes_sent),
        f"{1e3 * rank.seconds:,.3f} ms",
    )


def _tables(found: TowerSharding, everything: bool) -> Table:
    table = Table("table", "tower", "memory", "cost", "why")
    for column in table.columns[1:4]:
        column.justify, column.no_wrap = "right", True
    # Names and reasons may take several lines; numbers are never cut.
    table.columns[0].overflow = table.columns[4].overflow = "fold"
    ranked = sorted(found.tables, key=lambda entry: (-entry.seconds, entry.name))
    shown = ranked if everything else ranked[:_SHOWN_TABLES]
    for entry in shown:
        cost = f"{1e3 * entry.seconds:,.3f} ms"
        table.add_row(entry.name, str(entry.tower), human_bytes(entry.memory), cost, entry.reason)
    more = len(ranked) - len(shown)
    table.title = f"The {len(shown)} costliest tables; --all shows {more:,} more" if more else "Tables, costliest first"
    return table
