"""Parts of `benchmarks.tower_study`: the trials, their statistics, and how they are written down."""

from __future__ import annotations
