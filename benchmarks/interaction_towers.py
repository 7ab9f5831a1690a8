"""Do towers made from measured interactions train better than strided ones and than the paper's? Real data.

    OMP_NUM_THREADS=1 python -m benchmarks.interaction_towers --data DIR [--study dlrm]

DIR has ``flights.parquet``, ``hotel.parquet`` or ``census.parquet``. Models, settings and tests are those of the tower
study (`benchmarks.towers`): c = 0, p = 1, N = D = 16. Arms of one seed share their weights to begin with and the order
of rows: the flat model; strided towers; the paper's coherent towers, from the flat model of that seed; and towers whose
features interact (``together``) or do not (``apart``), measured on the training rows with the splits of that seed. The
study ``dcn`` has DMT-DCN, ``dlrm`` DMT-DLRM with the paper's tower modules and with those that hear inner products
(`DLRMProductsTowerModule`). No arm has seen a test row. A progress file keeps what is done.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import torch
from tqdm import tqdm

from benchmarks.report import commit, markdown_table, processor
from benchmarks.towers.clicks import Clicks, read_clicks
from benchmarks.towers.runs import affinity_of_pairs
from benchmarks.towers.statistics import compare_arms, holm
from benchmarks.towers.trials import STUDY_SETS, run_trial
from dmt.partitioner import TowerPartitioner
from dmt.plan.towers import TowerPlan

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class Study:
    """Arms that are compared with each other."""

    file: str
    """Name of its results."""
    title: str
    model: str
    arms: Mapping[str, tuple[str, str | None]]
    """The model of each arm (`trial_config`), and where its towers come from; None: it has no towers."""
    comparisons: Sequence[tuple[str, str]]
    """An arm, and its baseline."""
    shown: str
    """The arm whose towers are printed."""


STUDIES = {
    "dcn": Study(
        file="interaction_towers",
        title="Towers from interactions",
        model="DMT-DCN, c=0, p=1, N=D=16 and the flat DCN",
        arms={
            "flat": ("dcn", None),
            "strided": ("dcn", "strided"),
            "coherent": ("dcn", "coherent"),
            "interactions": ("dcn", "together"),
        },
        comparisons=[
            ("interactions", "strided"),
            ("coherent", "strided"),
            ("interactions", "coherent"),
            ("interactions", "flat"),
        ],
        shown="interactions",
    ),
    "dlrm": Study(
        file="product_towers",
        title="Tower modules with inner products",
        model="DMT-DLRM, c=0, p=1, N=D=16, with and without inner products in its tower modules, and the flat DLRM",
        arms={
            "flat": ("dlrm", None),
            "strided": ("dlrm", "strided"),
            "apart": ("dlrm", "apart"),
            "products, strided": ("dlrm-products", "strided"),
            "products, together": ("dlrm-products", "together"),
        },
        comparisons=[
            ("products, together", "strided"),
            ("products, together", "products, strided"),
            ("products, together", "flat"),
            ("products, strided", "strided"),
            ("apart", "strided"),
        ],
        shown="products, together",
    ),
}
_EMBEDDING_DIM = 16
_BATCH = 8192

Records = dict[tuple[str, str, int], dict[str, Any]]
"""By data set, arm and seed."""


def plan_of(
    strategy: str, clicks: Clicks, seed: int, flat: Mapping[str, Any], num_towers: int
) -> tuple[TowerPlan, float]:
    """The towers of an arm, and the CPU seconds that measuring took."""
    if strategy == "strided":
        return TowerPlan.strided(clicks.features, num_towers), 0.0
    if strategy == "coherent":
        affinity = affinity_of_pairs(flat["affinity"], clicks.features)
        return TowerPartitioner(num_towers=num_towers, strategy="coherent", seed=seed).fit(affinity), 0.0
    from dmt.partitioner import FeatureInteractions

    began = time.process_time()
    batches = (clicks.batch(clicks.train, rows) for rows in torch.arange(len(clicks.train[2])).split(_BATCH))
    found = FeatureInteractions.collect(batches, seed=seed)
    seconds = time.process_time() - began
    return TowerPartitioner(num_towers=num_towers, strategy=strategy, seed=seed).fit(found), seconds  # type: ignore[arg-type]


def train(
    data: Path,
    name: str,
    arms: Mapping[str, tuple[str, str | None]],
    seeds: Sequence[int],
    progress: Path,
    records: Records,
) -> None:
    """Trains what is not in ``records`` yet; adds it there and to the progress file."""
    todo = [(seed, arm) for seed in seeds for arm in arms if (name, arm, seed) not in records]
    if not todo:
        return
    clicks = read_clicks(data / f"{name}.parquet", embedding_dim=_EMBEDDING_DIM)
    study_set = STUDY_SETS[name]
    with progress.open("a") as file:
        for seed, arm in tqdm(todo, desc=name, unit="run"):
            plan, measured = None, 0.0
            arch, strategy = arms[arm]
            if strategy is not None:
                flat = records.get((name, "flat", seed), {})
                plan, measured = plan_of(strategy, clicks, seed, flat, study_set.num_towers)
            began = time.process_time()
            found = run_trial(name, arch, seed, clicks=clicks, study_set=study_set, plan=plan)
            cpu = {"cpu_seconds": round(time.process_time() - began, 2), "measuring_cpu_seconds": round(measured, 2)}
            records[name, arm, seed] = {"data": name, "arm": arm, "seed": seed} | cpu | found
            file.write(json.dumps(records[name, arm, seed]) + "\n")
            file.flush()


def compare(study: Study, records: Records, name: str, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Compares the arms of the study on one data set; Holm within it."""
    auc = {arm: {seed: records[name, arm, seed]["auc"] for seed in seeds} for arm in study.arms}
    pairs = study.comparisons
    found = [{"data": name, "arm": a, "baseline": b} | asdict(compare_arms(auc[a], auc[b])) for a, b in pairs]
    for row, p in zip(found, holm([row["wilcoxon_p"] for row in found]), strict=True):
        row["wilcoxon_p_holm"] = p
    return found


