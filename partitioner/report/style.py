"""Colours, markers, names and files that all pictures of a partition share."""

from __future__ import annotations

import os
import unicodedata
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dmt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    "tower_color",
    "tower_ink",
    "tower_marker",
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
    """The colour of tower ``number``, the same in every picture and on the pages; repeats after eight towers.

    Example:
        >>> tower_color(0), tower_color(8)
        ('#0072B2', '#0072B2')
    """
    return TOWER_COLORS[number % len(TOWER_COLORS)]


def tower_ink(number: int) -> str:
    """The colour of letters on `tower_color`.

    Example:
        >>> tower_ink(0), tower_ink(1)
        ('#FFFFFF', '#000000')
    """
    return "#000000" if tower_color(number) in LIGHT_COLORS else "#FFFFFF"


def tower_marker(number: int) -> str:
    """The marker of tower ``number``: another one whenever the colours begin again.

    Example:
        >>> tower_marker(7), tower_marker(8)
        ('o', 's')
    """
    return TOWER_MARKERS[number // len(TOWER_COLORS) % len(TOWER_MARKERS)]


def label_of(tower: str) -> str:
    """A tower's name in a picture: the bare number of a default name.

    Example:
        >>> label_of("tower_12"), label_of("user")
        ('12', 'user')
    """
    return tower.removeprefix("tower_")


def name_shortener(most: int | None = None) -> Callable[[str], str]:
    """A function that makes names from outside fit for a picture.

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
    path: str | os.PathLike[str], *, size: tuple[float, float], caller: str, layout: Literal["constrained"] | None
) -> Figure:
    """A figure of its own, for a file at ``path``; nothing of ``pyplot`` is involved.

    Args:
        path: the file that will be written.
        size: width and height in inches.
        caller: name of the public function, for the error.
        layout: matplotlib's layout engine (``"constrained"``), or None for axes that are placed by hand.

    Raises:
        InputError: the suffix of ``path`` is no picture format.

    Example:
        >>> new_figure("towers.png", size=(6.0, 4.0), caller="plot_balance", layout=None).get_size_inches().tolist()
        [6.0, 4.0]
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
    heading, *rest = lines
    for number, line in enumerate(reversed(rest)):
        axes.annotate(
            line,
            (0.0, 1.0),
            xycoords="axes fraction",
            xytext=(0.0, pad + 13.0 * number),
            textcoords="offset points",
            fontsize=9,
            color=SOFT,
            va="bottom",
        )
    axes.annotate(
        heading,
        (0.0, 1.0),
        xycoords="axes fraction",
        xytext=(0.0, pad + 13.0 * len(rest) + (2.0 if rest else 0.0)),
        textcoords="offset points",
        fontsize=11.5,
        color=INK,
        va="bottom",
    )


def dress_axes(axes: Axes, *, grid: str) -> None:
    """Quiet axes: a grid along ``"x"`` or ``"y"``, no ticks, only the spine that values are not read from."""
    axes.grid(axis="x" if grid == "x" else "y", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, length=0, labelcolor="#444444")
    for side, spine in axes.spines.items():
        spine.set_visible(side == ("left" if grid == "x" else "bottom"))
        spine.set_color("#BBBBBB")
