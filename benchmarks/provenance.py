"""Provenance of a result: the machine's processor and the commit of the code."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

__all__ = ["commit", "processor"]

_HERE = Path(__file__).parent


def processor() -> str:
    """The processor's name where the system tells it, for Linux; else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """The commit that is checked out, marked where files have changed since."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=_HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "unknown"
