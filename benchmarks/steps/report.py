"""Writes the results of the speed study: JSON, a page in Markdown, and pictures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import ABSENT, markdown_table
from benchmarks.steps.measured import KINDS, Measured, best_flat, fastest, measure_run, speedup
from dmt.files import atomic_write
from dmt.report.style import INK, SOFT, TOWER_COLORS, add_title, dress_axes, new_figure, save_figure

__all__ = ["GOALS", "goals_table", "predicted_rows", "setting_words", "times_table", "write_results"]

Run = Mapping[str, Any]
GOALS = (
    ("unchanged model, 200 Mbit/s", 200.0, "sptt", 1.0, 2.1),
    ("CR 2, 200 Mbit/s", 200.0, "dmt", 2.0, 2.3),
    ("CR 4, 200 Mbit/s", 200.0, "dmt", 4.0, 3.5),
    ("CR 16, 200 Mbit/s", 200.0, "dmt", 16.0, 4.8),
    ("unchanged model, 50 Mbit/s", 50.0, "sptt", 1.0, 3.0),
    ("CR 4, 50 Mbit/s", 50.0, "dmt", 4.0, 5.0),
    ("CR 16, 50 Mbit/s", 50.0, "dmt", 16.0, 10.0),
)
"""Name, rate in Mbit/s, family, compression ratio, and wanted speedup over the best flat model, in FP32."""
_PREDICTED_HEADER = ("hosts", "contender", "predicted ms", "x flat", "MB by the busiest host")
_BOUND_GOAL, _BOUND_SHARE = 1.10, 0.9
_COLORS = {"flat": "#8A8F98", "etc": TOWER_COLORS[1], "sptt": TOWER_COLORS[0], "dmt": TOWER_COLORS[2]}
_COLORS["products"] = TOWER_COLORS[3]
_ROW_INCHES, _FRAME_INCHES, _WIDTH_INCHES, _PANEL_INCHES = 0.3, 1.3, 8.0, 4.3


def write_results(
    runs: Sequence[Run],
    out: Path,
    *,
    about: Mapping[str, Any],
    predicted: Sequence[Mapping[str, Any]] = (),
    stem: str = "steps",
) -> list[Path]:
    """Writes ``<stem>.json``, ``<stem>.md`` and pictures of the results.

    Args:
        runs: runs from the JSON of ``benchmarks/train_step.py``, each with the name of its part under ``part``.
        out: the folder; made if absent.
        about: date, machine, versions, commits, command, and ``cores``.
        predicted: predictions of `benchmarks.steps.predicted`, for the key ``predicted`` of the JSON.
        stem: file names without endings.

    Returns:
        The paths of the files.
    """
    cores = about["cores"]
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{stem}.json", out / f"{stem}.md"]
    lines = ",\n".join(f"  {json.dumps(run)}" for run in runs)
    with atomic_write(paths[0]) as scratch:
        parts = f'"about": {json.dumps(dict(about))},\n "predicted": {json.dumps(list(predicted))}'
        scratch.write_text(f'{{{parts},\n "runs": [\n{lines}\n ]}}\n')
    main = next((run for run in runs if run["part"] == "main"), None)
    if main is not None and (contenders := measure_run(main, cores=cores)):
        paths.append(plot_steps(contenders, out / f"{stem}_steps.png", subtitle=setting_words(main["setting"])))
    if sweeps := _sweeps(runs, cores):
        paths.append(plot_sweeps(sweeps, out / f"{stem}_sweeps.png"))
    with atomic_write(paths[1]) as scratch:
        scratch.write_text(_page(runs, about, predicted, [path.name for path in paths[2:]]))
    return paths


def setting_words(setting: Mapping[str, Any]) -> str:
    """Returns a setting in words.

    Example:
        >>> setting_words({"hosts": 2, "ranks_per_host": 2, "mbit_per_s": 200.0, "batch_size": 4096})
        '2 hosts x 2 ranks, 200 Mbit/s, local batch 4,096'
        >>> setting_words({"hosts": 1, "ranks_per_host": 2, "mbit_per_s": None, "batch_size": 8, "ids": "skewed"})
        '1 host x 2 ranks, unlimited link, local batch 8, skewed ids'
    """
    rate = "unlimited link" if setting["mbit_per_s"] is None else f"{setting['mbit_per_s']:g} Mbit/s"
    hosts, ranks = (f"{setting[of]} {of[:4]}{'s' * (setting[of] > 1)}" for of in ("hosts", "ranks_per_host"))
    ids = f", {setting['ids']} ids" if "ids" in setting else ""
    return f"{hosts} x {ranks}, {rate}, local batch {setting['batch_size']:,}{ids}"


def goals_table(runs: Sequence[Run], *, cores: int) -> str:
    """Returns a table of the goals with the fastest contender for each, and of how many contenders are near a bound."""
    rows = []
    main = [run for run in runs if run["part"] in ("main", "rate")]
    for text, rate, family, compression, target in GOALS:
        run = next((run for run in main if run["setting"]["mbit_per_s"] == rate), None)
        contenders = [] if run is None else measure_run(run, cores=cores)
        flat, every_id = (best_flat(contenders, "fp32", every_id=every) for every in (False, True))
        ours = fastest(contenders, family, precision="fp32", compression=compression)
        if flat is None or ours is None:
            rows.append([text, f"{target:g}", ABSENT, "not measured", ABSENT])
            continue
        ratio = speedup(ours, flat)
        other = f"{speedup(ours, every_id)} ({every_id.name})" if every_id else ABSENT
        measured = f"{ratio} ({ours.name} over {flat.name})"
        rows.append([text, f"{target:g}", measured, _verdict(ratio.ratio >= target), other])
    every = [found for run in main for found in measure_run(run, cores=cores) if found.family not in ("flat", "etc")]
    if every:
        near = sum(found.bound_ratio <= _BOUND_GOAL for found in every)
        verdict = _verdict(near >= _BOUND_SHARE * len(every))
        text = f"step / bound at most {_BOUND_GOAL:g}, this library's contenders"
        rows.append([text, f"{_BOUND_SHARE:.0%}", f"{near} of {len(every)}", verdict, ABSENT])
    return markdown_table(["goal", "wanted", "measured", "verdict", "over flat that sends every id"], rows)


def _verdict(is_held: bool) -> str:
    return "held" if is_held else "**not held**"


def times_table(contenders: Sequence[Measured]) -> str:
    """Returns a table of the contenders' step times, bounds, bytes and memory."""
    header = [
        *("contender", "P10 ms", "P50 ms", "P90 ms", "x best flat", "waiting s", "bound s", "bound by", "step / bound"),
        *("MB by a host", "peak memory MB"),
    ]
    return markdown_table(header, [_times_row(found, contenders) for found in contenders])


