"""Id routes of SPTT: `PeerIdRoute` through the peers (steps a and c in two hops), `GlobalIdRoute` in one hop.

DMT (arXiv 2403.00877) sections 3.1.1 and 3.1.3; docs/towers.md follows one batch through all steps. A route sends the
ids of a batch to the ranks that hold the tables. From the lookup (step b) on nothing differs, so the results of both
have the same bits.

The peer route, the default, sends ids to the own peer in each tower; TorchRec's sharded collection carries them on to
the rank that holds the table or column shard, inside the tower; both hops belong to the id exchange that a train
pipeline starts one batch ahead. The global route needs one hop, and pays with a copy for every column shard across the
slow links.
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

__all__ = ["AgreedIds", "Deferred", "GlobalIdRoute", "IdExchange", "PeerIdRoute"]


class IdExchange(nn.Module):
    """Sends each feature's ids to the ranks of a group that want it (SPTT steps a and c; no gradient).

    ========= ==========================================================================================
    before    every rank: ids of all features for its own B samples
    after     every rank: the ids of the features that it wants, in the order in which it wants them, for
              the samples of all ranks of the group. Of the peer group (peer route) they come in peer
              order, so the explicit peer permute of DMT section 3.1.1, step c, disappears (section
              3.1.3, "virtual process group"). Of the sharding group (global route) ``stagger`` puts
              them in *peer order*, sorted by (local index, tower): the peer permute, on ids, before the
              lookup (section 3.1.3, "step b and step c can be swapped")
    ========= ==========================================================================================

    Args:
        group: the ranks.
        wanted: features that every rank of the group wants; one may be wanted more than once (column shards).
        input_features: keys of the batch, in the order of its ids; may hold more features than are used.
        stagger: T for the sharding group, whose rank (tower, local) is tower * ranks_per_tower + local; else 1.
        device: of the permutation.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        wanted: Sequence[Sequence[str]],
        input_features: Sequence[str],
        *,
        stagger: int = 1,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._group, self._stagger = group, stagger
        self._sizes = [len(of_rank) for of_rank in wanted]
        position = {feature: i for i, feature in enumerate(input_features)}
        self._order = [position[feature] for of_rank in wanted for feature in of_rank]
        order = torch.tensor(self._order, dtype=torch.int32, device=device)
        self.register_buffer("_order_tensor", order, persistent=False)

    def forward(self, ids: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Starts the exchange; the first ``wait`` has the sizes, the second the ids."""
        return self.send(self.in_order(ids))

    def in_order(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns the ids of the features that each rank wants, one after the other."""
        return ids.permute(self._order, self._order_tensor)

    def send(self, ids: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Starts the exchange of ids as of `in_order`.

        A feature may have several keys, one after the other, and each key a batch size of its own.
        """
        num = len(ids.keys()) // max(1, sum(self._sizes))
        # Not an attribute called _dist: under that name TorchRec's train pipeline would put off the exchange of sizes.
        return KJTAllToAll(self._group, [size * num for size in self._sizes], stagger=self._stagger)(ids)


class AgreedIds:
    """Keys and dtypes of a batch's ids, which ranks agree on in the first batch and later batches must have."""

    def __init__(self, features: Sequence[str], *, is_weighted: bool, group: dist.ProcessGroup) -> None:
        self._features, self._is_weighted, self._group = list(features), is_weighted, group
        self._keys: list[str] = []
        self._dtypes: dict[str, torch.dtype | None] = {}

    def checked(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns the ids, without weights unless the bags are weighted; collective at first.

        Raises:
            InputError: a feature is missing, weights are missing, ids are no int32 or int64, keys or dtypes differ
                from those of the first batch, or the batch size varies by feature.
        """
        self._check(ids)
        # TorchRec's sharded lookups would apply weights where the unsharded module does not.
        weights = ids.weights_or_none() if self._is_weighted else None
        parts = {"ids": ids.values(), "lengths": ids.lengths(), "weights": weights}
        dtypes = {name: None if part is None else part.dtype for name, part in parts.items()}
        if not self._keys:
            # Bytes of another dtype would be read as other ids, or too few of them.
            named = {f"dtype of {name}": dtype for name, dtype in dtypes.items()}
            check_agreement("The first batch", named, self._group)
            self._keys, self._dtypes = ids.keys(), dtypes
        for name, dtype in dtypes.items():
            if dtype != self._dtypes[name]:
                raise InputError(
                    f"The batch has {name} of {dtype}, but the first batch had {self._dtypes[name]}. Give all batches "
                    f"{name} of one dtype."
                )
        if weights is ids.weights_or_none():
            return ids
        return KeyedJaggedTensor(keys=ids.keys(), values=ids.values(), lengths=ids.lengths(), stride=ids.stride())

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
        known = set(ids.keys())
        missing = [] if self._keys else [feature for feature in self._features if feature not in known]
        if missing:
            raise InputError(
                f"The batch lacks feature {missing[0]!r} ({len(missing)} missing, {len(ids.keys())} present)."
                f"{did_you_mean(missing[0], ids.keys())}"
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


class IdRoute:
    """A route into the sharded collections of this rank's tower, which are one for each logical tower.

    ``has_arrived`` returns whether the exchange of a batch was waited for. ``look_up`` starts lookups and the exchange
    of partial embeddings inside the tower (SPTT steps b, d, e), and returns for each collection a lazy ``KeyedTensor``
    [sum of the peers' B, columns], peers in tower order.
    """

    group: dist.ProcessGroup
    """Ranks that the ids cross."""
    wanted: Sequence[Sequence[str]]
    """Features that each of them is sent."""
    peers = slice(None)
    """Positions of this rank's peers, in tower order, among them."""
    stagger = 1

    def __init__(self, mesh: TowerMesh, collections: Sequence[GroupShardedEBC], note_rows: NoteRows) -> None:
        self._mesh, self._collections, self._note_rows = mesh, collections, note_rows

    def exchange(self, input_features: Sequence[str], device: torch.device | None = None) -> IdExchange:
        """Makes the id exchange for batches with these keys."""
        return IdExchange(self.group, self.wanted, input_features, stagger=self.stagger, device=device)

    def carry_on(self, started: Any, ctx: Any) -> Awaitable[Awaitable[KJTList]]:
        """Carries the ids of a started exchange on to the ranks that look them up; waited for twice, like TorchRec's.

        Train pipelines wait for the sizes between the forward and the backward pass of the batch before, then for ids.
        """
        return KJTListSplitsAwaitable([started], ctx)


class PeerIdRoute(IdRoute):
    """The peer id route; each tower has its features once, ``features_by_tower``."""

    def __init__(
        self,
        mesh: TowerMesh,
        collections: Sequence[GroupShardedEBC],
        note_rows: NoteRows,
        features_by_tower: Sequence[Sequence[str]],
    ) -> None:
        super().__init__(mesh, collections, note_rows)
        self.group, self.wanted = mesh.peer_group, features_by_tower

    def carry_on(self, started: Any, ctx: Any) -> Awaitable[Awaitable[KJTList]]:
        """Carries the ids on inside the tower (SPTT step a) once they have arrived.

        When sizes are waited for, the ids of the first hop have arrived, and those of the second go on their way.
        """
        first = super().carry_on(started, ctx).wait()

        @torch.no_grad()
        def start() -> Awaitable[KeyedJaggedTensor]:
            ids_P = first.wait()[0]
            in_tower = self._note_rows(ctx, ids_P)
            contexts = [collection.create_context() for collection in self._collections]
            by_collection = list(zip(self._collections, contexts, strict=True))
            # Sizes of all collections cross before any of them is waited for.
            sizes = [collection.input_dist(context, in_tower) for collection, context in by_collection]
            pending = [of_collection.wait() for of_collection in sizes]

            def end() -> KeyedJaggedTensor:
                ctx.in_tower = [(context, ids.wait()) for context, ids in zip(contexts, pending, strict=True)]
                return ids_P

            return Deferred(end)

        return KJTListSplitsAwaitable([Deferred(start)], ctx)

    def has_arrived(self, ctx: Any) -> bool:
        """Returns whether the second hop has left its ids in the context."""
        return bool(ctx.in_tower)

    def look_up(self, ctx: Any, dist_input: KJTList) -> list[Any]:
        """Looks up the ids that are in the context, where the second hop has left them."""
        collections = zip(self._collections, ctx.in_tower, strict=True)
        return [collection.compute_and_output_dist(*of_collection) for collection, of_collection in collections]


class GlobalIdRoute(IdRoute):
    """The global id route: every rank of the sharding group says, once, what its lookups read. Collective."""

    def __init__(self, mesh: TowerMesh, collections: Sequence[GroupShardedEBC], note_rows: NoteRows) -> None:
        super().__init__(mesh, collections, note_rows)
        features = [
            [[name for table in tables for name in table.feature_names] for _, tables in collection.tables_by_lookup]
            for collection in collections
        ]
        self.group, self.stagger = mesh.sharding_group, mesh.topology.num_towers
        own_wanted = [name for of_collection in features for of_lookup in of_collection for name in of_lookup]
        self.wanted = gather_objects(own_wanted, self.group)
        self.peers = slice(mesh.local, None, mesh.topology.ranks_per_tower)
        self._counts = [[len(of_lookup) for of_lookup in of_collection] for of_collection in features]
        """Features of each lookup of each collection."""

    def has_arrived(self, ctx: Any) -> bool:
        """Returns whether the sizes that arrived are in the context."""
        return bool(ctx.sharding_contexts[0].output_splits)

    def look_up(self, ctx: Any, dist_input: KJTList) -> list[Any]:
        """Looks up the ids of each lookup."""
        ids, batch_sizes = self._note_rows(ctx, dist_input[0]), ctx.sharding_contexts[0].batch_size_per_rank
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
