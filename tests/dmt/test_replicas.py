"""Replicas: faults, refusals, loading, learning rates of single tables, dense reduction; parity is elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dmt import HierarchicalDataParallel, InputError, ReplicaSync, TowerMesh, TowerTopology, TrafficMeter
from dmt.collectives import gather_objects
from dmt.errors import ReplicaMismatchError
from dmt.replicas import dense_reduce
from dmt.replicas.sync import drifted
from dmt.sptt.group_sharded import GroupSharded
from dmt.sptt.state import checksum
from dmt.testing import PlainTraining
from dmt.testing.state import LocalPart, join_parts
from tests.parity import loss_of
from tests.ranks import on_ranks
from tests.sptt_case import CPU, Case, Training, build, own_tables, shard

TWO = Case(towers=2, ranks=1, replicas=2)


@on_ranks(4)
def test_a_replica_that_differs_is_found_on_every_rank(rank: int) -> None:
    training = Training(rank, replace(TWO, interval=2, scheme="mixed"), TowerMesh(TWO.topology))
    sync = training.sync
    assert sync is not None
    sync.check()
    training.step(0)
    with pytest.raises(ReplicaMismatchError, match=r"t\d\.\w+ of rank \d differs from that of rank \d"):
        sync.check()  # between syncs they do differ
    assert drifted(training.model)
    training.step(1)
    sync.check()
    assert not drifted(training.model), "what was averaged can be saved"
    assert not sync._states._works, "an average under way would be written over the next step"
    with TrafficMeter(host_of=lambda r: r // 2) as meter:
        sync.sync()
    mesh = training.mesh
    numbers = sum(one.tensor.numel() for one in own_tables(training.model) if one.is_replicated)
    # A ring of two ranks sends half of all numbers twice, FP32.
    assert meter.total(mesh.global_group).dense == 4 * sum(gather_objects(numbers, mesh.global_group))
    victim = next((one for one in own_tables(training.model) if one.name == "t1.momentum1"), None)
    if rank >= 2 and victim is not None:
        victim.tensor[:2] = victim.tensor[:2].flip(0) + torch.tensor([0.0, 1e-30])
        victim.tensor[0] += 1
    with pytest.raises(ReplicaMismatchError, match=r"t1\.momentum1 of rank [23] differs from that of rank [01]"):
        sync.check()


@on_ranks(4)
@patch("dmt.replicas.sync._MOST_PASSES_PER_STEP", 8)
def test_a_forgotten_step_is_noticed_in_training_passes_only(rank: int) -> None:
    """Evaluation without ``no_grad`` and ``state_dict()`` read tables too, and need no step."""
    mesh, most = TowerMesh(TWO.topology), 8
    ids, _ = TWO.draw(rank, 0)
    for kind in ("eval", "state_dict"):
        model = shard(TWO, build(TWO), mesh)
        ReplicaSync(model, mesh)
        model.train(kind != "eval")
        for _ in range(most + 1):
            _ = model.state_dict() if kind == "state_dict" else model(ids)
        model.train()
        for _ in range(most):  # none of those before was a training pass
            model(ids)
        with pytest.raises(InputError, match=rf"step\(\) was not called in {most} training passes"):
            model(ids)


def test_a_gradient_that_a_replica_lacks_counts_as_zero_in_plain_training() -> None:
    modules = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    modules[0](torch.ones(1, 1)).sum().backward()
    PlainTraining(modules, fused_params={}).average_gradients()
    assert [module.weight.grad for module in modules] == [0.5, 0.5]


def test_a_checksum_sees_every_bit_and_place() -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(3 * 2**20 // 7, generator=generator)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        base = value.to(dtype)
        seen = {checksum(base)}
        for place in (0, 1, len(base) // 2, len(base) - 1):
            changed = base.clone()
            changed[place] = torch.nextafter(changed[place].float(), torch.tensor(9e9)) * 1.01
            seen.add(checksum(changed))
        swapped = base.clone()
        swapped[[3, 2**19 // 2]] = swapped[[2**19 // 2, 3]]
        assert len(seen | {checksum(swapped)}) == 6, dtype
    # Places whose chunk and number in it are exchanged.
    long = torch.zeros(2**21)
    long[1], long[2**20] = 1.0, 2.0
    other = torch.zeros(2**21)
    other[1], other[2**20] = 2.0, 1.0
    assert checksum(long) != checksum(other)
    assert checksum(long > 1) != checksum(other > 1), "masks are buffers, too"


@on_ranks(4)
def test_what_is_loaded_is_not_mixed_with_what_was_under_way(rank: int) -> None:
    """Weights and states that are loaded while an averaging is under way stay as they were loaded."""
    training = Training(rank, replace(TWO, delayed=True), TowerMesh(TWO.topology))
    model, sync = training.model, training.sync
    assert sync is not None
    for step in range(2):
        training.step(step)
    assert sync._states._works
    loaded = {one.name: torch.full_like(one.tensor, 7.0) for one in own_tables(model)}
    model.state_dict()  # as loading begins: whoever writes tables waits for what is under way first
    for one in own_tables(model):
        one.tensor.copy_(loaded[one.name])
    sync.restart()
    assert not sync._states._works
    with patch.object(GroupSharded, "flush", lambda _: [one.tensor.fill_(5 + rank) for one in own_tables(model)]):
        sync.restart()  # rows that are cached on an accelerator are newer than the tables
    for one in own_tables(model):
        assert one.tensor.eq(5 + rank % 2).all(), one.name
        one.tensor.copy_(loaded[one.name])
    sync.restart()
    for one in own_tables(model):
        assert torch.equal(one.tensor, loaded[one.name]), one.name
    training.step(2)
    assert sync._states._works
    assert drifted(model), "delayed states lag behind"
    model.fused_optimizer.load_state_dict(model.fused_optimizer.state_dict())
    assert not sync._states._works, "a delayed mean of other states would be mixed into those that were loaded"
    sync.sync()
    sync.check()


@on_ranks(4)
def test_a_table_s_own_learning_rate_is_scaled_too(rank: int) -> None:
    """A learning rate on a table's parameter goes before the sharder's, also when it is scaled."""
    case = replace(TWO, kind="flat", eps=1e-12)
    mesh = TowerMesh(case.topology)
    moved = {}
    for c in (1, 2):
        torch.manual_seed(0)
        model = build(case)
        for name, parameter in model.sparse_arch.named_parameters():
            if "t0" in name:
                apply_optimizer_in_backward(RowWiseAdagrad, [parameter], {"lr": 0.01, "eps": 1e-12})
        sharded_model = shard(replace(case, moment_scale=c), model, mesh)
        sync = ReplicaSync(sharded_model, mesh)
        before = {one.name: one.tensor.clone() for one in own_tables(sharded_model)}
        ids, labels = case.draw(rank % 2, 0)
        loss_of(sharded_model(ids)[1], labels).backward()
        sync.step()
        moved[c] = {one.name: float((one.tensor - before[one.name]).norm()) for one in own_tables(sharded_model)}
    for name, step in moved[1].items():
        if name.endswith("weight"):
            # The first step of AdaGrad is lr sqrt(c) times the sign; eps is far below the gradients here.
            assert abs(moved[2][name] / step - 2**0.5) < 0.02, (name, moved)
    if "t0.weight" in moved[1]:
        assert moved[1]["t0.weight"] < 0.5 * moved[1]["t2.weight"], "the table's own rate is a fifth"


def test_parts_that_do_not_make_whole_tensors_are_refused() -> None:
    parts = [LocalPart("t.weight", torch.ones(4, 2), (slice(0, 4), slice(0, 2)), (4, 2))] * 2
    assert torch.equal(join_parts(parts)["t.weight"], torch.ones(4, 2))
    half = LocalPart("t.weight", torch.ones(2, 2), (slice(0, 2), slice(0, 2)), (4, 2))
    for few in ([half], [*parts, half]):
        with pytest.raises(ReplicaMismatchError, match=r"t\.weight: elements are on"):
            join_parts(few)
    with pytest.raises(ReplicaMismatchError, match="ranks hold different values"):
        join_parts([*parts, half._replace(tensor=torch.zeros(2, 2))])


WIDE = 400  # a layer has 640 kB, and DDP's first bucket at least 1 MB


class Branches(nn.Module):
    """Only rank 0 uses one layer, and no rank uses another."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.used, self.sometimes, self.never = (nn.Linear(WIDE, 3) for _ in range(3))
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) + self.sometimes(x) if self.rank == 0 else self.used(x)


