"""Names in pictures."""

from __future__ import annotations

import unicodedata
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

__all__ = ["drawable", "keep_apart", "write_badge", "write_label"]

# Stands for a character that the font cannot draw.
ABSENT = "\u25a1"


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
