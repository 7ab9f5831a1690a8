"""``dmt prepare``: the rows of a config's data as Parquet with ids, with a bar and a summary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dmt.errors import InputError
from dmt.files import check_output
from dmt.training.commands import Shown
from dmt.training.config import load_config
from dmt.training.console import progress_bar
from dmt.training.data.prepare import PrepareOptions, prepare

__all__ = ["run_prepare"]

_MOST_NOTES = 10


def run_prepare(
    config: str,
    overrides: Sequence[str],
    *,
    out: Path,
    ids: str = "config",
    vocabulary: Path | None = None,
    **options: Any,
) -> Shown:
    """Prepares the data of a config, and shows the manifest.

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
        manifest = prepare(data, out, PrepareOptions(**options), on_share=on_share, **dims)
    return _show(asdict(manifest), out)


def _show(record: dict[str, Any], out: Path) -> Shown:
    """Shows the columns of the rows, what to look at, and how to train on them."""
    rows = []
    for name, feature in record["summary"]["features"].items():
        numbers = [feature[key] for key in ("distinct", "missing", "rows", "suggested_rows")]
        cells = ["-" if number is None else f"{number:,}" for number in numbers]
        rows.append([name, *cells, f"{feature['its_share']:.1%} {feature['most_frequent'] or ''}"[:24]])
    parts, notes = record["rows"], record["summary"]["notes"]
    lines = [f"- {note}" for note in notes[:_MOST_NOTES]]
    if len(notes) > _MOST_NOTES:
        lines.append(f"- and {len(notes) - _MOST_NOTES} more: see summary.notes in {out / 'manifest.json'}")
    if record["rejects"]:
        lines.append(f"{record['rejects']:,} rows were left out: see {out / 'rejects.csv'}")
    counts = f"access counts: hot_rows.profile={out / record['access_counts']}"
    lines.append(f"Train with data.prepared={out}; {counts}")
    headers = ["feature", "values", "missing", "rows", "suggested", "most frequent"]
    title = f"{parts['train']:,} training rows and {parts['eval']:,} evaluation rows"
    return Shown(record, headers, rows, title, range(1, 5), lines)


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
