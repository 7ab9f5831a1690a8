"""`ScaledRateOptimizer`: shows schedulers the learning rate the user means and gives the kernel a multiple of it."""

from __future__ import annotations

from typing import Any

from torchrec.optim.keyed import KeyedOptimizer, OptimizerWrapper

__all__ = ["ScaledRateOptimizer"]


class ScaledRateOptimizer(OptimizerWrapper):
    """A fused optimizer whose kernel steps by ``factor`` times the learning rate in ``param_groups``.

    A warm-up or any other schedule writes the learning rate into ``param_groups``; without this it would overwrite the
    factor that was given to the kernel when it was made (see `dmt.sharding.optimizers`).

    Args:
        optimizer: a fused optimizer, made with ``factor`` times the learning rate.
        factor: above 0.
    """

    def __init__(self, optimizer: KeyedOptimizer, factor: float) -> None:
        super().__init__(optimizer)
        self._kernel = optimizer
        self._factor = factor
        self.param_groups = [{**group, "lr": group["lr"] / factor} for group in optimizer.param_groups]

    def step(self, closure: Any = None) -> None:
        """Hands the scaled learning rate on, as fused optimizers do: the update itself was in the backward pass."""
        self._scale()
        super().step(closure)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """As `step`."""
        self._scale()
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads the optimizer's state; learning rates stay as they are here."""
        groups = self.param_groups
        super().load_state_dict(state_dict)
        self.param_groups = groups

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Changes settings of the kernel; ``lr`` and ``eps`` are given unscaled."""
        scaled = {k: v * self._factor if k in ("lr", "eps") else v for k, v in params_dict.items()}
        super().update_hyper_parameters(scaled)

    def _scale(self) -> None:
        for inner, group in zip(self._kernel.param_groups, self.param_groups, strict=True):
            inner["lr"] = group["lr"] * self._factor
