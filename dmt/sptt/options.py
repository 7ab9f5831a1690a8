"""`refuse`: the table of options that cannot be combined, shared by sharders, handles and configs, without torch."""

from __future__ import annotations

from typing import Any

from dmt.errors import InputError

__all__ = ["REFUSALS", "refusals", "refuse"]

REFUSALS: dict[tuple[str, str], str] = {
    ("unique", "id_route"): "unique=True needs id_route='peer'; the global route sends the ids of every sample",
    ("sequences", "id_route"): (
        "sequences in towers need id_route='peer'; the global route does not tell a rank how long its sequences are"
    ),
    ("hot_rows", "id_route"): (
        "hot rows need id_route='peer'; the global route sends the ids and outputs of every sample"
    ),
    ("hot_rows", "has_towers"): "hot rows need a flat model; towers send outputs of tower modules, not embeddings",
    ("hot_rows", "num_replicas"): "hot rows need num_replicas=1; copies would have to be averaged over all replicas",
}
"""Message for each pair of options that cannot both differ from their defaults."""

_DEFAULTS = {
    "id_route": "peer",
    "unique": False,
    "hot_rows": False,
    "num_replicas": 1,
    "has_towers": False,  # whether the model has tower modules
    "sequences": False,  # whether a tower looks up an ``EmbeddingCollection``
}


def refusals(**options: Any) -> list[str]:
    """Returns the message of each pair of `REFUSALS` that applies; leave out options that are not known yet."""
    is_set = {name for name, value in options.items() if value != _DEFAULTS[name]}
    return [f"{message}. Leave out one of the two." for pair, message in REFUSALS.items() if is_set.issuperset(pair)]


def refuse(**options: Any) -> None:
    """Raises `InputError` with the first message of `refusals` for these options, if there is one.

    Example:
        >>> refuse(unique=True, id_route="global")
        Traceback (most recent call last):
        ...
        dmt.errors.InputError: unique=True needs id_route='peer'; the global route sends the ids of every sample. \
Leave out one of the two.
    """
    for message in refusals(**options):
        raise InputError(message)
