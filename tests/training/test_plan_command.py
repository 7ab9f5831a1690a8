"""`dmt plan`: what it reads, prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dmt import TableSpec, TowerPlan
from dmt.sharding_report import TowerSharding
from dmt.training.cli import main
from dmt.training.config import to_toml
from dmt.training.sharding import tower_sharding
from tests.test_house import run_without_torchrec
from tests.training.small import small, source


def plan(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def specs(number: int = 6) -> tuple[TableSpec, ...]:
    return tuple(
        TableSpec(name=f"t_{i}", num_embeddings=10**6, embedding_dim=32, feature_names=(f"f{i}",))
        for i in range(number)
    )


@pytest.fixture
def towers(tmp_path: Path) -> Path:
    TowerPlan.strided([f"f{i}" for i in range(6)], 2).save(tmp_path / "bare.json")
    path = tmp_path / "towers.json"
    TowerPlan.from_lists([["f0", "f1", "f2"], ["f3", "f4", "f5"]], tables=specs()).save(path)
    return path


def tables_file(folder: Path, number: int) -> Path:
    path = folder / "tables.json"
    path.write_text(json.dumps([vars(table) for table in specs(number)]))
    return path


def test_a_config_is_planned_with_its_own_sizes(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(to_toml(small()))
    result = plan(tmp_path / "run.toml", "train.batch_size=64", "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.output)
    assert record["workload"]["batch_size"] == 64
    assert record["workload"]["optimizer"] == "rowwise_adagrad"
    assert (record["topology"]["num_towers"], record["topology"]["ranks_per_tower"]) == (2, 2)
    assert len(record["tables"]) == 6
    assert len(record["ranks"]) == 4


def test_a_config_is_planned_as_the_trainer_will(tmp_path: Path) -> None:
    sections = {"memory_gib": 0.5, "tables": {"t_C2": "row_wise"}, "pooling_factors": {"C1": 7.0}, "id_route": "global"}
    config = small(sharding={**sections, "exchange_us": 0.0})
    (tmp_path / "run.toml").write_text(to_toml(config))
    result = plan(tmp_path / "run.toml", "--json")
    assert result.exit_code == 0, result.output
    expected = tower_sharding(config, source(config).tables).to_record()
    assert json.loads(result.output) == json.loads(json.dumps(expected))


def test_recorded_tables_are_planned_and_written(towers: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    arguments = ["--towers", towers, "--ranks-per-tower", 4, "--batch-size", 4096, "--memory-gib", 1]
    result = plan(*arguments, "--pin", "t_0=row_wise", "--pin", "t_[12]=table_wise,column_wise", "--out", out)
    assert result.exit_code == 0, result.output
    found = TowerSharding.load(out)
    assert found.placements["t_0"].scheme == "row_wise"
    assert found.placements["t_1"].scheme in ("table_wise", "column_wise")
    assert found.hardware.memory_per_rank == 2**30
    assert [table.tower for table in found.tables] == [0, 0, 0, 1, 1, 1]
    words = " ".join(result.output.split())
    assert f"{found.ranks[0].lookups:,.0f}" in words
    assert "row_wise over 4 ranks: asked for" in words
    assert f"over all ranks; inside a tower at most {max(t.imbalance for t in found.towers):.2f}" in words
    assert "plan.json" in words


def test_many_tables_are_summed_up(tmp_path: Path) -> None:
    path = tables_file(tmp_path, 300)
    result = plan("--tables", path, "--num-towers", 4, "--scheme", "table_wise", "--link-gb-per-s", 50)
    assert result.exit_code == 0, result.output
    assert "The 20 costliest tables; --all shows 280 more" in result.output
    for word in ("busiest", "idlest", "fullest", "mean of 32"):
        assert word in result.output
    assert "300 tables: 300 table_wise." in result.output
    assert max(map(len, result.output.splitlines())) <= 140
    everything = plan("--tables", path, "--num-towers", 4, "--scheme", "table_wise", "--all").output
    assert all(f" t_{i} " in everything for i in range(300))


def test_no_torchrec_is_needed(towers: Path) -> None:
    result = run_without_torchrec(
        f"""
        from click.testing import CliRunner
        from dmt.training.cli import main

        run = CliRunner().invoke(main, ["plan", "--towers", {str(towers)!r}, "--json"])
        print(run.exit_code, '"tables"' in run.output)
        """
    )
    assert result.stdout.split() == ["0", "True"], result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "There are no tables to plan. Give a CONFIG, or --tables"),
        (["--towers", "bare.json"], "There are no tables to plan"),
        (["demo", "--towers", "towers.json"], "--towers and a CONFIG contradict each other"),
        (["demo", "--memory-gib", "1"], "--memory-gib and a CONFIG contradict each other: the config decides it"),
        (["demo", "model.arch=dlrm"], "has the flat dataflow (model.arch='dlrm')"),
        (
            ["--towers", "towers.json", "--num-towers", "3"],
            "--num-towers 3 does not fit towers.json, which has 2 towers",
        ),
        (["--towers", "towers.json", "--pin", "row_wise"], "--pin 'row_wise' is not of the form TABLES=SCHEME"),
        (["--towers", "towers.json", "--pin", "t_9=row_wise"], "Table 't_9' is pinned but not in the model"),
        (["--towers", "towers.json", "--pin", "t_1=x"], "scheme 'x' is unknown"),
        (["--towers", "towers.json", "--pin", "t_1=row_wise", "--pin", "t_1=data_wise"], "--pin gives 't_1' twice"),
        (["--towers", "towers.json", "--pooling", "f0=many"], "--pooling 'f0=many' is not of the form FEATURE=NUMBER"),
        (["--towers", "towers.json", "--pooling", "f9=2"], "pooling_factors names the feature 'f9'"),
        (["--towers", "towers.json", "--scheme", "diagonal"], "scheme 'diagonal' is unknown"),
        (["--towers", "towers.json", "--batch-size", "0"], "batch_size=0 must be"),
        (["--towers", "towers.json", "--memory-gib", "0.001"], "but memory_per_rank is 1.07 MB"),
        (["--towers", "towers.json", "--ranks-per-tower", "0"], "ranks_per_tower=0 must be"),
        (["--tables", "absent.json"], "--tables absent.json: cannot be read"),
        (["--tables", "broken.json"], "--tables broken.json, line 1: not JSON"),
        (["--tables", "empty.json"], "--tables empty.json: holds no list of tables"),
        (["--tables", "odd.json"], "--tables odd.json: an entry is malformed"),
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
