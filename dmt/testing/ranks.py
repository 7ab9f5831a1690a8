"""Gloo ranks as processes of this machine, started, watched and stopped: `run_on_ranks`."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

from dmt.errors import InputError

__all__ = ["RanksFailedError", "Say", "prepare_ranks", "run_on_ranks"]

Say = Callable[[str], None]
"""Tells the parent what a rank is at."""

_PRELOAD = ["torch", "torch.fx.experimental.symbolic_shapes", "dmt.training.check.on_rank"]
_SHOWN_FRAMES = 3
# A rank that fails makes others fail; so long the parent waits for the one that began it.
_SETTLE_S = 1.0


class RanksFailedError(Exception):
    """A rank raised, died or does not answer; the text says which, where and at what."""


def prepare_ranks() -> None:
    """Starts to load what ranks need, beside this process; optional, and only the first call does something."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mp.get_context("forkserver").set_forkserver_preload(_PRELOAD)
    forkserver.ensure_running()


def run_on_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float) -> list[Any]:
    """Calls ``function(rank, say, *args)`` on gloo ranks and returns what each returned, as it was pickled.

    However it ends, no process is left.

    Args:
        function: importable; ``say(text)`` tells what the rank is at, and that it is alive.
        world_size: number of ranks.
        args: picklable.
        timeout_s: longest time without news from any rank.

    Raises:
        InputError: a rank raised it.
        RanksFailedError: a rank raised something else, died, or no rank has said anything for too long.
    """
    prepare_ranks()
    context = mp.get_context("forkserver")
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="dmt-ranks-") as folder:
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_rank_main,
                    args=(theirs, function, rank, world_size, f"{folder}/store", timeout_s, args),
                    daemon=True,
                )
                process.start()
                theirs.close()
                ranks.append(_Rank(rank, process, ours))
            _listen(ranks, timeout_s)
            return [rank.result for rank in ranks]
        finally:
            _stop(ranks)


class _Rank:
    def __init__(self, number: int, process: Any, pipe: Connection) -> None:
        self.number, self.process, self.pipe = number, process, pipe
        self.stage = "starting"
        self.is_done = False
        self.result: Any = None
        self.fault: Exception | None = None
        self.messages = 0

    def hear(self) -> None:
        """Takes one message."""
        try:
            kind, value = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join(_SETTLE_S)
            self.is_done = True
            self.fault = RanksFailedError(
                f"Rank {self.number} died with exit code {self.process.exitcode} while it was at: {self.stage}."
            )
            return
        self.messages += 1
        if kind == "at":
            self.stage = value
            return
        self.is_done = True
        if kind == "result":
            self.result = value
        elif kind == "input":
            self.fault = InputError(value)
        else:
            self.fault = RanksFailedError(f"Rank {self.number} failed while it was at: {self.stage}.\n{value}")


def _listen(ranks: Sequence[_Rank], timeout_s: float) -> None:
    faults: list[Exception] = []
    while waiting := [rank for rank in ranks if not rank.is_done]:
        ready = wait([rank.pipe for rank in waiting], timeout=_SETTLE_S if faults else timeout_s)
        if faults and not ready:
            break
        if not ready:
            least = min(rank.messages for rank in waiting)
            behind = [rank for rank in waiting if rank.messages == least]
            numbers = ", ".join(str(rank.number) for rank in behind)
            raise RanksFailedError(
                f"Nothing was heard of rank {numbers} for {timeout_s:g} s; it was at: {behind[0].stage}. It hangs, or "
                "--timeout is too short for this model."
            )
        for rank in waiting:
            if rank.pipe in ready:
                rank.hear()
                faults += [rank.fault] if rank.fault is not None else []
    # What the user can fix first; then a death, since it is what breaks the others' connections; then what came first.
    faults.sort(key=lambda fault: (not isinstance(fault, InputError), "died with exit code" not in str(fault)))
    if faults:
        raise faults[0]


def _stop(ranks: Sequence[_Rank]) -> None:
    deadline = time.monotonic() + (5 if all(rank.is_done and rank.fault is None for rank in ranks) else 0)
    for rank in ranks:
        # A rank leaves when its pipe is closed: before that its peers may still talk to it.
        rank.pipe.close()
        rank.process.join(max(0.0, deadline - time.monotonic()))
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()


def _rank_main(
    pipe: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    timeout_s: float,
    args: tuple[Any, ...],
) -> None:
    # Ctrl-C reaches every process of the terminal; the parent stops this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch
    import torch.distributed as dist

    from dmt.training.console import quiet_libraries

    def tell(kind: str, value: Any) -> None:
        # Plain pickle: multiprocessing's own would share tensor memory with a process that is about to end.
        with contextlib.suppress(OSError):
            pipe.send_bytes(pickle.dumps((kind, value)))

    torch.set_num_threads(1)
    quiet_libraries(rank=1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            # Longer than the parent waits: it says which rank hangs, gloo only that one does.
            timeout=timedelta(seconds=2 * timeout_s),
        )
        value = function(rank, lambda text: tell("at", text), *args)
        # Leaving while a peer still talks aborts it now and then.
        dist.barrier()
        dist.destroy_process_group()
        tell("result", value)
    except InputError as error:
        tell("input", str(error))
    except BaseException as error:
        frames = traceback.format_list(traceback.extract_tb(error.__traceback__)[-_SHOWN_FRAMES:])
        tell("failed", "".join([*frames, *traceback.format_exception_only(error)]).rstrip())
    with contextlib.suppress(EOFError, OSError):
        pipe.recv_bytes()
