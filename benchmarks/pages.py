"""The tables of README and docs that come from records: `python -m benchmarks.pages` writes their rows again.

A table is known by its header. `tests/test_docs.py` compares the rows on the pages with those made here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.steps.measured import Measured, best_flat, measure_run

__all__ = ["TABLES", "main", "pages", "with_current_tables"]

_ROOT = Path(__file__).parent.parent
_RECORDS = Path(__file__).parent / "results"
Rows = list[list[str]]


@cache
def _record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_RECORDS / f"{name}.json").read_text())
    return found


def _contenders(record: str, part: str, **setting: Any) -> dict[str, Measured]:
    """The contenders of a job of the speed study, by name."""
    runs = [run for run in _record(record)["runs"] if run.get("part", part) == part]
    (run,) = [run for run in runs if all(run["setting"].get(key) == value for key, value in setting.items())]
    return {found.name: found for found in measure_run(run, cores=2)}


def _best(contenders: Mapping[str, Measured], precision: str) -> Measured:
    flat = best_flat(contenders.values(), precision)
    assert flat is not None, "the record has a flat contender"
    return flat


def _megabytes(found: Measured) -> str:
    return f"{sum(found.across.values()) / 1e6:.1f}"


def _readme() -> Rows:
    contenders, aucs = _contenders("steps", "main"), _auc_less_flat()
    flat = _best(contenders, "fp32")
    same = "same results"
    rows: list[tuple[str, str, int | str]] = [
        ("flat TorchRec, the fastest of seven ways", flat.name, ""),
        ("the same model over towers, each distinct input sent once", "sptt+unique", same),
        ("the same, prefetch, two micro-batches, hierarchical reduce", "sptt+prefetch+hier+mb2+unique", same),
        ("DMT-DLRM as in the paper, compression ratio 2", "dmt-cr2", 2),
        *((f"with all options, ratio {ratio}", f"dmt-cr{ratio}+all+rank-towers", ratio) for ratio in (2, 4, 16)),
    ]
    made = []
    for label, name, quality in rows:
        found = contenders[name]
        if isinstance(quality, int):
            # The timed models project each feature (c = 1, p = 0) in strided towers.
            lost = [aucs[data, "dlrm-each", "strided", quality] for data in ("flights", "hotel")]
            quality = ", ".join(f"{auc:+.4f}" for auc in lost)
        made.append([label, f"{found.median:.2f}", f"{flat.median / found.median:.2f}", _megabytes(found), quality])
    return made


def _performance(precision: str) -> Rows:
    """All contenders of the main job in one number format."""
    contenders = _contenders("steps", "main")
    flat = _best(contenders, precision)
    return [
        [
            f"best flat: `{found.name}`" if found is flat else f"`{found.name}`",
            *(f"{found.median:.2f}", f"{flat.median / found.median:.2f}"),
            *(_megabytes(found), f"{found.bound_ratio:.2f}"),
        ]
        for found in contenders.values()
        if found.precision == precision
    ]


_MODULES = {
    "dlrm-products": "DLRM with products",
    "dcn": "DCN",
    "dlrm": "DLRM, paper's combinations",
    "dlrm-each": "DLRM, paper's projections",
}


def _auc_less_flat() -> dict[tuple[str, str, str, int], float]:
    """By data set, model, towers and ratio, for four towers and N = 16."""
    return {
        (row["data"], row["model"], row["towers"], row["ratio"]): row["auc_less_flat"]
        for row in _record("quality_study")["costs"]
        if (row["num_towers"], row["dim"]) == (4, 16)
    }


def _quality() -> Rows:
    found = _auc_less_flat()
    arms = [("dlrm-products", "interactions"), ("dcn", "interactions"), ("dlrm", "interactions")]
    arms += [(model, "strided") for model in _MODULES]
    return [
        [
            *(data, _MODULES[model], "interactions apart" if (model, towers) == ("dlrm", "interactions") else towers),
            *(f"{found[data, model, towers, ratio]:+.4f}" for ratio in (2, 4, 8, 16)),
        ]
        for data in ("flights", "hotel", "census")
        for model, towers in arms
    ]


def _bytes_of_ratios() -> Rows:
    costs = [
        r for r in _record("quality_study")["costs"] if (r["data"], r["num_towers"], r["dim"]) == ("flights", 4, 16)
    ]
    by = {(row["model"], row["ratio"], row["towers"]): row for row in costs}
    rows = [["flat", "", "", "", f"{costs[0]['flat_bytes']:,.0f}"]]
    for ratio in (2, 4, 8, 16):
        width = 64 // ratio
        products = f"{max(1, width // 16)} x {min(16, width)}"
        sent = [by[model, ratio, "strided"]["bytes"] for model in ("dcn", "dlrm-each")]
        rows.append([str(ratio), str(width), products, str(16 // ratio), f"{sent[0]:.0f} ({sent[1]:.0f})"])
    return rows


def _hot_steps() -> Rows:
    labels = {"SPTT": "sptt", "SPTT with hot rows": "sptt+hot", "SPTT with both": "sptt+unique+hot"}
    labels |= {"SPTT with hot rows, dense gradients host by host": "sptt+hier+hot"}
    labels |= {"flat TorchRec, small tables data-parallel": "flat-tw-dp"}
    found = _contenders("hot_steps", "hot")
    return [
        [label, f"{1000 * found[name].median:,.0f}", f"{sum(found[name].uplink) / 2e6:.1f}"]
        for label, name in labels.items()
    ]


TABLES: Mapping[tuple[str, ...], Callable[[], Rows]] = {
    ("", "seconds per step", "times the best flat", "MB sent per host", "AUC, flights and hotel"): _readme,
    ("setup", "seconds per step", "times best flat", "MB sent per host", "step / own bound"): partial(
        _performance, "fp32"
    ),
    ("FP16 setup", "seconds per step", "times best flat", "MB sent per host", "step / own bound"): partial(
        _performance, "fp16"
    ),
    ("data", "tower module", "towers", "CR 2", "CR 4", "CR 8", "CR 16"): _quality,
    (
        *("CR", "DCN: D", "DLRM, products: p x D", "DLRM, projections: D"),
        "bytes of embeddings and gradients across hosts (projections)",
    ): _bytes_of_ratios,
    ("contender", "ms", "MB a host"): _hot_steps,
}
"""By header: what makes the rows of a table."""


def pages() -> list[Path]:
    """README and the pages of docs/."""
    return [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]


def with_current_tables(text: str) -> str:
    """A page whose tables have the rows that their records hold; columns of aligned tables keep their width."""
    lines = text.split("\n")
    for start, line in enumerate(lines):
        header = tuple(_cells(line))
        if header not in TABLES:
            continue
        end = next(i for i in range(start, len(lines) + 1) if i == len(lines) or not lines[i].startswith("|"))
        marks = [len(cell) for cell in lines[start].strip("|").split("|")]
        is_aligned = len({len(row) for row in lines[start:end]}) == 1
        rows = TABLES[header]()
        lines[start + 2 : end] = [_line(row, marks, lines[start + 1], is_aligned=is_aligned) for row in rows]
    return "\n".join(lines)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []


def _line(row: list[str], widths: list[int], rule: str, *, is_aligned: bool) -> str:
    if not is_aligned:
        return f"| {' | '.join(row)} |".replace("|  |", "| |").replace("|  |", "| |")
    right = [cell.endswith(":") for cell in _cells(rule)]
    cells = [
        cell.rjust(width - 2) if to_right else cell.ljust(width - 2)
        for cell, width, to_right in zip(row, widths, right, strict=True)
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Writes the rows of all known tables again."""
    for page in pages():
        text = page.read_text()
        if (current := with_current_tables(text)) != text:
            page.write_text(current)
            print(page)


if __name__ == "__main__":
    main()
