"""What ranks can be told differently is named before anything is sent: the argument, the ranks, both values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt import (
    HierarchicalDataParallel,
    InputError,
    ReplicaSync,
    TowerCollectionSharder,
    TowerMesh,
    TowerShardingPlanner,
    TowerTopology,
)
from dmt.collectives import RankError, check_agreement, run_on_all_or_raise
from tests.parity import loss_of, make_tables
from tests.ranks import run_ranks
from tests.sptt_case import FUSED, Case, build, shard

pytestmark = pytest.mark.ranks
TWO = Case(towers=2, ranks=1)


def others_on_rank(rank: int) -> None:
    group = dist.group.WORLD
    with pytest.raises(InputError, match=r"^Here: b is absent on rank 0, but 2 on rank 1, 3. Give every rank the same"):
        check_agreement("Here", {"a": 1} | ({"b": 2} if rank % 2 else {}), group)
    with pytest.raises(InputError, match=r"^Here: a.x is 1 on rank 0, but 2 on rank 2\."):
        check_agreement("Here", {"a": {"x": 2 if rank == 2 else 1, "y": [3]}}, group)
    check_agreement("Here", {"a": {"x": (1, None)}, "b": torch.float32}, group)


def test_the_argument_the_ranks_and_both_values_are_named() -> None:
    run_ranks(others_on_rank, 4)


def not_picklable_on_rank(rank: int) -> None:
    with pytest.raises(RankError, match=r"^rank 1: .*cannot pickle 'generator'"):
        run_on_all_or_raise(lambda: (i for i in range(3)) if rank == 1 else rank, dist.group.WORLD)
    assert run_on_all_or_raise(lambda: [rank], dist.group.WORLD) == [[0], [1]]


def test_a_result_that_does_not_pickle_fails_on_all_ranks() -> None:
    run_ranks(not_picklable_on_rank, 2)


def meshes_on_rank(rank: int) -> None:
    sizes = (2, 2) if rank else (4, 1)
    with pytest.raises(InputError, match=r"TowerMesh: topology is TowerTopology\(.* on rank 0, but .* on rank 1, 2, 3"):
        TowerMesh(TowerTopology(num_towers=sizes[0], ranks_per_tower=sizes[1]))


def test_other_topologies_are_named_before_a_group_is_made() -> None:
    run_ranks(meshes_on_rank, 4)


def sharders_on_rank(rank: int, change: dict[str, Any], error: str) -> None:
    mesh = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=1))
    case = replace(TWO, weighted=change.pop("weighted", False) and rank == 1)
    sharder = TowerCollectionSharder(mesh, fused_params=FUSED | (change if rank else {}))
    model = build(case)
    plan = TowerShardingPlanner(mesh.topology).plan(model, [sharder])
    with pytest.raises(InputError, match=error):
        DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"learning_rate": 0.5}, "fused_params.t0.learning_rate is .* on rank 0, but 0.5 on rank 1"),
        ({"eps": 0.1}, "fused_params.t0.eps is .* on rank 0, but 0.1 on rank 1"),
        ({"weighted": True}, r"is_weighted is \[False, False\] on rank 0, but \[True, True\] on rank 1"),
    ],
)
def test_other_settings_of_a_sharder_are_named(change: dict[str, Any], error: str) -> None:
    run_ranks(sharders_on_rank, 2, change, error)


def formats_on_rank(rank: int) -> None:
    case = replace(TWO, precision="bf16" if rank else "fp16")
    with pytest.raises(InputError, match=r"peer_precision is .* on rank 0, but .* on rank"):
        shard(case, build(case), TowerMesh(case.topology))


def test_other_formats_are_named() -> None:
    run_ranks(formats_on_rank, 2)


def replicas_on_rank(rank: int) -> None:
    case = Case(towers=1, ranks=1, plan=((0, 1, 2, 3),))
    mesh = TowerMesh(TowerTopology(num_replicas=2, num_towers=1, ranks_per_tower=1))
    model = shard(case, build(case), mesh)
    for name, values in {
        "interval": (1, 2),
        "optimizer_state": ("now", "delayed"),
    }.items():
        with pytest.raises(
            InputError, match=f"ReplicaSync: {name} is {values[0]} on rank 0, but {values[1]} on rank 1"
        ):
            ReplicaSync(model, mesh, **{name: values[rank]})
    with pytest.raises(InputError, match="HierarchicalDataParallel: precision is fp32 on rank 0, but bf16 on rank 1"):
        HierarchicalDataParallel(mesh, precision="bf16" if rank else "fp32")
    with pytest.raises(InputError, match="HierarchicalDataParallel: static_graph is absent on rank 0, but True on"):
        HierarchicalDataParallel(mesh, **({"static_graph": True} if rank else {}))


def test_other_arguments_of_replicas_and_of_the_dense_reduce_are_named() -> None:
    run_ranks(replicas_on_rank, 2)


def batches_on_rank(rank: int) -> None:
    model = shard(TWO, build(TWO), TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=1)))
    ids, labels = TWO.batches().draw(rank, 0, make_tables(list(TWO.dims)))
    short = KeyedJaggedTensor(keys=ids.keys(), values=ids.values().int(), lengths=ids.lengths())
    with pytest.raises(InputError, match=r"The first batch: dtype of ids is torch\.int64 on rank 0, but torch\.int32"):
        model(short if rank else ids)
    loss_of(model(ids)[1], labels).backward()
    model.eval()
    expected = model(ids)[1]
    with pytest.raises(InputError, match=r"The batch has ids of torch\.int32, but the first batch had torch\.int64"):
        model(short)
    assert torch.equal(model(ids)[1], expected)


def test_ids_of_another_dtype_are_named() -> None:
    run_ranks(batches_on_rank, 2)


def kernel_on_rank(rank: int) -> None:
    case = Case(towers=1, ranks=1, plan=((0, 1, 2, 3),))
    mesh = TowerMesh(TowerTopology(num_replicas=2, num_towers=1, ranks_per_tower=1))
    sharder = TowerCollectionSharder(mesh, fused_params=FUSED)
    model = build(case)
    plan = TowerShardingPlanner(mesh.topology).plan(model, [sharder])
    for of_module in plan.plan.values():
        of_module["t1"].compute_kernel = "dense"
    with pytest.raises(InputError, match="Table 't1' in tower 0 is table_wise with compute_kernel='dense'"):
        DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])


def test_a_kernel_that_replicas_would_not_average_is_refused() -> None:
    run_ranks(kernel_on_rank, 2)
