"""Settings of a test session: threads and scheduling of its processes, and what ranks have loaded when they start."""

from __future__ import annotations

import contextlib
import gc
import os

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
    """Ranks are forked from a process that loads the modules of all rank tests, beside the first tests."""
    modules = {item.module.__name__ for item in request.session.items if item.get_closest_marker("ranks")}
    if modules:
        from dmt.testing.ranks import prepare_ranks

        # What training loads late.
        late = ["scipy.optimize", "torchmetrics.functional.classification", "torchrec.metrics.ne"]
        # This module first: what is loaded is no garbage. A rank collects again.
        prepare_ranks(["tests.conftest", *sorted(modules), *late])
