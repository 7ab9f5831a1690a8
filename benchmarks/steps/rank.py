"""Runs a rank of the step benchmark: builds all contenders, checks them, and times them in turns.

    torchrun --nproc-per-node 4 -m benchmarks.steps.rank spec.json

The spec is JSON, written by `benchmarks.train_step`: ``setting`` (fields of `Setting`), ``contenders`` (names), ``out``
(file to which rank 0 writes the run after every round) and ``deadline`` (seconds since 1970 after which no round
begins, or null).
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor

from benchmarks.report import write_json
from benchmarks.steps.build import Built, Meshes, build_contender
from benchmarks.steps.check import PlainModel, check_batches, check_losses, load_weights, losses_of, plain_weights
from benchmarks.steps.contenders import Contender, named
from benchmarks.steps.inputs import Batches, random_batch
from benchmarks.steps.measure import Turn, run_turn
from benchmarks.steps.setting import Setting
from dmt.collectives import gather_objects
from dmt.errors import InputError
from dmt.traffic import TrafficMeter
from dmt.training.data.batch import ClickBatch

__all__ = ["Record", "build_checked", "main", "run_job", "step_records", "weight_bytes"]

_TIMEOUT = timedelta(minutes=10)
_POOL = 3
_CLOCKS = ("seconds", "cpu", "main_cpu", "no_core", "waiting")


def main(spec_path: str) -> None:
    """Runs the job that a spec file describes; collective."""
    spec = json.loads(Path(spec_path).read_text())
    setting = Setting(**spec["setting"])
    # One machine may emulate several hosts, and torchrun counts all its ranks as local.
    os.environ["LOCAL_WORLD_SIZE"] = str(setting.ranks_per_host)
    # TorchRec warns about every data-parallel table: that it is not cached and, at the root, that it has no spec.
    for name in ("torchrec", None):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    if dist.get_world_size() != setting.world_size:
        raise InputError(f"The job has {dist.get_world_size()} ranks. Start {setting.world_size}, as its spec says.")
    try:
        contenders = [named(name) for name in spec["contenders"]]
        run_job(setting, contenders, Path(spec["out"]), deadline=spec.get("deadline"))
        # Leaving while a peer still communicates sometimes aborts the peer.
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_job(setting: Setting, contenders: Sequence[Contender], out: Path, *, deadline: float | None = None) -> None:
    """Builds, checks and times all contenders, and counts their bytes; rank 0 writes the run to ``out``. Collective.

    Bytes are counted in the first turn of each contender, so that a job that is stopped has them.

    Args:
        setting: sizes of the job.
        contenders: the contenders to compare.
        out: the JSON file.
        deadline: seconds since 1970 after which no round begins; None: no limit.
    """
    world, rank = _world(), dist.get_rank()
    record = Record(setting, contenders, out) if rank == 0 else None
    pool = [random_batch(setting, setting.batch_size, i, rank) for i in range(_POOL)]
    everything = build_checked(setting, contenders, pool)
    for built in everything:
        weights = gather_objects(weight_bytes(built), world)
        if record is not None:
            record.add(built.contender.name, weight_bytes=weights)
    first = -setting.warm_up_rounds
    for turn in range(first, setting.rounds):
        if deadline is not None and gather_objects(time.time(), world)[0] > deadline:
            break
        order = list(everything)
        random.Random(f"{setting.seed} {turn}").shuffle(order)
        for built in order:
            name = built.contender.name
            meter = TrafficMeter(host_of=setting.host) if turn == first else None
            seen = run_turn(built, setting.steps_per_turn, with_memory=turn == 0, meter=meter)
            turns = gather_objects(seen, world)
            traffic = None if meter is None else asdict(meter.total(world))
            if record is not None and traffic is not None:
                record.add(name, traffic=traffic)
            if record is not None and turn >= 0:
                record.add_turn(name, turns)
        if record is not None:
            record.write()
            print(f"# round {turn + 1} of {setting.rounds}", flush=True)
    for built in everything:
        built.finish()
    if record is not None:
        record.write()


def build_checked(setting: Setting, contenders: Sequence[Contender], pool: Sequence[ClickBatch]) -> list[Built]:
    """Builds all contenders, and checks that each computes what its plain model does. Collective.

    Args:
        setting: sizes of the job.
        contenders: the contenders to build.
        pool: this rank's batches after the check.

    Raises:
        RuntimeError: a contender's loss is wrong; raised on every rank, with the name of the contender.
    """
    world, meshes = _world(), Meshes()
    everything: dict[str, Built] = {}
    # One plain model at a time, because with its gradients it is as large as all ranks' tables together.
    by_model = sorted(contenders, key=lambda contender: contender.plain_model)
    for _, group in groupby(by_model, key=lambda contender: contender.plain_model):
        same = list(group)
        weights = plain_weights(same[0], setting)
        plain = PlainModel(same[0], setting, weights) if dist.get_rank() == 0 else None
        for contender in same:
            is_unique = contender.family == "flat" and contender.unique
            batches = Batches(check_batches(setting, dist.get_rank()), pool, unique=is_unique)
            built = everything[contender.name] = build_contender(contender, setting, meshes, batches)
            load_weights(built, weights)
            found = gather_objects(losses_of(built), world)
            wrong = "" if plain is None else check_losses(contender, found, plain.losses(built))
            if wrong := gather_objects(wrong, world)[0]:
                raise RuntimeError(wrong)
    return [everything[contender.name] for contender in contenders]


def weight_bytes(built: Built) -> int:
    """Returns the bytes of all weights that this rank holds."""
    size = 0
    for value in built.model.state_dict().values():
        parts = [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]
        size += sum(part.nbytes for part in parts)
    return size


class Record:
    """The record of a run, kept by rank 0.

    Args:
        setting: sizes of the job.
        contenders: the contenders, in the order of the results.
        path: the JSON file.
    """

    def __init__(self, setting: Setting, contenders: Sequence[Contender], path: Path) -> None:
        self._setting = setting
        self._path = path
        self._results: dict[str, dict[str, Any]] = {c.name: _contender_record(c) for c in contenders}

    def add(self, name: str, **values: Any) -> None:
        """Sets values of a contender in the record."""
        self._results[name].update(values)

    def add_turn(self, name: str, turns: Sequence[Turn]) -> None:
        """Adds the steps of a contender's turn; ``turns`` has the measurements of each rank."""
        result = self._results[name]
        result["steps"] += step_records(turns, self._setting)
        peaks = [turn.peak_bytes for turn in turns if turn.peak_bytes is not None]
        if peaks:
            weights = result["weight_bytes"]
            result["peak_memory_bytes"] = [peak + size for peak, size in zip(peaks, weights, strict=True)]

    def write(self) -> None:
        """Writes the record so far; replaces the file atomically."""
        run = {"setting": asdict(self._setting), "wire": None, "contenders": list(self._results.values())}
        write_json(self._path, run)


def step_records(turns: Sequence[Turn], setting: Setting) -> list[dict[str, Any]]:
    """Returns the steps of a turn from each rank's measurements; the bytes of the turn are spread evenly over them."""
    num_steps = len(turns[0].steps)
    uplink = [turn.uplink_bytes for turn in turns[:: setting.ranks_per_host]]
    per_step = None if None in uplink else [size / num_steps for size in uplink if size is not None]
    records = []
    for i in range(num_steps):
        clocks = [turn.steps[i] for turn in turns]
        by_rank: Mapping[str, list[float]] = {name: [getattr(clock, name) for clock in clocks] for name in _CLOCKS}
        records.append({"seconds": max(by_rank["seconds"]), "by_rank": by_rank, "uplink_bytes": per_step})
    return records


def _contender_record(contender: Contender) -> dict[str, Any]:
    described = {name: getattr(contender, name) for name in ("name", "family", "precision", "prefetch", "scheme")}
    measured = dict.fromkeys(("traffic", "peak_memory_bytes", "weight_bytes"))
    return {**described, "compression": float(contender.compression), "steps": [], **measured}


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "the default group exists once torch.distributed is initialized"
    return world


if __name__ == "__main__":
    main(sys.argv[1])
