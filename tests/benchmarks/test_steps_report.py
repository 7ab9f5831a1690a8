"""The report of the step benchmark: bounds, goals, intervals, best flat contender by hand; pages and pictures."""

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
from benchmarks.steps.contenders import Contender, parse_contender
from benchmarks.steps.setting import Setting
from benchmarks.steps_report.compare import best_flat, fastest, speedup
from benchmarks.steps_report.goals import Goal, judge, judge_unique
from benchmarks.steps_report.measures import Measured, measure_run
from benchmarks.steps_report.page import write_results
from benchmarks.steps_report.parts import (
    FLAT_CONTENDERS,
    MAIN_CONTENDERS,
    PARTS,
    Job,
    flat_jobs,
    main_jobs,
    quick_jobs,
    sweep_jobs,
    unique_jobs,
)
from benchmarks.steps_report.pictures import chosen
from benchmarks.steps_report.sweeps import SWEEPS, make_sweep
from benchmarks.steps_report.tables import compute_table, sweep_table

FLATS = ("flat-tw", "flat-cw", "flat-rw", "flat-twrw", "flat-grid", "flat-tw+fp16")
WIRE = {"bytes_per_rank": 25e6, "seconds": 1.02, "ratio": 1.02, "header_overhead": 0.01}
WIRE |= {"all_to_all_seconds": 1.3, "all_to_all_ratio": 1.3}


def made_up(name: str, setting: Setting, *, seconds: Sequence[float], across: float = 40e6) -> dict[str, Any]:
    """A contender whose hosts send ``across`` bytes each, with 1 % of headers."""
    contender = parse_contender(name)
    ranks, hosts = setting.world_size, setting.hosts
    by_rank = {"cpu": [0.5] * ranks, "main_cpu": [0.3] * ranks, "waiting": [0.2] * ranks, "no_core": [0.1] * ranks}
    kinds = {"ids": 0.02, "forward": 0.45, "backward": 0.45, "dense": 0.08}
    replicas = contender.num_replicas > 1
    return {
        **{
            key: getattr(contender, key) for key in ("name", "family", "precision", "prefetch", "compression", "scheme")
        },
        "notes": "",
        "steps": [
            {
                "seconds": second,
                "by_rank": {"seconds": [second] * ranks, **by_rank},
                "uplink_bytes": [across * 1.01] * hosts,
            }
            for second in seconds
        ],
        "traffic": {**{kind: share * across * hosts for kind, share in kinds.items()}, "inside": 5e6},
        "needed": {kind: share * across * hosts for kind, share in kinds.items()},
        "peak_memory_bytes": [3e8] * ranks,
        "weight_bytes": [1e8] * ranks,
        "sync_seconds": 0.5 if replicas else None,
        "sync_uplink_bytes": [2e6] * hosts if replicas else None,
    }


def run_of(setting: Setting, names: Sequence[str]) -> dict[str, Any]:
    """A run whose wire takes all of a step: seconds follow bytes."""
    generator = np.random.default_rng(0)
    contenders = []
    for name in names:
        contender = parse_contender(name)
        width = 1 / contender.compression / (2 if contender.precision == "fp16" else 1)
        across = width * 109e6 * setting.batch_size / 4096 * 2 * (setting.hosts - 1) / setting.hosts
        wire = 0.0 if setting.mbit_per_s is None else across * 8 / setting.mbit_per_s / 1e6
        steps = (wire + 1.1) * (1 + 0.04 * generator.random(setting.rounds * setting.steps_per_turn))
        contenders.append(made_up(name, setting, seconds=steps.tolist(), across=across))
    return {"setting": asdict(setting), "wire": WIRE, "contenders": contenders}


def run_of_job(job: Job) -> dict[str, Any]:
    return {"part": job.part, **run_of(job.setting, job.contenders)}


def measured(name: str, seconds: Sequence[float], *, setting: Setting | None = None, **changes: Any) -> Measured:
    setting = setting or Setting(steps_per_turn=1)
    run = {"setting": asdict(setting), "contenders": [made_up(name, setting, seconds=seconds)]}
    return replace(measure_run(run, cores=2)[0], **changes)


