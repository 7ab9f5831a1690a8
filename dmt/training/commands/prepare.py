"""``dmt prepare``: writes the rows of a config's data as Parquet with ids, and prints a summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dmt.files import check_output
from dmt.formatting import counted
from dmt.training.commands import Shown
from dmt.training.config import load_config, to_override
from dmt.training.data.prepare import prepare

__all__ = ["run_prepare"]

_MOST_NOTES, _MOST_COLUMNS = 10, 50


def run_prepare(
    config: str,
    overrides: Sequence[str],
    *,
    out: Path,
    ids: str = "config",
    vocabulary: Path | None = None,
    **options: Any,
) -> Shown:
    """Writes the prepared data of a config into the new folder ``out``, and returns a summary to print.

    ``ids`` is ``"config"`` or ``"frequency"``, ``vocabulary`` a prepared folder whose ids to reuse; else see `prepare`.

    Raises:
        InputError: ``vocabulary`` is given without ids by frequency, or `load_config` or `prepare` raises it.
    """
    given = [*overrides, *(["data.id_mode=frequency"] if ids == "frequency" else [])]
    run = load_config(config, [*given, *([to_override("data.vocabulary", vocabulary)] if vocabulary else [])])
    check_output("--out", out.absolute().parent, is_folder=True)
    dims: dict[str, Any] = {"embedding_dim": run.model.embedding_dim, "embedding_dims": run.model.embedding_dims}
    return _show(asdict(prepare(run.data, out, dims=dims, **options)), out)


def _show(record: dict[str, Any], out: Path) -> Shown:
    """Shows the columns of the prepared rows, notes on them, and how to train on them."""
    rows = []
    for name, feature in record["summary"]["features"].items():
        numbers = [f"{feature[key]:,}" for key in ("rows_in_use", "missing", "rows")]
        rows.append([name, *numbers, f"{feature['most_frequent_share']:.1%}"])
    rows += [[name, "", f"{dense['missing']:,}", "", ""] for name, dense in record["summary"]["dense"].items()]
    parts, notes, positives = record["rows"], record["summary"]["notes"], record["summary"]["positives"]
    shown = [note if len(note) <= 1000 else f"{note[:1000]} ..." for note in notes[:_MOST_NOTES]]
    lines = [f"- {note}" for note in shown]
    if len(rows) > _MOST_COLUMNS:
        lines.insert(0, f"{len(rows) - _MOST_COLUMNS:,} more columns: see summary in {out / 'manifest.json'}")
    if shown != notes:
        lines.append(f"- {counted(len(notes), 'note')} in full: see summary.notes in {out / 'manifest.json'}")
    if record["rejects"]:
        lines.append(f"{counted(record['rejects'], 'row')} left out: see {out / 'rejects.csv'}")
    lines.append(f"Train with data.prepared={out}; access counts of its rows: {out / record['access_counts']}")
    share = f" ({positives / parts['train']:.1%} with label 1)" if parts["train"] else ""
    title = f"{parts['train']:,} training rows{share} and {parts['eval']:,} evaluation rows"
    missing = "missing or id 0" if record["raw"].get("id_mode") == "index" else "missing"
    headers = ["column", "rows in use", missing, "rows", "most frequent"]
    return Shown(record, headers, rows[:_MOST_COLUMNS], title, range(1, 5), lines)
