"""`build_contender`: builds and shards the model of a contender on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torchrec.distributed.model_parallel import (
    DataParallelWrapper,
    DefaultDataParallelWrapper,
    DistributedModelParallel,
)
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan

from benchmarks.steps.contenders import EMBEDDING_DIM, Contender
from benchmarks.steps.flat import (
    SmallTables,
    flat_plan,
    flat_sharder,
    startable_on_cpu,
    tower_plan_by_hand,
    tower_sharder,
)
from benchmarks.steps.inputs import Batches, access_profile, benchmark_tables, distinct_rows
from benchmarks.steps.setting import Setting
from dmt import (
    ExchangePrecision,
    HierarchicalDataParallel,
    OutsideCollectionSharder,
    ReplicaSync,
    SPTTEmbeddingBagCollectionSharder,
    TowerCollectionSharder,
    TowerMesh,
    TowerPlan,
    TowerShardingPlanner,
    TowerTopology,
    run_in_micro_batches,
)
from dmt.errors import InputError
from dmt.hot_rows.choice import choose_rows
from dmt.hot_rows.runtime import HotRows
from dmt.models import DLRM, DMTDLRM, DMTDLRMProducts, flat_sparse_arch, tower_sparse_arch
from dmt.models.complexity import CRITEO_DENSE_FEATURES
from dmt.plan.tables import TableSpec, feature_names
from dmt.sharding.costs import StepWorkload
from dmt.sharding.outside import CrossingCosts, choose_outside
from dmt.training.build import ClickTask, build_optimizer, fused_params
from dmt.training.config import OptimizerConfig

__all__ = [
    *("OPTIMIZER", "Built", "Meshes", "build_contender", "build_plain", "own_tables", "own_topology", "own_towers"),
    "tower_sizes",
]

OPTIMIZER = OptimizerConfig(dense="sgd", dense_lr=0.05, sparse_lr=0.05, warmup_steps=0)
"""Row-wise AdaGrad for the tables, fused by FBGEMM, and SGD for everything else."""


@dataclass
class Meshes:
    """Process groups by topology, each made once, because every set costs connections and threads."""

    by_topology: dict[TowerTopology, TowerMesh] = field(default_factory=dict)

    def get(self, topology: TowerTopology) -> TowerMesh:
        """Returns the mesh of a topology; collective when a topology is first used."""
        if topology not in self.by_topology:
            self.by_topology[topology] = TowerMesh(topology)
        return self.by_topology[topology]


@dataclass(frozen=True, kw_only=True)
class Built:
    """A contender on this rank, ready to train."""

    contender: Contender
    model: DistributedModelParallel
    """The sharded `ClickTask`."""
    optimizer: Any
    pipeline: TrainPipelineBase[Any, Any] | TrainPipelineSparseDist[Any, Any]
    batches: Batches
    """Batches that the pipeline trains on."""
    plan: ShardingPlan
    topology: TowerTopology | None
    """Topology of this library's contenders; None for TorchRec's."""
    small_tables: SmallTables | None
    """The data-parallel tables of a flat contender."""
    replicas: ReplicaSync | None
    towers: TowerPlan
    """The features of each tower, also for TorchRec's contenders."""

    def step(self) -> Any:
        """Trains on the next batch, and returns (logits, labels, weights) of `ClickTask`. Collective."""
        output = self.pipeline.progress(self.batches)
        if self.small_tables is not None:
            self.small_tables.step()
        if self.replicas is not None:
            self.replicas.step()
        return output

    def finish(self) -> None:
        """Trains on the batches that the pipeline has read, and detaches it, so that the model can run alone."""
        self.batches.close()
        with suppress(StopIteration):
            while True:
                self.step()
        if isinstance(self.pipeline, TrainPipelineSparseDist):
            self.pipeline.detach()


