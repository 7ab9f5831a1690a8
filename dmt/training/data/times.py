"""Dates and times of a column as inputs of a model: hour, weekday, day and month as categories, years as a number.

Legend: n rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

__all__ = ["EXPECTED", "PART_ROWS", "TimePart", "TimePartName", "part_values", "to_times"]

TimePartName = Literal["hour", "weekday", "day", "month", "years"]
PART_ROWS: Mapping[str, int] = {"hour": 25, "weekday": 8, "day": 32, "month": 13}
"""Rows of the table of each part that is a category; row 0 is that of a missing time."""
EXPECTED = "a date or time such as 2026-11-22 or 2026-11-22T20:15:00"
# pandas' way of writing a missing time, besides those of a missing number.
_MISSING = ["nat", "nan", "na", "n/a", "null", "none", ""]
_TIME = pa.timestamp("us")
# Text has a zone or none, and rarely more than six decimals, for which years 1677 to 2262 alone have room.
_SPELLINGS = (_TIME, pa.timestamp("us", "UTC"), pa.timestamp("ns"), pa.timestamp("ns", "UTC"))
_ZONE = r"[T ].*(Z|[+-]\d\d(:?\d\d)?)$"
_MEAN_YEAR_US = 31_556_952_000_000  # 365.2425 days
_FUNCTIONS: Mapping[str, Callable[[pa.Array], pa.Array]] = {
    "hour": lambda times: pc.add(pc.hour(times), 1),
    "weekday": lambda times: pc.day_of_week(times, count_from_zero=False, week_start=1),
    "day": pc.day,
    "month": pc.month,
    "years": lambda times: pc.divide(times.cast(pa.int64()).cast(pa.float64(), safe=False), float(_MEAN_YEAR_US)),
}


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


def to_times(column: pa.Array) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Converts dates, timestamps or ISO 8601 text, [n], to times; those with a zone are turned into UTC.

    Returns:
        The times without a zone, ``timestamp[us]`` [n], null where missing, and which are no time, bool [n].

    Example:
        >>> times, wrong = to_times(pa.array(["2026-11-22T20:15:00+02:00", "2026-11-22", "", "22.11.2026"]))
        >>> [str(time) for time in times.to_pylist()], wrong.tolist()
        (['2026-11-22 18:15:00', '2026-11-22 00:00:00', 'None', 'None'], [False, False, False, True])
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return column.cast(_TIME, safe=False), np.zeros(len(column), dtype=bool)
    text = pc.utf8_trim_whitespace(column).cast(pa.string())
    return _parsed(pc.if_else(pc.is_in(pc.utf8_lower(text), value_set=pa.array(_MISSING)), None, text))


def _parsed(text: pa.Array) -> tuple[pa.Array, NDArray[np.bool_]]:
    for spelling in _SPELLINGS:
        try:
            return text.cast(spelling).cast(_TIME, safe=False), np.zeros(len(text), dtype=bool)
        except pa.ArrowInvalid:
            continue
    zoned = pc.fill_null(pc.match_substring_regex(text, _ZONE), False).to_numpy(zero_copy_only=False)
    if zoned.any() and not zoned.all():
        # Either group is of one spelling, however the two are mixed.
        parts = [_parsed(text.filter(pa.array(mask))) for mask in (zoned, ~zoned)]
        places = np.argsort(np.concatenate([np.flatnonzero(zoned), np.flatnonzero(~zoned)]))
        times = pa.concat_arrays([times for times, _ in parts]).take(pa.array(places))
        return times, np.concatenate([wrong for _, wrong in parts])[places]
    if len(text) == 1:
        return pa.nulls(1, _TIME), np.ones(1, dtype=bool)
    # Halves of halves lead to the few that differ.
    middle = len(text) // 2
    parts = [_parsed(text[:middle]), _parsed(text[middle:])]
    return pa.concat_arrays([times for times, _ in parts]), np.concatenate([wrong for _, wrong in parts])


def part_values(times: pa.Array, part: TimePartName) -> Any:
    """Returns a part of times, [n], null where missing: a row of its table, or years since 1970 as float64.

    Example:
        >>> times, _ = to_times(pa.array(["2026-11-22T20:15:00", None]))
        >>> [part_values(times, part).to_pylist() for part in ("hour", "weekday", "day", "month")]
        [[21, None], [7, None], [22, None], [11, None]]
        >>> round(part_values(times, "years")[0].as_py(), 3)
        56.893
    """
    return _FUNCTIONS[part](times)
