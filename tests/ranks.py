"""Starts gloo ranks for a test: `run_ranks`. Ranks come from a forkserver that has torch and torchrec preloaded."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

PRELOAD = [
    "torch",
    "torch.fx.experimental.symbolic_shapes",
    "torchrec.distributed.model_parallel",
    "tests.parity",
    "dmt.training.train",
    # Imported where they are used: each rank would load them again.
    "torch.utils.tensorboard",
    "torchmetrics.functional.classification",
]


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: int = 60) -> list[Any]:
    """Calls ``function(rank, *args)`` on ``world_size`` gloo ranks and returns what each rank returned.

    The first failing rank's traceback becomes the test's failure; the others are stopped.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        results, processes = {}, {}
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(theirs, function, rank, world_size, f"{folder}/store", timeout_s, args)
            )
            process.start()
            theirs.close()
            processes[ours] = (rank, process)
        try:
            while len(results) < world_size:
                pipes = [pipe for pipe, (rank, _) in processes.items() if rank not in results]
                ready = wait(pipes, timeout=2 * timeout_s)
                if not ready:
                    raise TimeoutError(f"ranks {sorted(set(range(world_size)) - set(results))} do not answer")
                for pipe in ready:
                    rank, process = processes[pipe]
                    try:
                        ok, value = pickle.loads(pipe.recv_bytes())
                    except (EOFError, ConnectionResetError):
                        process.join(5)
                        raise AssertionError(f"rank {rank} died with exit code {process.exitcode}") from None
                    if not ok:
                        raise AssertionError(f"rank {rank} failed:\n{value}")
                    results[rank] = value
        finally:
            for _, process in processes.values():
                process.join(5 if len(results) == world_size else 0)
                if process.is_alive():
                    process.kill()
                    process.join()
    return [results[rank] for rank in range(world_size)]


def _rank_main(
    pipe: Any, function: Callable[..., Any], rank: int, world_size: int, store: str, timeout_s: int, args: tuple
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    # Deliberately absurd: nothing may guess the topology from the environment.
    os.environ["LOCAL_WORLD_SIZE"] = "7"
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        value = function(rank, *args)
        # Leaving while a peer still talks aborts it now and then.
        dist.barrier()
        dist.destroy_process_group()
        # Plain pickle: multiprocessing's own would share tensor memory with a process that is about to end.
        pipe.send_bytes(pickle.dumps((True, value)))
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
