"""The `dmt` command: JSON, exit codes, one-line reasons; demos and checks that are stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from dmt import TowerPlan
from dmt.errors import InputError
from dmt.training import __main__ as training
from dmt.training.commands import demo
from dmt.training.config import load_config
from tests.ranks import run_program, wait_until
from tests.training.small import dmt, make_checkpoint


def test_complexity() -> None:
    counted = json.loads(dmt("complexity", "--arch", "dlrm", "--towers", 8, "--tower-dim", 64, "--json").output)
    assert set(counted) == {"mflops_per_sample", "parameters", "compression_ratio"}
    assert (counted["mflops_per_sample"], counted["compression_ratio"]) == (pytest.approx(8.95, rel=2e-3), 2)
    assert "96.17" in dmt("complexity", "--arch", "dcn").output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["complexity", "--arch", "dlmr"], "error: arch='dlmr' is unknown; use 'dlrm' or 'dcn'. Did you mean 'dlrm'?"),
        (["demo", "--data", "/nowhere.parquet"], "error: --data='/nowhere.parquet' matches no file"),
        (["demo", "model.archs=dlrm"], "error: Config key 'model.archs' is unknown. Did you mean 'arch'?"),
        (["demo", "model.arch=dlrm"], "model.arch='dlrm': the demo compares a shipped multi-tower model"),
        (["demo", "towers.plan=plan.json"], "The demo sets towers.plan itself"),
        (["demo", "train.batch_size=1000000"], "1,000,000 training rows, fewer than one step takes: 4 ranks x"),
        (["demo", "data.synthetic.num_dense=0"], "The data has no dense column"),
        (["plan", "demo", "data.synthetic.num_dense=0"], "The data has no dense column"),
    ],
)
def test_bad_input_is_a_line_and_code_2(arguments: list[str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: commands.append(command))
    for name in ("RESTART_COUNT", "MAX_RESTARTS"):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", "0")
    result = dmt(*arguments, code=2)
    assert reason in " ".join(result.output.split())
    assert "Traceback" not in result.output
    # Again when torchrun has ended.
    assert [command[-1] in result.output for command in commands] == [True] * result.output.count("error: ")


def test_a_demo_keeps_the_checkpoints_of_other_runs(tmp_path: Path) -> None:
    saved = make_checkpoint(tmp_path / "dlrm" / "checkpoint", 5, {})
    own = ["data.source=tests.training.data.test_source:rows", 'data.categorical=["c", "n"]', 'data.dense=["d"]']
    assert "would delete the checkpoints of another run" in dmt("demo", "--out", tmp_path, *own, code=2).output
    assert saved.exists()


@pytest.mark.ranks
def test_a_demo_on_a_handful_of_rows_with_odd_column_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(config: Path, ranks: int) -> None:
        assert run_program(["-m", "dmt.training", str(config)], ranks).returncode == 0

    monkeypatch.setattr(demo, "_start_ranks", launch)
    data, out, names = tmp_path / "my clicks'.parquet", tmp_path / "out", ["c_$\\frac{$", "c_a", "c_user.country"]
    columns: dict[str, Any] = {name: [f"v{i % 7}" for i in range(200)] for name in names}
    columns |= {"label": pa.array([i % 3 == 0 for i in range(200)]).cast("int8"), "d_x": np.arange(200.0)}
    pq.write_table(pa.table(columns), data)
    settings = ["topology.ranks_per_tower=1", "train.eval_every=3", "optimizer.warmup_steps=2"]
    (tmp_path / "prepared-cache").mkdir()  # as `dmt score` leaves it
    result = dmt("demo", "--data", data, "--out", out, "--json", *settings)
    assert list(json.loads(result.stdout)) == ["dlrm", "dmt-dlrm"]
    assert sorted(TowerPlan.load(out / "towers.json").features) == names
    assert (out / "report.html").stat().st_size > 10_000
    assert [len(list(path.glob("[0-9a-f]*"))) for path in sorted(tmp_path.rglob("prepared-cache"))] == [1, 0]


def test_the_demo_tells_formats_and_prepared_folders_apart(tmp_path: Path) -> None:
    criteo = "\t".join(["1", *["5"] * 13, *["0a"] * 26])
    (tmp_path / "test.txt").touch()  # Kaggle's has no labels, so it cannot be for evaluation
    for name, content, kind in (
        ("train.txt", criteo, "criteo_tsv"),
        ("clicks.tsv", "label\tc_a\td_x\n1\tx\t2", "columns"),
        ("clicks.csv", "label,c_a,d_x\n1,x,2", "columns"),
    ):
        (tmp_path / name).write_text(content + "\n")
        settings = demo.demo_settings(str(tmp_path / name))
        assert f'data.kind="{kind}"' in settings
        assert "data.eval_path" not in "".join(settings)
    (tmp_path / "manifest.json").touch()
    assert demo.demo_settings(str(tmp_path)) == [f'data.prepared="{tmp_path}"']
    refused = dmt("demo", "data.kind=criteo_tsv", f"data.train_path={tmp_path}", code=2)
    assert "Set data.prepared to this" in refused.output


@pytest.mark.parametrize("setting", ["sharding.tables.t_C1=row_wise", "sharding.unique=true", "towers.outside=auto"])
def test_settings_of_towers_stay_away_from_the_flat_run_and_others_reach_both(setting: str) -> None:
    flat = "model.arch=dlrm"
    with pytest.raises(InputError, match=rf"{setting.rpartition('.')[0]}.* needs the tower dataflow"):
        load_config("demo", [setting, flat])
    both = [flat, "sharding.scheme=row_wise", "sharding.pooling_factors.C1=1.5", "sharding.tables_x=1", "a word"]
    assert demo.flat_settings([setting, *both]) == both
    assert load_config("demo", demo.flat_settings([setting, flat])).dataflow == "flat"
    load_config("demo", [setting])


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
        sleep 1 # so that torchrun's agent, which starts this, keeps its process before the interrupt
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
        "check": (["demo"], 6),
    }[command]
    # A pytest that is killed takes it along.
    guard = f"from dmt.testing.ranks import end_with; end_with({os.getpid()}); "
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
