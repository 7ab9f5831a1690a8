"""Number formats of tables, exchanges and syncs, with their sizes; `mix_bits`."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "EXCHANGE_FORMATS",
    "NUMBER_BYTES",
    "TABLE_FORMATS",
    "ExchangeFormat",
    "SyncPrecision",
    "TableFormat",
    "mix_bits",
    "table_format",
]

ExchangeFormat = Literal["fp32", "fp16", "bf16"]
"""Formats of tower outputs and their gradients on the way between towers (`dmt.sptt.precision`)."""
SyncPrecision = Literal["fp32", "bf16"]
"""Formats in which hosts send the gradients that they average (`dmt.replicas.dense_reduce`)."""
TableFormat = Literal["FP32", "FP16"]
"""Formats of table weights, as in TorchRec's ``DataType``; TorchRec builds tables of any other format as FP16."""
EXCHANGE_FORMATS: tuple[ExchangeFormat, ...] = get_args(ExchangeFormat)
TABLE_FORMATS: tuple[TableFormat, ...] = get_args(TableFormat)
NUMBER_BYTES = MappingProxyType({"fp32": 4, "fp16": 2, "bf16": 2})
"""Bytes of a number, by the lower-case name of its format."""


def table_format(table: Any) -> str:
    """Returns the name of a table's weight format, of its ``data_type``; FP32 where it has none."""
    kind = getattr(table, "data_type", "FP32")
    return str(getattr(kind, "value", kind))


def mix_bits(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64: every bit of the result depends on every bit of a number."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
