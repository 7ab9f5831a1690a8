"""The flat dataflow: TorchRec's exchange over all ranks, in every scheme that TorchRec has or as its planner chooses.

Legend: B samples per rank, W ranks, L ranks of a host, H hosts, F features of a table, P ids per sample of all of them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.distributed.collective_utils import invoke_on_rank_and_broadcast_result
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import CommOp, ParameterSharding, ShardingEnv, ShardingPlan, ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dmt._torchrec import host_groups
from dmt.errors import InputError
from dmt.formatting import counted, shorten
from dmt.models.complexity import dense_weight_bytes
from dmt.number_formats import NUMBER_FORMATS
from dmt.plan.tables import TableSpec, feature_names
from dmt.plan.topology import TowerTopology
from dmt.sharding.costs import CostModel, StepWorkload
from dmt.sharding.schemes import why_not
from dmt.sptt.mesh import TowerMesh
from dmt.sptt.tower_lookup import GroupShardedEBC
from dmt.traffic import Traffic
from dmt.training.exchanges import dense_bytes
from dmt.training.job import Job

__all__ = ["FlatPlan", "FlatSharder", "codecs_of_all_ranks", "flat_costs", "place_flat", "shard_flat", "share_plan"]

_BY_HOST = ("table_row_wise", "grid_shard")
_ALL = ("data_parallel", "table_wise", "column_wise", "table_column_wise", "row_wise", *_BY_HOST)
# TorchRec's planner leaves the last ones out on a CPU, where they run all the same.
_CHOICES = {"auto": ("table_wise", "column_wise"), "grid": ("grid_shard",), "planner": _ALL}
_ID_BYTES = 8  # an id, and a length
_NO_LIMIT = 2**50  # bytes


class FlatSharder(EmbeddingBagCollectionSharder):
    """TorchRec's sharder of flat collections, whose modules have the fixes of `GroupShardedEBC`.

    Data-parallel tables keep their fused optimizer, and mean pooling of row-wise tables is that of the plain module.

    Args:
        mesh: the groups; its `TowerTopology.host` is what TorchRec's schemes by host take for one.
        kwargs: ``fused_params`` and ``qcomm_codecs_registry`` of TorchRec's class.
    """

    def __init__(self, mesh: TowerMesh | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._mesh = mesh

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns every scheme, also those that TorchRec offers on GPUs only."""
        return list(_ALL)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Returns the one kernel: dense for data-parallel tables, fused for all others."""
        is_dense = sharding_type == ShardingType.DATA_PARALLEL.value
        return [(EmbeddingComputeKernel.DENSE if is_dense else EmbeddingComputeKernel.FUSED).value]

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> GroupShardedEBC:
        """Shards over all ranks; collective."""
        mesh = self._mesh
        assert mesh is not None, "a sharder without a mesh is for planning"
        make = partial(
            GroupShardedEBC,
            module,
            params,
            group=mesh.global_group,
            data_parallel_group=mesh.global_group,
            moment_scales={},
            options={
                "fused_params": self.fused_params,
                "device": device,
                "qcomm_codecs_registry": self.qcomm_codecs_registry,
            },
        )
        if not any(sharding.sharding_type in _BY_HOST for sharding in params.values()):
            return make()
        hosts = mesh.topology.host_groups()
        inside, across = mesh.new_group(hosts), mesh.new_group([list(ranks) for ranks in zip(*hosts, strict=True)])
        with host_groups(inside, across):
            return make()


def shard_flat(job: Job, mesh: TowerMesh, fused_params: dict[str, Any]) -> tuple[list[Any], ShardingPlan]:
    """Returns the sharders and the plan of a flat job, the same plan on every rank; collective."""
    sharder = FlatSharder(mesh, fused_params=fused_params, qcomm_codecs_registry=codecs_of_all_ranks(job))
    plan = share_plan(job, mesh)
    assert plan is not None, "a flat job without replicas has a plan"
    return [sharder], plan


def share_plan(job: Job, mesh: TowerMesh) -> ShardingPlan | None:
    """Gives all ranks the `Job.flat_plan` of the first, which alone makes it where none has one; collective."""
    plan = invoke_on_rank_and_broadcast_result(mesh.global_group, 0, lambda: job.flat_plan)
    vars(job)["flat_plan"] = plan
    return plan


def codecs_of_all_ranks(job: Job) -> dict[str, Any] | None:
    """Returns TorchRec's quantised communication in the formats of the config; None where numbers travel as they are.

    Partial sums of rows are added in the format that they travel in.
    """
    codecs = job.config.sharding.precision.codecs(torch.device(job.device_type))
    operations = (CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER)
    return None if codecs is None else {operation.name: codecs for operation in operations}


@dataclass(frozen=True, kw_only=True)
class FlatPlan:
    """Placement of the tables of a flat job, and the bytes of its steps; made by `flat_costs`."""

    topology: TowerTopology
    schemes: Mapping[str, str]
    """TorchRec's name of the scheme of each table, largest table first."""
    ranks: Mapping[str, tuple[int, ...]]
    """Ranks that hold a shard, by table."""
    memory: Mapping[str, int]
    """Bytes of weights, optimizer state and dense gradients, over all ranks, by table."""
    rank_memory: tuple[int, ...]
    """Bytes of these on each rank."""
    traffic: Traffic
    """Bytes that all ranks together send in a step."""
    notes: tuple[str, ...]
    """Further notes for the reader, such as of tables that cannot have the scheme asked for."""

    @property
    def tables_by_scheme(self) -> dict[str, int]:
        """Number of tables of each scheme in use."""
        return dict(Counter(self.schemes.values()).most_common())

    def to_record(self) -> dict[str, Any]:
        """Returns the plan as a JSON object."""
        return asdict(self)

    def result(self, rows: int) -> dict[str, Any]:
        """Returns the section of a run's result; ``rows`` is the samples of a step."""
        return {
            "tables_by_scheme": self.tables_by_scheme,
            "largest_rank_bytes": max(self.rank_memory),
            "planned_bytes_per_sample": self.traffic.per_sample(rows),
            "notes": list(self.notes),
        }


