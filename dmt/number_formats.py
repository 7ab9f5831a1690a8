"""`NUMBER_FORMATS`: number formats of tables, exchanges and syncs, with their sizes and rounding errors. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

__all__ = [
    "EXCHANGE_FORMATS",
    "NUMBER_FORMATS",
    "TABLE_FORMATS",
    "ExchangeFormat",
    "NumberFormat",
    "SyncPrecision",
    "TableFormat",
    "table_format",
]

ExchangeFormat = Literal["fp32", "fp16", "bf16", "fp8", "int8"]
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
    num_bytes: float
    """Bytes per number; with ``group`` > 1 including the number's share of 8 bytes of scale and offset per group."""
    rounding_error: float
    """Largest error of one number after conversion from FP32, relative to the largest number converted with it."""
    group: int = 1
    """Numbers that share one scale."""


# FP16 and BF16 round to half a unit in the last place. INT8 errs by 1/510 of the range of its group, which is at most
# twice the largest magnitude. FP8 is 1-4-3 forward (2^-4) and 1-5-2 backward (2^-3). FBGEMM's default group is 32.
NUMBER_FORMATS: MappingProxyType[str, NumberFormat] = MappingProxyType(
    {
        "fp32": NumberFormat(dtype="float32", num_bytes=4, rounding_error=0.0),
        "fp16": NumberFormat(dtype="float16", num_bytes=2, rounding_error=2.0**-11),
        "bf16": NumberFormat(dtype="bfloat16", num_bytes=2, rounding_error=2.0**-8),
        "fp8": NumberFormat(dtype="uint8", num_bytes=1 + 8 / 32, rounding_error=2.0**-3, group=32),
        "int8": NumberFormat(dtype="uint8", num_bytes=1 + 8 / 32, rounding_error=2 / 510, group=32),
    }
)
"""Every format by its lower-case name."""


def table_format(table: Any) -> str:
    """Returns the name of a table's weight format, of its ``data_type``; FP32 where it has none."""
    kind = getattr(table, "data_type", "FP32")
    return str(getattr(kind, "value", kind))
