"""The global id route against the peer route, on the same sharded collections: bitwise, forward and after training.

From the lookup on both do the same arithmetic on the same numbers in the same order, so every comparison of the two is
exact. Against the plain collection the sums over a bag's rows may be taken in another order: a few units in the last
place of sums of at most 3 numbers below 1, so 1e-6 is a bound with room.
"""

from __future__ import annotations

import pytest
import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
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
)
from dmt.sptt.id_routes import IdExchange
from tests import sptt_case
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks


def peer_order_on_rank(rank: int, towers: int, ranks: int) -> list[int]:
    mesh = TowerMesh(TowerTopology(num_towers=towers, ranks_per_tower=ranks))
    world = towers * ranks
    wanted = [[f"f{owner}"] for owner in range(world)]
    exchange = IdExchange(mesh.sharding_group, wanted, [f"f{i}" for i in range(world)], stagger=towers)
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
        with pytest.raises(InputError, match=r"Table 't1' in tower 0 cannot be row_wise, .*: with id_route='global'"):
            sptt_case.shard(case, sptt_case.build(case), mesh)


def test_sharders_refuse_what_their_route_cannot_carry() -> None:
    run_ranks(sharder_refusals_on_rank, 2)
