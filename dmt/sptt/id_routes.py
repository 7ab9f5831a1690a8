"""Id routes of SPTT: `PeerIdRoute` through the peers (steps a and c in two hops), `GlobalIdRoute` in one hop.

DMT (arXiv 2403.00877) sections 3.1.1 and 3.1.3; docs/towers.md follows one batch through all steps. A route sends the
ids of a batch to the ranks that hold the tables. From the lookup (step b) on nothing differs, so the results of both
have the same bits.

The peer route, the default, sends ids to the own peer in each tower (`PeerInputDist`); TorchRec's sharded collection
carries them on to the rank that holds the table or column shard, inside the tower; both hops belong to the id exchange
that a train pipeline starts one batch ahead. The global route needs one hop (`GlobalInputDist`), and pays with a copy
for every column shard across the slow links.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext, KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt.collectives import check_agreement, gather_objects
from dmt.errors import InputError, did_you_mean
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.tower_lookup import GroupShardedEBC

__all__ = ["AgreedIds", "Deferred", "GlobalIdRoute", "GlobalInputDist", "PeerIdRoute", "PeerInputDist"]


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

        A feature may have several keys, one after the other, and each key a batch size of its own.
        """
        num = len(ids.keys()) // max(1, sum(self._sizes))
        # Not an attribute called _dist: under that name TorchRec's train pipeline would put off the exchange of sizes.
        return KJTAllToAll(self._group, [size * num for size in self._sizes])(ids)


