"""The `dmt` command: help with an example, JSON, exit codes, one-line reasons."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from dmt import TowerPlan
from dmt.partitioner import FeatureAffinity
from dmt.training.cli import main


def dmt(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def affinity(tmp_path: Path) -> Path:
    matrix = np.full((6, 6), 0.1)
    for group in ([0, 2, 4], [1, 3, 5]):
        matrix[np.ix_(group, group)] = 0.9
    np.fill_diagonal(matrix, 1)
    FeatureAffinity(matrix=matrix, features=list("abcdef")).save(tmp_path / "affinity.npz")
    return tmp_path / "affinity.npz"


@pytest.mark.parametrize("command", sorted(main.commands))
def test_help_has_an_example(command: str) -> None:
    result = dmt(command, "--help")
    assert result.exit_code == 0
    assert f"Example: dmt {command}" in " ".join(result.output.split())
    assert "--json" in result.output


def test_complexity_as_json() -> None:
    result = dmt("complexity", "--arch", "dlrm", "--towers", "8", "--tower-dim", "64", "--c", "1", "--p", "0", "--json")
    assert result.exit_code == 0
    counted = json.loads(result.output)
    assert set(counted) == {"mflops_per_sample", "parameters", "compression_ratio"}
    assert counted["mflops_per_sample"] == pytest.approx(8.95, rel=2e-3)
    assert counted["compression_ratio"] == 2


def test_complexity_as_a_table() -> None:
    result = dmt("complexity", "--arch", "dcn")
    assert result.exit_code == 0
    assert "96.17" in result.output


def test_partition_of_a_saved_affinity(affinity: Path, tmp_path: Path) -> None:
    out, picture = tmp_path / "towers.json", tmp_path / "affinity.png"
    result = dmt(
        "partition", "--affinity", str(affinity), "--towers", "2", "--out", str(out), "--picture", str(picture)
    )
    assert result.exit_code == 0, result.output
    assert TowerPlan.load(out).to_lists() == [["a", "c", "e"], ["b", "d", "f"]]
    assert TowerPlan.load(out).command.startswith("dmt ")
    assert picture.stat().st_size > 1000
    as_json = dmt("partition", "--affinity", str(affinity), "--towers", "2", "--out", str(out), "--json")
    assert json.loads(as_json.output)["towers"][0]["features"] == ["a", "c", "e"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["complexity", "--arch", "dlmr"], "error: arch='dlmr' is unknown; use 'dlrm' or 'dcn'. Did you mean 'dlrm'?"),
        (["complexity", "--arch", "dlrm", "--towers", "27"], "error: num_towers=27 must lie between 1 and"),
        (["partition", "--towers", "2"], "error: Give either --checkpoint RUN_DIR or --affinity FILE.npz."),
        (["partition", "--towers", "2", "--checkpoint", "/nowhere"], "error: /nowhere is not the output_dir of a"),
        (["partition", "--towers", "2", "--affinity", "/nowhere.npz"], "/nowhere.npz"),
        (["demo", "--data", "/nowhere.parquet"], "error: --data='/nowhere.parquet' matches no file"),
        (["demo", "model.archs=dlrm"], "error: Config key 'model.archs' is unknown. Did you mean 'arch'?"),
        (["demo", "model.arch=dlrm"], "the demo compares a multi-tower model with its flat form"),
        (["nonsense"], "No such command 'nonsense'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], reason: str) -> None:
    result = dmt(*arguments)
    assert result.exit_code == 2, result.output
    assert reason in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_too_many_towers_for_the_features(affinity: Path, tmp_path: Path) -> None:
    result = dmt("partition", "--affinity", str(affinity), "--towers", "7", "--out", str(tmp_path / "t.json"))
    assert result.exit_code == 2
    assert "7" in result.output
    assert not (tmp_path / "t.json").exists()


def test_doctor_as_json() -> None:
    result = dmt("doctor", "--json")
    assert result.exit_code == 0, result.output
    assert {line["what"] for line in json.loads(result.output)} >= {"python", "torch", "fbgemm", "torchrec", "import"}
