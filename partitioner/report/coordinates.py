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
    SOFT,
    add_title,
    label_of,
    name_shortener,
    new_figure,
    save_figure,
    tower_color,
    tower_ink,
    tower_marker,
    write_text,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["LabelPlacer", "plot_coordinates", "principal_axes"]

MOST_LABELLED, MOST_LETTERS, MOST_TOWER_LETTERS = 64, 28, 18
# Meaning of a small distance in the picture; the distances are those of `dmt.partitioner.embed.distances`.
MEANINGS = {
    "coherent": "near = alike (distance 1 - affinity)",
    "diverse": "near = unlike (distance = affinity)",
}
# A label is tried in these directions, at these distances from its point, with this margin around it; both in points.
# Beyond the first distance a thin line leads back to the point.
DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
DISTANCES = (2.0, 9.0, 18.0, 30.0)
MARGIN = 1.0


def plot_coordinates(partition: Partition, path: str | os.PathLike[str]) -> Path:
    """Draws the features where the embedding of their distances put them (DMT paper, section 3.3), tower by tower.

    A line ties every point to the centre of its tower, so that membership does not depend on colours alone; up to 64
    towers differ in colour or marker, and every tower has its name beside its centre. Up to 64 features are named.
    Names move aside to stay apart from each other, or are left out if there is no room; the subtitle counts those. The
    axes have one scale, shown by a bar, and no ticks, as only distances mean something.

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
        >>> from dmt.partitioner import FeatureAffinity, TowerPartitioner
        >>> affinity = FeatureAffinity(matrix=[[1, 0.9, 0], [0.9, 1, 0], [0, 0, 1]], features=["a", "b", "c"])
        >>> partition = TowerPartitioner(num_towers=2).partition(affinity)
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
            shorten(name), place, gap=radius, leader="#9AA1AD", fontsize=8.0, color=INK, zorder=4, centred=False
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
    place = (start + length, -0.03)
    write_text(axes, f"distance {length:g}", place, offset=(6.0, 0.0), coords=transform, va="center", color=SOFT)


def _title(partition: Partition, share: float, missing: tuple[int, int]) -> list[str]:
    plan, dims = partition.plan, partition.points.shape[1]
    heading = f"{counted(len(plan.features), 'feature')} in {counted(plan.num_towers, 'tower')}, {plan.strategy}"
    meaning = [MEANINGS[plan.strategy]] if plan.strategy in MEANINGS else []
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


class LabelPlacer:
    """Writes labels into axes, each at the first place near its point that is still free.

    The axes must not be resized afterwards: boxes are kept in pixels.
    """

    def __init__(self, axes: Axes) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        figure = axes.get_figure()
        assert figure is not None, "the axes were made by a figure"
        canvas = figure.canvas
        assert isinstance(canvas, FigureCanvasAgg), "other canvases measure text when they write a file only"
        self._axes = axes
        self._renderer = canvas.get_renderer()
        self._pixels_per_point = figure.dpi / 72
        # [K, 4]: left, bottom, right, top of everything that labels must not cover.
        self._taken = np.empty((0, 4))

    def block(self, places: NDArray[np.float64], radius: float) -> None:
        """Keeps labels off the squares of half side ``radius`` around ``places`` [K, 2], in pixels."""
        self._taken = np.concatenate([self._taken, np.hstack([places - radius, places + radius])])

    def write(
        self,
        label: str,
        place: NDArray[np.float64],
        *,
        gap: float,
        leader: str | None = None,
        centred: bool = True,
        **style: Any,
    ) -> bool:
        """Writes ``label`` near ``place`` [2] (pixels); returns False, and writes nothing, if there is no room.

        Args:
            label: the text.
            place: of the point, in pixels.
            gap: radius of the marker around the point, in pixels.
            leader: colour of the line from a label that had to move away; None for no line.
            centred: try the point itself first.
            style: further properties of the text.
        """
        text = self._axes.text(*self._to_data(place), label, ha="center", va="center", parse_math=False, **style)
        extent = text.get_window_extent(self._renderer)
        patch = text.get_bbox_patch()
        if patch is not None:
            text.update_bbox_position_size(self._renderer)
            extent = patch.get_window_extent(self._renderer)
        half = np.array([extent.width, extent.height]) / 2 + MARGIN * self._pixels_per_point
        found = self._free_place(place, half, gap, centred=centred)
        if found is None:
            text.remove()
            return False
        text.set_position(self._to_data(found))
        self._taken = np.vstack([self._taken, np.concatenate([found - half, found + half])])
        edge = np.clip(place, found - half, found + half)
        if leader is not None and np.abs(edge - place).max() > gap + 2 * DISTANCES[0] * self._pixels_per_point:
            ends = np.transpose([self._to_data(place), self._to_data(edge)])
            self._axes.plot(*ends, color=leader, linewidth=0.6, scalex=False, scaley=False, zorder=1.5)
        return True

    def _to_data(self, place: NDArray[np.float64]) -> tuple[float, float]:
        """Pixels to data coordinates, which stay true when the picture is cropped or written at another resolution."""
        x, y = self._axes.transData.inverted().transform(place)
        return float(x), float(y)

    def _free_place(
        self, place: NDArray[np.float64], half: NDArray[np.float64], gap: float, *, centred: bool
    ) -> NDArray[np.float64] | None:
        """Centre of the first free box; None if there is none."""
        frame = self._axes.get_window_extent(self._renderer)
        candidates = [place] if centred else []
        for distance in DISTANCES:
            reach = half + gap + distance * self._pixels_per_point
            candidates += [place + reach * np.array(way) for way in DIRECTIONS]
        for centre in candidates:
            low, high = centre - half, centre + half
            inside = low[0] >= frame.x0 and low[1] >= frame.y0 and high[0] <= frame.x1 and high[1] <= frame.y1
            clear = (low >= self._taken[:, 2:]) | (high <= self._taken[:, :2])
            if inside and clear.any(axis=1).all():
                return centre
        return None
