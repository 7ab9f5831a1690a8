"""The report page: one HTML file with its pictures inside, which opens anywhere and loads nothing else.

Numbers come from `dmt.training.report.comparison` and the rows of `dmt.training.console`; the words around them are in
``page.html`` and ``sharding.html``, within the frame that all pages share (`dmt.report`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dmt.formatting import human_bytes, natural
from dmt.plan.towers import TowerPlan
from dmt.report import data_uri, render_page
from dmt.report.style import tower_badges
from dmt.sharding.plan import TowerShardingPlan
from dmt.sharding.schemes import TablePlacement
from dmt.training.console import cells, lookup, rows_of
from dmt.training.report.comparison import NOT_KNOWN, RunComparison, compare_runs, link_seconds, ratio
from dmt.training.report.curves import RUN_COLORS

__all__ = ["write_report"]

# Ranks and tables beyond this number are folded away.
_SHOWN = 40
# Rows per rank and step of training jobs that have more than a demo.
_LARGER_BATCHES = (1024, 4096, 16_384)
# Keys of `TowerPlan.affinity`, and the pairs that they are the mean affinity of.
_AFFINITIES = (
    ("within_towers", "two features of one tower"),
    ("within_strided_towers", "the same, had the towers been dealt out in turn (strided)"),
    ("between_towers", "two features of different towers"),
)
# The same of towers from interactions.
_SHARES = (
    ("share_within", "two features of one tower"),
    ("share_within_strided", "the same, had the towers been dealt out in turn (strided)"),
)


def write_report(
    path: Path,
    *,
    runs: Mapping[str, Mapping[str, Any]],
    plan: TowerPlan,
    sharding: TowerShardingPlan,
    pictures: tuple[Path, Path],
    data_description: str,
    link_gbit_per_s: float = 10.0,
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
        link_gbit_per_s: rate at which a host sends to the others, in 10^9 bits per second, for the estimate of a step.
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
        "cards": _cards(comparison, list(runs)),
        "notes": list(notes),
        "columns": list(zip(runs, RUN_COLORS, strict=False)),
        "rows": _rows(runs),
        "link_rate": f"{link_gbit_per_s:g}",
        "link_rows": _link_rows(runs, sharding, link_gbit_per_s),
        "towers": tower_badges(plan),
        "plan": plan,
        "sharding": _sharding(sharding, plan, towers),
        "affinities": _affinities(plan),
        "measure": plan.affinity.get("measure", "affinity"),
        "affinity_picture": data_uri(affinity_picture),
        "curves_picture": data_uri(curves_picture),
        "data_description": data_description,
        "run": towers,
        "versions": [f"{name} {version}" for name, version in towers["versions"].items() if version != "absent"],
    }
    return render_page(Path(__file__).with_name("page.html"), path, context)


def _cards(comparison: RunComparison, names: Sequence[str]) -> list[dict[str, str]]:
    """The three figures under the headline: big text, what it is, and the numbers behind it."""
    auc, behind = "not known", NOT_KNOWN
    if not math.isnan(comparison.auc_noise):
        measured = f"{comparison.auc_difference:+.4f}"
        auc = "within noise" if comparison.within_noise else measured
        behind = f"measured {measured}; one standard error is {comparison.auc_noise:.4f}"
    instead = f"{comparison.all_bytes[1]:,.0f} instead of {comparison.all_bytes[0]:,.0f} per sample"
    cards = (
        (auc, f"difference of AUC, {names[1]} minus {names[0]}", behind),
        (
            _percent(*comparison.all_bytes),
            "of the bytes across hosts",
            f"{instead}; embeddings alone, forward and backward: {_percent(*comparison.embedding_bytes)}",
        ),
        (
            _percent(*comparison.mflops),
            "of the MFLOPs of a training step",
            f"{comparison.mflops[1]:.3f} instead of {comparison.mflops[0]:.3f} per sample",
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


def _link_rows(
    runs: Mapping[str, Mapping[str, Any]], sharding: TowerShardingPlan, gbit_per_s: float
) -> list[tuple[str, list[str]]]:
    """Batch sizes, the runs' own and larger ones, with the time that a step of each run occupies a host's link."""
    own = sharding.workload.batch_size
    place: dict[str, Any] = {"measured_at": own, "num_hosts": sharding.topology.num_hosts, "gbit_per_s": gbit_per_s}
    return [
        (f"{size:,}", [_time(link_seconds(run, batch_size=size, **place)) for run in runs.values()])
        for size in sorted({own, *(size for size in _LARGER_BATCHES if size > own)})
    ]


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def _affinities(plan: TowerPlan) -> list[tuple[str, str]]:
    """Each mean affinity, or share of interaction, by its pairs.

    A tower of one feature has no pair inside, and a single tower none outside.
    """
    keys = _SHARES if plan.affinity.get("measure") == "interactions" else _AFFINITIES
    found = [(what, plan.affinity.get(key)) for key, what in keys]
    return [(what, "-" if mean is None else f"{mean:.3f}") for what, mean in found]


def _sharding(sharding: TowerShardingPlan, plan: TowerPlan, run: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and texts of the section on a sharding plan (``sharding.html``); ``run`` is the run's ``result.json``."""
    badges = tower_badges(plan)
    return {
        "sentence": sharding.summary,
        "ranks": _rank_rows(sharding, badges),
        "tables": _table_rows(sharding, badges),
        "shown": _SHOWN,
        "notes": list(sharding.notes),
        "batch_size": f"{sharding.workload.batch_size:,}",
    }


def _rank_rows(sharding: TowerShardingPlan, badges: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """In the order of the mesh; where they are too many to be shown, the busiest first."""
    mean = sum(rank.seconds for rank in sharding.ranks) / len(sharding.ranks)
    ranks = list(sharding.ranks)
    if len(ranks) > _SHOWN:
        ranks.sort(key=lambda rank: (-rank.seconds, rank.tower, rank.local))
    return [
        {
            "badge": badges[rank.tower],
            "local": rank.local,
            "cells": [human_bytes(rank.memory), f"{rank.lookups:,.0f}", human_bytes(rank.bytes_sent)],
            "load": f"{rank.seconds / mean:.2f}" if mean else "-",
            "width": f"{100 * rank.seconds / sharding.seconds:.1f}%" if sharding.seconds else "0%",
        }
        for rank in ranks
    ]


def _table_rows(sharding: TowerShardingPlan, badges: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The costliest first; tables of one tower with the same to say share a row."""
    alike: dict[tuple[Any, ...], list[str]] = {}
    for table in sorted(sharding.tables, key=lambda table: (-table.seconds, natural(table.name))):
        ranks = _rank_words(table.placement, sharding.topology.ranks_per_tower)
        key = (table.tower, table.placement.scheme, ranks, table.memory, table.reason)
        alike.setdefault(key, []).append(table.name)
    return [
        {
            "name": ", ".join(names),
            "badge": badges[tower],
            "scheme": scheme,
            "ranks": ranks,
            "memory": human_bytes(memory) + (" each" if len(names) > 1 else ""),
            # The reason begins with the scheme, which has a column of its own.
            "reason": reason.partition(": ")[2] or reason,
        }
        for (tower, scheme, ranks, memory, reason), names in alike.items()
    ]


def _rank_words(placement: TablePlacement, ranks_per_tower: int) -> str:
    ranks = sorted(set(placement.ranks))
    if len(ranks) == ranks_per_tower > 1:
        return "all"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))
