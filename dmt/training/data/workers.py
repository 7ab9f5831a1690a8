"""Pieces read ahead by worker processes, PyTorch's `DataLoader` over the pieces of a rank; batches made by a thread.

Workers come from a fork server, a small process that the rank starts once: a fork of the rank itself would hold its
sockets and its lock of ``output_dir`` open after the rank has been killed. They end with their `DataLoader`, and at
once when the rank has ended, however it ends.
"""

from __future__ import annotations

import atexit
import multiprocessing as mp
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from dmt.errors import InputError
from dmt.processes import end_with
from dmt.training.data.packed import PackedRows, RowLayout
from dmt.training.data.pieces import Piece
from dmt.training.data.sharing import PieceReader, PieceReport

__all__ = ["BatchThread", "read_ahead"]

_Item = TypeVar("_Item")

_AHEAD = 2  # pieces of each worker that are read or being read
_PRELOAD = ["dmt.training.data.workers", "dmt.training.data.readers", "pandas.util", "torch.utils.data"]

_Sent = tuple[PieceReport, int, torch.Tensor]


class _Pieces(Dataset[_Sent]):
    """Pieces as a dataset whose indices are the pieces themselves."""

    def __init__(self, read: PieceReader) -> None:
        self._read = read

    def __getitem__(self, piece: Piece) -> _Sent:
        report, rows = self._read(piece)
        # As a tensor, rows come through shared memory; arrays would be written to a pipe. One tensor: the rank asks for
        # each over a socket, which the worker answers when its interpreter lets go of the parsing.
        return report, rows.num_rows, torch.from_numpy(rows.flatten())


def read_ahead(
    read: PieceReader, pieces: Sequence[Piece], num_workers: int
) -> Iterator[tuple[PieceReport, PackedRows]]:
    """Reads pieces in ``num_workers`` processes, each at most two pieces ahead; yields what ``read`` returns, in order.

    What else goes wrong in a worker is raised here, with its traceback. Closing the generator ends the workers.

    Raises:
        InputError: this process may not start others.
        RuntimeError: a worker has died.
    """
    if mp.current_process().daemon:
        raise InputError(
            f"data.workers={num_workers}: this process is daemonic (multiprocessing started it with daemon=True), and "
            "such a process may start no others. Set data.workers=0."
        )
    _start_server()
    loader = DataLoader(
        _Pieces(read),
        sampler=pieces,  # which the loader hands on as indices
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=_AHEAD,
        collate_fn=_unchanged,
        multiprocessing_context="forkserver",
        worker_init_fn=partial(_follow, os.getpid()),
        generator=torch.Generator(),  # else it draws from the one that the model draws from
    )
    others = mp.active_children()
    iterator = iter(loader)
    workers = [process for process in mp.active_children() if process not in others]
    end = partial(_kill, workers)
    # At the end of a program that an error ends, Python would wait for them before it lets go of the iterator.
    atexit.register(end)
    # A thread fetches the next piece while the rank computes: the answer of a worker that parses takes milliseconds.
    with ThreadPoolExecutor(1, "read_ahead") as fetcher:
        ahead = fetcher.submit(_fetch, iterator, read.layout) if pieces else None
        try:
            for number, piece in enumerate(pieces, start=1):
                assert ahead is not None, "there is a piece"
                try:
                    found = ahead.result()
                # Tensors are fetched over a socket of their worker, which resets, refuses or ends once it is dead.
                except (RuntimeError, OSError, EOFError) as error:
                    if not isinstance(error, RuntimeError):
                        wait([process.sentinel for process in workers], timeout=1.0)
                    if all(process.is_alive() for process in workers):
                        raise
                    raise RuntimeError(
                        f"{piece}: a worker process (data.workers={num_workers}) died while it read this piece or one "
                        "soon after. Was it killed for want of memory, or is /dev/shm full? Set fewer data.workers, or "
                        "write smaller row groups."
                    ) from error
                ahead = fetcher.submit(_fetch, iterator, read.layout) if number < len(pieces) else None
                yield found
        finally:
            if ahead is not None:
                futures.wait([ahead], timeout=1.0)  # the loader notices only after seconds that workers were killed
            end()
            atexit.unregister(end)  # also after an error, or each pass that one ends would keep its processes
    del iterator  # which waits for them


class BatchThread:
    """A thread that makes a rank's next batch from rows that were read ahead, while the rank computes.

    It makes the batches of all passes, so that their exchanges between ranks have one order, the same on all of them.
    These need a process group of their own: those of training steps run at the same time.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "batches")

    def ahead(self, batches: Iterator[_Item]) -> Iterator[_Item]:
        """Yields batches, each but the first made since the one before was asked for.

        What goes wrong with a batch is raised where that batch is asked for. Closing the generator waits for the batch
        that is being made, at most a second.
        """
        following = self._thread.submit(next, batches, None)
        try:
            while (batch := following.result()) is not None:
                following = self._thread.submit(next, batches, None)
                yield batch
        finally:
            futures.wait([following], timeout=1.0)


def _fetch(iterator: Iterator[_Sent], layout: RowLayout) -> tuple[PieceReport, PackedRows]:
    report, num_rows, sent = next(iterator)
    # A copy: a tensor that came through shared memory holds its place there and an open file.
    return report, layout.unflatten(sent.numpy().copy(), num_rows)


def _follow(rank: int, worker: int) -> None:
    # If someone else has started the fork server, it is not deaf to it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    sys.excepthook = _unless_cut_off
    # PyTorch's own watch is on a worker's parent, which is the fork server.
    end_with(rank)


def _unless_cut_off(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Prints an error of a thread, but not that the rank was gone while a piece was handed to it."""
    if not issubclass(kind, OSError | EOFError):
        sys.__excepthook__(kind, error, trace)


def _kill(processes: Sequence[Any]) -> None:
    for process in processes:
        process.kill()


def _unchanged(sent: Any) -> Any:
    return sent


def _start_server() -> None:
    """Starts this process's fork server, deaf to SIGTERM as all that it starts.

    Schedulers and torchrun send SIGTERM to all processes of a rank, which then trains a few steps more and needs its
    workers for that (`dmt.training.agreement`). A signal that is blocked here is blocked there, and not lost here.
    """
    mp.set_forkserver_preload(_PRELOAD)
    resource_tracker.ensure_running()  # which would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
