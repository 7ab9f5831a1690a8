"""From what the ranks saw to the JSON of a run; `Record` grows round by round."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.steps.contenders import Contender
from benchmarks.steps.measure import Turn
from benchmarks.steps.setting import Setting
from dmt.files import atomic_write

__all__ = ["SYNC_EVERY", "Record", "step_records"]

SYNC_EVERY = 10
"""Steps over which the time of one averaging of replicas is spread."""

_CLOCKS = ("seconds", "cpu", "main_cpu", "no_core", "waiting")


class Record:
    """A run, kept by rank 0.

    Args:
        setting: sizes of the job.
        contenders: in the order of the results.
        path: where it is written to.
    """

    def __init__(self, setting: Setting, contenders: Sequence[Contender], path: Path) -> None:
        self._setting = setting
        self._path = path
        self._syncs: dict[str, list[dict[str, Any]]] = {}
        self._results: dict[str, dict[str, Any]] = {c.name: _contender_record(c) for c in contenders}

    def add(self, name: str, **values: Any) -> None:
        """Sets values of a contender."""
        self._results[name].update(values)

    def add_turn(self, name: str, turns: Sequence[Turn]) -> None:
        """Adds the steps of one turn, as every rank saw it."""
        result = self._results[name]
        result["steps"] += step_records(turns, self._setting)
        peaks = [turn.peak_bytes for turn in turns if turn.peak_bytes is not None]
        if peaks:
            weights = result["weight_bytes"]
            result["peak_memory_bytes"] = [peak + size for peak, size in zip(peaks, weights, strict=True)]

    def add_sync(self, name: str, turns: Sequence[Turn]) -> None:
        """Adds one averaging of replicas."""
        syncs = self._syncs.setdefault(name, [])
        syncs += step_records(turns, self._setting)
        result = self._results[name]
        result["sync_seconds"] = statistics.median(sync["seconds"] for sync in syncs)
        step = statistics.median(record["seconds"] for record in result["steps"])
        result["amortised_seconds"] = step + result["sync_seconds"] / SYNC_EVERY
        by_host = [sync["uplink_bytes"] for sync in syncs]
        if by_host[0] is not None:
            result["sync_uplink_bytes"] = [statistics.median(sizes) for sizes in zip(*by_host, strict=True)]

    def write(self) -> None:
        """Writes everything so far, whole or not at all."""
        run = {"setting": asdict(self._setting), "wire": None, "contenders": list(self._results.values())}
        with atomic_write(self._path) as scratch:
            scratch.write_text(json.dumps(run, indent=1) + "\n")


def step_records(turns: Sequence[Turn], setting: Setting) -> list[dict[str, Any]]:
    """The steps of a turn from what each rank saw of it; bytes of the turn are shared out evenly over them."""
    num_steps = len(turns[0].steps)
    uplink = [turn.uplink_bytes for turn in turns[:: setting.ranks_per_host]]
    per_step = None if None in uplink else [size / num_steps for size in uplink if size is not None]
    records = []
    for i in range(num_steps):
        clocks = [turn.steps[i] for turn in turns]
        by_rank: Mapping[str, list[float]] = {name: [getattr(clock, name) for clock in clocks] for name in _CLOCKS}
        records.append({"seconds": max(by_rank["seconds"]), "by_rank": by_rank, "uplink_bytes": per_step})
    return records


def _contender_record(contender: Contender) -> dict[str, Any]:
    return {
        "name": contender.name,
        "family": contender.family,
        "precision": contender.precision,
        "prefetch": contender.prefetch,
        "compression": float(contender.compression),
        "scheme": contender.scheme,
        "num_replicas": contender.num_replicas,
        "options": list(contender.options),
        "notes": "",
        "steps": [],
        "traffic": None,
        "needed": None,
        "peak_memory_bytes": None,
        "weight_bytes": None,
        "sync_seconds": None,
        "sync_uplink_bytes": None,
        "amortised_seconds": None,
    }