def test_a_contender_by_hand() -> None:
    setting = Setting(batch_size=100, steps_per_turn=2)
    contender = made_up("dmt-cr2", setting, seconds=[2.0, 4.0, 3.0, 5.0])
    for step, busy in zip(contender["steps"], (1.0, 2.0, 3.0, 4.0), strict=True):
        step["by_rank"] |= {"cpu": [busy, 1, 1, 1], "main_cpu": [0.5, 0.5, 0.3, 0.1], "waiting": [busy, 0, 0, 1]}
        step["uplink_bytes"] = [busy * 10e6, 20e6]
    contender["needed"]["forward"] -= 4e6
    found = measure_run({"setting": asdict(setting), "contenders": [contender]}, cores=2)[0]
    assert found.rounds == ((2.0, 4.0), (3.0, 5.0))
    assert (found.median, found.percentile(10), found.percentile(90)) == pytest.approx((3.5, 2.3, 4.7))
    assert found.samples_per_second == pytest.approx(400 / 3.5)
    assert found.uplink == (25e6, 20e6)
    assert found.wire == pytest.approx(1.0)  # 25 MB at 200 Mbit/s
    assert found.compute == pytest.approx(2.75)  # (2.5 + 3) / 2 cores
    assert (found.bound, found.bound_name) == (found.compute, "compute")
    assert found.bound_ratio == pytest.approx(3.5 / 2.75)
    assert found.imbalance == pytest.approx(np.median([0.6 / s for s in (2.0, 4.0, 3.0, 5.0)]))
    assert found.waiting == pytest.approx(np.median([0.5, 0.75, 1.0, 1.25]))
    assert sum(found.across.values()) == pytest.approx(40e6)
    assert found.counted_ratio == pytest.approx(40 / 38)
    assert found.counters_ratio == pytest.approx(22.5 / 38)
    assert found.peak_memory == 3e8


def test_without_limit_or_uplink_the_bound_is_the_compute() -> None:
    found = measured("sptt", [1.5], setting=Setting(mbit_per_s=None))
    assert found.wire is None
    assert (found.bound, found.bound_name) == (1.0, "compute")
    setting = Setting(steps_per_turn=1)
    contender = made_up("sptt", setting, seconds=[1.5])
    for absent in (None, []):
        contender["steps"][0]["uplink_bytes"] = absent
        found = measure_run({"setting": asdict(setting), "contenders": [contender]}, cores=2)[0]
        assert (found.uplink, found.wire, found.counters_ratio, found.bound) == ((), None, None, 1.0)


def test_one_host_needs_no_bytes() -> None:
    setting = Setting(hosts=1)
    run = {"setting": asdict(setting), "contenders": [made_up("sptt", setting, seconds=[1.0], across=0)]}
    found = measure_run(run, cores=2)[0]
    assert (found.counted_ratio, found.counters_ratio, found.wire) == (None, None, 0.0)


def test_best_flat_is_over_schemes_and_prefetch_at_one_precision() -> None:
    found = [
        measured("flat-tw", [3.0]),
        measured("flat-grid+prefetch", [2.0]),
        measured("flat-tw+fp16", [1.5]),
        measured("dmt-cr2", [1.0]),
        measured("sptt-2d", [0.5]),
    ]
    assert best_flat(found, "fp32") is found[1]
    assert best_flat(found, "fp16") is found[2]
    assert best_flat(found[3:], "fp32") is None
    assert fastest(found, "dmt", precision="fp32", compression=4) is None
    assert fastest(found, "sptt", precision="fp32") is None, "contenders with replicas are left out"


def test_speedup_and_its_interval() -> None:
    ours, flat = measured("dmt-cr2", [1.0, 2.0, 1.0]), measured("flat-tw", [2.0, 4.0, 2.0])
    found = speedup(ours, flat)
    assert found.ratio == 2.0
    assert found.interval == (2.0, 2.0), "rounds are drawn together: both are slow in the second one"
    # Of two rounds, a quarter of the draws takes the first twice, a quarter the second, the others both.
    uneven = speedup(measured("dmt-cr2", [1.0, 1.0]), measured("flat-tw", [2.0, 4.0]))
    assert uneven.ratio == 3.0
    assert uneven.interval == (2.0, 4.0)
    assert str(uneven) == "3.00 [2.00, 4.00]"
    assert speedup(measured("dmt-cr2", [1.0]), measured("flat-tw", [2.0])).interval is None
    stopped = speedup(measured("dmt-cr2", [1.0, 1.0]), measured("flat-tw", [2.0, 2.0, 9.0]))
    assert stopped.interval == (2.0, 2.0), "rounds that one of the two lacks are left out"


def test_a_stopped_run_has_the_contenders_that_are_whole() -> None:
    run = run_of(Setting(rounds=1), ["flat-tw", "sptt", "dmt-cr2"])
    run["contenders"][0]["steps"] = []
    run["contenders"][1] |= {"traffic": None, "needed": None}
    run["contenders"][2]["peak_memory_bytes"] = None
    assert [(found.name, found.peak_memory) for found in measure_run(run, cores=2)] == [("dmt-cr2", 0)]


