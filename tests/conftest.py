"""Settings of a test session: threads and scheduling of its processes, and what ranks have loaded when they start."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import socket
import warnings
from multiprocessing import connection, forkserver, resource_tracker

import pytest

# Collecting the tests imports everything and makes no garbage, so the collector waits until it is done.
gc.disable()
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A thread of gloo wakes up for every message and spins until the thread that it interrupted asks for the message, which
# took a quarter of the time of ranks on two cores. Under SCHED_BATCH a process that wakes up interrupts no other.
if hasattr(os, "SCHED_BATCH"):
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # Ranks on one core wake one another faster. With more workers than cores, each core gets one; the others use all.
    number, cores = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]), sorted(os.sched_getaffinity(0))
    if number < len(cores) < int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")):
        os.sched_setaffinity(0, {cores[number]})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs modules with rank tests first: at the end, when one worker waits for the other, tests are short."""
    modules = {item.path for item in items if item.get_closest_marker("ranks")}
    items.sort(key=lambda item: item.path not in modules)
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Lets the interpreter free what was frozen: DuckDB prints what is left at its end."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seeds a test and its fixtures as in a fresh process, whichever tests this process has run before."""
    import random

    import numpy as np
    import torch

    from dmt.testing.ranks import _INITIAL_SEED

    torch.manual_seed(_INITIAL_SEED)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture(scope="session", autouse=True)
def _prepared_ranks(request: pytest.FixtureRequest) -> None:
    """Forks the process from which ranks are forked, before the first test and with all modules loaded."""
    if any(item.get_closest_marker("ranks") for item in request.session.items):
        # Modules that training loads late.
        for name in ("scipy.optimize", "torchmetrics.functional.classification", "torchrec.metrics.ne"):
            importlib.import_module(name)
        _start_fork_server()


def _start_fork_server() -> None:
    """Starts the fork server like ``ensure_running``, but by a fork: a new interpreter would import all again."""
    resource_tracker.ensure_running()
    with socket.socket(socket.AF_UNIX) as listener, warnings.catch_warnings():
        # Python warns of a fork beside threads; the one of pytest-xdist only reads commands.
        warnings.simplefilter("ignore", DeprecationWarning)
        listener.bind(address := connection.arbitrary_address("AF_UNIX"))
        listener.listen()
        until_closed, alive = os.pipe()
        process = os.fork()
        if not process:
            os.close(alive)
            # The filters of a fresh process, not those of the tests.
            warnings.resetwarnings()
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                forkserver.main(listener.detach(), until_closed, [])
            finally:
                os._exit(0)
    os.close(until_closed)
    server = forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, alive, process