def build_plain(contender: Contender, setting: Setting, *, tables_device: str | None = None) -> ClickTask:
    """Builds the unsharded model, the same for all contenders of one ``plain_model``; PyTorch's seed sets its weights.

    Args:
        contender: one of the contenders with this model.
        setting: sizes of the job.
        tables_device: ``"meta"`` for tables that only sharded ranks will hold; dense parts have their weights, as
            TorchRec's tower sharder needs.
    """
    if not contender.has_towers:
        return ClickTask(
            DLRM(
                tables=benchmark_tables(setting),
                dense_in_features=CRITEO_DENSE_FEATURES,
                make_sparse_arch=lambda tables, _: flat_sparse_arch(tables, tables_device),
            )
        )
    arch = DMTDLRMProducts if contender.family == "products" else DMTDLRM
    return ClickTask(
        arch(
            tables=own_tables(contender, setting),
            tower_plan=own_towers(contender, setting),
            dense_in_features=CRITEO_DENSE_FEATURES,
            **tower_sizes(contender, setting),
            make_sparse_arch=lambda tables, plan, modules, _: tower_sparse_arch(tables, plan, modules, tables_device),
        )
    )


def build_contender(contender: Contender, setting: Setting, meshes: Meshes, batches: Batches) -> Built:
    """Builds and shards a contender. Collective; TorchRec's need ``LOCAL_WORLD_SIZE`` = ``ranks_per_host``.

    Args:
        contender: the contender.
        setting: sizes of the job.
        meshes: process groups, shared by all contenders of the job.
        batches: this rank's batches, for this contender only.

    Raises:
        InputError: the contender does not support these sizes.
    """
    model = build_plain(contender, setting, tables_device="meta")
    fused = fused_params(OPTIMIZER)
    sharders: Sequence[Any]
    topology = mesh = None
    if contender.family == "flat":
        sharders = [flat_sharder(contender, fused)]
        plan = flat_plan(contender, setting, model, sharders[0])
    elif contender.family == "etc":
        sharders = [tower_sharder(contender, fused)]
        plan = tower_plan_by_hand(contender, setting, model, sharders[0])
    else:
        topology = own_topology(contender, setting)
        mesh = meshes.get(topology)
        sharders = own_sharders(contender, mesh, own_towers(contender, setting), fused)
        workload = StepWorkload(batch_size=setting.batch_size)
        plan = TowerShardingPlanner(topology, workload=workload, hot_rows=contender.hot_rows).plan(model, sharders)
    cpu = torch.device("cpu")
    with startable_on_cpu() if contender.family == "etc" else nullcontext():
        sharded = DistributedModelParallel(
            model,
            device=cpu,
            plan=plan,
            sharders=list(sharders),
            data_parallel_wrapper=None if mesh is None else own_wrapper(contender, mesh),
        )
    if contender.micro_batches > 1:
        run_in_micro_batches(sharded.module.model, contender.micro_batches)
    small_tables = SmallTables(sharded.module.model.sparse_arch, fused) if contender.family == "flat" else None
    optimizer = build_optimizer(OPTIMIZER, sharded)
    if contender.hot_rows and mesh is not None:
        hot_rows = HotRows(sharded, mesh, extra_memory=1.0, refresh_every=None)
        settings = {"batch_size": setting.batch_size, "distinct": contender.unique, "max_bytes": float("inf")}
        rows = choose_rows(access_profile(setting), benchmark_tables(setting), topology, **settings)
        hot_rows.replicate({name: of_table for name, of_table in rows.items() if name not in hot_rows.left_out})
    pipeline = TrainPipelineSparseDist if contender.prefetch else TrainPipelineBase
    return Built(
        contender=contender,
        model=sharded,
        optimizer=optimizer,
        pipeline=pipeline(sharded, optimizer, cpu),
        batches=batches,
        plan=plan,
        topology=topology,
        small_tables=small_tables,
        replicas=ReplicaSync(sharded, mesh) if mesh is not None and contender.num_replicas > 1 else None,
        towers=own_towers(contender, setting),
    )


