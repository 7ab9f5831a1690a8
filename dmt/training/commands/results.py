"""What ``dmt check``, ``dmt export`` and ``dmt score`` print, and what ``dmt check`` runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape

from dmt.formatting import counted, human_bytes, printable
from dmt.testing.ranks import prepare_ranks
from dmt.training.console import make_table, table_console
from dmt.training.records import quality_warnings

if TYPE_CHECKING:
    from dmt.training.check import CheckReport
    from dmt.training.serving.export import Exported
    from dmt.training.serving.score import Scored

__all__ = ["print_exported", "print_report", "print_scored", "run_check"]

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


def print_exported(found: Exported, out: Path) -> None:
    """Prints the exported model and the call that loads it."""
    manifest = found.manifest
    kind = f"{manifest['model']}, {len(manifest['towers']) or 'no'} towers"
    lines = [
        f"{found.checkpoint}: {kind}, step {manifest['step']}, {counted(len(manifest['features']), 'feature')}, "
        f"{counted(len(manifest['dense']), 'dense column')}, tables in {manifest['tables']}.",
        f"Logits on random samples: within {found.difference:.1e} of the trained model's."
        if found.difference
        else "Logits on random samples: the bits of the trained model's.",
        f"Written to {out}: {human_bytes(found.file_bytes)}.",
        f"Plain PyTorch loads it: torch.export.load({str(out)!r}).module(). `dmt score` takes it, too.",
    ]
    click.echo(printable("\n".join(lines)))


def print_scored(found: Scored, out: Path) -> None:
    """Prints the number of rows, and the metrics where rows have labels."""
    click.echo(printable(f"{found.num_rows:,} rows. Written to {out}."))
    if found.metrics is None:
        click.echo("The rows have no label: there are no metrics.")
        return
    click.echo(f"AUC {found.metrics.auc:.4f}, NE {found.metrics.ne:.4f}, loss {found.metrics.loss:.4f}.")
    for warning in quality_warnings(found.metrics.auc, found.metrics.ne):
        click.echo(warning)
