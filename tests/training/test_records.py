"""What a run leaves behind, and how a run that was killed goes on with it."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from dmt.errors import InputError
from dmt.training.config import TrainingConfig
from dmt.training.records import RunRecord, read_curves, read_result
from tests.training.small import small


@pytest.fixture(autouse=True)
def event_files_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard reads event files by name: second, process, number as text; restarts take more than a second."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(100))


def config_of(folder: Path) -> TrainingConfig:
    return small(train={"output_dir": str(folder)})


def record_of(folder: Path, **more: Any) -> RunRecord:
    return RunRecord(config_of(folder), enabled=True, **more)


def losses(record: RunRecord, steps: range, factor: float = 1.0) -> None:
    for step in steps:
        record.scalars(step, {"train/loss": factor * step})


def board(folder: Path, name: str) -> list[tuple[int, float]]:
    """What TensorBoard shows of a curve."""
    shown = EventAccumulator(str(folder / "tensorboard")).Reload()
    return [(event.step, event.value) for event in shown.Scalars(name)]


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """What an attempt of 30 steps left that was killed in the middle of a line."""
    record = record_of(tmp_path)
    losses(record, range(10, 40, 10))
    record.scalars(20, {"eval/auc": 0.5})
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 2')
    return tmp_path


def test_curves_stay_up_to_the_step_that_a_run_goes_on_from(killed: Path) -> None:
    record = record_of(killed, resumed_step=20)
    assert read_curves(killed) == {"train/loss": [(10, 10.0), (20, 20.0)], "eval/auc": [(20, 0.5)]}
    losses(record, range(30, 50, 10), factor=2.0)
    record.close({"steps": 40})
    expected = [(10, 10.0), (20, 20.0), (30, 60.0), (40, 80.0)]
    assert read_curves(killed)["train/loss"] == board(killed, "train/loss") == expected
    assert read_curves(killed)["eval/auc"] == board(killed, "eval/auc") == [(20, 0.5)]


def test_a_run_of_its_own_starts_anew(killed: Path) -> None:
    losses(record_of(killed), range(5, 6))
    assert read_curves(killed) == {"train/loss": [(5, 5.0)]}
    assert board(killed, "train/loss") == [(5, 5.0)]


@pytest.mark.parametrize("resumed_step", [None, 20])
def test_an_earlier_result_goes_and_a_new_one_is_written(tmp_path: Path, resumed_step: int | None) -> None:
    record_of(tmp_path).close({"steps": 10})
    record = record_of(tmp_path, resumed_step=resumed_step)
    assert not (tmp_path / "result.json").exists()
    record.close({"steps": 20})
    assert read_result(tmp_path)["steps"] == 20
    assert {path.name for path in tmp_path.iterdir()} == {"config.toml", "result.json", "tensorboard"}


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "tensorboard"])
def test_what_no_run_has_left_is_refused_before_anything_is_deleted(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("ours")
    with pytest.raises(InputError, match=rf"{name} is not what a run has left there: .* has no config\.toml"):
        record_of(tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["ours"]


def recording_until_killed(folder: Path) -> None:
    record_of(folder).scalars(1, {f"n{i:02}": float(i) for i in range(40)})
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_loses_nothing_that_was_recorded(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=recording_until_killed, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert read_curves(tmp_path) == {f"n{i:02}": [(1, float(i))] for i in range(40)}
    assert board(tmp_path, "n39") == [(1, 39.0)]


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """No file grows further, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def long_run(tmp_path: Path) -> Path:
    """Its numbers take so much room that TensorBoard's new file is far smaller."""
    text = "".join(json.dumps({"step": step, "train/loss": float(step)}) + "\n" for step in range(1000))
    (tmp_path / "metrics.jsonl").write_text(text)
    (tmp_path / "config.toml").touch()
    return tmp_path


def test_numbers_without_room_are_logged_and_later_ones_recorded(
    long_run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = long_run / "metrics.jsonl"
    record = record_of(long_run, resumed_step=1000)
    size = metrics.stat().st_size
    # Half of the next line finds room.
    with files_up_to(size + 20):
        losses(record, range(1001, 1003))
    assert size < metrics.stat().st_size <= size + 20
    losses(record, range(1003, 1005))
    record.close({"steps": 1004})
    left_out = [text.partition("Left out: ")[2] for text in caplog.messages]
    assert [json.loads(text)["step"] for text in left_out] == [1001, 1002]
    assert f"{metrics} cannot be written to ([Errno 27] File too large). Training goes on" in caplog.messages[0]
    assert read_curves(long_run)["train/loss"][1000:] == [(1003, 1003.0), (1004, 1004.0)]
    assert [step for step, _ in board(long_run, "train/loss")] == [1001, 1002, 1003, 1004]


def test_tensorboards_curves_end_where_its_file_cannot_grow_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = record_of(tmp_path)
    losses(record, range(1, 200))
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert events.stat().st_size > (tmp_path / "metrics.jsonl").stat().st_size + 200
    thread_failed = threading.Event()
    with monkeypatch.context() as full, files_up_to(events.stat().st_size + 10):
        full.setattr(threading, "excepthook", lambda _: thread_failed.set())
        losses(record, range(200, 204))
        assert thread_failed.wait(10), "TensorBoard could write"
    losses(record, range(204, 206))
    record.close({"steps": 205})
    assert len(caplog.messages) == 1
    assert "TensorBoard's curves end at step" in caplog.messages[0]
    assert read_curves(tmp_path)["train/loss"] == [(step, float(step)) for step in range(1, 206)]
    assert board(tmp_path, "train/loss") == [(step, float(step)) for step in range(1, 200)]
    assert "steps" in read_result(tmp_path)


def test_a_result_without_room_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = record_of(tmp_path)
    record.end()
    with (
        files_up_to(20),
        pytest.raises(InputError, match=r"result\.json: cannot be written .*File too large"),
    ):
        record.close({"steps": 1003, "eval_auc": math.nan})
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["eval_auc"]) == (1003, None)
    assert not (tmp_path / "result.json").exists()


GARBAGE = ["\0" * 9, "loss 0.3", '{"train/loss": 1.0}', '{"step": "2", "a": 1.0}', "[" * 10_000]


@pytest.mark.parametrize("line", GARBAGE, ids=range(len(GARBAGE)))
def test_lines_that_are_no_records_are_left_out_and_told(
    line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses(record_of(tmp_path), range(10, 30, 10))
    path = tmp_path / "metrics.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + line.encode() + b"\n" + second + b"\xff\n")
    assert read_curves(tmp_path) == {"train/loss": [(10, 10.0), (20, 20.0)]}
    assert f"{path}: no records of a run, left out: line 2, line 4." in caplog.text
    losses(record_of(tmp_path, resumed_step=20), range(30, 40, 10))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 20, 30]
