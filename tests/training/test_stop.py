"""SIGTERM and Ctrl-C: all ranks stop after one step and save it, and the same command goes on bit for bit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn

from dmt.errors import ReplicaMismatchError
from dmt.replicas.sync import ReplicaSync
from dmt.sptt.mesh import TowerMesh
from dmt.training.agreement import SIGNALS, Agreement, Signals
from dmt.training.checkpoints.store import checkpoints, newest, read_manifest
from dmt.training.config import TrainConfig
from dmt.training.metrics import ClickMetrics, StepTimer
from dmt.training.records import read_curves
from dmt.training.resume import Position
from dmt.training.train import _settle_replicas, save
from tests.ranks import on_ranks, run_ranks
from tests.training.small import small
from tests.training.test_resume import attempt, run_on_rank
from tests.training.test_resume import config as saved_config

STEPS = 14


def config(folder: Path, **settings: Any) -> dict[str, Any]:
    """A run of two ranks that would save only at its end."""
    few = {"num_rows": 32 * STEPS, "num_eval_rows": 64}
    train = {"output_dir": str(folder), "log_every": 1, "save_every": 1000} | settings.pop("train", {})
    return small("dmt-dlrm", synthetic=few, train=train, **settings).model_dump(mode="json")


def trains_on_rank(rank: int, values: dict[str, Any], signals: dict[int, tuple[int, int]] | None) -> Any:
    """Trains; ranks are sent signals after steps: ``signals`` has (step, signal) by rank."""
    note, step_of, number = Agreement.note, *(signals or {}).get(rank, (0, 0))

    def signalled(self: Agreement, step: int, logits: Tensor) -> None:
        if step == step_of:
            os.kill(os.getpid(), number)
        note(self, step, logits)

    with patch.object(Agreement, "note", signalled):
        return run_on_rank(rank, values, None)


PAIR = {"topology": {"num_towers": 2, "ranks_per_tower": 1}}
COPIES = {"topology": {"num_towers": 1, "ranks_per_tower": 1, "num_replicas": 2}, "replicas": {"sync_every": 4}}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("settings", "signals", "stops_after"),
    [
        # Both ranks at unlike steps. Replicas are saved where they are averaged anyway.
        (PAIR, {0: (3, signal.SIGTERM), 1: (2, signal.SIGINT)}, {2, 3}),
        pytest.param(COPIES, {0: (5, signal.SIGTERM)}, {8}, marks=pytest.mark.slow),
    ],
    ids=["towers", "replicas"],
)
def test_a_run_that_was_told_to_stop_goes_on_bit_for_bit(
    settings: dict[str, Any], signals: dict[int, tuple[int, int]], stops_after: set[int], tmp_path: Path
) -> None:
    values = config(tmp_path / "stopped", **settings)
    (stopped,) = {result["stopped_at"] for result in run_ranks(trains_on_rank, 2, values, signals, fresh=True)}
    assert stopped in stops_after
    saved = newest(tmp_path / "stopped" / "checkpoint")
    assert saved is not None
    assert read_manifest(saved).step == stopped
    assert not (tmp_path / "stopped" / "result.json").exists()
    result = run_ranks(trains_on_rank, 2, values, None)[0]
    whole = run_ranks(trains_on_rank, 2, config(tmp_path / "whole", **settings), None)[0]
    assert result["steps"] == whole["steps"] == STEPS
    curves = [read_curves(tmp_path / name)["train/loss"] for name in ("stopped", "whole")]
    assert curves[0] == curves[1]
    assert [step for step, _ in curves[0]] == [*range(1, STEPS + 1)]
    assert result["eval_loss"] == whole["eval_loss"]


def evaluates_on_rank(rank: int, values: dict[str, Any]) -> Any:
    """Trains; rank 1 is sent SIGTERM in an evaluation."""
    update = ClickMetrics.update

    def signalled(self: ClickMetrics, *batch: Tensor) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        update(self, *batch)

    with patch.object(ClickMetrics, "update", signalled), patch("dmt.training.train._MEET_EVERY", 1):
        return run_on_rank(rank, values, None)


@pytest.mark.ranks
def test_an_evaluation_ends_with_a_signal_and_not_with_its_last_row(tmp_path: Path) -> None:
    """torchrun kills ranks 30 s after a signal; an evaluation may take minutes, and no step was saved before it."""
    values = config(tmp_path, **PAIR, train={"eval_every": 5})
    assert [result["stopped_at"] for result in run_ranks(evaluates_on_rank, 2, values, fresh=True)] == [5, 5]
    assert [read_manifest(path).step for path in checkpoints(tmp_path / "checkpoint")] == [5]
    assert "eval/auc" not in read_curves(tmp_path)
    assert run_ranks(trains_on_rank, 2, values, None)[0]["steps"] == STEPS
    assert [step for step, _ in read_curves(tmp_path)["eval/auc"]] == [5, 10, STEPS]


def test_a_signal_that_is_too_late_for_a_step_is_not_lost() -> None:
    saved: list[bool] = []

    def signalled_too_late() -> None:
        with Signals():
            signal.raise_signal(signal.SIGINT)
            saved.append(True)

    # Tests that a shell runs in the background ignore SIGINT.
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = [signal.getsignal(number) for number in SIGNALS]
    try:
        with pytest.raises(KeyboardInterrupt):
            signalled_too_late()
        assert [signal.getsignal(number) for number in SIGNALS] == before
    finally:
        signal.signal(signal.SIGINT, ours)
    assert saved


@pytest.mark.parametrize(
    ("is_known", "pause", "stops", "ends"),
    [(False, 0.0, False, False), (False, 9.0, False, True), (False, 9.0, True, False), (True, 0.0, False, False)],
)
def test_a_second_signal_ends_the_process_unless_it_saves(
    is_known: bool, pause: float, stops: bool, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedulers send one signal twice at once, to torchrun, which hands it on, and to the ranks; hosts get it apart.

    ``is_known``: the first was another rank's, and has been agreed on.
    """
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    signals = Signals()
    with contextlib.suppress(KeyboardInterrupt), signals:
        if is_known:
            signals.signal = signal.SIGINT  # as `Agreement.meet` has it from another rank
        else:
            signal.raise_signal(signal.SIGINT)
            signals._came -= pause
        if stops:
            signals.stops = True
        signal.raise_signal(signal.SIGINT)
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    assert codes == ([128 + signal.SIGINT] if ends else [])


