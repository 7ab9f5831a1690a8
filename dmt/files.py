"""Files written atomically or through to the disk; JSON and TOML read and checked."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
    "parse",
    "read_file",
    "read_model",
    "read_record",
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
    """Yields the scratch file of `atomic_write`; raises `InputError` about ``what`` (a kind of file) if that fails."""
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


def read_file(path: str | os.PathLike[str], kind: Literal["JSON", "TOML"], *, place: str, remedy: str) -> Any:
    """Reads a JSON or TOML file and returns what it holds.

    Error messages begin with ``place``, what the file is and its name, such as ``"Tower plan towers.json"``, and end
    with ``remedy``, a sentence that says what to do.

    Raises:
        InputError: the file cannot be read, is a pipe, or is not valid JSON or TOML.
    """
    try:
        if Path(path).is_fifo():
            raise OSError("a pipe cannot be read by every rank: save it as a file")
        text = Path(path).read_bytes().decode()
    except (OSError, ValueError) as error:  # ValueError: text that is not UTF-8, a path with a NUL
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{place}: cannot be read ({reason}). {remedy}") from error
    return parse(text, kind, place=place, remedy=remedy)


def parse(text: str, kind: Literal["JSON", "TOML"], *, place: str, remedy: str) -> Any:
    """Parses text of a kind, such as JSON; ``place``, ``remedy`` and errors are those of `read_file`."""
    try:
        return json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: not {kind} ({error}). {remedy}") from error


def read_record(path: str | os.PathLike[str], *, what: str, version: int, remedy: str) -> dict[str, Any]:
    """Reads a JSON object whose key ``format`` is ``version``; ``what`` is a kind of file, such as ``"Tower plan"``.

    Raises:
        InputError: the file cannot be read, is not a JSON object, or of another format version.
    """
    record = read_file(path, "JSON", place=f"{what} {path}", remedy=remedy)
    form = record.get("format") if isinstance(record, dict) else None
    if form != version:
        raise InputError(f"{what} {path} has format {form!r}; this version reads format {version}. {remedy}")
    return dict(record)


def read_model(path: str | os.PathLike[str], kind: type[T], *, what: str, version: int, remedy: str) -> T:
    """Reads a JSON file as a dataclass; arguments and errors are those of `read_record` and `from_record`."""
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
    """Returns a sentence with the first field that pydantic refuses, why, and the value."""
    first = error.errors()[0]
    key = "".join(f"{part}." for part in first["loc"]).rstrip(".")
    reason = first["msg"].removeprefix("Value error, ").rstrip(".")
    reason = reason.replace("valid tuple", "list, in brackets").replace("valid dictionary", "table, in braces")
    got = "" if first["type"] in ("value_error", "missing") else f" (got {first['input']!r:.200})"
    return f"{key and f'{key}: '}{reason}{got}."
