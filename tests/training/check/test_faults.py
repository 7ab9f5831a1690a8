"""Faults that are put into a run are found, and named. All in one start of the ranks, a sound run among them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dmt.plan.topology import TowerTopology
from dmt.replicas.sync import ReplicaSync
from dmt.testing.state import local_parts
from dmt.training.check import CheckReport, compare_ranks, on_rank
from dmt.training.check.on_rank import RankReport, check_on_rank
from dmt.training.check.shrink import CheckedRun, CheckLimits, shrink
from dmt.training.job import open_job
from tests.ranks import run_ranks
from tests.training.small import small

pytestmark = pytest.mark.ranks

Change = Callable[..., Any]


def rows_swapped_on_rank_1(load: Change) -> Change:
    def faulty(model: Any, start: Any) -> None:
        load(model, start)
        if torch.distributed.get_rank() == 1:
            part = next(part for part in local_parts(model) if part.name.endswith("t_C1.weight"))
            part.tensor.copy_(part.tensor.flip(0))

    return faulty


def tower_gradient_doubled(shard: Change) -> Change:
    def faulty(*args: Any, **options: Any) -> Any:
        def double(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(2)

        model = shard(*args, **options)
        for name, parameter in model.named_parameters():
            if ".towers.1.interaction." in name:
                parameter.register_post_accumulate_grad_hook(double)
        return model

    return faulty


def warm_up_left_out(build: Change) -> Change:
    def faulty(config: Any, model: Any) -> Any:
        return build(config.model_copy(update={"warmup_steps": 0}), model)

    return faulty


def drift_on_rank_3(copy: Change) -> Change:
    def faulty(model: Any) -> Any:
        parts = copy(model)
        if torch.distributed.get_rank() == 3:
            next(part for part in parts if part.name.endswith("t_C4.weight")).tensor[0, 0] += 2**-20
        return parts

    return faulty


def table_altered_in_replica_1(sync: Change) -> Change:
    def faulty(self: ReplicaSync) -> None:
        sync(self)
        if self._mesh.replica == 1 and self._mesh.tower == 1:
            next(one for one in self._tensors if one.name.startswith("t_C4")).tensor[0, 0] += 2**-20

    return faulty


# name -> what is patched, the checks that must fail, and what the first of them must name
FAULTS: dict[str, tuple[Any, str, Callable[[Change], Change], set[str], str]] = {
    "rows": (on_rank, "load_plain_state", rows_swapped_on_rank_1, {"logits", "table gradients"}, "table t_C1"),
    "tower gradient": (on_rank, "shard_model", tower_gradient_doubled, {"dense gradients"}, "sparse_arch.towers.1.int"),
    "warm-up": (on_rank, "build_optimizer", warm_up_left_out, {"training"}, "table t_C"),
    "drift": (on_rank, "copy_parts", drift_on_rank_3, {"replicas"}, "table t_C4 (ranks [3] differ from rank 2)"),
    # In replicas, each with batches of its own.
    "altered table": (ReplicaSync, "sync", table_altered_in_replica_1, {"replicas"}, "t_C4.weight of rank 3 differs"),
    "no averaging": (ReplicaSync, "_average", lambda _: lambda self: None, {"training", "replicas"}, "table t_C"),
    "tower modules": (
        TowerTopology,
        "tower_module_groups",
        lambda _: TowerTopology.tower_groups,
        {"dense gradients"},
        "sparse_arch.towers.",
    ),
}
# Faults that show in different rows are in one run.
RUNS = {"sound": [], "rows": ["rows"], "others": ["tower gradient", "warm-up", "drift"]}
REPLICA_RUNS = {"sound replicas": [], "copies": ["altered table", "tower modules"], "no averaging": ["no averaging"]}


def with_faults(rank: int, run: CheckedRun, runs: dict[str, list[str]]) -> dict[str, RankReport]:
    reports = {}
    for name, faults in runs.items():
        with contextlib.ExitStack() as stack:
            for owner, function, change, *_ in (FAULTS[fault] for fault in faults):
                stack.enter_context(patch.object(owner, function, change(getattr(owner, function))))
            reports[name] = check_on_rank(rank, run)
    return reports


Checked = dict[str, tuple[CheckReport, list[RankReport], CheckedRun]]


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    schemes = {f"t_C{i + 1}": s for i, s in enumerate(["row_wise", "column_wise", "table_wise", "data_parallel"])}
    one = small("dmt-dlrm", sharding={"tables": schemes}, optimizer={"warmup_steps": 2})
    topology = {"num_replicas": 2, "ranks_per_tower": 1}
    two = small("dmt-dlrm", topology=topology, replicas={"optimizer_state": "delayed"})
    found = {}
    for config, steps, runs in ((one, 2, RUNS), (two, 4, REPLICA_RUNS)):
        limits = CheckLimits(steps=steps, batch_size=8)
        run = shrink(open_job(config), limits=limits, folder=tmp_path_factory.mktemp("faults"))
        by_rank = run_ranks(with_faults, 4, run, runs)
        for name in runs:
            reports = [of_rank[name] for of_rank in by_rank]
            found[name] = compare_ranks(run, reports), reports, run
    return found


@pytest.mark.parametrize("name", ["sound", "sound replicas"])
def test_sound_runs_agree(name: str, checked: Checked) -> None:
    report = checked[name][0]
    assert report.agrees, [row for row in report.rows if row.verdict == "FAILED"]
    assert {row.verdict for row in report.rows} == {"ok"}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named(name: str, checked: Checked) -> None:
    (run,) = [run for run, faults in (RUNS | REPLICA_RUNS).items() if name in faults]
    report, (_, _, _, wanted, named) = checked[run][0], FAULTS[name]
    failed = {row.check: row.where for row in report.rows if row.verdict == "FAILED"}
    assert wanted <= set(failed), failed
    assert not report.agrees
    assert any(named in failed[check] for check in wanted), failed


def test_shards_of_replicas_that_differ_are_found(checked: Checked) -> None:
    _, reports, run = checked["sound replicas"]
    checksums = {key: -1 if "t_C2" in key[0] else value for key, value in reports[3].checksums.items()}
    row = compare_ranks(run, [*reports[:3], replace(reports[3], checksums=checksums)]).rows[-1]
    assert (row.check, row.verdict, row.where) == ("replicas", "FAILED", "table t_C2 (ranks [3] differ from rank 1)")
    assert compare_ranks(run, reports).notes == ()
