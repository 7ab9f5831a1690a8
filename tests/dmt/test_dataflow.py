"""The tower dataflow besides training: the bits of flat TorchRec, bytes, order of ids, unusual models, freed memory."""

from __future__ import annotations

import copy
import gc
import sys
import warnings
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.profiler import profile
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dmt
from dmt import (
    HotRows,
    InputError,
    TowerCollectionSharder,
    TowerMesh,
    TowerTopology,
    TrafficMeter,
    run_in_micro_batches,
)
from dmt.collectives import gather_objects
from dmt.hot_rows.copies import HotCopies
from dmt.sharding.data_parallel import DataParallelOptimizer
from dmt.sharding.planner import parameter_sharding
from dmt.sharding.schemes import TablePlacement
from dmt.sptt.group_sharded import place_in_group
from dmt.sptt.id_routes import IdExchange
from dmt.sptt.towers import clip_grad_norm
from dmt.testing import PlainTraining, gather_plain_state, load_plain_state
from tests.parity import (
    FUSED,
    LR,
    OPTIMIZERS,
    FlatModel,
    PassThrough,
    PipelinedBatch,
    fail,
    loss_of,
)
from tests.ranks import on_ranks, run_ranks
from tests.sptt_case import CPU, Case, Training, build, distribute, shard, towers_of

pytestmark = pytest.mark.ranks
TWO_BY_TWO = Case(towers=2, ranks=2)
TWO = Case(towers=2, ranks=1)
ONE = Case(towers=1, ranks=2, plan=((0, 1, 2, 3),))


def loaded(model: nn.Module, sharder: Any, **planner: Any) -> DistributedModelParallel:
    """Shards a copy of the model, with the same weights."""
    start = copy.deepcopy(model.state_dict())
    sharded = distribute(copy.deepcopy(model), sharder, **planner)
    load_plain_state(sharded, start)
    return sharded


def flat_torchrec(tables: list[Any], state: dict[str, Tensor]) -> DistributedModelParallel:
    """Shards the flat model by TorchRec, table-wise over all ranks."""
    model, world = FlatModel(tables), dist.get_world_size()
    sharder = EmbeddingBagCollectionSharder(fused_params=FUSED)
    placed = {t.name: table_wise(rank=i % world) for i, t in enumerate(tables)}
    sizes = {"local_size": world, "world_size": world, "device_type": "cpu"}
    plan = ShardingPlan(
        plan={"sparse_arch": construct_module_sharding_plan(model.sparse_arch, placed, sharder, **sizes)}
    )
    flat = DistributedModelParallel(model, device=CPU, plan=plan, sharders=[sharder])
    load_plain_state(flat, state)
    return flat


@on_ranks(4)
def test_forward_is_bitwise_flat_torchrec(rank: int) -> None:
    mesh = TowerMesh(TWO_BY_TWO.topology)
    for pooling in ("SUM", "MEAN"):
        case = replace(TWO_BY_TWO, kind="flat", pooling=pooling, max_bag=4)
        model = shard(case, build(case), mesh)
        ids, _ = case.draw(rank, 0)
        ours, theirs = model(ids)[0], flat_torchrec(case.tables(), gather_plain_state(model))(ids)[0]
        assert all(torch.equal(ours[f"f{i}"], theirs[f"f{i}"]) for i in range(4))


