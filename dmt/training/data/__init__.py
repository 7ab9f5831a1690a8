"""Click data, from files to batches: ``dmt prepare``, the reader, a synthetic generator, and one interface to all.

``open_source(config)`` gives a `ClickData`, whose ``batches(...)`` train and evaluate a model. Each rank finds its rows
by arithmetic on the footers of Parquet files. TorchRec is imported only when a batch is made, DuckDB only to prepare.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dmt.training.data.config import DataConfig, SyntheticConfig

if TYPE_CHECKING:
    from dmt.training.data.batch import ClickBatch
    from dmt.training.data.clicks import ClickData, open_source

__all__ = ["ClickBatch", "ClickData", "DataConfig", "SyntheticConfig", "open_source"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "batch" if name == "ClickBatch" else "clicks"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
