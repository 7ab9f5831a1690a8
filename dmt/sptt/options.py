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
"""Message for each pair of arguments of `refuse` that cannot both differ from their defaults."""


def refusals(
    *,
    id_route: str = "peer",
    unique: bool = False,
    hot_rows: bool = False,
    num_replicas: int = 1,
    has_towers: bool = False,
    sequences: bool = False,
) -> list[tuple[bool, str]]:
    """Returns for each pair of `REFUSALS` whether these options are refused, and the message.

    ``has_towers`` says whether the model has tower modules, ``sequences`` whether a tower looks up an
    ``EmbeddingCollection``. Leave out options whose values are not known yet.
    """
    is_set = {
        "id_route": id_route != "peer",
        "unique": unique,
        "hot_rows": hot_rows,
        "num_replicas": num_replicas > 1,
        "has_towers": has_towers,
        "sequences": sequences,
    }
    return [(is_set[a] and is_set[b], f"{message}. Leave out one of the two.") for (a, b), message in REFUSALS.items()]


def refuse(**options: Any) -> None:
    """Raises `InputError` with the first message of `refusals` that applies to these options, if any does.

    Example:
        >>> refuse(unique=True, id_route="global")
        Traceback (most recent call last):
        ...
        dmt.errors.InputError: unique=True needs id_route='peer'; the global route sends the ids of every sample. \
Leave out one of the two.
    """
    for is_refused, message in refusals(**options):
        if is_refused:
            raise InputError(message)
