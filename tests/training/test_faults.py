"""Ranks killed with SIGKILL wherever they are: the run goes on from a whole checkpoint and ends with the same bits."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dmt.collectives import gather_objects
from dmt.plan.topology import TowerTopology
from dmt.testing.ranks import RanksFailedError
from dmt.training.checkpoints import checkpoints, newest, verify
from dmt.training.config import TrainingConfig, to_toml
from dmt.training.loop import Trainer
from dmt.training.resume import checkpoint_folder
from tests.ranks import run_ranks
from tests.training.kills import Kill, arm
from tests.training.test_resume import REPLICAS, config, losses, run_on_rank

ROOT = Path(__file__).parent.parent.parent
SAVE_EVERY, KEEP = 2, 2
SYNC_EVERY = 2
STEPS_A_PASS = 60
MANY_STEPS = 300


def killed_run(folder: Path, max_steps: int, *, topology: dict[str, Any] = REPLICAS, **train: Any) -> TrainingConfig:
    settings = {"save_every": SAVE_EVERY, "keep_checkpoints": KEEP, "max_steps": max_steps, "epochs": 9}
    ranks = topology["num_towers"] * topology["ranks_per_tower"] * topology["num_replicas"]
    rows = STEPS_A_PASS * ranks * 16 + 10
    return config(
        folder,
        topology=topology,
        sharding={"scheme": "table_wise"},
        replicas={"sync_every": SYNC_EVERY},
        synthetic={"num_rows": rows, "num_eval_rows": 200},
        train={**settings, **train},
    )


def attempt_on_rank(rank: int, values: dict[str, Any], number: int, kill: Kill | None, log: Path) -> None:
    """What torchrun steps: the first attempt at a run, or the one after so many resteps."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
    pids = dict(enumerate(gather_objects(os.getpid(), dist.group.WORLD)))
    train = Trainer.train

    def noted(self: Trainer, save: Callable[[], None] | None = None) -> Any:
        if rank == 0:
            log.with_suffix(".start").write_text(str(self.position.step))
        return train(self, save)

    Trainer.train = noted  # type: ignore[method-assign]
    if kill is not None:
        arm(kill, log, rank=rank, pids=pids)
    run_on_rank(rank, values, None)


def attempt(run: TrainingConfig, number: int = 0, kill: Kill | None = None) -> int | None:
    """One attempt, which must end as asked for; returns the step it began with, None if it did not come to that."""
    log = Path(f"{run.train.output_dir}-kills", str(number))
    log.parent.mkdir(exist_ok=True)
    ranks = run.topology.build().world_size
    try:
        run_ranks(attempt_on_rank, ranks, run.model_dump(mode="json"), number, kill, log, fresh=True)
    except RanksFailedError:
        if not log.exists():
            raise
    assert log.exists() == (kill is not None), f"the run ended before {kill}"
    start = log.with_suffix(".start")
    return int(start.read_text()) if start.exists() else None


def check_checkpoints(run: TrainingConfig, before: int) -> int:
    """Returns the step of the newest checkpoint, after a look at all of them; ``before``: that at the last look."""
    folder = checkpoint_folder(run)
    whole = [verify(path).step for path in checkpoints(folder)]
    last = max(whole, default=0)
    assert last >= before
    # One more than are kept, before the oldest is deleted.
    assert len(whole) <= KEEP + 1
    assert whole == sorted(set(whole), reverse=True)
    if whole:
        found = newest(folder)
        assert found is not None
        assert verify(found).step == last
    # What must be done again; a save in the background may be one behind.
    lines = losses(run) if (Path(run.train.output_dir) / "metrics.jsonl").exists() else []
    most = SAVE_EVERY * (2 if run.train.async_save else 1)
    assert max((step for step, _ in lines), default=0) - last <= most
    return last


def train_under_kills(run: TrainingConfig, kills: Sequence[Kill]) -> list[int]:
    """Returns the step of the newest checkpoint after each kill."""
    saved, steps = 0, []
    for number, kill in enumerate(kills):
        start = attempt(run, number, kill)
        try:
            assert start in (None, saved)
            saved = check_checkpoints(run, saved)
        except Exception as error:
            error.add_note(f"after attempt {number}, {kill}")
            raise
        steps.append(saved)
    assert attempt(run, len(kills)) == saved
    return steps


def outcome(run: TrainingConfig) -> dict[str, Any]:
    """All that a run has computed: numbers on the way, final metrics, and the bits of the model and its optimizer."""
    result = json.loads((Path(run.train.output_dir) / "result.json").read_text())
    for name in ("seconds", "samples_per_second"):  # of the last attempt
        del result[name]
    whole = newest(checkpoint_folder(run))
    assert whole is not None
    files = verify(whole).files
    tensors = {name: record for name, record in files.items() if name.endswith(".distcp")}
    assert tensors
    return {"losses": losses(run), "result": result, "tensors": tensors}


