"""`SPTTEmbeddingBagCollectionSharder`: the tower dataflow for a flat model, with no change to the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor
from torchrec.distributed.types import Awaitable, ParameterSharding
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedTensor

from dmt.errors import InputError, check_instance
from dmt.plan.tables import feature_names
from dmt.plan.towers import TowerPlan
from dmt.sptt.dataflow import SPTTContext, SPTTModule
from dmt.sptt.group_sharded import table_configs
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.peer_exchange import Pending, Piece, Rows, TowerOutput
from dmt.sptt.rows import part_sizes
from dmt.sptt.sharder import HomeTable, SharderSettings, TowerSharder
from dmt.sptt.tower_lookup import GroupShardedEBC, in_order, output_keys

__all__ = ["SPTTEmbeddingBagCollectionSharder", "ShardedSPTTEmbeddingBagCollection"]


class ShardedSPTTEmbeddingBagCollection(SPTTModule):
    """A rank's share of its mesh tower's tables, and tables outside; made by `SPTTEmbeddingBagCollectionSharder`.

    State is keyed as in the unsharded collection, ``embedding_bags.<table>.weight``.
    """

    def __init__(
        self,
        sharder: SPTTEmbeddingBagCollectionSharder,
        module: EmbeddingBagCollection,
        sharding: Mapping[str, ParameterSharding],
        device: torch.device | None = None,
    ) -> None:
        tables, outside = sharder.tables_by_tower(module), sharder.outside_tables(module)
        groups = [[[feature] for feature in dict.fromkeys(feature_names(of_tower))] for of_tower in tables]
        super().__init__(
            sharder,
            input_groups=groups,
            is_weighted=module.is_weighted(),
            device=device,
            outside=feature_names(outside),
        )
        number = {feature: i for i, (feature,) in enumerate(groups[self.mesh.tower])}
        self._groups = {
            name: number[feature]
            for table in tables[self.mesh.tower]
            for feature in table.feature_names
            for name in (feature, f"{feature}@{table.name}")
        }
        schemes = {name: of_table.sharding_type for name, of_table in sharding.items()}
        self.home_tables = {
            table.name: HomeTable(
                config=table,
                scheme=schemes[table.name],
                settings=sharder.kernel_settings(module.embedding_bags[table.name].weight, schemes[table.name]),
                is_outside=of_tower is outside,
            )
            for of_tower in (*tables, outside)
            for table in of_tower
        }
        """All tables of the collection by name, in towers and outside."""
        self.elsewhere = tuple(f"embedding_bags.{name}." for name in self.home_tables)  # own ones are never unknown
        self._keys = output_keys(table_configs(module))
        in_tower = _sub_collection(module, tables[self.mesh.tower])
        self.local_parts.append(sharder.shard_in_tower(in_tower, sharding, device))
        self.build_route()
        self._outside: GroupShardedEBC | None = None
        if outside:
            # After the route, which serves tables of towers only.
            part, alone = _sub_collection(module, outside), self.mesh.outside_towers()
            self._outside = sharder.shard_in_tower(part, sharding, device, mesh=alone)
            self.local_parts.append(self._outside)

    def tower_output(self, embeddings_PN: Sequence[KeyedTensor], rows: Rows) -> TowerOutput:
        """Returns this tower's embeddings unchanged, in the column order of the sharded collection: [P, N], O = N."""
        names, widths = embeddings_PN[0].keys(), embeddings_PN[0].length_per_key()
        pieces = list(zip(names, widths, strict=True))
        return TowerOutput(embeddings_PN[0].values(), pieces, [self._groups[name] for name in names])

    def columns(self, ctx: SPTTContext, exchanges: Sequence[Awaitable[Any]]) -> Sequence[Awaitable[Tensor]]:
        """Returns for each part an awaitable of [samples, columns]: those of all towers, then those outside them."""
        arriving = super().columns(ctx, exchanges)
        if self._outside is None:
            return arriving
        # The towers' columns are in flight meanwhile.
        context = self._outside.create_context()
        ids = self._outside.input_dist(context, ctx.ids_B).wait().wait()
        outside_B: Tensor = self._outside.compute_and_output_dist(context, ids).values()
        blocks = outside_B.split(part_sizes(len(outside_B), len(arriving)))
        return [Pending(_beside, part, block) for part, block in zip(arriving, blocks, strict=True)]

    def result(self, columns_BS: Tensor, pieces: Sequence[Piece]) -> KeyedTensor:
        """Returns a ``KeyedTensor`` [B, columns] with the keys of the unsharded collection, in the same order."""
        if self._outside is not None:
            pieces = [*pieces, *self._outside.output_columns]
        return in_order(KeyedTensor([key for key, _ in pieces], [n for _, n in pieces], columns_BS), self._keys)


