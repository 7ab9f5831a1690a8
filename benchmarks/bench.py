"""The whole study of step times on emulated hosts, from jobs to a page, in some 45 minutes on two cores.

    sudo make bench        or, as root:   OMP_NUM_THREADS=1 python -m benchmarks.bench

Flat contenders come first, in a job of their own, in FP32 and FP16: table- and column-wise, small tables on every rank
at two thresholds, TorchRec's planner, with and without prefetch. The two fastest of each precision then take turns with
all others in the main job, and every ratio is over the fastest flat one there. Sweeps around it: rate of the links,
ids drawn evenly. What is done is kept in ``--work`` round by round, and a stopped study goes on with
the jobs that are not whole; ``--minutes`` ends it in time. ``--quick`` tries all of it on small batches and says
nothing about speed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from benchmarks.steps.contenders import EMBEDDING_DIM, named, select
from benchmarks.steps.measured import bytes_per_second, measure_run
from benchmarks.steps.predicted import predictions
from benchmarks.steps.report import setting_words, write_results
from benchmarks.steps.setting import Setting
from benchmarks.train_step import about_job, run_setting, write_json
from dmt.errors import InputError

__all__ = ["PARTS", "Job", "Study", "main"]

_HERE = Path(__file__).parent
# Where every table is sharded, a flat model is slower by far: one of each scheme, for comparison. Small tables on every
# rank: with prefetch, which has been faster in every record.
FLAT = (
    *("flat-tw", "flat-cw+prefetch"),
    *(found.name for found in select([f"flat-{way}*+prefetch" for way in ("*-dp", "tw+vbe", "planner")])),
)
OURS = (
    *("etc-cr2", "etc-cr4+prefetch", "sptt", "sptt+unique", "sptt+hier+hot"),
    *(f"sptt+prefetch+hier+mb4+unique{option}" for option in ("", "+rank-towers", "+rank-towers+outside")),
    *("sptt+prefetch+hier+mb16+unique+rank-towers", "sptt+fp16+prefetch+bf16-dense+mb8+unique+rank-towers"),
    *("dmt-cr2", "dmt-cr2+outside", "dmt-cr4+all+outside"),
    *(f"dmt-cr{ratio}+all+rank-towers{option}" for ratio in (2, 4, 16) for option in ("", "+outside")),
    *(f"dmt-cr{ratio}+fp16+all+rank-towers+outside" for ratio in (2, 4, 16)),
)
_SWEPT = (
    *(f"sptt+prefetch+hier+mb{number}+unique+rank-towers" for number in (4, 16)),
    *(f"dmt-cr{ratio}+all+rank-towers+outside" for ratio in (2, 4, 16)),
)
_QUICK = ("flat-tw", "flat-planner+fp16", "etc-cr2", "sptt+unique", "dmt-cr2+all", "dmt-cr2+fp16+all")
_MAIN = Setting(steps_per_turn=1, rounds=5)
PARTS: dict[str, tuple[Setting, ...]] = {
    "flat": (replace(_MAIN, rounds=2),),
    "main": (_MAIN,),
    # Bound by the wire; and so fast a link that the flat model waits for it a third of its time, as in the DMT paper's
    # Figure 1 after optimization.
    "rate": tuple(replace(_MAIN, rounds=3, mbit_per_s=rate) for rate in (50.0, 500.0)),
    # All hosts share the cores: only slow links can still bind eight of them.
    "ids": (replace(_MAIN, rounds=2, ids="uniform"),),
}
"""Settings of the jobs of each part, those first that a study which is cut off must have."""

# For the estimate, from runs on two cores: starting a job, building one contender, computing one sample's step.
_START_SECONDS, _BUILD_SECONDS, _SAMPLE_SECONDS = 15.0, 1.5, 1.1e-4
_FEATURES, _DENSE_BYTES = 26, 9e6
# After the rounds: what the pipeline has begun.
_LAST_STEPS = 2
# Of a job whose time is cut short: its first round, and the end of the one that runs when its time is over.
_LEAST_ROUNDS = 2


@dataclass(frozen=True, kw_only=True)
class Job:
    """Contenders that run side by side at one setting."""

    part: str
    setting: Setting
    contenders: tuple[str, ...]

    @property
    def name(self) -> str:
        """Stem of its file."""
        setting = self.setting
        return f"{self.part}-{setting.hosts}x{setting.ranks_per_host}-{setting.mbit_per_s or 0:g}-{setting.ids}"

    @property
    def estimate(self) -> float:
        """Seconds that it will take, roughly."""
        return self._seconds(self.setting.rounds)

    @property
    def least(self) -> float:
        """Seconds that it takes to have a round of each contender."""
        return self._seconds(_LEAST_ROUNDS)

    def _seconds(self, rounds: int) -> float:
        num_steps = (rounds + self.setting.warm_up_rounds) * self.setting.steps_per_turn + _LAST_STEPS
        steps = sum(self._step_seconds(name) for name in self.contenders)
        build = _BUILD_SECONDS * len(self.contenders) * self.setting.world_size / 4
        return _START_SECONDS + build + num_steps * steps

    def _step_seconds(self, name: str) -> float:
        contender, setting = named(name), self.setting
        columns = _FEATURES * EMBEDDING_DIM * (2 if contender.precision == "fp16" else 4) / contender.compression
        # Small tables on every rank, hot rows and unique inputs: from the record of unique inputs.
        is_smaller = contender.data_parallel_rows != 0 or contender.outside
        share = 0.25 if contender.unique or contender.hot_rows else 0.5 if is_smaller else 1.0
        others = setting.batch_size * setting.ranks_per_host * (setting.hosts - 1) / setting.hosts
        across = 2 * others * columns * share + 2 * _DENSE_BYTES * (setting.hosts > 1)
        wire = 0.0 if setting.mbit_per_s is None else across / bytes_per_second(setting.mbit_per_s)
        compute = _SAMPLE_SECONDS * setting.batch_size * setting.world_size
        shorter, longer = sorted((wire, compute))
        return longer + shorter * (0.25 if contender.micro_batches > 1 else 1.0)


@dataclass(frozen=True, kw_only=True)
class Study:
    """The jobs of a study and what is done of them."""

    work: Path
    """Folder with a file for each job."""
    parts: tuple[str, ...] = tuple(PARTS)
    quick: bool = False
    """True for a smoke test."""
    deadline: float | None = None
    """Seconds since 1970 by which the study has ended; None: it takes its time."""

    def jobs(self, part: str) -> list[Job]:
        """The jobs of one part; but for ``flat`` they take the flat contenders that were fastest there."""
        if self.quick:
            small = {"batch_size": 256, "rounds": 1}
            return [Job(part=part, setting=replace(PARTS[part][-1], **small), contenders=_QUICK)]  # type: ignore[arg-type]
        contenders: Sequence[str] = FLAT
        if part == "main":
            contenders = (*self.fastest_flats("fp32"), *self.fastest_flats("fp16"), *OURS)
        elif part != "flat":
            contenders = (*self.fastest_flats("fp32"), *_SWEPT)
        return [Job(part=part, setting=setting, contenders=tuple(contenders)) for setting in PARTS[part]]

    def fastest_flats(self, precision: str) -> list[str]:
        """The two fastest flat contenders of a precision; before they have run, two that were fast once."""
        record = self.record(Job(part="flat", setting=PARTS["flat"][0], contenders=FLAT), unfinished=True)
        if record is None:
            half = "" if precision == "fp32" else f"+{precision}"
            return [f"flat-tw-dp15000{half}+prefetch", f"flat-planner{half}+prefetch"]
        flats = [f for f in measure_run(record["run"], cores=record["about"]["cores"]) if f.precision == precision]
        return [found.name for found in sorted(flats, key=lambda found: found.median)[:2]]

    def record(self, job: Job, *, unfinished: bool = False) -> dict[str, Any] | None:
        """What is done of a job, for this setting and these contenders; None if nothing is.

        ``unfinished`` also takes a job that was cut off, with the rounds that it has.
        """
        path, partial = self.work / f"{job.name}.json", self._partial(job)
        if path.exists():
            record: dict[str, Any] = json.loads(path.read_text())
        elif unfinished and partial.exists():
            record = {"about": about_job(_command()), "run": json.loads(partial.read_text())}
            if not all(one["steps"] for one in record["run"].get("contenders", [{"steps": []}])):
                return None
        else:
            return None
        names = {one["name"] for one in record["run"]["contenders"]}
        return record if record["run"]["setting"] == asdict(job.setting) and set(job.contenders) <= names else None

    def _partial(self, job: Job) -> Path:
        """Where a job writes every round; it stays where the job does not end."""
        return self.work / f"{job.name}.partial.json"

    def run(self) -> list[str]:
        """Runs the jobs that are not done; returns the names of those that failed or had no time left."""
        failed = []
        for part in self.parts:
            for job in self.jobs(part):
                words = f"{job.name}: {setting_words(asdict(job.setting))}, {len(job.contenders)} contenders"
                if self.record(job) is not None:
                    click.echo(f"{words}: done before")
                    continue
                if self.deadline is not None and time.time() + job.least > self.deadline:
                    click.echo(f"{words}: no time left")
                    failed.append(job.name)
                    continue
                click.echo(f"{words}, about {job.estimate / 60:.0f} min")
                if not self._run(job):
                    failed.append(job.name)
        return failed

    def _run(self, job: Job) -> bool:
        start, partial, deadline = time.monotonic(), self._partial(job), self.deadline
        if deadline is not None:
            # The last round and what follows it need time, too.
            deadline -= job.least / 2
        self.work.mkdir(parents=True, exist_ok=True)
        try:
            run = run_setting(job.setting, select(job.contenders), partial, deadline=deadline)
        except (RuntimeError, TimeoutError) as error:
            click.echo(f"{job.name}: failed. {error}", err=True)
            return False
        write_json(self.work / f"{job.name}.json", {"about": about_job(_command()), "run": run})
        partial.unlink(missing_ok=True)
        click.echo(f"{job.name}: {(time.monotonic() - start) / 60:.1f} min")
        return True

    def write(self, out: Path) -> list[Path]:
        """Writes the page, the JSON and the pictures of what is done, jobs that were cut off included.

        Raises:
            InputError: nothing is done.
        """
        records = [(job.part, self.record(job, unfinished=True)) for part in PARTS for job in self.jobs(part)]
        done = [(part, record) for part, record in records if record is not None]
        if not done:
            raise InputError(f"{self.work} holds no finished job of this study. Run one without --only-write first.")
        commits = sorted({record["about"]["commit"] for _, record in done})
        made = done[0][1]["about"] | {"commit": ", ".join(commits)}
        runs = [{"part": part, **record["run"]} for part, record in done]
        return write_results(runs, out, about=made, predicted=[] if self.quick else predictions())


def _command() -> str:
    return f"python -m benchmarks.bench {' '.join(sys.argv[1:])}".strip()


@click.command(context_settings={"show_default": True})
@click.option("--part", "parts", type=click.Choice([*PARTS]), multiple=True, default=[*PARTS], help="To be run.")
@click.option("--quick", is_flag=True, help="A smoke test of a few minutes; everything goes to WORK/quick.")
@click.option("--only-write", is_flag=True, help="Run nothing, write what is done.")
@click.option("--minutes", type=click.FloatRange(0, min_open=True), help="Time for the study; the rest is left out.")
@click.option("--work", type=click.Path(path_type=Path), default=Path("runs/steps"), help="For the progress.")
@click.option("--out", type=click.Path(path_type=Path), default=_HERE / "results", help="For the results.")
def main(
    *, parts: tuple[str, ...], quick: bool, only_write: bool, minutes: float | None, work: Path, out: Path
) -> None:
    """Times training steps on emulated hosts and writes a page. Needs root.

    Example: python -m benchmarks.bench --part flat --part main
    """
    if quick:
        work = out = work / "quick"
    deadline = None if minutes is None else time.time() + 60 * minutes
    study = Study(work=work, parts=tuple(part for part in PARTS if part in parts), quick=quick, deadline=deadline)
    failed: list[str] = []
    if not only_write:
        jobs = [job for part in study.parts for job in study.jobs(part)]
        click.echo(f"About {sum(job.estimate for job in jobs) / 60:.0f} minutes on two cores.")
        failed = study.run()
    try:
        for path in study.write(out):
            click.echo(path)
    except InputError as error:
        if not failed:
            raise click.UsageError(str(error)) from error
    if failed:
        raise click.ClickException(f"Not done: {', '.join(failed)}. What is done is written; run it again to go on.")


if __name__ == "__main__":
    main()
