"""The results of the tower study as tables in Markdown, as JSON, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import markdown_table
from benchmarks.towers.findings import (
    Records,
    auc_by_seed,
    control_findings,
    main_findings,
    pair_findings,
    stability_findings,
)
from benchmarks.towers.runs import ARCHS, CONTROL_ARMS, LEARNED_ARMS
from benchmarks.towers.trials import STUDY_SETS

__all__ = ["plot_arms", "write_study"]

_ARMS = ("flat", "strided", "random", *LEARNED_ARMS, *CONTROL_ARMS[1:])
# Okabe and Ito's palette, told apart by colour-blind readers too: naive towers grey, learned ones in colour.
_COLORS = {
    "flat": "#000000",
    "strided": "#777777",
    "random": "#AAAAAA",
    "coherent": "#0072B2",
    "diverse": "#D55E00",
    "coherent-mean": "#56B4E9",
    "diverse-mean": "#E69F00",
}


def write_study(records: Records, out: Path, *, stem: str, about: Mapping[str, Any]) -> list[Path]:
    """Writes ``<stem>.json``, ``<stem>.md`` and ``<stem>.png``.

    Args:
        records: of all runs.
        out: the folder; made when absent.
        stem: of the file names.
        about: date, machine, versions, command, settings; goes to the top of the files.

    Returns:
        The paths.
    """
    found = {
        "comparisons": main_findings(records),
        "controls": control_findings(records),
        "pairs": pair_findings(records),
        "stability": stability_findings(records),
    }
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{stem}.{suffix}" for suffix in ("json", "md", "png")]
    # The affinities of each seed's flat model are kept in the progress file only: they are most of its size.
    runs = [
        {name: value for name, value in r.items() if name not in ("affinity", "settings")} for r in records.values()
    ]
    head = json.dumps({"about": about, **found}, indent=1)
    lines = ",\n  ".join(json.dumps(run) for run in runs)
    paths[0].write_text(f'{head[:-2]},\n "runs": [\n  {lines}\n ]\n}}\n')
    paths[1].write_text(_page(found, stem=stem, about=about))
    plot_arms(records, paths[2])
    return paths


def _page(found: Mapping[str, Sequence[Mapping[str, Any]]], *, stem: str, about: Mapping[str, Any]) -> str:
    main, stability = found["comparisons"], found["stability"]
    facts = "\n".join(f"- {name}: {_fact(value)}" for name, value in about.items())
    return f"""# Do learned towers train better than naive ones?

The protocol of the DMT paper's Table 6 (section 5.2.3) on real data, made by `benchmarks/tower_study.py`.

{facts}

## Learned towers against strided ones

Test AUC, median (standard deviation) over seeds. Towers are learned for each seed, from the flat model of that
seed, so the noise of the whole method is in them. Difference: median over seeds, of pairs with one seed. Effect: the
difference in standard deviations over seeds. p-values are two-sided; in brackets after Holm's correction over the
{len(main)} rows. Both strategies are reported: choosing one by its test AUC would be optimistic.

{_comparison_table(main)}

![test AUC of every run]({stem}.png)

{_control_section(found["controls"])}## Which pairs of features matter

A look back, not a test planned beforehand: over all towers that were learned for each seed, the AUC less that of the
seed's strided towers, where a pair of features shares a tower and where it does not. The three pairs of each model with
the smallest Mann-Whitney p; in brackets after Holm's correction over all pairs of the model.

{_pair_table(found["pairs"])}

## How stable the learned towers are

Correlation: of the affinities of two seeds' flat models, mean over pairs of seeds. Rand index (adjusted; 1 equal, 0 as
by chance): of the towers of two seeds, mean over pairs of seeds; and of the towers learned from the mean affinity of
one half of the seeds with those of the other half.

{_stability_table(stability)}

Mean affinity of features that share a tower, in the flat model of the seed:

{_affinity_table(stability)}
"""


def _control_section(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    seeds = rows[0]["num_seeds"]
    smallest = 2.0 ** (1 - seeds)  # all differences of one sign, either way
    return f"""## Controls

`random`: balanced towers drawn for each seed. `coherent-mean`, `diverse-mean`: one plan for all seeds, learned
from the mean affinity of all seeds' flat models. Holm's correction is over these {len(rows)} rows; the smallest p that
the Wilcoxon test of {seeds} seeds can give, {smallest:.4f}, becomes {min(1.0, smallest * len(rows)):.3f} by it.

{_comparison_table(rows)}

