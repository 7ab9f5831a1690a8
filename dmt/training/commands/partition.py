"""The body of ``dmt partition``: what is read, written and printed. A saved affinity needs no TorchRec."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.text import Text

from dmt.errors import InputError
from dmt.formatting import human_bytes, printable
from dmt.partitioner import FeatureAffinity, Partition, PartitionRules, TowerPartitioner, write_partition_report
from dmt.partitioner.report import strongest_rows
from dmt.partitioner.verdict import judge_balance, judge_meaning
from dmt.training.console import NameConsole, make_table

__all__ = ["INTERACTIONS", "STRATEGIES", "TOWER_MODULES", "print_partition", "run_partition"]

_SHOWN_FEATURES, _SHOWN_INTERACTIONS = 8, 5
INTERACTIONS = "interactions"
"""Strategy for towers from the interactions of features in rows."""
STRATEGIES = ("auto", "coherent", "diverse", INTERACTIONS)
TOWER_MODULES = {"dcn": "DCNTowerModule", "dlrm": "DLRMTowerModule", "dlrm-products": "DLRMProductsTowerModule"}
"""Classes of `dmt.models.tower_modules` by the name of their model."""


def run_partition(options: Mapping[str, Any], command: str) -> Partition:
    """Runs ``dmt partition`` and writes the plan; progress goes to stderr.

    Args:
        options: the command's options by name, with ``-`` as ``_``.
        command: command line that is recorded in the plan.

    Raises:
        InputError: options contradict each other, a file cannot be read, or no towers can be made as asked.
    """
    _check_options(options)
    keeps, strategy = _sense(options)
    rules = PartitionRules.load(options["rules"]) if options["rules"] else PartitionRules()
    if options["entity"]:
        rules = PartitionRules(**dict(rules) | {"entities": _entities(options["entity"])})
    sense: Any = ("together" if keeps else "apart") if strategy == INTERACTIONS else strategy
    partitioner = TowerPartitioner(
        num_towers=options["towers"],
        strategy=sense,
        keeps_interactions=keeps,
        balance_ratio=_balance_ratio(options["balance_ratio"]),
        seed=options["seed"],
        rules=rules,
        refine=options["refine"],
    )
    # Before a model is loaded and run.
    partitioner.check()
    try:
        measured = _measured(options, rules, strategy)
    except InputError as error:
        if options["strategy"] == "auto" and options["checkpoint"] is not None and strategy == INTERACTIONS:
            raise InputError(f"{error} Or use --strategy coherent, which needs the run's model instead.") from error
        raise
    if options["save_affinity"]:
        measured.save(options["save_affinity"])
        _say(f"{'Interactions' if measured.is_interactions else 'Affinity'} written to {options['save_affinity']}.")
    with Console(stderr=True).status("Partitioning ..."):
        found = partitioner.partition(measured)
    found = replace(found, plan=replace(found.plan, command=command))
    found.plan.save(options["out"])
    _say(f"Written to {options['out']}.")
    if options["report"]:
        page = write_partition_report(found, options["report"])
        _say(f"Report: {page}")
    return found


def print_partition(found: Partition) -> None:
    """Prints the towers and what they are worth."""
    # Names are any text: brackets in them are no markup and colons no emoji.
    console = NameConsole(highlight=False, markup=False, emoji=False)
    weighed = found.loads[0].work is not None
    rows = []
    for tower, load in zip(found.plan.towers, found.loads, strict=True):
        names = " ".join(tower.features[:_SHOWN_FEATURES])
        more = len(tower.features) - _SHOWN_FEATURES
        weights = (f"{load.work:,.0f}", human_bytes(load.num_bytes or 0)) if weighed else ()
        rows.append(
            (tower.name, f"{load.num_features:,}", *weights, names + (f" and {more:,} more" if more > 0 else ""))
        )
    headers = ("tower", "features", *(("elements/sample", "tables") if weighed else ()), "")
    console.print(make_table(headers, rows, right=range(1, len(headers) - 1)))
    for note in found.notes:
        console.print(Text.assemble(("Note:", "yellow"), f" {note}"))
    console.print(judge_meaning(found).sentence)
    if strongest := strongest_rows(found, _SHOWN_INTERACTIONS):
        headers = ("strongest interactions", "gain, nats a row", "of the loss", "tower")
        console.print(make_table(headers, strongest, right=(1, 2)))
    console.print(judge_balance(found).sentence)


def _check_options(options: Mapping[str, Any]) -> None:
    """Raises `InputError` for options that contradict each other."""
    strategy, module = options["strategy"], options["tower_module"]
    given = [name for name in ("checkpoint", "affinity") if options[name] is not None]
    # Rows alone have no resemblance.
    alone = options["data"] is not None and strategy in ("auto", INTERACTIONS) and module is not None
    cases = {
        "--tower-module goes with --strategy interactions: no other strategy asks for it.": (
            module is not None and strategy not in ("auto", INTERACTIONS)
        ),
        "Give either --checkpoint RUN_DIR or --affinity FILE.npz. Rows alone, --data FILE, need --tower-module "
        f"{' or '.join(TOWER_MODULES)}, for towers from interactions.": len(given) != 1 and not (not given and alone),
        "--data goes with --checkpoint: a saved affinity has been collected already.": (
            options["affinity"] is not None and options["data"] is not None
        ),
    }
    for message, is_wrong in cases.items():
        if is_wrong:
            raise InputError(message)


def _sense(options: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether the tower modules keep interactions, and the strategy, ``auto`` only for a saved file.

    Interactions are measured where tower modules keep them and rows are there, by
    benchmarks/results/interaction_towers.md; linear tower modules have no such evidence. Options that only resemblance
    has say that it is meant.
    """
    strategy, name, run = options["strategy"], options["tower_module"], options["checkpoint"]
    if name is None and run is not None and strategy in ("auto", INTERACTIONS):
        from dmt.training.trained import checkpoint_of

        model = checkpoint_of(run, functions=options["function"])[1].model
        name = None if model.factory is not None else model.arch.removeprefix("dmt-")
    if name is None and strategy == INTERACTIONS and options["affinity"] is None:
        raise InputError(
            f"--strategy interactions needs --tower-module {' or '.join(TOWER_MODULES)} here: nothing else says which "
            "tower modules the towers will have. For modules of your own, name the one that is alike."
        )
    keeps = True
    if name is not None:
        import dmt.models.tower_modules

        keeps = bool(getattr(dmt.models.tower_modules, TOWER_MODULES[name]).keeps_interactions)
    if strategy != "auto" or options["affinity"] is not None:
        return keeps, strategy
    if run is not None and (name is None or not keeps or not options["refine"]):
        return keeps, "coherent"
    _say(f"Strategy interactions, for tower modules of {name}. For the paper's, by resemblance: --strategy coherent.")
    return keeps, INTERACTIONS


