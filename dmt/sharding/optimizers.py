"""Settings of the tables' fused optimizers: names, what data-parallel tables do not support, the moment scale c.

With R replicas, AdaGrad divides its sums of squared gradients by c, 0 < c <= R, before it takes their root (2D sparse
parallelism, Algorithm 1). FBGEMM's ``EmbOptimType`` is recognized by its text, so that planning does not need FBGEMM;
only `kernel_obstacle` does.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from dmt.errors import InputError
from dmt.plan.tables import is_sequence, table_format

__all__ = [
    "FBGEMM_NAMES",
    "FUSED_DEFAULTS",
    "MomentScale",
    "check_moment_scale",
    "data_parallel_obstacle",
    "kernel_obstacle",
    "moment_scale_of",
    "moment_scaled",
    "optimizer_name",
]

FUSED_DEFAULTS = {"learning_rate": 0.01, "eps": 1e-8, "beta1": 0.9, "beta2": 0.999}
"""FBGEMM's default for each of these settings."""

FBGEMM_NAMES = {
    "rowwise_adagrad": "exact_row_wise_adagrad",
    "adagrad": "exact_adagrad",
    "adam": "adam",
    "sgd": "exact_sgd",
}
"""FBGEMM's name of each optimizer that data-parallel tables support, by dmt's name."""

_NAMES = {theirs: ours for ours, theirs in FBGEMM_NAMES.items()}
_FBGEMM_DEFAULT = "exact_sgd"
# Settings that `dmt.sharding.data_parallel` applies, and settings without effect on the update.
_CARRIED_OUT = {"optimizer", "learning_rate", "eps", "beta1", "beta2"}
_NOT_THE_UPDATE = ("output_dtype", "cache_", "bounds_check", "enforce_hbm", "prefetch_", "stochastic_rounding", "uvm_")
# Settings that TorchRec reads and does not pass on, by prefix.
_TORCHRECS = ("__register_", "embedding_cache_", "kvzch_", "max_l1_cache_size", "res_")
_NAME_HINTS = {"lr": "; its name is learning_rate", "betas": "; its names are beta1 and beta2"}
_signature = cache(inspect.signature)  # slow, and asked for every table


def optimizer_name(settings: Mapping[str, Any]) -> str | None:
    """Returns dmt's name of the optimizer in ``fused_params``, by default SGD; None if dmt has no name for it."""
    return _NAMES.get(str(settings.get("optimizer", _FBGEMM_DEFAULT)))


def kernel_obstacle(settings: Mapping[str, Any], *, names_only: bool = False, cpu_table: Any = None) -> str:
    """Returns the reason why FBGEMM's fused kernels cannot apply these ``fused_params``; empty if they can.

    ``names_only`` omits the check that the optimizer uses each setting, since single tables may have other optimizers.
    ``cpu_table`` is the table if it is on a CPU, where the kernels ignore more settings; else None.

    Example:
        >>> kernel_obstacle({"betas": (0.8, 0.99)})
        'FBGEMM has no setting betas=(0.8, 0.99); its names are beta1 and beta2'
    """
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

    known = _signature(SplitTableBatchedEmbeddingBagsCodegen).parameters
    if not isinstance(kind := settings.get("optimizer", EmbOptimType.EXACT_SGD), EmbOptimType):
        return f"optimizer={kind!r} is not one of FBGEMM's, such as EmbOptimType.EXACT_ROWWISE_ADAGRAD"
    if not isinstance(output := settings.get("output_dtype", SparseType.FP32), SparseType):
        return f"output_dtype={output!r} is not one of FBGEMM's, such as SparseType.FP16"
    optimizer = str(kind)
    # What FBGEMM passes to the kernel of each optimizer. The mode of row-wise AdaGrad's decay is NONE by default.
    is_row_wise = optimizer.endswith("row_wise_adagrad")
    counts, clips = settings.get("counter_based_regularization"), settings.get("cowclip_regularization")
    mode: Any = getattr(counts or clips, "counter_weight_decay_mode", settings.get("weight_decay_mode"))
    has_mode = bool(mode) and not (clips and mode.name == "ADAGRADW")
    if has_mode and mode.name == "DECOUPLE_GLOBAL" and cpu_table is not None:
        return "FBGEMM has no kernel for weight_decay_mode=DECOUPLE_GLOBAL on a CPU"
    decays = has_mode if is_row_wise else optimizer not in ("exact_sgd", "exact_adagrad", "none")
    # FBGEMM 1.8 and 1.9 on a CPU: no table has max_norm, and FP32 bags of one feature decay only if rows are counted.
    is_bag = is_row_wise and cpu_table is not None and not is_sequence(cpu_table) and len(cpu_table.feature_names) == 1
    is_plain = is_bag and table_format(cpu_table) == "FP32" and not (counts or clips)
    has_norm = is_row_wise and cpu_table is None and not (counts or clips)
    reads = {"momentum": optimizer == "lars_sgd", "max_norm": has_norm, "weight_decay": decays and not is_plain}
    for key, value in settings.items():
        if key not in known and not key.startswith(_TORCHRECS):
            return f"FBGEMM has no setting {key}={value!r}{_NAME_HINTS.get(key, '')}"
        if value and not names_only and not reads.get(key, True):
            decay = " on a CPU in FP32 bags of one feature" if decays else " without weight_decay_mode L2 or DECOUPLE"
            hints = {"weight_decay": decay, "max_norm": " on a CPU or with row counters"} if is_row_wise else {}
            return f"FBGEMM's {optimizer} ignores {key}={value!r}{hints.get(key, '')}"
    return ""


