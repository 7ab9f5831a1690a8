"""Files of data on this machine or, by a URL such as ``s3://bucket/day_0.parquet``, wherever fsspec reaches."""

from __future__ import annotations

import glob
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from dmt.errors import InputError

__all__ = ["file_exists", "file_version", "is_remote", "matching_files", "open_binary"]


# Keys by which stores tell one version of a file from another.
_MARKS = ("ETag", "etag", "generation", "md5Hash", "Content-MD5", "Digest", "mtime", "LastModified", "Last-Modified")


def is_remote(path: str) -> bool:
    """Tells a URL from a path of this machine.

    Example:
        >>> is_remote("s3://bucket/day_0.parquet"), is_remote("day_0.parquet")
        (True, False)
    """
    return "://" in path


def open_binary(path: str) -> BinaryIO:
    """Opens a file to read.

    Raises:
        OSError: it cannot be opened.
        InputError: there is no package for such a URL.
    """
    if not is_remote(path):
        return open(path, "rb")
    system, inner = _file_system(path)
    with _as_os_errors():
        return io.BufferedReader(system.open(inner, "rb"))


def file_version(path: str) -> tuple[int, int]:
    """Returns the bytes of a file, and a number that changes with it; errors are those of `open_binary`.

    Of a remote file its store tells them; it is not read.
    """
    if not is_remote(path):
        found = os.stat(path)
        return found.st_size, found.st_mtime_ns
    system, inner = _file_system(path)
    with _as_os_errors():
        info = system.info(inner)
        # Not every store's ukey changes with the file: that of HTTP is one of the URL.
        marks = [str(info[key]) for key in _MARKS if info.get(key)] or [str(system.ukey(inner))]
        return int(info["size"]), zlib.crc32(" ".join([str(info["size"]), *marks]).encode())


def file_exists(path: str) -> bool:
    """Tells whether there is a file or folder; errors are those of `open_binary`."""
    if not is_remote(path):
        return Path(path).exists()
    system, inner = _file_system(path)
    with _as_os_errors():
        return bool(system.exists(inner))


def matching_files(value: str) -> tuple[list[str], bool]:
    """Lists the files that a file name, folder or glob matches, in the order of their names; tells if it is a folder.

    Hidden files of a folder and those that begin with ``_`` are left out. A folder that is named ``*.parquet``, as
    Spark writes, stands for its files.

    Raises:
        OSError: the place cannot be read.
        RuntimeError: the home of nobody.
        InputError: there is no package for such a URL; a link leads nowhere; or a folder named ``*.parquet`` holds
            other folders, whose rows would be left out.
    """
    system, inner = _file_system(value) if is_remote(value) else (None, str(Path(value).expanduser()))
    with _as_os_errors():
        if is_folder := bool(system.isdir(inner) if system else os.path.isdir(inner)):
            names = _visible(inner, system)
        elif system.isfile(inner) if system else os.path.lexists(inner):
            names = [inner]
        else:
            names = list(system.glob(inner) if system else glob.glob(inner, recursive=True))
        found: list[str] = []
        for name in names:
            if not (system.isdir(name) if system else os.path.isdir(name)):
                found.append(name)
            elif name.rstrip("/").endswith(".parquet"):
                found += _parts(name, system)
        for name in found:
            if not (system.exists(name) if system else os.path.exists(name)):
                raise InputError(f"{name} (of {value!r}) is a link that leads nowhere. Mend or remove it.")
    if system:  # a single file keeps the name that the user gave it
        found = [value] if found == [inner] else [system.unstrip_protocol(name) for name in found]
    return sorted(found), is_folder


def _visible(folder: str, system: Any) -> list[str]:
    """Lists what is in a folder, but for names that begin with a dot or ``_``."""
    names = system.ls(folder, detail=False) if system else [os.path.join(folder, name) for name in os.listdir(folder)]
    return [name for name in names if name.rstrip("/").rpartition("/")[2][0] not in "._"]


def _parts(folder: str, system: Any) -> list[str]:
    """Lists the Parquet files of a folder that is named as one file, as Spark writes."""
    names = _visible(folder, system)
    for name in names:
        if system.isdir(name) if system else os.path.isdir(name):
            raise InputError(
                f"{folder} holds the folder {name.rstrip('/').rpartition('/')[2]!r}, whose rows would be left out. "
                "Write it without partitions, or name its files by a glob."
            )
    return [name for name in names if name.endswith((".parquet", ".pq"))]


def _file_system(path: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        system, inner = url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise InputError(
            f"{path!r} cannot be read: {error}. Install fsspec's package for such URLs, or copy the files to this host."
        ) from error
    return system, inner


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Turns the errors of a store's own package into those of files."""
    try:
        yield
    except (InputError, OSError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
