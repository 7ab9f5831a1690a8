"""Study: what do M replicas cost in quality, and which moment scale c closes the gap? 2D sparse parallelism, Figure 4.

The model is a flat DLRM, with Adam for dense parts and row-wise AdaGrad for tables; the baseline is M = 1. All runs of
a data set train on the same global batches. Replica m gets the m-th of M equal parts, and replicas are averaged after
every step; `ReplicaTables` computes this with one copy of the tables, and tests compare it with M copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import nn

from benchmarks.report import markdown_table
from benchmarks.study.data import Clicks, without_test_rows
from benchmarks.study.report import write_record
from benchmarks.study.runs import Progress, Trials
from benchmarks.study.simulation import ReplicaTables
from benchmarks.study.statistics import holm
from benchmarks.study.train import SETTINGS, Arm, build_model_of_seed, job_of, row_order, score
from dmt.report.style import dress_axes, new_figure, save_figure
from dmt.training.build import warmup_factor
from dmt.training.config import OptimizerConfig

__all__ = ["MOMENT_SCALES", "ReplicaRun", "gaps", "run", "summary_of_pairs", "tuned_rate"]

MOMENT_SCALES = {2: (0.5, 1.0, 2.0), 4: (1.0, 2.0, 3.0, 4.0), 8: (1.0, 2.0, 4.0, 8.0, 16.0)}
"""Values of c, by M. The last value for M = 8 is outside the paper's range, (0, M]."""
RATE_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Factors of the settings' rate at which M = 1 is tuned; that rate was chosen for another variant of AdaGrad."""
TUNE_SEEDS = (100, 101, 102)
_COLORS = {2: "#0072B2", 4: "#009E73", 8: "#D55E00"}
Records = Mapping["ReplicaRun", Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, order=True)
class ReplicaRun:
    """One model to train."""

    data: str
    seed: int
    sparse_lr: float
    """Learning rate of the tables."""
    num_replicas: int = 1
    """M."""
    moment_scale: float = 1.0
    """c."""
    tuning: bool = False
    """True: train on four fifths of the training rows, and test on the rest."""


def simulate(run: ReplicaRun, clicks: Clicks) -> dict[str, Any]:
    """Trains with M replicas for the epochs of the settings; returns AUC and NE on the test rows."""
    settings = SETTINGS[run.data]
    model: Any = build_model_of_seed(job_of(run.data, Arm(model="dlrm"), clicks, None), run.seed)
    weights = {name: bag.weight.detach() for name, bag in model.sparse_arch.embedding_bags.items()}
    replicas = {"num_replicas": run.num_replicas, "moment_scale": run.moment_scale}
    model.sparse_arch = tables = ReplicaTables(weights, clicks.features, eps=1e-8, **replicas)  # type: ignore[arg-type]
    dense = torch.optim.Adam(model.parameters(), lr=settings.dense_lr, fused=True)
    rates = OptimizerConfig(warmup_steps=settings.warmup_steps)
    for step, rows in enumerate(row_order(len(clicks.train[2]), settings, run.seed)):
        share = warmup_factor(rates, step)
        dense.param_groups[0]["lr"] = settings.dense_lr * share
        numbers, ids, labels = (column[rows] for column in clicks.train)
        loss = nn.functional.binary_cross_entropy_with_logits(model(numbers, ids).squeeze(-1), labels)
        model.zero_grad()
        loss.backward()
        dense.step()
        tables.step(run.sparse_lr * share)
    model.eval()
    return score(lambda rows: model(clicks.test[0][rows], clicks.test[1][rows]), clicks)


def tuned_rate(records: Records, data: str) -> float:
    """Returns the tables' learning rate at which M = 1 had the lowest mean NE in tuning."""
    by_rate: dict[float, list[float]] = {}
    for run, record in records.items():
        if run.tuning and run.data == data:
            by_rate.setdefault(run.sparse_lr, []).append(record["ne"])
    return min(by_rate, key=lambda rate: float(np.mean(by_rate[rate])))


def grid(data: str, sparse_lr: float, seeds: Sequence[int]) -> list[ReplicaRun]:
    """Returns the runs with M = 1 and with every M and c of `MOMENT_SCALES`, seed by seed."""
    cells = [(1, 1.0), *((number, scale) for number, scales in MOMENT_SCALES.items() for scale in scales)]
    return [
        ReplicaRun(data=data, seed=seed, sparse_lr=sparse_lr, num_replicas=number, moment_scale=scale)
        for seed in seeds
        for number, scale in cells
    ]


