"""``dmt export``: writes a checkpoint of any layout as one file: a program (made in ``program.py``) and a manifest."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from dmt.errors import InputError
from dmt.files import atomic_write, parse
from dmt.training.check.expected import draw_samples
from dmt.training.checkpoints.store import read_manifest as read_checkpoint
from dmt.training.data.batch import ClickBatch
from dmt.training.data.hash import HASH_KEY, hash_rows
from dmt.training.factory import check_samples
from dmt.training.job import Job
from dmt.training.records import versions
from dmt.training.serving.program import ServedModel, StoredTables, make_program
from dmt.training.trained import trained_model

__all__ = ["Exported", "export_run", "is_program", "load_program", "read_manifest", "tensors_of", "writing"]

_FORMAT = 1
_MANIFEST = "manifest.json"
_REMEDY = "Name a file that `dmt export` wrote; if this is one, export the checkpoint again."
_HASH = (
    "row 0 for a missing value, else 1 + mix(hash(value) xor hash(salt)) mod (rows - 1), where hash is the "
    "pandas.util.hash_array of a text with hash_key, and mix is the finalizer of SplitMix64"
)
_HASHED_EXAMPLES = ("1", "abc")


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Result of ``dmt export``."""

    checkpoint: Path
    """Folder of the checkpoint."""
    manifest: dict[str, Any]
    """The manifest inside the file."""
    file_bytes: int
    """Size of the file in bytes."""
    difference: float
    """Largest absolute difference between the logits of the program and of the trained model, on random samples."""


def export_run(
    run: Path,
    out: Path,
    *,
    tables: StoredTables = "fp32",
    data_path: str | None = None,
    functions: Collection[str] = (),
) -> Exported:
    """Exports a run's newest intact checkpoint as a program for servers, and compares its logits with the model's.

    Args:
        run: the ``output_dir`` of a run, or a checkpoint.
        out: the ``.pt2`` file.
        tables: number format of the tables in the program.
        data_path: raw files or a prepared folder with the run's columns; None: the run's own data, which must exist.
        functions: see `dmt.training.trained.checkpoint_of`.

    Raises:
        InputError: see `checkpoint_of`, `ServedModel` and `make_program`; or the data do not fit the checkpoint, a
            logit depends on other samples, the logits of an FP32 program differ, or ``out`` does not end in ``.pt2``
            or cannot be written.
    """
    if out.suffix != ".pt2":
        raise InputError(f"--out {str(out)!r} must end in .pt2, the ending of exported PyTorch programs.")
    checkpoint, job, model = trained_model(run, data_path, functions)
    batch = draw_samples(job, 64, seed=0)
    expected = check_samples(job, model, batch.split_columns(job.column_splits))
    served = ServedModel(model, job.data.columns.feature_names, stored=tables, splits=job.column_splits)
    targets = {target for table in job.tables for _, target in table.sequences}
    program = make_program(served, num_dense=job.num_dense, targets=targets)
    manifest = _manifest(job, checkpoint, tables)
    with torch.no_grad():
        # Calling the module would make PyTorch check the inputs, for 20 s with 1,000 features; forward() does not.
        difference = float((program.module(check_guards=False).forward(*tensors_of(batch)) - expected).abs().max())
    # Both run the same operators in the same order, but CPU kernels may round differently by a tensor's alignment.
    rounding = 1e-5 * max(1.0, float(expected.abs().max()))
    if not difference <= (rounding if tables == "fp32" else torch.inf):
        raise InputError(
            f"The exported program of {checkpoint} differs from the model in its logits (by {difference:.1e}). Make "
            "the model's forward depend on its input and weights only."
        )
    # Write to memory first: PyTorch's zip writer aborts the process if the file raises, such as on a full disk.
    archive = io.BytesIO()
    torch.export.save(program, archive, extra_files={_MANIFEST: json.dumps(manifest, indent=1)})
    with writing(out), atomic_write(out) as scratch:
        scratch.write_bytes(archive.getbuffer())
    return Exported(checkpoint=checkpoint, manifest=manifest, file_bytes=out.stat().st_size, difference=difference)


