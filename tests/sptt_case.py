"""Distributed training beside plain training: what a case is, how it is sharded, and the one loop that compares both.

A `Case` names everything that may differ between two runs. `train` trains it on ranks and, on rank 0, as unsharded
modules in one process (`dmt.testing.PlainTraining`, the oracle), and compares after every step: columns and logits of
this rank's samples, dense gradients and their norm, dense weights, and this rank's shards of tables and of their
optimizer states. Each difference is divided by its bound (`Bounds`); `check` wants every quotient to be at most 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_tower import EmbeddingTower
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dmt import (
    HierarchicalDataParallel,
    HotRows,
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
from dmt.sharding.optimizers import moment_scale_of
from dmt.sharding.schemes import TablePlacement
from dmt.sptt.dataflow import SPTTModule
from dmt.sptt.precision import ExchangePrecision
from dmt.sptt.state import TableTensor, table_tensors
from dmt.sptt.towers import clip_grad_norm
from dmt.testing import gather_plain_state, load_plain_state, table_layout
from dmt.testing.plain import PlainTable, is_table, table_name
from tests.parity import (
    EPS,
    FUSED,
    LR,
    OPTIMIZERS,
    AttentionTowerModule,
    FlatModel,
    PassThrough,
    PipelinedBatch,
    SumTowerModule,
    TowerModel,
    Trained,
    dense_optimizer,
    draw_batch,
    make_tables,
    plain_outputs,
    plain_training,
    sequence_config,
    share,
    train_plainly,
)
from tests.ranks import DEVICE

CPU = torch.device("cpu")
# Classes that give a table an optimizer of its own.
OWN = {"rowwise_adagrad": RowWiseAdagrad, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}
PRECISIONS = {
    "fp32": ExchangePrecision(),
    "fp16": ExchangePrecision(forward="fp16", backward="fp16"),
    "bf16": ExchangePrecision(forward="bf16", backward="bf16"),
}
# The second step reads the states of the first, the third those that were both read and written.
STEPS = 3
_tables_of = cache(lambda case: case.tables())
MIXES = {
    "mixed": ("table_wise", "row_wise", "column_wise", "data_parallel"),
    "mixed-model-parallel": ("row_wise", "column_wise", "table_wise"),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    towers: int
    ranks: int
    replicas: int = 1
    replica_placement: Literal["inter_host", "intra_host"] = "inter_host"
    ranks_per_host: int | None = None
    dims: tuple[int, ...] = (8, 8, 8, 8)
    features: tuple[tuple[str, ...], ...] = ()  # of each table; by default table i has f<i>
    plan: tuple[tuple[int, ...], ...] = ((0, 2), (1, 3))
    outside: tuple[int, ...] = ()  # tables that every rank holds; in no tower of the plan
    sequences: tuple[int, ...] = ()  # towers of the plan that look up sequences, whose modules attend to them
    kind: str = "modules"  # modules | pass | frozen | flat
    collections: int = 1  # of a flat model: table i is in collection i mod this
    scheme: str = "table_wise"  # one for all tables, or a key of MIXES: table i takes scheme i of the mix
    pooling: str | tuple[str, ...] = "SUM"  # of all tables, or of each
    max_bag: int = 1
    weighted: bool = False
    sizes: tuple[int, ...] = ()
    id_dtype: torch.dtype = torch.int64
    placement: tuple[int, ...] | None = None
    fp16: tuple[int, ...] = ()  # tables with FP16 weights
    kernel: Any = "fused"  # of all tables that are not data-parallel
    optimizer: str = "rowwise_adagrad"
    eps: float = EPS  # of the optimizers of tables and of the dense part
    own: tuple[tuple[int, str, float], ...] = ()  # table, its optimizer (a key of OWN) and rate
    warmup: bool = False  # the rates of tables rise in the first steps
    clip: float | None = None
    id_route: Any = "peer"
    precision: str = "fp32"  # of outputs and gradients between towers, a key of PRECISIONS
    micro_batches: int = 1
    unique: bool = False
    hot: bool = False  # copies of rows in every table that allows them; of other rows from the third step on
    pipeline: Literal["", "on", "detached"] = ""  # TorchRec's; detached once, with two batches on their way
    dense: tuple[tuple[str, Any], ...] | None = None  # arguments of HierarchicalDataParallel
    moment_scale: Any = "num_replicas"
    interval: int = 1
    delayed: bool = False
    steps: int = STEPS

    @property
    def world(self) -> int:
        return self.replicas * self.towers * self.ranks

    @property
    def num_steps(self) -> int:
        return self.steps + self.hot  # the fourth reads the states of rows that are copied at the third

    @property
    def schedule(self) -> dict[str, Any]:
        return {"interval": self.interval, "optimizer_state": "delayed" if self.delayed else "now"}

    @property
    def topology(self) -> TowerTopology:
        return TowerTopology(
            num_replicas=self.replicas,
            num_towers=self.towers,
            ranks_per_tower=self.ranks,
            replica_placement=self.replica_placement,
            ranks_per_host=self.ranks_per_host,
        )

    def draw(self, rank: int, step: int) -> tuple[KeyedJaggedTensor, Tensor]:
        options: dict[str, Any] = {"max_bag": self.max_bag, "weighted": self.weighted, "repeated": self.unique}
        ids, labels = draw_batch(rank, step, _tables_of(self), self.sizes[rank] if self.sizes else 5, **options)
        if self.id_dtype != torch.int64:
            ids = KeyedJaggedTensor(ids.keys(), ids.values().to(self.id_dtype), ids.weights_or_none(), ids.lengths())
        return ids, labels

    def tables(self) -> list[EmbeddingBagConfig]:
        pooling = (self.pooling,) * len(self.dims) if isinstance(self.pooling, str) else self.pooling
        tables = [make_tables(list(self.dims), pooling=of_table)[i] for i, of_table in enumerate(pooling)]
        for table, features in zip(tables, self.features, strict=False):
            table.feature_names = list(features)
        for i in self.fp16:
            tables[i].data_type = DataType.FP16
        return tables

    def pins(self) -> dict[str, TablePlacement]:
        """Placements of a mix; a table that cannot be cut stays table-wise, on rank (number mod ranks)."""
        if self.scheme not in MIXES:
            return {}
        mix = MIXES[self.scheme]
        everyone = tuple(range(self.ranks))
        looked_up_one_by_one = {i for tower in self.sequences for i in self.plan[tower]}
        pins = {}
        for i, dim in enumerate(self.dims):
            if i in self.outside:
                continue
            scheme = mix[i % len(mix)]
            if i in looked_up_one_by_one:
                scheme = ("table_wise", "row_wise")[i % 2]
            if scheme == "column_wise" and dim >= 8 and self.ranks > 1:
                ranks = tuple(range(min(self.ranks, dim // 4)))
                pins[f"t{i}"] = TablePlacement(scheme="column_wise", ranks=ranks[::-1])
            elif scheme in ("row_wise", "data_parallel") and self.ranks > 1:
                pins[f"t{i}"] = TablePlacement(scheme=scheme, ranks=everyone)
            else:
                pins[f"t{i}"] = TablePlacement(scheme="table_wise", ranks=(i % self.ranks,))
        return pins


def build(case: Case) -> nn.Module:
    tables = case.tables()
    if case.kind == "flat":
        return FlatModel(tables, case.weighted, case.collections)
    towers, width = [], 0
    for number, members in enumerate(case.plan):
        own = [tables[i] for i in members]
        every = [feature for table in own for feature in table.feature_names]
        # A feature of several tables has a key for each.
        keys = [f if every.count(f) == 1 else f"{f}@{table.name}" for table in own for f in table.feature_names]
        dims = [table.embedding_dim for table in own for _ in table.feature_names]
        module: nn.Module = PassThrough(keys)
        out = sum(dims)
        if case.kind in ("modules", "frozen"):
            out = 3 + number  # towers of unequal output width
            is_sequence = number in case.sequences
            module = AttentionTowerModule(keys, dims[0], out) if is_sequence else SumTowerModule(keys, dims, out)
            module.requires_grad_(case.kind == "modules")
        if number in case.sequences:
            collection: nn.Module = EmbeddingCollection(tables=list(map(sequence_config, own)))
        else:
            collection = EmbeddingBagCollection(tables=own, is_weighted=case.weighted)
        towers.append(EmbeddingTower(collection, module))
        width += out
    outside = None
    if case.outside:
        outside = EmbeddingBagCollection(tables=[tables[i] for i in case.outside], is_weighted=case.weighted)
        width += sum(tables[i].embedding_dim * len(tables[i].feature_names) for i in case.outside)
    return TowerModel(towers, width, outside)


def shard(case: Case, model: nn.Module, mesh: TowerMesh) -> DistributedModelParallel:
    fused = {**FUSED, "optimizer": OPTIMIZERS[case.optimizer], "eps": case.eps}
    options: dict[str, Any] = {
        "moment_scale": case.moment_scale,
        "fused_params": {**fused, "stochastic_rounding": False},  # of FP16 tables on GPUs
        "id_route": case.id_route,
        "peer_precision": PRECISIONS[case.precision],
        "unique": case.unique,
    }
    weights = {table_name(name): weight for name, weight in model.named_parameters() if is_table(name)}
    for i, name, rate in case.own:
        apply_optimizer_in_backward(OWN[name], [weights[f"t{i}"]], {"lr": rate})
    if case.kind == "flat":
        tables = case.tables()
        plan = [[f for i in members for f in tables[i].feature_names] for members in case.plan]
        outside = dict.fromkeys(f for i in case.outside for f in tables[i].feature_names)
        towers = TowerPlan.from_lists([list(dict.fromkeys(features)) for features in plan], outside=tuple(outside))
        sharders: list[Any] = [SPTTEmbeddingBagCollectionSharder(mesh, towers, **options)]
    else:
        sharders = [TowerCollectionSharder(mesh, placement=case.placement, **options)]
        sharders.append(OutsideCollectionSharder(mesh, fused_params=options["fused_params"]))
    # In a tower of one rank every table is whole.
    scheme = case.scheme if case.ranks > 1 else "table_wise"
    own: dict[str, Any] = {"pinned": case.pins()} if case.scheme in MIXES else {"scheme": scheme}
    if case.kernel != "fused":
        pins = case.pins() if case.scheme in MIXES else {}
        own["pinned"] = {f"t{i}": case.kernel for i in range(len(case.dims))} | {
            name: placement if placement.scheme == "data_parallel" else replace(placement, kernel=case.kernel)
            for name, placement in pins.items()
        }
    planner = TowerShardingPlanner(mesh.topology, device_type=DEVICE.type, **own)
    wrapper = None if case.dense is None else HierarchicalDataParallel(mesh, **dict(case.dense))
    return DistributedModelParallel(
        model,
        device=DEVICE,
        plan=planner.plan(model, sharders),
        sharders=sharders,
        **({} if wrapper is None else {"data_parallel_wrapper": wrapper}),
    )


def distribute(model: nn.Module, sharder: Any, change: Any = None, **planner: Any) -> DistributedModelParallel:
    """Shards a model by the planner's plan, which ``change`` may change."""
    plan = TowerShardingPlanner(sharder.mesh.topology, device_type=DEVICE.type, **planner).plan(model, [sharder])
    if change is not None:
        change(next(iter(plan.plan.values())))
    return DistributedModelParallel(model, device=DEVICE, plan=plan, sharders=[sharder])


