"""Training of the quality study's cells: tower plans, and a progress file to continue from."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.quality.cells import FLAT, MADE, Cell, bytes_across, cell_config
from benchmarks.quality.made import write_made
from benchmarks.towers.clicks import Clicks, read_clicks
from benchmarks.towers.runs import affinity_of_pairs, random_plan
from benchmarks.towers.trials import count_trial, measure_affinity, train_and_test
from dmt.partitioner import FeatureInteractions, TowerPartitioner
from dmt.plan.towers import TowerPlan

__all__ = ["Progress", "Records", "own_rates"]

Records = dict[Cell, dict[str, Any]]
_BATCH = 8192
_TUNING_PARTS = 10


@dataclass(kw_only=True)
class Progress:
    """Finished cells in a file of one line each, and what is needed to train more."""

    folder: Path
    """The folder of ``<data>.parquet``."""
    work: Path
    """The folder of the progress file and of measured interactions; made when absent."""

    def __post_init__(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        self._clicks: dict[tuple[str, int, bool], Clicks] = {}

    @property
    def path(self) -> Path:
        """The progress file."""
        return self.work / "runs.jsonl"

    @cached_property
    def records(self) -> Records:
        """The records of finished cells."""
        names = [field.name for field in fields(Cell)]
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return {Cell(**{name: r[name] for name in names}): r for r in map(json.loads, lines)}

    def train(self, cells: Iterable[Cell], title: str) -> None:
        """Trains what is not done yet, and writes each down at once."""
        todo = [cell for cell in cells if cell not in self.records]
        with self.path.open("a") as file:
            for cell in tqdm(todo, desc=title, unit="run", mininterval=10.0):
                self.records[cell] = asdict(cell) | self._train_one(cell)
                file.write(json.dumps(self.records[cell]) + "\n")
                file.flush()

    def clicks(self, cell: Cell) -> Clicks:
        """The data of a cell, kept in memory."""
        key = cell.data, cell.dim, cell.tuning
        if key not in self._clicks:
            file = self.folder / f"{cell.data}.parquet"
            if cell.data in MADE:
                file = self.work / file.name
                if not file.exists():
                    write_made(cell.data, file)
            clicks = read_clicks(file, embedding_dim=cell.dim)
            self._clicks[key] = _tuning_part(clicks) if cell.tuning else clicks
        return self._clicks[key]

    def _train_one(self, cell: Cell) -> dict[str, Any]:
        clicks = self.clicks(cell)
        plan, measured = self._plan(cell, clicks)
        began = time.process_time()
        file = self.work / "towers.json"
        if plan is not None:
            plan.save(file)
        config = cell_config(cell, len(clicks.features), None if plan is None else str(file))
        model, metrics = train_and_test(config, clicks, cell.seed, joined=True)
        seconds = time.process_time() - began
        size = count_trial(config, clicks)
        record = {
            "auc": metrics.auc,
            "ne": metrics.ne,
            "cpu_seconds": round(seconds, 2),
            "mflops_per_sample": round(size.mflops_per_sample, 6),
            "compression_ratio": round(size.compression_ratio, 4),
        }
        if plan is not None:
            return record | {
                "bytes": bytes_across(config, clicks, plan, cell.num_towers),
                "tower_features": plan.to_lists(),
                "measuring_cpu_seconds": round(measured, 2),
            }
        if cell.tuning:
            return record
        flat = {str(towers): bytes_across(config, clicks, None, towers) for towers in (2, 4, 8)}
        affinity = measure_affinity(model, clicks, cell.seed)
        pairs = affinity.matrix[np.triu_indices(affinity.num_features, k=1)]
        return record | {"bytes": flat, "affinity": [round(float(value), 6) for value in pairs]}

    def _plan(self, cell: Cell, clicks: Clicks) -> tuple[TowerPlan | None, float]:
        """The towers of a cell, and the CPU seconds of measuring them where that was done now."""
        if cell.towers == "flat":
            return None, 0.0
        if cell.towers == "strided":
            return TowerPlan.strided(clicks.features, cell.num_towers), 0.0
        if cell.towers == "random":
            return random_plan(clicks.features, cell.num_towers, cell.seed), 0.0
        if cell.towers == "coherent":
            flat = Cell(data=cell.data, model=FLAT[cell.model], towers="flat", dim=cell.dim, seed=cell.seed)
            affinity = affinity_of_pairs(self.records[flat]["affinity"], clicks.features)
            return TowerPartitioner(num_towers=cell.num_towers, strategy="coherent", seed=cell.seed).fit(affinity), 0.0
        found, seconds = self._interactions(cell, clicks)
        # By the tower module's own declaration, never by what trains better.
        sense = "apart" if cell.model == "dlrm" else "together"
        return TowerPartitioner(num_towers=cell.num_towers, strategy=sense, seed=cell.seed).fit(found), seconds  # type: ignore[arg-type]

    def _interactions(self, cell: Cell, clicks: Clicks) -> tuple[FeatureInteractions, float]:
        """Measured once for each data set and seed, on all training rows with splits of that seed."""
        path = self.work / f"interactions_{cell.data}_{cell.seed}.npz"
        if path.exists():
            return FeatureInteractions.load(path), 0.0
        began = time.process_time()
        batches = (clicks.batch(clicks.train, rows) for rows in torch.arange(len(clicks.train[2])).split(_BATCH))
        found = FeatureInteractions.collect(batches, seed=cell.seed)
        found.save(path)
        return found, time.process_time() - began


def _tuning_part(clicks: Clicks) -> Clicks:
    """A tenth of the training rows, always the same, to test on; no test row."""
    order = torch.randperm(len(clicks.train[2]), generator=torch.Generator().manual_seed(0))
    held, rest = order[: len(order) // _TUNING_PARTS], order[len(order) // _TUNING_PARTS :]
    train, test = (tuple(column[rows] for column in clicks.train) for rows in (rest, held))
    return replace(clicks, train=train, test=test)  # type: ignore[arg-type]


def own_rates(records: Mapping[Cell, Mapping[str, Any]], cell: Cell) -> Cell | None:
    """The cell at the rates whose mean AUC was best in tuning its model, flat or in towers; None where none was tuned.

    Study settings stay where nothing is better.
    """
    found: dict[tuple[float, float], list[float]] = {}
    for tuned, record in sorted(records.items()):
        if (tuned.tuning, tuned.data, tuned.model) == (True, cell.data, cell.model) and (
            (tuned.towers == "flat") == (cell.towers == "flat")
        ):
            found.setdefault((tuned.sparse, tuned.dense), []).append(record["auc"])
    if not found:
        return None
    sparse, dense = max(found, key=lambda rates: (np.mean(found[rates]), rates == (1.0, 1.0)))
    return replace(cell, sparse=sparse, dense=dense)
