"""Do towers of entities send fewer bytes than strided ones, each distinct input once, and train as well?

Batches are grouped by request: the departures of one airport in one hour, the bookings of one hotel for one day. Four
towers: strided; by named entities; by entities measured on the first batches. Pairs of one seed have the same weights
to begin with and the same batches. Bytes are ids, lengths, outputs and gradients between towers on batches of seed 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import markdown_table
from benchmarks.study.data import Clicks
from benchmarks.study.report import write_record
from benchmarks.study.runs import Run, Trials
from benchmarks.study.statistics import compare_arms
from benchmarks.study.train import SETTINGS, Arm, row_order, tower_sizes
from dmt.partitioner import FeatureAffinity, PartitionRules, TowerPartitioner
from dmt.partitioner.entities import find_entities
from dmt.plan.distinct import bag_hashes
from dmt.plan.towers import TowerPlan

__all__ = ["ENTITIES", "REQUESTS", "entity_plan", "request_numbers", "run", "sent_bytes"]

_ID_BYTES, _NUMBER_BYTES, _BATCHES = 8, 4, 8
_ARMS = ("strided", "entities, named", "entities, auto")
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


def request_numbers(data: str, clicks: Clicks) -> torch.Tensor:
    """The request of each training row, [R]."""
    columns = [clicks.features.index(name) for name in REQUESTS[data]]
    return torch.unique(clicks.train[1][:, columns], dim=0, return_inverse=True)[1]


def _batches(data: str, clicks: Clicks, size: int, *, most: int) -> list[np.ndarray[Any, Any]]:
    """The ids of the first batches of seed 0, [B, F] each."""
    settings = replace(SETTINGS[data], batch_size=size)
    order = row_order(len(clicks.train[2]), settings, 0, request_numbers(data, clicks))
    return [clicks.train[1][rows].numpy() for rows in islice(order, most)]


def entity_plan(data: str, towers: str, clicks: Clicks, num_towers: int) -> TowerPlan:
    """Each entity in a tower, and the rest in another; ``entities, auto`` finds them in the first four batches."""
    entities: Mapping[str, Sequence[str]] = ENTITIES[data]
    if towers.endswith("auto"):
        ones = np.ones(SETTINGS[data].batch_size, dtype=np.int64)
        batches = _batches(data, clicks, len(ones), most=4)
        hashes = [{name: bag_hashes(ones, ids[:, i]) for i, name in enumerate(clicks.features)} for ids in batches]
        entities = find_entities(hashes, num_towers=num_towers)
    affinity = FeatureAffinity(matrix=np.eye(len(clicks.features)), features=tuple(clicks.features))
    return TowerPartitioner(num_towers=num_towers, rules=PartitionRules(entities=entities)).fit(affinity)


def sent_bytes(
    plan: TowerPlan, width: int, clicks: Clicks, batches: Sequence[np.ndarray[Any, Any]]
) -> dict[str, float]:
    """Bytes that one rank and step exchange with the towers: of every sample, or once for each distinct input.

    Args:
        plan: the towers.
        width: O_t, of every tower.
        clicks: for the order of features.
        batches: ids [B, F].
    """
    every = once = 0.0
    for tower in plan.to_lists():
        row_bytes = 2 * len(tower) * _ID_BYTES + 2 * width * _NUMBER_BYTES
        columns = [clicks.features.index(name) for name in tower]
        every += len(batches[0]) * row_bytes
        once += row_bytes * float(np.mean([len(np.unique(ids[:, columns], axis=0)) for ids in batches]))
    return {"every": every, "once": once}


def run(trials: Trials, names: Sequence[str], seeds: range, out: Path, about: Mapping[str, Any]) -> list[Path]:
    """Trains all arms, counts bytes, and writes ``entities.*``."""
    found: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    for data in names:
        clicks = trials.clicks(data)
        for model in ("dlrm", "dcn"):
            arms = {towers: Arm(model=model, towers=towers, by_request=True) for towers in _ARMS}
            keys = {towers: [Run(data=data, seed=seed, arm=arm) for seed in seeds] for towers, arm in arms.items()}
            trials.train(
                [run for part in zip(*keys.values(), strict=True) for run in part], f"entities, {data}, {model}"
            )
            records = trials.progress.records
            auc = {towers: {run.seed: records[run]["auc"] for run in part} for towers, part in keys.items()}
            runs += [
                {"data": data, "arm": r.arm.name, "seed": r.seed, "auc": records[r]["auc"]}
                for p in keys.values()
                for r in p
            ]
            dim, _, p = tower_sizes(arms["strided"], len(clicks.features))
            for size in (512, 4096):
                batches = _batches(data, clicks, size, most=_BATCHES)
                plans = {towers: trials.plan_of(part[0], clicks)[0] for towers, part in keys.items()}
                sent = {towers: sent_bytes(plan, dim * p, clicks, batches) for towers, plan in plans.items() if plan}
                for towers in _ARMS[1:]:
                    row = {"data": data, "model": model, "arm": towers, "batch_size": size}
                    row |= {"bytes": sent[towers], "strided_bytes": sent["strided"]}
                    found.append(row | asdict(compare_arms(auc[towers], auc["strided"])))
    text = "kB are what a rank exchanges with all towers in a step of B rows: ids, lengths, outputs and gradients."
    about = {**about, "seeds": f"{seeds[0]} to {seeds[-1]}", **{data: asdict(SETTINGS[data]) for data in names}}
    title = "Towers of entities against strided towers"
    return write_record(out, "entities", title, about, {"comparisons": found}, runs, [text, _table(found)])


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    header = ["data", "model", "towers", "B", "kB, every sample", "kB once, strided", "kB once", "times fewer"]
    return markdown_table(
        [*header, "AUC", "AUC strided", "difference", "better in", "Wilcoxon p"],
        [
            [
                *(
                    row["data"],
                    row["model"],
                    row["arm"],
                    f"{row['batch_size']:,}",
                    f"{row['bytes']['every'] / 1e3:,.0f}",
                ),
                *(f"{row['strided_bytes']['once'] / 1e3:,.0f}", f"{row['bytes']['once'] / 1e3:,.0f}"),
                f"{row['strided_bytes']['once'] / row['bytes']['once']:.2f}",
                *(f"{row['median']:.4f}", f"{row['baseline_median']:.4f}", f"{row['median_difference']:+.4f}"),
                *(f"{row['num_better']} of {row['num_seeds']}", f"{row['wilcoxon_p']:.3f}"),
            ]
            for row in rows
        ],
    )
