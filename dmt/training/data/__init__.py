"""Click data, from files to batches: readers, encoding and hashing, a synthetic generator, and one interface to all.

``open_source(config)`` gives a `ClickData`, whose ``batches(...)`` train and evaluate a model: a reader turns files
into blocks of rows, an encoder decodes the rows that a rank asks for, and `ClickBatch` holds them as tensors. TorchRec
is imported only when a batch is made.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dmt.training.data.config import DataConfig, SyntheticConfig

if TYPE_CHECKING:
    from dmt.training.data.batch import ClickBatch, check_ids
    from dmt.training.data.dataset import ClickData, ValidationReport, open_source

__all__ = ["ClickBatch", "ClickData", "DataConfig", "SyntheticConfig", "ValidationReport", "check_ids", "open_source"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "batch" if name in ("ClickBatch", "check_ids") else "dataset"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
