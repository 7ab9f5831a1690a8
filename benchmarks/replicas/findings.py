"""From the records of the replica study to its findings: gaps of NE against M = 1, trends, noise, growth of moments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.replicas.runs import MOMENT_SCALES, Records, ReplicaRun
from benchmarks.towers.statistics import holm
from dmt.errors import InputError

__all__ = [
    "AGAIN",
    "gap_findings",
    "growth_findings",
    "noise_findings",
    "summary_of_pairs",
    "trend_findings",
    "tune_findings",
    "whole_seeds",
]

Cell = tuple[int, float]
"""M and c."""
AGAIN: Cell = (1, 1.0)
"""M = 1 once more, the tables started 1e-6 larger: its gap is noise."""
Group = tuple[str, str, float]
"""Part, data set and learning rate of the tables: what one M = 1 is the baseline of."""
Gaps = dict[Cell, dict[int, float]]
"""By cell and seed, in percent."""


def whole_seeds(records: Records, runs: Iterable[ReplicaRun]) -> Records:
    """The records of ``runs``, less those of a seed, part, data set and rate that are not all done.

    What has fewer than two seeds then, and so no spread, is left out too.

    Raises:
        InputError: nothing is left.
    """
    runs = list(runs)
    short = {(_group(run), run.seed) for run in runs if run not in records}
    seeds: dict[Group, set[int]] = {}
    for run in runs:
        if (_group(run), run.seed) not in short:
            seeds.setdefault(_group(run), set()).add(run.seed)
    whole = {
        run: records[run] for run in runs if run.seed in seeds.get(_group(run), ()) and len(seeds[_group(run)]) > 1
    }
    if not whole:
        raise InputError("Fewer than two seeds of the study are done. Let it run on.")
    return whole


def summary_of_pairs(values: Sequence[float]) -> dict[str, Any]:
    """Differences over seeds: median, quartiles, mean with its 95 % interval, signs, paired t-test against 0.

    Args:
        values: one difference for each seed, at least two.

    Example:
        >>> found = summary_of_pairs([0.1, 0.2, 0.3])
        >>> found["num_seeds"], found["num_above"], round(found["median"], 3), round(found["p"], 4)
        (3, 3, 0.2, 0.0742)
    """
    x = np.asarray(values, dtype=np.float64)
    half = float(stats.t.ppf(0.975, len(x) - 1) * x.std(ddof=1) / np.sqrt(len(x)))
    lower, median, upper = (float(q) for q in np.quantile(x, (0.25, 0.5, 0.75)))
    return {
        "num_seeds": len(x),
        "median": median,
        "lower_quartile": lower,
        "upper_quartile": upper,
        "mean": float(x.mean()),
        "half_width": half,
        "num_above": int((x > 0).sum()),
        # Undefined without spread, which only equal runs have: no evidence of a difference.
        "p": float(stats.ttest_1samp(x, 0.0).pvalue) if x.std() > 0 else 1.0,
    }


def gap_findings(records: Records, parts: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each M and c: the NE gap in percent, with Holm's correction over all the rows."""
    found: list[dict[str, Any]] = []
    for group, gaps in _gaps(records, parts).items():
        for cell, by_seed in sorted(gaps.items()):
            if cell != AGAIN:
                found.append(_key(group) | _cell(cell) | summary_of_pairs(list(by_seed.values())))
    return _with_holm(found)


def trend_findings(records: Records, parts: Sequence[str]) -> list[dict[str, Any]]:
    """Is the gap at c = 1 larger for the largest M than for the smallest, and is that of c = M smaller than of c = 1?

    Differences of gaps, in percentage points, with Holm's correction over all the rows.
    """
    least, most = min(MOMENT_SCALES), max(MOMENT_SCALES)
    pairs: list[tuple[Cell, Cell]] = [((most, 1.0), (least, 1.0))]
    pairs += [((num_replicas, float(num_replicas)), (num_replicas, 1.0)) for num_replicas in MOMENT_SCALES]
    found: list[dict[str, Any]] = []
    for group, gaps in _gaps(records, parts).items():
        for one, other in pairs:
            if one in gaps and other in gaps:
                change = [gaps[one][seed] - gaps[other][seed] for seed in gaps[one]]
                key = _key(group) | _cell(one) | {"against": list(other)}
                found.append(key | summary_of_pairs(change))
    return _with_holm(found)