@pytest.mark.ranks
def test_a_run_whose_ranks_are_killed_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    undisturbed, killed = (killed_run(tmp_path / kind, 18) for kind in ("a", "b"))
    kills = [
        Kill(place="step", rank=2, nth=8, delay_s=0.01),
        Kill(place="mean under way", rank=1, nth=6),
        Kill(place="in a file", rank=0, nth=1500),
        Kill(place="deleting", rank=0, nth=12),
    ]
    attempt(undisturbed)
    steps = train_under_kills(killed, kills)
    assert len(set(steps)) > 2, "the kills came at different times"
    assert outcome(killed) == outcome(undisturbed)


@pytest.mark.slow
@pytest.mark.ranks
def test_torchrun_starts_a_killed_run_again(tmp_path: Path) -> None:
    pair = {"num_towers": 1, "ranks_per_tower": 1, "num_replicas": 2}
    undisturbed, killed = (killed_run(tmp_path / kind, 10, topology=pair) for kind in ("a", "b"))
    attempt(undisturbed)
    path, log = tmp_path / "config.toml", tmp_path / "kills"
    path.write_text(to_toml(killed))
    kill = {"kill": asdict(Kill(place="step", rank=1, nth=9)), "log": str(log)}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    finished = subprocess.run(
        [sys.executable, *torchrun, "-m", "tests.training.kills", str(path)],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1", "KILL": json.dumps(kill)},
        cwd=ROOT,
        check=False,
    )
    printed = finished.stdout + finished.stderr
    assert finished.returncode == 0, printed
    assert log.exists(), printed
    assert re.findall(r"# goes on from .*/(step-\d+):", printed) == ["step-00000004"], printed
    assert outcome(killed) == outcome(undisturbed)


def many_kills(seed: int) -> list[Kill]:
    """At every place of `tests.training.kills`, and some at any moment; in the end those of the last checkpoint."""
    draw = random.Random(seed)

    def kill(place: str, ranks: Sequence[int] = range(4), *, nth: int = 1, within_ms: float = 0.0) -> Kill:
        """``nth``: at most."""
        delay_s = draw.uniform(0, within_ms) / 1000
        return Kill(place=place, rank=draw.choice(ranks), nth=draw.randint(1, nth), delay_s=delay_s)

    writers = TowerTopology(**REPLICAS).sharding_groups()[0]
    on_the_way = [
        *(kill("start", within_ms=3000) for _ in range(4)),
        *(kill("step", nth=20, within_ms=20) for _ in range(3)),
        *(kill("sync", nth=10, within_ms=3) for _ in range(2)),
        *(kill("mean under way", nth=20) for _ in range(2)),
        kill("record", [0], nth=10),
        kill("prepare"),
        kill("restore", within_ms=20),
        kill("restored"),
        kill("save", nth=5, within_ms=3),
        kill("scratch", [0], nth=5),
        kill("files", writers, nth=5, within_ms=10),
        *(kill("in a file", writers, nth=5000) for _ in range(3)),
        kill("files written", [0], nth=5),
        kill("manifest written", [0], nth=5),
        kill("manifest written", [1, 2, 3], nth=5),
        kill("in place", [0], nth=5),
        kill("prune", [0], nth=5),
        kill("given up", [0], nth=5),
        *(kill("deleting", [0], nth=30) for _ in range(2)),
        kill("saved", nth=5),
    ]
    draw.shuffle(on_the_way)
    # Started again at the end, a run saves its last checkpoint in the place of an equal one.
    at_the_end = [kill("evaluation"), kill("put aside", [0]), kill("deleting", [0]), kill("result", [0])]
    return [*on_the_way, *at_the_end]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = killed_run(tmp_path_factory.mktemp("undisturbed") / "run", MANY_STEPS)
    attempt(run)
    return outcome(run)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("settings", [{}, {"async_save": True, "resume": "never"}], ids=["waits", "in the background"])
def test_dozens_of_kills_change_no_bit(settings: dict[str, Any], undisturbed: Any, tmp_path: Path) -> None:
    run, kills = killed_run(tmp_path / "run", MANY_STEPS, **settings), many_kills(seed=len(settings))
    steps = train_under_kills(run, kills)
    assert len(kills) >= 20
    assert steps[-5] < MANY_STEPS, "all but four kills came on the way"
    found = outcome(run)
    for name, expected in undisturbed.items():
        assert found[name] == expected, name
