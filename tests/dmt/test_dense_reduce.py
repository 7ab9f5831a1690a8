"""Gradients reduced host by host: several buckets and models at once, bytes, formats, unused parameters, two passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import ShardingPlan

from dmt import HierarchicalDataParallel, TowerMesh, TowerTopology, TrafficMeter, collectives
from tests.ranks import run_ranks
from tests.sptt_case import CPU

WIDE = 400  # a layer has 640 kB, and DDP's first bucket at least 1 MB


def narrow_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 1))


def wide_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(5)))


def batch(columns: int, rank: int, step: int) -> torch.Tensor:
    return torch.randn(rank + 2, columns, generator=torch.Generator().manual_seed(100 * step + rank))


def distributed(model: nn.Module, wrapper: DefaultDataParallelWrapper) -> DistributedModelParallel:
    plan = ShardingPlan(plan={})
    return DistributedModelParallel(model, device=CPU, plan=plan, data_parallel_wrapper=wrapper)


def follow_plain_means(
    rank: int, mesh: TowerMesh, kinds: Sequence[tuple[Callable[[], nn.Module], int]], *, passes: int, steps: int
) -> None:
    """Models in one backward pass, or several passes before a step, against the mean over ranks of plain losses."""
    wrapper = HierarchicalDataParallel(mesh)
    models, plain = ([make() for make, _ in kinds] for _ in range(2))
    ours = [distributed(model, wrapper) for model in models]
    for step in range(steps):
        for model in (*ours, *plain):
            model.zero_grad()
        for number in range(passes):
            draws = [[batch(columns, r, 10 * step + number) for r in range(4)] for _, columns in kinds]
            losses = [model(of_ranks[rank]).square().mean() for model, of_ranks in zip(ours, draws, strict=True)]
            torch.stack(losses).sum().backward()
            for model, of_ranks in zip(plain, draws, strict=True):
                torch.stack([model(x).square().mean() for x in of_ranks]).mean().backward()
        for model, ours_of_it in zip(plain, ours, strict=True):
            for name, value in model.named_parameters():
                found = ours_of_it.module.get_parameter(name)
                torch.testing.assert_close(found.grad, value.grad, rtol=1e-5, atol=1e-8)
                with torch.no_grad():  # the next step sees other weights
                    found -= 0.01 * value.grad
                    value -= 0.01 * value.grad


def buckets_on_rank(rank: int) -> None:
    mesh, calls = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=2)), []
    scatter = collectives.scatter_sum

    def counted(value: torch.Tensor, group: Any) -> torch.Tensor:
        calls.append(len(value))
        return scatter(value, group)

    with patch.object(collectives, "scatter_sum", counted):
        # DDP arranges its buckets anew after the second step.
        follow_plain_means(rank, mesh, [(wide_model, WIDE)], passes=1, steps=4)
    assert len(calls) > 4 + 2, "one bucket in each step: nothing was under way together with another"
    follow_plain_means(rank, mesh, [(narrow_model, 5), (wide_model, WIDE)], passes=1, steps=3)
    follow_plain_means(rank, mesh, [(narrow_model, 5)], passes=2, steps=2)


@pytest.mark.ranks
def test_several_buckets_models_and_passes() -> None:
    run_ranks(buckets_on_rank, 4)


class Scaled(nn.Module):
    """Gradients are what it is called with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(7, dtype=dtype))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


class Branches(nn.Module):
    """Rank 0 alone uses one layer, and nobody another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.used, self.sometimes, self.never = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.used(x) + self.sometimes(x) if rank == 0 else self.used(x)


def numbers_on_rank(rank: int) -> None:
    mesh = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=2))
    # The sum of two gradients of 40000, and of four, is more than FP16 holds, their mean is not.
    for ranks_per_host in (2, 1, 4):
        other = mesh if ranks_per_host == 2 else TowerMesh(replace(mesh.topology, ranks_per_host=ranks_per_host))
        model = distributed(Scaled(torch.float16), HierarchicalDataParallel(other))
        model(torch.full((7,), 40000.0, dtype=torch.float16)).backward()
        assert model.module.weight.grad.dtype == torch.float16
        assert model.module.weight.grad.tolist() == [40000.0] * 7, ranks_per_host
    model = distributed(Scaled(torch.float64), HierarchicalDataParallel(mesh))
    shares = [1 + (r + 1) * 2.0**-40 for r in range(4)]
    model(torch.full((7,), shares[rank], dtype=torch.float64)).backward()
    assert model.module.weight.grad.tolist() == [sum(shares) / 4] * 7
    check_bytes(rank, mesh)
    check_unused(rank, mesh)


def check_bytes(rank: int, mesh: TowerMesh) -> None:
    """H hosts send 2 (H - 1) n numbers to each other, n being the parameters."""
    for options, size in (({}, 4), ({"precision": "bf16"}, 2)):
        model = distributed(wide_model(), HierarchicalDataParallel(mesh, **options))
        for step in range(2):  # the first also exchanges how buckets are arranged
            with TrafficMeter(host_of=lambda r: r // 2) as meter:
                model(batch(WIDE, rank, step)).square().mean().backward()
        traffic, numbers = meter.total(mesh.global_group), sum(p.numel() for p in model.parameters())
        assert traffic.dense == 2 * (2 - 1) * numbers * size, options
        assert traffic.forward == traffic.backward == 0, "inside hosts, and nowhere else"
        assert traffic.inside > 0


def check_unused(rank: int, mesh: TowerMesh) -> None:
    options = {"static_graph": False, "find_unused_parameters": True}
    ours = distributed(Branches(), HierarchicalDataParallel(mesh, **options))
    theirs = distributed(Branches(), DefaultDataParallelWrapper(**options))
    for step in range(3):
        for model in (ours, theirs):
            model.zero_grad()
            model(batch(5, rank, step), rank).square().mean().backward()
        for name, value in theirs.module.named_parameters():
            found = ours.module.get_parameter(name).grad
            assert (found is None) == (value.grad is None), (name, step)
            if value.grad is not None:
                torch.testing.assert_close(found, value.grad, rtol=1e-5, atol=1e-8)
    assert theirs.module.sometimes.weight.grad.abs().sum() > 0


@pytest.mark.ranks
def test_formats_bytes_and_unused_parameters() -> None:
    run_ranks(numbers_on_rank, 4)