def noise_findings(records: Records) -> list[dict[str, Any]]:
    """NE at M = 1, the spread of its seeds, and the gap between two runs that should be equal (in percent of NE)."""
    found: list[dict[str, Any]] = []
    for group, gaps in _gaps(records, ("grid", "untuned", "rates")).items():
        plain = [
            record
            for run, record in records.items()
            if _group(run) == group and _cell_of(run) == AGAIN and not run.again
        ]
        ne = np.array([record["ne"] for record in plain])
        again = np.array(list(gaps.get(AGAIN, {}).values()))
        widths = [summary_of_pairs(list(by_seed.values()))["half_width"] for by_seed in gaps.values()]
        found.append(
            _key(group)
            | {
                "num_seeds": len(ne),
                "ne": float(np.median(ne)),
                "auc": float(np.median([record["auc"] for record in plain])),
                "seed_std": float(100 * ne.std(ddof=1) / ne.mean()),
                "again_std": float(again.std(ddof=1)) if len(again) else None,
                "half_width": float(np.median(widths)),
            }
        )
    return found


def growth_findings(records: Records, part: str = "grid") -> list[dict[str, Any]]:
    """By data set and M, at c = 1: how much faster the moments grew than without replicas, mean over seeds."""
    found: list[dict[str, Any]] = []
    for dataset in dict.fromkeys(run.dataset for run in records):
        for num_replicas in MOMENT_SCALES:
            of_cell = [
                record
                for run, record in records.items()
                if (run.part, run.dataset) == (part, dataset) and _cell_of(run) == (num_replicas, 1.0)
            ]
            row = {"dataset": dataset, "num_replicas": num_replicas}
            for name in ("moment_growth", "moment_growth_median"):
                row[name] = float(np.mean([record[name] for record in of_cell]))
            found.append(row)
    return found


def tune_findings(records: Records) -> list[dict[str, Any]]:
    """Mean NE of M = 1 by data set and learning rate, on held-out training rows."""
    by_rate: dict[tuple[str, float], list[float]] = {}
    for run, record in records.items():
        if run.part == "tune":
            by_rate.setdefault((run.dataset, run.sparse_lr), []).append(record["ne"])
    return [
        {"dataset": dataset, "sparse_lr": rate, "ne": float(np.mean(ne))} for (dataset, rate), ne in by_rate.items()
    ]


def _gaps(records: Records, parts: Sequence[str]) -> dict[Group, Gaps]:
    found: dict[Group, Gaps] = {}
    plain = {
        (_group(run), run.seed): record["ne"]
        for run, record in records.items()
        if _cell_of(run) == AGAIN and not run.again
    }
    for run, record in sorted(records.items(), key=lambda item: item[0].seed):
        if run.part in parts and (run.again or _cell_of(run) != AGAIN):
            gap = 100 * (record["ne"] / plain[_group(run), run.seed] - 1)
            found.setdefault(_group(run), {}).setdefault(_cell_of(run), {})[run.seed] = gap
    return found


def _with_holm(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for row, adjusted in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row["p_holm"] = adjusted
    return rows


def _group(run: ReplicaRun) -> Group:
    return run.part, run.dataset, run.sparse_lr


def _cell_of(run: ReplicaRun) -> Cell:
    return run.num_replicas, run.moment_scale


def _key(group: Group) -> dict[str, Any]:
    return dict(zip(("part", "dataset", "sparse_lr"), group, strict=True))


def _cell(cell: Cell) -> dict[str, Any]:
    return dict(zip(("num_replicas", "moment_scale"), cell, strict=True))