def _measured(options: Mapping[str, Any], rules: PartitionRules, strategy: str) -> FeatureAffinity:
    """Reads or measures what the strategy needs; rules are checked against the features before that takes long."""
    if options["affinity"] is not None:
        loaded = FeatureAffinity.load(options["affinity"])
        if options["tower_module"] is not None and not loaded.is_interactions:
            raise InputError(f"--tower-module goes with interactions, but {options['affinity']} holds an affinity.")
        if loaded.is_interactions and options["tower_module"] is None:
            _say(
                f"{options['affinity']} holds interactions: features that interact share a tower, as suits tower "
                "modules of dcn. For those of DLRM, name them: --tower-module dlrm or dlrm-products."
            )
        return loaded
    from dmt.training.commands.demo import demo_settings
    from dmt.training.config import load_config
    from dmt.training.partition import affinity_of_run, interactions_of
    from dmt.training.trained import checkpoint_of

    run, data, functions = options["checkpoint"], options["data"], options["function"]

    def check(features: Sequence[Any]) -> None:
        names = [name for given in features for name in getattr(given, "feature_names", [given])]
        rules.for_features(names)
        _say(f"Measuring {'interactions' if strategy == INTERACTIONS else 'the affinity'} of {data or run}")

    if strategy != INTERACTIONS:
        return affinity_of_run(run, data_path=data, check=check, functions=functions)[0]
    config = load_config("demo", demo_settings(data)) if run is None else checkpoint_of(run, data, functions)[1]
    own_rows = run if data is None else None
    # The tables of a file alone are not known: how many columns they will have is up to the model.
    return interactions_of(config, with_tables=run is not None, run=own_rows, seed=options["seed"], check=check)


def _entities(options: Sequence[str]) -> dict[str, list[str]]:
    named: dict[str, list[str]] = {}
    for text in options:
        name, _, patterns = text.partition("=")
        if not name or not patterns or name in named:
            raise InputError(f"--entity {text!r} must be NAME=FEATURES, each name once, such as user='u_*,age'.")
        named[name] = patterns.split(",")
    return named


def _balance_ratio(text: str) -> float | None:
    try:
        return None if text == "free" else float(text)
    except ValueError as error:
        raise InputError(
            f"--balance-ratio {text!r} must be a number of at least 1, or 'free' for towers of any size."
        ) from error


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)
