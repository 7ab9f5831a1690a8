"""Colors and figure helpers for all pictures, which are drawn without ``pyplot`` and its global state."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dmt.files import write_or_raise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dmt.plan.towers import TowerPlan

__all__ = ["INK", "SOFT", "TOWER_COLORS", "add_title", "dress_axes", "new_figure", "save_figure", "tower_badges"]

# After Okabe and Ito's palette, which color-blind readers can tell apart; reordered so that neighbors differ most, with
# a darker yellow, and gray for black.
TOWER_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A90A", "#555555")
_DARK, _MARKERS = ("#0072B2", "#555555"), "os^DvPX*"
INK, SOFT = "#222222", "#5B6473"


def tower_badges(plan: TowerPlan) -> list[dict[str, Any]]:
    """Returns each tower's name, features, color, ink (of text on that color) and marker; up to 64 towers differ."""
    looks = cycle(product(_MARKERS, TOWER_COLORS))
    return [
        vars(tower) | {"color": color, "marker": marker, "ink": "#FFFFFF" if color in _DARK else "#000000"}
        for tower, (marker, color) in zip(plan.towers, looks, strict=False)
    ]


def new_figure(width: float, height: float) -> Figure:
    """Makes an empty figure of this size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=160)


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Writes the figure in the format of the suffix of ``path``, makes missing folders, and returns ``path``.

    Raises `InputError` if the suffix is not a picture format, or the file cannot be written.
    """
    from matplotlib.text import Text

    for text in figure.findobj(Text):  # a dollar sign in a feature's name does not start a formula
        text.set_parse_math(False)
    target = Path(path)
    with write_or_raise(target, "Picture") as scratch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # drawn as an empty box
        figure.savefig(scratch, format=target.suffix[1:].lower(), dpi="figure", bbox_inches="tight", pad_inches=0.12)
    return target


def add_title(axes: Axes, lines: Sequence[str], *, pad: float = 10.0) -> None:
    """Writes ``lines`` left-aligned above the axes, the first as a heading; ``pad`` is the gap below them in points."""
    for number, line in enumerate(reversed(lines)):
        style: Any = {"color": INK, "fontsize": 11.5} if number == len(lines) - 1 else {"color": SOFT, "fontsize": 9}
        place: Any = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "left", "va": "bottom"}
        axes.annotate(line, (0.0, 1.0), xytext=(0.0, pad + 13.0 * number), annotation_clip=False, **place, **style)


def dress_axes(axes: Axes, *, grid: Literal["x", "y", "both"]) -> None:
    """Gives axes a pale grid, no ticks, and only the spine that bars or lines start from, or none for ``"both"``."""
    axes.grid(axis=grid, color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, length=0, labelcolor="#444444")
    for side, spine in axes.spines.items():
        spine.set(visible=side == {"x": "left", "y": "bottom"}.get(grid), color="#BBBBBB")
