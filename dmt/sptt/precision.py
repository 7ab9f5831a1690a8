"""`ExchangePrecision`: the number format in which tower outputs and their gradients cross between towers.

Quantised collectives for recommendation training: Yang et al., DLP-KDD 2020. The formats and their kernels are
FBGEMM's, reached through TorchRec. Only the peer all-to-all (slow links) is meant; exchanges inside a tower have
TorchRec's own ``qcomm_codecs_registry``. TorchRec and FBGEMM are imported when codecs are built.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dmt.errors import InputError, did_you_mean
from dmt.number_formats import EXCHANGE_FORMATS, NUMBER_FORMATS, ExchangeFormat

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torchrec.distributed.types import QuantizedCommCodecs

__all__ = ["ExchangePrecision"]

# A mean loss has gradients of 1e-6 and less: FP16 loses digits below 6e-5, FBGEMM's INT8 adds 1e-8 to the range of a
# group before it divides. FP8 was not measured; a power of two does it no harm.
_SCALED = ("fp16", "fp8", "int8")
_DEFAULT_SCALE = 4096.0


@dataclass(frozen=True, kw_only=True)
class ExchangePrecision:
    """Number formats in which tower outputs (forward) and their gradients (backward) are sent between towers.

    `dmt.number_formats.NUMBER_FORMATS` has their bytes and rounding errors. ``fp32`` sends numbers in the dtype of the
    towers' outputs; with ``fp16`` magnitudes above 65504 arrive as 65504; ``fp8`` runs on CUDA only.

    A number that is not finite and has to be converted arrives as NaN (with ``int8`` and ``fp8`` its whole group of 32
    does), never as an ordinary number: FBGEMM's own codecs turn infinity into 65504 (FP16) and may turn NaN into a
    finite number (INT8). The result has the dtype of the towers' outputs whatever the format, also under autocast; a
    format that is that dtype converts and scales nothing.

    Raises:
        InputError: an unknown format, or a ``loss_scale`` that cannot be undone exactly or has nothing to scale.

    Example:
        >>> precision = ExchangePrecision(forward="fp16", backward="bf16")
        >>> precision.backward_scale
        1.0
        >>> ExchangePrecision(forward="int8").padded_size(80)
        96
        >>> ExchangePrecision(forward="f16")
        Traceback (most recent call last):
        ...
        dmt.errors.InputError: ExchangePrecision: forward='f16' is unknown; use one of ['fp32', 'fp16', 'bf16', 'fp8', \
'int8']. Did you mean 'fp16'?
    """

    forward: ExchangeFormat = "fp32"
    """Number format of the tower outputs."""
    backward: ExchangeFormat = "fp32"
    """Number format of their gradients. ``"bf16"`` is the safe choice: it needs no scale."""
    loss_scale: float | None = None
    """Gradients are multiplied by this power of two before they are encoded and divided by it, in FP32, after; None
    means 4096 for FP16, FP8 and INT8, 1 otherwise. FP16 then keeps all its digits from 1.5e-8 to 16; larger gradients
    arrive as 16. (TorchRec's ``backward_loss_scale`` is undone in FP16 and so does not help small gradients.)"""

    def __post_init__(self) -> None:
        for direction in ("forward", "backward"):
            value = getattr(self, direction)
            if value not in EXCHANGE_FORMATS:
                raise InputError(
                    f"ExchangePrecision: {direction}={value!r} is unknown; use one of {list(EXCHANGE_FORMATS)}."
                    f"{did_you_mean(str(value), EXCHANGE_FORMATS)}"
                )
        if self.loss_scale is None:
            return
        if self.backward not in _SCALED:
            raise InputError(
                f"ExchangePrecision: loss_scale={self.loss_scale!r} is set but backward={self.backward!r}, which needs "
                f"no scale; drop loss_scale, or choose backward from {list(_SCALED)}."
            )
        exact = math.isfinite(self.loss_scale) and self.loss_scale > 0 and math.frexp(self.loss_scale)[0] == 0.5
        if not exact or not 2.0**-24 <= self.loss_scale <= 2.0**24:
            raise InputError(
                f"ExchangePrecision: loss_scale={self.loss_scale!r} cannot be undone exactly; give a power of two from "
                f"2**-24 to 2**24, or None for {_DEFAULT_SCALE:g}."
            )

    @property
    def backward_scale(self) -> float:
        """Factor on gradients while they are sent."""
        if self.loss_scale is not None:
            return self.loss_scale
        return _DEFAULT_SCALE if self.backward in _SCALED else 1.0

    def padded_size(self, numbers: int) -> int:
        """Returns how many numbers a block is padded to: whole groups of 32.

        FBGEMM asserts that for ``int8`` and ``fp8`` in the middle of the exchange; other formats need nothing.
        """
        group = max(NUMBER_FORMATS[self.forward].group, NUMBER_FORMATS[self.backward].group)
        return -(-numbers // group) * group

    def check_device(self, device: torch.device) -> None:
        """Raises `InputError` for ``fp8`` without CUDA: FBGEMM has no other kernel for it."""
        for direction in ("forward", "backward"):
            if getattr(self, direction) == "fp8" and device.type != "cuda":
                raise InputError(
                    f"ExchangePrecision: {direction}='fp8' does not run on device {str(device)!r}; FBGEMM has it for "
                    "CUDA only. Use 'bf16', or 'int8' for as few bytes."
                )

    def codecs(self, device: torch.device, dtype: torch.dtype | None = None) -> QuantizedCommCodecs | None:
        """TorchRec's codecs for the peer all-to-all, or None when both directions send numbers as they are.

        Args:
            device: where the outputs live.
            dtype: of the outputs, and so of the result and the gradients; FP32 by default.

        Raises:
            InputError: the device cannot do a format.
        """
        import torch

        self.check_device(device)
        dtype = dtype or torch.float32
        if all(_is_plain(name, dtype) for name in (self.forward, self.backward)):
            return None
        # Not get_qcomm_codecs_registry: on a CPU it turns BF16 into FP16.
        from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
        from torchrec.distributed.types import NoOpQuantizedCommCodec, QuantizedCommCodecs

        row = NUMBER_FORMATS["fp8"].group if "fp8" in (self.forward, self.backward) else None
        made = get_qcomm_codecs(
            QCommsConfig(
                forward_precision=CommType(self.forward),
                backward_precision=CommType(self.backward),
                fp8_quantize_dim=row,
                fp8_quantize_dim_bwd=row,
            )
        )
        as_is: Any = NoOpQuantizedCommCodec()
        as_is.quantized_dtype = dtype  # a method in TorchRec, where its planner reads a property

        def framed(codec: Any, name: ExchangeFormat, scale: float) -> Any:
            return as_is if _is_plain(name, dtype) else _ExactFrame(codec, scale, dtype, NUMBER_FORMATS[name].group)

        return QuantizedCommCodecs(
            forward=framed(made.forward, self.forward, 1.0),
            backward=framed(made.backward, self.backward, self.backward_scale),
        )


class _ExactFrame:
    """Wrapper of FBGEMM's codec for dtypes other than FP32, an exact scale, and numbers that are not finite.

    Numbers are multiplied by ``scale``, a power of two, on the way, and decoded to ``dtype``. One that is not finite
    spoils the ``group`` that shares FBGEMM's scale with it.
    """

    def __init__(self, codec: Any, scale: float, dtype: torch.dtype, group: int) -> None:
        self._codec = codec
        self._scale = scale
        self._dtype = dtype
        self._group = group

    def encode(self, input_tensor: Tensor, ctx: Any = None) -> Tensor:
        """FP32, scaled, encoded."""
        numbers = input_tensor.float() * self._scale
        poison = numbers * 0  # NaN where a number is not finite; no look at values, so a GPU does not wait
        if self._group > 1:
            groups = poison.view(-1, self._group)
            poison = groups.sum(dim=1, keepdim=True).expand_as(groups).reshape(-1)
        return self._codec.encode(numbers + poison, ctx)

    def decode(self, input_tensor: Tensor, ctx: Any = None) -> Tensor:
        """Decoded, unscaled in FP32, in the dtype of the outputs."""
        return (self._codec.decode(input_tensor, ctx).float() / self._scale).to(self._dtype)

    @property
    def quantized_dtype(self) -> torch.dtype:
        return self._codec.quantized_dtype

    def calc_quantized_size(self, input_len: int, ctx: Any = None) -> int:
        return self._codec.calc_quantized_size(input_len, ctx)

    def create_context(self) -> Any:
        return self._codec.create_context()

    def padded_size(self, input_tensor: Tensor, dim_per_rank: list[int], my_rank: int, qcomm_ctx: Any) -> Any:
        return self._codec.padded_size(input_tensor, dim_per_rank, my_rank, qcomm_ctx)


def _is_plain(name: ExchangeFormat, dtype: torch.dtype) -> bool:
    """Tells whether the format sends numbers of this dtype as they are."""
    return name == "fp32" or f"torch.{NUMBER_FORMATS[name].dtype}" == str(dtype)
