"""Picture of the affinity matrix in the order of a plan, with its towers boxed (the paper's Figure 9)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dmt.formatting import counted
from dmt.partitioner.affinity import FeatureAffinity
from dmt.partitioner.partition import tower_affinity
from dmt.partitioner.report.style import (
    label_of,
    name_shortener,
    new_figure,
    save_figure,
    tower_color,
    tower_ink,
    write_text,
)
from dmt.plan.towers import TowerPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_affinity"]

# One hue that none of the tower colours has, light to dark, so that it survives a grey printer.
HEAT_COLORS = ("#FFFFFF", "#E6E8EE", "#B9BFCE", "#848DA6", "#4F5A78", "#1E2746")
DIAGONAL_COLOR = "#F1EFE8"
MOST_LABELLED, MOST_LETTERS = 64, 28
# In points: between the matrix and the coloured band along its edge, and the band itself.
BAND_GAP, BAND_WIDTH = 4.0, 7.0


def plot_affinity(
    affinity: FeatureAffinity, plan: TowerPlan, path: str | os.PathLike[str], *, title: str | None = None
) -> Path:
    """Draws the affinity matrix in the order of the plan, with the towers boxed and colour-coded (paper's Figure 9).

    The features are named on the axes up to 64 of them (long names without their middle), beyond that only the towers.
    The colour scale ends at the largest affinity of two different features; the diagonal is left blank, as it would
    outshine everything else.

    Args:
        affinity: of the plan's features, in any order.
        plan: the towers.
        path: the file to write; its suffix chooses the format (``.png``, ``.svg``, ``.pdf``).
        title: heading; by default the strategy, the counts, and the mean affinity within and between towers.

    Returns:
        The path written.

    Raises:
        InputError: plan and affinity are not about the same features, the suffix is no picture format, or the file
            cannot be written.

    Example:
        >>> import tempfile
        >>> affinity = FeatureAffinity(matrix=[[1, 0.9, 0], [0.9, 1, 0], [0, 0, 1]], features=["a", "b", "c"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     plot_affinity(affinity, TowerPlan.from_lists([["a", "b"], ["c"]]), f"{folder}/towers.png").name
        'towers.png'
    """
    from matplotlib.colors import LinearSegmentedColormap

    matrix = affinity.permuted(plan.features).matrix.copy()
    size = len(matrix)
    np.fill_diagonal(matrix, np.nan)
    top = float(np.nanmax(matrix)) if size > 1 else 0.0
    # Rows need their height only where they are named.
    side = min(14.0, max(6.0, 2.6 + 0.21 * size)) if size <= MOST_LABELLED else 9.0
    figure = new_figure(path, size=(side + 1.0, side), caller="plot_affinity", layout="constrained")
    axes = figure.add_subplot()
    heat = LinearSegmentedColormap.from_list("affinity", HEAT_COLORS).with_extremes(bad=DIAGONAL_COLOR)
    # Where there are more cells than pixels, a pixel is a mean of cells, not one picked from them.
    image = axes.imshow(matrix, cmap=heat, vmin=0.0, vmax=top or 1.0, interpolation="antialiased")
    badge_height = _draw_towers(axes, plan, side)
    _label_axes(axes, plan, side)
    axes.set_title(title or _default_title(affinity, plan), fontsize=11, loc="left", pad=badge_height + 14.0)
    bar = figure.colorbar(image, ax=axes, fraction=0.035, pad=0.02, aspect=32)
    bar.set_label("affinity  |mean cosine|", fontsize=9)
    bar.ax.tick_params(labelsize=8, length=2)
    bar.outline.set_visible(False)
    return save_figure(figure, path, caller="plot_affinity")


def _draw_towers(axes: Axes, plan: TowerPlan, side: float) -> float:
    """Boxes each tower's block, colours the left and lower edge, and puts the names on top; returns their height."""
    from matplotlib.patches import Rectangle

    # A default name is shown by its number; names of one's own may be long and are then written upright.
    shorten = name_shortener(MOST_LETTERS)
    names = [shorten(label_of(tower.name)) for tower in plan.towers]
    longest = max(map(len, names))
    turned = longest > 3
    # About 55 of an inch's 72 points are left for the matrix.
    points_per_feature = 55.0 * side / len(plan.features)
    next_free, start = -np.inf, 0
    for number, tower in enumerate(plan.towers):
        color, extent = tower_color(number), len(tower.features)
        # A box must not fill the block that it surrounds.
        width = min(2.4, 0.12 * extent * points_per_feature)
        axes.add_patch(
            Rectangle(
                (start - 0.5, start - 0.5), extent, extent, fill=False, ec=color, lw=width, clip_on=False, zorder=3
            )
        )
        _draw_bands(axes, start, extent, color)
        middle = start + extent / 2 - 0.5
        # Names that would run into the one before are left out.
        half = (8.0 if turned else 5.0 + 3.0 * len(names[number])) / points_per_feature
        if middle - half >= next_free:
            next_free = middle + half
            _draw_badge(axes, middle, names[number], number, turned=turned)
        start += extent
    if not turned:
        write_text(axes, "tower", (-0.5, -0.5), offset=(-6.0, 8.0), ha="right", va="bottom", fontsize=8)
    return 8.0 + (6.5 * longest if turned else 10.0)


def _draw_badge(axes: Axes, middle: float, name: str, number: int, *, turned: bool) -> None:
    write_text(
        axes,
        name,
        (middle, -0.5),
        offset=(0.0, 8.0),
        ha="center",
        va="bottom",
        rotation=90 if turned else 0,
        fontsize=8,
        fontweight="bold",
        color=tower_ink(number),
        bbox={"boxstyle": "round,pad=0.25", "facecolor": tower_color(number), "edgecolor": "none"},
    )


def _draw_bands(axes: Axes, start: int, extent: int, color: str) -> None:
    from matplotlib.transforms import ScaledTranslation

    figure = axes.get_figure()
    assert figure is not None, "the axes were made by a figure"
    size = axes.get_xlim()[1] + 0.5
    gap = min(0.002 * size, 0.1 * extent)
    ends = (start - 0.5 + gap, start + extent - 0.5 - gap)
    # Distances and widths in points: a band looks the same beside 3 features and beside 300.
    away = (BAND_GAP + BAND_WIDTH / 2) / 72
    left = axes.get_yaxis_transform() + ScaledTranslation(-away, 0, figure.dpi_scale_trans)
    below = axes.get_xaxis_transform() + ScaledTranslation(0, -away, figure.dpi_scale_trans)
    for xs, ys, transform in (((0.0, 0.0), ends, left), (ends, (0.0, 0.0), below)):
        axes.plot(xs, ys, color=color, linewidth=BAND_WIDTH, solid_capstyle="butt", transform=transform, clip_on=False)


def _label_axes(axes: Axes, plan: TowerPlan, side: float) -> None:
    size = len(plan.features)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0, pad=BAND_GAP + BAND_WIDTH + 3.0, labelcolor="#333333")
    if size > MOST_LABELLED:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel(f"{size:,} features, tower by tower", fontsize=9, labelpad=BAND_GAP + BAND_WIDTH + 4.0)
        return
    # About 55 of an inch's 72 points are left for the matrix; a label must not be taller than its row.
    font = min(9.0, max(4.5, 0.68 * 55.0 * side / size))
    names = list(map(name_shortener(MOST_LETTERS), plan.features))
    axes.set_xticks(range(size), names, rotation=90, fontsize=font)
    axes.set_yticks(range(size), names, fontsize=font)


def _default_title(affinity: FeatureAffinity, plan: TowerPlan) -> str:
    within, between = tower_affinity(affinity, plan)
    means = [
        f"{word} towers {mean:.3f}" for word, mean in (("within", within), ("between", between)) if mean is not None
    ]
    counts = f"{counted(affinity.num_features, 'feature')} in {counted(plan.num_towers, 'tower')}, {plan.strategy}"
    return counts + (f"\nmean affinity {', '.join(means)}" if means else "")
