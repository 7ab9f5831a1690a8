"""`ShardingRules`: the user's decisions about single tables, checked and resolved before anything is placed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, cast

from dmt.errors import InputError, did_you_mean
from dmt.files import current_name
from dmt.sharding.schemes import SCHEMES, IdRoute, Scheme, TablePlacement, table_shards, why_not

__all__ = ["Allowed", "Rule", "ShardingRules"]

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
class ShardingRules:
    """The user's constraints.

    A rule for a table's name beats rules for patterns; two patterns that say different things about one table are
    refused. Rules for tables are strict, ``schemes`` is not: a table that none of them can hold stays whole.

    Raises:
        InputError: an unknown scheme, or none.

    Example:
        >>> from dmt.plan.tables import TableSpec
        >>> table = TableSpec(name="t_ad", num_embeddings=100, embedding_dim=8, feature_names=("ad",))
        >>> ShardingRules(tables={"t_*": "row_wise"}).resolve(table, num_ranks=4, tower=0)
        Allowed(schemes=('row_wise',), placement=None, why="asked for ('t_*')")
    """

    schemes: Sequence[Scheme] = SCHEMES
    """Schemes for tables without a rule of their own."""
    tables: Mapping[str, Rule] = field(default_factory=dict)
    """By table name or pattern (``"t_ad*"``): one scheme, several to choose from, or the whole placement."""

    id_route: IdRoute = "peer"
    """Route of the ids; the global route does not carry every scheme (`dmt.sharding.schemes.why_not`)."""
    fused_params: Mapping[str, Any] | None = None
    """Optimizer settings of the tables: some cannot be data-parallel; None if they are not known."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "schemes", _checked("schemes", self.schemes))
        rules = {key: self._checked_rule(key, rule) for key, rule in self.tables.items()}
        object.__setattr__(self, "tables", rules)

    @staticmethod
    def _checked_rule(key: str, rule: Rule) -> Rule:
        if isinstance(rule, TablePlacement):
            return rule
        schemes = _checked(f"Rule for tables {key!r}", [rule] if isinstance(rule, str) else rule)
        return schemes[0] if isinstance(rule, str) else schemes

    def check_names(self, names: Sequence[str]) -> None:
        """Raises `InputError` for a rule that matches no table."""
        known = set(names)
        for key in self.tables:
            if key in known or any(fnmatchcase(name, key) for name in names):
                continue
            if any(mark in key for mark in "*?["):
                raise InputError(f"The rule for tables {key!r} matches none of the {len(known)} tables. Fix it.")
            raise InputError(
                f"Table {key!r} is pinned but not in the model ({len(known)} tables).{did_you_mean(key, known)} Fix "
                "the name or drop the rule."
            )

    def resolve(self, table: Any, num_ranks: int, tower: int) -> Allowed:
        """Returns the planner's choices for ``table`` in a tower of ``num_ranks`` ranks.

        Raises:
            InputError: its rules contradict each other, or the table or the tower cannot take what they ask for.
        """
        where = f"Table {table.name!r} in tower {tower}"
        key = self._key(table.name, where)
        if key is None:
            possible = tuple(s for s in SCHEMES if s in self.schemes and not self._obstacle(table, s, num_ranks))
            if tuple(self.schemes) == SCHEMES:
                return Allowed(possible, None, "")
            asked = " or ".join(s for s in SCHEMES if s in self.schemes)
            if possible:
                return Allowed(possible, None, f"{_choice(possible)}asked for")
            return Allowed(
                ("table_wise",), None, f"{asked} asked for, but {self._obstacle(table, self.schemes[0], num_ranks)}"
            )
        rule = self.tables[key]
        of_pattern = "" if key == table.name else f" ({key!r})"
        if isinstance(rule, TablePlacement):
            hindered = self._obstacle(table, rule.scheme, num_ranks)
            if hindered:
                raise InputError(f"{where} is pinned {rule.scheme}, but {hindered}. Pin it table_wise.")
            _check_placement(table, rule, num_ranks, where)
            return Allowed((rule.scheme,), rule, f"pinned by the user{of_pattern}")
        asked_schemes = (rule,) if isinstance(rule, str) else tuple(rule)
        possible = tuple(s for s in SCHEMES if s in asked_schemes and not self._obstacle(table, s, num_ranks))
        if not possible:
            first = asked_schemes[0]
            raise InputError(
                f"{where} cannot be {first}, as the rule for {key!r} asks: "
                f"{self._obstacle(table, first, num_ranks)}. Change the rule, or let it choose from several schemes."
            )
        return Allowed(possible, None, f"{_choice(possible)}asked for{of_pattern}")

    def _obstacle(self, table: Any, scheme: Scheme, num_ranks: int) -> str:
        return why_not(table, scheme, num_ranks=num_ranks, id_route=self.id_route, fused_params=self.fused_params)

    def _key(self, name: str, where: str) -> str | None:
        if name in self.tables:
            return name
        keys = [key for key in self.tables if fnmatchcase(name, key)]
        for key in keys[1:]:
            if self.tables[key] != self.tables[keys[0]]:
                raise InputError(
                    f"{where} matches the rules {keys[0]!r} ({_words(self.tables[keys[0]])}) and {key!r} "
                    f"({_words(self.tables[key])}), which differ. Give it a rule by name, or narrow the patterns."
                )
        return keys[0] if keys else None


def _checked(what: str, schemes: Sequence[str]) -> tuple[Scheme, ...]:
    """Returns the schemes by their current names."""
    schemes = tuple(current_name(scheme) for scheme in schemes)
    if not schemes:
        raise InputError(f"{what} allows no scheme; use one or more of {list(SCHEMES)}.")
    unknown = [scheme for scheme in schemes if scheme not in SCHEMES]
    if unknown:
        raise InputError(
            f"{what}: scheme {unknown[0]!r} is unknown; use one of {list(SCHEMES)}.{did_you_mean(unknown[0], SCHEMES)}"
        )
    return cast("tuple[Scheme, ...]", schemes)


def _check_placement(table: Any, placement: TablePlacement, num_ranks: int, where: str) -> None:
    outside = [rank for rank in placement.ranks if not 0 <= rank < num_ranks]
    if outside:
        raise InputError(
            f"{where} is pinned to local rank {outside[0]}, but its tower has ranks 0..{num_ranks - 1}. Use one."
        )
    if placement.scheme in ("row_wise", "data_parallel") and len(placement.ranks) != num_ranks:
        raise InputError(
            f"{where} is pinned {placement.scheme} on {len(placement.ranks)} ranks; it takes all {num_ranks} ranks of "
            f"the tower. Use ranks=tuple(range({num_ranks}))."
        )
    table_shards(table, placement)


def _choice(schemes: Sequence[Scheme]) -> str:
    return f"{' or '.join(schemes)} " if len(schemes) > 1 else ""


def _words(rule: Rule) -> str:
    if isinstance(rule, TablePlacement):
        return f"{rule.scheme} on ranks {list(rule.ranks)}"
    return rule if isinstance(rule, str) else " or ".join(rule)
