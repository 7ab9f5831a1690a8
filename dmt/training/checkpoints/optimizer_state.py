"""`MaterializedState`: makes optimizer state before the first step, since a checkpoint is read into live tensors."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter

__all__ = ["MaterializedState"]


class MaterializedState:
    """Makes the state that PyTorch's optimizers and schedules have only after a step, such as Adam's moments.

    If state is missing, takes a step with gradients of zero and puts the weights back, since weight decay moves them
    even so. Tables are not touched: their state exists from the beginning.

    Args:
        optimizer: of all parameters.
    """

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        self._optimizer = optimizer
        self._before: list[tuple[MutableMapping[Any, Any], dict[Any, Any]]] = []
        states = optimizer.state
        if all(parameter in states for parameter in optimizer.params.values()):
            return
        parts = optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else [("", optimizer)]
        for _, part in parts:
            state: Any = part.state
            self._before.append((state, dict(state)))
        dense = list(_dense_parameters(optimizer))
        kept = [(parameter.detach().clone(), parameter.grad) for parameter in dense]
        for parameter in dense:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        with torch.no_grad():
            for parameter, (weight, gradient) in zip(dense, kept, strict=True):
                parameter.copy_(weight)
                parameter.grad = gradient

    def undo(self) -> None:
        """Removes the state that was made."""
        for state, before in self._before:
            state.clear()
            state.update(before)
        self._optimizer.post_load_state_dict()


def _dense_parameters(optimizer: KeyedOptimizer) -> Iterator[Tensor]:
    unsharded = ((name, p) for name, p in optimizer.params.items() if not isinstance(p, ShardedTensor))
    for _, parameter in in_backward_optimizer_filter(unsharded):
        # A schedule keeps its count under an empty parameter.
        if parameter.requires_grad and parameter.numel():
            yield parameter
