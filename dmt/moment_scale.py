"""Moment-scaled AdaGrad: which factor c, and what the kernel is told (2D sparse parallelism, Zhang et al. 2025, 3.2).

Algorithm 1, line 6, steps by ``eta / (sqrt(v / c) + eps) * g``. That equals
``eta sqrt(c) / (sqrt(v) + eps sqrt(c)) * g``, which FBGEMM's fused kernels compute when they are told the learning rate
``eta sqrt(c)`` and the epsilon ``eps sqrt(c)``. Legend: M replicas; v the moment, in FBGEMM's row-wise AdaGrad the
*mean* over a row's columns of squared gradients (the paper writes their sum, so compare eps and v with that in mind).

Pure: needs no TorchRec.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dmt.errors import InputError
from dmt.table_optimizers import FUSED_DEFAULTS, optimizer_name

__all__ = ["MomentScale", "TableOptimizer", "check_moment_scale", "moment_scale_of", "moment_scaled"]

MomentScale = float | Literal["num_replicas"]
# The optimizers whose step is the gradient over the root of a sum of squares.
_WITH_MOMENTS = ("rowwise_adagrad", "adagrad")


@dataclass(frozen=True, kw_only=True)
class TableOptimizer:
    """What a sharder was told of its tables' fused optimizer."""

    fused_params: dict[str, Any] | None = None
    """FBGEMM's settings; those on a table's parameter go before them."""
    moment_scale: MomentScale = "num_replicas"
    """Factor c of AdaGrad's moments."""


def check_moment_scale(moment_scale: MomentScale, num_replicas: int) -> None:
    """Raises `InputError` unless ``moment_scale`` is ``"num_replicas"`` or in (0, M] (Scaling Rule 1).

    Example:
        >>> check_moment_scale(3, num_replicas=2)
        Traceback (most recent call last):
        ...
        dmt.errors.InputError: moment_scale=3 must be above 0 and at most num_replicas=2, or 'num_replicas' (2D ...
    """
    if moment_scale == "num_replicas":
        return
    is_number = isinstance(moment_scale, int | float) and not isinstance(moment_scale, bool)
    if not is_number or not 0 < moment_scale <= num_replicas:
        raise InputError(
            f"moment_scale={moment_scale!r} must be above 0 and at most num_replicas={num_replicas}, or 'num_replicas' "
            "(2D sparse parallelism, Scaling Rule 1: the noisier the gradients, the nearer to the number of replicas)."
        )


def moment_scale_of(moment_scale: MomentScale, settings: Mapping[str, Any], num_replicas: int) -> float:
    """The factor c of a model-parallel table.

    Args:
        moment_scale: what was asked for, see `check_moment_scale`.
        settings: ``fused_params`` of the table.
        num_replicas: M.

    Returns:
        c; 1.0 for an optimizer without such a moment, unless one was asked for.

    Raises:
        InputError: a number other than 1 was asked for, and the optimizer has no such moment, or decouples its weight
            decay, which the scaled learning rate would change.

    Example:
        >>> moment_scale_of("num_replicas", {"optimizer": "exact_row_wise_adagrad"}, 4)
        4.0
        >>> moment_scale_of("num_replicas", {"optimizer": "exact_sgd"}, 4)
        1.0
    """
    check_moment_scale(moment_scale, num_replicas)
    asked = moment_scale != "num_replicas"
    scale = float(num_replicas if moment_scale == "num_replicas" else moment_scale)
    if scale == 1.0:
        return scale
    obstacle = ""
    if optimizer_name(settings) not in _WITH_MOMENTS:
        obstacle = f"the optimizer is {optimizer_name(settings) or settings['optimizer']}"
    elif settings.get("weight_decay") and "decouple" in str(settings.get("weight_decay_mode", "")).lower():
        # It shrinks weights by learning rate x decay, so sqrt(c) would come into it.
        obstacle, asked = "weight_decay_mode is decoupled", True
    if not obstacle:
        return scale
    if asked:
        raise InputError(
            f"moment_scale={moment_scale!r} scales the moments of {' and '.join(_WITH_MOMENTS)}, but {obstacle}. Use "
            "moment_scale=1."
        )
    return 1.0


def moment_scaled(settings: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """The settings with learning rate and epsilon times sqrt(c); other settings stay.

    Example:
        >>> moment_scaled({"learning_rate": 0.5, "eps": 1e-4, "weight_decay": 0.1}, 4.0)
        {'learning_rate': 1.0, 'eps': 0.0002, 'weight_decay': 0.1}
    """
    root = math.sqrt(scale)
    return {**settings, **{key: settings.get(key, FUSED_DEFAULTS[key]) * root for key in ("learning_rate", "eps")}}
