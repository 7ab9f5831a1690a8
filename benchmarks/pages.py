"""Updates the numbers in README and docs that come from records: `python -m benchmarks.pages`.

A table is identified by its header, a sentence by its words. `tests/test_docs.py` checks that both are up to date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import ABSENT
from benchmarks.steps.measured import Measured, best_flat, fastest, measure_run
from benchmarks.steps.report import setting_words

__all__ = ["SENTENCES", "TABLES", "main", "pages", "pattern", "with_current_numbers", "with_current_tables"]

_ROOT = Path(__file__).parent.parent
_RECORDS = Path(__file__).parent / "results"
Rows = list[list[str]]


@cache
def _record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_RECORDS / f"{name}.json").read_text())
    return found


def _contenders(record: str, part: str) -> dict[str, Measured]:
    """Returns the contenders of a job of the speed study, by name."""
    (run,) = [run for run in _record(record)["runs"] if run.get("part", part) == part]
    return {found.name: found for found in measure_run(run, cores=2)}


def _best(contenders: Mapping[str, Measured], precision: str, *, every_id: bool = False) -> Measured:
    flat = best_flat(contenders.values(), precision, every_id=every_id)
    assert flat is not None, "the record has a flat contender"
    return flat


def _megabytes(found: Measured) -> str:
    return f"{sum(found.across.values()) / 1e6:.1f}"


_TOWER_MODELS = [
    *((f"DMT-DLRM with products, ratio {cr}", f"products-cr{cr}+all+rank-towers", "interactions") for cr in (4, 16)),
    ("the paper's DMT-DLRM, ratio 16", "dmt-cr16+all+rank-towers", "strided"),
]
"""Compressing models of README's table: label, contender, and towers in the study `outside`."""


def _readme() -> Rows:
    """Returns flat models, the unchanged model over towers, and `_TOWER_MODELS`."""
    contenders, aucs = _contenders("steps", "main"), _auc_less_flat("outside")
    flat = _best(contenders, "fp32")
    ways = {name.removesuffix("+prefetch") for name, found in _contenders("steps", "flat").items() if _is_flat(found)}
    rows = [(f"flat TorchRec, each rank's distinct ids, sent ahead (fastest of {len(ways)} setups)", flat, "")]
    every = _best(contenders, "fp32", every_id=True)
    rows += [("flat TorchRec, sharded by its planner, ids sent ahead", every, "")] if every is not flat else []
    same = fastest(contenders.values(), "sptt", precision="fp32")
    rows.append(("the same model over towers, no options", contenders["sptt"], "same results"))
    rows += [("the same model over towers, all options and `unique`", same, "same results")] if same else []
    for label, name, towers in _TOWER_MODELS:
        found = contenders[name]
        model = "dlrm-products" if found.family == "products" else "dlrm-each"
        lost = (aucs[data, model, towers, int(found.compression)] for data in ("flights", "hotel"))
        rows.append((f"{label}, all options", found, ", ".join(f"{round(auc, 4) + 0.0:+.4f}" for auc in lost)))
    return [
        [label, f"{f.median:.2f}", f"{flat.median / f.median:.2f}", _megabytes(f), quality]
        for label, f, quality in rows
    ]


def _is_flat(found: Measured) -> bool:
    return (found.family, found.precision) == ("flat", "fp32")


_SWEPT = {f"products, CR {ratio}": f"products-cr{ratio}+all+rank-towers" for ratio in (4, 16)}
_SWEPT |= {f"paper's, CR {ratio}": f"dmt-cr{ratio}+all+rank-towers+outside" for ratio in (4, 16)}


