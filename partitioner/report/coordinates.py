"""The features as points in a plane, tower by tower: what the partitioner grouped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dmt.formatting import counted
from dmt.partitioner.partition import Partition
from dmt.partitioner.report.labels import LabelPlacer
from dmt.partitioner.report.style import (
    INK,
    SOFT,
    add_title,
    label_of,
    name_shortener,
    new_figure,
    save_figure,
    tower_color,
    tower_ink,
    tower_marker,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_coordinates", "principal_axes"]

MOST_LABELLED, MOST_LETTERS, MOST_TOWER_LETTERS = 64, 28, 18
# What a small distance in the picture means; the distances are those of `dmt.partitioner.embed.distances`.
DISTANCES = {
    "coherent": "near = alike (distance 1 - affinity)",
    "diverse": "near = unlike (distance = affinity)",
}


def plot_coordinates(partition: Partition, path: str | os.PathLike[str]) -> Path:
    """Draws the features where the embedding of their distances put them (DMT paper, section 3.3), tower by tower.

    Every point is tied to the centre of its tower by a line, so that membership does not hang on colours alone; up
    to 64 towers differ in colour or marker, and every tower has its name beside its centre. The features are named up
    to 64 of them. Names and tower names move aside to stay apart from each other, or are left out where there is
    no room; the subtitle counts those. The axes have one scale, shown by a bar; they have no ticks, as only
    distances mean something.

    Points in more than two dimensions are shown along the two principal axes, and the subtitle says which share of
    the variance they hold. Points in one dimension lie on a line.

    Args:
        partition: with points [F, n], any n >= 1.
        path: the file to write; its suffix chooses the format (``.png``, ``.svg``, ``.pdf``).

    Returns:
        The path written.

    Raises:
        InputError: the suffix is no picture format, or the file cannot be written.

    Example:
        >>> import tempfile
        >>> from dmt.partitioner import FeatureAffinity
        >>> from dmt.partitioner.partition import Comparison, TowerLimits, TowerLoad
        >>> from dmt.plan.towers import TowerPlan
        >>> partition = Partition(
        ...     plan=TowerPlan.from_lists([["a", "b"], ["c"]], strategy="coherent"),
        ...     affinity=FeatureAffinity(matrix=[[1, 0.9, 0], [0.9, 1, 0], [0, 0, 1]], features=["a", "b", "c"]),
        ...     points=np.array([[0.0, 0.0], [0.1, 0.0], [0.0, 1.0]]),
        ...     stress=0.0,
        ...     normalized_stress=0.0,
        ...     loads=(TowerLoad(name="tower_0", num_features=2), TowerLoad(name="tower_1", num_features=1)),
        ...     limits=TowerLimits(),
        ...     comparison=Comparison(
        ...         within=0.9, between=0.0, within_strided=0.0, within_random=0.3, std_random=0.4
        ...     ),
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     plot_coordinates(partition, f"{folder}/coordinates.png").name
        'coordinates.png'
    """
    figure = new_figure(path, size=(9.0, 9.0), caller="plot_coordinates", layout=None)
    on_a_line = partition.points.shape[1] == 1
    if on_a_line:
        figure.set_size_inches(11.0, 3.6)
    # Placed by hand: labels are measured in pixels, which must not move afterwards.
    axes = figure.add_axes((0.02, 0.02, 0.96, 0.84))
    points, share = principal_axes(partition.points)
    row = {name: i for i, name in enumerate(partition.affinity.features)}
    members = [[row[name] for name in tower.features] for tower in partition.plan.towers]
    _frame(axes, points, on_a_line=on_a_line)
    _draw_points(axes, points, members)
    missing = _write_names(axes, points, partition, members)
    _draw_scale(axes)
    add_title(axes, _title(partition, share, missing))
    return save_figure(figure, path, caller="plot_coordinates")


def principal_axes(points: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Two coordinates for every point: those of a plane as they are, a line with a zero, else the principal axes.

    Args:
        points: [F, n] float64.

    Returns:
        ([F, 2] float64 with their mean at the origin, share of the variance that they hold); the share is 1 up to two
        dimensions and where all points are in one place.

    Example:
        >>> flat, share = principal_axes(np.array([[0.0, 0.0, 5.0], [3.0, 0.0, 5.0], [0.0, 4.0, 5.0]]))
        >>> float(round(np.linalg.norm(flat[1] - flat[2]), 6)), round(share, 6)
        (5.0, 1.0)
    """
    centred = points - points.mean(axis=0)
    if points.shape[1] == 1:
        return np.column_stack([centred, np.zeros(len(points))]), 1.0
    if points.shape[1] == 2:
        return centred, 1.0
    _, scales, directions = np.linalg.svd(centred, full_matrices=False)
    axes = directions[:2]
    # The sign of an axis is arbitrary; this makes it the same everywhere.
    axes = axes * np.sign(axes[np.arange(len(axes)), np.abs(axes).argmax(axis=1)])[:, None]
    flat = np.zeros((len(points), 2))
    flat[:, : len(axes)] = centred @ axes.T
    total = float(np.square(scales).sum())
    return flat, float(np.square(scales[:2]).sum()) / total if total > 0 else 1.0


def _frame(axes: Axes, points: NDArray[np.float64], *, on_a_line: bool) -> None:
    """One scale for both axes and room for names around the points."""
    low, high = points.min(axis=0), points.max(axis=0)
    extent = float((high - low).max()) or 1.0
    middle = (low + high) / 2
    half = np.maximum((high - low) / 2, 0.02 * extent) + np.array([0.14, 0.08]) * extent
    if on_a_line:
        axes.axhline(0.0, color="#D5D8DE", linewidth=1.0, zorder=0)
    else:
        # The axes' box is filled here, so that asking for equal axes moves nothing.
        box = axes.get_window_extent()
        half = np.maximum(half, half[::-1] * np.array([box.width / box.height, box.height / box.width]))
        axes.set_aspect("equal")
    axes.set_xlim(middle[0] - half[0], middle[0] + half[0])
    axes.set_ylim(middle[1] - half[1], middle[1] + half[1])
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color("#D5D8DE")


def _draw_points(axes: Axes, points: NDArray[np.float64], members: list[list[int]]) -> None:
    from matplotlib.collections import LineCollection

    size = _marker_points(len(points)) ** 2
    for number, rows in enumerate(members):
        own = points[rows]
        centre = np.broadcast_to(own.mean(axis=0), own.shape)
        spokes = np.stack([own, centre], axis=1)
        width = 1.2 if len(points) <= 500 else 0.5
        axes.add_collection(
            LineCollection(list(spokes), colors=tower_color(number), linewidths=width, alpha=0.5, zorder=1)
        )
        axes.scatter(
            own[:, 0],
            own[:, 1],
            s=size,
            color=tower_color(number),
            marker=tower_marker(number),
            edgecolors="white",
            linewidths=0.5 if len(points) <= 500 else 0.15,
            zorder=2,
        )


def _marker_points(num_features: int) -> float:
    """Diameter of a marker in points: large for few features, just visible for thousands."""
    return float(np.clip(60.0 / np.sqrt(num_features), 2.6, 8.0))


def _write_names(
    axes: Axes, points: NDArray[np.float64], partition: Partition, members: list[list[int]]
) -> tuple[int, int]:
    """Names of towers, then of features; returns how many of each found no room."""
    pixels = axes.transData.transform(points)
    radius = _marker_points(len(points)) * axes.figure.dpi / 72 / 2
    placer = LabelPlacer(axes)
    # Among thousands of points there is no free place: only the names keep apart from each other there.
    named = len(points) <= MOST_LABELLED
    if named:
        placer.block(pixels, radius)
    shorten, count = name_shortener(MOST_TOWER_LETTERS), len(partition.plan.towers)
    towers_missing = 0
    for number, (tower, rows) in enumerate(zip(partition.plan.towers, members, strict=True)):
        placed = placer.write(
            shorten(label_of(tower.name)),
            pixels[rows].mean(axis=0),
            gap=0.0 if len(rows) > 1 or not named else radius,
            # A name that had to move may otherwise be taken for that of a neighbour; hundreds of lines help nobody.
            leader=INK if count <= 64 else None,
            fontsize=9.0 if count <= 40 else 6.5,
            fontweight="bold",
            color=tower_ink(number),
            bbox={"boxstyle": "round,pad=0.22", "facecolor": tower_color(number), "edgecolor": "white", "lw": 0.6},
            zorder=5,
        )
        towers_missing += not placed
    if not named:
        return towers_missing, 0
    shorten = name_shortener(MOST_LETTERS)
    names_missing = sum(
        not placer.write(
            shorten(name), place, gap=radius, fontsize=8.0, color=INK, zorder=4, leader="#9AA1AD", centred=False
        )
        for name, place in zip(partition.affinity.features, pixels, strict=True)
    )
    return towers_missing, names_missing


def _draw_scale(axes: Axes) -> None:
    """A bar of round length in the lower left corner, below everything else."""
    left, right = axes.get_xlim()
    wanted = (right - left) / 6
    power = 10.0 ** np.floor(np.log10(wanted))
    length = max(step * power for step in (1.0, 2.0, 5.0) if step * power <= wanted)
    transform = axes.get_xaxis_transform()
    start = left + 0.01 * (right - left)
    axes.plot(
        [start, start + length], [-0.03, -0.03], color=SOFT, linewidth=2.2, transform=transform, clip_on=False,
        solid_capstyle="butt",
    )  # fmt: skip
    axes.annotate(
        f"distance {length:g}",
        (start + length, -0.03),
        xycoords=transform,
        xytext=(6.0, 0.0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        color=SOFT,
        annotation_clip=False,
    )


def _title(partition: Partition, share: float, missing: tuple[int, int]) -> list[str]:
    plan, dims = partition.plan, partition.points.shape[1]
    heading = f"{counted(len(plan.features), 'feature')} in {counted(plan.num_towers, 'tower')}, {plan.strategy}"
    meaning = [DISTANCES[plan.strategy]] if plan.strategy in DISTANCES else []
    meaning.append(f"normalized stress {partition.normalized_stress:.3f} (0 is perfect, above 0.2 is poor)")
    remarks = []
    if dims > 2:
        remarks.append(f"first two of {dims} principal axes, {share:.0%} of the variance")
    remarks += [
        f"{counted(number, word)} left out for lack of room"
        for number, word in zip(missing, ("tower name", "feature name"), strict=True)
        if number
    ]
    return [heading, "; ".join(meaning), *(["; ".join(remarks)] if remarks else [])]
