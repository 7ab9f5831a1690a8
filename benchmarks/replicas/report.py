"""The results of the replica study as a page in Markdown, as JSON, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.replicas.findings import (
    gap_findings,
    growth_findings,
    noise_findings,
    trend_findings,
    tune_findings,
)
from benchmarks.replicas.runs import Records
from benchmarks.report import markdown_table

__all__ = ["plot_gaps", "write_results"]

Rows = Sequence[Mapping[str, Any]]

# Okabe and Ito's palette, told apart by colour-blind readers too.
_COLORS = {2: "#0072B2", 4: "#009E73", 8: "#D55E00"}
_PARTS = {"grid": "tuned rate", "untuned": "rate of the tower study"}


def write_results(
    records: Records,
    out: Path,
    *,
    tuning: Records,
    verified: Rows,
    about: Mapping[str, Any],
    conclusions: str,
    stem: str = "replica_study",
) -> list[Path]:
    """Writes ``<stem>.json``, ``<stem>.md`` and ``<stem>.png``.

    Args:
        records: of whole seeds.
        out: the folder; made when absent.
        tuning: records of the part ``tune``.
        verified: what the part ``verify`` found.
        about: date, machine, versions, commit, command, settings.
        conclusions: text in Markdown on what the numbers say.
        stem: of the file names.

    Returns:
        The paths.
    """
    found: dict[str, Rows] = {
        "gaps": gap_findings(records, ["grid"]),
        "trends": trend_findings(records, ["grid", "untuned", "rates"]),
        "other_rates": gap_findings(records, ["untuned", "rates"]),
        "noise": noise_findings(records),
        "growth": growth_findings(records),
        "tuning": tune_findings(tuning),
        "verified": list(verified),
    }
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{stem}.{suffix}" for suffix in ("json", "md", "png")]
    head = json.dumps({"about": about, **found}, indent=1)
    runs = [{name: value for name, value in record.items() if name != "settings"} for record in records.values()]
    lines = ",\n  ".join(json.dumps(run) for run in runs)
    paths[0].write_text(f'{head[:-2]},\n "runs": [\n  {lines}\n ]\n}}\n')
    paths[1].write_text(_page(found, stem=stem, about=about, conclusions=conclusions))
    plot_gaps(found, paths[2])
    return paths


def _page(found: Mapping[str, Rows], *, stem: str, about: Mapping[str, Any], conclusions: str) -> str:
    facts = "\n".join(f"- {name}: {_fact(value)}" for name, value in about.items())
    return f"""# What do replicas cost in quality, and which moment scale c closes the gap?

The protocol of Figure 4 of the 2D sparse parallelism paper (section 4.1) on public data with small models, made by
`benchmarks/replica_study.py`.

{conclusions.strip()}

## How

- Flat DLRM (16 columns, MLPs 64-16 and 64-32-1), dense parts with Adam, tables with row-wise AdaGrad. The baseline is
  M = 1. All runs of a data set see the same global batches; replica m is given the m-th of M equal parts.
- Algorithm 1 with a sync in every step. All replicas are equal at the start of a step then, so one process keeps one
  copy of the tables and computes the M updates on it (`benchmarks/replicas/simulation.py`). *Verification* holds it
  against the trainer's models and FBGEMM's kernel.
- NE: normalised entropy on the test rows, lower is better. **NE gap**: NE over that of M = 1 with the same seed (start
  and order of rows), less 1, in percent; above 0 is worse than M = 1. The paper calls 0.02 % significant.
- Learning rate of the tables: the one with the lowest NE at M = 1 (*Tuning*), then held for every M and c, as in the
  paper. Dense rate, batch, epochs and warm-up are those of the tower study.
- [Q1, Q3]: quartiles over seeds. Mean: with its 95 % interval. p: paired t-test of the gaps against 0, in brackets
  after Holm's correction over the rows of the table.

{facts}

## NE gap at the tuned rate

{_gap_table(found["gaps"], rate=False)}

c = 0.5 and c = 16 were added to see both sides; the paper's range is 0 < c <= M, and `dmt`
refuses c > M.

![NE gap against c]({stem}.png)

## The two claims of Figure 4

Differences of gaps in percentage points, paired by seed. (a) Is the gap at c = 1 larger with M = 8 than with M = 2?
Above 0 says yes. (b) Is it smaller with c = M than with c = 1? Below 0 says yes.

{_trend_table(found["trends"])}

## At other rates

The tower study's rate was chosen for AdaGrad with a moment for each weight; for row-wise AdaGrad it is low.

{_gap_table(found["other_rates"], rate=True)}

## What can be seen at this size

Spread of seeds: standard deviation of the NE of M = 1 over seeds. Of a repetition: standard deviation of the gap of two
runs of M = 1 with one seed whose tables start 1e-6 apart; pairing by seed takes away no more than this leaves. Last
column: half of the 95 % interval of a mean gap, median over the rows of the table. All in percent of NE.

{_noise_table(found["noise"])}

## Noise and signal (Scaling Rule 1)

How much faster the moments grew than they would have with the gradient of the whole batch, at the same weights and
c = 1: 1 where the replicas' gradients agree, about M where they are noise (Proposition 1). Of all rows together, and
median over lookups.

{_growth_table(found["growth"])}

## Tuning

Mean NE of M = 1 over three seeds outside the study, trained on four fifths of the training rows and tested on the rest.

{_tuning_table(found["tuning"])}

## Verification

Largest differences between the simulation and M of the trainer's own sharded models (FBGEMM's fused kernel, moment
scaling by lr sqrt(c) and eps sqrt(c)), synchronised by hand after every step, over 30 steps with warm-up; float32.

