"""Writes files atomically and flushes them to disk; reads and checks JSON and TOML."""

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
    """Yields the path of a scratch file that atomically replaces ``target`` at the end; makes missing folders.

    After an error the scratch file is removed, and an existing target is unchanged. Processes on several hosts may
    write to a shared folder.

    Raises:
        OSError: the file cannot be written.
        ValueError: the path has no file name, for example ``"."``.
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
    """Works like `atomic_write`, but turns OSError and ValueError into `InputError`; ``what`` is the kind of file."""
    try:
        with atomic_write(Path(path)) as scratch:
            yield scratch
    except (OSError, ValueError) as error:  # ValueError: a path without a file name, such as "."
        raise InputError(f"{what} {path}: cannot be written ({error}). Give another path or free up space.") from error


def fsync_path(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to the disk; raises `OSError` if it cannot."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_output(option: str, path: Path, *, is_folder: bool = False) -> None:
    """Raises `InputError` if a command will not be able to write its output; call it before the work starts.

    Makes missing folders. ``option`` names the output in the message; ``is_folder`` says that ``path`` is a folder.
    """
    if any(part.endswith(":") for part in path.parts):  # pathlib has made s3:/bucket of s3://bucket
        raise InputError(f"{option} {str(path)!r} is a URL, but output is written to local files. Give a path.")
    folder = path if is_folder else path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InputError(f"{option} {str(path)!r} cannot be written: {error.strerror}. Give another path.") from error
    if not is_folder and path.is_dir():
        raise InputError(f"{option} {str(path)!r} cannot be written: it is a folder. Name a file in it.")


def read_file(path: str | os.PathLike[str], kind: Literal["JSON", "TOML"], *, place: str, remedy: str) -> Any:
    """Reads a JSON or TOML file and returns its parsed content.

    Error messages begin with ``place``, the kind and name of the file, such as ``"Tower plan towers.json"``, and end
    with ``remedy``, a sentence that says what to do.

    Raises:
        InputError: the file cannot be read, is a pipe, or is not valid JSON or TOML.
    """
    try:
        if Path(path).is_fifo():
            raise OSError("a pipe cannot be read by every rank: save it as a file")
        text = Path(path).read_bytes().decode("utf-8-sig")  # of Windows: with a byte-order mark
    except (OSError, ValueError) as error:  # ValueError: text that is not UTF-8, a path with a NUL
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{place}: cannot be read ({reason}). {remedy}") from error
    return parse(text, kind, place=place, remedy=remedy)


def parse(text: str, kind: Literal["JSON", "TOML"], *, place: str, remedy: str) -> Any:
    """Parses JSON or TOML text; ``place``, ``remedy`` and the errors raised are as in `read_file`."""
    try:
        return json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place} is not {kind} ({error}). {remedy}") from error


def read_record(path: str | os.PathLike[str], *, what: str, version: int, remedy: str) -> dict[str, Any]:
    """Reads a JSON object whose ``format`` is ``version``; ``what`` names the kind of file, ``remedy`` ends messages.

    Raises:
        InputError: the file cannot be read, is not a JSON object, or has a different format version.
    """
    record = read_file(path, "JSON", place=f"{what} {path}", remedy=remedy)
    form = record.get("format") if isinstance(record, dict) else None
    if form != version:
        raise InputError(f"{what} {path} has format {form!r}; this version reads format {version}. {remedy}")
    return dict(record)


def read_model(path: str | os.PathLike[str], kind: type[T], *, what: str, version: int, remedy: str) -> T:
    """Reads a JSON file as a dataclass; arguments and errors are as in `read_record` and `from_record`."""
    record = read_record(path, what=what, version=version, remedy=remedy)
    return from_record(kind, record, place=f"{what} {path}", remedy=remedy)


def from_record(kind: type[T], record: Mapping[str, Any], *, place: str, remedy: str) -> T:
    """Converts an object of JSON or TOML to the dataclass ``kind``; all values, even nested ones, must have its types.

    Keys that are not fields are ignored, unless ``kind`` forbids them.

    Raises:
        InputError: a field is absent, has the wrong type or breaks a rule; the message begins with ``place`` and ends
            with ``remedy``.
    """
    # Imported here: it takes a tenth of a second to load, and most users of this module read no plan.
    from pydantic import TypeAdapter, ValidationError

    try:
        # As JSON: in Python's types, a strict check would refuse a list for a tuple.
        adapter: TypeAdapter[T] = TypeAdapter(kind)
        # A date of TOML becomes a string, which no field but a text accepts.
        return adapter.validate_json(json.dumps(record, default=str), strict=True)
    except ValidationError as error:
        raise InputError(f"{place}: {explain(error)} {remedy}") from error


def explain(error: ValidationError) -> str:
    """Returns a sentence: the first field that pydantic rejects, the reason, and the value unless the reason has it."""
    first = error.errors()[0]
    key = "".join(f"{part}." for part in first["loc"]).rstrip(".")
    reason = first["msg"].removeprefix("Value error, ").rstrip(".").partition(" or instance of ")[0]
    reason = reason.replace("valid tuple", "list, in brackets").replace("valid dictionary", "table, in braces")
    try:
        got = "" if first["type"] in ("value_error", "missing") else f" (got {first['input']!r:.200})"
    except RecursionError:  # TOML's dotted keys nest tables as deep as they are long
        got = " (got too deeply nested tables)"
    return f"{key and f'{key}: '}{reason}{got}."