# When checkpoints are saved.


def agreement(mesh: TowerMesh, *, interval: int = 1, **train: Any) -> Agreement:
    replicas: Any = SimpleNamespace(interval=interval)
    return Agreement(TrainConfig(**train), nn.Module(), mesh, timer=StepTimer(), replicas=replicas, signals=Signals())


@on_ranks(2, fresh=True)
def test_ranks_save_and_stop_after_the_same_steps(rank: int) -> None:
    mesh = TowerMesh(small(topology={"num_towers": 1, "ranks_per_tower": 2}).topology.build())

    def saves(times: Agreement, steps: range) -> list[int]:
        return [step for step in steps if times.is_due(step) and times.meet(step, torch.zeros(())).saves]

    assert saves(agreement(mesh), range(998, 2003)) == [1000, 2000]
    # With replicas, where they are averaged anyway.
    assert saves(agreement(mesh, save_every=5, interval=2), range(1, 13)) == [6, 12]
    slow = agreement(mesh)
    slow._timer.steps, slow._timer.seconds = 10, 5.0
    slow.meet(1, torch.zeros(()))
    assert [step for step in range(2, 7) if slow.is_due(step)] == [5, 6], "after two seconds, four steps"
    stopped = agreement(mesh, interval=4)
    stopped._signals.signal = signal.SIGTERM
    assert not stopped.meet(5, torch.zeros(())).stops
    assert stopped.is_due(8)
    assert stopped.meet(8, torch.zeros(())).stops


def test_replicas_that_a_step_has_averaged_are_not_averaged_again_to_be_saved() -> None:
    def averaged(step: int, *, delayed: bool = False) -> bool:
        replicas = Mock(spec=ReplicaSync, delays_states=delayed, interval=3)
        run: Any = SimpleNamespace(replicas=replicas)
        _settle_replicas(run, step)
        return replicas.sync.called

    assert [averaged(step) for step in (5, 6, 7)] == [True, False, True]
    assert averaged(6, delayed=True)


def test_replicas_that_differ_are_not_saved() -> None:
    run = Mock()
    run.replicas.check.side_effect = ReplicaMismatchError("momentum1 of rank 2 differs")
    with pytest.raises(ReplicaMismatchError):
        save(run, Position(step=6))
    run.saver.save.assert_not_called()


@pytest.mark.ranks
@pytest.mark.parametrize("train", [{"max_steps": 10}, {"max_steps": None, "epochs": 1, "eval_every": 2}])
def test_the_last_step_is_saved_once(train: dict[str, Any], tmp_path: Path) -> None:
    few = {"num_rows": 330, "num_eval_rows": 64}
    pair: dict[str, Any] = {"topology": {"num_towers": 1, "ranks_per_tower": 2}, "synthetic": few}
    assert attempt(saved_config(tmp_path, train={"save_every": 5, **train}, **pair)) is not None
    assert [path.name for path in checkpoints(tmp_path / "checkpoint")] == ["step-00000010", "step-00000005"]


def start(folder: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """Starts four ranks with torchrun itself, on a run that takes long but for the overrides."""
    settings = ["train.save_every=100000", "train.log_every=5", "data.synthetic.num_rows=1000000", *overrides]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += ["-m", "dmt.training", "demo", f"train.output_dir={folder}", "train.batch_size=32", *settings]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.slow
def test_torchrun_that_is_told_to_stop_leaves_a_checkpoint(tmp_path: Path) -> None:
    torchrun = start(tmp_path)
    while torchrun.poll() is None and not read_steps(tmp_path):
        time.sleep(0.1)
    torchrun.send_signal(signal.SIGTERM)
    assert torchrun.wait(60) != 0
    saved = newest(tmp_path / "checkpoint")
    assert saved is not None
    step = read_manifest(saved).step
    steps = read_steps(tmp_path)
    assert steps[-1] <= step < steps[-1] + 5, "a step is lost"
    last = -(-step // 5) * 5 + 5
    assert start(tmp_path, f"train.max_steps={last}").wait(120) == 0
    assert start(tmp_path / "whole", f"train.max_steps={last}").wait(120) == 0
    assert read_curves(tmp_path)["train/loss"] == read_curves(tmp_path / "whole")["train/loss"]


def read_steps(folder: Path) -> list[int]:
    """Steps whose loss was recorded."""
    if not (folder / "metrics.jsonl").exists():
        return []
    return [step for step, _ in read_curves(folder).get("train/loss", [])]
