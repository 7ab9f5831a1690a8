"""Every collective of the library, each one small function or module.

Legend: T towers, L ranks per tower, B the local batch, F_t features of tower t, O_t its output columns.
"peers" are the T ranks with one local index; their batches meet on each of them, one tower per peer.

TorchRec's KJT all-to-all moves ids, PyTorch's collectives and its sends and receives everything else. What we add is
the group as an explicit argument, the batch size of every peer, and a profiler range with one spelling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext, bucketize_kjt_before_all2all
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = [
    "IdsToOwners",
    "IdsToTowers",
    "PendingExchange",
    "RowWiseOutputs",
    "WantedIds",
    "broadcast_module",
    "broadcast_tensor",
    "gather_objects",
    "gather_parts",
    "ranks_that_differ",
    "scatter_sum",
    "start_exchange",
    "start_mean",
    "start_sum",
    "sum_over_ranks",
]


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


class RowWiseOutputs(nn.Module):
    """Reduce-scatter of partial sums inside a tower (SPTT step d of row-wise tables) for batches of any sizes.

    ========= ==================================================================================================
    before    every rank: [sum over ranks of B, columns], partial sums of the rows it holds, for the samples of all
    after     every rank: [B, columns], whole sums for its own samples
    backward  all-gather of the gradients, divided by the group size (TorchRec's gradient division)
    ========= ==================================================================================================

    Blocks of unequal size are padded with zeros to the largest and cut again: gloo's all-gather takes equal parts only.

    Args:
        exchange: TorchRec's output exchange of row-wise tables.
        rank: this rank in the group.
    """

    def __init__(self, exchange: nn.Module, rank: int) -> None:
        super().__init__()
        self._exchange = exchange
        self._rank = rank

    def forward(self, partial_sums: Tensor, sharding_ctx: EmbeddingShardingContext) -> Awaitable[Tensor]:
        """Starts the exchange; the context has the batch size of every rank."""
        sizes = sharding_ctx.batch_size_per_rank
        if len(set(sizes)) <= 1:
            return self._exchange(partial_sums, sharding_ctx)
        largest = max(sizes)
        padded = [nn.functional.pad(part, (0, 0, 0, largest - len(part))) for part in partial_sums.split(sizes)]
        even = EmbeddingShardingContext(batch_size_per_rank=[largest] * len(sizes))
        return _FirstRows(self._exchange(torch.cat(padded), even), sizes[self._rank])


class _FirstRows(Awaitable[Tensor]):
    def __init__(self, awaitable: Awaitable[Tensor], rows: int) -> None:
        super().__init__()
        self._awaitable = awaitable
        self._rows = rows

    def _wait_impl(self) -> Tensor:
        return self._awaitable.wait()[: self._rows]


def broadcast_tensor(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Gives every rank of the group the first one's tensor, in place."""
    dist.broadcast(tensor, group=group, group_src=0)


def broadcast_module(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Gives every rank of the group the first one's parameters and buffers, in place."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            broadcast_tensor(tensor, group)


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


def start_sum(value: Tensor, group: dist.ProcessGroup) -> Any:
    """Starts the sum of a tensor over the group, in place; ``wait()`` of what is returned ends it."""
    return dist.all_reduce(value, group=group, async_op=True)


class PendingExchange:
    """What `start_exchange` has begun; keeps the tensors alive."""

    def __init__(self, works: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        self._works = works
        self._tensors = tensors

    @property
    def is_done(self) -> bool:
        """Whether it has been waited for."""
        return not self._tensors

    def wait(self) -> None:
        """Returns when all has arrived and all is sent."""
        for work in self._works:
            work.wait()
        self._works, self._tensors = (), ()


def start_exchange(
    sent: Sequence[Tensor], arriving: Sequence[Tensor], group: dist.ProcessGroup, *, tag: int = 0
) -> PendingExchange:
    """Starts to send a tensor to each rank of the group and to receive one from each; empty ones and one's own stay.

    All ranks of the group must start their exchanges of one tag in one order. What is returned must be kept until it
    has been waited for.

    Args:
        sent: by group rank; contiguous, unchanged until the end.
        arriving: by group rank; contiguous, of the size and dtype that the other one sends.
        group: the ranks.
        tag: of the messages; NCCL knows none.
    """
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    # Receives first: a gloo rank that is asked late sends late.
    wanted: list[tuple[Any, Tensor, int]] = [(dist.irecv, arriving[rank], rank) for rank in others]
    wanted += [(dist.isend, sent[rank], rank) for rank in others]
    calls = [
        dist.P2POp(call, part, group=group, group_peer=rank, tag=tag) for call, part, rank in wanted if part.numel()
    ]
    return PendingExchange(dist.batch_isend_irecv(calls) if calls else [], [*sent, *arriving])


def scatter_sum(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns this rank's part of the sum of a tensor over the group: [n] -> [n / size], parts in group order."""
    if group.size() == 1:
        return value.clone()
    part = value.new_empty(value.numel() // group.size())
    dist.reduce_scatter_tensor(part, value, group=group)
    return part


def gather_parts(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the parts of all ranks one after the other: [n] -> [n * size], the same on every rank."""
    if group.size() == 1:
        return part
    whole = part.new_empty(part.numel() * group.size())
    dist.all_gather_into_tensor(whole, part, group=group)
    return whole


def start_mean(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Any:
    """Starts the mean of tensors of one dtype over the group, in place and in one collective; ``wait()`` ends it."""
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
    return group.allreduce_coalesced(list(tensors), options)


def sum_over_ranks(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the sum of a tensor over the group, on every rank; the argument is left alone."""
    total = value.detach().clone().contiguous()
    dist.all_reduce(total, group=group)
    return total


class WantedIds(NamedTuple):
    """What a rank asks the others for: the ids of one feature, all of them or those of its row shard."""

    feature: str
    """The feature."""
    row_starts: tuple[int, ...] = ()
    """First row of each of the tower's row shards, then the number of rows; empty: all ids, whatever their row."""


class IdsToOwners(nn.Module):
    """Sends ids straight to the ranks that hold the tables or shards (SPTT steps a and c, global route; no gradient).

    ========= ==================================================================
    before    every rank: ids of all features for its own B samples
    after     every rank: the ids it wants, features in the order it wants them,
              for the samples of all ranks of the group in *peer order*: sorted by
              (local index, tower), so the samples that one rank of the tower
              serves for its peers are contiguous
    ========= ==================================================================

    A feature goes to every rank that wants it, once for each time it is wanted (column shards). Ids of row-wise tables
    go to the rank that holds their row, counted from its first row; a bag that is spread over ranks keeps its order on
    each of them. The peer permute works on ids, before the lookup (DMT section 3.1.3, "step b and step c can be
    swapped"), and is done by the permutation that unpacks the exchange anyway: ``stagger`` of TorchRec's all-to-all.

    Args:
        group: the sharding group; rank (tower, local) of it is tower * ranks_per_tower + local.
        wanted: what every rank of the group wants, in the order its lookups read.
        input_features: keys of the batch, the order the ids arrive in; may hold more features than are used.
        num_towers: T.
        device: where the bookkeeping tensors live.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        wanted: Sequence[Sequence[WantedIds]],
        input_features: Sequence[str],
        *,
        num_towers: int,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._ranks_per_tower = len(wanted) // num_towers
        position = {feature: i for i, feature in enumerate(input_features)}
        everything = [(rank % self._ranks_per_tower, w) for rank, of_rank in enumerate(wanted) for w in of_rank]
        cut = list(dict.fromkeys(w for _, w in everything if w.row_starts))
        # Whole features first, then bucket after bucket the features that are cut by rows.
        whole = list(dict.fromkeys(w.feature for _, w in everything if not w.row_starts)) if cut else input_features
        place: dict[tuple[int, WantedIds], int] = {
            (bucket, w): len(whole) + bucket * len(cut) + i
            for bucket in range(self._ranks_per_tower)
            for i, w in enumerate(cut)
        }
        place_whole = {feature: i for i, feature in enumerate(whole)}
        order = [place[bucket, w] if w.row_starts else place_whole[w.feature] for bucket, w in everything]

        def indices(name: str, values: list[int]) -> list[int]:
            self.register_buffer(name, torch.tensor(values, dtype=torch.int32, device=device), persistent=False)
            return values

        self._order = indices("_order_tensor", order)
        self._whole = indices("_whole_tensor", [position[f] for f in whole] if cut else [])
        self._cut = indices("_cut_tensor", [position[w.feature] for w in cut])
        self._row_starts = [torch.tensor(w.row_starts, device=device) for w in cut]
        # Not read where row starts are given, but FBGEMM wants them.
        self._blocks = torch.ones(len(cut), dtype=torch.int64, device=device)
        # TorchRec's train pipeline looks for an attribute of this name and type to fuse the split exchanges.
        self._dist = KJTAllToAll(group, [len(of_rank) for of_rank in wanted], stagger=num_towers)

    def forward(self, ids: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Starts the exchange; the first ``wait`` has the sizes, the second the ids."""
        with torch.profiler.record_function("## dmt:ids_to_owners ##"):
            if self._cut:
                buckets, _ = bucketize_kjt_before_all2all(
                    ids.permute(self._cut, self._cut_tensor),
                    num_buckets=self._ranks_per_tower,
                    block_sizes=self._blocks,
                    block_bucketize_row_pos=self._row_starts,
                )
                whole = [ids.permute(self._whole, self._whole_tensor)] if self._whole else []
                ids = KeyedJaggedTensor.concat([*whole, buckets])
            return self._dist(ids.permute(self._order, self._order_tensor))
