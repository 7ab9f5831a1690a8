"""``dmt check`` from the command line: whole runs, exit codes, what is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dmt.plan.topology import TowerTopology
from dmt.plan.towers import TowerPlan
from dmt.sharding.schemes import TablePlacement
from dmt.testing.ranks import RanksFailedError
from dmt.training.build import build_model
from dmt.training.check import CheckReport, Finding, check_run, make_rows
from dmt.training.check.expected import UNEVEN, draw_batch
from dmt.training.check.shrink import CheckedRun, CheckLimits, fewer_ranks, shrink
from dmt.training.config import TrainingConfig, to_toml
from dmt.training.job import Job, open_job, open_unsharded
from tests.ranks import run_ranks
from tests.training.small import dmt, small


@pytest.fixture
def _shared_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check takes the ranks of the other tests instead of starting its own."""
    monkeypatch.setattr("dmt.training.check.run_on_ranks", run_ranks)


def write(config: TrainingConfig, folder: Path) -> str:
    (folder / "run.toml").write_text(to_toml(config))
    return str(folder / "run.toml")


@pytest.mark.ranks
@pytest.mark.usefixtures("_shared_ranks")
def test_towers_in_small_formats_on_fewer_ranks(tmp_path: Path) -> None:
    config = small(
        "dmt-dlrm-products",
        model={"p": 1},
        synthetic={"rows_per_table": 5000},
        topology={"num_towers": 3, "ranks_per_tower": 4},
        sharding={"scheme": "row_wise", "forward_precision": "fp16", "backward_precision": "bf16"},
        optimizer={"warmup_steps": 10},
    )
    options = ["--max-ranks", "4", "--rows", "40", "--json"]
    report = json.loads(dmt("check", write(config, tmp_path), *options).stdout)
    assert (report["agrees"], report["ranks"], report["schemes"]) == (True, 4, {"row_wise": 6})
    assert len(report["rows"]) == 5
    assert {row["verdict"] for row in report["rows"]} == {"ok"}, report["rows"]


@pytest.mark.ranks
@pytest.mark.usefixtures("_shared_ranks")
def test_a_flat_model_with_column_shards_in_towers(tmp_path: Path) -> None:
    plan = TowerPlan.from_lists(
        [["C6[4:12]", "C1", "C3", "C2"], ["C6[0:4]", "C4", "C5", "C6[12:16]"]], column_splits={"C6": (4, 8, 4)}
    )
    plan.save(tmp_path / "towers.json")
    config = small(
        "dcn",
        "sptt",
        model={"embedding_dim": 16},
        towers={"plan": str(tmp_path / "towers.json")},
        sharding={"dataflow": "sptt", "scheme": "column_wise"},
    )
    assert "Everything agrees. 4 ranks" in dmt("check", write(config, tmp_path)).stdout


@pytest.mark.ranks
@pytest.mark.usefixtures("_shared_ranks")
def test_micro_batches_are_checked_without_dropout_and_dense_gradients_sent_in_fp32() -> None:
    train = {"micro_batches": 3, "dense_reduce": "hierarchical_bf16"}
    model = {"factory": "tests.training.small:dropped"}
    sharding = {"scheme": "table_wise", "dataflow": "sptt"}
    report = check_run(small(model=model, sharding=sharding, train=train), CheckLimits(steps=2))
    assert report.agrees
    assert "train.dense_reduce is hierarchical instead of hierarchical_bf16" in report.reduced


@pytest.mark.ranks
def test_torchrecs_own_sharding_of_a_flat_model(tmp_path: Path) -> None:
    run = dmt("check", write(small("dlrm", "flat"), tmp_path), "--json")
    assert {row["verdict"] for row in json.loads(run.stdout)["rows"]} == {"ok"}


def report_of(*findings: Finding) -> CheckReport:
    rows = make_rows(findings, {"logits": "both batches", "shards": "all"})
    return CheckReport(rows=rows, reduced=("checked on fewer",), notes=("N.",), schemes={}, ranks=4, seconds=1.5)


SOUND = Finding(check="logits", item="the logits", difference=1e-7, allowed=1e-6)
SHARDS = Finding(check="shards", item="table t", difference=0, allowed=0)


