"""Sharding schemes: placements of tables in their tower, the shards that result, and the user's `ShardingRules`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any, Literal, NamedTuple, cast, get_args

from dmt.errors import InputError, did_you_mean
from dmt.plan.split_across_towers import uncut_name
from dmt.plan.tables import TABLE_FORMATS, is_sequence, table_format
from dmt.sharding.optimizers import data_parallel_obstacle

__all__ = [
    "EVERYWHERE",
    "ID_ROUTES",
    "KERNELS",
    "SCHEMES",
    "Allowed",
    "IdRoute",
    "Kernel",
    "Rule",
    "Scheme",
    "ShardingRules",
    "TablePlacement",
    "TableShard",
    "check_columns",
    "column_shards",
    "column_widths",
    "row_shards",
    "rules_by_name",
    "shards_in_tower",
    "table_shards",
    "why_not",
]

Scheme = Literal["table_wise", "row_wise", "column_wise", "data_parallel"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
IdRoute = Literal["peer", "global"]
"""Route of the ids to a table's tower: through the sending rank's peer there, or straight to the table's ranks."""
ID_ROUTES: tuple[IdRoute, ...] = get_args(IdRoute)
Kernel = Literal["fused", "fused_uvm", "fused_uvm_caching"]
"""TorchRec's kernel of a table, which decides where its weights are (Neo, section 5.2): in device memory, in host
memory, or in host memory with a cache on the device."""
KERNELS: tuple[Kernel, ...] = get_args(Kernel)
EVERYWHERE = ("row_wise", "data_parallel")
"""Schemes that use every rank of the tower."""
# FBGEMM's kernels read columns four at a time.
_COLUMN_QUANTUM = 4


@dataclass(frozen=True, kw_only=True)
class TablePlacement:
    """Placement of one table inside its tower (Neo, section 4; DMT, section 3.1.3).

    =================  =========================================================================================
    ``table_wise``     whole on one rank; all-to-all of pooled embeddings
    ``column_wise``    some columns on each of ``ranks``; ids go to all of them; all-to-all of pooled embeddings
    ``row_wise``       some rows on every rank of the tower; ids go to the row's rank; reduce-scatter of partial sums
    ``data_parallel``  whole on every rank of the tower; no exchange of ids and embeddings, all-reduce of gradients
    =================  =========================================================================================

    Raises:
        InputError: a value is unknown or out of range, or ``ranks`` or ``kernel`` do not suit the scheme.
    """

    scheme: Scheme
    ranks: tuple[int, ...]
    """Local ranks 0..L-1 of the tower, one for each shard, in the order of the rows or columns."""
    kernel: Kernel = "fused"
    """Kernel of the table. On a CPU all mean ``fused``."""
    cache_load_factor: float = 0.2
    """Share of the rows that the cache on the device holds; for ``fused_uvm_caching``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks))
        if self.scheme not in SCHEMES:
            raise InputError(f"TablePlacement: scheme={self.scheme!r} is unknown; use one of {list(SCHEMES)}.")
        if self.kernel not in KERNELS or (self.kernel != "fused" and self.scheme == "data_parallel"):
            raise InputError(
                f"TablePlacement: a {self.scheme} table cannot have kernel={self.kernel!r}; use one of "
                f"{list(KERNELS)}, and for data_parallel tables, which every device holds, 'fused'."
            )
        if not 0 < self.cache_load_factor <= 1:
            share = self.cache_load_factor
            raise InputError(f"TablePlacement: cache_load_factor={share} must be above 0 and at most 1 (all rows).")
        number = len(set(self.ranks))
        is_whole = self.scheme not in EVERYWHERE or self.ranks == tuple(range(number))
        if number < max(len(self.ranks), 1) or (self.scheme == "table_wise" and number != 1) or not is_whole:
            raise InputError(
                f"TablePlacement: a {self.scheme} table cannot be on ranks={list(self.ranks)}. Give one rank for "
                "table_wise, distinct ranks for column_wise, and all ranks of the tower in order for other schemes."
            )


class TableShard(NamedTuple):
    """The part of a table that one rank holds."""

    rank: int
    """Local rank in the tower."""
    first_row: int
    first_column: int
    rows: int
    columns: int


def table_shards(table: Any, placement: TablePlacement) -> list[TableShard]:
    """Returns the shards of a placed table, one for each entry of ``placement.ranks``.

    Raises `InputError` if the table cannot be cut into so many shards; the message names the table.
    """
    num = len(placement.ranks)
    heights, widths = [table.num_embeddings] * num, [table.embedding_dim] * num
    first_rows, first_columns = [0] * num, [0] * num
    try:
        if placement.scheme == "row_wise":
            heights = row_shards(table.num_embeddings, num)
            first_rows = [0, *accumulate(heights[:-1])]
        if placement.scheme == "column_wise":
            widths = column_shards(table.embedding_dim, num)
            first_columns = [0, *accumulate(widths[:-1])]
    except InputError as error:
        raise InputError(f"Table {table.name!r}: {error}. Use another scheme or fewer ranks.") from error
    return [TableShard(*side) for side in zip(placement.ranks, first_rows, first_columns, heights, widths, strict=True)]


def shards_in_tower(table: Any, placement: TablePlacement, *, num_ranks: int, tower: int) -> list[TableShard]:
    """Returns the shards of a table that is placed in a tower of ``num_ranks`` ranks.

    Raises:
        InputError: the placement names a rank that the tower does not have; a row-wise or data-parallel placement does
            not use all of its ranks; or the table cannot be cut into so many shards. The message names the table.
    """
    ranks, of_tower = placement.ranks, tuple(range(num_ranks))
    if not set(ranks) <= set(of_tower) or (placement.scheme in EVERYWHERE and ranks != of_tower):
        raise InputError(
            f"Table {table.name!r} in tower {tower} is {placement.scheme} on local ranks {list(ranks)}, but its tower "
            f"has ranks 0..{num_ranks - 1}, and row_wise and data_parallel use all of them. Correct its placement, or "
            "pass the plan of TowerShardingPlanner to DistributedModelParallel (plan=)."
        )
    return table_shards(table, placement)


def check_columns(table: Any) -> None:
    """Raises `InputError` if the columns of a table are not a multiple of four, as FBGEMM's kernels need."""
    if extra := table.embedding_dim % _COLUMN_QUANTUM:
        raise InputError(
            f"Table {table.name!r} has embedding_dim={table.embedding_dim}; FBGEMM's kernels take multiples of "
            f"{_COLUMN_QUANTUM}. Use {table.embedding_dim - extra + _COLUMN_QUANTUM}."
        )


