"""Bar charts of the load of each tower: features, work and bytes."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dmt.formatting import byte_unit, human_bytes
from dmt.partitioner.partition import Partition
from dmt.partitioner.report.style import (
    INK,
    add_title,
    dress_axes,
    label_of,
    name_shortener,
    new_figure,
    save_figure,
    tower_color,
    write_text,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_balance"]

# Up to this number of towers, bars have their tower's colour and name; beyond, colours would only flicker.
MOST_NAMED, MOST_LETTERS = 32, 18
BAR_COLOR, MEAN_COLOR, LIMIT_COLOR = "#848DA6", "#222222", "#B3261E"


@dataclass(frozen=True, kw_only=True)
class _Panel:
    """One quantity of all towers."""

    title: str
    values: Sequence[float]
    limit: float | None
    scale: float = 1.0
    """Divides the values for the axis."""
    whole: bool = False
    """True if the values are counts."""
    unit: str = ""

    def text(self, value: float) -> str:
        return human_bytes(value) if self.unit else f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def plot_balance(partition: Partition, path: str | os.PathLike[str]) -> Path:
    """Draws the load of each tower, one panel for each of features, work and bytes that is known.

    Every panel has a line at the mean over towers, one at the limit where all towers have the same, and the largest
    tower over the mean in its title: the factor by which the slowest tower holds the others up. Up to 32 towers have
    their colours and names.

    `plot_coordinates` takes the same arguments, returns and raises the same.
    """
    panels = _panels(partition)
    count = len(partition.loads)
    width = min(13.0, max(8.0, 2.5 + 0.28 * count))
    figure = new_figure(path, size=(width, 2.3 * len(panels) + 0.4), caller="plot_balance", layout=None)
    places = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    figure.subplots_adjust(hspace=0.42)
    for panel, axes in zip(panels, places, strict=True):
        _draw(axes, panel)
    _name_towers(places[-1], [load.name for load in partition.loads])
    return save_figure(figure, path, caller="plot_balance")


def _panels(partition: Partition) -> list[_Panel]:
    loads, limits = partition.loads, partition.limits
    features = [float(load.num_features) for load in loads]
    panels = [_Panel(title="features", values=features, limit=_most_features(partition), whole=True)]
    work = [load.work for load in loads if load.work is not None]
    if len(work) == len(loads):
        panels.append(_Panel(title="elements read per sample", values=work, limit=limits.max_work))
    sizes = [float(load.num_bytes) for load in loads if load.num_bytes is not None]
    if len(sizes) == len(loads):
        divisor, unit = byte_unit(max(sizes))
        panels.append(_Panel(title="bytes of tables", values=sizes, limit=limits.max_bytes, scale=divisor, unit=unit))
    return panels


def _most_features(partition: Partition) -> float | None:
    """Limit on the features of a tower; None if there is none or categories differ in it."""
    ratio = partition.limits.balance_ratio
    if ratio is None:
        return None
    sizes: dict[str, list[int]] = {}
    for load in partition.loads:
        sizes.setdefault(load.category, []).append(load.num_features)
    # The addend keeps 1.15 * 100 from falling to 114.
    most = {max(math.ceil(sum(own) / len(own)), math.floor(ratio * min(own) + 1e-9)) for own in sizes.values()}
    return float(most.pop()) if len(most) == 1 else None


def _draw(axes: Axes, panel: _Panel) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    count = len(panel.values)
    heights = [value / panel.scale for value in panel.values]
    colors = [tower_color(i) for i in range(count)] if count <= MOST_NAMED else BAR_COLOR
    # Without a gap, hundreds of bars do not shimmer.
    axes.bar(range(count), heights, width=0.76 if count <= MOST_NAMED else 1.0, color=colors, linewidth=0)
    dress_axes(axes, grid="y")
    mean, most = sum(panel.values) / count, max(panel.values)
    lines = [("mean", mean, MEAN_COLOR, "--")]
    if panel.limit is not None:
        lines.append(("limit", float(panel.limit), LIMIT_COLOR, "-"))
    top = max(most, mean) / panel.scale
    # A limit far above all towers would flatten them; it is then named, not drawn.
    shown = [line for line in lines if line[1] / panel.scale <= 3 * top]
    hidden = [f"; limit {panel.text(value)}" for _, value, _, _ in lines if value / panel.scale > 3 * top]
    for _, value, color, style in shown:
        axes.axhline(value / panel.scale, color=color, linestyle=style, linewidth=1.2, zorder=3)
    axes.set_ylim(0.0, 1.08 * max([top, *(value / panel.scale for _, value, _, _ in shown)]) or 1.0)
    _label_lines(axes, [(f"{word} {panel.text(value)}", value / panel.scale, color) for word, value, color, _ in shown])
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=panel.whole))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.set_xlim(-0.7, count - 0.3)
    if panel.unit:
        axes.set_ylabel(panel.unit, fontsize=9, color="#444444")
    imbalance = f", largest / mean {most / mean:.2f}" if mean > 0 else ""
    add_title(axes, [f"{panel.title}{imbalance}{''.join(hidden)}"], pad=5.0)


def _label_lines(axes: Axes, lines: Sequence[tuple[str, float, str]]) -> None:
    """Writes each line's label right of the axes; labels of lines that are near each other part up and down."""
    ordered = sorted(lines, key=lambda line: line[1])
    near = ordered[-1][1] - ordered[0][1] < 0.12 * axes.get_ylim()[1]
    for rank, (label, height, color) in enumerate(ordered):
        shift = (-6.5, 6.5)[rank] if near and len(ordered) > 1 else 0.0
        place, coords = (1.0, height), axes.get_yaxis_transform()
        write_text(axes, label, place, offset=(6.0, shift), coords=coords, va="center", color=color)


def _name_towers(axes: Axes, names: Sequence[str]) -> None:
    from matplotlib.ticker import MaxNLocator

    labels = list(map(name_shortener(MOST_LETTERS), map(label_of, names)))
    if len(names) > MOST_NAMED:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
        axes.set_xlabel(f"tower, by its place in the plan (0 to {len(names) - 1})", fontsize=9.5, color="#444444")
        return
    turned = max(map(len, labels)) > 3
    axes.set_xticks(range(len(names)), labels, rotation=90 if turned else 0, color=INK)
    axes.set_xlabel("tower", fontsize=9.5, color="#444444")