def verdicts(goals: Sequence[Goal], start: str) -> list[tuple[bool | None, str]]:
    return [(goal.held, goal.measured) for goal in goals if goal.text.startswith(start)]


def test_goals_by_hand() -> None:
    found = [
        measured("flat-tw", [3.7]),
        measured("etc-cr2", [2.1]),
        measured("sptt", [3.9]),
        measured("dmt-cr2", [2.0]),
        measured("dmt-cr2+prefetch", [2.5]),
        measured("dmt-cr4", [1.0]),
    ]
    goals = judge(found, header_share=0.01)
    assert verdicts(goals, "DMT at CR 2 at least 1.85 x") == [(True, "1.85 (dmt-cr2 over flat-tw)")]
    assert verdicts(goals, "DMT at CR 4 at least 3 x") == [(True, "3.70 (dmt-cr4 over flat-tw)")]
    assert verdicts(goals, "DMT at CR 16 at least 6 x") == [(None, "")]
    assert verdicts(goals, "SPTT alone") == [(False, "0.95 (sptt over flat-tw)")]
    assert verdicts(goals, "DMT at CR 2 at least 1.1 x") == [(False, "1.05 (dmt-cr2 over etc-cr2)")]
    assert verdicts(goals, "bytes across") == [(True, "at most 0.0% (dmt-cr2); 3 of 3 hold")]
    assert verdicts(goals, "the same by") == [(True, "at most 0.0% (dmt-cr2); 3 of 3 hold")]
    # 40.4 MB take 1.616 s; computing takes 1 s.
    assert verdicts(goals, "step time") == [(False, "at most 2.41 x (sptt); 1 of 3 hold")]
    assert verdicts(goals, "no host idle") == [(True, "at most 0.0% (dmt-cr2); 3 of 3 hold")]
    assert [goal.verdict for goal in goals[:4]] == ["held", "held", "not measured", "**not held**"]


def test_goals_of_sending_each_input_once_by_hand() -> None:
    skewed = [measured("flat-tw-dp", [4.0]), measured("flat-tw", [9.0]), measured("sptt+unique", [1.6])]
    skewed += [measured("sptt+all", [1.25]), measured("sptt+fp16+all", [0.9])]
    distinct = [measured("dmt-cr2", [0.97]), measured("dmt-cr2+unique", [1.0])]
    requests = [measured("dmt-cr2", [1.8]), measured("dmt-cr2+unique", [1.0], across={"forward": 20e6})]
    goals = judge_unique(skewed, distinct, requests)
    assert [(goal.held, goal.measured) for goal in goals] == [
        (True, "2.50 (sptt+unique over flat-tw-dp)"),
        (False, "3.20 (sptt+all over flat-tw-dp)"),
        (False, "0.97 (dmt-cr2+unique over dmt-cr2)"),
        (True, "1.80 (dmt-cr2+unique over dmt-cr2)"),
    ]
    assert "that is 1.80" in goals[3].text, "40 MB over 20, times 0.9"
    assert {goal.held for goal in judge_unique([], [], [])} == {None}


def test_bytes_too_few_and_too_many_are_seen() -> None:
    few = measured("sptt", [1.0], needed={"ids": 43e6})
    many = measured("dmt-cr2", [1.0], needed={"ids": 35e6})
    goal = next(goal for goal in judge([few, many]) if goal.text.startswith("bytes across"))
    assert (goal.held, goal.measured) == (False, "at most 14.3% (dmt-cr2); 0 of 2 hold")


def test_goals_without_contenders_are_not_measured() -> None:
    assert {goal.held for goal in judge([])} == {None}


def test_a_sweep_takes_the_main_run_in_and_puts_the_unlimited_rate_last() -> None:
    jobs = [*main_jobs(FLATS, rounds=1), *sweep_jobs("rate", flat="flat-cw", rounds=1)]
    sweep = make_sweep("rate", [run_of_job(job) for job in jobs], cores=2)
    assert sweep is not None
    assert [point.value for point in sweep.points] == [100, 200, 500, 1000, None]
    assert sweep.names == ("flat-cw", "sptt+all", "dmt-cr2+all", "dmt-cr16+all+rank-towers")
    lines = sweep_table(sweep).splitlines()
    assert lines[0] == "| contender | 100 Mbit/s | 200 Mbit/s | 500 Mbit/s | 1000 Mbit/s | unlimited |"
    assert "(1.00 x; " in lines[2]
    assert compute_table(sweep).splitlines()[2].startswith("| flat-cw | 1.1")
    assert compute_table(replace(sweep, points=sweep.points[-1:])) == "", "nothing to compare with"
    assert make_sweep("hosts", [run_of_job(job) for job in jobs], cores=2) is None


