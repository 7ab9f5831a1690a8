"""What passes through a model in one forward pass, plain or sharded, under the same names: `Watch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import KeyedTensor

from dmt.training.data.batch import ClickBatch

__all__ = ["Seen", "Watch", "sparse_part"]


class Seen(NamedTuple):
    """Of one forward pass."""

    embeddings: dict[str, Tensor]
    """By feature. With towers: what goes into their modules on this rank, the samples of all its peers."""
    outputs: Tensor
    """[B, columns]: what comes out of the sparse part."""
    logits: Tensor
    """[B]."""


class Watch:
    """Keeps what passes through a model in its latest forward pass.

    The output exchange is waited for where it begins, so nothing overlaps; no bit depends on that.

    Args:
        model: a `ClickTask`, or one that is sharded.
        send: what becomes of the sparse part's output on its way to the dense parts, see `as_sent`.
    """

    def __init__(self, model: nn.Module, send: Callable[[Tensor], Tensor] | None = None) -> None:
        self._model = model
        self._send = send
        self._embeddings: dict[str, Tensor] = {}
        self._outputs = torch.empty(0)
        self._logits = torch.empty(0)
        sparse = sparse_part(model)
        for module in _tower_modules(sparse):
            module.register_forward_pre_hook(self._before_tower_module)
        sparse.register_forward_hook(self._after_sparse_part)

    @property
    def seen(self) -> Seen:
        """Of the latest batch."""
        return Seen(self._embeddings, self._outputs, self._logits)

    def run(self, batch: ClickBatch) -> Tensor:
        """The loss of a batch, with all else kept."""
        self._embeddings = {}
        loss, (self._logits, _, _) = self._model(batch)
        return loss

    def run_and_see(self, batch: ClickBatch) -> Seen:
        """What a batch shows, without gradients."""
        with torch.no_grad():
            self.run(batch)
        return self.seen

    def _before_tower_module(self, module: nn.Module, inputs: Any) -> None:
        self._embeddings |= {name: value.detach() for name, value in inputs[0].to_dict().items()}

    def _after_sparse_part(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        result = output.wait() if isinstance(output, LazyAwaitable) else output
        self._outputs = result.values() if isinstance(result, KeyedTensor) else result
        if isinstance(result, KeyedTensor):
            # By name: the order of the keys changes with the sharding.
            self._embeddings = {name: value.detach() for name, value in result.to_dict().items()}
        if self._send is None:
            return result
        sent = self._send(self._outputs)
        return KeyedTensor(result.keys(), result.length_per_key(), sent) if isinstance(result, KeyedTensor) else sent


def sparse_part(model: nn.Module) -> Any:
    """TorchRec's collection in a `ClickTask`, or what it became."""
    task: Any = model.module if isinstance(model, DistributedModelParallel) else model
    arch = task.model.sparse_arch
    return getattr(arch, "shards", arch)


def _tower_modules(sparse: Any) -> list[nn.Module]:
    if hasattr(sparse, "towers"):
        return [tower.interaction for tower in sparse.towers]
    if hasattr(sparse, "interactions"):
        return list(sparse.interactions.by_tower.values())
    return []
