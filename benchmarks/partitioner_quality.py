"""The two optimisers of the partitioner against the packages a user would otherwise take.

Stress of `embed_distances` against scikit-learn's SMACOF, and the objective of `search_clusters` against
``KMeansConstrained``. Writes JSON and a Markdown table to ``benchmarks/results/``; see ``benchmarks/README.md``.
"""

from __future__ import annotations

import json
import platform
import time
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from dmt.partitioner import FeatureAffinity
from dmt.partitioner.assignment import Bounds
from dmt.partitioner.cluster import search_clusters, squared_distances
from dmt.partitioner.embed import distances, embed_distances

__all__ = ["compare_clusters", "compare_stress", "low_rank_affinity", "main", "noise_affinity", "planted_affinity"]

Matrix = NDArray[np.float64]
RESULTS = Path(__file__).parent / "results"
# "No worse": higher by less than the tolerances both optimisers stop at.
TOLERANCE = 1e-4


def planted_affinity(sizes: Sequence[int], *, seed: int, noise: float = 0.1) -> Matrix:
    """Groups of the given sizes in random order: 0.8 within, 0.1 between, and Gaussian noise; [F, F].

    Example:
        >>> planted_affinity([2, 1], seed=0, noise=0.0).sum().round(1)
        np.float64(4.4)
    """
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    matrix = np.where(group[:, None] == group, 0.8, 0.1) + rng.normal(0, noise, (len(group), len(group)))
    return np.clip((matrix + matrix.T) / 2, 0, 1)


def noise_affinity(num_features: int, *, seed: int) -> Matrix:
    """No structure at all, [F, F]."""
    matrix = np.random.default_rng(seed).random((num_features, num_features))
    return (matrix + matrix.T) / 2


def low_rank_affinity(num_features: int, *, seed: int) -> Matrix:
    """Absolute mean cosines of simulated embeddings, [F, F]: six shared directions, and noise of a feature's own."""
    rng = np.random.default_rng(seed)
    rank, dim, num_samples = 6, 32, 64
    loadings = rng.normal(size=(num_features, rank)) * np.exp(-0.4 * np.arange(rank))
    shared = loadings @ rng.normal(size=(rank, dim)) / np.sqrt(dim)
    own = rng.normal(size=(num_samples, num_features, dim)) * np.exp(rng.normal(size=num_features))[None, :, None]
    embeddings = shared + 0.3 * own / np.sqrt(dim)
    embeddings /= np.linalg.norm(embeddings, axis=2, keepdims=True)
    return np.clip(np.abs(np.einsum("sfd,sgd->fg", embeddings, embeddings) / num_samples), 0, 1)


def _affinities(num_features: int, seed: int) -> Iterator[tuple[str, Matrix]]:
    rng = np.random.default_rng(seed + 1000)
    unequal: list[int] = []
    while sum(unequal) < num_features:
        unequal.append(min(int(rng.integers(2, 9)), num_features - sum(unequal)))
    num_groups = max(2, round(num_features / (3.25 if num_features <= 60 else 8)))
    equal = np.bincount(np.arange(num_features) % num_groups).tolist()
    yield "equal groups", planted_affinity(equal, seed=seed)
    yield "groups of 2-8", planted_affinity(unequal, seed=seed, noise=0.15)
    yield "noise", noise_affinity(num_features, seed=seed)
    yield "low rank", low_rank_affinity(num_features, seed=seed)


def compare_stress(distance: Matrix, dims: int, *, seed: int, num_starts: int = 20) -> dict[str, Any]:
    """One row: stress and seconds of ours, and of SMACOF's best of ``num_starts`` random starts and one classical."""
    from sklearn.manifold import MDS, smacof

    begin = time.perf_counter()
    found = embed_distances(distance, dims=dims, seed=seed)
    ours = time.perf_counter() - begin
    tight = {"max_iter": 2000, "eps": 1e-8}
    begin = time.perf_counter()
    with warnings.catch_warnings():
        # Released versions announce changes of their defaults; none of those are used here.
        warnings.simplefilter("ignore", FutureWarning)
        _, random = smacof(
            distance, n_components=dims, n_init=num_starts, random_state=seed, normalized_stress=False, **tight
        )
        classical = MDS(
            dims, init="classical_mds", n_init=1, metric="precomputed", normalized_stress=False, **tight
        ).fit(distance)
    best = min(float(random), float(classical.stress_))
    return {
        "stress": found.stress,
        "normalized_stress": found.normalized_stress,
        "reference": best,
        "ratio": found.stress / best,
        "seconds": ours,
        "reference_seconds": time.perf_counter() - begin,
    }


def _objective(points: Matrix, labels: NDArray[np.int64]) -> float:
    groups = (points[labels == label] for label in np.unique(labels))
    return float(sum(np.square(group - group.mean(axis=0)).sum() for group in groups))


