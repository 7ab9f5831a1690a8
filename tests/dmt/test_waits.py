"""Steps of a train pipeline: id exchanges are out of the forward pass, and no step waits more often than a flat one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from dmt import TowerMesh
from dmt.sptt.dataflow import SPTTContext
from dmt.training.build import build_optimizer, in_micro_batches, replica_sync, shard_model
from dmt.training.job import open_job
from tests.ranks import run_ranks
from tests.training.small import small
from tests.waits import MADE, Waits

OVERLAPPED = {"micro_batches": 2, "dense_reduce": "hierarchical"}
COPIES = {"num_towers": 2, "ranks_per_tower": 1, "num_replicas": 2}
# name -> arch, dataflow, further settings
RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "flat": ("dlrm", "flat", {}),
    "sptt": ("dlrm", "sptt", {}),
    "sptt overlapped": ("dlrm", "sptt", {"train": OVERLAPPED}),
    "sptt replicas": ("dlrm", "sptt", {"topology": COPIES}),
    "dmt": ("dmt-dlrm", "sptt", {}),
    "dmt overlapped": ("dmt-dlrm", "sptt", {"train": OVERLAPPED}),
    "dmt replicas": ("dmt-dlrm", "sptt", {"topology": COPIES}),
    "dmt mixed schemes": ("dmt-dlrm", "sptt", {"sharding": {"scheme": "auto"}}),
    "dmt unique": ("dmt-dlrm", "sptt", {"sharding": {"unique": True}}),
    "dmt unique overlapped": ("dmt-dlrm", "sptt", {"sharding": {"unique": True}, "train": OVERLAPPED}),
}
STEPS = 4  # the first ones make what later ones have


def step_on_rank(rank: int, name: str) -> tuple[Waits, list[tuple[int, ...]]]:
    """One step of a pipeline that is full, and the ranks of this rank's peer group and tower."""
    arch, dataflow, settings = RUNS[name]
    sharding = {"scheme": "table_wise", "dataflow": dataflow} | settings.get("sharding", {})
    config = small(arch, **settings | {"sharding": sharding})
    job, mesh = open_job(config), TowerMesh(config.topology.build())
    model = shard_model(job, mesh)
    in_micro_batches(config.train, model)
    optimizer = build_optimizer(config.optimizer, model)
    replicas = replica_sync(config.replicas, model, mesh)
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"), execute_all_batches=True)
    batches = itertools.islice(job.data.batches("train", rank=rank, world_size=4, batch_size=16), STEPS + 2)
    waits, task = Waits(), model.module

    def progress() -> None:
        pipeline.progress(batches)
        if replicas is not None:
            replicas.step()

    for _ in range(STEPS - 1):
        progress()
    optimizer.step = waits.in_phase("optimizer", optimizer.step)  # type: ignore[method-assign]
    task.forward = waits.in_phase("forward", task.forward)
    with waits:
        progress()
    return waits, [tuple(dist.get_process_group_ranks(group)) for group in (mesh.peer_group, mesh.tower_group)]


def all_on_rank(rank: int) -> dict[str, tuple[int, int, list[tuple[str, tuple[int, ...]]], list[tuple[int, ...]]]]:
    steps = {name: step_on_rank(rank, name) for name in RUNS}
    return {name: (w.reads, w.found[MADE], w.exchanges, groups) for name, (w, groups) in steps.items()}


@pytest.fixture(scope="module")
def steps() -> list[dict[str, Any]]:
    return run_ranks(all_on_rank, 4)


@pytest.mark.ranks
@pytest.mark.parametrize("name", RUNS)
def test_no_id_crosses_ranks_in_the_forward_pass(name: str, steps: list[dict[str, Any]]) -> None:
    assert {phase for step in steps for phase, _ in step[name][2]} == {"between"}


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["sptt", "dmt", "dmt overlapped"])
def test_ids_go_to_the_peers_and_then_on_inside_the_tower(name: str, steps: list[dict[str, Any]]) -> None:
    for step in steps:
        _, _, exchanges, (peers, tower) = step[name]
        # Of each hop the sizes, then lengths and ids.
        assert [ranks for _, ranks in exchanges] == [peers] * 3 + [tower] * 3


@pytest.mark.ranks
@pytest.mark.parametrize("name", [name for name in RUNS if name != "flat" and "unique" not in name])
def test_a_step_waits_no_more_often_than_that_of_the_flat_model(name: str, steps: list[dict[str, Any]]) -> None:
    reads, made, *_ = steps[0][name]
    most, most_made, *_ = steps[0]["flat"]
    assert 0 < reads <= most
    # TorchRec makes tensors of the sizes that a hop sends; there is a second hop.
    assert made <= 2 * most_made


@pytest.mark.ranks
def test_finding_distinct_inputs_reads_their_numbers(steps: list[dict[str, Any]]) -> None:
    # To find the rows, to send other numbers of them for each group of features, and to arrange those that arrive.
    assert steps[0]["dmt unique"][0] <= steps[0]["dmt"][0] + 16
    # All micro-batches at once.
    assert steps[0]["dmt unique overlapped"][0] <= steps[0]["dmt unique"][0]


class OnAStream:
    """Something that notes which streams still use it."""

    def __init__(self) -> None:
        self.streams: list[Any] = []

    def record_stream(self, stream: Any) -> None:
        self.streams.append(stream)


def test_a_stream_is_told_of_the_ids_of_both_hops_and_of_the_rows() -> None:
    made: list[Any] = [OnAStream() for _ in range(5)]
    context = SPTTContext(in_tower=[(made[0], made[1]), (made[2], made[3])], code=made[4])
    stream: Any = "the current one"
    context.record_stream(stream)
    assert [part.streams for part in made] == [[stream]] * 5
