"""Colours, markers, names and files that all pictures share."""

from __future__ import annotations

import os
import unicodedata
from functools import cache
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dmt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

    from dmt.plan.towers import TowerPlan

__all__ = [
    "INK",
    "LIGHT_COLORS",
    "SOFT",
    "TOWER_COLORS",
    "TOWER_MARKERS",
    "add_title",
    "drawable",
    "dress_axes",
    "keep_apart",
    "new_figure",
    "save_figure",
    "tower_badges",
    "write_badge",
    "write_label",
]

# Okabe and Ito's palette, told apart by colour-blind readers too; reordered so that neighbours differ most.
TOWER_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A90A", "#555555")
# Those on which black letters have the better contrast (above 4.5 to 1); the others take white ones.
LIGHT_COLORS = ("#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A90A")
# With the colours, 64 towers look different; beyond that, numbers tell them apart.
TOWER_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
INK, SOFT = "#222222", "#5B6473"
# Stands for a character that the font cannot draw.
ABSENT = "\u25a1"


def tower_badges(plan: TowerPlan) -> list[dict[str, Any]]:
    """Name, features, colour, ink (the colour of letters on it) and marker of each tower, for pictures and pages."""
    looks = cycle((marker, color) for marker in TOWER_MARKERS for color in TOWER_COLORS)
    return [
        {
            "name": tower.name,
            "features": tower.features,
            "color": color,
            "ink": "#000000" if color in LIGHT_COLORS else "#FFFFFF",
            "marker": marker,
        }
        for tower, (marker, color) in zip(plan.towers, looks, strict=False)
    ]


def write_badge(axes: Axes, badge: Mapping[str, Any], place: tuple[float, float], **style: Any) -> Annotation:
    """Writes one of `tower_badges`, centred at ``place``; of a name such as ``tower_12`` the number."""
    box = {"boxstyle": "round,pad=0.25", "facecolor": badge["color"], "edgecolor": "white", "linewidth": 0.6}
    style = {"color": badge["ink"], "fontsize": 8.0, "fontweight": "bold", "zorder": 5, "bbox": box, **style}
    return write_label(axes, drawable(badge["name"].removeprefix("tower_")), place, **style)


def write_label(axes: Axes, text: str, place: tuple[float, float], **style: Any) -> Annotation:
    """Writes text as it is, centred at ``place``, also outside the axes; an offset in points may move it from there."""
    where = {"xytext": (0.0, 0.0), "textcoords": "offset points", "ha": "center", "va": "center"}
    return axes.annotate(text, place, annotation_clip=False, parse_math=False, **{**where, **style})


def drawable(name: str, most: int = 28) -> str:
    """Returns a name as it can be drawn.

    Control characters become spaces, those that matplotlib's fonts lack a square (matplotlib would warn about every
    one), and of long names the middle is left out, as names of features tend to differ at their ends.

    Example:
        >>> drawable("user_id", 11), drawable("user_history_of_clicks", 11)
        ('user_id', 'user...icks')
    """
    known = _characters()
    shown = "".join(
        " " if unicodedata.category(letter) in ("Cc", "Zl", "Zp") else letter if ord(letter) in known else ABSENT
        for letter in name
    )
    tail = (most - 3) // 2
    return shown if len(shown) <= most else f"{shown[: most - 3 - tail]}...{shown[-tail:]}"


@cache
def _characters() -> frozenset[int]:
    """Characters of matplotlib's fonts."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    fonts = [get_font(findfont(FontProperties(family=[family]))) for family in FontProperties().get_family()]
    return frozenset(code for font in fonts for code in font.get_charmap())


def keep_apart(
    axes: Axes,
    labels: Iterable[Annotation],
    taken: list[Bbox],
    *,
    ways: Sequence[tuple[int, int]],
    gaps: Sequence[float],
) -> int:
    """Moves each label to the first place around its point that is free, and removes it if there is none.

    Labels, annotations centred on their points, stay inside the axes, which must not be resized afterwards, and off the
    boxes ``taken``, in pixels; their own are added to these. Tried in turn are distances ``gaps`` from the point, in
    points, each in all ``ways``, of which (0, 0) is the point itself. Returns the number of labels that were removed.
    """
    scale, frame, missing = axes.figure.dpi / 72, axes.get_window_extent(), 0
    for label in labels:
        box = label.get_window_extent().padded(2 * scale)
        for gap, way in product(gaps, ways):
            offset = np.array(way) * (np.array([box.width, box.height]) / 2 + gap * scale)
            moved = box.translated(*offset)
            if frame.contains(*moved.min) and frame.contains(*moved.max) and not moved.count_overlaps(taken):
                label.set_position(tuple(offset / scale))
                taken.append(moved)
                break
        else:
            label.remove()
            missing += 1
    return missing


def new_figure(
    path: str | os.PathLike[str],
    *,
    size: tuple[float, float],
    caller: str,
    layout: Literal["constrained"] | None,
) -> Figure:
    """Makes a figure of ``size`` inches for a file at ``path``, without ``pyplot`` and its global state.

    ``layout`` is None for axes that are placed by hand; the error names ``caller``.

    Raises:
        InputError: the suffix of ``path`` is no picture format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout=layout, dpi=160)
    formats = FigureCanvasAgg(figure).get_supported_filetypes()
    if Path(path).suffix.lstrip(".").lower() not in formats:
        raise InputError(f"{caller}: path={str(path)!r} needs a suffix that is one of {', '.join(sorted(formats))}.")
    return figure


def save_figure(figure: Figure, path: str | os.PathLike[str], *, caller: str) -> Path:
    """Writes the figure, large enough for everything drawn in it; missing folders are made.

    Raises:
        InputError: the file cannot be written.
    """
    from matplotlib.text import Text

    # Names are any text: a dollar sign starts no formula.
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # A long title or long names reach beyond the canvas; the picture grows with them.
        figure.savefig(target, dpi="figure", bbox_inches="tight", pad_inches=0.12)
    except OSError as error:
        raise InputError(f"{caller}: path={str(path)!r} cannot be written ({error.strerror}).") from error
    return target


def add_title(axes: Axes, lines: Sequence[str], *, pad: float = 10.0) -> None:
    """A heading and smaller lines under it, flush left above the axes; ``pad`` is in points."""
    for number, line in enumerate(reversed(lines)):
        style = {"color": INK, "fontsize": 11.5} if number == len(lines) - 1 else {"color": SOFT, "fontsize": 9}
        at = (0.0, pad + 13.0 * number)
        write_label(axes, line, (0.0, 1.0), xycoords="axes fraction", xytext=at, ha="left", va="bottom", **style)


def dress_axes(axes: Axes, *, grid: Literal["x", "y", "both"]) -> None:
    """Makes axes quiet: a pale grid, no ticks, and only the spine that values are not read from, if there is one."""
    axes.grid(axis=grid, color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, length=0, labelcolor="#444444")
    for side, spine in axes.spines.items():
        spine.set_visible(side == {"x": "left", "y": "bottom"}.get(grid))
        spine.set_color("#BBBBBB")