class AgreedIds:
    """Keys and dtypes of a batch's ids, which ranks agree on in the first batch and later batches must have."""

    def __init__(self, features: Sequence[str], *, is_weighted: bool, group: dist.ProcessGroup) -> None:
        self._features, self._is_weighted, self._group = list(features), is_weighted, group
        self._keys: list[str] = []
        self._dtypes: list[torch.dtype | None] = []

    def checked(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns the ids in the agreed dtypes, without weights unless the bags are weighted; collective at first.

        Raises:
            InputError: a feature is missing, weights are missing, ids are no int32 or int64, or int64 where the first
                batch had int32, or the batch size varies by feature.
        """
        self._check(ids)
        # TorchRec's sharded lookups would apply weights where the unsharded module does not.
        weights = ids.weights_or_none() if self._is_weighted else None
        dtypes = [None if part is None else part.dtype for part in (ids.values(), ids.lengths(), weights)]
        if not self._keys:
            names = (f"dtype of {part}" for part in ("ids", "lengths", "weights"))
            # Bytes of another dtype would be read as other ids, or too few of them.
            check_agreement("The first batch", dict(zip(names, dtypes, strict=True)), self._group)
            self._keys, self._dtypes = ids.keys(), dtypes
        if dtypes == self._dtypes and weights is ids.weights_or_none():
            return ids
        of_ids, of_lengths, of_weights = self._dtypes
        if (ids.values().dtype, of_ids) == (torch.int64, torch.int32):
            raise InputError(
                "The batch has ids of torch.int64, but the first batch had torch.int32, in which ids above 2^31 would "
                "become others. Give all batches ids of one dtype."
            )
        return KeyedJaggedTensor(
            keys=ids.keys(),
            values=ids.values().to(of_ids),
            lengths=ids.lengths().to(of_lengths),
            weights=None if weights is None else weights.to(of_weights),
            stride=ids.stride(),
        )

    def _check(self, ids: KeyedJaggedTensor) -> None:
        if ids.variable_stride_per_key():
            raise InputError(
                "The batch size varies by feature (variable stride KeyedJaggedTensor); towers need one batch size "
                "for all features."
            )
        if ids.values().dtype not in (torch.int32, torch.int64):
            raise InputError(f"The batch has ids of {ids.values().dtype}; ids must be torch.int32 or torch.int64.")
        if self._is_weighted and ids.weights_or_none() is None:
            raise InputError("The bags are weighted, but the KeyedJaggedTensor has no weights.")
        if self._keys and ids.keys() != self._keys:
            raise InputError(
                f"The batch has features {ids.keys()}, but earlier ones had {self._keys}; the keys and their order "
                "must stay."
            )
        known = set(ids.keys()) if not self._keys else set(self._features)
        if missing := [feature for feature in self._features if feature not in known]:
            raise InputError(
                f"The batch lacks feature {missing[0]!r} ({len(missing)} missing, {len(known)} present)."
                f"{did_you_mean(missing[0], known)}"
            )


class Deferred(Awaitable[Any]):
    """A result that is made when it is waited for, by ``make``; one that makes another is waited for twice."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self._make = make

    def _wait_impl(self) -> Any:
        return self._make()


NoteRows = Callable[[Any, KeyedJaggedTensor], KeyedJaggedTensor]
"""Reads off ids that have arrived how many rows each peer sent; returns them with one batch size for all features."""


class PeerIdRoute:
    """The peer id route into the sharded collections of this rank's tower; each tower has its features once."""

    peers = slice(None)
    """Positions of this rank's peers, in tower order, among the ranks that the ids cross."""

    def __init__(
        self, mesh: TowerMesh, collections: Sequence[GroupShardedEBC], features_by_tower: Sequence[Sequence[str]]
    ) -> None:
        self._mesh = mesh
        self._collections = collections
        self._features_by_tower = features_by_tower

    def exchange(self, input_features: Sequence[str], device: torch.device | None = None) -> PeerInputDist:
        """Makes the id exchange for batches with these keys, see `PeerInputDist`."""
        return PeerInputDist(self._mesh.peer_group, self._features_by_tower, input_features, device)

    def carry_on(self, started: Any, ctx: Any, note_rows: NoteRows) -> Awaitable[Awaitable[KJTList]]:
        """Carries the ids of a started exchange on inside the tower (SPTT step a) once they have arrived.

        The result is waited for twice, like one of TorchRec's exchanges: for sizes, then for ids. Train pipelines do
        the first between the forward and the backward pass of the batch before. The ids of the first hop have arrived
        by then, and those of the second are on their way in the backward pass.
        """
        first = KJTListSplitsAwaitable([started], ctx).wait()

        @torch.no_grad()
        def start() -> Awaitable[KeyedJaggedTensor]:
            ids_P = first.wait()[0]
            pending = self._start_in_tower(note_rows(ctx, ids_P))

            def end() -> KeyedJaggedTensor:
                ctx.in_tower = [(context, request.wait()) for context, request in pending]
                return ids_P

            return Deferred(end)

        return KJTListSplitsAwaitable([Deferred(start)], ctx)

    def has_arrived(self, ctx: Any) -> bool:
        """Returns whether the exchange of a batch was waited for."""
        return bool(ctx.in_tower)

    def look_up(self, ctx: Any, dist_input: KJTList, note_rows: NoteRows) -> list[Any]:
        """Starts lookup and exchange of partial embeddings inside the tower (SPTT steps b, d, e).

        The ids are in the context, where the second hop has left them. Result as of `GlobalIdRoute.look_up`.
        """
        collections = zip(self._collections, ctx.in_tower, strict=True)
        return [collection.compute_and_output_dist(*of_collection) for collection, of_collection in collections]

    def _start_in_tower(self, ids_P: KeyedJaggedTensor) -> list[tuple[Any, Awaitable[KJTList]]]:
        """Returns for each collection its context, and its ids; sizes are known already."""
        contexts = [collection.create_context() for collection in self._collections]
        started = [own.input_dist(context, ids_P) for own, context in zip(self._collections, contexts, strict=True)]
        return [(context, request.wait()) for context, request in zip(contexts, started, strict=True)]


class GlobalInputDist(nn.Module):
    """Sends ids straight to the ranks that hold the tables or shards (SPTT steps a and c, global route; no gradient).

    ========= ==================================================================
    before    every rank: ids of all features for its own B samples
    after     every rank: the ids of the features it wants, in the order it
              wants them, for the samples of all ranks of the group in *peer
              order*: sorted by (local index, tower), so the samples that one
              rank of the tower serves for its peers are contiguous
    ========= ==================================================================

    A feature goes to every rank that wants it, once for each time it is wanted (column shards). The peer permute works
    on ids, before the lookup (DMT section 3.1.3, "step b and step c can be swapped"), and is done by the permutation
    that unpacks the exchange anyway: ``stagger`` of TorchRec's all-to-all.

    Args:
        group: the sharding group; rank (tower, local) of it is tower * ranks_per_tower + local.
        wanted: features that every rank of the group wants, in the order its lookups read.
        input_features: keys of the batch, the order the ids arrive in; may hold more features than are used.
        num_towers: T.
        device: where the bookkeeping tensors live.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        wanted: Sequence[Sequence[str]],
        input_features: Sequence[str],
        *,
        num_towers: int,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.input_features = list(input_features)
        position = {feature: i for i, feature in enumerate(input_features)}
        self._order = [position[feature] for of_rank in wanted for feature in of_rank]
        order = torch.tensor(self._order, dtype=torch.int32, device=device)
        self.register_buffer("_order_tensor", order, persistent=False)
        # TorchRec's train pipeline looks for an attribute of this name and type to fuse the split exchanges.
        self._dist = KJTAllToAll(group, [len(of_rank) for of_rank in wanted], stagger=num_towers)

    def forward(self, ids: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Starts the exchange; the first ``wait`` has the sizes, the second the ids."""
        return self._dist(ids.permute(self._order, self._order_tensor))


class GlobalIdRoute:
    """The global id route into the sharded collections of this rank's tower.

    Every rank of the sharding group says, once, which features its lookups read in which order. Collective over the
    group. Collections are one for each logical tower, in the same order on all ranks of the tower.
    """

    def __init__(self, mesh: TowerMesh, collections: Sequence[GroupShardedEBC]) -> None:
        self._mesh = mesh
        self._collections = collections
        features = [
            [[name for table in tables for name in table.feature_names] for _, tables in collection.tables_by_lookup]
            for collection in collections
        ]
        mine = [name for of_collection in features for of_lookup in of_collection for name in of_lookup]
        self._wanted = gather_objects(mine, mesh.sharding_group)
        self._counts = [[len(of_lookup) for of_lookup in of_collection] for of_collection in features]
        """Features of each lookup of each collection."""
        self.peers = slice(mesh.local, None, mesh.topology.ranks_per_tower)
        """Positions of this rank's peers, in tower order, among the ranks of the sharding group."""

    def exchange(self, input_features: Sequence[str], device: torch.device | None = None) -> GlobalInputDist:
        """Makes the id exchange for batches with these keys, see `GlobalInputDist`."""
        num_towers = self._mesh.topology.num_towers
        return GlobalInputDist(
            self._mesh.sharding_group, self._wanted, input_features, num_towers=num_towers, device=device
        )

    def carry_on(self, started: Any, ctx: Any, note_rows: NoteRows) -> Awaitable[Awaitable[KJTList]]:
        """Returns the started exchange: there is one hop."""
        return KJTListSplitsAwaitable([started], ctx)

    def has_arrived(self, ctx: Any) -> bool:
        """Returns whether the exchange of a batch was waited for."""
        return bool(ctx.sharding_contexts[0].output_splits)

    def look_up(self, ctx: Any, dist_input: KJTList, note_rows: NoteRows) -> list[Any]:
        """Starts lookups and the exchange of partial embeddings inside the tower (SPTT steps b, d, e).

        Returns for each collection a lazy ``KeyedTensor`` [sum of the peers' B, columns], peers in tower order.
        """
        ids, batch_sizes = note_rows(ctx, dist_input[0]), ctx.sharding_contexts[0].batch_size_per_rank
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
