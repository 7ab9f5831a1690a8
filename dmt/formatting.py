"""Formats numbers and lists for people: bytes with a unit, the first few of many items."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["counted", "human_bytes", "shorten"]

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def shorten(items: Sequence[str], separator: str = "; ", *, most: int = 3) -> str:
    """Joins the first ``most`` items, and says how many more there are.

    Example:
        >>> shorten("abcde"), shorten("abc"), shorten("abcde", ", ", most=1)
        ('a; b; c and 2 more', 'a; b; c', 'a and 4 more')
    """
    return separator.join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def human_bytes(num_bytes: float) -> str:
    """Formats bytes in the largest decimal unit that they fill (1 GB = 10^9 bytes), to three figures.

    Example:
        >>> human_bytes(12_440_000_000), human_bytes(17), human_bytes(999_700)
        ('12.4 GB', '17 bytes', '1.00 MB')
    """
    power = 0
    # At 999.5 of a unit, three figures would read 1000 of it.
    while power < len(_UNITS) - 1 and num_bytes >= 999.5 * 1000.0**power:
        power += 1
    value = num_bytes / 1000.0**power
    digits = 0 if not power or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {_UNITS[power]}"


def counted(number: int, word: str) -> str:
    """Returns the number with its noun, in the plural unless the number is 1.

    Example:
        >>> counted(1, "tower"), counted(4000, "feature")
        ('1 tower', '4,000 features')
    """
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"
