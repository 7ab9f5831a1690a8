"""``dmt score``: writes a trained or exported model's predictions for rows of files, read as the trainer reads them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dmt.errors import InputError
from dmt.files import atomic_write
from dmt.training.checkpoints.store import read_manifest as read_checkpoint
from dmt.training.config import TrainingConfig
from dmt.training.data.batch import ClickBatch
from dmt.training.data.clicks import ClickData
from dmt.training.data.config import DataConfig, data_section, with_files
from dmt.training.data.files import expand_path
from dmt.training.functions import check_allowed
from dmt.training.job import PREPARED, Job, open_unsharded
from dmt.training.metrics import ClickMetrics, MetricValues
from dmt.training.serving.export import is_program, load_program, read_manifest, tensors_of, writing
from dmt.training.trained import trained_model

__all__ = ["Predictions", "Scored", "check_evaluation_rows", "check_predictions", "open_rows", "rows_to_score", "score"]

_SCHEMA = pa.schema(
    {"row": pa.int64(), "logit": pa.float32(), "probability": pa.float32(), "label": pa.float32()}.items()
)
Scorer = Callable[[ClickBatch], Tensor]
# Rows of a batch, or fewer, so that the embeddings of one take at most so many bytes.
_BATCH_ROWS, _BATCH_BYTES = 4096, 2**28


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Result of ``dmt score``."""

    num_rows: int
    """Number of rows scored."""
    metrics: MetricValues | None
    """Metrics of the predictions; None where the rows have no label."""


