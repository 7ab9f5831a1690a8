"""The rounding of an exchange in the plain module: what a number format does to logits and gradients by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dmt.number_formats import ExchangeFormat
from dmt.sptt.precision import ExchangePrecision

__all__ = ["as_sent", "rounded"]

_GROUP = 32  # numbers that share a scale in INT8


def as_sent(outputs: Tensor, precision: ExchangePrecision, num_ranks: int) -> Tensor:
    """The outputs as they arrive, and on the way back their gradients.

    Args:
        outputs: [B, columns] of the sparse part.
        precision: of the exchange.
        num_ranks: of a replica; what a rank sends is so many times the gradient of the mean over them.
    """
    sent: Tensor = _AsSent.apply(outputs, precision, num_ranks)
    return sent


def rounded(numbers: Tensor, name: ExchangeFormat, scale: float = 1.0) -> Tensor:
    """Numbers in a format and back in FP32. Groups of INT8 are of neighbours here, on ranks of other ones.

    Example:
        >>> rounded(torch.tensor([1.0, 1.001]), "bf16").tolist()
        [1.0, 1.0]
        >>> rounded(torch.tensor([0.0, 0.5, 255.0]), "int8").tolist()
        [0.0, 0.0, 255.0]
    """
    if name == "fp32":
        return numbers
    if name == "fp16":
        return (numbers * scale).half().float() / scale
    if name == "bf16":
        return (numbers * scale).bfloat16().float() / scale
    flat = numbers.reshape(-1)
    groups = torch.nn.functional.pad(flat, (0, -flat.numel() % _GROUP)).view(-1, _GROUP)
    low = groups.min(dim=1, keepdim=True).values
    step = (groups.max(dim=1, keepdim=True).values - low) / 255
    return (
        torch.where(step > 0, low + step * ((groups - low) / step).round(), groups)
        .view(-1)[: flat.numel()]
        .view(numbers.shape)
    )


class _AsSent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, precision: ExchangePrecision, num_ranks: int) -> Tensor:
        ctx.precision, ctx.num_ranks = precision, num_ranks
        return rounded(outputs, precision.forward)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        name, scale = ctx.precision.backward, ctx.precision.backward_scale
        return rounded(gradient * ctx.num_ranks, name, scale) / ctx.num_ranks, None, None
