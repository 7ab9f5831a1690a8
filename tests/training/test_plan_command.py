"""`dmt plan`: what it reads, prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from click.testing import CliRunner, Result

from dmt import InputError, TableSpec, TowerPlan
from dmt.sharding.plan import TowerShardingPlan
from dmt.training.commands import main
from dmt.training.config import to_toml
from dmt.training.data.config import read_tables
from dmt.training.job import open_job
from tests.training.small import small


@pytest.fixture(autouse=True)
def no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


def plan(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


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


@pytest.fixture
def towers(tmp_path: Path) -> Path:
    """A config of two towers, with the tables that their plan records."""
    TowerPlan.strided([f"f{i}" for i in range(6)], 2).save(tmp_path / "bare.json")
    path = tmp_path / "towers.json"
    TowerPlan.from_lists([["f0", "f1", "f2"], ["f3", "f4", "f5"]], tables=specs()).save(path)
    return config_file(tmp_path, towers={"plan": path}, data={"tables": path}, topology={"num_towers": 2})


def tables_file(folder: Path, number: int) -> Path:
    path = folder / "tables.json"
    path.write_text(json.dumps([vars(table) for table in specs(number)]))
    return path


def tables_config(folder: Path, number: int, **sections: dict[str, Any]) -> Path:
    """A config of tables without data."""
    return config_file(folder, data={"tables": tables_file(folder, number)}, **sections)


def record_of(*arguments: object) -> dict[str, Any]:
    result = plan(*arguments, "--json")
    assert result.exit_code == 0, result.output
    record: dict[str, Any] = json.loads(result.output)
    return record


def test_a_config_is_planned_as_the_trainer_will(tmp_path: Path) -> None:
    sections = {"memory_gib": 0.5, "tables": {"t_C2": "row_wise"}, "pooling_factors": {"C1": 7.0}}
    config = small(sharding={**sections, "cluster": "h100"})
    (tmp_path / "run.toml").write_text(to_toml(config))
    assert record_of(tmp_path / "run.toml") == json.loads(json.dumps(open_job(config).sharding.to_record()))
    assert record_of(tmp_path / "run.toml", "train.batch_size=64")["workload"]["batch_size"] == 64


def test_recorded_tables_are_planned_and_written(towers: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    settings = ["topology.ranks_per_tower=4", "train.batch_size=4096", "sharding.memory_gib=1"]
    rules = 'sharding.tables={t_0 = "row_wise", t_1 = "column_wise"}'
    result = plan(towers, *settings, rules, "--out", out)
    assert result.exit_code == 0, result.output
    found = TowerShardingPlan.load(out)
    assert found.placements["t_0"].scheme == "row_wise"
    assert found.placements["t_1"].scheme == "column_wise"
    assert found.hardware.memory_per_rank == 2**30
    assert [table.tower for table in found.tables] == [0, 0, 0, 1, 1, 1]
    words = " ".join(result.output.split())
    assert "row_wise over 4 ranks: asked for" in words
    assert f"{found.imbalance:.2f} times the mean of all ranks. The fullest host needs " in words
    assert "plan.json" in words


def test_many_tables_are_summed_up(tmp_path: Path) -> None:
    config = tables_config(tmp_path, 300, topology={"num_towers": 4}, sharding={"scheme": "table_wise"})
    assert "300 tables in 4 towers of 8 ranks: 300 table_wise." in plan(config).output
    assert len(record_of(config)["tables"]) == 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan.toml", "data.tables=bare.json"], "data.tables='bare.json' holds no list of tables"),
        (["plan.toml", "topology.num_towers=3"], "towers.json has 2 towers, but topology.num_towers=3"),
        (["plan.toml", "sharding.tables={t_9 = 'row_wise'}"], "rule for tables 't_9' matches none"),
        (["plan.toml", "sharding.pooling_factors={f0 = nan}"], "f0"),
        (["plan.toml", "sharding.memory_gib=nan"], "sharding.memory_gib: "),
        (["plan.toml", "sharding.memory_gib=0.001"], "memory_per_rank=1.07 MB have"),
        (["plan.toml", "data.tables=absent.json"], "data.tables='absent.json': cannot be read"),
        (["plan.toml", "data.tables=broken.json"], "data.tables='broken.json' is not JSON"),
        (["plan.toml", "data.tables=empty.json"], "data.tables='empty.json' holds no list of tables"),
        (["plan.toml", "data.tables=odd.json"], "data.tables='odd.json', entry 1: num_embeddings: Field required"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, towers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("broken", "{"), ("empty", "[]"), ("odd", '[{"name": "t"}]')):
        Path(f"{name}.json").write_text(text)
    result = plan(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1


ENTRY = '{"name": "a", "num_embeddings": 10, "embedding_dim": 8, "feature_names": ["x"]%s}'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('"name": 3', r"name: .*string \(got 3\)"),
        ('"embedding_dim": 6', r"embedding_dim: .*multiple of 4 \(got 6\)"),
        ('"feature_names": []', r"feature_names: .*at least 1 item"),
        ('"data_type": "INT8"', r"data_type: .*'FP32' or 'FP16' \(got 'INT8'\)"),
        ('"datatype": "FP16"', r"datatype: Extra inputs are not permitted"),
        ("[3]", r"entry 1: Input should be an object \(got 3\)"),
        ("9" * 5000, "not JSON"),
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


def test_fp16_tables_take_half_the_weights(tmp_path: Path) -> None:
    (tmp_path / "tables.json").write_text("[" + ENTRY % ', "data_type": "FP16"' + "]")
    sections = {"topology": {"ranks_per_tower": 1}, "optimizer": {"sparse": "sgd"}}
    config = config_file(tmp_path, data={"tables": tmp_path / "tables.json"}, **sections)
    assert record_of(config)["ranks"][0]["memory"] == 10 * 8 * 2


def test_without_towers_the_features_of_a_table_stay_together(tmp_path: Path) -> None:
    shared = [dict(vars(table), feature_names=(f"a{i}", f"b{i}")) for i, table in enumerate(specs(5))]
    (tmp_path / "tables.json").write_text(json.dumps(shared))
    config = config_file(tmp_path, data={"tables": tmp_path / "tables.json"}, topology={"num_towers": 3})
    towers = {table["name"]: table["tower"] for table in record_of(config)["tables"]}
    assert towers == {"t_0": 0, "t_1": 1, "t_2": 2, "t_3": 0, "t_4": 1}


def test_whole_tables_are_cut_as_the_towers_want_them(tmp_path: Path) -> None:
    towers, tables = tmp_path / "cut.json", tables_file(tmp_path, 2)
    cut = TowerPlan.from_lists([["f0[0:16]", "f1"], ["f0[16:32]"]], column_splits={"f0": (16, 16)})
    cut.save(towers)
    sections = {"towers": {"plan": towers}, "data": {"tables": tables}, "topology": {"num_towers": 2}}
    sharding = {
        "pooling_factors": {"f0": 5.0, "f0[16:32]": 7.0},
        "tables": {"t_0": "row_wise", "t_0[16:32]": "table_wise"},
    }
    record = record_of(config_file(tmp_path, **sections, sharding=sharding))
    placed = {table["name"]: (table["tower"], table["placement"]["scheme"]) for table in record["tables"]}
    assert placed.keys() == {"t_0[0:16]", "t_0[16:32]", "t_1"}
    assert placed["t_0[0:16]"] == (0, "row_wise")
    assert placed["t_0[16:32]"] == (1, "table_wise")
    assert record["workload"]["pooling_factors"] == {"f0[0:16]": 5.0, "f0[16:32]": 7.0}

    tables.write_text(json.dumps([vars(table) for table in cut.split_tables(specs(2))]))
    assert {table["name"] for table in record_of(config_file(tmp_path, **sections))["tables"]} == placed.keys()


@pytest.mark.parametrize("width", [200, 12])
def test_narrow_output_cuts_no_number(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tables_config(tmp_path, 6, topology={"num_towers": 4}, train={"batch_size": 99999})
    tables = record_of(config)["tables"]
    monkeypatch.setenv("COLUMNS", str(width))
    words = " ".join(plan(config).output.split())
    assert "\u2026" not in words
    for table in tables:
        assert f" {table['name']} " in words
        assert f" {1e3 * table['seconds']:,.3f} ms " in words


def test_data_without_rows_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("label,a,b\n")
    data = {"kind": "columns", "train_path": str(tmp_path / "a.csv"), "categorical": ["a", "b"]}
    shown = plan(config_file(tmp_path, data=data, train={"output_dir": str(tmp_path / "out")}))
    assert "Check the data: There are no training rows." in shown.output, shown.output
