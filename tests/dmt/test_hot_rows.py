"""`HotRows` besides parity: loading, prefetched batches, choices, faults; sums of touched rows, byte by byte."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt import InputError, ReplicaSync, TowerMesh, TowerTopology, TrafficMeter
from dmt.collectives import gather_objects
from dmt.hot_rows.choice import choose_rows
from dmt.hot_rows.copies import HotCopies
from dmt.hot_rows.profile import AccessProfile
from dmt.hot_rows.runtime import HotRows, _Counter, why_no_copies
from dmt.hot_rows.touched_sum import TouchedRowsSum
from dmt.plan.tables import TableSpec, table_specs
from dmt.sptt.group_sharded import GroupSharded
from dmt.sptt.sharder import HomeTable
from dmt.testing import gather_plain_state, load_plain_state
from tests.parity import PipelinedBatch, loss_of, make_tables
from tests.ranks import on_ranks, run_ranks
from tests.sptt_case import Case, Training, build, own_tables, shard

FLAT = Case(towers=2, ranks=2, kind="flat", sizes=(9, 7, 8, 9))
TWO_BY_TWO = TowerTopology(num_towers=2, ranks_per_tower=2)


def some_rows(hot: HotRows, every: int) -> dict[str, range]:
    return {t.name: range(1, t.num_embeddings, every) for t in FLAT.tables() if t.name not in hot.left_out}


def numbers_of(training: Training) -> dict[str, Tensor]:
    """Weights and optimizer states of this rank's shards."""
    _ = training.model.fused_optimizer.state_dict()  # brings them up to date
    return {one.name: one.tensor.clone() for one in own_tables(training.model)}


@on_ranks(4)
def test_a_sync_of_one_replica_leaves_the_counting_alone(rank: int) -> None:
    """A training loop for any number of replicas has a `ReplicaSync` for one, too."""
    mesh = TowerMesh(TWO_BY_TWO)
    training = Training(rank, replace(FLAT, pooling=("SUM", "MEAN", "SUM", "SUM")), mesh)
    hot = HotRows(training.model, mesh, extra_memory=0.5, refresh_every=1)
    sync = ReplicaSync(training.model, mesh, optimizer_state="delayed")
    training.step(0)
    sync.step()
    hot.step()
    assert (bool(hot.rows), hot._module.replicas_drifted) == (True, False)


@on_ranks(4)
def test_copies_are_read_again_after_a_load(rank: int) -> None:
    """Goes back to a saved state in mid-training: the steps after it repeat to the bit."""
    mesh = TowerMesh(TWO_BY_TWO)
    training = Training(rank, replace(FLAT, optimizer="adagrad"), mesh)
    hot = HotRows(training.model, mesh, refresh_every=None)
    hot.replicate(some_rows(hot, 2))
    for step in range(2):
        training.step(step)
    model, fused, dense = training.model, training.model.fused_optimizer, training.optimizers.parts[0]
    parts = (model, fused, dense)
    saved = [copy.deepcopy(part.state_dict()) for part in parts]
    ends = []
    for order in ((0, 1, 2), (1, 0, 2), (2, 1, 0)):
        with patch.object(GroupSharded, "flush", Mock()) as flush:
            for step in (2, 3):
                training.step(step)
        # It would empty caches on GPUs, with the rows that a backward pass is about to update.
        assert not flush.called
        ends.append(numbers_of(training) | gather_plain_state(model))
        for i in order:
            parts[i].load_state_dict(copy.deepcopy(saved[i]))
    for again in ends[1:]:
        assert all(torch.equal(value, again[name]) for name, value in ends[0].items())


def double(state: dict[str, Any]) -> None:
    """Doubles all weights of a state in place."""
    for part in local_parts(state):
        part.mul_(2)


def local_parts(state: dict[str, Any]) -> list[Tensor]:
    """This rank's own live tensors in a state."""
    return [
        tensor
        for value in state.values()
        for tensor in ([s.tensor for s in value.local_shards()] if isinstance(value, ShardedTensor) else [value])
    ]


