"""Settings of a test session: one thread for each process, and what its gloo ranks have loaded when they start."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts to load the modules of all rank tests in the process that ranks are forked from, meanwhile."""
    modules = {item.module.__name__ for item in session.items if item.get_closest_marker("ranks")}
    if modules and not session.config.option.collectonly:
        from dmt.testing.ranks import prepare_ranks

        prepare_ranks(sorted(modules))
