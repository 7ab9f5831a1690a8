"""Small files and short cuts for the tests of `dmt.training.data`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch


def criteo_line(label="0", integers=None, categories=None):
    return "\t".join([label, *(integers or ["1"] * 13), *(categories or ["0a"] * 26)])


def numbered_lines(count):
    """Rows that can be told apart by I1 = 0, 1, 2, ..."""
    return [criteo_line(str(i % 2), [str(i), *["1"] * 12]) for i in range(count)]


def write(path, lines, end="\n"):
    path.write_bytes((end.join(lines) + end).encode())
    return str(path)


def parquet(path: Path, numbers: range, group_rows: int = 7) -> str:
    """Rows that can be told apart by ``d``, with text, missing values, lists, requests and a split."""
    table = {
        "label": [i % 2 for i in numbers],
        "d": [float(i) for i in numbers],
        "c": [None if i % 9 == 0 else f"v{i}" for i in numbers],
        "n": [i % 5 for i in numbers],
        "bag": [None if i % 4 == 0 else [f"x{i}", None, "y"][: i % 3] for i in numbers],
        "user": [(None, "")[i % 2] if i % 7 == 0 else f"u{i // 3 % 11}" for i in numbers],
        "part": ["test" if i % 5 == 0 else "train" for i in numbers],
    }
    pq.write_table(pa.table(table), path, row_group_size=group_rows)
    return str(path)


def real_rows(batches: Any) -> list[float]:
    """The rows of batches that count, by their first dense value."""
    return [x for b in batches for x in b.dense_features[b.weights > 0, 0].tolist()]


def same(a: Any, b: Any) -> bool:
    """Whether two batches have the same bits."""
    ids = (
        (a.sparse_features.values(), a.sparse_features.lengths()),
        (b.sparse_features.values(), b.sparse_features.lengths()),
    )
    parts = ((a.labels, b.labels), (a.dense_features, b.dense_features), (a.weights, b.weights))
    return all(torch.equal(x, y) for x, y in (*parts, *zip(*ids, strict=True)))
