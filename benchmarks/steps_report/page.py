"""The results of the speed study as a page in Markdown, as JSON, and as pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.steps_report.goals import judge, judge_unique
from benchmarks.steps_report.lines import plot_sweeps
from benchmarks.steps_report.measures import Measured, measure_run
from benchmarks.steps_report.pictures import chosen, plot_bytes, plot_steps
from benchmarks.steps_report.sweeps import SWEEPS, Sweep, make_sweep
from benchmarks.steps_report.tables import (
    bytes_table,
    compute_table,
    goals_table,
    replicas_table,
    sweep_table,
    times_table,
)
from dmt.files import atomic_write

__all__ = ["setting_words", "write_results"]

Run = Mapping[str, Any]
_FLAT_WORDS = "In a run of their own; the two fastest of each precision run again beside the others above."
_SWEEP_TITLES = {"hosts": "Hosts", "batch": "Local batch", "rate": "Link rate"}


def write_results(
    runs: Sequence[Run], out: Path, *, about: Mapping[str, Any], cores: int, stem: str = "train_step"
) -> list[Path]:
    """Writes ``<stem>.json``, ``<stem>.md`` and the pictures of what has been measured; other pictures are removed.

    Args:
        runs: of the JSON of ``benchmarks/train_step.py``, each with the name of its part under ``part``.
        out: the folder; made when absent.
        about: date, machine, versions, commits, command.
        cores: of the machine, all hosts together.
        stem: of the file names.

    Returns:
        The paths.
    """
    main = next((run for run in runs if run["part"] == "main"), None)
    contenders = [] if main is None else measure_run(main, cores=cores)
    sweeps = [sweep for part in SWEEPS if (sweep := make_sweep(part, runs, cores=cores)) is not None]
    pictures = {name: out / f"{stem}_{name}.png" for name in ("steps", "bytes", "sweeps")}
    out.mkdir(parents=True, exist_ok=True)
    for path in pictures.values():
        path.unlink(missing_ok=True)
    paths = [out / f"{stem}.json", out / f"{stem}.md"]
    if main is not None and contenders:
        words = setting_words(main["setting"])
        shown = chosen(contenders)
        paths += [
            plot_steps(shown, pictures["steps"], subtitle=words),
            plot_bytes(shown, pictures["bytes"], subtitle=words),
        ]
    if sweeps:
        # Every run holds the values that its sweep does not vary; those of the main setting are in most of them.
        base = main or next(run for run in runs if run["part"] == sweeps[0].part)
        paths.append(plot_sweeps(sweeps, pictures["sweeps"], subtitle=f"around {setting_words(base['setting'])}"))
    with atomic_write(paths[0]) as scratch:
        scratch.write_text(_json(runs, {**about, "cores": cores}))
    flat = next((measure_run(run, cores=cores) for run in runs if run["part"] == "flat"), [])
    unique = {
        "requests" if run["setting"]["group"] > 1 else run["setting"]["ids"]: (run, measure_run(run, cores=cores))
        for run in runs
        if run["part"] == "unique"
    }
    page = _page(main, contenders, flat, sweeps, unique, about={**about, "cores": cores}, stem=stem)
    with atomic_write(paths[1]) as scratch:
        scratch.write_text(page)
    return paths


def setting_words(setting: Mapping[str, Any]) -> str:
    """A setting in words.

    Example:
        >>> setting_words({"hosts": 2, "ranks_per_host": 2, "mbit_per_s": 200.0, "batch_size": 4096})
        '2 hosts x 2 ranks, 200 Mbit/s, local batch 4,096'
        >>> setting_words({"hosts": 1, "ranks_per_host": 2, "mbit_per_s": None, "batch_size": 8, "ids": "skewed"})
        '1 host x 2 ranks, unlimited link, local batch 8, skewed ids'
    """
    rate = "unlimited link" if setting["mbit_per_s"] is None else f"{setting['mbit_per_s']:g} Mbit/s"
    plural = "" if setting["hosts"] == 1 else "s"
    ranks = f"{setting['hosts']} host{plural} x {setting['ranks_per_host']} ranks"
    ids = f", {setting['ids']} ids" if "ids" in setting else ""
    group = f", requests of {setting['group']} samples" if setting.get("group", 1) > 1 else ""
    return f"{ranks}, {rate}, local batch {setting['batch_size']:,}{ids}{group}"


def _json(runs: Sequence[Run], about: Mapping[str, Any]) -> str:
    """One line for each contender: the file is read by people too."""
    blocks = []
    for run in runs:
        head = json.dumps({name: value for name, value in run.items() if name != "contenders"})
        lines = ",\n   ".join(json.dumps(contender) for contender in run["contenders"])
        blocks.append(f'{head[:-1]}, "contenders": [\n   {lines}\n  ]}}')
    body = ",\n  ".join(blocks)
    return f'{{"about": {json.dumps(about)},\n "runs": [\n  {body}\n ]\n}}\n'


def _page(
    main: Run | None,
    contenders: Sequence[Measured],
    flat: Sequence[Measured],
    sweeps: Sequence[Sweep],
    unique: Mapping[str, tuple[Run, Sequence[Measured]]],
    *,
    about: Mapping[str, Any],
    stem: str,
) -> str:
    facts = "\n".join(f"- {name}: {_fact(value)}" for name, value in about.items())
    return (
        "\n\n".join(
            [
                "# Step times on emulated hosts",
                "Made by `benchmarks/bench.py` (`make bench`). All hosts are network namespaces of one machine, their "
                "links limited by `tc htb`: this shows the wire and what overlaps it, not the speed of GPUs.",
                facts,
                _main_section(main, contenders, stem),
                *(["## All flat contenders", _FLAT_WORDS, times_table(flat)] if flat else []),
                *(_sweep_section(part, sweeps) for part in SWEEPS),
                *([f"![step time against hosts, batch and rate]({stem}_sweeps.png)"] if sweeps else []),
                *_unique_section(unique),
                _HOW,
            ]
        ).rstrip()
        + "\n"
    )


def _main_section(main: Run | None, contenders: Sequence[Measured], stem: str) -> str:
    if main is None or not contenders:
        return "## Goals\n\nThe main run has not been measured."
    wire = main["wire"]
    replicas = replicas_table(contenders)
    contender_notes = "\n".join(f"- {found.name}: {found.notes}" for found in contenders if found.notes)
    finished = min(len(found.rounds) for found in contenders)
    return "\n\n".join(
        [
            "## Goals",
            f"{setting_words(main['setting'])}; {finished} rounds of {main['setting']['steps_per_turn']} steps.",
            goals_table(judge(contenders, header_share=_header_share(wire))),
            _wire_words(wire),
            f"![step times]({stem}_steps.png)",
            "## All contenders",
            times_table(contenders),
            "Bold: the best flat contender of its precision. Memory: of the rank with most, weights included.",
            "## Bytes",
            "MB per step that one host sends to the others (mean over hosts).",
            f"![bytes across hosts]({stem}_bytes.png)",
            bytes_table(contenders),
            *([f"## Replicas\n\nAveraged every 10 steps, timed by itself.\n\n{replicas}"] if replicas else []),
            *([f"## Notes\n\n{contender_notes}"] if contender_notes else []),
        ]
    )


def _header_share(wire: Mapping[str, Any] | None) -> float:
    # A counter that is read while the neighbour has begun to send misses bytes; headers are never negative.
    return 0.0 if wire is None else max(0.0, wire["header_overhead"])


def _wire_words(wire: Mapping[str, Any] | None) -> str:
    if wire is None:
        return "The bare wire was not measured."
    return (
        f"The bare wire: {wire['bytes_per_rank'] / 1e6:g} MB per rank, all to all, took {_times(wire, '')} with "
        f"receives asked for first, as this library does, and {_times(wire, 'all_to_all_')} with PyTorch's "
        f"`all_to_all_single` over gloo, which TorchRec calls; headers added "
        f"{wire['header_overhead']:.2%} to the bytes."
    )


def _times(wire: Mapping[str, Any], which: str) -> str:
    ratio = wire[f"{which}ratio"]
    return f"{wire[f'{which}seconds']:.3f} s{'' if ratio is None else f' ({ratio:.2f} x bytes / rate)'}"


def _sweep_section(part: str, sweeps: Sequence[Sweep]) -> str:
    sweep = next((sweep for sweep in sweeps if sweep.part == part), None)
    title = f"## {_SWEEP_TITLES[part]}"
    if sweep is None:
        return f"{title}\n\nNot measured."
    text = f"{title}\n\nMedian seconds (speed over {sweep.names[0]}; median over bound).\n\n{sweep_table(sweep)}"
    compute = compute_table(sweep) if part == "rate" else ""
    return f"{text}\n\n{compute}".rstrip()


def _unique_section(runs: Mapping[str, tuple[Run, Sequence[Measured]]]) -> list[str]:
    if not runs:
        return []
    by_kind = [runs[kind][1] if kind in runs else [] for kind in ("skewed", "distinct", "requests")]
    tables = [
        f"{setting_words(run['setting'])}.\n\n{times_table(contenders)}\n\n{bytes_table(contenders)}"
        for run, contenders in runs.values()
    ]
    return ["## Each input once", goals_table(judge_unique(*by_kind)), *tables]


def _fact(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{name} {inner}" for name, inner in value.items())
    return str(value)


_HOW = """\
## How

- A round runs through all contenders in a shuffled order, the same on all ranks; warm-up rounds are left out. A step's
  seconds are those of its slowest rank.
- *Best flat*: the flat contender with the lowest median at the same precision, over schemes and prefetch. For a goal,
  the fastest of ours and of TorchRec's towers is chosen in the same way; its name is given.
- Speeds are ratios of medians. [a, b]: 95 % interval, from 10,000 bootstrap draws of rounds, the same rounds for both.
- *Bound*: the larger of wire (bytes of the busiest uplink by its counter / rate) and compute (CPU seconds of all
  processes, all threads, over the cores of the machine; median over steps). All hosts share these cores.
- *Imbalance*: CPU seconds of the main threads summed over a host's ranks, the most of a host less the least, over the
  step; median over steps.
- *Waiting*: what a main thread neither computed nor waited for a core; mean over ranks, median over steps.
- *Needed* bytes are arithmetic (`benchmarks/steps/needed.py`), *counted* ones are seen at the collectives
  (`dmt.traffic`), those *by counters* include headers and acknowledgements."""
