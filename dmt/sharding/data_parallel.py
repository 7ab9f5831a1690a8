"""`DataParallelOptimizer`: updates rows that several ranks hold, such as those of data-parallel tables.

Data parallelism (Neo, arXiv 2104.05158, section 4) all-reduces a table's gradient instead of exchanging ids and
embeddings. TorchRec leaves such tables to the dense optimizer and drops their fused optimizer; here they are updated as
FBGEMM's fused kernels would, with the same settings, state and learning-rate schedule, so a table trains the same under
any scheme. Exceptions: FBGEMM updates a table once per forward pass, not once per backward pass, and its Adam differs
(see `DataParallelOptimizer`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchrec.optim.fused import FusedOptimizer

from dmt.errors import InputError
from dmt.sharding.optimizers import FUSED_DEFAULTS, data_parallel_obstacle, optimizer_name

__all__ = ["DataParallelOptimizer", "UpdateSettings"]


class UpdateSettings(NamedTuple):
    """Settings of a table's update that change during training."""

    learning_rate: float
    number: int
    """Number of the update, starting at 1, for Adam's bias correction."""


_STATES = {"rowwise_adagrad": ("momentum1",), "adagrad": ("momentum1",), "adam": ("momentum1", "momentum2"), "sgd": ()}


class DataParallelOptimizer(FusedOptimizer):
    """FBGEMM's row-wise AdaGrad, AdaGrad, Adam and SGD for whole tables with dense gradients.

    State has FBGEMM's names, shapes and meaning: ``momentum1`` of row-wise AdaGrad is [rows], the sum over steps of
    the *mean* over columns of the squared gradient. Rows whose gradient is zero do not change. FBGEMM's Adam, which
    needs a GPU, differs: it also moves a row that was read but has a zero gradient, and counts every forward pass as a
    step, evaluation too.

    Args:
        weights: [rows, columns] of each table, by table name.
        settings: fused-optimizer settings of each table, by table name: ``optimizer``, ``learning_rate``, ``eps``,
            ``beta1``, ``beta2``; FBGEMM's defaults for those that are absent.

    Raises:
        InputError: a table has an optimizer or a setting that is not implemented here.
    """

    def __init__(self, weights: Mapping[str, Tensor], settings: Mapping[str, Mapping[str, Any]]) -> None:
        self._weights = dict(weights)
        self._settings: dict[str, dict[str, Any]] = {}
        self._kinds: dict[str, str] = {}
        state: dict[Any, dict[str, Tensor]] = {}
        for name, weight in weights.items():
            if obstacle := data_parallel_obstacle(settings[name]):
                remedy = "Change the table's optimizer settings, or use another scheme."
                raise InputError(f"Table {name!r} is data-parallel, but {obstacle}. {remedy}")
            kind = optimizer_name(settings[name]) or ""
            self._kinds[name], self._settings[name] = kind, {**FUSED_DEFAULTS, **settings[name]}
            shape = weight.shape[:1] if kind == "rowwise_adagrad" else weight.shape
            state[weight] = {
                f"{name}.{part}": torch.zeros(shape, dtype=torch.float32, device=weight.device)
                for part in _STATES[kind]
            }
            if kind == "adam":
                state[weight][f"{name}.iter"] = torch.zeros((), dtype=torch.int64)
        self._rates = {name: setting["learning_rate"] for name, setting in self._settings.items()}
        groups = [{"params": [weight], "lr": self._rates[name]} for name, weight in weights.items()]
        super().__init__({f"embedding_bags.{name}.weight": w for name, w in weights.items()}, state, groups)

    @torch.no_grad()
    def update(self) -> None:
        """Updates every table that has a gradient."""
        for name, weight in self._weights.items():
            if weight.grad is not None:
                # Through `.data`, unseen by autograd: FBGEMM's updates do not invalidate a graph either.
                weight.data.sub_(self._rates[name] * self._direction(name, weight, weight.grad.float()))

    def settings_now(self) -> dict[str, UpdateSettings]:
        """Returns the settings of each table's next update, by table name."""
        return {
            name: UpdateSettings(self._rates[name], 1 + int(self.state[weight].get(f"{name}.iter", 0)))
            for name, weight in self._weights.items()
        }

    def follow(self, settings: Mapping[str, UpdateSettings]) -> None:
        """Adopts another optimizer's settings, by table name, for the next update of each table."""
        for name, (rate, number) in settings.items():
            self._rates[name] = rate
            if (count := self.state[self._weights[name]].get(f"{name}.iter")) is not None:
                count.fill_(number - 1)

    def step(self, closure: Any = None) -> None:
        """Adopts the learning rates of ``param_groups``; the update itself happened in the backward pass."""
        for name, group in zip(self._weights, self.param_groups, strict=True):
            self._rates[name] = group["lr"]

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Does the same as `step`, like FBGEMM's fused optimizers: there are no gradients to clear."""
        self.step()

    def _direction(self, name: str, weight: Tensor, grad: Tensor) -> Tensor:
        kind, setting = self._kinds[name], self._settings[name]
        eps = setting["eps"]
        if kind == "sgd":
            return grad
        first = self.state[weight][f"{name}.momentum1"]
        if kind == "rowwise_adagrad":
            # FBGEMM's row-wise AdaGrad has one number per row, the mean over its columns.
            first.add_(grad.square().mean(dim=1))
            return _quotient(grad, (first.sqrt() + eps).unsqueeze(1), eps)
        if kind == "adagrad":
            first.add_(grad.square())
            return _quotient(grad, first.sqrt() + eps, eps)
        second, steps = (self.state[weight][f"{name}.{part}"] for part in ("momentum2", "iter"))
        steps += 1
        # A row that no rank's batch has read keeps weights and moments, as in FBGEMM's kernel.
        rows = grad.ne(0).any(dim=1, keepdim=True)
        beta1, beta2 = setting["beta1"], setting["beta2"]
        # No indexing by rows: it would make the host wait for the GPU.
        first.copy_(torch.where(rows, beta1 * first + (1 - beta1) * grad, first))
        second.copy_(torch.where(rows, beta2 * second + (1 - beta2) * grad.square(), second))
        mean = first / (1 - beta1 ** int(steps))
        root = (second / (1 - beta2 ** int(steps))).sqrt()
        return torch.where(rows, mean / (root + eps), 0.0)


def _quotient(grad: Tensor, root: Tensor, eps: float) -> Tensor:
    # With eps=0 a row that was never read is 0 / 0; FBGEMM does not visit it.
    return grad / root if eps else torch.where(grad == 0, grad, grad / root)