def _times_row(found: Measured, contenders: Sequence[Measured]) -> list[str]:
    flat = best_flat(contenders, found.precision)
    return [
        f"**{found.name}**" if found == flat else found.name,
        *(f"{1000 * found.percentile(percent):,.0f}" for percent in (10, 50, 90)),
        ABSENT if flat is None else str(speedup(found, flat)),
        *(f"{found.waiting:.2f}", f"{found.bound:.2f}", found.bound_name, f"{found.bound_ratio:.2f}"),
        f"{sum(found.across.values()) / 1e6:.2f}",
        f"{found.peak_memory / 1e6:,.0f}",
    ]


def _bytes_table(contenders: Iterable[Measured]) -> str:
    rows = [
        [
            found.name,
            *(f"{found.across[kind] / 1e6:.2f}" for kind in KINDS),
            ABSENT if found.counters_ratio is None else f"{found.counters_ratio:.3f}",
            f"{found.inside / 1e6:.2f}",
        ]
        for found in contenders
    ]
    return markdown_table(["contender", *KINDS, "counters / counted", "inside a host"], rows)


def _sweeps(runs: Sequence[Run], cores: int) -> dict[str, dict[str, list[Measured]]]:
    """Returns, by part and value, the contenders that ran at every value; the main run is the first value of a part."""
    sweeps: dict[str, dict[str, list[Measured]]] = {}
    for part in dict.fromkeys(run["part"] for run in runs if run["part"] not in ("flat", "main")):
        chosen = [run for wanted in ("main", part) for run in runs if run["part"] == wanted]
        points = {_value(part, run["setting"]): measure_run(run, cores=cores) for run in chosen}
        shared = set.intersection(*({found.name for found in point} for point in points.values()))
        if shared:
            sweeps[part] = {value: [f for f in point if f.name in shared] for value, point in points.items()}
    return sweeps


def _value(part: str, setting: Mapping[str, Any]) -> str:
    return f"{setting['mbit_per_s']:g} Mbit/s" if part == "rate" else str(setting[part])


