"""`TowerShardingPlanner`: from a model and its sharders to the ``ShardingPlan`` that DistributedModelParallel takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)

from dmt.errors import InputError, nearest
from dmt.placement import Scheme, TablePlacement, place_tables, table_shards
from dmt.topology import TowerTopology

__all__ = ["TowerShardingPlanner", "parameter_sharding"]


class TowerShardingPlanner:
    """Plans where each table lives inside its tower.

    Needs no process group: every rank computes the same plan. Ranks in it are local to the tower (0..L-1), so one plan
    serves every tower and replica; the sharders turn them into global ranks.

    Args:
        topology: the mesh sizes.
        scheme: one of `SCHEMES`, or ``"auto"`` (see `place_tables`).
        pinned: placements decided by the user, by table name.
        device_type: ``"cpu"`` or ``"cuda"``.
    """

    def __init__(
        self,
        topology: TowerTopology,
        *,
        scheme: Scheme | Literal["auto"] = "auto",
        pinned: Mapping[str, TablePlacement] | None = None,
        device_type: str = "cpu",
    ) -> None:
        self.topology = topology
        self.scheme = scheme
        self.pinned = dict(pinned or {})
        self.device_type = device_type

    def plan(self, model: nn.Module, sharders: Sequence[Any]) -> ShardingPlan:
        """Plans every module of ``model`` that one of the tower sharders handles.

        Args:
            model: the unsharded model.
            sharders: `TowerCollectionSharder` or `SPTTEmbeddingBagCollectionSharder`.

        Returns:
            TorchRec's plan, for ``DistributedModelParallel(model, plan=plan, sharders=sharders)``.

        Raises:
            InputError: no module fits a sharder, or a pinned table is in no tower.
        """
        modules: dict[str, EmbeddingModuleShardingPlan] = {}
        planned: set[str] = set()
        for path, module in model.named_modules():
            sharder = next((s for s in sharders if type(module) is s.module_type), None)
            inside_planned = any(outer == "" or path == outer or path.startswith(f"{outer}.") for outer in modules)
            if sharder is None or inside_planned:
                continue
            modules[path] = self.plan_module(sharder.tables_by_tower(module))
            planned.update(modules[path])
        if not modules:
            kinds = sorted({s.module_type.__name__ for s in sharders})
            raise InputError(f"{type(model).__name__} has no module of type {kinds} to shard.")
        unknown = sorted(set(self.pinned) - planned)
        if unknown:
            raise InputError(f"Table {unknown[0]!r} is pinned but not in the model.{nearest(unknown[0], planned)}")
        return ShardingPlan(plan=dict(modules))

    def plan_module(self, tables_by_tower: Sequence[Sequence[Any]]) -> EmbeddingModuleShardingPlan:
        """Plans one module from the table configs of each mesh tower."""
        plan = EmbeddingModuleShardingPlan()
        for tables in tables_by_tower:
            names = {table.name for table in tables}
            placements = place_tables(
                tables,
                self.topology.ranks_per_tower,
                scheme=self.scheme,
                pinned={name: p for name, p in self.pinned.items() if name in names},
            )
            for table in tables:
                plan[table.name] = parameter_sharding(table, placements[table.name], device_type=self.device_type)
        return plan


def parameter_sharding(table: Any, placement: TablePlacement, *, device_type: str = "cpu") -> ParameterSharding:
    """TorchRec's ``ParameterSharding`` of a placed table, ranks and placements local to the tower."""
    if placement.scheme == "data_wise":
        return ParameterSharding(
            sharding_type=ShardingType.DATA_PARALLEL.value,
            compute_kernel=EmbeddingComputeKernel.DENSE.value,
            ranks=list(placement.ranks),
        )
    shards = [
        ShardMetadata(
            shard_offsets=[shard.first_row, shard.first_column],
            shard_sizes=[shard.rows, shard.columns],
            placement=f"rank:{shard.rank}/cpu"
            if device_type == "cpu"
            else f"rank:{shard.rank}/{device_type}:{shard.rank}",
        )
        for shard in table_shards(table, placement)
    ]
    return ParameterSharding(
        sharding_type=placement.scheme,
        compute_kernel=EmbeddingComputeKernel.FUSED.value,
        ranks=list(placement.ranks),
        sharding_spec=EnumerableShardingSpec(shards),
    )
