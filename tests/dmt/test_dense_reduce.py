"""The dense part's gradients, reduced host by host: against the mean of all ranks' gradients in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import ShardingPlan

from dmt import InputError, TowerMesh, TowerTopology, TrafficMeter, collectives
from dmt.replicas.dense_reduce import HierarchicalDataParallel
from dmt.traffic import Traffic
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
STEPS = 4


def make() -> nn.Module:
    torch.manual_seed(0)
    # 5 * 7 + 7 + 7 + 1 = 50 numbers: parts of 3 hosts need padding.
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 1))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(rank + 2, 5, generator=torch.Generator().manual_seed(100 * step + rank))


WIDE = 400  # a layer has 640 kB, and DDP's first bucket at least 1 MB


def make_wide() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(5)))


def wide_batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2 + rank, WIDE, generator=torch.Generator().manual_seed(100 * step + rank))


def distributed(model: nn.Module, wrapper: DefaultDataParallelWrapper) -> DistributedModelParallel:
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan(plan={}), data_parallel_wrapper=wrapper
    )


def mean_gradients(model: nn.Module, losses: list[torch.Tensor]) -> None:
    for loss in losses:
        (loss / len(losses)).backward()


def check_several_buckets(rank: int, mesh: TowerMesh) -> None:
    """Four steps: DDP arranges its buckets anew after the second, and reduces several in each of the others."""
    model, plain = distributed(make_wide(), HierarchicalDataParallel(mesh)), make_wide()
    calls: list[int] = []
    scatter = collectives.scatter_sum

    def counted(value: torch.Tensor, group: Any) -> torch.Tensor:
        calls[-1] += 1
        return scatter(value, group)

    collectives.scatter_sum = counted
    try:
        for step in range(STEPS):
            calls.append(0)
            model.zero_grad()
            plain.zero_grad()
            model(wide_batch(rank, step)).square().mean().backward()
            mean_gradients(plain, [plain(wide_batch(r, step)).square().mean() for r in range(mesh.topology.world_size)])
            for name, value in plain.named_parameters():
                found = model.module.get_parameter(name)
                torch.testing.assert_close(found.grad, value.grad, rtol=1e-5, atol=1e-8)
                # The next step sees other weights.
                with torch.no_grad():
                    found -= 0.01 * value.grad
                    value -= 0.01 * value.grad
    finally:
        collectives.scatter_sum = scatter
    assert min(calls[2:]) > 1, f"{calls} buckets: nothing was under way together with another"


def sent_across_hosts(rank: int, mesh: TowerMesh, **options: Any) -> tuple[Traffic, int]:
    model = distributed(make_wide(), HierarchicalDataParallel(mesh, **options))
    for step in range(2):  # the first also exchanges how buckets are arranged
        meter = TrafficMeter(host_of=lambda r: r // 2)
        with meter:
            loss = model(wide_batch(rank, step)).square().mean()
            loss.backward()
    return meter.total(mesh.global_group), sum(p.numel() for p in model.parameters())


def check_bytes(rank: int, mesh: TowerMesh) -> None:
    """H hosts send 2 (H - 1) n numbers to each other, n being the parameters."""
    for options, size in (({}, 4), ({"precision": "bf16"}, 2)):
        traffic, numbers = sent_across_hosts(rank, mesh, **options)
        assert traffic.dense == 2 * (2 - 1) * numbers * size, options
        assert traffic.forward == traffic.backward == 0, "inside hosts, and nowhere else"
        assert traffic.inside > 0


def check_shared_wrapper(rank: int, mesh: TowerMesh) -> None:
    """Two models with one wrapper, in one backward pass and in passes that follow each other."""
    wrapper = HierarchicalDataParallel(mesh)
    models, plain = [distributed(make(), wrapper), distributed(make_wide(), wrapper)], [make(), make_wide()]
    draws = (batch, wide_batch)
    for step in range(3):
        for model in (*models, *plain):
            model.zero_grad()
        losses = [model(draw(rank, step)).square().mean() for model, draw in zip(models, draws, strict=True)]
        if step == 1:
            for loss in losses:
                loss.backward()
        else:
            torch.stack(losses).sum().backward()
        for model, ours, draw in zip(plain, models, draws, strict=True):
            mean_gradients(model, [model(draw(r, step)).square().mean() for r in range(4)])
            for name, value in model.named_parameters():
                torch.testing.assert_close(ours.module.get_parameter(name).grad, value.grad, rtol=1e-5, atol=1e-8)


class Scaled(nn.Module):
    """Gradients are what it is called with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(7, dtype=dtype))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


