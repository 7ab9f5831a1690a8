"""Do towers of entities send fewer bytes than strided ones, each distinct input once, and train as well? Real data.

    OMP_NUM_THREADS=1 python -m benchmarks.entity_towers --data DIR

DIR has ``flights.parquet`` and ``hotel.parquet``. Batches are grouped by request, as ``data.group_by`` does it: the
departures of one airport in one hour, the bookings of one hotel for one day. Four towers: strided; by named entities;
by entities measured on the first batches (``entities = "auto"``). Pairs of one seed have the same weights to begin
with and the same batches. Bytes are ids, lengths, outputs and gradients between towers, counted by
`dmt.plan.distinct` on the batches of the first seed; no rank is started.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
import torch
from torch import nn

from benchmarks.report import commit, markdown_table, processor
from benchmarks.towers.clicks import Clicks, read_clicks
from benchmarks.towers.statistics import compare_arms
from benchmarks.towers.trials import STUDY_SETS, row_order, train_and_test, trial_config
from dmt.partitioner import FeatureAffinity, PartitionRules, TowerPartitioner
from dmt.partitioner.entities import find_entities
from dmt.plan.distinct import bag_hashes, joint_hashes
from dmt.plan.towers import TowerPlan
from dmt.training.config import TrainConfig

__all__ = ["main"]

_TOWERS = 4
_ID_BYTES, _NUMBER_BYTES = 8, 4
_COUNTED = 8
_COLUMNS = (
    *("data", "model", "entities", "B", "kB, every sample", "kB once, strided", "kB once, entities", "times fewer"),
    *("AUC", "AUC strided", "difference", "better in", "Wilcoxon p"),
)
REQUESTS = {
    "flights": ["c_month", "c_day", "c_sched_hour", "c_origin"],
    "hotel": ["c_hotel", "c_arrival_date_month", "c_arrival_date_week_number", "c_arrival_date_day_of_month"],
}
ENTITIES = {
    "flights": {
        "hour": ["c_month", "c_day", "c_dow", "c_sched_hour", "c_wind_dir"],
        "route": ["c_origin", "c_dest*", "c_route"],
        "aircraft": ["c_tailnum", "c_manufacturer", "c_model", "c_engine", "c_ptype", "c_pyear"],
    },
    "hotel": {
        "stay": ["c_hotel", "c_arrival_*"],
        "channel": ["c_market_segment", "c_distribution_channel", "c_agent", "c_company", "c_deposit_type"],
        "guest": ["c_country", "c_customer_type", "c_is_repeated_guest"],
    },
}


def request_numbers(name: str, clicks: Clicks) -> torch.Tensor:
    """The request of each training row, [R]."""
    ids = clicks.train[1].numpy()
    keys = [ids[:, clicks.features.index(column)] for column in REQUESTS[name]]
    ones = np.ones(len(ids), dtype=np.int64)
    return torch.from_numpy(np.unique(joint_hashes(bag_hashes(ones, key) for key in keys), return_inverse=True)[1])


def batches_of(clicks: Clicks, requests: torch.Tensor, size: int, *, most: int) -> list[dict[str, tuple[Any, Any]]]:
    """The first batches of the first seed: (lengths, values) of each feature."""
    order = row_order(len(requests), TrainConfig(batch_size=size), 0, requests)
    ones = np.ones(size, dtype=np.int64)
    return [
        {feature: (ones, clicks.train[1][rows, i].numpy()) for i, feature in enumerate(clicks.features)}
        for rows in islice(order, most)
    ]


def plans_of(name: str, clicks: Clicks, requests: torch.Tensor) -> dict[str, TowerPlan]:
    """The tower plan of each arm."""
    batches = batches_of(clicks, requests, STUDY_SETS[name].batch_size, most=4)
    hashes = [{feature: bag_hashes(*bags) for feature, bags in batch.items()} for batch in batches]
    found = {"strided": TowerPlan.strided(clicks.features, _TOWERS)}
    # Affinities decide nothing here: each entity has one tower, and the rest another.
    affinity = FeatureAffinity(matrix=np.eye(len(clicks.features)), features=tuple(clicks.features))
    for arm, entities in (("named", ENTITIES[name]), ("auto", find_entities(hashes, num_towers=_TOWERS))):
        partitioner = TowerPartitioner(num_towers=_TOWERS, rules=PartitionRules(entities=entities))
        found[arm] = partitioner.fit(affinity)
    return found


def bytes_of(plan: TowerPlan, widths: Sequence[int], batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Bytes that one rank and step exchange with the towers, each sample or each distinct input sent once."""
    size, every = len(next(iter(batches[0].values()))[0]), 0.0
    once, shares = 0.0, []
    hashes = [{feature: bag_hashes(*bags) for feature, bags in batch.items()} for batch in batches]
    for group, width in zip(plan.to_lists(), widths, strict=True):
        # Each sample has one id of each feature.
        of_a_row = 2 * len(group) * _ID_BYTES + 2 * width * _NUMBER_BYTES
        rows = float(np.mean([len(np.unique(joint_hashes(of_batch[name] for name in group))) for of_batch in hashes]))
        every += size * of_a_row
        once += rows * of_a_row
        shares.append(round(rows / size, 4))
    return {"every": round(every), "once": round(once), "distinct_shares": shares}


