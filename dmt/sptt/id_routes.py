"""Id routes of SPTT: `PeerIdRoute` through the peers (steps a and c in two hops), `GlobalIdRoute` in one hop.

DMT (arXiv 2403.00877) sections 3.1.1 and 3.1.3; docs/sptt.md follows one batch through all steps. A route sends the
ids of a batch to the ranks that hold the tables. From the lookup (step b) on nothing differs, so the results of both
have the same bits.

The peer route, the default, sends ids to the own peer in each tower (`PeerInputDist`); TorchRec's sharded collection
carries them on to the rank that holds the table or column shard, inside the tower; both hops belong to the id exchange
that a train pipeline starts one batch ahead. The global route needs one hop (`GlobalInputDist`), and pays with a copy
for every column shard and a length for every row shard across the slow links.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext, bucketize_kjt_before_all2all
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt.collectives import gather_objects
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.tower_lookup import GroupShardedEBC, row_starts

__all__ = [
    "Deferred",
    "GlobalIdRoute",
    "GlobalInputDist",
    "PeerIdRoute",
    "PeerInputDist",
    "WantedIds",
    "exchange_keys",
]


class PeerInputDist(nn.Module):
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
        input_features: keys of the batch, in the order of its ids; may hold more features than are used.
        device: of the permutation.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        features_by_tower: Sequence[Sequence[str]],
        input_features: Sequence[str],
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.input_features = list(input_features)
        position = {feature: i for i, feature in enumerate(input_features)}
        self._order = [position[f] for features in features_by_tower for f in features]
        self.register_buffer(
            "_order_tensor", torch.tensor(self._order, dtype=torch.int32, device=device), persistent=False
        )
        self._group, self._sizes = group, [len(features) for features in features_by_tower]

    def forward(self, ids: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Starts the exchange; the first ``wait`` has the sizes, the second the ids."""
        return self.send(self.by_tower(ids))

    def by_tower(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns the ids of each tower's features one after the other."""
        return ids.permute(self._order, self._order_tensor)

    def send(self, ids: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Starts the exchange of ids in the order of `by_tower`.

        Each feature may have a batch size of its own, and as many keys as there are micro-batches.
        """
        return exchange_keys(self._group, self._sizes, ids)


def exchange_keys(
    group: dist.ProcessGroup, sizes: Sequence[int], ids: KeyedJaggedTensor
) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
    """Starts TorchRec's exchange of ids, rank by rank, of ``sizes`` features for each rank of the group.

    Features have one key or several, one after the other.
    """
    # Not an attribute called _dist: under that name TorchRec's train pipeline would put off the exchange of the sizes.
    num = len(ids.keys()) // max(1, sum(sizes))
    started: Awaitable[Awaitable[KeyedJaggedTensor]] = KJTAllToAll(group, [size * num for size in sizes])(ids)
    return started


class PeerIdRoute:
    """The peer id route into the sharded collections of this rank's tower; each tower has its features once."""

    peers = slice(None)
    """Positions of this rank's peers, in tower order, among the ranks that the ids cross."""
    num_hops = 2
    """Id exchanges one after the other: that of `exchange`, and that of `start`."""

    def __init__(
        self, mesh: TowerMesh, collections: Sequence[GroupShardedEBC], features_by_tower: Sequence[Sequence[str]]
    ) -> None:
        self._mesh = mesh
        self._collections = collections
        self._features_by_tower = features_by_tower

    def exchange(self, input_features: Sequence[str], device: torch.device | None = None) -> PeerInputDist:
        """Makes the id exchange for batches with these keys, see `PeerInputDist`."""
        return PeerInputDist(self._mesh.peer_group, self._features_by_tower, input_features, device)

    def start(self, ids: KeyedJaggedTensor) -> list[tuple[Any, Awaitable[KJTList]]]:
        """Starts the exchange of the tower's ids inside the tower (SPTT step a).

        Returns for each collection its context, and its ids; sizes are known already.
        """
        contexts = [collection.create_context() for collection in self._collections]
        started = [own.input_dist(context, ids) for own, context in zip(self._collections, contexts, strict=True)]
        return [(context, request.wait()) for context, request in zip(contexts, started, strict=True)]

    def look_up(self, ids: Sequence[tuple[Any, KJTList]], batch_sizes: Sequence[int]) -> list[Any]:
        """Starts lookup and exchange of partial embeddings inside the tower (SPTT steps b, d, e).

        Result and ``batch_sizes`` are those of `GlobalIdRoute.look_up`; ``ids`` are what `start` started, arrived.
        """
        collections = zip(self._collections, ids, strict=True)
        return [collection.compute_and_output_dist(*of_collection) for collection, of_collection in collections]


class Deferred(Awaitable[Any]):
    """A result that is made when it is waited for, by ``make``.

    One that makes another is an id exchange of two hops in the place of one of TorchRec's, which is waited for twice:
    for sizes, then for ids. Train pipelines do the first between the forward and the backward pass of the batch before.
    The ids of the first hop have arrived by then, and those of the second are on their way in the backward pass.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self._make = make

    def _wait_impl(self) -> Any:
        return self._make()


class WantedIds(NamedTuple):
    """Ids that a rank asks the others for: those of one feature, all of them or those of its row shard."""

    feature: str
    """The feature."""
    row_starts: tuple[int, ...] = ()
    """First row of each of the tower's row shards, then the number of rows; empty: all ids, whatever their row."""


class GlobalInputDist(nn.Module):
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
        wanted: ids that every rank of the group wants, in the order its lookups read.
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
        self.input_features = list(input_features)
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


class GlobalIdRoute:
    """The global id route into the sharded collections of this rank's tower.

    Every rank of the sharding group says, once, which ids its lookups read in which order. Collective over the group.
    Collections are one for each logical tower, in the same order on all ranks of the tower.
    """

    num_hops = 1
    """Id exchanges one after the other."""

    def __init__(self, mesh: TowerMesh, collections: Sequence[GroupShardedEBC]) -> None:
        self._mesh = mesh
        self._collections = collections
        self._wanted = gather_objects(self._wanted_ids(), mesh.sharding_group)
        self._counts = [
            [sum(len(table.feature_names) for table in tables) for _, tables in collection.tables_by_lookup]
            for collection in collections
        ]
        """Features of each lookup of each collection."""
        self.peers = slice(mesh.local, None, mesh.topology.ranks_per_tower)
        """Positions of this rank's peers, in tower order, among the ranks of the sharding group."""

    def exchange(self, input_features: Sequence[str], device: torch.device | None = None) -> GlobalInputDist:
        """Makes the id exchange for batches with these keys, see `GlobalInputDist`."""
        num_towers = self._mesh.topology.num_towers
        return GlobalInputDist(
            self._mesh.sharding_group, self._wanted, input_features, num_towers=num_towers, device=device
        )

    def look_up(self, ids: KeyedJaggedTensor, batch_sizes: Sequence[int]) -> list[Any]:
        """Starts lookups and the exchange of partial embeddings inside the tower (SPTT steps b, d, e).

        ``batch_sizes`` is B of every rank of the sharding group. Returns for each collection a lazy ``KeyedTensor``
        [sum of the peers' B, columns], peers in tower order.
        """
        num_ranks = self._mesh.topology.ranks_per_tower
        assert ids.stride() == sum(batch_sizes), f"{ids.stride()} samples arrived from batches of {batch_sizes}"
        # Peer order: every rank of the tower serves one block, the samples of all its peers.
        served = [sum(batch_sizes[local::num_ranks]) for local in range(num_ranks)]
        parts = iter(ids.split([count for of_collection in self._counts for count in of_collection]))
        pending = []
        for collection, of_collection in zip(self._collections, self._counts, strict=True):
            context = collection.create_context()
            context.sharding_contexts = [EmbeddingShardingContext(batch_size_per_rank=[*served]) for _ in of_collection]
            pending.append(collection.compute_and_output_dist(context, KJTList([next(parts) for _ in of_collection])))
        return pending

    def _wanted_ids(self) -> list[WantedIds]:
        lookups = [lookup for collection in self._collections for lookup in collection.tables_by_lookup]
        return [
            WantedIds(feature, tuple(row_starts(table)) if scheme == "row_wise" else ())
            for scheme, tables in lookups
            for table in tables
            for feature in table.feature_names
        ]
