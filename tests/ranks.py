"""Ranks for tests: `run_ranks` calls a function on gloo ranks that all tests of a process share, `on_ranks` a test.

`run_program` runs a whole program on ranks, as ``torchrun`` does, but in processes that have everything loaded.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import runpy
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dmt.testing.ranks import Rank, RanksFailedError, run_on_ranks
from dmt.training import metrics
from dmt.training.device import backend

_SHARED: list[Rank] = []
DEVICE = torch.device(os.environ.get("DMT_TEST_DEVICE", "cpu"))
"""Device of the ranks; the plain training that they are compared with runs on the CPU."""

ALL_BINS = metrics._BINS
# Fewer bins: adding them up over ranks in evaluations took a tenth of the time of a small run.
metrics._BINS = 2**14


def _but_on_meta(init: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda tensor, *args, **more: tensor if tensor.is_meta else init(tensor, *args, **more)


# PyTorch draws numbers for the meta device, which keeps none, step by step in Python.
for _name in ("normal_", "uniform_", "kaiming_uniform_", "xavier_normal_"):
    setattr(nn.init, _name, _but_on_meta(getattr(nn.init, _name)))


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 280, fresh: bool = False
) -> list[Any]:
    """Calls ``function(rank, *args)`` on ``world_size`` gloo ranks and returns what each rank returned.

    ``fresh``: in processes of its own, for a function that leaves its process changed or killed.
    """
    ranks = None if fresh else _SHARED
    backends = backend("cpu" if DEVICE.type == "cpu" else "cuda")
    return run_on_ranks(
        in_absurd_environment, world_size, function, args, timeout_s=timeout_s, ranks=ranks, backend=backends
    )


def on_ranks(world_size: int, *, fresh: bool = False) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Decorates a function that every rank calls, ``test(rank, ...)``; arguments after the rank are pytest's."""

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(function)
        def test(**arguments: Any) -> None:
            # By name: the module's attribute is this wrapper, so the function itself cannot be pickled.
            run_ranks(_test_on_rank, world_size, function.__module__, function.__name__, arguments, fresh=fresh)

        _, *others = inspect.signature(function).parameters.values()
        test.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return pytest.mark.ranks(test)

    return decorate


def _test_on_rank(rank: int, module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(rank, **arguments)


def in_absurd_environment(rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Calls a function with a wrong ``LOCAL_WORLD_SIZE``: nothing may guess the topology from the environment."""
    os.environ["LOCAL_WORLD_SIZE"] = "7"
    # NCCL refuses two ranks of one host on one GPU. Apart, they talk by sockets, as hosts do.
    os.environ |= {"NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    return function(rank, *args)


def run_program(arguments: Sequence[str], ranks: int, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Does what ``torchrun --nproc-per-node RANKS ARGUMENTS`` does in ``folder``; for one rank, what ``python`` does.

    As under torchrun, the others are stopped when a rank ends with an error; all that was printed until then is kept.
    """
    # Like torchrun's agent, the parent serves the store: a free port that is looked up first may be taken meanwhile.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with TemporaryDirectory() as printed:
        failure = ""
        try:
            run_ranks(_on_rank, ranks, list(arguments), str(folder or Path.cwd()), store.port, printed, fresh=True)
        except RanksFailedError as error:
            failure = str(error)
        # A rank that was stopped before the program began has no file.
        out, err = ("".join(path.read_text() for path in sorted(Path(printed).glob(f"*.{name}"))) for name in _STREAMS)
    return subprocess.CompletedProcess(arguments, 1 if failure else 0, out, err + failure)


_STREAMS = ("stdout", "stderr")


def _on_rank(rank: int, arguments: list[str], folder: str, port: int, printed: str) -> None:
    alone = dist.get_world_size() == 1
    # A rank that leaves at once breaks the connections that the others are still making.
    dist.barrier()
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"])
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if alone:
        for name in [name for name in os.environ if name.endswith(("RANK", "WORLD_SIZE")) or "MASTER_" in name]:
            del os.environ[name]
    os.chdir(folder)
    with contextlib.ExitStack() as stack:
        # Line by line: what a stopped rank has printed is kept.
        out, err = (stack.enter_context(Path(printed, f"{rank}.{name}").open("w", buffering=1)) for name in _STREAMS)
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        sys.argv = [*arguments]
        try:
            if arguments[0] == "-m":
                sys.argv = arguments[1:]
                runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
        except BaseException:
            traceback.print_exc()
            raise


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    """Returns whether the condition came true within so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False