def towers_of(modules: list[nn.Module], tables: list[Any] | None = None) -> TowerModel:
    """Makes a model with one table and one module per tower; a module's output is as wide as its table."""
    tables = tables or make_tables([8] * len(modules))
    pairs = zip(tables, modules, strict=True)
    towers = [EmbeddingTower(EmbeddingBagCollection(tables=[table]), module) for table, module in pairs]
    return TowerModel(towers, sum(table.embedding_dim for table in tables))


class Optimizers:
    """The optimizers of the dense part and of the tables as one, for train pipelines; clips gradients first."""

    def __init__(self, case: Case, model: DistributedModelParallel) -> None:
        named = in_backward_optimizer_filter((n, p) for n, p in model.named_parameters() if p.requires_grad)
        self.parameters = dict(named)
        assert not any(map(is_table, self.parameters)), "a table would be updated twice"
        stages = [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=4, value=0.25)] if case.warmup else []
        rates = model.fused_optimizer if case.own else WarmupOptimizer(model.fused_optimizer, stages, lr=LR)
        self.parts = [
            KeyedOptimizerWrapper(self.parameters, dense_optimizer(case.optimizer, case.eps)),
            rates,  # the schedule gives all tables one rate
        ]
        self._model, self._clip = model, case.clip
        self.norm = 0.0

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def step(self) -> None:
        if self._clip is not None:
            self.norm = float(clip_grad_norm(self._model, self._clip))
        for part in self.parts:
            part.step()


