"""The body of ``dmt plan``: what is read, planned and printed. Needs no TorchRec, unless a CONFIG names the tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dmt.costs import Hardware, SparseOptimizer, StepWorkload
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


class _Source(NamedTuple):
    """What is planned, before options change it."""

    tables: Sequence[TableSpec]
    towers: TowerPlan
    topology: TowerTopology
    batch_size: int
    optimizer: SparseOptimizer


def run_plan(config: str | None, overrides: Sequence[str], options: Mapping[str, Any]) -> TowerSharding:
    """Does what ``dmt plan`` was asked for; writes the plan where ``--out`` says.

    Args:
        config: a training config, or None where the tables come from a file.
        overrides: ``section.key=value`` for the config.
        options: the command's options by name, with ``-`` as ``_``.

    Raises:
        InputError: options contradict each other, a file cannot be read, or the tables cannot be placed as asked.
    """
    source = _of_config(config, overrides, options) if config else _of_files(options)
    batch, optimizer = options["batch_size"], options["optimizer"]
    memory = options["memory_gib"]
    rates = {name: options[name] for name in ("lookup_gb_per_s", "link_gb_per_s", "exchange_us") if options[name]}
    schemes = options["scheme"] or SCHEMES
    found = plan_tables(
        source.towers.tables_by_tower(source.tables),
        source.topology,
        workload=StepWorkload(
            batch_size=source.batch_size if batch is None else batch,
            pooling_factors=_pooling(options["pooling"]),
            optimizer=cast("SparseOptimizer", optimizer or source.optimizer),
        ),
        hardware=Hardware(memory_per_rank=None if memory is None else int(memory * 2**30), **rates),
        rules=ShardingRules(schemes=schemes, tables=_pins(options["pin"])),
    )
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


def _of_config(config: str, overrides: Sequence[str], options: Mapping[str, Any]) -> _Source:
    given = [name for name in ("tables", "towers", "num_towers", "ranks_per_tower", "num_replicas") if options[name]]
    if given:
        raise InputError(
            f"--{given[0].replace('_', '-')} and a CONFIG contradict each other: the config has tables, towers and "
            "topology. Change it by section.key=value."
        )
    from dmt.training.build import tower_plan
    from dmt.training.config import load_config
    from dmt.training.data import open_source

    run = load_config(config, overrides)
    tables = open_source(run.data, embedding_dim=run.model.embedding_dim).tables
    return _Source(tables, tower_plan(run, tables), run.topology.build(), run.train.batch_size, run.optimizer.sparse)


def _of_files(options: Mapping[str, Any]) -> _Source:
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
    topology = TowerTopology(
        num_towers=number,
        ranks_per_tower=8 if options["ranks_per_tower"] is None else options["ranks_per_tower"],
        num_replicas=1 if options["num_replicas"] is None else options["num_replicas"],
    )
    if towers is None:
        towers = TowerPlan.strided(feature_names(tables), number)
    elif towers.num_towers != number:
        raise InputError(
            f"--num-towers {number} does not fit {options['towers']}, which has {towers.num_towers} towers. Drop it."
        )
    return _Source(tables, towers, topology, StepWorkload().batch_size, StepWorkload().optimizer)


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
