"""Runs the study of step times on emulated hosts, from jobs to a page, in about 45 minutes on two cores.

    sudo make bench        or, as root:   OMP_NUM_THREADS=1 python -m benchmarks.bench

Flat contenders run first, in a separate job, in FP32 and FP16: table- and column-wise, small tables on every rank at
two thresholds, each distinct id once, and TorchRec's planner, mostly with prefetch. The two fastest of each precision
then take turns with all others in the main job, where every speedup is relative to the fastest flat one. Further jobs
vary the rate of the links, and draw ids evenly. ``--work`` keeps the results of every round, so that a rerun continues
with the jobs that are incomplete; ``--minutes`` limits the time. ``--quick`` is a smoke test on small batches: its
times mean nothing.
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

from benchmarks.report import write_json
from benchmarks.steps.contenders import EMBEDDING_DIM, named, select
from benchmarks.steps.measured import bytes_per_second, measure_run
from benchmarks.steps.predicted import predictions
from benchmarks.steps.report import setting_words, write_results
from benchmarks.steps.setting import Setting
from benchmarks.train_step import about_job, run_setting
from dmt.errors import InputError

__all__ = ["PARTS", "Job", "Study", "main"]

_HERE = Path(__file__).parent
# Flat models that shard every table are far slower: one of each scheme, for comparison. Those with small tables on
# every rank run with prefetch, which was faster in every record.
FLAT = (
    *("flat-tw", "flat-cw+prefetch"),
    *(found.name for found in select([f"flat-{way}*+prefetch" for way in ("*-dp", "tw+vbe", "planner")])),
)
OURS = (
    *("etc-cr2", "etc-cr4+prefetch", "sptt", "sptt+unique", "sptt+hier+hot"),
    *(f"sptt+prefetch+hier+mb4+unique+rank-towers{option}" for option in ("", "+outside")),
    *("sptt+prefetch+hier+mb16+unique+rank-towers", "sptt+fp16+prefetch+bf16-dense+mb8+unique+rank-towers"),
    *("dmt-cr2", "dmt-cr2+outside"),
    *(f"dmt-cr{ratio}+all+rank-towers{option}" for ratio in (2, 4, 16) for option in ("", "+outside")),
    *(f"products-cr{ratio}+all+rank-towers{option}" for ratio in (2, 4, 16) for option in ("", "+outside")),
    *(f"{model}-cr{ratio}+fp16+all+rank-towers+outside" for model in ("dmt", "products") for ratio in (4, 16)),
)
_SWEPT = (
    *(f"sptt+prefetch+hier+mb{number}+unique+rank-towers" for number in (4, 16)),
    *(f"dmt-cr{ratio}+all+rank-towers+outside" for ratio in (4, 16)),
    *(f"products-cr{ratio}+all+rank-towers{option}" for ratio in (4, 16) for option in ("", "+outside")),
)
_QUICK = ("flat-tw", "flat-planner+fp16", "etc-cr2", "sptt+unique", "dmt-cr2+all", "products-cr4+fp16+all+rank-towers")
_MAIN = Setting(steps_per_turn=1, rounds=5)
PARTS: dict[str, tuple[Setting, ...]] = {
    "flat": (replace(_MAIN, rounds=2),),
    "main": (_MAIN,),
    # At 50 Mbit/s the links are the bottleneck; at 500 the flat model waits for them a third of its time, as in the DMT
    # paper's Figure 1 after optimization.
    "rate": tuple(replace(_MAIN, rounds=3, mbit_per_s=rate) for rate in (50.0, 500.0)),
    # Drawn evenly, no id is frequent.
    "ids": (replace(_MAIN, rounds=2, ids="uniform"),),
}
"""Settings of the jobs of each part; the parts that a study needs most come first, in case its time runs out."""

# Times on two cores, for the estimate: to start a job, to build a contender, to compute a step of one sample.
_START_SECONDS, _BUILD_SECONDS, _SAMPLE_SECONDS = 15.0, 1.5, 1.1e-4
_FEATURES, _DENSE_BYTES = 26, 9e6
# Steps after the rounds, on batches that the pipeline has already read.
_LAST_STEPS = 2
# Rounds of a job whose time runs out: the first one, and the one that is running at that moment.
_LEAST_ROUNDS = 2


@dataclass(frozen=True, kw_only=True)
class Job:
    """Contenders that run side by side at one setting."""

    part: str
    setting: Setting
    contenders: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the job's file, without its ending."""
        setting = self.setting
        return f"{self.part}-{setting.hosts}x{setting.ranks_per_host}-{setting.mbit_per_s or 0:g}-{setting.ids}"

    @property
    def estimate(self) -> float:
        """Approximate seconds that the job takes."""
        return self._seconds(self.setting.rounds)

    @property
    def least(self) -> float:
        """Seconds that the job needs for at least one round of each contender."""
        return self._seconds(_LEAST_ROUNDS)

    def _seconds(self, rounds: int) -> float:
        num_steps = (rounds + self.setting.warm_up_rounds) * self.setting.steps_per_turn + _LAST_STEPS
        steps = sum(self._step_seconds(name) for name in self.contenders)
        build = _BUILD_SECONDS * len(self.contenders) * self.setting.world_size / 4
        return _START_SECONDS + build + num_steps * steps

    def _step_seconds(self, name: str) -> float:
        contender, setting = named(name), self.setting
        columns = _FEATURES * EMBEDDING_DIM * (2 if contender.precision == "fp16" else 4) / contender.compression
        # Shares of bytes with small tables on every rank, hot rows or unique inputs, from the record of unique inputs.
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
    """The jobs of a study, and their results so far."""

    work: Path
    """Folder with a result file for each job."""
    parts: tuple[str, ...] = tuple(PARTS)
    quick: bool = False
    """True for a smoke test."""
    deadline: float | None = None
    """Time by which the study must end, in seconds since 1970; None: no limit."""

    def jobs(self, part: str) -> list[Job]:
        """Returns the jobs of a part; parts other than ``flat`` include the flat contenders that were fastest there."""
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
        """Returns the two fastest flat contenders of a precision; before they have run, two of an earlier record."""
        record = self.record(Job(part="flat", setting=PARTS["flat"][0], contenders=FLAT), unfinished=True)
        if record is None:
            half = "" if precision == "fp32" else f"+{precision}"
            return [f"flat-tw-dp15000{half}+prefetch", f"flat-planner{half}+prefetch"]
        flats = [f for f in measure_run(record["run"], cores=record["about"]["cores"]) if f.precision == precision]
        return [found.name for found in sorted(flats, key=lambda found: found.median)[:2]]

    def record(self, job: Job, *, unfinished: bool = False) -> dict[str, Any] | None:
        """Returns the record of a job if it has run with this setting and these contenders, else None.

        ``unfinished`` also accepts a job that was stopped, with the rounds that it completed.
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
        """Returns the path to which a job writes its rounds; the file remains if the job does not end."""
        return self.work / f"{job.name}.partial.json"

    def run(self) -> list[str]:
        """Runs the jobs without a result; returns the names of those that failed or for which no time was left."""
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
            # Leaves time for the last round and for what follows it.
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
        """Writes page, JSON and pictures of all results, including those of stopped jobs; returns the paths.

        Raises:
            InputError: no job has a result.
        """
        records = [(job.part, self.record(job, unfinished=True)) for part in PARTS for job in self.jobs(part)]
        done = [(part, record) for part, record in records if record is not None]
        if not done:
            raise InputError(f"{self.work} has no result of this study. Run it without --only-write first.")
        commits = sorted({record["about"]["commit"] for _, record in done})
        made = done[0][1]["about"] | {"commit": ", ".join(commits)}
        runs = [{"part": part, **record["run"]} for part, record in done]
        return write_results(runs, out, about=made, predicted=[] if self.quick else predictions())


def _command() -> str:
    return f"python -m benchmarks.bench {' '.join(sys.argv[1:])}".strip()


@click.command(context_settings={"show_default": True})
@click.option("--part", "parts", type=click.Choice([*PARTS]), multiple=True, default=[*PARTS], help="Parts to run.")
@click.option("--quick", is_flag=True, help="Smoke test of a few minutes; all files go to WORK/quick.")
@click.option("--only-write", is_flag=True, help="Run nothing; write the results so far.")
@click.option("--minutes", type=click.FloatRange(0, min_open=True), help="Time limit; later jobs are left out.")
@click.option("--work", type=click.Path(path_type=Path), default=Path("runs/steps"), help="Progress folder.")
@click.option("--out", type=click.Path(path_type=Path), default=_HERE / "results", help="Results folder.")
def main(
    *, parts: tuple[str, ...], quick: bool, only_write: bool, minutes: float | None, work: Path, out: Path
) -> None:
    """Times training steps on emulated hosts, and writes a page of the results. Needs root.

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
        raise click.ClickException(f"Not done: {', '.join(failed)}. The other results are written; run it again.")


if __name__ == "__main__":
    main()
