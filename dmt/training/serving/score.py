"""``dmt score``: the predictions of a trained or exported model for the rows of files, by the trainer's own reader."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from dmt.errors import InputError
from dmt.files import atomic_write
from dmt.training.data.batch import ClickBatch
from dmt.training.data.clicks import ClickData
from dmt.training.data.config import DataConfig, with_files
from dmt.training.data.files import expand_path
from dmt.training.functions import check_allowed
from dmt.training.job import PREPARED
from dmt.training.metrics import ClickMetrics, MetricValues
from dmt.training.serving.export import load_program, read_manifest
from dmt.training.trained import data_section, trained_model

__all__ = ["Scored", "check_predictions", "score", "tensors_of"]

_SCHEMA = pa.schema(
    {"row": pa.int64(), "logit": pa.float32(), "probability": pa.float32(), "label": pa.float32()}.items()
)
Scorer = Callable[[ClickBatch], Tensor]


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Result of ``dmt score``."""

    num_rows: int
    """Rows scored."""
    metrics: MetricValues | None
    """Metrics of the predictions; None where the rows have no label."""


def score(
    model: Path,
    out: Path,
    *,
    data_path: str | None = None,
    batch_size: int = 4096,
    functions: Collection[str] = (),
) -> Scored:
    """Scores rows in the order of their files, and writes ``row``, ``logit``, ``probability`` and, if there, ``label``.

    Args:
        model: the ``output_dir`` of a run, a checkpoint, or a file that ``dmt export`` wrote.
        out: the Parquet file.
        data_path: a file, a directory or a glob with the columns of the run, of which the label may be absent. Without
            it, the run's own evaluation rows are scored.
        batch_size: rows in one go.
        functions: see `dmt.training.trained.checkpoint_of`.

    Raises:
        InputError: the model or the data cannot be read or do not fit each other, or the file cannot be written.
    """
    scorer, data = _open(model, data_path, functions, out.absolute().parent / PREPARED)
    has_labels = data.columns.label is not None
    schema = _SCHEMA if has_labels else _SCHEMA.remove(_SCHEMA.get_field_index("label"))
    metrics, row = ClickMetrics(), 0
    try:
        with atomic_write(out) as scratch, pq.ParquetWriter(scratch, schema) as writer, torch.inference_mode():
            for batch in data.batches("eval", rank=0, world_size=1, batch_size=batch_size):
                real = batch.weights > 0
                logits, labels = scorer(batch)[real], batch.labels[real]
                metrics.update(logits, labels, torch.ones_like(labels))
                columns = {
                    "row": torch.arange(row, row + len(logits)),
                    "logit": logits,
                    "probability": torch.sigmoid(logits),
                    "label": labels,
                }
                arrays = {name: columns[name].numpy() for name in schema.names}
                writer.write_table(pa.table(arrays, schema=schema))
                row += len(logits)
    except OSError as error:
        raise InputError(f"--out {str(out)!r} cannot be written: {error.strerror}.") from error
    return Scored(num_rows=row, metrics=metrics.compute() if has_labels else None)


def check_predictions(path: Path) -> None:
    """Raises `InputError` for a file that `score` has not written."""
    if pq.read_schema(path).names[:3] != _SCHEMA.names[:3]:
        raise InputError(f"{path} is not a file of predictions.")


def _open(model: Path, data_path: str | None, functions: Collection[str], cache: Path) -> tuple[Scorer, ClickData]:
    if model.suffix == ".pt2" or model.is_file():
        manifest, program = read_manifest(model), load_program(model)
        raw = data_section(manifest["data"], f"Exported model {model}: data", "Export the checkpoint again.")
        check_allowed(f"The manifest of {model}", {"data.source": raw.source if data_path is None else None}, functions)
        return partial(_run, model, program), _rows_of(raw, raw, data_path, cache)
    try:
        _, job, plain = trained_model(model, functions=functions)
    except InputError:
        if data_path is None:
            raise
        # The rows to score have the columns, too, should the run's own files be gone.
        _, job, plain = trained_model(model, data_path, functions)
    cuts = {} if job.towers is None else job.towers.column_splits
    data = _rows_of(job.data.raw, job.data.config, data_path, cache)
    return (lambda batch: plain(batch.dense_features, batch.split_columns(cuts).sparse_features).reshape(-1)), data


def _run(model: Path, program: nn.Module, batch: ClickBatch) -> Tensor:
    try:
        logits: Tensor = program(*tensors_of(batch))
    except (RuntimeError, IndexError, AssertionError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"Exported model {model} does not fit its manifest ({reason}). Export it again.") from error
    return logits


def tensors_of(batch: ClickBatch) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Returns the input of an exported program: dense features, and ids and lengths by feature."""
    bags = batch.sparse_features.to_dict()
    return (
        batch.dense_features,
        {name: own.values() for name, own in bags.items()},
        {name: own.lengths() for name, own in bags.items()},
    )


def _rows_of(raw: DataConfig, trained: DataConfig, data_path: str | None, cache: Path) -> ClickData:
    """Opens all rows of the files, in their order, or the evaluation rows of the run."""
    if data_path is None:
        return ClickData(trained, cache=cache)
    if raw.kind == "synthetic":
        raise InputError("The model was trained on synthetic clicks; rows of a file do not fit it. Leave out --data.")
    config = with_files(raw, data_path)
    if config.kind == "prepared":
        raise InputError(f"--data {data_path!r} is a prepared folder, but raw rows are scored. Name those.")
    # Every row has a prediction, or the first that cannot be read is named.
    changes: dict[str, Any] = {"eval_path": None, "split_column": None, "group_by": None}
    if config.kind == "columns" and config.label not in _columns_of(data_path, config):
        changes["label"] = None
    config = config.model_copy(update=changes)
    return ClickData(config, cache=cache, eval_only=True)


def _columns_of(data_path: str, config: DataConfig) -> list[str]:
    from dmt.training.data.raw import schema_of  # which loads DuckDB

    return list(schema_of(expand_path("--data", data_path, columns=True)[0], config).names)