def _sweeps() -> Rows:
    """Returns, for every setting of the study, speedup and MB of the fastest unchanged model and `_SWEPT`, in FP32."""
    rows = []
    for run in (run for record in ("steps", "hosts") for run in _record(record)["runs"]):
        contenders = {found.name: found for found in measure_run(run, cores=2) if found.precision == "fp32"}
        ours = [fastest(contenders.values(), "sptt", precision="fp32"), *map(contenders.get, _SWEPT.values())]
        if any(ours) and (flat := best_flat(contenders.values(), "fp32")):
            cells = [f"{flat.median / f.median:.2f} ({_megabytes(f)})" if f else ABSENT for f in ours]
            words = re.sub(r", local batch [\d,]+(?=,)|, skewed ids", "", setting_words(run["setting"]))
            rows.append([words, f"{flat.median:.2f} ({_megabytes(flat)})", *cells])
    return rows


def _performance() -> Rows:
    """Returns a row for each FP32 contender of the main job."""
    contenders = _contenders("steps", "main")
    flat = _best(contenders, "fp32")
    return [
        [
            f"best flat: `{found.name}`" if found is flat else f"`{found.name}`",
            *(f"{found.median:.2f}", f"{flat.median / found.median:.2f}"),
            *(_megabytes(found), f"{found.bound_ratio:.2f}"),
        ]
        for found in contenders.values()
        if found.precision == "fp32"
    ]


_MODULES = {
    "dlrm-products": "DLRM with products",
    "dcn": "DCN",
    "dlrm": "DLRM, paper's combinations",
    "dlrm-each": "DLRM, paper's projections",
}


def _auc_less_flat(record: str = "quality_study") -> dict[tuple[str, str, str, int], float]:
    """Returns AUC minus that of the flat model, by (data set, model, towers, ratio), for four towers and N = 16."""
    return {
        (row["data"], row["model"], row["towers"], row["ratio"]): row["auc_less_flat"]
        for row in _record(record)["costs"]
        if (row["num_towers"], row["dim"]) == (4, 16)
    }


def _outside_changes(model: str) -> list[float]:
    """Returns the changes of a model's AUC from moving small tables outside towers."""
    rows = _record("outside")["comparisons"]
    return [row["median_difference"] for row in rows if row["baseline"].startswith(f"{model}, ")]


def _quality() -> Rows:
    found = _auc_less_flat()
    arms = [("dlrm-products", "interactions"), ("dcn", "interactions"), ("dlrm", "interactions")]
    arms += [(model, "strided") for model in _MODULES]
    return [
        [
            *(data, _MODULES[model], "interactions apart" if (model, towers) == ("dlrm", "interactions") else towers),
            *(f"{found[data, model, towers, ratio]:+.4f}" for ratio in (2, 4, 8, 16)),
        ]
        for data in ("flights", "hotel")
        for model, towers in arms
    ]


def _history_quality() -> Rows:
    """Returns the AUC of the flat model with attention, and the differences of the other models from it."""
    rows: dict[tuple[str, str], list[str]] = {}
    for row in _record("histories")["comparisons"]:
        cells = rows.setdefault((row["data"], row["baseline"].rpartition(" ")[2]), [f"{row['baseline_median']:.4f}"])
        cells.append(f"{row['median_difference']:+.4f}")
    return [[*place, *cells] for place, cells in rows.items()]


def _hot_bytes() -> Rows:
    """Returns the factors by which hot rows and unique inputs cut bytes: measured on two hosts, predicted on more."""
    measured = _record("hot_rows")
    plain, unique = measured["off"]["none"]["bytes"], measured["rank"]
    sent = [measured["off"]["cost rule"], unique["none"], unique["cost rule"]]
    rows = [["2 x 2, 4,096", *(f"{plain / way['bytes']:.1f}" for way in sent)]]
    for rule in _record("oper_tables")["rules"][1:]:
        ways = [rule[way]["times"] for way in ("cost rule", "unique", "unique + hot rows")]
        setting = f"{rule['hosts']} x {rule['ranks_per_host']}, {rule['batch_size']:,}"
        rows.append([setting, *(f"{times:.1f}" for times in ways)])
    return rows


