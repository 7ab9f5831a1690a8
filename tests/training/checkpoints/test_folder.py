"""Names, order, the last K, and damage."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dmt.errors import InputError
from dmt.training.checkpoints import store
from dmt.training.checkpoints.store import (
    MANIFEST_NAME,
    _digest,
    commit,
    load_plain,
    newest,
    prepare_folder,
    prune,
    verify,
)
from tests.training.small import fill_checkpoint, linear, make_checkpoint, plain, save_alone, small

FILES = {"a.txt": "alpha", "b.txt": "beta"}


def save(folder: Path, step: int, *, keep: int, **progress: Any) -> None:
    scratch = folder / f".step-{step:08d}.partial"
    scratch.mkdir()
    fill_checkpoint(scratch, step, FILES, **progress)
    prune(commit(scratch, step), keep)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("steps", "keep", "left"),
    [
        ((5, 10, 1_000_000_000, 1_000_000_001), 2, ["step-1000000000", "step-1000000001"]),
        # A step that is saved again takes the place of the first.
        ((1, 2, 2, 2), 2, ["step-00000001", "step-00000002.2"]),
        ((1, 2, 2), 1, ["step-00000002.1"]),
        # A course that was given up is deleted, or a restart would go on from it.
        ((10, 20, 30, 25), 2, ["step-00000020", "step-00000025"]),
    ],
)
def test_the_last_ones_are_kept_and_other_things_left_alone(
    steps: tuple[int, ...], keep: int, left: list[str], tmp_path: Path
) -> None:
    (tmp_path / "step-by-step.txt").touch()
    (tmp_path / ".step-notes").mkdir()
    (tmp_path / prepare_folder(tmp_path)).rmdir()
    for step in steps:
        save(tmp_path, step, keep=keep)
    assert names(tmp_path) == [".step-notes", *left, "step-by-step.txt"]
    assert newest(tmp_path) == tmp_path / left[-1]


def test_a_checkpoint_that_is_deleted_meanwhile_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, keep=1)

    def verify_late(path: Path, share: slice) -> Any:
        if not (tmp_path / "step-00000002").exists():
            save(tmp_path, 2, keep=1)
        return verify(path, share)

    monkeypatch.setattr(store, "verify", verify_late)
    assert newest(tmp_path) == tmp_path / "step-00000002"
    assert not caplog.messages


def edited(**change: Any) -> Callable[[Path], None]:
    """A manifest changed by somebody who signs it."""

    def edit(path: Path) -> None:
        record = json.loads(path.read_text())
        del record["digest"]
        path.write_text(json.dumps(record | change | {"digest": _digest(record | change)}))

    return edit


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("a.txt", Path.unlink, "is damaged: a.txt cannot be read .No such file.*Use another checkpoint"),
        ("a.txt", lambda path: path.write_text("omega"), "is damaged: a.txt was altered or cut off"),
        (MANIFEST_NAME, Path.unlink, "checkpoint.json: cannot be read .No such file"),
        (MANIFEST_NAME, lambda path: path.write_bytes(path.read_bytes()[:-2]), "not JSON"),
        (MANIFEST_NAME, lambda path: path.write_bytes(b"[" * 100_000), "checkpoint.json"),
        (MANIFEST_NAME, lambda path: path.write_text(path.read_text().replace("7", "8", 1)), "was altered"),
        (MANIFEST_NAME, edited(format=4), "has format 4; this version reads format 3"),
        (MANIFEST_NAME, edited(step="x"), "is damaged: checkpoint.json: step"),
        (MANIFEST_NAME, edited(files={"../secret": "s"}), "is damaged: checkpoint.json: files"),
    ],
)
def test_damage_is_named_and_leads_to_the_checkpoint_before(
    file: str, damage: Callable[[Path], None], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(tmp_path, 1, FILES)
    path = make_checkpoint(tmp_path, 7, FILES)
    assert verify(path).step == 7
    damage(path / file)
    with pytest.raises(InputError, match=message):
        verify(path)
    assert newest(tmp_path) == tmp_path / "step-00000001"
    assert "step-00000007" in caplog.text
    (tmp_path / "step-00000001" / "a.txt").unlink()
    with pytest.raises(InputError, match=r"holds no intact checkpoint: .*step-00000007"):
        newest(tmp_path)


# What the plain model takes of a folder: its own weights, of the newest checkpoint that is whole.


@pytest.mark.parametrize(
    ("saved", "into", "sections", "message"),
    [
        ("dlrm", "dmt-dlrm", {}, r"another model .*yours lacks model\.model\.\S*"),
        ("dlrm", "dlrm", {"model": {"over_arch": [1]}}, r"yours lacks model\.model\.over_arch"),
        ("dlrm", "dlrm", {"synthetic": {"rows_per_table": 12}}, r"\[11, 8\].* current: \S*\[12, 8\].* \S*t_C1\.weight"),
    ],
)
def test_another_model_is_refused_with_names(
    saved: str, into: str, sections: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_alone(plain(small(saved)), tmp_path)
    with pytest.raises(InputError, match=message):
        load_plain(plain(small(into, **sections)), tmp_path)


def test_an_absent_checkpoint_is_told(tmp_path: Path) -> None:
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(InputError, match=r"holds no checkpoint\. Give one"):
            load_plain(linear(0.0), folder)


def test_sixty_bit_flips_and_truncations_are_noticed_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draw = random.Random(0)
    first = save_alone(linear(1.0), tmp_path, files={"config.toml": "a = 1"})
    second = save_alone(linear(2.0), tmp_path, files={"config.toml": "a = 2"}, step=2)
    assert newest(tmp_path) == second
    for number in range(60):
        file = draw.choice(sorted(second.iterdir()))
        whole = file.read_bytes()
        place = draw.randrange(len(whole))
        flipped = bytearray(whole)
        flipped[place] ^= 1 << draw.randrange(8)
        file.write_bytes(whole[:place] if number % 3 == 0 else flipped)
        model = linear(0.0)
        load_plain(model, tmp_path)
        assert (model.weight == 1.0).all(), (file, place)
        assert newest(tmp_path) == first
        assert "step-00000002" in caplog.messages[-1]
        file.write_bytes(whole)
    assert newest(tmp_path) == second
