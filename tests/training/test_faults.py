"""Ranks killed or stopped wherever they are: the run goes on from an intact checkpoint and ends with the same bits."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dmt.collectives import gather_objects
from dmt.testing.ranks import RanksFailedError
from dmt.training import train as training
from dmt.training.agreement import Signals
from dmt.training.checkpoints.store import checkpoints, newest, verify
from dmt.training.config import TrainingConfig, to_toml
from dmt.training.resume import Position, checkpoint_folder
from tests.ranks import run_ranks
from tests.training.test_resume import REPLICAS, config, losses, run_on_rank

# Kills of a rank at a chosen place of a run, from the inside: `arm`. The product has no hooks for it. As a program this
# module is ``dmt.training`` with one of the kills of the environment variable ``KILLS`` in each of torchrun's attempts.

_STOPPED_S = 0.3


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Kills ``rank`` at the ``nth`` time that it, or rank 0 where only that comes there, comes to a place.

    ``signal``: "KILL", "TERM", or "STOP", which leaves the others to wait for it until it is killed.
    """

    place: str
    rank: int
    nth: int = 1
    delay_s: float = 0.0
    signal: str = "KILL"


@dataclass(frozen=True, kw_only=True)
class Place:
    """The beginning or the end of a function's calls; of those that are asked for."""

    owner: Any
    name: str
    at_end: bool = False
    on_rank_0: bool = False
    counts: Callable[..., bool] = lambda *args, **kwargs: True


def _renamed_to(name: str) -> Callable[..., bool]:
    return lambda source, target, **kwargs: re.fullmatch(name, Path(target).name) is not None


def places() -> dict[str, Place]:
    """Where a rank can be killed, besides at its "start"."""
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    from dmt.replicas.sync import ReplicaSync, RunningMean
    from dmt.training import resume
    from dmt.training import train as run
    from dmt.training.checkpoints import state, store
    from dmt.training.records import RunRecord

    leads = partial(Place, on_rank_0=True)
    return {
        "prepare": leads(owner=store, name="prepare_folder"),
        "restore": Place(owner=resume, name="load"),
        "restored": Place(owner=resume, name="load", at_end=True),
        "step": Place(owner=TrainPipelineSparseDist, name="progress"),
        "sync": Place(owner=ReplicaSync, name="_average"),
        "mean under way": Place(owner=RunningMean, name="start", at_end=True),
        "record": leads(owner=RunRecord, name="scalars", at_end=True),
        "save": Place(owner=store.Checkpointer, name="save"),
        "in a file": Place(owner=state.RecordedFile, name="write"),
        "files": Place(owner=store, name="write_tensors"),
        "files written": leads(owner=store.Checkpointer, name="_finish"),
        "manifest written": leads(owner=store, name="commit"),
        "in place": leads(owner=os, name="rename", at_end=True, counts=_renamed_to(r"step-[\d.]+")),
        "prune": leads(owner=store, name="prune"),
        "given up": leads(owner=os, name="rename", at_end=True, counts=_renamed_to(r"\.step-[\d.]+\.partial")),
        # Only shutil.rmtree deletes in open folders.
        "deleting": leads(owner=os, name="unlink", at_end=True, counts=lambda *args, **kwargs: "dir_fd" in kwargs),
        "saved": Place(owner=store.Checkpointer, name="save", at_end=True),
        "evaluation": Place(owner=run, name="evaluate"),
        "result": leads(owner=RunRecord, name="close", at_end=True),
    }


def arm(kill: Kill, log: Path, *, rank: int, pids: Mapping[int, int]) -> None:
    """Prepares for the kill in the process of a rank; that it came is a line in the log."""
    assert shutil.rmtree.avoids_symlink_attacks, "it deletes by other calls than 'deleting' waits for"
    if kill.signal == "TERM":
        # All ranks would save and stop: here the one ends at once.
        Signals.__enter__ = lambda self: self  # type: ignore[method-assign]
    known = places()
    assert all(hasattr(place.owner, place.name) for place in known.values()), "a place has another name by now"
    place = None if kill.place == "start" else known[kill.place]
    if rank != (0 if place is not None and place.on_rank_0 else kill.rank):
        return

    def strike() -> None:
        time.sleep(kill.delay_s)
        with log.open("a") as stream:
            stream.write(json.dumps(asdict(kill)) + "\n")
        if kill.signal == "STOP":
            # From outside: a process that is stopped cannot kill itself.
            later = f"sleep {_STOPPED_S}; kill -KILL {pids[kill.rank]}"
            subprocess.Popen(["/bin/sh", "-c", later], start_new_session=True)
        os.kill(pids[kill.rank], signal.Signals[f"SIG{kill.signal}"])

    def come() -> None:
        if next(times) == kill.nth:
            threading.Thread(target=strike, daemon=True).start() if kill.delay_s else strike()

    times = count(1)
    if place is None:
        come()
    else:
        _wrap(place, come)


