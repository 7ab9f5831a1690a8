"""The partition report: pictures of a `Partition` and one HTML page that says what they show.

The judgements come from `dmt.partitioner.verdict`; the words around them are in ``report.html`` beside this file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import accumulate, pairwise
from pathlib import Path
from platform import python_version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmt import __version__
from dmt.formatting import counted, human_bytes
from dmt.partitioner.interactions import FeatureInteractions
from dmt.partitioner.partition import Partition
from dmt.partitioner.report import plot_affinity, plot_coordinates
from dmt.partitioner.verdict import (
    Verdict,
    deviations_from_random,
    judge_balance,
    judge_meaning,
    judge_stress,
    luck_bound,
    pairs_in_words,
    quantities,
    shares_inside,
)
from dmt.report import data_uri, render_page
from dmt.report.style import tower_badges

__all__ = ["write_partition_report"]

# Above this number of features, their lists start closed.
MOST_SHOWN = 64
_SHOWN_PAIRS = 20
_PACKAGES = ("torch", "numpy", "k-means-constrained", "matplotlib")


def write_partition_report(
    partition: Partition, folder: str | os.PathLike[str], *, links: Sequence[tuple[str, str]] = ()
) -> Path:
    """Writes ``report.html`` and its pictures into a folder, made if missing; returns the path of the page.

    The page holds its pictures and loads nothing, so it can be sent on alone. Beside it lie ``affinity.png`` and
    ``coordinates.png``, and for every other strategy that was tried ``affinity_2.png`` and so on. Files of the same
    names are replaced. ``links`` are addresses, relative to the folder, and texts of other pages. ``partition`` is what
    `TowerPartitioner.partition` returned (DMT paper, section 3.3).

    Raises:
        InputError: a file cannot be written.
    """
    target, loads = Path(folder), partition.loads
    features, samples = partition.affinity.num_features, partition.affinity.num_samples
    columns, cells, below = _tower_table(partition)
    context = {
        "links": list(links),
        "notes": list(partition.notes),
        "meaning": judge_meaning(partition).sentence,
        "columns": columns,
        "towers": [badge | {"cells": row} for badge, row in zip(tower_badges(partition.plan), cells, strict=True)],
        "below": below,
        "few_features": features <= MOST_SHOWN,
    }
    if partition.interactions is not None:
        return _write_interactions(partition, partition.interactions, target, context)
    categories = [load.category for load in loads]
    plan, towers = partition.plan, "tower" if partition.plan.num_towers == 1 else "towers"
    context |= {
        "heading": f"{counted(features, 'feature')} in {plan.num_towers:,} {plan.strategy} {towers}",
        "about": "What the tower partitioner found in the embeddings of a trained model"
        + (f", measured on {counted(samples, 'sample')}." if samples else "."),
        "cards": _cards(partition),
        "strategies": list(_strategies(partition, target)),
        "bound": f"{luck_bound([load.num_features for load in loads], categories=categories):.1f}",
        "by_category": any(categories),
        "measure": partition.affinity.measure,
        "column_shards": bool(plan.column_splits),
        "made": _made(partition),
    }
    return render_page(Path(__file__).with_name("report.html"), target / "report.html", context)


def _write_interactions(
    partition: Partition, found: FeatureInteractions, folder: Path, context: dict[str, Any]
) -> Path:
    """Writes the page of towers from interactions: shares inside, the towers, the matrix, the top pairs in words."""
    plan, shares = partition.plan, shares_inside(partition)
    context |= {
        "heading": f"{counted(partition.affinity.num_features, 'feature')} in {counted(plan.num_towers, 'tower')}",
        "about": "Which features predict the label together, measured on training rows without a model"
        + (f" ({found.num_rows:,} rows)." if found.num_rows else "."),
        "cards": [_card(judge_meaning(partition)), _card(judge_balance(partition))],
        "shares": [] if shares is None else [f"{share:.1%}" for share in shares],
        "pairs": pairs_in_words(partition, _SHOWN_PAIRS),
        "columns": [*context["columns"][:-1], "mean interaction within"],
        "picture": _picture(plot_affinity(partition.affinity, plan, folder / "interactions.png")),
        "strategy": plan.strategy,
        "made": [row for row in _made(partition) if row[0] not in ("Method", "Strategy")],
    }
    return render_page(Path(__file__).with_name("interactions.html"), folder / "report.html", context)


def _card(verdict: Verdict) -> dict[str, str]:
    return {"big": verdict.big, "what": verdict.what, "small": verdict.sentence}


def _picture(path: Path) -> str:
    return data_uri(path)


def _cards(partition: Partition) -> list[dict[str, str]]:
    """The three figures under the headline; the first one's sentence is the headline itself."""
    comparison = partition.comparison
    within, strided = _number(comparison.within), _number(comparison.within_strided)
    numbers = f"{within} within these towers, {_spread(partition)} within random ones, {strided} naive"
    meaning = _card(judge_meaning(partition)) | {"small": numbers}
    return [meaning, _card(judge_stress(partition)), _card(judge_balance(partition))]


