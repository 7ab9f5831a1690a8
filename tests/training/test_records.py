"""What a run leaves behind, and how a run that was killed goes on with it."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dmt.errors import InputError
from dmt.testing.ranks import RanksFailedError
from dmt.training.records import RunRecord, quality_warnings, read_curves, read_result
from tests.ranks import run_ranks
from tests.training.small import files_up_to, small


def record_of(folder: Path, **more: Any) -> RunRecord:
    return RunRecord(small(train={"output_dir": str(folder)}), enabled=True, **more)


def losses(record: RunRecord, steps: range, factor: float = 1.0) -> None:
    for step in steps:
        record.scalars(step, {"train/loss": factor * step})


def test_curves_stay_up_to_the_step_that_a_run_goes_on_from(tmp_path: Path) -> None:
    record = record_of(tmp_path)
    losses(record, range(10, 40, 10))
    record.scalars(20, {"eval/auc": 0.5})
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 2')  # killed in the middle of a line
    record = record_of(tmp_path, resumed_step=20)
    assert read_curves(tmp_path) == {"train/loss": [(10, 10.0), (20, 20.0)], "eval/auc": [(20, 0.5)]}
    losses(record, range(30, 50, 10), factor=2.0)
    assert read_curves(tmp_path)["train/loss"] == [(10, 10.0), (20, 20.0), (30, 60.0), (40, 80.0)]
    losses(record_of(tmp_path), range(5, 6))
    assert read_curves(str(tmp_path)) == {"train/loss": [(5, 5.0)]}, "a run of its own starts anew"


def test_numbers_that_are_not_finite_are_null_and_not_recorded_again(tmp_path: Path) -> None:
    for resumed_step in (0, 5):
        record_of(tmp_path, resumed_step=resumed_step).scalars(5, {"eval/auc": math.nan})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 5, "eval/auc": null}\n'
    assert math.isnan(read_curves(tmp_path)["eval/auc"][0][1])


def test_the_runs_of_a_demo_leave_stdout_to_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DMT_LAUNCHER", "1")
    record_of(tmp_path).say(["step 1"])
    assert capsys.readouterr() == ("", "# step 1\n")


MADE = {"steps": 20, "world_size": 4, "device": "cpu"}


@pytest.mark.parametrize("case", [(20, {}, 9), (0, {}, 1), *((20, {key: 2}, 1) for key in MADE)], ids=str)
def test_an_earlier_result_goes_but_for_its_speeds(tmp_path: Path, case: tuple[int, dict[str, Any], float]) -> None:
    resumed_step, other, seconds = case
    record_of(tmp_path).close({**MADE, "seconds": 9.0, "eval_auc": math.nan})
    assert '"eval_auc": null' in (tmp_path / "result.json").read_text()
    assert math.isnan(read_result(tmp_path)["eval_auc"])
    (tmp_path / "sharding.json").touch()
    record = record_of(tmp_path, resumed_step=resumed_step)
    assert not (tmp_path / "result.json").exists()
    record.sharding(None)
    record.close({**MADE, **other, "seconds": 1.0})
    assert read_result(tmp_path)["seconds"] == seconds
    assert {path.name for path in tmp_path.iterdir()} == {"config.toml", "metrics.jsonl", "result.json"}


def test_what_is_no_better_than_chance_is_told() -> None:
    quality = [(0.53, 1.05), (0.52, 1.0), (math.nan, math.nan), (0.9, 1.06)]
    assert [len(quality_warnings(*values)) for values in quality] == [0, 1, 1, 1]


def recording_until_killed(rank: int, folder: Path) -> None:
    record_of(folder).scalars(1, {f"n{i:02}": float(i) for i in range(40)})
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.ranks
def test_a_kill_loses_nothing_that_was_recorded(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match="died with exit code -9"):
        run_ranks(recording_until_killed, 1, tmp_path, fresh=True)
    assert read_curves(tmp_path) == {f"n{i:02}": [(1, float(i))] for i in range(40)}


def test_numbers_without_room_are_logged_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = record_of(tmp_path)
    losses(record, range(1, 201))
    metrics = tmp_path / "metrics.jsonl"
    with files_up_to(metrics.stat().st_size + 20):
        losses(record, range(201, 203))
        with pytest.raises(InputError, match=r"result\.json: cannot be written .*File too large"):
            record.close({"steps": 202, "long": "x" * metrics.stat().st_size})
    assert not (tmp_path / "result.json").exists()
    losses(record, range(203, 205))
    left_out = [json.loads(text.partition("Not recorded: ")[2])["step"] for text in caplog.messages]
    assert left_out == [201, 202]
    # Half of a line found room, before the next.
    assert read_curves(tmp_path)["train/loss"][199:] == [(200, 200.0), (203, 203.0), (204, 204.0)]


@pytest.mark.parametrize("line", ["\0" * 9, "7", '{"train/loss": 1.0}', '{"step": "2", "a": 1.0}'])
def test_lines_that_are_no_records_are_left_out(line: str, tmp_path: Path) -> None:
    losses(record_of(tmp_path), range(10, 30, 10))
    path = tmp_path / "metrics.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + line.encode() + b"\n" + second + b"\xff\n")
    assert read_curves(tmp_path) == {"train/loss": [(10, 10.0), (20, 20.0)]}
