"""Colours, markers, names and files that all pictures share."""

from __future__ import annotations

import os
import unicodedata
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dmt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import LayoutEngine

    from dmt.plan.towers import TowerPlan

__all__ = [
    "INK",
    "LIGHT_COLORS",
    "SOFT",
    "TOWER_COLORS",
    "TOWER_MARKERS",
    "add_title",
    "dress_axes",
    "label_of",
    "name_shortener",
    "new_figure",
    "save_figure",
    "tower_badges",
    "tower_color",
    "tower_ink",
    "tower_marker",
    "write_text",
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


def tower_color(number: int) -> str:
    """Colour of tower ``number``, the same in every picture and on the pages; repeats after eight towers."""
    return TOWER_COLORS[number % len(TOWER_COLORS)]


def tower_ink(number: int) -> str:
    """Colour of letters on `tower_color`."""
    return "#000000" if tower_color(number) in LIGHT_COLORS else "#FFFFFF"


def tower_badges(plan: TowerPlan) -> list[dict[str, Any]]:
    """Name, features, colour and ink of each tower, for a page."""
    return [
        {"name": tower.name, "features": tower.features, "color": tower_color(number), "ink": tower_ink(number)}
        for number, tower in enumerate(plan.towers)
    ]


def tower_marker(number: int) -> str:
    """Marker of tower ``number``, a new one whenever the colours begin again."""
    return TOWER_MARKERS[number // len(TOWER_COLORS) % len(TOWER_MARKERS)]


def label_of(tower: str) -> str:
    """Name of a tower in a picture; a default name such as ``tower_12`` becomes its number."""
    return tower.removeprefix("tower_")


def name_shortener(most: int | None = None) -> Callable[[str], str]:
    """Returns a function that makes any name drawable.

    Control characters become spaces, characters that matplotlib's fonts cannot draw a square (matplotlib would warn
    about every one), and of names longer than ``most`` characters the middle is left out, as names of features tend to
    differ at their ends.

    Example:
        >>> shorten = name_shortener(11)
        >>> shorten("user_id"), shorten("user_history_of_clicks")
        ('user_id', 'user...icks')
    """
    from matplotlib.font_manager import FontProperties, findfont, get_font

    fonts = [get_font(findfont(FontProperties(family=[family]))) for family in FontProperties().get_family()]
    known = frozenset(code for font in fonts for code in font.get_charmap())
    return partial(_shorten, known=known, most=most)


def _shorten(name: str, *, known: frozenset[int], most: int | None) -> str:
    drawable = "".join(
        " " if unicodedata.category(letter) in ("Cc", "Zl", "Zp") else letter if ord(letter) in known else ABSENT
        for letter in name
    )
    if most is None or len(drawable) <= most:
        return drawable
    tail = (most - 3) // 2
    return f"{drawable[: most - 3 - tail]}...{drawable[-tail:]}"


def new_figure(
    path: str | os.PathLike[str],
    *,
    size: tuple[float, float],
    caller: str,
    layout: LayoutEngine | Literal["constrained"] | None,
) -> Figure:
    """Makes a figure of ``size`` inches for a file at ``path``, without ``pyplot`` and its global state.

    ``layout`` is matplotlib's layout engine, None for axes that are placed by hand; the error names ``caller``.

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


def write_text(
    axes: Axes,
    text: str,
    place: tuple[float, float],
    *,
    offset: tuple[float, float],
    coords: Any = "data",
    **style: Any,
) -> None:
    """Writes text at an offset in points from a place, also outside the axes; 9 points high by default."""
    style.setdefault("color", INK)
    style.setdefault("fontsize", 9)
    axes.annotate(
        text, place, xycoords=coords, xytext=offset, textcoords="offset points", annotation_clip=False, **style
    )


def add_title(axes: Axes, lines: Sequence[str], *, pad: float = 10.0) -> None:
    """A heading and smaller lines under it, flush left above the axes; ``pad`` is in points."""
    heading, *rest = lines
    above: dict[str, Any] = {"coords": "axes fraction", "va": "bottom"}
    for number, line in enumerate(reversed(rest)):
        write_text(axes, line, (0.0, 1.0), offset=(0.0, pad + 13.0 * number), color=SOFT, **above)
    height = pad + 13.0 * len(rest) + (2.0 if rest else 0.0)
    write_text(axes, heading, (0.0, 1.0), offset=(0.0, height), fontsize=11.5, **above)


def dress_axes(axes: Axes, *, grid: str) -> None:
    """Quiet axes: a grid along ``"x"`` or ``"y"``, no ticks, only the spine that values are not read from."""
    axes.grid(axis="x" if grid == "x" else "y", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, length=0, labelcolor="#444444")
    for side, spine in axes.spines.items():
        spine.set_visible(side == ("left" if grid == "x" else "bottom"))
        spine.set_color("#BBBBBB")
