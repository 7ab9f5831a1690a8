"""Picture of the features as points in a plane, tower by tower."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dmt.formatting import counted
from dmt.partitioner.partition import Partition
from dmt.partitioner.report.style import (
    INK,
    add_title,
    drawable,
    dress_axes,
    keep_apart,
    new_figure,
    save_figure,
    tower_badges,
    tower_color,
    tower_marker,
    write_badge,
    write_label,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_coordinates", "principal_axes"]

MOST_LABELLED = 64
# Meaning of a small distance in the picture; the distances are those of `dmt.partitioner.embed.distances`.
MEANINGS = {
    "coherent": "near = alike (distance 1 - affinity)",
    "diverse": "near = unlike (distance = affinity)",
}
# A name is tried in these directions, and at these distances from the edge of its point's marker.
WAYS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
DISTANCES = (1.0, 13.0)


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
    figure = new_figure(path, size=(9.0, 9.0), caller="plot_coordinates", layout=None)
    # Placed by hand: names are measured in pixels, which must not move afterwards.
    axes = figure.add_axes((0.04, 0.04, 0.94, 0.82))
    points, share = principal_axes(partition.points)
    row = {name: i for i, name in enumerate(partition.affinity.features)}
    members = [[row[name] for name in tower.features] for tower in partition.plan.towers]
    # Diameter of a marker in points: large for few features, just visible for thousands.
    diameter = float(np.clip(60.0 / np.sqrt(len(points)), 2.6, 8.0))
    _draw_points(axes, points, members, diameter)
    missing = _write_names(axes, points, partition, members, diameter)
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


def _draw_points(axes: Axes, points: NDArray[np.float64], members: list[list[int]], diameter: float) -> None:
    from matplotlib.collections import LineCollection

    thin = len(points) > 500
    for number, rows in enumerate(members):
        own, color = points[rows], tower_color(number)
        spokes = np.stack([own, np.broadcast_to(own.mean(axis=0), own.shape)], axis=1)
        axes.add_collection(
            LineCollection(list(spokes), colors=color, linewidths=0.5 if thin else 1.2, alpha=0.5, zorder=1)
        )
        style: dict[str, Any] = {"color": color, "marker": tower_marker(number), "linewidths": 0.15 if thin else 0.5}
        axes.scatter(own[:, 0], own[:, 1], s=diameter**2, edgecolors="white", zorder=2, **style)
    dress_axes(axes, grid="both")
    # Room for names around the points, and one scale for both axes.
    axes.margins(0.14, 0.08)
    axes.set_aspect("equal", adjustable="datalim")
    axes.apply_aspect()


def _write_names(
    axes: Axes, points: NDArray[np.float64], partition: Partition, members: list[list[int]], diameter: float
) -> tuple[int, int]:
    """Names of towers, then of features; returns how many of each found no room."""
    from matplotlib.transforms import Bbox

    named = len(points) <= MOST_LABELLED
    centres = [tuple(points[rows].mean(axis=0)) for rows in members]
    towers = tower_badges(partition.plan)
    badges = [write_badge(axes, tower, centre) for tower, centre in zip(towers, centres, strict=True)]
    taken: list[Bbox] = []
    gaps = [diameter / 2 + distance for distance in DISTANCES]
    towers_missing = keep_apart(axes, badges, taken, ways=((0, 0), *WAYS), gaps=gaps)
    if not named:
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
