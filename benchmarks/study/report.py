"""Writes the record of a study: JSON, tables in Markdown, and a picture of AUC against bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import markdown_table
from benchmarks.study.runs import Run
from benchmarks.study.statistics import compare_arms, holm
from benchmarks.study.studies import Study, runs_of
from benchmarks.study.train import FLAT, SETTINGS, Arm, bytes_across
from dmt.files import atomic_write
from dmt.report.style import dress_axes, new_figure, save_figure

__all__ = ["LEAST_TESTED", "comparisons", "comparisons_table", "costs", "write_study"]

LEAST_TESTED = 6
"""Number of seeds below which no p-value is reported, because the smallest possible one would exceed 0.05."""
Records = Mapping[Run, Mapping[str, Any]]
Rows = list[dict[str, Any]]
_COLORS = {"dlrm": "#D55E00", "dlrm-each": "#E69F00", "dlrm-products": "#0072B2", "dcn": "#009E73"}
_STYLES = {"interactions": "-", "strided": "--", "coherent": ":", "random": "-.", "outside": "-"}
_STYLES["interactions, outside"] = "--"


def comparisons(study: Study, data: str, records: Records, seeds: Sequence[int]) -> Rows:
    """Compares each arm with its baseline over the seeds that have both; corrects by Holm over the tested rows."""
    found: Rows = []
    for arm, baseline in study.on(data).comparisons:
        values = [_by_seed(records, data, one, seeds, study.metric) for one in (arm, baseline)]
        shared = sorted(set(values[0]) & set(values[1]))
        if len(shared) < 2:
            continue
        towers = {"num_towers": arm.num_towers, "ratio": arm.ratio} if arm.towers != "flat" else {}
        sizes = {"data": data, "metric": study.metric, "dim": arm.dim, "num_towers": "-", "ratio": "-"} | towers
        result = asdict(compare_arms(*({seed: one[seed] for seed in shared} for one in values)))
        found.append(sizes | {"arm": arm.name, "baseline": baseline.name} | result)
    tested = [row for row in found if row["num_seeds"] >= LEAST_TESTED]
    for row in found:
        if row["num_seeds"] < LEAST_TESTED:
            row |= {"wilcoxon_p": None, "mann_whitney_p": None, "wilcoxon_p_holm": None}
    for row, p in zip(tested, holm([row["wilcoxon_p"] for row in tested]) if tested else [], strict=True):
        row["wilcoxon_p_holm"] = p
    return found


def _by_seed(records: Records, data: str, arm: Arm, seeds: Sequence[int], metric: str) -> dict[int, float]:
    runs = [Run(data=data, seed=seed, arm=arm) for seed in seeds]
    return {run.seed: records[run][metric] for run in runs if run in records}


def costs(study: Study, data: str, records: Records, seeds: Sequence[int], features: Any) -> Rows:
    """Returns a row for each arm in towers: AUC and NE against the flat model's, bytes per sample across hosts, MFLOPs.

    Args:
        study: the study.
        data: name of the data set.
        records: records of the finished runs.
        seeds: seeds of the study.
        features: the `Clicks` of the data set; only its number of features is used.
    """
    rows: Rows = []
    for arm in study.on(data).arms:
        if arm.towers == "flat":
            continue
        runs = [Run(data=data, seed=seed, arm=arm) for seed in seeds]
        pairs = [(records[run], records[flat]) for run in runs if run in records and (flat := _flat(run)) in records]
        if not pairs:
            continue
        flat_bytes = bytes_across(arm.flat, features, None, arm.num_towers)
        row: dict[str, Any] = {"data": data, "dim": arm.dim, "num_towers": arm.num_towers, "model": arm.model}
        row |= {"towers": arm.towers, "ratio": arm.ratio, "num_seeds": len(pairs)}
        sent = [ours["bytes"] for ours, _ in pairs]
        row["bytes"] = float(np.mean([each["embeddings"] + each.get("outside", 0.0) for each in sent]))
        row |= {"flat_bytes": flat_bytes["embeddings"], "ids_bytes": sent[0]["ids"]}
        once = [ours["bytes"]["once"] for ours, _ in pairs] if arm.by_request else []
        row["bytes_once"] = float(np.mean(once)) if once else None
        row |= {"compression_ratio": pairs[0][0]["compression_ratio"], "mflops": pairs[0][0]["mflops_per_sample"]}
        row["flat_mflops"] = pairs[0][1]["mflops_per_sample"]
        for metric in ("auc", "ne"):
            ours, flat = (np.array([pair[i][metric] for pair in pairs]) for i in (0, 1))
            row |= {metric: float(np.median(ours)), f"flat_{metric}": float(np.median(flat))}
            row |= {f"{metric}_std": _std(ours), f"flat_{metric}_std": _std(flat)}
            row[f"{metric}_less_flat"] = float(np.median(ours - flat))
        rows.append(row)
    return rows


def _flat(run: Run) -> Run:
    return replace(run, arm=run.arm.flat)


def _std(values: Any) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def comparisons_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Returns the comparisons of a study as a table in Markdown."""
    rows = list(rows)
    is_auc = all(row["metric"] == "auc" for row in rows)
    digits = 4 if is_auc else 5
    header = ["data", "T", "CR", "N", "arm", "baseline", "AUC (std)" if is_auc else "NE (std)", "baseline (std)"]
    header += ["difference", "better in" if is_auc else "worse in"]
    return markdown_table(
        [*header, "Wilcoxon p (Holm)"],
        [
            [
                *(row["data"], str(row["num_towers"]), str(row["ratio"]), str(row["dim"]), row["arm"], row["baseline"]),
                f"{row['median']:.4f} ({row['std']:.4f})",
                f"{row['baseline_median']:.4f} ({row['baseline_std']:.4f})",
                f"{row['median_difference']:+.{digits}f}",
                f"{row['num_better']} of {row['num_seeds']}",
                "" if row["wilcoxon_p"] is None else f"{row['wilcoxon_p']:.2g} ({row['wilcoxon_p_holm']:.2g})",
            ]
            for row in rows
        ],
    )


