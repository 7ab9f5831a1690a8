"""Placements of single tables and the shards they cut: pure arithmetic."""

from __future__ import annotations

import pytest

from dmt import InputError, TableSpec
from dmt.sharding.schemes import TablePlacement, column_shards, row_shards, table_shards


def table(rows: int = 10, columns: int = 8) -> TableSpec:
    return TableSpec(name="t", num_embeddings=rows, embedding_dim=columns, feature_names=("f",))


@pytest.mark.parametrize(("dim", "shards"), [(24, 4), (8, 2), (12, 3), (128, 3), (4, 1)])
def test_column_shards_cover_the_table(dim: int, shards: int) -> None:
    widths = column_shards(dim, shards)
    assert sum(widths) == dim
    assert len(widths) == shards
    assert all(w % 4 == 0 and w > 0 for w in widths)
    assert max(widths) - min(widths) <= 4


@pytest.mark.parametrize(("rows", "shards"), [(10, 4), (4, 4), (1000, 7), (1, 1)])
def test_row_shards_cover_the_table(rows: int, shards: int) -> None:
    heights = row_shards(rows, shards)
    assert sum(heights) == rows
    assert len(heights) == shards
    assert min(heights) >= 1


@pytest.mark.parametrize(
    ("placement", "cells"),
    [
        (TablePlacement(scheme="table_wise", ranks=(1,)), 80),
        (TablePlacement(scheme="column_wise", ranks=(1, 0)), 80),
        (TablePlacement(scheme="row_wise", ranks=(0, 1, 2)), 80),
        (TablePlacement(scheme="data_parallel", ranks=(0, 1)), 160),
    ],
)
def test_shards_cover_a_table_once_and_data_parallel_on_every_rank(placement: TablePlacement, cells: int) -> None:
    shards = table_shards(table(), placement)
    assert [shard.rank for shard in shards] == list(placement.ranks)
    assert sum(shard.rows * shard.columns for shard in shards) == cells


def test_bad_placements_are_refused() -> None:
    with pytest.raises(InputError, match="table_wise takes one rank"):
        TablePlacement(scheme="table_wise", ranks=(0, 1))
    with pytest.raises(InputError, match="scheme 'diagonal' is unknown"):
        TablePlacement(scheme="diagonal", ranks=(0,))
    with pytest.raises(InputError, match=r"takes every rank of its tower, in order, but ranks=\[1, 0\]"):
        TablePlacement(scheme="row_wise", ranks=(1, 0))
    with pytest.raises(InputError, match="Table 't': embedding_dim=8 cannot be cut into 3 column shards"):
        table_shards(table(), TablePlacement(scheme="column_wise", ranks=(0, 1, 2)))
    for rows in (2, 4):  # of 4 rows, blocks of two would leave the last rank none
        with pytest.raises(InputError, match=f"Table 't': num_embeddings={rows} cannot be cut into 3 row shards"):
            table_shards(table(rows=rows), TablePlacement(scheme="row_wise", ranks=(0, 1, 2)))
