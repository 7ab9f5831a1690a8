"""Towers and sharding in the trainer's config: what is refused before any rank starts, and what each choice does."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dmt import TowerPlan
from dmt.errors import InputError
from dmt.sharding.costs import Hardware
from dmt.sptt.mesh import TowerMesh
from dmt.training import train as run
from dmt.training.affinity import affinity_of_run
from dmt.training.checkpoints.store import load_plain, newest
from dmt.training.config import TrainingConfig, load_config
from dmt.training.job import open_job, open_unsharded
from dmt.training.preflight import checked_model
from tests.ranks import run_ranks
from tests.training.small import plain, small
from tests.training.test_build import FEATURES, SOME_CUT

REST = FEATURES[1:]


def cuts(towers: list[list[str]], *widths: int) -> TowerPlan:
    """A plan that cuts the feature of its first shard."""
    return TowerPlan.from_lists(towers, column_splits={towers[0][0].partition("[")[0]: widths})


def save_plan(folder: Path, plan: TowerPlan) -> dict[str, Any]:
    """The section of a plan."""
    plan.save(folder / "towers.json")
    return {"plan": str(folder / "towers.json")}


# What a plan can have wrong by itself is in tests/dmt/test_plan.py.
PLANS = [
    (TowerPlan.from_lists([["C1", "C2"], ["C3", "C4"], ["C5", "C6"]]), r"has 3 towers, but topology\.num_towers=2"),
    (cuts([["C1[0:6]", *REST], ["C1[6:16]"]], 6, 10), r"'C1' into column shards of \[6, 10\].* multiple of 4"),
    (cuts([["C1[0:4]", *REST], ["C1[4:8]"]], 4, 4), r"'t_C1' has embedding_dim=16, but its column shards are \[4, 4\]"),
    (cuts([["C7[0:4]", *FEATURES], ["C7[4:16]"]], 4, 12), r"'C7\[0:4\]', 'C7\[4:16\]' are in the tower plan but not"),
    (cuts([["C1[0:4]", *REST[1:]], ["C1[4:16]"]], 4, 12), r"Feature 'C2' is in no tower"),
]


@pytest.mark.parametrize("arch", ["dmt-dlrm", "dlrm"])
@pytest.mark.parametrize(("plan", "message"), PLANS, ids=[message[:30] for _, message in PLANS])
def test_a_bad_plan_is_refused(plan: TowerPlan, message: str, arch: str, tmp_path: Path) -> None:
    config = small(arch, "sptt", model={"embedding_dim": 16}, towers=save_plan(tmp_path, plan))
    with pytest.raises(InputError, match=message):
        checked_model(open_job(config))


def test_a_plan_of_other_tables_or_widths_is_refused(tmp_path: Path) -> None:
    tables = open_unsharded(small(model={"embedding_dim": 12})).tables
    other = TowerPlan.from_lists([FEATURES[:3], FEATURES[3:]], tables=tuple(tables))
    with pytest.raises(InputError, match=r"Table 't_C1' has embedding_dim=8 .* was made for 12 "):
        checked_model(open_job(small(towers=save_plan(tmp_path, other))))
    # Shards of two widths in a tower, which models with tower modules do not take.
    sections = {"model": {"embedding_dim": 16}, "towers": save_plan(tmp_path, SOME_CUT)}
    with pytest.raises(InputError, match=r"'tower_0' needs .* equal .*=\d of table 't_C1\["):
        checked_model(open_job(small("dmt-dlrm", "sptt", **sections)))
    job = open_job(small("dlrm", "sptt", synthetic={"num_multi_hot": 2}, **sections))
    assert [table.embedding_dim for table in job.tables] == [16] * 6
    # Batches name the shards, and tables stay whole.
    ids = next(job.data.batches("eval", rank=0, world_size=1, batch_size=8)).split_columns(SOME_CUT.column_splits)
    keys = ["C1[0:12]", "C1[12:16]", "C2", "C3", "C4", "C5", "C6[0:4]", "C6[4:12]", "C6[12:16]"]
    assert ids.sparse_features.keys() == keys
    assert torch.equal(ids.sparse_features["C6[0:4]"].values(), ids.sparse_features["C6[12:16]"].values())


REFUSED: list[tuple[dict[str, dict[str, Any]], str]] = [
    ({"towers": {"plan": "nowhere.json"}}, r"towers\.plan='nowhere\.json': Tower plan nowhere\.json: cannot be read"),
    ({"topology": {"num_towers": 8}}, r"num_towers=8 must be 1 to the number of features or tables, 6"),
    ({"optimizer": {"sparse": "adam"}}, r"optimizer\.sparse='adam': FBGEMM has no CPU kernel"),
    ({"model": {"c": 0, "p": 0}}, r"c \+ p=0 is invalid"),
    ({"sharding": {"memory_gib": 1e-7}}, r"memory_per_rank=107 bytes have.* A rank must hold .* of table 't_C\d'"),
    ({"sharding": {"pooling_factors": {"C7": 3.0}}}, r"pooling_factors names the feature 'C7', which no table has"),
    (
        {"sharding": {"scheme": "data_parallel", "table_precision": "fp16"}},
        r"None of the 6 tables can have .* 't_C1': data_parallel was asked for, but its weights are FP16",
    ),
    ({"model": {"arch": "dlrm"}, "sharding": {"cluster": "a1000"}}, r"Cluster a1000 is neither a file nor"),
]


@pytest.mark.parametrize(("sections", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_what_cannot_be_run_is_refused_before_any_rank_starts(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        checked_model(open_job(small(**sections)))


def test_a_cluster_gives_the_planner_its_rates() -> None:
    hardware = open_job(small(sharding={"cluster": "a100", "memory_gib": 2.0})).sharding.hardware
    assert hardware == Hardware(
        memory_per_rank=2**31, memory_gb_per_s=1300.0, intra_tower_gb_per_s=252.0, collective_latency_us=30.0
    )


def cut(tmp_path: Path, **sharding: Any) -> TrainingConfig:
    """A run whose tower plan cuts the tables of C1 and C2."""
    towers = [["C1[0:4]", "C2[4:8]", "C3", "C4"], ["C2[0:4]", "C1[4:8]", "C5", "C6"]]
    plan = TowerPlan.from_lists(towers, column_splits={"C1": (4, 4), "C2": (4, 4)})
    return small("dlrm", "sptt", towers=save_plan(tmp_path, plan), sharding=sharding | {"dataflow": "sptt"})


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"t_C1": "row_wise"}, {"t_C1[0:4]": "row_wise", "t_C1[4:8]": "row_wise"}),
        ({"t_C?": "row_wise"}, {"t_C1[0:4]": "row_wise", "t_C2[4:8]": "row_wise", "t_C3": "row_wise"}),
        ({"t_C1*": "row_wise"}, {"t_C1[0:4]": "row_wise", "t_C1[4:8]": "row_wise"}),
        # A shard's own rule beats that of its table, which beats a pattern, in any order.
        (
            {"t_C*": "data_parallel", "t_C1": "row_wise", "t_C1[4:8]": "table_wise"},
            {"t_C1[0:4]": "row_wise", "t_C1[4:8]": "table_wise", "t_C2[0:4]": "data_parallel", "t_C6": "data_parallel"},
        ),
    ],
)
def test_what_is_said_of_a_table_that_is_cut_holds_for_its_shards(
    rules: dict[str, str], expected: dict[str, str], tmp_path: Path
) -> None:
    config = cut(tmp_path, tables=rules)
    found = open_job(config).sharding.placements
    assert {name: found[name].scheme for name in expected} == expected


def test_rules_and_factors_of_tables_that_are_cut_are_checked(tmp_path: Path) -> None:
    config = cut(tmp_path, pooling_factors={"C2*": 9.0, "C2[4:8]": 5.0, "?1": 3.0, "C2": 2.0, "C3": 1.5})
    found = open_job(config).sharding.workload.pooling_factors
    assert found == {"C1[0:4]": 3.0, "C1[4:8]": 3.0, "C2[0:4]": 2.0, "C2[4:8]": 5.0, "C3": 1.5}
    with pytest.raises(InputError, match="rule for tables 'x' matches none"):
        checked_model(open_job(cut(tmp_path, tables={"t_C1": "row_wise", "t_C?": "row_wise", "x": "row_wise"})))


# A whole run, as torchrun would start it.


def run_on_rank(rank: int, config: TrainingConfig) -> dict[str, Any]:
    load, reads = TowerPlan.load, []

    def count(path: str | Path) -> TowerPlan:
        reads.append(str(path))
        return load(path)

    made = contextlib.nullcontext((config, TowerMesh(config.topology.build())))
    with (
        patch.object(TowerPlan, "load", count),
        patch.object(run, "process_group", lambda load: made),
        patch.object(run, "in_micro_batches", wraps=run.in_micro_batches) as in_parts,
    ):
        result = run.train(lambda: config)
    assert in_parts.called
    # Once in a run, on every rank: the file may change while the run trains with what it held.
    assert reads == [config.towers.plan]
    return result


@pytest.mark.ranks
def test_a_whole_run_with_cut_tables(tmp_path: Path) -> None:
    config = small(
        "dlrm",
        "sptt",
        model={"embedding_dim": 16},
        synthetic={"num_rows": 640, "num_eval_rows": 150, "num_multi_hot": 1},
        towers=save_plan(tmp_path, SOME_CUT),
        optimizer={"sparse_lr": 0.02},
        train={"eval_every": 7, "micro_batches": 2, "output_dir": str(tmp_path / "run")},
    )
    result = run_ranks(run_on_rank, 4, config)[0]
    assert (result["steps"], result["eval_num_rows"]) == (10, 150)
    assert min(result["bytes_per_sample"].values()) >= 0 < max(result["bytes_per_sample"].values())
    checkpoint = newest(tmp_path / "run" / "checkpoint")
    assert checkpoint is not None
    saved = TowerPlan.load(checkpoint / "towers.json")
    assert saved.column_splits == SOME_CUT.column_splits
    config = load_config(tmp_path / "run" / "config.toml")
    assert len(saved.tables) == len(open_job(config).towers.features)
    model = plain(config)
    load_plain(model, checkpoint)
    # The evaluation of the run is that of its checkpoint in one process.
    batch = next(open_unsharded(config).data.batches("eval", rank=0, world_size=1, batch_size=150))
    assert model(batch.split_columns(saved.column_splits))[0].item() == pytest.approx(result["eval_loss"], rel=1e-5)
    assert result["parameters"] == sum(p.numel() for p in model.parameters())
    assert math.isfinite(result["eval_auc"])
    with pytest.raises(InputError, match="tables are cut into column shards"):
        affinity_of_run(tmp_path / "run", max_rows=640)