def test_chosen_contenders_are_one_of_each_kind() -> None:
    names = [found.name for found in chosen(measure_run(run_of_job(main_jobs(FLATS, rounds=2)[0]), cores=2))]
    assert len([name for name in names if name.startswith("flat")]) == 6, "five schemes, and the best with FP16"
    ours = [parse_contender(name) for name in names if name.startswith(("sptt", "dmt"))]
    kinds = [(one.family, one.precision, one.compression) for one in ours]
    assert len(kinds) == len(set(kinds)) == 10, "SPTT and four ratios, in both formats"
    assert not any("2d" in name for name in names)


def test_the_jobs_of_the_study() -> None:
    jobs = [*main_jobs(FLATS, rounds=5), *(j for p in SWEEPS for j in sweep_jobs(p, flat="flat-tw", rounds=2))]
    jobs += unique_jobs(rounds=5)
    assert len({job.name for job in jobs}) == len(jobs)
    assert main_jobs(FLATS, rounds=7)[0].setting == Setting(rounds=7, steps_per_turn=1), (
        "the goals are for the setting's own values"
    )
    everyone = (*FLAT_CONTENDERS, *MAIN_CONTENDERS)
    ways = [name for name in FLAT_CONTENDERS if "fp16" not in name]
    assert len(ways) == 14, (
        "five schemes, two with small tables data-parallel, one plan of TorchRec's, most with prefetch"
    )
    assert len(FLAT_CONTENDERS) == 28, "with and without FP16"
    assert len(set(everyone)) == len(everyone)
    assert all(parse_contender(name).name == name for name in everyone)
    assert sum(job.estimate for job in [*jobs, *flat_jobs(rounds=3)]) < 90 * 60
    assert {job.part for job in quick_jobs(PARTS)} == set(PARTS)
    assert sum(job.estimate for job in quick_jobs(PARTS)) < 5 * 60


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("results")
    jobs = [
        *flat_jobs(rounds=2),
        *main_jobs(FLATS, rounds=3),
        *(j for p in SWEEPS for j in sweep_jobs(p, flat="flat-tw", rounds=2)),
    ]
    jobs += unique_jobs(rounds=2)
    write_results([run_of_job(job) for job in jobs], out, about={"machine": "made up"}, cores=2)
    return out


def test_page_json_and_pictures_are_written(written: Path) -> None:
    names = {path.name for path in written.iterdir()}
    pictures = {f"train_step_{name}.png" for name in ("steps", "bytes", "sweeps")}
    assert names == {"train_step.json", "train_step.md"} | pictures
    assert all((written / name).stat().st_size > 10_000 for name in pictures)
    record = json.loads((written / "train_step.json").read_text())
    assert record["about"] == {"machine": "made up", "cores": 2}
    assert [run["part"] for run in record["runs"]].count("rate") == 4
    page = (written / "train_step.md").read_text()
    assert page.isascii()
    assert "Not measured" not in page
    assert all(f"({name})" in page for name in pictures)
    assert "| **flat-" in page.partition("## All flat contenders")[2]
    assert "| sptt-2d+all |" in page.partition("## Replicas")[2]
    assert "compute alone s, unlimited" in page
    assert page.count("local batch 4,096, skewed ids, requests of 8 samples.") == 1
    assert "1.300 s (1.30 x bytes / rate) with PyTorch" in page


def test_missing_parts_are_left_out_with_a_word(tmp_path: Path) -> None:
    main = run_of_job(main_jobs(FLATS, rounds=1)[0])
    paths = write_results([main], tmp_path, about={}, cores=2)
    assert [path.name for path in paths][2:] == ["train_step_steps.png", "train_step_bytes.png"]
    assert paths[1].read_text().count("Not measured.") == 3
    runs = [run_of_job(job) for job in sweep_jobs("batch", flat="flat-tw", rounds=1)]
    paths = write_results(runs, tmp_path, about={}, cores=2)
    assert [path.name for path in paths][2:] == ["train_step_sweeps.png"]
    assert not (tmp_path / "train_step_steps.png").exists(), "a picture of another record is not left lying"
    assert "The main run has not been measured." in paths[1].read_text()
    main["contenders"] = [{**main["contenders"][0], "steps": []}]
    main["wire"] = None
    assert "has not been measured" in write_results([main], tmp_path, about={}, cores=2)[1].read_text()


