"""`check_output_files`: no command replaces what it reads, or a file that is not of the kind it writes."""

from __future__ import annotations

import json
import os
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

from dmt.errors import InputError
from dmt.files import check_output
from dmt.training.config import TrainingConfig
from dmt.training.data.files import is_remote, matching_files

__all__ = ["Kind", "check_output_files", "files_of_config", "files_of_run"]

Kind = Literal["tower plan", "sharding plan", "config", "cluster", "Parquet", "program", "matrix", "picture", "folder"]
"""What an option of a command writes."""

_HEADS = {b"PAR1": "Parquet", b"PK\x03\x04": "zip archive"}
_INPUT_KEYS = (
    ("data", "prepared"),
    ("data", "train_path"),
    ("data", "eval_path"),
    ("data", "tables"),
    ("towers", "plan"),
    ("sharding", "plan"),
    ("hot_rows", "profile"),
)
_CLUSTER_KEY = "all_to_all"
_MOST_BYTES = 64 << 20


def check_output_files(
    outputs: Mapping[str, tuple[Path | None, Kind]], inputs: Iterable[str | os.PathLike[str] | None]
) -> None:
    """Refuses outputs before the work that leads to them; missing folders of outputs are made.

    Args:
        outputs: the path (None where it was not given) and the kind of each output, by the option that names it.
        inputs: every file, folder or glob that the command reads; None and addresses of remote files are passed over.

    Raises:
        InputError: an output is an input, also by a link; two outputs are one file; an output exists and is a file of
            another kind; or it cannot be written.
    """
    given = {option: (path, kind) for option, (path, kind) in outputs.items() if path is not None}
    taken: dict[Path, str] = {}
    for option, (path, kind) in given.items():
        assert kind in get_args(Kind), f"{kind!r} is not a kind of output"
        other = taken.setdefault(path.resolve(), option)
        if other != option:
            raise InputError(f"{other} and {option} are the same file, {str(path)!r}. Name another for one of them.")
    existing = {option: path for option, (path, _) in given.items() if path.exists()}
    if existing:
        read = {_identity(Path(name)): name for value in inputs if value is not None for name in _names(str(value))}
        for option, path in existing.items():
            if (name := read.get(_identity(path))) is not None:
                same = "" if Path(name) == path else f", which is {name!r}"
                raise InputError(f"{option} {str(path)!r}{same}, is read by this command. Name another file.")
    for option, (path, kind) in given.items():
        check_output(option, path, is_folder=kind == "folder")
        # The ending of a picture has been checked, and its formats are many.
        if kind not in ("folder", "picture") and (found := _kind_of(path)) not in (None, kind):
            raise InputError(
                f"{option} {str(path)!r} exists and is not a file that this option writes ({kind}; found: {found}). "
                "Name another file, or remove this one."
            )


def files_of_config(config: TrainingConfig) -> list[str]:
    """Returns the files, folders and globs that a config names as inputs."""
    return _files_in(config.model_dump(mode="json"))


def files_of_run(model: Path, data: str | None) -> list[str]:
    """Returns what is read with a run, a checkpoint or an exported program, and rows from ``data`` or its own.

    Every file of its checkpoints counts, whichever of them is used.
    """
    if model.is_file():
        from dmt.training.serving.export import read_manifest

        own = [] if data is not None else _files_in({"data": read_manifest(model).data})
        return [str(model), *own, *filter(None, [data])]
    folder = model / "checkpoint" if (model / "checkpoint").is_dir() else model
    files = [path for path in folder.rglob("*") if path.is_file()]
    own = []
    for path in files if data is None else []:
        if path.name == "config.toml":
            with suppress(OSError, ValueError):  # the command says itself what it cannot read
                own += _files_in(tomllib.loads(path.read_text(encoding="utf-8")))
    return [*map(str, files), *own, *filter(None, [data])]


def _files_in(record: Mapping[str, Any]) -> list[str]:
    sections = {section: record.get(section) for section, _ in _INPUT_KEYS}
    named = [own.get(key) for section, key in _INPUT_KEYS if isinstance(own := sections[section], dict)]
    return [value for value in named if isinstance(value, str)]


def _names(value: str) -> list[str]:
    """The input itself, which may be a folder, and the files that it stands for."""
    if is_remote(value):
        return []
    try:
        return [name for name in (value, *matching_files(value)) if Path(name).exists()]
    except (OSError, InputError):  # the command says itself what it cannot read
        return []


def _identity(path: Path) -> tuple[int, int]:
    """Equal for all links to one file."""
    status = path.stat()
    return status.st_dev, status.st_ino


def _kind_of(path: Path) -> str | None:
    """The kind of an existing file by its content; None for a file that is absent or empty."""
    if not path.exists() or (path.is_file() and not path.stat().st_size):
        return None
    if not path.is_file():
        return "no regular file"
    with path.open("rb") as file:
        content = file.read(8)
    kind = next((kind for head, kind in _HEADS.items() if content.startswith(head)), None)
    if kind == "zip archive":
        return _kind_of_archive(path)
    if kind is not None:
        return kind
    return _kind_of_text(path) if path.stat().st_size <= _MOST_BYTES else "other data"


def _kind_of_archive(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return "damaged zip archive"
    if any(name.endswith("archive_format") for name in names):
        return "program"
    return "matrix" if all(name.endswith(".npy") for name in names) else "zip archive"


def _kind_of_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return "other data"
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        record = None
    if isinstance(record, dict) and {"format", "towers"} <= record.keys():
        return "sharding plan" if "ranks" in record else "tower plan"
    if record is not None:
        return "JSON"
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError):
        return "text"
    if _CLUSTER_KEY in table:
        return "cluster"
    return "config" if table and table.keys() <= TrainingConfig.model_fields.keys() else "TOML"