def _wrap(place: Place, come: Callable[[], None]) -> None:
    function = getattr(place.owner, place.name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        here = place.counts(*args, **kwargs)
        if here and not place.at_end:
            come()
        result = function(*args, **kwargs)
        if here and place.at_end:
            come()
        return result

    setattr(place.owner, place.name, wrapped)


def main() -> None:
    from dmt.training.__main__ import main as train

    rank, number = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    asked = json.loads(os.environ["KILLS"])
    for kill in asked["kills"][number : number + 1]:
        arm(Kill(**kill), Path(asked["log"]), rank=rank, pids={rank: os.getpid()})
    train()


ROOT = Path(__file__).parent.parent.parent
SAVE_EVERY, KEEP = 2, 2
STEPS_A_PASS, MANY_STEPS = 60, 300
PAIR = {"num_towers": 1, "ranks_per_tower": 1, "num_replicas": 2}
IN_REPLICAS: dict[str, Any] = {
    "topology": REPLICAS,
    "sharding": {"scheme": "table_wise"},
    "replicas": {"sync_every": 2},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": IN_REPLICAS,
    "replicas, saved in the background": {**IN_REPLICAS, "train": {"async_save": True}},
    "replicas averaged later": IN_REPLICAS
    | {"replicas": {"sync_every": 2, "optimizer_state": "delayed"}, "train": {"async_save": True}},
    "towers in micro-batches": {"train": {"micro_batches": 2, "dense_reduce": "hierarchical"}},
    "flat": {"arch": "dlrm", "train": {"async_save": True}},
}


def killed_run(folder: Path, max_steps: int, **sections: Any) -> TrainingConfig:
    train = {"save_every": SAVE_EVERY, "keep_checkpoints": KEEP, "max_steps": max_steps, "epochs": 9}
    sections["train"] = train | sections.get("train", {})
    ranks = 2 if sections.get("topology") == PAIR else 4
    rows = STEPS_A_PASS * ranks * 16 + 10
    return config(folder, synthetic={"num_rows": rows, "num_eval_rows": 200}, **sections)


def attempt_on_rank(rank: int, values: dict[str, Any], number: int, kill: Kill | None, log: Path) -> None:
    """What torchrun starts: the first attempt at a run, or the one after so many restarts."""
    os.environ["TORCHELASTIC_RUN_ID"], os.environ["TORCHELASTIC_RESTART_COUNT"] = str(log.parent), str(number)
    pids = dict(enumerate(gather_objects(os.getpid(), dist.group.WORLD)))
    if rank == 0:
        log.with_suffix(".pids").write_text(json.dumps(list(pids.values())))
    train_steps = training.train_steps

    def noted(run: training.Run, at: Position, signals: Any) -> Any:
        if rank == 0:
            log.with_suffix(".start").write_text(str(at.step))
        return train_steps(run, at, signals)

    training.train_steps = noted
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
    assert not [pid for pid in json.loads(log.with_suffix(".pids").read_text()) if is_alive(pid)]
    start = log.with_suffix(".start")
    return int(start.read_text()) if start.exists() else None


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def check_checkpoints(run: TrainingConfig, before: int) -> int:
    """Returns the step of the newest checkpoint, after a look at all of them; ``before``: that at the last look."""
    folder = checkpoint_folder(run)
    whole = [verify(path).step for path in checkpoints(folder)]
    last = max(whole, default=0)
    assert last >= before
    # One more than are kept, before the oldest is deleted.
    assert len(whole) <= KEEP + 1
    assert whole == sorted(whole, reverse=True)
    if whole:
        found = newest(folder)
        assert found is not None
        assert verify(found).step == last
    # What must be done again; a save in the background may be one behind.
    curves = losses(run) if (Path(run.train.output_dir) / "metrics.jsonl").exists() else {}
    most = SAVE_EVERY * (2 if run.train.async_save else 1)
    assert max((step for step, _ in curves.get("train/loss", [])), default=0) - last <= most
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
    of_the_last_attempt = ("seconds", "samples_per_second", "samples_per_second_per_rank", "lookups", "peak_memory")
    for name in of_the_last_attempt:
        del result[name]
    whole = newest(checkpoint_folder(run))
    assert whole is not None
    files = verify(whole).files
    tensors = {name: record for name, record in files.items() if name.endswith(".distcp")}
    assert tensors
    return {"losses": losses(run), "result": result, "tensors": tensors}


@pytest.fixture(scope="module")
def undisturbed_pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = killed_run(tmp_path_factory.mktemp("undisturbed") / "run", 10, **IN_REPLICAS | {"topology": PAIR})
    attempt(run)
    return outcome(run)


@pytest.mark.ranks
def test_a_run_whose_ranks_are_killed_ends_like_an_undisturbed_one(undisturbed_pair: Any, tmp_path: Path) -> None:
    run = killed_run(tmp_path / "run", 10, **IN_REPLICAS | {"topology": PAIR})
    kills = [
        Kill(place="mean under way", rank=1, nth=3, signal="STOP"),
        Kill(place="in a file", rank=0, nth=500),
        Kill(place="deleting", rank=0, nth=4, signal="TERM"),
    ]
    steps = train_under_kills(run, kills)
    assert len(set(steps)) > 1, "the kills came at different times"
    assert outcome(run) == undisturbed_pair


@pytest.mark.slow
@pytest.mark.ranks
def test_torchrun_starts_a_killed_run_again(undisturbed_pair: Any, tmp_path: Path) -> None:
    run = killed_run(tmp_path / "run", 10, **IN_REPLICAS | {"topology": PAIR})
    path, log = tmp_path / "config.toml", tmp_path / "kills"
    path.write_text(to_toml(run))
    kills = [asdict(Kill(place="start", rank=1)), asdict(Kill(place="step", rank=1, nth=6))]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    finished = subprocess.run(
        [sys.executable, *torchrun, "-m", "tests.training.test_faults", str(path)],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1", "KILLS": json.dumps({"kills": kills, "log": str(log)})},
        cwd=ROOT,
        check=False,
    )
    printed = finished.stdout + finished.stderr
    assert finished.returncode == 0, printed
    assert [json.loads(line) for line in log.read_text().splitlines()] == kills, printed
    assert re.findall(r"# resumes from .*/(step-\d+):", printed) == ["step-00000004"], printed
    assert outcome(run) == undisturbed_pair


def many_kills(run: TrainingConfig, seed: int) -> list[Kill]:
    """20 kills, at places of `PLACES` and at any moment; in the end those of the last checkpoint."""
    draw = random.Random(seed)
    topology = run.topology.build()

    def kill(place: str, ranks: Sequence[int] = range(4), *, nth: int = 1, within_ms: float = 0.0) -> Kill:
        """``nth``: at most."""
        delay_s = draw.uniform(0, within_ms) / 1000
        kind = draw.choice(("KILL", "KILL", "TERM", "STOP"))
        return Kill(place=place, rank=draw.choice(ranks), nth=draw.randint(1, nth), delay_s=delay_s, signal=kind)

    writers = topology.sharding_groups()[0]
    averagings = [*(kill("sync", nth=10, within_ms=3) for _ in range(2)), kill("mean under way", nth=20)]
    on_the_way = [
        *(averagings if topology.num_replicas > 1 else []),
        *(kill("start", within_ms=3000) for _ in range(4)),
        *(kill("step", nth=20, within_ms=20) for _ in range(3)),
        kill("record", [0], nth=10),
        kill("prepare"),
        kill("restore", within_ms=20),
        kill("restored"),
        kill("save", nth=5, within_ms=3),
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
    on_the_way = draw.sample(on_the_way, 16)
    # Started again at the end, a run is evaluated from its last checkpoint once more.
    at_the_end = [kill("evaluation"), kill("restored"), kill("evaluation"), kill("result", [0])]
    return [*on_the_way, *at_the_end]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_hundred_kills_change_no_bit(name: str, tmp_path: Path) -> None:
    undisturbed, run = (killed_run(tmp_path / kind, MANY_STEPS, **LAYOUTS[name]) for kind in ("undisturbed", "run"))
    attempt(undisturbed)
    kills = many_kills(run, seed=int(os.environ.get("KILLS_SEED", "0")) + list(LAYOUTS).index(name))
    steps = train_under_kills(run, kills)
    assert len(kills) == 100 // len(LAYOUTS)
    assert steps[-5] < MANY_STEPS, "all but four kills came on the way"
    found = outcome(run)
    for key, expected in outcome(undisturbed).items():
        assert found[key] == expected, key


if __name__ == "__main__":
    main()
