"""`TowerShardingPlanner`: from a model and its sharders to the ``ShardingPlan`` that DistributedModelParallel takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import (
    CacheParams,
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from dmt.errors import InputError
from dmt.formatting import human_bytes
from dmt.plan.tables import number_bytes
from dmt.plan.topology import TowerTopology
from dmt.sharding.costs import Hardware, SparseOptimizer, StepWorkload
from dmt.sharding.optimizers import data_parallel_obstacle, optimizer_name
from dmt.sharding.plan import TowerShardingPlan
from dmt.sharding.plan_tables import plan_tables
from dmt.sharding.schemes import SCHEMES, IdRoute, Scheme, TablePlacement, table_shards
from dmt.sharding.user_rules import CachePolicy, Rule, ShardingRules, Tiers

__all__ = ["TowerShardingPlanner", "parameter_sharding"]

_OTHER_SCHEMES = [ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value, ShardingType.COLUMN_WISE.value]


class TowerShardingPlanner:
    """Plans where each table lives inside its tower (Neo, section 4.1; see `dmt.sharding.plan_tables.plan_tables`).

    Needs no process group: every rank computes the same plan. Ranks in it are local to the tower (0..L-1), so one plan
    serves every tower and replica; the sharders turn them into global ranks.

    Args:
        topology: the mesh sizes.
        scheme: one of `SCHEMES` for every table that can have it, several of them, or ``"auto"``. A table that can have
            none of them stays whole.
        pinned: what is decided for single tables, by name or pattern: a scheme, several, or a `TablePlacement`.
        workload: batch size, ids per sample and optimizer of the tables; without it, `plan` and `explain` take the
            optimizer from the sharders' ``fused_params``.
        hardware: memory and rates of a rank.
        id_route: how ids travel; `plan` and `explain` take it from the sharders.
        device_type: ``"cpu"`` or ``"cuda"``.
        tiers: kernels of single tables, and their caches.
    """

    def __init__(
        self,
        topology: TowerTopology,
        *,
        scheme: Scheme | Sequence[Scheme] | Literal["auto"] = "auto",
        pinned: Mapping[str, Rule] | None = None,
        workload: StepWorkload | None = None,
        hardware: Hardware | None = None,
        id_route: IdRoute = "peer",
        device_type: str = "cpu",
        tiers: Tiers | None = None,
    ) -> None:
        self.topology = topology
        schemes = SCHEMES if scheme == "auto" else (scheme,) if isinstance(scheme, str) else tuple(scheme)
        self.rules = ShardingRules(
            schemes=cast("tuple[Scheme, ...]", schemes),
            tables=dict(pinned or {}),
            id_route=id_route,
            tiers=tiers or Tiers(),
        )
        self.workload = workload
        self.hardware = hardware or Hardware()
        self.device_type = device_type

    def plan(self, model: nn.Module, sharders: Sequence[Any]) -> ShardingPlan:
        """Plans every module of ``model`` that one of the sharders handles.

        Modules of TorchRec's own sharders, such as ``EmbeddingCollectionSharder`` for sequences of ids, are planned
        over all ranks by TorchRec's ``EmbeddingShardingPlanner``; rules, workload and hardware are not for them.

        Args:
            model: the unsharded model.
            sharders: `TowerCollectionSharder` or `SPTTEmbeddingBagCollectionSharder`, and TorchRec's for other modules.

        Returns:
            TorchRec's plan, for ``DistributedModelParallel(model, plan=plan, sharders=sharders)``. Its ranks are local
            to the towers.

        Raises:
            InputError: no module fits a tower sharder, a collection of tables fits none, a rule names no table, tables
                do not fit (see `plan_tables`), or TorchRec cannot place its own.
        """
        modules = self._modules(model, sharders)
        placements = self._explain(modules, sharders).placements
        plan = {path: EmbeddingModuleShardingPlan() for path in modules}
        for path, tables_by_tower in modules.items():
            for table in (table for tables in tables_by_tower for table in tables):
                placement = placements[table.name]
                plan[path][table.name] = parameter_sharding(
                    table, placement, device_type=self.device_type, cache_policy=self.rules.tiers.cache_policy
                )
        others = self._plan_others(_others(model, sharders, modules), sharders)
        return ShardingPlan(plan={**plan, **others})

    def _plan_others(self, others: Mapping[str, nn.Module], sharders: Sequence[Any]) -> dict[str, Any]:
        """Plans modules of TorchRec's sharders over all ranks, by path."""
        if not others:
            return {}
        if self.topology.num_replicas > 1:
            raise InputError(
                f"{next(iter(others))!r} is for a sharder of TorchRec's, which knows no replicas, but the topology has "
                f"{self.topology.num_replicas}. Use one replica, or bags of ids in towers."
            )
        # Alone: of the whole model it would plan the tables inside our modules, too.
        alone = nn.ModuleDict({str(number): module for number, module in enumerate(others.values())})
        tables = {name.split(".")[-2] for name, _ in alone.named_parameters() if name.endswith(".weight")}
        planner = EmbeddingShardingPlanner(
            topology=Topology(
                world_size=self.topology.world_size,
                local_world_size=self.topology.ranks_per_tower,
                compute_device=self.device_type,
            ),
            # Not data-parallel: TorchRec drops the fused optimizer of such tables without a word.
            constraints={name: ParameterConstraints(sharding_types=_OTHER_SCHEMES) for name in tables},
        )
        try:
            found = planner.plan(alone, [s for s in sharders if not hasattr(s, "tables_by_tower")]).plan
        except (PlannerError, RuntimeError) as error:
            raise InputError(
                f"TorchRec's planner cannot place the tables of {list(others)}: {str(error).partition(chr(10))[0]} "
                "Plan them yourself: plan.plan[path] = ..."
            ) from error
        return {path: found[str(number)] for number, path in enumerate(others)}

    def explain(self, model: nn.Module, sharders: Sequence[Any]) -> TowerShardingPlan:
        """The plan behind `plan`, with costs, loads and reasons."""
        return self._explain(self._modules(model, sharders), sharders)

    def _explain(self, modules: Mapping[str, Sequence[Sequence[Any]]], sharders: Sequence[Any]) -> TowerShardingPlan:
        # Together: the modules of a model share the ranks.
        towers = [
            [table for tables in of_tower for table in tables] for of_tower in zip(*modules.values(), strict=True)
        ]
        rules, workload = self.rules, self.workload
        for sharder in sharders:
            settings = getattr(sharder, "fused_params", None) or {}
            if getattr(sharder, "id_route", "peer") == "global":
                rules = replace(rules, id_route="global")
            if data_parallel_obstacle(settings):  # of one sharder is enough: rules hold for the tables of all
                rules = replace(rules, fused_params=settings)
            workload = _same_optimizer(workload, settings)
        return plan_tables(towers, self.topology, workload=workload, hardware=self.hardware, rules=rules)

    @staticmethod
    def _modules(model: nn.Module, sharders: Sequence[Any]) -> dict[str, list[list[Any]]]:
        """The tables by mesh tower of every module that a sharder handles, by path; nothing inside of those."""
        modules: dict[str, list[list[Any]]] = {}
        for path, module in model.named_modules():
            sharder = _sharder_of(module, sharders)
            if hasattr(sharder, "tables_by_tower") and not _is_inside(path, modules):
                modules[path] = [list(tables) for tables in sharder.tables_by_tower(module)]
        if not modules:
            kinds = sorted({s.module_type.__name__ for s in sharders if hasattr(s, "tables_by_tower")})
            if not kinds:
                raise InputError("TowerShardingPlanner: none of the sharders is dmt's. Use TorchRec's own planner.")
            raise InputError(f"{type(model).__name__} has no module of type {kinds} to shard.")
        return modules


