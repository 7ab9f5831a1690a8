"""Across towers: the semantic-preserving tower transform (DMT, arXiv 2403.00877, section 3.1) as TorchRec modules.

`SPTTModule` of `dmt.sptt.dataflow` has the steps; importing this package loads no TorchRec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmt.sptt.dataflow import Piece as Piece
    from dmt.sptt.dataflow import SPTTContext as SPTTContext
    from dmt.sptt.dataflow import SPTTModule as SPTTModule


def __getattr__(name: str) -> Any:
    if name not in ("Piece", "SPTTContext", "SPTTModule"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dmt.sptt import dataflow

    return getattr(dataflow, name)
