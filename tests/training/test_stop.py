"""SIGTERM and Ctrl-C: all ranks stop after one step and save it, and the same command goes on bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from click.testing import CliRunner

from dmt.training import stop
from dmt.training import train as run
from dmt.training.__main__ import main
from dmt.training.checkpoints import Checkpointer, newest, read_manifest
from dmt.training.config import TrainingConfig
from dmt.training.loop import Trainer
from dmt.training.records import read_curves
from dmt.training.stop import SIGNALS, StopRequest, say_stopped
from tests.ranks import run_ranks
from tests.training.small import small

STEPS = 14


def config(folder: Path, **settings: Any) -> dict[str, Any]:
    """A run of two ranks that would save only at its end."""
    few = {"num_rows": 32 * STEPS, "num_eval_rows": 64}
    train = {"output_dir": str(folder), "log_every": 1, "save_every": 1000}
    return small("dmt-dlrm", synthetic=few, train=train, **settings).model_dump(mode="json")


def trains_on_rank(rank: int, values: dict[str, Any], told_after: list[int] | None) -> dict[str, Any]:
    """Trains; each rank is sent SIGTERM after a step of its own."""
    end_step, made = Trainer._end_step, nullcontext(dist.group.WORLD)

    def told(self: Trainer, *args: Any) -> None:
        if told_after is not None and self.position.step + 1 == told_after[rank]:
            os.kill(os.getpid(), (signal.SIGTERM, signal.SIGINT)[rank])
        end_step(self, *args)

    with patch.object(run, "_process_group", lambda backends: made), patch.object(Trainer, "_end_step", told):
        return run.train(TrainingConfig.model_validate(values))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("settings", "told_after", "stops_after"),
    [
        ({"topology": {"num_towers": 2, "ranks_per_tower": 1}}, [2, 3], {7, 8}),
        # A checkpoint of replicas is saved where they are averaged anyway.
        pytest.param(
            {
                "topology": {"num_towers": 1, "ranks_per_tower": 1, "num_replicas": 2},
                "replicas": {"sync_every": 4},
            },
            [1, 2],
            {8},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["towers", "replicas"],
)
def test_a_run_that_was_told_to_stop_goes_on_bit_for_bit(
    settings: dict[str, Any], told_after: list[int], stops_after: set[int], tmp_path: Path
) -> None:
    values = config(tmp_path / "stopped", **settings)
    (stopped,) = {result["stopped_at"] for result in run_ranks(trains_on_rank, 2, values, told_after, fresh=True)}
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


def told_too_late(saved: list[bool]) -> None:
    with StopRequest(dist.group.WORLD):
        os.kill(os.getpid(), signal.SIGINT)
        saved.append(True)


def told_alone_on_rank(rank: int) -> list[Any]:
    stop._PATIENCE_S = 0.05
    answers: list[Any] = []
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopRequest(dist.group.WORLD) as request:
        assert {signal.getsignal(number) for number in SIGNALS} == {request._note}
    assert [signal.getsignal(number) for number in SIGNALS] == before
    # Too late for a step: what is saved is not ended, and then the signal is not lost.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    saved: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        told_too_late(saved)
    assert saved
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    with StopRequest(dist.group.WORLD) as request:
        answers.append(request.is_due(1))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
            for step in range(2, 9):
                try:
                    answers.append(request.is_due(step))
                except SystemExit as error:
                    answers.append(error.code)
                    break
                time.sleep(0.1)
    return answers


def told_in_the_last_save_on_rank(rank: int, values: dict[str, Any]) -> bool:
    save = Checkpointer.save

    def told(self: Checkpointer, *args: Any, **settings: Any) -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        return save(self, *args, **settings)

    run._process_group = lambda backends: nullcontext(dist.group.WORLD)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    Checkpointer.save = told  # type: ignore[method-assign]
    try:
        run.train(TrainingConfig.model_validate(values))
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.ranks
def test_a_signal_in_the_last_save_does_not_lose_it(tmp_path: Path) -> None:
    values = config(tmp_path, topology={"num_towers": 1, "ranks_per_tower": 1})
    assert run_ranks(told_in_the_last_save_on_rank, 1, values, fresh=True) == [True]
    saved = newest(tmp_path / "checkpoint")
    assert saved is not None
    assert not (tmp_path / "result.json").exists()


@pytest.mark.ranks
def test_a_rank_that_is_told_alone_ends_as_before() -> None:
    assert run_ranks(told_alone_on_rank, 2, fresh=True) == [[False], [*[False] * 4, 128 + signal.SIGINT]]


def test_the_last_line_names_the_checkpoint_and_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = TrainingConfig.model_validate(config(tmp_path)).train
    monkeypatch.setattr(sys, "argv", ["__main__.py", "demo", f"train.output_dir={tmp_path}", "model.arch=dcn x"])
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    say_stopped(run, "Ctrl-C")
    line = "stopped by Ctrl-C: nothing was saved yet. To start again: the same command again\n"
    assert capsys.readouterr().err == line
    (tmp_path / "checkpoint" / "step-00000007").mkdir(parents=True)
    for name, value in (("TORCHELASTIC_RUN_ID", "none"), ("GROUP_WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    say_stopped(run.model_copy(update={"resume": "never"}), "SIGTERM")
    command = f"torchrun --nproc-per-node 4 -m dmt.training demo train.output_dir={tmp_path} 'model.arch=dcn x'"
    assert capsys.readouterr().err == (
        f"stopped by SIGTERM: the newest checkpoint is {tmp_path}/checkpoint/step-00000007. "
        f"To go on: {command} train.resume=auto\n"
    )
    # On several hosts a rank does not know the whole command.
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    say_stopped(run, "SIGTERM")
    assert capsys.readouterr().err.endswith("To go on: the same command again\n")


def test_a_run_that_an_error_ends_says_last_how_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(config: TrainingConfig) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr("dmt.training.train.train", fails)
    monkeypatch.setattr("dmt.training.__main__.quiet_libraries", lambda rank: None)
    found = CliRunner().invoke(main, ["demo", f"train.output_dir={tmp_path}"])
    assert found.exit_code == 1
    assert "RuntimeError: Connection closed by peer\n" in found.stderr
    assert found.stderr.endswith("stopped by an error: nothing was saved yet. To start again: the same command again\n")


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


def told_during_a_long_step_on_rank(rank: int) -> int:
    stop._PATIENCE_S = 0.0  # whatever a step takes, it is longer
    with StopRequest(dist.group.WORLD) as request:
        os.kill(os.getpid(), signal.SIGTERM)
        for step in range(1, 20):
            time.sleep(0.02 * rank)
            dist.barrier()  # as gradients are reduced: no rank is more than a step ahead
            if request.is_due(step):
                return step
    return 0


@pytest.mark.ranks
def test_a_step_longer_than_the_patience_is_waited_for() -> None:
    (stopped,) = set(run_ranks(told_during_a_long_step_on_rank, 3, fresh=True))
    assert 0 < stopped < 19
