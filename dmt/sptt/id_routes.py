"""Id routes of SPTT: `PeerIdRoute` through the peers (steps a and c in two hops), `GlobalIdRoute` in one hop.

DMT (arXiv 2403.00877) sections 3.1.1 and 3.1.3. The peer route sends ids to the peer in each tower; TorchRec's sharded
collection carries them on to the rank that holds the table or column shard, inside the tower; both hops belong to the
id exchange that a train pipeline starts one batch ahead. The global route needs one hop, and pays with a copy for every
column shard across the slow links. From the lookup (step b) on nothing differs, so both have the same bits.
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
from dmt.sptt.peer_exchange import Pending
from dmt.sptt.tower_lookup import GroupShardedEBC

__all__ = ["AgreedIds", "GlobalIdRoute", "IdExchange", "PeerIdRoute"]


class IdExchange(nn.Module):
    """Sends each feature's ids to the ranks of a group that want it (SPTT steps a and c; no gradient).

    ========= ==========================================================================================
    before    every rank: ids of all features for its own B samples
    after     every rank: the ids of the features that it wants, in the order in which it wants them, for
              the samples of all ranks of the group, in peer order. From the peer group they arrive so
              (DMT section 3.1.3, "virtual process group"); from the sharding group ``stagger`` sorts
              them by (local index, tower): the peer permute of step c, on ids, before the lookup
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
        # Kept on the device: made anew in each batch, a GPU would be waited for.
        order = torch.tensor(self._order, dtype=torch.int32, device=device)
        self.register_buffer("_order_tensor", order, persistent=False)

    def in_order(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns the ids of the features that each rank wants, one after the other."""
        return ids.permute(self._order, self._order_tensor)

    def forward(self, ids: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Starts the exchange of ids as of `in_order`; the first ``wait`` has the sizes, the second the ids.

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
        keys, values = ids.keys(), ids.values()
        # TorchRec's sharded lookups would apply weights where the unsharded module does not.
        weights = ids.weights_or_none() if self._is_weighted else None
        refusals = {
            "has a batch size of its own for each feature; towers need one for all.": ids.variable_stride_per_key(),
            f"has ids of {values.dtype}; ids must be torch.int32 or torch.int64.": values.dtype
            not in (torch.int32, torch.int64),
            "has no weights, but the bags are weighted.": self._is_weighted and weights is None,
            f"has features {keys}, but earlier ones had {self._keys}; keys and their order must stay.": self._keys
            not in ([], keys),
        }
        for message, is_refused in refusals.items():
            if is_refused:
                raise InputError(f"The batch {message}")
        parts = {"ids": values, "lengths": ids.lengths(), "weights": weights}
        dtypes = {name: None if part is None else part.dtype for name, part in parts.items()}
        if not self._keys:
            self._agree(keys, dtypes)
        for name, dtype in dtypes.items():
            if dtype != self._dtypes[name]:
                raise InputError(
                    f"The batch has {name} of {dtype}, but the first batch had {self._dtypes[name]}. Give all batches "
                    f"{name} of one dtype."
                )
        if weights is ids.weights_or_none():
            return ids
        return KeyedJaggedTensor(keys=keys, values=values, lengths=ids.lengths(), stride=ids.stride())

    def _agree(self, keys: list[str], dtypes: dict[str, torch.dtype | None]) -> None:
        # The first batch decides, since a plan does not know the keys' order nor dtypes.
        missing = [feature for feature in self._features if feature not in set(keys)]
        if missing:
            raise InputError(
                f"The batch lacks feature {missing[0]!r} ({len(missing)} missing, {len(keys)} present)."
                f"{did_you_mean(missing[0], keys)}"
            )
        # Bytes of another dtype would be read as other ids, or too few of them.
        check_agreement("The first batch", {f"dtype of {name}": dtype for name, dtype in dtypes.items()}, self._group)
        self._keys, self._dtypes = keys, dtypes


NoteRows = Callable[[Any, KeyedJaggedTensor], KeyedJaggedTensor]
"""Reads off ids that have arrived how many rows each peer sent; returns them with one batch size for all features."""


class PeerIdRoute:
    """The peer id route into the sharded collections of this rank's tower, which are one for each logical tower.

    ``wanted`` has the features of each tower, once.
    """

    peers = slice(None)
    """Positions of this rank's peers, in tower order, among the ranks that the ids cross."""

    def __init__(
        self,
        mesh: TowerMesh,
        collections: Sequence[GroupShardedEBC],
        note_rows: NoteRows,
        wanted: Sequence[Sequence[str]],
    ) -> None:
        self._mesh, self._collections, self._note_rows, self._wanted = mesh, collections, note_rows, wanted

    def exchange(self, input_features: Sequence[str], device: torch.device | None = None) -> IdExchange:
        """Makes the id exchange for batches with these keys."""
        return IdExchange(self._mesh.peer_group, self._wanted, input_features, device=device)

    def carry_on(self, started: Any, ctx: Any) -> Awaitable[Awaitable[KJTList]]:
        """Carries the ids of a started exchange on inside the tower (SPTT step a) once they have arrived.

        Train pipelines wait for sizes between the forward and the backward pass of the batch before, then for ids. When
        sizes are waited for, the ids of the first hop have arrived, and those of the second go on their way.
        """
        first = KJTListSplitsAwaitable([started], ctx).wait()

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

            return Pending(end)

        return KJTListSplitsAwaitable([Pending(start)], ctx)

    def has_arrived(self, ctx: Any) -> bool:
        """Returns whether the exchange of a batch was waited for: the second hop has left its ids in the context."""
        return bool(ctx.in_tower)

    def look_up(self, ctx: Any, dist_input: KJTList) -> list[Any]:
        """Starts lookups and the exchange of partial embeddings inside the tower (SPTT steps b, d, e).

        Returns for each collection a lazy ``KeyedTensor`` [sum of the peers' B, columns], peers in tower order.
        """
        collections = zip(self._collections, ctx.in_tower, strict=True)
        return [collection.compute_and_output_dist(*of_collection) for collection, of_collection in collections]


class GlobalIdRoute(PeerIdRoute):
    """The global id route: every rank of the sharding group says, once, what its lookups read. Collective."""

    def __init__(self, mesh: TowerMesh, collections: Sequence[GroupShardedEBC], note_rows: NoteRows) -> None:
        lookups = [[tables for _, tables in collection.tables_by_lookup] for collection in collections]
        features = [[[f for table in tables for f in table.feature_names] for tables in own] for own in lookups]
        # Column shards make a rank want a feature more than once: the copies that this route pays with.
        wanted = [name for of_collection in features for of_lookup in of_collection for name in of_lookup]
        super().__init__(mesh, collections, note_rows, gather_objects(wanted, mesh.sharding_group))
        self.peers = slice(mesh.local, None, mesh.topology.ranks_per_tower)
        self._counts = [[len(of_lookup) for of_lookup in of_collection] for of_collection in features]
        """Features of each lookup of each collection."""

    def exchange(self, input_features: Sequence[str], device: torch.device | None = None) -> IdExchange:
        """Makes the id exchange for batches with these keys."""
        group, num_towers = self._mesh.sharding_group, self._mesh.topology.num_towers
        return IdExchange(group, self._wanted, input_features, stagger=num_towers, device=device)

    def carry_on(self, started: Any, ctx: Any) -> Awaitable[Awaitable[KJTList]]:
        """The ids need no second hop."""
        return KJTListSplitsAwaitable([started], ctx)

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
        # Each lookup reads its own features; in the peer route TorchRec splits them inside the tower.
        parts = iter(ids.split([count for of_collection in self._counts for count in of_collection]))
        pending = []
        for collection, of_collection in zip(self._collections, self._counts, strict=True):
            context = collection.create_context()
            context.sharding_contexts = [EmbeddingShardingContext(batch_size_per_rank=[*served]) for _ in of_collection]
            pending.append(collection.compute_and_output_dist(context, KJTList([next(parts) for _ in of_collection])))
        return pending
