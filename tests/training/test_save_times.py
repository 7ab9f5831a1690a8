"""When checkpoints are saved: by steps, or by rank 0's clock, on all ranks after the same step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from dmt.replicas.sync import ReplicaSync
from dmt.sptt.mesh import TowerMesh
from dmt.training import agreement as module
from dmt.training.agreement import Agreement, Signals
from dmt.training.checkpoints import checkpoints, newest, read_manifest
from dmt.training.config import TrainConfig
from dmt.training.metrics import StepTimer
from dmt.training.train import _settle_replicas
from tests.ranks import run_ranks
from tests.training.small import small
from tests.training.test_records import board
from tests.training.test_resume import STEPS, attempt, config, losses


def agreement(mesh: TowerMesh, *, interval: int = 1, delayed: bool = False, **train: Any) -> Agreement:
    health: Any = SimpleNamespace(output_range=(0.0, 0.0), report=list, judge=Mock(), check=Mock())
    replicas: Any = SimpleNamespace(interval=interval, delays_states=delayed)
    settings = {"health": health, "timer": StepTimer(), "replicas": replicas, "signals": Signals()}
    return Agreement(TrainConfig(**train), mesh, **settings)


def saves(times: Agreement, steps: range) -> list[int]:
    """The steps after which is saved, where saving takes no time."""
    found = []
    for step in steps:
        if times.is_due(step) and times.meet(step, torch.zeros(())).saves:
            found.append(step)
            times.saved()
    return found


def times_on_rank(rank: int) -> None:
    mesh, shown = TowerMesh(small(topology={"num_towers": 1, "ranks_per_tower": 2}).topology.build()), [100.0]
    with patch.object(module, "time", SimpleNamespace(monotonic=lambda: shown[0])):
        # The clock of rank 0 decides, and counts from the end of the save before.
        by_clock = agreement(mesh, save_minutes=2.0)
        shown[0] += 119.0
        assert saves(by_clock, range(1, 9)) == []
        shown[0] += 1.0 if rank == 0 else -1e9
        assert saves(by_clock, range(9, 19)) == [9]
        shown[0] += 300.0 if rank == 0 else 0.0
        by_clock.saved()
        assert saves(by_clock, range(19, 29)) == []
        # With replicas, where they are averaged anyway.
        averaged = agreement(mesh, interval=3, save_minutes=1e-9)
        shown[0] += 1.0
        assert saves(averaged, range(2, 4)) == [3]
        # Steps decide where they are asked for, or where a save changes what comes after it.
        shown[0] += 1e9
        assert saves(agreement(mesh, save_every=5, interval=2), range(1, 13)) == [6, 12]
        assert saves(agreement(mesh, delayed=True), range(9_998, 10_003)) == [10_000]


@pytest.mark.ranks
def test_ranks_save_after_the_same_steps() -> None:
    run_ranks(times_on_rank, 2, fresh=True)


def test_replicas_that_a_step_has_averaged_are_not_averaged_again_to_be_saved() -> None:
    def averaged(step: int, *, delayed: bool = False) -> bool:
        replicas = Mock(spec=ReplicaSync, delays_states=delayed, interval=3)
        run: Any = SimpleNamespace(replicas=replicas)
        _settle_replicas(run, step)
        return replicas.sync.called

    assert [averaged(step) for step in (5, 6, 7)] == [True, False, True]
    assert averaged(6, delayed=True)


@pytest.mark.ranks
@pytest.mark.parametrize("prefetch", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_saved_by_the_clock_is_the_same_run_and_resumes_bit_for_bit(prefetch: bool, tmp_path: Path) -> None:
    by_clock = {"save_every": None, "save_minutes": 1e-9, "log_every": 2, "eval_every": 5, "prefetch_ids": prefetch}
    pair: dict[str, Any] = {"topology": {"num_towers": 2, "ranks_per_tower": 1}}
    run = config(tmp_path / "clock", train=by_clock, **pair)
    # It is time after every step.
    assert attempt(run, stop_at=8) is None
    saved = newest(tmp_path / "clock" / "checkpoint")
    assert saved is not None
    assert read_manifest(saved).step in (6, 7)
    result = attempt(run)
    assert checkpoints(tmp_path / "clock" / "checkpoint")[0].name == f"step-{STEPS:08}"
    whole = config(tmp_path / "whole", train=by_clock | {"save_every": 1000}, **pair)
    expected = attempt(whole)
    assert losses(run) == losses(whole)
    assert result is not None
    assert expected is not None
    assert (result["steps"], result["eval_loss"]) == (STEPS, expected["eval_loss"])
    # Drawn, but not recorded: no run repeats a time.
    assert [step for step, _ in board(tmp_path / "whole", "train/samples_per_second")] == [6, 8, 10]
    drawn = board(tmp_path / "whole", "bytes_per_sample/forward")
    assert drawn == [(STEPS, pytest.approx(expected["bytes_per_sample"]["forward"]))]


@pytest.mark.ranks
@pytest.mark.parametrize("train", [{"max_steps": 10}, {"max_steps": None, "epochs": 1, "eval_every": 2}])
def test_the_last_step_is_saved_once(train: dict[str, Any], tmp_path: Path) -> None:
    few = {"num_rows": 330, "num_eval_rows": 64}
    pair: dict[str, Any] = {"topology": {"num_towers": 1, "ranks_per_tower": 2}, "synthetic": few}
    assert attempt(config(tmp_path, train={"save_every": 5, **train}, **pair)) is not None
    assert [path.name for path in checkpoints(tmp_path / "checkpoint")] == ["step-00000010", "step-00000005"]