class SPTTEmbeddingBagCollectionSharder(TowerSharder[EmbeddingBagCollection]):
    """Shards any ``EmbeddingBagCollection`` over towers by the SPTT dataflow (DMT section 3.1), without tower modules.

    The result is a ``KeyedTensor`` [B, columns] with the unsharded collection's keys, in the same order; bags that are
    averaged or in row-wise tables may differ by rounding.

    Args:
        mesh: the process groups of this job.
        plan: assigns the features of the model's collections to mesh towers. Every rank holds the tables of features
            outside towers; their gradients are averaged over all ranks. On GPUs, all ranks must use the results of the
            collections in the same order.
        settings: ``fused_params``, ``id_route``, ``peer_precision``, ``moment_scale`` and ``unique``, see
            `dmt.sptt.sharder.TowerSharder`.

    Raises:
        InputError: ``plan`` is not a `TowerPlan` or has more or fewer towers than the mesh, or a setting is refused.

    Example::

        sharders = [SPTTEmbeddingBagCollectionSharder(mesh, TowerPlan.load("towers.json"))]
        plan = TowerShardingPlanner(mesh.topology).plan(model, sharders)
        model = DistributedModelParallel(model, plan=plan, sharders=sharders)
    """

    module_type: type[EmbeddingBagCollection] = EmbeddingBagCollection
    """The unsharded module type."""
    sharded_type = ShardedSPTTEmbeddingBagCollection

    def __init__(self, mesh: TowerMesh, plan: TowerPlan, **settings: Unpack[SharderSettings]) -> None:
        super().__init__(mesh, **settings)
        check_instance("plan", plan, TowerPlan)
        if plan.num_towers != mesh.topology.num_towers:
            raise InputError(
                f"The tower plan has {plan.num_towers} towers, but the topology has "
                f"num_towers={mesh.topology.num_towers}. Change the plan or the topology."
            )
        self.plan = plan

    def tables_by_tower(self, module: EmbeddingBagCollection) -> list[list[Any]]:
        """Returns the table configs of each mesh tower; raises `InputError` if the plan does not fit the module."""
        return self.plan.tables_by_tower(table_configs(module), partly=True)

    def outside_tables(self, module: EmbeddingBagCollection) -> list[Any]:
        """Returns the table configs of features that the plan puts outside towers."""
        return self.plan.outside_tables(table_configs(module))


def _beside(columns: Awaitable[Tensor], others: Tensor) -> Tensor:
    return torch.cat([columns.wait(), others], dim=1)


def _sub_collection(module: EmbeddingBagCollection, tables: list[Any]) -> EmbeddingBagCollection:
    """Returns a collection of some tables of ``module``, which shares their parameters.

    The parameters must be the same objects: ``apply_optimizer_in_backward`` stores each table's optimizer as an
    attribute on them, and new parameters would silently train with the default optimizer.
    """
    part = EmbeddingBagCollection(tables=tables, device=torch.device("meta"), is_weighted=module.is_weighted())
    for table in tables:
        part.embedding_bags[table.name] = module.embedding_bags[table.name]
    return part
