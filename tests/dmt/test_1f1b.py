"""1F1B: micro-batches whose backward passes follow their forward passes train as the plain module does."""

from __future__ import annotations

from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dmt import InputError, TowerMesh, TowerTopology, TrafficMeter, run_in_micro_batches
from dmt.sptt.dataflow import SPTTModule
from dmt.sptt.micro_batches import Schedule
from dmt.sptt.peer_exchange import _AllToAllRequest
from dmt.testing import gather_plain_state, load_plain_state
from dmt.testing.state import table_layout
from dmt.traffic import Traffic
from tests.parity import DENSE, LR, loss_of, make_tables, plain_training, train_plainly
from tests.ranks import run_ranks
from tests.sptt_case import STEPS, Case, build, check_worst, shard

pytestmark = pytest.mark.ranks
THREE_TOWERS = ((0, 2), (1, 3), (4,))
CASES = {
    "modules": Case(towers=2, ranks=2, micro_batches=2),
    "uneven batches": Case(towers=2, ranks=2, micro_batches=3, sizes=(3, 4, 5, 9), max_bag=3),
    "fewer samples than micro-batches": Case(towers=2, ranks=2, micro_batches=4, sizes=(1, 2, 7, 3), max_bag=3),
    "flat": Case(towers=2, ranks=2, kind="flat", micro_batches=4),
    "three towers, mixed schemes": Case(
        towers=3, ranks=2, dims=(8, 4, 8, 12, 16), plan=THREE_TOWERS, scheme="mixed", micro_batches=3
    ),
    "FP16": Case(towers=2, ranks=2, precision="fp16", optimizer="sgd", micro_batches=3),
}


class Task(nn.Module):
    """A model with its mean loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.model(ids)[1]
        return loss_of(logits, labels), logits.detach()


def sharded(case: Case, make_task: type[Task] = Task) -> tuple[Any, TowerMesh, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = build(case)
    start = {name: value.detach().clone() for name, value in model.state_dict().items()}
    mesh = TowerMesh(TowerTopology(num_towers=case.towers, ranks_per_tower=case.ranks))
    task = shard(case, make_task(model), mesh)
    others = {name: value.detach() for name, value in task.module.named_parameters(recurse=False)}
    load_plain_state(task, {f"model.{name}": value for name, value in start.items()} | others)
    return task, mesh, start


def parity_on_rank(rank: int, case: Case) -> dict[str, float]:
    """The largest differences to the plain module after some steps, and of losses and outputs."""
    task, _, start = sharded(case)
    plain = build(case)
    plain.load_state_dict(start)
    oracle = plain_training(plain, layout=table_layout(task), optimizer=case.optimizer)
    plain = oracle.modules[0]
    run_in_micro_batches(task.module, case.micro_batches, schedule="1f1b")
    parameters = ((n, p) for n, p in task.named_parameters() if p.requires_grad)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(parameters)), lambda p: DENSE[case.optimizer == "sgd"](p, lr=LR)
    )
    tables, worst = make_tables(list(case.dims)), {"tables": 0.0, "dense": 0.0, "moved": 0.0}
    for step in range(STEPS):
        everyone = [case.batches().draw(r, step, tables) for r in range(case.world)]
        with torch.no_grad():
            logits = plain(everyone[rank][0])[1]
        dense.zero_grad()
        loss, found = task(*everyone[rank])
        tolerance = 1e-5 if case.precision == "fp32" else 1e-2
        torch.testing.assert_close(found, logits, rtol=0, atol=tolerance)
        torch.testing.assert_close(loss.detach(), loss_of(logits, everyone[rank][1]), rtol=0, atol=tolerance)
        loss.backward()
        dense.step()
        train_plainly(oracle, everyone)
    after = {name.removeprefix("model."): value for name, value in gather_plain_state(task).items()}
    for name, value in plain.state_dict().items():
        kind = "tables" if "embedding_bags" in name else "dense"
        worst[kind] = max(worst[kind], (after[name] - value).abs().max().item())
        worst["moved"] = max(worst["moved"], (start[name] - value).abs().max().item())
    task.eval()
    with torch.no_grad():  # nothing is trained
        loss, _ = task(*everyone[rank])
    assert not loss.requires_grad
    assert all(
        torch.equal(value, after[name.removeprefix("model.")]) for name, value in gather_plain_state(task).items()
    )
    return worst


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_training_equals_the_plain_module(case: Case) -> None:
    for worst in run_ranks(parity_on_rank, case.world, case):
        check_worst(case, worst)


class Weighed(Task):
    """Has a parameter behind the mean: a gradient of the mean over no samples would be no number."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, ids: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss, logits = super().forward(ids, labels)
        return self.weight * loss, logits


def weighed_on_rank(rank: int, sizes: tuple[int, int]) -> None:
    """Loss, gradients and tables after a short batch are those without micro-batches."""
    case, found = Case(towers=2, ranks=1, micro_batches=4, sizes=sizes), []
    for num in (1, 4):
        torch.manual_seed(0)
        task, _, _ = sharded(case, Weighed)
        if num > 1:
            run_in_micro_batches(task.module, num, schedule="1f1b")
        loss, _ = task(*case.batches().draw(rank, 0, make_tables(list(case.dims))))
        loss.backward()
        gradients = {f"{name}.grad": p.grad for name, p in task.named_parameters() if p.grad is not None}
        assert len(gradients) == 5, "loss, tower module and dense part"
        found.append({"loss": loss.detach(), **gradients, **gather_plain_state(task)})
    whole, parts = found
    if 0 in sizes:  # DDP averages what is no number, and TorchRec's plain module takes no empty batch
        assert whole.pop("weight.grad").isnan()
        assert parts.pop("weight.grad").isfinite()
    assert bool(whole["loss"].isfinite()) == (sizes[rank] > 0)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("sizes", [(1, 3), (5, 0)])
