"""`OutsideCollectionSharder`: keeps the tables of features outside towers on every rank, in a model of towers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torchrec.distributed.types import ParameterSharding
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dmt.plan.tables import feature_names
from dmt.plan.towers import TowerPlan
from dmt.sptt.flat import ShardedSPTTEmbeddingBagCollection, SPTTEmbeddingBagCollectionSharder
from dmt.sptt.group_sharded import table_configs
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.sharder import TowerSharder

__all__ = ["OutsideCollectionSharder"]


def _make(
    sharder: TowerSharder[Any],
    module: EmbeddingBagCollection,
    sharding: Mapping[str, ParameterSharding],
    device: torch.device | None,
) -> ShardedSPTTEmbeddingBagCollection:
    """Makes the sharded module: one tower of one rank, replicated on every rank, so that it sends no ids or outputs."""
    plan = TowerPlan.from_lists([dict.fromkeys(feature_names(table_configs(module)))])
    alone = SPTTEmbeddingBagCollectionSharder(sharder.mesh.outside_towers(), plan, fused_params=sharder.fused_params)
    made = ShardedSPTTEmbeddingBagCollection(alone, module, sharding, device)
    made.before_lookup = None  # every step averages the gradients, so these replicas need no `ReplicaSync`
    return made


class OutsideCollectionSharder(TowerSharder[EmbeddingBagCollection]):
    """Keeps all tables of an ``EmbeddingBagCollection`` on every rank (Neo, section 4, "Data parallelism").

    Use it for features outside towers, beside an ``EmbeddingTowerCollection``: ids and embeddings stay on their rank,
    and the gradients of the tables are averaged over all ranks of the job. For a flat model, the plan of
    `SPTTEmbeddingBagCollectionSharder` names such features instead.

    Args:
        mesh: the process groups of this job.
        fused_params: settings of FBGEMM's fused optimizer, see `dmt.sptt.sharder.TowerSharder`.

    Example::

        sharders = [TowerCollectionSharder(mesh), OutsideCollectionSharder(mesh)]
        plan = TowerShardingPlanner(mesh.topology).plan(model, sharders)
        model = DistributedModelParallel(model, plan=plan, sharders=sharders)
    """

    module_type: type[EmbeddingBagCollection] = EmbeddingBagCollection
    """The unsharded module type."""
    sharded_type = staticmethod(_make)

    def __init__(self, mesh: TowerMesh, *, fused_params: dict[str, Any] | None = None) -> None:
        super().__init__(mesh, fused_params=fused_params)

    def tables_by_tower(self, module: EmbeddingBagCollection) -> list[list[Any]]:
        """Returns an empty list for each mesh tower: no tower holds a table of the collection."""
        return [[] for _ in range(self.mesh.topology.num_towers)]

    def outside_tables(self, module: EmbeddingBagCollection) -> list[Any]:
        """Returns the table configs of the whole collection."""
        return table_configs(module)
