"""Parts of dates and times: hour, weekday, day and month as categories, years as a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

__all__ = ["PART_ROWS", "TimePart", "TimePartName"]

TimePartName = Literal["hour", "weekday", "day", "month", "years"]
PART_ROWS: Mapping[str, int] = {"hour": 25, "weekday": 8, "day": 32, "month": 13}
"""Rows of the table of each part that is a category; row 0 is that of a missing time."""


class TimePart(NamedTuple):
    """Source of a feature that is part of a time."""

    column: str
    """Column of the time."""
    part: TimePartName
    """Part of it."""

    @property
    def name(self) -> str:
        """Name of the feature or dense column: ``time_hour``."""
        return f"{self.column}_{self.part}"
