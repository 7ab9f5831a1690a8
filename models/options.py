"""`ModelOptions`: the layer sizes and the device that the four models share, and the check of sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dmt.errors import InputError
from dmt.models.presets import DENSE_ARCH_LAYER_SIZES

__all__ = ["ModelOptions", "check_layer_sizes", "check_size"]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Sizes of a model's two MLPs, and where the model is built.

    Raises:
        InputError: a layer size is not a positive whole number, or ``over_arch_layer_sizes`` is empty.

    Example:
        >>> ModelOptions(dense_arch_layer_sizes=(64,), over_arch_layer_sizes=(64, 1)).over_arch_layer_sizes
        (64, 1)
    """

    dense_arch_layer_sizes: tuple[int, ...] = DENSE_ARCH_LAYER_SIZES
    """Hidden sizes of the bottom MLP. The model appends the last size itself: N, or D with towers."""
    over_arch_layer_sizes: tuple[int, ...] | None = None
    """Sizes of the top MLP with its output, 1 for one logit. ``None``: the paper's sizes for the model."""
    device: torch.device | str | None = None
    """Where parameters are made. ``None`` follows PyTorch's own ``with torch.device(...)``."""

    def __post_init__(self) -> None:
        # A list is what a configuration file gives; a tuple keeps the frozen dataclass immutable.
        object.__setattr__(self, "dense_arch_layer_sizes", tuple(self.dense_arch_layer_sizes))
        check_layer_sizes("ModelOptions.dense_arch_layer_sizes", self.dense_arch_layer_sizes)
        if self.over_arch_layer_sizes is not None:
            object.__setattr__(self, "over_arch_layer_sizes", tuple(self.over_arch_layer_sizes))
            check_layer_sizes("ModelOptions.over_arch_layer_sizes", self.over_arch_layer_sizes, at_least=1)


def check_size(name: str, value: int, *, minimum: int = 1) -> None:
    """Raises `InputError` unless ``value`` is a whole number of at least ``minimum``.

    Example:
        >>> check_size("DLRM: dense_in_features", 0)
        Traceback (most recent call last):
        ...
        dmt.errors.InputError: DLRM: dense_in_features=0 must be a whole number of at least 1.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise InputError(f"{name}={value!r} must be a whole number of at least {minimum}.")


def check_layer_sizes(name: str, sizes: Sequence[int], *, at_least: int = 0) -> None:
    """Raises `InputError` unless ``sizes`` are ``at_least`` so many positive whole numbers.

    Example:
        >>> check_layer_sizes("over_arch_layer_sizes", (512, 256, 1), at_least=1)
    """
    if len(sizes) < at_least:
        raise InputError(f"{name}={tuple(sizes)!r} needs at least {at_least} layer size.")
    for i, size in enumerate(sizes):
        check_size(f"{name}[{i}]", size)
