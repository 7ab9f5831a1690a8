"""Ranks of an attempt find each other in a store that a dead attempt has written to."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from dmt.errors import InputError
from dmt.training.device import restart_safe_store
from dmt.training.resume import open_lock


def attempt(store: dist.Store, world_size: int, order: list[int]) -> list[str]:
    """What each rank reads of the others, each under the same key, as a process group does with addresses."""
    with ThreadPoolExecutor(world_size) as pool:

        def join(rank: int) -> str:
            own = restart_safe_store(store, rank, world_size, timeout=timedelta(seconds=20))
            own.set(f"address/{rank}", f"attempt {store.get('attempt').decode()}")
            return "; ".join(own.get(f"address/{other}").decode() for other in range(world_size))

        joined = {rank: pool.submit(join, rank) for rank in order}
        return [joined[rank].result(timeout=20) for rank in range(world_size)]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_no_rank_reads_what_an_earlier_attempt_wrote(order: list[int]) -> None:
    store = dist.HashStore()
    for number in range(3):
        store.set("attempt", str(number))
        assert attempt(store, 3, order) == [f"attempt {number}; attempt {number}; attempt {number}"] * 3


def test_a_rank_that_died_while_joining_leaves_a_greeting_only() -> None:
    store = dist.HashStore()
    store.set("attempt", "1")
    store.set("dmt/greeting/1", "of a rank that was killed")
    assert attempt(store, 2, [0, 1]) == ["attempt 1; attempt 1"] * 2


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(TimeoutError, match=r"Ranks \[1, 2\] of 3 have not come"):
        restart_safe_store(dist.HashStore(), 0, 3, timeout=timedelta(seconds=0.2))


def test_a_folder_is_free_again_after_the_job(tmp_path: Path) -> None:
    refused = pytest.raises(InputError, match=r"Another job is running in .*train\.output_dir")
    with open_lock(tmp_path), refused, open_lock(tmp_path):
        pass
    with open_lock(tmp_path):
        pass
