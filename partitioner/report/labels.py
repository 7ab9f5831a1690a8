"""`LabelPlacer`: names beside points, without one on top of another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["LabelPlacer"]

# Right first, where names are looked for; directions in which the label's box leaves the point.
_DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
# Distances from the point, in points; beyond the first, a thin line leads back to it.
_DISTANCES = (2.0, 9.0, 18.0, 30.0)
# Around every label, in points.
_MARGIN = 1.0


class LabelPlacer:
    """Writes labels into axes, each at the first place near its point that is still free.

    The axes must not be resized afterwards: boxes are kept in pixels.

    Example:
        >>> from matplotlib.backends.backend_agg import FigureCanvasAgg
        >>> from matplotlib.figure import Figure
        >>> figure = Figure()
        >>> canvas = FigureCanvasAgg(figure)
        >>> placer = LabelPlacer(figure.add_axes((0.0, 0.0, 1.0, 1.0)))
        >>> [placer.write("ad", np.array([100.0, 100.0]), gap=2.0) for _ in range(2)]
        [True, True]
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
        """Writes ``label`` near ``place`` [2] (pixels), or leaves it out.

        Args:
            label: the text.
            place: of the point, in pixels.
            gap: radius of the marker around the point, in pixels.
            leader: colour of the line from a label that had to move away; None for no line.
            centred: try the point itself first.
            style: further properties of the text.

        Returns:
            Whether there was room.
        """
        text = self._axes.text(*self._to_data(place), label, ha="center", va="center", parse_math=False, **style)
        extent = text.get_window_extent(self._renderer)
        patch = text.get_bbox_patch()
        if patch is not None:
            text.update_bbox_position_size(self._renderer)
            extent = patch.get_window_extent(self._renderer)
        half = np.array([extent.width, extent.height]) / 2 + _MARGIN * self._pixels_per_point
        found = self._free_place(place, half, gap, centred=centred)
        if found is None:
            text.remove()
            return False
        centre, distance = found
        text.set_position(self._to_data(centre))
        self._taken = np.vstack([self._taken, np.concatenate([centre - half, centre + half])])
        if leader is not None and distance > _DISTANCES[0]:
            edge = np.clip(place, centre - half, centre + half)
            ends = np.transpose([self._to_data(place), self._to_data(edge)])
            self._axes.plot(*ends, color=leader, linewidth=0.6, scalex=False, scaley=False, zorder=1.5)
        return True

    def _to_data(self, place: NDArray[np.float64]) -> tuple[float, float]:
        """Pixels to data coordinates, which stay true when the picture is cropped or written at another resolution."""
        x, y = self._axes.transData.inverted().transform(place)
        return float(x), float(y)

    def _free_place(
        self, place: NDArray[np.float64], half: NDArray[np.float64], gap: float, *, centred: bool
    ) -> tuple[NDArray[np.float64], float] | None:
        """Centre of the first free box and its distance from the point in points; None where there is none."""
        frame = self._axes.get_window_extent(self._renderer)
        candidates = [(place, 0.0)] if centred else []
        for distance in _DISTANCES:
            reach = half + gap + distance * self._pixels_per_point
            # Diagonal boxes touch the point's corner, so they may come nearer.
            candidates += [(place + reach * np.array(way), distance) for way in _DIRECTIONS]
        for centre, distance in candidates:
            low, high = centre - half, centre + half
            inside = low[0] >= frame.x0 and low[1] >= frame.y0 and high[0] <= frame.x1 and high[1] <= frame.y1
            apart = (
                (low[0] >= self._taken[:, 2])
                | (high[0] <= self._taken[:, 0])
                | (low[1] >= self._taken[:, 3])
                | (high[1] <= self._taken[:, 1])
            )
            if inside and apart.all():
                return centre, distance
        return None
