"""Measures one rank on one GPU in a few minutes: parity with the plain module, step time, memory and a profile.

    .venv/bin/python -m benchmarks.gpu --out benchmarks/results/gpu.json

It compares three models with the same tables: flat TorchRec, SPTT, and DMT-DLRM. A single rank exchanges nothing, so
step times show what the dataflows cost apart from their exchanges, not what they save. ``--device cpu`` runs the same
on a CPU, with ``--quick`` in seconds; docs/status.md describes the record.
"""

from __future__ import annotations

import gc
import itertools
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from benchmarks.report import about
from dmt.errors import InputError
from dmt.sptt.mesh import TowerMesh
from dmt.testing import load_plain_state
from dmt.training.build import ClickTask, build_model, build_optimizer, shard_model
from dmt.training.config import TrainingConfig
from dmt.training.data.batch import ClickBatch
from dmt.training.device import backend, current_device, device_type, take_device
from dmt.training.job import Job, open_job
from dmt.training.records import to_json

__all__ = ["CONTENDERS", "main", "measure", "profile_step"]

CONTENDERS = {"flat": ("dlrm", "flat"), "sptt": ("dlrm", "sptt"), "dmt": ("dmt-dlrm", "sptt")}
"""Model architecture and dataflow of each contender, by its name."""
# Largest difference of logits and gradients, which are sums of numbers near 1 in another order.
_TOLERANCE = 1e-4
_WARM_UP_STEPS = 3
_OPERATORS = 12


def make_config(name: str, device: str, *, quick: bool) -> TrainingConfig:
    """Returns the config of a contender: DLRM of the paper's sizes on 26 features, or a tiny one if ``quick``."""
    arch, dataflow = CONTENDERS[name]
    features, rows, batch = (6, 50, 32) if quick else (26, 100_000, 4096)
    layers = {"dense_arch": [8], "over_arch": [8, 1], "embedding_dim": 8, "tower_dim": 4} if quick else {}
    return TrainingConfig.model_validate(
        {
            "model": {"arch": arch, **layers},
            "topology": {"num_towers": 1, "ranks_per_tower": 1},
            "sharding": {"dataflow": dataflow, "scheme": "table_wise"},
            "data": {"synthetic": {"num_features": features, "rows_per_table": rows, "num_groups": 2}},
            "train": {"device": device, "batch_size": batch},
        }
    )


def measure(name: str, device: str, *, quick: bool) -> dict[str, Any]:
    """Returns a contender's differences from the plain module, seconds per step, peak bytes of memory, and profile."""
    config = make_config(name, device, quick=quick)
    job, mesh = open_job(config), TowerMesh(config.topology.build())
    place, on_gpu = current_device(job.device_type), job.device_type == "cuda"
    gc.collect()  # models are in reference cycles; otherwise the previous one would count
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    model = shard_model(job, mesh)
    optimizer = build_optimizer(config.optimizer, model)
    batches = job.data.batches("train", rank=0, world_size=1, batch_size=config.train.batch_size)
    parity = _parity(job, model, next(batches).to(place))
    optimizer.zero_grad()
    pipeline = TrainPipelineSparseDist(model, optimizer, place, execute_all_batches=True)
    steps = 3 if quick else 30
    ahead = list(itertools.islice(batches, _WARM_UP_STEPS + steps + 1))
    given, seconds = iter([batch.pin_memory() if on_gpu else batch for batch in ahead]), []
    for _ in ahead[:-1]:
        began = time.perf_counter()
        pipeline.progress(given)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    timed = sorted(seconds[_WARM_UP_STEPS:])
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "parity": parity,
        "step_seconds": {"median": statistics.median(timed), "least": timed[0], "most": timed[-1], "steps": steps},
        "peak_bytes": peak,
        "profile": profile_step(lambda: pipeline.progress(given), on_gpu=on_gpu),
    }