def _histories() -> Rows:
    """Returns, for each length, the fastest setups, flat and in towers, with the bytes per sample across hosts."""
    rows = []
    for run in _record("history")["runs"]:
        contenders, samples = measure_run(run, cores=2), run["setting"]["batch_size"] * run["setting"]["ranks_per_host"]
        ours = fastest(contenders, "dmt", precision="fp32")
        assert ours is not None, "the record has towers"
        flat, cells = _best({found.name: found for found in contenders}, "fp32"), []
        for found in (flat, ours):
            ids, embeddings = found.across["ids"], found.across["forward"] + found.across["backward"]
            cells += [f"{found.median:.2f}", f"{embeddings / samples:,.0f}", f"{ids / samples:,.0f}"]
        rows.append([str(run["setting"]["history"]), *cells, f"{flat.median / ours.median:.1f}"])
    return rows


def _step_cells(run: Mapping[str, Any], ways: Iterable[str]) -> list[str]:
    """Returns, for each of ``ways``, the unchanged model's median seconds per step, and the MB that a host sends."""
    found = {one["name"]: one["steps"] for one in run["contenders"]}
    steps = [found[f"sptt{way}"] for way in ways]
    return [f"{median(s['seconds'] for s in way):.1f} ({max(way[0]['uplink_bytes']) / 1e6:.0f})" for way in steps]


def _placements() -> Rows:
    """Returns times and MB of the unchanged model's steps with one copy of the tables, and two in both placements."""
    rows = []
    for run in _record("replica_placement")["runs"]:
        setting, cells = run["setting"], _step_cells(run, ("", "+r2-intra", "+r2-inter"))
        rows.append([f"{setting['hosts']} x {setting['ranks_per_host']}", f"{setting['rows_cap']:,}", *cells])
    return rows


def _replicas() -> Rows:
    """Returns steps with one copy of the tables and with replicas, and the MB that a host sends in them."""
    ways = ("", "+r2-inter", "+r4-inter")
    return [[f"{run['setting']['rows_cap']:,}", *_step_cells(run, ways)] for run in _record("replica_steps")["runs"]]


TABLES: Mapping[tuple[str, ...], Callable[[], Rows]] = {
    ("model", "seconds per step", "speedup", "MB sent per host", "AUC, flights and hotel"): _readme,
    ("setting", "best flat: s (MB)", "unchanged: times (MB)", *_SWEPT): _sweeps,
    ("setup", "seconds per step", "speedup", "MB sent per host", "step / own bound"): _performance,
    ("rows of a table, at most", "one copy", "2 replicas", "4 replicas"): _replicas,
    ("hosts x ranks", "rows of a table, at most", "one copy", "`intra_host`", "`inter_host`"): _placements,
    ("data", "tower module", "towers", "CR 2", "CR 4", "CR 8", "CR 16"): _quality,
    ("data", "length", "flat: AUC", "CR 1", *("CR 2", "CR 4") * 2, "mean", "no history"): _history_quality,
    ("length", "flat: s", "embeddings", "ids", "towers: s", "embeddings", "ids", "times as fast"): _histories,
    ("hosts x ranks, samples per rank", "hot rows", "unique", "both"): _hot_bytes,
}
"""Functions that make the rows of a table, by its header."""


def _readme_sentences() -> Iterable[str]:
    aucs = _auc_less_flat()
    contenders = _contenders("steps", "main")
    every, once = (_megabytes(_best(contenders, "fp32", every_id=way)) for way in (True, False))
    yield f"flat TorchRec sent {every} MB per host and step, but only"
    yield f"{once} when each rank sent distinct ids"
    same = fastest(contenders.values(), "sptt", precision="fp32")
    assert same is not None, "the record has the same model over towers"
    flat = _best(contenders, "fp32").median
    gains = [flat / found.median for found in (contenders["sptt"], contenders["sptt+unique"], same)]
    yield "raises its speedup from {:.2f} to {:.2f}, and all other options to {:.2f}".format(*gains)
    models, towers = ("dlrm-products", "dcn"), _record("interaction_towers")["comparisons"]
    yield f"In arbitrary towers, it lost {-aucs['flights', models[0], 'strided', 4]:.4f}"
    learned = [row["median_difference"] for row in towers if row["baseline"] == "flat"]
    learned += [aucs[data, model, "interactions", 4] for data in ("flights", "hotel") for model in models]
    yield f"interactions, products and DCN lost at most {-min(learned):.4f}"


