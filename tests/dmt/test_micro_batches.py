"""Micro-batches against the plain module in one process, and against the same model run on whole batches."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dmt import InputError, MicroBatches, TowerMesh, TowerTopology, run_in_micro_batches
from dmt.collectives import PendingExchange
from dmt.sptt.peer_exchange import PeerExchange, _Transfer
from dmt.testing import gather_plain_state
from tests.dmt.test_dataflow import flat_torchrec
from tests.parity import Batches, SumTowerModule, load_ramps, loss_of, make_tables
from tests.ranks import run_ranks
from tests.sptt_case import Case, build, shard

pytestmark = pytest.mark.ranks
TWO_TOWERS = TowerTopology(num_towers=2, ranks_per_tower=1)
TWO = Case(towers=2, ranks=1)
THREE_TOWERS = ((0, 2), (1, 3), (4,))


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Containers(nn.Module):
    """Takes tensors in every kind of container, and returns them so."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.inner = build(case)
        self.rows: list[list[int]] = []
        self.flaw = ""

    def forward(
        self, ids: KeyedJaggedTensor, extra: list[Any], *, pair: Pair, named: dict[str, Any], rate: torch.Tensor
    ):
        assert (extra[1], named["nothing"], rate.dim()) == ("extra", None, 0)
        tensors = [extra[0], pair.left, pair.right, named["a"], *named["list"], named["tuple"][0]]
        self.rows.append([len(tensor) for tensor in tensors])
        embeddings, logits = self.inner(ids)
        sums = [rate * tensor.sum(dim=1) for tensor in tensors]
        return {
            "embeddings": embeddings,
            "logits": logits + torch.stack(sums).sum(dim=0),
            "pair": Pair(pair.right, pair.left),
            "tuple": (sums[0], None),
            "list": [sums[1], (sums[2],)],
        }


class Flawed(nn.Module):
    """Does something that micro-batches cannot have, by name."""

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
        twice = {"two calls": (0, 1), "second pass": (0,), "first pass": (1,)}
        if self.passes % 2 in twice.get(self.flaw, ()):
            logits = logits + self.inner(ids)[1]
        if self.flaw == "none in one":
            return None if self.passes % 2 else logits
        if self.flaw == "more keys":
            return {"logits": logits} if self.passes % 2 else {"logits": logits, "more": logits}
        if self.flaw == "number":
            return 1.0
        return logits.sum() if self.flaw == "loss" else logits


class Hidden:
    """Nothing that can be looked into."""

    def __init__(self, ids: KeyedJaggedTensor) -> None:
        self.ids = ids


def drawn(rank: int, step: int, size: int = 5) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    return Batches(sizes=(size,) * 2, max_bag=3).draw(rank, step, make_tables([8, 8, 8, 8]))


def check_constructor(mesh: TowerMesh, rank: int) -> None:
    model = shard(TWO, build(TWO), mesh)
    with pytest.raises(InputError, match="num_micro_batches=0 must be at least 1"):
        run_in_micro_batches(model, num_micro_batches=0)
    with pytest.raises(InputError, match="this Linear has none inside"):
        run_in_micro_batches(nn.Linear(2, 2), num_micro_batches=2)
    own = 2 if rank == 0 else 3
    with pytest.raises(InputError, match="num_micro_batches is 2 on rank 0, but 3 on rank 1"):
        run_in_micro_batches(model, num_micro_batches=own)
    with pytest.raises(InputError, match="num_micro_batches is 2 on rank 0, but 0 on rank 1"):
        run_in_micro_batches(model, num_micro_batches=2 * (1 - rank))
    assert "forward" not in vars(model.module), "what was refused has left nothing"
    run_in_micro_batches(model, num_micro_batches=2)
    with pytest.raises(InputError, match=r"This TowerModel runs in micro-batches already; detach\(\) the first ones"):
        run_in_micro_batches(model.module, num_micro_batches=2)
    flat = replace(TWO, kind="flat")
    theirs = flat_torchrec(make_tables(list(TWO.dims)), gather_plain_state(shard(flat, build(flat), mesh)))
    with pytest.raises(InputError, match="holds a ShardedEmbeddingBagCollection, which would look up and send K times"):
        run_in_micro_batches(theirs, num_micro_batches=2)
    routed = shard(replace(TWO, id_route="global"), build(TWO), mesh)
    with pytest.raises(InputError, match="micro_batches=2 needs id_route='peer'"):
        run_in_micro_batches(routed, num_micro_batches=2)
    assert "forward" not in vars(routed.module)
    run_in_micro_batches(routed, num_micro_batches=1)