def profile_step(step: Callable[[], Any], *, on_gpu: bool) -> dict[str, Any]:
    """Returns the total seconds of a step's GPU kernels, or else CPU operators, and those of the slowest, in order."""
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    clock = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    found = sorted(profiler.key_averages(), key=lambda one: getattr(one, clock), reverse=True)
    if on_gpu:  # operators and named ranges would count the time of their kernels again
        found = [one for one in found if one.device_type == DeviceType.CUDA and not one.is_user_annotation]
    operators = [{"name": one.key, "calls": one.count, "seconds": getattr(one, clock) / 1e6} for one in found]
    return {"seconds": sum(one["seconds"] for one in operators), "operators": operators[:_OPERATORS]}


def _parity(job: Job, model: DistributedModelParallel, batch: ClickBatch) -> dict[str, float]:
    """Returns the largest differences of logits and dense gradients from a plain module with the same weights."""
    plain = ClickTask(build_model(job, device=str(batch.labels.device)))
    load_plain_state(model, plain.state_dict())
    results: list[tuple[Tensor, dict[str, Tensor]]] = []
    for task in (plain, model):
        loss, (logits, *_) = task(batch)
        loss.backward()
        gradients = {
            name.removeprefix("module."): p.grad.detach().clone()
            for name, p in task.named_parameters()
            if p.grad is not None and ".embedding_bags." not in name
        }
        results.append((logits, gradients))
    (expected, wanted), (found, got) = results
    return {
        "logits": float((found - expected).abs().max()),
        "dense_gradients": max(float((got[name] - wanted[name]).abs().max()) for name in got),
        "tensors": len(got),
    }


def provenance(device: str) -> dict[str, Any]:
    """Returns the provenance of a record: `about`, with the device, the version of CUDA, and facts on the GPU."""
    facts: dict[str, Any] = {"device": device, "cuda": torch.version.cuda}
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        facts |= {"gpu": gpu.name, "gpu_bytes": gpu.total_memory, "nccl": list(torch.cuda.nccl.version())}
    return about(f"python -m benchmarks.gpu {' '.join(sys.argv[1:])}", **facts)


@click.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cuda", show_default=True)
@click.option("--quick", is_flag=True, help="Tiny models and few steps; times mean nothing.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON file of the record; by default printed.")
def main(device: str, quick: bool, out: Path | None) -> None:
    """Measures flat TorchRec, SPTT and DMT-DLRM on one rank; exits with 1 if they differ from the plain module."""
    try:
        kind = device_type("cuda" if device == "cuda" else "cpu")
    except InputError as error:
        click.echo(f"error: {error}".replace("train.device=", "--device="), err=True)
        sys.exit(2)
    take_device(kind, 0)
    dist.init_process_group(backend(kind), store=dist.HashStore(), rank=0, world_size=1)
    try:
        contenders = {name: measure(name, kind, quick=quick) for name in CONTENDERS}
    finally:
        dist.destroy_process_group()
    worst = max(run["parity"][part] for run in contenders.values() for part in ("logits", "dense_gradients"))
    record = {"about": provenance(kind), "quick": quick, "agrees": worst <= _TOLERANCE}
    text = to_json({**record, "contenders": contenders})
    if out is None:
        click.echo(text)
    else:
        out.write_text(text + "\n", encoding="utf-8")
    for name, run in contenders.items():
        time_, memory = run["step_seconds"]["median"], run["peak_bytes"] / 2**20
        click.echo(f"{name:5} {time_ * 1e3:9.2f} ms per step, {memory:9.1f} MiB, {json.dumps(run['parity'])}", err=True)
        for one in run["profile"]["operators"][:3]:
            click.echo(f"      {one['seconds'] * 1e3:9.2f} ms in {one['name']:.60}, {one['calls']} calls", err=True)
    if not record["agrees"]:
        click.echo(f"error: a difference of {worst:.2g} from the plain module is above {_TOLERANCE:g}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