def _sharder_of(module: nn.Module, sharders: Sequence[Any]) -> Any:
    return next((sharder for sharder in sharders if type(module) is sharder.module_type), None)


def _is_inside(path: str, modules: Iterable[str]) -> bool:
    return any(outer == "" or path == outer or path.startswith(f"{outer}.") for outer in modules)


def _others(model: nn.Module, sharders: Sequence[Any], modules: Mapping[str, Any]) -> dict[str, nn.Module]:
    """The modules beside those that are planned already which one of the sharders handles, by path.

    Raises:
        InputError: a collection of tables is for none.
    """
    others: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if _is_inside(path, (*modules, *others)):
            continue
        if _sharder_of(module, sharders) is not None:
            others[path] = module
        elif isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            kind = type(module).__name__
            raise InputError(
                f"TowerShardingPlanner: no sharder is for {path!r} ({kind}), so every rank would hold and train all "
                f"of its tables. Add TorchRec's {kind}Sharder() to the sharders, here and of DistributedModelParallel."
            )
    return others


def _same_optimizer(workload: StepWorkload | None, settings: Mapping[str, Any]) -> StepWorkload | None:
    """The workload with the optimizer of the sharder, which decides the memory of its state."""
    if "optimizer" not in settings:
        return workload
    # An optimizer that the cost model does not know is counted as the one with the most state.
    optimizer = cast("SparseOptimizer", optimizer_name(settings) or "adam")
    if workload is None:
        return StepWorkload(optimizer=optimizer)
    if workload.optimizer != optimizer:
        raise InputError(
            f"TowerShardingPlanner: workload.optimizer={workload.optimizer!r}, but the sharder's fused_params have "
            f"optimizer {settings['optimizer']}, whose state takes another memory. Make them agree."
        )
    return workload


def parameter_sharding(
    table: Any, placement: TablePlacement, *, device_type: str = "cpu", cache_policy: CachePolicy = "lru"
) -> ParameterSharding:
    """Returns TorchRec's ``ParameterSharding`` of a placed table, ranks and placements local to the tower.

    Raises:
        InputError: the device has no such kernel.
    """
    if placement.kernel == "key_value" and device_type == "cpu":
        size = table.num_embeddings * table.embedding_dim * number_bytes(table)
        raise InputError(
            f"Table {table.name!r} of {human_bytes(size)} has kernel='key_value', but FBGEMM keeps tables on SSDs "
            "behind caches of GPUs, and this run is on CPUs. Use 'fused_uvm_caching', or GPUs."
        )
    has_cache = placement.kernel in ("fused_uvm_caching", "key_value")
    algorithm = CacheAlgorithm.LFU if cache_policy == "lfu" else CacheAlgorithm.LRU
    if placement.scheme == "data_parallel":
        return ParameterSharding(
            sharding_type=ShardingType.DATA_PARALLEL.value,
            compute_kernel=EmbeddingComputeKernel.DENSE.value,
            ranks=list(placement.ranks),
        )
    shards = []
    for rank, *offsets, rows, columns in table_shards(table, placement):
        device = "cpu" if device_type == "cpu" else f"{device_type}:{rank}"
        shards.append(ShardMetadata(offsets, [rows, columns], f"rank:{rank}/{device}"))
    return ParameterSharding(
        sharding_type=placement.scheme,
        compute_kernel=placement.kernel,
        ranks=list(placement.ranks),
        sharding_spec=EnumerableShardingSpec(shards),
        cache_params=CacheParams(algorithm, load_factor=placement.cache_load_factor) if has_cache else None,
    )
