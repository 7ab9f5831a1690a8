"""Ranks for tests: `run_ranks` calls a function on gloo ranks that all tests of a process share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from dmt.testing.ranks import Rank, run_on_ranks

_SHARED: list[Rank] = []


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 280, fresh: bool = False
) -> list[Any]:
    """Calls ``function(rank, *args)`` on ``world_size`` gloo ranks and returns what each rank returned.

    ``fresh``: in processes of its own, for a function that leaves its process changed or killed.
    """
    ranks = None if fresh else _SHARED
    return run_on_ranks(in_absurd_environment, world_size, function, args, timeout_s=timeout_s, ranks=ranks)


def in_absurd_environment(rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Nothing may guess the topology from the environment."""
    os.environ["LOCAL_WORLD_SIZE"] = "7"
    return function(rank, *args)


def loaded_modules(rank: int) -> list[str]:
    return sorted(sys.modules)
