"""Runs with micro-batches and the hierarchical dense reduce: losses of plain runs, resuming, what is refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from dmt.errors import InputError
from dmt.sptt.mesh import TowerMesh
from dmt.training.check import check_run
from dmt.training.check.shrink import CheckLimits
from dmt.training.config import TrainingConfig, load_config
from dmt.training.preflight import resolve
from dmt.training.records import RunRecord
from dmt.training.train import train_job
from tests.ranks import run_ranks
from tests.training.small import small

STEPS, SAVE_EVERY = 6, 3
# Adam and AdaGrad divide by a gradient's size: they would hide a wrong divisor, and show rounding where terms cancel.
SGD = {"dense": "sgd", "dense_lr": 0.1, "sparse": "sgd", "sparse_lr": 1.0}
# Losses near 0.7 have units of 6e-8. Sums in another order err by a few of them, step by step; 1.2e-7 was seen.
# A lost micro-batch's gradients, or a mean twice as large, move losses by 6e-3 and more from the second step on.
CLOSE = 1e-6
BOTH = {"micro_batches": 3, "dense_reduce": "hierarchical"}


class Interrupted(Exception):
    pass


def config(folder: Path, arch: str = "dmt-dlrm", dataflow: str = "auto", **sections: dict[str, Any]) -> TrainingConfig:
    train = {"max_steps": STEPS, "log_every": 1, "output_dir": str(folder)}
    sections["train"] = train | sections.get("train", {})
    sections.setdefault("synthetic", {"num_rows": 400, "num_eval_rows": 150})
    return small(arch, dataflow, **sections)


def runs_on_rank(rank: int, runs: list[tuple[dict[str, Any], int | None]]) -> list[dict[str, Any] | None]:
    """Runs one after another, each of which may be interrupted at a step: their results, None of an interrupted one."""
    results: list[dict[str, Any] | None] = []
    log = RunRecord.scalars
    for values, stop_at in runs:

        def scalars(self: RunRecord, step: int, numbers: dict[str, float], stop_at: int | None = stop_at) -> None:
            log(self, step, numbers)
            if step == stop_at:
                raise Interrupted

        run = TrainingConfig.model_validate(values)
        results.append(None)
        with patch.object(RunRecord, "scalars", scalars), contextlib.suppress(Interrupted):
            results[-1] = train_job(resolve(run, run.topology.build().world_size), TowerMesh(run.topology.build()))
    return results


def attempt(*runs: TrainingConfig, stop_at: dict[int, int] | None = None) -> list[dict[str, Any]]:
    """The results of runs one after another on the same ranks; ``stop_at`` has the last step of those interrupted."""
    steps = stop_at or {}
    values = [(run.model_dump(mode="json"), steps.get(i)) for i, run in enumerate(runs)]
    found: list[dict[str, Any]] = run_ranks(runs_on_rank, runs[0].topology.build().world_size, values)[0]
    return found


def losses(run: TrainingConfig) -> list[dict[str, float]]:
    return [json.loads(line) for line in (Path(run.train.output_dir) / "metrics.jsonl").read_text().splitlines()]


def check_close(found: TrainingConfig, expected: TrainingConfig) -> None:
    ours, plain = losses(found), losses(expected)
    assert len(plain) == STEPS + 1
    assert [line.keys() for line in ours] == [line.keys() for line in plain]
    for line, other in zip(ours[:STEPS], plain, strict=False):
        assert line["train/loss"] == pytest.approx(other["train/loss"], abs=CLOSE, rel=0), line["step"]
    assert ours[-1]["eval/ne"] == pytest.approx(plain[-1]["eval/ne"], abs=CLOSE, rel=0)


@pytest.mark.ranks
def test_losses_are_those_of_a_plain_run(tmp_path: Path) -> None:
    def run(name: str, **train: Any) -> TrainingConfig:
        train |= {"batch_size": 4}
        rows = {"num_rows": 400, "num_eval_rows": 40}
        return config(tmp_path / name, optimizer=SGD, sharding={"scheme": "table_wise"}, synthetic=rows, train=train)

    plain, ahead = run("plain"), run("ahead", **BOTH)
    # More micro-batches than samples leave some empty. Evaluation ends with a smaller batch.
    many = run("many", prefetch_ids=False, **{**BOTH, "micro_batches": 6})
    results = attempt(plain, ahead, many)
    for other in (ahead, many):
        check_close(other, plain)
    assert losses(ahead) != losses(plain), "the options did nothing"
    # 4 ranks on 2 hosts: a ring sends 3 times the dense gradients between hosts, and host by host they are sent twice.
    dense = [result["bytes_per_sample"]["dense"] for result in results]
    assert dense[0] > dense[1] == dense[2]


@pytest.mark.ranks
def test_a_check_trains_with_them_and_sends_dense_gradients_in_fp32(tmp_path: Path) -> None:
    train = {**BOTH, "dense_reduce": "hierarchical_bf16"}
    run = config(tmp_path, sharding={"scheme": "table_wise"}, train=train)
    report = check_run(run, CheckLimits(steps=2))
    assert report.agrees
    assert "train.dense_reduce is hierarchical instead of hierarchical_bf16" in report.reduced
    assert not [row for row in report.rows if row.verdict == "skipped"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.arch=dcn", "train.micro_batches=2"],
            r"train\.micro_batches=2 needs the tower dataflow, but .*'flat'.* Set it to 'sptt', or leave micro_batches",
        ),
        (["train.micro_batches=0"], r"train\.micro_batches: .* greater than or equal to 1 \(got 0\)"),
        (
            ["topology.num_towers=1", "train.dense_reduce=hierarchical"],
            r"dense_reduce='hierarchical' .* one host of \d ranks\. Set topology\.ranks_per_host to the",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_config("demo", ["model.arch=dmt-dlrm", *overrides])
