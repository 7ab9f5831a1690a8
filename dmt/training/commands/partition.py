"""The body of ``dmt partition``: what is read, written and printed. A saved affinity needs no TorchRec."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.text import Text

from dmt.errors import InputError, did_you_mean
from dmt.formatting import human_bytes, printable, shorten
from dmt.partitioner import (
    FeatureAffinity,
    FeatureInteractions,
    Partition,
    PartitionRules,
    TowerPartitioner,
    plot_affinity,
    write_partition_report,
)
from dmt.partitioner.verdict import judge_balance, judge_meaning, pairs_in_words
from dmt.plan.tables import TableSpec, feature_names
from dmt.plan.towers import PlanComparison
from dmt.report.style import new_figure
from dmt.training.commands.outputs import Kind, check_output_files, files_of_run
from dmt.training.console import NameConsole, make_table

__all__ = ["INTERACTIONS", "TOWER_MODULES", "print_compared", "print_partition", "run_partition", "sense_of"]

_SHOWN_FEATURES = 8
_SHOWN_PAIRS = 5
_SHOWN_MOVED = 10
AUTO = "auto"
INTERACTIONS = "interactions"
"""Strategy for towers from the interactions of features in rows."""
TOWER_MODULES = {
    "dcn": "DCNTowerModule",
    "dlrm": "DLRMTowerModule",
    "dlrm-products": "DLRMProductsTowerModule",
}


def run_partition(options: Mapping[str, Any], command: str) -> Partition:
    """Runs ``dmt partition`` and writes the plan; progress goes to stderr.

    Args:
        options: the command's options by name, with ``-`` as ``_``.
        command: command line that is recorded in the plan.

    Raises:
        InputError: options contradict each other, a file cannot be read, or no towers can be made as asked.
    """
    is_auto = options["strategy"] == AUTO
    if is_auto and options["towers"] is not None:
        options = _chosen(options)
    _check_options(options)
    by_interactions = options["strategy"] == INTERACTIONS
    _check_outputs(options)
    rules = PartitionRules.load(options["rules"]) if options["rules"] else PartitionRules()
    if options["entity"]:
        rules = PartitionRules(**dict(rules) | {"entities": _entities(options)})
    strategy: Any = _sense(options) if by_interactions else options["strategy"]
    # Made first: what is wrong with it shows before a model is loaded and run.
    partitioner = TowerPartitioner(
        num_towers=options["towers"],
        strategy=strategy,
        balance_ratio=_balance_ratio(options["balance_ratio"]),
        dims=options["dims"],
        seed=options["seed"],
        rules=rules,
        split_columns=options["split_columns"],
        refine=options["refine"],
    )
    try:
        affinity = _interactions(options, rules) if by_interactions else _affinity(options, rules)
    except InputError as error:
        if is_auto and options["checkpoint"] is not None and str(error).startswith("FeatureInteractions.collect"):
            raise InputError(f"{error} Or use --strategy coherent, which needs the run's model instead.") from error
        raise
    if options["save_affinity"]:
        affinity.save(options["save_affinity"])
        _say(f"{'Interactions' if by_interactions else 'Affinity'} written to {options['save_affinity']}.")
    with Console(stderr=True).status("Partitioning ..."):
        found = partitioner.partition(affinity)
    out: Path = options["out"]
    others = tuple(replace(other, plan=replace(other.plan, command=command)) for other in found.alternatives)
    found = replace(found, plan=replace(found.plan, command=command), alternatives=others)
    found.plan.save(out)
    for other in others:
        other.plan.save(_beside(out, other.plan.strategy))
    try:
        if options["picture"]:
            plot_affinity(found.affinity, found.plan, options["picture"])
            _say(f"Picture written to {options['picture']}.")
        if options["report"]:
            write_partition_report(found, options["report"])
    except InputError as error:
        raise InputError(f"{error} The plan itself was written to {out}.") from error
    if options.get("as_json"):
        # stdout is the plan; what print_partition tells goes beside it.
        for line in _places(found, out, options["report"]):
            _say(line)
    return found


def print_partition(found: Partition, out: Path, report: Path | None) -> None:
    """Prints the towers, what they are worth, and where they were written."""
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
    for partition in found.every:
        label = f"{partition.plan.strategy}: " if found.alternatives else ""
        console.print(f"{label}{judge_meaning(partition).sentence}")
        for line in pairs_in_words(partition, _SHOWN_PAIRS):
            console.print(f"- {line}")
    console.print(judge_balance(found).sentence)
    for line in _places(found, out, report):
        console.print(line, soft_wrap=True)


def print_compared(found: PlanComparison, *, as_json: bool) -> None:
    """Prints how far two plans put the same features together."""
    if as_json:
        print(json.dumps(asdict(found), indent=1))
        return
    console = NameConsole(highlight=False, markup=False, emoji=False)
    console.print(
        f"Rand index {found.rand_index:.3f}, adjusted for chance {found.adjusted_rand_index:.3f}: 1 where both plans "
        "have the same towers, adjusted about 0 where they are unrelated."
    )
    for what, pairs in (("the first plan only", found.only_first), ("the second plan only", found.only_second)):
        shown = shorten([f"{a} with {b}" for a, b in pairs], ", ", most=_SHOWN_MOVED)
        console.print(f"Pairs that share a tower in {what}: {len(pairs):,}{f', {shown}' if pairs else ''}.")


def _places(found: Partition, out: Path, report: Path | None) -> Iterator[str]:
    """Yields a line for each plan and report that was written."""
    yield f"Written to {out}."
    for other in found.alternatives:
        beside = _beside(out, other.plan.strategy)
        yield f"Also tried: {other.plan.strategy}, in {beside}. Only training tells which is better."
    if report is not None:
        yield f"Report: {report / 'report.html'}"


def _check_options(options: Mapping[str, Any]) -> None:
    """Raises `InputError` for options that are absent, unknown or contradict each other."""
    if options["towers"] is None:
        raise InputError(
            "Give --towers, the number of towers; or --compare A.json B.json for two plans that are there."
        )
    strategies = (AUTO, "coherent", "diverse", "both", INTERACTIONS)
    if options["strategy"] not in strategies:
        raise InputError(
            f"--strategy {options['strategy']!r} is unknown.{did_you_mean(options['strategy'], strategies)} Use one of "
            f"{', '.join(strategies)}."
        )
    by_interactions = options["strategy"] == INTERACTIONS
    if options["max_triples"] and (not by_interactions or options["affinity"] is not None):
        raise InputError(
            "--max-triples needs --strategy interactions and rows to measure; a saved file has been measured already."
        )
    if options["tower_module"] is not None and not by_interactions:
        raise InputError("--tower-module goes with --strategy interactions: no other strategy asks for it.")
    alone = by_interactions and options["data"] is not None and options["affinity"] is None
    if (options["checkpoint"] is None) == (options["affinity"] is None) and not (alone and not options["checkpoint"]):
        raise InputError(
            "Give either --checkpoint RUN_DIR or --affinity FILE.npz. Rows alone, --data FILE, need --tower-module "
            f"{' or '.join(TOWER_MODULES)}, for towers from interactions."
        )
    if options["affinity"] is not None and options["data"] is not None:
        raise InputError("--data goes with --checkpoint: a saved affinity has been collected already.")


def _check_outputs(options: Mapping[str, Any]) -> None:
    """Raises `InputError` for an output that cannot be written: a large partition takes minutes."""
    if options["picture"] is not None:
        # Made and dropped: it refuses a suffix that is no picture format.
        new_figure(options["picture"], size=(1.0, 1.0), caller="--picture")
    given: dict[str, tuple[Path | None, Kind]] = {
        "--out": (options["out"], "tower plan"),
        "--report": (options["report"], "folder"),
        "--picture": (options["picture"], "picture"),
        "--save-affinity": (options["save_affinity"], "matrix"),
    }
    run: Path | None = options["checkpoint"]
    rows = [options["data"]] if run is None else files_of_run(run, options["data"])
    check_output_files(given, [options["affinity"], options["rules"], *rows])


def _affinity(options: Mapping[str, Any], rules: PartitionRules) -> FeatureAffinity:
    if options["affinity"] is not None:
        return FeatureAffinity.load(options["affinity"])
    from dmt.training.partition import affinity_of_run

    def check(tables: Sequence[TableSpec]) -> None:
        rules.for_features(feature_names(tables))
        _say(f"Collecting the affinity of {options['checkpoint']}")

    affinity, _ = affinity_of_run(
        options["checkpoint"], data_path=options["data"], check=check, functions=options["function"]
    )
    return affinity


def _chosen(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options with the meaning of ``auto``: interactions where towers keep them and rows are there.

    Else coherent. By benchmarks/results/interaction_towers.md, where DCN's towers of interactions were not below
    coherent ones. Products were never compared with coherent towers, and linear tower modules have no such evidence.
    A saved file is what it holds, and options that only affinities have say that these are meant.
    """
    coherent = {**options, "strategy": "coherent"}
    given: str | None = options["tower_module"]
    if options["affinity"] is not None:
        if not _holds_interactions(options["affinity"]):
            return coherent
        if given is None:
            _say(
                f"{options['affinity']} holds interactions: features that interact share a tower, as suits tower "
                "modules of dcn. For those of DLRM, name them: --tower-module dlrm or dlrm-products."
            )
        return {**options, "strategy": INTERACTIONS, "tower_module": given or "dcn"}
    if options["dims"] != 2 or not options["refine"]:
        return coherent
    name = _tower_module(options)
    if name not in TOWER_MODULES:
        return coherent if given is None else {**options, "strategy": INTERACTIONS}
    # Rows alone have no resemblance: there, a module that keeps nothing has its interactions parted.
    if sense_of(name) != "together" and options["checkpoint"] is not None:
        return {**coherent, "tower_module": None}
    _say(f"Strategy interactions, for tower modules of {name}. For the paper's, by resemblance: --strategy coherent.")
    return {**options, "strategy": INTERACTIONS}


