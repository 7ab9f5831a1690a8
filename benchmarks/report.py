"""Markdown tables and provenance for all records."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dmt.files import atomic_write
from dmt.training.records import versions

__all__ = ["ABSENT", "about", "commit", "markdown_table", "processor", "write_json"]

ABSENT = "-"
"""Text of a table cell without a value."""
_HERE = Path(__file__).parent


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown.

    Example:
        >>> print(markdown_table(["a", "b"], [["1", "2"]]))
        | a | b |
        | --- | --- |
        | 1 | 2 |
    """
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def about(command: str, **facts: Any) -> dict[str, Any]:
    """Returns the provenance of a record: date, commit, processor, package versions, command, and other facts."""
    return {
        "date": f"{datetime.now(tz=UTC):%Y-%m-%d}",
        "commit": commit(),
        "machine": processor(),
        "packages": versions(),
        "command": command,
        **facts,
    }


def write_json(path: Path, value: Any) -> None:
    """Writes a value as JSON; replaces the file atomically."""
    with atomic_write(path) as scratch:
        scratch.write_text(json.dumps(value, indent=1) + "\n")


def processor() -> str:
    """Returns the processor's name on Linux, or else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """Returns the checked-out commit, with the suffix ``-dirty`` if files have changed since; else ``unknown``."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        described = subprocess.run(command, cwd=_HERE, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git
        return "unknown"
    return described.stdout.strip() or "unknown"
