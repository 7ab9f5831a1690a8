"""Kills a rank at a chosen place of a run, from the inside: `arm`. The product has no hooks for it.

As a program it is ``dmt.training`` with one of the kills of the environment variable ``KILLS`` in each of torchrun's
attempts, while there are any.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from dmt.training.agreement import Signals

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
        "prepare": leads(owner=store, name="prepare"),
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
    place = places().get(kill.place)
    assert place is not None or kill.place == "start", f"no such place: {kill.place}"
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


if __name__ == "__main__":
    main()
