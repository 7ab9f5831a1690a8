"""Loads config, job and plain model of a run's newest intact checkpoint; `describe_run` saves its config and plans."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from torch import nn

from dmt.collectives import by_path
from dmt.errors import InputError
from dmt.files import read_file
from dmt.formatting import shorten
from dmt.hot_rows.runtime import HotRowsState
from dmt.sptt.mesh import TowerMesh
from dmt.training.access import save_hot_rows
from dmt.training.build import ClickTask, build_model
from dmt.training.checkpoints.store import load, newest, read_manifest
from dmt.training.config import TrainingConfig, load_config, to_override, to_toml
from dmt.training.data.config import DataConfig, data_section, with_files
from dmt.training.functions import check_allowed
from dmt.training.job import Job, open_unsharded

__all__ = ["changed_settings", "check_encoding", "checkpoint_of", "describe_run", "trained_model"]

_RAW_DATA = "raw_data.json"
"""File of a checkpoint with the ``[data]`` settings that turn raw rows into ids; it names every column."""
# Settings that determine how raw values become ids and numbers.
_CODED = {"dense", "categorical", "multi_hot", "sequences", "timestamps", "shared_tables", "id_mode", "dense_transform"}


def checkpoint_of(
    run: Path, data_path: str | None = None, functions: Collection[str] = (), mesh: TowerMesh | None = None
) -> tuple[Path, TrainingConfig]:
    """Finds the newest intact checkpoint of a run and its config, which names the tower plan inside the checkpoint.

    A checkpoint may come from elsewhere, so a factory or source that its config names is refused unless allowed.

    Args:
        run: the ``output_dir`` of a run, a checkpoint or a folder of them.
        data_path: raw files or a prepared folder to read instead of the run's own data.
        functions: factories and sources of the config that may run, as ``package.module:function``.
        mesh: ranks that find the checkpoint together, each reading some of its files; collective if it is given.

    Raises:
        InputError: there is no intact checkpoint, its config or data settings cannot be read, ``data_path`` cannot
            replace its rows (see `with_files`), or the config names a function that is not allowed.
    """
    checkpoint = newest(run / "checkpoint", mesh) or newest(run, mesh)
    if checkpoint is None:
        raise InputError(f"{run} holds no checkpoint. Give one, or the output_dir of a run that has saved one.")
    file, folder = checkpoint / "config.toml", checkpoint.absolute().parent
    # The run may have been moved since; raw rows are prepared in its folder.
    overrides = [to_override("train.output_dir", folder.parent if folder.name == "checkpoint" else folder)]
    if (checkpoint / "towers.json").exists():
        # The plan file also says which features are outside towers.
        overrides += [to_override("towers.plan", checkpoint / "towers.json"), "towers.outside=none"]
    config = load_config(file, overrides)
    if data_path is not None:
        config = config.model_copy(update={"data": with_files(_raw_data(checkpoint) or config.data, data_path)})
    check_allowed(str(file), {"model.factory": config.model.factory, "data.source": config.data.source}, functions)
    return checkpoint, config


def _raw_data(checkpoint: Path) -> DataConfig | None:
    """Returns the settings of `_RAW_DATA`; None if the checkpoint has no such file."""
    path, remedy = checkpoint / _RAW_DATA, "Use another checkpoint."
    if not path.exists():
        return None
    return data_section(read_file(path, "JSON", place=str(path), remedy=remedy), str(path), remedy)


def check_encoding(folder: Path, job: Job, *, lengths: bool = True) -> None:
    """Raises `InputError` if a checkpoint was trained on rows with another encoding.

    Without this check its weights would load, but each row of a table would stand for another value. ``lengths``:
    compare ``data.max_length``, too, which training may change but predictions must not.
    """
    if job.config.data.kind == "synthetic" or (saved := _raw_data(folder)) is None:
        return
    both = (saved, job.data.raw)
    compared = _CODED | {"max_length"} if lengths else _CODED
    wrong = changed_settings(*({"data": config.model_dump(mode="json", include=compared)} for config in both))
    if len({(config.vocabulary or "").rpartition("#")[2] for config in both}) > 1:
        wrong.append("the vocabulary (prepare the rows with data.vocabulary set to the folder of that run)")
    if job.data.raw.kind == "prepared":  # by another program, which named no raw columns
        columns = [*job.data.columns.dense, *job.data.columns.feature_names]
        before = read_manifest(folder).progress.get("columns", columns)
        wrong += [f"column {old!r} -> {new!r}" for old, new in zip_longest(before, columns) if old != new]
    if wrong:
        remedy = "Undo these changes, or pass data that has that run's columns (--data of dmt score and dmt export)."
        found = f"The checkpoint {folder} was trained on rows with a different encoding"
        raise InputError(f"{found}: {shorten(wrong)}. {remedy}")


def changed_settings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the settings in which two configs, as plain data, differ: ``section.key: saved -> now``.

    A path of training rows that both configs set is left out even if it differs: `start_from` compares the rows.
    """
    before, after = ({k: v for k, v in by_path(values).items() if v not in (None, {})} for values in (saved, now))
    changed = {key for key in {**before, **after} if before.get(key) != after.get(key)}
    changed -= {"data.train_path", "data.prepared"} & before.keys() & after.keys()
    return [f"{key}: {before.get(key)!r} -> {after.get(key)!r}" for key in sorted(changed)]


def trained_model(
    run: Path,
    data_path: str | None = None,
    functions: Collection[str] = (),
    open_rows: Callable[[TrainingConfig], Job] = open_unsharded,
) -> tuple[Path, Job, nn.Module]:
    """Loads a run's newest intact checkpoint, of any layout, into a plain model; see `checkpoint_of` for arguments.

    ``open_rows`` opens the data, of which only the columns are used here. Raises what these functions and `load` raise.

    Returns:
        The folder of the checkpoint, the job (without a sharding plan), and the model in evaluation mode.
    """
    checkpoint, config = checkpoint_of(run, data_path, functions)
    job = open_rows(config)
    check_encoding(checkpoint, job)
    task = ClickTask(build_model(job))
    try:
        load(checkpoint, task, None)
    except InputError:
        if checkpoint.exists():
            raise
        # The run is still training: it has saved newer checkpoints and deleted this one.
        return trained_model(run, data_path, functions, open_rows)
    return checkpoint, job, task.model.eval()


def describe_run(job: Job, hot_rows: HotRowsState | None, folder: Path) -> None:
    """Writes a run's config, data settings, plans and hot rows into a checkpoint, as the user's files may change."""
    if hot_rows is not None:
        save_hot_rows(hot_rows, folder)
    if job.towers is not None:
        replace(job.towers, tables=job.split_tables).save(folder / "towers.json")
    if job.sharding is not None:
        job.sharding.save(folder / "sharding.json")
    if job.config.data.kind != "synthetic":
        raw = job.data.raw.model_dump(mode="json", exclude_defaults=True)
        (folder / _RAW_DATA).write_text(json.dumps(raw), encoding="utf-8")
    (folder / "config.toml").write_text(to_toml(job.config), encoding="utf-8")
