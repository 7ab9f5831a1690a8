"""`ExchangePrecision`: the number format in which tower outputs and their gradients cross between towers.

It applies to the exchange between peers (slow links) only; exchanges inside a tower send numbers unchanged. In a flat
job of the trainer, which has no towers, it applies between all ranks. This file imports neither torch nor TorchRec, so
that configs can import it; `dmt.sptt.peer_exchange` casts the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from dmt.errors import InputError, did_you_mean

__all__ = ["EXCHANGE_FORMATS", "ExchangeFormat", "ExchangePrecision", "SyncPrecision"]

ExchangeFormat = Literal["fp32", "fp16", "bf16"]
"""Formats of tower outputs and their gradients on the way between towers."""
EXCHANGE_FORMATS: tuple[ExchangeFormat, ...] = get_args(ExchangeFormat)
SyncPrecision = Literal["fp32", "bf16"]
"""Formats in which hosts send the gradients that they average (`dmt.replicas.dense_reduce`)."""


@dataclass(frozen=True, kw_only=True)
class ExchangePrecision:
    """Number formats in which tower outputs (forward) and their gradients (backward) are sent between towers.

    ``fp32`` sends numbers unchanged, in the dtype of the towers' outputs; so does the format that is this dtype, as
    under autocast. Otherwise ``fp16`` has a relative error of up to 2^-11, ``bf16`` one of up to 2^-8; both turn
    infinities into NaN. Forward, ``fp16`` has a larger error below 6.1e-5 and clamps magnitudes to 65504; backward, it
    sends scaled gradients (see `backward`). In every format the result has the dtype of the towers' outputs.

    Raises `InputError` if a format is unknown.

    Example:
        >>> precision = ExchangePrecision(forward="fp16", backward="bf16")
        >>> precision.backward_scale
        1.0
        >>> ExchangePrecision(forward="f16")
        Traceback (most recent call last):
        ...
        dmt.errors.InputError: ExchangePrecision: forward='f16' is unknown; use one of ['fp32', 'fp16', 'bf16']. Did \
you mean 'fp16'?
    """

    forward: ExchangeFormat = "fp32"
    """Number format of the tower outputs."""
    backward: ExchangeFormat = "fp32"
    """Number format of the gradients of the tower outputs. ``"bf16"`` is the safe choice: it needs no scale. ``"fp16"``
    multiplies gradients by 4096 before rounding and divides them by 4096 on arrival, in FP32: those from 1.5e-8 to 16
    have the full precision of FP16, and larger ones arrive as 16."""

    def __post_init__(self) -> None:
        for direction in ("forward", "backward"):
            value = getattr(self, direction)
            if value not in EXCHANGE_FORMATS:
                raise InputError(
                    f"ExchangePrecision: {direction}={value!r} is unknown; use one of {list(EXCHANGE_FORMATS)}."
                    f"{did_you_mean(str(value), EXCHANGE_FORMATS)}"
                )

    @property
    def backward_scale(self) -> float:
        """Factor by which gradients are multiplied while they are sent: 4096 for FP16, else 1."""
        # A mean loss has gradients of 1e-6 and less, and FP16 loses digits below 6e-5. A power of two divides exactly.
        return 4096.0 if self.backward == "fp16" else 1.0
