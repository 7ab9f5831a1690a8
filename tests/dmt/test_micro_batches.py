"""Micro-batches against the plain module in one process, and against the same model run on whole batches."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils._pytree import tree_leaves
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from dmt import InputError, MicroBatches, TowerMesh, run_in_micro_batches
from dmt.collectives import PendingExchange
from dmt.sptt.peer_exchange import PeerExchange, _Wait
from dmt.testing import gather_plain_state
from tests.parity import PipelinedBatch, SumTowerModule, draw_batch, fail, load_ramps, loss_of
from tests.ranks import on_ranks
from tests.sptt_case import Case, Training, build, shard

pytestmark = pytest.mark.ranks
TWO = Case(towers=2, ranks=1)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Containers(nn.Module):
    """Takes and returns tensors in every kind of container."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.inner = build(case)
        self.rows: list[list[int]] = []

    def forward(
        self, ids: KeyedJaggedTensor, extra: list[Any], *, pair: Pair, named: dict[str, Any], rate: torch.Tensor
    ) -> dict[str, Any]:
        assert (extra[1], named["nothing"], rate.dim()) == ("extra", None, 0)
        tensors = [extra[0], pair.left, pair.right, named["a"], named["list"][0], named["list"][1][0]]
        self.rows.append([len(tensor) for tensor in tensors])
        embeddings, logits = self.inner(ids)
        sums = [rate * tensor.sum(dim=1) for tensor in tensors]
        return {
            "embeddings": embeddings,
            "logits": logits + torch.stack(sums).sum(dim=0),
            "pair": Pair(pair.right, pair.left),
            "tuple": (sums[0], None, [sums[1]]),
        }


