"""Bytes of a step by `step_work` against those that `TrafficMeter` counts in one, on gloo ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor

from dmt.plan.towers import TowerPlan
from dmt.simulator.steps import Load
from dmt.sptt.mesh import TowerMesh
from dmt.training.config import TrainingConfig
from dmt.training.data.batch import ClickBatch
from dmt.training.job import open_job
from dmt.training.metrics import measure_traffic
from dmt.training.step_prediction import work_of
from dmt.training.train import Run, batches_of
from tests.ranks import run_ranks
from tests.seeds import collected
from tests.training.small import new_run, small

ROWS, BUSIEST = 12, "unequal towers"
Measured = tuple[str, list[dict[str, list[dict[str, int]]]]]
"""Folder of the tower plans, and what `measure_on_rank` returns on every rank."""
PLANS = {
    # C1 whole, C6 in both towers.
    "cut": TowerPlan.from_lists([["C1", "C2", "C6[0:4]"], ["C3", "C4", "C5", "C6[4:8]"]], column_splits={"C6": (4, 4)}),
    "unequal": TowerPlan.from_lists([["C1"], ["C2", "C3", "C4", "C5", "C6"]]),
}


def placed(*schemes: str) -> dict[str, str]:
    """Schemes of the tables of C1, C2, ..."""
    return {f"t_C{number}": scheme for number, scheme in enumerate(schemes, 1)}


LISTS = {"synthetic": {"num_multi_hot": 2}, "data": {"sequences": {"C6": "C1", "C5": "C1"}}}
TWO_ON_A_HOST = {"num_towers": 4, "ranks_per_tower": 1, "ranks_per_host": 2}


# arch, then the sections of the config
CASES: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "a mix": ("dmt-dcn", {"sharding": {"tables": placed("row_wise", "data_parallel", "data_parallel", "table_wise")}}),
    "flat dataflow, 16 bits": (
        "dlrm",
        {"sharding": {"dataflow": "flat", "scheme": "table_wise", "forward_precision": "bf16"}},
    ),
    "cut table, 16 bits": (
        "dcn",
        {"sharding": {"scheme": "table_wise", "forward_precision": "fp16"}, "towers": {"plan": "cut"}},
    ),
    # All but the gradients of the dense part weighs on the second tower.
    BUSIEST: (
        "dmt-dlrm",
        {
            "model": {"p": 1},
            "towers": {"plan": "unequal"},
            "sharding": {"scheme": "table_wise", "tables": {"t_C2": "data_parallel"}},
            "train": {"dense_reduce": "hierarchical"},
        },
    ),
    # Every rank reads all rows of every table.
    "unique": ("dcn", {"towers": {"plan": "unequal"}, "sharding": {"scheme": "table_wise", "unique": True}}),
    "outside towers, 16 bits": (
        "dmt-dlrm",
        {"towers": {"outside": ["C2", "C6"]}, "sharding": {"scheme": "table_wise", "backward_precision": "bf16"}},
    ),
    "flat, outside towers": (
        "dcn",
        {
            "towers": {"outside": ["C2", "C6"]},
            "sharding": {"scheme": "table_wise"},
            "topology": TWO_ON_A_HOST,
            "train": {"micro_batches": 2},
        },
    ),
    "two towers on a host": ("dmt-dlrm", {"topology": TWO_ON_A_HOST, "train": {"dense_reduce": "hierarchical"}}),
    "sequences": ("dmt-dlrm", {**LISTS, "sharding": {"scheme": "table_wise", "pooling_factors": {"C5": 10, "C6": 50}}}),
    "flat sequences": (
        "dlrm",
        {**LISTS, "sharding": {"dataflow": "flat", "scheme": "table_wise", "pooling_factors": {"C5": 10, "C6": 50}}},
    ),
    "sequences, two towers on a host": (
        "dmt-dcn",
        {
            **LISTS,
            "sharding": {"scheme": "table_wise", "pooling_factors": {"C5": 200, "C6": 1}},
            "topology": TWO_ON_A_HOST,
        },
    ),
    "a tower on two hosts": (
        "dmt-dcn",
        {
            "sharding": {
                "tables": placed("table_wise", "table_wise", "data_parallel", "row_wise", "table_wise", "row_wise")
            },
            "topology": {"num_towers": 1, "ranks_per_tower": 4, "ranks_per_host": 2},
        },
    ),
}
MIX = placed("row_wise", "data_parallel", "table_wise", "column_wise", "data_parallel", "table_wise")
# Two replicas. Gradients of data-parallel tables and tower modules cross hosts only between hosts, those of dense parts
# do in both placements.
REPLICAS = {"num_towers": 1, "ranks_per_tower": 2, "num_replicas": 2, "replica_placement": "intra_host"}
CASES["replicas"] = ("dmt-dlrm", {"sharding": {"tables": MIX}, "topology": REPLICAS})


def config_of(name: str, folder: str) -> TrainingConfig:
    arch, sections = CASES[name]
    sections = {key: dict(section) for key, section in sections.items()}
    if "plan" in sections.get("towers", {}):
        sections["towers"] = {"plan": f"{folder}/{sections['towers']['plan']}.json"}
    sections["sharding"] = {"dataflow": "sptt"} | sections.get("sharding", {})
    # Rows that the tower's ranks share evenly and one id a sample, as planned. In its third pass, DDP tells all ranks
    # once how it has laid out gradients; the fourth one is measured.
    synthetic = {"rows_per_table": ROWS, "num_rows": 3072} | sections.pop("synthetic", {})
    train = {"batch_size": 128} | sections.pop("train", {})
    return small(arch, synthetic=synthetic, train=train, **sections)


def measure_on_rank(rank: int, folder: str, names: list[str]) -> dict[str, list[dict[str, int]]]:
    """The bytes of one step of every case: of all ranks, and, of `BUSIEST`, of this rank."""
    found = {}
    for name in names:
        config = config_of(name, folder)
        mesh = TowerMesh(config.topology.build())
        run = new_run(config, mesh)
        batch = evenly_drawn(next(batches_of(run.job, mesh, "train")), config.sharding.pooling_factors, rank)
        for _ in range(3):
            forward_and_backward(run, batch)
            run.optimizer.step()
        alone: Any = SimpleNamespace(topology=mesh.topology, global_group=mesh.replica_group)
        groups = (mesh, alone) if name == BUSIEST else (mesh,)
        found[name] = [asdict(measure_traffic(partial(forward_and_backward, run, batch), group)) for group in groups]
    return found


def forward_and_backward(run: Run, batch: ClickBatch) -> None:
    run.model(batch)[0].backward()


def evenly_drawn(batch: ClickBatch, of_feature: Mapping[str, float], seed: int) -> ClickBatch:
    """The batch with as many ids as planned, which use all rows evenly."""
    keys, size = batch.sparse_features.keys(), batch.sparse_features.stride()
    lengths = torch.tensor([int(of_feature.get(key, 1)) for key in keys]).repeat_interleave(size)
    values = torch.randint(ROWS, (int(lengths.sum()),), generator=torch.Generator().manual_seed(seed))
    return replace(batch, sparse_features=KeyedJaggedTensor(keys=keys, values=values, lengths=lengths))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Measured:
    cases = [name for name in CASES if name in collected(request, "name")]
    folder = tmp_path_factory.mktemp("planned")
    for name, plan in PLANS.items():
        plan.save(folder / f"{name}.json")
    return str(folder), run_ranks(measure_on_rank, 4, str(folder), cases)


def by_kind(found: Mapping[str, Load]) -> dict[str, int]:
    """The sums as `TrafficMeter` books them; embeddings inside towers go there and back."""
    across = {name: load.uplink for name, load in found.items()}
    inside = sum(load.inside for name, load in found.items() if name != "replicas") + found["tower_outputs"].inside
    kinds = {
        "ids": across["peer_ids"] + across["tower_ids"],
        "forward": across["peer_outputs"] + across["tower_outputs"],
        "backward": across["peer_gradients"] + across["tower_outputs"],
        "dense": across["dense_weights"] + across["tower_weights"] + across["outside_weights"],
        "inside": inside,
    }
    return {kind: round(number) for kind, number in kinds.items()}


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_a_step_sends_what_was_planned(name: str, measured: Measured) -> None:
    folder, by_rank = measured
    config = config_of(name, folder)
    topology = config.topology.build()
    job = open_job(config)
    planned = by_kind(work_of(job).sent)
    found = by_rank[0][name][0]
    assert any(found.values())
    for kind in ("forward", "backward", "dense"):
        assert found[kind] == planned[kind], kind
    # Sizes come on top: at most 8 numbers of 8 bytes from every rank to each other one of its replica.
    ranks = topology.world_size // topology.num_replicas
    sizes = 8 * 8 * topology.world_size * (ranks - 1)
    # Which ranks the ids of a row-wise table go to is chance: 512 samples, each id to the own rank with 1/2. The sum
    # over 6 tables has a standard deviation of 8 * sqrt(6 * 512 / 4), 222 bytes; five of them. (With replicas it is one
    # table and twice the samples.)
    chance = 1110 if "row_wise" in str(CASES[name]) else 0
    assert 0 <= found["ids"] - planned["ids"] <= sizes
    assert -chance <= found["inside"] - planned["inside"] <= sizes + chance


@pytest.mark.ranks
@pytest.mark.parametrize("name", [BUSIEST])
def test_the_busiest_host_and_rank_send_what_was_planned(name: str, measured: Measured) -> None:
    folder, by_rank = measured
    planned = by_kind(work_of(open_job(config_of(name, folder))).loads)
    ranks = [rank[name][1] for rank in by_rank]
    hosts = [Counter(ranks[first]) + Counter(ranks[first + 1]) for first in (0, 2)]
    # Of two hosts one sends what the other receives, so the busier end of an exchange is the one that sends more.
    for kind in ("forward", "backward", "dense"):
        assert max(host[kind] for host in hosts) == planned[kind], kind
    assert hosts[0]["ids"] != hosts[1]["ids"]
    assert 0 <= max(host["ids"] for host in hosts) - planned["ids"] <= 2 * 8 * 8
    assert 0 <= max(rank["inside"] for rank in ranks) - planned["inside"] <= 8 * 8 * 3
