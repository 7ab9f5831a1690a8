"""Files of commit 46fd84c, with the names of that time, still load: see ``tests/data/made_at_46fd84c/README.md``."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dmt.plan.tables import feature_names
from dmt.plan.towers import TowerPlan
from dmt.sharding.plan import TowerShardingPlan
from dmt.training.checkpoints import load_plain, newest, verify
from dmt.training.config import TrainingConfig, load_config
from dmt.training.serving.score import score
from tests.training.small import plain, source
from tests.training.test_resume import attempt, losses

MADE = Path(__file__).parents[2] / "data" / "made_at_46fd84c"
CHECKPOINT = MADE / "step-00000006"
EXPECTED = json.loads((MADE / "expected.json").read_text())
SCHEMES = {
    "t_C1": "table_wise",
    "t_C2": "table_wise",
    "t_C3": "row_wise",
    "t_C4": "row_wise",
    "t_C5": "column_wise",
    "t_C6": "column_wise",
    "t_C7": "data_parallel",
    "t_C8": "data_parallel",
}


def test_the_checkpoint_is_whole() -> None:
    manifest = verify(CHECKPOINT)
    assert manifest.step == 6
    assert manifest.progress == {"epoch": 0, "row": 384, "files": []}
    assert sorted(manifest.column_shards.values()) == [(4, 4), (4, 4)]
    assert newest(CHECKPOINT) == CHECKPOINT


@pytest.mark.parametrize("file", [MADE / "config.toml", CHECKPOINT / "config.toml"], ids=["given", "resolved"])
def test_a_config_with_the_old_names_is_read(file: Path) -> None:
    sharding = load_config(file).sharding
    assert sharding.tables["t_C[78]"] == "data_parallel"
    assert sharding.tables["t_C5"] == "column_wise"
    assert sharding.memory_gb_per_s == 500
    assert sharding.intra_tower_gb_per_s == 100
    assert sharding.collective_latency_us == 25


def test_the_tower_plan_is_read() -> None:
    plan = TowerPlan.load(CHECKPOINT / "towers.json")
    assert [tower.features for tower in plan.towers] == [("C1", "C3", "C5", "C7"), ("C2", "C4", "C6", "C8")]
    assert feature_names(plan.tables) == [f"C{i}" for i in range(1, 9)]


def test_a_sharding_plan_with_the_old_names_is_read() -> None:
    plan = TowerShardingPlan.load(CHECKPOINT / "sharding.json")
    assert {name: placement.scheme for name, placement in plan.placements.items()} == SCHEMES
    assert plan.hardware.memory_gb_per_s == 500
    assert plan.hardware.intra_tower_gb_per_s == 100
    assert plan.hardware.collective_latency_us == 25
    assert plan.tables_by_scheme["data_parallel"] == 2


def test_the_weights_load_into_the_plain_model() -> None:
    model = plain(load_config(MADE / "config.toml"))
    load_plain(model, CHECKPOINT)
    loaded = {name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in model.state_dict().items()}
    assert loaded == EXPECTED["sha256"]


@pytest.mark.ranks
@pytest.mark.parametrize("placed_by", ["old config", "old sharding plan"])
def test_training_goes_on_from_it(tmp_path: Path, placed_by: str) -> None:
    """The next losses are those of commit 46fd84c; other CPUs may round them in other ways."""
    shutil.copytree(CHECKPOINT, tmp_path / "checkpoint" / CHECKPOINT.name)
    values: dict[str, Any] = load_config(MADE / "config.toml").model_dump(mode="json")
    values["train"] |= {"output_dir": str(tmp_path), "max_steps": 12}
    if placed_by == "old sharding plan":
        values["sharding"] |= {"plan": str(CHECKPOINT / "sharding.json"), "tables": {}}
        values["towers"]["plan"] = str(CHECKPOINT / "towers.json")
    run = TrainingConfig.model_validate(values)
    assert {table.name for table in source(run).tables} == SCHEMES.keys()
    result = attempt(run)
    assert result is not None
    # One process, of the same rows: what a server would come to, see tests/training/serving.
    served = score(tmp_path, tmp_path / "predictions.parquet").metrics
    assert served is not None
    assert (served.loss, served.auc) == pytest.approx((result["eval_loss"], result["eval_auc"]), abs=1e-6)
    found = {step: line["train/loss"] for step, line in losses(run) if "train/loss" in line}
    assert found == pytest.approx({step: EXPECTED["losses"][str(step)] for step in (7, 8, 9)}, rel=1e-5)
