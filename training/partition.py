"""From the output of a training run to the affinity of its features: loads the plain model and runs data through it."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import torch

from dmt.errors import InputError
from dmt.partitioner import FeatureAffinity
from dmt.tables import TableSpec
from dmt.training.build import ClickTask, build_model
from dmt.training.checkpoint import load_plain
from dmt.training.config import load_config
from dmt.training.data import open_source

__all__ = ["affinity_of_run"]

_BATCH_ROWS = 256


def affinity_of_run(
    run: Path, *, data_path: str | None = None, max_rows: int = 65_536
) -> tuple[FeatureAffinity, list[TableSpec]]:
    """Collects the feature affinity of a trained model on its training rows.

    Args:
        run: the ``output_dir`` of a finished run, with its ``checkpoint/``.
        data_path: rows from here instead of the run's own ``data.train_path``.
        max_rows: rows to average over; the mean settles quickly.

    Returns:
        The affinity and the tables of the model.

    Raises:
        InputError: the folder holds no run, or the data do not fit it.
    """
    checkpoint = run / "checkpoint"
    if not (checkpoint / "config.toml").exists():
        raise InputError(f"{run} is not the output_dir of a finished training run: it has no checkpoint/config.toml.")
    overrides = []
    if (checkpoint / "towers.json").exists():
        overrides.append(f"towers.plan={json.dumps(str(checkpoint / 'towers.json'))}")
    if data_path is not None:
        if load_config(checkpoint / "config.toml", overrides).data.kind == "synthetic":
            raise InputError(f"{run} was trained on synthetic clicks; rows of a file do not fit it. Leave out --data.")
        overrides.append(f"data.train_path={json.dumps(str(data_path))}")
    config = load_config(checkpoint / "config.toml", overrides)
    data = open_source(config.data, embedding_dim=config.model.embedding_dim)
    task = ClickTask(build_model(config, data.tables, len(data.dense_names)))
    load_plain(task, checkpoint)
    # Not more than the run's own batch: there are at least so many rows.
    size = min(_BATCH_ROWS, config.train.batch_size)
    batches = data.batches("train", rank=0, world_size=1, batch_size=size)
    with torch.no_grad():
        affinity = FeatureAffinity.collect(task.model, islice(batches, max(1, max_rows // size)))
    return affinity, data.tables