def data_parallel_obstacle(settings: Mapping[str, Any]) -> str:
    """Returns the reason why a table with these ``fused_params`` cannot be data-parallel; empty if it can.

    Example:
        >>> data_parallel_obstacle({"optimizer": "adam", "beta1": 0.9})
        ''
        >>> data_parallel_obstacle({"optimizer": "lamb"})
        "its optimizer is lamb, and data-parallel tables support ['rowwise_adagrad', 'adagrad', 'adam', 'sgd']"
        >>> data_parallel_obstacle({"weight_decay": 0.1})
        'its fused optimizer sets weight_decay=0.1, which data-parallel tables do not support'
    """
    if optimizer_name(settings) is None:
        return f"its optimizer is {settings['optimizer']}, and data-parallel tables support {list(_NAMES.values())}"
    for key, value in settings.items():
        if value and key not in _CARRIED_OUT and not key.startswith(_NOT_THE_UPDATE):
            return f"its fused optimizer sets {key}={value!r}, which data-parallel tables do not support"
    return ""


MomentScale = float | Literal["num_replicas"]
# The optimizers whose step is the gradient over the root of a sum of squares.
_WITH_MOMENTS = ("rowwise_adagrad", "adagrad")


def check_moment_scale(moment_scale: MomentScale, num_replicas: int) -> None:
    """Raises `InputError` unless the scale is ``"num_replicas"`` or in (0, ``num_replicas``] (Scaling Rule 1)."""
    if moment_scale == "num_replicas":
        return
    is_number = isinstance(moment_scale, int | float) and not isinstance(moment_scale, bool)
    if not is_number or not 0 < moment_scale <= num_replicas:
        raise InputError(
            f"moment_scale={moment_scale!r} must be above 0 and at most num_replicas={num_replicas}, or 'num_replicas' "
            "(2D sparse parallelism, Scaling Rule 1: the noisier the gradients, the nearer to the number of replicas)."
        )


def moment_scale_of(moment_scale: MomentScale, settings: Mapping[str, Any], num_replicas: int) -> float:
    """Returns the factor c for the moments of a model-parallel table whose fused optimizer has these ``settings``.

    With ``"num_replicas"``, c is 1.0 for an optimizer without a sum of squared gradients.

    Raises:
        InputError: ``moment_scale`` is out of range, or is not 1 though the optimizer has no such sum; or c is not 1
            with decoupled weight decay or row counters, whose effect the scaled learning rate would change.

    Example:
        >>> moment_scale_of("num_replicas", {"optimizer": "exact_row_wise_adagrad"}, 4)
        4.0
        >>> moment_scale_of("num_replicas", {"optimizer": "exact_sgd"}, 4)
        1.0
    """
    check_moment_scale(moment_scale, num_replicas)
    asked = moment_scale != "num_replicas"
    scale = float(num_replicas if moment_scale == "num_replicas" else moment_scale)
    obstacle, mode = "", getattr(settings.get("weight_decay_mode"), "name", "")
    if optimizer_name(settings) not in _WITH_MOMENTS:
        obstacle = f"the optimizer is {optimizer_name(settings) or settings['optimizer']}"
    elif mode in ("COUNTER", "COWCLIP") or ("DECOUPLE" in mode and settings.get("weight_decay")):
        obstacle, asked = f"it would change what weight_decay_mode={mode} does", True
    if obstacle and asked and scale != 1.0:
        raise InputError(
            f"moment_scale={moment_scale!r} scales the moments of {' and '.join(_WITH_MOMENTS)}, but {obstacle}. Use "
            "moment_scale=1."
        )
    return 1.0 if obstacle else scale


def moment_scaled(settings: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Returns the settings with learning rate and epsilon multiplied by the square root of ``scale``.

    Example:
        >>> moment_scaled({"learning_rate": 0.5, "eps": 1e-4, "weight_decay": 0.1}, 4.0)
        {'learning_rate': 1.0, 'eps': 0.0002, 'weight_decay': 0.1}
    """
    # lr g / (sqrt(v / c) + eps) = sqrt(c) lr g / (sqrt(v) + sqrt(c) eps): Algorithm 1, line 6, by settings alone.
    root = math.sqrt(scale)
    return {**settings, **{key: settings.get(key, FUSED_DEFAULTS[key]) * root for key in ("learning_rate", "eps")}}
