"""Faults that are put into a run are found, and named. All in one start of the ranks, a sound run among them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from dmt.plan.topology import TowerTopology
from dmt.replicas.sync import ReplicaSync
from dmt.sptt.dataflow import SPTTModule
from dmt.sptt.mesh import TowerMesh
from dmt.testing.state import local_parts
from dmt.training.check import CheckReport, compare_ranks, on_rank
from dmt.training.check.on_rank import RankReport, check_on_rank
from dmt.training.check.shrink import CheckedRun, CheckLimits, shrink, with_values
from dmt.training.job import Job, open_job
from tests.ranks import run_ranks
from tests.seeds import collected, some_slow
from tests.training.small import small

pytestmark = pytest.mark.ranks

Change = Callable[..., Any]


@contextlib.contextmanager
def patched(owner: Any, name: str, change: Callable[[Change], Change]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, change(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def rows_swapped_on_rank_1(load: Change) -> Change:
    def faulty(model: Any, start: Any) -> None:
        load(model, start)
        if torch.distributed.get_rank() == 1:
            part = next(part for part in local_parts(model) if part.name.endswith("t_C1.weight"))
            part.tensor.copy_(part.tensor.flip(0))

    return faulty


def towers_exchanged(finish: Change) -> Change:
    def faulty(self: SPTTModule, columns_BS: torch.Tensor) -> Any:
        agreed = self._outputs
        assert agreed is not None
        return self.result(columns_BS, [piece for pieces in agreed.pieces[::-1] for piece in pieces])

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


def table_gradient_doubled(compute: Change) -> Change:
    def faulty(self: SPTTModule, *args: Any) -> Any:
        output = compute(self, *args)
        if self.mesh.tower == 1 and output.columns_PO.requires_grad:
            output.columns_PO.register_hook(lambda gradient: 2 * gradient)
        return output

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


# name -> what is patched, the checks that must fail, and what the first of them must name
FAULTS: dict[str, tuple[Any, str, Callable[[Change], Change], set[str], str]] = {
    "rows": (on_rank, "load_plain_state", rows_swapped_on_rank_1, {"logits", "table gradients"}, "table t_C1"),
    "towers": (SPTTModule, "finish", towers_exchanged, {"logits"}, "the logits"),
    "tower gradient": (on_rank, "shard_model", tower_gradient_doubled, {"dense gradients"}, "sparse_arch.towers.1.int"),
    "table gradient": (SPTTModule, "run_towers", table_gradient_doubled, {"table gradients"}, "table t_C"),
    "warm-up": (on_rank, "build_optimizer", warm_up_left_out, {"training"}, "table t_C"),
    "drift": (on_rank, "copy_parts", drift_on_rank_3, {"replicas"}, "table t_C4 (ranks [3] differ from rank 2)"),
}


def table_altered_in_replica_1(sync: Change) -> Change:
    def faulty(self: ReplicaSync) -> None:
        sync(self)
        if self._mesh.replica == 1 and self._mesh.tower == 1:
            next(one for one in self._tensors if one.name.startswith("t_C4")).tensor[0, 0] += 2**-20

    return faulty


def state_altered_in_replica_1(check: Change) -> Change:
    def faulty(self: ReplicaSync) -> None:
        if self._mesh.replica == 1 and self._mesh.tower == 0:
            next(one for one in self._tensors if one.name == "t_C1.momentum1").tensor[0] += 1.0
        check(self)

    return faulty


def states_averaged_at_once(keep: Change) -> Change:
    def faulty(own: Any, model: Any, mesh: TowerMesh) -> Any:
        return keep(own.model_copy(update={"optimizer_state": "now"}), model, mesh)

    return faulty


def moments_not_scaled(shard: Change) -> Change:
    def faulty(job: Job, mesh: TowerMesh) -> Any:
        return shard(replace(job, config=with_values(job.config, "replicas", moment_scale=1.0)), mesh)

    return faulty


# In a run with two replicas, each with batches of its own.
REPLICA_FAULTS: dict[str, tuple[Any, str, Callable[[Change], Change], set[str], str]] = {
    "altered table": (ReplicaSync, "sync", table_altered_in_replica_1, {"replicas"}, "t_C4.weight of rank 3 differs"),
    "altered state": (ReplicaSync, "check", state_altered_in_replica_1, {"replicas"}, "t_C1.momentum1 of rank 2 diff"),
    "no averaging": (ReplicaSync, "_average", lambda _: lambda self: None, {"training", "replicas"}, "table t_C"),
    "states at once": (on_rank, "replica_sync", states_averaged_at_once, {"training"}, "table t_C"),
    "moments": (on_rank, "shard_model", moments_not_scaled, {"training"}, "table t_C"),
    "tower modules": (
        TowerTopology,
        "tower_module_groups",
        lambda _: TowerTopology.tower_groups,
        {"dense gradients"},
        "sparse_arch.towers.",
    ),
}


# These show in different rows, so one run has them all.
TOGETHER = [name for name in FAULTS if name not in ("rows", "towers")]
RUNS = {"sound": [], "rows": ["rows"], "towers": ["towers"], "together": TOGETHER}
# Their rows fail by other faults too.
SLOW = ("altered state", "states at once", "moments")
REPLICA_RUNS = {
    "sound": [],
    "altered table": ["altered table", "tower modules"],
    "altered state": ["altered state"],
    "no averaging": ["no averaging"],
    "states at once": ["states at once"],
    "moments": ["moments"],
}


def with_faults(rank: int, run: CheckedRun, runs: dict[str, list[str]]) -> dict[str, RankReport]:
    reports = {}
    for name, faults in runs.items():
        with contextlib.ExitStack() as stack:
            for fault in faults:
                stack.enter_context(patched(*(FAULTS | REPLICA_FAULTS)[fault][:3]))
            reports[name] = check_on_rank(rank, run)
    return reports


Checked = dict[str, tuple[CheckReport, list[RankReport], CheckedRun]]


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    schemes = {f"t_C{i + 1}": s for i, s in enumerate(["row_wise", "column_wise", "table_wise", "data_parallel"])}
    config = small("dmt-dlrm", sharding={"tables": schemes}, optimizer={"warmup_steps": 2})
    limits = CheckLimits(steps=2, batch_size=8)
    return all_checked(shrink(open_job(config), limits=limits, folder=tmp_path_factory.mktemp("faults")), RUNS)


@pytest.fixture(scope="module")
def checked_replicas(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Checked:
    topology = {"num_replicas": 2, "ranks_per_tower": 1}
    config = small("dmt-dlrm", topology=topology, replicas={"optimizer_state": "delayed"})
    limits, folder = CheckLimits(steps=4, batch_size=8), tmp_path_factory.mktemp("replicas")
    wanted = collected(request, "name")
    runs = {name: faults for name, faults in REPLICA_RUNS.items() if not faults or wanted & {*faults}}
    return all_checked(shrink(open_job(config), limits=limits, folder=folder), runs)


def all_checked(run: CheckedRun, runs: dict[str, list[str]]) -> Checked:
    by_rank = run_ranks(with_faults, 4, run, runs)
    return {
        name: (compare_ranks(run, [reports[name] for reports in by_rank]), [r[name] for r in by_rank], run)
        for name in runs
    }


def test_sound_runs_agree(checked: Checked, checked_replicas: Checked) -> None:
    for runs in (checked, checked_replicas):
        report = runs["sound"][0]
        assert report.agrees, [row for row in report.rows if row.verdict == "FAILED"]
        assert {row.verdict for row in report.rows} == {"ok"}


def check_fault(report: CheckReport, wanted: set[str], named: str) -> None:
    failed = {row.check: row.where for row in report.rows if row.verdict == "FAILED"}
    assert wanted <= set(failed), failed
    assert not report.agrees
    assert any(named in failed[check] for check in wanted), failed


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_fault_is_found_and_named(name: str, checked: Checked) -> None:
    check_fault(checked[name if name in RUNS else "together"][0], *FAULTS[name][3:])


@pytest.mark.parametrize("name", some_slow(REPLICA_FAULTS, SLOW))
def test_a_fault_of_replicas_is_found_and_named(name: str, checked_replicas: Checked) -> None:
    run = next(run for run, faults in REPLICA_RUNS.items() if name in faults)
    check_fault(checked_replicas[run][0], *REPLICA_FAULTS[name][3:])


def test_shards_of_replicas_that_differ_are_found(checked_replicas: Checked) -> None:
    _, reports, run = checked_replicas["sound"]
    checksums = {key: -1 if "t_C2" in key[0] else value for key, value in reports[3].checksums.items()}
    row = compare_ranks(run, [*reports[:3], replace(reports[3], checksums=checksums)]).rows[-1]
    assert (row.check, row.verdict, row.where) == ("replicas", "FAILED", "table t_C2 (ranks [3] differ from rank 1)")
    assert compare_ranks(run, reports).notes == ()
