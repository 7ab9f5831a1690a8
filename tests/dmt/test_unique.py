"""Unique inputs: the rows found, bytes, gradients of shared rows, batches in flight; parity is elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torchrec.distributed.types import NoWait
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dmt.sptt.rows
import dmt.sptt.unique
from dmt import TowerCollectionSharder, TowerMesh, TowerTopology, run_in_micro_batches
from dmt.sptt.dataflow import SPTTModule
from dmt.sptt.rows import RowCode, part_sizes, rows_of_parts
from dmt.sptt.unique import distinct_inputs, samples_of_rows
from dmt.testing import gather_plain_state
from dmt.traffic import Traffic, TrafficMeter
from tests.parity import FUSED, loss_of, make_tables
from tests.ranks import on_ranks, run_ranks
from tests.sptt_case import Case, build, distribute, shard, towers_of

Bag = tuple[tuple[int, float], ...]


def bags_of(ids: KeyedJaggedTensor) -> list[list[Bag]]:
    """Bags of each feature, ids with their weights."""
    weights = ids.weights_or_none()
    numbers = [0.0] * ids.values().numel() if weights is None else weights.tolist()
    pairs = list(zip(ids.values().tolist(), numbers, strict=True))
    bags, start = [], 0
    for length in ids.lengths().tolist():
        bags.append(tuple(pairs[start : start + length]))
        start += length
    strides = ids.stride_per_key()
    return [[bags.pop(0) for _ in range(stride)] for stride in strides]


@st.composite
def batches(draw: Callable[..., Any]) -> tuple[KeyedJaggedTensor, list[int]]:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    num_features, num_samples = sum(sizes), draw(st.integers(1, 9))
    longest = draw(st.sampled_from([1, 3]))
    low = 1 if longest == 1 else 0
    lengths = draw(
        st.lists(st.integers(low, longest), min_size=num_features * num_samples, max_size=num_features * num_samples)
    )
    values = draw(st.lists(st.sampled_from([0, 1, 2**62, -5]), min_size=sum(lengths), max_size=sum(lengths)))
    weights = draw(st.lists(st.sampled_from([0.0, -0.0, 1.5]), min_size=sum(lengths), max_size=sum(lengths)))
    return (
        KeyedJaggedTensor(
            keys=[f"f{i}" for i in range(num_features)],
            values=torch.tensor(values, dtype=torch.int64),
            lengths=torch.tensor(lengths, dtype=torch.int64),
            weights=torch.tensor(weights) if draw(st.booleans()) else None,
        ),
        sizes,
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(batches(), st.booleans(), st.integers(1, 4))
def test_rows_are_the_distinct_inputs_in_the_order_of_their_first_samples(
    drawn: tuple[KeyedJaggedTensor, list[int]], all_hashes_are_equal: bool, num_micro_batches: int
) -> None:
    ids, sizes = drawn
    with pytest.MonkeyPatch.context() as patch:
        if all_hashes_are_equal:  # then only the comparison tells inputs apart, and some rows are sent twice
            patch.setattr(dmt.sptt.unique, "_mix", lambda numbers: numbers * 0)
        cut = part_sizes(ids.stride(), num_micro_batches)
        sent, parts, inverse = distinct_inputs(ids, sizes, cuts=cut)
    before, by_key = bags_of(ids), bags_of(sent)
    after = [list(itertools.chain(*by_key[i : i + len(cut)])) for i in range(0, len(by_key), len(cut))]
    blocks = inverse.split(cut, dim=1)
    first = 0
    for group, size in enumerate(sizes):
        inputs = list(zip(*before[first : first + size], strict=True))
        rows = list(zip(*after[first : first + size], strict=True))
        assert [rows[row] for row in inverse[group].tolist()] == inputs
        assert sum(part[group] for part in parts) == len(rows)
        seen = 0
        for part, block, own in zip(parts, blocks, by_key[first * len(cut) :], strict=False):
            assert part[group] == len(own), "each key has the rows of a micro-batch"
            seen += part[group]
            assert all(row < seen for row in block[group].tolist()), "no micro-batch needs rows of a later one"
            assert part[group] == len({row for row in block[group].tolist() if row >= seen - part[group]})
        if not all_hashes_are_equal and ids.weights_or_none() is None:  # 0.0 and -0.0 are two inputs
            assert rows == list(dict.fromkeys(inputs))
        first += size


def test_only_samples_without_ids_share_a_row_if_others_must_not() -> None:
    ids = KeyedJaggedTensor(["a"], torch.tensor([3, 3]), lengths=torch.tensor([1, 0, 1, 0]))
    _, parts, inverse = distinct_inputs(ids, [1], share=False)
    assert (parts, inverse.tolist()) == ([[3]], [[0, 1, 2, 1]])


def test_rows_of_groups_are_filled_up_with_empty_bags() -> None:
    strides = [[1, 1], [0, 1], [2, 1], [1, 1]]  # of two micro-batches of a, then of b, from each of two peers
    ids = KeyedJaggedTensor(
        ["a", "a", "b", "b"], torch.arange(8), lengths=torch.ones(8, dtype=torch.int64), stride_per_key_per_rank=strides
    )
    code = RowCode(ids, [[1, 0], [2, 1]], torch.empty(0), [1, 2], None)
    filled, parts = rows_of_parts(code, ids, [[["a"], ["b"]]], 0)
    assert [part.arrived for part in parts] == [[[1, 2], [1, 1]], [[0, 1], [1, 1]]]
    assert [part.sent for part in parts] == [[[1, 0]], [[2, 1]]]
    assert [part.num_rows for part in parts] == [3, 2]
    assert bags_of(filled) == [
        [((0, 0.0),), ((1, 0.0),), (), ((2, 0.0),), ()],
        [((3, 0.0),), ((4, 0.0),), ((5, 0.0),), ((6, 0.0),), ((7, 0.0),)],
    ]


def bytes_on_rank(rank: int, case: Case) -> tuple[Traffic, dict[str, int]]:
    """Returns the bytes of the second step, and those that this rank needs to send in it."""
    mesh = TowerMesh(case.topology)
    model = shard(case, build(case), mesh)
    for step in range(2):
        with TrafficMeter(host_of=lambda number: number // case.ranks) as meter:
            ids, labels = case.draw(rank, step)
            loss = loss_of(model(ids)[1], labels)
            loss.backward()
    traffic, by_feature = meter.total(mesh.global_group), dict(zip(ids.keys(), bags_of(ids), strict=True))
    needed = {"forward": 0, "ids": 0}
    for tower, members in enumerate(case.plan):
        if tower == rank // case.ranks:
            continue
        features = [f"f{i}" for i in members]
        if case.kind == "flat":
            rows = {f: len(set(by_feature[f])) for f in features}
            needed["forward"] += sum(4 * rows[f"f{i}"] * case.dims[i] for i in members)
            own = [bag for f in features for bag in set(by_feature[f])]
        else:
            distinct = set(zip(*(by_feature[f] for f in features), strict=True))
            needed["forward"] += 4 * len(distinct) * (3 + tower)
            own = [bag for inputs in distinct for bag in inputs]
        needed["ids"] += 8 * (len(own) + sum(map(len, own)))  # lengths and ids
    return traffic, needed


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["flat", "modules"])
def test_bytes_are_those_of_the_distinct_inputs(kind: str) -> None:
    case = Case(towers=2, ranks=2, kind=kind, dims=(8, 16, 4, 12), max_bag=2, sizes=(40, 31, 40, 8), unique=True)
    answers = run_ranks(bytes_on_rank, 4, case)
    traffic = answers[0][0]
    assert traffic.forward == traffic.backward == sum(needed["forward"] for _, needed in answers)
    # Besides: to the one other tower from each of four ranks two sizes and a number of rows for each of two features.
    sizes = 4 * (3 + 2) * 8
    assert traffic.ids == sum(needed["ids"] for _, needed in answers) + sizes


def test_gradients_of_many_samples_are_summed_in_fp32() -> None:
    """In BF16 a sum of ones stops at 256."""
    rows = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True)
    (pending,) = samples_of_rows([NoWait(rows.flatten())], [[1]], [2], [torch.zeros(1, 4096, dtype=torch.int64)])
    taken = pending.wait()
    assert taken.dtype == torch.bfloat16
    taken.backward(torch.ones_like(taken))
    assert rows.grad is not None
    assert rows.grad.tolist() == [[4096.0, 4096.0]]


def test_rows_of_several_parts_are_copied_once_and_their_gradients_join() -> None:
    """Part k has a row of its own and reads those before it; no part copies the rows of another one again."""
    parts = [torch.full((1, 2), float(k), requires_grad=True) for k in range(4)]
    inverses = [torch.arange(k + 1).unsqueeze(0) for k in range(4)]
    copied: list[int] = []
    place = torch.Tensor.copy_

    def counted(own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        copied.append(len(other))
        return place(own, other)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", counted)
        found = [one.wait() for one in samples_of_rows([NoWait(p.flatten()) for p in parts], [[1]] * 4, [2], inverses)]
    assert copied == [1] * 4
    assert [one[:, 0].tolist() for one in found] == [[0.0], [0.0, 1.0], [0.0, 1.0, 2.0], [0.0, 1.0, 2.0, 3.0]]
    torch.cat(found).sum().backward()
    assert [part.grad.tolist() for part in parts if part.grad is not None] == [[[4.0 - k] * 2] for k in range(4)]


def test_a_second_pass_through_a_retained_graph_has_its_own_gradients() -> None:
    parts = [torch.full((2,), float(k), requires_grad=True) for k in range(2)]
    inverses = [torch.zeros(1, 3, dtype=torch.int64), torch.arange(2).unsqueeze(0)]
    first, second = (one.wait() for one in samples_of_rows([NoWait(p) for p in parts], [[1]] * 2, [2], inverses))
    for loss, expected in (((first.sum() + second.sum()), [4.0, 1.0]), (10 * second.sum(), [10.0, 10.0])):
        for part in parts:
            part.grad = None
        loss.backward(retain_graph=True)
        assert [float(part.grad[0]) for part in parts if part.grad is not None] == expected


class Normed(nn.Module):
    """A row of zeros, such as an empty bag looks up, has no gradient here but NaN."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim, bias=False)

    def forward(self, embeddings: Any) -> torch.Tensor:
        x = self.linear(embeddings.values())
        return x / x.square().sum(dim=1, keepdim=True).sqrt()


