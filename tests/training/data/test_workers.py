"""Workers read what the rank itself would read, report faults alike, and are gone when the rank is."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dmt.errors import InputError
from dmt.training.data.config import DataConfig
from dmt.training.data.workers import BatchThread

from .helpers import criteo_line, numbered_lines, write

ROOT = Path(__file__).parents[3]


@contextmanager
def started(folder: Path, way: str) -> Iterator[subprocess.Popen[str]]:
    lines = numbered_lines(60)
    file = write(folder / "a.tsv", [*lines[:40], criteo_line("x"), *lines[40:]])
    command = [sys.executable, "-m", "tests.training.data.reading_ahead", file, way]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, start_new_session=True, **pipes) as program:
        try:
            yield program
        finally:
            program.kill()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_end(pids: list[int]) -> bool:
    deadline = time.monotonic() + 60
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_alive, pids))


def test_workers_read_what_the_rank_would_read_and_end_with_the_generator(tmp_path: Path) -> None:
    with started(tmp_path, "read") as program:
        printed, errors = program.communicate(timeout=120)
    assert program.returncode == 0, errors
    began, read, closed, died = map(json.loads, printed.splitlines())
    assert len(began["pids"]) == 3, "a fork server and two workers"
    assert read["same"]
    assert read["number"] > 10
    assert read["fault"].startswith(f"{tmp_path}/a.tsv, line 41: column label: expected 0 or 1, found 'x'. Fix")
    # Those that were told to stop by SIGTERM read on to the end; then only the server is left, until the rank ends.
    assert read["pids"] == closed["pids"] == began["pids"][:1]
    assert closed["kept"] == 1, "only the main process: nothing of a pass that was closed is kept to the end"
    assert all_end(began["pids"])
    # A worker that is killed, for want of memory say.
    place = rf"{tmp_path}/a\.tsv, from byte \d+ to \d+: "
    assert re.match(place + r"a worker process \(data\.workers=2\) died .* Set fewer data\.workers", died["error"])
    # And one that fails by a mistake in this library.
    assert re.search(place + r"cannot be read \(ZeroDivisionError: ", died["mistake"])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["error", "kill", "interrupt"])
def test_no_process_is_left_after_an_error_a_kill_or_ctrl_c(way: str, tmp_path: Path) -> None:
    with started(tmp_path, "error" if way == "error" else "wait") as program:
        assert program.stdout is not None
        pids = json.loads(program.stdout.readline())["pids"]
        assert len(pids) == 3
        if way == "kill":
            program.kill()
        elif way == "interrupt":
            os.killpg(program.pid, signal.SIGINT)  # the terminal tells all of them
        _, errors = program.communicate(timeout=120)
    wanted = {"error": "training has diverged", "kill": "", "interrupt": "KeyboardInterrupt"}[way]
    assert wanted in errors
    assert errors.count("Traceback") == (way != "kill"), errors
    assert all_end(pids)


def test_a_thread_makes_one_batch_ahead_and_raises_at_its_place() -> None:
    made: list[int] = []
    is_made = [threading.Event() for _ in range(5)]

    def batches(first: int) -> Iterator[int]:
        for number in range(first, 4):
            made.append(number)
            is_made[number].set()
            yield number
        made.append(4)
        is_made[4].set()
        raise InputError("line 5: no label")

    thread = BatchThread()
    ahead, other = thread.ahead(batches(0)), thread.ahead(batches(2))
    for number in range(2):
        assert next(ahead) == number
        assert is_made[number + 1].wait(60), "made while this one is used"
    # The other pass begins once the batch of the first that is being made is there, never beside it.
    assert next(other) == 2
    assert made[:4] == [0, 1, 2, 2]
    assert [next(ahead), next(ahead)] == [2, 3]
    with pytest.raises(InputError, match="line 5: no label"):
        next(ahead)
    assert next(ahead, None) is None
    other.close()
    assert made.count(0) == made.count(1) == 1


def test_workers_are_for_files() -> None:
    with pytest.raises(ValueError, match="workers has no meaning for kind='synthetic'"):
        DataConfig(workers=1)