def wide_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(5)))


def loss_on(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(rank + 2, WIDE, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x).square().mean()


def distributed(model: nn.Module, wrapper: DefaultDataParallelWrapper) -> DistributedModelParallel:
    plan = ShardingPlan(plan={})
    return DistributedModelParallel(model, device=CPU, plan=plan, data_parallel_wrapper=wrapper)


def follow_ddp(
    rank: int, mesh: TowerMesh, models: Sequence[nn.Module], *, passes: int = 1, steps: int = 3, **options: Any
) -> None:
    """Checks that gradients equal DDP's, of models in one backward pass or with several passes before a step."""
    wrappers = HierarchicalDataParallel(mesh, **options), DefaultDataParallelWrapper(**options)
    ours, theirs = ([distributed(copy.deepcopy(model), wrapper) for model in models] for wrapper in wrappers)
    for step in range(steps):
        for side in (ours, theirs):
            for model in side:
                model.zero_grad()
            for number in range(passes):
                torch.stack([loss_on(model, rank, 10 * step + number) for model in side]).sum().backward()
        for model, other in zip(ours, theirs, strict=True):
            for (name, found), (_, value) in zip(model.named_parameters(), other.named_parameters(), strict=True):
                assert (found.grad is None) == (value.grad is None), (name, step)
                if value.grad is not None:
                    torch.testing.assert_close(found.grad, value.grad, rtol=1e-5, atol=1e-8)
                    with torch.no_grad():  # the next step sees other weights
                        found -= 0.01 * value.grad
                        value -= 0.01 * value.grad


@on_ranks(4)
def test_several_buckets_models_and_passes(rank: int) -> None:
    torch.manual_seed(0)
    mesh, start = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=2)), dense_reduce.start_sum_over_hosts
    with patch.object(dense_reduce, "start_sum_over_hosts", side_effect=start) as sums:
        # DDP arranges its buckets anew after the second step.
        follow_ddp(rank, mesh, [wide_model()], steps=4)
    assert sums.call_count > 4 + 2, "one bucket in each step: nothing was under way together with another"
    narrow = nn.Sequential(nn.Linear(WIDE, 7), nn.ReLU(), nn.Linear(7, 1))
    follow_ddp(rank, mesh, [narrow, wide_model()])
    follow_ddp(rank, mesh, [narrow], passes=2)
    follow_ddp(rank, mesh, [Branches(rank)], static_graph=False, find_unused_parameters=True)


class Scaled(nn.Module):
    """A model whose gradient is its input."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(7, dtype=dtype))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


def check_bytes(rank: int, mesh: TowerMesh) -> None:
    """Checks that H hosts send 2 (H - 1) n numbers to each other for n parameters."""
    for options, size in (({}, 4), ({"precision": "bf16"}, 2)):
        model = distributed(wide_model(), HierarchicalDataParallel(mesh, **options))
        for step in range(2):  # the first also exchanges how buckets are arranged
            with TrafficMeter(host_of=lambda r: r // 2) as meter:
                loss_on(model, rank, step).backward()
        traffic, numbers = meter.total(mesh.global_group), sum(p.numel() for p in model.parameters())
        assert traffic.dense == 2 * (2 - 1) * numbers * size, options
        assert traffic.forward == traffic.backward == 0 < traffic.inside, "inside hosts, and nowhere else"


@on_ranks(4)
def test_formats_and_bytes(rank: int) -> None:
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
