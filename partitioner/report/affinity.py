"""Picture of the affinity matrix in the order of a plan, with its towers boxed (the paper's Figure 9)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dmt.formatting import counted
from dmt.partitioner.affinity import FeatureAffinity
from dmt.partitioner.partition import tower_affinity
from dmt.partitioner.report.style import drawable, new_figure, save_figure, tower_badges, write_badge
from dmt.plan.towers import TowerPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_affinity"]

# One hue that none of the tower colours has, light to dark, so that it survives a grey printer.
HEAT_COLORS = ("#FFFFFF", "#E6E8EE", "#B9BFCE", "#848DA6", "#4F5A78", "#1E2746")
DIAGONAL_COLOR = "#F1EFE8"
MOST_LABELLED = 64
_SCALES = dict.fromkeys(("together", "apart"), "interaction, of the largest")


def plot_affinity(
    affinity: FeatureAffinity, plan: TowerPlan, path: str | os.PathLike[str], *, title: str | None = None
) -> Path:
    """Draws the affinity matrix in the order of the plan, with the towers boxed and colour-coded (paper's Figure 9).

    The features are named on the axes up to 64 of them (long names without their middle), beyond that only the towers.
    The colour scale ends at the largest affinity of two different features; the diagonal is left blank, as it would
    outshine everything else. Returns the path written.

    Args:
        affinity: of the plan's features, in any order.
        plan: the towers.
        path: the file to write; its suffix chooses the format (``.png``, ``.svg``, ``.pdf``).
        title: heading; by default the strategy, the counts, and the mean affinity within and between towers.

    Raises:
        InputError: plan and affinity are not about the same features, the suffix is no picture format, or the file
            cannot be written.
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
    bar = figure.colorbar(image, ax=axes, fraction=0.035, pad=0.02, aspect=32)
    measure = "affinity  |mean cosine|" if affinity.measure == "cosine" else "affinity  linear CKA"
    bar.set_label(_SCALES.get(plan.strategy, measure), fontsize=9)
    bar.ax.tick_params(labelsize=8, length=2)
    bar.outline.set_visible(False)
    # About 55 of an inch's 72 points are left for the matrix.
    row_height = 55.0 * side / size
    _label_axes(axes, plan.features, row_height)
    figure.suptitle(title or _default_title(affinity, plan), fontsize=11, x=0.02, ha="left", parse_math=False)
    _draw_towers(axes, plan, row_height)
    return save_figure(figure, path, caller="plot_affinity")


def _draw_towers(axes: Axes, plan: TowerPlan, row_height: float) -> None:
    """Boxes each tower's block and puts its name on top; names that would run into the one before are left out."""
    from matplotlib.patches import Rectangle

    start, badges = 0, []
    # A default name is shown by its number; names of one's own may be long and are then written upright.
    turned = max(len(tower.name.removeprefix("tower_")) for tower in plan.towers) > 3
    for tower in tower_badges(plan):
        extent = len(tower["features"])
        # A box must not fill the block that it surrounds.
        corner, middle = (start - 0.5, start - 0.5), (start + extent / 2 - 0.5, -0.5)
        width = min(2.4, 0.12 * extent * row_height)
        axes.add_patch(
            Rectangle(corner, extent, extent, fill=False, ec=tower["color"], lw=width, clip_on=False, zorder=3)
        )
        style = {"xytext": (0.0, 8.0), "va": "bottom", "rotation": 90.0 if turned else 0.0}
        badges.append(write_badge(axes, tower, middle, **style))
        start += extent
    # Lays the picture out, so that the names are where they will be.
    figure = axes.get_figure(root=True)
    assert figure is not None, "the axes were made by a figure"
    figure.draw_without_rendering()
    edge = -np.inf
    for badge in badges:
        box = badge.get_window_extent()
        if box.x0 < edge:
            badge.remove()
        else:
            edge = box.x1 + 4.0


def _label_axes(axes: Axes, features: Sequence[str], row_height: float) -> None:
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0, labelcolor="#333333")
    if len(features) > MOST_LABELLED:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel(f"{len(features):,} features, tower by tower", fontsize=9)
        return
    # A name must not be taller than its row.
    font = min(9.0, max(4.5, 0.68 * row_height))
    names = list(map(drawable, features))
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=font, parse_math=False)
    axes.set_yticks(range(len(names)), names, fontsize=font, parse_math=False)


def _default_title(affinity: FeatureAffinity, plan: TowerPlan) -> str:
    within, between = tower_affinity(affinity, plan)
    means = [
        f"{word} towers {mean:.3f}" for word, mean in (("within", within), ("between", between)) if mean is not None
    ]
    counts = f"{counted(affinity.num_features, 'feature')} in {counted(plan.num_towers, 'tower')}, {plan.strategy}"
    measure = "interaction" if plan.strategy in _SCALES else "affinity"
    return counts + (f"\nmean {measure} {', '.join(means)}" if means else "")