def _holds_interactions(path: Path) -> bool:
    try:
        # Opened here, because numpy leaves a broken archive open.
        with path.open("rb") as file:
            return "gains" in np.load(file, allow_pickle=False).files
    except Exception:  # What cannot be read is refused with its reason when it is loaded.
        return False


def _tower_module(options: Mapping[str, Any]) -> str | None:
    """Returns the name of the tower module of the options or of the run, if any."""
    name: str | None = options["tower_module"]
    if name is None and options["checkpoint"] is not None:
        from dmt.training.trained import checkpoint_of

        model = checkpoint_of(options["checkpoint"], functions=options["function"])[1].model
        if model.factory is None:
            name = model.arch.removeprefix("dmt-")
    return name


def _sense(options: Mapping[str, Any]) -> Literal["together", "apart"]:
    """``together`` or ``apart``, by the tower module of the options or of the run."""
    name = _tower_module(options)
    if name is None:
        raise InputError(
            f"--strategy interactions needs --tower-module {' or '.join(TOWER_MODULES)} here: nothing else says which "
            "tower modules the towers will have. For modules of your own, name the one that is alike."
        )
    if name not in TOWER_MODULES:
        raise InputError(
            f"--tower-module {name!r} must be one of {', '.join(TOWER_MODULES)}: features that interact share a tower "
            "whose module keeps their interactions, and part for one that does not."
        )
    return sense_of(name)