def train_arms(
    name: str, arch: str, clicks: Clicks, requests: torch.Tensor, plans: Mapping[str, TowerPlan], seeds: int
) -> list[dict[str, Any]]:
    """Trains every arm with every seed, arms side by side; one record each."""
    records = []
    with TemporaryDirectory() as folder:
        for seed in range(seeds):
            for arm, plan in plans.items():
                path = Path(folder) / f"{arm}.json"
                plan.save(path)
                config = trial_config(name, arch, study_set=STUDY_SETS[name], plan=str(path))
                began = time.process_time()
                model, metrics = train_and_test(config, clicks, seed, requests)
                records.append(
                    {"data": name, "arch": arch, "arm": arm, "seed": seed, "auc": metrics.auc, "ne": metrics.ne}
                    | {"cpu_seconds": round(time.process_time() - began, 2), "widths": tower_widths(model)}
                )
                click.echo(f"{name} {arch} {arm} seed {seed}: AUC {metrics.auc:.4f}")
    return records


def tower_widths(model: nn.Module) -> list[int]:
    """Outputs of each tower per sample."""
    found = (getattr(module, "towers", None) for module in model.modules())
    return [tower.interaction.out_features for towers in found if isinstance(towers, nn.ModuleList) for tower in towers]  # type: ignore[union-attr,misc]


@click.command(context_settings={"show_default": True})
@click.option("--data", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True)
@click.option("--seeds", type=click.IntRange(2), default=10, help="Pairs of runs.")
@click.option("--quick", is_flag=True, help="8,192 training rows: a smoke test; prints the table only.")
@click.option("--out", type=click.Path(path_type=Path), default=Path(__file__).parent / "results")
def main(*, data: Path, seeds: int, quick: bool, out: Path) -> None:
    """Counts bytes and trains all arms; writes entity_towers.json and .md after each model."""
    torch.set_num_threads(1)
    records, found, rows, arms = [], [], [], {}
    for name in sorted(REQUESTS, reverse=True):  # the smaller one first
        clicks = read_clicks(data / f"{name}.parquet", embedding_dim=16, max_rows=8192 if quick else None)
        requests = request_numbers(name, clicks)
        plans = arms[name] = plans_of(name, clicks, requests)
        for arch in ("dlrm", "dcn"):
            trained = train_arms(name, arch, clicks, requests, plans, seeds)
            records += trained
            auc, widths = (
                {arm: {r["seed"]: r[key] for r in trained if r["arm"] == arm} for arm in plans}
                for key in ("auc", "widths")
            )
            for size in (512, 4096):
                batches = batches_of(clicks, requests, size, most=_COUNTED)
                sent = {arm: bytes_of(plan, widths[arm][0], batches) for arm, plan in plans.items()}
                for arm in ("named", "auto"):
                    against = compare_arms(auc[arm], auc["strided"])
                    ratio = sent["strided"]["once"] / sent[arm]["once"]
                    found.append(
                        {"data": name, "arch": arch, "arm": arm, "batch_size": size, "times_fewer": round(ratio, 3)}
                        | {"bytes": sent[arm], "strided_bytes": sent["strided"], "auc": asdict(against)}
                    )
                    rows.append(
                        [name, f"DMT-{arch.upper()}", arm, f"{size:,}", f"{sent[arm]['every'] / 1e3:,.0f}"]
                        + [f"{sent[a]['once'] / 1e3:,.0f}" for a in ("strided", arm)]
                        + [f"{ratio:.2f}", f"{against.median:.4f}", f"{against.baseline_median:.4f}"]
                        + [f"{against.median_difference:+.4f}", f"{against.num_better} of {seeds}"]
                        + [f"{against.wilcoxon_p:.3f}"]
                    )
            if not quick:
                write(out, records, found, arms, markdown_table(_COLUMNS, rows), seeds)
    click.echo(markdown_table(_COLUMNS, rows))


def write(
    out: Path,
    records: Sequence[Mapping[str, Any]],
    found: Sequence[Mapping[str, Any]],
    arms: Mapping[str, Mapping[str, TowerPlan]],
    table: str,
    seeds: int,
) -> None:
    """Writes the record and its page."""
    packages = ("torch", "torchrec", "numpy", "scipy")
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": processor(),
        "packages": {name: version(name) for name in packages},
        "seeds": f"0 to {seeds - 1}",
        "cpu_minutes": round(sum(r["cpu_seconds"] for r in records) / 60, 1),
        **{name: asdict(STUDY_SETS[name]) for name in REQUESTS},
    }
    towers = {name: {arm: plan.to_lists() for arm, plan in plans.items()} for name, plans in arms.items()}
    record = {"about": about, "towers": towers, "comparisons": found, "runs": records}
    (out / "entity_towers.json").write_text(json.dumps(record, indent=1) + "\n")
    lists = [
        f"- {name}, {arm}: " + "; ".join(" ".join(tower) for tower in lists).replace("c_", "")
        for name, by_arm in towers.items()
        for arm, lists in by_arm.items()
    ]
    (out / "entity_towers.md").write_text(
        "# Towers of entities against strided towers\n\nMade by `benchmarks/entity_towers.py`.\n\n"
        + "\n".join(f"- {key}: {value}" for key, value in about.items())
        + "\n\nBatches of B rows of one rank, grouped by request; kB are what the rank exchanges with all towers in a "
        "step: ids, lengths, outputs\nand gradients. Models are trained at B = 512. AUC: test, median over seeds; the "
        f"difference is the median over pairs.\n\n{table}\n\n## Towers\n\n" + "\n".join(lists) + "\n"
    )


if __name__ == "__main__":
    main()
