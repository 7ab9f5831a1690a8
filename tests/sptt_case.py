"""One parity case of the tower dataflow: how it is built, sharded, trained on ranks and compared with the oracle.

Forward: bitwise where only bytes move. Training: float32 rounding; gradients of a table row are summed over ranks in
another order than in one process, each step adds at most a few units in the last place of numbers near 1, and
AdaGrad's first steps divide small gradients by their own size, so 5e-6 after four steps is a bound with room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.embedding_tower import EmbeddingTower
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedTensor

from dmt import (
    SPTTEmbeddingBagCollectionSharder,
    TowerCollectionSharder,
    TowerMesh,
    TowerPlan,
    TowerShardingPlanner,
    TowerTopology,
    run_in_micro_batches,
)
from dmt.hot_rows.runtime import HotRows
from dmt.number_formats import NUMBER_FORMATS
from dmt.sharding.schemes import TablePlacement
from dmt.sharding.user_rules import Tiers
from dmt.sptt.precision import ExchangePrecision
from dmt.testing import gather_plain_state, load_plain_state, table_layout
from tests.parity import (
    DENSE,
    FUSED,
    LR,
    OPTIMIZERS,
    Batches,
    FlatModel,
    PassThrough,
    SumTowerModule,
    TowerModel,
    loss_of,
    make_tables,
    plain_training,
    train_plainly,
)

TOLERANCE = 5e-6
# By the tables' optimizer. SGD amplifies no rounding. Element-wise AdaGrad's first step is LR g / (|g| + EPS): where a
# gradient of EPS or less is what is left of numbers that cancel, rounding of 1e-9 moves it by LR 1e-9 / 4 EPS.
TRAINED_FP32 = {"sgd": 1e-6, "rowwise_adagrad": TOLERANCE, "adagrad": 5e-5}
PRECISIONS = {
    "fp32": ExchangePrecision(),
    "fp16": ExchangePrecision(forward="fp16", backward="fp16"),
    "bf16": ExchangePrecision(forward="bf16", backward="bf16"),
}
# Forward, relative to the largest number sent: half a unit in the last place of each format, with room for FP32.
_ERROR = {name: 1.01 * number_format.rounding_error for name, number_format in NUMBER_FORMATS.items()}
FORWARD = {"fp32": 1e-6, "fp16": _ERROR["fp16"], "bf16": _ERROR["bf16"]}
# Weights after at most four steps of SGD, as a share of the largest way a weight went: rounding moves a gradient by the
# error of the format and, through the logits, by as much again, in each of the steps. AdaGrad and Adam divide by the
# gradient's own size, so a gradient that cancels takes its direction from rounding: only FP32 trains with them.
TRAINED = {"fp16": 8 * 2**-11, "bf16": 8 * 2**-8}
# The second step reads the states of the first, the third those that were both read and written.
STEPS = 3
MIXES = {
    "mixed": ("table_wise", "row_wise", "column_wise", "data_parallel"),
    "mixed-model-parallel": ("row_wise", "column_wise", "table_wise"),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    towers: int
    ranks: int
    dims: tuple[int, ...] = (8, 8, 8, 8)
    plan: tuple[tuple[int, ...], ...] = ((0, 2), (1, 3))
    kind: str = "modules"  # modules | pass | frozen | flat
    scheme: str = "table_wise"  # one for all tables, or a key of MIXES: table i takes scheme i of the mix
    pooling: str = "SUM"
    max_bag: int = 1
    weighted: bool = False
    sizes: tuple[int, ...] = ()
    placement: tuple[int, ...] | None = None
    optimizer: str = "rowwise_adagrad"
    id_route: str = "peer"
    precision: str = "fp32"  # of outputs and gradients between towers, a key of PRECISIONS
    micro_batches: int = 1
    unique: bool = False
    kernel: Any = "fused"  # of all tables that are not data-parallel
    hot: bool = False  # rows of all tables that can have copies have some, others from the third step on

    @property
    def world(self) -> int:
        return self.towers * self.ranks

    def batches(self) -> Batches:
        return Batches(
            sizes=self.sizes or (5,) * self.world,
            max_bag=self.max_bag,
            weighted=self.weighted,
            repeated=self.unique,
        )

    def pins(self) -> dict[str, TablePlacement]:
        """Placements of a mix; what cannot be cut stays table-wise, on the rank its number gives."""
        if self.scheme not in MIXES:
            return {}
        mix = MIXES[self.scheme]
        everyone = tuple(range(self.ranks))
        pins = {}
        for i, dim in enumerate(self.dims):
            scheme = mix[i % len(mix)]
            if scheme == "column_wise" and dim >= 8 and self.ranks > 1:
                ranks = tuple(range(min(self.ranks, dim // 4)))
                pins[f"t{i}"] = TablePlacement(scheme="column_wise", ranks=ranks[::-1])
            elif scheme in ("row_wise", "data_parallel") and self.ranks > 1:
                pins[f"t{i}"] = TablePlacement(scheme=scheme, ranks=everyone)
            else:
                pins[f"t{i}"] = TablePlacement(scheme="table_wise", ranks=(i % self.ranks,))
        return pins


def build(case: Case) -> torch.nn.Module:
    tables = make_tables(list(case.dims), pooling=case.pooling)
    if case.kind == "flat":
        return FlatModel(tables, case.weighted)
    towers, width = [], 0
    for number, members in enumerate(case.plan):
        features, dims = [f"f{i}" for i in members], [case.dims[i] for i in members]
        module = PassThrough(features)
        out = sum(dims)
        if case.kind in ("modules", "frozen"):
            out = 3 + number  # towers of unequal output width
            module = SumTowerModule(features, dims, out)
            module.requires_grad_(case.kind == "modules")
        bags = EmbeddingBagCollection(tables=[tables[i] for i in members], is_weighted=case.weighted)
        towers.append(EmbeddingTower(bags, module))
        width += out
    return TowerModel(towers, width)


def shard(
    case: Case, model: torch.nn.Module, mesh: TowerMesh, moment_scale: Any = "num_replicas"
) -> DistributedModelParallel:
    options: dict[str, Any] = {
        "moment_scale": moment_scale,
        "fused_params": {**FUSED, "optimizer": OPTIMIZERS[case.optimizer]},
        "id_route": case.id_route,
        "peer_precision": PRECISIONS[case.precision],
        "unique": case.unique,
    }
    if case.kind == "flat":
        plan = TowerPlan.from_lists([[f"f{i}" for i in members] for members in case.plan])
        sharder: Any = SPTTEmbeddingBagCollectionSharder(mesh, plan, **options)
    else:
        sharder = TowerCollectionSharder(mesh, placement=case.placement, **options)
    # In a tower of one rank every table is whole.
    scheme = case.scheme if case.ranks > 1 else "table_wise"
    own: dict[str, Any] = {"pinned": case.pins()} if case.scheme in MIXES else {"scheme": scheme}
    of_data_parallel = [name for name, placement in case.pins().items() if placement.scheme == "data_parallel"]
    if case.kernel != "fused":
        tables = {f"t{i}" for i in range(len(case.dims))}
        own["tiers"] = Tiers(kernels=dict.fromkeys(sorted(tables - set(of_data_parallel)), case.kernel))
    planner = TowerShardingPlanner(mesh.topology, **own)
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=planner.plan(model, [sharder]), sharders=[sharder]
    )


def hot_rows(case: Case, hot: HotRows, tables: Sequence[EmbeddingBagConfig], step: int) -> dict[str, list[int]]:
    """Of each table that can have copies a third of the rows, or half of them: some stay, some go and some come."""
    every = 3 if step == 0 else 2
    return {t.name: list(range(0, t.num_embeddings, every)) for t in tables if t.name not in hot.left_out}


def columns_of(result: Any) -> torch.Tensor:
    return result.values() if isinstance(result, KeyedTensor) else result


def parity_on_rank(rank: int, case: Case, mesh: TowerMesh | None = None) -> dict[str, float]:
    """Trains on ranks and in one process; returns the largest differences of weights, and how far weights moved."""
    torch.manual_seed(0)
    original = build(case)
    tables = make_tables(list(case.dims), pooling=case.pooling)
    start = {name: value.detach().clone() for name, value in original.state_dict().items()}
    plain = build(case)
    plain.load_state_dict(start)
    torch.manual_seed(100 + rank)  # whatever ranks draw on their own must not matter
    mesh = mesh or TowerMesh(TowerTopology(num_towers=case.towers, ranks_per_tower=case.ranks))
    model = shard(case, original, mesh)
    layout = table_layout(model)
    oracle = plain_training(plain, layout=layout, optimizer=case.optimizer) if rank == 0 else None
    load_plain_state(model, start)
    hot = HotRows(model, mesh, refresh_every=None) if case.hot else None
    if case.micro_batches > 1:
        run_in_micro_batches(model, case.micro_batches)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter((n, p) for n, p in model.named_parameters() if p.requires_grad)),
        lambda params: DENSE[case.optimizer == "sgd"](params, lr=LR),
    )
    assert not any("embedding_bags" in name for name in dense.params), "a table would be updated twice"
    batches = case.batches()
    for step in range(STEPS + case.hot):  # of the rows that come at the third step, the fourth reads the states
        ids, labels = batches.draw(rank, step, tables)
        if hot is not None and step in (0, 2):
            hot.replicate(hot_rows(case, hot, tables, step))
        result, logits = model(ids)
        result = result.wait() if hasattr(result, "wait") else result
        if step == 0:  # equal weights
            check_forward(case, result, plain(ids)[0])
        dense.zero_grad()
        loss_of(logits, labels).backward()
        dense.step()
        if oracle is not None:
            train_plainly(oracle, [batches.draw(r, step, tables) for r in range(case.world)])
    after = gather_plain_state(model)
    assert set(after) == set(start), "the sharded state has other names than the unsharded one"
    worst = {"tables": 0.0, "dense": 0.0, "moved": 0.0}
    for name, value in oracle.modules[0].state_dict().items() if oracle is not None else ():
        kind = "tables" if "embedding_bags" in name else "dense"
        worst[kind] = max(worst[kind], (after[name] - value).abs().max().item())
        worst["moved"] = max(worst["moved"], (start[name] - value).abs().max().item())
    of_first = [worst]
    dist.broadcast_object_list(of_first, src=0)
    return of_first[0]


def check_forward(case: Case, result: Any, expected: Any) -> None:
    # FBGEMM averages a bag as a sum of v/n, the plain module as (sum of v)/n; row-wise sums a bag rank by rank.
    # With hot rows a bag is a sum of two.
    cut = case.scheme == "row_wise" or case.scheme in MIXES or case.hot
    rounds = case.max_bag > 1 and (case.pooling == "MEAN" or cut)
    ours, theirs = columns_of(result), columns_of(expected)
    if case.kind in ("pass", "flat") and not rounds and case.precision == "fp32":  # only bytes have moved
        assert torch.equal(ours, theirs), case
    else:  # a matrix product of other row counts may round differently
        largest = max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=FORWARD[case.precision] * largest)
    if case.kind == "flat":
        assert result.keys() == expected.keys()


def check_worst(case: Case, worst: dict[str, float]) -> None:
    moved = 3e-4 if case.optimizer == "sgd" else 1e-2  # mean-loss gradients are small, AdaGrad's steps are not
    assert worst["moved"] > moved, f"{case}: training did not move the weights; the comparison would prove nothing"
    tables = TRAINED_FP32[case.optimizer]
    dense = TOLERANCE
    if case.precision != "fp32":
        tables = dense = TRAINED[case.precision] * worst["moved"]
    assert worst["tables"] < tables, f"{case}: {worst}"
    assert worst["dense"] < dense, f"{case}: {worst}"
