"""Small runs for the tests of the trainer: a config, its data and its plain model."""

from __future__ import annotations

from typing import Any

from torchrec.distributed.model_parallel import DistributedModelParallel

from dmt.sptt.mesh import TowerMesh
from dmt.training.agreement import Signals
from dmt.training.build import ClickTask, build_model, build_optimizer, replica_sync, shard_model
from dmt.training.config import TrainingConfig
from dmt.training.data.clicks import ClickData
from dmt.training.job import Job, open_data, open_job
from dmt.training.records import RunRecord
from dmt.training.resume import Position, Start
from dmt.training.train import Run, make_pipeline, train_steps

NUM_DENSE = 3
# Every model with every dataflow it can take.
ARCHS = [
    ("dlrm", "flat"),
    ("dlrm", "sptt"),
    ("dcn", "flat"),
    ("dcn", "sptt"),
    ("dmt-dlrm", "sptt"),
    ("dmt-dcn", "sptt"),
]


def small(arch: str = "dmt-dlrm", dataflow: str = "auto", **sections: dict[str, Any]) -> TrainingConfig:
    """A run of 2 towers x 2 ranks on tables of equal size; ``sections`` change single values."""
    synthetic = {"num_features": 6, "num_dense": NUM_DENSE, "rows_per_table": 11, "num_groups": 2}
    # A run is evaluated at its end, on all rows that there are for it.
    synthetic |= {"num_eval_rows": 200}
    values: dict[str, dict[str, Any]] = {
        "model": {"arch": arch, "embedding_dim": 8, "dense_arch": [6], "over_arch": [4, 1], "tower_dim": 4},
        "data": {"synthetic": synthetic | sections.pop("synthetic", {})},
        "topology": {"num_towers": 2, "ranks_per_tower": 2},
        "sharding": {"dataflow": dataflow},
        "optimizer": {"warmup_steps": 0},
        "train": {"device": "cpu", "batch_size": 16},
    }
    values["model"] |= {"cross_layers": 1, "cross_rank": 2}
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return TrainingConfig.model_validate(values)


def source(config: TrainingConfig) -> ClickData:
    """The data of a run."""
    return open_data(config).data


def plain(config: TrainingConfig) -> ClickTask:
    """The model of a run in one process, unsharded."""
    return ClickTask(build_model(unsharded(config)))


def unsharded(config: TrainingConfig) -> Job:
    """The job of a run that is not sharded."""
    return open_data(config)


def new_run(
    config: TrainingConfig,
    mesh: TowerMesh,
    *,
    model: DistributedModelParallel | None = None,
    optimizer: Any = None,
    record: Any = None,
) -> Run:
    """A run that `train_steps` can train, which saves nothing; ``record`` takes its numbers."""
    job = open_job(config)
    model = model or shard_model(job, mesh)
    optimizer = optimizer or build_optimizer(config.optimizer, model)
    saver: Any = None
    return Run(
        job=job,
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        replicas=replica_sync(config.replicas, model, mesh),
        hot_rows=None,
        record=record or RunRecord(config, enabled=False),
        saver=saver,
        start=Start(files=[]),
        pipeline=make_pipeline(job, model, optimizer),
    )


def train_loop(run: Run) -> Position:
    """Trains a run from its first step to its end, without evaluating or saving that."""
    return train_steps(run, Position(), Signals())[0]
