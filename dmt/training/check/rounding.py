"""Effects of rounding: the largest differences allowed, by compared quantity and number format.

Two ways to sum K products in FP32 differ by at most K units in the last place of the sum of their magnitudes, and
typically by its square root; K is a few thousand in the widest layers here, so 64 units are allowed. A fault (a wrong
row, a wrong divisor, a gradient twice) shows in the first or second digit.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dmt.number_formats import NUMBER_FORMATS, ExchangeFormat
from dmt.sptt.precision import ExchangePrecision

__all__ = [
    "FoundGradient",
    "allowed_gradient",
    "allowed_logits",
    "allowed_outputs",
    "allowed_weights",
    "as_sent",
    "format_error",
    "rounded",
    "step_error",
    "unit_of",
]

# Relative error of a sum of products.
_FP32_SUM = 64 * 2.0**-24
# The effect of rounding on logits and gradients is measured in the plain module; on the ranks ties and, in INT8, groups
# of numbers fall elsewhere.
_LIKE_TRIED = 8
# In INT8, another rounding may push the input of a ReLU across zero, which switches a sample's share of a gradient.
# FP16 and BF16 round alike in the plain module, so the same ones are pushed there.
_SWITCHED = 0.25
# Gradients pass through as many layers twice.
_LAYERS = 8
# A gradient smaller than this share of the largest of its kind is a sum of terms that cancel.
_CANCELS = 1 / 16
# Adam and AdaGrad divide by the gradient's own size, so an element whose terms cancel to a share s of themselves takes
# a step that errs by _FP32_SUM / s; with elements spread evenly over s, the root mean square over them is about
# sqrt(_FP32_SUM) = 2e-3 of a step. SGD amplifies nothing; row-wise AdaGrad divides a row by its norm.
_STEP = {"sgd": 1e-4, "rowwise_adagrad": 1e-3, "adagrad": 1e-2, "adam": 1e-2, "adamw": 1e-2}
_GROUP = 32  # numbers that share a scale in INT8


def format_error(name: ExchangeFormat) -> float:
    """Returns the largest error of a number sent in a format, as a share of the largest number sent."""
    return 1.01 * NUMBER_FORMATS[name].rounding_error


def unit_of(weights: Tensor) -> float:
    """Returns the largest relative rounding error of a weight, FP16 or FP32."""
    return 2.0**-11 if weights.dtype == torch.float16 else 2.0**-24


def allowed_outputs(largest: float, forward: ExchangeFormat, *, is_exact: bool) -> float:
    """Returns the bound for outputs of the sparse part, after the exchange between towers in format ``forward``.

    ``largest`` is the magnitude among numbers that are sent together; ``is_exact``: rows of tables, not sums of them.
    """
    return (format_error(forward) + (0.0 if is_exact else _FP32_SUM)) * largest


def allowed_logits(expected: Tensor, rounding: float) -> float:
    """Returns the bound for logits [B], given the change that the exchange's format makes in the plain module's."""
    return _LIKE_TRIED * rounding + _FP32_SUM * max(1.0, float(expected.abs().max()))


def allowed_gradient(largest: float, of_kind: float, rounding: float, precision: ExchangePrecision) -> float:
    """Returns the bound for the gradient of one parameter.

    ``largest`` is the magnitude among its own elements, ``of_kind`` among those of all parameters of its kind,
    ``rounding`` the change that the formats of the exchange make in the plain module's gradient.
    """
    share = _LAYERS * _FP32_SUM
    if {"int8", "fp8"} & {precision.forward, precision.backward}:
        share += _SWITCHED
    return _LIKE_TRIED * rounding + share * max(largest, _CANCELS * of_kind)


def allowed_weights(found: Tensor, start: Tensor, after: Tensor, *, error: float, steps: int) -> float:
    """Returns the bound for the L2 norm of the difference of weights ``found``, FP16 or FP32, from those expected.

    ``start`` and ``after`` are the expected ones before and after ``steps``, ``error`` the optimizer's `step_error`.
    """
    moved, size = float((after - start).norm()), float(after.norm())
    # In FP16 a sum near the middle between two numbers may be rounded to either of them: one unit, in any step.
    units = 2 if found.dtype == torch.float16 else 1
    return error * moved + units * math.sqrt(steps) * unit_of(found) * size


def step_error(optimizer: str, *, dense_optimizer: str = "sgd") -> float:
    """Returns the error of an optimizer's steps, as a share of the distance that weights move.

    Errors of the other weights, which have ``dense_optimizer``, reach tables in the next gradient.
    """
    return max(_STEP[optimizer], 0.1 * _STEP[dense_optimizer])


def as_sent(outputs: Tensor, precision: ExchangePrecision, num_ranks: int) -> Tensor:
    """Returns outputs [B, columns] as they arrive from the exchange; rounds their gradients in the backward pass.

    A rank sends ``num_ranks`` (those of a replica) times the gradient of the mean over ranks.
    """
    sent = outputs + (rounded(outputs, precision.forward) - outputs).detach()
    if sent.requires_grad:
        scale = precision.backward_scale
        sent.register_hook(lambda gradient: rounded(gradient * num_ranks, precision.backward, scale) / num_ranks)
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
    if name in ("fp16", "bf16"):
        return (numbers * scale).to(torch.float16 if name == "fp16" else torch.bfloat16).float() / scale
    flat = numbers.reshape(-1)
    groups = torch.nn.functional.pad(flat, (0, -flat.numel() % _GROUP)).view(-1, _GROUP)
    low, high = groups.aminmax(dim=1, keepdim=True)
    step = (high - low) / 255
    sent = torch.where(step > 0, low + step * ((groups - low) / step).round(), groups)
    return sent.view(-1)[: flat.numel()].view(numbers.shape)


class FoundGradient(NamedTuple):
    """Gradient of the part of a parameter that a rank holds."""

    name: str
    ours: Tensor
    wanted: Tensor
    rounding: float
    """Largest error of reading it."""
