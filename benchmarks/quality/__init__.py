"""Parts of `benchmarks.quality_study`: which models are trained, how, and how it is written down."""

from __future__ import annotations
