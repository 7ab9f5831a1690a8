"""The whole study of step times on emulated hosts, from jobs to tables and pictures.

    sudo make bench        or, as root:   OMP_NUM_THREADS=1 python -m benchmarks.bench

Six parts: ``flat`` (all flat contenders at the setting of the goals), ``main`` (the two fastest of them at each
precision, and all others), three sweeps around it, over ``hosts``, ``batch`` and ``rate``, and ``unique`` (each input
sent once, with skewed ids, with ids that do not repeat and with requests). What is done is kept in ``--work``, and a
stopped study goes on with the next job. ``--quick`` tries all of it on small batches and says nothing
about speed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import click

from benchmarks.steps.contenders import select
from benchmarks.steps.setting import Ids
from benchmarks.steps_report.compare import best_flat
from benchmarks.steps_report.measures import Measured, measure_run
from benchmarks.steps_report.page import setting_words, write_results
from benchmarks.steps_report.parts import PARTS, Job, flat_jobs, main_jobs, quick_jobs, sweep_jobs, unique_jobs
from benchmarks.train_step import about, run_setting
from dmt.errors import InputError
from dmt.files import atomic_write

__all__ = ["Study", "main"]

_HERE = Path(__file__).parent
# Compared with where the flat part has not run.
_FLATS = {"fp32": ["flat-tw", "flat-tw+prefetch"], "fp16": ["flat-tw+fp16", "flat-tw+fp16+prefetch"]}


class Study:
    """The jobs of a study and what is done of them.

    Args:
        work: folder with a file for each job.
        parts: to be run.
        again: whether finished jobs of these parts run once more.
        rounds: measured ones of the main part, and of the sweeps.
        quick: whether this is a smoke test.
        ids: how they are drawn in all parts but ``unique``.
    """

    def __init__(
        self,
        *,
        work: Path,
        parts: Sequence[str],
        again: bool,
        rounds: tuple[int, int],
        quick: bool,
        ids: Ids = "skewed",
    ) -> None:
        self.work = work
        self.parts = [part for part in PARTS if part in parts]
        self.again = again
        self.rounds = rounds
        self.quick = quick
        self.ids = ids

    def jobs(self, part: str) -> list[Job]:
        """Jobs of one part; those of a sweep take the flat contender that was fastest in the main part."""
        if self.quick:
            return quick_jobs([part])
        if part == "unique":
            return unique_jobs(rounds=self.rounds[0])
        return [replace(job, setting=replace(job.setting, ids=self.ids)) for job in self._jobs(part)]

    def _jobs(self, part: str) -> list[Job]:
        if part == "flat":
            return flat_jobs(rounds=self.rounds[1])
        if part == "main":
            return main_jobs(self._fastest_flats(), rounds=self.rounds[0])
        return sweep_jobs(part, flat=self._best_flat(), rounds=self.rounds[1])

    def _fastest_flats(self) -> list[str]:
        """Two of each precision."""
        record = _read(self._path("flat"))
        flats = [] if record is None else sorted(_measured(record), key=lambda found: found.median)
        by_precision = {precision: [one.name for one in flats if one.precision == precision] for precision in _FLATS}
        return [name for precision, first in _FLATS.items() for name in (by_precision[precision] or first)[:2]]

    def _best_flat(self) -> str:
        record = _read(self._path("main"))
        flat = None if record is None else best_flat(_measured(record), "fp32")
        return _FLATS["fp32"][0] if flat is None else flat.name

    def _path(self, name: str) -> Path:
        return self.work / f"{name}.json"

    def is_done(self, job: Job) -> bool:
        """True if the job's file is complete, for this setting and these contenders, with at least as many rounds."""
        record = self.record(job)
        if record is None:
            return False
        found, wanted = record["run"]["setting"], json.loads(json.dumps(asdict(job.setting)))
        return (
            {**found, "rounds": 0} == {**wanted, "rounds": 0}
            and found["rounds"] >= wanted["rounds"]
            and set(job.contenders) <= {one["name"] for one in record["run"]["contenders"]}
        )

    def record(self, job: Job) -> dict[str, Any] | None:
        """Content of the job's file; None if it is absent."""
        return _read(self._path(job.name))

    def estimate(self) -> float:
        """Seconds that the jobs to come will take, roughly."""
        jobs = [job for part in self.parts for job in self.jobs(part)]
        return sum(job.estimate for job in jobs if self.again or not self.is_done(job))

    def run(self) -> list[str]:
        """Runs the jobs that are not done.

        Returns:
            Names of the jobs that failed.
        """
        failed = []
        for part in self.parts:
            for job in self.jobs(part):
                words = f"{job.name}: {setting_words(asdict(job.setting))}, {len(job.contenders)} contenders"
                if self.is_done(job) and not self.again:
                    click.echo(f"{words}: done before")
                    continue
                click.echo(f"{words}, about {job.estimate / 60:.0f} min")
                if not self._run(job):
                    failed.append(job.name)
        return failed

    def _run(self, job: Job) -> bool:
        start, partial = time.monotonic(), self.work / f"{job.name}.partial.json"
        try:
            run = run_setting(job.setting, select(job.contenders), partial)
        except (RuntimeError, TimeoutError) as error:
            click.echo(f"{job.name}: failed. {error}", err=True)
            return False
        self.work.mkdir(parents=True, exist_ok=True)
        with atomic_write(self._path(job.name)) as scratch:
            scratch.write_text(json.dumps({"about": about(_command()), "run": run}))
        partial.unlink(missing_ok=True)
        click.echo(f"{job.name}: {(time.monotonic() - start) / 60:.1f} min")
        return True

    def has_results(self) -> bool:
        """True if any job is done, whatever its rounds and contenders."""
        return any(self.record(job) is not None for part in PARTS for job in self.jobs(part))

    def write(self, out: Path) -> list[Path]:
        """Writes the page, the JSON and the pictures of all jobs that are done, whatever their rounds and contenders.

        Raises:
            InputError: nothing is done.
        """
        records = [(job.part, self.record(job)) for part in PARTS for job in self.jobs(part)]
        found = [(part, record) for part, record in records if record is not None]
        if not found:
            raise InputError(f"{self.work} holds no finished job of this study. Run one without --only-write first.")
        runs = [{"part": part, "about": r["about"], **r["run"]} for part, r in found]
        made = [record["about"] for _, record in found]
        stem = "train_step" if self.ids == "skewed" else f"train_step_{self.ids}"
        return write_results(runs, out, about=_summary(made), cores=made[0]["machine"]["cores"], stem=stem)


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def _command() -> str:
    return f"python -m benchmarks.bench {' '.join(sys.argv[1:])}".strip()


