"""What a user can get wrong at the tower dataflow: each case with a part of the message that names it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
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
from dmt._torchrec import group_timeout
from dmt.collectives import gather_objects
from dmt.sptt.options import REFUSALS, Options, refuse
from tests.parity import FUSED, make_tables
from tests.ranks import run_ranks
from tests.sptt_case import Case, build, shard

CPU = torch.device("cpu")
FLAT = Case(towers=2, ranks=1, kind="flat")
PLAN = TowerPlan.from_lists([["f0", "f2"], ["f1", "f3"]])


def ids_of(dtype: torch.dtype) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f0", "f1", "f2", "f3"], torch.ones(8, dtype=dtype), lengths=torch.ones(8).long())


def model_of(case: Case, mesh: TowerMesh) -> DistributedModelParallel:
    torch.manual_seed(0)
    return shard(case, build(case), mesh)


def after_int32(mesh: TowerMesh) -> Any:
    model = model_of(FLAT, mesh)
    model(ids_of(torch.int32))
    return model(ids_of(torch.int64))


def sharded(mesh: TowerMesh, model: nn.Module, *, planned: bool = True, weighted: bool = False) -> Any:
    sharders = [SPTTEmbeddingBagCollectionSharder(mesh, PLAN, fused_params=FUSED)]
    plan = TowerShardingPlanner(mesh.topology).plan(model, sharders) if planned else None
    return DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)


def two_collections(mesh: TowerMesh) -> Any:
    tables = make_tables([8, 8, 8, 8])
    return sharded(mesh, nn.ModuleList([EmbeddingBagCollection(tables[:2]), EmbeddingBagCollection(tables[2:])]))


def weighted_means(mesh: TowerMesh) -> Any:
    return sharded(mesh, nn.Sequential(EmbeddingBagCollection(make_tables([8] * 4, pooling="MEAN"), is_weighted=True)))


def assigned(mesh: TowerMesh) -> Any:
    sparse: Any = model_of(FLAT, mesh).module.sparse_arch
    return sparse.load_state_dict(sparse.state_dict(), assign=True)


CASES: dict[str, tuple[Callable[[TowerMesh], Any], str]] = {
    "floats as ids": (lambda mesh: model_of(FLAT, mesh)(ids_of(torch.float32)), r"ids of torch.float32; ids must be"),
    "int64 after int32": (after_int32, r"ids of torch.int64, but the first batch had torch.int32"),
    "means of weighted bags": (weighted_means, r"'t0' in tower 0 has mean pooling of weighted bags"),
    "assign=True": (assigned, r"load_state_dict\(assign=True\) cannot replace"),
    "two collections": (two_collections, r"A tower plan is for one EmbeddingBagCollection: where a model has several"),
}


def cases_on_rank(rank: int) -> dict[str, str]:
    mesh, told = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=1)), {}
    for name, (attempt, _) in CASES.items():
        try:
            attempt(mesh)
        except InputError as error:
            told[name] = str(error)
    return told


@pytest.mark.ranks
def test_wrong_use_is_named_on_every_rank() -> None:
    for told in run_ranks(cases_on_rank, 2):
        for name, (_, message) in CASES.items():
            with pytest.raises(InputError, match=message):
                raise InputError(told.get(name, f"{name} was not refused"))


def without_plan_on_rank(rank: int) -> None:
    mesh = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=1))
    flat = SPTTEmbeddingBagCollectionSharder(mesh, PLAN, fused_params=FUSED)
    for sharder, case in ((flat, FLAT), (TowerCollectionSharder(mesh), Case(towers=2, ranks=1))):
        with pytest.raises(InputError, match=rf"^{type(sharder).__name__} needs a plan: .*TowerShardingPlanner"):
            DistributedModelParallel(build(case), device=CPU, sharders=[sharder])
    assert sharded(mesh, build(FLAT)) is not None, "the refusal leaves nothing"


@pytest.mark.ranks
def test_a_missing_plan_is_named_on_every_rank() -> None:
    run_ranks(without_plan_on_rank, 2)


def groups_on_rank(rank: int, num_towers: int, ranks_per_tower: int, num_replicas: int) -> int:
    # Ranks are in unequally many groups of the user's own.
    dist.new_group([0, 1])
    made: list[Any] = []
    new_group = dist.new_group

    def counted(*args: Any, **options: Any) -> Any:
        made.append(new_group(*args, **options))
        return made[-1]

    topology = TowerTopology(num_towers=num_towers, ranks_per_tower=ranks_per_tower, num_replicas=num_replicas)
    with patch.object(dist, "new_group", counted):
        mesh = TowerMesh(topology)
    groups = [group for group in made if isinstance(group, dist.ProcessGroup)]
    assert {group_timeout(group) for group in groups} == {group_timeout(mesh.global_group)}
    for group, ranks in ((mesh.tower_group, topology.tower_groups()), (mesh.peer_group, topology.peer_groups())):
        mine = next(members for members in ranks if rank in members)
        assert gather_objects(rank, group) == mine
    return len(made)


@pytest.mark.ranks
@pytest.mark.parametrize(("sizes", "number"), [((4, 1, 1), 5), ((2, 2, 1), 8), ((2, 1, 2), 9)])
def test_groups_of_one_rank_are_made_once_and_all_have_the_timeout_of_the_job(
    sizes: tuple[int, int, int], number: int
) -> None:
    assert run_ranks(groups_on_rank, 4, *sizes) == [number] * 4


def test_each_pair_of_options_is_refused_once_or_goes_together() -> None:
    on = {"id_route": "global", "unique": True, "num_micro_batches": 2, "hot_rows": True}
    on |= {"num_replicas": 2, "has_towers": True}
    refused = set()
    for one, other in itertools.combinations(on, 2):
        lines = [message for holds, message in REFUSALS if holds(Options(**{one: on[one], other: on[other]}))]
        assert len(lines) <= 1
        if lines:
            refused.add((one, other))
            with pytest.raises(InputError, match="Leave out one of them"):
                refuse(**{one: on[one], other: on[other]})
    assert len(refused) == len(REFUSALS), "a line of the table never holds for a pair"
