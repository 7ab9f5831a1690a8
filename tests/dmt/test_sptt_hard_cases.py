"""Inputs that once gave a wrong result without an error, or an error that said nothing. All on gloo ranks."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_tower import EmbeddingTower
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt import (
    InputError,
    SPTTEmbeddingBagCollectionSharder,
    TowerCollectionSharder,
    TowerMesh,
    TowerPlan,
    TowerShardingPlanner,
    TowerTopology,
    TrafficMeter,
)
from dmt.collectives import gather_objects
from dmt.sharding.schemes import TablePlacement
from dmt.testing import gather_plain_state, load_plain_state
from tests.parity import Batches, FlatModel, PassThrough, SumTowerModule, TowerModel, make_tables
from tests.ranks import run_ranks
from tests.sptt_case import FUSED, Case, build, shard

pytestmark = pytest.mark.ranks
CPU = torch.device("cpu")


def mesh_of(towers: int, ranks: int) -> TowerMesh:
    return TowerMesh(TowerTopology(num_towers=towers, ranks_per_tower=ranks))


def towers_of(tables: list[Any], modules: list[nn.Module]) -> list[EmbeddingTower]:
    """One table and one module a tower."""
    return [EmbeddingTower(EmbeddingBagCollection(tables=[t]), m) for t, m in zip(tables, modules, strict=True)]


def distribute(model: nn.Module, sharder: Any, **planner: Any) -> DistributedModelParallel:
    plan = TowerShardingPlanner(sharder.mesh.topology, **planner).plan(model, [sharder])
    return DistributedModelParallel(model, device=CPU, plan=plan, sharders=[sharder])


def frozen_on_rank(rank: int) -> None:
    mesh = mesh_of(2, 2)
    torch.manual_seed(rank)  # every rank draws its own; nothing is loaded afterwards
    case = Case(towers=2, ranks=2, kind="frozen")
    model = shard(case, build(case), mesh)
    own = {n: p.detach().clone() for n, p in model.named_parameters() if "interaction" in n}
    assert own
    for other in gather_objects(own, mesh.tower_group):
        assert all(torch.equal(own[name], other[name]) for name in own)


def test_a_frozen_tower_starts_equal_on_all_its_ranks() -> None:
    run_ranks(frozen_on_rank, 4)


def shared_on_rank(rank: int) -> None:
    mesh = mesh_of(2, 1)
    shared = nn.Linear(8, 3)

    class Shared(PassThrough):
        def __init__(self, features: list[str]) -> None:
            super().__init__(features)
            self.linear = shared

    model = TowerModel(towers_of(make_tables([8, 8]), [Shared(["f0"]), Shared(["f1"])]), 16)
    with pytest.raises(InputError, match=r"Towers 0 and 1 share the parameter 'interaction\.linear\.weight'"):
        distribute(model, TowerCollectionSharder(mesh))


def test_a_parameter_shared_across_hosts_is_refused() -> None:
    run_ranks(shared_on_rank, 2)


def other_plan_on_rank(rank: int) -> None:
    mesh = mesh_of(1, 2)
    sharder = SPTTEmbeddingBagCollectionSharder(mesh, TowerPlan.from_lists([["f0", "f1"]]))
    pins = {"t0": TablePlacement(scheme="table_wise", ranks=(rank,))}
    with pytest.raises(InputError, match=r"sharding plan.t0 is .* on rank 0, but .* on rank 1"):
        distribute(FlatModel(make_tables([8, 8])), sharder, pinned=pins)
    with pytest.raises(InputError, match=r"table.t0 is .*40.* on rank 0, but .*41.* on rank 1"):
        distribute(FlatModel(make_tables([8, 8], rows=40 + rank)), sharder)


def test_ranks_with_other_plans_or_tables_are_named() -> None:
    run_ranks(other_plan_on_rank, 2)


def unasked_weights_on_rank(rank: int, kind: str) -> None:
    case = Case(towers=2, ranks=2, kind=kind, max_bag=3)
    tables = make_tables(list(case.dims))
    torch.manual_seed(0)
    plain = build(case)
    start = plain.state_dict()
    model = shard(case, copy.deepcopy(plain), mesh_of(2, 2))  # DMP replaces the modules of the model it is given
    load_plain_state(model, start)
    ids, _ = Batches(sizes=(5,) * 4, max_bag=3).draw(rank, 0, tables)
    # Only some ranks bring weights.
    weights = torch.rand(ids.values().numel()) if rank % 2 else None
    weighted = KeyedJaggedTensor(keys=ids.keys(), values=ids.values(), lengths=ids.lengths(), weights=weights)
    expected = plain.sparse_arch(ids)
    got = model.module.sparse_arch(weighted).wait()
    if kind == "flat":
        expected, got = expected.values(), got.values()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    if kind != "flat":  # the collection of towers takes weighted ids apart; an unweighted one ignores them
        both = model.module.sparse_arch(ids, weighted).wait()
        torch.testing.assert_close(both, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["modules", "flat"])
def test_weights_nobody_asked_for_change_nothing(kind: str) -> None:
    run_ranks(unasked_weights_on_rank, 4, kind)


class Buffered(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def meta_on_rank(rank: int) -> None:
    mesh = mesh_of(2, 1)

    class Mixed(PassThrough):
        def __init__(self, features: list[str], *parts: nn.Module) -> None:
            super().__init__(features)
            self.parts = nn.Sequential(*parts)

        def forward(self, embeddings: Any) -> Tensor:
            return self.parts(super().forward(embeddings))

    pretrained = nn.Linear(8, 8)
    nn.init.constant_(pretrained.weight, 3.0)
    parts = [pretrained, nn.Linear(8, 8, device="meta")]
    model = TowerModel(towers_of(make_tables([8, 8]), [Mixed(["f0"], *parts), PassThrough(["f1"])]), 16)
    sharded = distribute(model, TowerCollectionSharder(mesh))
    state = gather_plain_state(sharded)
    assert (state["sparse_arch.towers.0.interaction.parts.0.weight"] == 3).all()
    fresh = state["sparse_arch.towers.0.interaction.parts.1.weight"]
    assert 0.1 < fresh.abs().max() <= 8**-0.5  # nn.Linear draws from +-1/sqrt(8)

    modules = [Mixed([feature], Buffered("meta")) for feature in ("f0", "f1")]
    model = TowerModel(towers_of(make_tables([8, 8]), modules), 16)
    with pytest.raises(InputError, match="Buffered built on the meta device without reset_parameters"):
        distribute(model, TowerCollectionSharder(mesh))


def test_only_what_is_on_meta_is_drawn_anew() -> None:
    run_ranks(meta_on_rank, 2)


def dtypes_on_rank(rank: int) -> None:
    mesh = mesh_of(2, 1)
    tables = make_tables([8, 8])
    torch.manual_seed(0)
    modules = [SumTowerModule(["f0"], [8], 5), PassThrough(["f1"])]
    plain = TowerModel(towers_of(tables, modules), 13)
    start = plain.state_dict()
    model = distribute(copy.deepcopy(plain), TowerCollectionSharder(mesh))
    load_plain_state(model, start)
    ids, _ = Batches(sizes=(4, 6)).draw(rank, 0, tables)
    with torch.autocast("cpu", torch.bfloat16):  # the linear tower puts out bf16, the other one fp32
        got = model.module.sparse_arch(ids).wait()
        expected = plain.sparse_arch(ids)
    assert got.dtype == torch.float32
    assert torch.equal(got, expected)


def test_towers_of_other_dtypes_meet_in_the_widest() -> None:
    run_ranks(dtypes_on_rank, 2)


class Widening(nn.Module):
    width = 4

    def forward(self, embeddings: Any) -> Tensor:
        return embeddings["f0"][:, : self.width]


def width_on_rank(rank: int) -> None:
    mesh = mesh_of(1, 2)
    tables = make_tables([8])
    module = Widening()
    model = distribute(TowerModel(towers_of(tables, [module]), 4), TowerCollectionSharder(mesh))
    ids, _ = Batches(sizes=(4, 4)).draw(rank, 0, tables)
    model(ids)
    module.width = 6
    with pytest.raises(InputError, match=r"returned columns \[6\] of torch.float32, but \[4\]"):
        model(ids)


def test_an_output_that_changes_its_width_is_refused() -> None:
    run_ranks(width_on_rank, 2)


class ByPosition(nn.Module):
    def forward(self, embeddings: Any) -> Tensor:
        return embeddings.values()


def position_on_rank(rank: int) -> None:
    mesh = mesh_of(1, 2)
    tables = make_tables([4, 8, 12, 16])
    towers = [EmbeddingTower(EmbeddingBagCollection(tables=tables), ByPosition())]
    torch.manual_seed(0)
    plain = TowerModel(towers, 40)
    start = plain.state_dict()
    model = distribute(copy.deepcopy(plain), TowerCollectionSharder(mesh))
    load_plain_state(model, start)
    ids, _ = Batches(sizes=(4, 6)).draw(rank, 0, tables)
    assert torch.equal(model.module.sparse_arch(ids).wait(), plain.sparse_arch(ids))


def test_a_tower_module_may_read_by_position() -> None:
    run_ranks(position_on_rank, 2)


def meter_on_rank(rank: int) -> None:
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    meter = TrafficMeter(host_of=lambda r: r)
    with meter:
        dist.all_gather([torch.empty(4), torch.empty(4)], torch.ones(4))
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(4))
        dist.broadcast(torch.ones(3), src=0)
    # per rank: 16 bytes to the other one, half of 16, and from rank 0 only 12
    assert meter.total(group).forward == 2 * 16 + 2 * 8 + 12
    # A collective that it does not know must not end the step that is measured.
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dmt.traffic").addHandler(handler)
    with meter:
        assert functional.all_reduce(torch.ones(2), "sum", group).tolist() == [2, 2]
        for _ in range(2):
            dist.gather(torch.ones(2), [torch.empty(2), torch.empty(2)] if rank == 0 else None, dst=0)
    assert [message.split()[6].strip(":") for message in messages] == ["_c10d_functional.all_reduce", "c10d.gather_"]


def test_the_meter_counts_or_says_what_it_does_not_count() -> None:
    run_ranks(meter_on_rank, 2)


def empty_on_rank(rank: int, sizes: tuple[int, ...]) -> None:
    case = Case(towers=1, ranks=2, plan=((0, 1, 2, 3),), pooling="MEAN", scheme="row_wise", sizes=sizes, max_bag=3)
    tables = make_tables(list(case.dims), pooling="MEAN")
    torch.manual_seed(0)
    plain = build(case)
    start = plain.state_dict()
    model = shard(case, copy.deepcopy(plain), mesh_of(1, 2))
    load_plain_state(model, start)
    ids, _ = case.batches().draw(rank, 0, tables)
    logits = model(ids)[1]
    if sizes[rank]:  # the unsharded module fails without samples
        torch.testing.assert_close(logits, plain(ids)[1], rtol=1e-6, atol=1e-6)
    assert len(logits) == sizes[rank]
    logits.sum().backward()
    moved = (
        gather_plain_state(model)["sparse_arch.towers.0.embedding.embedding_bags.t0.weight"]
        - start["sparse_arch.towers.0.embedding.embedding_bags.t0.weight"]
    )
    assert moved.any() == any(sizes)


@pytest.mark.parametrize("sizes", [(0, 5), (0, 0)])
def test_ranks_without_samples_and_mean_pooled_row_wise_tables(sizes: tuple[int, ...]) -> None:
    run_ranks(empty_on_rank, 2, sizes)


class Listed(PassThrough):
    def forward(self, embeddings: Any) -> Any:
        return [super().forward(embeddings)]


def refusals_on_rank(rank: int) -> None:
    mesh = mesh_of(2, 1)
    tables = make_tables([8, 8])
    ours, flat = (
        TowerCollectionSharder(mesh),
        SPTTEmbeddingBagCollectionSharder(mesh, TowerPlan.strided(["f0", "f1"], 2)),
    )
    ids, _ = Batches(sizes=(4, 6)).draw(rank, 0, tables)
    listed = distribute(TowerModel(towers_of(tables, [Listed(["f0"]), Listed(["f1"])]), 16), ours)
    with pytest.raises(InputError, match=rf"tower {rank} returned a list for 10 samples; it must return a tensor"):
        listed(ids)
    sequences = EmbeddingCollection(
        tables=[EmbeddingConfig(name="t0", num_embeddings=9, embedding_dim=8, feature_names=["f0"])]
    )
    towers = [EmbeddingTower(sequences, PassThrough(["f0"])), *towers_of(tables[1:], [PassThrough(["f1"])])]
    with pytest.raises(InputError, match="Tower 0 holds a EmbeddingCollection; towers of pooled"):
        distribute(TowerModel(towers, 16), ours)
    both = nn.ModuleDict({"towers": FlatModel(tables), "rest": FlatModel(make_tables([8]))})
    with pytest.raises(InputError, match=r"has no module of type \['EmbeddingTowerCollection'\] to shard"):
        TowerShardingPlanner(mesh.topology).plan(both, [ours, EmbeddingBagCollectionSharder()])
    narrow = mesh_of(1, 2)
    one = SPTTEmbeddingBagCollectionSharder(narrow, TowerPlan.from_lists([["f0", "f1"]]))
    for scheme, kernel in (("data_parallel", "fused"), ("table_wise", "dense")):
        plan = TowerShardingPlanner(narrow.topology, scheme=scheme).plan(FlatModel(tables), [one])
        plan.plan["sparse_arch"]["t1"].compute_kernel = kernel
        with pytest.raises(InputError, match=f"'t1' in tower 0 is {scheme} with compute_kernel='{kernel}'"):
            DistributedModelParallel(FlatModel(tables), device=CPU, plan=plan, sharders=[one])
    frozen = FlatModel(tables)
    frozen.sparse_arch.embedding_bags["t1"].weight.requires_grad_(False)
    with pytest.raises(InputError, match="Table 't1' in tower 1 has requires_grad=False, but the optimizer"):
        distribute(frozen, flat)


def test_what_torchrec_answers_with_an_assertion_is_refused_by_name() -> None:
    run_ranks(refusals_on_rank, 2)


def still_on_rank(rank: int) -> None:
    mesh = mesh_of(1, 2)
    tables = make_tables([8, 8])
    model = FlatModel(tables)
    apply_optimizer_in_backward(torch.optim.SGD, [model.sparse_arch.embedding_bags["t1"].weight], {"lr": 0.0})
    sharder = SPTTEmbeddingBagCollectionSharder(mesh, TowerPlan.from_lists([["f0", "f1"]]), fused_params=FUSED)
    sharded = distribute(model, sharder)
    before = gather_plain_state(sharded)
    ids, _ = Batches(sizes=(4, 6)).draw(rank, 0, tables)
    sharded(ids)[1].sum().backward()
    after = gather_plain_state(sharded)
    moved = {name: not torch.equal(before[name], after[name]) for name in before if "embedding_bags" in name}
    assert list(moved.values()) == [True, False], moved


def test_a_table_of_rate_zero_stays() -> None:
    """The advice of the error above."""
    run_ranks(still_on_rank, 2)