def flat_costs(job: Job, plan: ShardingPlan, model: nn.Module, fused_params: Mapping[str, Any]) -> FlatPlan:
    """Returns memory and bytes of the plan of a flat job, whose ``model`` has stand-ins for its tables.

    ``fused_params`` are those that the plan was made with.

    Ids follow ``sharding.pooling_factors``, rows of a table are read equally often, gradients of data-parallel tables
    and of the dense part go round in rings. Not counted: the sizes that ranks tell each other before an exchange.

    ================  ==================================================================================================
    ids               from every rank to every shard: F lengths, and the P ids or the share of them in its rows
    embeddings        from every shard to every rank: F times its columns, whole or, of row-wise tables, partial sums;
                      of ``table_row_wise`` and ``grid_shard``, partial sums inside a host, then sums to the others
    ================  ==================================================================================================
    """
    modules: list[Any] = list(plan.plan.values())
    placed: dict[str, ParameterSharding] = {name: own for module in modules for name, own in module.items()}
    own, topology = job.config.sharding, job.topology
    workload = StepWorkload(
        batch_size=job.config.train.batch_size,
        pooling_factors=own.pooling_factors,
        optimizer=job.config.optimizer.sparse,
    )
    costs = CostModel(topology=topology.as_one_tower(), workload=workload)
    batch, world, local = workload.batch_size, topology.world_size, topology.host_size
    tables = sorted(job.tables, key=lambda table: -table.num_bytes)
    held, memory = [0] * world, dict.fromkeys((table.name for table in tables), 0)
    ids, outputs, reduced = _Sums(), _Sums(), 0.0
    for table in tables:
        sharding, features = placed[table.name], len(table.feature_names)
        whole = sharding.sharding_type == ShardingType.DATA_PARALLEL.value
        scheme: Any = "data_parallel" if whole else "table_wise"
        for rank, rows, columns in _shards(table, sharding, world):
            load = costs.shard(table, scheme, rows, columns)
            held[rank] += load.memory
            memory[table.name] += load.memory
            if whole:
                reduced += load.reduced_bytes
                continue
            lookups = features + costs.pooling(table) * rows / table.num_embeddings
            ids.add(batch * lookups * _ID_BYTES, world - local, local - 1)
            if sharding.sharding_type in _BY_HOST:
                hosts = world // local
                outputs.add(batch * features * columns, hosts - 1, (local - 1) * hosts)
            else:
                outputs.add(batch * features * columns, world - local, local - 1)
    _, of_all = dense_weight_bytes(model)
    dense, dense_inside = dense_bytes(topology, job.config.train, of_all)
    ring = topology.ring_share_across_hosts([range(world)])
    forward, backward = (
        NUMBER_FORMATS[precision].num_bytes for precision in (own.forward_precision, own.backward_precision)
    )
    inside = ids.inside + outputs.inside * (forward + backward) + dense_inside + (1 - ring) * reduced
    schemes = {table.name: placed[table.name].sharding_type for table in tables}
    return FlatPlan(
        topology=topology,
        schemes=schemes,
        ranks={table.name: tuple(rank for rank, *_ in _shards(table, placed[table.name], world)) for table in tables},
        memory=memory,
        rank_memory=tuple(held),
        traffic=Traffic(
            ids=round(ids.across),
            forward=round(outputs.across * forward),
            backward=round(outputs.across * backward),
            dense=round(dense + ring * reduced),
            inside=round(inside),
        ),
        notes=_notes(job, tables, schemes, fused_params),
    )


