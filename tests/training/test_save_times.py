"""When checkpoints are saved: by steps, or by rank 0's clock, on all ranks after the same step."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dmt.replicas.sync import ReplicaSync
from dmt.training import save_times
from dmt.training.checkpoints import checkpoints, newest, read_manifest
from dmt.training.config import TrainConfig
from dmt.training.loop import Trainer
from dmt.training.save_times import SaveTimes
from tests.training.test_records import board
from tests.training.test_resume import STEPS, attempt, config, losses


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the module's clock shows."""
    shown = [100.0]
    monkeypatch.setattr(save_times.time, "monotonic", lambda: shown[0])
    return shown


def times(*, leads: bool = True, interval: int = 1, delayed: bool = False, **train: Any) -> SaveTimes:
    return SaveTimes(TrainConfig(**train), interval=interval, leads=leads, changes_results=delayed)


def test_the_clock_of_rank_0_decides(clock: list[float]) -> None:
    leader, other = times(save_minutes=2.0), times(save_minutes=2.0, leads=False)
    clock[0] += 119.0
    assert not leader.asks()
    clock[0] += 1.0
    assert leader.asks()
    assert not other.asks()
    for saves in (leader, other):
        saves.agree(50)
        assert not saves.asks()  # once is enough
        assert saves.steps_left(50) == saves.steps_left(53) + 3 == 4
        assert [saves.is_due(step) for step in (50, 53)] == [False, False]
        assert saves.is_due(54)
        assert not saves.is_due(54)
        assert saves.steps_left(54) > 2**40
    clock[0] += 300.0  # the save itself
    leader.restart()
    clock[0] += 119.0
    assert not leader.asks()  # counted from the end of the save
    clock[0] += 1.0
    assert leader.asks()
    leader.agree(60)
    # At the step itself and after it, where an epoch has ended there, the run does not end for it.
    assert min(leader.steps_left(64), leader.steps_left(65)) > 2**40


def test_steps_decide_where_they_are_asked_for_or_a_save_changes_results(clock: list[float]) -> None:
    by_steps, delayed = times(save_every=5, interval=2), times(delayed=True)
    clock[0] += 1e9
    assert not by_steps.asks()
    assert not delayed.asks()
    assert [step for step in range(1, 13) if by_steps.is_due(step)] == [6, 12]
    assert by_steps.steps_left(7) == 5
    assert delayed.steps_left(1) == 9_999
    # Replicas are averaged every 3 steps, and saved at such a step.
    averaged = times(interval=3)
    averaged.agree(2)
    assert averaged.steps_left(2) == 4


def test_replicas_that_a_step_has_averaged_are_not_averaged_again_to_be_saved() -> None:
    def averaged(step: int, *, delayed: bool = False) -> bool:
        replicas = Mock(spec=ReplicaSync, delays_states=delayed)
        Trainer.sync_replicas(Mock(_replicas=replicas, _step=step, _interval=3))
        return replicas.sync.called

    assert [averaged(step) for step in (5, 6, 7)] == [True, False, True]
    assert averaged(6, delayed=True)


@pytest.mark.ranks
@pytest.mark.parametrize("prefetch", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_saved_by_the_clock_is_the_same_run_and_resumes_bit_for_bit(prefetch: bool, tmp_path: Path) -> None:
    by_clock = {"save_every": None, "save_minutes": 1e-9, "log_every": 2, "eval_every": 5, "prefetch_ids": prefetch}
    pair: dict[str, Any] = {"topology": {"num_towers": 2, "ranks_per_tower": 1}}
    run = config(tmp_path / "clock", train=by_clock, **pair)
    # It is time after every step. Ranks hear of it at steps 2 and 6, and save four steps later.
    assert attempt(run, stop_at=8) is None
    saved = newest(tmp_path / "clock" / "checkpoint")
    assert saved is not None
    assert read_manifest(saved).step == 6
    result = attempt(run)
    assert [path.name for path in checkpoints(tmp_path / "clock" / "checkpoint")] == [
        f"step-{step:08}" for step in (STEPS, 6)
    ]
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
