"""SPTT inside TorchRec: flat TorchRec as oracle, the train pipeline, checkpoints, traffic, and wrong use."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.embedding_tower import EmbeddingTower
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt import (
    HotRows,
    InputError,
    SPTTEmbeddingBagCollectionSharder,
    TowerCollectionSharder,
    TowerMesh,
    TowerPlan,
    TowerShardingPlanner,
    TowerTopology,
    TrafficMeter,
)
from dmt.sharding.schemes import TablePlacement
from dmt.testing import gather_plain_state, load_plain_state
from tests.parity import (
    Batches,
    FlatModel,
    PassThrough,
    TowerModel,
    loss_of,
    make_tables,
)
from tests.ranks import run_ranks
from tests.seeds import some_slow
from tests.sptt_case import FUSED, Case, build, shard

pytestmark = pytest.mark.ranks
CPU = torch.device("cpu")
TWO_BY_TWO = TowerTopology(num_towers=2, ranks_per_tower=2)


def flat_torchrec(tables: list[Any], state: dict[str, torch.Tensor]) -> DistributedModelParallel:
    """The flat model as TorchRec shards it, table-wise over all ranks."""
    model = FlatModel(tables)
    world = dist.get_world_size()
    sharder = EmbeddingBagCollectionSharder(fused_params=FUSED)
    module_plan = construct_module_sharding_plan(
        model.sparse_arch,
        {t.name: table_wise(rank=i % world) for i, t in enumerate(tables)},
        sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    plan = ShardingPlan(plan={"sparse_arch": module_plan})
    flat = DistributedModelParallel(model, device=CPU, plan=plan, sharders=[sharder])
    load_plain_state(flat, state)
    return flat


def bitwise_on_rank(rank: int, pooling: str) -> None:
    case = Case(towers=2, ranks=2, kind="flat", pooling=pooling, max_bag=4)
    model = shard(case, build(case), TowerMesh(TWO_BY_TWO))
    tables = make_tables(list(case.dims), pooling=pooling)
    flat = flat_torchrec(tables, gather_plain_state(model))
    for step in range(3):
        ids, _ = case.batches().draw(rank, step, tables)
        ours, theirs = model(ids), flat(ids)
        for table in tables:
            feature = table.feature_names[0]
            assert torch.equal(ours[0][feature], theirs[0][feature])


@pytest.mark.parametrize("pooling", ["SUM", "MEAN"])
def test_forward_is_bitwise_flat_torchrec(pooling: str) -> None:
    run_ranks(bitwise_on_rank, 4, pooling)


def save_on_rank(rank: int, folder: str, case: Case) -> dict[str, torch.Tensor]:
    torch.manual_seed(rank)
    model = shard(case, build(case), TowerMesh(TowerTopology(num_towers=case.towers, ranks_per_tower=case.ranks)))
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    return gather_plain_state(model)


def load_on_rank(rank: int, folder: str, case: Case) -> dict[str, torch.Tensor]:
    torch.manual_seed(7 + rank)
    model = shard(case, build(case), TowerMesh(TowerTopology(num_towers=case.towers, ranks_per_tower=case.ranks)))
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    keys = model.load_state_dict(state["model"])
    assert not keys.missing_keys, keys
    assert not keys.unexpected_keys, keys
    return gather_plain_state(model)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # the plain module loads in one process
@pytest.mark.parametrize(
    "change",
    [
        {"placement": (1, 0)},
        *(
            pytest.param({"scheme": scheme}, marks=pytest.mark.slow)
            for scheme in ("column_wise", "row_wise", "data_parallel")
        ),
        {"scheme": "mixed", "placement": (1, 0)},
        {"towers": 1, "ranks": 1, "placement": (0, 0)},
        {"towers": 2, "ranks": 3},
        {"scheme": "row_wise", "fp16": (0, 2)},
    ],
    ids=str,
)
def test_a_checkpoint_does_not_know_the_placement(tmp_path: Path, change: dict[str, Any]) -> None:
    # 12 columns are cut into 8 and 4.
    case = Case(towers=2, ranks=2, dims=(8, 16, 12, 8), fp16=(0, 1, 2, 3) if "fp16" in change else ())
    saved = run_ranks(save_on_rank, 4, str(tmp_path), case)[0]
    other = replace(case, **change)
    loaded = run_ranks(load_on_rank, other.world, str(tmp_path), other)[0]
    assert saved.keys() == loaded.keys()
    for name, value in saved.items():
        assert torch.equal(value, loaded[name]), name
    # and into the plain module, in one process, with no sharding at all
    plain = build(case)
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path), no_dist=True)
    for name, value in state["model"].items():
        assert torch.equal(value, saved[name]), name


def optimizer_on_rank(rank: int) -> None:
    """`apply_optimizer_in_backward` marks parameter objects; the SPTT sharder must keep them."""
    tables = make_tables([8, 8])
    torch.manual_seed(0)
    model = FlatModel(tables)
    apply_optimizer_in_backward(torch.optim.SGD, model.sparse_arch.parameters(), {"lr": 0.5})
    sharder = SPTTEmbeddingBagCollectionSharder(
        TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=1)), TowerPlan.from_lists([["f0"], ["f1"]])
    )
    plan = TowerShardingPlanner(sharder.mesh.topology).plan(model, [sharder])
    sharded = DistributedModelParallel(model, device=CPU, plan=plan, sharders=[sharder])
    before = gather_plain_state(sharded)
    kjt = KeyedJaggedTensor(keys=["f0", "f1"], values=torch.tensor([0, 1]), lengths=torch.tensor([1, 1]))
    sharded(kjt)[1].sum().backward()
    step = (
        before["sparse_arch.embedding_bags.t0.weight"]
        - gather_plain_state(sharded)["sparse_arch.embedding_bags.t0.weight"]
    )[0]
    # d(logit)/d(embedding) is the over arch's weight; both ranks looked up the same row, the mean is the same
    weight = before["over_arch.weight"][0, :8]
    torch.testing.assert_close(step, 0.5 * weight, rtol=1e-5, atol=1e-6)


def test_optimizers_given_on_parameters_are_kept() -> None:
    run_ranks(optimizer_on_rank, 2)


def traffic_on_rank(rank: int) -> tuple[Any, Any]:
    tables = make_tables([8, 8, 8, 8])
    mesh = TowerMesh(TWO_BY_TWO)
    batches = Batches(sizes=(6, 6, 6, 6))
    found = []
    tower = shard(Case(towers=2, ranks=2), build(Case(towers=2, ranks=2)), mesh)
    flat = flat_torchrec(
        tables, gather_plain_state(shard(Case(towers=2, ranks=2, kind="flat"), FlatModel(tables), mesh))
    )
    for model in (tower, flat):
        for step in range(2):  # the first step also exchanges sizes that never change again
            ids, labels = batches.draw(rank, step, tables)
            meter = TrafficMeter(host_of=lambda r: r // 2)
            with meter:
                loss = loss_of(model(ids)[1].clone(), labels)
                loss.backward()
        found.append(meter.total(mesh.global_group))
    return tuple(found)


def test_traffic_is_what_the_algorithm_needs() -> None:
    tower, flat = run_ranks(traffic_on_rank, 4)[0]
    # Two hosts of two ranks, batch 6: every rank needs the other host's outputs. Towers emit 3 and 4 columns.
    assert tower.forward == tower.backward == 4 * 2 * 6 * (3 + 4)
    # Flat: every rank needs the 2 tables of the other host, 8 columns each.
    assert flat.forward == flat.backward == 4 * 4 * 6 * 2 * 8
    # Two features' ids and lengths (8 bytes each) for 6 samples go to the other host, plus a few sizes.
    assert 4 * 6 * 2 * 16 <= tower.ids <= 4 * (6 * 2 * 16 + 64)
    # The ring of 4 ranks crosses hosts twice: 2 * S * 3/4 each, S = the over arch.
    assert tower.dense == 2 * (2 * 4 * (7 + 1) * 3 // 4)
    assert flat.dense == 2 * (2 * 4 * (32 + 1) * 3 // 4)


def wrong_use_on_rank(rank: int) -> None:
    mesh = TowerMesh(TWO_BY_TWO)
    tables = make_tables([8, 8])
    plan = TowerPlan.from_lists([["f0"], ["f1"]])
    with pytest.raises(InputError, match=r"1 \* 3 \* 2 = 6 ranks, but the job was started with WORLD_SIZE=4"):
        TowerMesh(TowerTopology(num_towers=3, ranks_per_tower=2))
    with pytest.raises(InputError, match="plan has 1 towers but the topology num_towers=2"):
        SPTTEmbeddingBagCollectionSharder(mesh, TowerPlan.from_lists([["f0", "f1"]]))
    no_plan: Any = [["f0"], ["f1"]]
    with pytest.raises(InputError, match=r"The tower plan \[\['f0'\], \['f1'\]\] must be a dmt.TowerPlan"):
        SPTTEmbeddingBagCollectionSharder(mesh, no_plan)
    no_precision: Any = "fp16"
    with pytest.raises(InputError, match=r"peer_precision='fp16' must be a dmt\.ExchangePrecision"):
        SPTTEmbeddingBagCollectionSharder(mesh, TowerPlan.from_lists(no_plan), peer_precision=no_precision)

    sharder = SPTTEmbeddingBagCollectionSharder(mesh, plan)
    planner = TowerShardingPlanner(mesh.topology, scheme="table_wise")
    with pytest.raises(InputError, match="Feature 'f1' is in the tower plan but not in the model"):
        planner.plan(FlatModel(tables[:1]), [sharder])
    with pytest.raises(InputError, match="Feature 'f2' is in no tower"):
        planner.plan(FlatModel(make_tables([8, 8, 8])), [sharder])
    with pytest.raises(InputError, match="has no module of type"):
        planner.plan(torch.nn.Linear(1, 1), [sharder])
    pins = {"t7": TablePlacement(scheme="table_wise", ranks=(0,))}
    with pytest.raises(InputError, match="rule for tables 't7' matches none"):
        TowerShardingPlanner(mesh.topology, pinned=pins).plan(FlatModel(tables), [sharder])

    model = FlatModel(tables)
    good = planner.plan(model, [sharder])

    def shard_with(change: Any) -> None:
        broken = planner.plan(model, [sharder])
        change(broken.plan["sparse_arch"])
        DistributedModelParallel(FlatModel(tables), device=CPU, plan=broken, sharders=[sharder])

    mine = "t1"  # a fault of one tower is raised on all ranks
    with pytest.raises(InputError, match="Table 't1' in tower 1 is sharded 'table_row_wise'"):
        shard_with(lambda p: setattr(p[mine], "sharding_type", "table_row_wise"))
    for everywhere, reason in (
        ("row_wise", "takes every rank of its tower"),
        ("data_parallel", "compute_kernel='fused'"),
    ):
        with pytest.raises(InputError, match=rf"Table 't1' in tower 1.* {everywhere} .*{reason}"):
            shard_with(lambda p, scheme=everywhere: setattr(p[mine], "sharding_type", scheme))
    with pytest.raises(InputError, match="Table 't1' in tower 1 has a shard on local rank 5"):
        shard_with(lambda p: setattr(p[mine], "ranks", [5]))
    with pytest.raises(InputError, match=r"43, 6\)\] .* do not cover it as \[\(., 0, 0, 43, 8\)\] do"):
        shard_with(lambda p: p[mine].sharding_spec.shards[0].shard_sizes.__setitem__(1, 6))

    sharded = DistributedModelParallel(model, device=CPU, plan=good, sharders=[sharder])
    kjt = KeyedJaggedTensor(keys=["f0"], values=torch.tensor([0]), lengths=torch.tensor([1]))
    with pytest.raises(InputError, match="The batch lacks feature 'f1'"):
        sharded(kjt)

    towers = [EmbeddingTower(EmbeddingBagCollection(tables=[t]), PassThrough(list(t.feature_names))) for t in tables]
    with pytest.raises(InputError, match=r"placement=\[0\] must give one mesh tower"):
        TowerCollectionSharder(mesh, placement=[0]).mesh_towers(TowerModel(towers, 16).sparse_arch)
    with pytest.raises(InputError, match="Mesh tower 1 has no tower of the model"):
        TowerCollectionSharder(mesh, placement=[0, 0]).mesh_towers(TowerModel(towers, 16).sparse_arch)
    with pytest.raises(InputError, match="model has 1 towers but the topology num_towers=2"):
        TowerCollectionSharder(mesh).mesh_towers(TowerModel(towers[:1], 8).sparse_arch)


def test_wrong_use_is_refused_with_names() -> None:
    run_ranks(wrong_use_on_rank, 4)


def mistakes_of_an_hour_on_rank(rank: int) -> None:
    mesh = TowerMesh(TowerTopology(num_towers=1, ranks_per_tower=1))
    plan = TowerPlan.from_lists([["f0"]])
    sharder = SPTTEmbeddingBagCollectionSharder(mesh, plan)
    with pytest.raises(InputError, match=r"fused_params has lr=0\.1, .* FBGEMM's is learning_rate"):
        SPTTEmbeddingBagCollectionSharder(mesh, plan, fused_params={"lr": 0.1})
    with pytest.raises(InputError, match=r"Table 't0' has embedding_dim=10; FBGEMM's kernels take multiples of 4"):
        TowerShardingPlanner(mesh.topology).plan(FlatModel(make_tables([10])), [sharder])
    with pytest.raises(InputError, match=r"Sharder needs a plan: .*plan=TowerShardingPlanner\(mesh\.topology\)\.plan"):
        DistributedModelParallel(FlatModel(make_tables([8])), device=CPU, sharders=[sharder])


def test_mistakes_of_the_first_hour_are_named() -> None:
    run_ranks(mistakes_of_an_hour_on_rank, 1)


def disagreement_on_rank(rank: int) -> None:
    mesh = TowerMesh(TWO_BY_TWO)
    order = [["f0"], ["f1"]] if rank < 3 else [["f1"], ["f0"]]
    sharder = SPTTEmbeddingBagCollectionSharder(mesh, TowerPlan.from_lists(order))
    model = FlatModel(make_tables([8, 8]))
    plan = TowerShardingPlanner(mesh.topology).plan(model, [sharder])
    with pytest.raises(InputError, match=r"towers.tower 0 is \['t0'\] on rank 0, but \['t1'\] on rank 3"):
        DistributedModelParallel(model, device=CPU, plan=plan, sharders=[sharder])


def test_ranks_with_other_plans_are_named() -> None:
    run_ranks(disagreement_on_rank, 4)


def meta_on_rank(rank: int) -> None:
    """Tables and tower modules built on meta get real, equal weights."""
    mesh = TowerMesh(TWO_BY_TWO)
    with torch.device("meta"):
        model = build(Case(towers=2, ranks=2))
    torch.manual_seed(rank)
    state = gather_plain_state(shard(Case(towers=2, ranks=2), model, mesh))
    tower = state[f"sparse_arch.towers.{mesh.tower}.interaction.linear.weight"]
    assert tower.isfinite().all()
    assert tower.std() > 0
    bound = 1 / 40**0.5  # TorchRec draws a table of n rows from +-1/sqrt(n)
    table = state["sparse_arch.towers.0.embedding.embedding_bags.t0.weight"]
    assert 0.5 * bound < table.abs().max() <= bound


def test_modules_may_be_built_on_meta() -> None:
    run_ranks(meta_on_rank, 4)


def freed_on_rank(rank: int, scheme: str) -> None:
    hot = scheme == "hot rows"
    case = Case(towers=2, ranks=2, kind="flat") if hot else Case(towers=2, ranks=2, scheme=scheme)
    mesh = TowerMesh(TWO_BY_TWO)
    model = shard(case, build(case), mesh)
    if hot:
        HotRows(model, mesh).replicate({"t0": range(9), "t1": [1]})
    ids, labels = case.batches().draw(rank, 0, make_tables(list(case.dims)))
    loss_of(model(ids)[1], labels).backward()
    del model
    gc.collect()
    modules = [type(one) for one in gc.get_objects() if isinstance(one, torch.nn.Module)]
    left = {kind.__name__ for kind in modules if kind.__module__.startswith("dmt.")}
    assert not left, f"still in memory: {left}"


@pytest.mark.parametrize(
    "scheme",
    some_slow(
        ["table_wise", "row_wise", "column_wise", "data_parallel", "hot rows"], slow=["table_wise", "column_wise"]
    ),
)
def test_a_model_that_is_let_go_leaves_memory(scheme: str) -> None:
    """Hooks of data-parallel tables once kept tables and process groups until the process ended."""
    run_ranks(freed_on_rank, 4, scheme)


def test_a_mesh_needs_a_process_group() -> None:
    with pytest.raises(InputError, match=r"TowerMesh needs torch\.distributed"):
        TowerMesh(TWO_BY_TWO)
