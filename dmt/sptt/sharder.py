"""`Exchange`: how ids and outputs travel between towers, and which tables an id route carries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from dmt.errors import InputError, did_you_mean
from dmt.sptt.precision import ExchangePrecision

__all__ = ["ID_ROUTES", "Exchange", "IdRoute", "route_obstacle"]

IdRoute = Literal["peer", "global"]
ID_ROUTES: tuple[IdRoute, ...] = get_args(IdRoute)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """How ids and outputs travel; the same on every rank.

    Raises:
        InputError: ``id_route`` is unknown.

    Example:
        >>> Exchange(id_route="globl")
        Traceback (most recent call last):
        ...
        dmt.errors.InputError: id_route='globl' is unknown; use one of ['peer', 'global']. Did you mean 'global'?
    """

    id_route: IdRoute = "peer"
    """Ids by way of the own peer in each tower, or straight to the holders of the tables (`dmt.sptt.input_dist`)."""
    precision: ExchangePrecision = field(default_factory=ExchangePrecision)
    """Number formats of tower outputs and of their gradients."""

    def __post_init__(self) -> None:
        if self.id_route not in ID_ROUTES:
            raise InputError(
                f"id_route={self.id_route!r} is unknown; use one of {list(ID_ROUTES)}."
                f"{did_you_mean(self.id_route, ID_ROUTES)}"
            )


def route_obstacle(id_route: IdRoute, scheme: str, pooling: Any) -> str:
    """Why an id route cannot carry a table; empty if it can.

    Args:
        id_route: the route.
        scheme: of the table.
        pooling: of the table, TorchRec's ``PoolingType`` or its name; anything that does not end in ``MEAN`` sums.

    Example:
        >>> route_obstacle("peer", "data_parallel", "SUM"), route_obstacle("global", "table_wise", "MEAN")
        ('', '')
        >>> route_obstacle("global", "data_parallel", "SUM")
        "id_route='global' sends every rank's ids to each holder of a table, here to every rank of the tower"
    """
    if id_route == "peer":
        return ""
    if scheme == "data_parallel":
        return "id_route='global' sends every rank's ids to each holder of a table, here to every rank of the tower"
    if scheme == "row_wise" and str(getattr(pooling, "value", pooling)).upper().endswith("MEAN"):
        return "with id_route='global' a rank sees the ids of its own rows only, never the length of a bag to divide by"
    return ""
