"""Small files and short cuts for the tests of `dmt.training.data`."""

from __future__ import annotations

from pathlib import Path

import pytest

from dmt.training.data.packed import PackedRows, RowLayout

REAL = Path("/work/shared/data")
needs_real_data = pytest.mark.skipif(not (REAL / "flights.parquet").exists(), reason="the shared real data are absent")


def criteo_line(label="0", integers=None, categories=None):
    return "\t".join([label, *(integers or ["1"] * 13), *(categories or ["0a"] * 26)])


def numbered_lines(count):
    """Rows that can be told apart by I1 = 0, 1, 2, ..."""
    return [criteo_line(str(i % 2), [str(i), *["1"] * 12]) for i in range(count)]


def write(path, lines, end="\n"):
    path.write_bytes((end.join(lines) + end).encode())
    return str(path)


def joined(parts):
    """The decoded rows of all parts, one after another."""
    layout = RowLayout(parts[0].dense.shape[1], tuple(b.offsets is not None for b in parts[0].bags), wide=True)
    return layout.unpack(PackedRows.concat([layout.pack(rows) for rows in parts]))


def real_rows(batches):
    """The rows of batches that count, by their first dense value."""
    return [x for b in batches for x in b.dense_features[b.weights > 0, 0].tolist()]