def write(study: Study, records: Records, done: Mapping[str, Sequence[int]], out: Path) -> None:
    """Writes the study's file as .json and .md."""
    found = [row for name, seeds in done.items() for row in compare(study, records, name, seeds)]
    packages = ("torch", "torchrec", "fbgemm-gpu-cpu", "numpy", "scipy")
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": f"{processor()}, one thread",
        "packages": {name: version(name) for name in packages},
        "model": study.model,
        "seeds": {name: [min(seeds), max(seeds)] for name, seeds in done.items()},
        **{name: asdict(STUDY_SETS[name]) for name in done},
    }
    runs = [
        {key: value for key, value in records[name, arm, seed].items() if key != "affinity"}
        for name, seeds in done.items()
        for seed in seeds
        for arm in study.arms
    ]
    lines = ",\n  ".join(json.dumps(run) for run in runs)
    head = json.dumps({"about": about, "comparisons": found}, indent=1)
    (out / f"{study.file}.json").write_text(f'{head[:-2]},\n "runs": [\n  {lines}\n ]\n}}\n')
    rows = [
        [
            *(r["data"], r["arm"], r["baseline"], f"{r['median']:.4f} ({r['std']:.4f})"),
            *(f"{r['baseline_median']:.4f} ({r['baseline_std']:.4f})", f"{r['median_difference']:+.4f}"),
            *(f"{r['num_better']} of {r['num_seeds']}", f"{r['wilcoxon_p']:.2g} ({r['wilcoxon_p_holm']:.2g})"),
        ]
        for r in found
    ]
    columns = ["data", "arm", "baseline", "AUC (std)", "baseline (std)", "difference", "better in", "Wilcoxon p (Holm)"]
    seconds = {
        name: [
            sum(records[name, arm, seed][key] for seed in seeds) / len(seeds)
            for arm, key in ((study.shown, "measuring_cpu_seconds"), ("flat", "cpu_seconds"))
        ]
        for name, seeds in done.items()
    }
    costs = [
        f"- {name}: measuring interactions {own:.1f} CPU seconds; training and testing the flat model {flat:.1f}, of "
        f"{STUDY_SETS[name].epochs} passes over the training rows."
        for name, (own, flat) in seconds.items()
    ]
    towers = [
        f"- {name}, seed {seeds[0]}: "
        + "; ".join(" ".join(tower) for tower in records[name, study.shown, seeds[0]]["towers"]).replace("c_", "")
        for name, seeds in done.items()
    ]
    (out / f"{study.file}.md").write_text(
        f"# {study.title}\n\nMade by `python -m benchmarks.interaction_towers`.\n\n"
        + "\n".join(f"- {key}: {value}" for key, value in about.items())
        + "\n\nTest AUC, median over seeds (standard deviation); the difference is the median over pairs of one seed. "
        "p-values are two-sided; in\nbrackets after Holm's correction over the rows of the data set.\n\n"
        + markdown_table(columns, rows)
        + "\n\n## Cost\n\n"
        + "\n".join(costs)
        + "\n\n## Towers of interactions\n\n"
        + "\n".join(towers)
        + "\n"
    )


@click.command(context_settings={"show_default": True})
@click.option("--data", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True)
@click.option("--set", "names", multiple=True, default=("flights",), help="Data sets, one after the other.")
@click.option("--study", "kind", type=click.Choice([*STUDIES]), default="dcn")
@click.option("--seeds", type=click.IntRange(2), default=20, help="Runs of each arm.")
@click.option("--first-seed", type=click.IntRange(0), default=100, help="The tower study has 0 to 19.")
@click.option("--work", type=click.Path(path_type=Path), default=Path("runs/interaction_towers"), help="For progress.")
@click.option("--out", type=click.Path(path_type=Path), default=Path(__file__).parent / "results")
def main(*, data: Path, names: Sequence[str], kind: str, seeds: int, first_seed: int, work: Path, out: Path) -> None:
    """Trains the arms and writes the results of the seeds that have all of them."""
    torch.set_num_threads(1)
    work.mkdir(parents=True, exist_ok=True)
    study = STUDIES[kind]
    progress = work / f"{kind}.jsonl"
    lines = progress.read_text().splitlines() if progress.exists() else []
    records: Records = {(r["data"], r["arm"], r["seed"]): r for r in map(json.loads, lines)}
    for name in names:
        train(data, name, study.arms, range(first_seed, first_seed + seeds), progress, records)
    every = {name: sorted({seed for data, _, seed in records if data == name}) for name in STUDY_SETS}
    done = {
        name: [s for s in seeds if all((name, arm, s) in records for arm in study.arms)]
        for name, seeds in every.items()
    }
    write(study, records, {name: seeds for name, seeds in done.items() if len(seeds) > 1}, out)


if __name__ == "__main__":
    main()
