"""Parts of `benchmarks.train_step`: the contenders, and a job that times all of them side by side."""

from __future__ import annotations
