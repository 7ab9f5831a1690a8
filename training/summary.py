"""The table that ends a run or a comparison of runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["ROWS", "cells", "print_summary"]

# name, path in the result, format, which direction is better (for the reader)
ROWS: tuple[tuple[str, str, str], ...] = (
    ("AUC", "eval_auc", "{:.4f}"),
    ("NE", "eval_ne", "{:.4f}"),
    ("MFLOPs/sample", "mflops_per_sample", "{:.3f}"),
    ("parameters", "parameters", "{:,.0f}"),
    ("compression ratio", "compression_ratio", "{:.2f}"),
    ("samples/s", "samples_per_second", "{:,.0f}"),
    ("bytes/sample across hosts: ids", "bytes_per_sample.ids", "{:,.0f}"),
    ("bytes/sample across hosts: forward", "bytes_per_sample.forward", "{:,.0f}"),
    ("bytes/sample across hosts: backward", "bytes_per_sample.backward", "{:,.0f}"),
    ("bytes/sample across hosts: dense all-reduce", "bytes_per_sample.dense", "{:,.0f}"),
    ("bytes/sample inside hosts", "bytes_per_sample.inside", "{:,.0f}"),
)


def cells(result: Mapping[str, Any]) -> list[str]:
    """The values of one run, formatted, in the order of `ROWS`.

    Example:
        >>> cells({"eval_auc": 0.75})[:2]
        ['0.7500', '-']
    """
    formatted = []
    for _, path, form in ROWS:
        value: Any = result
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        undefined = value is None or math.isnan(value)
        formatted.append("-" if undefined else form.format(value))
    return formatted


def print_summary(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints runs side by side, one column each."""
    table = Table(title="evaluation and cost")
    table.add_column("")
    for name in results:
        table.add_column(name, justify="right")
    for (label, _, _), *values in zip(ROWS, *(cells(result) for result in results.values()), strict=True):
        table.add_row(label, *values)
    Console(width=110).print(table)
