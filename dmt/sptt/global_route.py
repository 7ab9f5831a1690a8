"""`GlobalIdRoute`: ids straight to the ranks that hold the tables, in one hop (SPTT steps a and c).

DMT (arXiv 2403.00877) section 3.1.3. Where the peer route (`dmt.sptt.tower_lookup.PeerIdRoute`) crosses the slow links
once for each feature, this one crosses them once for each of its column shards. From the lookup (step b) on nothing
differs, so both have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext, KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable

from dmt.collectives import gather_objects
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.peer_exchange import IdExchange
from dmt.sptt.tower_lookup import GroupShardedEBC, NoteRows, PeerIdRoute

__all__ = ["GlobalIdRoute"]


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
