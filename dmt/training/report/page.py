"""The report page, and its picture of the training curves: one HTML file that opens anywhere and loads nothing else.

Numbers come from `compare_runs` and the rows of `dmt.training.console`; the words around them are in ``page.html``,
in the frame that both reports share (`dmt.report`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmt.formatting import counted
from dmt.plan.towers import TowerPlan
from dmt.report import data_uri, render_page
from dmt.report.style import dress_axes, new_figure, save_figure, tower_badges
from dmt.sharding.explanation import TowerShardingPlan
from dmt.training.console import cells, lookup, rows_of
from dmt.training.records import read_curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["RUN_COLORS", "RunComparison", "auc_standard_error", "compare_runs", "plot_curves", "smooth", "write_report"]

# Color-blind readers can tell these apart; neither is among the first tower colors, which the same page shows.
RUN_COLORS = ("#46506B", "#D55E00")
_MARKERS = ("o", "s")
_PANELS = (
    ("train/loss", "Training loss (binary cross entropy, lower is better)"),
    ("eval/auc", "AUC on evaluation rows (higher is better)"),
    ("eval/ne", "Normalized entropy on evaluation rows (lower is better)"),
)
_LEAST_SPAN = 0.01  # of an axis, so that noise in the fourth decimal does not fill a panel

Curve = NDArray[np.float64]  # [points, 2]: step and value

# Keys of `TowerPlan.affinity`, and the pairs that they are the mean affinity of; interactions have the first two.
_PAIRS = (
    ("within", "two features of one tower"),
    ("within_strided", "the same, had the features been dealt out in turn (strided)"),
    ("between", "two features of different towers"),
)
_NOT_KNOWN = "all evaluation rows have the same label"  # the only reason for an AUC of NaN


class RunComparison(NamedTuple):
    """The difference in AUC between two runs, judged against its noise; numbers are NaN if the AUCs are."""

    auc_difference: float
    """AUC of the second run minus that of the first."""
    auc_noise: float
    """The larger standard error of the two AUCs (`auc_standard_error`)."""
    within_noise: bool
    """Whether the AUCs are equal, differ by less than ``auc_noise``, or are NaN."""
    accuracy: str
    """A sentence about AUC that claims no more than the noise allows."""


def auc_standard_error(auc: float, *, num_rows: int, label_rate: float) -> float:
    """Returns the standard error of an AUC on ``num_rows`` rows, of which the share ``label_rate`` is positive.

    Hanley and McNeil, Radiology 143 (1982), equation (1): with A the AUC, n1 positive and n0 negative rows,
    SE^2 = (A (1 - A) + (n1 - 1) (Q1 - A^2) + (n0 - 1) (Q2 - A^2)) / (n1 n0), Q1 = A / (2 - A), Q2 = 2 A^2 / (1 + A).
    It does not cover how much another training seed would move A. NaN if one of the classes has no row.

    Example:
        >>> round(auc_standard_error(0.8, num_rows=200, label_rate=0.5), 4)
        0.0314
    """
    positive = label_rate * num_rows
    negative = num_rows - positive
    # A count below half a row is the rounding error of zero.
    if min(positive, negative) < 0.5:
        return math.nan
    q1, q2 = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    spread = auc * (1 - auc) + (positive - 1) * (q1 - auc**2) + (negative - 1) * (q2 - auc**2)
    # The spread of a perfect AUC is 0; rounding must not make it negative.
    return math.sqrt(max(0.0, spread) / (positive * negative))


def _ratio(first: Any, second: Any) -> float | None:
    """Returns ``second / first``; None if a value is absent or not finite, or ``first`` is 0."""
    values = (first, second)
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in values) or not first:
        return None
    return float(second / first)


def compare_runs(runs: Mapping[str, Mapping[str, Any]]) -> RunComparison:
    """Compares the second of two runs (``result.json`` by name) with the first, evaluated on the same rows.

    Calls an AUC higher or lower only if the difference is at least the larger of the two standard errors.
    """
    names, (first, second) = list(runs), runs.values()
    errors = [
        auc_standard_error(run["eval_auc"], num_rows=run["eval_num_rows"], label_rate=run["eval_label_rate"])
        for run in (first, second)
    ]
    noise, difference = max(errors), second["eval_auc"] - first["eval_auc"]
    text = f"{names[1]} has AUC {second['eval_auc']:.4f} and {names[0]} {first['eval_auc']:.4f}"
    within_noise = not (difference != 0 and abs(difference) >= noise)
    if math.isnan(noise):
        text += f"; the two cannot be compared: {_NOT_KNOWN}."
    elif within_noise:
        text += (
            f": the difference of {difference:+.4f} is within the noise of the evaluation (one standard error is "
            f"{noise:.4f}), so neither is better by this measure."
        )
    else:
        text += (
            f": {'higher' if difference > 0 else 'lower'} by {abs(difference):.4f}, where one standard error of the "
            f"evaluation is {noise:.4f}. Another training seed may move it too."
        )
    return RunComparison(difference, noise, within_noise, text)


def write_report(
    path: Path,
    *,
    runs: Mapping[str, Mapping[str, Any]],
    plan: TowerPlan,
    sharding: TowerShardingPlan,
    pictures: tuple[Path, Path],
    data_description: str,
    notes: Sequence[str] = (),
) -> Path:
    """Writes the page that compares two runs, with a link to the partitioner's ``report.html``; returns its path.

    Args:
        path: the HTML file.
        runs: ``result.json`` of two runs by the name to show, the baseline first.
        plan: the tower plan of the second run.
        sharding: the sharding plan of the second run.
        pictures: the files of `plot_affinity` (of ``plan``, beside ``report.html``) and `plot_curves` (of ``runs``).
        data_description: what the runs were trained on, for the reader.
        notes: lines to show below the headline.

    Raises:
        InputError: the page cannot be written.
    """
    comparison, towers = compare_runs(runs), list(runs.values())[1]
    affinity_picture, curves_picture = pictures
    address = Path(os.path.relpath(affinity_picture.with_name("report.html"), path.parent)).as_posix()
    context = {
        "links": [(address, "The towers, judged against random ones")],
        "names": list(runs),
        "comparison": comparison,
        "cards": _cards(comparison, runs),
        "notes": list(notes),
        "columns": list(zip(runs, RUN_COLORS, strict=True)),
        "rows": _rows(runs),
        "towers": tower_badges(plan),
        "plan": plan,
        "sharding": [sharding.summary],
        "affinities": _affinities(plan),
        "measure": plan.affinity.get("measure", "affinity"),
        "affinity_picture": data_uri(affinity_picture),
        "curves_picture": data_uri(curves_picture),
        "data_description": data_description,
        "hosts": counted(sharding.topology.num_hosts, "host"),
        "run": towers,
        "versions": [f"{name} {version}" for name, version in towers["versions"].items() if version != "absent"],
    }
    return render_page(Path(__file__).with_name("page.html"), path, context)


def _cards(comparison: RunComparison, runs: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """Returns the three cards under the headline: a figure, its meaning, and the numbers behind it."""
    (first_name, first), (name, second) = runs.items()
    auc, behind = "not known", _NOT_KNOWN
    if not math.isnan(comparison.auc_noise):
        measured = f"{comparison.auc_difference:+.4f}"
        auc = "within noise" if comparison.within_noise else measured
        behind = f"measured {measured}; one standard error is {comparison.auc_noise:.4f}"
    kinds = ("ids", "forward", "backward", "dense")
    every = [sum(run["bytes_per_sample"][kind] for kind in kinds) for run in (first, second)]
    embeddings = [sum(run["bytes_per_sample"][kind] for kind in kinds[1:3]) for run in (first, second)]
    mflops = [run["mflops_per_sample"] for run in (first, second)]
    mflops_behind = f"{mflops[1]:.3f} instead of {mflops[0]:.3f} per sample"
    bytes_behind = f"{every[1]:,.0f} instead of {every[0]:,.0f} per sample; embeddings alone, forward and backward: "
    cards = (
        (auc, f"difference of AUC, {name} minus {first_name}", behind),
        (_percent(*every), "of the bytes across hosts", bytes_behind + _percent(*embeddings)),
        (_percent(*mflops), "of the MFLOPs of a training step", mflops_behind),
    )
    return [{"big": big, "what": what, "small": small} for big, what, small in cards]


def _percent(first: float, second: float) -> str:
    part = _ratio(first, second)
    if part is None:
        return "-" if second else "none"
    return f"{part:.0%}"


def _rows(runs: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Returns the label and cells of each row: the values of both runs, and the second divided by the first."""
    first, second = runs.values()
    rows = rows_of(runs.values())
    shown = []
    for (label, path, _), *values in zip(rows, cells(first, rows), cells(second, rows), strict=True):
        quotient = _ratio(lookup(first, path), lookup(second, path))
        shown.append((label, [*values, "-" if quotient is None else f"{quotient:.3f}"]))
    return shown