def costs_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Returns costs as a table in Markdown."""
    header = ["data", "T", "CR", "N", "tower module", "towers", "AUC (std)", "less flat", "NE less flat", "seeds"]
    return markdown_table(
        [*header, "bytes", "flat", "with ids, each distinct input once", "MFLOPs / flat"],
        [
            [
                *(row["data"], str(row["num_towers"]), str(row["ratio"]), str(row["dim"]), row["model"], row["towers"]),
                f"{row['auc']:.4f} ({row['auc_std']:.4f})",
                *(f"{row['auc_less_flat']:+.4f}", f"{row['ne_less_flat']:+.4f}", str(row["num_seeds"])),
                *(f"{row['bytes']:.0f}", f"{row['flat_bytes']:.0f}"),
                "-" if row["bytes_once"] is None else f"{row['bytes_once']:.0f}",
                f"{row['mflops'] / row['flat_mflops']:.2f}",
            ]
            for row in rows
        ],
    )


def write_study(
    study: Study,
    trials: Any,
    studies: Mapping[str, Study],
    seeds: Sequence[int],
    out: Path,
    about: Mapping[str, Any],
) -> list[Path]:
    """Writes the record of a study's finished runs, and returns the paths of its files.

    Args:
        study: the study, for its title and facts.
        trials: the `Trials` with the records.
        studies: the study on each data set, with the rates chosen for it.
        seeds: seeds of the study.
        out: folder of the files.
        about: provenance of the record.
    """
    records = trials.progress.records
    found: dict[str, Any] = {"costs": [], "comparisons": []}
    runs: list[dict[str, Any]] = []
    for data, own in studies.items():
        found["costs"] += costs(own, data, records, seeds, trials.clicks(data))
        found["comparisons"] += comparisons(own, data, records, seeds)
        wanted = [run for run in runs_of(own, data, seeds) if run in records]
        left_out = ("affinity", "towers", "bytes")
        runs += [
            {"data": data, "seed": run.seed, **asdict(run.arm)}
            | {key: value for key, value in records[run].items() if key not in left_out}
            for run in wanted
        ]
    facts = {data: {**asdict(SETTINGS[data]), **study.facts(trials.clicks(data))} for data in studies}
    about = {**about, **facts}
    text = [
        f"Test {study.metric.upper()}, median over seeds (standard deviation); differences are medians over pairs of "
        "one seed. p-values are two-sided; in brackets after Holm's correction over the rows of the data set.",
        comparisons_table(found["comparisons"]),
    ]
    if found["costs"]:
        words = "Bytes are those of embeddings and their gradients, per sample, across hosts."
        text += ["## Costs", words, costs_table(found["costs"])]
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{study.stem}.{ending}" for ending in ("json", "md")]
    head, lines = json.dumps({"about": about, **found}, indent=1), ",\n  ".join(map(json.dumps, runs))
    with atomic_write(paths[0]) as scratch:
        scratch.write_text(f'{head[:-2]},\n "runs": [\n  {lines}\n ]\n}}\n')
    facts_list = "\n".join(f"- {name}: {value}" for name, value in about.items())
    parts = [f"# {study.title}", f"Made by `{about['command']}`.", facts_list]
    shown = [row for row in found["costs"] if row["towers"] in _STYLES]
    if len({row["ratio"] for row in shown}) > 1:
        paths.append(out / f"{study.stem}.png")
        plot_costs(shown, paths[-1])
        parts.append(f"![{study.title}]({study.stem}.png)")
    with atomic_write(paths[1]) as scratch:
        scratch.write_text("\n\n".join([*parts, *text]) + "\n")
    return paths


def plot_costs(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws median AUC against bytes of embeddings and gradients across hosts, with a panel for each data set."""
    datasets = list(dict.fromkeys(row["data"] for row in rows))
    figure = new_figure(max(7.5, 5.0 * len(datasets)), 4.8)
    for axes, data in zip(figure.subplots(1, len(datasets), squeeze=False)[0], datasets, strict=True):
        of_set = [row for row in rows if row["data"] == data]
        for model, color in _COLORS.items():
            for towers, style in _STYLES.items():
                points = sorted((r["bytes"], r["auc"]) for r in of_set if (r["model"], r["towers"]) == (model, towers))
                if points:
                    axes.plot(*zip(*points, strict=True), style, color=color, marker="o", label=f"{model}: {towers}")
        for flat in {FLAT[row["model"]]: row for row in of_set}.values():
            axes.plot(flat["flat_bytes"], flat["flat_auc"], "ks", label=f"flat {FLAT[flat['model']]}", zorder=3)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("bytes per sample across hosts", fontsize=9)
        axes.set_title(data, fontsize=10, loc="left")
        axes.legend(fontsize=6.5, frameon=False, loc="lower right", handlelength=4)
        dress_axes(axes, grid="y")
    figure.axes[0].set_ylabel("test AUC, median over seeds", fontsize=9)
    save_figure(figure, path)
