"""Trains the runs of a study with their towers, and keeps a progress file, so that a rerun continues."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.study.data import Clicks, read_clicks, without_test_rows, write_planted
from benchmarks.study.entities import bytes_once, entity_plan, request_numbers
from benchmarks.study.train import Arm, bytes_across, bytes_outside, measure_affinity, train_and_test
from dmt.errors import InputError
from dmt.partitioner import FeatureAffinity, PartitionRules, TowerPartitioner
from dmt.plan.tables import TableSpec, feature_names
from dmt.plan.towers import TowerPlan

__all__ = [
    *("OUTSIDE_SHARE", "Progress", "Run", "Trials", "affinity_of_pairs", "outside_facts", "outside_plan"),
    "random_plan",
]

OUTSIDE_SHARE = 16 / 26
"""Share of the features that are outside towers in the step benchmark (``dmt-cr4+all+outside``)."""
_BATCH, _TUNING_PARTS = 8192, 10
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, order=True)
class Run:
    """One model to train."""

    data: str
    seed: int
    arm: Arm


class Progress:
    """Finished runs of all studies, kept in a file with a line of JSON for each.

    Args:
        path: the file; an existing file is continued.
        settings: settings of all its runs, as text; raises `InputError` if the file has other settings.
    """

    def __init__(self, path: Path, settings: str) -> None:
        self.path, self._settings = path, settings
        self.records: dict[Run, Record] = {}
        for line in path.read_text().splitlines() if path.exists() else []:
            record = json.loads(line)
            if record.pop("settings") != settings:
                raise InputError(f"{path} holds runs with settings other than {settings!r}. Move the file.")
            run = record.pop("run")
            self.records[Run(data=run["data"], seed=run["seed"], arm=Arm(**run["arm"]))] = record

    def train(self, runs: Iterable[Run], train_one: Callable[[Run], Record], title: str = "") -> None:
        """Trains the runs that are not finished, and writes the record of each run as soon as it ends."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        todo = [run for run in dict.fromkeys(runs) if run not in self.records]
        with self.path.open("a") as file:
            for run in tqdm(todo, desc=title, unit="run", mininterval=10.0):
                self.records[run] = train_one(run)
                line = {"run": asdict(run), "settings": self._settings} | self.records[run]
                file.write(json.dumps(line) + "\n")
                file.flush()


