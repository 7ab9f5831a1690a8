"""Do learned towers train better than naive ones? The protocol of the DMT paper's Table 6 (section 5.2.3) on real data.

    OMP_NUM_THREADS=1 python -m benchmarks.tower_study --data DIR

DIR has ``flights.parquet``, ``hotel.parquet`` and ``census.parquet``; what is absent is skipped. A rerun continues
where the last one stopped. ``--quick`` is a smoke test on few rows and says nothing about towers.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from benchmarks.report import processor
from benchmarks.towers.report import write_study
from benchmarks.towers.runs import Study
from benchmarks.towers.trials import STUDY_SETS

__all__ = ["main"]

_HERE = Path(__file__).parent


@click.command(context_settings={"show_default": True})
@click.option(
    "--data", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True, help="Its folder."
)
@click.option("--seeds", type=click.IntRange(2), default=10, help="Runs of each arm.")
@click.option("--first-seed", type=click.IntRange(0), default=0, help="For a repetition with other seeds.")
@click.option("--controls/--no-controls", default=True, help="Whether to train the controls too.")
@click.option("--jobs", type=click.IntRange(1), default=1, help="Processes.")
@click.option("--quick", is_flag=True, help="Two seeds, 8,192 training rows; the results go to --work.")
@click.option("--work", type=click.Path(path_type=Path), default=Path("runs/tower_study"), help="For the progress.")
@click.option("--out", type=click.Path(path_type=Path), default=_HERE / "results", help="For the results.")
def main(
    *, data: Path, seeds: int, first_seed: int, controls: bool, jobs: int, quick: bool, work: Path, out: Path
) -> None:
    """Trains all arms of the study and writes its results."""
    study = Study(
        data=data,
        progress=work / ("quick.jsonl" if quick else "runs.jsonl"),
        seeds=tuple(range(first_seed, first_seed + (2 if quick else seeds))),
        max_rows=8192 if quick else None,
        controls=controls,
    )
    records = study.train(jobs=jobs)
    stem = "tower_study" if first_seed == 0 else f"tower_study_seeds_{study.seeds[0]}_to_{study.seeds[-1]}"
    for path in write_study(records, work if quick else out, stem=stem, about=_about(study)):
        click.echo(path)


def _about(study: Study) -> dict[str, Any]:
    packages = ("dmt-recsys", "torch", "torchrec", "fbgemm-gpu-cpu", "numpy", "scipy", "k-means-constrained")
    return {
        "date": f"{datetime.now(tz=UTC):%Y-%m-%d}",
        "machine": f"{processor()}, one process and one thread per run",
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
        "command": f"python -m benchmarks.tower_study {' '.join(sys.argv[1:])}",
        "seeds": f"{study.seeds[0]} to {study.seeds[-1]}",
        **{name: asdict(STUDY_SETS[name]) for name in study.datasets},
    }


if __name__ == "__main__":
    main()
