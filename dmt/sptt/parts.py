"""The rows of micro-batches: how many each has, ids brought into their order, and results that arrive in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt.sptt.results import CachedAwaitable

__all__ = ["ResultInParts", "in_micro_batch_order", "micro_batch_sizes"]


def micro_batch_sizes(batch_size: int, num: int) -> list[int]:
    """Samples of each micro-batch, the first ones one larger where it does not divide; any may be 0.

    Example:
        >>> micro_batch_sizes(10, 4), micro_batch_sizes(1, 2)
        ([3, 3, 2, 2], [1, 0])
    """
    small, rest = divmod(batch_size, num)
    return [small + 1] * rest + [small] * (num - rest)


def in_micro_batch_order(ids: KeyedJaggedTensor, batch_sizes: Sequence[int], num: int) -> KeyedJaggedTensor:
    """Samples of all peers, peer by peer, into the order (micro-batch, peer), so that a micro-batch is contiguous rows.

    As with the peer permute, ids are permuted rather than the embeddings looked up with them (DMT section 3.1.3).

    Args:
        ids: of sum(batch_sizes) samples.
        batch_sizes: B of every peer.
        num: micro-batches.

    Example:
        >>> ids = KeyedJaggedTensor(keys=["f"], values=torch.arange(5), lengths=torch.ones(5, dtype=torch.int64))
        >>> in_micro_batch_order(ids, [2, 3], 2).values().tolist()  # samples 0 1 | 2 3 4 -> 0 2 3 | 1 4
        [0, 2, 3, 1, 4]
    """
    num_samples = sum(batch_sizes)
    blocks = torch.arange(num_samples).split([size for b in batch_sizes for size in micro_batch_sizes(b, num)])
    order = torch.cat([block for k in range(num) for block in blocks[k::num]])
    starts = torch.arange(len(ids.keys())).unsqueeze(1) * num_samples
    bags = (starts + order).flatten().to(device=ids.device(), dtype=torch.int32)
    lengths, values, weights = torch.ops.fbgemm.permute_1D_sparse_data(
        bags, ids.lengths(), ids.values(), ids.weights_or_none(), ids.values().numel()
    )
    return KeyedJaggedTensor(keys=ids.keys(), values=values, weights=weights, lengths=lengths, stride=num_samples)


class ResultInParts(CachedAwaitable):
    """The rows of a result in several exchanges, all under way; used as a whole, or part by part.

    Args:
        exchanges: awaitables of [B of the micro-batch, columns], in order.
        finish: turns [B, columns] into the result.
    """

    def __init__(self, exchanges: Sequence[Any], finish: Callable[[Tensor], Any]) -> None:
        super().__init__(_Rows([CachedAwaitable(exchange) for exchange in exchanges]), finish)
        self._parts = self._awaitable.parts
        self._finish_part = finish

    @property
    def num_parts(self) -> int:
        """How many there are."""
        return len(self._parts)

    def part(self, number: int) -> CachedAwaitable:
        """The result of one micro-batch."""
        return CachedAwaitable(self._parts[number], self._finish_part)


class _Rows:
    def __init__(self, parts: Sequence[CachedAwaitable]) -> None:
        self.parts = parts

    def wait(self) -> Tensor:
        return torch.cat([part.wait() for part in self.parts])
