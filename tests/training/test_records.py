"""What a run leaves behind, and how a run that was killed goes on with it."""

from __future__ import annotations

import json
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
from dmt.training.records import (
    RunRecord,
    check_records,
    compression_warning,
    read_curves,
    read_result,
    result_warnings,
)
from dmt.training.resume import begin_anew
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
    lines = (killed / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [10, 20, 20, 30, 40]


@pytest.mark.parametrize("step", [0, 9, 10, 30, 31])
def test_lines_up_to_the_step_itself_stay(killed: Path, step: int) -> None:
    record_of(killed, resumed_step=step)
    wanted = [(at, float(at)) for at in (10, 20, 30) if at <= step]
    assert read_curves(killed).get("train/loss", []) == wanted


def test_what_is_there_at_the_step_is_not_recorded_twice(killed: Path) -> None:
    record = record_of(killed, resumed_step=20)
    record.scalars(20, {"eval/auc": 0.75, "eval/ne": 0.9})
    record.scalars(20, {"eval/auc": 0.75})
    record.scalars(30, {"eval/auc": 0.625})
    record.close({})
    for curves in (read_curves(killed), {name: board(killed, name) for name in ("eval/auc", "eval/ne")}):
        assert curves["eval/auc"] == [(20, 0.5), (30, 0.625)]
        assert curves["eval/ne"] == [(20, pytest.approx(0.9))]


def test_it_can_go_on_many_times(tmp_path: Path) -> None:
    for attempt in range(4):
        record = record_of(tmp_path, resumed_step=10 * attempt or None)
        losses(record, range(10 * attempt + 10, 10 * attempt + 40, 10), factor=1.0 + attempt)
    expected = [(10, 10.0), (20, 40.0), (30, 90.0), (40, 160.0), (50, 200.0), (60, 240.0)]
    assert read_curves(tmp_path)["train/loss"] == board(tmp_path, "train/loss") == expected


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


FOREIGN = ["metrics.jsonl", "result.json", "affinity.npz", "sharding.json", "tensorboard/events.out.tfevents.1"]


@pytest.mark.parametrize("name", [*FOREIGN, "config.toml"])
def test_what_no_run_has_left_is_refused_before_anything_is_deleted(tmp_path: Path, name: str) -> None:
    config = small("dlrm", train={"output_dir": str(tmp_path), "affinity_rows": 9, "resume": "never"})
    for path in (tmp_path / "checkpoint" / "not ours", tmp_path / name):
        path.parent.mkdir(exist_ok=True)
        path.write_text("[train]\nepochs = 2\n")
    before = {path for path in tmp_path.rglob("*")}
    why = "is not what a run has left there: .* no config\\.toml of"
    if name == "config.toml":
        why = "is no config that a run has left there, and a new run would replace it"
    with pytest.raises(InputError, match=rf"{name.split('/')[0]} {why}"):
        begin_anew(config, "", is_restart=False)
    assert {path for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "tensorboard", "config.toml"])
def test_nothing_is_deleted_or_replaced_through_a_link(killed: Path, name: str) -> None:
    check_records(config_of(killed))
    (killed / name).unlink(missing_ok=True) if name != "tensorboard" else (killed / name).rename(killed / "moved")
    (killed / name).symlink_to("moved")  # for the others a link to nothing
    with pytest.raises(InputError, match=rf"{name} is a link: a run deletes and replaces nothing through a link"):
        check_records(config_of(killed))


def test_files_that_a_run_leaves_alone_may_be_anybodys(tmp_path: Path) -> None:
    for name in ("affinity.npz", "sharding.json", "notes.txt"):
        (tmp_path / name).touch()
    plan = str(tmp_path / "sharding.json")
    check_records(small(train={"output_dir": str(tmp_path)}, sharding={"plan": plan}))


def test_what_is_said_shows_control_characters_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_of(tmp_path).say(["goes on from a\x1b[2J"])
    assert capsys.readouterr().out == "# goes on from a\\x1b[2J\n"


def test_a_run_that_left_nothing_goes_on_too(tmp_path: Path) -> None:
    losses(record_of(tmp_path, resumed_step=100), range(110, 120, 10))
    assert read_curves(tmp_path) == {"train/loss": [(110, 110.0)]}


