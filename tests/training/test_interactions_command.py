"""``dmt partition --strategy interactions``: from a file of rows, from a run, and from what was saved."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from dmt import TowerPlan
from dmt.partitioner import FeatureAffinity
from dmt.training.commands import main
from dmt.training.config import to_toml
from tests.partitioner.clicks import parity_clicks, planted_clicks
from tests.training.small import make_checkpoint, small


def partition(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["partition", *map(str, arguments)])


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six features, of which the 1st and 3rd, the 2nd and 6th, and the 4th and 5th interact."""
    ids, labels = planted_clicks(6, [(0, 2), (1, 5), (3, 4)], rows=6000, strength=1.5)
    names = [f"c_{i}" for i in range(6)]
    lines = [",".join(["label", "d_0", *names])]
    lines += [
        ",".join(map(str, [int(label), i % 7, *own])) for i, (label, own) in enumerate(zip(labels, ids, strict=True))
    ]
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_file_of_rows_is_all_it_takes(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["dmt", "partition", "..."])
    out, saved = tmp_path / "towers.json", tmp_path / "interactions.npz"
    asked = ["--strategy", "interactions", "--towers", "3", "--out", out]
    result = partition("--data", rows, *asked, "--tower-module", "dcn", "--report", tmp_path, "--save-affinity", saved)
    assert result.exit_code == 0, result.output
    plan = TowerPlan.load(out)
    pairs = {frozenset({"c_0", "c_2"}), frozenset({"c_1", "c_5"}), frozenset({"c_3", "c_4"})}
    assert {frozenset(tower) for tower in plan.to_lists()} == pairs
    assert (plan.strategy, plan.command) == ("together", "dmt partition ...")
    assert plan.tables == ()
    printed = " ".join(result.output.split())
    assert re.search("(9[0-9]|100)% of all interaction beyond the error of measuring is inside", printed)
    assert re.search("c_0, c_2: known together they gain [0-9.]+ . [0-9.]+ nats a row", printed)
    page = (tmp_path / "report.html").read_text()
    assert "within naive towers" in page
    assert page.count("<td>tower_") == 3
    # What was saved needs no rows; a linear tower module parts what the other kept together.
    result = partition("--affinity", saved, *asked, "--tower-module", "dlrm", "--json")
    assert result.exit_code == 0, result.output
    towers = [set(tower["features"]) for tower in json.loads(result.stdout)["towers"]]
    assert not any(pair <= tower for pair in pairs for tower in towers)
    result = partition("--affinity", saved, *asked, "--tower-module", "dlrm-products", "--json")
    assert {frozenset(tower["features"]) for tower in json.loads(result.stdout)["towers"]} == pairs
    assert FeatureAffinity.load(saved).num_samples == 16 * 337  # a tenth of the rows evaluates


