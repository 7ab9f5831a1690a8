"""``dmt prepare``: the rows of a config's data as Parquet with ids, with a bar and a summary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dmt.files import check_output
from dmt.training.config import load_config
from dmt.training.console import make_table, progress_bar, table_console
from dmt.training.data.prepare import PrepareOptions, prepare

__all__ = ["print_prepared", "run_prepare"]


def run_prepare(
    config: str, overrides: Sequence[str], *, out: Path, ranks: int | None, **options: Any
) -> dict[str, Any]:
    """Prepares the data of a config for a job of its ranks, or of ``ranks``; returns the manifest.

    Raises:
        InputError: see `prepare`.
    """
    run = load_config(config, overrides)
    check_output("--out", out.absolute().parent, is_folder=True)
    if ranks is None:
        ranks = run.topology.build().world_size
    dims: dict[str, Any] = {"embedding_dim": run.model.embedding_dim, "embedding_dims": run.model.embedding_dims}
    bars: dict[str, Any] = {}

    def on_rows(phase: str, rows: int) -> None:
        if phase not in bars:
            for bar in bars.values():
                bar.close()
            bars[phase] = progress_bar(initial=0, total=None, enabled=True, desc=phase, unit="row")
        bars[phase].update(rows)

    try:
        return prepare(run.data, out, PrepareOptions(ranks=ranks, **options), on_rows=on_rows, **dims)
    finally:
        for bar in bars.values():
            bar.close()


def print_prepared(record: dict[str, Any], out: Path) -> None:
    """Prints the tables of a manifest, and how to train on it."""
    console = table_console(markup=False)
    rows = [
        [name, *("-" if own[key] is None else f"{own[key]:,}" for key in ("distinct", "rows", "rows_read", "accesses"))]
        for name, own in record["tables"].items()
    ]
    numbers = record["rows"]
    title = f"{numbers['train']:,} training rows and {numbers['eval']:,} evaluation rows, ids by {record['ids']}"
    console.print(make_table(["table", "values", "rows", "rows read", "accesses"], rows, title=title))
    if record["malformed_rows"]:
        console.print(f"{record['malformed_rows']:,} malformed rows were left out.")
    console.print(f"Row groups of {record['row_group_rows']:,} rows. Train with data.prepared={out}", soft_wrap=True)
    console.print(f"Access counts: hot_rows.profile={out / record['access_counts']}", soft_wrap=True)
