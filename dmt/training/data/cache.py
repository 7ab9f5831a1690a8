"""`prepare_if_needed`: data that training cannot read as they are become a prepared folder, once."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dmt.errors import InputError
from dmt.training.data.columns import expand_path, find_columns, format_of
from dmt.training.data.config import DataConfig
from dmt.training.data.parquet import is_direct, parquet_schema
from dmt.training.data.prepared import FORMAT, MANIFEST, prepared_settings
from dmt.training.data.storage import file_version

__all__ = ["prepare_if_needed", "with_folder"]

logger = logging.getLogger(__name__)

# Settings that say how rows are read from the folder, and not what is in it.
_OF_READING = ("shuffle_rows", "shuffle_seed", "shuffle_pieces", "max_train_rows", "max_eval_rows", "synthetic")


def prepare_if_needed(config: DataConfig, cache: Path | None, *, eval_only: bool = False) -> DataConfig:
    """Returns settings that training can read: these, or those of a folder in ``cache`` that is prepared from them.

    That is done once: a folder for the same settings and files is used again. Ranks of one host wait for one another.

    Args:
        config: files of text or Parquet.
        cache: a folder beside the output of the command.
        eval_only: all rows of ``train_path`` are to be evaluated, in their order, each of them.

    Raises:
        InputError: see `prepare`; or the data need it and there is no ``cache``.
    """
    is_criteo = config.kind == "criteo_tsv"
    paths = {"train_path": config.train_path, "eval_path": config.eval_path}
    files = [
        file
        for name, path in paths.items()
        if path is not None
        for file in expand_path(name, path, columns=not is_criteo)
    ]
    if all(format_of(file, config) == "parquet" for file in files):
        schema = parquet_schema(files[0])
        if is_direct(schema, config, find_columns(config, schema, files[0])):
            return config
    if cache is None:
        raise InputError(
            f"{files[0]} has to be prepared: training reads Parquet with numbers, texts and lists. Run `dmt prepare`, "
            "and name its folder as data.prepared."
        )
    folder = cache / _digest(config, files, eval_only)
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / MANIFEST).exists():
            from dmt.training.data.prepare import PrepareOptions, prepare

            logger.warning("Preparing %s, once, into %s (`dmt prepare` does so by itself).", files[0], folder)
            try:
                prepare(config, folder, PrepareOptions(eval_only=eval_only))
            except InputError:
                (cache / ".lock").unlink(missing_ok=True)
                with suppress(OSError):  # of a cache with other rows
                    cache.rmdir()
                raise
    return with_folder(config, folder)


def with_folder(config: DataConfig, folder: Path) -> DataConfig:
    """Returns settings with the paths, columns and tables of a prepared folder.

    Raises:
        InputError: see `read_manifest`.
    """
    unset = {"split_column": None, "timestamps": (), "multi_hot": ()}
    settings = prepared_settings(str(folder)) | unset
    for name in ("categorical", "dense"):
        settings[name] = tuple(settings[name])
    settings["shared_tables"] = {name: tuple(features) for name, features in settings["shared_tables"].items()}
    return config.model_copy(update=settings)


def _digest(config: DataConfig, files: Sequence[str], eval_only: bool) -> str:
    settings = config.model_dump(mode="json", exclude=set(_OF_READING))
    told: list[Any] = [FORMAT, eval_only, settings, [(file, *file_version(file)) for file in files]]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]