def score(model: Path, out: Path, *, data_path: str | None = None, functions: Collection[str] = ()) -> Scored:
    """Scores rows in the order of their files, and writes ``row``, ``logit``, ``probability`` and any ``label``.

    Args:
        model: the ``output_dir`` of a run, a checkpoint, or a file that ``dmt export`` wrote.
        out: the Parquet file: ``row`` int64, the other columns float32.
        data_path: raw files with the run's columns (label optional): a file, folder or glob; None: its evaluation rows.
        functions: see `dmt.training.trained.checkpoint_of`.

    Raises:
        InputError: model or data cannot be read or do not match, a function is not allowed, a logit is not finite, or
            ``out`` cannot be written or names another format.
    """
    if out.suffix in (".csv", ".tsv", ".json", ".jsonl", ".gz"):
        raise InputError(f"--out {str(out)!r} is written as Parquet. Name a file that ends in .parquet.")
    scorer, data, columns = _open(model, data_path, functions, out)
    batch_size = max(1, min(_BATCH_ROWS, _BATCH_BYTES // (4 * columns)))
    with writing(out), atomic_write(out) as scratch, torch.inference_mode():
        predictions = Predictions(scratch, data)
        with predictions.writer:
            for batch in data.batches("eval", rank=0, world_size=1, batch_size=batch_size):
                predictions.write(scorer(batch), batch.labels, batch.weights)
        metrics = predictions.metrics.compute()
    return Scored(num_rows=predictions.row, metrics=metrics if data.columns.label else None)


class Predictions:
    """Writes predictions to a Parquet file, and accumulates their metrics.

    Args:
        path: the file.
        data: the rows; without labels, the file has no column ``label``.
        first_row: number of the first row.
        group: the ranks whose metrics are joined; None: this rank alone.
    """

    def __init__(
        self, path: Path, data: ClickData, *, first_row: int = 0, group: dist.ProcessGroup | None = None
    ) -> None:
        has_labels = data.columns.label is not None
        self._schema = _SCHEMA if has_labels else _SCHEMA.remove(_SCHEMA.get_field_index("label"))
        self.writer = pq.ParquetWriter(path, self._schema)
        """Writer of the file; the caller closes it at the end."""
        self.metrics = ClickMetrics(group)
        self.row = first_row
        """Number of the next row."""

    def write(self, logits: Tensor, labels: Tensor, weights: Tensor) -> None:
        """Writes a batch: logits, labels and weights, float32 [B] each; rows of weight 0 are padding and left out."""
        self.metrics.update(logits, labels, weights)
        logits, labels = (values[weights > 0].cpu() for values in (logits, labels))
        columns = {
            "row": torch.arange(self.row, self.row + len(logits)),
            "logit": logits,
            "probability": torch.sigmoid(logits),
            "label": labels,
        }
        arrays = {name: columns[name].numpy() for name in self._schema.names}
        self.writer.write_table(pa.table(arrays, schema=self._schema))
        self.row += len(logits)


def check_predictions(path: Path) -> None:
    """Raises `InputError` if a Parquet file does not begin with the columns that `score` writes."""
    if pq.read_schema(path).names[:3] != _SCHEMA.names[:3]:
        raise InputError(f"{path} is not a file of predictions. Name a file that `dmt score` wrote.")


def _open(model: Path, data_path: str | None, functions: Collection[str], out: Path) -> tuple[Scorer, ClickData, int]:
    """Returns what scores a batch, the rows to score, and the columns of a row's embeddings."""
    if is_program(model):
        manifest = read_manifest(model)
        data = _rows_of_program(model, manifest, data_path, functions, out)
        columns = sum(feature["columns"] for feature in manifest["features"])
        return partial(_run, model, load_program(model)), data, columns
    folder, job, plain = trained_model(model, data_path, functions, partial(open_rows, data_path=data_path, out=out))
    if data_path is None:
        check_evaluation_rows(folder, job.data)
    cuts, columns = job.column_splits, sum(table.embedding_dim * len(table.feature_names) for table in job.tables)

    def scorer(batch: ClickBatch) -> Tensor:
        logits: Tensor = plain(batch.dense_features, batch.split_columns(cuts).sparse_features)
        return logits.reshape(-1)

    return scorer, job.data, columns


def _rows_of_program(
    model: Path, manifest: Mapping[str, Any], data_path: str | None, functions: Collection[str], out: Path
) -> ClickData:
    """Opens the rows to score with an exported program: those of ``data_path``, or the evaluation rows of its run."""
    raw = data_section(manifest["data"], f"Exported model {model}: data", "Export the checkpoint again.")
    if data_path is not None:
        return rows_to_score(raw, data_path, out)
    check_allowed(f"The manifest of {model}", {"data.source": raw.source}, functions)
    prepared = manifest["prepared"]
    data = ClickData(DataConfig(prepared=prepared) if prepared else raw, cache=out.absolute().parent / PREPARED)
    inputs = [*manifest["dense"], *(feature["name"] for feature in manifest["features"])]
    known = data.config if raw.kind == "prepared" else raw  # of rows of another program only names are known
    if prepared and (inputs != [*data.columns.dense, *data.columns.feature_names] or data.raw != known):
        raise InputError(f"data.prepared={prepared!r} changed after {model} was exported. Undo it or give --data.")
    check_evaluation_rows(model, data)
    return data


def check_evaluation_rows(model: Path, data: ClickData) -> None:
    """Raises `InputError` if the evaluation rows of a run's own data may now be rows on which it has trained.

    ``eval_fraction`` takes rows at even intervals, which move if a file is added before others, changed or removed.
    ``model`` is a checkpoint or a file that ``dmt export`` wrote.
    """
    raw, files = data.raw, [list(file) for file in data.files("train")]
    is_by_interval = raw.kind in ("columns", "criteo_tsv") and not (raw.eval_path or raw.split_column or raw.group_by)
    saved = read_manifest(model)["trained_files"] if is_program(model) else read_checkpoint(model).progress.get("files")
    if is_by_interval and saved not in (None, files):
        raise InputError(
            f"The training files have changed since {model} was saved, so rows that data.eval_fraction now takes for "
            "evaluation may have been trained on. Name the rows to score (--data)."
        )


def open_rows(config: TrainingConfig, data_path: str | None, out: Path) -> Job:
    """Opens the job of a checkpoint's config with the rows to score (see `score`), without a sharding plan."""
    return open_unsharded(config, None if data_path is None else rows_to_score(config.data, data_path, out))


def _run(model: Path, program: nn.Module, batch: ClickBatch) -> Tensor:
    try:
        # The graph's own checks will do: calling the module would take 20 s more with 1,000 features (`export_run`).
        logits: Tensor = program.forward(*tensors_of(batch))
    except (RuntimeError, LookupError, AssertionError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"Exported model {model}: the program refuses the rows ({reason}). Give rows whose ids were made as in "
            "training, or export the checkpoint again."
        ) from error
    return logits


def rows_to_score(raw: DataConfig, data_path: str, out: Path) -> ClickData:
    """Opens all rows of raw files, in order, with a run's settings ``raw``; raises `InputError` if they do not fit."""
    config = with_files(raw, data_path)
    if config.kind == "prepared":
        raise InputError(f"--data {data_path!r} is a prepared folder, but scoring takes raw rows. Name the raw files.")
    from dmt.training.data.raw import schema_of  # which loads DuckDB

    file = expand_path("--data", data_path, columns=config.kind == "columns")[0]
    # Score every row: none is for training.
    bare = config.model_copy(update={"split_column": None, "group_by": None, "label": None})
    label = config.label if config.label in schema_of(file, bare).names else None
    data = ClickData(bare.model_copy(update={"label": label}), cache=out.absolute().parent / PREPARED, eval_only=True)
    if data.num_rows("eval") == 0:
        raise InputError(f"--data {data_path!r} has no rows. Name other files.")
    return data
