"""`PartitionRules`: constraints on a partition besides the number of features per tower, from code or TOML."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dmt.errors import InputError, did_you_mean
from dmt.files import explain, read_file

__all__ = ["REST", "PartitionRules"]

REST = "rest"
"""The category of features that belong to no entity."""


class PartitionRules(BaseModel):
    """Categories, features that must or must not share a tower, and limits on the work and memory of a tower.

    A feature may be named or matched by a pattern with ``*`` or ``?``. Work is the number of embedding elements that a
    sample reads: pooling factor times embedding dim, summed over a tower's features. Bytes are those of the tables'
    weights at 32-bit floats; add room for optimizer states and other things to the limit yourself.

    Raises:
        InputError: a rule is of the wrong type or out of range.

    Example:
        >>> categories = {"user": ["user_*", "age"], "item": ["item_*"]}
        >>> rules = PartitionRules(categories=categories, apart=[["age", "user_id"]])
        >>> rules.for_features(["age", "user_id", "item_id"]).categories
        {'user': ('age', 'user_id'), 'item': ('item_id',)}
        >>> rules.for_features(["age", "user_id", "shop"])
        Traceback (most recent call last):
        ...
        dmt.errors.InputError: Partition rules: category 'item' has 'item_*', which matches none of the 3 features.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    categories: Mapping[str, Annotated[Sequence[str], Field(min_length=1)]] = Field(default_factory=dict)
    """Features by category, each in exactly one: no tower mixes two. The paper's XLRM (section 5.2.3) has item,
    user and item-user features."""
    towers_per_category: Mapping[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Towers of each category; by default in proportion to its features, and at least one."""
    together: Sequence[Sequence[str]] = ()
    """Groups of features that must share a tower. The features of a shared table do so without being named."""
    apart: Sequence[Sequence[str]] = ()
    """Groups of features of which no two may share a tower."""
    entities: Mapping[str, Annotated[Sequence[str], Field(min_length=1)]] = Field(default_factory=dict)
    """Features by entity, such as the user or the request that several samples of a batch belong to. An entity has a
    tower of its own, so that this tower's whole input repeats and is sent once (``unique``); a single feature of
    something else in it would make the inputs differ. The other features share the other towers; where there are none,
    large entities have several. Entities are categories, so only one of both can be given."""
    pooling_factors: Mapping[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Mean number of ids per sample; for features not named, that of the affinity if it was measured, else 1. Of
    several that match a feature the longest pattern counts, and its own name before any."""
    column_shards: Mapping[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Equal column shards to cut the table of a feature into, such as for more towers than features; each is a member
    of its own, ``ad[0:64]``, and no two of a table share a tower. The longest pattern counts, as above."""
    max_work_ratio: float | None = Field(default=None, ge=1)
    """Most work of a tower, over the mean of the towers."""
    max_bytes_ratio: float | None = Field(default=None, ge=1)
    """Most bytes of a tower, over the mean of the towers."""
    max_tower_bytes: float | None = Field(default=None, gt=0)
    """Most bytes of a tower."""

    def __init__(self, /, **rules: Any) -> None:
        try:
            super().__init__(**rules)
        except ValidationError as error:
            known = list(type(self).model_fields)
            unknown = next((name for name in rules if name not in known), None)
            if unknown is not None:
                raise InputError(
                    f"Partition rules: {unknown!r} is no rule.{did_you_mean(unknown, known)} The rules are "
                    f"{', '.join(known)}."
                ) from error
            raise InputError(f"Partition rules: {explain(error)}") from error

    @model_validator(mode="after")
    def _check(self) -> PartitionRules:
        if self.entities and self.categories:
            raise InputError("entities and categories are both given; entities are categories with one tower each.")
        if REST in self.entities:
            raise InputError(f"an entity is named {REST!r}, as are the features of no entity. Give it another name.")
        lone = self.towers_per_category.keys() ^ self.categories.keys() if self.towers_per_category else set()
        for category in sorted(lone):
            raise InputError(
                f"{category!r} is not both in towers_per_category {list(self.towers_per_category)} and in categories "
                f"{list(self.categories)}.{did_you_mean(category, lone - {category})} Give a number for every category "
                "or for none."
            )
        return self

    @property
    def need_tables(self) -> bool:
        """True if a rule can only be held if the tables are known."""
        limits = (self.max_work_ratio, self.max_bytes_ratio, self.max_tower_bytes)
        return bool(self.column_shards) or any(limit is not None for limit in limits)

    def for_features(self, features: Sequence[str]) -> PartitionRules:
        """Replaces every pattern by the features it matches, in the order of ``features``.

        Raises:
            InputError: a name or pattern matches no feature, or a feature is in no category, or in two.
        """
        known = set(features)

        def by_feature(rule: str) -> dict[str, Any]:
            # Of two patterns that match, the longer one counts, and a name most: they say more.
            given = sorted(getattr(self, rule).items(), key=lambda item: (item[0] in known, len(item[0])))
            return {feature: value for pattern, value in given for feature in _matched([pattern], features, rule)}

        entities = {name: _matched(some, features, f"entity {name!r}") for name, some in self.entities.items()}
        categories = {name: _matched(some, features, f"category {name!r}") for name, some in self.categories.items()}
        if entities:
            categories = dict(entities)
            in_entity = set().union(*entities.values())
            if rest := tuple(name for name in features if name not in in_entity):
                categories[REST] = rest
        members = {category: set(names) for category, names in categories.items()}
        for feature in features if categories else ():
            homes = [category for category, names in members.items() if feature in names]
            if len(homes) != 1:
                raise InputError(
                    f"Partition rules: feature {feature!r} is in categories {homes}; each feature must be in one of "
                    f"{list(categories)}."
                )
        named = {
            "entities": entities,
            "categories": categories,
            "together": [_matched(patterns, features, "together") for patterns in self.together],
            "apart": [_matched(patterns, features, "apart") for patterns in self.apart],
            "pooling_factors": by_feature("pooling_factors"),
            "column_shards": by_feature("column_shards"),
        }
        return self.model_copy(update=named)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PartitionRules:
        """Reads rules from a TOML file whose keys are the fields of this class.

        Limits, ``together`` and ``apart`` are written above the first table (``[categories]`` and the like): TOML takes
        what is below the head of a table as its contents.

        Raises:
            InputError: the file cannot be read, is not TOML, or has a key that is no rule.
        """
        where = f"Partition rules {path}"
        record = read_file(path, "TOML", place=where, remedy="Give a TOML file of rules.")
        try:
            return cls(**record)
        except InputError as error:
            raise InputError(f"{where}: {str(error).removeprefix('Partition rules: ')}") from error


def _matched(patterns: Sequence[str], features: Sequence[str], where: str) -> tuple[str, ...]:
    """The features that one of the patterns names or matches, in their own order."""
    known = set(features)
    matched: set[str] = set()
    for pattern in patterns:
        # A name may hold the characters of a pattern; it is taken as a name first. Brackets are never a pattern.
        glob = pattern.replace("[", "[[]")
        names = {pattern} if pattern in known else {name for name in features if fnmatchcase(name, glob)}
        if not names:
            raise InputError(
                f"Partition rules: {where} has {pattern!r}, which matches none of the {len(features)} features."
                f"{did_you_mean(pattern, features)}"
            )
        matched |= names
    return tuple(name for name in features if name in matched)
