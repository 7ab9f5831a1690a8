"""Gloo ranks as processes of this machine, started, watched and stopped: `run_on_ranks`, `RankPool`."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing as mp
import os
import pickle
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from dmt.errors import InputError
from dmt.processes import end_with

__all__ = ["RankPool", "RanksFailedError", "prepare_ranks", "run_on_ranks", "say"]

_PRELOAD = ("torch", "torch.fx.experimental.symbolic_shapes", "torchrec.distributed.model_parallel")
_SHOWN_FRAMES = 3
# A failing rank makes others fail; the parent waits this long for the one that began it.
_SETTLE_S = 1.0
# PyTorch's own initial seed: each call begins like a fresh process.
_INITIAL_SEED = 67280421310721


class RanksFailedError(Exception):
    """A rank raised, died or does not answer; the text names the rank, the reason and what it was at.

    The full traceback of a rank that raised is a note of the exception.
    """


def prepare_ranks(modules: Sequence[str] = ()) -> None:
    """Starts a process from which all ranks are forked and which imports their modules, while this process goes on.

    Optional: `RankPool` calls it too. Only the first call in a process has an effect. ``modules`` are those that the
    functions of the ranks need; one that cannot be imported is left to the rank that needs it.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mp.get_context("forkserver").set_forkserver_preload([*modules, *_PRELOAD])
    forkserver.ensure_running()


def say(text: str) -> None:
    """Tells the parent that this rank is alive, and the text that names what it is at should it fail, die or hang."""
    for pipe in _PARENT:
        with contextlib.suppress(OSError):
            pipe.send_bytes(pickle.dumps(("at", text)))


def run_on_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float) -> list[Any]:
    """Calls ``function(rank, *args)`` on gloo ranks of this machine. However it ends, no process is left.

    Args:
        function: importable; inside it, the default process group is that of the ranks.
        world_size: number of ranks.
        args: picklable.
        timeout_s: longest time, in seconds, without news from any rank; `say` is news.

    Returns:
        What each rank returned, by rank. It must be picklable.

    Raises:
        InputError: a rank raised it.
        RanksFailedError: a rank raised something else, died, or no rank has said anything for too long.

    Example::

        def total(rank: int, number: int) -> float:
            value = torch.tensor(float(rank + number))
            dist.all_reduce(value)
            return value.item()

        if __name__ == "__main__":
            assert run_on_ranks(total, 2, 10, timeout_s=60) == [21.0, 21.0]
    """
    with RankPool() as pool:
        return pool.run(function, world_size, *args, timeout_s=timeout_s)


class RankPool:
    """Processes that serve as the gloo ranks of one call after the other; a context manager.

    A call makes and destroys its own process group. It begins with the working folder of the caller, the environment
    variables of the pool, and the random number generators of a fresh process. Everything else that a call changes in
    its process, such as a patched class, is still changed in the next one: give such calls a pool of their own. After
    a call that fails, all processes are killed; the next call starts others.

    Args:
        environment: set in every call, after RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = dict(environment or {})
        self._ranks: list[_Rank] = []

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float) -> list[Any]:
        """Same as `run_on_ranks`, but the processes stay for the next call."""
        prepare_ranks()
        # Plain pickle: multiprocessing's own would share tensor memory with a process that may end.
        task = pickle.dumps((function, args))
        with tempfile.TemporaryDirectory(prefix="dmt-ranks-") as folder:
            try:
                while len(self._ranks) < world_size:
                    self._ranks.append(_Rank(len(self._ranks)))
                ranks = self._ranks[:world_size]
                for rank in ranks:
                    place = {"RANK": str(rank.number), "WORLD_SIZE": str(world_size)}
                    environment = place | {f"LOCAL_{name}": value for name, value in place.items()} | self._environment
                    store = f"{folder}/store"
                    rank.begin(_Call(task, rank.number, world_size, store, timeout_s, os.getcwd(), environment))
                _listen(ranks, timeout_s)
            except BaseException:
                self.close(wait_s=0)
                raise
        return [rank.result for rank in ranks]

    def close(self, *, wait_s: float = 5.0) -> None:
        """Ends all processes; kills those that have not left by themselves after ``wait_s`` seconds."""
        ranks, self._ranks = self._ranks, []
        deadline = time.monotonic() + wait_s
        for rank in ranks:
            rank.pipe.close()
        for rank in ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
            if rank.process.is_alive():
                rank.process.kill()
                rank.process.join()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Call(NamedTuple):
    task: bytes
    rank: int
    world_size: int
    store: str
    timeout_s: float
    folder: str
    environment: dict[str, str]


class _Rank:
    """A process as its parent sees it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pipe, theirs = mp.get_context("forkserver").Pipe()
        self.process = mp.get_context("forkserver").Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, call: _Call) -> None:
        self.stage = "starting"
        self.is_done = False
        self.result: Any = None
        self.fault: Exception | None = None
        self.messages = 0
        # If the process has died meanwhile, `hear` says so.
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(pickle.dumps(call))

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
        self.is_done = kind != "at"
        if kind == "at":
            self.stage = value
        elif kind == "result":
            self.result = value
        elif kind == "input":
            self.fault = InputError(value)
        else:
            short, full = value
            self.fault = RanksFailedError(f"Rank {self.number} failed while it was at: {self.stage}.\n{short}")
            self.fault.add_note(full)


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
                "needs more time: raise timeout_s."
            )
        for rank in waiting:
            if rank.pipe in ready:
                rank.hear()
                faults += [rank.fault] if rank.fault is not None else []
    # What the user can fix first; then a death, since it is what breaks the others' connections; then what came first.
    faults.sort(key=lambda fault: (not isinstance(fault, InputError), "died with exit code" not in str(fault)))
    if faults:
        raise faults[0]


