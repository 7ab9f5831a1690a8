"""From files of clicks to batches: configuration, readers, hashing, a synthetic generator, one interface.

``open_source(config)`` gives a `ClickData` whose ``batches(...)`` are what a model is trained and evaluated on.
TorchRec is imported only when a batch is made.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmt.training.data.batch import ClickBatch as ClickBatch
    from dmt.training.data.batch import check_ids as check_ids
    from dmt.training.data.config import DataConfig as DataConfig
    from dmt.training.data.config import SyntheticConfig as SyntheticConfig
    from dmt.training.data.dataset import ClickData as ClickData
    from dmt.training.data.dataset import ValidationReport as ValidationReport
    from dmt.training.data.dataset import open_source as open_source

_HOME = {
    "ClickBatch": "batch",
    "ClickData": "dataset",
    "DataConfig": "config",
    "SyntheticConfig": "config",
    "ValidationReport": "dataset",
    "check_ids": "batch",
    "open_source": "dataset",
}

__all__ = ["ClickBatch", "ClickData", "DataConfig", "SyntheticConfig", "ValidationReport", "check_ids", "open_source"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dmt.training.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dmt.training.data.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
