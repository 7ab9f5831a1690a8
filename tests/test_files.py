"""Reading within bounds: what JSON and TOML from elsewhere may hold, and how each refusal reads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dmt.errors import InputError
from dmt.files import atomic_write, parse_toml, read_json, read_toml

DEEP = "[" * 101 + "]" * 101


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{,", r", line 1: not JSON \(Expecting property name"),
        (b"9" * 5000, r": not JSON that can be read \(Exceeds the limit"),
        (b"[" * 100_000, r": not JSON that can be read \(maximum recursion depth"),
        (DEEP.encode(), ": brackets are nested more than 100 levels deep"),
        (b'{"a": 1' + b"0" * 30 + b"}", ": a whole number has more than 64 bits"),
        (rb'["\ud800"]', r": '\\ud800' is no Unicode text"),
        (rb'{"\ud800": 1}', r": '\\ud800' is no Unicode text"),
        (b'"\xff"', r": cannot be read \('utf-8' codec"),
        (b" " * (64 << 20) + b"1", r": cannot be read \(it has more than 64 MiB\)"),
    ],
    ids=["syntax", "digits", "recursion", "depth", "bits", "surrogate", "key", "bytes", "size"],
)
def test_json_beyond_the_bounds(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(InputError, match=rf"Plan a\.json{reason}.*Make it again\."):
        read_json(tmp_path / "a.json", place="Plan a.json", remedy="Make it again.")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a = ", r"not TOML \(Invalid value"),
        ("a = " + "[" * 5000, r"not TOML \(maximum recursion"),
        ("a = " + "9" * 5000, r"not TOML \(Exceeds the limit"),
        ("a = 0x" + "f" * 5000, "a whole number has more than 64 bits"),
        ("a = " + DEEP, "brackets are nested more than 100 levels deep"),
        (".".join("a" * 300_000) + "= 1", r"not TOML \(a key has more than 100 parts"),
        (f"[{'.'.join('a' * 300_000)}]", r"not TOML \(a key has more than 100 parts"),
    ],
    ids=["syntax", "recursion", "digits", "bits", "depth", "dots", "section"],
)
def test_toml_beyond_the_bounds(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=rf"Config x: {reason}.*Fix it\."):
        parse_toml(text, place="Config x", remedy="Fix it.")


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
