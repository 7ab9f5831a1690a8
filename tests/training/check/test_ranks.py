"""However ranks end, the parent says so and leaves no process behind."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dmt.errors import InputError
from dmt.testing.ranks import Rank, RanksFailedError, end_ranks, run_on_ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    before = set(mp.active_children())  # those of `tests.ranks`
    yield
    assert not set(mp.active_children()) - before


def ends(rank: int, how: str) -> int:
    dist.barrier()
    if rank == 1:
        match how:
            case "raises":
                raise ArithmeticError("one divided by nothing")
            case "bad input":
                raise InputError("towers.plan is bad.")
            case "dies":
                os._exit(7)
    if how == "hangs":
        # Longer than a test may take: whoever waits for the end fails.
        time.sleep(3600 if rank == 1 else 0)
    elif how != "well":
        dist.barrier()
    return rank * 10


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("raises", RanksFailedError, r"(?s)^Rank 1 failed\..*in ends.*ArithmeticError: one divided by nothing$"),
        ("dies", RanksFailedError, r"^Rank 1 died with exit code 7\.$"),
        ("bad input", InputError, r"^towers\.plan is bad\.$"),
        ("hangs", RanksFailedError, r"^After 3 s these ranks still run: [01, ]+\. Raise timeout_s"),
    ],
)
def test_the_rank_that_fails_is_named(how: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        run_on_ranks(ends, 2, how, timeout_s=3 if how == "hangs" else 30)


def test_an_interrupt_ends_them() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(KeyboardInterrupt):
            run_on_ranks(ends, 2, "hangs", timeout_s=60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def look(rank: int, change: bool) -> tuple[int, str, dict[str, str | None], list[float]]:
    """This process's number, its folder, some environment variables, and what the generators draw."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LEFT_BEHIND")
    found = (os.getpid(), os.getcwd(), {name: os.environ.get(name) for name in names})
    draws = [torch.rand(()).item(), random.random(), np.random.rand()]
    if change:
        os.chdir("/")
        os.environ["LEFT_BEHIND"] = os.environ["RANK"] = "here"
    dist.barrier()
    return *found, draws


def test_processes_serve_one_call_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: list[Rank] = []
    pids, first = [], None
    for world_size, folder in ((2, Path.cwd()), (3, tmp_path), (1, Path.cwd()), (2, Path.cwd())):
        monkeypatch.chdir(folder)
        answers = run_on_ranks(look, world_size, True, timeout_s=30, ranks=ranks)
        for rank, (pid, where, environment, draws) in enumerate(answers):
            pids.append(pid)
            place = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
            assert where == str(folder)
            assert environment == {**place, **{f"LOCAL_{k}": v for k, v in place.items()}, "LEFT_BEHIND": None}
            first = first or draws
            assert draws == first, "generators begin like those of a fresh process"
    assert pids == [*pids[:2], *pids[2:5], pids[2], *pids[2:4]]
    assert pids[:2] == pids[2:4]
    with pytest.raises(RanksFailedError, match=r"^Rank 1 failed"):
        run_on_ranks(ends, 2, "raises", timeout_s=30, ranks=ranks)
    after = [pid for pid, *_ in run_on_ranks(look, 3, False, timeout_s=30, ranks=ranks)]
    assert not set(after) & set(pids), "after a failure the processes are others"
    # One that dies between calls is noticed by the next.
    os.kill(after[1], signal.SIGKILL)
    with pytest.raises(RanksFailedError, match=r"^Rank 1 died with exit code -9\.$"):
        run_on_ranks(look, 2, False, timeout_s=30, ranks=ranks)
    assert len(run_on_ranks(look, 2, False, timeout_s=30, ranks=ranks)) == 2
    end_ranks(ranks)
