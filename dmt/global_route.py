"""`GlobalIdRoute`: ids straight to the ranks that hold the tables, in one exchange over the sharding group.

DMT (arXiv 2403.00877) sections 3.1.1 and 3.1.3; `dmt.walkthrough` follows one batch through all steps. The peer route
sends ids to the own peer in each tower first and lets TorchRec's exchange inside the tower carry them on; this route
needs one hop, and pays with a copy for every column shard and a length for every row shard across the slow links:

======  ==================================================================  ==============  =====================
step    what                                                                group           who does it
======  ==================================================================  ==============  =====================
a       ids of each feature to the rank that holds the table or shard       sharding        `IdsToOwners`
c       peer permute, on ids: blocks of samples from rank into peer order   -               `IdsToOwners`
b       lookup                                                              -               FBGEMM
d, e    partial embeddings to the tower's ranks                             tower           TorchRec's sharded EBC
======  ==================================================================  ==============  =====================

From step b on nothing differs from the peer route, so every result is bitwise the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt._torchrec import LookupTable, lookup_tables
from dmt.collectives import IdsToOwners, WantedIds, gather_objects
from dmt.errors import InputError
from dmt.exchange import route_obstacle
from dmt.mesh import TowerMesh

__all__ = ["GlobalIdRoute"]


class GlobalIdRoute:
    """The global id route into the sharded collections of this rank's tower.

    The owners are asked: every rank of the sharding group says, once, which ids its lookups read in which order.
    Collective over the sharding group; a table that cannot be served is refused on all its ranks.

    Args:
        mesh: the groups.
        embeddings: the sharded collections of this rank's tower, one for each logical tower, in the same order on all
            ranks of the tower.

    Raises:
        InputError: a table is data-wise, or row-wise with mean pooling; names it and its tower.
    """

    def __init__(self, mesh: TowerMesh, embeddings: Iterable[ShardedEmbeddingBagCollection]) -> None:
        self._mesh = mesh
        self._embeddings = list(embeddings)
        lookups = [lookup_tables(embedding) for embedding in self._embeddings]
        self._num_features = [[sum(len(t.features) for t in tables) for tables in of_one] for of_one in lookups]
        tables = [table for of_one in lookups for of_lookup in of_one for table in of_lookup]
        fault = next((f"Table {t.name!r} in tower {mesh.tower} {why}" for t in tables if (why := _refusal(t))), None)
        wanted = [WantedIds(feature, table.row_starts) for table in tables for feature in table.features]
        # Faults travel with the wishes, so that no rank is left waiting for one that has raised.
        answers = gather_objects((wanted, fault), mesh.sharding_group)
        for _, found in answers:
            if found is not None:
                raise InputError(found)
        self._wanted: list[list[WantedIds]] = [wishes for wishes, _ in answers]

    def exchange(self, input_features: Sequence[str], device: torch.device | None = None) -> IdsToOwners:
        """The id exchange for batches with these keys.

        Args:
            input_features: keys of the batch, in its order; may hold more features than are used.
            device: where the bookkeeping tensors live.
        """
        return IdsToOwners(
            self._mesh.sharding_group,
            self._wanted,
            input_features,
            num_towers=self._mesh.topology.num_towers,
            device=device,
        )

    @property
    def peers(self) -> slice:
        """Where this rank's peers, in tower order, stand among the ranks of the sharding group."""
        return slice(self._mesh.local, None, self._mesh.topology.ranks_per_tower)

    def look_up(self, ids: KeyedJaggedTensor, batch_sizes: Sequence[int]) -> list[Any]:
        """Starts lookups and the exchange of partial embeddings inside the tower (SPTT steps b, d, e).

        Args:
            ids: what `exchange` delivered to this rank.
            batch_sizes: B of every rank of the sharding group.

        Returns:
            For each collection a lazy ``KeyedTensor`` [sum of the peers' B, columns], peers in tower order.
        """
        num_ranks = self._mesh.topology.ranks_per_tower
        assert ids.stride() == sum(batch_sizes), f"{ids.stride()} samples arrived from batches of {batch_sizes}"
        # Peer order: every rank of the tower serves one block, the samples of all its peers.
        served = [sum(batch_sizes[local::num_ranks]) for local in range(num_ranks)]
        parts = iter(ids.split([count for of_one in self._num_features for count in of_one]))
        pending = []
        for embedding, counts in zip(self._embeddings, self._num_features, strict=True):
            context = embedding.create_context()
            context.sharding_contexts = [EmbeddingShardingContext(batch_size_per_rank=list(served)) for _ in counts]
            pending.append(embedding.compute_and_output_dist(context, KJTList([next(parts) for _ in counts])))
        return pending


def _refusal(table: LookupTable) -> str | None:
    """Why the global route cannot serve a table, and what to do about it."""
    obstacle = route_obstacle("global", table.scheme, "MEAN" if table.is_mean else "SUM")
    if not obstacle:
        return None
    pooling = " with mean pooling" if table.is_mean else ""
    return f"is {table.scheme}{pooling}, but {obstacle}. Use id_route='peer', or another scheme for this table."
