"""`PartitionRules`: constraints on a partition besides the number of features per tower, from code or TOML."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from dmt.errors import InputError, did_you_mean
from dmt.files import read_toml

__all__ = ["PartitionRules"]


@dataclass(frozen=True, kw_only=True)
class PartitionRules:
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

    categories: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Features by category, each in exactly one: no tower mixes two. The paper's XLRM (section 5.2.3) has item,
    user and item-user features."""
    towers_per_category: Mapping[str, int] = field(default_factory=dict)
    """Towers of each category; by default in proportion to its features (or to its bytes or work, where those are
    limited), and at least one."""
    together: Sequence[Sequence[str]] = ()
    """Groups of features that must share a tower. The features of a shared table do so without being named."""
    apart: Sequence[Sequence[str]] = ()
    """Groups of features of which no two may share a tower."""
    pooling_factors: Mapping[str, float] = field(default_factory=dict)
    """Mean number of ids per sample; for features not named, that of the affinity if it was measured, else 1. Of
    several that match a feature the longest pattern counts, and its own name before any."""
    max_work_ratio: float | None = None
    """Most work of a tower, over the mean of the towers."""
    max_bytes_ratio: float | None = None
    """Most bytes of a tower, over the mean of the towers."""
    max_tower_bytes: int | None = None
    """Most bytes of a tower."""

    def __post_init__(self) -> None:
        for name in ("max_work_ratio", "max_bytes_ratio"):
            value = getattr(self, name)
            of_towers = "a finite number of at least 1; it is the most a tower may have over the mean of the towers"
            _require(name, value, of_towers, value is None or (_is_number(value) and np.isfinite(value) and value >= 1))
        most = self.max_tower_bytes
        _require("max_tower_bytes", most, "a positive number", most is None or (_is_number(most) and most > 0))
        for name in ("categories", "towers_per_category", "pooling_factors"):
            value = getattr(self, name)
            is_dict = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
            _require(name, value, "a dict whose keys are names", is_dict)
        for name, groups in (("together", self.together), ("apart", self.apart)):
            _require(name, groups, "a list of lists of feature names", _is_list(groups))
            for number, group in enumerate(groups):
                _require(f"{name}[{number}]", group, "a list of feature names", _is_list_of_names(group))
        for category, patterns in self.categories.items():
            is_given = _is_list_of_names(patterns) and len(patterns) > 0
            _require(f"categories[{category!r}]", patterns, "a list of feature names, one at least", is_given)
        for feature, factor in self.pooling_factors.items():
            is_factor = _is_number(factor) and np.isfinite(factor) and factor >= 0
            _require(f"pooling_factors[{feature!r}]", factor, "a finite number, 0 or more", is_factor)
        for category, count in self.towers_per_category.items():
            is_count = isinstance(count, int) and not isinstance(count, bool) and count >= 1
            _require(f"towers_per_category[{category!r}]", count, "a whole number, 1 or more", is_count)
        lone = self.towers_per_category.keys() ^ self.categories.keys() if self.towers_per_category else set()
        for category in sorted(lone):
            raise InputError(
                f"Partition rules: {category!r} is not both in towers_per_category {list(self.towers_per_category)} "
                f"and in categories {list(self.categories)}.{did_you_mean(category, lone - {category})} Give a number "
                "for every category or for none."
            )

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
        rules = replace(
            self,
            categories={
                name: _matched(patterns, features, f"category {name!r}") for name, patterns in self.categories.items()
            },
            together=[_matched(patterns, features, "together") for patterns in self.together],
            apart=[_matched(patterns, features, "apart") for patterns in self.apart],
            pooling_factors={
                feature: factor
                # Of two that match, the longer pattern counts, and a name most: they say more.
                for pattern, factor in sorted(
                    self.pooling_factors.items(), key=lambda item: (item[0] in known, len(item[0]))
                )
                for feature in _matched([pattern], features, "pooling_factors")
            },
        )
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
        known = [f.name for f in fields(cls)]
        hint = " Limits, together and apart are keys above the first table; TOML takes what is below as its contents."
        for key in record:
            if key not in known:
                raise InputError(
                    f"{where}: {key!r} is no rule.{did_you_mean(key, known)} The rules are {', '.join(known)}.{hint}"
                )
        try:
            return cls(**record)
        except InputError as error:
            advice = hint if any(isinstance(value, Mapping) for value in record.values()) else ""
            raise InputError(f"{where}: {str(error).removeprefix('Partition rules: ')}{advice}") from error


def _require(name: str, value: Any, rule: str, is_held: bool) -> None:
    if not is_held:
        raise InputError(f"Partition rules: {name}={value!r} must be {rule}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_list_of_names(value: Any) -> bool:
    return _is_list(value) and all(isinstance(name, str) for name in value)


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
