"""Saves that fail leave everything as it was, and saves in the background see the moment they were asked at."""

from __future__ import annotations

import importlib.metadata
import math
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dmt import TowerMesh, TowerTopology
from dmt._torchrec import default_pg_timeout, group_timeout
from dmt.errors import InputError
from dmt.training.checkpoints import store
from dmt.training.checkpoints.store import Checkpointer, load_plain, newest, read_manifest, verify
from tests.ranks import on_ranks, run_ranks
from tests.training.small import alone, files_up_to, linear, save_alone

# Of two layers each rank writes one.
LAYER = 300
BYTES_OF_LAYER = 4 * LAYER * LAYER


def two_layers(value: float) -> nn.Module:
    layers = nn.Sequential(nn.Linear(LAYER, LAYER, bias=False), nn.Linear(LAYER, LAYER, bias=False))
    for parameter in layers.parameters():
        nn.init.constant_(parameter, value)
    return layers


def saves_on_rank(rank: int, folder: str, asynchronous: bool) -> list[tuple[bool, list[str]]]:
    """One good save, then one for each fault with a good one after it: whether each succeeded, and what is there."""
    mesh = TowerMesh(TowerTopology(num_towers=1, ranks_per_tower=2))
    found: list[tuple[bool, list[str]]] = []
    faults: dict[str, bool] = {}

    def describe(scratch: Path) -> None:
        if faults.get("describe"):
            raise PermissionError(13, "Permission denied", str(scratch))

    checkpointer = Checkpointer(folder, mesh, keep=1, asynchronous=asynchronous)
    assert group_timeout(checkpointer._writers) == group_timeout(mesh.global_group) != default_pg_timeout

    def save(step: int) -> None:
        started = checkpointer.save(two_layers(step), None, step=step, progress={}, describe=describe)
        ended = checkpointer.wait()
        assert started == (True if asynchronous else ended) or not asynchronous
        found.append((started and ended, sorted(path.name for path in Path(folder).iterdir())))

    save(1)
    for step, broken in ((2, 0), (4, 1)):
        with files_up_to(BYTES_OF_LAYER // 2) if rank == broken else nullcontext():
            save(step)
        save(step + 1)
    faults["describe"] = True
    save(6)
    faults.clear()
    save(7)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_fails_on_any_rank_fails_on_all_and_the_next_succeeds(asynchronous: bool, tmp_path: Path) -> None:
    by_rank = run_ranks(saves_on_rank, 2, str(tmp_path), asynchronous)
    assert by_rank[0] == by_rank[1]
    kept = [1, 1, 3, 3, 5, 5, 7]
    assert [names for _, names in by_rank[0]] == [[f"step-{step:08d}"] for step in kept]
    assert [ok for ok, _ in by_rank[0]] == [True, False, True, False, True, False, True]
    model = two_layers(0.0)
    load_plain(model, tmp_path)
    assert all((parameter == 7).all() for parameter in model.parameters())


@on_ranks(2)
def test_a_folder_that_hosts_do_not_share_takes_no_checkpoint(rank: int, tmp_path: Path) -> None:
    """Each rank has a folder of its own, as hosts have whose path is no shared one."""
    mesh = TowerMesh(TowerTopology(num_towers=1, ranks_per_tower=2))
    (tmp_path / f"host{rank}").mkdir()
    os.chdir(tmp_path)
    checkpointer = Checkpointer(Path("in"), mesh, keep=1)
    assert checkpointer.save(two_layers(1), None, step=1, progress={})
    assert checkpointer.save(two_layers(1), None, step=2, progress={})
    if rank == 1:
        os.chdir("host1")
    assert not checkpointer.save(two_layers(1), None, step=3, progress={})
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["step-00000002"]
    assert newest(tmp_path / "in") is not None
    with pytest.raises(InputError, match=r"Checkpoint folder in: rank 1 cannot see .*shared file system"):
        Checkpointer(Path("in"), mesh)
    if rank == 0:  # which leaves nothing
        assert [path.name for path in Path("in").iterdir()] == ["step-00000002"]


def test_files_are_on_the_disk_before_the_manifest_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def spy(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.removesuffix(".tmp"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    path = save_alone(linear(1.0), tmp_path, files={"config.toml": "a = 1", "towers.json": "{}"})
    manifest = verify(path)
    assert sorted(manifest.files) == [".metadata", "__0_0.distcp", "config.toml", "towers.json"]
    assert set(manifest.files) <= set(synced[: synced.index("checkpoint.json")])
    assert manifest.versions["torch"] == importlib.metadata.version("torch")


@on_ranks(2)
def test_an_error_in_training_costs_no_save_under_way(rank: int, tmp_path: Path) -> None:
    """Training fails right after a save has begun: the error is held back until the save is whole."""

    def slow(scratch: Path) -> None:
        time.sleep(0.5)
        (scratch / "a").write_text("x")

    mesh = TowerMesh(TowerTopology(num_towers=1, ranks_per_tower=2))
    checkpointer = Checkpointer(tmp_path, mesh, asynchronous=True)

    def train() -> None:
        checkpointer.save(two_layers(1 + rank), None, step=1, progress={}, describe=slow)
        raise RuntimeError("training failed")

    with pytest.raises(RuntimeError, match="training failed"), closing(checkpointer):
        train()
    files = verify(tmp_path / "step-00000001").files
    assert sorted(files) == [".metadata", "__0_0.distcp", "__1_0.distcp", "a"]


def mount(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        not shutil.which("mount")
        or mount("-t", "tmpfs", "-o", f"size={3 * BYTES_OF_LAYER}", "none", str(folder)).returncode
    ):
        pytest.skip("a disk of one's own needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_costs_nothing_that_was_saved(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    with alone() as mesh:
        checkpointer = Checkpointer(small_disk / "in", mesh)
        assert checkpointer.save(two_layers(1.0), None, step=1, progress={})
        assert not checkpointer.save(two_layers(2.0), None, step=2, progress={})
        (message,) = [record.message for record in caplog.records if record.name == store.__name__]
        assert "The checkpoint of step 2 was not saved to" in message
        assert "rank 0: OSError: [Errno 28] No space left on device" in message
        assert newest(small_disk / "in") == small_disk / "in" / "step-00000001"
        assert [path.name for path in (small_disk / "in").iterdir()] == ["step-00000001"]
        assert mount("-o", f"remount,size={9 * BYTES_OF_LAYER}", str(small_disk)).returncode == 0
        assert checkpointer.save(two_layers(3.0), None, step=3, progress={})
    assert newest(small_disk / "in") == small_disk / "in" / "step-00000003"


def test_a_save_in_the_background_has_the_values_of_its_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    write = store.write_tensors

    def slow(*arguments: Any) -> Any:
        assert goes_on.wait(30)
        return write(*arguments)

    monkeypatch.setattr(store, "write_tensors", slow)
    model = linear(1.0)
    with alone() as mesh:
        checkpointer = Checkpointer(tmp_path, mesh, asynchronous=True)
        assert checkpointer.save(model, None, step=1, progress={"row": 5})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(2.0)
        assert not list(tmp_path.glob("step-*")), "it was written at once"
        goes_on.set()
        assert checkpointer.save(model, None, step=2, progress={"row": 6}), "it waits for the one before"
        assert (tmp_path / "step-00000001").exists()
        assert checkpointer.wait()
        assert checkpointer.wait(), "there is nothing to wait for"
    for step, value in ((1, 1.0), (2, 2.0)):
        loaded = linear(0.0)
        load_plain(loaded, tmp_path / f"step-{step:08d}")
        assert (loaded.weight == value).all()
        assert (loaded.bias == value).all()
    assert read_manifest(tmp_path / "step-00000001").progress == {"row": 5}


def test_what_cannot_be_saved_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

    with alone() as mesh:
        checkpointer = Checkpointer(tmp_path, mesh)
        assert not checkpointer.save(linear(1.0), None, step=1, progress={"seen": {1}})
        assert "TypeError: Object of type set is not JSON serializable" in caplog.text
        with pytest.raises(InputError, match=r"model\._extra_state is of type dict, but checkpoints hold tensors only"):
            checkpointer.save(Odd(1, 1), None, step=1, progress={})
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_not_saved_in_the_place_of_good_ones(
    value: float, asynchronous: bool, tmp_path: Path
) -> None:
    with alone() as mesh, closing(Checkpointer(tmp_path, mesh, keep=1, asynchronous=asynchronous)) as checkpointer:
        assert checkpointer.save(linear(1.0), None, step=1, progress={})
        model = linear(2.0)
        with torch.no_grad():
            model.weight[1, 2] = value
        with pytest.raises(InputError, match=r"Step 2 is not saved: rank 0 has NaN or infinity in model\.weight\."):
            checkpointer.save(model, None, step=2, progress={})
    assert newest(tmp_path) == tmp_path / "step-00000001"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_folder_that_takes_no_checkpoints_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with alone() as mesh, pytest.raises(InputError, match=r"Checkpoint folder .*file/in' cannot be written: Not a dir"):
        Checkpointer(tmp_path / "file" / "in", mesh)


def test_a_disk_that_becomes_read_only_costs_nothing_that_was_saved(small_disk: Path) -> None:
    with alone() as mesh:
        checkpointer = Checkpointer(small_disk / "in", mesh, keep=1)
        assert checkpointer.save(linear(1.0), None, step=1, progress={})
        assert mount("-o", "remount,ro", str(small_disk)).returncode == 0
        assert not checkpointer.save(linear(2.0), None, step=2, progress={})
        assert newest(small_disk / "in") == small_disk / "in" / "step-00000001"
        with pytest.raises(InputError, match=r"Checkpoint folder .* cannot be written: Read-only file system"):
            Checkpointer(small_disk / "in", mesh)
        assert mount("-o", "remount,rw", str(small_disk)).returncode == 0
        assert checkpointer.save(linear(3.0), None, step=3, progress={})
    assert newest(small_disk / "in") == small_disk / "in" / "step-00000003"
