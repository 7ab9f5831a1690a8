"""The report of the step benchmark: bounds, intervals, best flat contender and goals by hand; the study goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import benchmarks.bench as bench
from benchmarks.steps.contenders import CONTENDERS, Contender, named
from benchmarks.steps.measured import Measured, best_flat, fastest, measure_run, speedup
from benchmarks.steps.report import goals_table
from benchmarks.steps.setting import Setting

WIRE = {"bytes_per_rank": 25e6, "seconds": 1.02, "ratio": 1.02, "header_overhead": 0.01}
WIRE |= {"all_to_all_seconds": 1.3, "all_to_all_ratio": 1.3}
ONE = Setting(steps_per_turn=1)


def made_up(name: str, setting: Setting, *, seconds: Sequence[float], across: float = 40e6) -> dict[str, Any]:
    """A contender whose hosts send ``across`` bytes each, with 1 % of headers."""
    ranks, hosts = setting.world_size, setting.hosts
    by_rank = {"cpu": [0.5] * ranks, "main_cpu": [0.3] * ranks, "waiting": [0.2] * ranks, "no_core": [0.1] * ranks}
    kinds = {"ids": 0.02, "forward": 0.45, "backward": 0.45, "dense": 0.08}
    described = {key: getattr(named(name), key) for key in ("name", "family", "precision", "compression", "scheme")}
    steps = [
        {"seconds": s, "by_rank": {"seconds": [s] * ranks, **by_rank}, "uplink_bytes": [across * 1.01] * hosts}
        for s in seconds
    ]
    return {
        **described,
        "steps": steps,
        "traffic": {**{kind: share * across * hosts for kind, share in kinds.items()}, "inside": 5e6},
        "peak_memory_bytes": [3e8] * ranks,
    }


def run_of(setting: Setting, names: Sequence[str]) -> dict[str, Any]:
    """A run whose wire takes all of a step: seconds follow bytes."""
    generator = np.random.default_rng(0)
    contenders = []
    for name in names:
        width = 1 / named(name).compression / (2 if named(name).precision == "fp16" else 1)
        across = width * 109e6 * setting.batch_size / 4096 * 2 * (setting.hosts - 1) / setting.hosts
        wire = 0.0 if setting.mbit_per_s is None else across * 8 / setting.mbit_per_s / 1e6
        steps = (wire + 1.1) * (1 + 0.04 * generator.random(setting.rounds * setting.steps_per_turn))
        contenders.append(made_up(name, setting, seconds=steps.tolist(), across=across))
    return {"setting": asdict(setting), "wire": WIRE, "contenders": contenders}


def measured(name: str, seconds: Sequence[float], *, setting: Setting = ONE, **changes: Any) -> Measured:
    run = {"setting": asdict(setting), "contenders": [made_up(name, setting, seconds=seconds)]}
    return replace(measure_run(run, cores=2)[0], **changes)


def test_a_contender_by_hand() -> None:
    setting = Setting(batch_size=100, steps_per_turn=2)
    contender = made_up("dmt-cr2", setting, seconds=[2.0, 4.0, 3.0, 5.0])
    for step, busy in zip(contender["steps"], (1.0, 2.0, 3.0, 4.0), strict=True):
        step["by_rank"] |= {"cpu": [busy, 1, 1, 1], "main_cpu": [0.5, 0.5, 0.3, 0.1], "waiting": [busy, 0, 0, 1]}
        step["uplink_bytes"] = [busy * 10e6, 20e6]
    contender["traffic"]["forward"] -= 4e6
    found = measure_run({"setting": asdict(setting), "contenders": [contender]}, cores=2)[0]
    assert found.rounds == ((2.0, 4.0), (3.0, 5.0))
    assert (found.median, found.percentile(10), found.percentile(90)) == pytest.approx((3.5, 2.3, 4.7))
    assert found.uplink == (25e6, 20e6)
    assert found.wire == pytest.approx(1.0)  # 25 MB at 200 Mbit/s
    assert found.compute == pytest.approx(2.75)  # (2.5 + 3) / 2 cores
    assert (found.bound, found.bound_name) == (found.compute, "compute")
    assert found.bound_ratio == pytest.approx(3.5 / 2.75)
    assert found.waiting == pytest.approx(np.median([0.5, 0.75, 1.0, 1.25]))
    assert sum(found.across.values()) == pytest.approx(38e6)
    assert found.counters_ratio == pytest.approx(22.5 / 38)
    assert found.peak_memory == 3e8


def test_best_flat_is_over_schemes_and_prefetch_at_one_precision() -> None:
    found = [
        measured("flat-tw", [3.0]),
        measured("flat-planner+prefetch", [2.0]),
        measured("flat-tw+fp16", [1.5]),
        measured("dmt-cr2", [1.0]),
    ]
    assert best_flat(found, "fp32") is found[1]
    assert best_flat(found, "fp16") is found[2]
    assert best_flat(found[3:], "fp32") is None
    assert fastest(found, "dmt", precision="fp32", compression=4) is None
    assert fastest(found, "dmt", precision="fp32", compression=2) is found[3]


def test_speedup_and_its_interval() -> None:
    ours, flat = measured("dmt-cr2", [1.0, 2.0, 1.0]), measured("flat-tw", [2.0, 4.0, 2.0])
    found = speedup(ours, flat)
    assert found.ratio == 2.0
    assert found.interval == (2.0, 2.0), "rounds are drawn together: both are slow in the second one"
    # Of two rounds, a quarter of the draws takes the first twice, a quarter the second, the others both.
    uneven = speedup(measured("dmt-cr2", [1.0, 1.0]), measured("flat-tw", [2.0, 4.0]))
    assert (uneven.ratio, uneven.interval, str(uneven)) == (3.0, (2.0, 4.0), "3.00 [2.00, 4.00]")
    assert speedup(measured("dmt-cr2", [1.0]), measured("flat-tw", [2.0])).interval is None
    stopped = speedup(measured("dmt-cr2", [1.0, 1.0]), measured("flat-tw", [2.0, 2.0, 9.0]))
    assert stopped.interval == (2.0, 2.0), "rounds that one of the two lacks are left out"


def test_goals_by_hand() -> None:
    seconds = {"flat-tw": 6.3, "flat-tw+vbe": 4.2, "sptt": 2.1, "sptt+unique": 2.0, "dmt-cr2": 1.75, "dmt-cr4": 1.3}
    contenders = [made_up(name, ONE, seconds=[second]) for name, second in seconds.items()]
    lines = goals_table([{"part": "main", "setting": asdict(ONE), "contenders": contenders}], cores=2).splitlines()[2:]
    assert lines[0].endswith("| 2.1 | 2.10 (sptt+unique over flat-tw+vbe) | held | 3.15 (flat-tw) |")
    assert lines[1].startswith("| CR 2, 200 Mbit/s | 2.3 | 2.40 (dmt-cr2 over flat-tw+vbe) | held")
    assert lines[2].startswith("| CR 4, 200 Mbit/s | 3.5 | 3.23 (dmt-cr4 over flat-tw+vbe) | **not held**")
    assert [line.split("|")[-3].strip() for line in lines[3:7]] == ["not measured"] * 4
    # 40.4 MB take 1.616 s, computing takes 1 s: only the last two are within 1.1 of that.
    assert lines[7].endswith("| 90% | 2 of 4 | **not held** | - |")


class Runner:
    """Stands in for `benchmarks.train_step.run_setting`; fails at the rates it is told."""

    def __init__(self) -> None:
        self.ran: list[tuple[Setting, tuple[str, ...]]] = []
        self.failing: set[float | None] = set()

    def __call__(
        self, setting: Setting, contenders: Sequence[Contender], out: Path, *, deadline: float | None
    ) -> dict[str, Any]:
        names = tuple(contender.name for contender in contenders)
        self.ran.append((setting, names))
        out.write_text("{}")
        if setting.mbit_per_s in self.failing:
            raise RuntimeError("rank 3 is gone")
        return run_of(setting, names)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    stand_in = Runner()
    monkeypatch.setattr(bench, "run_setting", stand_in)
    return stand_in


def invoke(tmp_path: Path, *arguments: str) -> tuple[int, str]:
    folders = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(bench.main, [*folders, *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_the_study_compares_with_the_flat_contenders_that_won(tmp_path: Path, runner: Runner) -> None:
    code, _ = invoke(tmp_path, "--part", "flat", "--part", "main", "--part", "rate")
    assert code == 0
    flats = [found for found in measure_run(run_of(*runner.ran[0]), cores=2) if found.precision == "fp32"]
    fastest_two = {found.name for found in sorted(flats, key=lambda found: found.median)[:2]}
    for _, contenders in runner.ran[1:]:
        assert fastest_two == {name for name in contenders if name.startswith("flat") and "fp16" not in name}
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"steps.json", "steps.md", "steps_steps.png", "steps_sweeps.png"}
    record = json.loads((tmp_path / "out" / "steps.json").read_text())
    assert [run["part"] for run in record["runs"]] == ["flat", "main", "rate", "rate"]
    page = (tmp_path / "out" / "steps.md").read_text()
    assert "1.30 x with PyTorch's `all_to_all_single`" in page
    assert "## rate: 2 hosts x 2 ranks, 500 Mbit/s, local batch 4,096, skewed ids" in page


def test_a_stopped_study_goes_on(tmp_path: Path, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "write_results", lambda *runs, **facts: [])
    monkeypatch.setattr(bench, "predictions", lambda: [])
    runner.failing = {50.0}
    code, output = invoke(tmp_path, "--part", "main", "--part", "rate")
    assert code == 1
    assert "rate-2x2-50-skewed: failed. rank 3 is gone" in output
    assert "Not done: rate-2x2-50-skewed" in output
    runner.ran, runner.failing = [], set()
    code, output = invoke(tmp_path, "--part", "main", "--part", "rate")
    assert (code, output.count("done before")) == (0, 2)
    assert [setting.mbit_per_s for setting, _ in runner.ran] == [50]
    assert not list((tmp_path / "work").glob("*.partial.json"))


def test_the_whole_study_takes_less_than_an_hour(tmp_path: Path, runner: Runner) -> None:
    study = bench.Study(work=tmp_path)
    jobs = [job for part in bench.PARTS for job in study.jobs(part)]
    assert len({job.name for job in jobs}) == len(jobs)
    assert {name for job in jobs for name in job.contenders} <= set(CONTENDERS)
    # It estimates a fifth too much, so that this is 45 minutes at most.
    assert sum(job.estimate for job in jobs) < 50 * 60
    assert invoke(tmp_path, "--quick")[0] == 0
    assert all(setting.rounds == 1 for setting, _ in runner.ran)
    assert (tmp_path / "work" / "quick" / "steps.md").exists()
    assert not (tmp_path / "out").exists()
