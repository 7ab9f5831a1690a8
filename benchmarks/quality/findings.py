"""From the records of the quality study to its findings: what compression costs, and which towers lose less."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from benchmarks.quality.cells import FLAT, Cell
from benchmarks.towers.statistics import compare_arms, holm

__all__ = ["COMPARISONS", "LEAST_TESTED", "Records", "compared", "costs", "kinds", "tuned"]

LEAST_TESTED = 6
"""Seeds below which no p-value is given: the smallest that fewer could give is above .05.

Decided after flights' first table had been seen. Over all its 34 rows, as first planned, Holm's smallest p is .066
instead of the .035 of the 18 tested rows.
"""

Records = Mapping[Cell, Mapping[str, Any]]

COMPARISONS = (
    (("dcn", "interactions"), ("dcn", "strided")),
    (("dlrm-products", "interactions"), ("dlrm-products", "strided")),
    (("dlrm", "interactions"), ("dlrm", "strided")),
    (("dlrm-products", "interactions"), ("dlrm", "strided")),
    (("dlrm-products", "interactions"), ("dlrm-each", "strided")),
    (("dcn", "interactions"), ("dcn", "coherent")),
    (("dlrm-products", "interactions"), ("dlrm-products", "coherent")),
    (("dlrm", "coherent"), ("dlrm", "strided")),
    (("dcn", "coherent"), ("dcn", "strided")),
    (("dcn", "random"), ("dcn", "strided")),
    (("dlrm-products", "random"), ("dlrm-products", "strided")),
    (("dlrm", "random"), ("dlrm", "strided")),
)
"""Arms and baselines, as (model, towers); fixed before the runs."""


def kinds(records: Records) -> list[tuple[str, int, bool]]:
    """The data sets, dimensions, and whether rates are those tuned for each model, that have towers."""
    at = {(c.data, c.dim, (c.sparse, c.dense) != (1.0, 1.0)) for c in records if not c.tuning and c.towers != "flat"}
    return sorted(at)


def _study(records: Records, data: str, dim: int) -> dict[Cell, Mapping[str, Any]]:
    """Runs of a data set at the study's rates."""
    return {
        cell: record
        for cell, record in records.items()
        if (cell.data, cell.dim, cell.tuning, cell.sparse, cell.dense) == (data, dim, False, 1.0, 1.0)
    }


def _by_seed(records: Records, cells: Iterable[Cell], metric: str = "auc") -> dict[int, float]:
    return {cell.seed: records[cell][metric] for cell in cells}


def costs(records: Records, data: str, dim: int) -> list[dict[str, Any]]:
    """For each number of towers, ratio, model and towers: AUC and NE beside those of the flat model, seed by seed."""
    runs = _study(records, data, dim)
    flats = {(c.model, c.seed): r for c, r in runs.items() if c.towers == "flat"}
    groups: dict[Cell, list[Cell]] = {}
    for cell in sorted(runs):
        if cell.towers != "flat" and (FLAT[cell.model], cell.seed) in flats:
            groups.setdefault(replace(cell, seed=0), []).append(cell)
    rows = []
    for kind, cells in groups.items():
        own = [runs[cell] for cell in cells]
        flat = [flats[FLAT[cell.model], cell.seed] for cell in cells]
        across = [record["bytes"]["embeddings"] for record in own]
        row: dict[str, Any] = {name: getattr(kind, name) for name in ("data", "dim", "num_towers", "model", "towers")}
        row |= {"ratio": kind.ratio, "num_seeds": len(cells), "bytes": float(np.mean(across))}
        row["flat_bytes"] = flat[0]["bytes"][str(kind.num_towers)]["embeddings"]
        row["ids_bytes"] = own[0]["bytes"]["ids"]
        row["compression_ratio"] = own[0]["compression_ratio"]
        row["mflops"] = own[0]["mflops_per_sample"]
        row["flat_mflops"] = flat[0]["mflops_per_sample"]
        for metric in ("auc", "ne"):
            values, base = (np.array([record[metric] for record in part]) for part in (own, flat))
            row |= {metric: float(np.median(values)), f"flat_{metric}": float(np.median(base))}
            row |= {f"{metric}_std": _std(values), f"flat_{metric}_std": _std(base)}
            row[f"{metric}_less_flat"] = float(np.median(values - base))
        rows.append(row)
    return rows


