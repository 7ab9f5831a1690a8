"""``dmt check`` from the command line: whole runs, exit codes, what is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dmt.plan.towers import TowerPlan
from dmt.testing.ranks import RanksFailedError
from dmt.training.check import CheckReport, Finding, check_run, make_rows
from dmt.training.check.shrink import CheckLimits
from dmt.training.commands import _show_check, emit, main
from dmt.training.config import TrainingConfig, to_toml
from tests.ranks import run_ranks
from tests.training.small import small


@pytest.fixture
def _shared_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check takes the ranks of the other tests instead of starting its own."""
    monkeypatch.setattr("dmt.training.check.run_on_ranks", run_ranks)


def write(config: TrainingConfig, folder: Path) -> str:
    (folder / "run.toml").write_text(to_toml(config))
    return str(folder / "run.toml")


@pytest.mark.ranks
@pytest.mark.usefixtures("_shared_ranks")
def test_towers_in_small_formats_on_fewer_ranks(tmp_path: Path) -> None:
    config = small(
        "dmt-dlrm-products",
        model={"p": 1},
        synthetic={"rows_per_table": 5000},
        topology={"num_towers": 3, "ranks_per_tower": 4},
        sharding={"scheme": "row_wise", "forward_precision": "fp16", "backward_precision": "bf16"},
        optimizer={"warmup_steps": 10},
    )
    options = ["--max-ranks", "4", "--rows", "40", "--json"]
    run = CliRunner().invoke(main, ["check", write(config, tmp_path), *options])
    assert run.exit_code == 0, run.output
    report = json.loads(run.stdout)
    assert (report["agrees"], report["ranks"], report["schemes"]) == (True, 4, {"row_wise": 6})
    assert len(report["rows"]) == 7
    assert {row["verdict"] for row in report["rows"]} == {"ok"}, report["rows"]
    assert [line.split()[0] for line in report["reduced"]] == [
        "topology.ranks_per_tower",
        "topology.num_towers",
        "optimizer.warmup_steps",
        "6",
    ]
    assert report["seconds"] > 0


@pytest.mark.ranks
@pytest.mark.usefixtures("_shared_ranks")
def test_a_flat_model_with_column_shards_in_towers(tmp_path: Path) -> None:
    plan = TowerPlan.from_lists(
        [["C6[4:12]", "C1", "C3", "C2"], ["C6[0:4]", "C4", "C5", "C6[12:16]"]], column_splits={"C6": (4, 8, 4)}
    )
    plan.save(tmp_path / "towers.json")
    config = small(
        "dcn",
        "sptt",
        model={"embedding_dim": 16},
        towers={"plan": str(tmp_path / "towers.json")},
        sharding={"dataflow": "sptt", "scheme": "column_wise"},
    )
    run = CliRunner().invoke(main, ["check", write(config, tmp_path)])
    assert run.exit_code == 0, run.output
    assert "Everything agrees. 4 ranks" in run.stdout


@pytest.mark.ranks
@pytest.mark.usefixtures("_shared_ranks")
def test_micro_batches_are_checked_and_dense_gradients_sent_in_fp32() -> None:
    train = {"micro_batches": 3, "dense_reduce": "hierarchical_bf16"}
    report = check_run(small(sharding={"scheme": "table_wise"}, train=train), CheckLimits(steps=2))
    assert report.agrees
    assert "train.dense_reduce is hierarchical instead of hierarchical_bf16" in report.reduced
    assert not [row for row in report.rows if row.verdict == "skipped"]


@pytest.mark.ranks
def test_torchrecs_own_sharding_of_a_flat_model(tmp_path: Path) -> None:
    run = CliRunner().invoke(main, ["check", write(small("dlrm", "flat"), tmp_path), "--json"])
    assert run.exit_code == 0, run.output
    assert {row["verdict"] for row in json.loads(run.stdout)["rows"]} == {"ok"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sharding.tables.t_C9=row_wise", "t_C9"),
        ("data.train_path=none.csv", "none.csv"),
        ("optimizer.sparse=adam", "optimizer.sparse='adam'"),
        ("--rows=1", "'--rows': 1 is not in the range"),
        ("--max-ranks=65", "'--max-ranks': 65 is not in the range"),
    ],
)
def test_bad_input_is_told(override: str, message: str, tmp_path: Path) -> None:
    more = ["data.kind=columns", 'data.categorical=["a"]'] if "train_path" in override else []
    run = CliRunner().invoke(main, ["check", write(small("dmt-dlrm"), tmp_path), override, *more])
    assert (run.exit_code, message in run.stderr) == (2, True), run.output


@pytest.mark.parametrize(("columns", "is_cut"), [("", False), ("60", True)])
def test_a_pipe_is_wide_and_long_names_are_folded(
    columns: str, is_cut: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    name = "table_of_" + "x" * 60
    emit(_show_check(report_of(Finding(check="logits", item=name, difference=1, allowed=0))), as_json=False)
    printed = capsys.readouterr().out
    assert (name in printed) is not is_cut
    assert printed.count("x") >= 60, "folded, not cut"
    assert max(len(line) for line in printed.splitlines()) <= (90 if is_cut else 140)


def report_of(*findings: Finding, skipped: dict[str, str] | None = None) -> CheckReport:
    rows = make_rows(findings, {"logits": "both batches", "shards": "all"}, skipped or {})
    return CheckReport(rows=rows, reduced=("checked on fewer",), notes=("N.",), schemes={}, ranks=4, seconds=1.5)


SOUND = Finding(check="logits", item="the logits", difference=1e-7, allowed=1e-6)
SHARDS = Finding(check="shards", item="table t", difference=0, allowed=0)


@pytest.mark.parametrize("difference", [float("nan"), 1e-5, float("inf")])
def test_what_does_not_agree_is_told_and_ends_with_1(difference: float, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Finding(check="logits", item="[tower] 3", difference=difference, allowed=1e-6, place="rank 2, step 1")
    report = report_of(SOUND, wrong, SHARDS)
    assert not report.agrees
    monkeypatch.setattr("dmt.training.check.check_run", lambda *args: report)
    run = CliRunner().invoke(main, ["check", "demo"])
    assert run.exit_code == 1
    assert "[tower] 3 (rank 2, step 1)" in " ".join(run.stdout.replace("│", " ").split())
    assert "Does not agree: logits." in run.stdout
    assert "Made smaller: checked on fewer\n" in run.stdout
    as_json = CliRunner().invoke(main, ["check", "demo", "--json"])
    assert as_json.exit_code == 1
    found = json.loads(as_json.stdout)["rows"][0]
    assert found["difference"] == (difference if difference < 1 else None)
    assert found["where"] == "[tower] 3 (rank 2, step 1)"


def test_a_check_that_compared_nothing_has_failed() -> None:
    rows = report_of(SOUND).rows
    assert (rows[1].verdict, rows[1].where) == ("FAILED", "nothing was compared")
    assert report_of(SOUND, skipped={"shards": "why"}).agrees


def test_ranks_that_fail_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **options: object) -> CheckReport:
        raise RanksFailedError("Rank 2 died with exit code -9.")

    monkeypatch.setattr("dmt.training.check.check_run", fails)
    run = CliRunner().invoke(main, ["check", "demo"])
    assert (run.exit_code, run.stdout) == (1, "")
    assert run.stderr == "FAILED: Rank 2 died with exit code -9.\n"