def _notes(
    job: Job, tables: Sequence[TableSpec], schemes: Mapping[str, str], fused_params: Mapping[str, Any]
) -> tuple[str, ...]:
    """Names the tables that are table-wise because they cannot have the scheme asked for, and says why."""
    asked = _asked(job.config.sharding.scheme)
    why = {
        # The last obstacle: the model here no longer tells which bags have means.
        table.name: _obstacle(table, asked[0], job.topology, fused_params, is_mean=True)
        for table in tables
        if schemes[table.name] not in asked
    }
    if not why:
        return ()
    shown = shorten([f"{name!r} ({reason})" for name, reason in why.items()], ", ")
    verb = "is" if len(why) == 1 else "are"
    return (f"{counted(len(why), 'table')} {verb} table_wise instead of {asked[0]}: {shown}.",)


class _Sums:
    """Sums of what is sent between hosts and inside them."""

    def __init__(self) -> None:
        self.across = self.inside = 0.0

    def add(self, size: float, times_across: int, times_inside: int) -> None:
        self.across += size * times_across
        self.inside += size * times_inside


def _planner(job: Job, model: nn.Module, fused_params: Mapping[str, Any]) -> EmbeddingShardingPlanner:
    own, topology = job.config.sharding, job.topology
    StepWorkload(pooling_factors=own.pooling_factors).check_features(set(feature_names(job.tables)))
    means = [t for part in model.modules() if isinstance(part, EmbeddingBagCollection) for t in _means(part)]
    constraints = {}
    for table in job.tables:
        schemes = _schemes(table, own.scheme, topology, fused_params, is_mean=table.name in means)
        constraints[table.name] = ParameterConstraints(
            sharding_types=list(schemes),
            pooling_factors=[own.pooling_factors.get(name, 1.0) for name in table.feature_names],
            # Left alone, TorchRec cuts no table of 128 columns or fewer into a grid.
            min_partition=_grid_columns(table, topology) if "grid_shard" in schemes and len(schemes) == 1 else None,
        )
    room = _NO_LIMIT if job.rank_memory is None else job.rank_memory  # else TorchRec has a limit of its own
    return EmbeddingShardingPlanner(
        topology=Topology(
            world_size=topology.world_size,
            local_world_size=topology.host_size,
            compute_device=job.device_type,
            hbm_cap=room if job.device_type == "cuda" else None,
            ddr_cap=room if job.device_type == "cpu" else None,
        ),
        batch_size=job.config.train.batch_size,
        constraints=constraints,
        # The limit is for tables.
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
    )


