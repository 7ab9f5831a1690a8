"""``dmt partition``: of saved files, trained models and rows alone; which rows it measures, and what it refuses."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import Result

from dmt import TowerPlan
from dmt.partitioner import FeatureAffinity, TowerPartitioner
from dmt.plan.tables import TableSpec
from dmt.training import affinity as module
from dmt.training import trained
from dmt.training.affinity import affinity_of_run, interactions_of, spread_batches
from dmt.training.config import to_toml
from dmt.training.data.clicks import ClickData
from dmt.training.data.config import DataConfig
from tests.partitioner.clicks import planted_clicks
from tests.training.small import dmt, make_checkpoint, numbered, plain, save_alone, small


def partitioned(out: Path, *arguments: object) -> tuple[TowerPlan, Result]:
    result = dmt("partition", *arguments, "--out", out)
    return TowerPlan.load(out), result


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[object]]:
    """Takes a matrix for what a run would be measured to have; the result asks for its towers by resemblance."""

    def asked(matrix: Any, features: Sequence[str], **more: Any) -> list[object]:
        affinity = FeatureAffinity(matrix=matrix, features=list(features), **more)
        monkeypatch.setattr(module, "affinity_of_run", lambda run, data_path, **_: {"rows": affinity}[data_path])
        return ["--checkpoint", "run", "--data", "rows", "--tower-module", "dlrm"]

    return asked


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> str:
    """What was typed, by the process's arguments; the program's name comes from its script."""
    monkeypatch.setattr(sys, "argv", ["/venv/bin/dmt", "partition", "--towers", "of two"])
    return "dmt partition --towers 'of two'"


def test_a_run_is_partitioned_by_resemblance(tmp_path: Path, typed: str, measured: Callable[..., list[object]]) -> None:
    matrix = np.full((6, 6), 0.1)
    for group in ([0, 2, 4], [1, 3, 5]):
        matrix[np.ix_(group, group)] = 0.9
    np.fill_diagonal(matrix, 1)
    asked = [*measured(matrix, "abcdef"), "--towers", 2]
    plan, result = partitioned(out := tmp_path / "towers.json", *asked)
    assert (plan.to_lists(), plan.command, plan.strategy) == ([["a", "c", "e"], ["b", "d", "f"]], typed, "coherent")
    assert f"Written to {out}." in result.stderr
    _, as_json = partitioned(out, *asked, "--json")
    assert json.loads(as_json.stdout)["towers"][0]["features"] == ["a", "c", "e"]


def test_names_of_features_are_no_markup(tmp_path: Path, measured: Callable[..., list[object]]) -> None:
    names = ["a[/b]", "h[red]", ":smile:", "x"]
    # All alike, which is worth a note.
    asked = [*measured(np.ones((4, 4)), names), "--towers", 2]
    _, result = partitioned(out := tmp_path / "[red]towers.json", *asked)
    assert not [word for word in [*names, "Note: "] if word not in result.stdout]
    assert f"Written to {out}." in result.stderr


def test_rules_limits_and_a_report(tmp_path: Path, measured: Callable[..., list[object]]) -> None:
    names = [f"{kind}_{i}" for kind in ("user", "item") for i in range(4)]
    tables = tuple(
        TableSpec(name=f"t_{name}", num_embeddings=10 ** (i % 4 + 1), embedding_dim=8, feature_names=(name,))
        for i, name in enumerate(names)
    )
    matrix = np.random.default_rng(0).random((8, 8))
    run = measured((matrix + matrix.T) / 2, names, tables=tables, pooling_factors=(1.0, 9.0) * 4)
    (tmp_path / "rules.toml").write_text(
        'max_work_ratio = 1.9\napart = [["user_0", "user_1"]]\n[categories]\nuser = ["user_*"]\nitem = ["item_*"]\n'
    )
    asked = [*run, "--rules", tmp_path / "rules.toml", "--towers", 4, "--balance-ratio", "inf", "--seed", 5]
    asked += ["--strategy", "diverse", "--report", tmp_path / "report"]
    plan, result = partitioned(tmp_path / "new" / "towers.json", *asked)
    assert (plan.strategy, plan.seed, plan.tables) == ("diverse", 5, tables)
    assert [tower.name for tower in plan.towers] == ["user_0", "user_1", "item_0", "item_1"]
    assert all(feature.startswith(tower.name[:4]) for tower in plan.towers for feature in tower.features)
    assert not any({"user_0", "user_1"} <= set(tower.features) for tower in plan.towers)
    assert "elements/sample" in " ".join(result.output.split())
    assert (tmp_path / "report" / "report.html").exists()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six features, of which the 1st and 3rd, the 2nd and 6th, and the 4th and 5th interact."""
    ids, labels = planted_clicks(6, [(0, 2), (1, 5), (3, 4)], rows=6000, strength=1.5)
    lines = [",".join(["label", "d_0", *(f"c_{i}" for i in range(6))])]
    lines += [",".join(map(str, [int(y), i % 7, *row])) for i, (y, row) in enumerate(zip(labels, ids, strict=True))]
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_file_of_rows_is_all_it_takes(rows: Path, tmp_path: Path) -> None:
    asked = ["--data", rows, "--strategy", "interactions", "--towers", 3]
    plan, result = partitioned(tmp_path / "towers.json", *asked, "--tower-module", "dcn", "--report", tmp_path)
    pairs = {frozenset({"c_0", "c_2"}), frozenset({"c_1", "c_5"}), frozenset({"c_3", "c_4"})}
    assert {frozenset(tower) for tower in plan.to_lists()} == pairs
    assert (plan.strategy, plan.tables) == ("together", ())
    printed = " ".join(result.output.split())
    assert re.search("(9[0-9]|100)% of all interaction beyond the measuring error is inside", printed)
    assert re.search("c_0, c_2: their interaction lowers the loss by [0-9.]+ . [0-9.]+ nats per row", printed)
    assert (tmp_path / "report.html").read_text().count("<td>tower_") == 3
    # A linear tower module parts what the other kept together.
    plan, _ = partitioned(tmp_path / "towers.json", *asked, "--tower-module", "dlrm")
    assert not any(pair <= set(tower) for pair in pairs for tower in plan.to_lists())