def test_a_failed_rewrite_leaves_the_lines_as_they_were(killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (killed / "metrics.jsonl").read_text()
    with monkeypatch.context() as patched:
        patched.setattr(
            Path, "write_text", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
        with pytest.raises(InputError, match="cannot be written: No space left"):
            record_of(killed, resumed_step=20)
    assert (killed / "metrics.jsonl").read_text() == before


def test_an_unfinished_last_line_is_not_read(killed: Path) -> None:
    assert read_curves(killed) == {"train/loss": [(10, 10.0), (20, 20.0), (30, 30.0)], "eval/auc": [(20, 0.5)]}


def test_other_ranks_touch_nothing(killed: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in killed.rglob("*")}
    record = RunRecord(config_of(killed), enabled=False, resumed_step=10)
    losses(record, range(20, 30))
    record.close({})
    assert {path: path.stat().st_mtime_ns for path in killed.rglob("*")} == before


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
    return tmp_path


def test_numbers_wait_until_there_is_room(long_run: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = long_run / "metrics.jsonl"
    record = record_of(long_run, resumed_step=1000)
    for first in (1000, 1020):
        size = metrics.stat().st_size
        # Half of the next line finds room.
        with files_up_to(size + 20):
            losses(record, range(first + 1, first + 5))
        assert size < metrics.stat().st_size <= size + 20
        losses(record, range(first + 5, first + 7))
        assert len(caplog.messages) == 1, "once for each time that the disk is full"
        assert f"{long_run} cannot be written to ([Errno 27] File too large). Training goes on" in caplog.messages[0]
        caplog.clear()
    record.close({"steps": 1026})
    added = [(step, float(step)) for first in (1000, 1020) for step in range(first + 1, first + 7)]
    assert read_curves(long_run)["train/loss"][1000:] == board(long_run, "train/loss") == added
    assert read_result(long_run)["steps"] == 1026


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
    assert "Training goes on; metrics.jsonl has all numbers, TensorBoard only those up to now" in caplog.messages[0]
    assert read_curves(tmp_path)["train/loss"] == [(step, float(step)) for step in range(1, 206)]
    assert board(tmp_path, "train/loss") == [(step, float(step)) for step in range(1, 200)]
    assert "steps" in read_result(tmp_path)


def test_a_result_without_room_is_printed(long_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = record_of(long_run, resumed_step=1000)
    losses(record, range(1001, 1002))
    with files_up_to((long_run / "metrics.jsonl").stat().st_size):
        losses(record, range(1002, 1004))
    # Under the limit the result itself does not fit either.
    with (
        files_up_to(20),
        pytest.raises(InputError, match=r"result\.json cannot be written: File too large\. .* printed; make room"),
    ):
        record.close({"steps": 1003})
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["step"] for line in lines[:2]] == [1002, 1003]
    assert json.loads("".join(lines[2:]))["steps"] == 1003
    assert not (long_run / "result.json").exists()


GARBAGE = ["", "\0" * 9, "loss 0.3", '{"train/loss": 1.0}', '{"step": "2", "a": 1.0}', "[" * 10_000, "9" * 5_000]


@pytest.mark.parametrize("line", [*GARBAGE, '{"step": 20, "eval/auc": [0.5]}'], ids=range(len(GARBAGE) + 1))
def test_lines_that_are_no_records_are_left_out_and_told(
    line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses(record_of(tmp_path), range(10, 30, 10))
    path = tmp_path / "metrics.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + line.encode() + b"\n" + second + b"\xff\n")
    assert read_curves(tmp_path) == {"train/loss": [(10, 10.0), (20, 20.0)]}
    assert f"{path}: 2 of its lines are no records of a run and are left out: line 2, line 4." in caplog.text
    losses(record_of(tmp_path, resumed_step=20), range(30, 40, 10))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 20, 30]


def test_hot_rows_that_are_none_are_remarked_on() -> None:
    result = {"eval_auc": 0.7, "eval_ne": 0.9, "compression_ratio": 1.0, "hot_rows": {"rows": 0}}
    assert "No row had a copy: rows are chosen for the first time after 100 steps" in result_warnings(result)[0]
    assert result_warnings({**result, "hot_rows": {"rows": 1}}) == []


def test_towers_that_send_next_to_nothing_are_remarked_on() -> None:
    assert compression_warning(16.0) == ""
    assert "send 1 of 33 numbers of their embeddings" in compression_warning(33.0)
    assert "model.tower_dim" in compression_warning(33.0)
