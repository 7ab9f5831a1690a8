"""Ranks for tests: `run_ranks` calls a function on gloo ranks that all tests of a process share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from dmt.testing.ranks import RankPool

# Deliberately absurd: nothing may guess the topology from the environment.
_ENVIRONMENT = {"LOCAL_WORLD_SIZE": "7"}
_SHARED = RankPool(_ENVIRONMENT)


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 280, fresh: bool = False
) -> list[Any]:
    """Calls ``function(rank, *args)`` on ``world_size`` gloo ranks and returns what each rank returned.

    ``fresh``: in processes of its own, for a function that leaves its process changed or killed.
    """
    if not fresh:
        return _SHARED.run(function, world_size, *args, timeout_s=timeout_s)
    with RankPool(_ENVIRONMENT) as pool:
        return pool.run(function, world_size, *args, timeout_s=timeout_s)


def loaded_modules(rank: int) -> list[str]:
    return sorted(sys.modules)
