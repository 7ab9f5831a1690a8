"""Warnings that others raise and we cannot fix are ignored here, each with its reason."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
