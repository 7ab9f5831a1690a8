"""The global id route against the peer route, on the same sharded collections: bitwise, forward and after training.

From the lookup on both do the same arithmetic on the same numbers in the same order, so every comparison of the two is
exact. Against the plain collection the sums over a bag's rows may be taken in another order: a few units in the last
place of sums of at most 3 numbers below 1, so 1e-6 is a bound with room.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
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
from dmt.sharding.planner import parameter_sharding
from dmt.sharding.schemes import TablePlacement
from dmt.sptt.dataflow import SPTTContext
from dmt.sptt.id_routes import GlobalIdRoute, GlobalInputDist, PeerInputDist
from dmt.testing import gather_plain_state
from tests import sptt_case
from tests.parity import EPS, LR, Batches, PipelinedBatch, Trained, load_ramps, make_tables
from tests.ranks import run_ranks
from tests.seeds import some_slow

pytestmark = pytest.mark.ranks
FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LR, "eps": EPS}
Layout = tuple[tuple[tuple[str, ...], ...], ...]
MIX: tuple[str, ...] = ("whole", "columns", "whole", "reversed")


@dataclass(frozen=True, kw_only=True)
class Case:
    towers: int
    ranks: int
    layout: Layout
    """For each mesh tower, for each logical tower on it, how each table is placed."""
    pooling: str = "SUM"
    max_bag: int = 3
    weighted: bool = False
    shared: bool = False
    """Every table also looks up one feature that all of them have."""
    sizes: tuple[int, ...] = ()
    dtype: torch.dtype = torch.int64
    replicas: int = 1
    """More than one: the replicas of a shard are neighbouring ranks."""

    @property
    def world(self) -> int:
        return self.replicas * self.towers * self.ranks

    def mesh(self) -> TowerMesh:
        return TowerMesh(
            TowerTopology(
                num_towers=self.towers,
                ranks_per_tower=self.ranks,
                num_replicas=self.replicas,
                replica_placement="intra_host",
            )
        )

    def batches(self) -> Batches:
        return Batches(sizes=self.sizes or (4,) * self.world, max_bag=self.max_bag, weighted=self.weighted)


class Placed(NamedTuple):
    table: EmbeddingBagConfig
    placement: TablePlacement


def placed_tables(case: Case) -> list[list[list[Placed]]]:
    number, everyone = 0, tuple(range(case.ranks))
    layout: list[list[list[Placed]]] = []
    for tower in case.layout:
        layout.append([])
        for kinds in tower:
            layout[-1].append([])
            for kind in kinds:
                rows = 40 + 3 * number
                placement = {
                    "whole": TablePlacement(scheme="table_wise", ranks=(number % case.ranks,)),
                    "columns": TablePlacement(scheme="column_wise", ranks=everyone),
                    "reversed": TablePlacement(scheme="column_wise", ranks=everyone[::-1]),
                }[kind]
                table = EmbeddingBagConfig(
                    name=f"t{number}",
                    num_embeddings=rows,
                    embedding_dim=24 if placement.scheme == "column_wise" else 8 + 4 * (number % 3),
                    feature_names=[f"f{number}"] + ["shared"] * case.shared,
                    pooling=PoolingType[case.pooling],
                )
                layout[-1][-1].append(Placed(table, placement))
                number += 1
    return layout


def features_of(tower: list[list[Placed]]) -> list[str]:
    return list(dict.fromkeys(f for logical in tower for placed in logical for f in placed.table.feature_names))


def draw(case: Case, rank: int, step: int) -> KeyedJaggedTensor:
    # The shared feature is drawn for the smallest table, the first one.
    drawn = {
        f: p.table
        for tower in reversed(placed_tables(case))
        for logical in reversed(tower)
        for p in reversed(logical)
        for f in p.table.feature_names
    }
    tables = [
        EmbeddingBagConfig(name=f, num_embeddings=t.num_embeddings, embedding_dim=4, feature_names=[f])
        for f, t in drawn.items()
    ]
    ids, _ = case.batches().draw(rank, step, tables)
    return KeyedJaggedTensor(
        keys=ids.keys(), values=ids.values().to(case.dtype), lengths=ids.lengths(), weights=ids.weights_or_none()
    )


def plain_collections(case: Case, tower: list[list[Placed]]) -> list[EmbeddingBagCollection]:
    return [EmbeddingBagCollection(tables=[p.table for p in tables], is_weighted=case.weighted) for tables in tower]


def shard_all(case: Case, tower: list[list[Placed]], mesh: TowerMesh) -> list[Any]:
    sharder = TowerCollectionSharder(mesh, fused_params=FUSED)
    return [
        sharder.shard_in_tower(
            collection,
            {p.table.name: parameter_sharding(p.table, p.placement) for p in tables},
            torch.device("cpu"),
        )
        for collection, tables in zip(plain_collections(case, tower), tower, strict=True)
    ]


def local_shards(embeddings: list[Any]) -> list[tuple[str, list[int], list[int], torch.Tensor]]:
    found = []
    for embedding in embeddings:
        for name, value in embedding.state_dict().items():
            assert isinstance(value, ShardedTensor)
            for shard in value.local_shards():
                found.append((name, shard.metadata.shard_offsets, shard.metadata.shard_sizes, shard.tensor))
    return found


def load(embeddings: list[Any], plain: list[EmbeddingBagCollection]) -> None:
    weights = {name: value for collection in plain for name, value in collection.state_dict().items()}
    for name, offsets, sizes, tensor in local_shards(embeddings):
        where = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        tensor.detach().copy_(weights[name][where])


def by_name(lazy: Any) -> list[tuple[str, torch.Tensor]]:
    return sorted(lazy.wait().to_dict().items())


def both_routes_on_rank(rank: int, case: Case) -> float:
    mesh, layout = case.mesh(), placed_tables(case)
    mine = layout[mesh.tower]
    torch.manual_seed(mesh.tower)
    plain = plain_collections(case, mine)
    by_peers, by_owners = shard_all(case, mine, mesh), shard_all(case, mine, mesh)
    load(by_peers, plain)
    load(by_owners, plain)
    route = GlobalIdRoute(mesh, by_owners)
    keys = draw(case, rank, 0).keys()
    to_towers = PeerInputDist(mesh.peer_group, [features_of(tower) for tower in layout], keys)
    to_owners = route.exchange(keys)
    moved = 0.0
    before = [tensor.detach().clone() for *_, tensor in local_shards(by_owners)]
    for step in range(3):
        ids = draw(case, rank, step)
        met = to_towers(ids).wait().wait()
        expected = [value for embedding in by_peers for value in by_name(embedding(met))]
        context = SPTTContext()
        arrived = KJTListSplitsAwaitable([to_owners(ids)], context).wait().wait()[0]
        sizes = context.sharding_contexts[0].batch_size_per_rank
        assert sizes == [case.batches().sizes[r] for r in dist.get_process_group_ranks(mesh.sharding_group)]
        pending = route.look_up(context, KJTList([arrived]), lambda _, arrived_ids: arrived_ids)
        got = [value for lazy in pending for value in by_name(lazy)]
        assert [key for key, _ in got] == [key for key, _ in expected]
        assert all(torch.equal(x, y) for (_, x), (_, y) in zip(got, expected, strict=True))
        assert len(got[0][1]) == sum(sizes[route.peers])
        if step == 0:
            truth = [value for collection in plain for value in sorted(collection(met).to_dict().items())]
            for (name, x), (_, y) in zip(got, truth, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6, msg=name)
        torch.manual_seed(step)
        gradient = [torch.rand_like(value) for _, value in got]
        torch.autograd.backward([value for _, value in expected], gradient)
        torch.autograd.backward([value for _, value in got], gradient)
        for (*_, x), (*_, y) in zip(local_shards(by_peers), local_shards(by_owners), strict=True):
            assert torch.equal(x, y)
    for old, (*_, new) in zip(before, local_shards(by_owners), strict=True):
        moved = max(moved, (old - new).abs().max().item())
    return moved


CASES = {
    "whole-2x2": Case(towers=2, ranks=2, layout=((("whole", "whole"),), (("whole", "whole"),)), max_bag=1),
    "columns-2x2": Case(towers=2, ranks=2, layout=((("columns",),), (("reversed", "columns"),))),
    "mix-2x3-uneven-batches": Case(towers=2, ranks=3, layout=((MIX,), (MIX[:3],)), sizes=(2, 5, 1, 4, 3, 6)),
    "mix-3x2-weighted": Case(
        towers=3, ranks=2, layout=((MIX[:2],), (MIX[2:],), (("whole",),)), weighted=True, sizes=(1, 2, 3, 4, 5, 6)
    ),
    "mix-1x2": Case(towers=1, ranks=2, layout=((MIX,),)),
    "mix-2x1": Case(towers=2, ranks=1, layout=((MIX,), (("whole",),)), sizes=(3, 1)),
    "one-rank": Case(towers=1, ranks=1, layout=((MIX,),)),
    "two-logical-towers": Case(
        towers=2, ranks=2, layout=((("whole", "whole"), ("columns",), ("whole",)), (MIX,)), sizes=(3, 4, 1, 2)
    ),
    "shared-feature": Case(towers=2, ranks=2, layout=((MIX,), (("whole", "whole"), ("columns",))), shared=True),
    "idle-rank": Case(towers=2, ranks=2, layout=((("whole",),), (MIX,))),
    "mean": Case(towers=2, ranks=2, layout=((("whole", "columns"),), (("reversed",),)), pooling="MEAN"),
    "replicas": Case(towers=2, ranks=2, replicas=2, layout=((MIX,), (MIX[:3],)), sizes=(1, 2, 3, 4, 5, 4, 3, 2)),
    "int32-batch-of-one": Case(towers=2, ranks=2, layout=((MIX,), (MIX,)), sizes=(1, 1, 1, 1), dtype=torch.int32),
}


# The mixes have their schemes.
SLOW = ("whole-2x2", "columns-2x2", "modules-2x2")


@pytest.mark.parametrize("name", some_slow(CASES, SLOW))
def test_both_routes_give_the_same_bits(name: str) -> None:
    moved = run_ranks(both_routes_on_rank, CASES[name].world, CASES[name])
    assert max(moved) > 1e-2, "training did not move the weights; the comparison would prove nothing"


def test_bags_may_all_be_empty() -> None:
    case = Case(towers=2, ranks=2, layout=((MIX,), (("columns", "whole"),)), max_bag=0, weighted=True)
    assert run_ranks(both_routes_on_rank, 4, case) == [0.0] * 4


def peer_order_on_rank(rank: int, towers: int, ranks: int) -> list[int]:
    mesh = TowerMesh(TowerTopology(num_towers=towers, ranks_per_tower=ranks))
    world = towers * ranks
    wanted = [[f"f{owner}"] for owner in range(world)]
    exchange = GlobalInputDist(mesh.sharding_group, wanted, [f"f{i}" for i in range(world)], num_towers=towers)
    # Rank r sends r + 1 samples, each with the id r.
    ids = KeyedJaggedTensor(
        keys=[f"f{i}" for i in range(world)],
        values=torch.full((world * (rank + 1),), rank),
        lengths=torch.ones(world * (rank + 1), dtype=torch.int64),
    )
    arrived = exchange(ids).wait().wait()
    assert arrived.keys() == [f"f{rank}"]
    return arrived.values().tolist()


@pytest.mark.parametrize(("towers", "ranks"), [(2, 2), (2, 3), (3, 2)])
def test_ids_arrive_in_peer_order(towers: int, ranks: int) -> None:
    order = TowerTopology(num_towers=towers, ranks_per_tower=ranks).peer_order()
    expected = [rank for rank in order for _ in range(rank + 1)]
    assert run_ranks(peer_order_on_rank, towers * ranks, towers, ranks) == [expected] * (towers * ranks)


def refusal_on_rank(rank: int) -> None:
    """All ranks of the job hear of the fault before anything is sharded, whichever tower has it."""
    mesh, towers = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=2)), TowerPlan.from_lists([["f0"], ["f1"]])
    for pooling, scheme, why in (
        (PoolingType.SUM, "data_parallel", "id_route='global' sends every rank's ids"),
        (PoolingType.SUM, "row_wise", "with id_route='global' every holder"),
    ):
        tables = [
            EmbeddingBagConfig(
                name=f"t{i}", num_embeddings=8, embedding_dim=4, feature_names=[f"f{i}"], pooling=pooling
            )
            for i in range(2)
        ]
        peer, globally = (
            SPTTEmbeddingBagCollectionSharder(mesh, towers, id_route=route) for route in ("peer", "global")
        )
        model = torch.nn.Sequential(EmbeddingBagCollection(tables=tables))
        plan = TowerShardingPlanner(mesh.topology, pinned={"t0": "table_wise", "t1": scheme}).plan(model, [peer])
        with pytest.raises(
            InputError, match=rf"'t1' in tower 1 is {scheme}, but {why}.* Use id_route='peer', or another scheme"
        ):
            DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[globally])


def test_what_the_global_route_cannot_carry_is_refused_by_name() -> None:
    run_ranks(refusal_on_rank, 4)


def bytes_on_rank(rank: int, kind: str) -> tuple[int, int]:
    """Bytes of ids that cross hosts, by the peer route and by the global route; a tower is a host."""
    case = Case(towers=2, ranks=2, layout=(((kind, kind),), ((kind, kind),)), max_bag=1, sizes=(50,) * 4)
    mesh, layout = case.mesh(), placed_tables(case)
    ids = draw(case, rank, 0)
    embeddings = shard_all(case, layout[mesh.tower], mesh)
    to_towers = PeerInputDist(mesh.peer_group, [features_of(tower) for tower in layout], ids.keys())
    across = []
    for exchange in (to_towers, GlobalIdRoute(mesh, embeddings).exchange(ids.keys())):
        meter = TrafficMeter(host_of=lambda r: r // 2)
        with meter:
            exchange(ids).wait().wait()
        across.append(meter.total(mesh.global_group).ids)
    assert gather_objects(across, mesh.global_group) == [across] * 4
    return across[0], across[1]


# Per sample and feature a length and an id of 8 bytes; a few sizes more. Both shards of a column-wise table get both.
@pytest.mark.parametrize(("kind", "numbers"), [("whole", 2), ("columns", 4)])
def test_what_crosses_hosts_is_what_the_routes_need(kind: str, numbers: int) -> None:
    peer, owners = run_ranks(bytes_on_rank, 4, kind)[0]
    samples = 4 * 50 * 2  # each with the two features of the other host
    assert samples * 2 * 8 <= peer <= samples * 2 * 8 + 4 * 64
    assert samples * numbers * 8 <= owners <= samples * numbers * 8 + 4 * 128


def train_on_rank(rank: int, case: sptt_case.Case) -> None:
    """Peer route, global route, and global route in TorchRec's train pipeline."""
    tables = make_tables(list(case.dims))
    mesh = TowerMesh(TowerTopology(num_towers=case.towers, ranks_per_tower=case.ranks))
    ends = []
    for id_route, pipelined in (("peer", False), ("global", False), ("global", True)):
        torch.manual_seed(0)
        model = sptt_case.shard(replace(case, id_route=id_route), Trained(sptt_case.build(case)), mesh)
        load_ramps(model)
        dense = [p for n, p in model.named_parameters() if "embedding_bags" not in n]
        optimizer = torch.optim.Adam(dense, lr=LR)
        batches = iter([PipelinedBatch(*case.batches().draw(rank, step, tables)) for step in range(5)])
        if pipelined:
            pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
            for _ in range(5):
                pipeline.progress(batches)
            assert len(pipeline._pipelined_modules) == 1, "the towers were not pipelined"
        else:
            for batch in batches:
                optimizer.zero_grad()
                model(batch)[0].backward()
                optimizer.step()
        ends.append(gather_plain_state(model))
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name]), name
        assert torch.equal(value, ends[2][name]), name


