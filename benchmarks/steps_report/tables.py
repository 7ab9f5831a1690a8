"""Tables in Markdown: goals, step times, bytes, memory, sweeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.steps_report.compare import best_flat, speedup
from benchmarks.steps_report.goals import Goal
from benchmarks.steps_report.measures import KINDS, Measured
from benchmarks.steps_report.sweeps import Sweep, value_name
from benchmarks.towers.report import markdown_table

__all__ = ["bytes_table", "compute_table", "goals_table", "replicas_table", "sweep_table", "times_table"]

ABSENT = "-"


def goals_table(goals: Iterable[Goal]) -> str:
    """A line for each goal."""
    return markdown_table(
        ["goal", "measured", "verdict"], [[goal.text, goal.measured or ABSENT, goal.verdict] for goal in goals]
    )


def times_table(contenders: Sequence[Measured]) -> str:
    """Step times of all contenders beside their bounds."""
    header = [
        *("contender", "P10 ms", "P50 ms", "P90 ms", "samples/s", "x best flat", "waiting s"),
        *("bound s", "bound by", "P50 / bound", "imbalance", "peak memory MB"),
    ]
    return markdown_table(header, [_times_row(found, contenders) for found in contenders])


def _times_row(found: Measured, contenders: Sequence[Measured]) -> list[str]:
    flat = best_flat(contenders, found.precision)
    return [
        f"**{found.name}**" if found == flat else found.name,
        *(f"{1000 * found.percentile(percent):,.0f}" for percent in (10, 50, 90)),
        f"{found.samples_per_second:,.0f}",
        ABSENT if flat is None else str(speedup(found, flat)),
        f"{found.waiting:.2f}",
        f"{found.bound:.2f}",
        found.bound_name,
        f"{found.bound_ratio:.2f}",
        f"{found.imbalance:.1%}",
        f"{found.peak_memory / 1e6:,.0f}",
    ]


def bytes_table(contenders: Iterable[Measured]) -> str:
    """MB per host and step that every contender sends, by kind and by three ways of counting."""
    header = [
        *("contender", *KINDS, "all counted", "needed", "counted / needed"),
        *("by counters", "counters / needed", "inside a host"),
    ]
    return markdown_table(header, [_bytes_row(found) for found in contenders])


def _bytes_row(found: Measured) -> list[str]:
    counters = sum(found.uplink) / len(found.uplink) if found.uplink else None
    return [
        found.name,
        *(_megabytes(found.across[kind]) for kind in KINDS),
        _megabytes(sum(found.across.values())),
        _megabytes(sum(found.needed.values())),
        _number(found.counted_ratio),
        _megabytes(counters),
        _number(found.counters_ratio),
        _megabytes(found.inside),
    ]


def replicas_table(contenders: Iterable[Measured], *, every: int = 10) -> str:
    """Contenders with replicas: a step, one averaging, and a step with its share of an averaging; "" without any.

    Args:
        contenders: of a run.
        every: steps between two averagings.
    """
    rows = [
        [
            found.name,
            f"{1000 * found.median:,.0f}",
            f"{1000 * found.sync_seconds:,.0f}",
            _megabytes(found.sync_uplink),
            f"{1000 * (found.median + found.sync_seconds / every):,.0f}",
        ]
        for found in contenders
        if found.sync_seconds is not None
    ]
    header = ["contender", "P50 ms", "averaging ms", "its MB per host across", f"step with 1/{every} of it, ms"]
    return markdown_table(header, rows) if rows else ""


def sweep_table(sweep: Sweep) -> str:
    """Step times over the values of a sweep, each with its speed over the first contender, which is flat."""
    rows = []
    for name in sweep.names:
        cells = []
        for point in sweep.points:
            found, reference = point.named(name), point.named(sweep.names[0])
            assert found is not None, f"{name} is a name of the sweep and absent at {point.value}"
            assert reference is not None, f"{sweep.names[0]} is a name of the sweep and absent at {point.value}"
            cells.append(f"{found.median:.2f} ({reference.median / found.median:.2f} x; {found.bound_ratio:.2f})")
        rows.append([name, *cells])
    return markdown_table(["contender", *(value_name(sweep.part, point.value) for point in sweep.points)], rows)


def compute_table(rate: Sweep) -> str:
    """Step and compute alone with the link unlimited, beside the compute at the slowest rate; "" where absent."""
    unlimited = next((point for point in rate.points if point.value is None), None)
    slowest = rate.points[0]
    if unlimited is None or slowest is unlimited:
        return ""
    rows = []
    for name in rate.names:
        found, slow = unlimited.named(name), slowest.named(name)
        assert found is not None, f"{name} is a name of the sweep and absent at the unlimited rate"
        assert slow is not None, f"{name} is a name of the sweep and absent at {slowest.value}"
        rows.append([name, f"{found.median:.2f}", f"{found.compute:.2f}", f"{slow.compute:.2f}"])
    header = ["contender", "P50 s, unlimited", "compute alone s, unlimited", "compute alone s"]
    header[-1] += f", {value_name('rate', slowest.value)}"
    return markdown_table(header, rows)


def _megabytes(num_bytes: float | None) -> str:
    return ABSENT if num_bytes is None else f"{num_bytes / 1e6:.2f}"


def _number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.3f}"
