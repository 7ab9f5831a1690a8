"""`PartitionRules`: constraints on a partition other than the number of features per tower, from Python or TOML."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dmt.errors import InputError, did_you_mean
from dmt.files import explain, read_file

__all__ = ["REST", "PartitionRules"]

REST = "rest"
"""Category of the features that no category names."""


class PartitionRules(BaseModel):
    """Categories, features that must or must not share a tower, and limits on the work and memory of a tower.

    Rules name features, or match them by patterns with ``*`` or ``?``. The work of a tower is the number of embedding
    elements that a sample reads: pooling factor times embedding dim, summed over the tower's features. Its bytes are
    those of its tables' weights, without optimizer state.

    Raises `InputError` if a rule is unknown, has the wrong type or is out of range.

    Example:
        >>> categories = {"user": ["user_*", "age"], "item": ["item_*"]}
        >>> rules = PartitionRules(categories=categories, apart=[["age", "user_id"]])
        >>> rules.for_features(["age", "user_id", "item_id"]).categories
        {'user': ('age', 'user_id'), 'item': ('item_id',)}
        >>> rules.for_features(["age", "user_id", "shop"])
        Traceback (most recent call last):
        ...
        dmt.errors.InputError: Partition rules: category 'item' has 'item_*', which matches none of the 3 features \
to place. Correct or drop it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    categories: Mapping[str, Annotated[Sequence[str], Field(min_length=1)]] = Field(default_factory=dict)
    """Features by category; no tower mixes categories, such as the item, user and item-user features of the paper's
    XLRM (section 5.2.3). Features that no category names form the category ``rest``."""
    towers_per_category: Mapping[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Number of towers by category; categories without a number share the other towers in proportion to their features.
    Give an entity such as the user one tower: samples of a user then have equal inputs, which ``unique`` sends once."""
    together: Sequence[Sequence[str]] = ()
    """Groups of features that must share a tower. Features that share a table always do."""
    apart: Sequence[Sequence[str]] = ()
    """Groups of features; no two features of a group may share a tower."""
    outside: Sequence[str] = ()
    """Features in no tower: the plan lists them as outside, and every rank holds their tables."""
    max_work_ratio: float | None = Field(default=None, ge=1)
    """Limit on the work of a tower, as a multiple of the mean over towers; None for no limit."""
    max_tower_bytes: float | None = Field(default=None, gt=0)
    """Limit on the bytes of a tower; None for no limit."""

    def __init__(self, /, **rules: Any) -> None:
        try:
            super().__init__(**rules)
        except ValidationError as error:
            names = ", ".join(type(self).model_fields)
            raise InputError(f"Partition rules: {explain(error)} The rules are {names}.") from error

    def for_features(self, features: Sequence[str]) -> PartitionRules:
        """Returns the rules with patterns replaced by the ``features`` that they match.

        Rules other than ``outside`` match only features that are not outside.

        Raises:
            InputError: a name or pattern matches no feature, all features are outside, a feature is in two categories,
                or ``towers_per_category`` names an unknown category.
        """
        outside = _matched(self.outside, features, "outside")
        features = [name for name in features if name not in outside]
        if outside and not features:
            raise InputError(f"Partition rules: outside names all {len(outside)} features. Leave some for the towers.")
        categories = {name: _matched(some, features, f"category {name!r}") for name, some in self.categories.items()}
        named = [feature for inside in categories.values() for feature in inside]
        if len(set(named)) < len(named):
            twice = next(feature for feature in named if named.count(feature) > 1)
            homes = [category for category, inside in categories.items() if twice in inside]
            raise InputError(f"Partition rules: feature {twice!r} is in categories {homes}. Name it in one category.")
        others = set(features) - set(named)
        if categories and others:
            rest = others | set(categories.get(REST, ()))
            categories[REST] = tuple(name for name in features if name in rest)
        for category in self.towers_per_category:
            if category not in categories:
                raise InputError(
                    f"Partition rules: towers_per_category has {category!r}, which is not among the categories "
                    f"{list(categories)}.{did_you_mean(category, categories)} Correct the name, or add the category."
                )
        groups = {
            rule: [_matched(some, features, rule) for some in getattr(self, rule)] for rule in ("together", "apart")
        }
        return self.model_copy(update={"categories": categories, "outside": outside, **groups})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PartitionRules:
        """Reads rules from a TOML file whose keys are the fields of this class.

        Write ``together``, ``apart``, ``outside`` and limits above ``[categories]``: lines below belong to that table.

        Raises:
            InputError: the file cannot be read or is not TOML, or a rule is unknown, of a wrong type or out of range.
        """
        return cls(**read_file(path, "TOML", place=f"Partition rules {path}", remedy="Give a TOML file of rules."))


def _matched(patterns: Sequence[str], features: Sequence[str], where: str) -> tuple[str, ...]:
    """Returns the features that any of the patterns names or matches, in the order of ``features``."""
    known = set(features)
    matched: set[str] = set()
    for pattern in patterns:
        # A feature of exactly this name goes before a pattern: names may contain * or ?. Brackets are never patterns.
        glob = pattern.replace("[", "[[]")
        if not (names := {pattern} if pattern in known else {name for name in features if fnmatchcase(name, glob)}):
            raise InputError(
                f"Partition rules: {where} has {pattern!r}, which matches none of the {len(features)} features"
                f"{'.' if where == 'outside' else ' to place.'}{did_you_mean(pattern, features)} Correct or drop it."
            )
        matched |= names
    return tuple(name for name in features if name in matched)
