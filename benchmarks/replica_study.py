"""Quality of training with replicas by moment scale: Figure 4 of the 2D paper on real data.

    OMP_NUM_THREADS=1 python -m benchmarks.replica_study --data DIR

DIR has ``flights.parquet``, ``hotel.parquet`` and ``census.parquet``; what is absent is skipped. A rerun continues
where the last one stopped; ``--part write`` writes the page of the seeds that are whole by then. ``--quick`` is a smoke
test on few rows and says nothing about replicas.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from benchmarks.replicas.findings import whole_seeds
from benchmarks.replicas.report import write_results
from benchmarks.replicas.runs import Progress, study_runs, tune_runs, tuned_rates
from benchmarks.replicas.verify import verify
from benchmarks.report import commit, processor
from benchmarks.towers.trials import STUDY_SETS
from dmt.training.records import versions

__all__ = ["PARTS", "Study", "main"]

_HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Study:
    """Settings and records that the parts share."""

    progress: Progress
    """Finished runs, and the data."""
    seeds: range
    """Seeds of the study."""
    out: Path
    """Folder of the results."""
    conclusions: Path | None
    """Text for the page."""

    @property
    def _verified(self) -> Path:
        return self.progress.path.with_suffix(".verify.json")

    def tune(self) -> None:
        """Trains M = 1 at many learning rates."""
        self.progress.train(tune_runs(self.progress.datasets()))

    def verify(self) -> None:
        """Holds the simulation against the trainer's models."""
        self._verified.parent.mkdir(parents=True, exist_ok=True)
        self._verified.write_text(json.dumps(verify(self.progress)))

    def train(self) -> None:
        """Trains all M and c at the tuned rates and at others."""
        self.progress.train(study_runs(self._rates(), self.seeds))

    def write(self) -> None:
        """Writes the results of the seeds that are done."""
        tuning = self.progress.train(tune_runs(self.progress.datasets()))
        records = whole_seeds(self.progress.finished(), study_runs(self._rates(), self.seeds))
        seeds = sorted({run.seed for run in records})
        paths = write_results(
            records,
            self.out,
            tuning=tuning,
            verified=json.loads(self._verified.read_text()) if self._verified.exists() else [],
            about=_about(self, seeds),
            conclusions="" if self.conclusions is None else self.conclusions.read_text(),
        )
        for path in paths:
            click.echo(path)

    def _rates(self) -> dict[str, float]:
        return tuned_rates(self.progress.train(tune_runs(self.progress.datasets())))


PARTS: dict[str, Callable[[Study], None]] = {
    "tune": Study.tune,
    "verify": Study.verify,
    "train": Study.train,
    "write": Study.write,
}


@click.command(context_settings={"show_default": True})
@click.option(
    "--data", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True, help="Its folder."
)
@click.option("--part", "parts", type=click.Choice(list(PARTS)), multiple=True, default=list(PARTS), help="To be done.")
@click.option("--seeds", type=click.IntRange(2), default=10, help="Of the study.")
@click.option("--quick", is_flag=True, help="Two seeds, 8,192 training rows; the results go to --work.")
@click.option("--work", type=click.Path(path_type=Path), default=Path("runs/replica_study"), help="For the progress.")
@click.option("--out", type=click.Path(path_type=Path), default=_HERE / "results", help="For the results.")
@click.option("--conclusions", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Text for the page.")
def main(
    *, data: Path, parts: tuple[str, ...], seeds: int, quick: bool, work: Path, out: Path, conclusions: Path | None
) -> None:
    """Trains the runs of the study and writes its results."""
    study = Study(
        progress=Progress(
            data=data, path=work / ("quick.jsonl" if quick else "runs.jsonl"), max_rows=8192 if quick else None
        ),
        seeds=range(2 if quick else seeds),
        out=work if quick else out,
        conclusions=conclusions,
    )
    for part in parts:
        PARTS[part](study)


def _about(study: Study, seeds: list[int]) -> dict[str, Any]:
    return {
        "date": f"{datetime.now(tz=UTC):%Y-%m-%d}",
        "machine": f"{processor()}, one process and one thread",
        "commit when written": commit(),
        "packages": versions(),
        "command": f"python -m benchmarks.replica_study {' '.join(sys.argv[1:])}",
        "seeds": f"{seeds[0]} to {seeds[-1]}",
        **{name: asdict(STUDY_SETS[name]) for name in study.progress.datasets()},
    }


if __name__ == "__main__":
    main()
