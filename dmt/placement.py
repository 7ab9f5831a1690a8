"""Where one table of a tower lives: `TablePlacement`, the four schemes, and the shards they cut. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple, get_args

from dmt.errors import InputError, nearest

__all__ = [
    "SCHEMES",
    "Scheme",
    "TablePlacement",
    "TableShard",
    "column_shards",
    "place_tables",
    "row_shards",
    "table_shards",
]

Scheme = Literal["table_wise", "row_wise", "column_wise", "data_wise"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
# FBGEMM's kernels read columns four at a time.
_COLUMN_QUANTUM = 4


@dataclass(frozen=True, kw_only=True)
class TablePlacement:
    """Where one table lives inside its tower (Neo, section 4; DMT, section 3.1.3).

    ================  ==========================================================================================
    ``table_wise``    whole on one rank; exchange: all-to-all of pooled embeddings
    ``column_wise``   some columns on each of ``ranks``, which may repeat; ids go to all of them; all-to-all
    ``row_wise``      some rows on every rank of the tower; ids go to the row's rank; reduce-scatter of partial sums
    ``data_wise``     whole on every rank of the tower; no exchange of ids and embeddings, all-reduce of gradients
    ================  ==========================================================================================
    """

    scheme: Scheme
    """How the table is cut."""
    ranks: tuple[int, ...]
    """Local ranks 0..L-1 of the tower, one for each shard, in the order of the rows or columns."""
    sizes: tuple[int, ...] = ()
    """Rows (``row_wise``) or columns (``column_wise``) of each shard; empty: as even as possible."""

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise InputError(f"Sharding scheme {self.scheme!r} is unknown; use one of {list(SCHEMES)}.")
        if not self.ranks or (self.scheme == "table_wise" and len(self.ranks) != 1):
            raise InputError(
                f"A {self.scheme} table cannot live on ranks {list(self.ranks)}; table_wise takes one rank."
            )
        if self.scheme in ("row_wise", "data_wise") and self.ranks != tuple(range(len(self.ranks))):
            raise InputError(
                f"A {self.scheme} table lives on every rank of its tower, in order, but ranks={list(self.ranks)}."
            )
        if self.sizes and (self.scheme in ("table_wise", "data_wise") or len(self.sizes) != len(self.ranks)):
            raise InputError(
                f"sizes={list(self.sizes)} of a {self.scheme} table on ranks {list(self.ranks)}: give one size for "
                "each shard of a row_wise or column_wise table, none otherwise."
            )


class TableShard(NamedTuple):
    """The part of a table that one rank holds."""

    rank: int
    """Local rank in the tower."""
    first_row: int
    """First row of the table that it holds."""
    first_column: int
    """First column."""
    rows: int
    """Number of rows."""
    columns: int
    """Number of columns."""


def table_shards(table: Any, placement: TablePlacement) -> list[TableShard]:
    """The shards of a placed table, one for each entry of ``placement.ranks``.

    Args:
        table: ``EmbeddingBagConfig`` or `dmt.tables.TableSpec`.
        placement: its scheme and ranks.

    Raises:
        InputError: the table cannot be cut so; names it.

    Example:
        >>> from dmt.tables import TableSpec
        >>> table = TableSpec(name="t", num_embeddings=5, embedding_dim=8, feature_names=("f",))
        >>> [shard[:] for shard in table_shards(table, TablePlacement(scheme="row_wise", ranks=(0, 1)))]
        [(0, 0, 0, 3, 8), (1, 3, 0, 2, 8)]
    """
    rows, columns, ranks = table.num_embeddings, table.embedding_dim, placement.ranks
    try:
        if placement.scheme == "row_wise":
            heights = _given("num_embeddings", rows, placement) or row_shards(rows, len(ranks))
            return [
                TableShard(rank, first, 0, height, columns)
                for rank, first, height in zip(ranks, accumulate(heights, initial=0), heights, strict=False)
            ]
        if placement.scheme == "column_wise":
            widths = _given("embedding_dim", columns, placement) or column_shards(columns, len(ranks))
            return [
                TableShard(rank, 0, first, rows, width)
                for rank, first, width in zip(ranks, accumulate(widths, initial=0), widths, strict=False)
            ]
    except InputError as error:
        raise InputError(f"Table {table.name!r}: {error}") from error
    return [TableShard(rank, 0, 0, rows, columns) for rank in ranks]


def row_shards(num_embeddings: int, num_shards: int) -> list[int]:
    """Rows of the row shards of a table: equal blocks, the last one shorter; no shard is empty.

    Raises:
        InputError: there are fewer rows than shards.

    Example:
        >>> row_shards(10, 4), row_shards(5, 4)
        ([3, 3, 3, 1], [2, 1, 1, 1])
    """
    if num_embeddings < num_shards:
        raise InputError(
            f"num_embeddings={num_embeddings} cannot be cut into {num_shards} row shards: every rank needs a row. Use "
            "another scheme."
        )
    block = -(-num_embeddings // num_shards)
    last = num_embeddings - block * (num_shards - 1)
    if last > 0:  # the blocks of TorchRec's own bucketizer
        return [block] * (num_shards - 1) + [last]
    even, more = divmod(num_embeddings, num_shards)
    return [even + (shard < more) for shard in range(num_shards)]


def column_shards(embedding_dim: int, num_shards: int) -> list[int]:
    """Widths of the column shards of a table: multiples of four, as even as that allows.

    Raises:
        InputError: the columns are no multiple of four, or too few.

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


def _given(field: str, total: int, placement: TablePlacement) -> Sequence[int]:
    sizes = placement.sizes
    quantum = _COLUMN_QUANTUM if placement.scheme == "column_wise" else 1
    if sizes and (sum(sizes) != total or any(size < 1 or size % quantum for size in sizes)):
        raise InputError(
            f"sizes={list(sizes)} of its {placement.scheme} shards must be positive multiples of {quantum} that add up "
            f"to {field}={total}."
        )
    return sizes


def place_tables(
    tables: Sequence[Any],
    ranks_per_tower: int,
    *,
    scheme: Scheme | Literal["auto"] = "auto",
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
        TablePlacement(scheme='table_wise', ranks=(1,), sizes=())
        >>> place_tables([ads], 2)["a"]
        TablePlacement(scheme='column_wise', ranks=(0, 1), sizes=())
    """
    if scheme not in ("auto", *SCHEMES):
        raise InputError(f"scheme={scheme!r} is unknown; use one of {['auto', *SCHEMES]}.")
    if scheme in ("row_wise", "data_wise"):
        everyone = TablePlacement(scheme=scheme, ranks=tuple(range(ranks_per_tower)))
        return {table.name: (pinned or {}).get(table.name, everyone) for table in tables}
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


def _balance(
    tables: Sequence[Any], num_ranks: int, *, cut: bool, pinned: Mapping[str, TablePlacement]
) -> dict[str, TablePlacement]:
    columns, num_bytes = [0] * num_ranks, [0] * num_ranks
    placements: dict[str, TablePlacement] = {}

    def put(table: Any, placement: TablePlacement) -> None:
        placements[table.name] = placement
        for shard in table_shards(table, placement):
            columns[shard.rank] += shard.columns
            num_bytes[shard.rank] += shard.columns * shard.rows

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


def _columns_per_rank(tables: Sequence[Any], placements: Mapping[str, TablePlacement], num_ranks: int) -> list[int]:
    columns = [0] * num_ranks
    for table in tables:
        placement = placements[table.name]
        for shard in table_shards(table, placement):
            columns[shard.rank] += shard.columns
    return columns
