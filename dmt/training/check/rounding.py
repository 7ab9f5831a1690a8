"""Number formats: their effect on logits and gradients of the plain module, and the faults they could hide.

A largest difference does not show gradients of another scale, nor an exchange that ignores its format.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmt.number_formats import ExchangeFormat
from dmt.sptt.precision import ExchangePrecision
from dmt.testing.bounds import format_error

__all__ = ["FoundGradient", "as_sent", "backward_rounding", "forward_rounding", "rounded", "scale_error"]

_GROUP = 32  # numbers that share a scale in INT8
# The scale of all gradients of a kind is a mean, in which rounding averages out: in sound runs (the demo's and the
# tests' models, three seeds) it errs by at most 2e-7 in FP32, 8e-4 in BF16, and 2.3e-2 in INT8, which switches ReLUs.
_SCALE: dict[str, float] = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 1e-2, "int8": 0.1, "fp8": 0.1}


def as_sent(outputs: Tensor, precision: ExchangePrecision, num_ranks: int) -> Tensor:
    """Returns outputs [B, columns] as they arrive from the exchange; rounds their gradients in the backward pass.

    A rank sends ``num_ranks`` (those of a replica) times the gradient of the mean over ranks.
    """
    sent: Tensor = _AsSent.apply(outputs, precision, num_ranks)
    return sent


def rounded(numbers: Tensor, name: ExchangeFormat, scale: float = 1.0) -> Tensor:
    """Returns numbers rounded to a format. INT8 groups neighbours here; an exchange groups other numbers.

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


class FoundGradient(NamedTuple):
    """Gradient of the part of a parameter that a rank holds."""

    name: str
    ours: Tensor
    wanted: Tensor
    rounding: float
    """Largest error of reading it."""


def scale_error(found: Iterable[FoundGradient], precision: ExchangePrecision) -> tuple[float, float] | None:
    """Returns the error in scale of gradients g against the expected e, ``|<g, e> / <e, e> - 1|``, and the allowed one.

    A fault of scale shows here whatever single ReLUs do. Returns None if all expected gradients are zero.

    Example:
        >>> e = torch.tensor([1.0, -2.0])
        >>> error, allowed = scale_error([FoundGradient("w", 1.25 * e, e, 0.0)], ExchangePrecision())
        >>> error, allowed
        (0.25, 0.0001)
    """
    product = square = noise = 0.0
    for _, ours, wanted, rounding in found:
        if ours.shape != wanted.shape:
            return math.nan, 0.0
        ours, wanted = ours.detach().double(), wanted.double()
        product += float((ours * wanted).sum())
        square += float(wanted.square().sum())
        noise += rounding**2 * int(wanted.count_nonzero())
    if not square:
        return None
    allowed = max(_SCALE[precision.forward], _SCALE[precision.backward]) + math.sqrt(noise / square)
    return abs(product / square - 1), allowed


def forward_rounding(ours: Tensor, wanted: Tensor, name: ExchangeFormat) -> float | None:
    """Returns a format's rounding of the expected numbers over the rounding found: about 1, very large if not used.

    None where the format changes none of the exact numbers ``wanted``.

    Example:
        >>> wanted = torch.tensor([1.001, 3.001])
        >>> forward_rounding(wanted.half().float(), wanted, "fp16"), forward_rounding(wanted, wanted, "fp16")
        (1.0, inf)
    """
    if ours.shape != wanted.shape:
        return math.nan
    return _ratio((rounded(wanted, name) - wanted).norm(), (ours - wanted).norm())


def backward_rounding(
    ours: Iterable[FoundGradient], unrounded: Iterable[FoundGradient], name: ExchangeFormat
) -> float | None:
    """Returns the largest rounding of a format over the rounding found in gradients; very large if it was not used.

    ``unrounded`` was found with FP32 on the way back and all else equal. None where all gradients are zero.
    """
    pairs = [(a.ours.detach(), b.ours.detach()) for a, b in zip(ours, unrounded, strict=True)]
    if not pairs:
        return None
    found, exact = (torch.cat([part.reshape(-1) for part in parts]) for parts in zip(*pairs, strict=True))
    return _ratio(format_error(name) * exact.norm(), (found - exact).norm())


def _ratio(expected: Tensor, found: Tensor) -> float | None:
    return float(expected / found) if expected else None
