"""Optimizer state that comes with the first step, made before there is one: a checkpoint is read into what is there."""

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

    A step with gradients of zero is taken where state is missing, and weights are put back: weight decay moves them
    even so. Tables are not touched, their state is there from the beginning.

    Args:
        optimizer: of everything.
    """

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        self._optimizer = optimizer
        self._before: list[tuple[MutableMapping[Any, Any], dict[Any, Any]]] = []
        states = optimizer.state
        if all(parameter in states for parameter in optimizer.params.values()):
            return
        parts = optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else [("", optimizer)]
        for _, part in parts:
            of_part: Any = part.state
            self._before.append((of_part, dict(of_part)))
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
        """Takes away what was made."""
        for state, before in self._before:
            state.clear()
            state.update(before)
        self._optimizer.post_load_state_dict()


def _dense_parameters(optimizer: KeyedOptimizer) -> Iterator[Tensor]:
    whole = ((name, p) for name, p in optimizer.params.items() if not isinstance(p, ShardedTensor))
    for _, parameter in in_backward_optimizer_filter(whole):
        # A schedule keeps its count under an empty parameter.
        if parameter.requires_grad and parameter.numel():
            yield parameter
