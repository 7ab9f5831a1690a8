"""`check_output_files`: no command replaces what it reads, or a file that is not of the kind it writes."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from glob import glob
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from dmt.errors import InputError
from dmt.files import check_output

__all__ = ["Kind", "check_output_files"]

Kind = Literal["tower plan", "sharding plan", "config", "cluster", "Parquet", "program", "matrix", "folder"]
"""What an option of a command writes."""
Identity = tuple[int, int]
# What reads each kind of file, imported where one is there.
_READERS = {
    "tower plan": "dmt.plan.towers:TowerPlan.load",
    "sharding plan": "dmt.sharding.plan:TowerShardingPlan.load",
    "config": "dmt.training.config:load_config",
    "cluster": "dmt.simulator.cluster:load_cluster",
    "Parquet": "pyarrow.parquet:read_schema",
    "program": "dmt.training.serving.export:read_manifest",
    "matrix": "dmt.partitioner:FeatureAffinity.load",
}


def check_output_files(outputs: Mapping[str, tuple[Path | None, Kind]], inputs: Iterable[object]) -> None:
    """Refuses outputs before the work that leads to them; missing folders of outputs are made.

    Args:
        outputs: the path (None where it was not given) and the kind of each output, by the option that names it.
        inputs: texts and paths that the command was given; of those that are files, folders or globs everything counts
            as read, and what a config or an exported program among them names as its data. Others are passed over.

    Raises:
        InputError: an output is an input, also by a link; two outputs are one file; an output exists and is a file of
            another kind; or it cannot be written.
    """
    given = {option: (path, kind) for option, (path, kind) in outputs.items() if path is not None}
    taken: dict[Path, str] = {}
    for option, (path, _) in given.items():
        other = taken.setdefault(path.resolve(), option)
        if other != option:
            raise InputError(f"{other} and {option} are the same file, {str(path)!r}. Name another for one of them.")
    read = _files_read(inputs) if any(path.exists() for path, _ in given.values()) else {}
    for option, (path, _) in given.items():
        if path.exists() and (name := read.get(_identity(path))) is not None:
            same = "" if name == path else f", which is {str(name)!r}"
            raise InputError(f"{option} {str(path)!r}{same}, is read by this command. Name another file.")
    for option, (path, kind) in given.items():
        check_output(option, path, is_folder=kind == "folder")
        if kind != "folder" and path.exists() and not _is_kind(path, kind):
            raise InputError(
                f"{option} {str(path)!r} exists and is not a file that this option writes ({kind}). Name another file, "
                "or remove this one."
            )


def _is_kind(path: Path, kind: Kind) -> bool:
    """Returns whether a file can be read as its kind; an empty one, as ``mktemp`` makes it, may become any."""
    if path.is_file() and not path.stat().st_size:
        return True
    module, name = _READERS[kind].split(":")
    try:
        attrgetter(name)(import_module(module))(path)
    except (OSError, ValueError):
        return False
    return True


def _files_read(inputs: Iterable[object]) -> dict[Identity, Path]:
    """Every file that inputs are, hold or name, by its identity."""
    found: dict[Identity, Path] = {}
    waiting = [*_texts(list(inputs))]
    while waiting:
        text = waiting.pop()
        for path in (*_matches(text), *_matches(text.partition("=")[2])):  # a path, or an override
            if found.setdefault(_identity(path), path) == path:
                with suppress(OSError, ValueError):  # the command says itself what it cannot read
                    waiting += _texts(_named_in(path))
    return found


def _matches(text: str) -> list[Path]:
    with suppress(OSError, ValueError):
        path = Path(text.strip("\"'"))
        if not text:
            return []
        if path.is_dir():
            # Of a run its checkpoints: other files in its folder may be those that a command writes.
            inside = path / "checkpoint" if (path / "checkpoint").is_dir() else path
            return [path, *(file for file in inside.rglob("*") if file.is_file())]
        return [path] if path.exists() else [file for name in glob(text, recursive=True) for file in _matches(name)]
    return []


def _named_in(path: Path) -> object:
    """The values of a config, and the data of an exported program."""
    if path.suffix == ".toml":
        record = tomllib.loads(path.read_text(encoding="utf-8"))
        return [value for section in record.values() for key, value in _items(section) if key != "output_dir"]
    if path.suffix == ".pt2":
        from dmt.training.serving.export import read_manifest

        return read_manifest(path)["data"]
    return []


def _items(section: Any) -> Iterable[tuple[str, Any]]:
    return section.items() if isinstance(section, dict) else ()


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str | Path):
        yield str(value)
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)


def _identity(path: Path) -> Identity:
    """Equal for all links to one file."""
    status = path.stat()
    return status.st_dev, status.st_ino