# In a rank: the way to its parent.
_PARENT: list[Connection] = []


def _serve(pipe: Connection) -> None:
    # Ctrl-C reaches every process of the terminal; the parent stops this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A fork server that somebody else started may block it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    parent = mp.parent_process()
    assert parent is not None, "started by multiprocessing"
    assert parent.pid is not None, "its own number"
    end_with(parent.pid)
    import torch

    torch.set_num_threads(1)
    # What the fork brought along is never garbage; looking through it after every call would take longer than many do.
    gc.freeze()
    gc.enable()

    _initialize_torchrec()
    _PARENT.append(pipe)
    environment = dict(os.environ)
    # The parent closes the pipe, or is gone.
    with contextlib.suppress(EOFError, OSError):
        while True:
            call: _Call = pickle.loads(pipe.recv_bytes())
            os.environ.clear()
            os.environ.update(environment | call.environment)
            pipe.send_bytes(_answer(call))


def _initialize_torchrec() -> None:
    """Takes the one collective step of a process's first model: ranks that have had one would not wait for new ones."""
    import torch.distributed as dist

    try:
        from torchrec.distributed.collective_utils import init_collective_validation
    except ImportError:  # the light half of the library
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    init_collective_validation(dist.group.WORLD)
    dist.destroy_process_group()


def _answer(call: _Call) -> bytes:
    import numpy as np
    import torch
    import torch.distributed as dist

    torch.manual_seed(_INITIAL_SEED)
    np.random.seed(0)
    random.seed(0)
    try:
        os.chdir(call.folder)
        function, args = pickle.loads(call.task)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{call.store}",
            rank=call.rank,
            world_size=call.world_size,
            # Longer than the parent waits: it says which rank hangs, gloo only that one does.
            timeout=timedelta(seconds=2 * call.timeout_s),
        )
        value = function(call.rank, *args)
        if dist.is_initialized():
            # Leaving while a peer still talks aborts it now and then.
            dist.barrier()
            # Models in reference cycles end here, not in the next call, and while PyTorch still holds the groups. A
            # group whose last owner is a model's reducer is destroyed under Python's lock; its worker thread may wait
            # for that lock with the barrier in hand, and both for ever.
            gc.collect()
            dist.destroy_process_group()
        return pickle.dumps(("result", value))
    except InputError as error:
        return pickle.dumps(("input", str(error)))
    except BaseException as error:
        short = "".join(traceback.format_exception(error, limit=-_SHOWN_FRAMES, chain=False)).rstrip()
        return pickle.dumps(("failed", (short, traceback.format_exc())))
