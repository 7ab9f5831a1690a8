"""Replicas: what is noticed, what is refused, and what loading and rates of single tables do; parity is elsewhere."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dmt import InputError, ReplicaSync, TowerMesh
from dmt.errors import ReplicaMismatchError
from dmt.sptt.state import checksum
from dmt.testing.state import LocalPart, join_parts
from tests.parity import loss_of
from tests.ranks import run_ranks
from tests.sptt_case import Case, Training, build, own_tables, shard

TWO = Case(towers=2, ranks=1, replicas=2)


def damage_on_rank(rank: int) -> None:
    training = Training(rank, replace(TWO, interval=2, scheme="mixed"), TowerMesh(TWO.topology))
    sync = training.sync
    assert sync is not None
    sync.check()
    training.step(0)
    with pytest.raises(ReplicaMismatchError, match=r"t\d\.\w+ of rank \d differs from that of rank \d"):
        sync.check()  # between syncs they do differ
    training.step(1)
    sync.check()
    victim = next((one for one in own_tables(training.model) if one.name == "t1.momentum1"), None)
    if rank >= 2 and victim is not None:
        victim.tensor[:2] = victim.tensor[:2].flip(0) + torch.tensor([0.0, 1e-30])
        victim.tensor[0] += 1
    with pytest.raises(ReplicaMismatchError, match=r"t1\.momentum1 of rank [23] differs from that of rank [01]"):
        sync.check()


@pytest.mark.ranks
def test_a_replica_that_differs_is_found_on_every_rank() -> None:
    run_ranks(damage_on_rank, 4)


def wrong_use_on_rank(rank: int) -> None:
    case = TWO
    mesh = TowerMesh(case.topology)
    for c in (0, -1, 3, float("nan"), True, "replicas"):
        with pytest.raises(InputError, match=r"moment_scale=.* must be above 0 and at most num_replicas=2"):
            shard(replace(case, moment_scale=c), build(case), mesh)
    sgd = replace(case, optimizer="sgd", moment_scale=2)
    with pytest.raises(InputError, match=r"moment_scale=2 scales the moments of rowwise_adagrad and adagrad, but"):
        shard(sgd, build(sgd), mesh)
    with pytest.raises(InputError, match=r"moment_scale is .* on rank 0, but .* on rank 3"):
        shard(replace(case, moment_scale=2 if rank == 3 else 1), build(case), mesh)
    model = shard(case, build(case), mesh)
    ids, _ = case.draw(rank, 0)
    with pytest.raises(InputError, match=r"num_replicas=2, but nothing keeps the replicas equal.*ReplicaSync\(model"):
        model(ids)
    for wrong in (
        {"interval": 0},
        {"interval": 1.5},
        {"optimizer_state": "late"},
    ):
        name = next(iter(wrong))
        with pytest.raises(InputError, match=f"ReplicaSync: {name}="):
            ReplicaSync(model, mesh, **wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="found no tables in the model that a tower sharder"):
        ReplicaSync(build(case), mesh)


def passes_without_step_on_rank(rank: int) -> None:
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


@pytest.mark.ranks
def test_a_forgotten_step_is_noticed_in_training_passes_only() -> None:
    """Evaluation without ``no_grad`` and ``state_dict()`` read tables too, and need no step."""
    run_ranks(few_passes_on_rank, 4)


def few_passes_on_rank(rank: int) -> None:
    with patch("dmt.replicas.sync._MOST_PASSES_PER_STEP", 8):
        passes_without_step_on_rank(rank)


@pytest.mark.ranks
def test_wrong_use_is_refused() -> None:
    run_ranks(wrong_use_on_rank, 4)


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


def under_way_on_rank(rank: int) -> None:
    """Weights and states that are loaded while an averaging is under way stay as they were loaded."""
    training = Training(rank, replace(TWO, delayed=True), TowerMesh(TWO.topology))
    model, sync = training.model, training.sync
    assert sync is not None
    for step in range(2):
        training.step(step)
    assert sync._states.is_running
    loaded = {one.name: torch.full_like(one.tensor, 7.0) for one in own_tables(model)}
    model.state_dict()  # as loading begins: whoever writes tables waits for what is under way first
    for one in own_tables(model):
        one.tensor.copy_(loaded[one.name])
    sync.restart()
    assert not sync._states.is_running
    for one in own_tables(model):
        assert torch.equal(one.tensor, loaded[one.name]), one.name
    training.step(2)
    sync.sync()
    sync.check()


@pytest.mark.ranks
def test_what_is_loaded_is_not_mixed_with_what_was_under_way() -> None:
    run_ranks(under_way_on_rank, 4)


def own_rates_on_rank(rank: int) -> None:
    """A learning rate on a table's parameter goes before the sharder's, also when it is scaled."""
    case = replace(TWO, kind="flat")
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


@pytest.mark.ranks
def test_a_table_s_own_learning_rate_is_scaled_too() -> None:
    run_ranks(own_rates_on_rank, 4)


def test_gathering_without_the_number_of_replicas_says_what_to_give() -> None:
    parts = [LocalPart("t.weight", torch.ones(4, 2), (slice(0, 4), slice(0, 2)), (4, 2), is_shard=True)] * 2
    assert torch.equal(join_parts(parts, num_replicas=2)["t.weight"], torch.ones(4, 2))
    with pytest.raises(ReplicaMismatchError, match=r"8 of its 8 .* held by 2 rank\(s\), not by num_replicas=1"):
        join_parts(parts)