def _tower_table(partition: Partition) -> tuple[list[str], list[list[str]], dict[str, list[str]]]:
    """Headings; the cells of each tower after its name; and those of the rows below all towers, by their name."""
    known = quantities(partition)
    columns = [[_amount(quantity.name, value) for value in quantity.values] for quantity in known]
    ordered = partition.affinity.permuted(partition.plan.features).matrix
    stops = accumulate((load.num_features for load in partition.loads), initial=0)
    blocks = [ordered[start:stop, start:stop] for start, stop in pairwise(stops)]
    columns.append([_number(_mean_of_pairs(block)) for block in blocks])
    below = {
        "mean": [_amount(quantity.name, sum(quantity.values) / len(quantity.values)) for quantity in known],
        "largest / mean": [_number(quantity.imbalance, digits=2) for quantity in known],
    }
    if any(quantity.limit is not None for quantity in known):
        below["limit"] = ["-" if q.limit is None else _amount(q.name, q.limit) for q in known]
    headings = ["tower", *(quantity.name for quantity in known), "affinity within"]
    return headings, list(map(list, zip(*columns, strict=True))), below


def _mean_of_pairs(matrix: NDArray[np.float64]) -> float | None:
    pairs = len(matrix) * (len(matrix) - 1)
    return float(matrix.sum() - np.trace(matrix)) / pairs if pairs else None


def _amount(quantity: str, value: float) -> str:
    return human_bytes(value) if quantity == "bytes" else f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def _strategies(partition: Partition, folder: Path) -> Iterator[dict[str, Any]]:
    """Each strategy with its numbers and its own two pictures."""
    for number, part in enumerate(partition.every, start=1):
        # By number: a strategy may be called anything, also what is no file name.
        suffix = "" if number == 1 else f"_{number}"
        deviations = deviations_from_random(part.comparison)
        cells = [
            *(_number(getattr(part.comparison, key)) for key in ("within", "between", "within_strided")),
            _spread(part),
            "-" if deviations is None else f"{deviations:+.1f}",
            f"{part.normalized_stress:.3f}",
        ]
        yield {
            "name": part.plan.strategy,
            "cells": cells,
            "stress": judge_stress(part).sentence,
            "affinity_picture": _picture(plot_affinity(part.affinity, part.plan, folder / f"affinity{suffix}.png")),
            "coordinates_picture": _picture(plot_coordinates(part, folder / f"coordinates{suffix}.png")),
        }


def _spread(partition: Partition) -> str:
    comparison = partition.comparison
    if comparison.within_random is None or comparison.std_random is None:
        return "-"
    return f"{comparison.within_random:.4f} \u00b1 {comparison.std_random:.4f}"


def _number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _made(partition: Partition) -> list[tuple[str, str]]:
    plan, affinity = partition.plan, partition.affinity
    dims = partition.points.shape[1]
    versions = [f"Python {python_version()}", f"dmt {__version__}", *(f"{name} {version(name)}" for name in _PACKAGES)]
    return [
        ("Command", plan.command or "not recorded"),
        ("Strategy", f"{plan.strategy}, {counted(dims, 'dimension')}"),
        ("Seed", "none" if plan.seed is None else str(plan.seed)),
        ("Affinity", f"digest {plan.affinity.get('digest') or affinity.to_summary()['digest']}"),
        ("Samples", "not recorded" if affinity.num_samples is None else f"{affinity.num_samples:,}"),
        ("Versions", ", ".join(versions)),
        ("Method", "Disaggregated Multi-Tower, arXiv 2403.00877, section 3.3"),
    ]
