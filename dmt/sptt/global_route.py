"""`GlobalIdRoute`: sends ids straight to the ranks that hold the tables, in one hop (SPTT steps a and c).

DMT (arXiv 2403.00877) section 3.1.3. The peer route (`dmt.sptt.peer_exchange.PeerIdRoute`) sends the ids of a feature
across the slow links once, this route once for each column shard of its table. From the lookup (step b) on, both routes
are the same, so their results are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrec.distributed.embedding_sharding import EmbeddingShardingContext, KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt.collectives import gather_objects
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.peer_exchange import PeerIdRoute, Pending
from dmt.sptt.tower_lookup import GroupShardedEBC

__all__ = ["GlobalIdRoute"]


class GlobalIdRoute(PeerIdRoute):
    """The global id route. Collective: every rank of the sharding group announces which features its lookups read."""

    def __init__(self, mesh: TowerMesh, collections: Sequence[GroupShardedEBC], note_rows: Any) -> None:
        lookups = [[tables for _, tables in collection.tables_by_lookup] for collection in collections]
        features = [[[f for table in tables for f in table.feature_names] for tables in own] for own in lookups]
        # A rank wants a feature once for each column shard that it holds; these copies make this route more expensive.
        wanted = [name for of_collection in features for of_lookup in of_collection for name in of_lookup]
        super().__init__(mesh.sharding_group, collections, note_rows, gather_objects(wanted, mesh.sharding_group))
        self.stagger, self._num_ranks = mesh.topology.num_towers, mesh.topology.ranks_per_tower
        self.peers = slice(mesh.local, None, self._num_ranks)
        self._counts = [[len(of_lookup) for of_lookup in of_collection] for of_collection in features]
        """Number of features of each lookup of each collection."""

    def carry_on(self, started: Any, ctx: Any) -> Awaitable[Awaitable[KJTList]]:
        """Splits the ids of a started exchange by lookup once they have arrived; they need no second hop."""
        sizes = KJTListSplitsAwaitable([started], ctx)

        def start() -> Awaitable[KeyedJaggedTensor]:
            pending = sizes.wait()

            def end() -> KeyedJaggedTensor:
                ids = pending.wait()[0]
                ctx.in_tower = self._by_collection(self._note_rows(ctx, ids), ctx)
                return ids

            return Pending(end)

        return KJTListSplitsAwaitable([Pending(start)], ctx)

    def _by_collection(self, ids: KeyedJaggedTensor, ctx: Any) -> list[tuple[Any, KJTList]]:
        batch_sizes, num_ranks = ctx.sharding_contexts[0].batch_size_per_rank, self._num_ranks
        assert ids.stride() == sum(batch_sizes), f"{ids.stride()} samples arrived from batches of {batch_sizes}"
        # In peer order, the samples of all peers of a rank of the tower are one block.
        served = [sum(batch_sizes[local::num_ranks]) for local in range(num_ranks)]
        # Each lookup reads its own features; on the peer route, TorchRec makes this split inside the tower.
        parts = iter(ids.split([count for of_collection in self._counts for count in of_collection]))
        in_tower = []
        for collection, of_collection in zip(self._collections, self._counts, strict=True):
            context = collection.create_context()
            context.sharding_contexts = [EmbeddingShardingContext(batch_size_per_rank=[*served]) for _ in of_collection]
            in_tower.append((context, KJTList([next(parts) for _ in of_collection])))
        return in_tower
