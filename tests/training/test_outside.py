"""Features outside towers in the trainer: which ones, what is refused, and whole runs of every command."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dmt.errors import InputError
from dmt.plan.tables import TableSpec
from dmt.plan.topology import TowerTopology
from dmt.plan.towers import TowerPlan
from dmt.sharding.costs import StepWorkload
from dmt.sharding.outside import CrossingCosts, choose_outside
from dmt.simulator.cluster import load_cluster
from dmt.training.build import build_model, count_model
from dmt.training.check import check_run
from dmt.training.check.shrink import CheckLimits
from dmt.training.job import Job, crossing_costs, make_job
from dmt.training.step_prediction import alternatives, predict_step, work_of
from tests.ranks import run_ranks
from tests.training.small import small
from tests.training.test_resume import config, trained

TWO_BY_TWO = TowerTopology(num_towers=2, ranks_per_tower=2)


def table(name: str, rows: int, dim: int = 8) -> TableSpec:
    return TableSpec(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=(f"f_{name}",))


def test_bytes_of_a_table_by_hand() -> None:
    # 4 ranks of 10 samples: those of 2 ranks go to the other host. Each host sends the sum of its gradients.
    costs = CrossingCosts(topology=TWO_BY_TWO, workload=StepWorkload(batch_size=10, pooling_factors={"f_a": 3.0}))
    found = costs.of(table("a", 100))
    assert found.outside == 2 * 4 * 100 * 8
    assert found.in_tower == 2 * 10 * (8 * (3 + 1) + 2 * 4 * 8)
    halved = CrossingCosts(topology=TWO_BY_TWO, workload=StepWorkload(batch_size=10), sent=4, number_bytes=(2, 2))
    assert halved.of(table("a", 100)).in_tower == 2 * 10 * (8 * 2 + 2 * 2 * 4)
    # Of equal inputs one is sent, at most one for each row.
    unique = CrossingCosts(topology=TWO_BY_TWO, workload=StepWorkload(batch_size=10), is_unique=True)
    sizes = [unique.of(table("a", rows)).in_tower / (2 * (8 * 2 + 2 * 4 * 8)) for rows in (3, 100)]
    assert sizes == [3, 10]
    counted = replace(unique, distinct={"f_a": 2.5, "f_b": 40.0})
    # As counted, also for a column shard; no more than samples and rows.
    found_rows = [counted.rows(*of) for of in (("f_a[0:4]", table("a", 100)), ("f_b", table("b", 9)))]
    assert found_rows == [2.5, 9]
    of_bags = StepWorkload(batch_size=10, pooling_factors={"f_a": 1.5})
    assert replace(unique, workload=of_bags).rows("f_a", table("a", 3)) == 10, "bags of several ids are unlike"
    one_host = TowerTopology(num_towers=2, ranks_per_tower=1, ranks_per_host=2)
    assert CrossingCosts(topology=one_host, workload=StepWorkload()).of(table("a", 1)) == (0, 0)


def test_tables_that_save_most_go_first_and_every_tower_keeps_one() -> None:
    costs = CrossingCosts(topology=TWO_BY_TWO, workload=StepWorkload(batch_size=512))
    by_tower = [[table("a", 5), table("b", 50), table("c", 10**6)], [table("d", 6), table("e", 7)]]
    assert choose_outside(by_tower, costs) == ["a", "d", "b"]
    assert choose_outside(by_tower, costs, candidates=["b", "c"]) == ["b"]
    # Weights and gradients of 8 numbers a row and a state: 340 bytes for a, 408 for d; and for each 512 embeddings with
    # their gradients. Together a tenth of the memory.
    room = 10 * (340 + 408 + 2 * 512 * 8 * 4 * 2)
    assert choose_outside(by_tower, costs, memory_per_rank=room) == ["a", "d"]
    assert choose_outside(by_tower, costs, memory_per_rank=room - 1) == ["a"]


def test_balanced_towers_count_distinct_inputs_only_where_those_are_sent() -> None:
    balanced: dict[str, Any] = {"towers": {"plan": "balanced"}, "train": {"batch_size": 64}}
    unique = job_of("dlrm", "none", sharding={"unique": True}, **copy.deepcopy(balanced))
    # Of C3, C4 and C6 64 rows, of the others 20, 6 and 4.
    assert plan_of(unique).to_lists() == [["C3", "C6"], ["C4", "C2", "C5", "C1"]]
    tight = job_of("dlrm", "none", sharding={"unique": True, "memory_gib": 1e-4}, **copy.deepcopy(balanced))
    assert plan_of(tight).to_lists() == [["C3", "C6", "C5", "C1"], ["C4", "C2"]]
    for arch, sharding in (("dlrm", {}), ("dmt-dlrm", {"unique": True})):
        even = job_of(arch, "none", sharding=sharding, **copy.deepcopy(balanced))
        assert plan_of(even).to_lists() == [["C1", "C3", "C5"], ["C2", "C4", "C6"]]


# Without data: 6 tables, of which C1, C2 and C5 pay.
TABLES = [
    TableSpec(name=f"t_{name}", num_embeddings=rows, embedding_dim=8, feature_names=(name,))
    for name, rows in {"C1": 4, "C2": 20, "C3": 400, "C4": 4000, "C5": 6, "C6": 90}.items()
]


def job_of(arch: str = "dmt-dlrm", outside: Any = "auto", tables: Any = TABLES, **sections: Any) -> Job:
    towers = {"outside": outside, **sections.pop("towers", {})}
    return make_job(small(arch, "sptt", towers=towers, **sections), tables, 3)


def plan_of(job: Job) -> TowerPlan:
    assert job.towers is not None
    return job.towers


def test_the_planner_moves_what_saves_bytes_and_says_how_many() -> None:
    job = job_of()
    # Those that stay are dealt to the towers anew, so that these are even.
    assert (plan_of(job).to_lists(), plan_of(job).outside) == ([["C3", "C6"], ["C4"]], ("C1", "C2", "C5"))
    assert {table.name: table.embedding_dim for table in job.tables} == {
        **dict.fromkeys(("t_C3", "t_C4", "t_C6"), 8),
        **dict.fromkeys(("t_C1", "t_C2", "t_C5"), 4),  # tower_dim
    }
    assert job.sharding is not None
    assert re.findall(r"\d\S* k?[bB]\w*", job.sharding.reasons["t_C2"]) == ["640 bytes", "1.54 kB"]
    flat = job_of("dlrm")
    assert plan_of(flat).outside == ("C1", "C2", "C5")
    assert {table.embedding_dim for table in flat.tables} == {8}
    # A tower of DCN sends as much without a feature: its ids are all that is saved.
    assert plan_of(job_of("dmt-dcn")).outside == ("C1", "C5")
    assert plan_of(job_of(sharding={"tables": {"t_C2": "row_wise"}})).outside == ("C1", "C5")
    halves = [replace(table, data_type="FP16") for table in TABLES]
    assert plan_of(job_of(sharding={"table_precision": "fp16"}, tables=halves)).outside == ()
    assert plan_of(job_of(topology={"ranks_per_host": 4})).outside == ()
    assert plan_of(job_of(model={"tower_dim": 6})).outside == ()
    few = [TABLES[i] for i in (0, 1, 4, 5)]
    for gib, fitting in ((1e-5, ("C1",)), (None, ("C1", "C2"))):
        assert plan_of(job_of(tables=few, sharding={"memory_gib": gib})).outside == fitting
    half = {"forward_precision": "fp16", "backward_precision": "fp16"}
    for is_unique, expected in ((False, ("C1", "C5")), (True, ())):
        sharding = {**half, "dataflow": "sptt", "unique": is_unique}
        assert plan_of(job_of("dlrm", topology={"ranks_per_tower": 1}, sharding=sharding)).outside == expected


def test_a_plan_with_features_outside_is_left_as_it_is(tmp_path: Path) -> None:
    TowerPlan.from_lists([["C1", "C2"], ["C3", "C4", "C5"]], outside=("C6",), tables=tuple(TABLES)).save(
        tmp_path / "towers.json"
    )
    towers = {"plan": str(tmp_path / "towers.json")}
    assert plan_of(job_of(towers=towers)).outside == ("C6",)
    moved = plan_of(job_of(outside=["C6", "C2"], towers=towers))
    assert (moved.to_lists(), moved.outside) == ([["C1"], ["C3", "C4", "C5"]], ("C6", "C2"))
    assert [table.name for table in moved.tables] == ["t_C1", "t_C3", "t_C4", "t_C5", "t_C6"]


SHARED = [replace(TABLES[0], feature_names=("C1", "C7")), *TABLES[1:]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outside": ["C9"]}, r"towers.outside=.* feature 'C9': no table has it"),
        ({"outside": ["C1"], "tables": SHARED}, r"Table 't_C1' is shared by .*'C1' outside, 'C7' in tower_0"),
        ({"outside": ["C4"], "sharding": {"memory_gib": 1e-4}}, "outside towers need .* for table 't_C4', but memory"),
        ({"outside": ["C4"], "model": {"embedding_dims": {"?4": 8}}}, "'t_C4' outside towers has embedding_dim=8, but"),
        ({"outside": ["C4"], "model": {"tower_dim": 6}}, r"outside=.*: tables .* model\.tower_dim=6 columns, but FBG"),
    ],
)  # fmt: skip
def test_what_cannot_be_outside_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_model(job_of(**options), device="meta")


def test_a_plan_that_cuts_the_table_is_named(tmp_path: Path) -> None:
    cut = TowerPlan.from_lists([["C1[0:4]", "C2"], ["C1[4:8]", "C3"]], column_splits={"C1": (4, 4)})
    cut.save(tmp_path / "towers.json")
    towers = {"plan": str(tmp_path / "towers.json")}
    with pytest.raises(InputError, match=r"'C1': the plan cuts its table\. Remove the feature from the list\.$"):
        job_of("dlrm", outside=["C1"], tables=TABLES[:3], towers=towers)
    assert plan_of(job_of("dlrm", tables=TABLES[:3], towers=towers)).outside == ("C2",)


@pytest.mark.parametrize("arch", ["dmt-dlrm", "dmt-dcn"])
def test_they_are_counted_as_they_are_built(arch: str) -> None:
    job = job_of(arch, outside=["C2", "C6"])
    counted = count_model(job)
    assert counted.parameters == sum(weight.numel() for weight in build_model(job, device="meta").parameters())
    # What enters the towers of two features each over what leaves them, D = N / 2.
    assert counted.compression_ratio == (2.0 if arch == "dmt-dlrm" else 4.0)


@pytest.mark.ranks
def test_a_flat_model_is_the_same_with_other_tables_outside(tmp_path: Path) -> None:
    for outside, steps in ((["C6", "C2"], 3), (["C4"], 5)):
        towers = {"outside": outside, "plan": "balanced"}
        run = config(tmp_path, arch="dlrm", dataflow="sptt", topology={"ranks_per_tower": 1}, towers=towers)
        trained(run, steps)


@pytest.mark.ranks
@pytest.mark.parametrize(("arch", "towers"), [("dmt-dcn", 3), ("dcn", 2)])
def test_a_check_agrees_with_features_outside(arch: str, towers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmt.training.check.run_on_ranks", run_ranks)
    topology = {"num_towers": towers, "ranks_per_tower": 2}
    config = small(arch, "sptt", topology=topology, towers={"outside": ["C6", "C2"]})
    report = check_run(config, CheckLimits(max_rows=20, max_ranks=4, batch_size=4, steps=2))
    assert report.agrees, report.rows


def test_what_if_counts_what_they_save_and_has_alternatives_without() -> None:
    size = {"topology": {"ranks_per_tower": 8}}
    job, without = (job_of(outside=features, **size) for features in (["C1", "C3"], "none"))
    costs = crossing_costs(job.config, None)
    saved = sum(costs.of(table).saved for table in job.tables if table.name in ("t_C1", "t_C3"))
    work, other = work_of(job), work_of(without)
    across = [sum(load.uplink for load in one.sent.values()) for one in (work, other)]
    assert job.sharding is not None
    assert work.rank_bytes[0] == max(rank.needed for rank in job.sharding.ranks)
    # Their vectors are as many and as wide as those that towers send for them.
    assert (work.model.dense_bytes, work.output_bytes) == (other.model.dense_bytes, other.output_bytes)
    assert across[1] - across[0] == pytest.approx(saved)
    assert predict_step(job, load_cluster("a100")).compression_ratio == 2.0
    listed = job_of(outside=["C1"], tables=[replace(table, embedding_dim=16) for table in TABLES], **size)
    for one, ratios in ((job, {1.0, 2.0, 4.0}), (listed, {1.0, 2.0, 4.0, 16.0})):
        ways, left_out = alternatives(one, load_cluster("a100"))
        assert ({way.compression_ratio for way in ways}, left_out) == (ratios, [])
