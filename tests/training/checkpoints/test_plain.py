"""Checkpoints of 2 x 2 ranks load into the plain model bit by bit, and into no other model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from dmt.errors import InputError
from dmt.sptt.mesh import TowerMesh
from dmt.testing import gather_plain_state
from dmt.training.build import build_optimizer, shard_model
from dmt.training.checkpoints import Checkpointer, load_plain, newest
from dmt.training.job import open_job
from tests.ranks import run_ranks
from tests.training.checkpoints.made import linear, save_alone
from tests.training.small import plain, small

pytestmark = pytest.mark.ranks
SAVED = [("dlrm", "flat"), ("dmt-dlrm", "sptt"), ("dcn", "sptt")]
STEP = "step-00000007"
State = dict[str, torch.Tensor]


def save_on_rank(rank: int, folder: str) -> dict[str, State]:
    """Saves one checkpoint for each of `SAVED`, over an older one of the first; returns the weights saved."""
    states = {}
    for seed, (arch, dataflow) in [(1, SAVED[0]), *((2, case) for case in SAVED)]:
        config = small(arch, dataflow, train={"seed": seed})
        mesh = TowerMesh(config.topology.build())
        model = shard_model(open_job(config), mesh)
        optimizer = build_optimizer(config.optimizer, model)
        target = Path(folder) / arch
        if rank == 0 and (target / STEP).exists():
            (target / STEP / "left_over").touch()
        assert Checkpointer(target, mesh).save(model, optimizer, step=7, progress={})
        states[arch] = gather_plain_state(model)
    return states


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, State]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    # What a save leaves that was stopped half way: the next one must not mix with it.
    partial = folder / "dmt-dlrm" / f".{STEP}.partial"
    partial.mkdir(parents=True)
    (partial / "__0_0.distcp").write_bytes(b"half a file")
    (partial / "left_over").write_bytes(b"")
    return folder, run_ranks(save_on_rank, 4, str(folder))[0]


@pytest.mark.parametrize("arch", [arch for arch, _ in SAVED])
def test_it_loads_into_the_plain_model_bit_by_bit(arch: str, saved: tuple[Path, dict[str, State]]) -> None:
    folder, states = saved
    model = plain(small(arch))
    load_plain(model, folder / arch)
    loaded = model.state_dict()
    assert loaded.keys() == states[arch].keys()
    for name, value in states[arch].items():
        assert torch.equal(loaded[name], value), name
    assert sum("embedding_bags" in name for name in loaded) == 6, "the tables were not compared"


def test_nothing_is_left_of_older_and_broken_saves(
    saved: tuple[Path, dict[str, State]],
) -> None:
    folder, _ = saved
    names = {path.name: [step.name for step in path.iterdir()] for path in folder.iterdir()}
    assert names == {"dlrm": [f"{STEP}.1"], "dmt-dlrm": [STEP], "dcn": [STEP]}
    assert not list(folder.rglob("left_over"))


@pytest.mark.parametrize(
    ("of", "into", "sizes", "message"),
    [
        ("dlrm", "dmt-dlrm", {}, r"another model .*it has model\.model\.\S*"),
        ("dmt-dlrm", "dlrm", {}, r"another model .*it has model\.model\.\S*"),
        ("dlrm", "dlrm", {"over_arch": [4, 4, 1]}, r"model\.model\.over_arch"),
        ("dlrm", "dlrm", {"over_arch": [1]}, r"it has model\.model\.over_arch\S*.* in addition"),
        ("dlrm", "dlrm", {"embedding_dim": 12}, r"Size mismatch between saved .* and current: .* for model\."),
        ("dmt-dlrm", "dmt-dlrm", {"tower_dim": 6}, r"Size mismatch between saved .* and current: .* for model\."),
    ],
)
def test_another_model_is_refused_with_names(
    of: str,
    into: str,
    sizes: dict[str, Any],
    message: str,
    saved: tuple[Path, dict[str, State]],
) -> None:
    with pytest.raises(InputError, match=message):
        load_plain(plain(small(into, model=sizes)), saved[0] / of)


def test_tables_of_other_sizes_are_refused(saved: tuple[Path, dict[str, State]]) -> None:
    with pytest.raises(InputError, match=r"\(\[11, 8\]\) and current: \S*\(\[12, 8\]\) for \S*t_C1\.weight"):
        load_plain(plain(small("dlrm", synthetic={"rows_per_table": 12})), saved[0] / "dlrm")


def test_an_absent_checkpoint_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere holds no checkpoint\. Give the output_dir"):
        load_plain(plain(small("dlrm")), tmp_path / "nowhere")
    with pytest.raises(InputError, match="holds no checkpoint"):
        load_plain(plain(small("dlrm")), tmp_path)


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
