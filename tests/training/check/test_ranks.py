"""However ranks end, the parent says so and leaves no process behind."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from dmt.errors import InputError
from dmt.testing.ranks import RanksFailedError, Say, run_on_ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    assert not mp.active_children()


def ends(rank: int, say: Say, how: str) -> int:
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


def hangs(rank: int, say: Say) -> None:
    say("the beginning")
    if rank != 1:
        say("the middle")
    time.sleep(60)


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
    began = time.monotonic()
    with pytest.raises(RanksFailedError, match=r"^Nothing was heard of rank 1 for 2 s; it was at: the beginning\."):
        run_on_ranks(hangs, 2, timeout_s=2)
    assert time.monotonic() - began < 20
