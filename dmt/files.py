"""Files written atomically or through to the disk; JSON and TOML read and checked."""

from __future__ import annotations

import json
import os
import secrets
import stat
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from dmt.errors import InputError

if TYPE_CHECKING:
    from pydantic import ValidationError

__all__ = [
    "atomic_write",
    "check_output",
    "explain",
    "from_record",
    "fsync_path",
    "open_file",
    "parse",
    "read_json",
    "read_model",
    "read_record",
    "read_toml",
    "write_or_raise",
]

T = TypeVar("T")


@contextmanager
def atomic_write(target: Path) -> Iterator[Path]:
    """Yields a scratch file beside ``target`` that replaces it atomically at the end; missing folders are made.

    After an error the scratch file is removed, and an existing target is unchanged. Processes of several hosts may
    write to one folder that they share.

    Raises:
        OSError: the file cannot be written.
        ValueError: the path is no file name, such as ``"."``.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        yield scratch
        # Before the rename, which may reach the disk first and leave an empty file after a power failure.
        fsync_path(scratch)
        scratch.replace(target)
        fsync_path(target.parent)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def write_or_raise(path: str | os.PathLike[str], what: str) -> Iterator[Path]:
    """Yields the scratch file of `atomic_write`; raises `InputError` where ``what``, a kind of file, is not written."""
    try:
        with atomic_write(Path(path)) as scratch:
            yield scratch
    except (OSError, ValueError) as error:  # ValueError: a path that is no file name, such as "."
        raise InputError(f"{what} {path}: cannot be written ({error}). Give another path or free space.") from error


def fsync_path(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to the disk.

    Raises:
        OSError: the path does not exist or cannot be flushed.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_output(option: str, path: Path, *, is_folder: bool = False) -> None:
    """Raises `InputError` for an output of a command that cannot be written, before the work that leads to it.

    Missing folders are made; ``option`` names the output.
    """
    folder = path if is_folder else path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"{option} {str(path)!r} cannot be written: {error.strerror}.") from error
    if not is_folder and path.is_dir():
        raise InputError(f"{option} {str(path)!r} cannot be written: it is a folder. Name a file in it.")


def open_file(path: str | os.PathLike[str]) -> BufferedReader:
    """Opens a regular file to read; waits for nobody, as opening a pipe would.

    Raises:
        OSError: it cannot be opened, or is a folder, a pipe or a device.
    """
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115 - returned
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{os.fspath(path)} is no regular file, which every rank can read: save it as one")
    return file


def read_json(path: str | os.PathLike[str], *, place: str, remedy: str) -> Any:
    """Reads a JSON file.

    Error messages begin with ``place``, its kind and name, such as ``"Tower plan towers.json"``, and end with
    ``remedy``, an advice.

    Raises:
        InputError: the file cannot be read, is no regular file or not JSON.
    """
    return parse(_read(path, place, remedy), "JSON", place=place, remedy=remedy)


def read_toml(path: str | os.PathLike[str], *, place: str, remedy: str) -> dict[str, Any]:
    """Reads a TOML file; arguments and errors are those of `read_json`."""
    return dict(parse(_read(path, place, remedy), "TOML", place=place, remedy=remedy))


def _read(path: str | os.PathLike[str], place: str, remedy: str) -> str:
    try:
        with open_file(path) as file:
            return file.read().decode()
    except (OSError, ValueError) as error:  # ValueError: text that is not UTF-8, a path with a NUL
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{place}: cannot be read ({reason}). {remedy}") from error


def parse(text: str, kind: Literal["JSON", "TOML"], *, place: str, remedy: str) -> Any:
    """Reads text of a kind; ``place``, ``remedy`` and errors are those of `read_json`."""
    try:
        return json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: not {kind} ({error}). {remedy}") from error


def read_record(path: str | os.PathLike[str], *, what: str, version: int, remedy: str) -> dict[str, Any]:
    """Reads a JSON object whose key ``format`` is ``version``; ``what`` is a kind of file, such as ``"Tower plan"``.

    Raises:
        InputError: the file cannot be read, is not a JSON object, or of another format version.
    """
    record = read_json(path, place=f"{what} {path}", remedy=remedy)
    form = record.get("format") if isinstance(record, dict) else None
    if form != version:
        raise InputError(f"{what} {path} has format {form!r}; this version reads format {version}. {remedy}")
    return dict(record)


def read_model(path: str | os.PathLike[str], kind: type[T], *, what: str, version: int, remedy: str) -> T:
    """Makes a dataclass of a JSON file; arguments and errors are those of `read_record` and `from_record`."""
    record = read_record(path, what=what, version=version, remedy=remedy)
    return from_record(kind, record, place=f"{what} {path}", remedy=remedy)


def from_record(kind: type[T], record: Mapping[str, Any], *, place: str, remedy: str) -> T:
    """Makes a dataclass of a JSON object whose values, also nested ones, have exactly the types of its fields.

    Raises:
        InputError: a field is absent, has another type or breaks a rule; the message begins with ``place`` and ends
            with ``remedy``.
    """
    # Here, since it takes a tenth of a second to load, and most that imports this module reads no plan.
    from pydantic import TypeAdapter, ValidationError

    try:
        # As JSON: in Python's types, a strict check would refuse a list for a tuple.
        adapter: TypeAdapter[T] = TypeAdapter(kind)
        return adapter.validate_json(json.dumps(record), strict=True)
    except ValidationError as error:
        raise InputError(f"{place}: {explain(error)} {remedy}") from error


def explain(error: ValidationError) -> str:
    """Says in a sentence which field is the first that pydantic refuses, why, and what it has instead."""
    first = error.errors()[0]
    key = "".join(f"{part}." for part in first["loc"]).rstrip(".")
    reason = first["msg"].removeprefix("Value error, ").rstrip(".")
    got = "" if first["type"] == "value_error" else f" (got {first['input']!r:.200})"
    return f"{key and f'{key}: '}{reason}{got}."
