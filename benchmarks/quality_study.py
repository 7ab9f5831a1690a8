"""The quality study: AUC of flat models and of towers over compression ratios and numbers of towers, on real data.

    OMP_NUM_THREADS=1 python -m benchmarks.quality_study --data DIR [--stage flights ...]

DIR has ``flights.parquet``, ``hotel.parquet`` or ``census.parquet``. Data, settings and training are those of the tower
study (`benchmarks.towers`); sizes and stages are in `benchmarks.quality.cells`. All models of one seed start from the
same weights where they have the same parts and see the same rows in the same order. Stages run in the order given; a
rerun continues, and ``--write-only`` writes the results of what is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import torch

from benchmarks.quality.cells import STAGES, Cell, cells_of
from benchmarks.quality.report import write_results
from benchmarks.quality.runs import Progress, own_rates

__all__ = ["main"]


@click.command(context_settings={"show_default": True})
@click.option(
    "--data", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True, help="Its folder."
)
@click.option("--stage", "stages", multiple=True, default=("flights",), help="NAME, or NAME:SEEDS for fewer seeds.")
@click.option("--seeds", type=click.IntRange(2), default=10, help="Runs of each cell.")
@click.option("--first-seed", type=click.IntRange(0), default=400, help="Earlier studies have 0 to 319.")
@click.option("--write-only", is_flag=True, help="Train nothing.")
@click.option("--work", type=click.Path(path_type=Path), default=Path("runs/quality_study"), help="For progress.")
@click.option("--out", type=click.Path(path_type=Path), default=Path(__file__).parent / "results")
def main(
    *, data: Path, stages: Sequence[str], seeds: int, first_seed: int, write_only: bool, work: Path, out: Path
) -> None:
    """Trains the stages and writes the results of the seeds that are whole."""
    torch.set_num_threads(1)
    progress = Progress(folder=data, work=work)
    if not write_only:
        for text in stages:
            name, _, fewer = text.partition(":")
            if name not in STAGES or not f"{fewer or seeds}".isdecimal():
                raise click.UsageError(f"--stage {text} must be one of {', '.join(STAGES)}, and NAME:SEEDS a number.")
            progress.train(_cells(name, range(first_seed, first_seed + int(fewer or seeds)), progress), name)
    for path in write_results(progress.records, out):
        click.echo(path)


def _cells(name: str, seeds: Sequence[int], progress: Progress) -> Iterator[Cell]:
    stage = STAGES[name]
    for cell in cells_of(stage, seeds):
        own = own_rates(progress.records, cell) if stage.own_rates else cell
        if own is None:
            raise click.UsageError(f"Stage {name} needs tuned rates; run {stage.data}-tune first.")
        yield own


if __name__ == "__main__":
    main()
