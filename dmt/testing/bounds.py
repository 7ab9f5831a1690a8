"""Largest differences that rounding explains, by the compared quantity and its number format.

Two ways to sum K products in FP32 differ by at most K units in the last place of the sum of their magnitudes, and
typically by its square root; K is a few thousand in the widest layers here, so 64 units are allowed. A fault (a wrong
row, a wrong divisor, a gradient twice) shows in the first or second digit.
"""

from __future__ import annotations

import math

from torch import Tensor

from dmt.number_formats import NUMBER_FORMATS, ExchangeFormat
from dmt.sptt.precision import ExchangePrecision

__all__ = [
    "FP32_SUM",
    "allowed_gradient",
    "allowed_logits",
    "allowed_outputs",
    "allowed_weights",
    "format_error",
    "step_error",
]

FP32_SUM = 64 * 2.0**-24
"""Relative error of a sum of products."""

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
# a step that errs by FP32_SUM / s; with elements spread evenly over s, the root mean square over them is about
# sqrt(FP32_SUM) = 2e-3 of a step. SGD amplifies nothing; row-wise AdaGrad divides a row by its norm.
_STEP = {"sgd": 1e-4, "rowwise_adagrad": 1e-3, "adagrad": 1e-2, "adam": 1e-2, "adamw": 1e-2}


def format_error(name: ExchangeFormat) -> float:
    """Returns the largest error of a number sent in a format, as a share of the largest number sent."""
    return 1.01 * NUMBER_FORMATS[name].rounding_error


def allowed_outputs(largest: float, forward: ExchangeFormat, *, is_exact: bool) -> float:
    """Returns the bound for outputs of the sparse part, after the exchange between towers.

    Args:
        largest: magnitude among numbers that are sent together.
        forward: format of the exchange.
        is_exact: whether the outputs are rows of tables, with no arithmetic before the exchange.
    """
    return (format_error(forward) + (0.0 if is_exact else FP32_SUM)) * largest


def allowed_logits(expected: Tensor, rounding: float) -> float:
    """Returns the bound for logits [B], given the change that the exchange's format makes in the plain module's."""
    return _LIKE_TRIED * rounding + FP32_SUM * max(1.0, float(expected.abs().max()))


def allowed_gradient(largest: float, of_kind: float, rounding: float, precision: ExchangePrecision) -> float:
    """Returns the bound for the gradient of one parameter.

    Args:
        largest: magnitude among its own elements.
        of_kind: largest magnitude among all parameters of its kind.
        rounding: change that the formats of the exchange make in the plain module's gradient.
        precision: the formats.
    """
    share = _LAYERS * FP32_SUM
    if {"int8", "fp8"} & {precision.forward, precision.backward}:
        share += _SWITCHED
    return _LIKE_TRIED * rounding + share * max(largest, _CANCELS * of_kind)


def allowed_weights(start: Tensor, after: Tensor, *, error: float, steps: int, is_half: bool) -> float:
    """Returns the bound for the L2 norm of the difference of weights after training.

    Args:
        start: weights before training.
        after: weights expected after training.
        error: `step_error` of their optimizer.
        steps: number of training steps.
        is_half: whether the model's weights are FP16.
    """
    unit = 2.0**-11 if is_half else 2.0**-24
    moved, size = float((after - start).norm()), float(after.norm())
    # In FP16 a sum near the middle between two numbers may be rounded to either of them: one unit, in any step.
    return error * moved + (2 if is_half else 1) * math.sqrt(steps) * unit * size


def step_error(optimizer: str, *, dense_optimizer: str = "sgd") -> float:
    """Returns the error of an optimizer's steps, as a share of the distance that weights move.

    Args:
        optimizer: name of the weights' own optimizer.
        dense_optimizer: for tables, the name of the other weights': their errors reach tables in the next gradient.
    """
    return max(_STEP[optimizer], 0.1 * _STEP[dense_optimizer])
