"""`Exchange`: how ids and outputs travel between towers."""

from __future__ import annotations

from dataclasses import dataclass, field

from dmt.errors import InputError, did_you_mean
from dmt.sharding.schemes import ID_ROUTES, IdRoute
from dmt.sptt.precision import ExchangePrecision

__all__ = ["Exchange"]


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