def _measured(record: Mapping[str, Any]) -> list[Measured]:
    return measure_run(record["run"], cores=record["about"]["machine"]["cores"])


def _summary(made: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarises all jobs: common values once, differing values side by side."""
    return {
        "date": ", ".join(sorted({one["date"] for one in made})),
        "commit": ", ".join(sorted({one["commit"] for one in made})),
        "machine": "; ".join(sorted({_machine_words(one["machine"]) for one in made})),
        "packages": made[0]["versions"],
        "command": ", ".join(sorted({one["command"] for one in made})),
    }


def _machine_words(machine: Mapping[str, Any]) -> str:
    memory = machine["memory_bytes"] / 2**30
    return f"{machine['processor']}, {machine['cores']} cores, {memory:.0f} GiB, shared by all hosts"


@click.command(context_settings={"show_default": True})
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, default=PARTS, help="To be run.")
@click.option("--again", is_flag=True, help="Run these parts once more, even if they are done.")
@click.option("--rounds", type=click.IntRange(1), default=5, help="Measured rounds of the main part.")
@click.option("--sweep-rounds", type=click.IntRange(1), default=3, help="Measured rounds of the others.")
@click.option("--ids", type=click.Choice(get_args(Ids)), default="skewed", help="How they are drawn but in `unique`.")
@click.option("--quick", is_flag=True, help="A smoke test of a few minutes; everything goes to WORK/quick.")
@click.option("--only-write", is_flag=True, help="Run nothing, write what is done.")
@click.option("--work", type=click.Path(path_type=Path), default=Path("runs/train_step"), help="For the progress.")
@click.option("--out", type=click.Path(path_type=Path), default=_HERE / "results", help="For the results.")
def main(
    *,
    parts: tuple[str, ...],
    again: bool,
    ids: Ids,
    quick: bool,
    only_write: bool,
    work: Path,
    out: Path,
    **rounds: int,
) -> None:
    """Times training steps on emulated hosts and writes tables and pictures. Needs root.

    Example: python -m benchmarks.bench --part main --rounds 7
    """
    if quick:
        work = out = work / "quick"
    work = work if ids == "skewed" else work / ids
    numbers = (rounds["rounds"], rounds["sweep_rounds"])
    study = Study(work=work, parts=parts, again=again, rounds=numbers, quick=quick, ids=ids)
    failed: list[str] = []
    try:
        if not only_write:
            click.echo(f"About {study.estimate() / 60:.0f} minutes on two cores.")
            failed = study.run()
        if only_write or study.has_results():
            for path in study.write(out):
                click.echo(path)
    except InputError as error:
        raise click.UsageError(str(error)) from error
    if failed:
        raise click.ClickException(f"Failed: {', '.join(failed)}. What is done is written; run it again to go on.")


if __name__ == "__main__":
    main()