@on_ranks(4)
def test_changes_in_place_are_read_after_a_restart(rank: int) -> None:
    """Doubles weights in place, then replicates again; a state dict from before a step is up to date on demand."""
    mesh = TowerMesh(TWO_BY_TWO)
    training, plain = (Training(rank, FLAT, mesh) for _ in range(2))
    hot = HotRows(training.model, mesh, refresh_every=None)
    hot.replicate(some_rows(hot, 2))
    training.step(0)
    plain.step(0)
    held = training.model.state_dict()
    for one in (training, plain):
        double(one.model.state_dict())
    hot.replicate(hot.rows)
    training.step(1)
    plain.step(1)
    hot.replicate(hot.rows)  # the step is not lost, though `held` is from before it
    found, expected = gather_plain_state(training.model), gather_plain_state(plain.model)
    # Both were trained: twice the bound of `tests.sptt_case`.
    assert all((found[name] - value).abs().max() < 4e-6 for name, value in expected.items())
    for one in (training, plain):
        load_plain_state(one.model, {name: value / 2 for name, value in expected.items()})
        one.step(2)
    found, expected = gather_plain_state(training.model), gather_plain_state(plain.model)
    assert all((found[name] - value).abs().max() < 4e-6 for name, value in expected.items())
    weights = [part for name, part in held.items() if "embedding_bags" in name]
    training.step(7)
    before = [part.clone() for part in local_parts(dict(enumerate(weights)))]
    _ = training.model.fused_optimizer.params
    after = local_parts(dict(enumerate(weights)))
    assert not all(map(torch.equal, before, after)), "no hot row came back to its table"


@on_ranks(4)
def test_a_schedule_of_learning_rates_writes_no_hot_row_back(rank: int) -> None:
    mesh = TowerMesh(TWO_BY_TWO)
    training = Training(rank, FLAT, mesh)
    hot = HotRows(training.model, mesh, refresh_every=None)
    hot.replicate(some_rows(hot, 2))
    fused = training.model.fused_optimizer
    with patch.object(HotCopies, "write_back") as write:
        for step in range(3):
            for group in fused.param_groups:
                group["lr"] = 0.1 / (1 + step)
            torch.set_default_dtype(torch.bfloat16)  # rates must not be rounded to it on their way
            try:
                training.step(step)
            finally:
                torch.set_default_dtype(torch.float32)
            assert hot._copies is not None
            for now in hot._copies.lookup.optimizer.settings_now().values():
                assert now.learning_rate == pytest.approx(0.1 / (1 + step), rel=1e-6)
            assert not write.called, step
        for read in (lambda: fused.state, lambda: dict(training.model.named_parameters())):
            write.reset_mock()
            read()
            assert write.called, "a reader of the tables gets those of before"


@on_ranks(4)
def test_a_batch_that_does_not_come_to_its_end_with_its_copies_is_refused(rank: int) -> None:
    mesh = TowerMesh(TWO_BY_TWO)
    training = Training(rank, FLAT, mesh)
    hot = HotRows(training.model, mesh, refresh_every=None)
    hot.replicate(some_rows(hot, 2))
    loss = training.model(PipelinedBatch(*FLAT.draw(rank, 1)))[0]
    before = weakref.ref(hot._copies)
    hot.replicate(some_rows(hot, 3))
    with pytest.raises(InputError, match="the hot rows changed between the forward and the backward pass"):
        loss.backward()
    gc.disable()
    try:
        assert before() is not None
        del loss
        assert before() is None, "copies out of use wait for the garbage collector"
    finally:
        gc.enable()