def _std(values: Any) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def compared(records: Records, data: str, dim: int) -> list[dict[str, Any]]:
    """All comparisons of a data set and dimension, over the seeds that have both; Holm over all of them.

    `COMPARISONS`, at each number of towers and ratio, and then each model in towers of interactions with its flat one.
    """
    runs = _study(records, data, dim)
    settings = sorted({(c.num_towers, c.ratio) for c in runs if c.towers != "flat"})
    found: list[dict[str, Any]] = []
    for num_towers, ratio in settings:

        def arm(model: str, towers: str, num_towers: int = num_towers, ratio: int = ratio) -> dict[int, float]:
            size = (1, 1) if towers == "flat" else (num_towers, ratio)
            own = (c for c in runs if (c.model, c.towers, c.num_towers, c.ratio) == (model, towers, *size))
            return _by_seed(runs, own)

        against_flat = [((m, "interactions"), (FLAT[m], "flat")) for m in ("dlrm", "dlrm-products", "dcn")]
        for one, other in (*COMPARISONS, *against_flat):
            found += _row(arm(*one), arm(*other), at=(data, dim, num_towers, ratio), names=(one, other))
    return _corrected(found)


def tuned(records: Records, data: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns what tuning found, and comparisons at the rates that were tuned for each model."""
    tried: dict[tuple[str, bool], dict[tuple[float, float], list[float]]] = {}
    for cell, record in sorted(records.items()):
        if cell.tuning and cell.data == data:
            rates = tried.setdefault((cell.model, cell.towers == "flat"), {})
            rates.setdefault((cell.sparse, cell.dense), []).append(record["auc"])
    table = [
        {"model": model, "flat": flat, "rates": rates, "auc": float(np.mean(aucs)), "num_seeds": len(aucs)}
        for (model, flat), by_rates in tried.items()
        for rates, aucs in by_rates.items()
    ]
    best = {
        key: max(by_rates, key=lambda r: (np.mean(by_rates[r]), r == (1.0, 1.0))) for key, by_rates in tried.items()
    }

    def arm(model: str, towers: str) -> dict[int, float]:
        rates = best.get((model, towers == "flat"))
        own = (
            c
            for c in records
            if (c.data, c.model, c.towers, c.dim, c.tuning) == (data, model, towers, 16, False)
            and (c.sparse, c.dense) == rates
            and (towers == "flat" or (c.num_towers, c.ratio) == (4, 4))
        )
        return _by_seed(records, own)

    pairs = [((m, "interactions"), (m, "strided")) for m in ("dcn", "dlrm-products", "dlrm")]
    pairs += [((m, "interactions"), (FLAT[m], "flat")) for m in ("dcn", "dlrm-products", "dlrm")]
    found: list[dict[str, Any]] = []
    for one, other in pairs:
        found += _row(arm(*one), arm(*other), at=(data, 16, 4, 4), names=(one, other))
    return table, _corrected(found)


def _row(
    one: dict[int, float],
    other: dict[int, float],
    *,
    at: tuple[str, int, int, int],
    names: tuple[tuple[str, str], tuple[str, str]],
) -> list[dict[str, Any]]:
    """A comparison over the seeds that both have; nothing for fewer than two."""
    seeds = sorted(set(one) & set(other))
    if len(seeds) < 2:
        return []
    data, dim, num_towers, ratio = at
    place = {"data": data, "dim": dim, "num_towers": num_towers, "ratio": ratio}
    result = asdict(compare_arms({s: one[s] for s in seeds}, {s: other[s] for s in seeds}))
    return [place | {"arm": ", ".join(names[0]), "baseline": ", ".join(names[1])} | result]


def _corrected(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds Holm's correction over the rows that have enough seeds to be tested; the others lose their p-values."""
    tested = [row for row in found if row["num_seeds"] >= LEAST_TESTED]
    for row in found:
        if row["num_seeds"] < LEAST_TESTED:
            row |= {"wilcoxon_p": None, "mann_whitney_p": None, "wilcoxon_p_holm": None}
    adjusted: Sequence[float] = holm([row["wilcoxon_p"] for row in tested]) if tested else []
    for row, p in zip(tested, adjusted, strict=True):
        row["wilcoxon_p_holm"] = p
    return found
