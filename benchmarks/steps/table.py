"""A run of the step benchmark as a table for the console; the full report is `benchmarks.steps_report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["run_table"]

_HEAD = ("contender", "P50 ms", "P10", "P90", "samples/s", "x best flat", "MB/host", "waiting")


def run_table(run: Mapping[str, Any]) -> str:
    """One line per contender; MB/host are those that the busiest uplink sent in a step, waiting is in ms per step.

    ``x best flat`` is the P50 of the fastest flat contender of the same precision over this one's. Times of contenders
    with replicas are without the averaging.
    """
    rows = [_HEAD]
    samples = run["setting"]["batch_size"] * run["setting"]["hosts"] * run["setting"]["ranks_per_host"]
    contenders = [contender for contender in run["contenders"] if contender["steps"]]
    best: dict[str, float] = {}
    for contender in contenders:
        if contender["family"] == "flat":
            precision = contender["precision"]
            best[precision] = min(best.get(precision, np.inf), _quantile(contender, 0.5))
    for contender in contenders:
        seconds, flat = _quantile(contender, 0.5), best.get(contender["precision"])
        waiting = np.median([np.mean(step["by_rank"]["waiting"]) for step in contender["steps"]])
        rows.append(
            (
                contender["name"],
                *(f"{1000 * _quantile(contender, share):.0f}" for share in (0.5, 0.1, 0.9)),
                f"{samples / seconds:.0f}",
                "-" if flat is None else f"{flat / seconds:.2f}",
                _megabytes(contender["steps"]),
                f"{1000 * waiting:.0f}",
            )
        )
    return _aligned(rows)


def _quantile(contender: Mapping[str, Any], share: float) -> float:
    return float(np.quantile([step["seconds"] for step in contender["steps"]], share))


def _megabytes(steps: Sequence[Mapping[str, Any]]) -> str:
    if steps[0]["uplink_bytes"] is None:
        return "-"
    return f"{np.median([max(step['uplink_bytes']) for step in steps]) / 1e6:.1f}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for name, *numbers in rows:
        cells = [name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True))]
        lines.append("  ".join(cells))
    return "\n".join(lines)
