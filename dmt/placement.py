"""Which rank of its tower holds which table or column shard. Pure arithmetic, no TorchRec.

This is the simple balanced plan: lookups are spread evenly over a tower's ranks. The cost-model planner of Neo
(section 4) is a later stage behind the same interface.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dmt.errors import InputError, nearest

__all__ = ["SCHEMES", "TablePlacement", "place_tables"]

SCHEMES = ("table_wise", "column_wise")
# FBGEMM's kernels read columns four at a time.
_COLUMN_QUANTUM = 4


@dataclass(frozen=True, kw_only=True)
class TablePlacement:
    """Where one table lives inside its tower."""

    scheme: Literal["table_wise", "column_wise"]
    """``"table_wise"``: whole on one rank. ``"column_wise"``: cut into column shards, one per entry of ``ranks``."""
    ranks: tuple[int, ...]
    """Local ranks 0..L-1 of the tower, one for each shard in column order."""

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise InputError(f"Sharding scheme {self.scheme!r} is unknown; use one of {list(SCHEMES)}.")
        if not self.ranks or (self.scheme == "table_wise" and len(self.ranks) != 1):
            raise InputError(
                f"A {self.scheme} table cannot live on ranks {list(self.ranks)}; table_wise takes one rank."
            )


def place_tables(
    tables: Sequence[Any],
    ranks_per_tower: int,
    *,
    scheme: Literal["auto", "table_wise", "column_wise"] = "auto",
    pinned: Mapping[str, TablePlacement] | None = None,
) -> dict[str, TablePlacement]:
    """Spreads the tables of one tower over its ranks.

    Tables go, widest first, to the rank with the fewest columns so far (a lookup reads ``embedding_dim`` columns per
    id), then the fewest bytes. ``"auto"`` keeps tables whole unless cutting every table into columns lowers the
    load of the busiest rank by more than a tenth.

    Args:
        tables: ``EmbeddingBagConfig`` or `TableSpec` of one tower.
        ranks_per_tower: L.
        scheme: one scheme for every table, or ``"auto"``.
        pinned: placements decided by the user, by table name; the rest is balanced around them.

    Returns:
        The placement of every table, by name.

    Raises:
        InputError: unknown scheme, unknown pinned table, or a pin on a rank outside the tower.

    Example:
        >>> from dmt.tables import TableSpec
        >>> ads, users = (TableSpec(name=n, num_embeddings=100, embedding_dim=8, feature_names=(n,)) for n in "au")
        >>> place_tables([ads, users], 2)["u"]
        TablePlacement(scheme='table_wise', ranks=(1,))
        >>> place_tables([ads], 2)["a"]
        TablePlacement(scheme='column_wise', ranks=(0, 1))
    """
    if scheme not in ("auto", *SCHEMES):
        raise InputError(f"scheme={scheme!r} is unknown; use one of {['auto', *SCHEMES]}.")
    pinned = dict(pinned or {})
    names = [table.name for table in tables]
    for name, placement in pinned.items():
        if name not in names:
            raise InputError(f"Table {name!r} is pinned but not in this tower.{nearest(name, names)}")
        outside = [rank for rank in placement.ranks if not 0 <= rank < ranks_per_tower]
        if outside:
            raise InputError(
                f"Table {name!r} is pinned to local rank {outside[0]}, but its tower has ranks "
                f"0..{ranks_per_tower - 1}."
            )
    if scheme != "auto":
        return _balance(tables, ranks_per_tower, cut=scheme == "column_wise", pinned=pinned)
    whole = _balance(tables, ranks_per_tower, cut=False, pinned=pinned)
    cut = _balance(tables, ranks_per_tower, cut=True, pinned=pinned)
    busiest_whole, busiest_cut = (max(_columns_per_rank(tables, p, ranks_per_tower)) for p in (whole, cut))
    return cut if busiest_cut < 0.9 * busiest_whole else whole


def column_shards(embedding_dim: int, num_shards: int) -> list[int]:
    """Widths of the column shards of a table: multiples of four, as even as that allows.

    Example:
        >>> column_shards(24, 4)
        [8, 8, 4, 4]
    """
    quanta, rest = divmod(embedding_dim, _COLUMN_QUANTUM)
    if rest or quanta < num_shards:
        raise InputError(
            f"embedding_dim={embedding_dim} cannot be cut into {num_shards} column shards: each shard needs a multiple "
            f"of {_COLUMN_QUANTUM} columns. Use at most {quanta} shards or another embedding_dim."
        )
    even, more = divmod(quanta, num_shards)
    return [_COLUMN_QUANTUM * (even + (shard < more)) for shard in range(num_shards)]


def _balance(
    tables: Sequence[Any], num_ranks: int, *, cut: bool, pinned: Mapping[str, TablePlacement]
) -> dict[str, TablePlacement]:
    columns, num_bytes = [0] * num_ranks, [0] * num_ranks
    placements: dict[str, TablePlacement] = {}

    def put(table: Any, placement: TablePlacement) -> None:
        placements[table.name] = placement
        for rank, width in zip(placement.ranks, column_shards_of(table, placement), strict=True):
            columns[rank] += width
            num_bytes[rank] += width * table.num_embeddings

    for table in tables:
        if table.name in pinned:
            put(table, pinned[table.name])
    for table in sorted(tables, key=lambda t: (-t.embedding_dim, -t.num_embeddings, t.name)):
        if table.name in pinned:
            continue
        ranks = sorted(range(num_ranks), key=lambda rank: (columns[rank], num_bytes[rank], rank))
        shards = min(num_ranks, table.embedding_dim // _COLUMN_QUANTUM) if cut else 1
        if shards > 1 and table.embedding_dim % _COLUMN_QUANTUM == 0:
            put(table, TablePlacement(scheme="column_wise", ranks=tuple(ranks[:shards])))
        else:
            put(table, TablePlacement(scheme="table_wise", ranks=(ranks[0],)))
    return {table.name: placements[table.name] for table in tables}


def column_shards_of(table: Any, placement: TablePlacement) -> list[int]:
    """Widths of a placed table's shards, one per rank of the placement."""
    if placement.scheme == "table_wise":
        return [table.embedding_dim]
    try:
        return column_shards(table.embedding_dim, len(placement.ranks))
    except InputError as error:
        raise InputError(f"Table {table.name!r}: {error}") from error


def _columns_per_rank(tables: Sequence[Any], placements: Mapping[str, TablePlacement], num_ranks: int) -> list[int]:
    columns = [0] * num_ranks
    for table in tables:
        placement = placements[table.name]
        for rank, width in zip(placement.ranks, column_shards_of(table, placement), strict=True):
            columns[rank] += width
    return columns
