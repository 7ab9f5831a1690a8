"""The partition report: pictures of a `Partition`, and an HTML page that explains them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dmt import __version__
from dmt.errors import InputError
from dmt.formatting import counted, human_bytes
from dmt.partitioner.affinity import FeatureAffinity
from dmt.partitioner.partition import Partition, judge_balance, judge_meaning, tower_loads
from dmt.plan.towers import TowerPlan
from dmt.report import data_uri, render_page
from dmt.report.style import INK, add_title, dress_axes, new_figure, save_figure, tower_badges

__all__ = ["plot_affinity", "plot_coordinates", "strongest_rows", "write_partition_report"]

# Light to dark in a hue that no tower has, so that the picture also reads when printed in gray.
_HEAT_COLORS = ("#FFFFFF", "#E6E8EE", "#B9BFCE", "#848DA6", "#4F5A78", "#1E2746")
_DIAGONAL_COLOR = "#F1EFE8"
# With more features, pictures do not name them, and the lists of the page start closed.
MOST_NAMED = 64
_SHOWN_INTERACTIONS = 5


def plot_affinity(affinity: FeatureAffinity, plan: TowerPlan, path: str | os.PathLike[str]) -> Path:
    """Draws the affinity matrix in the order of the plan, with a colored box for each tower (paper's Figure 9).

    Features are named if there are at most 64. The diagonal is blank, because it would dominate the color scale.
    ``affinity`` has exactly the features in the plan's towers, in any order (`FeatureAffinity.without` removes others).
    The suffix of ``path`` sets the format, for example ``.png``, ``.svg`` or ``.pdf``. Returns the path.

    Raises:
        InputError: plan and affinity have different features, the suffix is not a picture format, or writing fails.
    """
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    matrix = affinity.permuted(plan.features).matrix.copy()
    size = len(matrix)
    np.fill_diagonal(matrix, np.nan)
    top = float(np.nanmax(matrix)) if size > 1 else 0.0
    # Only labeled rows need a minimum height.
    side = min(14.0, max(6.0, 2.6 + 0.21 * size)) if size <= MOST_NAMED else 9.0
    figure = new_figure(side + 1.0, side)
    axes = figure.add_subplot()
    heat = LinearSegmentedColormap.from_list("affinity", _HEAT_COLORS).with_extremes(bad=_DIAGONAL_COLOR)
    # With more cells than pixels, a pixel shows the mean of its cells, not one of them.
    image = axes.imshow(matrix, cmap=heat, vmin=0.0, vmax=top or 1.0, interpolation="antialiased")
    bar = figure.colorbar(image, ax=axes, fraction=0.035, pad=0.02, aspect=32)
    bar.set_label("interaction, nats per row" if affinity.is_interactions else "affinity  |mean cosine|", fontsize=9)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=min(9.0, max(4.5, 37.0 * side / size)))
    names = [_shown(name) for name in plan.features] if size <= MOST_NAMED else []
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_yticks(range(len(names)), names)
    start = 0
    for tower in tower_badges(plan):
        extent = len(tower["features"])
        box = Rectangle((start - 0.5, start - 0.5), extent, extent, fill=False, ec=tower["color"], lw=2.0, zorder=3)
        axes.add_patch(box).set_clip_on(False)
        _write_badge(axes, tower, (start + extent / 2 - 0.5, -0.5), offset=9.0)
        start += extent
    figure.suptitle(_title(plan), fontsize=11, x=0.02, ha="left")
    return save_figure(figure, path)


def _title(plan: TowerPlan) -> str:
    return f"{counted(len(plan.features), 'feature')} in {counted(plan.num_towers, 'tower')}, {plan.strategy}"


def plot_coordinates(partition: Partition, path: str | os.PathLike[str]) -> Path:
    """Draws the features as points in the plane (DMT paper, section 3.3): close where the strategy wants them together.

    A line joins every point to the center of its tower, so that towers can be told apart without colors; up to 64
    towers differ in color or marker. Features are named if there are at most 64. Both axes have the same scale, because
    only distances have a meaning. The suffix of ``path`` sets the format, as in `plot_affinity`. Returns the path.

    Raises:
        InputError: the partition is of interactions, the suffix is not a picture format, or writing fails.
    """
    from matplotlib.collections import LineCollection

    if partition.affinity.is_interactions:
        raise InputError("plot_coordinates: a partition made from interactions has no points. Use plot_affinity.")
    figure = new_figure(9.0, 9.0)
    axes: Any = figure.add_subplot()
    points = partition.points
    row = {name: i for i, name in enumerate(partition.affinity.features)}
    for tower in tower_badges(partition.plan):
        inside = points[[row[name] for name in tower["features"]]]
        spokes = np.stack([inside, np.broadcast_to(inside.mean(axis=0), inside.shape)], axis=1)
        axes.add_collection(LineCollection(list(spokes), colors=tower["color"], linewidths=0.8, alpha=0.5, zorder=1))
        diameter = float(np.clip(60.0 / np.sqrt(len(points)), 2.6, 8.0))
        style = {"color": tower["color"], "marker": tower["marker"], "edgecolors": "white", "linewidths": 0.3}
        axes.scatter(inside[:, 0], inside[:, 1], s=diameter**2, zorder=2, **style)
        _write_badge(axes, tower, tuple(inside.mean(axis=0)), offset=0.0)
    for name, place in zip(row if len(points) <= MOST_NAMED else (), points, strict=False):
        axes.annotate(_shown(name), place, xytext=(5, 3), textcoords="offset points", fontsize=7.5, color=INK)
    dress_axes(axes, grid="both")
    axes.set_aspect("equal", adjustable="datalim")
    meaning = "similar" if partition.plan.strategy == "coherent" else "dissimilar"
    stress = f"normalized stress {partition.normalized_stress:.3f} (0 is perfect, above 0.2 is poor)"
    add_title(axes, [_title(partition.plan), f"close = {meaning}; {stress}"])
    return save_figure(figure, path)


def _write_badge(axes: Any, badge: dict[str, Any], place: tuple[float, float], *, offset: float) -> None:
    """Writes a tower's name, without the prefix ``tower_``, ``offset`` points above ``place``."""
    box = {"boxstyle": "round,pad=0.25", "facecolor": badge["color"], "edgecolor": "white", "linewidth": 0.6}
    style = {"color": badge["ink"], "fontsize": 8, "fontweight": "bold", "ha": "center", "va": "center", "bbox": box}
    text = _shown(badge["name"].removeprefix("tower_"))
    where = {"xytext": (0.0, offset), "textcoords": "offset points", "annotation_clip": False, "zorder": 5}
    axes.annotate(text, place, **where, **style)


def _shown(name: str, most: int = 28) -> str:
    """Returns a name as it is drawn: on one line, and without its middle if it is long, as names differ at the ends.

    Example:
        >>> _shown("user_id", 11), _shown("user_history_of_clicks", 11)
        ('user_id', 'user...icks')
    """
    line, tail = "".join(letter if letter.isprintable() else " " for letter in name), (most - 3) // 2
    return line if len(line) <= most else f"{line[: most - 3 - tail]}...{line[-tail:]}"


def write_partition_report(
    partition: Partition, folder: str | os.PathLike[str], *, links: Sequence[tuple[str, str]] = ()
) -> Path:
    """Writes ``report.html`` and its pictures into ``folder``, which is made if missing; returns the path of the page.

    The page embeds its pictures and loads nothing, so it can be sent alone. ``affinity.png`` and, except for
    interactions, ``coordinates.png`` are written beside it. Existing files are replaced. ``links`` to other pages are
    pairs of an address, relative to the folder, and a text.

    Raises:
        InputError: a file cannot be written, or ``partition`` is a plan without the numbers of a partition.
    """
    if not isinstance(partition, Partition):
        raise InputError(f"partition is a {type(partition).__name__}. Pass the result of TowerPartitioner.partition.")
    target, plan, affinity = Path(folder), partition.plan, partition.affinity
    loads = {name: [_amount(name, value) for value in values] for name, values in tower_loads(partition).items()}
    pictures = [plot_affinity(affinity, plan, target / "affinity.png")]
    if not affinity.is_interactions:
        pictures.append(plot_coordinates(partition, target / "coordinates.png"))
    context = {
        "heading": _title(plan),
        "plan": plan,
        "affinity": affinity,
        "comparison": partition.comparison,
        "links": list(links),
        "notes": list(partition.notes),
        "meaning": judge_meaning(partition),
        "balance": judge_balance(partition),
        "strongest": strongest_rows(partition, _SHOWN_INTERACTIONS),
        "columns": ["tower", *loads],
        "towers": [badge | {"cells": row} for badge, *row in zip(tower_badges(plan), *loads.values(), strict=True)],
        "few_features": affinity.num_features <= MOST_NAMED,
        "pictures": [data_uri(picture) for picture in pictures],
        "version": __version__,
    }
    return render_page(Path(__file__).with_name("report.html"), target / "report.html", context)


def strongest_rows(partition: Partition, count: int) -> list[tuple[str, str, str, str]]:
    """Returns up to ``count`` interactions, strongest first, as texts: features, gain ± error, share of loss, tower."""
    loss = partition.affinity.loss
    tower_of = {name: tower.name for tower in partition.plan.towers for name in tower.features}
    rows = []
    for strong in partition.affinity.strongest(count) if partition.affinity.is_interactions else []:
        towers = {tower_of[name] for name in strong.features}
        place = towers.pop() if len(towers) == 1 else "in different towers"
        gain = f"{strong.gain:.5f} \u00b1 {strong.error:.5f}"
        rows.append((", ".join(strong.features), gain, f"{strong.gain / loss:.1%}" if loss else "-", place))
    return rows


def _amount(quantity: str, value: float) -> str:
    return human_bytes(value) if quantity == "bytes" else f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"
