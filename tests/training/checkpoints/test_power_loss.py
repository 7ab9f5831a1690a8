"""A kill or a loss of power after any operation leaves the new checkpoint or the one before, never less than promised.

Every operation that changes names or flushes is recorded. After each one a disk may hold all of it, only what was
flushed, or all names but only the bytes that were flushed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dmt.training.checkpoints.store import Checkpointer, checkpoints, newest, prepare_folder, read_manifest
from tests.training.small import alone, linear

Tree = dict[str, Any]
OPERATIONS = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync")


class Disk:
    """Flushed names and bytes below a folder, by inode, and what a crash leaves after each operation."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self._root = root
        # Open descriptors: the number of an inode that is gone is not given to another.
        self._held: dict[int, int] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._bytes: dict[int, bytes] = {}
        self.promised = 0
        self.crashes: list[tuple[Tree, int, str]] = []
        for name in OPERATIONS:
            patch.setattr(os, name, self._recorded(name, getattr(os, name)))

    def _recorded(self, name: str, operate: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            self._hold(self._root)
            result = operate(*arguments, **options)
            if name == "fsync":
                self._flush(arguments[0])
            self._hold(self._root)
            root = self._root
            for crash in (self._flushed(root.stat().st_ino), self._named(root, False), self._named(root, True)):
                if not any(crash == before and self.promised == promised for before, promised, _ in self.crashes[-3:]):
                    self.crashes.append((crash, self.promised, f"{name}{arguments}"))
            return result

        return operation

    def _hold(self, path: Path) -> None:
        inode = path.stat().st_ino
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_RDONLY)
        for inner in path.iterdir() if path.is_dir() else ():
            self._hold(inner)

    def _flush(self, descriptor: int) -> None:
        status, path = os.fstat(descriptor), Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if stat.S_ISDIR(status.st_mode):
            self._names[status.st_ino] = {inner.name: inner.stat().st_ino for inner in path.iterdir()}
        else:
            self._bytes[status.st_ino] = path.read_bytes()

    def _flushed(self, inode: int) -> Any:
        if not stat.S_ISDIR(os.fstat(self._held[inode]).st_mode):
            return self._bytes.get(inode, b"")
        return {name: self._flushed(inner) for name, inner in self._names.get(inode, {}).items()}

    def _named(self, path: Path, is_kill: bool) -> Any:
        if not path.is_dir():
            return path.read_bytes() if is_kill else self._bytes.get(path.stat().st_ino, b"")
        return {inner.name: self._named(inner, is_kill) for inner in path.iterdir()}


def write(tree: Tree, folder: Path) -> None:
    folder.mkdir()
    for name, inner in tree.items():
        if isinstance(inner, dict):
            write(inner, folder / name)
        else:
            (folder / name).write_bytes(inner)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_kill_or_a_loss_of_power_leaves_the_new_checkpoint_or_the_one_before(
    keep: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    with alone() as mesh, pytest.MonkeyPatch.context() as patch:
        disk = Disk(root, patch)
        checkpointer = Checkpointer(root / "run" / "checkpoint", mesh, keep=keep)
        # The second one of step 2 takes the place of the first.
        for number, step in enumerate((1, 2, 2, 3), 1):
            assert checkpointer.save(linear(number), None, step=step, progress={"save": number})
            disk.promised = number
    assert len(disk.crashes) > 40
    for case, (tree, promised, operation) in enumerate(disk.crashes):
        folder = tmp_path / str(case) / "run" / "checkpoint"
        write(tree, tmp_path / str(case))
        for _ in range(2):  # as it is found, and after the next start
            found = newest(folder)
            saved = 0 if found is None else read_manifest(found).progress["save"]
            assert promised <= saved <= promised + 1, operation
            (folder / prepare_folder(folder)).rmdir()
        assert {*folder.iterdir()} == {*checkpoints(folder)}, operation
    assert not [text for text in caplog.messages if "Skipping a damaged" in text], "nothing damaged may be in sight"
