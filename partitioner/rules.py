"""`PartitionRules`: constraints on a partition besides the number of features per tower, from code or TOML."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dmt.errors import InputError, did_you_mean
from dmt.files import explain, read_toml

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
    """Towers of each category; by default in proportion to its features (or to its bytes or work, where those are
    limited), and at least one."""
    together: Sequence[Sequence[str]] = ()
    """Groups of features that must share a tower. The features of a shared table do so without being named."""
    apart: Sequence[Sequence[str]] = ()
    """Groups of features of which no two may share a tower."""
    entities: Mapping[str, Annotated[Sequence[str], Field(min_length=1)]] = Field(default_factory=dict)
    """Features by entity, such as the user or the request that several samples of a batch belong to. An entity has a
    tower of its own, so that this tower's whole input repeats and is sent once (``unique``); a single feature of
    something else in it would make the inputs differ. The other features share the other towers; where there are none,
    large entities have several. Entities are categories, so only one of both can be given. `find_entities` measures
    them from rows (``dmt partition --entity auto``)."""
    pooling_factors: Mapping[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Mean number of ids per sample; for features not named, that of the affinity if it was measured, else 1. Of
    several that match a feature the longest pattern counts, and its own name before any."""
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
            for unknown in error.errors():
                if unknown["type"] == "extra_forbidden":
                    name, known = str(unknown["loc"][0]), list(type(self).model_fields)
                    raise InputError(
                        f"Partition rules: {name!r} is no rule.{did_you_mean(name, known)} The rules are "
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
        """True if a limit can only be held if the tables are known."""
        return any(v is not None for v in (self.max_work_ratio, self.max_bytes_ratio, self.max_tower_bytes))

    def for_features(self, features: Sequence[str]) -> PartitionRules:
        """Replaces every pattern by the features it matches, in the order of ``features``.

        Raises:
            InputError: a name or pattern matches no feature, or a feature is in no category, or in two.
        """
        known = set(features)
        entities = {name: _matched(own, features, f"entity {name!r}") for name, own in self.entities.items()}
        categories = {name: _matched(own, features, f"category {name!r}") for name, own in self.categories.items()}
        if entities:
            categories = dict(entities)
            if rest := tuple(sorted(known.difference(*entities.values()), key=features.index)):
                categories[REST] = rest
        named = {
            "entities": entities,
            "categories": categories,
            "together": [_matched(patterns, features, "together") for patterns in self.together],
            "apart": [_matched(patterns, features, "apart") for patterns in self.apart],
            "pooling_factors": {
                feature: factor
                # Of two that match, the longer pattern counts, and a name most: they say more.
                for pattern, factor in sorted(
                    self.pooling_factors.items(), key=lambda item: (item[0] in known, len(item[0]))
                )
                for feature in _matched([pattern], features, "pooling_factors")
            },
        }
        rules = self.model_copy(update=named)
        owned = {category: set(members) for category, members in rules.categories.items()}
        for feature in features if owned else ():
            homes = [category for category, members in owned.items() if feature in members]
            if not homes:
                raise InputError(
                    f"Partition rules: feature {feature!r} is in no category. Add it to one of {list(owned)}, or "
                    "make a category for it."
                )
            if len(homes) > 1:
                raise InputError(
                    f"Partition rules: feature {feature!r} is in categories {homes}; each feature must be in one. "
                    "Narrow the patterns."
                )
        return rules

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PartitionRules:
        """Reads rules from a TOML file whose keys are the fields of this class.

        Limits, ``together`` and ``apart`` are written above the first table (``[categories]`` and the like): TOML takes
        what is below the head of a table as its contents.

        Raises:
            InputError: the file cannot be read, is not TOML, or has a key that is no rule.
        """
        where = f"Partition rules {path}"
        record = read_toml(path, place=where, remedy="Give a TOML file of rules.")
        try:
            return cls(**record)
        except InputError as error:
            hint = (
                " Limits, together and apart are keys above the first table; TOML takes what is below as its contents."
            )
            advice = hint if any(isinstance(value, Mapping) for value in record.values()) else ""
            raise InputError(f"{where}: {str(error).removeprefix('Partition rules: ')}{advice}") from error


def _matched(patterns: Sequence[str], features: Sequence[str], where: str) -> tuple[str, ...]:
    """The features that one of the patterns names or matches, in their own order."""
    known = set(features)
    matched: set[str] = set()
    for pattern in patterns:
        # A name may hold the characters of a pattern; it is taken as a name first. Brackets are never a pattern.
        glob = pattern.replace("[", "[[]")
        found = {pattern} if pattern in known else {name for name in features if fnmatchcase(name, glob)}
        if not found:
            raise InputError(
                f"Partition rules: {where} has {pattern!r}, which matches none of the {len(features)} features."
                f"{did_you_mean(pattern, features)}"
            )
        matched |= found
    return tuple(name for name in features if name in matched)
