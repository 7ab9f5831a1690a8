"""Runs a study of quality and writes its record.

    OMP_NUM_THREADS=1 python -m benchmarks.study interactions --data DIR --set flights --set hotel

DIR has ``flights.parquet``, ``hotel.parquet`` or ``census.parquet``; ``planted`` is generated. All models of a seed
start from the same weights in the parts that they share, and train on the same rows in the same order; no arm is
trained or tuned on test rows. A rerun continues where the last one stopped. ``--quick`` is a smoke test whose numbers
mean nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.report import about
from benchmarks.study.report import write_study
from benchmarks.study.runs import Trials
from benchmarks.study.studies import STUDIES, runs_of, with_tuned_rates
from benchmarks.study.train import SETTINGS

__all__ = ["main"]

_RESULTS = Path(__file__).parent.parent / "results"


@click.command(context_settings={"show_default": True})
@click.argument("name", type=click.Choice([*STUDIES]))
@click.option(
    "--data", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True, help="Data folder."
)
@click.option("--set", "names", type=click.Choice([*SETTINGS]), multiple=True, default=("flights", "hotel"))
@click.option("--seeds", type=click.IntRange(2), default=10, help="Runs of each arm.")
@click.option("--quick", is_flag=True, help="Two seeds, 8,192 training rows; results go to --work.")
@click.option("--work", type=click.Path(path_type=Path), default=Path("runs/study"), help="Progress folder.")
@click.option("--out", type=click.Path(path_type=Path), default=_RESULTS, help="Results folder.")
def main(*, name: str, data: Path, names: Sequence[str], seeds: int, quick: bool, work: Path, out: Path) -> None:
    """Trains all arms of a study and writes its results."""
    if quick:
        seeds, work = 2, work / "quick"
        out = work
    trials = Trials(folder=data, work=work, max_rows=8192 if quick else None)
    made = about(f"python -m benchmarks.study {' '.join(sys.argv[1:])}")
    study = STUDIES[name]
    chosen = range(study.first_seed, study.first_seed + seeds)
    studies = {}
    for one in names:
        studies[one] = with_tuned_rates(study, one, trials)
        trials.train(runs_of(studies[one], one, chosen), f"{name}, {one}")
    made["seeds"] = f"{chosen[0]} to {chosen[-1]}"
    for path in write_study(study, trials, studies, chosen, out, made):
        click.echo(path)


if __name__ == "__main__":
    main()
