"""The `dmt` command: help with an example, JSON, exit codes, one-line reasons."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from functools import partial
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from dmt import TowerPlan
from dmt.errors import InputError
from dmt.partitioner import FeatureAffinity
from dmt.plan.tables import TableSpec
from dmt.training import __main__ as training
from dmt.training import partition as partition_of_run
from dmt.training.commands import demo, doctor, main
from dmt.training.config import load_config, to_toml
from tests.ranks import run_program, wait_until
from tests.training.small import make_checkpoint, small


def dmt(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> str:
    """What was typed, by the process's arguments; the program's name comes from its script."""
    monkeypatch.setattr(sys, "argv", ["/venv/bin/dmt", "partition", "--towers", "of two"])
    return "dmt partition --towers 'of two'"


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
    example = " ".join(result.output.split()).partition("Example: ")[2]
    assert example.removeprefix("torchrun --nproc-per-node 2 --no-python ").startswith(f"dmt {command}")
    assert "--json" in result.output
    # A screen: it need not be scrolled.
    assert len(result.output.splitlines()) <= 40


def test_the_list_of_commands_says_what_each_does_and_how_to_train() -> None:
    shown = dmt("--help").output
    assert "..." not in shown.partition("Commands:")[2], "a summary is cut off"
    assert "Train with: torchrun --nproc-per-node 4 -m dmt.training CONFIG" in " ".join(shown.split())


def test_complexity_as_json() -> None:
    result = dmt("complexity", "--arch", "dlrm", "--towers", "8", "--tower-dim", "64", "--json")
    assert result.exit_code == 0
    counted = json.loads(result.output)
    assert set(counted) == {"mflops_per_sample", "parameters", "compression_ratio"}
    assert counted["mflops_per_sample"] == pytest.approx(8.95, rel=2e-3)
    assert counted["compression_ratio"] == 2


def test_complexity_as_a_table() -> None:
    result = dmt("complexity", "--arch", "dcn")
    assert result.exit_code == 0
    assert "96.17" in result.output


def test_partition_of_a_saved_affinity(affinity: Path, tmp_path: Path, typed: str) -> None:
    out = tmp_path / "towers.json"
    result = dmt("partition", "--affinity", str(affinity), "--towers", "2", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert TowerPlan.load(out).to_lists() == [["a", "c", "e"], ["b", "d", "f"]]
    assert TowerPlan.load(out).command == typed
    assert f"Written to {out}." in result.stderr
    as_json = dmt("partition", "--affinity", str(affinity), "--towers", "2", "--out", str(out), "--json")
    assert json.loads(as_json.stdout)["towers"][0]["features"] == ["a", "c", "e"]
    assert f"Written to {out}." in as_json.stderr


def test_names_of_features_are_no_markup(tmp_path: Path) -> None:
    names = ["a[/b]", "h[red]", ":smile:", "x"]
    # All alike, which is worth a note.
    FeatureAffinity(matrix=np.ones((4, 4)), features=names).save(tmp_path / "affinity.npz")
    out, saved = tmp_path / "[red]towers.json", tmp_path / "kept.npz"
    files = ["--affinity", str(tmp_path / "affinity.npz"), "--save-affinity", str(saved), "--out", str(out)]
    result = dmt("partition", *files, "--towers", "2")
    assert result.exit_code == 0, result.output
    for name in names:
        assert name in result.stdout
    assert "Note: " in result.stdout
    assert f"Written to {out}." in result.stderr
    assert FeatureAffinity.load(saved).features == tuple(names)


def test_two_options_may_not_name_one_file(affinity: Path, tmp_path: Path) -> None:
    before = affinity.read_bytes()
    for options, reason in (
        (
            ["--out", str(tmp_path / "x"), "--save-affinity", str(tmp_path / "x")],
            "--out and --save-affinity are the same",
        ),
        (["--out", str(tmp_path / "x"), "--report", str(tmp_path / "x")], "--out and --report are the same file"),
    ):
        result = dmt("partition", "--affinity", str(affinity), "--towers", "2", *options)
        assert result.exit_code == 2, result.output
        assert f"error: {reason}" in " ".join(result.output.split())
    assert affinity.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["affinity.npz"]


def test_rules_are_matched_before_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    make_checkpoint(run / "checkpoint", 7, {"config.toml": to_toml(small("dlrm"))})
    (tmp_path / "rules.toml").write_text('together = [["C1", "C22"]]\n')
    monkeypatch.setattr(partition_of_run, "build_model", None)
    files = ["--checkpoint", str(run), "--rules", str(tmp_path / "rules.toml"), "--out", str(tmp_path / "t.json")]
    result = dmt("partition", *files, "--towers", "2")
    assert result.exit_code == 2, result.output
    reason = "error: Partition rules: together has 'C22', which matches none of the 6 features. Did you mean 'C2'?"
    assert reason in " ".join(result.output.split())


def test_rules_limits_and_a_report(tmp_path: Path, typed: str) -> None:
    names = [f"{kind}_{i}" for kind in ("user", "item") for i in range(4)]
    tables = tuple(
        TableSpec(name=f"t_{name}", num_embeddings=10 ** (i % 4 + 1), embedding_dim=8, feature_names=(name,))
        for i, name in enumerate(names)
    )
    matrix = np.random.default_rng(0).random((8, 8))
    matrix = (matrix + matrix.T) / 2
    affinity = FeatureAffinity(matrix=matrix, features=names, tables=tables, pooling_factors=(1.0, 9.0) * 4)
    affinity.save(tmp_path / "affinity.npz")
    (tmp_path / "rules.toml").write_text(
        'max_work_ratio = 1.9\napart = [["user_0", "user_1"]]\n[categories]\nuser = ["user_*"]\nitem = ["item_*"]\n'
    )
    out, report = tmp_path / "new" / "towers.json", tmp_path / "report"
    inputs = ["--affinity", str(tmp_path / "affinity.npz"), "--rules", str(tmp_path / "rules.toml"), "--towers", "4"]
    limits = ["--balance-ratio", "inf"]
    result = dmt("partition", *inputs, *limits, "--strategy", "diverse", "--out", str(out), "--report", str(report))
    assert result.exit_code == 0, result.output
    plan = TowerPlan.load(out)
    assert plan.strategy == "diverse"
    assert [tower.name for tower in plan.towers] == ["user_0", "user_1", "item_0", "item_1"]
    assert all(feature.startswith(tower.name[:4]) for tower in plan.towers for feature in tower.features)
    assert not any({"user_0", "user_1"} <= set(tower.features) for tower in plan.towers)
    assert plan.tables == tables
    assert plan.command == typed
    printed = " ".join(result.output.split())
    assert "The towers put together features that do not resemble each other" in printed
    assert "elements/sample" in printed
    page = (report / "report.html").read_text()
    assert "towers.json" not in page or "not recorded" not in page


def test_no_output_is_begun_where_one_cannot_be_written(affinity: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for option in ("--report", "--save-affinity"):
        place = tmp_path / "file" / "x.png"
        source = ["--affinity", str(affinity), "--towers", "2", "--out", str(tmp_path / "towers.json")]
        result = dmt("partition", *source, option, str(place))
        assert result.exit_code == 2, result.output
        assert f"{option} {str(place)!r} cannot be written" in " ".join(result.output.split())
        assert not (tmp_path / "towers.json").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            ["complexity", "--arch", "dlmr"],
            "error: arch='dlmr' is unknown; use 'dlrm' or 'dcn'. Did you mean 'dlrm'?",
        ),
        (["complexity", "--arch", "dlrm", "--towers", "27"], "error: num_towers=27 must lie between 1 and"),
        (["partition", "--towers", "2"], "error: Give one of: --checkpoint RUN_DIR, --affinity FILE.npz"),
        (["partition", "--towers", "2", "--checkpoint", "/nowhere"], "error: /nowhere is not the output_dir of a"),
        (["partition", "--towers", "2", "--affinity", "/nowhere.npz"], "/nowhere.npz"),
        (["demo", "--data", "/nowhere.parquet"], "error: --data='/nowhere.parquet' matches no file"),
        (["demo", "model.archs=dlrm"], "error: Config key 'model.archs' is unknown. Did you mean 'arch'?"),
        (["demo", "model.factory=a:b"], "model.factory='a:b': the demo compares a multi-tower model of dmt's own"),
        (["demo", "model.arch=dlrm"], "model.arch='dlrm': the demo compares a multi-tower model"),
        (["demo", "towers.plan=plan.json"], "The demo sets towers.plan itself"),
        (["demo", "train.batch_size=1000000"], "1000000 training rows, fewer than one step takes: 4 ranks x"),
        (["demo", "data.synthetic.num_dense=0"], "The data has no dense column"),
        (["partition", "--towers", "2", "--affinity", "a.npz", "--data", "x"], "Give one of"),
        (
            ["partition", "--towers", "2", "--affinity", "a.npz", "--balance-ratio", "0.5"],
            "balance_ratio: Input should be",
        ),
        (["partition", "--towers", "2", "--affinity", "a.npz", "--strategy", "diverce"], "'diverce' is not one of"),
        (["partition", "--towers", "2", "--affinity", "a.npz", "--rules", "/nowhere.toml"], "/nowhere.toml: cannot be"),
        (["partition", "--towers", "0", "--affinity", "a.npz"], "num_towers: Input should be greater than"),
        (["nonsense"], "No such command 'nonsense'"),
        (["score", "runs/x"], "Missing option '-o' / '--out'"),
        (["what-if", "demo"], "Missing option '--cluster'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], reason: str) -> None:
    result = dmt(*arguments)
    assert result.exit_code == 2, result.output
    assert reason in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_torchrun_is_given_the_reason_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    handler = type("Handler", (), {"record_exception": lambda self, error: told.append(traceback.format_exc())})
    monkeypatch.setattr(training, "get_error_handler", handler)
    ran = CliRunner().invoke(training.main, ["demo", "data.lable=x"])
    assert ran.exit_code == 2
    assert told[0].startswith("dmt.errors.InputError: Config key 'data.lable' is unknown. Did you mean 'label'?")
    assert "File" not in told[0]


def test_doctor_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    # That packages load in fresh processes is tested in test_doctor.py.
    monkeypatch.setattr(doctor.diagnose, "__defaults__", (doctor._installed_version, lambda: ("", "0 GPUs")))
    result = dmt("doctor", "--json")
    assert result.exit_code == 0, result.output
    assert {line["what"] for line in json.loads(result.output)} >= {"torch", "torchrec", "import"}


def write_parquet(path: Path, columns: list[str], rows: int) -> Path:
    table = {"label": [i % 3 == 0 for i in range(rows)], "d_x": [float(i) for i in range(rows)]}
    table |= {name: [f"v{i % 7}" for i in range(rows)] for name in columns}
    pq.write_table(pa.table({**table, "label": pa.array(table["label"]).cast("int8")}), path)
    return path


@pytest.mark.ranks
def test_a_demo_on_a_handful_of_rows_with_odd_column_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(config: Path, ranks: int) -> None:
        assert run_program(["-m", "dmt.training", str(config)], ranks).returncode == 0

    monkeypatch.setattr(demo, "_start_ranks", launch)
    data = write_parquet(tmp_path / "my clicks'.parquet", ["c_user.country", "c_$\\frac{$", "c_a"], rows=200)
    out = tmp_path / "out"
    settings = ["topology.ranks_per_tower=1", "train.eval_every=3", "optimizer.warmup_steps=2"]
    result = dmt("demo", "--data", str(data), "--out", str(out), "--json", *settings)
    assert result.exit_code == 0, result.output
    runs = json.loads(result.stdout)
    assert list(runs) == ["dlrm", "dmt-dlrm"]
    assert sorted(TowerPlan.load(out / "towers.json").features) == ["c_$\\frac{$", "c_a", "c_user.country"]
    assert (out / "report.html").stat().st_size > 10_000


def test_too_few_rows_are_told_before_training(tmp_path: Path) -> None:
    data = write_parquet(tmp_path / "few.parquet", ["c_a", "c_b"], rows=40)
    result = dmt("demo", "--data", str(data), "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "There are 36 training rows, fewer than one step takes: 4 ranks x train.batch_size=16 = 64" in result.output
    assert "2/4" not in result.output


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("day_0", "1\t" + "\t".join("5" * 13) + "\t" + "\t".join(["0a"] * 26) + "\n", "criteo_tsv"),
        ("clicks.tsv", "label\tc_a\td_x\n1\tx\t2\n", "columns"),
        ("clicks.csv", "label,c_a,d_x\n1,x,2\n", "columns"),
    ],
)
def test_the_demo_tells_criteos_format_from_named_columns(tmp_path: Path, name: str, content: str, kind: str) -> None:
    (tmp_path / name).write_text(content)
    assert f'data.kind="{kind}"' in demo.demo_settings(str(tmp_path / name))


OF_TOWERS = [
    'sharding.tables={"t_*" = "row_wise"}',
    "sharding.tables.t_C1=row_wise",
    "sharding.unique=true",
]


@pytest.mark.parametrize("setting", OF_TOWERS)
def test_settings_of_towers_stay_away_from_the_flat_run(setting: str) -> None:
    flat = "model.arch=dlrm"
    with pytest.raises(InputError, match=r"needs the tower dataflow"):
        load_config("demo", [setting, flat])
    assert demo.flat_settings([setting, flat]) == [flat]
    assert load_config("demo", demo.flat_settings([setting, flat])).dataflow == "flat"
    load_config("demo", [setting])


def test_settings_of_both_runs_reach_both() -> None:
    settings = [
        "sharding.scheme=row_wise",
        "sharding.memory_gib=2",
        "sharding.pooling_factors.C1=1.5",
        "sharding.tables_of_another_name=1",
        "train.epochs=2",
        "a word",
    ]
    assert demo.flat_settings(settings) == settings


def processes_with(setting: str) -> list[str]:
    """Command lines of the processes that have a setting in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if setting.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found


