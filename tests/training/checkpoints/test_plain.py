"""What the plain model takes of a folder of checkpoints: its own weights, of the newest one that is whole."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from dmt.errors import InputError
from dmt.training.checkpoints.store import load_plain, newest
from tests.training.small import linear, plain, save_alone, small


@pytest.mark.parametrize(
    ("saved", "into", "sections", "message"),
    [
        ("dlrm", "dmt-dlrm", {}, r"another model .*it has model\.model\.\S*"),
        ("dlrm", "dlrm", {"model": {"over_arch": [4, 4, 1]}}, r"model\.model\.over_arch"),
        ("dlrm", "dlrm", {"model": {"over_arch": [1]}}, r"it has model\.model\.over_arch\S*.* in addition"),
        (
            "dmt-dlrm",
            "dmt-dlrm",
            {"model": {"tower_dim": 6}},
            r"Size mismatch between saved .* and current: ",
        ),
        (
            "dlrm",
            "dlrm",
            {"synthetic": {"rows_per_table": 12}},
            r"\(\[11, 8\]\) and current: \S*\(\[12, 8\]\) for \S*t_C1\.weight",
        ),
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
        with pytest.raises(InputError, match=r"holds no checkpoint\. Give the output_dir"):
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