def _performance_sentences() -> Iterable[str]:
    contenders = _contenders("steps", "main")
    once, every = (_best(contenders, "fp32", every_id=way) for way in (False, True))
    yield f"a step takes {once.median:.2f} instead of {every.median:.2f} seconds"
    names = ("sptt+fp16+prefetch+bf16-dense+mb8+unique+rank-towers", "products-cr16+fp16+all+rank-towers+outside")
    halves = (_best(contenders, "fp16"), *(contenders[name] for name in names))
    cells = [f"{found.median:.2f} ({_megabytes(found)})" for found in halves]
    yield "best flat {}, unchanged over towers {}, products at ratio 16 with small tables outside {}".format(*cells)
    wires = [run["wire"] for run in _record("steps")["runs"] if run.get("wire")]
    gloo = [wire["all_to_all_ratio"] for wire in wires]
    yield f"took {min(gloo):.2f} to {max(gloo):.2f} times bytes / rate"
    yield f"this library's exchange between hosts took at most {max(wire['ratio'] for wire in wires):.2f}"
    ratios = [run["wire"]["all_to_all_ratio"] for run in _record("hosts")["runs"][:3]]  # hosts of one rank
    yield "{:.2f}, {:.2f} and {:.2f} times bytes / rate".format(*ratios)


def _quality_sentences() -> Iterable[str]:
    costs, aucs = _record("quality_study")["costs"], _auc_less_flat()
    spread = {
        data: median(r["auc_std"] for r in costs if (r["data"], r["num_towers"], r["dim"]) == (data, 4, 16))
        for data in ("flights", "hotel", "census")
    }
    yield f"is {spread['flights']:.4f} on flights and {spread['hotel']:.4f} on hotel"
    lost = {key[1:3]: -auc for key, auc in aucs.items() if key[0] == "flights" and key[3] == 4}
    keeping = ("dlrm-products", "dcn")
    yield f"interact lost at most {max(lost[model, 'interactions'] for model in keeping):.4f} at ratio 4"
    yield f"modules lost {lost['dlrm-products', 'strided']:.4f} and {lost['dcn', 'strided']:.4f}"
    linear = [lost[arm] for arm in (("dlrm", "interactions"), ("dlrm", "strided"), ("dlrm-each", "strided"))]
    yield f"the paper's modules for DLRM {min(linear):.4f} to {max(linear):.4f}"
    shown = ("interactions", "strided")
    below = {
        data: -min(auc for key, auc in aucs.items() if key[0] == data and key[2] in shown and key[3] == 4)
        for data in ("hotel", "census")
    }
    yield f"at ratio 4 no row is more than {below['hotel']:.4f} below the flat model"
    yield f"none is more than {below['census']:.4f} below it"
    tuned = [
        row["median_difference"]
        for row in _record("quality_study")["tuned_comparisons"]
        if row["arm"].startswith(keeping) and row["baseline"].endswith("flat") and row["data"] in spread
    ]
    yield f"by {min(tuned):+.4f} (DCN, hotel) to {max(tuned):+.4f} (products, flights)"
    for model, name in (("dlrm-products", "products"), ("dcn", "DCN")):
        yield f"{lost[model, 'coherent']:.4f} with {name} (random: {lost[model, 'random']:.4f})"
    gained, products = aucs["planted", "dcn", "interactions", 4], -aucs["planted", "dlrm-products", "interactions", 4]
    yield f"DCN gained {gained:.4f} at ratio 4 and products lost {products:.4f}"
    yield f"changed by at most {max(map(abs, _outside_changes('dlrm-each'))):.4f}, never"
    yield f"stay, lost up to {-min(_outside_changes('dlrm-products')):.4f}"
    steps = {(row["data"], row["rows"], row["rates"]): row["ne"] for row in _record("batches")["medians"]}
    near = [abs(ne - steps[data, 512, 1.0]) for (data, rows, _), ne in steps.items() if rows == 2048]
    yield f"stayed within {max(near) + 0.0005:.3f} NE of 512"  # rounded up
    for data in ("flights", "hotel"):
        yield f"from {steps[data, 512, 1.0]:.2f} to {steps[data, 8192, 4.0]:.2f} on {data}"


