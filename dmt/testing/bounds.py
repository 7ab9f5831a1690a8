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

__all__ = ["FP32_SUM", "allowed_gradient", "allowed_logits", "allowed_outputs", "allowed_weights", "format_error"]

FP32_SUM = 64 * 2.0**-24
"""Relative error of a sum of products."""

# What rounding does to logits and gradients is tried out in the plain module (`rounding`); the ranks' differs from that
# by where ties and, in INT8, the groups of numbers fall.
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
    """Largest error of a number sent, as a share of the largest one."""
    return 1.01 * NUMBER_FORMATS[name].rounding_error


def allowed_outputs(largest: float, forward: ExchangeFormat, *, is_exact: bool) -> float:
    """For outputs of the sparse part, after the exchange between towers.

    Args:
        largest: magnitude among those that are sent together.
        forward: format of the exchange.
        is_exact: whether they are rows of tables, that nothing has been computed with.
    """
    share = format_error(forward) + (0.0 if is_exact else FP32_SUM)
    return share * largest


def allowed_logits(expected: Tensor, rounding: float) -> float:
    """For logits.

    Args:
        expected: [B].
        rounding: what the format of the exchange did to them in the plain module.
    """
    return _LIKE_TRIED * rounding + FP32_SUM * max(1.0, float(expected.abs().max()))


def allowed_gradient(largest: float, of_kind: float, rounding: float, precision: ExchangePrecision) -> float:
    """For the gradient of one parameter.

    Args:
        largest: of its own elements.
        of_kind: of all parameters of its kind.
        rounding: what the formats of the exchange did to it in the plain module.
        precision: the formats.
    """
    share = _LAYERS * FP32_SUM
    if {"int8", "fp8"} & {precision.forward, precision.backward}:
        share += _SWITCHED
    return _LIKE_TRIED * rounding + share * max(largest, _CANCELS * of_kind)


def allowed_weights(
    start: Tensor,
    after: Tensor,
    *,
    is_table: bool,
    table_optimizer: str,
    dense_optimizer: str,
    steps: int,
    is_half: bool,
) -> float:
    """For the L2 norm of the difference of weights after training: a share of the way they went, and their rounding.

    Args:
        start: before training.
        after: expected after training.
        is_table: whether it is a table.
        table_optimizer: name of the tables' optimizer.
        dense_optimizer: name of the others' optimizer.
        steps: of training.
        is_half: whether the weights are FP16.
    """
    share = _STEP[table_optimizer if is_table else dense_optimizer]
    if is_table:
        # What the dense parts err by reaches the tables with the next step's gradient.
        share = max(share, 0.1 * _STEP[dense_optimizer])
    unit = 2.0**-11 if is_half else 2.0**-24
    moved, size = float((after - start).norm()), float(after.norm())
    # In FP16 a sum that is near the middle between two numbers may go to either of them: one unit, in any step.
    return share * moved + (2 if is_half else 1) * math.sqrt(steps) * unit * size