class Flawed(nn.Module):
    """Does something that micro-batches do not support; ``flaw`` names it."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.inner = build(case)
        self.flaw = ""
        self.passes = 0

    def forward(self, given: Any, *others: Any) -> Any:
        ids = given.ids if isinstance(given, Hidden) else given
        self.passes += 1
        if self.flaw == "no call":
            return torch.zeros(len(others[0]))
        logits = self.inner(ids)[1]
        if self.flaw == "two calls" or (self.flaw == "second pass" and self.passes == 2):
            logits = logits + self.inner(ids)[1]
        if self.flaw == "none in one":
            return None if self.passes == 1 else logits
        if self.flaw == "number":
            return 1.0
        pairs = logits.unsqueeze(1) - logits
        outputs = {"loss": logits.sum(), "pairs": pairs, "softmax of pairs": pairs.softmax(dim=1)}
        outputs["classes of pairs"] = torch.stack([pairs, -pairs], dim=2).softmax(dim=2)
        return {**outputs, "two columns": torch.stack([logits, logits], dim=1)}.get(self.flaw, logits)


@dataclass
class Hidden:
    """An object in which micro-batches find no ids; passed on whole, it would give each all its numbers."""

    ids: Any


def drawn(rank: int, size: int = 5) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    return draw_batch(rank, 0, TWO.tables(), size, max_bag=3)


def check_equal_micro_batches(model: Any, rank: int) -> None:
    """Scores of pairs of samples are refused, though they have a row per sample; other square outputs are not."""
    ids = drawn(rank, size=6)[0]
    with torch.no_grad():
        model.module.flaw = "pairs"
        assert model(ids).shape == (6, 2)  # not noticed without gradients
    for flaw in ("pairs", "softmax of pairs", "classes of pairs"):
        model.module.flaw = flaw
        with pytest.raises(InputError, match=r"a tensor \[2, 2\] for a micro-batch of 2 samples, and its rows"):
            model(ids)
        handle = vars(model.module)["forward"]
        handle._has_checked_pairs = False
    model.module.flaw = "two columns"
    model(ids).sum().backward()
    assert handle._has_checked_pairs
    model.module.flaw = ""


def check_calls(mesh: TowerMesh, rank: int) -> None:
    model = shard(TWO, Flawed(TWO), mesh)
    ids, labels = drawn(rank, size=4)
    expected = model(ids).detach()
    run_in_micro_batches(model, num_micro_batches=3)
    named = {
        "no call": r"Flawed called its sharded modules \[0\] times",
        "two calls": r"\[2\] times in the first 1 of 3 micro-batches. Its forward must call each",
        "second pass": r"\[3\] times in the first 2",
        "loss": r"returned \[\[\], \[\], \[\]\] for micro-batches of \[2, 1, 1\] samples.* computes no loss",
        "pairs": r"returned \[\[2, 2\], \[1, 1\], \[1, 1\]\] for .* compares no samples",
        "none in one": "Flawed returned different structures for different micro-batches",
        "number": r"Flawed returned \['float', 'float', 'float'\] for",
    }
    for flaw, message in named.items():
        model.module.flaw, model.module.passes = flaw, 0
        with pytest.raises(InputError, match=message):
            model(ids, labels)
        model.module.flaw = ""
        torch.testing.assert_close(model(ids).detach(), expected)  # and nothing is left of it
    with pytest.raises(InputError, match=r"the arguments of Flawed must .* one batch size, but there are none\."):
        model(Hidden(ids))
    with pytest.raises(InputError, match=r"one batch size, but their batch sizes are \[\d+, \d+\]\."):
        model(ids, drawn(rank, size=5)[0])
    hidden, jagged = Hidden(torch.zeros(4)), JaggedTensor(torch.zeros(4), lengths=torch.ones(4).long())
    for other in (hidden, {"a": [hidden]}, jagged):
        with pytest.raises(InputError, match=r"Flawed was called with a (Hidden|JaggedTensor), which cannot"):
            model(ids, other)
    for other in (torch.zeros(1, 4), torch.zeros(5), [torch.zeros(6)], {"a": torch.zeros(0)}):
        with pytest.raises(InputError, match=r"Flawed was called with a tensor of shape .* for a batch of 4 samples"):
            model(ids, other)
    torch.testing.assert_close(model(ids, torch.zeros(4, 2), torch.tensor(3.0)).detach(), expected)
    check_equal_micro_batches(model, rank)


def check_detach(mesh: TowerMesh, rank: int) -> None:
    model = shard(TWO, build(TWO), mesh)
    ids = drawn(rank)[0]
    whole = model(ids)[1]
    plain, calls = model.module.forward, []

    def counted(given: KeyedJaggedTensor) -> Any:
        calls.append(given.stride())
        return plain(given)

    for own in (None, counted):
        if own is not None:
            model.module.forward = own
        parts = MicroBatches(model, num_micro_batches=3)
        torch.testing.assert_close(model(ids)[1], whole)
        over = model.module.forward = functools.partial(parts)
        with pytest.raises(InputError, match=r"another wrapper was put over it. Remove that wrapper"):
            parts.detach()
        assert model.module.forward is over
        model.module.forward = parts
        parts.detach()
        assert vars(model.module).get("forward") is own
        assert not any("compute_and_output_dist" in vars(part) for part in model.module.modules())
        assert torch.equal(model(ids)[1], whole), "whole batches again"
        with pytest.raises(InputError, match="it is already detached"):
            parts.detach()
    assert calls == [5] * 4, "three micro-batches, and the whole batch"
    run_in_micro_batches(model, num_micro_batches=1)
    assert torch.equal(model(ids)[1], whole)
    assert len(calls) == 5, "one micro-batch is the whole batch"


def check_containers(mesh: TowerMesh, rank: int) -> None:
    case = replace(TWO, kind="flat")
    model = shard(case, Containers(case), mesh)
    ids = drawn(rank)[0]
    a, b, c, d, e, f = torch.randn(6, 5, 2).unbind()
    others = {"pair": Pair(b, c), "named": {"a": d, "list": [e, (f,)], "nothing": None}, "rate": torch.tensor(2.0)}
    whole = model(ids, [a, "extra"], **others)
    run_in_micro_batches(model, num_micro_batches=2)
    joined = model(ids, [a, "extra"], **others)
    assert model.module.rows == [[5] * 6, [3] * 6, [2] * 6], "rows of each argument in the whole batch, then in parts"
    ours, theirs = joined.pop("embeddings"), whole.pop("embeddings")
    assert isinstance(ours, KeyedTensor)
    assert (ours.keys(), ours.length_per_key()) == (theirs.keys(), theirs.length_per_key())
    assert torch.equal(ours.values(), theirs.values())
    assert [type(part) for part in joined.values()] == [torch.Tensor, Pair, tuple]
    torch.testing.assert_close(tree_leaves(joined), tree_leaves(whole))


@on_ranks(2)
def test_use_and_wrong_use(rank: int) -> None:
    mesh = TowerMesh(TWO.topology)
    check_calls(mesh, rank)
    check_detach(mesh, rank)
    check_containers(mesh, rank)


@on_ranks(2)
def test_ranks_may_have_no_samples(rank: int) -> None:
    mesh = TowerMesh(TWO.topology)
    for sizes in ((5, 0), (0, 3), (0, 0)):
        ends = []
        for num in (2, 1):
            model = shard(TWO, build(TWO), mesh)
            load_ramps(model)
            run_in_micro_batches(model, num_micro_batches=num)
            ids, labels = replace(TWO, sizes=sizes, max_bag=3).draw(rank, 0)
            # Not the mean: of no sample there is none.
            binary_cross_entropy_with_logits(model(ids)[1], labels, reduction="sum").backward()
            ends.append({**gather_plain_state(model), "gradient": model.module.over_arch.weight.grad})
        torch.testing.assert_close(*ends, rtol=0, atol=5e-6)


def end_of(rank: int, mesh: TowerMesh, disturbed: str) -> dict[str, torch.Tensor]:
    """Returns the weights after three steps, with a step between the first two that fails.

    The dense part fails in the first micro-batch, forward or backward, while the second is under way.
    """
    training = Training(rank, replace(TWO, micro_batches=2, max_bag=3, sizes=(5, 4)), mesh)
    dense, passes = training.model.module.model.over_arch, []

    def disturb(module: nn.Module, inputs: Any, logits: torch.Tensor) -> None:
        passes.append(logits)
        if disturbed == "forward":
            fail(logits)
        if disturbed == "backward" and len(passes) == 1:
            logits.register_hook(fail)

    training.step(0)
    hook = dense.register_forward_hook(disturb)
    with pytest.raises(ZeroDivisionError) if disturbed in ("forward", "backward") else contextlib.nullcontext():
        loss, _ = training.model(PipelinedBatch(*training.case.draw(rank, 7))) if disturbed else (None, None)
        if disturbed == "backward":
            loss.backward()
    hook.remove()
    training.step(1)
    training.step(2)
    return gather_plain_state(training.model)


@on_ranks(2)
def test_passes_that_break_off_leave_no_trace(rank: int) -> None:
    mesh = TowerMesh(TWO.topology)
    expected = end_of(rank, mesh, "")
    for kind in ("dropped", "forward", "backward"):
        end = end_of(rank, mesh, kind)
        assert all(torch.equal(end[name], value) for name, value in expected.items()), kind


def logged(before: Any, event: str, events: list[str]) -> Any:
    def log(own: Any, *args: Any) -> Any:
        if not getattr(own, "is_done", False):  # waited for already
            events.append(event)
        return before(own, *args)

    return log


def watched(events: list[str]) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for owner, name, event in (
        (PeerExchange, "__call__", "exchange begun"),
        (SumTowerModule, "forward", "tower module"),
        (PendingExchange, "wait", "waited for"),
        (_Wait, "backward", "gradients sent"),
    ):
        stack.enter_context(patch.object(owner, name, logged(getattr(owner, name), event, events)))
    return stack


@on_ranks(2)
def test_one_micro_batch_is_under_way_while_the_dense_part_computes_another(rank: int) -> None:
    """Events of the second step."""
    model = shard(TWO, build(TWO), TowerMesh(TWO.topology))
    run_in_micro_batches(model, num_micro_batches=2)
    events: list[str] = []

    def dense(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        events.append("dense part")
        output.register_hook(lambda _: events.append("dense part, backward"))

    model.module.over_arch.register_forward_hook(dense)
    for step in range(2):
        events.clear()
        with watched(events):
            ids, labels = TWO.draw(rank, step)
            loss_of(model(ids)[1], labels).backward()
    begun, computed = ["tower module", "exchange begun"], ["waited for", "dense part"]
    back = ["dense part, backward", "gradients sent"]
    assert events == [*begun, *begun, *computed, *computed, *back, *back, *2 * ["waited for"]]