"""


def _fact(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{name} {inner}" for name, inner in value.items())
    return str(value)


def _comparison_table(rows: Sequence[Mapping[str, Any]]) -> str:
    header = ["data", "model", "towers", "against", "AUC", "AUC against", "flat AUC"]
    header += ["difference", "better in", "effect", "Mann-Whitney p", "Wilcoxon p"]
    return markdown_table(
        header,
        [
            [
                row["dataset"],
                f"DMT-{row['arch'].upper()}",
                row["arm"],
                row["baseline"],
                f"{row['median']:.4f} ({row['std']:.4f})",
                f"{row['baseline_median']:.4f} ({row['baseline_std']:.4f})",
                f"{row['flat_median']:.4f}",
                f"{row['median_difference']:+.4f}",
                f"{row['num_better']} of {row['num_seeds']}",
                f"{row['effect']:+.1f}",
                *(_p_values(row, test) for test in ("mann_whitney_p", "wilcoxon_p")),
            ]
            for row in rows
        ],
    )


def _pair_table(rows: Sequence[Mapping[str, Any]]) -> str:
    return markdown_table(
        ["data", "model", "features", "runs together, apart", "AUC together", "AUC apart", "p"],
        [
            [
                row["dataset"],
                f"DMT-{row['arch'].upper()}",
                " + ".join(row["features"]),
                f"{row['num_together']}, {row['num_apart']}",
                f"{row['median_together']:+.4f}",
                f"{row['median_apart']:+.4f}",
                _p_values(row, "p"),
            ]
            for row in rows
        ],
    )


def _p_values(row: Mapping[str, Any], test: str) -> str:
    one, corrected = row[test], row[f"{test}_holm"]
    return f"{f'{one:.4f}' if one >= 0.0001 else '<0.0001'} ({corrected:.3f})"


def _stability_table(rows: Sequence[Mapping[str, Any]]) -> str:
    fields = [f"rand_index_{part}{arm}" for part in ("", "halves_") for arm in LEARNED_ARMS]
    return markdown_table(
        ["data", "model", "correlation", "coherent", "diverse", "coherent, halves", "diverse, halves"],
        [
            [row["dataset"], row["arch"].upper(), *(f"{row[name]:.2f}" for name in ("affinity_correlation", *fields))]
            for row in rows
        ],
    )


def _affinity_table(rows: Sequence[Mapping[str, Any]]) -> str:
    arms = ("coherent", "strided", "diverse", "expected")
    return markdown_table(
        ["data", "model", "coherent", "strided", "diverse", "expected of random"],
        [[row["dataset"], row["arch"].upper(), *(f"{row[f'affinity_{arm}']:.3f}" for arm in arms)] for row in rows],
    )


def plot_arms(records: Records, path: Path) -> None:
    """Draws every run's test AUC: a panel for each data set and arch, a column of points for each arm.

    Args:
        records: of all runs.
        path: the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    datasets = [name for name in STUDY_SETS if any(run.dataset == name for run in records)]
    figure = Figure(figsize=(11.0, 0.8 + 2.7 * len(datasets)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(datasets), len(ARCHS), squeeze=False)
    arms = [arm for arm in _ARMS if any(run.arm == arm for run in records)]
    for row, dataset in zip(panels, datasets, strict=True):
        for axes, arch in zip(row, ARCHS, strict=True):
            for place, arm in enumerate(arms):
                aucs = [auc for _, auc in sorted(auc_by_seed(records, dataset, arch, arm).items())]
                spread = np.linspace(-0.18, 0.18, len(aucs))
                axes.scatter(place + spread, aucs, s=16, color=_COLORS[arm], alpha=0.75, linewidths=0, zorder=2)
                middle = float(np.median(aucs))
                axes.plot([place - 0.32, place + 0.32], [middle, middle], color=_COLORS[arm], linewidth=2.0, zorder=3)
                if arm == "strided":
                    axes.axhline(middle, color=_COLORS[arm], linewidth=0.8, linestyle=":", zorder=1)
            axes.set_title(f"{dataset}, {arch.upper()}", fontsize=10, loc="left")
            axes.set_xticks(range(len(arms)), [arm.replace("-", "\n") for arm in arms], fontsize=8)
            axes.tick_params(axis="y", labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel("test AUC", fontsize=9)
    seeds = len({run.seed for run in records})
    figure.suptitle(
        f"Test AUC over {seeds} seeds; bars are medians, the dotted line is that of strided towers", fontsize=11
    )
    figure.savefig(path, dpi=140)