def sense_of(tower_module: str) -> Literal["together", "apart"]:
    """Returns where features that interact belong, as the tower module (a name of `TOWER_MODULES`) declares."""
    import dmt.models.tower_modules

    kind = getattr(dmt.models.tower_modules, TOWER_MODULES[tower_module])
    return "together" if kind.keeps_interactions else "apart"


def _interactions(options: Mapping[str, Any], rules: PartitionRules) -> FeatureInteractions:
    if options["affinity"] is not None:
        return FeatureInteractions.load(options["affinity"])
    from dmt.training.commands.demo import demo_settings
    from dmt.training.config import load_config
    from dmt.training.partition import interactions_of
    from dmt.training.trained import checkpoint_of

    run: Path | None = options["checkpoint"]
    if run is not None:
        config = checkpoint_of(run, options["data"], options["function"])[1]
    else:
        config = load_config("demo", demo_settings(options["data"]))

    def check(features: Sequence[str]) -> None:
        rules.for_features(features)
        _say(f"Measuring interactions in the training rows of {options['data'] or run}")

    # The tables of a file alone are not known: how many columns they will have is up to the model.
    return interactions_of(
        config,
        with_tables=run is not None,
        run=None if options["data"] is not None else run,
        seed=options["seed"],
        max_triples=options["max_triples"],
        check=check,
    )


def _entities(options: Mapping[str, Any]) -> dict[str, list[str]]:
    if "auto" in options["entity"]:
        if len(options["entity"]) > 1 or options["checkpoint"] is None:
            raise InputError(
                "--entity auto measures all entities from the rows of --checkpoint RUN_DIR: give it alone and with "
                "that, or name the entities, such as --entity user='u_*'."
            )
        from dmt.training.partition import entities_of_run

        found = entities_of_run(
            options["checkpoint"],
            num_towers=options["towers"],
            data_path=options["data"],
            functions=options["function"],
        )
        for name, features in found.items():
            _say(f"Entity {name}: {' '.join(features)}")
        return found
    found = {}
    for text in options["entity"]:
        name, _, patterns = text.partition("=")
        if not name or not patterns or name in found:
            raise InputError(f"--entity {text!r} must be NAME=FEATURES, each name once, such as user='u_*,age'.")
        found[name] = patterns.split(",")
    return found


def _balance_ratio(text: str) -> float | None:
    if text == "free":
        return None
    try:
        return float(text)
    except ValueError as error:
        raise InputError(
            f"--balance-ratio {text!r} must be a number of at least 1, or 'free' for towers of any size."
        ) from error


def _beside(out: Path, strategy: str) -> Path:
    return out.with_name(f"{out.stem}.{strategy}{out.suffix}")


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)
