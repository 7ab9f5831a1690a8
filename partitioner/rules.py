"""`PartitionRules`: constraints on a partition besides the number of features per tower, from code or TOML."""

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
"""The category of features that are named in none."""


class PartitionRules(BaseModel):
    """Categories, features that must or must not share a tower, and limits on the work and memory of a tower.

    A feature may be named or matched by a pattern with ``*`` or ``?``. Work is the number of embedding elements that a
    sample reads: pooling factor times embedding dim, summed over a tower's features. Bytes are those of the tables'
    weights as 32-bit floats, without optimizer states.

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
    """Features by category: no tower mixes two. The paper's XLRM (section 5.2.3) has item, user and item-user features.
    Features that no category names are one more, ``rest``."""
    towers_per_category: Mapping[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Towers of a category; the categories that are not named get the others in proportion to their features. One tower
    for an entity, such as the user that several samples of a batch belong to: its input repeats and is sent once."""
    together: Sequence[Sequence[str]] = ()
    """Groups of features that must share a tower. The features of a shared table do so without being named."""
    apart: Sequence[Sequence[str]] = ()
    """Groups of features of which no two may share a tower."""
    outside: Sequence[str] = ()
    """Features that the partitioner leaves out: the plan has them outside towers, their tables on every rank."""
    max_work_ratio: float | None = Field(default=None, ge=1)
    """Most work of a tower, over the mean of the towers."""
    max_tower_bytes: float | None = Field(default=None, gt=0)
    """Most bytes of a tower."""

    def __init__(self, /, **rules: Any) -> None:
        try:
            super().__init__(**rules)
        except ValidationError as error:
            names = ", ".join(type(self).model_fields)
            raise InputError(f"Partition rules: {explain(error)} The rules are {names}.") from error

    def for_features(self, features: Sequence[str]) -> PartitionRules:
        """Replaces every pattern by the features it matches, in the order of ``features``; those ``outside`` by none.

        Raises:
            InputError: a name or pattern matches no feature, all features are outside, one is in two categories, or a
                number of towers is given for no category.
        """
        outside = _matched(self.outside, features, "outside")
        features = [name for name in features if name not in outside]
        if outside and not features:
            raise InputError("Partition rules: outside leaves no feature to place. Name fewer.")
        categories = {name: _matched(some, features, f"category {name!r}") for name, some in self.categories.items()}
        named = [feature for inside in categories.values() for feature in inside]
        if len(set(named)) < len(named):
            twice = next(feature for feature in named if named.count(feature) > 1)
            homes = [category for category, inside in categories.items() if twice in inside]
            raise InputError(f"Partition rules: feature {twice!r} is in categories {homes}; give it one.")
        others = set(features) - set(named)
        if categories and others:
            rest = others | set(categories.get(REST, ()))
            categories[REST] = tuple(name for name in features if name in rest)
        for category in self.towers_per_category:
            if category not in categories:
                raise InputError(
                    f"Partition rules: towers_per_category has {category!r}, which is not among the categories "
                    f"{list(categories)}.{did_you_mean(category, categories)}"
                )
        groups = {
            rule: [_matched(some, features, rule) for some in getattr(self, rule)] for rule in ("together", "apart")
        }
        return self.model_copy(update={"categories": categories, "outside": outside, **groups})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PartitionRules:
        """Reads rules from a TOML file whose keys are the fields of this class.

        Write limits, ``together`` and ``apart`` above the first table (such as ``[categories]``): in TOML, all lines
        below the header of a table belong to it.

        Raises:
            InputError: the file cannot be read, is not TOML, or has a key that is no rule.
        """
        return cls(**read_file(path, "TOML", place=f"Partition rules {path}", remedy="Give a TOML file of rules."))


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
