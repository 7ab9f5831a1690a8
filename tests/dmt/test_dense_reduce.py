"""The dense part's gradients, reduced host by host: against the mean of all ranks' gradients in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan

from dmt import InputError, TowerMesh, TowerTopology
from dmt.dense_reduce import HierarchicalDataParallel
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
SHAPES = {
    "2 hosts x 2": TowerTopology(num_towers=2, ranks_per_tower=2),
    "3 hosts x 1": TowerTopology(num_towers=3, ranks_per_tower=1),
    "2 hosts x 3": TowerTopology(num_towers=2, ranks_per_tower=3),
    "1 host x 3": TowerTopology(num_towers=1, ranks_per_tower=3),
    "4 hosts x 2, replicas": TowerTopology(num_towers=2, ranks_per_tower=2, num_replicas=2),
    "2 hosts x 4, replicas inside": TowerTopology(
        num_towers=2, ranks_per_tower=2, num_replicas=2, replica_placement="intra_host"
    ),
}
STEPS = 4


def make() -> nn.Module:
    torch.manual_seed(0)
    # 5 * 7 + 7 + 7 + 1 = 50 numbers: parts of 3 hosts need padding.
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 1))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(rank + 2, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def trained_on_rank(rank: int, topology: TowerTopology, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    mesh = TowerMesh(topology)
    model = DistributedModelParallel(
        make(),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={}),
        data_parallel_wrapper=HierarchicalDataParallel(mesh, **options),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.module.state_dict().items()}


def trained_plainly(num_ranks: int) -> dict[str, torch.Tensor]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(num_ranks):
            (model(batch(rank, step)).square().mean() / num_ranks).backward()
        optimizer.step()
    return model.state_dict()


# A bucket of every 20 numbers or so: several are under way at once.
@pytest.mark.parametrize("bucket_cap_mb", [25, 8e-5])
@pytest.mark.parametrize("topology", SHAPES.values(), ids=SHAPES.keys())
def test_gradients_are_means_over_all_ranks(topology: TowerTopology, bucket_cap_mb: float) -> None:
    by_rank = run_ranks(trained_on_rank, topology.world_size, topology, {"bucket_cap_mb": bucket_cap_mb})
    expected = trained_plainly(topology.world_size)
    for name, value in expected.items():
        # Means over ranks are summed in another order.
        torch.testing.assert_close(by_rank[0][name], value, rtol=0, atol=2e-7)
        assert all(torch.equal(of_rank[name], by_rank[0][name]) for of_rank in by_rank), "ranks drift apart"


def test_bf16_rounds_gradients_between_hosts_only() -> None:
    topology = SHAPES["2 hosts x 2"]
    by_rank = run_ranks(trained_on_rank, 4, topology, {"precision": "bf16"})
    expected, start = trained_plainly(4), make().state_dict()
    for name, value in expected.items():
        # Each of two sums of ranks is rounded to 8 bits, and their sum: three half units in the last place a step.
        bound = 3 * 2**-9 * STEPS * (value - start[name]).abs().max()
        torch.testing.assert_close(by_rank[0][name], value, rtol=0, atol=float(bound))
        assert all(torch.equal(of_rank[name], by_rank[0][name]) for of_rank in by_rank)
    assert any(not torch.equal(by_rank[0][name], value) for name, value in expected.items())


def unknown_precision_on_rank(rank: int) -> None:
    with pytest.raises(InputError, match="precision='fp8' is unknown; use 'fp32' or 'bf16'"):
        HierarchicalDataParallel(TowerMesh(TowerTopology(num_towers=1, ranks_per_tower=1)), precision="fp8")  # type: ignore[arg-type]


def test_unknown_precision() -> None:
    run_ranks(unknown_precision_on_rank, 1)
