"""Between copies: replicas of the tables (2D sparse parallelism) and the gradients of the dense part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmt.replicas.sync import ReplicaSync as ReplicaSync
    from dmt.replicas.sync import moment_scales as moment_scales


def __getattr__(name: str) -> Any:
    if name not in ("ReplicaSync", "moment_scales"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dmt.replicas import sync

    return getattr(sync, name)
