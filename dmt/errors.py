"""`InputError` (bad user input; commands print it and exit with status 2), `ReplicaMismatchError`, and helpers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["InputError", "ReplicaMismatchError", "check_instance", "did_you_mean"]


class InputError(ValueError):
    """The user's input (an argument, file, configuration or data) breaks a rule.

    The message names the argument, its value, the rule, the place and what to do.
    """


class ReplicaMismatchError(RuntimeError):
    """Ranks hold different values of one tensor, or some of its elements are on more ranks than others."""


def check_instance(name: str, value: object, kind: type) -> None:
    """Raises `InputError` if ``value`` is not an instance of ``kind``, for example if it is the class itself.

    Example:
        >>> check_instance("seed", int, int)
        Traceback (most recent call last):
        ...
        dmt.errors.InputError: seed is <class 'int'>, but must be an instance of int. Call the class: int(...).
    """
    if not isinstance(value, kind):
        advice = "Give an instance."
        if isinstance(value, type) and issubclass(value, kind):
            advice = f"Call the class: {value.__name__}(...)."
        raise InputError(f"{name} is {value!r:.200}, but must be an instance of {kind.__name__}. {advice}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns `` Did you mean 'x'?`` for the closest known word, or an empty string.

    Example:
        >>> did_you_mean("leraning_rate", ["learning_rate", "seed"])
        " Did you mean 'learning_rate'?"
        >>> did_you_mean("c1", ["C1", "C2"])
        " Did you mean 'C1'?"
    """
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f" Did you mean {by_lower[close[0]]!r}?" if close else ""
