"""Tools to test a distributed model against the unsharded one: gloo ranks, plain training, moving weights.

>>> from dmt.testing import PlainTraining, gather_plain_state, load_plain_state, run_on_ranks, table_layout
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmt.testing.plain import PlainTraining as PlainTraining
    from dmt.testing.ranks import run_on_ranks as run_on_ranks
    from dmt.testing.state import gather_plain_state as gather_plain_state
    from dmt.testing.state import load_plain_state as load_plain_state
    from dmt.testing.state import table_layout as table_layout

_HOME = {"PlainTraining": "plain", "run_on_ranks": "ranks"}
__all__ = ["PlainTraining", "gather_plain_state", "load_plain_state", "run_on_ranks", "table_layout"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'dmt.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dmt.testing.{_HOME.get(name, 'state')}"), name)
