"""`ShardingRules`: the user's decisions about single tables, checked and resolved before anything is placed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, cast, get_args

from dmt.errors import InputError, did_you_mean
from dmt.plan.split_across_towers import uncut_name
from dmt.sharding.schemes import KERNELS, SCHEMES, IdRoute, Kernel, Scheme, TablePlacement, shards_in_tower, why_not

__all__ = ["Allowed", "CachePolicy", "Rule", "ShardingRules", "Tiers"]

CachePolicy = Literal["lru", "lfu"]
"""Rows that leave a full cache first: those read longest ago, or least often."""

Rule = Scheme | Sequence[Scheme] | TablePlacement


class Allowed(NamedTuple):
    """Choices that the planner has for one table."""

    schemes: tuple[Scheme, ...]
    """At least one."""
    placement: TablePlacement | None
    """Placement that the user gave; None if there is none."""
    why: str
    """Part of the reason of the choice; empty if the user asked for nothing."""


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """Memories of tables, and the caches in front of those that are not the device's (Neo, section 4.1.3).

    Raises:
        InputError: an unknown kernel or policy.
    """

    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    """Kernel by table name or pattern, of which the first that matches holds; other tables are on the device."""
    cache_load_factor: float = 0.2
    """Share of their rows that tables with a cache have there."""
    cache_policy: CachePolicy = "lru"
    """Rows that leave a full cache first."""

    def __post_init__(self) -> None:
        for key, kernel in self.kernels.items():
            if kernel not in KERNELS:
                raise InputError(f"Rule for tables {key!r}: kernel {kernel!r} is unknown; use one of {list(KERNELS)}.")
        if self.cache_policy not in get_args(CachePolicy):
            raise InputError(f"cache_policy={self.cache_policy!r} is unknown; use one of {get_args(CachePolicy)}.")

    def kernel_of(self, name: str) -> Kernel | None:
        """Returns the kernel asked for a table, None if there is none."""
        exact = self.kernels.get(name) or self.kernels.get(uncut_name(name))
        return exact or next((kernel for key, kernel in self.kernels.items() if fnmatchcase(name, key)), None)


@dataclass(frozen=True, kw_only=True)
class ShardingRules:
    """The user's constraints.

    A rule for a table's name beats rules for patterns; two patterns that say different things about one table are
    refused. Rules for tables are strict, ``schemes`` is not: a table that none of them can hold stays whole. The rules
    of a table that the tower plan cuts hold for its column shards.

    Raises:
        InputError: an unknown scheme, or none.
    """

    schemes: Sequence[Scheme] = SCHEMES
    """Schemes for tables without a rule of their own."""
    tables: Mapping[str, Rule] = field(default_factory=dict)
    """By table name or pattern (``"t_ad*"``): one scheme, several to choose from, or the whole placement."""

    id_route: IdRoute = "peer"
    """Route of the ids; the global route does not carry every scheme (`dmt.sharding.schemes.why_not`)."""
    tiers: Tiers = field(default_factory=Tiers)
    """The user's decisions about the memories of tables."""
    fused_params: Mapping[str, Any] | None = None
    """Optimizer settings of the tables: some cannot be data-parallel; None if they are not known."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "schemes", _checked("schemes", self.schemes))
        rules: dict[str, Rule] = dict(self.tables)
        for key, rule in self.tables.items():
            if not isinstance(rule, TablePlacement):
                schemes = _checked(f"Rule for tables {key!r}", [rule] if isinstance(rule, str) else rule)
                rules[key] = schemes[0] if isinstance(rule, str) else schemes
        object.__setattr__(self, "tables", rules)

    def resolve_all(self, tables_by_tower: Sequence[Sequence[Any]], num_ranks: int) -> dict[str, Allowed]:
        """Returns the planner's choices for every table, by name; see `resolve`.

        Raises:
            InputError: a rule matches no table, or not one can have the schemes asked for.
        """
        placed = [(table, tower) for tower, tables in enumerate(tables_by_tower) for table in tables]
        self._check_names({table.name for table, _ in placed})
        allowed = {table.name: self.resolve(table, num_ranks, tower) for table, tower in placed}
        free = [] if "table_wise" in self.schemes else [t for t in placed if not self._keys(t[0].name)]
        if free and not any(set(choice.schemes) & set(self.schemes) for choice in allowed.values()):
            name, tower = free[0][0].name, free[0][1]
            raise InputError(
                f"No table of the {len(placed)} can have the scheme asked for; the first of them is table {name!r} in "
                f"tower {tower}: {allowed[name].why}. Use table_wise, or leave the schemes open."
            )
        return allowed

    def _check_names(self, names: Set[str]) -> None:
        known = names | {uncut_name(name) for name in names}
        for key in (*self.tables, *self.tiers.kernels):
            if key in known or (uncut_name(key) == key and any(fnmatchcase(name, key) for name in known)):
                continue
            if any(mark in key for mark in "*?["):
                raise InputError(f"The rule for tables {key!r} matches none of the {len(names)} tables. Fix it.")
            raise InputError(
                f"Table {key!r} is pinned but not in the model ({len(names)} tables).{did_you_mean(key, names)} "
                "Fix the name or drop the rule."
            )

    def resolve(self, table: Any, num_ranks: int, tower: int) -> Allowed:
        """Returns the planner's choices for ``table`` in a tower of ``num_ranks`` ranks.

        Raises:
            InputError: its rules contradict each other, or the table or the tower cannot take what they ask for.
        """
        where, keys = f"Table {table.name!r} in tower {tower}", self._keys(table.name)
        for key in keys[1:]:
            if self.tables[key] != self.tables[keys[0]]:
                raise InputError(
                    f"{where} matches the rules {keys[0]!r} ({_words(self.tables[keys[0]])}) and {key!r} "
                    f"({_words(self.tables[key])}), which differ. Give it a rule by name, or narrow the patterns."
                )
        rule = self.tables[keys[0]] if keys else self.schemes
        pattern = f" ({keys[0]!r})" if keys and keys[0] != table.name else ""
        if isinstance(rule, TablePlacement):
            if obstacle := self._obstacle(table, rule.scheme, num_ranks):
                raise InputError(f"{where} is pinned {rule.scheme}, but {obstacle}. Pin it table_wise.")
            shards_in_tower(table, rule, num_ranks=num_ranks, tower=tower)
            return Allowed((rule.scheme,), rule, f"pinned by the user{pattern}")
        asked: Sequence[Scheme] = (rule,) if isinstance(rule, str) else rule
        possible = tuple(s for s in SCHEMES if s in asked and not self._obstacle(table, s, num_ranks))
        if possible:
            choice = f"{' or '.join(possible)} " if len(possible) > 1 else ""
            return Allowed(possible, None, "" if rule == SCHEMES and not keys else f"{choice}asked for{pattern}")
        obstacle = self._obstacle(table, asked[0], num_ranks)
        if keys:
            raise InputError(
                f"{where} cannot be {asked[0]}, as the rule for {keys[0]!r} asks: {obstacle}. Change the rule, or let "
                "it choose from several schemes."
            )
        schemes = " or ".join(s for s in SCHEMES if s in asked)
        return Allowed(("table_wise",), None, f"{schemes} asked for, but {obstacle}")

    def _obstacle(self, table: Any, scheme: Scheme, num_ranks: int) -> str:
        return why_not(table, scheme, num_ranks=num_ranks, id_route=self.id_route, fused_params=self.fused_params)

    def _keys(self, name: str) -> list[str]:
        names = (name, uncut_name(name))
        exact = [name for name in names if name in self.tables]
        # "t[0:4]" names a shard of t; as a pattern it would match t0.
        patterns = [key for key in self.tables if uncut_name(key) == key]
        return exact[:1] or [key for key in patterns if any(fnmatchcase(name, key) for name in names)]


def _checked(what: str, schemes: Sequence[str]) -> tuple[Scheme, ...]:
    schemes = tuple(schemes)
    if not schemes:
        raise InputError(f"{what} allows no scheme; use one or more of {list(SCHEMES)}.")
    unknown = [scheme for scheme in schemes if scheme not in SCHEMES]
    if unknown:
        raise InputError(
            f"{what}: scheme {unknown[0]!r} is unknown; use one of {list(SCHEMES)}.{did_you_mean(unknown[0], SCHEMES)}"
        )
    return cast("tuple[Scheme, ...]", schemes)


def _words(rule: Rule) -> str:
    if isinstance(rule, TablePlacement):
        return f"{rule.scheme} on ranks {list(rule.ranks)}"
    return rule if isinstance(rule, str) else " or ".join(rule)