def check_calls(mesh: TowerMesh, rank: int) -> None:
    model = shard(TWO, Flawed(TWO), mesh)
    ids, labels = drawn(rank, 0, size=4)
    expected = model(ids).detach()
    run_in_micro_batches(model, num_micro_batches=2)
    named = {
        "no call": r"Flawed has called the sharded modules inside \[0\] times",
        "two calls": r"\[2\] times in 1 micro-batches; it must call each exactly once",
        # Two and none would be as many calls as there are micro-batches.
        "first pass": r"\[2\] times in 1",
        "second pass": r"\[3\] times in 2",
        "loss": r"returned \[\[\], \[\]\] for micro-batches of \[2, 2\] samples.* computes no loss",
        "none in one": "Flawed returned something else for one micro-batch than for another",
        "more keys": "Flawed returned something else for one micro-batch than for another",
        "number": r"Flawed returned \['float', 'float'\] for",
    }
    for flaw, message in named.items():
        model.module.flaw, model.module.passes = flaw, 0
        with pytest.raises(InputError, match=message):
            model(ids, labels)
        model.module.flaw = ""
        torch.testing.assert_close(model(ids).detach(), expected)  # and nothing is left of it
    with pytest.raises(InputError, match="Flawed is given; its arguments hold 0 different ones"):
        model(Hidden(ids))
    with pytest.raises(InputError, match="its arguments hold 2 different ones"):
        model(ids, drawn(rank, 0, size=5)[0])
    for other in (torch.zeros(1, 4), torch.zeros(5), [torch.zeros(6)], {"a": torch.zeros(0)}):
        with pytest.raises(InputError, match=r"Flawed is given a tensor of shape .* with a batch of 4 samples"):
            model(ids, other)
    torch.testing.assert_close(model(ids, torch.zeros(4, 2), torch.tensor(3.0)).detach(), expected)


def check_detach(mesh: TowerMesh, rank: int) -> None:
    model = shard(TWO, build(TWO), mesh)
    ids = drawn(rank, 0)[0]
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
        with pytest.raises(InputError, match="another was put over them, which must be taken off first"):
            parts.detach()
        assert model.module.forward is over
        model.module.forward = parts
        parts.detach()
        assert vars(model.module).get("forward") is own
        assert not any("compute_and_output_dist" in vars(part) for part in model.module.modules())
        assert torch.equal(model(ids)[1], whole), "whole batches again"
        with pytest.raises(InputError, match="they are detached already"):
            parts.detach()
    assert calls == [5] * 4, "three micro-batches, and the whole batch"
    run_in_micro_batches(model, num_micro_batches=1)
    assert torch.equal(model(ids)[1], whole)
    assert len(calls) == 5, "one micro-batch is the whole batch"


def check_containers(mesh: TowerMesh, rank: int) -> None:
    case = replace(TWO, kind="flat")
    model = shard(case, Containers(case), mesh)
    ids = drawn(rank, 0)[0]
    a, b, c, d, e, f, g = torch.randn(7, 5, 2).unbind()
    extra, pair = [a, "extra"], Pair(b, c)
    others = {
        "pair": pair,
        "named": {"a": d, "list": [e, f], "tuple": (g,), "nothing": None},
        "rate": torch.tensor(2.0),
    }
    whole = model(ids, extra, **others)
    run_in_micro_batches(model, num_micro_batches=2)
    joined = model(ids, extra, **others)
    assert model.module.rows == [[5] * 7, [3] * 7, [2] * 7], "rows of each argument in the whole batch, then in parts"
    ours, theirs = joined.pop("embeddings"), whole.pop("embeddings")
    assert isinstance(ours, KeyedTensor)
    assert (ours.keys(), ours.length_per_key()) == (theirs.keys(), theirs.length_per_key())
    assert torch.equal(ours.values(), theirs.values())
    assert [type(part) for part in joined.values()] == [torch.Tensor, Pair, tuple, list]
    for one, other in zip(tree_leaves([*joined.values()]), tree_leaves([*whole.values()]), strict=True):
        torch.testing.assert_close(one, other)
    assert torch.equal(joined["pair"].left, c)
    assert torch.equal(joined["pair"].right, b)


def use_on_rank(rank: int) -> None:
    mesh = TowerMesh(TWO_TOWERS)
    check_constructor(mesh, rank)
    check_calls(mesh, rank)
    check_detach(mesh, rank)
    check_containers(mesh, rank)


def test_use_and_wrong_use() -> None:
    run_ranks(use_on_rank, 2)