@on_ranks(2)
def test_rows_that_fill_up_reach_no_tower_module(rank: int) -> None:
    """Trains two towers on one mesh tower, one with a single row; all weights stay finite."""
    mesh = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=1))
    tables = make_tables([8, 4, 12])
    plain = towers_of([Normed(table.embedding_dim) for table in tables], tables)
    sharder = TowerCollectionSharder(mesh, placement=(0, 1, 1), unique=True, fused_params=FUSED)
    model = distribute(plain, sharder)
    values = torch.cat([torch.zeros(4), torch.zeros(4), torch.arange(4)]).long()
    ids = KeyedJaggedTensor(["f0", "f1", "f2"], values, lengths=torch.ones(12, dtype=torch.int64))
    model(ids)[1].sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(bool(w.isfinite().all()) for w in [*gather_plain_state(model).values(), *gradients])


@pytest.mark.parametrize("unique", [False, True])
@on_ranks(4)
def test_batches_on_their_way_outlive_another_number_of_micro_batches(rank: int, unique: bool) -> None:
    """Micro-batches are switched on and off while ids are in flight."""
    case = Case(towers=2, ranks=2, kind="flat", max_bag=2, sizes=(9, 7, 2, 9), unique=unique)
    model = shard(case, build(case), TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=2)))
    (sparse,) = (part for part in model.modules() if isinstance(part, SPTTModule))
    ids, _ = case.draw(rank, 0)

    def sent() -> tuple[Any, Any]:
        context = sparse.create_context()
        return context, sparse.input_dist(context, ids).wait().wait()

    expected = sparse.compute_and_output_dist(*sent()).wait().values()
    before = sent()
    micro_batches = run_in_micro_batches(model, num_micro_batches=3)
    assert torch.equal(sparse.compute_and_output_dist(*before).wait().values(), expected)
    between = sent()
    micro_batches.detach()
    assert torch.equal(sparse.compute_and_output_dist(*between).wait().values(), expected)