def columns_of(result: Any) -> Tensor:
    result = result.wait() if hasattr(result, "wait") else result
    return result.values() if isinstance(result, KeyedTensor) else result


class Worst(dict[str, float]):
    """The largest quotient of a difference and its bound, by kind."""

    def note(self, kind: str, ours: Tensor, theirs: Tensor, bound: float) -> None:
        assert ours.shape == theirs.shape, f"{kind}: {ours.shape} instead of {theirs.shape}"
        error = float((ours.detach().cpu().float() - theirs.detach()).abs().max()) if ours.numel() else 0.0
        # NaN is larger than any bound.
        quotient = 0.0 if error == 0 else error / bound if bound and error < torch.inf else torch.inf
        self[kind] = max(self.get(kind, 0.0), quotient)


_SENT = {"fp32": 0.0, "fp16": 1.01 * 2**-11, "bf16": 1.01 * 2**-8}  # half a unit in the last place
_HALF = 2**-12
_WEIGHTS = 2e-6


class Bounds:
    """Bounds of the differences, each justified here.

    Forward with equal weights: bitwise where only bytes move; else half a unit in the last place of the format sent,
    relative to the largest number, with room for FP32.

    Training: gradients of a table row are summed over ranks in another order than in one process, and each step adds a
    few units in the last place of numbers near 1. Of a gradient that cancels AdaGrad and Adam make no large step: they
    divide it by more than EPS, so rounding of 1e-9 moves a weight by LR 1e-9 / EPS. Later outputs are sums over such
    weights. Gradients and states, much smaller than 1, have bounds relative to the largest of their kind; where numbers
    near 0.1 cancel, rounding of 5e-9 moves a state, which is a sum of squares, by 1e-8 times its root.

    In 16 bits rounding moves a gradient by the error of the format and, through the logits, by as much again, in each
    of at most four steps. That is not small beside EPS, so AdaGrad and Adam would make steps of it where a gradient
    cancels: such cases train with SGD. The bound of weights is a share of the largest way that one went: for tables one
    of a table, since a bias goes further.

    FP16 tables: FBGEMM rounds new weights to nearest, half the spacing of FP16 in each step (2^-12 of a weight below
    1), and half as much again for what a changed weight does to later gradients and to AdaGrad's quotient.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        # FBGEMM averages a bag as a sum of v/n, the plain module as (sum of v)/n; row-wise sums a bag rank by rank.
        # With hot rows a bag is a sum of two.
        cut = case.scheme == "row_wise" or case.scheme in MIXES or case.hot
        rounds = case.max_bag > 1 and ("MEAN" in case.pooling or cut)
        self.only_bytes_move = case.kind in ("pass", "flat") and not rounds and case.precision == "fp32"
        self.forward = 1e-6 if case.precision == "fp32" else _SENT[case.precision]
        share = max([2**-11] * (case.precision == "fp16") + [2**-8] * (case.precision == "bf16"), default=0.0)
        # Gradients of two hosts are rounded before they are added, and may nearly cancel.
        halves = dict(case.dense or ()).get("precision") == "bf16"
        self._share = 8 * max(share, 2**-7 if halves else 0.0)
        self.is_exact = not (self._share or case.fp16)
        """No number is rounded to 16 bits."""
        self.moved = self.moved_tables = 0.0
        """The largest change so far of any weight, and of any weight of a table."""
        self.relative = max(2e-5, self._share, 8 * _HALF if case.fp16 else 0.0)

    def columns(self, step: int, expected: Tensor) -> float:
        largest = max(1.0, float(expected.abs().max()) if len(expected) else 0.0)
        if step == 0:
            return 0.0 if self.only_bytes_move else 2 * self.forward * largest
        return 5 * _WEIGHTS * largest

    def logits(self, step: int, expected: Tensor) -> float:
        # The largest sum of the over arch's weights is the square root of their number, here less than 8.
        return self.columns(step, expected) if step else 8 * max(self.columns(step, expected), 1e-6)

    def table(self, name: str) -> float:
        if self._case.fp16:
            return 1.5 * self._case.steps * _HALF if int(name[1:]) in self._case.fp16 else _HALF
        return self._share * self.moved_tables or _WEIGHTS

    def dense(self) -> float:
        return _HALF if self._case.fp16 else self._share * self.moved or _WEIGHTS


def own_tables(model: nn.Module) -> list[TableTensor]:
    return [one for part in model.modules() if isinstance(part, SPTTModule) for one in table_tensors(part)]


class Training:
    """A case's sharded model in training, with its options; every model of the case begins with the same weights."""

    def __init__(self, rank: int, case: Case, mesh: TowerMesh) -> None:
        torch.manual_seed(0)
        self.rank, self.case, self.mesh = rank, case, mesh
        self.plain = Trained(build(case))
        for name, weight in self.plain.named_parameters():
            if is_table(name):
                weight.data = weight.data.half().float() if case.fp16 else weight.data  # what both can hold
        self.start = {name: value.detach().clone() for name, value in self.plain.state_dict().items()}
        torch.manual_seed(100 + rank)  # whatever ranks draw on their own must not matter
        self.model = shard(case, Trained(build(case)), mesh)
        load_plain_state(self.model, self.start)
        for one in own_tables(self.model):
            # `ReplicaSync` must give every replica the weights of replica 0.
            one.tensor.add_(mesh.replica if one.is_replicated else 0)
        self.sync = ReplicaSync(self.model, mesh, **case.schedule) if case.replicas > 1 else None
        self.hot = HotRows(self.model, mesh, refresh_every=None) if case.hot else None
        if case.micro_batches > 1:
            run_in_micro_batches(self.model.module.model, case.micro_batches)
        self.optimizers = Optimizers(case, self.model)
        optimizers: Any = self.optimizers
        self.pipeline = TrainPipelineSparseDist(self.model, optimizers, DEVICE) if case.pipeline else None
        self._batches = (self._draw(step) for step in range(case.num_steps))

    def _draw(self, step: int) -> PipelinedBatch:
        return PipelinedBatch(*self.case.draw(self.rank, step)).to(DEVICE)

    def step(self, number: int) -> tuple[Any, Tensor]:
        """Takes a step; returns what the model returns."""
        if self.hot is not None and number in (0, 2):
            # From one choice to the next some rows stay, some leave and some join.
            every = 3 if number == 0 else 2
            tables = [table for table in self.case.tables() if table.name not in self.hot.left_out]
            self.hot.replicate({table.name: range(0, table.num_embeddings, every) for table in tables})
        if self.pipeline is None:
            self.optimizers.zero_grad()
            loss, result = self.model(self._draw(number))
            loss.backward()
            self.optimizers.step()
        else:
            if number == 2 and self.case.pipeline == "detached":
                self.evaluate(self.pipeline.detach())
                self.pipeline.attach()
            result = self.pipeline.progress(self._batches)
        if self.sync is not None:
            self.sync.step()
        return result

    def evaluate(self, model: nn.Module) -> None:
        """Runs a pass without gradients, which must not count as training."""
        with torch.no_grad():
            model(self._draw(77))

    def bring_up_to_date(self, number: int) -> bool:
        """Brings this rank's tables up to date after odd steps; returns whether they are."""
        if self.hot is not None and number % 2:
            # Reading tables or states brings them up to date with the copies.
            _ = self.model.state_dict() if number == 1 else self.model.fused_optimizer.state_dict()
        return self.hot is None or number % 2 == 1


