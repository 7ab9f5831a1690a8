"""``dmt score`` under torchrun: each rank scores a part of the rows with the sharded model, into one folder."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dmt.errors import InputError
from dmt.files import check_output, fsync_path
from dmt.plan.towers import TowerPlan
from dmt.sharding.schemes import SCHEMES
from dmt.sptt.mesh import TowerMesh
from dmt.training.build import build_model, replica_sync, shard_model
from dmt.training.checkpoints.store import load
from dmt.training.config import OptimizerConfig, ReplicasConfig, TopologyConfig, TrainingConfig
from dmt.training.data.batch import ClickBatch
from dmt.training.device import current_device, on_all_ranks, on_first_rank, process_group
from dmt.training.job import Job, make_job
from dmt.training.preflight import check_same_input
from dmt.training.serving.export import is_program, writing
from dmt.training.serving.score import Predictions, Scored, check_evaluation_rows, open_rows
from dmt.training.trained import check_encoding, checkpoint_of

__all__ = ["score_by_ranks"]


def score_by_ranks(
    model: Path, out: Path, *, world_size: int, data_path: str | None = None, functions: Collection[str] = ()
) -> Scored:
    """Scores rows with the sharded model of a checkpoint; collective, for every rank that torchrun started.

    The rows are cut into a part for each rank, in the order of their files; rank 3 writes ``part-00003.parquet``. With
    as many ranks as in training, towers are placed as in training; otherwise each tower is placed on all ranks. A model
    trained with the flat dataflow stays flat. A rank's batches have the run's ``train.batch_size`` rows.

    Args:
        model: the ``output_dir`` of a run, or a checkpoint.
        out: the folder, which all hosts must share; it must not exist, and appears when all ranks are done.
        world_size: number of ranks of the job.
        data_path: see `dmt.training.serving.score.score`.
        functions: see `dmt.training.trained.checkpoint_of`.

    Returns:
        Rows and metrics of all ranks, on every rank.

    Raises:
        InputError: model or data cannot be read or do not fit each other, a function is not allowed, a logit is not
            finite, ``out`` exists or is not writable, ``model`` is exported, or the rows come from a ``data.source``.
    """
    with process_group(partial(_joining, model, out, world_size)) as (_, everyone):
        checkpoint, config = checkpoint_of(model, data_path, functions, everyone)
        job = on_all_ranks(lambda: _placed(open_rows(config, data_path, out), world_size), everyone)
        on_all_ranks(lambda: check_encoding(checkpoint, job), everyone)
        if data_path is None:
            on_all_ranks(lambda: check_evaluation_rows(checkpoint, job.data), everyone)
        mesh = TowerMesh(job.topology)
        return _score(job, _load(checkpoint, job, mesh), mesh, out)


def _joining(model: Path, out: Path, world_size: int) -> TrainingConfig:
    """Makes the checks of a rank before it joins the others, and returns the config of one tower of all ranks."""
    if is_program(model):
        raise InputError(
            f"{model} is an exported model, which one process loads whole, but this job has {world_size} ranks. Run "
            "dmt score without torchrun, or name the run that was exported."
        )
    if out.exists() or out.is_symlink():
        raise InputError(f"--out {str(out)!r} exists, but under torchrun `dmt score` writes a new folder. Name one.")
    check_output("--out", out)
    return TrainingConfig(topology=TopologyConfig(ranks_per_tower=world_size))


def _placed(job: Job, world_size: int) -> Job:
    """Places the tables of a job on ranks that only predict, in the towers of training or in one tower."""
    config, towers, placement = job.config, job.towers, None
    if job.data.source is not None:
        raise InputError(
            f"data.source={config.data.source!r} deals rows to ranks itself, so the rows have no numbers. Give files "
            "(--data), or run dmt score without torchrun."
        )
    # Exchanges in FP32 round nothing, so predictions agree with those of one process.
    sharding: dict[str, Any] = {"forward_precision": "fp32", "backward_precision": "fp32", "cluster": None}
    changes: dict[str, Any] = {
        "train": config.train.model_copy(update={"device": "auto", "dense_reduce": "ring"}),
        "replicas": ReplicasConfig(),
        "optimizer": OptimizerConfig(sparse="sgd"),  # which has no state
    }
    if config.topology.build().world_size != world_size:
        changes["topology"] = TopologyConfig(ranks_per_tower=world_size)
        # Schemes and the memory limit apply to the ranks of training only.
        kernels = {name: rule for name, rule in config.sharding.tables.items() if rule not in SCHEMES}
        sharding |= {"scheme": "auto", "tables": kernels, "memory_gib": None}
        if towers is not None:
            placement = (0,) * towers.num_towers
            towers = TowerPlan.from_lists([towers.features], outside=towers.outside, column_splits=job.column_splits)
    changes["sharding"] = config.sharding.model_copy(update=sharding)
    placed = make_job(config.model_copy(update=changes), job.tables, job.num_dense, towers=towers, data=job.data)
    if placement is not None and config.model.has_towers:
        placed = replace(placed, towers=job.towers, placement=placement)
    return placed


def _load(checkpoint: Path, job: Job, mesh: TowerMesh) -> nn.Module:
    """Makes the sharded `ClickTask` of a checkpoint, in evaluation mode; collective."""
    plain = on_all_ranks(lambda: build_model(job, device="meta"), mesh)
    check_same_input(job, plain, mesh)
    model = shard_model(job, mesh, plain)
    load(checkpoint, model, None, mesh=mesh)
    # Without the sync, a model with replicas refuses a batch.
    replica_sync(job.config.replicas, model, mesh)
    return model.eval()


def _score(job: Job, model: nn.Module, mesh: TowerMesh, out: Path) -> Scored:
    """Writes the predictions of all ranks; collective, and an error on one rank is raised on all."""
    device = current_device(job.device_type)
    with ExitStack() as stack, torch.no_grad():
        folder = on_first_rank(writing(out)(partial(stack.enter_context, _new_folder(out))), mesh)

        def start() -> tuple[Predictions, Iterator[ClickBatch]]:
            first_row, batches = job.data.part(mesh.rank, job.topology.world_size, job.config.train.batch_size)
            path = folder / f"part-{mesh.rank:05}.parquet"
            return Predictions(path, job.data, first_row=first_row, group=mesh.global_group), batches

        def turn() -> ClickBatch | None:
            if output is not None:
                predictions.write(*output)
            return next(batches, None)

        predictions, batches = on_all_ranks(writing(out)(start), mesh)
        output: tuple[Tensor, Tensor, Tensor] | None = None
        with writing(out), predictions.writer:
            while (batch := on_all_ranks(writing(out)(turn), mesh)) is not None:
                output = model(batch.split_columns(job.column_splits).to(device))[1]
            on_all_ranks(writing(out)(predictions.writer.close), mesh)
        metrics = predictions.metrics.compute()
        on_all_ranks(writing(out)(stack.close), mesh)
    num_rows = job.data.num_rows("eval")
    assert num_rows is not None, "rows of files"
    return Scored(num_rows=num_rows, metrics=metrics if job.data.columns.label else None)


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Yields a new folder beside ``out`` that is renamed to ``out`` at the end; an error removes it."""
    scratch = out.with_name(f".{out.name}.{secrets.token_hex(8)}")
    try:
        scratch.mkdir(parents=True)
        yield scratch
        for path in (*scratch.iterdir(), scratch):
            fsync_path(path)
        scratch.rename(out)
        fsync_path(out.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
