"""SPTT against the plain single-process module, on gloo ranks.

Forward: bitwise, only bytes move. Training: float32 rounding; gradients of a table row are summed over ranks in
another order than in one process, each step adds at most a few units in the last place of numbers near 1, and
AdaGrad's first steps divide small gradients by their own size, so 5e-6 after four steps is a bound with room.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.embedding_tower import EmbeddingTower
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.sparse.jagged_tensor import KeyedTensor

from dmt import (
    SPTTEmbeddingBagCollectionSharder,
    TowerCollectionSharder,
    TowerMesh,
    TowerPlan,
    TowerShardingPlanner,
    TowerTopology,
)
from dmt.placement import column_shards
from tests.parity import (
    EPS,
    LR,
    Batches,
    FlatModel,
    Oracle,
    PassThrough,
    SumTowerModule,
    TowerModel,
    full_state,
    load_full,
    loss_of,
    make_tables,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
TOLERANCE = 5e-6
STEPS = 4
FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LR, "eps": EPS}


@dataclass(frozen=True, kw_only=True)
class Case:
    towers: int
    ranks: int
    dims: tuple[int, ...] = (8, 8, 8, 8)
    plan: tuple[tuple[int, ...], ...] = ((0, 2), (1, 3))
    kind: str = "modules"  # modules | pass | frozen | flat
    scheme: str = "table_wise"
    pooling: str = "SUM"
    max_bag: int = 1
    weighted: bool = False
    sizes: tuple[int, ...] = ()
    placement: tuple[int, ...] | None = None

    @property
    def world(self) -> int:
        return self.towers * self.ranks

    def batches(self) -> Batches:
        return Batches(sizes=self.sizes or (5,) * self.world, max_bag=self.max_bag, weighted=self.weighted)


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


def shard(case: Case, model: torch.nn.Module, mesh: TowerMesh) -> DistributedModelParallel:
    if case.kind == "flat":
        plan = TowerPlan.from_lists([[f"f{i}" for i in members] for members in case.plan])
        sharder: Any = SPTTEmbeddingBagCollectionSharder(mesh, plan, fused_params=FUSED)
    else:
        sharder = TowerCollectionSharder(mesh, placement=case.placement, fused_params=FUSED)
    plan = TowerShardingPlanner(mesh.topology, scheme=case.scheme).plan(model, [sharder])
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])


def columns_of(result: Any) -> torch.Tensor:
    return result.values() if isinstance(result, KeyedTensor) else result


def parity_on_rank(rank: int, case: Case) -> dict[str, float]:
    torch.manual_seed(0)
    original = build(case)
    tables = make_tables(list(case.dims), pooling=case.pooling)
    cuts = {}
    if case.scheme == "column_wise":
        cuts = {t.name: column_shards(t.embedding_dim, min(case.ranks, t.embedding_dim // 4)) for t in tables}
    oracle = Oracle(original, cuts)
    start = {name: value.detach().clone() for name, value in original.state_dict().items()}
    torch.manual_seed(100 + rank)  # whatever ranks draw on their own must not matter
    model = shard(case, original, TowerMesh(TowerTopology(num_towers=case.towers, ranks_per_tower=case.ranks)))
    load_full(model, start)
    assert set(full_state(model)) == set(start), "the sharded state has other names than the unsharded one"
    dense = KeyedOptimizerWrapper(
        {n: p for n, p in model.named_parameters() if "embedding_bags" not in n and p.requires_grad},
        lambda params: torch.optim.Adam(params, lr=LR),
    )
    batches = case.batches()
    for step in range(STEPS):
        everyone = [batches.draw(r, step, tables) for r in range(case.world)]
        ids, labels = everyone[rank]
        expected = oracle.model(ids)[0]
        result, logits = model(ids)
        result = result.wait()
        if step == 0:  # equal weights: only bytes have moved
            # FBGEMM averages a bag as a sum of v/n, the plain module as (sum of v)/n.
            inexact_mean = case.pooling == "MEAN" and case.max_bag > 1
            if case.kind in ("pass", "flat") and not inexact_mean:
                assert torch.equal(columns_of(result), columns_of(expected))
            else:  # a matrix product of other row counts may round differently
                torch.testing.assert_close(columns_of(result), columns_of(expected), rtol=1e-6, atol=1e-6)
            if case.kind == "flat":
                assert result.keys() == expected.keys()
        dense.zero_grad()
        loss_of(logits, labels).backward()
        dense.step()
        oracle.step(everyone)
    after = full_state(model)
    worst = {"tables": 0.0, "dense": 0.0, "moved": 0.0}
    for name, value in oracle.model.state_dict().items():
        kind = "tables" if "embedding_bags" in name else "dense"
        worst[kind] = max(worst[kind], (after[name] - value).abs().max().item())
        worst["moved"] = max(worst["moved"], (start[name] - value).abs().max().item())
    return worst


TOPOLOGIES = {
    (1, 2): ((0, 1, 2, 3),),
    (2, 1): ((3, 0), (1, 2)),
    (2, 2): ((0, 2), (1, 3)),
    (2, 3): ((3, 1, 0), (2,)),
    (3, 2): ((2,), (3, 0), (1,)),
}
CASES = {
    **{
        f"{k}-{t}x{r}": Case(towers=t, ranks=r, plan=p, kind=k)
        for (t, r), p in TOPOLOGIES.items()
        for k in ("modules", "flat")
    },
    "column-wise": Case(towers=2, ranks=2, scheme="column_wise", dims=(8, 16, 24, 8)),
    "column-wise-flat-2x3": Case(
        towers=2, ranks=3, plan=((0, 2), (3, 1)), scheme="column_wise", kind="flat", dims=(24, 8, 16, 4)
    ),
    "auto-one-table-towers": Case(towers=2, ranks=2, dims=(16, 8), plan=((1,), (0,)), scheme="column_wise"),
    "one-table-towers-idle-rank": Case(towers=2, ranks=2, dims=(16, 8), plan=((1,), (0,))),
    "pass-through": Case(towers=2, ranks=2, kind="pass"),
    "frozen": Case(towers=2, ranks=2, kind="frozen"),
    "swapped": Case(towers=2, ranks=2, placement=(1, 0), dims=(8, 4, 8, 4)),
    "swapped-pass-3x2": Case(
        towers=3, ranks=2, plan=((2,), (3, 0), (1,)), placement=(2, 0, 1), kind="pass", dims=(8, 4, 12, 16)
    ),
    "two-towers-on-one-host": Case(towers=2, ranks=2, plan=((0,), (3,), (1, 2)), placement=(1, 0, 1)),
    "multi-hot": Case(towers=2, ranks=2, max_bag=4),
    "multi-hot-mean": Case(towers=2, ranks=2, max_bag=4, pooling="MEAN"),
    "multi-hot-mean-flat": Case(towers=2, ranks=2, max_bag=4, pooling="MEAN", kind="flat", scheme="column_wise"),
    "weighted": Case(towers=2, ranks=2, max_bag=4, weighted=True),
    "weighted-flat": Case(towers=2, ranks=2, max_bag=3, weighted=True, kind="flat"),
    "mixed-dims": Case(towers=2, ranks=2, dims=(4, 8, 12, 16), max_bag=2),
    "mixed-dims-flat": Case(towers=2, ranks=2, dims=(4, 8, 12, 16), max_bag=2, kind="flat"),
    "batch-of-one": Case(towers=2, ranks=2, sizes=(1, 1, 1, 1)),
    "uneven": Case(towers=2, ranks=2, sizes=(2, 3, 4, 5), max_bag=3),
    "uneven-flat-column-wise": Case(towers=2, ranks=2, sizes=(6, 1, 3, 2), kind="flat", scheme="column_wise"),
}


@pytest.mark.parametrize("name", CASES)
def test_sptt_equals_the_single_process_module(name: str) -> None:
    case = CASES[name]
    for worst in run_ranks(parity_on_rank, case.world, case):
        assert worst["moved"] > 1e-2, "training did not move the weights; the comparison would prove nothing"
        assert worst["tables"] < TOLERANCE, worst
        assert worst["dense"] < TOLERANCE, worst


MATRIX = [
    Case(
        towers=towers,
        ranks=ranks,
        plan=plan,
        kind=kind,
        scheme=scheme,
        pooling=pooling,
        weighted=weighted,
        max_bag=3,
        dims=(8, 16, 4, 12),
        sizes=tuple(3 + (rank * 2) % 5 for rank in range(towers * ranks)) if uneven else (),
    )
    for (towers, ranks), plan in TOPOLOGIES.items()
    for kind in ("modules", "pass", "flat")
    for scheme in ("table_wise", "column_wise")
    for pooling, weighted in (("SUM", False), ("MEAN", False), ("SUM", True))
    for uneven in (False, True)
]


@pytest.mark.slow
@pytest.mark.parametrize("case", MATRIX, ids=lambda case: f"{case.kind}-{case.towers}x{case.ranks}-{case.scheme}")
def test_the_whole_parity_matrix(case: Case) -> None:
    for worst in run_ranks(parity_on_rank, case.world, case):
        assert worst["moved"] > 1e-2
        assert worst["tables"] < TOLERANCE, worst
        assert worst["dense"] < TOLERANCE, worst
