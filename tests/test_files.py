"""Files that are no JSON or TOML, pipes, and files that two hosts write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import pytest

from dmt.errors import InputError
from dmt.files import atomic_write, read_file


@pytest.mark.parametrize(
    ("kind", "content", "reason"),
    [
        ("JSON", b"{,", r"not JSON \(Expecting property name"),
        ("JSON", b"9" * 5000, r"not JSON \(Exceeds the limit"),
        ("JSON", b"[" * 100_000, r"not JSON \(maximum recursion depth"),
        ("JSON", b'"\xff"', r"cannot be read \('utf-8' codec"),
        ("TOML", b"a = ", r"not TOML \(Invalid value"),
        ("TOML", b"a = " + b"[" * 5000, r"not TOML \(maximum recursion"),
        ("TOML", b"a = " + b"9" * 5000, r"not TOML \(Exceeds the limit"),
    ],
    ids=["syntax", "digits", "recursion", "bytes", "toml-syntax", "toml-recursion", "toml-digits"],
)
def test_what_is_not_of_its_kind(kind: Literal["JSON", "TOML"], content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(InputError, match=rf"Plan a: {reason}.*Make it again\."):
        read_file(tmp_path / "a", kind, place="Plan a", remedy="Make it again.")


def test_what_cannot_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, reason in (
        (tmp_path / "pipe", "a pipe cannot be read by every rank"),
        (tmp_path, "Is a directory"),
        (tmp_path / "absent", "No such file"),
        (Path("a\0b"), "null byte"),
    ):
        with pytest.raises(InputError, match=rf"X: cannot be read \(.*{reason}"):
            read_file(path, "JSON", place="X", remedy="")


def test_processes_of_two_hosts_write_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one process number, as containers have; the bytes are on the disk before the name is."""
    monkeypatch.setattr("os.getpid", lambda: 1)
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr("os.fsync", lambda file: (events.append("fsync"), fsync(file)))
    monkeypatch.setattr(Path, "replace", lambda path, to: (events.append("replace"), replace(path, to)))
    with atomic_write(tmp_path / "a") as first, atomic_write(tmp_path / "a") as second:
        assert first != second
        first.write_text("first")
        second.write_text("second")
    assert ((tmp_path / "a").read_text(), len(list(tmp_path.iterdir()))) == ("first", 1)
    assert events == ["fsync", "replace", "fsync"] * 2