def place_flat(job: Job, model: nn.Module, fused_params: dict[str, Any]) -> ShardingPlan:
    """Places the tables of a flat job, whose model is on the meta device, as `Job.flat_plan` says."""
    sharder = FlatSharder(None, fused_params=fused_params, qcomm_codecs_registry=codecs_of_all_ranks(job))
    # TorchRec warns of how its planner is called, and of every data-parallel table.
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        return _planner(job, model, fused_params).plan(model, [sharder])
    except PlannerError as error:
        own = job.config.sharding
        limit = f", sharding.memory_gib={own.memory_gib}" if own.memory_gib is not None else ""
        raise InputError(
            f"TorchRec's planner cannot place the tables (sharding.scheme={own.scheme!r}{limit}): "
            f"{str(error).strip().partition(chr(10))[0]} Allow other schemes or more memory, or use more ranks."
        ) from error
    finally:
        logging.disable(before)


def _asked(scheme: str) -> Sequence[str]:
    """TorchRec's names of the schemes that ``sharding.scheme`` allows."""
    return _CHOICES.get(scheme, (scheme,))


def _schemes(
    table: TableSpec, scheme: str, topology: TowerTopology, fused_params: Mapping[str, Any], *, is_mean: bool
) -> Sequence[str]:
    """TorchRec's names of the schemes that a table may have; ``table_wise`` where it can have none of those asked."""
    asked = _asked(scheme)
    possible = [own for own in asked if not _obstacle(table, own, topology, fused_params, is_mean=is_mean)]
    return possible or ["table_wise"]  # which `FlatPlan.notes` tells


def _obstacle(
    table: TableSpec, scheme: str, topology: TowerTopology, fused_params: Mapping[str, Any], *, is_mean: bool
) -> str:
    """Returns the reason why a table cannot have a scheme of TorchRec, or an empty string if it can."""
    parts = {"row_wise": topology.world_size} | dict.fromkeys(_BY_HOST, topology.host_size)
    if scheme in parts and _has_empty_shard(table.num_embeddings, parts[scheme]):
        return f"cut for {parts[scheme]} ranks, its {counted(table.num_embeddings, 'row')} would leave one without any"
    if scheme == "data_parallel":
        return why_not(table, scheme, fused_params=fused_params)
    if scheme == "grid_shard" and is_mean:
        return "its bags are averaged, where each rank would divide by the ids of its own rows"
    return ""


def _has_empty_shard(rows: int, parts: int) -> bool:
    return rows <= -(-rows // parts) * (parts - 1)


def _grid_columns(table: TableSpec, topology: TowerTopology) -> int:
    """Columns of a table's parts on the hosts: as many equal multiples of four as there can be."""
    most = max(1, min(topology.num_hosts, table.embedding_dim // 4))
    parts = next(number for number in range(most, 0, -1) if table.embedding_dim % (4 * number) == 0)
    return table.embedding_dim // parts


def _means(collection: EmbeddingBagCollection) -> list[str]:
    return [table.name for table in collection.embedding_bag_configs() if table.pooling.value == "MEAN"]


def _shards(table: TableSpec, sharding: ParameterSharding, world: int) -> list[tuple[int, int, int]]:
    """(rank, rows, columns) of each shard, or of each copy of a data-parallel table."""
    if sharding.sharding_type == ShardingType.DATA_PARALLEL.value:
        return [(rank, table.num_embeddings, table.embedding_dim) for rank in range(world)]
    spec: Any = sharding.sharding_spec
    return [(shard.placement.rank(), *shard.shard_sizes) for shard in spec.shards]
