"""The report page: one HTML file with its pictures inside, which opens anywhere and loads nothing else.

Numbers come from `dmt.training.report.comparison` and the rows of `dmt.training.console`; the words around them are in
``page.html``, within the frame that both reports share (`dmt.report`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dmt.plan.towers import TowerPlan
from dmt.report import data_uri, render_page
from dmt.report.style import tower_badges
from dmt.sharding.plan import TowerShardingPlan
from dmt.training.console import cells, lookup, rows_of
from dmt.training.report.comparison import NOT_KNOWN, RunComparison, compare_runs, ratio
from dmt.training.report.curves import RUN_COLORS

__all__ = ["write_report"]

# Keys of `TowerPlan.affinity`, and the pairs that they are the mean affinity of.
_AFFINITIES = (
    ("within", "two features of one tower"),
    ("within_strided", "the same, had the towers been dealt out in turn (strided)"),
    ("between", "two features of different towers"),
)
# The same of towers from interactions.
_SHARES = (
    ("within", "two features of one tower"),
    ("within_strided", "the same, had the towers been dealt out in turn (strided)"),
)


def write_report(
    path: Path,
    *,
    runs: Mapping[str, Mapping[str, Any]],
    plan: TowerPlan,
    sharding: TowerShardingPlan,
    pictures: tuple[Path, Path],
    data_description: str,
    notes: Sequence[str] = (),
) -> Path:
    """Writes the page that compares two runs; an existing file is replaced.

    It links to the partitioner's report, if that lies beside the first picture.

    Args:
        path: the HTML file to write; missing folders are made.
        runs: the ``result.json`` of two runs, by the name to show, the baseline first.
        plan: the towers of the second run, with the affinity numbers that `TowerPartitioner` leaves in it.
        sharding: where the second run had its tables.
        pictures: what `plot_affinity` drew of ``plan``, and `plot_curves` of ``runs``, in the same order.
        data_description: what the models were trained on, in a few words.
        notes: warnings to show above the numbers.

    Raises:
        InputError: a picture cannot be read or embedded, or the page cannot be written.
    """
    comparison, towers = compare_runs(runs), list(runs.values())[1]
    affinity_picture, curves_picture = pictures
    towers_page = affinity_picture.with_name("report.html")
    has_page = towers_page.exists() and towers_page.absolute() != path.absolute()
    address = Path(os.path.relpath(towers_page, path.parent)).as_posix()
    context = {
        "links": [(address, "The towers, judged against random ones")] if has_page else [],
        "names": list(runs),
        "comparison": comparison,
        "cards": _cards(comparison, runs),
        "notes": list(notes),
        "columns": list(zip(runs, RUN_COLORS, strict=False)),
        "rows": _rows(runs),
        "towers": tower_badges(plan),
        "plan": plan,
        "sharding": [sharding.summary, *sharding.notes],
        "affinities": _affinities(plan),
        "measure": plan.affinity.get("measure", "affinity"),
        "affinity_picture": data_uri(affinity_picture),
        "curves_picture": data_uri(curves_picture),
        "data_description": data_description,
        "run": towers,
        "versions": [f"{name} {version}" for name, version in towers["versions"].items() if version != "absent"],
    }
    return render_page(Path(__file__).with_name("page.html"), path, context)


def _cards(comparison: RunComparison, runs: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """The three figures under the headline: big text, what it is, and the numbers behind it."""
    (first_name, first), (name, second) = runs.items()
    auc, behind = "not known", NOT_KNOWN
    if not math.isnan(comparison.auc_noise):
        measured = f"{comparison.auc_difference:+.4f}"
        auc = "within noise" if comparison.within_noise else measured
        behind = f"measured {measured}; one standard error is {comparison.auc_noise:.4f}"
    every, embeddings = (
        [sum(run["bytes_per_sample"][kind] for kind in kinds) for run in (first, second)]
        for kinds in (("ids", "forward", "backward", "dense"), ("forward", "backward"))
    )
    mflops = first["mflops_per_sample"], second["mflops_per_sample"]
    cards = (
        (auc, f"difference of AUC, {name} minus {first_name}", behind),
        (
            _percent(*every),
            "of the bytes across hosts",
            f"{every[1]:,.0f} instead of {every[0]:,.0f} per sample; embeddings alone, forward and backward: "
            f"{_percent(*embeddings)}",
        ),
        (
            _percent(*mflops),
            "of the MFLOPs of a training step",
            f"{mflops[1]:.3f} instead of {mflops[0]:.3f} per sample",
        ),
    )
    return [{"big": big, "what": what, "small": small} for big, what, small in cards]


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


def _affinities(plan: TowerPlan) -> list[tuple[str, str]]:
    """Each mean affinity, or share of interaction, by its pairs.

    A tower of one feature has no pair inside, and a single tower none outside.
    """
    keys = _SHARES if plan.affinity.get("measure") == "interactions" else _AFFINITIES
    found = [(what, plan.affinity.get(key)) for key, what in keys]
    return [(what, "-" if mean is None else f"{mean:.3f}") for what, mean in found]
