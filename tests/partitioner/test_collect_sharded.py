"""`FeatureAffinity.collect` over gloo ranks: equal to one process on the union of the data, and nobody left waiting.

Tolerance of the matrix: column-wise and table-wise lookups are bitwise the plain model's, row-wise ones sum in another
order; cosines then differ by float32 rounding, 6e-8 of numbers up to 1. Sums over ranks are float64.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection

from dmt import (
    SPTTEmbeddingBagCollectionSharder,
    TowerCollectionSharder,
    TowerMesh,
    TowerPlan,
    TowerShardingPlanner,
    TowerTopology,
)
from dmt.partitioner import FeatureAffinity
from dmt.testing import load_plain_state
from tests.partitioner.planted import FlatModel, batch
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
NAMES = ["a", "b", "c", "d", "e"]
DIM = 8
FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.5}


def tables() -> list[EmbeddingBagConfig]:
    """One table per feature except for ``b`` and ``c``, which share one; rows differ."""
    groups = [["a"], ["b", "c"], ["d"], ["e"]]
    return [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=20 + i, embedding_dim=DIM, feature_names=names)
        for i, names in enumerate(groups)
    ]


def plain() -> FlatModel:
    torch.manual_seed(3)
    return FlatModel(EmbeddingBagCollection(tables=tables()))


def batches_of(rank: int, count: int = 3, *, weighted: bool = False) -> list[SimpleNamespace]:
    """Bags of 0 to 3 ids, batches of unequal size, features in another order than the tables."""
    generator = torch.Generator().manual_seed(rank)
    made = [batch(NAMES[::-1], 4 + rank + i, generator=generator, least=0, most=3) for i in range(count)]
    for one in made if weighted else []:
        ids = one.sparse_features
        weights = torch.rand(len(ids.values()), generator=generator)
        one.sparse_features = KeyedJaggedTensor(ids.keys(), ids.values(), weights=weights, lengths=ids.lengths())
    return made


def shard(model: FlatModel, ways: list[Any]) -> DistributedModelParallel:
    """Shards the tables by TorchRec, each in its way, with the model's weights."""
    size, sharder = dist.get_world_size(), EmbeddingBagCollectionSharder(fused_params=FUSED)
    plan = construct_module_sharding_plan(
        model.sparse_arch["ebc_0"],
        {f"t{i}": way for i, way in enumerate(ways)},
        sharder=sharder,
        local_size=size,
        world_size=size,
        device_type="cpu",
    )
    env = ShardingEnv.from_process_group(world())
    plans = ShardingPlan({"sparse_arch.ebc_0": plan})
    return DistributedModelParallel(model, env=env, device=torch.device("cpu"), plan=plans, sharders=[sharder])


def shard_towers(model: nn.Module, sharders: list[Any], mesh: TowerMesh) -> DistributedModelParallel:
    plan = TowerShardingPlanner(mesh.topology).plan(model, sharders)
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def case_on_rank(rank: int, is_sptt: bool, weights: dict[str, torch.Tensor]) -> FeatureAffinity:
    if is_sptt:
        mesh = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=2))
        # Towers in another order than the tables.
        towers = TowerPlan.from_lists([["e", "b", "c"], ["d", "a"]])
        model = shard_towers(plain(), [SPTTEmbeddingBagCollectionSharder(mesh, towers)], mesh)
    else:
        model = shard(plain(), [row_wise(), column_wise(ranks=[2, 1]), data_parallel(), table_wise(rank=3)])
    load_plain_state(model, weights)
    return FeatureAffinity.collect(model, iter(batches_of(rank)), process_group=world())


@pytest.mark.parametrize("is_sptt", [False, True], ids=["mixed", "sptt"])
def test_sharded_equals_one_process_on_all_the_data(is_sptt: bool) -> None:
    model = plain()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1)  # not what any initialization gives
    wanted = FeatureAffinity.collect(model, [one for rank in range(4) for one in batches_of(rank)])
    results = run_ranks(case_on_rank, 4, is_sptt, model.state_dict())
    for found in results:
        assert found.features == tuple(NAMES[::-1]), "the order of the ids"
        assert found.tables == (), "a rank may know those of its tower only"
        assert found.num_samples == wanted.num_samples == 78
        ordered = found.permuted(wanted.features)
        np.testing.assert_allclose(ordered.matrix, wanted.matrix, rtol=0, atol=1e-6)
        np.testing.assert_allclose(ordered.pooling_factors, wanted.pooling_factors, rtol=0, atol=1e-14)
        np.testing.assert_array_equal(found.matrix, results[0].matrix)


def message_of(run: Any) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class FirstOf(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, embeddings: Any) -> torch.Tensor:
        return embeddings[self.name]