class Oracle:
    """Plain training of the same case on rank 0, which sends its numbers to every rank."""

    def __init__(self, ours: Training) -> None:
        self._ours, self._case, self._replica = ours, ours.case, ours.mesh.replica
        self.worst, self.bounds = Worst(), Bounds(ours.case)
        self.training = plain_training(
            ours.plain,
            replicas=self._case.replicas,
            optimizer=self._case.optimizer,
            eps=self._case.eps,
            layout=table_layout(ours.model),
            moment_scale=self._case.moment_scale,
            **self._case.schedule,
        )
        for number, name, rate in self._case.own:
            self._give_own(f"t{number}", name, rate)

    def _give_own(self, name: str, optimizer: str, rate: float) -> None:
        """Gives a table of all replicas an optimizer and a rate of its own."""
        settings = {"optimizer": OPTIMIZERS[optimizer], "eps": self._case.eps}
        scale = moment_scale_of(self._case.moment_scale, settings, self._case.replicas)
        for table in (tables[key] for tables in self.training.tables for key in tables if table_name(key) == name):
            PlainTable.__init__(table, table.weight, table.widths if table.is_averaged else [], settings, scale)
            table.step = lambda _, table=table: PlainTable.step(table, rate)

    @torch.no_grad()
    def forward(self, number: int) -> tuple[Any, Tensor]:
        """Returns what the module of this replica returns for this rank's batch."""
        return plain_outputs(self.training.modules[self._replica].model, self._case.draw(self._ours.rank, number)[0])

    def step(self, number: int) -> None:
        """Takes the same step as the ranks."""
        case, norm = self._case, 0.0
        if case.warmup:
            self.training.learning_rate = LR * min(1.0, 0.25 + 0.75 * number / 4)
        if self._ours.rank == 0:
            of_replicas = case.topology.sharding_groups()
            batches = [[PipelinedBatch(*case.draw(rank, number)) for rank in ranks] for ranks in of_replicas]
            norm = train_plainly(self.training, *batches, clip=case.clip)
            self.worst.note("norm", torch.tensor(self._ours.optimizers.norm), torch.tensor(norm), 1e-5 * norm)
        share(self.training)

    def compare_outputs(self, number: int, ours: tuple[Any, Tensor], theirs: tuple[Any, Tensor]) -> None:
        (columns, logits), expected = ours, columns_of(theirs[0])
        if self._case.kind == "flat":
            assert columns.keys() == theirs[0].keys()
        if number == 0 or self.bounds.is_exact:
            self.worst.note("columns", columns_of(columns), expected, self.bounds.columns(number, expected))
            self.worst.note("logits", logits, theirs[1], self.bounds.logits(number, expected))

    def compare_dense(self) -> None:
        now, ours = dict(self.training.modules[self._replica].named_parameters()), self._ours
        for name, value in now.items():
            way = float((value - ours.start[name]).detach().abs().max())
            self.bounds.moved = max(self.bounds.moved, way)
            self.bounds.moved_tables = max(self.bounds.moved_tables, way * is_table(name))
        parameters, grads = ours.optimizers.parameters, {name: value.grad for name, value in now.items()}
        largest = max(float(grads[name].abs().max()) for name in parameters)
        for name, parameter in parameters.items():
            self.worst.note("gradients", parameter.grad, grads[name], self.bounds.relative * largest)
            self.worst.note("dense", parameter, now[name], self.bounds.dense())

    def compare_tables(self) -> None:
        """Compares this rank's shards of tables and of their states with those of its replica."""
        tensors = own_tables(self._ours.model)
        places = {one.table: (one.offsets, one.tensor.shape) for one in tensors if one.part == "weight"}
        for name, plain in self.training.tables[self._replica].items():
            own = [one for one in tensors if one.table == table_name(name)]
            if not own:
                continue
            (row, column), (rows, columns) = places[table_name(name)]
            starts = [sum(plain.widths[:i]) for i in range(len(plain.widths))]
            # The weight comes first, then states in the order of FBGEMM's numbers.
            # A state has one number per row and shard, or one per weight.
            shard, part = starts.index(column), slice(column, column + columns)
            states = [state[:, part if state.shape == plain.weight.shape else shard] for state in plain.states]
            expected = [plain.weight.detach()[:, part], *states]
            for one, whole in zip(own, expected, strict=True):
                largest = float(whole.abs().max())
                kind, bound = "states", self.bounds.relative * largest + 1e-8 * largest**0.5
                if one.part == "weight":
                    kind, bound = "tables", self.bounds.table(one.table)
                is_half = one.part == "weight" and int(one.table[1:]) in self._case.fp16
                assert one.tensor.dtype == (torch.float16 if is_half else torch.float32), one.name
                self.worst.note(kind, one.tensor, whole[row : row + rows].view(one.tensor.shape), bound)

    def compare_whole(self, ours: dict[str, Tensor]) -> None:
        """Compares whole weights by the names of the unsharded module."""
        theirs = self.training.modules[self._replica].state_dict()
        assert set(ours) == set(theirs), "the sharded state has other names than the unsharded one"
        for name, value in theirs.items():
            bound = self.bounds.table(table_name(name)) if is_table(name) else self.bounds.dense()
            self.worst.note("gathered", ours[name], value, bound)