def _manifest(job: Job, checkpoint: Path, tables: StoredTables) -> dict[str, Any]:
    """Returns the manifest, which tells a server how to make the program's input, as plain data for JSON."""
    config, data, saved = job.config, job.data, read_checkpoint(checkpoint)
    # Prepared rows may come from another program, so how their ids were made is unknown.
    is_hashed = data.raw.id_mode == "hash" and data.raw.kind not in ("synthetic", "prepared")
    texts, features = pa.array(_HASHED_EXAMPLES), []
    tables_by_feature = {name: table for table in job.tables for name in table.feature_names}
    for feature in data.columns.features:  # in the order of the program's input: a compiled program knows no names
        table, time = tables_by_feature[feature.name], feature.time
        rows = hash_rows(texts, feature=feature.table, num_embeddings=table.num_embeddings).tolist()
        examples = dict(zip(_HASHED_EXAMPLES, rows, strict=True)) if is_hashed and time is None else {}
        features.append(
            {
                "name": feature.name,  # key of its ids and lengths
                "table": table.name,
                "rows": table.num_embeddings,  # ids lie in 0 to rows - 1
                "columns": table.embedding_dim,
                "multi_hot": feature.is_bag,  # true where a sample has any number of ids; else it has one
                "target": feature.target,  # of a sequence: the feature that attends to it
                "salt": feature.table,  # of the hash of its values
                # For a part of a time: the column of times, and the part (hour or weekday); else empty.
                "time_column": "" if time is None else time[0],
                "time_part": "" if time is None else time[1],
                # Rows of some texts, for servers to check their hashing; empty where ids are not hashed.
                "examples": examples,
            }
        )
    towers = job.towers.to_lists() if job.towers is not None and config.model.has_towers else []
    return {
        "format": _FORMAT,
        "model": config.model.name,
        "step": saved.step,
        "dense": list(data.columns.dense),
        "features": features,
        "towers": towers,
        "tables": config.sharding.table_precision if tables == "fp32" else tables,
        "hashing": _HASH if is_hashed else "",
        "hash_key": HASH_KEY if is_hashed else "",
        "data": data.raw.model_dump(mode="json"),
        "prepared": data.config.prepared,  # folder whose evaluation rows `dmt score` reads; null: those of "data"
        "trained_files": saved.progress.get("files"),  # null if unknown
        "versions": versions(),
    }


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Turns an `OSError` in its ``with`` block into an `InputError`: ``out`` cannot be written."""
    try:
        yield
    except OSError as error:
        raise InputError(f"--out {str(out)!r} cannot be written: {error.strerror}. Give another path.") from error


def tensors_of(batch: ClickBatch) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Returns a program's input: dense features float32 [B, D]; by feature, ids int64 [n] and lengths int64 [B]."""
    bags = batch.sparse_features.to_dict()
    return (
        batch.dense_features,
        {name: bag.values() for name, bag in bags.items()},
        {name: bag.lengths() for name, bag in bags.items()},
    )


def is_program(model: Path) -> bool:
    """Returns whether a path names an exported program; if not, it names a run or a checkpoint."""
    return model.suffix == ".pt2" or model.is_file()


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads the manifest of an exported program, without its tensors.

    Raises:
        InputError: the file cannot be read, or ``dmt export`` did not write it.
    """
    place = f"Exported model {path}"
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(f"extra/{_MANIFEST}")]
            text = archive.read(names[0]).decode() if names else None
    except Exception as error:  # zipfile raises many kinds of errors for a damaged file
        raise InputError(f"{place}: cannot be read ({error}). {_REMEDY}") from error
    if text is None:
        raise InputError(f"{place}: has no manifest, so `dmt export` did not write it. Name a file that it wrote.")
    record = parse(text, "JSON", place=place, remedy=_REMEDY)
    if not isinstance(record, dict) or record.get("format") != _FORMAT or "data" not in record:
        raise InputError(f"{place}: its manifest is not of format {_FORMAT}. {_REMEDY}")
    return record


def load_program(path: Path) -> torch.nn.Module:
    """Loads an exported program; call it like `ServedModel`.

    Raises `InputError` if the file cannot be read.
    """
    try:
        return torch.export.load(path).module(check_guards=False)
    except Exception as error:  # damaged bytes can make the reader raise anything
        reason = str(error).partition("\n")[0]
        raise InputError(f"Exported model {path}: cannot be read ({reason}). {_REMEDY}") from error
