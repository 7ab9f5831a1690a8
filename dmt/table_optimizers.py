"""Settings of the tables' fused optimizers: their short names, and why a data-wise table cannot have them.

Pure: FBGEMM's ``EmbOptimType`` is known by its text, so planning needs no FBGEMM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["FUSED_DEFAULTS", "data_wise_obstacle", "optimizer_name"]

FUSED_DEFAULTS = {"learning_rate": 0.01, "eps": 1e-8, "beta1": 0.9, "beta2": 0.999}
"""What FBGEMM takes for settings that are left out."""

_NAMES = {
    "exact_row_wise_adagrad": "rowwise_adagrad",
    "exact_adagrad": "adagrad",
    "adam": "adam",
    "exact_sgd": "sgd",
}
_FBGEMM_DEFAULT = "exact_sgd"
# What `dmt.data_wise` carries out, and what says nothing about the update; both in FBGEMM's and PyTorch's spelling.
_CARRIED_OUT = {"optimizer", "learning_rate", "lr", "eps", "beta1", "beta2", "betas"}
_NOT_THE_UPDATE = ("output_dtype", "cache_", "bounds_check", "enforce_hbm", "prefetch_", "stochastic_rounding", "uvm_")


def optimizer_name(settings: Mapping[str, Any]) -> str | None:
    """Our name of the optimizer in ``fused_params``; None for another one.

    Example:
        >>> optimizer_name({"optimizer": "exact_row_wise_adagrad"}), optimizer_name({"optimizer": "lamb"})
        ('rowwise_adagrad', None)
    """
    return _NAMES.get(str(settings.get("optimizer", _FBGEMM_DEFAULT)))


def data_wise_obstacle(settings: Mapping[str, Any]) -> str:
    """Why a table with these ``fused_params`` cannot be data-wise; empty if it can.

    Example:
        >>> data_wise_obstacle({"optimizer": "adam", "beta1": 0.9})
        ''
        >>> data_wise_obstacle({"optimizer": "lamb"})
        "its optimizer is lamb, and data-wise tables have one of ['rowwise_adagrad', 'adagrad', 'adam', 'sgd']"
        >>> data_wise_obstacle({"weight_decay": 0.1})
        'its fused optimizer sets weight_decay=0.1, which data-wise tables do not have'
    """
    if optimizer_name(settings) is None:
        return f"its optimizer is {settings['optimizer']}, and data-wise tables have one of {list(_NAMES.values())}"
    for key, value in settings.items():
        if value and key not in _CARRIED_OUT and not key.startswith(_NOT_THE_UPDATE):
            return f"its fused optimizer sets {key}={value!r}, which data-wise tables do not have"
    return ""