TRAINED = {
    "modules-2x2": sptt_case.Case(towers=2, ranks=2, scheme="column_wise", dims=(8, 24, 8, 8), max_bag=3),
    "flat-2x3": sptt_case.Case(
        towers=2, ranks=3, scheme="column_wise", kind="flat", dims=(8, 16, 8, 12), sizes=(2, 5, 1, 4, 3, 6)
    ),
    "two-towers-on-one-host": sptt_case.Case(
        towers=2, ranks=2, plan=((0,), (3,), (1, 2)), placement=(1, 0, 1), scheme="table_wise", weighted=True, max_bag=3
    ),
}


@pytest.mark.parametrize("name", some_slow(TRAINED, SLOW))
def test_training_and_the_pipeline_change_no_bit(name: str) -> None:
    run_ranks(train_on_rank, TRAINED[name].world, TRAINED[name])


def sharder_refusals_on_rank(rank: int) -> None:
    mesh = TowerMesh(TowerTopology(num_towers=1, ranks_per_tower=2))
    plan = TowerPlan.from_lists([["f0"]])
    with pytest.raises(InputError, match=r"id_route='globl' is unknown; use one of .* Did you mean 'global'\?"):
        SPTTEmbeddingBagCollectionSharder(mesh, plan, id_route="globl")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="id_route='tower' is unknown"):
        TowerCollectionSharder(mesh, id_route="tower")  # type: ignore[arg-type]
    for kind in ("flat", "modules"):
        case = sptt_case.Case(
            towers=1, ranks=2, kind=kind, plan=((0, 1, 2, 3),), scheme="mixed", id_route="global", dims=(8, 8, 8, 8)
        )
        with pytest.raises(InputError, match="Table 't1' in tower 0 is pinned row_wise, but with id_route='global'"):
            sptt_case.shard(case, sptt_case.build(case), mesh)


def test_sharders_refuse_what_their_route_cannot_carry() -> None:
    run_ranks(sharder_refusals_on_rank, 2)
