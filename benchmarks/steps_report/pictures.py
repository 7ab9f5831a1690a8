"""Pictures of the main run: step times with their bounds, and the bytes across hosts by kind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.steps_report.compare import best_flat, fastest, precisions
from benchmarks.steps_report.measures import KINDS, Measured
from dmt.report.style import INK, SOFT, TOWER_COLORS, add_title, dress_axes, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["FAMILY_COLORS", "chosen", "plot_bytes", "plot_steps"]

FAMILY_COLORS = {"flat": "#8A8F98", "etc": TOWER_COLORS[1], "sptt": TOWER_COLORS[0], "dmt": TOWER_COLORS[2]}
_KIND_COLORS = {"ids": "#CC79A7", "forward": "#0072B2", "backward": "#56B4E9", "dense": "#E69F00"}
_ROW_INCHES, _FRAME_INCHES, _WIDTH_INCHES = 0.3, 1.3, 8.0


def chosen(contenders: Sequence[Measured]) -> list[Measured]:
    """Those that the pictures show, slowest family first.

    At the widest precision the fastest of each flat scheme; at the others the best flat; of the rest the fastest of
    each compression and precision. Contenders with replicas are left out.
    """
    found: list[Measured | None] = []
    for place, precision in enumerate(precisions(contenders)):
        flat = [one for one in contenders if (one.family, one.precision) == ("flat", precision)]
        schemes = dict.fromkeys(one.scheme for one in flat)
        by_scheme = [min((o for o in flat if o.scheme == s), key=lambda o: o.median) for s in schemes]
        found += by_scheme if place == 0 else [best_flat(contenders, precision)]
        for family in ("etc", "sptt", "dmt"):
            compressions = sorted({one.compression for one in contenders if one.family == family})
            found += [fastest(contenders, family, precision=precision, compression=c) for c in compressions]
    return [one for one in found if one is not None]


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
        axes.barh(row, middle, height=0.72, color=FAMILY_COLORS[found.family])
        spread = [[middle - low], [high - middle]]
        axes.errorbar(middle, row, xerr=spread, color=SOFT, linewidth=1.1, capsize=2.5)
        axes.plot([found.bound] * 2, [row - 0.42, row + 0.42], color=INK, linewidth=2.2, solid_capstyle="butt")
        flat = best_flat(contenders, found.precision)
        ratio = "" if flat is None else f"  {flat.median / found.median:.2f} x"
        axes.annotate(
            f"{_seconds(middle)}{ratio}",
            (max(high, found.bound), row),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=INK,
        )
    _label_rows(axes, contenders)
    axes.set_xlim(0, 1.22 * max(max(found.percentile(90), found.bound) for found in contenders))
    axes.set_xlabel("seconds per step", fontsize=9, color=SOFT)
    lines = ["Step time, median and P10 to P90", subtitle]
    lines.append("black mark: the contender's own bound; x: speed over the best flat of the same precision")
    add_title(axes, lines, pad=6)
    return save_figure(figure, path, caller="plot_steps")


def plot_bytes(contenders: Sequence[Measured], path: Path, *, subtitle: str) -> Path:
    """Bars of the megabytes that a host sends to others in a step, stacked by kind.

    Args:
        contenders: at least one.
        path: the picture.
        subtitle: the setting.
    """
    height = _ROW_INCHES * len(contenders) + _FRAME_INCHES + 0.2
    figure = new_figure(path, size=(_WIDTH_INCHES, height), caller="plot_bytes")
    axes = figure.add_subplot()
    widest = max(max(sum(found.across.values()), sum(found.needed.values())) for found in contenders) / 1e6
    for row, found in enumerate(contenders):
        left = 0.0
        for kind in KINDS:
            width = found.across[kind] / 1e6
            label = kind if row == 0 else None
            axes.barh(row, width, left=left, height=0.72, color=_KIND_COLORS[kind], label=label)
            left += width
        needed = sum(found.needed.values()) / 1e6
        axes.plot([needed] * 2, [row - 0.42, row + 0.42], color=INK, linewidth=2.2, solid_capstyle="butt")
        axes.annotate(
            f"{left:.1f} MB",
            (max(left, needed), row),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=INK,
        )
    _label_rows(axes, contenders)
    axes.set_xlim(0, 1.15 * widest or 1)
    axes.set_xlabel("MB that a host sends to the others in a step", fontsize=9, color=SOFT)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(KINDS), fontsize=9, frameon=False, borderaxespad=0.2)
    lines = ["Bytes across hosts, counted at the collectives", f"{subtitle}; black mark: bytes that are needed"]
    add_title(axes, lines, pad=26)
    return save_figure(figure, path, caller="plot_bytes")


def _label_rows(axes: Axes, contenders: Sequence[Measured]) -> None:
    axes.set_yticks(range(len(contenders)), [found.name for found in contenders])
    axes.set_ylim(len(contenders) - 0.4, -0.6)
    dress_axes(axes, grid="x")


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