def _partitioner_sentences() -> Iterable[str]:
    named = [row for row in _record("entity_towers")["comparisons"] if row["arm"] == "named"]
    shares = [100 * row["bytes"]["once"] / row["strided_bytes"]["once"] for row in named]
    yield f"a rank then sends {min(shares):.0f} to {max(shares):.0f} % of the bytes"
    on_flights = {row["arch"]: row["auc"]["median_difference"] for row in named if row["data"] == "flights"}
    yield f"DLRM loses {-on_flights['dlrm']:.3f} of AUC, and DCN's cross layers gain {on_flights['dcn']:.3f}"


def _serving_sentences() -> Iterable[str]:
    results = _record("serving")["results"]
    of = {kind: [row for row in results if row["tables"] == kind] for kind in ("fp32", "int8", "int4")}
    shares = (median(row["file_over_tables"] for row in of[kind]) for kind in ("int8", "int4"))
    yield "take {:.2f} (INT8) or {:.2f} (INT4)".format(*shares)
    times = [
        row["p50_ms_of_1"] / plain["p50_ms_of_1"]
        for kind in ("int8", "int4")
        for row, plain in zip(of[kind], of["fp32"], strict=True)
    ]
    yield f"a median of {min(times):.1f} to {max(times):.1f} times as long"


def _what_if_sentences() -> Iterable[str]:
    text = " ".join((_RECORDS / "simulator.md").read_text().split())
    steps = re.search(r"(\d+) steps: median error (\S+), worst (\S+), .* took at most (\S+) longer", text)
    assert steps is not None, "simulator.md has a summary"
    count, middle, worst, longer = steps.groups()
    yield f"Over {count} measured steps of emulated clusters, the median error was {middle} and the worst {worst}"
    yield f"took at most {longer} longer"


SENTENCES: Mapping[str, Callable[[], Iterable[str]]] = {
    "README.md": _readme_sentences,
    "performance.md": _performance_sentences,
    "quality.md": _quality_sentences,
    "partitioner.md": _partitioner_sentences,
    "serving.md": _serving_sentences,
    "what_if.md": _what_if_sentences,
}
"""Functions that yield parts of a page's sentences with the numbers of their records, by page."""
_NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"


def pattern(sentence: str) -> re.Pattern[str]:
    r"""Returns a pattern that finds a sentence on a page with any numbers and line breaks; each number is a group.

    Example:
        >>> pattern("from 126 to 72.3 MB").search("cuts it from 1 to\n  7.5 MB").groups()
        ('1', '7.5')
    """
    parts = [re.escape(part) for part in re.split(_NUMBER, sentence)]
    return re.compile(f"({_NUMBER})".join(parts).replace(r"\ ", r"\s+"))


def with_current_numbers(page: str, text: str) -> str:
    """Returns a page's text with the numbers in its sentences updated from their records."""
    for sentence in SENTENCES.get(page, list)():
        found = pattern(sentence).search(text)
        assert found is not None, f"{page} has no sentence like {sentence!r}: correct the page or benchmarks/pages.py"
        numbers = re.findall(_NUMBER, sentence)
        for group in range(len(numbers), 0, -1):
            text = text[: found.start(group)] + numbers[group - 1] + text[found.end(group) :]
    return text


def pages() -> list[Path]:
    """Returns the paths of README and of the pages in docs/."""
    return [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]


def with_current_tables(text: str) -> str:
    """Returns a page's text with the rows of its tables updated; columns of aligned tables keep their width."""
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
    """Updates the rows of all known tables and the numbers in all known sentences, and prints the changed pages."""
    for page in pages():
        text = page.read_text()
        if (current := with_current_numbers(page.name, with_current_tables(text))) != text:
            page.write_text(current)
            print(page)


if __name__ == "__main__":
    main()
