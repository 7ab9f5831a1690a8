"""Checkpoints of 2 x 2 ranks load into the plain model bit by bit, and into no other model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dmt.errors import InputError
from dmt.mesh import TowerMesh
from dmt.training.build import ClickTask, build_model, shard_model
from dmt.training.checkpoint import load_plain, save_model
from dmt.training.config import TrainingConfig
from dmt.training.data import open_source
from tests.parity import full_state
from tests.ranks import run_ranks

# DCP notes that it loads in one process, torch that a typed storage is deprecated (inside torch's own checkpoint code).
pytestmark = pytest.mark.ranks
NUM_DENSE = 3
DATA = {"synthetic": {"num_features": 5, "num_dense": NUM_DENSE, "rows_per_table": 11, "num_groups": 2}}
ARCHS = {"dlrm": "flat", "dmt-dlrm": "sptt", "dcn": "sptt"}


def small(arch: str, seed: int = 0, **sizes: Any) -> TrainingConfig:
    model = {"embedding_dim": 8, "dense_arch": [6], "over_arch": [4, 1], "tower_dim": 4, "cross_layers": 1}
    return TrainingConfig.model_validate(
        {
            "model": {**model, "arch": arch, "cross_rank": 2, **sizes},
            "topology": {"num_towers": 2, "ranks_per_tower": 2},
            "sharding": {"dataflow": ARCHS.get(arch, "auto")},
            "data": DATA,
            "train": {"seed": seed},
        }
    )


def plain(config: TrainingConfig) -> ClickTask:
    tables = open_source(config.data, embedding_dim=config.model.embedding_dim).tables
    return ClickTask(build_model(config, tables, NUM_DENSE))


def save_on_rank(rank: int, folder: str, seed: int) -> dict[str, dict[str, torch.Tensor]]:
    """Saves one checkpoint for each arch; returns the weights saved."""
    states = {}
    for arch in ARCHS:
        config = small(arch, seed)
        mesh = TowerMesh(config.topology.build())
        tables = open_source(config.data, embedding_dim=config.model.embedding_dim).tables
        model = shard_model(config, tables, NUM_DENSE, mesh)
        save_model(model, Path(folder) / arch)
        states[arch] = full_state(model)
    return states


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, torch.Tensor]]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    # What a save leaves that was stopped half way: the next one must not mix with it.
    (folder / ".dlrm.partial").mkdir()
    (folder / ".dlrm.partial" / "__0_0.distcp").write_bytes(b"half a file")
    (folder / ".dlrm.partial" / "left_over").write_bytes(b"")
    run_ranks(save_on_rank, 4, str(folder), 1)
    (folder / "dlrm" / "left_over").write_bytes(b"")
    # The second save overwrites the first, of other weights.
    return folder, run_ranks(save_on_rank, 4, str(folder), 2)[0]


@pytest.mark.parametrize("arch", ARCHS)
def test_it_loads_into_the_plain_model_bit_by_bit(
    arch: str, saved: tuple[Path, dict[str, dict[str, torch.Tensor]]]
) -> None:
    folder, states = saved
    model = plain(small(arch))
    load_plain(model, folder / arch)
    loaded = model.state_dict()
    assert loaded.keys() == states[arch].keys()
    for name, value in states[arch].items():
        assert torch.equal(loaded[name], value), name
        assert value.any(), f"{name} is all zero, so nothing was compared"


def test_nothing_is_left_of_older_and_broken_saves(
    saved: tuple[Path, dict[str, dict[str, torch.Tensor]]],
) -> None:
    folder, _ = saved
    assert sorted(path.name for path in folder.iterdir()) == sorted(ARCHS)
    assert not (folder / "dlrm" / "left_over").exists()


@pytest.mark.parametrize(
    ("of", "into", "sizes", "message"),
    [
        ("dlrm", "dmt-dlrm", {}, r"another model: it lacks \['model\.model\.sparse_arch\.towers\.0\."),
        ("dmt-dlrm", "dlrm", {}, r"it lacks \['model\.model\.sparse_arch\.embedding_bags\..*and has \['model\.model\."),
        ("dlrm", "dlrm", {"over_arch": [4, 4, 1]}, r"it lacks \['model\.model\.over_arch.* and has nothing besides"),
        ("dlrm", "dlrm", {"over_arch": [1]}, r"it lacks nothing and has \['model\.model\.over_arch"),
        ("dlrm", "dlrm", {"embedding_dim": 12}, r"does not fit the model: .*model\.model\.\S*weight"),
        ("dmt-dlrm", "dmt-dlrm", {"tower_dim": 8}, r"does not fit the model: .*model\.model\.\S*weight"),
    ],
)
def test_another_model_is_refused_with_names(
    of: str,
    into: str,
    sizes: dict[str, Any],
    message: str,
    saved: tuple[Path, dict[str, dict[str, torch.Tensor]]],
) -> None:
    with pytest.raises(InputError, match=message):
        load_plain(plain(small(into, **sizes)), saved[0] / of)


def test_tables_of_other_sizes_are_refused(saved: tuple[Path, dict[str, dict[str, torch.Tensor]]]) -> None:
    config = small("dlrm")
    more = config.model_copy(update={"data": config.data.model_validate({"synthetic": {**DATA["synthetic"], "rows_per_table": 12}})})
    with pytest.raises(InputError, match=r"does not fit the model: .*t_C1\.weight"):
        load_plain(plain(more), saved[0] / "dlrm")


def test_a_failed_load_says_so_and_an_absent_folder_too(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere holds no checkpoint\. Give the output_dir"):
        load_plain(plain(small("dlrm")), tmp_path / "nowhere")
    with pytest.raises(InputError, match="holds no checkpoint"):
        load_plain(plain(small("dlrm")), tmp_path)
