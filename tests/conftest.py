"""Settings of a test session: one thread for each process, and what its gloo ranks have loaded when they start."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def _prepared_ranks(request: pytest.FixtureRequest) -> None:
    """Ranks are forked from a process that loads the modules of all rank tests, beside the first tests."""
    modules = {item.module.__name__ for item in request.session.items if item.get_closest_marker("ranks")}
    if modules:
        from dmt.testing.ranks import prepare_ranks

        prepare_ranks(sorted(modules))