@pytest.mark.parametrize("difference", [float("nan"), 1e-5, float("inf")])
def test_what_does_not_agree_is_told_and_ends_with_1(difference: float, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Finding(check="logits", item="[tower] 3", difference=difference, allowed=1e-6, place="rank 2, step 1")
    report = report_of(SOUND, wrong, SHARDS)
    assert not report.agrees
    monkeypatch.setattr("dmt.training.check.check_run", lambda *args: report)
    run = dmt("check", "demo", code=1)
    assert "[tower] 3 (rank 2, step 1)" in " ".join(run.stdout.replace("│", " ").split())
    assert "These differ too much: logits." in run.stdout
    as_json = dmt("check", "demo", "--json", code=1)
    assert json.loads(as_json.stdout)["rows"][0]["difference"] == (difference if difference < 1 else None)


def test_a_check_that_compared_nothing_has_failed() -> None:
    rows = report_of(SOUND).rows
    assert (rows[1].verdict, rows[1].where) == ("FAILED", "nothing was compared")


def test_ranks_that_fail_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Mock(side_effect=RanksFailedError("Rank 2 died with exit code -9."))
    monkeypatch.setattr("dmt.training.check.check_run", failed)
    run = dmt("check", "demo", code=1)
    assert (run.stdout, run.stderr) == ("", "FAILED: Rank 2 died with exit code -9.\n")


# What is made smaller, and what stays: schemes, ranks of shards, towers.

TABLES = [f"t_C{i}" for i in range(1, 7)]
SCHEMES: dict[str, Any] = dict(
    zip(TABLES, ["row_wise", "column_wise", "table_wise", "data_parallel", "row_wise", "column_wise"], strict=True)
)


def shrunk(config: TrainingConfig, folder: Path, **limits: Any) -> CheckedRun:
    return shrink(open_job(config), limits=CheckLimits(**limits), folder=folder)


def placements(job: Job) -> dict[str, TablePlacement]:
    assert job.sharding is not None
    return dict(job.sharding.placements)


@pytest.mark.parametrize(
    ("towers", "ranks", "replicas", "most", "left"),
    [(2, 2, 1, 8, (2, 2, 1)), (2, 8, 1, 8, (2, 4, 1)), (8, 8, 1, 8, (4, 2, 1)), (8, 1, 1, 8, (8, 1, 1)),
     (8, 1, 1, 4, (4, 1, 1)), (1, 16, 1, 8, (1, 8, 1)), (3, 8, 1, 8, (3, 2, 1)), (64, 8, 1, 4, (2, 2, 1)),
     (2, 3, 1, 4, (2, 2, 1)), (2, 4, 2, 8, (2, 2, 2)), (2, 4, 8, 16, (2, 4, 2)), (2, 4, 3, 4, (1, 2, 2))],
)  # fmt: skip
def test_ranks_per_tower_go_first_and_both_exchanges_and_two_replicas_stay(
    towers: int, ranks: int, replicas: int, most: int, left: tuple[int, int, int]
) -> None:
    full = {"num_towers": towers, "ranks_per_tower": ranks, "num_replicas": replicas}
    small_one = fewer_ranks(TowerTopology(**full, replica_placement="intra_host"), most)
    assert (small_one.num_towers, small_one.ranks_per_tower, small_one.num_replicas) == left
    assert small_one.replica_placement == "intra_host"


def test_large_tables_keep_their_schemes_and_ranks(tmp_path: Path) -> None:
    synthetic = {"rows_per_table": 20_000}
    config = small("dmt-dlrm", synthetic=synthetic, sharding={"tables": SCHEMES, "memory_gib": 0.01})
    full = open_job(config).sharding.placements
    run = shrunk(config, tmp_path, max_rows=50)
    assert {table.num_embeddings for table in run.job.tables} == {50}
    assert shrunk(small("dmt-dlrm", sharding={"tables": SCHEMES}), tmp_path).reduced == (), "what fits stays"
    assert placements(run.job) == full
    assert {name: placement.scheme for name, placement in full.items()} == SCHEMES


def test_fewer_ranks_keep_schemes_and_several_towers_share_a_mesh_tower(tmp_path: Path) -> None:
    topology = {"num_towers": 6, "ranks_per_tower": 4}
    config = small("dmt-dlrm", topology=topology, sharding={"tables": SCHEMES | {"t_C4": "row_wise"}})
    run = shrunk(config, tmp_path, max_ranks=4)
    assert (run.job.topology.num_towers, run.job.topology.ranks_per_tower) == (2, 2)
    assert run.job.placement == (0, 0, 0, 1, 1, 1)
    assert run.job.towers.num_towers == 6, "every tower keeps its module"
    assert {n: p.scheme for n, p in placements(run.job).items()} == SCHEMES | {"t_C4": "row_wise"}


def test_the_towers_of_a_flat_model_are_joined(tmp_path: Path) -> None:
    config = small("dlrm", "sptt", topology={"num_towers": 3, "ranks_per_tower": 4})
    run = shrunk(config, tmp_path, max_ranks=4)
    assert run.job.placement is None
    assert run.job.towers.to_lists() == [["C1", "C4", "C2", "C5"], ["C3", "C6"]]


def test_a_plan_made_for_larger_tables_still_builds(tmp_path: Path) -> None:
    config = small("dmt-dlrm", synthetic={"rows_per_table": 3000})
    tables = open_unsharded(config).tables
    TowerPlan.from_lists([["C1", "C2"], ["C3", "C4", "C5", "C6"]], tables=tuple(tables)).save(tmp_path / "t.json")
    config = small("dmt-dlrm", synthetic={"rows_per_table": 3000}, towers={"plan": str(tmp_path / "t.json")})
    run = shrunk(config, tmp_path, max_rows=20)
    build_model(run.job, device="meta")


def test_replicas_are_averaged_within_the_few_steps(tmp_path: Path) -> None:
    topology = {"num_replicas": 4, "ranks_per_tower": 1}
    own = {"sync_every": 10, "moment_scale": 3.0}
    run = shrunk(small("dmt-dlrm", topology=topology, replicas=own, optimizer={"warmup_steps": 100}), tmp_path)
    assert (run.config.replicas.sync_every, run.config.replicas.moment_scale) == (2, 2)
    assert len(run.reduced) == 4
    assert run.job.sharding.topology == run.job.topology


def test_batches_have_bags_and_unequal_sizes(tmp_path: Path) -> None:
    run = shrunk(small("dmt-dlrm"), tmp_path)
    uneven = [draw_batch(run, rank, UNEVEN) for rank in range(4)]
    assert len({len(batch.labels) for batch in uneven}) == 3
    lengths = uneven[0].sparse_features.lengths()
    assert (lengths.min(), lengths.max()) == (0, 3)
    assert uneven[0].sparse_features.values().max() < 11
    again = draw_batch(run, 0, UNEVEN)
    assert again.sparse_features.values().equal(uneven[0].sparse_features.values())