class Broken(Exception):
    pass


class Breakable(nn.Module):
    """Raises in the dense part of the first micro-batch, forward or backward, while the second is under way."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.inner = build(case)
        self.fails: str | None = None

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(ids)[1]
        fails, self.fails = self.fails, None
        if fails == "forward":
            raise Broken
        if fails == "backward":
            logits.register_hook(fail)
        return logits


def fail(gradient: torch.Tensor) -> None:
    raise Broken


def train(mesh: TowerMesh, rank: int, *, num: int, sizes: tuple[int, int], disturbed: str | None = None) -> Any:
    """The weights after three steps, with an attempt after the first that comes to nothing."""
    torch.manual_seed(0)
    model = shard(TWO, Breakable(TWO), mesh)
    load_ramps(model)
    optimizer = torch.optim.SGD(model.module.inner.over_arch.parameters(), lr=0.05)
    run_in_micro_batches(model, num_micro_batches=num)
    batches = Batches(sizes=sizes, max_bag=3)
    tables = make_tables(list(TWO.dims))
    for step in range(3):
        if step == 1 and disturbed == "dropped":
            model(batches.draw(rank, 7, tables)[0])
        elif step == 1 and disturbed is not None:
            model.module.fails = disturbed
            with pytest.raises(Broken):
                model(batches.draw(rank, 7, tables)[0]).sum().backward()
        ids, labels = batches.draw(rank, step, tables)
        optimizer.zero_grad()
        # Not the mean: of no sample there is none.
        binary_cross_entropy_with_logits(model(ids), labels, reduction="sum").backward()
        optimizer.step()
    return gather_plain_state(model)


def disturbed_on_rank(rank: int) -> None:
    mesh = TowerMesh(TWO_TOWERS)
    for sizes in ((5, 0), (0, 3), (0, 0)):
        found, expected = (train(mesh, rank, num=num, sizes=sizes) for num in (2, 1))
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=5e-6)
    undisturbed = train(mesh, rank, num=2, sizes=(5, 4))
    for kind in ("dropped", "forward", "backward"):
        found = train(mesh, rank, num=2, sizes=(5, 4), disturbed=kind)
        for name, value in undisturbed.items():
            assert torch.equal(found[name], value), (kind, name)


def test_empty_batches_and_passes_that_break_off() -> None:
    run_ranks(disturbed_on_rank, 2)


def logged(before: Any, event: str, events: list[str]) -> Any:
    def log(own: Any, *args: Any) -> Any:
        if not getattr(own, "is_done", False):  # waited for already
            events.append(event)
        return before(own, *args)

    return log


def watched(events: list[str]) -> contextlib.ExitStack:
    """Logs what begins, computes and ends."""
    stack = contextlib.ExitStack()
    for owner, name, event in (
        (PeerExchange, "__call__", "exchange begun"),
        (SumTowerModule, "forward", "tower module"),
        (PendingExchange, "wait", "waited for"),
        (_Transfer, "start_backward", "gradients sent"),
    ):
        stack.enter_context(patch.object(owner, name, logged(getattr(owner, name), event, events)))
    return stack


class SentAndReceived(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if func.namespace == "c10d" and name in ("send", "recv_"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def order_on_rank(rank: int) -> tuple[list[str], list[str]]:
    """Events of the second step, and its sends and receives."""
    case = Case(towers=3, ranks=1, dims=(8,) * 5, plan=THREE_TOWERS)
    model = shard(case, build(case), TowerMesh(TowerTopology(num_towers=3, ranks_per_tower=1)))
    run_in_micro_batches(model, num_micro_batches=2)
    events: list[str] = []

    def dense(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        events.append("dense part")
        output.register_hook(lambda _: events.append("dense part, backward"))

    model.module.over_arch.register_forward_hook(dense)
    for step in range(2):
        events.clear()
        with watched(events), SentAndReceived() as messages:
            ids, labels = case.draw(rank, step)
            loss_of(model(ids)[1], labels).backward()
    return events, messages.names


def test_one_micro_batch_is_under_way_while_the_dense_part_computes_another() -> None:
    begun = ["tower module", "exchange begun"]
    computed = ["waited for", "dense part"]
    back = ["dense part, backward", "gradients sent"]
    for events, messages in run_ranks(order_on_rank, 3):
        assert events == [*begun, *begun, *computed, *computed, *back, *back, *2 * ["waited for"]]
        # Two micro-batches, forward and backward: what comes from two peers is asked for first.
        assert messages == 4 * ["recv_", "recv_", "send", "send"]