def row_shards(num_embeddings: int, num_shards: int) -> list[int]:
    """Returns how many rows each row shard of a table has: equal blocks, of which the last may be shorter.

    Raises `InputError` if a shard would be empty; the caller adds the table and the remedy.

    Example:
        >>> row_shards(10, 4)
        [3, 3, 3, 1]
    """
    # TorchRec's bucketizer divides an id by the block to get its rank.
    block = -(-num_embeddings // num_shards)
    if (last := num_embeddings - block * (num_shards - 1)) < 1:
        raise InputError(
            f"num_embeddings={num_embeddings} cannot be cut into {num_shards} row shards: equal blocks would leave a "
            "rank without a row"
        )
    return [block] * (num_shards - 1) + [last]


def column_shards(embedding_dim: int, num_shards: int) -> list[int]:
    """Returns how many columns each column shard of a table has: multiples of four, as even as possible.

    Raises:
        InputError: ``embedding_dim`` is too small or not a multiple of four; the caller names the table and the remedy.

    Example:
        >>> column_shards(24, 4)
        [8, 8, 4, 4]
    """
    quanta, rest = divmod(embedding_dim, _COLUMN_QUANTUM)
    if rest or quanta < num_shards:
        raise InputError(
            f"embedding_dim={embedding_dim} cannot be cut into {num_shards} column shards, each of a multiple of "
            f"{_COLUMN_QUANTUM} columns"
        )
    even, more = divmod(quanta, num_shards)
    return [_COLUMN_QUANTUM * (even + (shard < more)) for shard in range(num_shards)]


def column_widths(shards: Iterable[Any]) -> list[int]:
    """Returns the widths of column shards from left to right, from the ``ShardMetadata`` of all shards of a table."""
    widths = {shard.shard_offsets[1]: shard.shard_sizes[1] for shard in shards}
    return [widths[first] for first in sorted(widths)]


def why_not(
    table: Any,
    scheme: str,
    *,
    num_ranks: int | None = None,
    id_route: IdRoute = "peer",
    fused_params: Mapping[str, Any] | None = None,
) -> str:
    """Returns the reason why a table cannot have a sharding scheme, or an empty string if it can.

    Args:
        table: ``EmbeddingBagConfig``, ``EmbeddingConfig`` or `dmt.plan.tables.TableSpec`.
        scheme: one of `SCHEMES`.
        num_ranks: L, ranks of the tower, to check that the table can be cut; None if it is cut already.
        id_route: route of the ids.
        fused_params: settings of the table's optimizer; None if they are not known yet.

    Example:
        >>> from dmt.plan.tables import TableSpec
        >>> table = TableSpec(name="t", num_embeddings=3, embedding_dim=8, feature_names=("f",))
        >>> why_not(table, "row_wise", num_ranks=4)
        'num_embeddings=3 cannot be cut into 4 row shards: equal blocks would leave a rank without a row'
    """
    kind = table_format(table)
    if kind not in TABLE_FORMATS:  # TorchRec builds tables of other formats as FP16, silently
        return f"its data_type is {kind!r}; tables train in {' or '.join(TABLE_FORMATS)}"
    if scheme == "table_wise":
        return ""
    if is_sequence(table) and scheme != "row_wise":
        return "its ids are looked up one by one, as sequences: such a table must be table_wise or row_wise"
    try:
        if num_ranks == 1:
            return "its tower has one rank"
        if num_ranks is not None and scheme == "row_wise":
            row_shards(table.num_embeddings, num_ranks)
        if num_ranks is not None and scheme == "column_wise":
            column_shards(table.embedding_dim, 2)
    except InputError as error:
        return str(error)
    if scheme in EVERYWHERE and id_route == "global":
        return "id_route='global' would send all ids to every rank of the tower, since each holds rows of the table"
    if scheme == "data_parallel":
        if kind == "FP16":  # a gradient of 1e-7 would err by a fifth, and one of 1e-8 would be lost
            return "its weights are FP16, and the gradients of a data-parallel table would be FP16 too"
        if fused_params is not None and (reason := data_parallel_obstacle(fused_params)):
            return reason
    return ""


Rule = Scheme | Kernel | TablePlacement
"""The user's decision for a table: its scheme, its kernel, or its whole placement; the planner chooses the rest."""


class Allowed(NamedTuple):
    """Choices that the planner has for one table."""

    schemes: tuple[Scheme, ...]
    """Schemes to choose from, at least one."""
    kernel: Kernel
    placement: TablePlacement | None
    """The placement that the user gave, or None."""
    why: str
    """Why the choice is limited, as the plan's reason quotes it; empty if that quotes nothing."""

    def place(self, scheme: Scheme, ranks: Sequence[int]) -> TablePlacement:
        """Returns a placement with the table's kernel."""
        return TablePlacement(scheme=scheme, ranks=tuple(ranks), kernel=self.kernel)


@dataclass(frozen=True, kw_only=True)
class ShardingRules:
    """The user's decisions for all tables, and for single tables by name or pattern with ``*``, ``?`` (``"t_ad*"``).

    A rule with the exact name of a table overrides patterns; among patterns the first match applies. A rule for a
    table that the tower plan cuts applies to its column shards. Rules for single tables are strict, ``schemes`` is not:
    a table that supports none of them is table_wise.

    Raises:
        InputError: a scheme or kernel is unknown, or there is no scheme.
    """

    schemes: Sequence[Scheme] = SCHEMES
    """Schemes to choose from for tables without a rule, or whose rule is only a kernel."""
    tables: Mapping[str, Rule] = field(default_factory=dict)
    """Rules by table name or pattern; without a rule, or with only a scheme, a table has the kernel ``fused``."""
    id_route: IdRoute = "peer"
    """Route of the ids; the global route does not support every scheme (`why_not`)."""
    fused_params: Mapping[str, Any] | None = None
    """Optimizer settings of the tables, some of which rule out data_parallel; None if they are not known."""
    hot_rows: bool = False
    """True if rows will have copies. Then a table is cut into columns only if a rule asks for it: `dmt.HotRows` leaves
    out such tables under row-wise AdaGrad, which keeps a separate state for each part of a row."""

    def __post_init__(self) -> None:
        for scheme in self.schemes or ("",):
            _check_known("schemes", scheme, SCHEMES)
        for key, rule in self.tables.items():
            if not isinstance(rule, TablePlacement):
                _check_known(f"rule for tables {key!r}", rule, (*SCHEMES, *KERNELS))

    def resolve(
        self, tables_by_tower: Sequence[Sequence[Any]], num_ranks: int, outside: Sequence[Any] = ()
    ) -> dict[str, Allowed]:
        """Returns what the planner may choose for every table, by name, in towers of ``num_ranks`` ranks.

        For tables ``outside`` towers there is no choice: their rules are only checked.

        Raises:
            InputError: a rule matches no table, a table or its tower cannot take what its rule asks for, or no table
                can have any of ``schemes``.
        """
        placed = [(table, tower) for tower, tables in enumerate(tables_by_tower) for table in tables]
        names = [table.name for table, _ in placed]
        known = dict.fromkeys([*names, *(table.name for table in outside)])
        keys, unused = _match(self.tables, known)
        if unused:
            raise InputError(
                f"The rule for tables {unused[0]!r} matches none of the {len(known)} tables of the model."
                f"{did_you_mean(unused[0], known)} Fix the name or drop the rule."
            )
        for table in outside:
            self._check_outside(table, keys.get(table.name))
        allowed = {table.name: self._resolve(table, keys.get(table.name), num_ranks, tower) for table, tower in placed}
        free = [name for name in names if name not in keys]
        if free and not any(set(choice.schemes) & set(self.schemes) for choice in allowed.values()):
            raise InputError(
                f"None of the {len(names)} tables can have the requested scheme; for table {free[0]!r}: "
                f"{allowed[free[0]].why}. Use table_wise, or leave the scheme open."
            )
        return allowed

    def _check_outside(self, table: Any, key: str | None) -> None:
        rule = "fused" if key is None else self.tables[key]
        scheme = rule.scheme if isinstance(rule, TablePlacement) else rule
        obstacle = why_not(table, "data_parallel", fused_params=self.fused_params)
        if scheme not in ("fused", "data_parallel"):
            obstacle = f"its rule {key!r} asks for {scheme}"
        if obstacle:
            raise InputError(
                f"Table {table.name!r} outside towers is data_parallel, on every rank, but {obstacle}. Change this "
                "setting, or put the table's features into a tower."
            )

    def _resolve(self, table: Any, key: str | None, num_ranks: int, tower: int) -> Allowed:
        rule = "fused" if key is None else self.tables[key]
        pattern = "" if key == table.name else f" ({key!r})"
        if rule in KERNELS:
            return self._free(table, rule, num_ranks)
        scheme = rule.scheme if isinstance(rule, TablePlacement) else cast("Scheme", rule)
        if obstacle := self._obstacle(table, scheme, num_ranks):
            raise InputError(
                f"Table {table.name!r} in tower {tower} cannot be {scheme}, as its rule{pattern} asks: {obstacle}. "
                "Change the rule."
            )
        if not isinstance(rule, TablePlacement):
            return Allowed((scheme,), "fused", None, f"asked for{pattern}")
        shards_in_tower(table, rule, num_ranks=num_ranks, tower=tower)
        return Allowed((scheme,), rule.kernel, rule, f"pinned by the user{pattern}")

    def _free(self, table: Any, kernel: Kernel, num_ranks: int) -> Allowed:
        obstacles = {scheme: self._obstacle(table, scheme, num_ranks) for scheme in self.schemes}
        if kernel != "fused" and "data_parallel" in obstacles:
            obstacles["data_parallel"] = f"kernel={kernel!r} is for tables that are too large for every device"
        why = "asked for" if len(self.schemes) == 1 else ""
        if self.hot_rows and obstacles.get("column_wise") == "":
            obstacles["column_wise"] = why = "it is not cut into columns, so that its rows can have copies"
        if not (possible := tuple(scheme for scheme in SCHEMES if obstacles.get(scheme) == "")):
            obstacle = next(iter(obstacles.values()))
            possible, why = ("table_wise",), f"{' or '.join(obstacles)} was asked for, but {obstacle}"
        return Allowed(possible, kernel, None, why)

    def _obstacle(self, table: Any, scheme: Scheme, num_ranks: int) -> str:
        return why_not(table, scheme, num_ranks=num_ranks, id_route=self.id_route, fused_params=self.fused_params)


def _check_known(what: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise InputError(f"{what}: {value!r} is not one of {list(known)}.{did_you_mean(str(value), known)}")


def rules_by_name(rules: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Returns the rule of each name that has one, as in `ShardingRules`; rules that match no name stay as they are."""
    keys, unused = _match(rules, names)
    return {key: rules[key] for key in unused} | {name: rules[key] for name, key in keys.items()}


def _match(rules: Collection[str], names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the key of the rule of each name that has one, by name; and the keys that match no name."""
    known, used = dict.fromkeys(names), set[str]()
    # A name with * is a name. Brackets belong to the names of column shards, "t[0:4]", and are not patterns.
    patterns = {key: key.replace("[", "[[]") for key in rules if key not in known and ("*" in key or "?" in key)}
    keys: dict[str, str] = {}
    for name in known:
        texts = name, uncut_name(name)
        matching = [text for text in texts if text in rules]
        matching += [key for key, pattern in patterns.items() if any(fnmatchcase(text, pattern) for text in texts)]
        used.update(matching)
        if matching:
            keys[name] = matching[0]
    return keys, [key for key in rules if key not in used]