@dataclass(frozen=True, kw_only=True)
class Trials:
    """Trains the runs of all studies that compare arms."""

    folder: Path
    """Folder of ``<data set>.parquet``."""
    work: Path
    """Folder of the progress file, of measured interactions and of generated data."""
    max_rows: int | None = None
    """Largest number of training rows of a data set; None: all."""

    @cached_property
    def progress(self) -> Progress:
        """The finished runs, read from ``runs.jsonl``."""
        return Progress(self.work / "runs.jsonl", f"rows: {self.max_rows}")

    def train(self, runs: Iterable[Run], title: str = "") -> None:
        """Trains the given runs that are not finished; towers by affinity need the flat model of their seed first."""
        torch.set_num_threads(1)
        self.progress.train(runs, self._train_one, title)

    def clicks(self, data: str, dim: int = 16) -> Clicks:
        """Returns a data set, which stays in memory."""
        return read_clicks(self._file(data), dim=dim, max_rows=self.max_rows)

    def _file(self, data: str) -> Path:
        file = self.folder / f"{data}.parquet"
        if data == "planted":
            self.work.mkdir(parents=True, exist_ok=True)
            file = self.work / file.name
            if not file.exists():
                write_planted(file)
        return file

    def _train_one(self, run: Run) -> Record:
        clicks = self.clicks(run.data, run.arm.dim)
        if run.arm.tuning:
            clicks = without_test_rows(clicks, parts=_TUNING_PARTS)
        plan, measuring = self.plan_of(run, clicks)
        requests = request_numbers(run.data, clicks) if run.arm.by_request else None
        began = time.process_time()
        model, record = train_and_test(run.data, run.arm, clicks, run.seed, plan=plan, requests=requests)
        cpu = {"cpu_seconds": round(time.process_time() - began, 2), "measuring_cpu_seconds": round(measuring, 2)}
        if plan is not None:
            across = bytes_across(run.arm, clicks, plan, run.arm.num_towers)
            if plan.outside:
                across["outside"] = bytes_outside(run.data, run.arm, clicks, plan)
            if requests is not None:
                across["once"] = bytes_once(run.data, run.arm, clicks, plan, requests)
            return record | cpu | {"bytes": across, "towers": plan.to_lists()}
        if run.arm.batch > 1 or run.arm.replicas:
            return record | cpu
        return record | cpu | {"affinity": measure_affinity(model, clicks, run.seed)}

    def plan_of(self, run: Run, clicks: Clicks) -> tuple[TowerPlan | None, float]:
        """Returns the towers of a run, None for a flat model, and the CPU seconds of any measurement made for them."""
        arm, towers, rules = run.arm, run.arm.towers, PartitionRules()
        if towers == "flat":
            return None, 0.0
        if towers == "strided":
            return TowerPlan.strided(clicks.features, arm.num_towers), 0.0
        if towers == "outside":
            return outside_plan(clicks.tables, arm.num_towers), 0.0
        if towers == "random":
            return random_plan(clicks.features, arm.num_towers, run.seed), 0.0
        if towers == "entities":
            return entity_plan(run.data, clicks, arm.num_towers), 0.0
        if towers in ("coherent", "diverse"):
            pairs = self.progress.records[replace(run, arm=arm.flat)]["affinity"]
            measured, seconds = affinity_of_pairs(pairs, clicks.features), 0.0
            sense = towers
        else:
            learned, *outside = towers.split(", ")
            assert learned in ("interactions", "together"), f"unknown towers {towers!r}"
            measured, seconds = self._interactions(run, clicks)
            if outside:
                rules = PartitionRules(outside=outside_plan(clicks.tables, arm.num_towers).outside)
            # As the tower module declares it, not by what trains better.
            sense = ("apart" if arm.model == "dlrm" else "together") if learned == "interactions" else learned
        partitioner = TowerPartitioner(num_towers=arm.num_towers, strategy=sense, seed=run.seed, rules=rules)  # type: ignore[arg-type]
        return partitioner.fit(measured), seconds

    def _interactions(self, run: Run, clicks: Clicks) -> tuple[Any, float]:
        """Returns the interactions of a data set, measured once per seed on all training rows, and the CPU seconds."""
        path = self.work / f"interactions_{run.data}_{run.seed}_{self.max_rows or 'all'}.npz"
        if path.exists():
            return FeatureAffinity.load(path), 0.0
        began = time.process_time()
        found = FeatureAffinity.collect_interactions(_batches(clicks), seed=run.seed)
        found.save(path)
        return found, time.process_time() - began


def _batches(clicks: Clicks) -> Iterator[Any]:
    return (clicks.batch(clicks.train, rows) for rows in torch.arange(len(clicks.train[2])).split(_BATCH))


def affinity_of_pairs(pairs: Iterable[float], features: list[str]) -> FeatureAffinity:
    """Returns the affinity whose upper triangle, by rows and without the diagonal, is ``pairs``.

    Example:
        >>> affinity_of_pairs([0.5, 0.25, 0.0], ["a", "b", "c"]).matrix[0].tolist()
        [1.0, 0.5, 0.25]
    """
    matrix = np.eye(len(features))
    upper = np.triu_indices(len(features), k=1)
    matrix[upper] = list(pairs)
    matrix.T[upper] = matrix[upper]
    return FeatureAffinity(matrix=matrix, features=tuple(features))


def random_plan(features: list[str], num_towers: int, seed: int) -> TowerPlan:
    """Returns balanced random towers: strided towers of a shuffled list.

    Example:
        >>> sorted(map(len, random_plan(["a", "b", "c"], 2, seed=0).to_lists()))
        [1, 2]
    """
    order = np.random.default_rng([seed, num_towers]).permutation(len(features))
    return TowerPlan.strided([features[i] for i in order], num_towers)


def outside_plan(tables: Sequence[TableSpec], num_towers: int) -> TowerPlan:
    """Returns a plan with the smallest tables, `OUTSIDE_SHARE` of all, outside towers; the others in strided towers."""
    by_size = sorted(tables, key=lambda table: table.num_embeddings)
    small = feature_names(by_size[: round(OUTSIDE_SHARE * len(tables))])
    inside, outside = ([f for f in feature_names(tables) if (f in small) == is_small] for is_small in (False, True))
    return replace(TowerPlan.strided(inside, num_towers), outside=tuple(outside))


def outside_facts(clicks: Clicks) -> Record:
    """Returns the number of rows of each table outside towers, and of each table in four strided towers."""
    plan, rows = outside_plan(clicks.tables, 4), {t.feature_names[0]: t.num_embeddings for t in clicks.tables}
    towers = [{name: rows[name] for name in tower} for tower in plan.to_lists()]
    return {"outside": {name: rows[name] for name in plan.outside}, "towers": towers}
