"""The report page: one HTML file with its pictures inside, which opens anywhere and loads nothing else.

Numbers come from `dmt.training.report.finding` and the rows of `dmt.training.console`; the words around them are in
``page.html`` beside this file, within the frame that all pages share (`dmt.partitioner.report.frame`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dmt.errors import InputError
from dmt.partitioner.report.frame import data_uri, render_page
from dmt.partitioner.report.style import tower_color, tower_ink
from dmt.plan.towers import TowerPlan
from dmt.sharding.plan import TowerShardingPlan
from dmt.training.console import cells, rows_of
from dmt.training.report.curves import RUN_COLORS
from dmt.training.report.finding import Finding, compare_runs, lookup, ratio
from dmt.training.report.sharding import sharding_context

__all__ = ["write_report"]

# Keys of `TowerPlan.affinity`, what they are the mean affinity of, and the CSS class of their bar.
_AFFINITY_ROWS = (
    ("within_towers", "two features of one tower", "within"),
    ("within_strided_towers", "the same, had the towers been dealt out in turn (strided)", "strided"),
    ("between_towers", "two features of different towers", "between"),
)


def write_report(
    path: Path,
    *,
    runs: Mapping[str, Mapping[str, Any]],
    plan: TowerPlan,
    sharding: TowerShardingPlan,
    affinity_picture: Path,
    curves_picture: Path,
    data_description: str,
    notes: Sequence[str] = (),
) -> Path:
    """Writes the page that compares two runs; an existing file is replaced.

    Args:
        path: the HTML file to write; missing folders are made.
        runs: two results as in ``result.json``, by the name to show, the baseline first.
        plan: the towers of the second run, with the affinity numbers that `TowerPartitioner` leaves in it.
        sharding: where the second run had its tables, as in its ``sharding.json``.
        affinity_picture: what `plot_affinity` drew of ``plan`` (``.png``, ``.svg`` or ``.jpg``).
        curves_picture: what `plot_curves` drew of ``runs``, in the same order.
        data_description: what the models were trained on, in a few words.
        notes: warnings to show above the numbers, such as that of an AUC close to chance.

    Returns:
        The path written.

    Raises:
        InputError: there are not two runs, a run lacks a number, the plan has no affinity numbers or another number of
            towers than ``sharding``, or a picture cannot be read or embedded.

    Example:
        >>> import tempfile
        >>> from dmt.plan.tables import TableSpec
        >>> from dmt.plan.topology import TowerTopology
        >>> from dmt.sharding.plan_tables import plan_tables
        >>> run = {"eval_auc": 0.78, "eval_num_rows": 65536, "eval_label_rate": 0.25, "mflops_per_sample": 0.5}
        >>> run["bytes_per_sample"] = {"ids": 8.0, "forward": 64.0, "backward": 64.0, "dense": 4.0}
        >>> means = {"within_towers": 0.5, "between_towers": 0.25, "within_strided_towers": 0.3}
        >>> plan = TowerPlan.from_lists([["a", "b"], ["c", "d"]], affinity=means)
        >>> sizes = {"num_embeddings": 100, "embedding_dim": 8}
        >>> tables = [TableSpec(name=f"t_{name}", feature_names=(name,), **sizes) for name in "abcd"]
        >>> topology = TowerTopology(num_towers=2, ranks_per_tower=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     picture = Path(folder, "picture.svg")
        ...     _ = picture.write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
        ...     page = write_report(
        ...         Path(folder, "report.html"),
        ...         runs={"flat": run, "towers": run},
        ...         plan=plan,
        ...         sharding=plan_tables(plan.tables_by_tower(tables), topology),
        ...         affinity_picture=picture,
        ...         curves_picture=picture,
        ...         data_description="made-up clicks",
        ...     )
        ...     "<td>0.7800</td>" in page.read_text()
        True
    """
    finding = compare_runs(runs)
    if sharding.topology.num_towers != plan.num_towers:
        raise InputError(
            f"write_report: sharding has {sharding.topology.num_towers} towers, but plan has {plan.num_towers}. "
            "Give the sharding.json of the run that had this plan."
        )
    context = {
        "names": list(runs),
        "finding": finding,
        "cards": _cards(finding, list(runs)),
        "notes": list(notes),
        "columns": list(zip(runs, RUN_COLORS, strict=False)),
        "rows": _rows(runs),
        "towers": _towers(plan),
        "plan": plan,
        "sharding": sharding_context(sharding, plan, list(runs.values())[1]),
        "affinity_rows": _affinity_rows(plan),
        "affinity_sentence": _affinity_sentence(plan),
        "affinity_picture": data_uri(affinity_picture, place="write_report: affinity_picture"),
        "curves_picture": data_uri(curves_picture, place="write_report: curves_picture"),
        "data_description": data_description,
        "evaluated": " and ".join(dict.fromkeys(_evaluated(run) for run in runs.values())),
        "ranks": " and ".join(dict.fromkeys(str(run.get("world_size", "?")) for run in runs.values())),
        "versions": _versions(runs),
    }
    return render_page(Path(__file__).with_name("page.html"), path, context)


def _cards(finding: Finding, names: Sequence[str]) -> list[dict[str, str]]:
    """The three figures under the headline: big text, what it is, and the numbers behind it."""
    measured = f"{finding.auc_difference:+.4f}"
    if finding.obstacle:
        auc, behind = "not known", finding.obstacle
    else:
        auc = "within noise" if finding.within_noise else measured
        behind = f"measured {measured}; one standard error is {finding.auc_noise:.4f}"
    return [
        {
            "big": auc,
            "what": f"difference of AUC, {names[1]} minus {names[0]}",
            "small": behind,
        },
        {
            "big": _percent(*finding.embedding_bytes),
            "what": "of the embedding bytes across hosts, forward and backward",
            "small": f"{finding.embedding_bytes[1]:,.0f} instead of {finding.embedding_bytes[0]:,.0f} per sample; with "
            f"ids and dense gradients {_percent(*finding.all_bytes)}",
        },
        {
            "big": _percent(*finding.mflops),
            "what": "of the MFLOPs of a training step",
            "small": f"{finding.mflops[1]:.3f} instead of {finding.mflops[0]:.3f} per sample",
        },
    ]


def _percent(first: float, second: float) -> str:
    part = ratio(first, second)
    return "none" if part is None and not second else "-" if part is None else f"{part:.0%}"


def _rows(runs: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Label and cells of each row of the table; the last cell is second / first."""
    first, second = runs.values()
    rows = rows_of(runs.values())
    shown = []
    for (label, path, _), *values in zip(rows, cells(first, rows), cells(second, rows), strict=True):
        quotient = ratio(lookup(first, path), lookup(second, path))
        shown.append((label, [*values, "-" if quotient is None else f"{quotient:.3f}"]))
    return shown


def _towers(plan: TowerPlan) -> list[dict[str, Any]]:
    """Name, features and colours of each tower, the colours as in `plot_affinity`."""
    return [
        {"name": tower.name, "features": tower.features, "color": tower_color(number), "ink": tower_ink(number)}
        for number, tower in enumerate(plan.towers)
    ]


def _affinity_rows(plan: TowerPlan) -> list[dict[str, str]]:
    missing = [key for key, _, _ in _AFFINITY_ROWS if key not in plan.affinity]
    if missing:
        raise InputError(
            f"write_report: plan.affinity has no {missing[0]!r} (it has {sorted(plan.affinity) or 'nothing'}; the "
            f"plan's strategy is {plan.strategy!r}). Give a plan made by TowerPartitioner or `dmt partition`."
        )
    # A tower of one feature has no pair inside, and a single tower none outside: the mean is None then.
    known = [value for key, _, _ in _AFFINITY_ROWS if (value := plan.affinity[key]) is not None]
    longest = max(known, default=0.0) or 1.0
    return [
        {
            "what": what,
            "kind": kind,
            "value": "no such pair" if (value := plan.affinity[key]) is None else f"{value:.3f}",
            "width": f"{100 * (value or 0.0) / longest:.1f}%",
        }
        for key, what, kind in _AFFINITY_ROWS
    ]


def _affinity_sentence(plan: TowerPlan) -> str:
    """What the three means say about a learned plan; empty where the plan was not learned or there is no pair."""
    within, strided, between = (plan.affinity[key] for key, _, _ in _AFFINITY_ROWS)
    if plan.strategy not in ("coherent", "diverse") or not within or not strided or not between:
        return ""
    numbers = (
        f"{within / between:.2f} times those between different towers and {within / strided:.2f} times those within "
        "strided towers"
    )
    if plan.strategy == "coherent":
        met = within > max(strided, between)
        wish = "A coherent plan puts features together that are alike"
    else:
        met = within < min(strided, between)
        wish = "A diverse plan puts features together that are unlike"
    verdict = "it did so here" if met else "it did not succeed here"
    return f"{wish}, and {verdict}: the affinities within its towers are {numbers}."


def _evaluated(run: Mapping[str, Any]) -> str:
    return f"{run['eval_num_rows']:,.0f} rows, {run['eval_label_rate']:.1%} of them clicks"


def _versions(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """``package version``, each once; a package that is absent in both runs is left out."""
    found = [f"{name} {version}" for run in runs.values() for name, version in run.get("versions", {}).items()]
    return [text for text in dict.fromkeys(found) if not text.endswith(" absent")]