def compare_clusters(points: Matrix, num_clusters: int, *, seed: int) -> dict[str, Any]:
    """One row: sum of squared distances to the centres, and seconds; ours and ``KMeansConstrained``, 20 starts."""
    from k_means_constrained import KMeansConstrained

    smallest, largest = len(points) // num_clusters, -(-len(points) // num_clusters)
    bounds = Bounds(loads=np.ones((1, len(points))), lower=np.array([smallest]), upper=np.array([largest]))
    begin = time.perf_counter()
    labels = search_clusters(points, squared_distances(points), num_clusters=num_clusters, bounds=bounds, seed=seed)
    ours = time.perf_counter() - begin
    solver = KMeansConstrained(num_clusters, size_min=smallest, size_max=largest, n_init=20, random_state=seed)
    # The package rounds distances to 1/1000; it is not to lose by that.
    scaled = points * (1000.0 / np.ptp(points, axis=0).max())
    begin = time.perf_counter()
    theirs = solver.fit(scaled).labels_
    found, best = _objective(points, labels), _objective(points, theirs)
    return {
        "objective": found,
        "reference": best,
        "ratio": found / best,
        "seconds": ours,
        "reference_seconds": time.perf_counter() - begin,
    }


def _stress_rows(sizes: Sequence[int], dims: Sequence[int], seed: int) -> Iterator[dict[str, Any]]:
    for size in sizes:
        for kind, matrix in _affinities(size, seed):
            for strategy in ("coherent", "diverse"):
                for n in dims:
                    case = {"matrix": kind, "features": size, "strategy": strategy, "dims": n}
                    yield case | compare_stress(distances(matrix, strategy), n, seed=seed)


def _cluster_rows(cases: Sequence[tuple[int, int]], seed: int) -> Iterator[dict[str, Any]]:
    for size, towers in cases:
        for kind, matrix in _affinities(size, seed):
            points = embed_distances(distances(matrix, "coherent"), seed=seed).points
            yield {"matrix": kind, "features": size, "towers": towers} | compare_clusters(points, towers, seed=seed)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    def cell(key: str, value: Any) -> str:
        digits = {"seconds": ".2f", "reference_seconds": ".2f", "ratio": ".5f"}.get(key, ".6g")
        return format(value, digits) if isinstance(value, float) else str(value)

    lines = [list(rows[0]), ["---"] * len(rows[0]), *([cell(*item) for item in row.items()] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _write(record: dict[str, Any], out: Path, name: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    pages = [f"# Partitioner quality\n\n{json.dumps(record['environment'])}\n"]
    for part in ("stress", "clusters"):
        rows = record[part]
        worse = sum(row["ratio"] > 1 + TOLERANCE for row in rows)
        if rows:
            pages.append(f"## {part}\n\n{len(rows)} cases, {worse} worse by more than {TOLERANCE}.\n\n{_table(rows)}")
    (out / f"{name}.md").write_text("\n".join(pages))


@click.command()
@click.option("--quick", is_flag=True, help="Small matrices in two dimensions: a minute instead of an hour.")
@click.option("--part", type=click.Choice(["stress", "clusters", "all"]), default="all", show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of the matrices and of both sides.")
@click.option("--affinity", "files", multiple=True, type=click.Path(exists=True), help="Measured affinities (.npz).")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, show_default=False, help="Output folder.")
def main(*, quick: bool, part: str, seed: int, files: tuple[str, ...], out: Path) -> None:
    """Compares stress and clusters; one line per case, and a record in the output folder."""
    sizes, dims = ((8, 26), (2,)) if quick else ((8, 26, 60, 100, 200, 500), (1, 2, 3))
    cases = ((26, 8),) if quick else ((26, 8), (60, 16), (200, 40), (500, 32))
    packages = ("torch", "numpy", "scikit-learn", "k-means-constrained")
    record: dict[str, Any] = {
        "environment": {name: version(name) for name in packages}
        | {"seed": seed, "machine": platform.machine(), "date": time.strftime("%Y-%m-%d")},
        "stress": [],
        "clusters": [],
    }
    measured = [(Path(file).name, FeatureAffinity.load(file).matrix) for file in files]
    rows: list[tuple[str, Iterator[dict[str, Any]]]] = []
    if part != "clusters":
        rows += [("stress", _stress_rows(sizes, dims, seed)), ("stress", _measured_rows(measured, dims, seed))]
    if part != "stress":
        rows.append(("clusters", _cluster_rows(cases, seed)))
    name = "partitioner_quality" + ("_quick" if quick else "") + ("" if part == "all" else f"_{part}")
    for key, iterator in rows:
        for row in iterator:
            record[key].append(row)
            click.echo("  ".join(f"{v:.5g}" if isinstance(v, float) else str(v) for v in row.values()))
            # After each case, so that a run that is stopped leaves what it found.
            _write(record, out, name)


def _measured_rows(measured: Sequence[tuple[str, Matrix]], dims: Sequence[int], seed: int) -> Iterator[dict[str, Any]]:
    for name, matrix in measured:
        for strategy in ("coherent", "diverse"):
            for n in dims:
                case = {"matrix": name, "features": len(matrix), "strategy": strategy, "dims": n}
                yield case | compare_stress(distances(matrix, strategy), n, seed=seed)


if __name__ == "__main__":
    main()