def train(rank: int, case: Case, mesh: TowerMesh | None = None) -> tuple[Worst, dict[str, Tensor]]:
    """Trains on ranks and in one process; returns the worst differences, and the weights on ranks at the end.

    ``worst["moved"]`` is the largest change of a weight, not divided by a bound.
    """
    ours = Training(rank, case, mesh or TowerMesh(case.topology))
    oracle = Oracle(ours)
    return oracle.worst, train_beside(ours, oracle)


def train_beside(ours: Training, oracle: Oracle) -> dict[str, Tensor]:
    """Takes all steps of a case on ranks and in one process, and compares; returns the weights on ranks at the end."""
    for number in range(ours.case.num_steps):
        expected = oracle.forward(number)
        result = ours.step(number)
        if ours.pipeline is None and number == 1:
            ours.evaluate(ours.model)
        oracle.step(number)
        oracle.compare_outputs(number, result, expected)
        oracle.compare_dense()
        if ours.bring_up_to_date(number):
            oracle.compare_tables()
    if ours.sync is not None:
        ours.sync.sync()
        oracle.training.sync()
        share(oracle.training)
        ours.sync.check()
        oracle.compare_tables()
    after = gather_plain_state(ours.model)
    oracle.compare_whole(after)
    oracle.worst["moved"] = oracle.bounds.moved
    return after


def check(case: Case, worst: Worst) -> None:
    least = 3e-4 if case.optimizer == "sgd" else 1e-2  # mean-loss gradients are small, AdaGrad's steps are not
    assert worst["moved"] > least, f"{case}: training did not move the weights; the comparison would prove nothing"
    beyond = {kind: quotient for kind, quotient in worst.items() if kind != "moved" and quotient > 1}
    assert not beyond, f"{case}: beyond their bounds, by this factor: {beyond}"


def cases_on_rank(rank: int, cases: Sequence[Case]) -> list[Worst]:
    """Trains one case after the other, with one mesh for each topology."""
    meshes: dict[TowerTopology, TowerMesh] = {}
    found = []
    for case in cases:
        mesh = meshes.get(case.topology) or meshes.setdefault(case.topology, TowerMesh(case.topology))
        try:
            found.append(train(rank, case, mesh)[0])
        except Exception as error:
            error.add_note(f"in {case}")
            raise
    return found