def skewed(rank: int, step: int, first: int, tables: list[Any], size: int = 64) -> tuple[KeyedJaggedTensor, Tensor]:
    """Draws a batch in which half of the ids are ``first`` or the next row, and the others any row."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    popular = first + torch.randint(0, 2, (len(tables), size), generator=draw)
    rare = torch.stack([torch.randint(0, t.num_embeddings, (size,), generator=draw) for t in tables])
    ids = torch.where(torch.rand(popular.shape, generator=draw) < 0.5, popular, rare)
    kjt = KeyedJaggedTensor([f"f{i}" for i in range(len(tables))], ids.flatten(), lengths=torch.ones(ids.numel()).int())
    return kjt, torch.rand(size, generator=draw).round()


def refresh_on_rank(rank: int) -> dict[str, Any]:
    """Moves the popular rows after six steps; returns the rows chosen, and bytes of steps around each choice."""
    mesh, case = TowerMesh(TWO_BY_TWO), replace(FLAT, dims=(32, 32, 32, 32))
    tables = make_tables(list(case.dims), rows=5000)
    torch.manual_seed(0)
    with patch("tests.sptt_case.make_tables", lambda *_, **__: tables):
        model = shard(case, build(case), mesh)
    # Room for two rows of each table.
    hot, seen = HotRows(model, mesh, refresh_every=3, extra_memory=2 / 5000), {}
    for step in range(12):
        ids, labels = skewed(rank, step, 7 if step < 6 else 4000, tables)
        with TrafficMeter(host_of=lambda number: number // 2) as meter:
            loss_of(model(ids)[1], labels).backward()
        total = meter.total(mesh.global_group)
        seen[step] = total.across
        hot.step()
        if step in (2, 11):
            seen[f"rows after {step}"] = {name: rows.tolist() for name, rows in hot.rows.items()}
    return seen


@pytest.mark.ranks
def test_rows_are_chosen_as_they_are_read_and_follow_a_drift() -> None:
    answers = run_ranks(refresh_on_rank, 4)
    assert answers[0] == answers[3], "ranks chose other rows, or counted other bytes"
    seen = answers[0]
    assert seen["rows after 2"] == {f"t{i}": [7, 8] for i in range(4)}
    assert seen["rows after 11"] == {f"t{i}": [4000, 4001] for i in range(4)}
    before, saved = seen[1], seen[1] - seen[4]
    assert saved > 0.4 * before
    assert before - seen[7] < 0.1 * saved, "the rows that moved are cold, and copies that nobody reads cost nothing"
    assert before - seen[10] > 0.95 * saved, "one refresh regains the saving"


@on_ranks(4)
def test_rows_are_chosen_after_the_first_steps_and_a_state_restores_them(rank: int) -> None:
    mesh = TowerMesh(TWO_BY_TWO)
    training = Training(rank, FLAT, mesh)
    hot = HotRows(training.model, mesh, extra_memory=1.0)
    hot.refresh()  # too early: nobody knows the size of a batch yet
    found = []
    with patch("dmt.hot_rows.runtime._FIRST_STEPS", 2):
        for step in range(3):
            training.step(step)
            hot.step()
            found.append({name: rows.tolist() for name, rows in hot.rows.items()})
    assert not found[0]
    assert found[1] == found[2] != {}
    assert hot.num_bytes == sum(len(rows) for rows in found[1].values()) * 32
    with torch.no_grad():
        training.model.eval()(PipelinedBatch(*FLAT.draw(rank, 9)))  # not counted
    state = gather_objects(hot.state(), mesh.global_group)[0]  # as from a file, which every rank reads
    assert {name: rows.tolist() for name, rows in state.rows.items()} == found[-1]
    assert (state.steps, state.counts.num_samples) == (3, sum(FLAT.sizes))
    for memory, every in ((1.0, 1000), (1e-3, None)):
        other = HotRows(Training(rank, FLAT, mesh).model, mesh, extra_memory=memory, refresh_every=every)
        other.load_state(state)
        assert {name: rows.tolist() for name, rows in other.rows.items()} == found[-1]
        with patch("dmt.hot_rows.runtime._LEAST_COUNTED", 20):
            again = gather_objects(other.state(), mesh.global_group)[0]
        assert (again.steps, again.batch_size) == (state.steps, state.batch_size)
        assert all(np.array_equal(again.counts[t.name].counts, state.counts[t.name].counts) for t in FLAT.tables())
    other.load_state(replace(state, counts=AccessProfile(FLAT.tables()[:2])))
    assert set(other.rows) == set(found[-1]) & {"t0", "t1"}, "a table that the model lacks, or has in another form"
    other.replicate({"t0": []})
    assert not other.rows
    for _ in range(2):  # nobody has trained since the first
        hot.refresh()
    assert hot.rows


def test_choice_takes_what_saves_most_for_its_size() -> None:
    tables = [
        TableSpec(name=name, num_embeddings=50, embedding_dim=dim, feature_names=(f"f_{name}",))
        for name, dim in (("narrow", 4), ("wide", 64), ("bags", 8))
    ]
    profile = AccessProfile(tables)
    ids = np.repeat([5, 6, 7], [60, 30, 10])
    profile.add({"f_narrow": ids, "f_wide": ids, "f_bags": np.repeat(ids, 2)}, num_samples=100)
    several = TowerTopology(num_towers=2, ranks_per_tower=2)
    chosen = choose_rows(profile, tables, several, batch_size=100, distinct=False, max_bytes=1e9)
    assert {name: rows.tolist() for name, rows in chosen.items()} == {"narrow": [5, 6, 7], "wide": [5, 6, 7]}
    one = choose_rows(profile, tables, several, batch_size=100, distinct=False, max_bytes=280)
    # Ids weigh more beside a narrow row.
    assert {name: rows.tolist() for name, rows in one.items()} == {"narrow": [5], "wide": [5]}
    single = TowerTopology(num_towers=1, ranks_per_tower=4)
    assert choose_rows(profile, tables, single, batch_size=100, distinct=False, max_bytes=1e9) == {}


@pytest.mark.parametrize(("max_bytes", "most"), [(0, 30), (8 * 100, 100)])
def test_ids_that_wait_to_be_counted_take_no_more_than_copies_may(max_bytes: int, most: int) -> None:
    tables = [TableSpec(name="t", num_embeddings=5000, embedding_dim=4, feature_names=("a", "b"))]
    with patch("dmt.hot_rows.runtime._LEAST_COUNTED", 30):
        counter, waiting = _Counter(tables, max_bytes), []
    for step in range(40):
        counter.add(KeyedJaggedTensor(["a", "b"], torch.arange(step, step + 8), lengths=torch.ones(8).int()))
        waiting.append(counter._num_waiting)
    assert most - 8 < max(waiting) <= most
    counts = counter.profile()
    assert (counts.num_samples, counts["t"].total, counts["t"].counts.max()) == (160, 320, 8)


@pytest.mark.parametrize(("at_once", "most"), [(20, 6), (2**18, 1)])
def test_ids_of_many_tables_are_counted_by_few_searches(at_once: int, most: int) -> None:
    tables = [
        TableSpec(name=f"t{i}", num_embeddings=3 + i, embedding_dim=4, feature_names=(f"f{i}",)) for i in range(9)
    ]
    counter, expected = _Counter(tables, 0), AccessProfile(tables)
    for num_samples in (7, 5):
        values = torch.randint(-2, 12, (9, num_samples), dtype=torch.int32)
        lengths = torch.ones(values.numel(), dtype=torch.int64)
        counter.add(KeyedJaggedTensor([f"f{i}" for i in range(9)], values.flatten(), lengths=lengths))
        rows = {f"f{i}": ids[(ids >= 0) & (ids < 3 + i)] for i, ids in enumerate(values)}
        expected.add(rows, num_samples=num_samples)
    with (
        patch("dmt.hot_rows.runtime._LEAST_COUNTED", at_once),
        patch.object(Tensor, "unique", autospec=True, side_effect=Tensor.unique) as searches,
    ):
        counts = counter.profile()
    assert searches.call_count <= most
    for table in tables:
        assert counts[table.name].rows.tolist() == expected[table.name].rows.tolist()
        assert counts[table.name].counts.tolist() == expected[table.name].counts.tolist()


@on_ranks(4)
def test_ids_outside_a_table_stay_cold(rank: int) -> None:
    """An id beyond its table is not looked up among the copies of the next one."""
    mesh = TowerMesh(TWO_BY_TWO)
    training = Training(rank, FLAT, mesh)
    hot = HotRows(training.model, mesh, refresh_every=None)
    hot.replicate({table.name: range(table.num_embeddings) for table in FLAT.tables()})
    copies = hot._copies
    assert copies is not None
    module = copies._module
    sizes = {table.feature_names[0]: table.num_embeddings for table in FLAT.tables()}
    values = torch.tensor([number for f in module.features for number in (-1, sizes[f], sizes[f] - 1)])
    ids = KeyedJaggedTensor(module.features, values, lengths=torch.ones(12, dtype=torch.int64))
    cold, bags = copies.split(ids)
    assert cold.lengths().tolist() == [1, 1, 0] * 4
    assert cold.values().tolist() == [number for f in module.features for number in (-1, sizes[f])]
    assert bags.ids.tolist() == [sizes[f] - 1 for f in module.features]


def test_tables_that_cannot_have_copies_are_left_out() -> None:
    def home(index: int, scheme: str = "table_wise", **settings: Any) -> HomeTable:
        return HomeTable(
            config=configs[index], scheme=scheme, settings={"optimizer": "exact_row_wise_adagrad", **settings}
        )

    configs = make_tables([8, 8, 8, 8, 8])
    configs[4].feature_names = ["f3"]
    assert (
        "its lookups return fp16, but copies are FP32"
        in why_no_copies({"t0": home(0, output_dtype=SparseType.FP16)})["t0"]
    )
    assert why_no_copies({"t0": home(0, output_dtype=SparseType.FP32)}) == {}
    tables = {"t0": home(0, "column_wise"), "t1": home(1, weight_decay=0.1), "t2": home(2, "row_wise")}
    found = why_no_copies({**tables, "t3": home(3), "t4": home(4)})
    assert set(found) == {"t0", "t1", "t3", "t4"}
    assert "row-wise AdaGrad has a separate state for each part of a row" in found["t0"]
    assert found["t1"] == "its fused optimizer sets weight_decay=0.1, which copies do not support"
    assert found["t4"] == "its feature 'f3' is also looked up in t3"
    assert why_no_copies({"t0": home(0, "column_wise", optimizer="exact_adagrad")}) == {}
    assert table_specs(configs[:1])[0].name == "t0"


SHAPES = [(37, 4), (3, 8), (1, 1), (20, 2)]


def gradient_of(rank: int, touched: float) -> Tensor:
    """Draws a gradient; every rank touches other rows."""
    draw, draw_rows = torch.Generator().manual_seed(rank), torch.Generator().manual_seed(100 + rank)
    parts = []
    for rows, columns in SHAPES:
        is_touched = torch.rand(rows, 1, generator=draw_rows) < touched
        parts.append(torch.randn(rows, columns, generator=draw) * is_touched)
    return torch.cat([part.flatten() for part in parts])


def sums_on_rank(rank: int, topology: TowerTopology, touched: float) -> tuple[Tensor, Tensor, Any]:
    mesh = TowerMesh(topology)
    rows = TouchedRowsSum(SHAPES, mesh.tower_group, mesh.peer_group)
    no_deprecated_names = warnings.catch_warnings(action="error", category=FutureWarning)
    with TrafficMeter(host_of=topology.host) as meter, no_deprecated_names:
        numbers = gradient_of(rank, touched)
        told = rows.start(numbers, torch.tensor([1.0, rank]))()
    return numbers, told, meter.total(mesh.global_group)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("towers", "ranks", "touched"), [(2, 2, 0.1), (2, 2, 1.0), (2, 2, 0.0), (2, 3, 0.1), (3, 1, 0.3), (1, 4, 0.3)]
)
def test_touched_rows_are_summed_and_others_are_not_sent(towers: int, ranks: int, touched: float) -> None:
    topology = TowerTopology(num_towers=towers, ranks_per_tower=ranks)
    world = topology.world_size
    of_ranks = run_ranks(sums_on_rank, world, topology, touched)
    exact = torch.stack([gradient_of(rank, touched).double() for rank in range(world)]).sum(0)
    whole = 2 * (towers - 1) * 4 * exact.numel()
    for numbers, told, measured in of_ranks:
        # Rounding of a sum of six numbers near 1.
        assert (numbers - exact).abs().max() <= (2e-6 if touched else 0)
        assert torch.equal(numbers, of_ranks[0][0]), "ranks have other bits"
        assert told.tolist() == [world, sum(range(world))]
        assert measured.dense >= whole if touched == 1.0 or towers == 1 else measured.dense < whole


@on_ranks(4)
def test_no_number_is_lost(rank: int) -> None:
    """NaN and infinity of one rank reach all, and so does a row that only the last host touched."""
    mesh = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=2))
    rows = TouchedRowsSum([(20, 3)], mesh.tower_group, mesh.peer_group)
    gradient = torch.zeros(20, 3)
    if rank == 3:
        gradient[4, 1], gradient[19, 2], gradient[8, 0] = torch.nan, torch.inf, 1e-38
    rows.start(gradient.view(-1), torch.zeros(1))()
    assert gradient[4, 1].isnan() & gradient[19, 2].isinf() & gradient[8, 0].eq(torch.tensor(1e-38))
