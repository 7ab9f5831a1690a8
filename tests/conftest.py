"""Settings of a test session: threads and scheduling of its processes, and what ranks have loaded when they start."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import socket
import sys
import threading
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules with rank tests come first: what is left for the end, when one worker waits for the other, is short."""
    modules = {item.path for item in items if item.get_closest_marker("ranks")}
    items.sort(key=lambda item: item.path not in modules)
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _prepared_ranks(request: pytest.FixtureRequest) -> None:
    """Ranks are forked from a copy of this process, which has the modules of all tests loaded already."""
    if any(item.get_closest_marker("ranks") for item in request.session.items):
        # What training loads late.
        for late in ("scipy.optimize", "torch.utils.tensorboard", "torchmetrics.functional.classification"):
            importlib.import_module(late)
        importlib.import_module("torchrec.metrics.ne")
        _fork_server()


def _fork_server() -> None:
    """Starts multiprocessing's fork server by a fork, where it would start an interpreter and load everything again."""
    resource_tracker.ensure_running()
    alive_r, alive_w = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        address = connection.arbitrary_address("AF_UNIX")
        listener.bind(address)
        listener.listen()
        gc.freeze()
        server = os.fork()
        if not server:
            os.close(alive_w)
            try:
                _forget_pytest()
                forkserver.main(listener.fileno(), alive_r, [])
            finally:
                os._exit(0)
    os.close(alive_r)
    of_this_process = forkserver._forkserver
    of_this_process._forkserver_address = address
    of_this_process._forkserver_alive_fd = alive_w
    of_this_process._forkserver_pid = server


def _forget_pytest() -> None:
    """Undoes what pytest has changed in a process and ranks would inherit: filters, handlers, hooks and streams."""
    gc.disable()  # a rank collects again
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    logging.root.handlers.clear()
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
