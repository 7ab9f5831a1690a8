"""`run_on_all_or_raise`: something done on every rank, of which all ranks know whether it succeeded on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from dmt.collectives import gather_objects
from dmt.errors import InputError

__all__ = ["RankError", "run_on_all_or_raise", "reason_of"]

Value = TypeVar("Value")


class RankError(RuntimeError):
    """Something failed on a rank, maybe another one; says which and why."""


def run_on_all_or_raise(work: Callable[[], Value], group: dist.ProcessGroup) -> list[Value]:
    """Does something on every rank of a group; collective.

    No rank is left waiting for one that failed: either all get all results, or all raise.

    Args:
        work: what this rank does; its small result is sent to all.
        group: the ranks.

    Returns:
        The results by group rank.

    Raises:
        InputError: the first rank that failed raised one; the same everywhere.
        RankError: it raised something else.
    """
    value, failed = None, None
    try:
        value = work()
    except (Exception, CheckpointException) as error:
        failed = error
    told = None if failed is None else (isinstance(failed, InputError), reason_of(failed))
    answers = gather_objects((told, value), group)
    for rank, (failure, _) in zip(dist.get_process_group_ranks(group), answers, strict=True):
        if failure is not None:
            is_input, reason = failure
            raise (InputError(reason) if is_input else RankError(f"rank {rank}: {reason}")) from failed
    return [answer for _, answer in answers]


def reason_of(error: BaseException) -> str:
    """Why something failed, in one line."""
    if isinstance(error, CheckpointException):  # of torch.distributed.checkpoint, with one failure for each rank
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {reason_of(cause)}"
    return str(error) if isinstance(error, InputError | RankError) else f"{type(error).__name__}: {error}"
