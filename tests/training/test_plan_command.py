"""`dmt plan`: what it reads, prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from dmt import InputError, TableSpec, TowerPlan
from dmt.sharding.explanation import TowerShardingPlan
from dmt.training.config import to_toml
from dmt.training.data.config import read_tables
from dmt.training.job import open_job
from tests.training.small import dmt, small


def specs(number: int = 6) -> tuple[TableSpec, ...]:
    return tuple(
        TableSpec(name=f"t_{i}", num_embeddings=10**6, embedding_dim=32, feature_names=(f"f{i}",))
        for i in range(number)
    )


def config_file(folder: Path, **sections: dict[str, Any]) -> Path:
    """A config of towers of 8 ranks; paths in ``sections`` become texts."""
    sections["topology"] = {"ranks_per_tower": 8} | sections.get("topology", {})
    texts = {
        name: {key: str(value) if isinstance(value, Path) else value for key, value in section.items()}
        for name, section in sections.items()
    }
    path = folder / "plan.toml"
    path.write_text(tomli_w.dumps(texts))
    return path


def record_of(*arguments: object) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(dmt("plan", *arguments, "--json").output)
    return record


def test_a_config_is_planned_as_the_trainer_will(tmp_path: Path) -> None:
    sections = {"memory_gib": 0.5, "tables": {"t_C2": "row_wise"}, "pooling_factors": {"C1": 7.0}}
    config = small(sharding={**sections, "cluster": "h100"})
    (tmp_path / "run.toml").write_text(to_toml(config))
    assert record_of(tmp_path / "run.toml") == json.loads(json.dumps(open_job(config).sharding.to_record()))
    assert record_of(tmp_path / "run.toml", "train.batch_size=64")["workload"]["batch_size"] == 64


ENTRY = '{"name": "a", "num_embeddings": 10, "embedding_dim": 8, "feature_names": ["x"]%s}'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('"name": 3', r"name: .*string \(got 3\)"),
        ('"data_type": "INT8"', r"data_type: .*'FP32' or 'FP16' \(got 'INT8'\)"),
        ('"datatype": "FP16"', r"datatype: Extra inputs are not permitted"),
        ("[3]", r"entry 1: Input should be an object \(got 3\)"),
        ("[]", "holds no list of tables"),
        ('{"format": 1}', "holds no list of tables"),
        (f"[{ENTRY % ''}, {ENTRY % ''}]", "Table 'a' occurs 2 times"),
    ],
    ids=lambda text: text[:30],
)
def test_malformed_tables_are_named(change: str, message: str, tmp_path: Path) -> None:
    """``change``: of the second entry, or the whole file."""
    path, is_entry = tmp_path / "tables.json", change.startswith('"')
    path.write_text(f"[{ENTRY % ''}, {ENTRY % f', {change}'}]" if is_entry else change)
    with pytest.raises(InputError, match=rf"data.tables='{path}'{', entry 2' if is_entry else ''}.*{message}"):
        read_tables(path)


def test_recorded_tables_are_planned_and_written(tmp_path: Path) -> None:
    path, out = tmp_path / "towers.json", tmp_path / "plan.json"
    TowerPlan.from_lists([["f0", "f1", "f2"], ["f3", "f4", "f5"]], tables=specs()).save(path)
    sharding = {"memory_gib": 1, "tables": {"t_0": "row_wise", "t_1": "column_wise"}}
    sections = {"towers": {"plan": path}, "data": {"tables": path}, "topology": {"num_towers": 2}}
    dmt("plan", config_file(tmp_path, sharding=sharding, **sections), "--out", out)
    found = TowerShardingPlan.load(out)
    assert [found.placements[name].scheme for name in ("t_0", "t_1")] == ["row_wise", "column_wise"]
    assert found.hardware.memory_per_rank == 2**30
    assert [table.tower for table in found.tables] == [0, 0, 0, 1, 1, 1]


def test_without_towers_the_features_of_a_table_stay_together(tmp_path: Path) -> None:
    shared = [dict(vars(table), feature_names=(f"a{i}", f"b{i}")) for i, table in enumerate(specs(5))]
    (tmp_path / "tables.json").write_text(json.dumps(shared))
    config = config_file(tmp_path, data={"tables": tmp_path / "tables.json"}, topology={"num_towers": 3})
    towers = {table["name"]: table["tower"] for table in record_of(config)["tables"]}
    assert towers == {"t_0": 0, "t_1": 1, "t_2": 2, "t_3": 0, "t_4": 1}
    assert "besides tables in host memory" in dmt("plan", config, "sharding.tables.t_0=fused_uvm").output


@pytest.mark.parametrize("are_cut", [False, True])
def test_tables_of_a_file_are_whole_or_cut_as_the_towers_want_them(are_cut: bool, tmp_path: Path) -> None:
    cut = TowerPlan.from_lists([["f0[0:16]", "f1"], ["f0[16:32]"]], column_splits={"f0": (16, 16)})
    cut.save(tmp_path / "cut.json")
    tables = cut.split_tables(specs(2)) if are_cut else specs(2)
    (tmp_path / "tables.json").write_text(json.dumps([vars(table) for table in tables]))
    data, topology = {"tables": tmp_path / "tables.json"}, {"num_towers": 2}
    config = config_file(tmp_path, towers={"plan": tmp_path / "cut.json"}, data=data, topology=topology)
    towers = {table["name"]: table["tower"] for table in record_of(config)["tables"]}
    assert towers == {"t_0[0:16]": 0, "t_1": 0, "t_0[16:32]": 1}
