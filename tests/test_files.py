"""Files that are no JSON or TOML, pipes and devices, and files that two hosts write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dmt.errors import InputError
from dmt.files import atomic_write, parse, read_json, read_toml


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{,", r": not JSON \(Expecting property name"),
        (b"9" * 5000, r": not JSON \(Exceeds the limit"),
        (b"[" * 100_000, r": not JSON \(maximum recursion depth"),
        (b'"\xff"', r": cannot be read \('utf-8' codec"),
    ],
    ids=["syntax", "digits", "recursion", "bytes"],
)
def test_what_is_not_json(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(InputError, match=rf"Plan a\.json{reason}.*Make it again\."):
        read_json(tmp_path / "a.json", place="Plan a.json", remedy="Make it again.")


@pytest.mark.parametrize(
    ("text", "reason"),
    [("a = ", "Invalid value"), ("a = " + "[" * 5000, "maximum recursion"), ("a = " + "9" * 5000, "Exceeds the limit")],
    ids=["syntax", "recursion", "digits"],
)
def test_what_is_not_toml(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=rf"Config x: not TOML \({reason}.*Fix it\."):
        parse(text, "TOML", place="Config x", remedy="Fix it.")


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, reason in (
        (tmp_path / "pipe", "is no regular file, which every rank can read: save it as one"),
        (Path("/dev/zero"), "is no regular file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "absent", "No such file"),
        (Path("a\0b"), "null byte"),
    ):
        for read in (read_json, read_toml):
            with pytest.raises(InputError, match=rf"X: cannot be read \(.*{reason}"):
                read(path, place="X", remedy="")


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
