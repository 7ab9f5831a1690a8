"""The pictures of a partition: its affinity matrix (the paper's Figure 9), and its features as points in a plane."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dmt.formatting import counted
from dmt.partitioner.affinity import FeatureAffinity
from dmt.partitioner.partition import Partition, tower_affinity
from dmt.partitioner.report.style import drawable, keep_apart, write_badge, write_label
from dmt.plan.towers import TowerPlan
from dmt.report.style import INK, add_title, dress_axes, new_figure, save_figure, tower_badges

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_affinity", "plot_coordinates", "principal_axes"]

# One hue that none of the tower colours has, light to dark, so that it survives a grey printer.
HEAT_COLORS = ("#FFFFFF", "#E6E8EE", "#B9BFCE", "#848DA6", "#4F5A78", "#1E2746")
DIAGONAL_COLOR = "#F1EFE8"
MOST_LABELLED = 64
_SCALES = dict.fromkeys(("together", "apart"), "interaction, of the largest")
# Meaning of a small distance in the picture; the distances are those of `dmt.partitioner.embed.distances`.
MEANINGS = {
    "coherent": "near = alike (distance 1 - affinity)",
    "diverse": "near = unlike (distance = affinity)",
}
# A name is tried in these directions, and at these distances from the edge of its point's marker.
WAYS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
DISTANCES = (1.0, 13.0)


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
    figure = new_figure(path, size=(side + 1.0, side), caller="plot_affinity")
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


def plot_coordinates(partition: Partition, path: str | os.PathLike[str]) -> Path:
    """Draws the features where the embedding of their distances put them (DMT paper, section 3.3), tower by tower.

    A line ties every point to the centre of its tower, so that membership does not depend on colours alone; up to 64
    towers differ in colour or marker, and every tower has its name at its centre. Up to 64 features are named beside
    their points. Names without room are left out, and the subtitle counts them. Both axes have one scale, as only
    distances mean something.

    Points in more than two dimensions are shown along the two principal axes, and the subtitle says which share of
    the variance they hold. Points in one dimension lie on a line.

    The suffix of ``path``, which is returned, chooses the format (``.png``, ``.svg``, ``.pdf``).

    Raises:
        InputError: the suffix is no picture format, or the file cannot be written.
    """
    figure = new_figure(path, size=(9.0, 9.0), caller="plot_coordinates")
    # Placed by hand: names are measured in pixels, which must not move afterwards.
    figure.set_layout_engine("none")
    axes = figure.add_axes((0.04, 0.04, 0.94, 0.82))
    points, share = principal_axes(partition.points)
    row = {name: i for i, name in enumerate(partition.affinity.features)}
    members = [[row[name] for name in tower.features] for tower in partition.plan.towers]
    # Diameter of a marker in points: large for few features, just visible for thousands.
    diameter = float(np.clip(60.0 / np.sqrt(len(points)), 2.6, 8.0))
    towers = tower_badges(partition.plan)
    _draw_points(axes, points, members, towers, diameter)
    missing = _write_names(axes, points, partition, members, towers, diameter)
    add_title(axes, _title(partition, share, missing))
    return save_figure(figure, path, caller="plot_coordinates")


def principal_axes(points: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Two coordinates for every point: those of a plane as they are, a line with a zero, else the principal axes.

    Returns:
        ([F, 2] float64 with their mean at the origin, share of the variance that they hold) for points [F, n]; the
        share is 1 up to two dimensions and where all points are in one place.
    """
    centred = points - points.mean(axis=0)
    if points.shape[1] <= 2:
        return np.pad(centred, ((0, 0), (0, 2 - points.shape[1]))), 1.0
    variances, directions = np.linalg.eigh(centred.T @ centred)
    total = float(variances.sum())
    return centred @ directions[:, :-3:-1], float(variances[-2:].sum()) / total if total > 0 else 1.0


def _draw_points(
    axes: Axes, points: NDArray[np.float64], members: list[list[int]], towers: list[dict[str, Any]], diameter: float
) -> None:
    from matplotlib.collections import LineCollection

    thin = len(points) > 500
    for rows, tower in zip(members, towers, strict=True):
        own, color = points[rows], tower["color"]
        spokes = np.stack([own, np.broadcast_to(own.mean(axis=0), own.shape)], axis=1)
        axes.add_collection(
            LineCollection(list(spokes), colors=color, linewidths=0.5 if thin else 1.2, alpha=0.5, zorder=1)
        )
        style: dict[str, Any] = {"color": color, "marker": tower["marker"], "linewidths": 0.15 if thin else 0.5}
        axes.scatter(own[:, 0], own[:, 1], s=diameter**2, edgecolors="white", zorder=2, **style)
    dress_axes(axes, grid="both")
    # Room for names around the points, and one scale for both axes.
    axes.margins(0.14, 0.08)
    axes.set_aspect("equal", adjustable="datalim")
    axes.apply_aspect()


def _write_names(
    axes: Axes,
    points: NDArray[np.float64],
    partition: Partition,
    members: list[list[int]],
    towers: list[dict[str, Any]],
    diameter: float,
) -> tuple[int, int]:
    """Names of towers, then of features; returns how many of each found no room."""
    from matplotlib.transforms import Bbox

    badges = [
        write_badge(axes, tower, tuple(points[rows].mean(axis=0))) for tower, rows in zip(towers, members, strict=True)
    ]
    taken: list[Bbox] = []
    gaps = [diameter / 2 + distance for distance in DISTANCES]
    towers_missing = keep_apart(axes, badges, taken, ways=((0, 0), *WAYS), gaps=gaps)
    if len(points) > MOST_LABELLED:
        return towers_missing, 0
    radius = diameter / 2 * axes.figure.dpi / 72
    taken += [Bbox([place - radius, place + radius]) for place in axes.transData.transform(points)]
    labels = [
        write_label(axes, drawable(name), tuple(place), fontsize=8.0, color=INK, zorder=4)
        for name, place in zip(partition.affinity.features, points, strict=True)
    ]
    return towers_missing, keep_apart(axes, labels, taken, ways=WAYS, gaps=gaps)


def _title(partition: Partition, share: float, missing: tuple[int, int]) -> list[str]:
    plan, dims = partition.plan, partition.points.shape[1]
    heading = f"{counted(len(plan.features), 'feature')} in {counted(plan.num_towers, 'tower')}, {plan.strategy}"
    meaning = [MEANINGS[plan.strategy]] if plan.strategy in MEANINGS else []
    meaning.append(f"normalized stress {partition.normalized_stress:.3f} (0 is perfect, above 0.2 is poor)")
    remarks = [f"first two of {dims} principal axes, {share:.0%} of the variance"] if dims > 2 else []
    remarks += [
        f"{counted(number, word)} left out for lack of room"
        for number, word in zip(missing, ("tower name", "feature name"), strict=True)
        if number
    ]
    return [heading, "; ".join(meaning), *(["; ".join(remarks)] if remarks else [])]
