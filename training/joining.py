"""`fresh_store`: a store for the process group of this attempt at a run, that no earlier attempt has written to.

``torchrun --max-restarts`` keeps one store for all attempts, and torch 2.13 puts the process group's keys there without
a prefix. A rank that starts before its peers then reads their addresses of the attempt before: its connection is
refused, or both wait until the group's timeout. ``TORCHELASTIC_RESTART_COUNT`` is no prefix: each host counts its own.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

__all__ = ["fresh_store"]

_POLL_S = 0.05


def fresh_store(store: dist.Store, rank: int, world_size: int, *, timeout: timedelta) -> dist.Store:
    """A part of a store that only the ranks of this attempt know; every rank of the attempt calls it.

    Rank 0 names the part. It answers each greeting that it finds, also one that an earlier attempt has left, until
    all ranks have thanked it for the name.

    Args:
        store: shared with earlier attempts.
        rank: of this process.
        world_size: ranks of the attempt.
        timeout: how long rank 0 waits for the others; they wait as long as the store does.

    Raises:
        TimeoutError: on rank 0, some rank has not come.
    """
    own = uuid.uuid4().hex
    if rank != 0:
        store.set(f"dmt/greeting/{rank}", own)
        name = store.get(f"dmt/answer/{own}").decode()
        store.set(f"dmt/thanks/{name}/{rank}", "")
        return dist.PrefixStore(name, store)
    waiting = set(range(1, world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while waiting:
        if time.monotonic() > deadline:
            raise TimeoutError(f"Ranks {sorted(waiting)[:8]} of {world_size} have not come within {timeout}.")
        for other in sorted(waiting):
            if store.check([f"dmt/thanks/{own}/{other}"]):
                waiting.remove(other)
            elif store.check([f"dmt/greeting/{other}"]):
                store.set(f"dmt/answer/{store.get(f'dmt/greeting/{other}').decode()}", own)
        time.sleep(_POLL_S if waiting else 0)
    return dist.PrefixStore(own, store)
