"""``dmt prepare``: the rows of a config's data as Parquet with ids, with a bar and a summary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dmt.errors import InputError
from dmt.files import check_output
from dmt.training.config import load_config
from dmt.training.console import make_table, progress_bar, table_console
from dmt.training.data.prepare import PrepareOptions, prepare

__all__ = ["print_prepared", "run_prepare"]

_MOST_NOTES = 10


def run_prepare(
    config: str,
    overrides: Sequence[str],
    *,
    out: Path,
    ids: str = "config",
    vocabulary: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Prepares the data of a config; returns the manifest.

    Raises:
        InputError: see `prepare`.
    """
    run = load_config(config, [*overrides, *(["data.id_mode=frequency"] if ids == "frequency" else [])])
    data = run.data if vocabulary is None else run.data.model_copy(update={"vocabulary": str(vocabulary)})
    if vocabulary is not None and data.id_mode != "frequency":
        raise InputError("--vocabulary needs ids by frequency. Give --ids frequency, or leave it out.")
    check_output("--out", out.absolute().parent, is_folder=True)
    dims: dict[str, Any] = {"embedding_dim": run.model.embedding_dim, "embedding_dims": run.model.embedding_dims}
    with _share_bar() as on_share:
        return asdict(prepare(data, out, PrepareOptions(**options), on_share=on_share, **dims))


def print_prepared(record: dict[str, Any], out: Path) -> None:
    """Prints the tables of a manifest, what to look at, and how to train on it."""
    console = table_console(markup=False)
    rows = []
    for name, feature in record["summary"]["features"].items():
        numbers = [feature[key] for key in ("distinct", "missing", "rows", "suggested_rows")]
        rows.append(
            [
                name,
                *("-" if number is None else f"{number:,}" for number in numbers),
                f"{feature['its_share']:.1%} {feature['most_frequent'] or ''}"[:24],
            ]
        )
    parts = record["rows"]
    ids = record["raw"].get("id_mode", "hash")
    title = f"{parts['train']:,} training rows and {parts['eval']:,} evaluation rows, ids by {ids}"
    names = ["feature", "values", "missing", "rows", "suggested", "most frequent"]
    console.print(make_table(names, rows, title=title))
    notes = record["summary"]["notes"]
    for note in notes[:_MOST_NOTES]:
        console.print(f"- {note}", soft_wrap=True)
    if len(notes) > _MOST_NOTES:
        console.print(f"- and {len(notes) - _MOST_NOTES} more: see summary.notes in {out / 'manifest.json'}")
    if record["rejects"]:
        console.print(f"{record['rejects']:,} rows were left out: see {out / 'rejects.csv'}", soft_wrap=True)
    console.print(
        f"Train with data.prepared={out}; access counts: hot_rows.profile={out / record['access_counts']}",
        soft_wrap=True,
    )


@contextmanager
def _share_bar() -> Iterator[Callable[[str, float], None]]:
    """Yields a function that shows the share of a part of the work that is done."""
    bars: dict[str, Any] = {}

    def show(phase: str, share: float) -> None:
        if phase not in bars:
            bars[phase] = progress_bar(initial=0, total=100, enabled=True, desc=phase, unit="%")
        bars[phase].update(round(100 * share) - bars[phase].n)

    try:
        yield show
    finally:
        for bar in bars.values():
            bar.close()
