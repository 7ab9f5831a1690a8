"""Measures of interaction: what they cost by features and rows, and whether a trained model agrees with the data.

    OMP_NUM_THREADS=1 python -m benchmarks.interaction_measures --data DIR

DIR has ``flights.parquet``. Costs are CPU seconds on drawn clicks (features of 8 values), without reading. Agreement:
Spearman's correlation over all pairs of features between `FeatureInteractions.collect` on the training rows and
`FeatureInteractions.collect_from_model` of a flat model that was trained on them, as the tower study trains it; and of
either measure with itself over seeds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from torch import Tensor

from benchmarks.provenance import commit, processor
from benchmarks.towers.clicks import Clicks, read_clicks
from benchmarks.towers.report import markdown_table
from benchmarks.towers.trials import STUDY_SETS, train_and_test, trial_config
from dmt.partitioner import FeatureInteractions
from dmt.training.records import versions

__all__ = ["main"]

_FEATURES, _ROWS = (13, 26, 52, 104, 208, 400), (10_000, 30_000, 100_000, 300_000, 1_000_000)
_AT_ROWS, _AT_FEATURES, _VALUES = 20_000, 26, 8
_MEASURED_ROWS, _BATCH = 8192, 8192


def drawn(num_features: int, num_rows: int) -> list[SimpleNamespace]:
    """One batch of clicks that no feature says anything about: what is found does not change what it costs."""
    rng = np.random.default_rng([num_features, num_rows])
    ids = {f"f{i}": rng.integers(0, _VALUES, num_rows) for i in range(num_features)}
    return [SimpleNamespace(sparse_features=ids, labels=(rng.random(num_rows) < 0.3).astype(np.float32))]


def cost(num_features: int, num_rows: int) -> dict[str, Any]:
    """CPU seconds of one measurement."""
    batches = drawn(num_features, num_rows)
    began = time.process_time()
    FeatureInteractions.collect(batches)
    seconds = time.process_time() - began
    pairs = num_features * (num_features - 1) // 2
    return {"features": num_features, "pairs": pairs, "rows": num_rows, "cpu_seconds": round(seconds, 3)}


def agreement(clicks: Clicks, seeds: Sequence[int]) -> dict[str, Any]:
    """Trains flat models, measures both ways, and correlates."""
    found: dict[str, list[NDArray[np.float64]]] = {"data": [], "dlrm": [], "dcn": []}
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for seed in seeds:
        began = time.process_time()
        rows = torch.arange(len(clicks.train[2]))
        found["data"].append(_pairs(FeatureInteractions.collect(_batches(clicks, rows, _BATCH), seed=seed)))
        seconds["data"].append(time.process_time() - began)
        for arch in ("dlrm", "dcn"):
            config = trial_config("flights", arch, study_set=STUDY_SETS["flights"], plan=None)
            model, _ = train_and_test(config, clicks, seed, joined=True)
            began = time.process_time()
            some = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:_MEASURED_ROWS]
            own = FeatureInteractions.collect_from_model(model, _batches(clicks, some, 2048), seed=seed)
            found[arch].append(_pairs(own))
            seconds[arch].append(time.process_time() - began)
    means = {name: np.mean(values, axis=0) for name, values in found.items()}
    return {
        "seeds": list(seeds),
        "between_seeds": {
            name: _mean([_spearman(one, other) for one, other in combinations(values, 2)])
            for name, values in found.items()
        },
        "of_one_seed_with_data": {
            arch: _mean([_spearman(a, b) for a, b in zip(found[arch], found["data"], strict=True)])
            for arch in ("dlrm", "dcn")
        },
        "of_means_with_data": {arch: _spearman(means[arch], means["data"]) for arch in ("dlrm", "dcn")},
        "of_means_dlrm_with_dcn": _spearman(means["dlrm"], means["dcn"]),
        "cpu_seconds": {name: _mean(values) for name, values in seconds.items()},
        "top_pairs": {name: _top(values, clicks.features) for name, values in means.items()},
    }


def _batches(clicks: Clicks, rows: Tensor, size: int) -> Iterator[Any]:
    return (clicks.batch(clicks.train, part) for part in rows.split(size))


def _pairs(found: FeatureInteractions) -> NDArray[np.float64]:
    return found.gains[np.triu_indices(found.num_features, k=1)]


def _spearman(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    return round(float(spearmanr(one, other).statistic), 3)


def _mean(values: Sequence[float]) -> float:
    return round(float(np.mean(values)), 3)


def _top(gains: NDArray[np.float64], features: Sequence[str], most: int = 8) -> list[str]:
    names = [f"{a} + {b}" for a, b in combinations(features, 2)]
    return [names[k].replace("c_", "") for k in np.argsort(-gains)[:most]]


def plot(costs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws CPU seconds against pairs of features, and against rows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    parts = (
        ("pairs", [r for r in costs if r["rows"] == _AT_ROWS], f"pairs of features, {_AT_ROWS:,} rows"),
        ("rows", [r for r in costs if r["features"] == _AT_FEATURES], f"rows, {_AT_FEATURES} features"),
    )
    for axes, (key, rows, label) in zip(panels, parts, strict=True):
        shown = sorted((row[key], row["cpu_seconds"]) for row in rows)
        axes.loglog(*zip(*shown, strict=True), marker="o", color="#0072B2")
        last = shown[-1]
        axes.loglog([x for x, _ in shown], [last[1] * x / last[0] for x, _ in shown], ":", color="#777777")
        axes.set_xlabel(f"{label} (dotted: in proportion)", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("CPU seconds, three splits", fontsize=9)
    figure.savefig(path, dpi=140)


def page(about: Mapping[str, Any], costs: Sequence[Mapping[str, Any]], agreed: Mapping[str, Any]) -> str:
    """The record in Markdown."""
    rows = [[f"{r['features']}", f"{r['pairs']:,}", f"{r['rows']:,}", f"{r['cpu_seconds']:.2f}"] for r in costs]
    between, own, means = (agreed[key] for key in ("between_seeds", "of_one_seed_with_data", "of_means_with_data"))
    table = [
        [name, *(f"{value:.2f}" if value is not None else "" for value in values)]
        for name, values in {
            "data": (between["data"], None, None, agreed["cpu_seconds"]["data"]),
            "flat DLRM": (between["dlrm"], own["dlrm"], means["dlrm"], agreed["cpu_seconds"]["dlrm"]),
            "flat DCN": (between["dcn"], own["dcn"], means["dcn"], agreed["cpu_seconds"]["dcn"]),
        }.items()
    ]
    top = "\n".join(f"- {name}: {'; '.join(pairs)}" for name, pairs in agreed["top_pairs"].items())
    return "\n\n".join(
        [
            "# Measures of interaction: cost and agreement",
            "Made by `python -m benchmarks.interaction_measures`.",
            "\n".join(f"- {name}: {value}" for name, value in about.items()),
            "## Cost",
            "![CPU seconds against pairs and rows](interaction_measures.png)",
            markdown_table(["features", "pairs", "rows", "CPU seconds"], rows),
            "## Agreement on flights",
            "Spearman's correlation over the pairs of features: between two seeds of one measure (mean over pairs of "
            f"seeds), and with the measure on data; {len(agreed['seeds'])} seeds, {_MEASURED_ROWS:,} rows of a model.",
            markdown_table(
                ["interactions of", "between seeds", "one seed with data", "means with data", "CPU seconds"], table
            ),
            f"The means of both models with each other: {agreed['of_means_dlrm_with_dcn']:.2f}. Strongest pairs:",
            top,
        ]
    )


@click.command(context_settings={"show_default": True})
@click.option("--data", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True)
@click.option("--seeds", type=click.IntRange(2), default=3)
@click.option("--first-seed", type=click.IntRange(0), default=420)
@click.option("--out", type=click.Path(path_type=Path), default=Path(__file__).parent / "results")
def main(*, data: Path, seeds: int, first_seed: int, out: Path) -> None:
    """Measures and writes ``interaction_measures.json``, ``.md`` and ``.png``."""
    torch.set_num_threads(1)
    sizes = [(count, _AT_ROWS) for count in _FEATURES] + [(_AT_FEATURES, rows) for rows in _ROWS]
    costs = [cost(*size) for size in sizes]
    agreed = agreement(read_clicks(data / "flights.parquet", embedding_dim=16), range(first_seed, first_seed + seeds))
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{processor()}, one thread, beside other work",
        "commit": commit(),
        "packages": versions(),
    }
    record = {"about": about, "costs": costs, "agreement": agreed}
    (out / "interaction_measures.json").write_text(json.dumps(record, indent=1) + "\n")
    (out / "interaction_measures.md").write_text(page(about, costs, agreed) + "\n")
    plot(costs, out / "interaction_measures.png")


if __name__ == "__main__":
    main()
