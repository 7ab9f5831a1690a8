"""Sharding in the trainer's config: what is refused before any process group, and what each choice does to training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.distributed.model_parallel import DistributedModelParallel

from dmt import TowerPlan, TrafficMeter
from dmt.errors import InputError
from dmt.sharding.costs import Hardware
from dmt.sptt.mesh import TowerMesh
from dmt.testing import gather_plain_state, load_plain_state
from dmt.training.build import shard_model
from dmt.training.config import TrainingConfig
from dmt.training.job import open_job
from dmt.training.preflight import resolve
from tests.ranks import run_ranks
from tests.training.small import plain, small, source

MODES = [("dmt-dlrm", "auto"), ("dlrm", "sptt")]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"sharding": {"tables": {"t_C9": "row_wise"}}},
            r"rule for tables 't_C9' matches none of the 6 tables of the model.*Did you mean 't_C",
        ),
        ({"sharding": {"tables": {"x*": "row_wise"}}}, r"'x\*' matches none of the 6 tables"),
        (
            {"sharding": {"tables": {"t_C1": "row_wise"}}, "topology": {"num_towers": 4, "ranks_per_tower": 1}},
            r"Table 't_C1' in tower 0 cannot be row_wise.*one rank",
        ),
        (
            {
                "sharding": {"tables": {"t_C3": "row_wise"}},
                "synthetic": {"rows_per_table": 3},
                "topology": {"num_towers": 1, "ranks_per_tower": 4},
            },
            r"Table 't_C3' in tower 0 cannot be row_wise.*num_embeddings=3 cannot be cut into 4 row shards",
        ),
        ({"sharding": {"memory_gib": 1e-7}}, r"memory_per_rank=107 bytes have; of table 't_C\d' a rank must hold"),
        ({"sharding": {"memory_gib": 5e-7}}, r"tower 0: they need at least .*memory_per_rank"),
        ({"sharding": {"pooling_factors": {"C7": 3.0}}}, r"pooling_factors names the feature 'C7', which no table has"),
        (
            {"sharding": {"scheme": "row_wise"}, "topology": {"num_towers": 4, "ranks_per_tower": 1}},
            r"No table of the 6 can have .* 't_C1': row_wise asked for, but its tower has one rank",
        ),
        (
            {"sharding": {"scheme": "data_parallel", "table_precision": "fp16"}},
            r"No table of the 6 can have .* 't_C1': data_parallel asked for, but its weights are FP16",
        ),
        ({"sharding": {"cluster": "a1000"}}, r"Cluster a1000 is neither a file nor one that is shipped"),
        (
            {"sharding": {"table_precision": "fp16", "scheme": "data_parallel", "tables": {"t_C2": "data_parallel"}}},
            r"Table 't_C2' in tower 1 cannot be data_parallel.*FP16",
        ),
    ],
    ids=[
        "table",
        "pattern",
        "one rank",
        "rows",
        "memory",
        "all memory",
        "feature",
        "scheme",
        "scheme of fp16",
        "cluster",
        "fp16 data-parallel",
    ],
)
def test_what_cannot_be_sharded_is_refused_before_any_rank_starts(sections: dict[str, Any], message: str) -> None:
    config = small(**sections)
    with pytest.raises(InputError, match=message):
        resolve(config, 4)


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        ({"tables": {"t_C1": "table_wise"}}, r"sharding\.tables=.* needs the tower dataflow"),
        ({"unique": True}, r"sharding\.unique=True needs the tower dataflow"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_flat_run_refuses_what_only_towers_have(sharding: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small("dlrm", "flat", sharding={"dataflow": "auto", **sharding})


def test_a_cluster_gives_the_planner_its_rates() -> None:
    hardware = open_job(small(sharding={"cluster": "a100", "memory_gib": 2.0})).sharding.hardware
    assert hardware == Hardware(
        memory_per_rank=2**31, memory_gb_per_s=1300.0, intra_tower_gb_per_s=252.0, collective_latency_us=30.0
    )


def cut(tmp_path: Path, **sharding: Any) -> TrainingConfig:
    """A run whose tower plan cuts the tables of C1 and C2."""
    towers = [["C1[0:4]", "C2[4:8]", "C3", "C4"], ["C2[0:4]", "C1[4:8]", "C5", "C6"]]
    TowerPlan.from_lists(towers, column_splits={"C1": (4, 4), "C2": (4, 4)}).save(tmp_path / "towers.json")
    return small(
        "dlrm", "sptt", towers={"plan": str(tmp_path / "towers.json")}, sharding=sharding | {"dataflow": "sptt"}
    )


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"t_C1": "row_wise"}, {"t_C1[0:4]": "row_wise", "t_C1[4:8]": "row_wise"}),
        ({"t_C?": "row_wise"}, {"t_C1[0:4]": "row_wise", "t_C2[4:8]": "row_wise", "t_C3": "row_wise"}),
        ({"t_C1*": "row_wise"}, {"t_C1[0:4]": "row_wise", "t_C1[4:8]": "row_wise"}),
        # A shard's own rule beats that of its table, which beats a pattern.
        (
            {"t_C1[4:8]": "table_wise", "t_C1": "row_wise", "t_C*": "data_parallel"},
            {"t_C1[0:4]": "row_wise", "t_C1[4:8]": "table_wise", "t_C2[0:4]": "data_parallel", "t_C6": "data_parallel"},
        ),
    ],
    ids=["name", "pattern of all", "pattern of shards too", "order"],
)
def test_what_is_said_of_a_table_that_is_cut_holds_for_its_shards(
    rules: dict[str, str], expected: dict[str, str], tmp_path: Path
) -> None:
    config = cut(tmp_path, tables=rules)
    found = open_job(config).sharding.placements
    assert {name: found[name].scheme for name in expected} == expected


def test_rules_and_factors_of_tables_that_are_cut_are_checked(tmp_path: Path) -> None:
    config = cut(tmp_path, pooling_factors={"C2[4:8]": 5.0, "C1": 3.0, "C2": 2.0, "C3": 1.5})
    found = open_job(config).sharding.workload.pooling_factors
    assert found == {"C1[0:4]": 3.0, "C1[4:8]": 3.0, "C2[0:4]": 2.0, "C2[4:8]": 5.0, "C3": 1.5}
    for sharding, message in (
        ({"tables": {"t_C1": "row_wise", "t_C?": "row_wise", "x": "row_wise"}}, "rule for tables 'x' matches none"),
        ({"pooling_factors": {"C9": 2.0}}, "pooling_factors names the feature 'C9', which no table has"),
    ):
        config = cut(tmp_path, **sharding)
        with pytest.raises(InputError, match=message):
            resolve(config, 4)


def trained(
    rank: int, config: TrainingConfig, start: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], list[float], tuple[float, float]]:
    """Weights and losses after three steps, and the bytes between hosts of the last one."""
    mesh = TowerMesh(config.topology.build())
    data = source(config)
    model: DistributedModelParallel = shard_model(open_job(config), mesh)
    load_plain_state(model, start)
    losses = []
    for batch, _ in zip(data.batches("train", rank=rank, world_size=4, batch_size=16, epoch=0), range(3), strict=False):
        meter = TrafficMeter(host_of=lambda r: r // 2)
        with meter:
            loss, _ = model(batch)
            loss.backward()
        losses.append(loss.item())
    traffic = meter.total(mesh.global_group)
    return gather_plain_state(model), losses, (traffic.forward, traffic.backward)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("arch", "dataflow"), [MODES[0], pytest.param(*MODES[1], marks=pytest.mark.slow), ("dlrm", "flat")]
)
def test_precision_halves_the_bytes_and_keeps_training(arch: str, dataflow: str) -> None:
    """BF16 has 8 significant bits; three steps keep losses within 1 %, and the other direction's bytes as they were."""
    start = dict(plain(small(arch, dataflow)).state_dict())
    whole, exact, (forward, backward) = run_ranks(trained, 4, small(arch, dataflow), start)[0]
    for key, ratios in (("forward_precision", (0.5, 1.0)), ("backward_precision", (1.0, 0.5))):
        config = small(arch, dataflow, sharding={"dataflow": dataflow, key: "bf16"})
        state, losses, sent = run_ranks(trained, 4, config, start)[0]
        assert (sent[0] / forward, sent[1] / backward) == pytest.approx(ratios, abs=0.02)
        assert losses == pytest.approx(exact, rel=0.01)
        # Losses of so few steps may be the same to the bit; weights are not.
        assert any(not torch.equal(state[name], whole[name]) for name in whole), "nothing was rounded"


@pytest.mark.ranks
def test_fp16_tables_train_within_their_rounding() -> None:
    """FP16 weights are within 2^-11 of themselves, and so are the losses of tables whose weights are below 1."""
    start = dict(plain(small()).state_dict())
    _, exact, _ = run_ranks(trained, 4, small(sharding={"scheme": "table_wise"}), start)[0]
    config = small(sharding={"scheme": "table_wise", "table_precision": "fp16"})
    state, losses, _ = run_ranks(trained, 4, config, start)[0]
    tables = [name for name in state if "embedding_bags" in name]
    assert all(torch.equal(state[name], state[name].half().float()) for name in tables)
    assert losses == pytest.approx(exact, rel=2e-3)
