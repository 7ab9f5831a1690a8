"""Picture of the training curves of one or more runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dmt.errors import InputError
from dmt.report.style import dress_axes, new_figure, save_figure
from dmt.training.records import read_curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["RUN_COLORS", "plot_curves", "smooth"]

# Told apart by colour-blind readers; none is one of the first tower colours, which the same page shows.
RUN_COLORS = ("#46506B", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#8C7A00")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_PANELS = (
    ("train/loss", "Training loss (binary cross entropy, lower is better)"),
    ("eval/auc", "AUC on evaluation rows (higher is better)"),
    ("eval/ne", "Normalized entropy on evaluation rows (lower is better)"),
)
_LEAST_SPAN = 0.01  # of an axis, so that noise in the fourth decimal does not fill a panel

Curve = NDArray[np.float64]  # [points, 2]: step and value


def plot_curves(runs: Mapping[str, Path], path: Path) -> Path:
    """Draws training loss, evaluation AUC and normalized entropy over training steps, one colour per run.

    The loss is shown as recorded (faint) and smoothed; evaluations are marked one by one, so that a run with a single
    evaluation shows too. ``runs`` are output folders by the name to show; the suffix of ``path`` chooses the format.

    Raises:
        InputError: a folder without readable curves, an unknown picture format, or a path that is not writable.
    """
    curves = {name: _read(folder) for name, folder in runs.items()}
    figure = new_figure(path, size=(8.4, 6.2), caller="plot_curves")
    grid = figure.add_gridspec(2, 2, height_ratios=(1.0, 1.05))
    places = (grid[0, :], grid[1, 0], grid[1, 1])
    last = max(float(curve[:, 0].max()) for run in curves.values() for curve in run.values())
    for place, (key, title) in zip(places, _PANELS, strict=True):
        axes = figure.add_subplot(place)
        _draw(axes, [run.get(key) for run in curves.values()], smoothed=key == "train/loss")
        axes.set_title(title if place is places[0] else title.replace(" (", "\n("), fontsize=10.5, loc="left")
        axes.set_xlim(0.0, last * 1.01)
        axes.set_xlabel("training step", fontsize=9.5, color="#444444")
        dress_axes(axes, grid="y")
        # Without this, a narrow range is labelled with differences from an offset.
        axes.ticklabel_format(axis="both", useOffset=False)
    handles = [figure.axes[1].plot([], [], linewidth=2.0, **_style(i))[0] for i in range(len(curves))]
    # "_x" is how matplotlib hides a label; names come from outside.
    labels = [f" {name}" if name.startswith("_") else name for name in curves]
    figure.legend(handles, labels, loc="outside upper left", ncols=min(3, len(labels)), frameon=False, fontsize=11)
    return save_figure(figure, path, caller="plot_curves")


def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Takes a centred mean over about a tenth of the values [n], which does not lag behind as an exponential one does.

    Towards the ends the window shrinks on both sides, so a steep beginning is not flattened.
    """
    size = len(values)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(size)
    reach = np.minimum(max(1, size // 20), np.minimum(index, size - 1 - index))
    return np.asarray((sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1))


def _read(folder: Path) -> dict[str, Curve]:
    try:
        recorded = read_curves(folder)
    except OSError as error:
        reason = f"{folder / 'metrics.jsonl'} cannot be read ({error.strerror})"
        raise InputError(f"plot_curves: {reason}. Give the output_dir of a training run that has ended.") from error
    curves = {key: np.array(recorded.get(key, []), dtype=np.float64).reshape(-1, 2) for key, _ in _PANELS}
    finite = {key: curve[np.isfinite(curve[:, 1])] for key, curve in curves.items()}
    return {key: curve for key, curve in finite.items() if len(curve)}


def _draw(axes: Axes, curves: Sequence[Curve | None], *, smoothed: bool) -> None:
    shown = [(i, curve) for i, curve in enumerate(curves) if curve is not None]
    if not shown:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color="#777777")
        axes.set_yticks([])
        return
    for i, curve in shown:
        (steps, values), style = curve.T, _style(i)
        if smoothed:
            axes.plot(steps, values, color=style["color"], linewidth=1.0, alpha=0.3)
            style["marker"] = "none" if len(steps) > 1 else style["marker"]
        axes.plot(steps, smooth(values) if smoothed else values, linewidth=2.0, clip_on=False, zorder=3, **style)
    every = np.concatenate([curve[:, 1] for _, curve in shown])
    low, high = float(every.min()), float(every.max())
    slack = max(0.06 * (high - low), (_LEAST_SPAN - (high - low)) / 2)
    axes.set_ylim(low - slack, high + slack)


def _style(run: int) -> dict[str, Any]:
    color, marker = RUN_COLORS[run % len(RUN_COLORS)], _MARKERS[run % len(_MARKERS)]
    return {"color": color, "marker": marker, "markersize": 6.5, "markeredgecolor": "white"}
