"""This library's contenders: SPTT and DMT, with their options; a new option of theirs is added here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrec.distributed.model_parallel import DataParallelWrapper, DefaultDataParallelWrapper

from benchmarks.steps.contenders import Contender
from benchmarks.steps.inputs import benchmark_tables
from benchmarks.steps.setting import Setting
from dmt import (
    ExchangePrecision,
    HierarchicalDataParallel,
    SPTTEmbeddingBagCollectionSharder,
    TowerCollectionSharder,
    TowerMesh,
    TowerPlan,
    TowerShardingPlanner,
    TowerTopology,
)
from dmt.errors import InputError
from dmt.plan.tables import feature_names
from dmt.sharding.costs import StepWorkload

__all__ = ["own_planner", "own_sharders", "own_topology", "own_towers", "own_wrapper"]

# What an option means to the sharders; names of all are in `contenders.OWN_OPTIONS`.
_SHARDER_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "global": {"id_route": "global"},
    "unique": {"unique": "rank"},
    "unique-host": {"unique": "host"},
    "all": {"unique": "auto"},
}


def own_topology(contender: Contender, setting: Setting) -> TowerTopology:
    """A tower on each host, or on each rank; replicas, where there are any, inside of it.

    Raises:
        InputError: the ranks of a host cannot be shared out among the replicas.
    """
    if contender.has_rank_towers:
        return TowerTopology(num_towers=setting.world_size, ranks_per_tower=1, ranks_per_host=setting.ranks_per_host)
    if setting.ranks_per_host % contender.num_replicas:
        raise InputError(
            f"Contender {contender.name!r} has {contender.num_replicas} replicas on each host, but ranks_per_host="
            f"{setting.ranks_per_host} is no multiple of that. Leave it out, or use more ranks."
        )
    return TowerTopology(
        num_replicas=contender.num_replicas,
        num_towers=setting.hosts,
        ranks_per_tower=setting.ranks_per_host // contender.num_replicas,
        replica_placement="intra_host" if contender.num_replicas > 1 else "inter_host",
    )


def own_sharders(
    contender: Contender, mesh: TowerMesh, towers: TowerPlan, fused_params: dict[str, Any]
) -> Sequence[TowerCollectionSharder | SPTTEmbeddingBagCollectionSharder]:
    """The sharder of the contender with its options."""
    options: dict[str, Any] = {"fused_params": fused_params}
    if contender.precision == "fp16":
        options["peer_precision"] = ExchangePrecision(forward="fp16", backward="fp16")
    for option in contender.options:
        options |= _SHARDER_OPTIONS.get(option, {})
    if contender.family == "sptt":
        return [SPTTEmbeddingBagCollectionSharder(mesh, towers, **options)]
    return [TowerCollectionSharder(mesh, **options)]


def own_wrapper(contender: Contender, mesh: TowerMesh) -> DataParallelWrapper:
    """Wrapper of the dense part for DMP."""
    if contender.has_hierarchical_reduce:
        return HierarchicalDataParallel(mesh, precision=contender.dense_precision)
    return DefaultDataParallelWrapper()


def own_towers(contender: Contender, setting: Setting) -> TowerPlan:
    """Feature i in tower i mod T, as in the paper's tables."""
    num_towers = setting.world_size if contender.has_rank_towers else setting.hosts
    return TowerPlan.strided(feature_names(benchmark_tables(setting)), num_towers)


def own_planner(contender: Contender, topology: TowerTopology, setting: Setting) -> TowerShardingPlanner:
    """The library's planner as a user would take it, or with a scheme that is asked for."""
    workload = StepWorkload(batch_size=setting.batch_size)
    if contender.scheme == "table_wise":
        return TowerShardingPlanner(topology, scheme="table_wise", workload=workload)
    return TowerShardingPlanner(topology, workload=workload)
