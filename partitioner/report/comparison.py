"""Affinity within and between the towers of a plan, beside what naive and random towers reach."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from dmt.partitioner.partition import AffinityComparison, Partition
from dmt.partitioner.report.style import SOFT, add_title, dress_axes, new_figure, save_figure, write_text
from dmt.partitioner.verdict import deviations_from_random

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_comparison"]

# Field of `AffinityComparison`, its words, marker and colour; told apart by place and marker, colour only helps.
_ROWS = (
    ("within", "in one tower of this plan", "o", "#0072B2"),
    ("between", "in different towers of this plan", "D", "#848DA6"),
    ("within_strided", "in one naive (strided) tower", "s", "#E69F00"),
    ("within_random", "in one random tower", "^", "#555555"),
)


def plot_comparison(partition: Partition, path: str | os.PathLike[str]) -> Path:
    """Draws the mean affinity of pairs of features within and between towers against naive and random towers.

    One panel per strategy that was tried, the chosen one on top, on one axis. Random towers have a bar of one standard
    deviation to either side. A mean that does not exist (towers of one feature; a single tower) is said to be absent.

    Naive towers are those of the paper's section 5.2.3. `plot_coordinates` takes the same arguments, returns and raises
    the same.
    """
    shown = list(partition.every)
    figure = new_figure(path, size=(6.2, 0.5 + 2.0 * len(shown)), caller="plot_comparison", layout=None)
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    figure.subplots_adjust(hspace=0.26)
    for number, (part, axes) in enumerate(zip(shown, panels, strict=True)):
        _draw(axes, part.comparison)
        chosen = " (chosen)" if number == 0 and len(shown) > 1 else ""
        add_title(axes, [f"{part.plan.strategy}{chosen}{_distance(part.comparison)}"], pad=4.0)
    _set_range(panels[0], [part.comparison for part in shown])
    panels[-1].set_xlabel("mean affinity of the pairs of features", fontsize=9.5, color="#444444")
    return save_figure(figure, path, caller="plot_comparison")


def _draw(axes: Axes, comparison: AffinityComparison) -> None:
    for row, (key, _, marker, color) in enumerate(_ROWS):
        value = getattr(comparison, key)
        if value is None:
            coords = axes.get_yaxis_transform()
            write_text(axes, "no such pair", (0.01, row), offset=(0.0, 0.0), coords=coords, va="center", color=SOFT)
            continue
        error = comparison.std_random if key == "within_random" else None
        axes.errorbar(
            [value],
            [row],
            xerr=[error] if error is not None else None,
            color=color,
            marker=marker,
            markersize=9,
            markeredgecolor="white",
            elinewidth=2.0,
            capsize=5,
            zorder=3,
        )
        deviation = "" if error is None else f" \u00b1 {error:.4f}"
        coords = axes.get_yaxis_transform()
        write_text(axes, f"{value:.4f}{deviation}", (1.0, row), offset=(8.0, 0.0), coords=coords, va="center")
    axes.set_yticks(range(len(_ROWS)), [words for _, words, _, _ in _ROWS])
    axes.set_ylim(len(_ROWS) - 0.5, -0.5)
    dress_axes(axes, grid="x")


def _set_range(axes: Axes, comparisons: list[AffinityComparison]) -> None:
    """From zero where that does not squeeze the differences, else around the values."""
    ends = []
    for comparison in comparisons:
        ends += [value for key, *_ in _ROWS if (value := getattr(comparison, key)) is not None]
        if comparison.within_random is not None and comparison.std_random is not None:
            ends += [comparison.within_random + sign * comparison.std_random for sign in (-1, 1)]
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    if low < 0.7 * high:
        low = min(low, 0.0)
    # Differences in the fourth decimal must not fill the picture.
    slack = max(0.05 * (high - low), (0.01 - (high - low)) / 2)
    axes.set_xlim(low - slack, high + slack)


def _distance(comparison: AffinityComparison) -> str:
    deviations = deviations_from_random(comparison)
    if deviations is None:
        return ""
    side = "above" if deviations >= 0 else "below"
    return f": {abs(deviations):.1f} standard deviations {side} random towers"
