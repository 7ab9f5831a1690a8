"""Faults that are put into a run are found, and named. All in one start of the ranks, a sound run among them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from dmt.mesh import TowerMesh
from dmt.precision import ExchangePrecision
from dmt.sptt import SPTTModule
from dmt.training.build import open_data
from dmt.training.check import on_rank
from dmt.training.check.check import compare_ranks
from dmt.training.check.findings import CheckReport, Finding, make_rows
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


def without_codecs(direction: str) -> Callable[[Change], Change]:
    def change(codecs: Change) -> Change:
        def faulty(self: ExchangePrecision, *args: Any) -> Any:
            return codecs(replace(self, **{direction: "fp32"}, loss_scale=None), *args)

        return faulty

    return change


def gradients_scaled(read: Change) -> Change:
    def faulty(self: Any, model: Any) -> Any:
        return [g if "dense" in on_rank._kind(g.name) else g._replace(ours=1.2 * g.ours) for g in read(self, model)]

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


# In a run with INT8 both ways, where the largest difference tells neither of them.
FORMAT_FAULTS: dict[str, tuple[Any, str, Callable[[Change], Change], set[str], str]] = {
    "no forward format": (ExchangePrecision, "codecs", without_codecs("forward"), {"formats"}, "(int8 forward)"),
    "no backward format": (ExchangePrecision, "codecs", without_codecs("backward"), {"formats"}, "(int8 backward)"),
    "scale": (on_rank._Checks, "_gradients", gradients_scaled, {"gradient scales"}, "tower gradients, table gradients"),
}


# These show in different rows, so one run has them all.
TOGETHER = [name for name in FAULTS if name not in ("rows", "towers")]
RUNS = {"sound": [], "rows": ["rows"], "towers": ["towers"], "together": TOGETHER}


def forward_and_backward(rank: int, say: Say, run: CheckedRun) -> dict[str, list[Finding]]:
    found = {}
    for name, (owner, attribute, change, *_) in (
        {"sound": (on_rank, "_kind", lambda kind: kind)} | FORMAT_FAULTS
    ).items():
        checks = on_rank._Checks(rank, run, TowerMesh(run.topology))
        with patched(owner, attribute, change):
            checks.forward_and_gradients()
        found[name] = checks.findings
    return found


def test_unused_formats_and_scales_are_found_in_int8(tmp_path: Path) -> None:
    config = small("dmt-dlrm", sharding={"forward_precision": "int8", "backward_precision": "int8"})
    tables = open_data(config).tables
    run = shrink(config, tables, NUM_DENSE, limits=CheckLimits(), folder=tmp_path)
    by_rank = run_on_ranks(forward_and_backward, 4, run, timeout_s=60)
    failed = {}
    for name in by_rank[0]:
        findings = [finding for found in by_rank for finding in found[name]]
        rows = make_rows(findings, {finding.check: "" for finding in findings}, {})
        failed[name] = {row.check: row.where for row in rows if row.verdict == "FAILED"}
    assert failed["sound"] == {}
    for name, (*_, wanted, named) in FORMAT_FAULTS.items():
        assert wanted <= set(failed[name]), (name, failed[name])
        items = {f.item for found in by_rank for f in found[name] if f.check in wanted and not f.agrees}
        if name == "scale":
            assert items == set(named.split(", "))
        else:
            assert items == {f"the exchange did not use its format {named}"}


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
    assert [row.check for row in report.rows if row.verdict == "skipped"] == ["formats", "id routes"]
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
