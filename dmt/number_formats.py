"""`NUMBER_FORMATS`: number formats of tables, exchanges and syncs, with their sizes and rounding errors; `mix_bits`."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "EXCHANGE_FORMATS",
    "NUMBER_FORMATS",
    "TABLE_FORMATS",
    "ExchangeFormat",
    "NumberFormat",
    "SyncPrecision",
    "TableFormat",
    "mix_bits",
    "table_format",
]

ExchangeFormat = Literal["fp32", "fp16", "bf16"]
"""Formats of tower outputs and their gradients on the way between towers (`dmt.sptt.precision`)."""
SyncPrecision = Literal["fp32", "bf16"]
"""Formats in which replicas and hosts send what they average (`dmt.replicas`)."""
TableFormat = Literal["FP32", "FP16"]
"""Formats of table weights, as in TorchRec's ``DataType``; TorchRec builds tables of any other format as FP16."""
EXCHANGE_FORMATS: tuple[ExchangeFormat, ...] = get_args(ExchangeFormat)
TABLE_FORMATS: tuple[TableFormat, ...] = get_args(TableFormat)


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """Size and accuracy of one number format."""

    dtype: str
    """Name of the torch dtype that holds it."""
    num_bytes: int
    """Bytes per number."""
    rounding_error: float
    """Largest error of a number after conversion from FP32, relative to it."""


# FP16 and BF16 round to half a unit in the last place.
NUMBER_FORMATS: MappingProxyType[str, NumberFormat] = MappingProxyType(
    {
        "fp32": NumberFormat(dtype="float32", num_bytes=4, rounding_error=0.0),
        "fp16": NumberFormat(dtype="float16", num_bytes=2, rounding_error=2.0**-11),
        "bf16": NumberFormat(dtype="bfloat16", num_bytes=2, rounding_error=2.0**-8),
    }
)
"""Every format by its lower-case name."""


def table_format(table: Any) -> str:
    """Returns the name of a table's weight format, of its ``data_type``; FP32 where it has none."""
    kind = getattr(table, "data_type", "FP32")
    return str(getattr(kind, "value", kind))


def mix_bits(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64: every bit of the result depends on every bit of a number."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