@pytest.mark.parametrize(("arch", "strategy"), [("dcn", "together"), ("dmt-dlrm", "apart")])
def test_a_run_says_which_tower_module_and_which_tables(arch: str, strategy: str, rows: Path, tmp_path: Path) -> None:
    data = {"kind": "columns", "train_path": str(rows), "categorical": ["c_*"], "dense": ["d_*"]}
    run = small(arch, data=data)
    make_checkpoint(tmp_path / "run" / "checkpoint", 7, {"config.toml": to_toml(run)})
    out = tmp_path / "towers.json"
    # By default towers go by interactions where their modules keep them, and say so.
    result = partition("--checkpoint", tmp_path / "run", "--towers", "3", "--out", out)
    said = "Strategy interactions;" in result.stderr
    assert said == (arch == "dcn")
    # A module that keeps no interactions is none to choose them for, named or not.
    result = partition("--checkpoint", tmp_path / "run", "--tower-module", "dlrm", "--towers", "3", "--out", out)
    assert "Strategy interactions" not in result.stderr
    limits = ["--rules", tmp_path / "rules.toml"]
    (tmp_path / "rules.toml").write_text('max_work_ratio = 1.1\napart = [["c_1", "c_5"]]\n')
    result = partition(
        "--checkpoint", tmp_path / "run", "--strategy", "interactions", "--towers", "3", "--out", out, *limits
    )
    assert result.exit_code == 0, result.output
    plan = TowerPlan.load(out)
    assert plan.strategy == strategy
    assert [table.embedding_dim for table in plan.tables] == [run.model.embedding_dim] * 6
    # The rule leaves room for one of the other two pairs.
    towers = [set(tower) for tower in plan.to_lists()]
    assert ({"c_0", "c_2"} in towers or {"c_3", "c_4"} in towers) is (strategy == "together")
    assert {"c_1", "c_5"} not in towers


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "Give one of: --checkpoint RUN_DIR, --affinity FILE.npz, or rows alone, --data FILE with --tower-module"),
        (["--data", "x"], "Give one of"),
        (["--affinity", "x", "--checkpoint", "y"], "Give one of"),
        (
            ["--data", "x", "--strategy", "interactions", "--tower-module", "dcm"],
            "'dcm' is not one of",
        ),
        (["--data", "/no.csv", "--strategy", "interactions", "--tower-module", "dcn"], "'/no.csv' matches no file"),
        (["--affinity", "/no.npz", "--strategy", "interactions", "--tower-module", "dcn"], "Affinity file /no.npz"),
        (["--affinity", "/no.npz", "--strategy", "interaction"], "'interaction' is not one of"),
        (["--affinity", "x", "--data", "x", "--strategy", "interactions"], "Give one of"),
    ],
)
def test_what_does_not_fit_together_is_refused(arguments: list[str], reason: str) -> None:
    result = partition(*arguments, "--towers", "2")
    assert result.exit_code == 2, result.output
    assert reason in " ".join(result.output.split())


def test_a_saved_affinity_is_partitioned_by_resemblance_by_default(tmp_path: Path) -> None:
    FeatureAffinity(matrix=np.eye(4), features=list("abcd")).save(tmp_path / "affinity.npz")
    result = partition("--affinity", tmp_path / "affinity.npz", "--towers", "2", "--out", tmp_path / "towers.json")
    assert result.exit_code == 0, result.output
    assert TowerPlan.load(tmp_path / "towers.json").strategy == "coherent"


def test_a_file_of_the_other_measure_is_refused(tmp_path: Path) -> None:
    FeatureAffinity(matrix=np.eye(4), features=list("abcd")).save(tmp_path / "a.npz")
    asked = ["--affinity", tmp_path / "a.npz", "--towers", "2", "--out", tmp_path / "towers.json"]
    result = partition(*asked, "--strategy", "interactions")
    assert "strategy='together' does not fit the measure 'cosine'" in " ".join(result.output.split())


def test_a_saved_file_is_what_it_holds_by_default(tmp_path: Path) -> None:
    gains = np.zeros((4, 4))
    gains[0, 3] = gains[3, 0] = gains[1, 2] = gains[2, 1] = 0.1
    FeatureAffinity(matrix=gains, features=list("abcd"), measure="interactions").save(tmp_path / "found.npz")
    asked = ["--affinity", tmp_path / "found.npz", "--towers", "2", "--out", tmp_path / "towers.json"]
    result = partition(*asked)
    assert result.exit_code == 0, result.output
    plan = TowerPlan.load(tmp_path / "towers.json")
    assert {frozenset(tower) for tower in plan.to_lists()} == {frozenset("ad"), frozenset("bc")}
    result = partition(*asked, "--tower-module", "dlrm")
    assert result.exit_code == 0, result.output
    assert TowerPlan.load(tmp_path / "towers.json").strategy == "apart"


def test_a_parity_of_three_is_found_without_an_option(tmp_path: Path) -> None:
    ids, labels = parity_clicks(5, [(0, 2, 4)], rows=6000, strength=1.0)
    lines = [",".join(["label", "d_0", *(f"c_{i}" for i in range(5))])]
    lines += [",".join(map(str, [int(label), 0, *own])) for label, own in zip(labels, ids, strict=True)]
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    asked = ["--data", tmp_path / "rows.csv", "--tower-module", "dcn", "--towers", "2"]
    result = partition(*asked, "--out", tmp_path / "towers.json")
    assert result.exit_code == 0, result.output
    assert {"c_0", "c_2", "c_4"} in [set(tower) for tower in TowerPlan.load(tmp_path / "towers.json").to_lists()]
    assert "c_0, c_2, c_4 (0." in " ".join(result.output.split()), "a note"