def predicted_rows(predicted: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Returns the rows of the table of predictions."""
    flat = {one["hosts"]: one["seconds"] for one in predicted if one["contender"].startswith("flat")}
    return [
        [
            *(str(one["hosts"]), one["contender"], f"{1000 * one['seconds']:.1f}"),
            *(f"{flat[one['hosts']] / one['seconds']:.2f}", f"{one['uplink_bytes'] / 1e6:,.0f}"),
        ]
        for one in predicted
    ]


def _page(
    runs: Sequence[Run], about: Mapping[str, Any], predicted: Sequence[Mapping[str, Any]], pictures: Sequence[str]
) -> str:
    cores = about["cores"]
    parts = [
        "# Step times on emulated hosts",
        "Made by `benchmarks/bench.py` (`make bench`). All hosts are network namespaces of one machine, their links "
        "limited by `tc htb`: this shows the wire and what overlaps it, not the speed of GPUs.",
        "\n".join(f"- {name}: {_fact(value)}" for name, value in about.items()),
        "## Goals",
        goals_table(runs, cores=cores),
        *(f"![{name}]({name})" for name in pictures),
    ]
    if predicted:
        parts += [
            "## Prediction for GPUs, not measured",
            "By the simulator of `dmt what-if` (`benchmarks/steps/predicted.py`): hosts of eight GPUs (`a100`), 16,384 "
            "samples a rank. Equal inputs that are sent once are not modeled.",
            markdown_table(_PREDICTED_HEADER, predicted_rows(predicted)),
        ]
    for run in runs:
        contenders = measure_run(run, cores=cores)
        parts += [f"## {run['part']}: {setting_words(run['setting'])}", _wire_words(run["wire"])]
        parts += [times_table(contenders), _bytes_table(contenders)]
    return "\n\n".join([*parts, _HOW]) + "\n"


def _wire_words(wire: Mapping[str, Any] | None) -> str:
    if wire is None or wire["ratio"] is None:
        return "The bare wire was not measured."
    return (
        f"The bare wire: {wire['bytes_per_rank'] / 1e6:g} MB per rank, all to all, took {wire['ratio']:.2f} x bytes / "
        "rate with receives asked for first, as this library does, and "
        f"{wire['all_to_all_ratio']:.2f} x with PyTorch's `all_to_all_single` over gloo, which TorchRec calls."
    )


def _fact(value: Any) -> str:
    return "; ".join(f"{name} {inner}" for name, inner in value.items()) if isinstance(value, Mapping) else str(value)


def plot_steps(contenders: Sequence[Measured], path: Path, *, subtitle: str) -> Path:
    """Draws bars of median step times, with whiskers from P10 to P90 and marks at the bounds; returns ``path``.

    Args:
        contenders: at least one contender.
        path: the picture file.
        subtitle: the setting in words.
    """
    height = _ROW_INCHES * len(contenders) + _FRAME_INCHES
    figure = new_figure(_WIDTH_INCHES, height)
    axes = figure.add_subplot()
    for row, found in enumerate(contenders):
        low, middle, high = (found.percentile(percent) for percent in (10, 50, 90))
        axes.barh(row, middle, height=0.72, color=_COLORS[found.family])
        axes.errorbar(middle, row, xerr=[[middle - low], [high - middle]], color=SOFT, linewidth=1.1, capsize=2.5)
        axes.plot([found.bound] * 2, [row - 0.42, row + 0.42], color=INK, linewidth=2.2, solid_capstyle="butt")
        flat = best_flat(contenders, found.precision)
        ratio = "" if flat is None else f"  {flat.median / found.median:.2f} x"
        place = (max(high, found.bound), row)
        look = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontsize": 9, "color": INK}
        axes.annotate(f"{middle:.2f} s{ratio}", place, **look)  # type: ignore[arg-type]
    axes.set_yticks(range(len(contenders)), [found.name for found in contenders])
    axes.set_ylim(len(contenders) - 0.4, -0.6)
    dress_axes(axes, grid="x")
    axes.set_xlim(0, 1.22 * max(max(found.percentile(90), found.bound) for found in contenders))
    axes.set_xlabel("seconds per step", fontsize=9, color=SOFT)
    lines = ["Step time, median and P10 to P90", subtitle]
    lines.append("black mark: the contender's own bound; x: speed over the best flat of the same precision")
    add_title(axes, lines, pad=6)
    return save_figure(figure, path)


def plot_sweeps(sweeps: Mapping[str, Mapping[str, Sequence[Measured]]], path: Path) -> Path:
    """Draws a panel for each sweep, with the step time of each contender at each value; returns ``path``.

    Args:
        sweeps: contenders by value, by the name of the sweep; at least one sweep.
        path: the picture file.
    """
    figure = new_figure(_PANEL_INCHES * len(sweeps) + 0.4, 5.4)
    for axes, (name, points) in zip(
        figure.subplots(1, len(sweeps), squeeze=False, sharey=True)[0], sweeps.items(), strict=True
    ):
        contenders = {found.name: found.family for by_value in points.values() for found in by_value}
        for contender, family in contenders.items():
            steps = [next((f.median for f in found if f.name == contender), None) for found in points.values()]
            style = "s--" if family == "flat" else "o:" if "outside" in contender else "o-"
            axes.plot(range(len(steps)), steps, style, color=_COLORS[family], label=contender, markersize=4)  # type: ignore[arg-type]
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xticks(range(len(points)), list(points), fontsize=8)
        axes.set_title(name, fontsize=10, loc="left", color=INK)
        axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.08), handlelength=4)
        dress_axes(axes, grid="y")
    figure.axes[0].set_ylabel("seconds per step", fontsize=9, color=SOFT)
    return save_figure(figure, path)


_HOW = """\
## How

- A round runs through all contenders in a shuffled order, the same on all ranks; warm-up rounds are left out. A step's
  seconds are those of its slowest rank.
- *Best flat* (bold): the flat contender with the lowest median at the same precision in the same job. Speeds are
  ratios of medians. [a, b]: 95 % interval, from 10,000 bootstrap draws of rounds, the same rounds for both.
- *Bound*: the larger of wire (bytes of the busiest uplink by its counter / rate) and compute (CPU seconds of all
  processes over the cores of the machine; median over steps). All hosts share these cores.
- *Waiting*: what a main thread neither computed nor waited for a core; mean over ranks, median over steps.
- MB per step that one host sends to the others (mean over hosts), *counted* at the collectives (`dmt.traffic`);
  *counters*: by those of the uplinks, with headers."""