def summary_of_pairs(values: Sequence[float]) -> dict[str, Any]:
    """Returns statistics of paired differences: median, quartiles, mean with 95 % interval, signs, t-test against 0.

    Example:
        >>> found = summary_of_pairs([0.1, 0.2, 0.3])
        >>> found["num_seeds"], found["num_above"], round(found["median"], 3), round(found["p"], 4)
        (3, 3, 0.2, 0.0742)
    """
    x = np.asarray(values, dtype=np.float64)
    lower, median, upper = (float(q) for q in np.quantile(x, (0.25, 0.5, 0.75)))
    return {
        "num_seeds": len(x),
        "median": median,
        "lower_quartile": lower,
        "upper_quartile": upper,
        "mean": float(x.mean()),
        "half_width": float(stats.t.ppf(0.975, len(x) - 1) * x.std(ddof=1) / np.sqrt(len(x))),
        "num_above": int((x > 0).sum()),
        # Undefined without spread, as between equal runs: no evidence of a difference.
        "p": float(stats.ttest_1samp(x, 0.0).pvalue) if x.std() > 0 else 1.0,
    }


def gaps(runs: Sequence[ReplicaRun], records: Records) -> list[dict[str, Any]]:
    """Returns, for each M and c, by how many percent NE exceeds that of M = 1 at the same seed and rate, and tests."""
    by_cell: dict[tuple[str, float, int, float], list[float]] = {}
    for run in runs:
        plain = ReplicaRun(data=run.data, seed=run.seed, sparse_lr=run.sparse_lr)
        if run != plain:
            cell = (run.data, run.sparse_lr, run.num_replicas, run.moment_scale)
            by_cell.setdefault(cell, []).append(100 * (records[run]["ne"] / records[plain]["ne"] - 1))
    names = ("data", "sparse_lr", "num_replicas", "moment_scale")
    found = [dict(zip(names, cell, strict=True)) | summary_of_pairs(values) for cell, values in by_cell.items()]
    for row, p in zip(found, holm([row["p"] for row in found]), strict=True):
        row["p_holm"] = p
    return found


def run(trials: Trials, names: Sequence[str], seeds: range, out: Path, about: Mapping[str, Any]) -> list[Path]:
    """Tunes M = 1, trains the grid at the tuned and the settings' rate; writes ``replicas.*`` and returns the paths."""
    torch.set_num_threads(1)
    progress = Progress(trials.work / "replicas.jsonl", f"rows: {trials.max_rows}", lambda key: ReplicaRun(**key))

    def train_one(run: ReplicaRun) -> dict[str, Any]:
        clicks = trials.clicks(run.data)
        return simulate(run, without_test_rows(clicks, parts=5) if run.tuning else clicks)

    runs: list[ReplicaRun] = []
    for data in names:
        start = SETTINGS[data].sparse_lr
        rates = [start * factor for factor in RATE_FACTORS]
        tuning = [ReplicaRun(data=data, seed=s, sparse_lr=rate, tuning=True) for rate in rates for s in TUNE_SEEDS]
        progress.train(tuning, train_one, f"{data}, rates")
        for rate in dict.fromkeys((tuned_rate(progress.records, data), start)):
            runs += grid(data, rate, seeds)
    progress.train(runs, train_one, "replicas")
    found = gaps(runs, progress.records)
    about = {**about, "seeds": f"{seeds[0]} to {seeds[-1]}", **{data: asdict(SETTINGS[data]) for data in names}}
    text = [
        "NE gap: normalized entropy over that of M = 1 with the same seed and rate, less 1, in percent; above 0 is "
        "worse than M = 1. The paper calls 0.02 % significant.",
        _table(found),
    ]
    records = [asdict(run) | dict(progress.records[run]) for run in runs]
    title = "What do replicas cost in quality?"
    return write_record(out, "replicas", title, about, {"gaps": found}, records, text, lambda path: _plot(found, path))


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    header = ["data", "rate", "M", "c", "NE gap, %", "[Q1, Q3]", "mean", "worse in", "p (Holm)"]
    return markdown_table(
        header,
        [
            [
                *(row["data"], f"{row['sparse_lr']:g}", str(row["num_replicas"]), f"{row['moment_scale']:g}"),
                f"{row['median']:+.3f}",
                f"[{row['lower_quartile']:+.3f}, {row['upper_quartile']:+.3f}]",
                f"{row['mean']:+.3f} +- {row['half_width']:.3f}",
                f"{row['num_above']} of {row['num_seeds']}",
                f"{row['p']:.2g} ({row['p_holm']:.2g})",
            ]
            for row in rows
        ],
    )


def _plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    groups = list(dict.fromkeys((row["data"], row["sparse_lr"]) for row in rows))
    figure = new_figure(path, size=(max(6.0, 3.2 * len(groups)), 3.6), caller="replicas")
    for axes, group in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups, strict=True):
        for number, color in _COLORS.items():
            cells = [r for r in rows if (r["data"], r["sparse_lr"], r["num_replicas"]) == (*group, number)]
            points = ([r["moment_scale"] for r in cells], [r["median"] for r in cells])
            axes.plot(*points, "o-", color=color, label=f"M = {number}")
        axes.axhline(0, color="#555555", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_title(f"{group[0]}, rate {group[1]:g}", fontsize=9, loc="left")
        axes.set_xlabel("c", fontsize=9)
        dress_axes(axes, grid="y")
    figure.axes[0].set_ylabel("NE gap, %", fontsize=9)
    figure.axes[0].legend(fontsize=7, frameon=False)
    save_figure(figure, path, caller="replicas")