def own_topology(contender: Contender, setting: Setting) -> TowerTopology:
    """Returns the topology of one of this library's contenders: a tower per host of a replica, or per rank.

    Raises:
        InputError: the replicas do not divide the hosts, or the ranks of a host.
    """
    hosts, ranks, number = setting.hosts, setting.ranks_per_host, contender.num_replicas
    is_between = contender.replica_placement == "inter_host"
    if (hosts if is_between else ranks) % number:
        raise InputError(
            f"Contender {contender.name!r} has {number} replicas, which do not divide "
            f"{f'hosts={hosts}' if is_between else f'ranks_per_host={ranks}'}. Use another contender or size."
        )
    hosts, ranks = (hosts // number, ranks) if is_between else (hosts, ranks // number)
    towers = hosts * ranks if contender.rank_towers else hosts
    return TowerTopology(
        num_towers=towers,
        ranks_per_tower=hosts * ranks // towers,
        num_replicas=number,
        replica_placement=contender.replica_placement,
        ranks_per_host=setting.ranks_per_host,
    )


def own_sharders(
    contender: Contender, mesh: TowerMesh, towers: TowerPlan, fused_params: dict[str, Any]
) -> Sequence[Any]:
    """Returns this library's sharders with the options of a contender."""
    options: dict[str, Any] = {"fused_params": fused_params}
    if contender.precision == "fp16":
        options["peer_precision"] = ExchangePrecision(forward="fp16", backward="fp16")
    if contender.unique:
        options["unique"] = True
    if contender.family == "sptt":
        return [SPTTEmbeddingBagCollectionSharder(mesh, towers, **options)]
    return [TowerCollectionSharder(mesh, **options), OutsideCollectionSharder(mesh, fused_params=fused_params)]


def own_tables(contender: Contender, setting: Setting) -> list[TableSpec]:
    """Returns the tables of a model; those outside towers have D columns, like the vectors that leave towers."""
    tables, dim = benchmark_tables(setting), tower_sizes(contender, setting)["tower_dim"]
    outside = own_towers(contender, setting).outside_tables(tables)
    return [replace(table, embedding_dim=dim) if table in outside else table for table in tables]


def tower_sizes(contender: Contender, setting: Setting) -> dict[str, int]:
    """Returns ``tower_dim`` (D), ``c`` and ``p`` of a tower model.

    With products, as in the study of quality, each of T towers returns at most F N / (T CR) numbers for F features, in
    vectors of at most N; here D is a multiple of 4.
    """
    if contender.family != "products":
        return {"tower_dim": EMBEDDING_DIM // contender.compression, "c": 1, "p": 0}
    towers = own_towers(contender, setting)
    outputs = len(towers.features) * EMBEDDING_DIM // (towers.num_towers * contender.compression)
    p = -(-outputs // EMBEDDING_DIM)
    return {"tower_dim": outputs // p // 4 * 4, "c": 0, "p": p}


def own_wrapper(contender: Contender, mesh: TowerMesh) -> DataParallelWrapper:
    """Returns the wrapper of the dense part for ``DistributedModelParallel``."""
    if contender.dense_reduce == "ring":
        return DefaultDataParallelWrapper()
    return HierarchicalDataParallel(mesh, precision=contender.dense_reduce)


@cache
def own_towers(contender: Contender, setting: Setting) -> TowerPlan:
    """Returns towers that send about the same bytes; a contender with ``outside`` has small tables outside them."""
    topology, tables = own_topology(contender, setting), benchmark_tables(setting)
    is_unique = contender.unique and not contender.has_towers  # inputs of single features
    rows = distinct_rows(setting) if is_unique else None
    plan = TowerPlan.balanced(tables, topology, rows=rows)
    if not contender.outside:
        return plan
    dim = EMBEDDING_DIM // contender.compression
    workload = StepWorkload(batch_size=setting.batch_size)
    vectors = [[replace(table, embedding_dim=dim) for table in own] for own in plan.tables_by_tower(tables)]
    costs = CrossingCosts(topology=topology, workload=workload, sent=dim, is_unique=is_unique)
    chosen = choose_outside(vectors, costs)
    outside = feature_names([table for table in tables if table.name in chosen])
    inside = [table for table in tables if table.name not in chosen]
    return replace(TowerPlan.balanced(inside, topology, rows=rows), outside=tuple(outside))
