"""The picture of the sweeps: step time against hosts, local batch and link rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.steps_report.measures import Measured
from benchmarks.steps_report.pictures import FAMILY_COLORS
from benchmarks.steps_report.sweeps import Sweep
from dmt.report.style import INK, SOFT, dress_axes, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_sweeps", "spread_labels"]

_PANEL_INCHES = 4.3
_TITLES = {"hosts": "hosts", "batch": "local batch", "rate": "Mbit/s (none: no limit)"}
# Share of a panel's height that a line of its labels takes.
_LABEL_HEIGHT = 0.062
_DASHES = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)), (0, (1, 1)))


def plot_sweeps(sweeps: Sequence[Sweep], path: Path, *, subtitle: str) -> Path:
    """One panel for each sweep, a line for each contender, both axes logarithmic; lines are named at their ends.

    Args:
        sweeps: at least one.
        path: the picture.
        subtitle: the setting around which they vary.
    """
    size = (_PANEL_INCHES * len(sweeps) + 0.4, 4.4)
    figure = new_figure(path, size=size, caller="plot_sweeps")
    panels = figure.subplots(1, len(sweeps), squeeze=False, sharey=True)[0]
    for sweep, axes in zip(sweeps, panels, strict=True):
        _draw_lines(axes, sweep)
        axes.set_xlabel(_TITLES[sweep.part], fontsize=10, color=INK)
    flat = ", ".join(sorted({name for sweep in sweeps for name in sweep.names if _label(name) == "flat"}))
    heading = f"Seconds per step {subtitle}{f'; flat is {flat}' if flat else ''}"
    figure.suptitle(heading, x=0.01, ha="left", fontsize=10.5, color=INK)
    seconds = [f.median for s in sweeps for p in s.points for f in p.contenders if f.name in s.names]
    low, high = min(seconds) / 1.3, max(seconds) * 1.3
    panels[0].set_yscale("log")
    panels[0].set_ylim(low, high)
    panels[0].yaxis.set_major_formatter("{x:g}")
    panels[0].set_yticks([tick for tick in _ticks() if low <= tick <= high])
    panels[0].set_yticks([], minor=True)
    for sweep, axes in zip(sweeps, panels, strict=True):
        _label_lines(axes, sweep, low=low, high=high)
    return save_figure(figure, path, caller="plot_sweeps")


def _ticks() -> list[float]:
    return [digit * 10.0**power for power in range(-4, 4) for digit in (1, 2, 5)]


def _draw_lines(axes: Axes, sweep: Sweep) -> None:
    # Equal steps on the axis: the values double or nearly so, and an unlimited rate has no place on a scale.
    places = range(len(sweep.points))
    for name in sweep.names:
        found = _line(sweep, name)
        axes.plot(
            places,
            [one.median for one in found],
            color=FAMILY_COLORS[found[0].family],
            linestyle=_dash(sweep, found[0]),
            marker="o",
            markersize=4,
            # Our lines may lie on the flat one, which shows at both sides then.
            linewidth=4.5 if found[0].family == "flat" else 1.8,
        )
    axes.set_xticks(places, ["none" if point.value is None else f"{point.value:g}" for point in sweep.points])
    dress_axes(axes, grid="y")


def _line(sweep: Sweep, name: str) -> list[Measured]:
    return [found for point in sweep.points if (found := point.named(name)) is not None]


def _label(name: str) -> str:
    return "flat" if name.startswith("flat") else name


def _dash(sweep: Sweep, found: Measured) -> str | tuple[float, tuple[float, ...]]:
    """Lines of one family share their colour: the first is solid, the next ones are dashed."""
    names = [name for name in sweep.names if _line(sweep, name)[0].family == found.family]
    return _DASHES[names.index(found.name) % len(_DASHES)]


def _label_lines(axes: Axes, sweep: Sweep, *, low: float, high: float) -> None:
    last = len(sweep.points) - 1
    axes.set_xlim(-0.08 * (last + 1), last + 0.05 + 0.42 * (last + 0.5))
    ends = {name: _line(sweep, name)[-1] for name in sweep.names}
    heights = [float(np.log(ends[name].median / low) / np.log(high / low)) for name in sweep.names]
    for name, height, label_height in zip(sweep.names, heights, spread_labels(heights, _LABEL_HEIGHT), strict=True):
        shown = axes.get_xaxis_transform()
        if abs(height - label_height) > 0.01:
            line = [last + 0.02 * (last + 2), last + 0.055 * (last + 2)]
            axes.plot(line, [height, label_height], transform=shown, color=SOFT, linewidth=0.7)
        place = last + 0.065 * (last + 2)
        axes.text(place, label_height, _label(name), transform=shown, va="center", fontsize=9, color=INK)


def spread_labels(heights: Sequence[float], gap: float) -> list[float]:
    """Heights moved apart to at least ``gap``, in their order, as little upwards as that takes.

    Example:
        >>> [round(height, 2) for height in spread_labels([0.5, 0.1, 0.52], 0.1)]
        [0.5, 0.1, 0.6]
    """
    moved = list(heights)
    below = -np.inf
    for place in np.argsort(heights, kind="stable"):
        moved[place] = max(moved[place], below + gap)
        below = moved[place]
    return moved
