"""Pictures of the speed study: step times with their bounds, and step times over a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.steps_report.measures import Measured, best_flat
from dmt.report.style import INK, SOFT, TOWER_COLORS, add_title, dress_axes, new_figure, save_figure

__all__ = ["plot_steps", "plot_sweeps"]

_COLORS = {"flat": "#8A8F98", "etc": TOWER_COLORS[1], "sptt": TOWER_COLORS[0], "dmt": TOWER_COLORS[2]}
_ROW_INCHES, _FRAME_INCHES, _WIDTH_INCHES, _PANEL_INCHES = 0.3, 1.3, 8.0, 4.3


def plot_steps(contenders: Sequence[Measured], path: Path, *, subtitle: str) -> Path:
    """Bars of the median step time with whiskers from P10 to P90, and a mark at each one's bound.

    Args:
        contenders: at least one.
        path: the picture.
        subtitle: the setting.
    """
    height = _ROW_INCHES * len(contenders) + _FRAME_INCHES
    figure = new_figure(path, size=(_WIDTH_INCHES, height), caller="plot_steps")
    axes = figure.add_subplot()
    for row, found in enumerate(contenders):
        low, middle, high = (found.percentile(percent) for percent in (10, 50, 90))
        axes.barh(row, middle, height=0.72, color=_COLORS[found.family])
        axes.errorbar(middle, row, xerr=[[middle - low], [high - middle]], color=SOFT, linewidth=1.1, capsize=2.5)
        axes.plot([found.bound] * 2, [row - 0.42, row + 0.42], color=INK, linewidth=2.2, solid_capstyle="butt")
        flat = best_flat(contenders, found.precision)
        ratio = "" if flat is None else f"  {flat.median / found.median:.2f} x"
        place = (max(high, found.bound), row)
        look = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontsize": 9, "color": INK}
        axes.annotate(f"{middle:.2f} s{ratio}", place, **look)  # type: ignore[arg-type]
    axes.set_yticks(range(len(contenders)), [found.name for found in contenders])
    axes.set_ylim(len(contenders) - 0.4, -0.6)
    dress_axes(axes, grid="x")
    axes.set_xlim(0, 1.22 * max(max(found.percentile(90), found.bound) for found in contenders))
    axes.set_xlabel("seconds per step", fontsize=9, color=SOFT)
    lines = ["Step time, median and P10 to P90", subtitle]
    lines.append("black mark: the contender's own bound; x: speed over the best flat of the same precision")
    add_title(axes, lines, pad=6)
    return save_figure(figure, path, caller="plot_steps")


def plot_sweeps(sweeps: Mapping[str, Mapping[str, Sequence[Measured]]], path: Path) -> Path:
    """One panel for each sweep: step time of each contender at each value, the seconds logarithmic.

    Args:
        sweeps: by name, the contenders by value; at least one.
        path: the picture.
    """
    size = (_PANEL_INCHES * len(sweeps) + 0.4, 4.4)
    figure = new_figure(path, size=size, caller="plot_sweeps")
    for axes, (name, points) in zip(
        figure.subplots(1, len(sweeps), squeeze=False, sharey=True)[0], sweeps.items(), strict=True
    ):
        contenders = {found.name: found.family for by_value in points.values() for found in by_value}
        for contender, family in contenders.items():
            steps = [next((f.median for f in found if f.name == contender), None) for found in points.values()]
            style = "o-" if family != "flat" else "s--"
            axes.plot(range(len(steps)), steps, style, color=_COLORS[family], label=contender, markersize=4)  # type: ignore[arg-type]
        axes.set_yscale("log")
        axes.set_xticks(range(len(points)), list(points), fontsize=8)
        axes.set_title(name, fontsize=10, loc="left", color=INK)
        axes.legend(fontsize=7, frameon=False)
        dress_axes(axes, grid="y")
    figure.axes[0].set_ylabel("seconds per step", fontsize=9, color=SOFT)
    return save_figure(figure, path, caller="plot_sweeps")
