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
from dmt.testing.ranks import RankPool, RanksFailedError, run_on_ranks, say
from tests.ranks import loaded_modules, run_ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    before = set(mp.active_children())  # those of `tests.ranks`
    yield
    assert not set(mp.active_children()) - before


def ends(rank: int, how: str) -> int:
    dist.barrier()
    say("the middle")
    if rank == 1:
        if how == "raises":
            raise ArithmeticError("one divided by nothing")
        if how == "bad input":
            raise InputError("towers.plan is bad.")
        if how == "dies":
            os._exit(7)
        if how == "hangs":
            time.sleep(60)
    if how != "well":
        dist.barrier()
    return rank * 10


def test_results_come_by_rank() -> None:
    assert run_on_ranks(ends, 3, "well", timeout_s=30) == [0, 10, 20]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", r"(?s)^Rank 1 failed while it was at: the middle\..*ArithmeticError: one divided by nothing$"),
        ("dies", r"^Rank 1 died with exit code 7 while it was at: the middle\.$"),
    ],
)
def test_the_rank_that_fails_is_named(how: str, message: str) -> None:
    with pytest.raises(RanksFailedError, match=message):
        run_on_ranks(ends, 2, how, timeout_s=30)


def test_a_fault_of_the_user_stays_one() -> None:
    with pytest.raises(InputError, match=r"^towers\.plan is bad\.$"):
        run_on_ranks(ends, 2, "bad input", timeout_s=30)


def hangs(rank: int) -> None:
    say("the beginning")
    if rank != 1:
        say("the middle")
    # Longer than a test may take: whoever waits for the end fails.
    time.sleep(3600)


def test_an_interrupt_ends_them() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(KeyboardInterrupt):
            run_on_ranks(hangs, 2, timeout_s=60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_the_rank_that_hangs_is_named() -> None:
    with pytest.raises(RanksFailedError, match=r"^Nothing was heard of rank 1 for 2 s; it was at: the beginning\."):
        run_on_ranks(hangs, 2, timeout_s=2)


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


def test_a_pool_serves_one_call_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RankPool({"LOCAL_WORLD_SIZE": "7"}) as pool:
        pids, first = [], None
        for world_size, folder in ((2, Path.cwd()), (3, tmp_path), (1, Path.cwd()), (2, Path.cwd())):
            monkeypatch.chdir(folder)
            for rank, (pid, where, environment, draws) in enumerate(pool.run(look, world_size, True, timeout_s=30)):
                pids.append(pid)
                assert where == str(folder)
                assert environment == {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": "7",
                    "LEFT_BEHIND": None,
                }
                first = first or draws
                assert draws == first, "generators begin like those of a fresh process"
        assert pids == [*pids[:2], *pids[2:5], pids[2], *pids[2:4]]
        assert pids[:2] == pids[2:4]
        with pytest.raises(RanksFailedError, match=r"^Rank 1 failed") as failure:
            pool.run(ends, 2, "raises", timeout_s=30)
        assert "in ends" in "".join(failure.value.__notes__)
        after = [pid for pid, *_ in pool.run(look, 3, False, timeout_s=30)]
        assert not set(after) & set(pids), "after a failure the processes are others"
        # One that dies between calls is noticed by the next.
        os.kill(after[1], signal.SIGKILL)
        with pytest.raises(RanksFailedError, match=r"^Rank 1 died with exit code -9 while it was at: starting\.$"):
            pool.run(look, 2, False, timeout_s=30)
        assert len(pool.run(look, 2, False, timeout_s=30)) == 2


def test_ranks_of_tests_find_the_test_modules_loaded() -> None:
    """A module that cannot be imported in the process that ranks are forked from is left out in silence."""
    assert {"pytest", "torchrec", __name__} <= set(run_ranks(loaded_modules, 1, fresh=True)[0])
