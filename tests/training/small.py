"""Small runs for the tests of the trainer: a config, its data, its plain model, and checkpoints made without ranks."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from click.testing import CliRunner, Result
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from dmt.plan.topology import TowerTopology
from dmt.sptt.mesh import TowerMesh
from dmt.testing import PlainTraining
from dmt.training.agreement import Signals
from dmt.training.build import ClickTask, build_model, build_optimizer, fused_params, replica_sync, shard_model
from dmt.training.checkpoints.store import Checkpointer, CheckpointManifest, sha256_of, write_manifest
from dmt.training.commands import main
from dmt.training.config import TrainingConfig
from dmt.training.data.clicks import ClickData
from dmt.training.job import open_job, open_unsharded
from dmt.training.records import RunRecord
from dmt.training.resume import Position
from dmt.training.train import Run, make_pipeline, train_steps
from dmt.training.trained import describe_run

NUM_DENSE = 3


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
    return open_unsharded(config).data


def numbered(path: Path, ids: Sequence[int] = range(40)) -> dict[str, Any]:
    """The section of data in a new Parquet file whose rows have these ids, for training and evaluation."""
    path.parent.mkdir(exist_ok=True)
    columns = {"label": [i % 2 for i in ids], "d_1": [0.1 * i for i in ids], "c_1": ids}
    pq.write_table(pa.table(columns), path, row_group_size=8)
    names = {"dense": ["d_1"], "categorical": ["c_1"], "id_mode": "index", "num_embeddings": len(ids)}
    return {"kind": "columns", "train_path": str(path), "eval_path": str(path), "shuffle_rows": 0, **names}


def plain(config: TrainingConfig) -> ClickTask:
    """The model of a run in one process, unsharded."""
    return ClickTask(build_model(open_unsharded(config)))


def train_on_union(config: TrainingConfig, model: ClickTask, steps: int, layout: Any) -> dict[str, Tensor]:
    """Trains the plain model of a config, with SGD in its dense parts, on the union of the batches of all ranks.

    ``layout``: column shards of tables, as `table_layout` has them. Returns the weights. Learning rates warm up from
    1 / n to 1 in n equal steps.
    """
    job, optimizer, ranks = open_unsharded(config), config.optimizer, config.topology.build().world_size
    training = PlainTraining(
        [model],
        fused_params=fused_params(optimizer),
        make_optimizer=lambda dense: torch.optim.SGD(dense.values(), lr=optimizer.dense_lr),
        layout=layout,
    )
    n, union = max(1, optimizer.warmup_steps), {"batch_size": ranks * config.train.batch_size, "lanes": ranks}
    for step, batch in enumerate(islice(job.data.batches("train", rank=0, world_size=1, **union), steps)):
        share = min(1.0, (1 + (n - 1) * step / n) / n)
        training.learning_rate = share * optimizer.sparse_lr
        training.dense_optimizers[0].param_groups[0]["lr"] = share * optimizer.dense_lr
        model.zero_grad()
        model(batch.split_columns(job.column_splits))[0].backward()
        training.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def new_run(
    config: TrainingConfig, mesh: TowerMesh, *, model: DistributedModelParallel | None = None, record: Any = None
) -> Run:
    """A run that `train_steps` can train, which saves nothing; ``record`` takes its numbers."""
    job = open_job(config)
    model = model or shard_model(job, mesh)
    optimizer = build_optimizer(config.optimizer, model)
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
        pipeline=make_pipeline(job, model, optimizer),
    )


def train_loop(run: Run) -> Position:
    """Trains a run from its first step to its end, without evaluating or saving that."""
    return train_steps(run, Position(), Signals())[0]


class Dropped(nn.Module):
    """A flat model that draws random bits: half of its inputs, and of its hidden numbers, are left out of each step."""

    def __init__(self, tables: list[EmbeddingBagConfig], num_dense: int, device: torch.device | None) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection(tables=tables, device=device or torch.device("cpu"))
        self.features = [name for table in tables for name in table.feature_names]
        self.dropout = nn.Dropout(0.5)
        inputs = sum(t.embedding_dim * len(t.feature_names) for t in tables) + num_dense
        self.hidden = nn.GRU(inputs, 4, num_layers=2, batch_first=True, dropout=0.5)
        self.over = nn.Linear(4, 1)

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        """Returns logits [B, 1]."""
        embeddings = self.embeddings(ids)
        inputs = torch.cat([dense, *(embeddings[name] for name in self.features)], dim=1)
        logits: Tensor = self.over(self.hidden(self.dropout(inputs)[:, None])[0][:, 0])
        return logits


def dropped(tables: list[EmbeddingBagConfig], num_dense: int, device: torch.device | None) -> nn.Module:
    return Dropped(tables, num_dense, device)


@contextmanager
def alone() -> Iterator[TowerMesh]:
    """A job of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield TowerMesh(TowerTopology(num_towers=1, ranks_per_tower=1))
    finally:
        dist.destroy_process_group()


def save_alone(model: nn.Module, folder: Path, *, files: Mapping[str, str] | None = None, step: int = 1) -> Path:
    """A real checkpoint of a plain model, with files beside its tensors."""

    def describe(scratch: Path) -> None:
        for name, text in (files or {}).items():
            (scratch / name).write_text(text)

    with alone() as mesh:
        assert Checkpointer(folder, mesh).save(model, None, step=step, progress={}, describe=describe)
    return folder / f"step-{step:08d}"


def save_run(folder: Path, config: TrainingConfig) -> Path:
    """A trained run, as far as files can tell; its weights are random."""
    torch.manual_seed(0)
    with alone() as mesh:
        describe = partial(describe_run, open_job(config), None)
        saver = Checkpointer(folder / "checkpoint", mesh)
        assert saver.save(plain(config), None, step=1, progress={}, describe=describe)
    return folder


def make_checkpoint(folder: Path, step: int, files: Mapping[str, str]) -> Path:
    """An intact checkpoint of text files without a tensor."""
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    fill_checkpoint(path, step, files)
    return path


def fill_checkpoint(path: Path, step: int, files: Mapping[str, str], **progress: Any) -> None:
    for file, text in files.items():
        (path / file).write_text(text)
    records = {file: sha256_of(path / file) for file in files}
    write_manifest(path, CheckpointManifest(step=step, progress=progress, versions={}, files=records))


def linear(value: float) -> nn.Linear:
    """A layer full of one number, with a buffer that is empty."""
    layer = nn.Linear(3, 2)
    layer.register_buffer("nothing", torch.empty(0))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(value)
    return layer


def dmt(*arguments: object, code: int = 0, columns: int = 80) -> Result:
    """The end of a command, which must have this exit code, in a terminal of so many columns."""
    environment = {"COLUMNS": str(columns)}
    ran = CliRunner().invoke(main, [*map(str, arguments)], env=environment, catch_exceptions=False)
    assert ran.exit_code == code, ran.output
    return ran


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """No file grows further, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
