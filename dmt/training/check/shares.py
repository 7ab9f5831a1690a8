"""What the largest difference does not show: gradients of another scale, and an exchange that ignores its format."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dmt.number_formats import ExchangeFormat
from dmt.sptt.precision import ExchangePrecision
from dmt.testing.bounds import format_error
from dmt.training.check.rounding import rounded

__all__ = ["FoundGradient", "backward_rounding", "forward_rounding", "scale_error"]

# A scale of all gradients of a kind is a mean over them, in which rounding averages out: in sound runs (the demo's and
# the tests' models, three seeds) at most 2e-7 in FP32, 8e-4 in BF16, and in INT8, which switches ReLUs, 2.3e-2.
_SCALE: dict[str, float] = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 1e-2, "int8": 0.1, "fp8": 0.1}


class FoundGradient(NamedTuple):
    """The gradient of what a rank holds of one parameter."""

    name: str
    ours: Tensor
    wanted: Tensor
    rounding: float
    """Largest error of reading it."""


def scale_error(found: Iterable[FoundGradient], precision: ExchangePrecision) -> tuple[float, float] | None:
    """How far the scale of gradients g is from that of the expected ones e: ``|<g, e> / <e, e> - 1|``; and the allowed.

    A fault of scale shows here whatever single ReLUs do. None where nothing is expected but zeros.

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
    """What a format does to the expected numbers over what was done to ours: about 1, very large where it was unused.

    Args:
        ours: that came out of the exchange.
        wanted: expected, exact.
        name: of the format.

    Returns:
        None where the format changes none of them.

    Example:
        >>> wanted = torch.tensor([1.001, 3.001])
        >>> forward_rounding(wanted.half().float(), wanted, "fp16"), forward_rounding(wanted, wanted, "fp16")
        (1.0, inf)
    """
    if ours.shape != wanted.shape:
        return math.nan
    return _over((rounded(wanted, name) - wanted).norm(), (ours - wanted).norm())


def backward_rounding(
    ours: Iterable[FoundGradient], plain: Iterable[FoundGradient], name: ExchangeFormat
) -> Iterator[float]:
    """The same for gradients and the ones found with FP32 on the way back, at the largest error of the format.

    Args:
        ours: found.
        plain: the same with FP32 on the way back and all else equal.
        name: of the format.

    Returns:
        One number; none where all gradients are zero.
    """
    pairs = [(a.ours.detach(), b.ours.detach()) for a, b in zip(ours, plain, strict=True)]
    if pairs:
        a, b = (torch.cat([part.reshape(-1) for part in parts]) for parts in zip(*pairs, strict=True))
        ratio = _over(format_error(name) * b.norm(), (a - b).norm())
        if ratio is not None:
            yield ratio


def _over(expected: Tensor, found: Tensor) -> float | None:
    if not expected:
        return None
    return float(expected / found)
