"""Placing tables on a tower's ranks: pure arithmetic."""

from __future__ import annotations

import pytest

from dmt import InputError, TableSpec
from dmt.placement import TablePlacement, column_shards, place_tables


def tables(*dims: int) -> list[TableSpec]:
    return [
        TableSpec(name=f"t{i}", num_embeddings=10, embedding_dim=d, feature_names=(f"f{i}",))
        for i, d in enumerate(dims)
    ]


def test_tables_are_spread_by_columns() -> None:
    placements = place_tables(tables(64, 16, 16, 32), 2, scheme="table_wise")
    load = [0, 0]
    for spec in tables(64, 16, 16, 32):
        load[placements[spec.name].ranks[0]] += spec.embedding_dim
    assert load == [64, 64]


def test_auto_cuts_columns_only_where_it_helps() -> None:
    assert {p.scheme for p in place_tables(tables(8, 8, 8, 8), 2).values()} == {"table_wise"}
    assert {p.scheme for p in place_tables(tables(8), 2).values()} == {"column_wise"}
    assert place_tables(tables(4), 2)["t0"].scheme == "table_wise"  # one shard needs four columns


@pytest.mark.parametrize(("dim", "shards"), [(24, 4), (8, 2), (12, 3), (128, 3), (4, 1)])
def test_column_shards_cover_the_table(dim: int, shards: int) -> None:
    widths = column_shards(dim, shards)
    assert sum(widths) == dim
    assert len(widths) == shards
    assert all(w % 4 == 0 and w > 0 for w in widths)
    assert max(widths) - min(widths) <= 4


def test_pins_are_kept_and_checked() -> None:
    pin = TablePlacement(scheme="table_wise", ranks=(1,))
    assert place_tables(tables(8, 8), 2, pinned={"t0": pin})["t0"] == pin
    assert place_tables(tables(8, 8), 2, pinned={"t0": pin})["t1"].ranks == (0,)
    with pytest.raises(InputError, match="Table 't9' is pinned but not in this tower"):
        place_tables(tables(8), 2, pinned={"t9": pin})
    with pytest.raises(InputError, match=r"'t0' is pinned to local rank 1, but its tower has ranks 0\.\.0"):
        place_tables(tables(8), 1, pinned={"t0": pin})
    with pytest.raises(InputError, match="scheme='diagonal' is unknown"):
        place_tables(tables(8), 1, scheme="diagonal")
    with pytest.raises(InputError, match="Table 't0': embedding_dim=8 cannot be cut into 3 column shards"):
        place_tables(tables(8), 3, pinned={"t0": TablePlacement(scheme="column_wise", ranks=(0, 1, 2))})
    with pytest.raises(InputError, match="table_wise takes one rank"):
        TablePlacement(scheme="table_wise", ranks=(0, 1))
