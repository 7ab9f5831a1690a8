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

# Collecting the tests imports everything there is, and leaves nothing to collect.
gc.disable()
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Gloo's threads wake up for every message, and spin until the thread that they have interrupted asks for it: a quarter
# of what ranks on two cores compute. Of processes of this kind, none interrupts another one when it wakes up.
if hasattr(os, "SCHED_BATCH"):
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # Ranks that share one core wake one another for less. Each worker takes one; those beyond use what is left of all.
    number, cores = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]), sorted(os.sched_getaffinity(0))
    if number < len(cores) < int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")):
        os.sched_setaffinity(0, {cores[number]})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules with rank tests come first: what is left for the end, when one worker waits for the other, is short."""
    modules = {item.path for item in items if item.get_closest_marker("ranks")}
    items.sort(key=lambda item: item.path not in modules)
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A test and its fixtures draw what they would in a fresh process, whichever tests this one has run before."""
    import random

    import numpy as np
    import torch

    from dmt.testing.ranks import _INITIAL_SEED

    torch.manual_seed(_INITIAL_SEED)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture(scope="session", autouse=True)
def _prepared_ranks(request: pytest.FixtureRequest) -> None:
    """Ranks are forked from a copy of this process as it is now: with all modules loaded, and before its first test."""
    if any(item.get_closest_marker("ranks") for item in request.session.items):
        # What training loads late.
        for name in ("scipy.optimize", "torchmetrics.functional.classification", "torchrec.metrics.ne"):
            importlib.import_module(name)
        _start_fork_server()


def _start_fork_server() -> None:
    """What `multiprocessing.forkserver.ensure_running` does, by a fork: a new interpreter would import all again."""
    resource_tracker.ensure_running()
    with socket.socket(socket.AF_UNIX) as listener, warnings.catch_warnings():
        # A thread of pytest-xdist reads commands; what is forked has no use for it.
        warnings.simplefilter("ignore", DeprecationWarning)
        listener.bind(address := connection.arbitrary_address("AF_UNIX"))
        listener.listen()
        until_closed, alive = os.pipe()
        process = os.fork()
        if not process:
            os.close(alive)
            # Those of a fresh process, not those of a test.
            warnings.resetwarnings()
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                forkserver.main(listener.detach(), until_closed, [])
            finally:
                os._exit(0)
    os.close(until_closed)
    server = forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, alive, process