def check_fp16_does_not_overflow(mesh: TowerMesh) -> None:
    """The sum of two gradients of 40000, and of four, is more than FP16 holds, their mean is not."""
    for ranks_per_host in (2, 1, 4):
        other = mesh if ranks_per_host == 2 else TowerMesh(replace(mesh.topology, ranks_per_host=ranks_per_host))
        model = distributed(Scaled(torch.float16), HierarchicalDataParallel(other))
        model(torch.full((7,), 40000.0, dtype=torch.float16)).backward()
        assert model.module.weight.grad.tolist() == [40000.0] * 7, ranks_per_host
        assert model.module.weight.grad.dtype == torch.float16


def check_float64_is_exact(rank: int, mesh: TowerMesh) -> None:
    model = distributed(Scaled(torch.float64), HierarchicalDataParallel(mesh))
    shares = [1 + (r + 1) * 2.0**-40 for r in range(4)]
    model(torch.full((7,), shares[rank], dtype=torch.float64)).backward()
    assert model.module.weight.grad.tolist() == [sum(shares) / 4] * 7


def numbers_on_rank(rank: int) -> None:
    mesh = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=2))
    check_several_buckets(rank, mesh)
    check_bytes(rank, mesh)
    check_shared_wrapper(rank, mesh)
    check_fp16_does_not_overflow(mesh)
    check_float64_is_exact(rank, mesh)


def test_buckets_bytes_and_formats() -> None:
    run_ranks(numbers_on_rank, 4)


class Branches(nn.Module):
    """Rank 0 alone uses one layer, and nobody another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.used, self.sometimes, self.never = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.used(x) + self.sometimes(x) if rank == 0 else self.used(x)


def check_unused_parameters(rank: int, mesh: TowerMesh) -> None:
    options = {"static_graph": False, "find_unused_parameters": True}
    ours = distributed(Branches(), HierarchicalDataParallel(mesh, **options))
    theirs = distributed(Branches(), DefaultDataParallelWrapper(**options))
    for step in range(3):
        for model in (ours, theirs):
            model.zero_grad()
            model(batch(rank, step), rank).square().mean().backward()
        for name, value in theirs.module.named_parameters():
            found = ours.module.get_parameter(name).grad
            assert (found is None) == (value.grad is None), (name, step)
            if value.grad is not None:
                torch.testing.assert_close(found, value.grad, rtol=1e-5, atol=1e-8)
    assert theirs.module.sometimes.weight.grad.abs().sum() > 0
    assert not ours.module.never.weight.grad.any() if ours.module.never.weight.grad is not None else True


def check_accumulation(rank: int, mesh: TowerMesh) -> None:
    model, plain = distributed(make(), HierarchicalDataParallel(mesh)), make()
    for first in (0, 2):  # twice, with gradients set to zero in between
        model.zero_grad()
        plain.zero_grad()
        for step in (first, first + 1):
            model(batch(rank, step)).square().mean().backward()
            mean_gradients(plain, [plain(batch(r, step)).square().mean() for r in range(4)])
        for name, value in plain.named_parameters():
            torch.testing.assert_close(model.module.get_parameter(name).grad, value.grad, rtol=1e-5, atol=1e-8)


def check_refused(mesh: TowerMesh) -> None:
    with pytest.raises(InputError, match="precision='fp8' is unknown; use 'fp32' or 'bf16'"):
        HierarchicalDataParallel(mesh, precision="fp8")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"allreduce_comm_precision=.bf16.; use precision='bf16'"):
        HierarchicalDataParallel(mesh, allreduce_comm_precision="bf16")


def use_on_rank(rank: int) -> None:
    mesh = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=2))
    check_unused_parameters(rank, mesh)
    check_accumulation(rank, mesh)
    check_refused(mesh)


def test_unused_parameters_accumulation_and_wrong_use() -> None:
    run_ranks(use_on_rank, 4)