def traffic_on_rank(rank: int) -> list[Any]:
    case = replace(TWO_BY_TWO, sizes=(6,) * 4)
    mesh, found = TowerMesh(case.topology), []
    tower = shard(case, build(case), mesh)
    of_flat = replace(case, kind="flat")
    flat = flat_torchrec(case.tables(), gather_plain_state(shard(of_flat, build(of_flat), mesh)))
    in_parts = shard(case, build(case), mesh)
    run_in_micro_batches(in_parts, num_micro_batches=3)
    for model in (tower, flat, shard(replace(of_flat, id_route="global"), build(of_flat), mesh), in_parts):
        for step in range(2):  # the first step also exchanges sizes that never change again
            ids, labels = case.draw(rank, step)
            with TrafficMeter(host_of=lambda r: r // 2) as meter:
                loss_of(model(ids)[1].clone(), labels).backward()
        found.append(meter.total(mesh.global_group))
    return found


def test_traffic_is_what_the_algorithm_needs() -> None:
    tower, flat, by_owners, in_parts = run_ranks(traffic_on_rank, 4)[0]
    assert in_parts == tower
    # Two hosts of two ranks, batch 6: every rank needs the other host's outputs. Towers emit 3 and 4 columns.
    assert tower.forward == tower.backward == 4 * 2 * 6 * (3 + 4)
    # Flat: every rank needs the 2 tables of the other host, 8 columns each.
    assert flat.forward == flat.backward == 4 * 4 * 6 * 2 * 8
    # Two features' ids and lengths (8 bytes each) for 6 samples go to the other host, plus a few sizes.
    for route in (tower, by_owners):
        assert 4 * 6 * 2 * 16 <= route.ids <= 4 * (6 * 2 * 16 + 128)
    # The ring of 4 ranks crosses hosts twice: 2 * S * 3/4 each, S = the over arch.
    assert tower.dense == 2 * (2 * 4 * (7 + 1) * 3 // 4)
    assert flat.dense == 2 * (2 * 4 * (32 + 1) * 3 // 4)


@on_ranks(2)
def test_the_meter_counts_collectives(rank: int) -> None:
    with TrafficMeter(host_of=lambda r: r) as meter:
        dist.all_gather([torch.empty(4), torch.empty(4)], torch.ones(4))
        dist.reduce_scatter_single(torch.empty(2), torch.ones(4))
        dist.broadcast(torch.ones(3), src=0)
    # Per rank 16 bytes to the other one, half of 16, and from rank 0 only 12.
    assert meter.total(dist.group.WORLD).forward == 2 * 16 + 2 * 8 + 12


@pytest.mark.parametrize(("towers", "ranks"), [(2, 3), (3, 2)])
@on_ranks(6)
def test_ids_arrive_in_peer_order(rank: int, towers: int, ranks: int) -> None:
    mesh = TowerMesh(TowerTopology(num_towers=towers, ranks_per_tower=ranks))
    keys = [f"f{i}" for i in range(6)]
    exchange = IdExchange(mesh.sharding_group, [[key] for key in keys], keys, stagger=towers)
    # Rank r sends r + 1 samples, each with the id r.
    lengths = torch.ones(6 * (rank + 1), dtype=torch.int64)
    arrived = exchange(KeyedJaggedTensor(keys, torch.full_like(lengths, rank), lengths=lengths)).wait().wait()
    assert arrived.keys() == [f"f{rank}"]
    # Peer order: by local index, then by tower. The paper prints g % T, but its definition of peers requires g % L.
    peer_order = sorted(range(6), key=lambda g: (g % ranks, g // ranks))
    assert arrived.values().tolist() == [r for r in peer_order for _ in range(r + 1)]


@on_ranks(4)
def test_a_checkpoint_does_not_know_the_placement(rank: int, tmp_path: Path) -> None:
    """`torch.distributed.checkpoint` loads the state dict into any placement, and into the plain module."""
    case = Case(towers=2, ranks=2, dims=(8, 16, 12, 8), fp16=(0, 1, 2, 3))  # 12 columns are cut into 8 and 4
    mesh = TowerMesh(case.topology)
    torch.manual_seed(rank)
    model = shard(case, build(case), mesh)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    found, saved = [], gather_plain_state(model)
    for options in ({"scheme": "mixed", "placement": (1, 0), "fp16": ()}, {"scheme": "row_wise", "fp16": (0, 2)}):
        other = replace(case, **options)
        torch.manual_seed(7 + rank)
        loaded = shard(other, build(other), mesh)
        state = {"model": loaded.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path)
        with warnings.catch_warnings(action="error", category=FutureWarning):
            assert not any(loaded.load_state_dict(state["model"])), "no key is missing or unexpected"
        found.append(gather_plain_state(loaded))
    plain = {"model": build(case).state_dict()}
    dcp.load(plain, checkpoint_id=tmp_path, no_dist=True)
    for after in [*found, plain["model"]]:
        assert saved.keys() == after.keys()
        for name, value in saved.items():
            assert torch.equal(value, after[name]), name


@on_ranks(4)
def test_an_unsharded_state_loads_into_the_sharded_model(rank: int) -> None:
    mesh = TowerMesh(TWO_BY_TWO.topology)
    for options in ({}, {"kind": "flat", "plan": ((0, 2), (3,)), "outside": (1,)}):
        case = replace(TWO_BY_TWO, dims=(8, 16, 12, 8), scheme="mixed", **options)
        model, state = shard(case, build(case), mesh), build(case).state_dict()
        state = gather_objects(state, mesh.global_group)[0]  # each rank has drawn its own
        assert not any(model.load_state_dict(dict(state))), "keys of other towers are not unexpected"
        others = {name: value + 1 for name, value in state.items() if "t1" not in name}
        found = gather_objects(model.load_state_dict(dict(others), strict=False).missing_keys, mesh.global_group)
        assert {key.rpartition(".")[0][-2:] for missing in found for key in missing} == {"t1"}
        after = gather_plain_state(model)
        assert all(torch.equal(after[name], others.get(name, value)) for name, value in state.items())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_plain_training_leaves_a_weight_to_an_optimizer_of_its_own() -> None:
    table = nn.Embedding.from_pretrained(torch.ones(2, 4), freeze=False)
    apply_optimizer_in_backward(torch.optim.SGD, table.parameters(), {"lr": 0.5})
    training = PlainTraining([nn.ModuleDict({"embedding_bags": nn.ModuleDict({"t": table})})], fused_params=FUSED)
    table(torch.tensor(1)).sum().backward()
    training.step()
    assert table.weight[:, 0].tolist() == [1.0, 0.5]


@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise_adagrad"])
def test_rows_that_were_never_read_stay_without_an_epsilon(optimizer: str) -> None:
    weight = torch.ones(2, 4)
    update = DataParallelOptimizer({"t": weight}, {"t": {**FUSED, "optimizer": OPTIMIZERS[optimizer], "eps": 0.0}})
    weight.grad = torch.tensor([[0.0] * 4, [2.0] * 4])
    update.update()
    torch.testing.assert_close(weight, torch.tensor([[1.0] * 4, [1.0 - LR] * 4]))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_data_parallel_tables_side_by_side_train_by_few_calls_to_the_bits_of_tables_alone(optimizer: str) -> None:
    shapes = [(3, 4), (1, 4), (5, 12), (2, 4)] * 10
    ends = list(accumulate(rows * columns for rows, columns in shapes))
    numbers = nn.Parameter(torch.randn(ends[-1]))
    places = zip([0, *ends], ends, shapes, strict=False)
    slices = {f"t{i}": TableBatchedEmbeddingSlice(numbers, a, b, *shape) for i, (a, b, shape) in enumerate(places)}
    settings = {name: {**FUSED, "optimizer": OPTIMIZERS[optimizer]} for name in slices}
    apart = {name: table.detach().clone() for name, table in slices.items()}
    updates = [DataParallelOptimizer(tables, settings) for tables in (slices, apart)]
    num_calls = []
    for step in range(3):
        numbers.grad = torch.randn(ends[-1]) * (torch.rand(ends[-1]) < 0.5)
        for name, table in apart.items():
            table.grad = slices[name].grad
        for update in updates:
            update.param_groups[7]["lr"] = 0.3 if step == 1 else LR  # of one table only
            update.step()
            with profile() as calls:
                update.update()
            num_calls.append(sum(call.count for call in calls.key_averages()))
    for name, table in slices.items():
        states = [update.state[of_name] for update, of_name in zip(updates, (table, apart[name]), strict=True)]
        assert torch.equal(table, apart[name])
        assert all(torch.equal(*parts) for parts in zip(*map(dict.values, states), strict=True))
    assert num_calls[0] < num_calls[1] / 3


@on_ranks(2)
def test_a_backward_pass_that_raises_leaves_no_trace(rank: int) -> None:
    """A caller may catch the exception and go on with the next batch."""
    ends = []
    for raises in (False, True):
        training = Training(rank, replace(ONE, kind="flat", scheme="data_parallel"), TowerMesh(ONE.topology))
        for step in (0, 2):
            training.step(step)
            columns = training.model(PipelinedBatch(*training.case.draw(rank, 1)))[1][0]
            if raises:
                # After the data-parallel table's gradient is there and its reduction has begun.
                table = training.model.module.model.sparse_arch.local_parts[0]._lookups[-1]
                hooked = next(iter(table.parameters())).register_post_accumulate_grad_hook(fail)
                with pytest.raises(ZeroDivisionError):
                    columns["f0"].sum().backward()
                hooked.remove()
        ends.append(gather_plain_state(training.model)["model.sparse_arch.embedding_bags.t0.weight"])
    assert torch.equal(*ends)


@on_ranks(2)
def test_what_is_loaded_in_place_is_not_overwritten_by_cached_rows(rank: int) -> None:
    """Rows in a cache on a GPU, here those of whole tables, are written to the tables until the cache is emptied."""
    model = shard(TWO, build(TWO), TowerMesh(TWO.topology))
    (lookup,) = (lookup for one in model.module.sparse_arch.collections for lookup in one.lookups)
    weights, cached = [weight.detach() for weight in lookup.parameters()], ["all rows"]
    lookup.flush, lookup.purge = lambda: [weight.fill_(7) for weight in weights if cached], cached.clear
    state = model.state_dict()
    assert all((weight == 7).all() for weight in weights)
    for weight in weights:
        weight.zero_()  # as dcp.load does
    model.load_state_dict(state)
    assert not any(weight.any() for weight in weights)


@on_ranks(1)
def test_a_gpu_without_a_number_is_the_current_one(rank: int) -> None:
    table = build(TWO).sparse_arch.towers[0].embedding.embedding_bag_configs()[0]
    plan = {"t": parameter_sharding(table, TablePlacement(scheme="table_wise", ranks=(0,)), "cuda")}
    with patch.object(torch.cuda, "current_device", lambda: 3):
        spec: Any = place_in_group(plan, dist.group.WORLD, torch.device("cuda"))["t"].sharding_spec
    assert str(spec.shards[0].placement) == "rank:0/cuda:3"


@on_ranks(2)
def test_a_tower_may_be_frozen_for_some_steps(rank: int) -> None:
    training, ends = Training(rank, ONE, TowerMesh(ONE.topology)), []
    layers = [parameter for name, parameter in training.model.named_parameters() if ".interaction." in name]
    for step, is_trained in enumerate((False, True, False, True)):
        for layer in layers:
            layer.requires_grad_(is_trained)
        training.step(step)
        ends.append(parameters_to_vector(layers).detach())
    assert [torch.equal(before, after) for before, after in pairwise(ends)] == [False, True, False]
    assert torch.equal(*gather_objects(ends[-1], dist.group.WORLD))


@on_ranks(4)
def test_what_ranks_draw_is_equal_where_they_share_it(rank: int) -> None:
    """Every rank draws its own, and nothing is loaded afterwards."""
    torch.manual_seed(rank)
    mesh = TowerMesh(TWO_BY_TWO.topology)
    frozen, copied = replace(TWO_BY_TWO, kind="frozen"), replace(TWO_BY_TWO, scheme="data_parallel")
    # From a collection that was built on a GPU, TorchRec copies the weights of each rank.
    both = [(copied, "embedding_bags", place) for place in ("cpu", "cuda")]
    for case, part, place in [(frozen, "interaction", "cpu"), *both]:
        with patch.object(EmbeddingBagCollection, "device", torch.device(place)):
            parameters = dict(shard(case, build(case), mesh).state_dict())
        own = {name: value.clone() for name, value in parameters.items() if part in name}
        assert own
        for other in gather_objects(own, mesh.tower_group):
            assert all(torch.equal(own[name], other[name]) for name in own), part
    with torch.device("meta"):
        model = build(TWO_BY_TWO)
    state = gather_plain_state(shard(replace(TWO_BY_TWO, fp16=(0, 1, 2, 3)), model, mesh))
    assert min(float(value.std()) for value in state.values() if value.dim() > 1) > 0
    bound = 1 / 40**0.5  # TorchRec draws a table of n rows from +-1/sqrt(n)
    table = state["sparse_arch.towers.0.embedding.embedding_bags.t0.weight"]
    assert 0.5 * bound < table.abs().max() <= bound * (1 + 2**-11)


class Scaled(PassThrough):
    def __init__(self, features: list[str]) -> None:
        super().__init__(features)
        self.pretrained, self.fresh = nn.Linear(8, 8), nn.Linear(8, 8, device="meta")
        nn.init.constant_(self.pretrained.weight, 3.0)

    def forward(self, embeddings: Any) -> Tensor:
        return self.fresh(self.pretrained(super().forward(embeddings)))


class Buffered(PassThrough):
    def __init__(self, features: list[str]) -> None:
        super().__init__(features)
        self.register_buffer("scale", torch.ones(1, device="meta"))


@on_ranks(2)
def test_only_what_is_on_meta_is_drawn_anew(rank: int) -> None:
    mesh = TowerMesh(TWO.topology)
    model = distribute(towers_of([Scaled(["f0"]), PassThrough(["f1"])]), TowerCollectionSharder(mesh))
    state = gather_plain_state(model)
    assert (state["sparse_arch.towers.0.interaction.pretrained.weight"] == 3).all()
    fresh = state["sparse_arch.towers.0.interaction.fresh.weight"]
    assert 0.1 < fresh.abs().max() <= 8**-0.5  # nn.Linear draws from +-1/sqrt(8)
    with pytest.raises(InputError, match="Buffered that was built on the meta device and has no"):
        distribute(towers_of([Buffered(["f0"]), Buffered(["f1"])]), TowerCollectionSharder(mesh))


@on_ranks(4)
def test_weights_nobody_asked_for_change_nothing(rank: int) -> None:
    mesh = TowerMesh(TWO_BY_TWO.topology)
    for kind in ("modules", "flat"):
        case = replace(TWO_BY_TWO, kind=kind, max_bag=3)
        training = Training(rank, case, mesh)
        ids, _ = case.draw(rank, 0)
        # Only some ranks bring weights.
        weights = torch.rand(ids.values().numel()) if rank % 2 else None
        weighted = KeyedJaggedTensor(ids.keys(), ids.values(), weights, ids.lengths())
        expected, sparse = training.plain.model.sparse_arch(ids), training.model.module.model.sparse_arch
        found = [sparse(weighted).wait()]
        if kind == "flat":
            expected, found = expected.values(), [found[0].values()]
        else:  # the collection of towers takes weighted ids apart; an unweighted one ignores them
            others = KeyedJaggedTensor(ids.keys(), ids.values().roll(1), weights, ids.lengths())
            found.append(sparse(ids, others).wait())
        for one in found:
            torch.testing.assert_close(one, expected, rtol=1e-6, atol=1e-6)


class ByPosition(nn.Module):
    def forward(self, embeddings: Any) -> Tensor:
        return embeddings.values()


class Projected(nn.Linear):
    def forward(self, embeddings: Any) -> Tensor:
        return super().forward(embeddings.values())


@on_ranks(2)
def test_towers_of_other_dtypes_meet_in_the_widest(rank: int) -> None:
    """A linear tower puts out BF16, a module that reads by position FP32. Later outputs may not be wider."""
    sharder = TowerCollectionSharder(TowerMesh(TWO.topology))
    ids, _ = replace(TWO, dims=(8, 8), plan=((0,), (1,))).draw(rank, 0)
    for other, dtype in ((ByPosition(), torch.float32), (Projected(8, 8), torch.bfloat16)):
        torch.manual_seed(0)  # ranks have drawn different numbers of times
        plain = towers_of([Projected(8, 8), other])
        model: Any = loaded(plain, sharder)
        with torch.autocast("cpu", torch.bfloat16):
            got, expected = model.module.sparse_arch(ids).wait(), plain.sparse_arch(ids)
        assert got.dtype == dtype
        assert torch.equal(got, expected)
    with pytest.raises(InputError, match=r"in torch\.float32, but in the first batch .* in torch\.bfloat16\. Return"):
        model.module.sparse_arch(ids).wait()


@pytest.mark.parametrize(
    "case", [replace(ONE, scheme="mixed"), replace(TWO, kind="flat", hot=True)], ids=["mixed", "hot"]
)
@on_ranks(2)
def test_a_model_that_is_let_go_leaves_memory(rank: int, case: Case) -> None:
    """Hooks of data-parallel tables once kept tables and process groups until the process ended."""
    mesh = TowerMesh(case.topology)
    model = shard(case, build(case), mesh)
    if case.hot:
        HotRows(model, mesh).replicate({"t0": range(9), "t1": [1]})
    ids, labels = case.draw(rank, 0)
    loss_of(model(ids)[1], labels).backward()
    del model
    gc.collect()
    modules = [type(one) for one in gc.get_objects() if isinstance(one, nn.Module)]
    left = {kind.__name__ for kind in modules if kind.__module__.startswith("dmt.")}
    assert not left, f"still in memory: {left}"


@on_ranks(2)
def test_steps_are_profiler_ranges_in_both_directions(rank: int) -> None:
    model = shard(TWO, build(TWO), TowerMesh(TWO.topology))
    ids, labels = TWO.draw(rank, 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss_of(model(ids)[1], labels).backward()
    ranges = [(event.time_range.start, event.name) for event in profile.events() if "## dmt:" in event.name]
    steps = ["exchange_ids", "look_up", "run_towers", "exchange_outputs", "exchange_outputs:bwd"]
    assert [name for _, name in sorted(ranges)] == [f"## dmt:{step} ##" for step in steps]


@on_ranks(2)
def test_clipping_brings_no_table_up_to_date(rank: int) -> None:
    """Clipping reads no table, so it does not bring tables up to date with the copies of their hot rows."""
    case = replace(TWO, kind="flat")
    mesh = TowerMesh(case.topology)
    model = shard(case, build(case), mesh)
    HotRows(model, mesh, refresh_every=None).replicate({"t0": [1, 2]})
    ids, labels = case.draw(rank, 0)
    loss_of(model(ids)[1], labels).backward()
    with patch.object(HotCopies, "write_back", side_effect=AssertionError("tables were read")):
        assert clip_grad_norm(model, 1e-3) > 0


@pytest.mark.parametrize(("kind", "file"), [("modules", "sptt/towers.py"), ("flat", "sptt/flat.py")])
@on_ranks(2)
def test_a_plain_batch_enters_six_files(rank: int, kind: str, file: str) -> None:
    """The batch after the first one, forward and backward."""
    case, entered = replace(TWO, kind=kind), set()
    model = shard(case, build(case), TowerMesh(case.topology))

    def note(frame: FrameType, event: str, _: Any) -> None:
        entered.add(Path(frame.f_code.co_filename))

    for step in range(2):
        entered.clear()
        ids, labels = case.draw(rank, step)
        sys.setprofile(note)
        loss_of(model(ids)[1], labels).backward()
        sys.setprofile(None)
    package = Path(dmt.__file__).parent
    files = {str(path.relative_to(package)) for path in entered if path.is_relative_to(package)}
    shared = {f"sptt/{name}.py" for name in ("dataflow", "id_routes", "peer_exchange", "tower_lookup")}
    assert files == {file, "collectives.py"} | shared
