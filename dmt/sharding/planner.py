"""`TowerShardingPlanner`: makes the ``ShardingPlan`` for DistributedModelParallel from a model and its sharders."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.proposers import GreedyProposer, GridSearchProposer, UniformProposer
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.sharding_plan import get_module_to_default_sharders
from torchrec.distributed.types import (
    CacheParams,
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from dmt.errors import InputError, check_instance
from dmt.formatting import human_bytes, shorten
from dmt.plan.tables import feature_names
from dmt.plan.topology import TowerTopology
from dmt.plan.towers import TowerPlan
from dmt.sharding.costs import Hardware, SparseOptimizer, StepWorkload
from dmt.sharding.explanation import TowerShardingPlan
from dmt.sharding.optimizers import data_parallel_obstacle, optimizer_name
from dmt.sharding.plan_tables import plan_tables
from dmt.sharding.schemes import SCHEMES, Rule, Scheme, ShardingRules, TablePlacement, table_shards

__all__ = ["TowerShardingPlanner", "parameter_sharding", "plan_by_torchrec"]

_BY_STATE: tuple[SparseOptimizer, ...] = ("sgd", "rowwise_adagrad", "adagrad", "adam")  # the least state first


class TowerShardingPlanner:
    """Plans where each table lives inside its tower (Neo, section 4.1; see `dmt.sharding.plan_tables.plan_tables`).

    Needs no process group: every rank computes the same plan. Ranks in the plan are local to the table's tower (0..L-1)
    and the same in every replica; the sharders convert them to global ranks. The sharders set the id route.

    Args:
        topology: the mesh sizes.
        scheme: a scheme of `SCHEMES`, or several to choose from, for every table that supports one; ``"auto"``: all.
            A table that supports none of them is table_wise; schemes that no table supports are refused.
        pinned: decisions for single tables, by name or pattern: a scheme, a kernel of TorchRec
            (`dmt.sharding.schemes.Kernel`), or a `TablePlacement`, which has both.
        hot_rows: True if the model will have `dmt.HotRows`: then only tables pinned to column_wise are cut by columns.
        workload: batch size, ids per sample, and the tables' optimizer unless the ``fused_params`` of dmt's sharders
            name one; of several, that with the most state counts.
        hardware: memory and rates of a rank.
        device_type: ``"cpu"`` or ``"cuda"``.

    Raises:
        InputError: a scheme, a kernel or ``device_type`` is unknown, or an argument has the wrong type.
    """

    def __init__(
        self,
        topology: TowerTopology,
        *,
        scheme: Scheme | Sequence[Scheme] | Literal["auto"] = "auto",
        pinned: Mapping[str, Rule] | None = None,
        hot_rows: bool = False,
        workload: StepWorkload | None = None,
        hardware: Hardware | None = None,
        device_type: str = "cpu",
    ) -> None:
        check_instance("topology", topology, TowerTopology)
        check_instance("workload", workload or StepWorkload(), StepWorkload)
        check_instance("hardware", hardware or Hardware(), Hardware)
        if device_type not in ("cpu", "cuda"):
            raise InputError(f"TowerShardingPlanner: device_type={device_type!r} is unknown; use 'cpu' or 'cuda'.")
        schemes = SCHEMES if scheme == "auto" else cast("Any", (scheme,) if isinstance(scheme, str) else tuple(scheme))
        self.topology = topology
        self.rules = ShardingRules(schemes=schemes, tables=dict(pinned or {}), hot_rows=hot_rows)
        self.workload, self.hardware = workload, hardware or Hardware()
        self.device_type = device_type

    def plan(self, model: nn.Module, sharders: Sequence[Any]) -> ShardingPlan:
        """Plans every module of ``model`` that one of the sharders handles.

        `plan_by_torchrec` plans the modules of TorchRec's sharders, such as ``EmbeddingCollectionSharder``, over all
        ranks: without this planner's rules, workload and rates, in the memory that the fullest rank has left.

        Args:
            model: the unsharded model.
            sharders: those of dmt, at least one, such as `TowerCollectionSharder`, and TorchRec's for other modules.

        Returns:
            TorchRec's plan, for ``DistributedModelParallel(model, plan=plan, sharders=sharders)``. Its ranks are local
            to the towers; for modules of TorchRec's sharders they are global.

        Raises:
            InputError: no module has a dmt sharder, a collection has no sharder or two, a table shares its weight, a
                tower plan, tables or rules do not fit (see `plan_tables` and `parameter_sharding`), or TorchRec cannot
                place the tables left to it, or would have to replicate them (num_replicas above 1).
        """
        modules, others = _modules(model, sharders)
        explained = self._explain(modules, sharders)
        placements = explained.placements
        plan: dict[str, Any] = {path: EmbeddingModuleShardingPlan() for path in modules}
        for path, lists in modules.items():
            for table in (table for tables in lists for table in tables):
                plan[path][table.name] = parameter_sharding(table, placements[table.name], self.device_type)
        if others and self.topology.num_replicas > 1:
            raise InputError(
                f"Module {next(iter(others))!r} has a sharder of TorchRec, which does not support replicas, but the "
                f"topology has num_replicas={self.topology.num_replicas}. Use one replica, or put its tables in towers."
            )
        if others:
            # Only these modules: in the whole model, TorchRec would also plan the tables of the tower sharders.
            alone = nn.ModuleDict({str(number): module for number, module in enumerate(others.values())})
            theirs = [sharder for sharder in sharders if not _is_ours(sharder)]
            room, device_type = self.hardware.memory_per_rank, self.device_type
            if room is not None:
                room -= max(rank.needed for rank in explained.ranks)
            made = plan_by_torchrec(alone, theirs, self.topology, memory_per_rank=room, device_type=device_type)
            plan |= {path: made.plan[str(number)] for number, path in enumerate(others)}
        return ShardingPlan(plan=plan)

    def explain(self, model: nn.Module, sharders: Sequence[Any]) -> TowerShardingPlan:
        """Returns the `TowerShardingPlan` behind `plan`, with reasons; modules of TorchRec's sharders are left out.

        Raises:
            InputError: as `plan` does, except for those modules.
        """
        return self._explain(_modules(model, sharders)[0], sharders)

    def _explain(self, modules: Mapping[str, Sequence[Sequence[Any]]], sharders: Sequence[Any]) -> TowerShardingPlan:
        # Planned together, because the modules of a model share the ranks.
        *towers, outside = [
            [table for tables in of_tower for table in tables] for of_tower in zip(*modules.values(), strict=True)
        ]
        rules, workload = self.rules, self.workload or StepWorkload()
        optimizers: list[Any] = []
        for sharder in filter(_is_ours, sharders):
            settings = sharder.fused_params or {}
            if sharder.id_route == "global":
                rules = replace(rules, id_route="global")
            if data_parallel_obstacle(settings):  # one sharder's is enough: rules hold for all tables
                rules = replace(rules, fused_params=settings)
            if "optimizer" in settings:
                # An optimizer that the cost model does not know is counted as the one with the most state.
                optimizers.append(optimizer_name(settings) or "adam")
        if optimizers:
            workload = replace(workload, optimizer=max(optimizers, key=_BY_STATE.index))
        return plan_tables(
            towers, self.topology, outside=outside, workload=workload, hardware=self.hardware, rules=rules
        )


def plan_by_torchrec(
    model: nn.Module,
    sharders: Sequence[Any],
    topology: TowerTopology,
    *,
    constraints: dict[str, ParameterConstraints] | None = None,
    memory_per_rank: int | None = None,
    batch_size: int | None = None,
    device_type: str = "cpu",
) -> ShardingPlan:
    """Places the tables of TorchRec's sharders over all ranks, by TorchRec's ``EmbeddingShardingPlanner``.

    Args:
        model: the unsharded model; all its modules that a sharder handles are planned.
        sharders: TorchRec's sharders.
        topology: the mesh sizes and hosts.
        constraints: constraints by table name; None: any scheme but data-parallel, for which TorchRec silently drops
            the fused optimizer of a table.
        memory_per_rank: bytes for tables, optimizer state, and ids and embeddings of a step; None: no limit.
        batch_size: samples per rank; None: TorchRec's default.
        device_type: ``"cpu"`` or ``"cuda"``.

    Raises:
        InputError: the planner cannot place the tables.
    """
    if constraints is None:
        tables = {name.split(".")[-2] for name, _ in model.named_parameters() if name.endswith(".weight")}
        schemes = [scheme for scheme in SCHEMES if scheme != "data_parallel"]
        constraints = {name: ParameterConstraints(sharding_types=schemes) for name in tables}
    room = 2**50 if memory_per_rank is None else memory_per_rank  # in bytes; for None, TorchRec would set a limit
    # TorchRec warns about how its planner is called, and about every data-parallel table.
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        planner = EmbeddingShardingPlanner(
            topology=Topology(
                world_size=topology.world_size,
                local_world_size=topology.host_size,
                compute_device=device_type,
                hbm_cap=room if device_type == "cuda" else None,
                ddr_cap=room if device_type == "cpu" else None,
            ),
            batch_size=batch_size,
            constraints=constraints,
            # TorchRec's own try a plan for each scheme of each table. These stop after 100 that are no better.
            proposer=[GridSearchProposer(), GreedyProposer(True, 100), GreedyProposer(False, 100), UniformProposer()],
            # The limit is for tables and their lookups alone, so nothing is reserved.
            storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
        )
        return planner.plan(model, list(sharders))
    except PlannerError as error:
        limit = "" if memory_per_rank is None else f" with {human_bytes(memory_per_rank)} of free memory per rank"
        raise InputError(
            f"TorchRec's planner cannot place the tables {shorten(sorted(constraints), ', ')}{limit}"
            f": {str(error).strip().partition(chr(10))[0].rstrip()} Allow more memory (Hardware.memory_per_rank, in a "
            "config sharding.memory_gib), use more ranks, or, in a config, set another sharding.scheme."
        ) from error
    finally:
        logging.disable(before)


def _is_ours(sharder: Any) -> bool:
    return hasattr(sharder, "tables_by_tower")


def _modules(model: nn.Module, sharders: Sequence[Any]) -> tuple[dict[str, list[list[Any]]], dict[str, nn.Module]]:
    """Finds the outermost modules that the sharders handle.

    Returns:
        Two dicts by path: for each module of a tower sharder, the tables of each mesh tower and then those outside
        towers; and the modules of TorchRec's sharders.

    Raises:
        InputError: a collection has no sharder, no module has a tower sharder, or two sharders handle the same type.
    """
    towers: dict[str, list[list[Any]]] = {}
    others: dict[str, nn.Module] = {}
    by_type: dict[type[nn.Module], Any] = {}
    check_instance("model", model, nn.Module)
    for sharder in sharders:
        if isinstance(sharder, type):
            check_instance("sharder", sharder, ModuleSharder)
        if by_type.setdefault(sharder.module_type, sharder) is not sharder:
            raise InputError(
                f"TowerShardingPlanner: two sharders handle {sharder.module_type.__name__}, and "
                "DistributedModelParallel would use the last one. Pass only one of them, both to the planner and to "
                "DistributedModelParallel."
            )
    collections = tuple(get_module_to_default_sharders())
    for path, module in model.named_modules():
        if any(outer == "" or path.startswith(f"{outer}.") for outer in (*towers, *others)):
            continue
        sharder = by_type.get(type(module))
        # Also a module around a collection, such as one with feature processors, which needs a sharder as a whole.
        if sharder is None and isinstance(module, collections):
            kind = type(module).__name__
            is_beside = type(module) is EmbeddingBagCollection and any(map(_is_ours, sharders))
            add = "OutsideCollectionSharder(mesh)" if is_beside else f"TorchRec's {kind}Sharder, which uses no towers,"
            raise InputError(
                f"TowerShardingPlanner: no sharder handles {path!r} ({kind}), which must be sharded as a "
                f"whole. Add {add} to the sharders, here and in DistributedModelParallel."
            )
        if sharder is not None and _is_ours(sharder):
            towers[path] = [*map(list, sharder.tables_by_tower(module)), sharder.outside_tables(module)]
        elif sharder is not None:
            others[path] = module
    if not towers:
        kinds = sorted({sharder.module_type.__name__ for sharder in sharders if _is_ours(sharder)})
        missing = f"{type(model).__name__} has no module of type {kinds}" if kinds else "none of the sharders is dmt's"
        raise InputError(f"TowerShardingPlanner: {missing}. Pass an unwrapped dmt sharder for the model's collections.")
    _check_weights(model)
    for module_type, sharder in by_type.items():
        held = {path: lists for path, lists in towers.items() if type(model.get_submodule(path)) is module_type}
        if held and (tower_plan := getattr(sharder, "plan", None)):
            _check_plan(tower_plan, held)
    return towers, others


def _check_weights(model: nn.Module) -> None:
    names: dict[nn.Parameter, list[str]] = {}
    for path, module in model.named_modules():  # yields a module once, even if several others share it
        for name, weight in module.named_parameters(path, recurse=False):
            names.setdefault(weight, []).append(name)
    collections = (m for m in model.modules() if isinstance(m, EmbeddingBagCollection | EmbeddingCollection))
    for weight in (weight for collection in collections for weight in collection.parameters()):
        if len(names[weight]) > 1:
            raise InputError(
                f"TowerShardingPlanner: {shorten(names[weight], ' and ')} share a weight, but would train apart once "
                "sharded. Give each a separate weight, or let features share one table (feature_names)."
            )


def _check_plan(plan: TowerPlan, collections: Mapping[str, Sequence[Sequence[Any]]]) -> None:
    """Checks the tower plan of a flat model's collections, by path, each with its tables tower by tower and outside."""
    tables = [table for by_tower in collections.values() for of_tower in by_tower for table in of_tower]
    plan.check_features(dict.fromkeys(feature_names(tables)))
    for path, by_tower in collections.items():
        for tower, of_tower in zip(plan.towers, by_tower, strict=False):
            if not of_tower:
                raise InputError(
                    f"TowerShardingPlanner: collection {path!r} has no table in {tower.name} of the tower plan. Each "
                    "collection needs one in every tower: change the plan, or merge collections."
                )


def parameter_sharding(table: Any, placement: TablePlacement, device_type: str = "cpu") -> ParameterSharding:
    """Returns a ``ParameterSharding`` with tower-local ranks; raises `InputError` as `table_shards` does."""
    is_dense, has_cache = placement.scheme == "data_parallel", placement.kernel == "fused_uvm_caching"
    shards = []
    for rank, *offsets, rows, columns in table_shards(table, placement):
        device = "cpu" if device_type == "cpu" else f"{device_type}:{rank}"
        shards.append(ShardMetadata(offsets, [rows, columns], f"rank:{rank}/{device}"))
    return ParameterSharding(
        sharding_type=placement.scheme,
        compute_kernel="dense" if is_dense else placement.kernel,
        ranks=list(placement.ranks),
        sharding_spec=None if is_dense else EnumerableShardingSpec(shards),
        cache_params=CacheParams(load_factor=placement.cache_load_factor) if has_cache else None,
    )
