"""What is made smaller, and what stays: schemes, ranks of shards, towers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dmt.errors import InputError
from dmt.plan.topology import TowerTopology
from dmt.plan.towers import TowerPlan
from dmt.sharding.schemes import TablePlacement
from dmt.training.build import build_model
from dmt.training.check.expected import UNEVEN, draw_batch
from dmt.training.check.shrink import CheckedRun, CheckLimits, fewer_ranks, shrink
from dmt.training.config import TrainingConfig
from dmt.training.job import Job, open_data, open_job
from tests.training.small import small

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
    ("towers", "ranks", "most", "left"),
    [(2, 2, 8, (2, 2)), (2, 8, 8, (2, 4)), (8, 8, 8, (4, 2)), (8, 1, 8, (8, 1)), (8, 1, 4, (4, 1)), (1, 16, 8, (1, 8)),
     (3, 8, 8, (3, 2)), (64, 8, 4, (2, 2)), (2, 3, 4, (2, 2))],
)  # fmt: skip
def test_ranks_per_tower_go_first_and_both_exchanges_stay(
    towers: int, ranks: int, most: int, left: tuple[int, int]
) -> None:
    small_one = fewer_ranks(TowerTopology(num_towers=towers, ranks_per_tower=ranks), most)
    assert (small_one.num_towers, small_one.ranks_per_tower) == left


@pytest.mark.parametrize(
    ("replicas", "most", "left"), [(1, 8, (1, 2, 4)), (2, 8, (2, 2, 2)), (8, 16, (2, 2, 4)), (3, 4, (2, 1, 2))]
)
def test_two_replicas_stay_of_several(replicas: int, most: int, left: tuple[int, int, int]) -> None:
    full = TowerTopology(num_towers=2, ranks_per_tower=4, num_replicas=replicas, replica_placement="intra_host")
    small_one = fewer_ranks(full, most)
    assert (small_one.num_replicas, small_one.num_towers, small_one.ranks_per_tower) == left
    assert small_one.replica_placement == "intra_host"


def test_nothing_is_changed_that_fits(tmp_path: Path) -> None:
    config = small("dmt-dlrm", sharding={"tables": SCHEMES})
    run = shrunk(config, tmp_path)
    assert (run.reduced, run.job.placement) == ((), None)
    assert placements(run.job) == open_job(config).sharding.placements


def test_large_tables_keep_their_schemes_and_ranks(tmp_path: Path) -> None:
    synthetic = {"rows_per_table": 20_000}
    config = small("dmt-dlrm", synthetic=synthetic, sharding={"tables": SCHEMES, "memory_gib": 0.01})
    full = open_job(config).sharding.placements
    run = shrunk(config, tmp_path, max_rows=50)
    assert {table.num_embeddings for table in run.job.tables} == {50}
    assert placements(run.job) == full
    assert {name: placement.scheme for name, placement in full.items()} == SCHEMES
    assert run.reduced == ("6 of 6 tables have 50 rows instead of up to 20,000",)


def test_fewer_ranks_keep_schemes_and_several_towers_share_a_mesh_tower(tmp_path: Path) -> None:
    topology = {"num_towers": 6, "ranks_per_tower": 4}
    config = small("dmt-dlrm", topology=topology, sharding={"tables": SCHEMES | {"t_C4": "row_wise"}})
    run = shrunk(config, tmp_path, max_ranks=4)
    assert (run.topology.num_towers, run.topology.ranks_per_tower) == (2, 2)
    assert run.job.placement == (0, 0, 0, 1, 1, 1)
    assert run.job.towers.num_towers == 6, "every tower keeps its module"
    assert {n: p.scheme for n, p in placements(run.job).items()} == SCHEMES | {"t_C4": "row_wise"}
    assert run.reduced[:2] == ("topology.ranks_per_tower is 2 instead of 4", "topology.num_towers is 2 instead of 6")


def test_the_towers_of_a_flat_model_are_joined(tmp_path: Path) -> None:
    config = small("dlrm", "sptt", topology={"num_towers": 3, "ranks_per_tower": 4})
    run = shrunk(config, tmp_path, max_ranks=4)
    assert run.job.placement is None
    assert run.job.towers.to_lists() == [["C1", "C4", "C2", "C5"], ["C3", "C6"]]


def test_a_plan_made_for_larger_tables_still_builds(tmp_path: Path) -> None:
    config = small("dmt-dlrm", synthetic={"rows_per_table": 3000})
    tables = open_data(config).tables
    TowerPlan.from_lists([["C1", "C2"], ["C3", "C4", "C5", "C6"]], tables=tuple(tables)).save(tmp_path / "t.json")
    config = small("dmt-dlrm", synthetic={"rows_per_table": 3000}, towers={"plan": str(tmp_path / "t.json")})
    run = shrunk(config, tmp_path, max_rows=20)
    build_model(run.job, device="meta")


def test_the_memory_limit_is_that_of_the_full_size(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"synthetic": {"rows_per_table": 60_000}, "sharding": {"memory_gib": 0.0005}}
    with pytest.raises(InputError, match=r"tower 0: they need .* memory_per_rank=.* of table 't_C1' a rank must hold"):
        shrunk(small("dmt-dlrm", **sections), tmp_path)


def test_warm_up_is_cut_so_that_full_rates_are_run(tmp_path: Path) -> None:
    run = shrunk(small("dmt-dlrm", optimizer={"warmup_steps": 100}), tmp_path)
    assert run.config.optimizer.warmup_steps == 2
    assert run.reduced == ("optimizer.warmup_steps is 2 instead of 100",)


def test_replicas_are_averaged_within_the_few_steps(tmp_path: Path) -> None:
    topology = {"num_replicas": 4, "ranks_per_tower": 1}
    own = {"sync_every": 10, "moment_scale": 3.0}
    run = shrunk(small("dmt-dlrm", topology=topology, replicas=own, optimizer={"warmup_steps": 0}), tmp_path)
    assert (run.config.replicas.sync_every, run.config.replicas.moment_scale) == (2, 2)
    assert run.reduced == (
        "topology.num_replicas is 2 instead of 4",
        "replicas.sync_every is 2 instead of 10",
        "replicas.moment_scale is 2.0 instead of 3.0",
    )
    assert run.job.sharding.topology == run.topology


def test_batches_have_bags_and_unequal_sizes(tmp_path: Path) -> None:
    run = shrunk(small("dmt-dlrm"), tmp_path)
    uneven = [draw_batch(run, rank, UNEVEN) for rank in range(4)]
    assert len({len(batch.labels) for batch in uneven}) == 3
    lengths = uneven[0].sparse_features.lengths()
    assert (lengths.min(), lengths.max()) == (0, 3)
    assert uneven[0].sparse_features.values().max() < 11
    again = draw_batch(run, 0, UNEVEN)
    assert again.sparse_features.values().equal(uneven[0].sparse_features.values())