def test_a_run_without_hosts_of_its_own_is_written(tmp_path: Path) -> None:
    run = run_of(Setting(mbit_per_s=None, rounds=1), ["flat-tw", "dmt-cr2"])
    for contender in run["contenders"]:
        for step in contender["steps"]:
            step["uplink_bytes"] = None
    page = write_results([{"part": "main", **run, "wire": None}], tmp_path, about={}, cores=2)[1].read_text()
    assert "unlimited link" in page
    assert "The bare wire was not measured." in page


class Runner:
    """Stands in for `benchmarks.train_step.run_setting`; fails at the batches it is told."""

    def __init__(self) -> None:
        self.ran: list[tuple[Setting, tuple[str, ...]]] = []
        self.failing: set[int] = set()

    def __call__(self, setting: Setting, contenders: Sequence[Contender], out: Path) -> dict[str, Any]:
        names = tuple(contender.name for contender in contenders)
        self.ran.append((setting, names))
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("{}")
        if setting.batch_size in self.failing:
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


def test_a_stopped_study_goes_on(tmp_path: Path, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    runner.failing = {512}
    code, output = invoke(tmp_path, "--part", "main", "--part", "batch")
    assert code == 1
    assert "About" in output
    assert "batch-512: failed. rank 3 is gone" in output
    assert "Failed: batch-512" in output
    assert len(runner.ran) == 5
    assert (tmp_path / "out" / "train_step_sweeps.png").exists()

    # Pictures take seconds, and these are not looked at.
    monkeypatch.setattr(bench, "write_results", lambda *runs, **facts: [])
    runner.ran, runner.failing = [], set()
    code, output = invoke(tmp_path, "--part", "batch")
    assert code == 0
    assert [setting.batch_size for setting, _ in runner.ran] == [512]
    assert output.count("done before") == 3
    assert not list((tmp_path / "work").glob("*.partial.json"))

    runner.ran = []
    invoke(tmp_path, "--part", "main", "--rounds", "7")
    assert [setting.rounds for setting, _ in runner.ran] == [7], "five rounds are not seven"
    invoke(tmp_path, "--part", "main")
    assert len(runner.ran) == 1, "seven rounds are more than five"
    invoke(tmp_path, "--part", "main", "--again")
    assert len(runner.ran) == 2


def test_a_study_whose_first_job_fails_says_so(tmp_path: Path, runner: Runner) -> None:
    runner.failing = {4096}
    code, output = invoke(tmp_path, "--part", "main")
    assert code == 1
    assert "main: failed. rank 3 is gone" in output
    assert "Failed: main. What is done is written" in output
    assert not (tmp_path / "out").exists()


def test_sweeps_take_the_flat_contender_that_won(
    tmp_path: Path, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "write_results", lambda *runs, **facts: [])
    invoke(tmp_path, "--part", "main", "--part", "hosts")
    main = json.loads((tmp_path / "work" / "main.json").read_text())["run"]
    winner = best_flat(measure_run(main, cores=2), "fp32")
    assert winner is not None
    assert {contenders[0] for _, contenders in runner.ran[1:]} == {winner.name}


def test_only_write_runs_nothing(tmp_path: Path, runner: Runner) -> None:
    code, output = invoke(tmp_path, "--only-write")
    assert code == 2
    assert "holds no finished job of this study. Run one without --only-write first." in " ".join(output.split())
    invoke(tmp_path, "--part", "rate", "--sweep-rounds", "1")
    ran = len(runner.ran)
    assert invoke(tmp_path, "--only-write")[0] == 0
    assert len(runner.ran) == ran == 4


def test_ids_of_another_kind_keep_to_their_own_files(tmp_path: Path, runner: Runner) -> None:
    code, _ = invoke(tmp_path, "--part", "rate", "--ids", "uniform", "--sweep-rounds", "1")
    assert code == 0
    assert {setting.ids for setting, _ in runner.ran} == {"uniform"}
    assert len(list((tmp_path / "work" / "uniform").glob("rate-*.json"))) == 4
    assert (tmp_path / "out" / "train_step_uniform.md").exists()


def test_quick_keeps_to_its_folder(tmp_path: Path, runner: Runner) -> None:
    code, _ = invoke(tmp_path, "--quick")
    assert code == 0
    assert (tmp_path / "work" / "quick" / "train_step.md").exists()
    assert not (tmp_path / "out").exists()
    assert all(setting.rounds == 1 for setting, _ in runner.ran)
