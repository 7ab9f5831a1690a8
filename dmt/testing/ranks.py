"""`run_on_ranks`: starts, watches and stops ranks as processes of this machine."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing as mp
import os
import pickle
import random
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from dmt.errors import InputError

__all__ = ["Rank", "RanksFailedError", "end_ranks", "end_with", "prepare_ranks", "run_on_ranks"]

_PRELOAD = ("torch", "torch.fx.experimental.symbolic_shapes", "torchrec.distributed.model_parallel")
# The first failure that arrives may have its cause on another rank; the parent waits this long for the others.
_SETTLE_S = 1.0
# PyTorch's own initial seed: each call begins like a fresh process.
_INITIAL_SEED = 67280421310721


class RanksFailedError(Exception):
    """A rank raised an error, died or did not finish in time; the message names the rank and the reason."""


class Rank(NamedTuple):
    """A process of `run_on_ranks`, and the parent's end of the pipe to it."""

    process: Any
    pipe: Connection


def prepare_ranks(modules: Sequence[str] = ()) -> None:
    """Starts the process from which all ranks are forked; it imports ``modules`` while this process continues.

    Optional: `run_on_ranks` calls it too. Only the first call in a process has an effect; it sets ``OMP_NUM_THREADS``
    to 1 unless it is set. If the import of a module fails, only a rank whose function needs it fails.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mp.get_context("forkserver").set_forkserver_preload([*modules, *_PRELOAD])
    forkserver.ensure_running()


def run_on_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float,
    ranks: list[Rank] | None = None,
    backend: str = "gloo",
) -> list[Any]:
    """Calls ``function(rank, *args)`` on ranks of this machine. Without ``ranks``, no rank outlives the call.

    Each call makes and destroys a process group. Ranks begin with the caller's working folder, the same random seeds,
    and the environment of the process that they are forked from, to which ``RANK`` and the like are added.

    Args:
        function: an importable function; inside it, the default process group contains the ranks.
        world_size: number of ranks.
        args: picklable arguments.
        timeout_s: longest time until every rank has returned, in seconds.
        ranks: list of processes to reuse; the call appends those that it starts. They live until a call fails or
            until `end_ranks`, and keep what a call changes in them, such as a patched class. None: new processes.
        backend: of the process group, as in ``torch.distributed.init_process_group``.

    Returns:
        The picklable result of each rank, by rank.

    Raises:
        InputError: a rank raised an `InputError`.
        RanksFailedError: a rank raised another error, died or did not finish in time.

    Example::

        def total(rank: int, number: int) -> float:
            value = torch.tensor(float(rank + number))
            dist.all_reduce(value)
            return value.item()

        if __name__ == "__main__":
            assert run_on_ranks(total, 2, 10, timeout_s=60) == [21.0, 21.0]
    """
    prepare_ranks()
    # Plain pickle: multiprocessing's own would share tensor memory with a process that may end.
    task, started = pickle.dumps((function, args)), [] if ranks is None else ranks
    try:
        with tempfile.TemporaryDirectory(prefix="dmt-ranks-") as folder:
            while len(started) < world_size:
                ours, theirs = mp.get_context("forkserver").Pipe()
                arguments = theirs, os.getpid()
                process = mp.get_context("forkserver").Process(target=_serve, args=arguments, daemon=True)
                process.start()
                theirs.close()
                started.append(Rank(process, ours))
            for number, rank in enumerate(started[:world_size]):
                call = task, number, world_size, backend, f"{folder}/store", timeout_s, os.getcwd()
                # If the process has died meanwhile, `_listen` says so.
                with contextlib.suppress(OSError):
                    rank.pipe.send_bytes(pickle.dumps(call))
            results = _listen(started[:world_size], timeout_s)
    except BaseException:
        end_ranks(started)
        raise
    if ranks is None:
        end_ranks(started)
    return results


def end_ranks(ranks: list[Rank]) -> None:
    """Kills the processes that `run_on_ranks` appended to ``ranks``, and empties the list."""
    for rank in ranks:
        rank.process.kill()
    for rank in ranks:
        rank.process.join()
        rank.pipe.close()
    ranks.clear()


def end_with(process: int) -> None:
    """Makes this process exit as soon as the process with this id ends, for whatever reason; returns at once.

    A thread waits for that. Linux's parent-death signal would not do: it comes when the *thread* that forked this
    process ends, and ranks are forked by the process that `prepare_ranks` starts, not by the one that waits for them.
    """

    def follow() -> None:
        try:
            wait([os.pidfd_open(process)])
        except (OSError, AttributeError):  # it has ended; or before Linux 5.3, or in a sandbox
            while os.path.exists(f"/proc/{process}"):
                time.sleep(1)
        os._exit(1)

    threading.Thread(target=follow, name="end_with", daemon=True).start()


def _listen(ranks: Sequence[Rank], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    faults: list[Exception] = []
    while waiting := {rank.pipe: number for number, rank in enumerate(ranks) if number not in results}:
        ready = wait(waiting, timeout=_SETTLE_S if faults else max(0.0, deadline - time.monotonic()))
        if not ready and not faults:
            numbers = ", ".join(map(str, waiting.values()))
            problem = f"After {timeout_s:g} s these ranks still run: {numbers}. Raise timeout_s, or find what hangs."
            faults.append(RanksFailedError(problem))
        if not ready:
            break
        for number in (waiting[pipe] for pipe in ready if isinstance(pipe, Connection)):
            process, pipe = ranks[number]
            try:
                results[number], fault = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                process.join(_SETTLE_S)
                results[number] = None
                fault = RanksFailedError(f"Rank {number} died with exit code {process.exitcode}.")
            faults += [] if fault is None else [fault]
    # First what the user can fix; then a death, which breaks the connections of other ranks; then the earliest fault.
    faults.sort(key=lambda fault: (not isinstance(fault, InputError), "died with exit code" not in str(fault)))
    if faults:
        raise faults[0]
    return [results[number] for number in range(len(ranks))]


def _serve(pipe: Connection, parent: int) -> None:
    # Ctrl-C reaches every process of the terminal; the parent stops this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A fork server that another library started may block SIGTERM.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    end_with(parent)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # Objects from before the fork are never garbage; looking through them after every call would be slow.
    gc.freeze()
    gc.enable()

    # TorchRec's first model in a process runs this collective: reused ranks would not join that of new ranks.
    with contextlib.suppress(ImportError):  # the light half of the library
        from torchrec.distributed.collective_utils import init_collective_validation

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        init_collective_validation(dist.group.WORLD)
        dist.destroy_process_group()
    environment = dict(os.environ)
    while True:
        os.environ.clear()
        os.environ.update(environment)
        pipe.send_bytes(_answer(*pickle.loads(pipe.recv_bytes())))


def _answer(task: bytes, rank: int, world_size: int, backend: str, store: str, timeout_s: float, folder: str) -> bytes:
    import numpy as np
    import torch
    import torch.distributed as dist

    place = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ.update(place | {f"LOCAL_{name}": value for name, value in place.items()})
    torch.manual_seed(_INITIAL_SEED)
    np.random.seed(0)
    random.seed(0)
    try:
        os.chdir(folder)
        function, args = pickle.loads(task)
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            # Longer than the parent waits, because the parent names the rank that hangs, and gloo does not.
            timeout=timedelta(seconds=2 * timeout_s),
        )
        value = function(rank, *args)
        if dist.is_initialized():
            # Leaving while a peer still communicates sometimes aborts the peer.
            dist.barrier()
            # Frees models in reference cycles now, not in the next call, while PyTorch still holds the groups. A group
            # whose last owner is a model's reducer is destroyed under Python's lock, and waits for its worker thread,
            # which may be waiting for that lock: a deadlock.
            gc.collect()
            dist.destroy_process_group()
        return pickle.dumps((value, None))
    except InputError as error:
        return pickle.dumps((None, InputError(str(error))))
    except BaseException:
        return pickle.dumps((None, RanksFailedError(f"Rank {rank} failed.\n{traceback.format_exc().rstrip()}")))
