"""Every collective of the library, each one small function or module.

Legend: T towers, L ranks per tower, B the local batch, F_t features of tower t, O_t its output columns.
"peers" are the T ranks with one local index; their batches meet on each of them, one tower per peer.

Nothing here is a collective of our own: TorchRec's KJT and pooled all-to-alls move the bytes. What we add is the
group as an explicit argument, the batch size of every peer, and a profiler range with one spelling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.dist_data import KJTAllToAll, PooledEmbeddingsAllToAll
from torchrec.distributed.types import Awaitable, QuantizedCommCodecs
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["IdsToTowers", "OutputsToPeers", "broadcast_module", "gather_objects", "ranks_that_differ", "sum_over_ranks"]


class IdsToTowers(nn.Module):
    """Sends each feature's ids to the peer whose tower owns the feature (SPTT step a, peer route; no gradient).

    ========= ==================================================================
    before    every peer: ids of all features for its own B samples
    after     every peer: ids of its tower's F_t features for the samples of all
              peers, in peer order (so the explicit peer permute of DMT section
              3.1.1, step c, disappears: section 3.1.3, "virtual process group")
    ========= ==================================================================

    Args:
        group: the peer group.
        features_by_tower: for each tower (rank of the group) the features it owns.
        input_features: keys of the batch, the order the ids arrive in; may hold more features than are used.
        device: where the permutation lives.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        features_by_tower: Sequence[Sequence[str]],
        input_features: Sequence[str],
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        position = {feature: i for i, feature in enumerate(input_features)}
        self._order = [position[f] for features in features_by_tower for f in features]
        self.register_buffer(
            "_order_tensor", torch.tensor(self._order, dtype=torch.int32, device=device), persistent=False
        )
        # TorchRec's train pipeline looks for an attribute of this name and type to fuse the split exchanges.
        self._dist = KJTAllToAll(group, [len(features) for features in features_by_tower])

    def forward(self, ids: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Starts the exchange; the first ``wait`` has the sizes, the second the ids."""
        with torch.profiler.record_function("## dmt:ids_to_towers ##"):
            return self._dist(ids.permute(self._order, self._order_tensor))


class OutputsToPeers(nn.Module):
    """Returns each peer's rows of this tower's output to it (SPTT step f); differentiable.

    ========= ==================================================================
    before    every peer: [sum over peers of B, O_t], its tower's columns for the samples of all peers
    after     every peer: [B, sum over towers of O_t], all columns for its own samples,
              towers in peer order
    backward  the transposed exchange, divided by the group size T (TorchRec's gradient division): with the
              mean over the tower group that follows, gradients are means over the ranks of the job
    ========= ==================================================================

    Args:
        group: the peer group.
        output_sizes: O_t for each tower (rank of the group).
        device: where the bookkeeping tensors live.
        codecs: TorchRec's quantised communication, forward and backward; None sends as is.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        output_sizes: Sequence[int],
        device: torch.device | None = None,
        codecs: QuantizedCommCodecs | None = None,
    ) -> None:
        super().__init__()
        self._exchange = PooledEmbeddingsAllToAll(group, list(output_sizes), device, codecs=codecs)

    def forward(self, outputs: Tensor, batch_sizes: Sequence[int]) -> Awaitable[Tensor]:
        """Starts the exchange.

        Args:
            outputs: [sum(batch_sizes), O_t].
            batch_sizes: B of every peer, in group order; they may differ.
        """
        # gloo's all-to-all reads a strided tensor as if it were contiguous, so never hand it a view.
        with torch.profiler.record_function("## dmt:outputs_to_peers ##"):
            return self._exchange(outputs.contiguous(), list(batch_sizes))


def broadcast_module(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Gives every rank of the group the first one's parameters and buffers, in place."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor, group=group, group_src=0)


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Collects one small picklable object from every rank of the group, by group rank."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def ranks_that_differ(value: Any, group: dist.ProcessGroup) -> list[int]:
    """Compares a small picklable object over the group; returns the global ranks whose one differs from the first's."""
    values = gather_objects(value, group)
    ranks = dist.get_process_group_ranks(group)
    return [rank for rank, other in zip(ranks, values, strict=True) if other != values[0]]


def sum_over_ranks(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the sum of a tensor over the group, on every rank; the argument is left alone."""
    total = value.detach().clone().contiguous()
    dist.all_reduce(total, group=group)
    return total
