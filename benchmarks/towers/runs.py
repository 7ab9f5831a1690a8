"""The runs of the tower study: which there are, their tower plans, and a progress file to continue from."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.towers.clicks import Clicks, read_clicks
from benchmarks.towers.trials import STUDY_SETS, StudySet, run_trial
from dmt.errors import InputError
from dmt.partitioner import FeatureAffinity, TowerPartitioner, tower_affinity
from dmt.plan.towers import TowerPlan

__all__ = ["ARCHS", "CONTROL_ARMS", "LEARNED_ARMS", "Run", "Study", "affinity_of_pairs", "random_plan"]

ARCHS = ("dlrm", "dcn")
LEARNED_ARMS = ("coherent", "diverse")
"""Towers learned from the flat model of the same seed: the question of the study."""
CONTROL_ARMS = ("random", "coherent-mean", "diverse-mean")
"""Balanced towers drawn at random for each seed, and towers learned once from the mean affinity of all seeds."""

_EMBEDDING_DIM = 16


@dataclass(frozen=True, kw_only=True, order=True)
class Run:
    """One model to train."""

    dataset: str
    arch: str
    seed: int
    arm: str
    """``flat``, ``strided``, or one of `LEARNED_ARMS` and `CONTROL_ARMS`."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """All runs over some data sets, with what is done in a progress file: a line of JSON for each finished run.

    Raises:
        InputError: no data set is in the folder.
    """

    data: Path
    """Folder of ``<dataset>.parquet``; what is absent is skipped."""
    progress: Path
    """The progress file; made when absent, continued otherwise."""
    seeds: tuple[int, ...]
    """One flat model, one set of towers and so on for each."""
    max_rows: int | None = None
    """Training rows used at most of each data set."""
    controls: bool = True
    """True to train the `CONTROL_ARMS` too."""
    datasets: tuple[str, ...] = field(init=False)
    """The data sets that are there."""

    def __post_init__(self) -> None:
        found = tuple(name for name in STUDY_SETS if (self.data / f"{name}.parquet").exists())
        if not found:
            raise InputError(f"--data {self.data}: has none of {', '.join(f'{name}.parquet' for name in STUDY_SETS)}.")
        object.__setattr__(self, "datasets", found)

    def waves(self) -> list[list[Run]]:
        """The runs, in three parts: each needs only what the earlier ones found."""
        return [
            [
                Run(dataset=dataset, arch=arch, seed=seed, arm=arm)
                for seed in self.seeds
                for dataset in self.datasets
                for arch in ARCHS
                for arm in arms
            ]
            for arms in (("flat",), ("strided", *LEARNED_ARMS), CONTROL_ARMS if self.controls else ())
        ]

    def finished(self) -> dict[Run, dict[str, Any]]:
        """The records of the progress file.

        Raises:
            InputError: it is of other settings than these.
        """
        records = {}
        lines = self.progress.read_text().splitlines() if self.progress.exists() else []
        for line in lines:
            record = json.loads(line)
            run = Run(**{name: record[name] for name in ("dataset", "arch", "seed", "arm")})
            if record["settings"] != self._settings(run.dataset):
                raise InputError(
                    f"{self.progress} holds runs of other settings ({run.dataset}). Move it away to start again."
                )
            records[run] = record
        return records

    def train(self, *, jobs: int = 1) -> dict[Run, dict[str, Any]]:
        """Does what is not done yet, in ``jobs`` processes; returns the records of all runs."""
        self.progress.parent.mkdir(parents=True, exist_ok=True)
        records = self.finished()
        waves = self.waves()
        with (
            tqdm(total=sum(map(len, waves)), unit="run", mininterval=5.0, smoothing=0.05) as bar,
            self.progress.open("a") as file,
        ):
            for wave in waves:
                todo = [run for run in wave if run not in records]
                bar.update(len(wave) - len(todo))
                tasks = [(self, run, self._affinity_pairs(run, records)) for run in todo]
                for run, result in _results(tasks, jobs):
                    records[run] = asdict(run) | {"settings": self._settings(run.dataset)} | result
                    file.write(json.dumps(records[run]) + "\n")
                    file.flush()
                    bar.update()
        return {run: records[run] for wave in waves for run in wave}

    def train_one(self, run: Run, pairs: Sequence[float] | None) -> dict[str, Any]:
        """Trains one run; ``pairs`` is the affinity that its towers come from, None for the flat model."""
        torch.set_num_threads(1)
        clicks = _clicks(self.data / f"{run.dataset}.parquet", self.max_rows)
        study_set = STUDY_SETS[run.dataset]
        if pairs is None:
            return run_trial(run.dataset, run.arch, run.seed, clicks=clicks, study_set=study_set)
        affinity = affinity_of_pairs(pairs, clicks.features)
        plan = _plan(run, affinity, study_set)
        record = run_trial(run.dataset, run.arch, run.seed, clicks=clicks, study_set=study_set, plan=plan)
        within, _ = tower_affinity(affinity, plan)
        return record | {"affinity_within": within, "affinity_mean": float(np.mean(pairs))}

    def _affinity_pairs(self, run: Run, records: dict[Run, dict[str, Any]]) -> list[float] | None:
        if run.arm == "flat":
            return None
        seeds = self.seeds if run.arm.endswith("-mean") else (run.seed,)
        flats = [Run(dataset=run.dataset, arch=run.arch, seed=seed, arm="flat") for seed in seeds]
        return [float(x) for x in np.mean([records[flat]["affinity"] for flat in flats], axis=0)]

    def _settings(self, dataset: str) -> str:
        return f"{zlib.crc32(repr((STUDY_SETS[dataset], _EMBEDDING_DIM, self.max_rows)).encode()):08x}"


def affinity_of_pairs(pairs: Sequence[float], features: Sequence[str]) -> FeatureAffinity:
    """The affinity whose upper triangle, by rows and without the diagonal, is ``pairs``.

    Example:
        >>> affinity_of_pairs([0.5, 0.25, 0.0], ["a", "b", "c"]).matrix[0].tolist()
        [1.0, 0.5, 0.25]
    """
    matrix = np.eye(len(features))
    upper = np.triu_indices(len(features), k=1)
    matrix[upper] = pairs
    matrix.T[upper] = pairs
    return FeatureAffinity(matrix=matrix, features=tuple(features))


def random_plan(features: Sequence[str], num_towers: int, seed: int) -> TowerPlan:
    """Balanced towers drawn at random: strided ones of a shuffled list.

    Example:
        >>> sorted(map(len, random_plan(["a", "b", "c"], 2, seed=0).to_lists()))
        [1, 2]
    """
    shuffled = [features[i] for i in np.random.default_rng([seed, num_towers]).permutation(len(features))]
    return TowerPlan.strided(shuffled, num_towers)


def _plan(run: Run, affinity: FeatureAffinity, study_set: StudySet) -> TowerPlan:
    if run.arm == "strided":
        return TowerPlan.strided(affinity.features, study_set.num_towers)
    if run.arm == "random":
        return random_plan(affinity.features, study_set.num_towers, run.seed)
    strategy, _, of_all = run.arm.partition("-")
    seed = 0 if of_all else run.seed
    # The strategy is one of the two names: `TowerPartitioner` refuses any other.
    return TowerPartitioner(num_towers=study_set.num_towers, strategy=strategy, seed=seed).fit(affinity)  # type: ignore[arg-type]


@cache
def _clicks(file: Path, max_rows: int | None) -> Clicks:
    return read_clicks(file, embedding_dim=_EMBEDDING_DIM, max_rows=max_rows)


def _task(study: Study, run: Run, pairs: Sequence[float] | None) -> tuple[Run, dict[str, Any]]:
    return run, study.train_one(run, pairs)


def _results(
    tasks: Iterable[tuple[Study, Run, Sequence[float] | None]], jobs: int
) -> Iterator[tuple[Run, dict[str, Any]]]:
    if jobs == 1:
        yield from (_task(*task) for task in tasks)
        return
    with ProcessPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(_task, *task) for task in tasks]):
            yield done.result()
