"""`DataParallelOptimizer`: updates rows that several ranks hold, such as those of data-parallel tables.

Data parallelism (Neo, arXiv 2104.05158, section 4) all-reduces a table's gradient instead of exchanging ids and
embeddings. TorchRec leaves such tables to the dense optimizer and drops their fused optimizer; here they are updated as
FBGEMM's fused kernels would, with the same settings, state and learning-rate schedule, so a table trains the same under
any scheme. Exceptions: FBGEMM updates a table once per forward pass, not once per backward pass, and its Adam differs
(see `DataParallelOptimizer`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchrec.optim.fused import FusedOptimizer

from dmt.errors import InputError
from dmt.sharding.optimizers import FUSED_DEFAULTS, data_parallel_obstacle, optimizer_name

__all__ = ["DataParallelOptimizer", "UpdateSettings", "blocks_of"]


class UpdateSettings(NamedTuple):
    """Settings of a table's update that change during training."""

    learning_rate: float
    number: int
    """Number of the update, starting at 1, for Adam's bias correction."""


_STATES = {"rowwise_adagrad": ("momentum1",), "adagrad": ("momentum1",), "adam": ("momentum1", "momentum2"), "sgd": ()}
# Numbers that one call updates: so few that what is computed on the way fits the cache of a CPU.
_MOST_NUMBERS = 2**18


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
        for name in weights:
            if obstacle := data_parallel_obstacle(settings[name]):
                remedy = "Change the table's optimizer settings, or use another scheme."
                raise InputError(f"Table {name!r} is data-parallel, but {obstacle}. {remedy}")
            kind = optimizer_name(settings[name]) or ""
            self._kinds[name], self._settings[name] = kind, {**FUSED_DEFAULTS, **settings[name]}
        self._rates = {name: setting["learning_rate"] for name, setting in self._settings.items()}
        self._shapes = {name: (weight.shape[0], weight.shape[1]) for name, weight in weights.items()}
        self._runs = _runs(weights, self._settings)
        state: dict[Any, dict[str, Tensor]] = {weight: {} for weight in weights.values()}
        for part in ("momentum1", "momentum2"):
            names = [name for name, kind in self._kinds.items() if part in _STATES[kind]]
            shapes = [self._shapes[name][: 1 if self._kinds[name] == "rowwise_adagrad" else 2] for name in names]
            sizes = [math.prod(shape) for shape in shapes]
            device = weights[names[0]].device if names else None
            # One after the other in memory, as the weights of a run are.
            moments = torch.zeros(sum(sizes), dtype=torch.float32, device=device).split(sizes)
            for name, moment, shape in zip(names, moments, shapes, strict=True):
                state[weights[name]][f"{name}.{part}"] = moment.view(shape)
                if part == "momentum2":  # Adam's
                    state[weights[name]][f"{name}.iter"] = torch.zeros((), dtype=torch.int64)
        groups = [{"params": [weight], "lr": self._rates[name]} for name, weight in weights.items()]
        super().__init__({f"embedding_bags.{name}.weight": w for name, w in weights.items()}, state, groups)

    @torch.no_grad()
    def update(self) -> None:
        """Updates every table that has a gradient."""
        now = self.settings_now()
        for (_, settings), names in groupby(self._weights, lambda name: (self._runs[name], now[name])):
            self._update(list(names), settings)

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

    def _update(self, names: Sequence[str], now: UpdateSettings) -> None:
        """Updates neighbours in a run by the same calls, of which thousands of tables would take thousands."""
        weight = self._weights[names[0]]
        if (grad := weight.grad) is None:
            return
        blocks = blocks_of([self._shapes[name] for name in names])
        size = sum(rows * columns for rows, columns in blocks)
        for name in names if self._kinds[names[0]] == "adam" else ():
            self.state[self._weights[name]][f"{name}.iter"] += 1
        direction = self._direction(names[0], grad.as_strided((size,), (1,)).float(), blocks, now.number)
        # Through `.data`, unseen by autograd: FBGEMM's updates do not invalidate a graph either.
        weight.data.as_strided((size,), (1,)).sub_(now.learning_rate * direction)

    def _direction(self, name: str, grad: Tensor, blocks: Sequence[tuple[int, int]], number: int) -> Tensor:
        """Returns the step, 1-D, of ``name`` and its neighbours for a rate of 1; updates their moments."""
        kind, setting, moments = self._kinds[name], self._settings[name], self.state[self._weights[name]]
        eps = setting["eps"]
        if kind == "sgd":
            return grad
        rows = [num_rows for num_rows, _ in blocks]
        first = moments[f"{name}.momentum1"].as_strided((sum(rows) if kind == "rowwise_adagrad" else len(grad),), (1,))
        if kind == "adagrad":
            return _quotient(grad, first.add_(grad.square()).sqrt() + eps, eps)
        parts = grad.split([num_rows * columns for num_rows, columns in blocks])
        tables = [part.view(shape) for part, shape in zip(parts, blocks, strict=True)]
        if kind == "rowwise_adagrad":
            # FBGEMM's row-wise AdaGrad has one number per row, the mean over its columns.
            first.add_(torch.cat([table.square().mean(dim=1) for table in tables]))
            pairs = zip(tables, (first.sqrt() + eps).split(rows), strict=True)
            parts = [_quotient(table, root.unsqueeze(1), eps).flatten() for table, root in pairs]
            return torch.cat(parts) if len(parts) > 1 else parts[0]
        second = moments[f"{name}.momentum2"].as_strided((len(grad),), (1,))
        # A row that no rank's batch has read keeps weights and moments, as in FBGEMM's kernel.
        is_read = torch.cat([table.ne(0).any(dim=1, keepdim=True).expand_as(table).flatten() for table in tables])
        beta1, beta2 = setting["beta1"], setting["beta2"]
        # No indexing by rows: it would make the host wait for the GPU.
        first.copy_(torch.where(is_read, beta1 * first + (1 - beta1) * grad, first))
        second.copy_(torch.where(is_read, beta2 * second + (1 - beta2) * grad.square(), second))
        mean = first / (1 - beta1**number)
        root = (second / (1 - beta2**number)).sqrt()
        return torch.where(is_read, mean / (root + eps), 0.0)


def blocks_of(shapes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merges tables [rows, columns] of equal width that lie one after the other; returns the shapes of the results."""
    return [(sum(rows for rows, _ in block), columns) for columns, block in groupby(shapes, itemgetter(1))]


def _runs(weights: Mapping[str, Tensor], settings: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Returns the number of each table's run: tables of equal settings that lie one after the other in memory."""
    runs: dict[str, int] = {}
    number, size, expected = 0, 0, None
    for name, weight in weights.items():
        storage, begin, like = weight.untyped_storage().data_ptr(), weight.storage_offset(), settings[name]
        if (storage, begin, like) != expected or size + weight.numel() > _MOST_NUMBERS:
            number, size = number + 1, 0
        runs[name] = number
        size, expected = size + weight.numel(), (storage, begin + weight.numel(), like)
    return runs


def _quotient(grad: Tensor, root: Tensor, eps: float) -> Tensor:
    # With eps=0 a row that was never read is 0 / 0; FBGEMM does not visit it.
    return grad / root if eps else torch.where(grad == 0, grad, grad / root)
