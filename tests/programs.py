"""Runs whole programs on gloo ranks, as ``torchrun`` does, but in processes that have everything loaded."""

from __future__ import annotations

import contextlib
import os
import runpy
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist

from dmt.testing.ranks import RanksFailedError
from tests.ranks import run_ranks


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
