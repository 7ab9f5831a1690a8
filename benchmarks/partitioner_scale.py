"""Time, memory and quality of ``TowerPartitioner(num_towers=T).fit`` on planted groups, each size in a fresh process.

python -m benchmarks.partitioner_scale
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.report import about
from dmt.partitioner import FeatureAffinity, TowerPartitioner

__all__ = ["main", "measure", "planted"]

_RESULTS = Path(__file__).parent / "results"
SIZES = ((26, 8), (100, 16), (500, 32), (1000, 64), (2000, 128), (4000, 256))


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


def measure(num_features: int, num_towers: int) -> dict[str, Any]:
    """Seconds of ``fit`` (median), adjusted Rand index with the planted groups, peak memory of this process in MiB."""
    from sklearn.metrics import adjusted_rand_score

    # The first fit of a process also loads the solver.
    TowerPartitioner(num_towers=2).fit(planted(8, 2)[0])
    affinity, groups = planted(num_features, num_towers)
    seconds = []
    for _ in range(3 if num_features <= 500 else 1):
        start = time.perf_counter()
        plan = TowerPartitioner(num_towers=num_towers).fit(affinity)
        seconds.append(time.perf_counter() - start)
    placed = [(groups[name], tower) for tower, names in enumerate(plan.to_lists()) for name in names]
    return {
        "features": num_features,
        "towers": num_towers,
        "fit": statistics.median(seconds),
        "rand_index": adjusted_rand_score(*zip(*placed, strict=True)),
        # Linux counts in KiB.
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


@click.command()
@click.option("--largest", default=4000, show_default=True, help="Leaves out sizes above this.")
@click.option("--one", nargs=2, type=int, default=None, hidden=True, help="Features, towers; prints JSON.")
@click.option("--out", type=click.Path(path_type=Path), default=_RESULTS, show_default=False, help="Output folder.")
def main(*, largest: int, one: tuple[int, int] | None, out: Path) -> None:
    """Measures each size in a process of its own and writes the record."""
    if one is not None:
        click.echo(json.dumps(measure(*one)))
        return
    rows = []
    for features, towers in SIZES:
        if features <= largest:
            command = [sys.executable, "-m", "benchmarks.partitioner_scale", "--one", str(features), str(towers)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            click.echo(json.dumps(rows[-1]))
    record = {"about": about("python -m benchmarks.partitioner_scale"), "rows": rows}
    (out / "partitioner_scale.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
