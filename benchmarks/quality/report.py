"""The results of the quality study as tables in Markdown, as JSON, and as a picture."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.quality.cells import SETTINGS
from benchmarks.quality.findings import LEAST_TESTED, Records, compared, costs, kinds, tuned
from benchmarks.report import commit, markdown_table, processor
from dmt.training.records import versions

__all__ = ["plot_costs", "write_results"]

_NAMES = {
    "dlrm": "DLRM, the paper's combinations",
    "dlrm-each": "DLRM, the paper's projections",
    "dlrm-products": "DLRM with products",
    "dcn": "DCN",
}
# Okabe and Ito's palette; towers of interactions are drawn in full, others dashed.
_COLORS = {"dlrm": "#D55E00", "dlrm-each": "#E69F00", "dlrm-products": "#0072B2", "dcn": "#009E73"}
_STYLES = {"interactions": "-", "strided": "--", "coherent": ":", "random": "-."}


def write_results(records: Records, out: Path, *, stem: str = "quality_study") -> list[Path]:
    """Writes ``<stem>.json``, ``<stem>.md`` and ``<stem>.png`` of whatever is there."""
    sets = list(dict.fromkeys((data, dim) for data, dim, _ in kinds(records)))
    found = {
        "costs": [row for data, dim in sets for row in costs(records, data, dim)],
        "comparisons": [row for data, dim in sets for row in compared(records, data, dim)],
    }
    tuning = {data: tuned(records, data) for data in dict.fromkeys(cell.data for cell in records if cell.tuning)}
    found["tuning"] = [{"data": data} | row for data, (table, _) in tuning.items() for row in table]
    found["tuned_comparisons"] = [row for _, rows in tuning.values() for row in rows]
    seeds = sorted({cell.seed for cell in records if not cell.tuning})
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{processor()}, one process and one thread, beside other work",
        "commit when written": commit(),
        "packages": versions(),
        "seeds": f"{seeds[0]} to {seeds[-1]}; each table says how many",
        "runs": len(records),
        **{data: asdict(SETTINGS[data]) for data in dict.fromkeys(data for data, _ in sets)},
    }
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{stem}.{suffix}" for suffix in ("json", "md", "png")]
    left_out = ("affinity", "tower_features")
    runs = [{key: value for key, value in record.items() if key not in left_out} for record in records.values()]
    lines = ",\n  ".join(json.dumps(run) for run in runs)
    head = json.dumps({"about": about, **found}, indent=1)
    paths[0].write_text(f'{head[:-2]},\n "runs": [\n  {lines}\n ]\n}}\n')
    paths[1].write_text(_page(found, sets, about, stem))
    plot_costs(found["costs"], paths[2])
    return paths


def _page(
    found: Mapping[str, list[dict[str, Any]]], sets: Sequence[tuple[str, int]], about: Mapping[str, Any], stem: str
) -> str:
    parts = [
        "# What compression costs",
        "Made by `python -m benchmarks.quality_study`; docs/quality.md says what comes out.",
        "\n".join(f"- {name}: {value}" for name, value in about.items()),
        f"![AUC against bytes across hosts]({stem}.png)",
    ]
    for data, dim in sets:
        of_set = [row for row in found["costs"] if (row["data"], row["dim"]) == (data, dim)]
        comparisons = [row for row in found["comparisons"] if (row["data"], row["dim"]) == (data, dim)]
        parts.append(f"## {data}, N = {dim}")
        for metric, digits in (("auc", "AUC"), ("ne", "normalized entropy")):
            parts.append(
                f"Test {digits} less that of the flat model, median over seeds of the difference in one seed (standard "
                f"deviation of {digits} over seeds, number of seeds where it is not {_most_seeds(of_set)}). "
                + _flat_line(of_set, metric)
            )
            parts.append(_cost_table(of_set, metric))
        parts.append(_bytes_line(of_set))
        tested = [row["wilcoxon_p"] for row in comparisons if row["wilcoxon_p"] is not None]
        text = (
            f"Comparisons, test AUC; in brackets after Holm's correction over the {len(tested)} rows of this set with "
            f"at least {LEAST_TESTED} seeds. Fewer cannot give a p-value below .05, so that none is given."
        )
        if 0 < len(tested) < len(comparisons):
            least = min(1.0, min(tested) * len(comparisons))
            text += (
                f" This rule was made after the first table of flights had been seen: over all {len(comparisons)} "
                f"rows, as first planned, the smallest p after the correction is {least:.2g}."
            )
        parts.append(text)
        parts.append(_comparison_table(comparisons))
    if found["tuning"]:
        parts.append("## Learning rates tuned on a tenth of the training rows")
        parts.append(
            "Mean AUC of two seeds on that tenth (strided towers, T = 4, CR 4), at rates of tables and of the rest, as "
            "multiples of the study's. The best of each row are that model's own rates."
        )
        parts.append(_tuning_table(found["tuning"]))
        if found["tuned_comparisons"]:
            parts.append("Test AUC at each model's own rates, T = 4, CR 4; Holm's correction within a data set.")
            parts.append(_comparison_table(found["tuned_comparisons"]))
    return "\n\n".join(parts) + "\n"


def _most_seeds(rows: Sequence[Mapping[str, Any]]) -> int:
    return max(row["num_seeds"] for row in rows)


def _flat_line(rows: Sequence[Mapping[str, Any]], metric: str) -> str:
    flat = {("DCN" if row["model"] == "dcn" else "DLRM"): row for row in sorted(rows, key=lambda r: r["num_seeds"])}
    texts = (f"{name} {row[f'flat_{metric}']:.4f} ({row[f'flat_{metric}_std']:.4f})" for name, row in flat.items())
    return f"Flat: {', '.join(texts)}."


def _cost_table(rows: Sequence[Mapping[str, Any]], metric: str) -> str:
    ratios, most = sorted({row["ratio"] for row in rows}), _most_seeds(rows)
    lines: dict[tuple[int, str, str], dict[int, str]] = {}
    for row in rows:
        seeds = "" if row["num_seeds"] == most else f", {row['num_seeds']}"
        text = f"{row[f'{metric}_less_flat']:+.4f} ({row[f'{metric}_std']:.4f}{seeds})"
        lines.setdefault((row["num_towers"], _NAMES[row["model"]], row["towers"]), {})[row["ratio"]] = text
    return markdown_table(
        ["T", "tower module", "towers", *(f"CR {ratio}" for ratio in ratios)],
        [[str(key[0]), *key[1:], *(by.get(r, "") for r in ratios)] for key, by in sorted(lines.items())],
    )


def _bytes_line(rows: Sequence[Mapping[str, Any]]) -> str:
    """Bytes across hosts and cost of computing, by towers and ratio."""
    table: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows:
        table.setdefault((row["num_towers"], row["ratio"]), {})[row["model"]] = row
    lines = []
    for (num_towers, ratio), by_model in sorted(table.items()):
        any_row = next(iter(by_model.values()))
        lines.append(
            [
                *(str(num_towers), str(ratio), f"{any_row['flat_bytes']:.0f}", f"{any_row['ids_bytes']:.0f}"),
                *(
                    f"{r['bytes']:.0f} ({r['compression_ratio']:.1f}), {r['mflops'] / r['flat_mflops']:.2f}"
                    if (r := by_model.get(model))
                    else ""
                    for model in _NAMES
                ),
            ]
        )
    return (
        "Planned bytes per sample across hosts, embeddings and their gradients (ids, the same for all, beside them); "
        "in brackets the true compression ratio, then MFLOPs over the flat model's.\n\n"
        + markdown_table(["T", "CR", "flat", "ids", *_NAMES.values()], lines)
    )


def _comparison_table(rows: Sequence[Mapping[str, Any]]) -> str:
    return markdown_table(
        ["data", "T", "CR", "arm", "baseline", "AUC (std)", "baseline (std)", "difference", "better in", "Wilcoxon p"],
        [
            [
                *(row["data"], str(row["num_towers"]), str(row["ratio"]), row["arm"], row["baseline"]),
                f"{row['median']:.4f} ({row['std']:.4f})",
                f"{row['baseline_median']:.4f} ({row['baseline_std']:.4f})",
                f"{row['median_difference']:+.4f}",
                f"{row['num_better']} of {row['num_seeds']}",
                "" if row["wilcoxon_p"] is None else f"{row['wilcoxon_p']:.2g} ({row['wilcoxon_p_holm']:.2g})",
            ]
            for row in rows
        ],
    )


def _tuning_table(rows: Sequence[Mapping[str, Any]]) -> str:
    rates = sorted({tuple(row["rates"]) for row in rows})
    lines: dict[tuple[str, str], dict[Any, float]] = {}
    for row in rows:
        name = f"{row['model']}, {'flat' if row['flat'] else 'towers'}"
        lines.setdefault((row["data"], name), {})[tuple(row["rates"])] = row["auc"]
    return markdown_table(
        ["data", "model", *(f"{sparse:g}, {dense:g}" for sparse, dense in rates)],
        [[*key, *(f"{by[r]:.4f}" if r in by else "" for r in rates)] for key, by in lines.items()],
    )


def plot_costs(rows: Sequence[Mapping[str, Any]], path: Path, *, num_towers: int = 4, dim: int = 16) -> None:
    """Draws median AUC against bytes of embeddings and gradients across hosts, a panel for each set with several."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [row for row in rows if (row["num_towers"], row["dim"]) == (num_towers, dim)]
    # A single ratio makes no line; where no set has more, all are drawn.
    ratios = {data: {row["ratio"] for row in shown if row["data"] == data} for data in {row["data"] for row in shown}}
    several = {data for data, found in ratios.items() if len(found) > 1} or set(ratios)
    datasets = [data for data in dict.fromkeys(row["data"] for row in shown) if data in several]
    figure = Figure(figsize=(max(7.5, 5.0 * len(datasets)), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, data in zip(figure.subplots(1, len(datasets), squeeze=False)[0], datasets, strict=True):
        of_set = [row for row in shown if row["data"] == data]
        for model, color in _COLORS.items():
            for towers, style in _STYLES.items():
                points = sorted((r["bytes"], r["auc"]) for r in of_set if (r["model"], r["towers"]) == (model, towers))
                if points:
                    label = f"{_NAMES[model]}: {towers}"
                    fill = color if towers == "interactions" else "white"
                    look = {"color": color, "marker": "o", "markersize": 5, "markerfacecolor": fill}
                    axes.plot(*zip(*points, strict=True), style, label=label, **look)
        for model, marker in (("dlrm", "s"), ("dcn", "D")):
            flat = max((r for r in of_set if r["model"] == model), key=lambda r: r["num_seeds"], default=None)
            if flat:
                color = "#000000" if model == "dlrm" else "#777777"
                axes.plot(
                    flat["flat_bytes"], flat["flat_auc"], marker, color=color, label=f"flat {model.upper()}", zorder=3
                )
        axes.set_xscale("log", base=2)
        axes.set_xlabel("bytes per sample across hosts (embeddings and gradients)", fontsize=9)
        axes.set_title(f"{data}, {num_towers} towers", fontsize=10, loc="left")
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=6.5, frameon=False, loc="lower right")
    figure.axes[0].set_ylabel("test AUC, median over seeds", fontsize=9)
    figure.savefig(path, dpi=140)
