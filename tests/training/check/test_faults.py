"""Faults that are put into a run are found, and named. All in one start of the ranks, a sound run among them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from dmt.sptt import SPTTModule
from dmt.training.build import open_data
from dmt.training.check import on_rank
from dmt.training.check.check import compare_ranks
from dmt.training.check.findings import CheckReport
from dmt.training.check.local import local_parts
from dmt.training.check.on_rank import RankReport, check_on_rank
from dmt.training.check.ranks import Say, run_on_ranks
from dmt.training.check.shrink import CheckedRun, CheckLimits, shrink
from tests.training.small import NUM_DENSE, small

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


def towers_exchanged(init: Change) -> Change:
    def faulty(self: SPTTModule, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self._column_order = self._column_order[::-1]

    return faulty


def tower_gradient_doubled(shard: Change) -> Change:
    def faulty(*args: Any) -> Any:
        def double(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(2)

        model = shard(*args)
        for name, parameter in model.named_parameters():
            if ".towers.1.interaction." in name:
                parameter.register_post_accumulate_grad_hook(double)
        return model

    return faulty


def table_gradient_doubled(compute: Change) -> Change:
    def faulty(self: SPTTModule, *args: Any) -> torch.Tensor:
        output = compute(self, *args)
        if self.mesh.tower == 1 and output.requires_grad:
            output.register_hook(lambda gradient: 2 * gradient)
        return output

    return faulty


def warm_up_left_out(build: Change) -> Change:
    def faulty(config: Any, model: Any) -> Any:
        return build(config.model_copy(update={"warmup_steps": 0}), model)

    return faulty


def old_batch_in_pipeline(progress: Change) -> Change:
    def faulty(self: Any, batches: Any) -> Any:
        self.kept = getattr(self, "kept", None) or next(batches)
        return progress(self, iter([self.kept] * 9))

    return faulty


def drift_on_rank_3(copy: Change) -> Change:
    def faulty(model: Any) -> Any:
        parts = copy(model)
        if torch.distributed.get_rank() == 3:
            next(part for part in parts if part.name.endswith("t_C4.weight")).tensor[0, 0] += 2**-20
        return parts

    return faulty


def another_checkpoint(save: Change) -> Change:
    def faulty(model: Any, folder: Path) -> None:
        part = next((part for part in local_parts(model) if part.name.endswith("t_C3.weight")), None)
        if part is not None:
            part.tensor[1, 2] += 1.0
        save(model, folder)

    return faulty


# name -> what is patched, the checks that must fail, and what the first of them must name
FAULTS: dict[str, tuple[Any, str, Callable[[Change], Change], set[str], str]] = {
    "rows": (on_rank, "load_start", rows_swapped_on_rank_1, {"embeddings", "bags"}, "table of C1"),
    "towers": (SPTTModule, "__init__", towers_exchanged, {"tower outputs", "logits", "reload"}, "output of tower 0"),
    "tower gradient": (on_rank, "shard_model", tower_gradient_doubled, {"tower gradients"}, "sparse_arch.towers.1.int"),
    "table gradient": (SPTTModule, "compute", table_gradient_doubled, {"table gradients"}, "table t_C"),
    "warm-up": (on_rank, "build_optimizer", warm_up_left_out, {"dense weights", "table weights", "losses"}, "step 1"),
    "pipeline": (TrainPipelineSparseDist, "progress", old_batch_in_pipeline, {"pipeline"}, "the logits"),
    "drift": (on_rank, "copy_parts", drift_on_rank_3, {"replicas"}, "table t_C4 (ranks [3] differ from rank 2)"),
    "checkpoint": (on_rank, "save_model", another_checkpoint, {"checkpoint"}, "table t_C3"),
}


# These show in different rows, so one run has them all.
TOGETHER = [name for name in FAULTS if name not in ("rows", "towers")]
RUNS = {"sound": [], "rows": ["rows"], "towers": ["towers"], "together": TOGETHER}


def with_faults(rank: int, say: Say, run: CheckedRun) -> dict[str, RankReport]:
    reports = {}
    for name, faults in RUNS.items():
        with contextlib.ExitStack() as stack:
            for fault in faults:
                stack.enter_context(patched(*FAULTS[fault][:3]))
            reports[name] = check_on_rank(rank, say, run)
    return reports


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[CheckReport, list[RankReport], CheckedRun]]:
    schemes = {f"t_C{i + 1}": s for i, s in enumerate(["row_wise", "column_wise", "table_wise", "data_wise"])}
    config = small("dmt-dlrm", sharding={"tables": schemes}, optimizer={"warmup_steps": 2})
    run = shrink(
        config,
        open_data(config).tables,
        NUM_DENSE,
        limits=CheckLimits(steps=2, batch_size=8),
        folder=tmp_path_factory.mktemp("faults"),
    )
    by_rank = run_on_ranks(with_faults, 4, run, timeout_s=60)
    return {
        name: (compare_ranks(run, [reports[name] for reports in by_rank]), [r[name] for r in by_rank], run)
        for name in RUNS
    }


def test_a_sound_run_agrees(checked: dict[str, Any]) -> None:
    report = checked["sound"][0]
    assert report.agrees, [row for row in report.rows if row.verdict == "FAILED"]
    assert [row.check for row in report.rows if row.verdict == "skipped"] == ["id routes"]
    assert all(row.count for row in report.rows if row.verdict == "ok")


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_fault_is_found_and_named(name: str, checked: dict[str, Any]) -> None:
    report = checked[name if name in RUNS else "together"][0]
    *_, wanted, named = FAULTS[name]
    failed = {row.check: row.where for row in report.rows if row.verdict == "FAILED"}
    assert wanted <= set(failed), failed
    assert not report.agrees
    assert any(named in failed[check] for check in wanted), failed


def test_a_lost_and_a_doubled_shard_are_found(checked: dict[str, Any]) -> None:
    _, reports, run = checked["sound"]
    table = next(shard for shard in reports[0].shards if "t_C1" in shard[0])
    without = [RankReport(**{**vars(reports[0]), "shards": ()}), *reports[1:]]
    doubled = [RankReport(**{**vars(reports[0]), "shards": (*reports[0].shards, table)}), *reports[1:]]
    nowhere = [RankReport(**{**vars(r), "shards": tuple(s for s in r.shards if "t_C1" not in s[0])}) for r in reports]
    for faulty, place in ((without, "are not held once"), (doubled, "are not held once"), (nowhere, "on no rank")):
        row = compare_ranks(run, faulty).rows[-1]
        assert (row.check, row.verdict) == ("shards", "FAILED")
        assert "table t_C1" in row.where
        assert place in row.where or len(row.where.split("table")) > 2, row.where
