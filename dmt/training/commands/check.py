"""The body of ``dmt check``: what is run and printed."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from dmt.testing.ranks import prepare_ranks
from dmt.training.console import make_table, table_console

if TYPE_CHECKING:
    from dmt.training.check import CheckReport

__all__ = ["print_report", "run_check"]

_COLOURS = {"ok": "green", "FAILED": "bold red", "skipped": "yellow"}


def run_check(config: str, overrides: Sequence[str], **limits: Any) -> CheckReport:
    """Runs ``dmt check`` on a config; ``limits`` are those of `CheckLimits`.

    Raises:
        InputError: the config cannot be read, or the run cannot be built as it says.
        RanksFailedError: a rank failed, died or hangs.
    """
    began = time.perf_counter()
    from dmt.training.config import load_config

    settings = load_config(config, overrides)
    # The ranks' packages take as long to load as this process's: both at once.
    prepare_ranks(["dmt.training.check"])
    from dmt.training.check import check_run
    from dmt.training.check.shrink import CheckLimits

    # What one process says of the whole run, such as a far too large batch, is no news here.
    logging.getLogger("dmt").setLevel(logging.WARNING)
    with Console(stderr=True).status("Checking ..."):
        return replace(check_run(settings, CheckLimits(**limits)), seconds=time.perf_counter() - began)


def print_report(report: CheckReport) -> None:
    """Prints the report."""
    console = table_console(markup=True)
    schemes = ", ".join(f"{count} {scheme}" for scheme, count in report.schemes.items())
    for line in ([f"schemes: {schemes}"] if schemes else []) + list(report.reduced):
        console.print(f"- {escape(line)}")
    rows = []
    for row in report.rows:
        where = f"\n[{'red' if row.verdict == 'FAILED' else 'dim'}]{escape(row.where)}[/]" if row.where else ""
        allowed = "bitwise" if row.allowed == 0 else _number(row.allowed)
        verdict = f"[{_COLOURS[row.verdict]}]{row.verdict}[/]"
        rows.append((row.check, escape(row.what) + where, _number(row.difference), allowed, verdict))
    headers = ("", "against the plain module, or as said", "difference", "allowed", "")
    table = make_table(headers, rows, right=(2, 3))
    for column in table.columns:
        column.overflow = "fold"
    console.print(table)
    for note in report.notes:
        console.print(f"[yellow]Note:[/] {escape(note)}")
    failed = [row.check for row in report.rows if row.verdict == "FAILED"]
    verdict = f"[bold red]Does not agree: {', '.join(failed)}.[/]" if failed else "[green]Everything agrees.[/]"
    console.print(f"{verdict} {report.ranks} ranks, {report.seconds:.0f} s.")


def _number(number: float | None) -> str:
    if number is None:
        return ""
    return f"{number:.1e}" if number else "0"