def others_on_rank(rank: int) -> dict[str, Any]:
    """What each of two ranks raises where only one of them is at fault, and other shapes of models."""
    found: dict[str, Any] = {}
    model = shard(plain(), [table_wise(rank=0), row_wise()] * 2)
    mine = batches_of(rank)

    def collect(batches: Any, model: nn.Module = model, **more: Any) -> FeatureAffinity:
        return FeatureAffinity.collect(model, batches, **({"process_group": world()} | more))

    found["count"] = message_of(lambda: collect(batches_of(rank, 1 + rank)))
    generator = torch.Generator().manual_seed(1)
    other = batch(NAMES[:3] if rank == 1 else NAMES[::-1], 4, generator=generator)
    found["keys"] = message_of(lambda: collect([mine[0], other]))
    orders = [batch(names, 4, generator=generator) for names in (NAMES[::-1], NAMES)]
    found["order"] = message_of(lambda: collect(orders[:: -1 if rank else 1], plain()))
    found["two orders"] = message_of(lambda: collect(orders))
    too_high = batch(NAMES, 4, generator=generator, rows=20 + 980 * rank)
    found["bad id"] = message_of(lambda: collect([too_high], plain()))
    found["weights"] = message_of(lambda: collect(batches_of(rank, weighted=rank == 1)))
    found["iterator"] = message_of(lambda: collect(one if rank != 1 or i < 1 else 1 / 0 for i, one in enumerate(mine)))
    found["ids"] = message_of(lambda: collect(["x" if rank == 0 else mine[0]]))
    found["nobody"] = message_of(lambda: collect([]))
    found["no group"] = message_of(lambda: collect(mine, process_group=None))
    found["unlike"] = message_of(lambda: collect(mine, plain() if rank else FlatModel(plain(), plain())))
    # The last batch of the last rank is bad: the others have nothing to look up any more.
    if rank == 1:
        with torch.no_grad():
            for weight in (bad := plain()).parameters():
                weight.fill_(float("nan"))
    found["nan"] = message_of(lambda: collect(mine, bad if rank else plain()))
    # Replicated models, each rank with its own batches; in DDP, where its features are those of the plain model.
    wrapped = DistributedDataParallel(plain(), process_group=world())
    found["replicated"] = collect(batches_of(rank, 2), wrapped)
    empty = [batch(NAMES[::-1], 0, generator=generator)]
    found["empty"] = collect([*mine, *(empty if rank else [])]).num_samples
    found["bare"] = collect(batches_of(rank, 1), model.module.sparse_arch["ebc_0"]).features
    sharded = model.module.sparse_arch["ebc_0"]
    # As a train pipeline does, whose detach() takes it back.
    sharded.forward = lambda ids: None
    found["pipeline"] = message_of(lambda: collect(mine))
    del sharded.forward
    mesh = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=1))
    pairs = ((tables()[:2], "a"), (tables()[2:], "d"))
    towers = [EmbeddingTower(EmbeddingBagCollection(tables=part), FirstOf(name)) for part, name in pairs]
    towered = nn.Sequential(EmbeddingTowerCollection(towers))
    parallel = shard_towers(towered, [TowerCollectionSharder(mesh)], mesh)
    found["towers"] = message_of(lambda: collect(mine, parallel))
    return found


@pytest.fixture(scope="module")
def of_others() -> list[dict[str, Any]]:
    return run_ranks(others_on_rank, 2)


REFUSED = {
    "count": r"ranks 0 and 1 of the group differ in .*: 1 against 2\. Give every rank",
    "keys": "differ in .* keys and weights of batches: .*'e', 'd', 'c', 'b', 'a'.* against ",
    "order": "differ in .* keys and weights of batches: .*'e', .*'a', .* against .*'a', .*'e', ",
    "two orders": "batches of the group differ in .*'e', 'd', .* and .*'a', 'b', .* Give all batches the same keys",
    "weights": r"differ in .* keys and weights of batches: .*False.* against .*True",
    "bad id": "rank 1: ",
    "iterator": "ZeroDivisionError",
    "ids": "returns a str, not a KeyedJaggedTensor",
    "nobody": "batches have no samples",
    "no group": r"is a Sharded.*, whose tables are spread over ranks\. Call collect on every rank",
    "unlike": "differ in their collections",
    "pipeline": r"^InputError: .*attached to a train pipeline.* Call the pipeline's detach\(\)",
    "nan": "the embedding of feature 'e' is not finite",
    "towers": r"is a ShardedTowerCollection, whose embeddings never leave their towers. Load the checkpoint",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_fault_on_one_rank_is_raised_on_all(of_others: list[dict[str, Any]], name: str) -> None:
    for found in of_others:
        assert re.search(REFUSED[name], found[name]), found[name]


def test_replicated_models_add_up(of_others: list[dict[str, Any]]) -> None:
    wanted = FeatureAffinity.collect(plain(), batches_of(0, 2) + batches_of(1, 2))
    for found in of_others:
        np.testing.assert_allclose(found["replicated"].matrix, wanted.matrix, rtol=0, atol=1e-12)
        assert found["replicated"].num_samples == wanted.num_samples
        assert found["replicated"].tables == wanted.tables
        assert found["empty"] == 2 * (4 + 5 + 6) + 3
        assert found["bare"] == tuple(NAMES[::-1])