def test_a_rank_ends_with_the_process_that_started_it_though_it_died_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    ends_with: list[int] = []
    monkeypatch.setattr(training, "end_with", ends_with.append)
    monkeypatch.setattr(training, "quiet_libraries", lambda rank: None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    parent = os.getppid()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert CliRunner().invoke(training.main, ["no.toml"]).exit_code == 2
    assert ends_with == [parent]


def test_a_demo_that_is_stopped_by_ctrl_c_waits_until_its_ranks_have_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Instead of a rank: it needs a moment to save, and says whom it was told to end with.
    rank = tmp_path / "rank"
    rank.write_text(f"""#!/bin/sh
        trap 'sleep 0.5; echo $DMT_LAUNCHER > {tmp_path}/saved; exit 143' TERM
        touch {tmp_path}/begun
        while :; do sleep 0.1; done
        """)
    rank.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(rank))
    # A shell starts what runs in its background deaf to Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def stop() -> None:
        wait_until((tmp_path / "begun").exists, 60)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        demo._start_ranks(tmp_path / "run.toml", 1)
    assert (tmp_path / "saved").read_text() == f"{os.getpid()}\n"
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "number", "begun"),
    [
        # While its ranks still import; the others in the middle of their work.
        ("demo", signal.SIGKILL, "*"),
        ("demo", signal.SIGKILL, "dlrm/metrics.jsonl"),
        ("demo", signal.SIGTERM, "dlrm/metrics.jsonl"),
        ("check", signal.SIGTERM, "dmt-ranks-*/store"),
        ("check", signal.SIGKILL, "dmt-ranks-*/store"),
    ],
)
def test_a_stopped_command_leaves_no_process_behind(
    command: str, number: signal.Signals, begun: str, tmp_path: Path
) -> None:
    """Of a demo: the ranks. Of a check: the ranks and the process they are forked from."""
    arguments, processes = {
        "demo": (["topology.ranks_per_tower=1", "train.log_every=1", "--out", str(tmp_path)], 3),
        "check": (["demo", "--steps", "1000000"], 6),
    }[command]
    # A pytest that is killed takes it along.
    guard = f"from dmt.processes import end_with; end_with({os.getpid()}); "
    program = [sys.executable, "-c", guard + "from dmt.training.commands import main; main()", command, *arguments]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    left = partial(processes_with, f"TMPDIR={tmp_path}")
    with subprocess.Popen(program, env={**os.environ, "TMPDIR": str(tmp_path)}, **quiet) as stopped:
        try:
            assert wait_until(lambda: any(tmp_path.glob(begun)) and len(left()) >= processes, 300), left()
            stopped.send_signal(number)
            assert stopped.wait(60) == (-number if number == signal.SIGKILL else 128 + number)
        finally:
            stopped.kill()
    # A rank that still imports ends when it has.
    assert wait_until(lambda: not left(), 120), left()
    if (command, number) == ("check", signal.SIGTERM):
        assert not [*tmp_path.iterdir()], "temporary folders are removed"


def test_there_are_at_most_70_options() -> None:
    options = [option for command in main.commands.values() for option in command.params]
    assert sum(isinstance(option, click.Option) for option in options) <= 70