def test_an_empty_part_adds_nothing_to_any_gradient(sizes: tuple[int, int]) -> None:
    run_ranks(weighed_on_rank, 2, sizes)


def order_on_rank(rank: int) -> tuple[list[str], list[str]]:
    """Forward passes of the dense part and starts of gradient exchanges, before and in ``backward()``."""
    case, events = Case(towers=2, ranks=1, micro_batches=3), []
    task, _, _ = sharded(case)
    run_in_micro_batches(task.module, 3, schedule="1f1b")
    task.module.model.over_arch.register_forward_hook(lambda *_: events.append("F"))
    start = _AllToAllRequest.start_backward

    def recorded(self: Any, gradients: torch.Tensor) -> None:
        events.append("B")
        start(self, gradients)

    with patch.object(_AllToAllRequest, "start_backward", recorded):
        loss, _ = task(*case.batches().draw(rank, 0, make_tables(list(case.dims))))
        before = list(events)
        loss.backward()
    return before, events[len(before) :]


def test_gradients_of_a_part_leave_before_the_next_is_computed() -> None:
    assert run_ranks(order_on_rank, 2) == [(list("FBFBF"), ["B"])] * 2


def traffic_on_rank(rank: int, schedule: Schedule) -> Traffic:
    case = Case(towers=2, ranks=2, micro_batches=3)
    task, mesh, _ = sharded(case)
    run_in_micro_batches(task.module if schedule == "1f1b" else task.module.model, 3, schedule=schedule)
    for step in range(2):  # the first step also exchanges sizes that never change again
        with TrafficMeter(host_of=mesh.topology.host) as meter:
            task(*case.batches().draw(rank, step, make_tables(list(case.dims))))[0].backward()
    return meter.total(mesh.global_group)


def test_bytes_of_each_kind_are_those_without_1f1b() -> None:
    early, late = (run_ranks(traffic_on_rank, 4, schedule)[0] for schedule in get_args(Schedule))
    assert early == late
    assert early.forward == early.backward > 0


def refusals_on_rank(rank: int) -> list[str]:
    case = Case(towers=2, ranks=1, micro_batches=2)
    batch = case.batches().draw(rank, 0, make_tables(list(case.dims)))
    texts = []

    def refused(function: Any) -> None:
        with pytest.raises(InputError) as caught:
            function()
        texts.append(str(caught.value))

    def one(num: int = 2, own: Case = case) -> Any:
        task, _, _ = sharded(own)
        return task, run_in_micro_batches(task.module, num, schedule="1f1b")

    for in_place in (False, True):
        task, handle = one()
        loss, _ = task(*batch)
        task.module.model.over_arch.zero_grad(set_to_none=not in_place)
        refused(loss.backward)
    task, handle = one()
    loss, _ = task(*batch)
    next(reversed(list(task.module.model.over_arch.parameters()))).grad.zero_()  # a single one
    refused(loss.backward)
    task, handle = one()
    refused((2 * task(*batch)[0]).backward)
    task, handle = one()
    handle.detach()
    (2 * task(*batch)[0]).backward()  # whole batches again
    task, _, _ = sharded(case)
    refused(lambda: run_in_micro_batches(task.module, 2, schedule="2f2b"))  # type: ignore[arg-type]
    task.module.norm = nn.BatchNorm1d(3)
    refused(lambda: run_in_micro_batches(task.module, 2, schedule="1f1b"))
    refused(lambda: one(own=Case(towers=2, ranks=1, unique="rank")))
    refused(lambda: one(own=Case(towers=1, ranks=2, plan=((0, 1, 2, 3),))))
    task, _, _ = sharded(case)
    sparse = next(part for part in task.module.modules() if isinstance(part, SPTTModule))
    own = next(p for p in sparse.parameters() if p.requires_grad)
    if rank == 0:  # as where only one tower shares it
        task.module.tied = own
    refused(lambda: run_in_micro_batches(task.module, 2, schedule="1f1b"))
    task.module.tied = own
    refused(lambda: run_in_micro_batches(task.module, 2, schedule="1f1b"))
    task, _, _ = sharded(case)
    run_in_micro_batches(task.module.model, 2, schedule="1f1b")
    refused(lambda: task(*batch))
    return texts


def test_what_cannot_be_is_refused() -> None:
    expected = (
        *["they were cleared or changed before backward"] * 3,
        "called with 2.0 times the loss",
        "schedule='2f2b' is unknown",
        "BatchNorm1d makes each depend on the others",
        "needs unique='off'",
        "needs two towers or more",
        "a parameter both in a tower and in the dense part",
        "but they share 'tied'",
        "needs a module that returns the mean loss",
    )
    for texts in run_ranks(refusals_on_rank, 2, fresh=True):
        assert len(texts) == len(expected)
        for text, part in zip(texts, expected, strict=True):
            assert part in text