def _affinities(plan: TowerPlan) -> list[tuple[str, str]]:
    """Returns each kind of pair with its mean affinity or share of interaction; "-" if there are no such pairs."""
    pairs = _PAIRS[:2] if plan.affinity.get("measure") == "interactions" else _PAIRS
    means = [(what, plan.affinity.get(key)) for key, what in pairs]
    return [(what, "-" if mean is None else f"{mean:.3f}") for what, mean in means]


def plot_curves(runs: Mapping[str, Path], path: Path) -> Path:
    """Draws training loss, evaluation AUC and normalized entropy of at most two runs over training steps.

    The loss is shown as recorded (faint) and smoothed; each evaluation has a mark, so that a single evaluation shows,
    too. ``runs`` are output folders by the name to show; the suffix of ``path`` chooses the format. Returns ``path``.

    Raises:
        InputError: the picture format is unknown, or ``path`` cannot be written.
    """
    curves = {name: _read_curves(folder) for name, folder in runs.items()}
    figure = new_figure(8.4, 6.2)
    grid = figure.add_gridspec(2, 2, height_ratios=(1.0, 1.05))
    places = (grid[0, :], grid[1, 0], grid[1, 1])
    last = max((float(curve[:, 0].max()) for run in curves.values() for curve in run.values()), default=1.0)
    for place, (key, title) in zip(places, _PANELS, strict=True):
        axes = figure.add_subplot(place)
        _draw_curves(axes, [run.get(key) for run in curves.values()], smoothed=key == "train/loss")
        axes.set_title(title if place is places[0] else title.replace(" (", "\n("), fontsize=10.5, loc="left")
        axes.set_xlim(0.0, last * 1.01)
        axes.set_xlabel("training step", fontsize=9.5, color="#444444")
        dress_axes(axes, grid="y")
        # Without this, matplotlib labels a narrow range with differences from an offset.
        axes.ticklabel_format(axis="both", useOffset=False)
    handles = [figure.axes[1].plot([], [], linewidth=2.0, **_style_of(i))[0] for i in range(len(curves))]
    figure.legend(handles, list(curves), loc="outside upper left", ncols=2, frameon=False, fontsize=11)
    return save_figure(figure, path)


