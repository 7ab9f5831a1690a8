"""Time and memory of ``TowerPartitioner(num_towers=T).fit`` from 26 features to 4,000, each size in a fresh process.

Writes JSON and a log-log plot to ``benchmarks/results/``; see ``benchmarks/README.md``.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import numpy as np

from dmt.partitioner import FeatureAffinity, TowerPartitioner
from dmt.partitioner.assignment import Bounds
from dmt.partitioner.cluster import search_clusters, squared_distances
from dmt.partitioner.embed import distances, embed_distances

__all__ = ["main", "measure", "plot", "planted"]

RESULTS = Path(__file__).parent / "results"
SIZES = ((26, 8), (100, 16), (500, 32), (1000, 64), (2000, 128), (4000, 256))
STAGES = ("fit", "embed", "cluster")


def planted(num_features: int, num_groups: int, *, seed: int = 0) -> tuple[FeatureAffinity, dict[str, int]]:
    """An affinity with as many groups as towers, and the groups: 0.8 within, 0.1 between, noise of 0.1.

    Example:
        >>> planted(26, 8)[0].num_features
        26
    """
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.arange(num_features) % num_groups)
    matrix = np.where(group[:, None] == group, 0.8, 0.1) + rng.normal(0, 0.1, (num_features, num_features))
    matrix = np.clip((matrix + matrix.T) / 2, 0, 1)
    names = tuple(f"f{i:04d}" for i in range(num_features))
    return FeatureAffinity(matrix=matrix, features=names), dict(zip(names, group.tolist(), strict=True))


def _peak_mib() -> float:
    # Linux counts in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _timed(action: Any) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = action()
    return time.perf_counter() - begin, result


def measure(num_features: int, num_towers: int, *, repeats: int) -> dict[str, Any]:
    """Seconds of ``fit`` and of its stages, median of ``repeats``, and the peak memory of this process in MiB.

    The memory is read after the ``fit``s and before the stages are run on their own. The first ``fit`` of a process
    also loads torch and the solver, so one of 8 features is run before it.
    """
    from sklearn.metrics import adjusted_rand_score

    TowerPartitioner(num_towers=2).fit(planted(8, 2)[0])
    affinity, groups = planted(num_features, num_towers)
    before = _peak_mib()
    fits = [_timed(lambda: TowerPartitioner(num_towers=num_towers).fit(affinity)) for _ in range(repeats)]
    plan = fits[0][1]
    placed = [(groups[name], tower) for tower, names in enumerate(plan.to_lists()) for name in names]
    peak = _peak_mib()
    distance = distances(affinity.matrix, "coherent")
    embeds = [_timed(lambda: embed_distances(distance)) for _ in range(repeats)]
    points = embeds[0][1].points
    sizes = {"lower": np.array([num_features // num_towers]), "upper": np.array([-(-num_features // num_towers)])}
    bounds = Bounds(loads=np.ones((1, num_features)), **sizes)
    squared = squared_distances(points)
    search = functools.partial(search_clusters, points, squared, num_clusters=num_towers, bounds=bounds, seed=0)
    clusters = [_timed(search)[0] for _ in range(repeats)]
    return {
        "features": num_features,
        "towers": num_towers,
        "repeats": repeats,
        "fit": statistics.median(seconds for seconds, _ in fits),
        "embed": statistics.median(seconds for seconds, _ in embeds),
        "cluster": statistics.median(clusters),
        "normalized_stress": embeds[0][1].normalized_stress,
        "rand_index": adjusted_rand_score(*zip(*placed, strict=True)),
        "num_refined": plan.affinity["num_refined"],
        "peak_mib": peak,
        "before_mib": before,
    }


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Seconds and peak memory over F, both axes logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    size = [row["features"] for row in rows]
    for stage in STAGES:
        left.loglog(size, [row[stage] for row in rows], marker="o", label=stage)
    left.set(xlabel="features", ylabel="seconds")
    left.legend()
    right.loglog(size, [row["peak_mib"] for row in rows], marker="o", label="peak of the process")
    right.loglog(size, [row["before_mib"] for row in rows], marker="o", label="before fit, with the affinity")
    right.set(xlabel="features", ylabel="MiB")
    right.legend()
    for axes in (left, right):
        axes.grid(which="both", alpha=0.3)
    figure.savefig(path, dpi=120)


def _in_new_process(num_features: int, num_towers: int) -> dict[str, Any]:
    repeats = 5 if num_features <= 100 else 3 if num_features <= 500 else 1
    case = ["--one", str(num_features), str(num_towers), str(repeats)]
    command = [sys.executable, str(Path(__file__).resolve()), *case]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


@click.command()
@click.option("--largest", default=4000, show_default=True, help="Leaves out sizes above this.")
@click.option("--one", nargs=3, type=int, default=None, hidden=True, help="Features, towers, repeats; prints JSON.")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, show_default=False, help="Output folder.")
def main(*, largest: int, one: tuple[int, int, int] | None, out: Path) -> None:
    """Measures each size in a process of its own and writes the record and the plot."""
    if one is not None:
        click.echo(json.dumps(measure(one[0], one[1], repeats=one[2])))
        return
    out.mkdir(parents=True, exist_ok=True)
    environment = {name: version(name) for name in ("torch", "numpy", "k-means-constrained")} | {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "load_before": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }
    rows: list[dict[str, Any]] = []
    for num_features, num_towers in SIZES:
        if num_features > largest:
            continue
        rows.append(_in_new_process(num_features, num_towers))
        click.echo(json.dumps(rows[-1]))
        record = {"environment": environment, "rows": rows}
        (out / "partitioner_scale.json").write_text(json.dumps(record, indent=1) + "\n")
    plot(rows, out / "partitioner_scale.png")


if __name__ == "__main__":
    main()
