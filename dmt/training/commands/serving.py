"""The output of ``dmt export`` and ``dmt score``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dmt.formatting import counted, human_bytes, printable
from dmt.training.records import quality_warnings

if TYPE_CHECKING:
    from dmt.training.serving.export import Exported
    from dmt.training.serving.score import Scored

__all__ = ["print_exported", "print_scored"]


def print_exported(found: Exported, out: Path) -> None:
    """Prints the exported model and the call that loads it."""
    manifest = found.manifest
    share = found.file_bytes / found.table_bytes
    kind = f"{manifest.model}, {len(manifest.towers)} towers" if manifest.towers else f"{manifest.model}, no towers"
    mostly = " (more of it is program than tables)" if share > 1 else ""
    lines = [
        f"{found.checkpoint}: {kind}, step {manifest.step}, {counted(len(manifest.features), 'feature')}, "
        f"{counted(len(manifest.dense), 'dense column')}, tables in {manifest.tables}.",
        f"Logits on random samples: within {found.difference:.1e} of the trained model's."
        if found.difference
        else "Logits on random samples: the bits of the trained model's.",
        f"Written to {out}: {human_bytes(found.file_bytes)}, {share:.2f} times its tables in FP32{mostly}.",
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