@pytest.mark.parametrize(("arch", "strategy"), [("dcn", "together"), ("dmt-dlrm", "apart")])
def test_a_run_says_which_tower_module_and_which_tables(arch: str, strategy: str, rows: Path, tmp_path: Path) -> None:
    data = {"kind": "columns", "train_path": "gone.csv", "categorical": ["c_*"], "dense": ["d_*"]}
    run = small(arch, data=data)
    make_checkpoint(tmp_path / "run" / "checkpoint", 7, {"config.toml": to_toml(run)})
    asked = ["--checkpoint", tmp_path / "run", "--data", rows, "--towers", 3, "--out", tmp_path / "towers.json"]
    # By default towers go by interactions where their modules keep them, and say so; else there are no weights.
    by_default = dmt("partition", *asked, code=0 if arch == "dcn" else 2)
    assert ("Strategy: interactions." in by_default.stderr) == (arch == "dcn")
    # A module that keeps no interactions is none to choose them for, named or not.
    assert "Strategy: interactions" not in dmt("partition", *asked, "--tower-module", "dlrm", code=2).stderr
    (tmp_path / "rules.toml").write_text('max_work_ratio = 1.1\napart = [["c_1", "c_5"]]\n')
    rules = ["--strategy", "interactions", "--rules", tmp_path / "rules.toml"]
    plan, _ = partitioned(tmp_path / "towers.json", *asked, *rules)
    assert plan.strategy == strategy
    assert [table.embedding_dim for table in plan.tables] == [run.model.embedding_dim] * 6
    # The rule leaves room for one of the other two pairs.
    towers = [set(tower) for tower in plan.to_lists()]
    assert ({"c_0", "c_2"} in towers or {"c_3", "c_4"} in towers) is (strategy == "together")
    assert {"c_1", "c_5"} not in towers


RUN = ("--checkpoint", "run", "--tower-module", "dlrm")
INTERACTIONS = ("--strategy", "interactions", "--tower-module", "dcn")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "RUN_DIR; or, for towers from interactions without a model, --data FILE and --tower-module"),
        (["--checkpoint", "/nowhere"], "error: /nowhere holds no checkpoint. Give one"),
        (["--data", "/no.csv", *INTERACTIONS], "'/no.csv' matches no file"),
        ([*RUN, "--rules", "/nowhere.toml"], "/nowhere.toml: cannot be"),
        ([*RUN, "--balance-ratio", "0.5"], "balance_ratio: Input should be"),
        ([*RUN, "--report", "file/x.png"], "--report 'file/x.png' cannot be written"),
    ],
)
def test_what_cannot_be_partitioned_is_refused(
    arguments: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    result = dmt("partition", "--towers", 2, "--out", "towers.json", *arguments, code=2)
    assert reason in " ".join(result.output.split())
    assert {path.name for path in tmp_path.iterdir()} == {"file"}


def test_rules_are_matched_before_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "run" / "checkpoint", 7, {"config.toml": to_toml(small("dlrm"))})
    (tmp_path / "rules.toml").write_text('together = [["C1", "C22"]]\n')
    monkeypatch.setattr(trained, "build_model", None)
    asked = ["--checkpoint", tmp_path / "run", "--rules", tmp_path / "rules.toml", "--out", tmp_path / "t.json"]
    result = dmt("partition", *asked, "--towers", 2, code=2)
    assert "together has 'C22', which matches none of the 6 features to place. Did" in " ".join(result.output.split())


