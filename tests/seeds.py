"""Random cases of a test: some in `make test`, all in `make test-all`."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def collected(request: pytest.FixtureRequest, *names: str) -> set[Any]:
    """Returns the values of these arguments in the tests to run that use a module's fixture; tuples if several."""
    users = [i for i in request.session.items if i.path == request.path and request.fixturename in i.fixturenames]
    found = [user.callspec.params for user in users if hasattr(user, "callspec")]
    return {tuple(p[name] for name in names) if len(names) > 1 else p[names[0]] for p in found if set(names) <= set(p)}


def some_slow(cases: Iterable[Any], slow: Container[Any]) -> list[Any]:
    """Returns the cases of a parametrized test; those in ``slow`` are marked slow."""
    marks = pytest.mark.slow
    return [
        case if case not in slow else pytest.param(*(case if isinstance(case, tuple) else [case]), marks=marks)
        for case in cases
    ]


def seeds(daily: int, number: int) -> list[Any]:
    """The seeds below ``number``; those from ``daily`` on are marked slow."""
    return [*range(daily), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(daily, number))]