{_verified_table(found["verified"])}
"""


def _fact(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{name} {inner}" for name, inner in value.items())
    return str(value)


def _gap_table(rows: Rows, *, rate: bool) -> str:
    header = ["data", *(["rate"] if rate else []), "M", "c", "median gap, %", "[Q1, Q3]", "mean", "seeds above 0", "p"]
    return markdown_table(
        header,
        [
            [
                row["dataset"],
                *([f"{row['sparse_lr']:g}"] if rate else []),
                str(row["num_replicas"]),
                f"{row['moment_scale']:g}",
                *_statistics(row),
            ]
            for row in rows
        ],
    )


def _trend_table(rows: Rows) -> str:
    return markdown_table(
        ["data", "rate", "gap of", "less gap of", "median", "[Q1, Q3]", "mean", "seeds above 0", "p"],
        [
            [
                row["dataset"],
                f"{row['sparse_lr']:g}",
                *(f"M = {m}, c = {c:g}" for m, c in ((row["num_replicas"], row["moment_scale"]), row["against"])),
                *_statistics(row),
            ]
            for row in rows
        ],
    )


def _statistics(row: Mapping[str, Any]) -> list[str]:
    p = f"{row['p']:.4f}" if row["p"] >= 0.0001 else "<0.0001"
    return [
        f"{row['median']:+.3f}",
        f"[{row['lower_quartile']:+.3f}, {row['upper_quartile']:+.3f}]",
        f"{row['mean']:+.3f} ± {row['half_width']:.3f}",
        f"{row['num_above']} of {row['num_seeds']}",
        f"{p} ({row['p_holm']:.3f})",
    ]


def _noise_table(rows: Rows) -> str:
    return markdown_table(
        ["data", "rate", "seeds", "NE of M = 1", "AUC", "spread of seeds", "of a repetition", "half interval"],
        [
            [
                row["dataset"],
                f"{row['sparse_lr']:g}",
                str(row["num_seeds"]),
                f"{row['ne']:.5f}",
                f"{row['auc']:.4f}",
                f"{row['seed_std']:.2f}",
                "-" if row["again_std"] is None else f"{row['again_std']:.2f}",
                f"{row['half_width']:.2f}",
            ]
            for row in rows
        ],
    )


def _growth_table(rows: Rows) -> str:
    return markdown_table(
        ["data", "M", "all rows", "median over lookups"],
        [
            [
                row["dataset"],
                str(row["num_replicas"]),
                f"{row['moment_growth']:.2f}",
                f"{row['moment_growth_median']:.2f}",
            ]
            for row in rows
        ],
    )


def _tuning_table(rows: Rows) -> str:
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    best = {name: min(row["ne"] for row in rows if row["dataset"] == name) for name in datasets}
    return markdown_table(
        ["data", "NE by learning rate of the tables"],
        [
            [
                name,
                ", ".join(
                    f"{row['sparse_lr']:g}: {'**' if row['ne'] == best[name] else ''}{row['ne']:.4f}"
                    f"{'**' if row['ne'] == best[name] else ''}"
                    for row in rows
                    if row["dataset"] == name
                ),
            ]
            for name in datasets
        ],
    )


def _verified_table(rows: Rows) -> str:
    names = ["loss", "weight", "weight_moved", "moment", "moment_largest"]
    return markdown_table(
        ["data", "M", "c", "loss", "weight", "a weight went up to", "moment", "a moment is up to"],
        [
            [row["dataset"], str(row["num_replicas"]), f"{row['moment_scale']:g}", *(f"{row[x]:.1e}" for x in names)]
            for row in rows
        ],
    )


def plot_gaps(found: Mapping[str, Rows], path: Path) -> None:
    """Draws the NE gap against c: a column of panels for each data set, a row for each rate, a line for each M.

    Args:
        found: the findings.
        path: the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [*found["gaps"], *found["other_rates"]]
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    figure = Figure(figsize=(4.0 * len(datasets), 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(_PARTS), len(datasets), squeeze=False)
    for part, line in zip(_PARTS, panels, strict=True):
        for dataset, axes in zip(datasets, line, strict=True):
            of_panel = [row for row in rows if (row["part"], row["dataset"]) == (part, dataset)]
            if not of_panel:
                axes.set_axis_off()
                continue
            _draw_panel(axes, of_panel)
            axes.set_title(f"{dataset}, {_PARTS[part]} ({of_panel[0]['sparse_lr']:g})", fontsize=9, loc="left")
        line[0].set_ylabel("NE gap against M = 1, %", fontsize=9)
    for axes in panels[-1]:
        axes.set_xlabel("moment scale c", fontsize=9)
    panels[0][0].legend(fontsize=8, frameon=False)
    seeds = max(row["num_seeds"] for row in rows)
    figure.suptitle(f"NE gap, median and quartiles of {seeds} seeds; above 0 is worse than M = 1", fontsize=11)
    figure.savefig(path, dpi=140)


def _draw_panel(axes: Any, rows: Rows) -> None:
    for num_replicas, color in _COLORS.items():
        line = [row for row in rows if row["num_replicas"] == num_replicas]
        if line:
            # Lines of equal c would lie on one another.
            scales = [row["moment_scale"] * (1 + 0.03 * (num_replicas.bit_length() - 3)) for row in line]
            medians = [row["median"] for row in line]
            spread = [
                [row["median"] - row["lower_quartile"] for row in line],
                [row["upper_quartile"] - row["median"] for row in line],
            ]
            axes.errorbar(
                scales,
                medians,
                yerr=spread,
                color=color,
                marker="o",
                markersize=4,
                capsize=2,
                label=f"M = {num_replicas}",
            )
    axes.axhline(0.0, color="#777777", linewidth=0.8, linestyle=":", zorder=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