# Which rows of a run are measured.


@pytest.mark.parametrize(
    ("num_rows", "max_rows", "batch_size", "count"),
    [(100, 20, 5, 4), (100, 99, 5, 19), (100, 99, 10, 9), (100, 1, 5, 1), (4, 20, 4, 1), (2570, 2560, 10, 256)],
)
def test_batches_come_from_all_over_the_rows(
    num_rows: int, max_rows: int, batch_size: int, count: int, tmp_path: Path
) -> None:
    clicks = ClickData(
        DataConfig.model_validate(numbered(tmp_path / "rows.parquet", range(num_rows))), cache=tmp_path / "prepared"
    )
    batches = spread_batches(clicks, max_rows=max_rows, batch_size=batch_size)
    found = [batch.sparse_features.values().tolist() for batch in batches]
    starts = [batch[0] for batch in found]
    assert found == [list(range(start, start + batch_size)) for start in starts]
    assert len(starts) == len(set(starts)) == count
    assert starts[0] == 0
    if count > 1:
        assert starts[-1] == num_rows - batch_size, "the last rows that there are, and none after them"
        assert max(np.diff(starts)) <= 2 * num_rows / count


@pytest.mark.parametrize(
    ("other", "seen"),
    [(None, [*range(4), *range(92, 96)]), (50, [*range(4), *range(44, 48)])],  # its own file of 97 rows, or another
)
def test_a_run_is_measured_all_over_the_rows(
    other: int | None, seen: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small("dlrm", data=numbered(tmp_path / "rows.parquet", range(97)), train={"batch_size": 4})
    torch.manual_seed(0)
    save_alone(plain(config), tmp_path / "run" / "checkpoint", files={"config.toml": to_toml(config)})
    path = None if other is None else numbered(tmp_path / "other.parquet", range(other))["train_path"]
    ids: list[int] = []

    def look(*arguments: Any, **settings: Any) -> Any:
        for batch in spread_batches(*arguments, **settings):
            ids.extend(batch.sparse_features.values().tolist())
            yield batch

    monkeypatch.setattr(module, "spread_batches", look)
    affinity = affinity_of_run(tmp_path / "run", data_path=path, max_rows=8)
    assert (ids, affinity.num_samples, affinity.pooling_factors) == (seen, 8, (1.0,))
    assert [table.name for table in affinity.tables] == ["t_c_1"]


def test_rows_of_many_columns_are_few_but_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_KEPT", 3 * 640)
    monkeypatch.setattr(FeatureAffinity, "collect_interactions", lambda batches, **_: list(batches))
    read: Any = interactions_of(small(data=numbered(tmp_path / "rows.parquet", range(3200))), with_tables=False)
    ids = torch.cat([batch.sparse_features.values() for batch in read]).tolist()
    assert (len(ids), ids[0], ids[-1]) == (600, 0, 3199)


def test_a_history_is_measured_as_a_bag_and_stays_with_its_target(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    items, users = random.integers(0, 6, (2, 3000))
    histories = [random.integers(0, 6, length).tolist() for length in random.integers(0, 5, 3000)]
    labels = [int(item in history) for item, history in zip(items, histories, strict=True)]
    rows = {"label": labels, "item": items, "history": histories, "user": users, "city": users[::-1]}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    data = {"kind": "columns", "train_path": str(tmp_path / "rows.parquet"), "eval_fraction": 0.1}
    columns = {"categorical": ["item", "history", "user", "city"], "id_mode": "index", "num_embeddings": 7}
    config = small(train={"output_dir": str(tmp_path)})
    made = DataConfig(**data, **columns, sequences={"history": "item"})
    measured = interactions_of(config.model_copy(update={"data": made}), with_tables=True)
    assert set(measured.strongest(1)[0].features) == {"item", "history"}
    assert [set(table.feature_names) for table in measured.tables if table.sequences] == [{"item", "history"}]
    # Features that interact are to part here, but not those of one table.
    towers = TowerPartitioner(num_towers=2, strategy="apart").fit(measured).to_lists()
    assert {"item", "history"} in map(set, towers)
