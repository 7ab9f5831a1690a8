"""Step time by hosts, batch and link rate: the runs of a sweep beside the main run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.steps_report.measures import Measured, measure_run

__all__ = ["SWEEPS", "Point", "Sweep", "make_sweep", "value_name"]

SWEEPS = {"hosts": "hosts", "batch": "batch_size", "rate": "mbit_per_s"}
"""Parts of the study, and the entry of the setting that each varies."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """The contenders at one value."""

    value: float | None
    """Hosts, local batch, or Mbit/s, where None is unlimited."""
    contenders: tuple[Measured, ...]

    def named(self, name: str) -> Measured | None:
        """The contender of that name; None where it did not run here."""
        return next((found for found in self.contenders if found.name == name), None)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The points of one part, the smallest value first, an unlimited rate last."""

    part: str
    points: tuple[Point, ...]
    names: tuple[str, ...]
    """Contenders that ran at every point made for this sweep."""


def make_sweep(part: str, runs: Sequence[Mapping[str, Any]], *, cores: int) -> Sweep | None:
    """The runs of a part with the main run, which has the same setting but for one value.

    Args:
        part: a key of `SWEEPS`.
        runs: all of the study, each with its ``part``.
        cores: of the machine.

    Returns:
        The sweep; None where no run of the part is there, or its runs have no contender in common.
    """
    key = SWEEPS[part]
    points = {}
    for run in [run for wanted in ("main", part) for run in runs if run["part"] == wanted]:
        if contenders := measure_run(run, cores=cores):
            points[run["setting"][key]] = Point(value=run["setting"][key], contenders=tuple(contenders))
    own = [run for run in runs if run["part"] == part]
    if not own or not points:
        return None
    shared = set.intersection(*({found.name for found in point.contenders} for point in points.values()))
    first = [one["name"] for one in own[0]["contenders"] if one["name"] in shared]
    if not first:
        return None
    values = sorted(points, key=lambda value: float("inf") if value is None else value)
    return Sweep(part=part, points=tuple(points[value] for value in values), names=tuple(first))


def value_name(part: str, value: float | None) -> str:
    """A value of a sweep in words.

    Example:
        >>> value_name("rate", None), value_name("hosts", 1), value_name("batch", 8192)
        ('unlimited', '1 host', '8,192')
    """
    if part == "rate":
        return "unlimited" if value is None else f"{value:g} Mbit/s"
    if part == "hosts":
        return f"{value:g} host{'' if value == 1 else 's'}"
    return f"{value:,.0f}"
