"""What a user can get wrong at sharders, meshes, batches and replicas: each case with the words that name it.

All cases run on the same two ranks, and every rank must be told: a rank that is refused alone leaves others waiting.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_tower import EmbeddingTower
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt import (
    HierarchicalDataParallel,
    HotRows,
    InputError,
    ReplicaSync,
    SPTTEmbeddingBagCollectionSharder,
    TowerCollectionSharder,
    TowerMesh,
    TowerPlan,
    TowerShardingPlanner,
    TowerTopology,
    run_in_micro_batches,
)
from dmt._torchrec import group_timeout
from dmt.collectives import RankError, check_agreement, gather_objects, run_on_all_or_raise
from dmt.sharding.data_parallel import DataParallelOptimizer
from dmt.sharding.optimizers import moment_scale_of
from dmt.sharding.planner import parameter_sharding
from dmt.sharding.schemes import TablePlacement
from dmt.sptt.towers import clip_grad_norm
from tests.dmt.test_dataflow import flat_torchrec
from tests.parity import FUSED, OPTIMIZERS, FlatModel, PassThrough, TowerModel, make_tables, sequence_config
from tests.ranks import on_ranks, run_ranks
from tests.sptt_case import CPU, Case, build, distribute, shard, towers_of

TWO = Case(towers=2, ranks=1)
ONE = Case(towers=1, ranks=2, plan=((0, 1, 2, 3),))
COPIES = Case(towers=1, ranks=1, replicas=2, plan=((0, 1, 2, 3),))
FLAT = replace(TWO, kind="flat")


@dataclass
class Job:
    """Two ranks, as two towers, as a tower of two, and as two replicas of a tower."""

    rank: int
    two: TowerMesh
    one: TowerMesh
    copies: TowerMesh

    def differs(self, first: Any, second: Any) -> Any:
        return second if self.rank else first


def flat_sharder(mesh: TowerMesh, towers: Any = None, **options: Any) -> SPTTEmbeddingBagCollectionSharder:
    towers = towers or [["f0"], ["f1"]][: mesh.topology.num_towers]
    if mesh.topology.num_towers == 1:
        towers = [["f0", "f1"]]
    return SPTTEmbeddingBagCollectionSharder(mesh, TowerPlan.from_lists(towers), **options)


def sharder_of(job: Job, case: Case) -> Any:
    is_flat = case.kind == "flat"
    return flat_sharder(job.two, [["f0", "f2"], ["f1", "f3"]]) if is_flat else TowerCollectionSharder(job.two)


def changed(mesh: TowerMesh, change: Any, **planner: Any) -> Any:
    """A plan for two tables that somebody has changed."""
    return distribute(FlatModel(make_tables([8, 8])), flat_sharder(mesh), change, **planner)


def ids_of(dtype: torch.dtype, *features: str) -> KeyedJaggedTensor:
    keys = list(features or ("f0", "f1", "f2", "f3"))
    return KeyedJaggedTensor(keys, torch.ones(2 * len(keys), dtype=dtype), lengths=torch.ones(2 * len(keys)).long())


def after_int32(job: Job) -> Any:
    model = shard(FLAT, build(FLAT), job.two)
    model(ids_of(torch.int32))
    return model(ids_of(torch.int64))


class Shared(PassThrough):
    linear = nn.Linear(8, 3)

    def __init__(self, features: list[str]) -> None:
        super().__init__(features)
        self.own = Shared.linear


class Listed(PassThrough):
    def forward(self, embeddings: Any) -> Any:
        return [super().forward(embeddings)]


class Widening(nn.Module):
    width = 4

    def forward(self, embeddings: Any) -> Tensor:
        return embeddings["f0"][:, : self.width]


def widened(job: Job) -> Any:
    module = Widening()
    model = distribute(towers_of([module]), TowerCollectionSharder(job.one))
    model.module.sparse_arch(ids_of(torch.int64, "f0")).wait()
    module.width = 6
    return model.module.sparse_arch(ids_of(torch.int64, "f0")).wait()


def listed(job: Job) -> Any:
    model = distribute(towers_of([Listed(["f0"]), Listed(["f1"])]), TowerCollectionSharder(job.two))
    return model(ids_of(torch.int64, "f0", "f1"))


def sequences(job: Job, *, pinned: Any = None, is_weighted: bool = False, id_route: Any = "peer") -> Any:
    first, second = make_tables([8, 8])
    towers = [
        EmbeddingTower(EmbeddingCollection(tables=[sequence_config(first)]), PassThrough(["f0"])),
        EmbeddingTower(EmbeddingBagCollection(tables=[second], is_weighted=is_weighted), PassThrough(["f1"])),
    ]
    sharder = TowerCollectionSharder(job.two, id_route=id_route)
    return distribute(TowerModel(towers, 16), sharder, pinned=pinned)


class Twice(EmbeddingTower):
    def forward(self, *args: Any) -> Any:
        return 2 * super().forward(*args)


def trained_anew(job: Job, kind: str, part: str) -> Any:
    model = sharded(replace(TWO, kind=kind), job.two)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(kind == "frozen") if f".interaction.{part}" in name else None
    return model(ids_of(torch.int64))


def penalized(job: Job) -> Any:
    model = sequences(job)  # on rank 0, bags on rank 1
    return sum(weight.square().sum() for weight in model.parameters()).backward()  # type: ignore[union-attr]


def tied(job: Job) -> Any:
    model = FlatModel(make_tables([8, 8]))
    model.over_arch.weight = model.sparse_arch.embedding_bags["t1"].weight
    return distribute(model, flat_sharder(job.two))


def no_collection(job: Job) -> Any:
    towers = [EmbeddingTower(nn.Embedding(9, 8), nn.Identity()), *towers_of([PassThrough(["f0"])]).sparse_arch.towers]
    return distribute(TowerModel(towers, 16), TowerCollectionSharder(job.two))


def assigned(job: Job) -> Any:
    sparse: Any = shard(FLAT, build(FLAT), job.two).module.sparse_arch
    return sparse.load_state_dict(sparse.state_dict(), assign=True)


OUTSIDE = replace(FLAT, plan=((0, 2), (3,)), outside=(1,))


def cut_outside(job: Job) -> Any:
    model = FlatModel(make_tables([8, 8]))
    cut = parameter_sharding(make_tables([8, 8])[1], TablePlacement(scheme="table_wise", ranks=(0,)))
    sharder = SPTTEmbeddingBagCollectionSharder(job.one, TowerPlan.from_lists([["f0"]], outside=("f1",)))
    return distribute(model, sharder, lambda plan: plan.__setitem__("t1", cut))


def loaded_outside(job: Job, change: Callable[[dict[str, Any]], Any]) -> Any:
    sparse: Any = sharded(OUTSIDE, job.two).module.sparse_arch
    state = sparse.state_dict()
    change(state)
    return sparse.load_state_dict(state)


def no_table_in_tower(job: Job) -> Any:
    tables = make_tables([8, 8, 8, 8])
    model = nn.ModuleList([EmbeddingBagCollection(tables[:2]), EmbeddingBagCollection(tables[2:])])
    return distribute(model, flat_sharder(job.two, [["f0", "f1"], ["f2", "f3"]]))


def frozen_table(job: Job) -> Any:
    model = FlatModel(make_tables([8, 8]))
    model.sparse_arch.embedding_bags["t1"].weight.requires_grad_(False)
    return distribute(model, flat_sharder(job.two))


def on_parameters(job: Job, kind: Any, scheme: str, settings: Any, fused: Any = FUSED, dtype: Any = "FP32") -> Any:
    tables = make_tables([8, 8])
    for table in tables:
        table.data_type = DataType[dtype]
    model = FlatModel(tables)
    apply_optimizer_in_backward(kind, model.sparse_arch.parameters(), settings)
    return distribute(model, flat_sharder(job.one, fused_params=fused), scheme=scheme)


def fp16_data_parallel(job: Job) -> Any:
    tables = make_tables([8, 8])
    tables[0].data_type = DataType.FP16
    copied = parameter_sharding(tables[0], TablePlacement(scheme="data_parallel", ranks=(0, 1)))
    sharder = flat_sharder(job.one)
    return distribute(FlatModel(tables), sharder, lambda plan: plan.__setitem__("t0", copied))


def sharded(case: Case, mesh: TowerMesh) -> Any:
    return shard(case, build(case), mesh)


def hot(job: Job, case: Case = FLAT, **options: Any) -> HotRows:
    return HotRows(sharded(case, job.two), job.two, **options)


def micro_batches_twice(job: Job) -> Any:
    model = sharded(TWO, job.two)
    run_in_micro_batches(model)
    return run_in_micro_batches(model.module)


def of_optimizer(**settings: Any) -> Any:
    return DataParallelOptimizer({"t_ad": torch.zeros(2, 4)}, {"t_ad": {**FUSED, **settings}})


def both_kinds(job: Job) -> Any:
    both = nn.ModuleDict({"towers": FlatModel(make_tables([8, 8])), "rest": FlatModel(make_tables([8]))})
    sharders = [TowerCollectionSharder(job.two), EmbeddingBagCollectionSharder()]
    return TowerShardingPlanner(job.two.topology).plan(both, sharders)


def towers(job: Job, number: int, **options: Any) -> Any:
    model = towers_of([PassThrough([f"f{i}"]) for i in range(number)])
    return TowerCollectionSharder(job.two, **options).mesh_towers(model.sparse_arch)


def small_shard(plan: Any) -> None:
    plan["t1"].sharding_spec.shards[0].shard_sizes[1] = 6


def put(**values: Any) -> Callable[[Any], None]:
    return lambda plan: [setattr(plan["t1"], name, value) for name, value in values.items()] and None


DECAY = {**FUSED, "weight_decay": 0.1}
GLOBAL = "Table 't1' in tower 0 cannot be row_wise, .*: id_route='global'"
# name -> attempt, words of the message
CASES: dict[str, tuple[Callable[[Job], Any], str]] = {
    "world size": (lambda job: TowerMesh(TowerTopology(num_towers=3, ranks_per_tower=2)), r"6 ranks, .*WORLD_SIZE=2"),
    "towers of the plan": (lambda job: SPTTEmbeddingBagCollectionSharder(
        job.two, TowerPlan.from_lists([["f0", "f1"]])), "plan has 1 towers, but the topology has num_towers=2"),
    "no plan": (lambda job: SPTTEmbeddingBagCollectionSharder(job.two, [["f0"]]), r"plan is \[\['f0'\]\], but"),  # type: ignore[arg-type]
    "precision": (lambda job: flat_sharder(job.two, peer_precision="fp16"), "precision is 'fp16', but"),
    "unique": (lambda job: flat_sharder(job.two, unique="ranks"), "unique='ranks' must be True or False"),
    "unique towers that mix samples": (lambda job: distribute(towers_of([PassThrough(["f0"]), nn.Sequential(
        nn.BatchNorm1d(8))]), TowerCollectionSharder(job.two, unique=True)), "unique=True, .* tower 1 holds a Batch"),
    "unique attention with dropout": (lambda job: distribute(towers_of([PassThrough(["f0"]), nn.Sequential(
        nn.MultiheadAttention(8, 1, dropout=0.1))]), TowerCollectionSharder(job.two, unique=True)), "whose dropout"),
    "towers that mix their samples": (lambda job: distribute(towers_of([PassThrough(["f0"]), nn.Sequential(
        nn.SyncBatchNorm(8))]), TowerCollectionSharder(job.two)), "tower 1 holds a SyncBatchNorm, which would mix"),
    "a state of the module inside": (lambda job: sharded(FLAT, job.two).module.load_state_dict({}, strict=False),
                                     "on a module that holds the sharded 'sparse_arch.'"),
    "unique, global": (lambda job: flat_sharder(job.two, unique=True, id_route="global"), "unique=True needs id_"),
    "route": (lambda job: flat_sharder(job.two, id_route="globl"), "'globl' is unknown.* mean 'global'"),
    "lr": (lambda job: flat_sharder(job.two, fused_params={"lr": 0.1}), r"no setting lr=0\.1; its name is learning_ra"),
    "a name": (lambda job: flat_sharder(job.two, fused_params={"optimizer": "adam"}), "optimizer='adam' is not one"),
    "TorchRec's type": (lambda job: flat_sharder(job.two, fused_params={"output_dtype": DataType.FP16}), "SparseType"),
    "device": (lambda job: TowerShardingPlanner(job.two.topology, device_type="gpu"), "device_type='gpu' is unknown"),
    "feature of the plan": (lambda job: distribute(FlatModel(make_tables([8])), flat_sharder(job.two)),
                            "Feature 'f1' is in the tower plan but not in the model"),
    "feature of the model": (lambda job: distribute(FlatModel(make_tables([8] * 3)), flat_sharder(job.two)),
                             "Feature 'f2' is in no tower"),
    "no collection": (lambda job: distribute(nn.Linear(1, 1), flat_sharder(job.two)), "has no module of type"),
    "other sharder": (both_kinds, r"has no module of type \['EmbeddingTowerCollection'\]"),
    "columns": (lambda job: distribute(FlatModel(make_tables([10, 8])), flat_sharder(job.two)),
                "Table 't0' has embedding_dim=10; FBGEMM's kernels take multiples of 4"),
    **{f"no sharding plan, {case.kind}": (lambda job, case=case: DistributedModelParallel(
        build(case), device=CPU, sharders=[sharder_of(job, case)]), "Sharder needs a plan of TowerShardingPlanner;")
       for case in (TWO, FLAT)},
    "scheme": (lambda job: changed(job.two, put(sharding_type="grid_shard")), "tower 1 has the sharding type 'grid_"),
    "row-wise on one rank": (lambda job: changed(job.one, put(sharding_type="row_wise"), scheme="table_wise"),
                             r"a row_wise table cannot be on ranks=\[1\]"),
    "data-parallel kernel": (lambda job: changed(job.one, put(compute_kernel="fused"), scheme="data_parallel"),
                             "'t1' in tower 0 is data_parallel with compute_kernel='fused'"),
    "kernel of a table on an SSD": (lambda job: changed(job.one, put(compute_kernel="key_value"), scheme="table_wise"),
                                    "'t1' in tower 0 is table_wise with compute_kernel='key_value'"),
    "dense kernel": (lambda job: changed(job.one, put(compute_kernel="dense"), scheme="table_wise"),
                     "'t1' in tower 0 is table_wise with compute_kernel='dense'"),
    "output dtype": (lambda job: changed(job.two, put(output_dtype=DataType.FP16)), "'t1' in tower 1 has output_dtype"),
    "local rank": (lambda job: changed(job.two, put(ranks=[5])), r"'t1' in tower 1 is .* local ranks \[5\], but"),
    "cover": (lambda job: changed(job.two, small_shard), r"is 43 x 8\. The plan .* shards .*43, 6\)\], but"),
    "a batch without a feature on one rank": (
        lambda job: changed(job.two, None)(ids_of(torch.int64, "f0", *(["f1"] if job.two.rank else []))),
        "lacks feature 'f1'"),
    "placement": (lambda job: towers(job, 2, placement=[0]), r"placement=\(0,\)\. A placement names"),
    "empty mesh tower": (lambda job: towers(job, 2, placement=[0, 0]), r"placement=\(0, 0\)\. A placement names"),
    "number of towers": (lambda job: towers(job, 1), "model has 1 towers, but the topology has num_towers=2"),
    "shared parameter": (lambda job: distribute(towers_of([Shared(["f0"]), Shared(["f1"])]), TowerCollectionSharder(
        job.two)), r"Towers 0 and 1 share the parameter 'interaction\.own\.weight'"),
    "other width": (widened, r"returned outputs of widths \[6\] in torch.float32, but .* on \[4\]"),
    "a list": (listed, r"tower . returned list for 4 samples; it must return a tensor"),
    "no collection of tables": (no_collection, "0 has the type .*Tower, .* collection Embedding. .* place two"),
    "a tower with a forward of its own": (
        lambda job: distribute(TowerModel([Twice(t.embedding, t.interaction) for t in build(TWO).sparse_arch.towers],
                                          7), TowerCollectionSharder(job.two)), "0 has the type Twice, .*d unchanged"),
    **{name: (lambda job, kind=kind, part=part: trained_anew(job, kind, part), "requires_grad of .* after sharding, so")
       for name, kind, part in (("module that trains later", "frozen", ""), ("frozen bias", "modules", "linear.bias"))},
    "a weight of a table and a layer": (tied, r"t1\.weight and over_arch\.weight share a weight, but would"),
    "a penalty of weights": (penalized, "The loss uses the weights of a sharded table, but only .* Penalize the embe"),
    "sequences, global ids": (lambda job: sequences(job, id_route="global"),
                              "sequences in towers need id_route='peer'; the global"),
    **{f"sequences, {scheme}": (
           lambda job, s=scheme: sequences(job, pinned={"t0": s}),
           f"Table 't0' in tower 0 cannot be {scheme}, as its rule asks: its ids are looked up one by one",
       ) for scheme in ("column_wise", "data_parallel")},
    "sequences beside weighted bags": (lambda job: sequences(job, is_weighted=True),
                                       r"Tower 1 and tower 0 differ in is_weighted.* no weights"),
    "no table in a tower": (no_table_in_tower, r"collection .0. has no table in tower_1 of the tower plan.* merge"),
    **{f"{name} is {value}": (attempt, rf"^{name} is .*{value}.*, but must be an instance of {kind}\. [CG]")
       for name, value, kind, attempt in (
        ("mesh", "TowerMesh", "TowerMesh", lambda job: TowerCollectionSharder(TowerMesh)),  # type: ignore[arg-type]
        ("mesh", "None", "TowerMesh", lambda job: HotRows(build(FLAT), None)),  # type: ignore[arg-type]
        ("topology", "TowerMesh", "TowerTopology", lambda job: TowerShardingPlanner(job.two)),  # type: ignore[arg-type]
        ("fused_params", "adam", "dict", lambda job: flat_sharder(job.two, fused_params="adam")),
        ("model", "tuple", "Module", lambda job: clip_grad_norm(iter(()), 1.0)),  # type: ignore[arg-type]
        ("model", "FlatModel", "Module", lambda job: TowerShardingPlanner(job.two.topology).plan(FlatModel, [])),  # type: ignore[arg-type]
        ("sharder", "Sharder", "ModuleSharder", lambda job: TowerShardingPlanner(
            job.two.topology).plan(build(FLAT), [TowerCollectionSharder])),  # type: ignore[arg-type]
    )},
    "means of weighted bags": (lambda job: distribute(nn.Sequential(EmbeddingBagCollection(make_tables(
        [8, 8], pooling="MEAN"), is_weighted=True)), flat_sharder(job.two)), "'t0' in tower 0 has mean pooling of wei"),
    "frozen table": (frozen_table, "Table 't1' in tower 1 has requires_grad=False, but the optimizer"),
    **{f"{name} of a {scheme} table": (lambda job, args=(kind, scheme, {name: value}): on_parameters(job, *args),
                                       f"'t0' in tower 0 is {scheme}, but .*{verb} {name}=")
       for kind, scheme, name, value, verb in (
        (torch.optim.SGD, "data_parallel", "weight_decay", 0.1, "sets"),
        (torch.optim.SGD, "row_wise", "momentum", 0.9, "FBGEMM's exact_sgd ignores"),
        (torch.optim.Adam, "table_wise", "betas", (0.8, 0.9), "FBGEMM has no setting"),
        (RowWiseAdagrad, "row_wise", "weight_decay", 0.1, "FBGEMM's exact_row_wise_adagrad ignores"),
    )},
    **{f"fused {settings}": (lambda job, settings=settings: distribute(FlatModel(make_tables([8, 8])), flat_sharder(
        job.two, fused_params=settings)), f"'t0' in tower 0 is table_wise, but FBGEMM('s)? {words}")
       for settings, words in (
        ({"weight_decay": 1e-5}, "exact_sgd ignores weight_decay=1e-05. Change"),
        (DECAY, "exact_row_wise_adagrad ignores weight_decay=0.1 without weight_decay_mode L2 or DECOUPLE"),
        ({**FUSED, "momentum": 0.9}, "exact_row_wise_adagrad ignores momentum=0.9"),
        ({**DECAY, "weight_decay_mode": WeightDecayMode.DECOUPLE_GLOBAL}, "has no kernel for .*DECOUPLE_GLOBAL on"),
        ({"optimizer": EmbOptimType.LAMB, "max_norm": 1.0, "weight_decay": 0.1}, "lamb ignores max_norm=1.0"),
    )},
    **{f"decay of {dtype} tables with an optimizer": (lambda job, dtype=dtype: on_parameters(
        job, RowWiseAdagrad, "row_wise", {"weight_decay_mode": WeightDecayMode.L2}, {"weight_decay": 1}, dtype), words)
       for dtype, words in (("FP16", "^nothing$"), ("FP32", "ignores weight_decay=1 on a CPU in FP32 bags"))},
    "FP16 data-parallel": (fp16_data_parallel, "Table 't0' in tower 0 is data_parallel, but its weights are FP16"),
    "a table outside towers in one": (cut_outside, "'t1' outside towers is table_wise, but tables outside towers must"),
    "a batch without a feature outside": (
        lambda job: sharded(OUTSIDE, job.two)(ids_of(torch.int64, "f0", "f2", "f3")), "The batch lacks feature 'f1'"),
    "state without a table": (lambda job: loaded_outside(job, lambda state: state.pop("embedding_bags.t1.weight")),
                              r"RuntimeError.* Missing keys: embedding_bags.t1.weight\."),
    "state with another table": (
        lambda job: loaded_outside(job, lambda state: state.update({"embedding_bags.t9.weight": torch.zeros(1)})),
        r"RuntimeError.* Unknown keys: embedding_bags.t9.weight\."),
    "state of longer tables": (
        lambda job: loaded_outside(job, lambda state: state.update({f"embedding_bags.t{i}.weight": torch.zeros(
            99, 8) for i in (0, 2, 3) if f"embedding_bags.t{i}.weight" in state})),
        r"_bags.t[03].weight' has shape \(99, 8\), but \(4[09], 8\) in the model"),
    "hot table outside": (lambda job: hot(job, OUTSIDE).replicate({"t1": [1]}), "'t1' cannot have copies: it is out"),
    "assign=True": (assigned, r"load_state_dict\(assign=True\) cannot replace"),
    "another key": (lambda job: [model(ids_of(torch.int64, "f0", "f1", "f2", "f3", *more)) for model in [
        sharded(FLAT, job.two)] for more in ([], ["x"])], r"5 keys, with \['x'\] at position 4; the first batch had 4"),
    "weights that train": (lambda job: sharded(replace(FLAT, weighted=True), job.two)(KeyedJaggedTensor(
        ["f0", "f1", "f2", "f3"], torch.ones(8).long(), torch.ones(8, requires_grad=True), torch.ones(8).long())),
        "has weights that require a gradient, which does not cross ranks; pass"),
    "floats as ids": (lambda job: sharded(FLAT, job.two)(ids_of(torch.float32)), "ids of torch.float32; ids must be"),
    "int64 after int32": (after_int32, "ids of torch.int64, but the first batch had torch.int32"),
    **{f"global route, {kind}": (lambda job, kind=kind: sharded(replace(
        ONE, kind=kind, scheme="mixed", id_route="global"), job.one), GLOBAL) for kind in ("flat", "modules")},
    "optimizer of a data-parallel table": (lambda job: of_optimizer(optimizer=OPTIMIZERS["adam"].__class__.LAMB),
                                           "Table 't_ad' is data-parallel, but its optimizer is lamb"),
    "decay of a data-parallel table": (lambda job: of_optimizer(weight_decay=0.1),
                                       "'t_ad' is data-parallel, but its fused optimizer sets weight_decay=0.1"),
    "norm": (lambda job: clip_grad_norm(nn.Linear(1, 1), 0.0), r"max_norm=0\.0 must be above 0"),
    # Micro-batches.
    "no micro-batch": (lambda job: run_in_micro_batches(sharded(TWO, job.two), 0), "num_micro_batches=0 must be at"),
    "micro-batches of a plain module": (lambda job: run_in_micro_batches(nn.Linear(2, 2)), "this Linear has no shard"),
    "micro-batches of ranks": (lambda job: run_in_micro_batches(sharded(TWO, job.two), 2 * (1 - job.rank)),
                               "num_micro_batches is 2 on rank 0, but 0 on rank 1"),
    "micro-batches of a batch norm": (lambda job: run_in_micro_batches(distribute(towers_of([PassThrough(["f0"]),
        nn.Sequential(nn.BatchNorm1d(8))]), TowerCollectionSharder(job.two))), "TowerModel holds a BatchNorm1d, which"),
    "micro-batches twice": (micro_batches_twice, "This TowerModel already runs in micro-batches; call detach"),
    "micro-batches of TorchRec's module": (lambda job: run_in_micro_batches(flat_torchrec(
        make_tables([8, 8]), FlatModel(make_tables([8, 8])).state_dict())),
        r"FlatModel has a ShardedEmbeddingBagCollection, .* once per micro-batch\. Shard all its tables with dmt's"),
    # Hot rows.
    "hot towers": (lambda job: HotRows(sharded(TWO, job.two), job.two), "hot rows need a flat model; towers send"),
    "hot rows, global ids": (lambda job: hot(job, replace(FLAT, id_route="global")), "hot rows need id_route='peer'"),
    "hot replicas": (lambda job: HotRows(sharded(replace(COPIES, kind="flat"), job.copies), job.copies),
                     "hot rows need num_replicas=1"),
    "hot pair": (lambda job: hot(job, replace(FLAT, plan=((0, 1), (3, 2)), collections=2)), "has 2. Merge several"),
    "hot means": (lambda job: hot(job, replace(FLAT, pooling="MEAN")), "can have copies; .* are averaged.*Leave Hot"),
    **{f"hot {name}={value}": (lambda job, name=name, value=value: hot(job, **{name: value}), f"{name}={value!r} mu")
       for name, value in (("extra_memory", 0), ("extra_memory", "0.1"), ("refresh_every", 0), ("refresh_every", 2.5))},
    "hot table": (lambda job: hot(job).replicate({"t9": [1]}), "'t9' cannot have copies: the model has no such table"),
    "hot row": (lambda job: hot(job).replicate({"t1": [99]}), "'t1' .* int64 from 99 to 99"),
    "hot row below": (lambda job: hot(job).replicate({"t1": [-1, 3]}), "'t1' .* int64 from -1 to 3"),
    "hot mask": (lambda job: hot(job).replicate({"t1": np.ones(4, dtype=bool)}),
                 "given numbers are bool from True to True. Give .* mask, give np.flatno"),
    "hot shares": (lambda job: hot(job).replicate(job.differs({}, {"t1": [0.5]})), "'t1' .* are float64 from"),
    "hot rows of ranks": (lambda job: hot(job).replicate({"t1": [job.rank]}), "HotRows.replicate: rows is"),
    "memories": (lambda job: hot(job, extra_memory=0.5 + job.rank), "extra_memory is 0.5 on rank 0, but 1.5 on rank 1"),
    # Replicas.
    **{f"c = {c}": (lambda job, c=c: sharded(replace(COPIES, moment_scale=c), job.copies),
                    "moment_scale=.* must be above 0 and at most num_replicas=2")
       for c in (0, -1, 3, float("nan"), True, "replicas")},
    "c of SGD": (lambda job: sharded(replace(COPIES, optimizer="sgd", moment_scale=2), job.copies),
                 "moment_scale=2 scales the moments of rowwise_adagrad and adagrad, but"),
    **{f"c of decay {mode}": (lambda job, mode=mode: moment_scale_of("num_replicas", {
        **DECAY, "weight_decay_mode": WeightDecayMode[mode]}, 2), f"what weight_decay_mode={mode} does")
       for mode in ("DECOUPLE", "COUNTER")},
    "no sync": (lambda job: sharded(COPIES, job.copies)(COPIES.draw(job.rank, 0)[0]),
                r"num_replicas=2, but nothing keeps the replicas equal.*ReplicaSync\(model"),
    **{f"{name} = {value}": (
        lambda job, name=name, value=value: ReplicaSync(sharded(COPIES, job.copies), job.copies, **{name: value}),
        f"ReplicaSync: .*{name}={value!r}")
       for name, value in (("interval", 0), ("interval", 1.5), ("optimizer_state", "late"))},
    "sync by another mesh": (lambda job: ReplicaSync(sharded(FLAT, job.two), job.copies), "ReplicaSync: shape.*absent"),
    "sync of a plain model": (lambda job: ReplicaSync(build(COPIES), job.copies), "the model has no tables that"),
    "dense precision": (lambda job: HierarchicalDataParallel(job.two, precision="fp8"), "'fp8' is unk"),  # type: ignore[arg-type]
    # Ranks that are told different things.
    "topologies": (lambda job: TowerMesh(job.differs(TWO, ONE).topology), "topology is .* rank 0, but .* rank 1"),
    "tower plans": (lambda job: distribute(FlatModel(make_tables([8, 8])), flat_sharder(
        job.two, job.differs([["f0"], ["f1"]], [["f1"], ["f0"]]))),
        r"towers.tower 0 is \['t0'\] on rank 0, but \['t1'\] on rank 1"),
    "sharding plans": (lambda job: distribute(FlatModel(make_tables([8, 8])), flat_sharder(job.one), pinned={
        "t0": TablePlacement(scheme="table_wise", ranks=(job.rank,))}),
        r"table.t0.sharding is .*ranks=\[0\].* on rank 0, but .*\[1\]"),
    "tables": (lambda job: distribute(FlatModel(make_tables([8, 8], rows=40 + job.rank)), flat_sharder(job.one)),
               r"table.t0.config is .*=40.* on rank 0, but .*=41.* on rank 1"),
    "rates": (lambda job: distribute(FlatModel(make_tables([8, 8])), flat_sharder(
        job.two, fused_params={**FUSED, "learning_rate": job.differs(0.1, 0.5)})),
        "t0.fused_params.learning_rate is 0.1 on rank 0, but 0.5 on rank 1"),
    "eps": (lambda job: distribute(FlatModel(make_tables([8, 8])), flat_sharder(
        job.two, fused_params=FUSED | job.differs({}, {"eps": 0.1}))), "t0.fused_params.eps is .*, but 0.1 on rank 1"),
    "weights": (lambda job: sharded(replace(TWO, weighted=bool(job.rank)), job.two),
                r"is_weighted is \[False, False\] on rank 0, but \[True, True\] on rank 1"),
    "formats": (lambda job: sharded(replace(TWO, precision=job.differs("fp16", "bf16")), job.two),
                "peer_precision is .* on rank 0, but .* on rank 1"),
    "scales": (lambda job: sharded(replace(COPIES, moment_scale=job.differs(1, 2)), job.copies),
               "moment_scale is .* on rank 0, but .* on rank 1"),
    "ids": (lambda job: sharded(TWO, job.two)(ids_of(job.differs(torch.int64, torch.int32))),
            r"The first batch: dtype of ids is torch\.int64 on rank 0, but torch\.int32"),
    "intervals": (lambda job: ReplicaSync(sharded(COPIES, job.copies), job.copies, interval=1 + job.rank),
                  "ReplicaSync: interval is 1 on rank 0, but 2 on rank 1"),
    "states": (lambda job: ReplicaSync(sharded(COPIES, job.copies), job.copies, optimizer_state=job.differs(
        "now", "delayed")), "ReplicaSync: optimizer_state is now on rank 0, but delayed on rank 1"),
    "dense precisions": (lambda job: HierarchicalDataParallel(job.copies, precision=job.differs("fp32", "bf16")),
                         "HierarchicalDataParallel: precision is fp32 on rank 0, but bf16 on rank 1"),
    "static graph": (lambda job: HierarchicalDataParallel(job.copies, **job.differs({}, {"static_graph": True})),
                     "HierarchicalDataParallel: static_graph is absent on rank 0, but True on"),
    "a key inside": (lambda job: check_agreement("Here", {"a": {"x": job.rank, "y": [3]}}, dist.group.WORLD),
                     r"^Here: a.x is 0 on rank 0, but 1 on rank 1\."),
}  # fmt: skip


def cases_on_rank(rank: int) -> dict[str, str]:
    job = Job(rank, *(TowerMesh(case.topology) for case in (TWO, ONE, COPIES)))
    told = {}
    for name, (attempt, _) in CASES.items():
        try:
            attempt(job)
            told[name] = "nothing"
        except InputError as error:
            told[name] = str(error)
        except Exception as error:
            told[name] = f"no InputError, but {type(error).__name__}: {error}"
    return told


@pytest.fixture(scope="module")
def told() -> list[dict[str, str]]:
    return run_ranks(cases_on_rank, 2)


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_it_is_named_on_every_rank(name: str, told: list[dict[str, str]]) -> None:
    for of_rank in told:
        assert re.search(CASES[name][1], of_rank[name]), f"{name}: {of_rank[name]}"


def fail(text: str) -> None:
    raise InputError(text)


@on_ranks(2)
def test_a_result_that_does_not_pickle_fails_on_all_ranks(rank: int) -> None:
    with pytest.raises(RankError, match=r"^rank 1: .*cannot pickle 'generator'"):
        run_on_all_or_raise(lambda: (i for i in range(3)) if rank == 1 else rank, dist.group.WORLD)
    with pytest.raises(InputError, match=r"^rank 1 on \S+: no such file"):
        run_on_all_or_raise(lambda: fail("no such file") if rank == 1 else None, dist.group.WORLD)
    with pytest.raises(InputError, match=r"^no such file"):
        run_on_all_or_raise(lambda: fail("no such file"), dist.group.WORLD)
    assert run_on_all_or_raise(lambda: [rank], dist.group.WORLD) == [[0], [1]]
    check_agreement("Here", {"a": {"x": (1, None)}, "b": torch.float32}, dist.group.WORLD)


def test_a_mesh_needs_a_process_group() -> None:
    with pytest.raises(InputError, match=r"TowerMesh needs a default process group\. Call"):
        TowerMesh(TWO.topology)


def groups_on_rank(rank: int, num_towers: int, ranks_per_tower: int, num_replicas: int) -> int:
    # Ranks are in different numbers of the user's groups.
    dist.new_group([0, 1])
    made: list[Any] = []
    new_group = dist.new_group

    def counted(*args: Any, **options: Any) -> Any:
        made.append(new_group(*args, **options))
        return made[-1]

    topology = TowerTopology(num_towers=num_towers, ranks_per_tower=ranks_per_tower, num_replicas=num_replicas)
    with patch.object(dist, "new_group", counted):
        mesh = TowerMesh(topology)
    groups = [group for group in made if isinstance(group, dist.ProcessGroup)]
    assert {group_timeout(group) for group in groups} == {group_timeout(mesh.global_group)}
    for group, ranks in ((mesh.tower_group, topology.tower_groups()), (mesh.peer_group, topology.peer_groups())):
        mine = next(members for members in ranks if rank in members)
        assert gather_objects(rank, group) == mine
    return len(made)


@pytest.mark.ranks
@pytest.mark.parametrize(("sizes", "number"), [((4, 1, 1), 5), ((2, 2, 1), 8), ((2, 1, 2), 9)])
def test_groups_of_one_rank_are_made_once_and_all_have_the_timeout_of_the_job(
    sizes: tuple[int, int, int], number: int
) -> None:
    assert run_ranks(groups_on_rank, 4, *sizes) == [number] * 4
