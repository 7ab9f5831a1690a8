"""`peer_precision` of both sharders: what it changes, and what it leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan
from torchrec.modules.embedding_configs import DataType

from dmt import (
    InputError,
    SPTTEmbeddingBagCollectionSharder,
    TowerCollectionSharder,
    TowerMesh,
    TowerPlan,
    TowerShardingPlanner,
    TowerTopology,
    TrafficMeter,
)
from dmt.sharding.planner import parameter_sharding
from dmt.sharding.schemes import TablePlacement
from dmt.sptt.precision import ExchangePrecision
from dmt.testing import gather_plain_state, load_plain_state
from tests.parity import LR, FlatModel, loss_of, make_tables
from tests.ranks import run_ranks
from tests.sptt_case import FUSED, Case, build, columns_of

pytestmark = pytest.mark.ranks
STEPS = 4


def run(
    rank: int, case: Case, mesh: TowerMesh, precision: ExchangePrecision | None, autocast: bool
) -> tuple[Any, torch.Tensor, Any]:
    """Weights after some steps, the first step's columns, and the last step's traffic."""
    torch.manual_seed(0)
    model = build(case)
    start = {name: value.detach().clone() for name, value in model.state_dict().items()}
    options: dict[str, Any] = {"fused_params": FUSED, "peer_precision": precision}
    if case.kind == "flat":
        plan = TowerPlan.from_lists([[f"f{i}" for i in members] for members in case.plan])
        sharder: Any = SPTTEmbeddingBagCollectionSharder(mesh, plan, **options)
    else:
        sharder = TowerCollectionSharder(mesh, **options)
    sharding = TowerShardingPlanner(mesh.topology, scheme="table_wise").plan(model, [sharder])
    sharded = DistributedModelParallel(model, device=torch.device("cpu"), plan=sharding, sharders=[sharder])
    load_plain_state(sharded, start)
    dense = torch.optim.SGD([p for n, p in sharded.named_parameters() if "embedding_bags" not in n], lr=LR)
    for step in range(STEPS):
        ids, labels = case.batches().draw(rank, step, make_tables(list(case.dims)))
        meter = TrafficMeter(host_of=lambda r: r // 2)
        with meter, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result, logits = sharded(ids)
            columns = columns_of(result.wait())
            if step == 0:
                first = columns.detach().clone()
            dense.zero_grad()
            loss_of(logits.float(), labels).backward()
        dense.step()
    return gather_plain_state(sharded), first, meter.total(mesh.global_group)


def compare_on_rank(rank: int, kind: str, choices: list[tuple[Any, Any]], autocast: bool) -> list[dict[str, Any]]:
    case = Case(towers=2, ranks=2, dims=(8, 16, 8, 8), kind=kind, sizes=(64, 32, 32, 64), max_bag=3)
    mesh = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=2))
    weights, first, traffic = run(rank, case, mesh, None, autocast)
    found = []
    for forward, backward in choices:
        precision = ExchangePrecision(forward=forward, backward=backward)
        other_weights, other_first, other_traffic = run(rank, case, mesh, precision, autocast)
        assert other_first.dtype == first.dtype
        error = (other_first - first).float().abs()
        found.append(
            {
                "choice": (forward, backward),
                "apart": max((weights[n] - other_weights[n]).abs().max().item() for n in weights),
                "relative": (error / first.float().abs().clamp(min=1e-9)).max().item(),
                "absolute": error.max().item() / (first.max() - first.min()).item(),
                "plain": traffic,
                "traffic": other_traffic,
            }
        )
    return found


CHOICES = [("fp32", "fp32"), ("fp16", "fp32"), ("fp32", "bf16"), ("bf16", "fp16"), ("fp16", "bf16")]


@pytest.mark.parametrize(
    ("kind", "autocast", "choices"),
    [
        pytest.param(kind, autocast, choices, id=f"{kind}-{autocast}-{len(choices)}", marks=marks)
        for kind, autocast, choices, marks in (
            ("modules", False, CHOICES[::2], []),
            ("flat", False, CHOICES[1::2], []),
            ("modules", True, CHOICES[1::2], []),
            ("modules", False, CHOICES[1::2], [pytest.mark.slow]),
            ("flat", False, CHOICES[::2], [pytest.mark.slow]),
            ("flat", True, CHOICES[1::2], [pytest.mark.slow]),
        )
    ],
)
def test_the_peer_exchange_alone_changes(kind: str, autocast: bool, choices: list[tuple[Any, Any]]) -> None:
    share = {"fp32": 1.0, "fp16": 0.5, "bf16": 0.5}
    for found in run_ranks(compare_on_rank, 4, kind, choices, autocast)[0]:
        forward, backward = found["choice"]
        plain, traffic = found["plain"], found["traffic"]
        assert traffic.forward == plain.forward * share[forward]
        assert traffic.backward == plain.backward * share[backward]
        assert (traffic.ids, traffic.dense, traffic.inside) == (plain.ids, plain.dense, plain.inside)
        # FP16 also has its smallest step, relative to the clamp of 1e-9 above: none of the numbers is that small.
        assert found["relative"] <= {"fp32": 0.0, "fp16": 2**-11 * 1.01, "bf16": 2**-8}[forward]
        # AdaGrad divides first gradients by their own size, so a relative error becomes one of whole steps.
        assert found["apart"] <= (0.0 if (forward, backward) == ("fp32", "fp32") else STEPS * LR / 4)


def disagreement_on_rank(rank: int) -> None:
    case = Case(towers=2, ranks=1, dims=(8, 8), plan=((0,), (1,)))
    mesh = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=1))
    with pytest.raises(InputError, match=r"peer_precision is .* on rank 0, but .* on rank"):
        run(rank, case, mesh, ExchangePrecision(forward="fp16" if rank == 0 else "bf16"), False)


def data_parallel_on_rank(rank: int) -> None:
    mesh = TowerMesh(TowerTopology(num_towers=1, ranks_per_tower=2))
    tables = make_tables([8])
    tables[0].data_type = DataType.FP16
    model = FlatModel(tables)
    sharder = SPTTEmbeddingBagCollectionSharder(mesh, TowerPlan.from_lists([["f0"]]))
    sharding = parameter_sharding(tables[0], TablePlacement(scheme="data_parallel", ranks=(0, 1)))
    plan = ShardingPlan(plan={"sparse_arch": EmbeddingModuleShardingPlan({"t0": sharding})})
    with pytest.raises(InputError, match="Table 't0' in tower 0 is data_parallel, but its weights are FP16"):
        DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])


def test_data_parallel_fp16_tables_are_refused() -> None:
    run_ranks(data_parallel_on_rank, 2)


def test_what_cannot_work_is_refused() -> None:
    run_ranks(disagreement_on_rank, 2)
