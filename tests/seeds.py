"""Random cases of a test: some in `make test`, all in `make test-all`."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(daily: int, number: int) -> list[Any]:
    """The seeds below ``number``; those from ``daily`` on are marked slow."""
    return [*range(daily), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(daily, number))]
