"""The runs of the replica study: which there are, and a progress file to continue from."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.replicas.simulation import simulate
from benchmarks.towers.clicks import Clicks, read_clicks
from benchmarks.towers.trials import STUDY_SETS, trial_config
from dmt.errors import InputError
from dmt.training.config import OptimizerConfig, TrainingConfig

__all__ = ["Progress", "Records", "ReplicaRun", "study_runs", "tune_runs", "tuned_rates"]

MOMENT_SCALES = {2: (0.5, 1.0, 2.0), 4: (1.0, 2.0, 3.0, 4.0), 8: (1.0, 2.0, 4.0, 8.0, 16.0)}
"""The grid: M, and the values of c for it. The last value of M = 8 is outside the paper's range (0, M]."""
RATE_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Factors over which M = 1 is tuned, times the rate of the tower study, which is that of another AdaGrad."""
TUNE_SEEDS = (100, 101, 102)
_EMBEDDING_DIM = 16
_START_FACTOR_AGAIN = 1 + 1e-6


@dataclass(frozen=True, kw_only=True, order=True)
class ReplicaRun:
    """One model to train."""

    part: str
    """``tune``, or one of those that `study_runs` makes."""
    dataset: str
    sparse_lr: float
    """Learning rate of the tables."""
    num_replicas: int = 1
    """M."""
    moment_scale: float = 1.0
    """c."""
    again: bool = False
    """True if the tables start 1e-6 larger, to show how far apart two runs are that should be equal."""
    seed: int


Records = dict[ReplicaRun, dict[str, Any]]


def tune_runs(datasets: Iterable[str]) -> list[ReplicaRun]:
    """M = 1 at every rate of `RATE_FACTORS`, with seeds outside the study."""
    return [
        ReplicaRun(part="tune", dataset=dataset, sparse_lr=STUDY_SETS[dataset].sparse_lr * factor, seed=seed)
        for dataset in datasets
        for factor in RATE_FACTORS
        for seed in TUNE_SEEDS
    ]


def tuned_rates(records: Records) -> dict[str, float]:
    """By data set, the rate of the tables at which M = 1 has the lowest mean NE in the part ``tune``."""
    by_rate: dict[str, dict[float, list[float]]] = {}
    for run, record in records.items():
        if run.part == "tune":
            by_rate.setdefault(run.dataset, {}).setdefault(run.sparse_lr, []).append(record["ne"])
    return {
        dataset: min(rates, key=lambda rate, rates=rates: float(np.mean(rates[rate])))  # type: ignore[misc]
        for dataset, rates in by_rate.items()
    }


def study_runs(rates: Mapping[str, float], seeds: Sequence[int]) -> list[ReplicaRun]:
    """The runs of the study, in the order in which they matter: five seeds at a time, other rates at the end.

    ``grid``: M = 1 twice and every M and c of `MOMENT_SCALES`, at the given rate of each data set. ``untuned``: at that
    of the tower study, less what is outside 1 <= c <= M and c = 3. ``rates``: M = 1 and the largest M, at half and
    twice the given rate.
    """
    blocks = [seeds[first : first + 5] for first in range(0, len(seeds), 5)]
    stages = [(part, block) for block in blocks for part in ("grid", "untuned")] + [("rates", seeds)]
    return [
        ReplicaRun(part=part, dataset=dataset, sparse_lr=other, seed=seed, **cell)
        for stage, block in stages
        for seed in block
        for dataset, rate in rates.items()
        for part, other, cell in _cells(rate, STUDY_SETS[dataset].sparse_lr)
        if part == stage
    ]


def _cells(rate: float, untuned: float) -> list[tuple[str, float, dict[str, Any]]]:
    plain: dict[str, Any] = {}
    grid = [
        {"num_replicas": num_replicas, "moment_scale": scale}
        for num_replicas, scales in MOMENT_SCALES.items()
        for scale in scales
    ]
    inside = [cell for cell in grid if 1 <= cell["moment_scale"] <= cell["num_replicas"] and cell["moment_scale"] != 3]
    most = max(MOMENT_SCALES)
    ends = [{"num_replicas": most, "moment_scale": scale} for scale in (1.0, float(most))]
    return [
        *(("grid", rate, cell) for cell in [plain, {"again": True}, *grid]),
        *(("untuned", untuned, cell) for cell in [plain, *inside] if untuned != rate),
        *(("rates", other, cell) for other in (rate / 2, rate * 2) if other != untuned for cell in [plain, *ends]),
    ]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A file with a line of JSON for each finished run, and the data that runs are trained on."""

    data: Path
    """Folder of ``<dataset>.parquet``."""
    path: Path
    """The file; made when absent, continued otherwise."""
    max_rows: int | None = None
    """Training rows used at most of each data set."""

    def datasets(self) -> list[str]:
        """The data sets that are there.

        Raises:
            InputError: there is none.
        """
        found = [name for name in STUDY_SETS if (self.data / f"{name}.parquet").exists()]
        if not found:
            raise InputError(f"--data {self.data}: has none of {', '.join(f'{name}.parquet' for name in STUDY_SETS)}.")
        return found

    def finished(self) -> Records:
        """Records of the runs that are done.

        Raises:
            InputError: the file is of other settings than these.
        """
        records: Records = {}
        for line in self.path.read_text().splitlines() if self.path.exists() else []:
            record = json.loads(line)
            run = ReplicaRun(**{field.name: record[field.name] for field in fields(ReplicaRun)})
            if record["settings"] != self._settings(run.dataset):
                raise InputError(
                    f"{self.path} holds runs of other settings ({run.dataset}). Move it away to start again."
                )
            records[run] = record
        return records

    def train(self, runs: list[ReplicaRun]) -> Records:
        """Does those of the runs that are not done yet; returns the records of all of them."""
        torch.set_num_threads(1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        records = self.finished()
        todo = [run for run in runs if run not in records]
        with self.path.open("a") as file:
            for run in tqdm(todo, unit="run", mininterval=30.0, smoothing=0.05):
                records[run] = asdict(run) | {"settings": self._settings(run.dataset)} | self._train_one(run)
                file.write(json.dumps(records[run]) + "\n")
                file.flush()
        return {run: records[run] for run in runs}

    def clicks(self, dataset: str) -> Clicks:
        """The data of a data set."""
        return _clicks(self.data / f"{dataset}.parquet", self.max_rows)

    def config(self, dataset: str, sparse_lr: float) -> TrainingConfig:
        """Config of a run on a data set: as in the tower study, but with row-wise AdaGrad at the given rate."""
        config = trial_config(dataset, "dlrm", study_set=STUDY_SETS[dataset], plan=None)
        changed = config.optimizer.model_dump() | {"sparse": "rowwise_adagrad", "sparse_lr": sparse_lr}
        return config.model_copy(update={"optimizer": OptimizerConfig(**changed)})

    def _train_one(self, run: ReplicaRun) -> dict[str, Any]:
        clicks = self.clicks(run.dataset)
        return simulate(
            self.config(run.dataset, run.sparse_lr),
            _held_out(clicks) if run.part == "tune" else clicks,
            seed=run.seed,
            num_replicas=run.num_replicas,
            moment_scale=run.moment_scale,
            start_factor=_START_FACTOR_AGAIN if run.again else 1.0,
        )

    def _settings(self, dataset: str) -> str:
        return f"{zlib.crc32(repr((STUDY_SETS[dataset], _EMBEDDING_DIM, self.max_rows)).encode()):08x}"


def _held_out(clicks: Clicks) -> Clicks:
    """The training rows alone: a fifth, drawn at random and always the same, takes the place of the test rows."""
    rows = torch.randperm(len(clicks.train[2]), generator=torch.Generator().manual_seed(0))
    fifth = len(rows) // 5

    def part(of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dense, ids, labels = clicks.train
        return dense[of], ids[of], labels[of]

    return replace(clicks, train=part(rows[fifth:]), test=part(rows[:fifth]))


@cache
def _clicks(file: Path, max_rows: int | None) -> Clicks:
    return read_clicks(file, embedding_dim=_EMBEDDING_DIM, max_rows=max_rows)
