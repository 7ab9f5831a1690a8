"""`ExchangePrecision`: the number format in which tower outputs and their gradients cross between towers.

Only the peer all-to-all (slow links) is meant; exchanges inside a tower send numbers as they are.
TorchRec is imported when codecs are built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from dmt.errors import InputError, did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torchrec.distributed.types import QuantizedCommCodecs

__all__ = ["EXCHANGE_FORMATS", "ExchangeFormat", "ExchangePrecision", "SyncPrecision"]

ExchangeFormat = Literal["fp32", "fp16", "bf16"]
"""Formats of tower outputs and their gradients on the way between towers."""
EXCHANGE_FORMATS: tuple[ExchangeFormat, ...] = get_args(ExchangeFormat)
SyncPrecision = Literal["fp32", "bf16"]
"""Formats in which hosts send the gradients that they average (`dmt.replicas.dense_reduce`)."""

# A mean loss has gradients of 1e-6 and less, and FP16 loses digits below 6e-5. A power of two is undone exactly.
_FP16_SCALE = 4096.0


@dataclass(frozen=True, kw_only=True)
class ExchangePrecision:
    """Number formats in which tower outputs (forward) and their gradients (backward) are sent between towers.

    ``fp32`` sends numbers in the dtype of the towers' outputs, which the result has whatever the format; ``fp16``
    rounds by 2^-11 of a number, and magnitudes above 65504 arrive as 65504; ``bf16`` rounds by 2^-8. A number that is
    not finite and has to be converted arrives as NaN.

    Raises:
        InputError: an unknown format.

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
    """Number format of their gradients. ``"bf16"`` is the safe choice: it needs no scale. For FP16 they are multiplied
    by 4096 before they are encoded and divided by it, in FP32, after: FP16 then keeps all its digits from 1.5e-8 to 16,
    and larger gradients arrive as 16."""

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
        """Factor on gradients while they are sent."""
        return _FP16_SCALE if self.backward == "fp16" else 1.0

    def codecs(self, dtype: torch.dtype | None = None) -> QuantizedCommCodecs | None:
        """TorchRec's codecs for the peer all-to-all, or None when both directions send numbers as they are.

        ``dtype`` is that of the outputs, and so of the result and the gradients; FP32 by default.
        """
        import torch
        from torchrec.distributed.types import NoOpQuantizedCommCodec, QuantizedCommCodecs

        dtype = dtype or torch.float32
        as_is: Any = NoOpQuantizedCommCodec()
        as_is.quantized_dtype = dtype  # a method in TorchRec, where its planner reads a property
        dtypes = {"fp32": dtype, "fp16": torch.float16, "bf16": torch.bfloat16}
        forward, backward = (
            as_is if dtypes[name] == dtype else _Cast(dtypes[name], scale, dtype)
            for name, scale in ((self.forward, 1.0), (self.backward, self.backward_scale))
        )
        return None if forward is backward else QuantizedCommCodecs(forward, backward)


class _Cast:
    """TorchRec's codec that sends numbers, times ``scale``, a power of two, in a dtype of 16 bits.

    TorchRec's own FP16 codec turns infinity into 65504, and divides by its scale while still in FP16.
    """

    def __init__(self, wire: torch.dtype, scale: float, dtype: torch.dtype) -> None:
        self.quantized_dtype = wire
        self._scale, self._dtype = scale, dtype

    def encode(self, input_tensor: Tensor, ctx: Any = None) -> Tensor:
        """Returns the numbers as FP32, scaled, in the dtype of the wire."""
        import torch

        largest = torch.finfo(self.quantized_dtype).max
        numbers = input_tensor.float() * self._scale
        # Infinity becomes NaN before it would be clamped; no look at values, so a GPU does not wait.
        return (numbers + numbers * 0).clamp(-largest, largest).to(self.quantized_dtype)

    def decode(self, input_tensor: Tensor, ctx: Any = None) -> Tensor:
        """Returns the numbers unscaled in FP32, in the dtype of the outputs."""
        return (input_tensor.float() / self._scale).to(self._dtype)

    def calc_quantized_size(self, input_len: int, ctx: Any = None) -> int:
        """Returns the numbers that are sent for ``input_len``: as many."""
        return input_len

    def create_context(self) -> None:
        """A cast has no context."""

    def padded_size(self, input_tensor: Tensor, dim_per_rank: list[int], my_rank: int, qcomm_ctx: Any) -> Any:
        """Returns the columns of the input, and that none are added."""
        return input_tensor.shape[0 if input_tensor.dim() == 1 else 1], 0
