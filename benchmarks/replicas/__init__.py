"""Parts of `benchmarks.replica_study`: Algorithm 1 in one process, its runs, their statistics, and the page."""

from __future__ import annotations