def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the moving mean of values, float64 [n], over centered windows of about a tenth of them.

    Near the ends, windows shrink and stay centered, so that a steep beginning is not flattened.
    """
    size = len(values)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(size)
    reach = np.minimum(max(1, size // 20), np.minimum(index, size - 1 - index))
    return np.asarray((sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1))


def _read_curves(folder: Path) -> dict[str, Curve]:
    recorded = read_curves(folder)
    curves = {key: np.array(recorded.get(key, []), dtype=np.float64).reshape(-1, 2) for key, _ in _PANELS}
    finite = {key: curve[np.isfinite(curve[:, 1])] for key, curve in curves.items()}
    return {key: curve for key, curve in finite.items() if len(curve)}


def _draw_curves(axes: Axes, curves: Sequence[Curve | None], *, smoothed: bool) -> None:
    shown = [(i, curve) for i, curve in enumerate(curves) if curve is not None]
    if not shown:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color="#777777")
        axes.set_yticks([])
        return
    for i, curve in shown:
        (steps, values), style = curve.T, _style_of(i)
        if smoothed:
            axes.plot(steps, values, color=style["color"], linewidth=1.0, alpha=0.3)
            style["marker"] = "none" if len(steps) > 1 else style["marker"]
        axes.plot(steps, smooth(values) if smoothed else values, linewidth=2.0, clip_on=False, zorder=3, **style)
    every = np.concatenate([curve[:, 1] for _, curve in shown])
    low, high = float(every.min()), float(every.max())
    slack = max(0.06 * (high - low), (_LEAST_SPAN - (high - low)) / 2)
    axes.set_ylim(low - slack, high + slack)


def _style_of(run: int) -> dict[str, Any]:
    return {"color": RUN_COLORS[run], "marker": _MARKERS[run], "markersize": 6.5, "markeredgecolor": "white"}
