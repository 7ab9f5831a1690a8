"""`refuse`: the one table of options that cannot wrap the tower dataflow together, for sharders, handles and configs.

Pure: it imports neither torch nor TorchRec.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dmt.errors import InputError

__all__ = ["REFUSALS", "Options", "refusals", "refuse"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What wraps, or changes, the tower dataflow of a model; as far as the asker knows it."""

    id_route: str = "peer"
    unique: bool = False
    hot_rows: bool = False
    num_replicas: int = 1
    has_towers: bool = False
    """The model has tower modules."""


REFUSALS: tuple[tuple[Callable[[Options], bool], str], ...] = (
    (
        lambda o: o.unique and o.id_route == "global",
        "unique=True needs id_route='peer'; the global route sends the ids of every sample",
    ),
    (
        lambda o: o.hot_rows and o.id_route == "global",
        "hot rows need id_route='peer'; the global route sends the ids and outputs of every sample",
    ),
    (
        lambda o: o.hot_rows and o.has_towers,
        "hot rows need a flat model; towers send their modules' outputs",
    ),
    (
        lambda o: o.hot_rows and o.num_replicas > 1,
        "hot rows need num_replicas=1; copies would have to be averaged over {o.num_replicas} replicas",
    ),
)
"""Conditions and messages, which may name fields of the `Options` ``o``."""


def refusals(**options: Any) -> list[tuple[bool, str]]:
    """Returns for each line of `REFUSALS` whether it holds for these fields of `Options`, and its message."""
    given = Options(**options)
    return [(bool(holds(given)), f"{message.format(o=given)}. Leave out one of them.") for holds, message in REFUSALS]


def refuse(**options: Any) -> None:
    """Raises `InputError` with the first message of `refusals` that holds for these fields of `Options`.

    Example:
        >>> refuse(unique=True, id_route="global")
        Traceback (most recent call last):
        ...
        dmt.errors.InputError: unique=True needs id_route='peer'; the global route sends the ids of every sample. \
Leave out one of them.
    """
    for is_refused, message in refusals(**options):
        if is_refused:
            raise InputError(message)
