"""``dmt breakdown``: prints where the time of a profiled step went."""

from __future__ import annotations

from pathlib import Path

from dmt.training.breakdown import Breakdown
from dmt.training.console import make_table, table_console

__all__ = ["print_breakdown"]


def print_breakdown(found: Breakdown, trace: Path) -> None:
    """Prints computing, exchanges and the rest, which add up to the step."""
    rows = [["computing", _part(found.computing, found), ""]]
    for kind in sorted({*found.exposed, *found.hidden}):
        hidden = found.hidden.get(kind, 0.0)
        rows.append([kind, _part(found.exposed.get(kind, 0.0), found), f"{1e3 * hidden:,.1f} ms"])
    rows += [["rest", _part(found.rest, found), ""], ["step", _part(found.seconds, found), ""]]
    steps = f", mean of {found.steps} steps" if found.steps > 1 else ""
    console = table_console(markup=False)
    console.print(make_table(["", "of the step", "hidden behind computing"], rows, title=f"{trace.name}{steps}"))
    console.print(
        "Exchanges: the time in which nothing computed (exposed); of several at once equal parts. Rest: nothing "
        "computed or was sent: the program, and waiting for other ranks."
    )


def _part(seconds: float, found: Breakdown) -> str:
    return f"{1e3 * seconds:,.1f} ms  {seconds / found.seconds:4.0%}"
