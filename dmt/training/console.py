"""What the terminal shows: the log messages of rank 0, a progress bar, and tables of a run's numbers."""

from __future__ import annotations

import io
import logging
import math
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = [
    "ROWS",
    "cells",
    "lookup",
    "make_table",
    "progress_bar",
    "quiet_libraries",
    "rows_of",
    "say_last",
    "table_console",
]

# Characters in a line: in a pipe or file, and at least, so that no number is cut.
_PIPE_WIDTH, _LEAST_WIDTH = 140, 90
# Ranks with an error wait this long, so that the first rank of their host can report it before torchrun stops all.
_LET_FIRST_SPEAK_S = 10
_WHEN_IT_HAS_ENDED = """
import os, select, sys
try:
    select.select([os.pidfd_open(int(sys.argv[1]))], [], [])
except OSError:  # it has ended, or the system has no such call
    pass
print(sys.argv[2], file=sys.stderr)
"""
# Seconds between two lines of progress if there is no terminal for a bar.
_LINE_EVERY_S = 30.0
# Label, path in the result, format of the value.
ROWS: tuple[tuple[str, str, str], ...] = (
    ("AUC", "eval_auc", "{:.4f}"),
    ("NE", "eval_ne", "{:.4f}"),
    ("MFLOPs/sample", "mflops_per_sample", "{:.3f}"),
    ("parameters", "parameters", "{:,.0f}"),
    ("compression ratio", "compression_ratio", "{:.2f}"),
    ("samples/s", "samples_per_second", "{:,.0f}"),
    ("samples/s per rank", "samples_per_second_per_rank", "{:,.0f}"),
    ("samples/s predicted by dmt what-if", "predicted.samples_per_second", "{:,.0f}"),
    ("lookups of a step, s: slowest rank", "lookups.largest", "{:.5f}"),
    ("lookups of a step, s: predicted", "predicted.lookup_seconds", "{:.5f}"),
    ("lookups: slowest rank / mean of ranks", "lookups.imbalance", "{:.2f}"),
    ("peak memory in bytes: largest rank", "peak_memory.largest", "{:,.0f}"),
    ("peak memory in bytes: mean of ranks", "peak_memory.mean", "{:,.0f}"),
    ("bytes/sample across hosts", "bytes_per_sample.across", "{:,.0f}"),
    ("bytes/sample across hosts: ids", "bytes_per_sample.ids", "{:,.0f}"),
    ("bytes/sample across hosts: forward", "bytes_per_sample.forward", "{:,.0f}"),
    ("bytes/sample across hosts: backward", "bytes_per_sample.backward", "{:,.0f}"),
    ("bytes/sample across hosts: dense all-reduce", "bytes_per_sample.dense", "{:,.0f}"),
    ("bytes/sample inside hosts", "bytes_per_sample.inside", "{:,.0f}"),
    # Only for runs that have these. Averaging crosses hosts unless the replicas share them.
    ("hot rows on every rank", "hot_rows.rows", "{:,.0f}"),
    ("bytes/sample replicas' sync", "replicas.bytes_per_sample", "{:,.0f}"),
)


class _Lines(io.TextIOBase):
    """Prints each redraw of a progress bar as a new line, for files and pipes."""

    def write(self, text: str) -> int:
        if line := text.strip():
            print(line, file=sys.stderr, flush=True)
        return len(text)


def progress_bar(
    items: Iterable[Any] | None = None,
    *,
    initial: int = 0,
    total: int | None,
    enabled: bool = True,
    desc: str = "train",
    unit: str = "step",
    delay_s: float = 0,
) -> Any:
    """Returns a tqdm bar on stderr from ``initial`` to ``total``; if that is None, it estimates no time left.

    With ``items``, it yields them and counts. It appears after ``delay_s`` seconds. Without a terminal, it prints a
    line every 30 seconds instead. If not ``enabled``, it shows nothing.
    """
    from tqdm import tqdm

    options: dict[str, Any] = {"desc": desc, "unit": unit, "initial": initial, "total": total, "delay": delay_s}
    if sys.stderr.isatty():
        options |= {"mininterval": 1.0}
    else:
        # A pipe has no width, and a log needs no picture of a bar.
        form = "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
        options |= {"mininterval": _LINE_EVERY_S, "maxinterval": _LINE_EVERY_S, "file": _Lines(), "bar_format": form}
    return tqdm(items, **options, disable=not enabled)


def table_console() -> Console:
    """Returns a console for tables, as wide as the terminal or ``COLUMNS`` but wide enough that no number is cut."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        # A pipe has no width; rich's 80 columns would fold lines that a file has room for.
        console.width = _PIPE_WIDTH
    console.width = max(console.width, _LEAST_WIDTH)
    return console


def make_table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None, right: Sequence[int] = ()
) -> Table:
    """Returns a table; columns at the indices ``right`` hold numbers, which are never cut; long texts are folded."""
    table = Table(title=title)
    for place, header in enumerate(headers):
        is_number = place in right
        table.add_column(header, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def quiet_libraries(*, rank: int) -> None:
    """Sends this package's log to stderr, and silences Python warnings and TorchRec's messages below ERROR.

    For programs only: a library leaves logging to its user. Ranks other than 0 log errors only.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    said: dict[str, logging.LogRecord] = {}
    # Only new messages: a run lists its files several times, each time with the same warnings.
    handler.addFilter(lambda record: said.setdefault(record.getMessage(), record) is record)
    ours = logging.getLogger("dmt")
    ours.handlers = [handler]
    ours.propagate = False
    ours.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    warnings.simplefilter("ignore")
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    # PyTorch sets its loggers' levels itself, but leaves those that have one.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


def say_last(text: str, *, rank: int, launcher: int) -> None:
    """Prints a line to stderr; on torchrun's last attempt, again after torchrun (process ``launcher``) has ended.

    Ranks other than 0 begin the line with their number; all but the first rank of a host wait first.
    """
    if os.environ.get("LOCAL_RANK", str(rank)) != "0":
        time.sleep(_LET_FIRST_SPEAK_S)
    if rank != 0:
        text = f"[rank {rank}] {text}"
    print(text, file=sys.stderr, flush=True)
    attempt, most = (os.environ.get(f"TORCHELASTIC_{name}") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    if attempt is not None and attempt == most and "DMT_LAUNCHER" not in os.environ:
        # torchrun does not know this process, so it does not end it.
        command = [sys.executable, "-I", "-S", "-c", _WHEN_IT_HAS_ENDED, str(launcher), text]
        subprocess.Popen(command, start_new_session=True)


def rows_of(results: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Returns the entries of `ROWS` for which at least one of the results has a value."""
    runs = list(results)
    return [row for row in ROWS if any(lookup(run, row[1]) is not None for run in runs)]


def lookup(result: Mapping[str, Any], path: str) -> Any:
    """Returns the value at a dotted path such as ``"bytes_per_sample.forward"``; None if it is absent."""
    value: Any = result
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def cells(result: Mapping[str, Any], rows: Sequence[tuple[str, str, str]] = ROWS) -> list[str]:
    """Returns the formatted values of one run, in the order of ``rows``; "-" for a value that is absent or NaN."""
    values = [(lookup(result, path), form) for _, path, form in rows]
    return ["-" if value is None or math.isnan(value) else form.format(value) for value, form in values]
