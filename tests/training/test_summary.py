"""The table of a run's numbers."""

from __future__ import annotations

from typing import Any

import pytest

from dmt.training.console import ROWS, SYNC_ROW, cells, print_summary, progress_bar, rows_of


def test_the_sync_of_replicas_has_a_row_only_where_there_are_some(capsys: pytest.CaptureFixture[str]) -> None:
    plain: dict[str, Any] = {"eval_auc": 0.75}
    replicated: dict[str, Any] = {"eval_auc": 0.74, "replicas": {"num_replicas": 2, "bytes_per_sample": 4321.4}}
    print_summary({"plain": plain})
    assert "sync" not in capsys.readouterr().out
    print_summary({"plain": plain, "replicated": replicated})
    row = next(line for line in capsys.readouterr().out.splitlines() if "replicas' sync" in line)
    assert row.replace("│", " ").split()[-2:] == ["-", "4,321"]
    assert rows_of([plain, replicated]) == (*ROWS, SYNC_ROW)
    assert len(cells(replicated)) == len(ROWS)


def test_progress_without_a_terminal_is_a_few_lines_with_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(initial=4, total=2004, enabled=True) as bar:
        for _ in range(2000):
            bar.update(1)
        bar.set_postfix(loss="0.5", refresh=False)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("train: 4/2004 [00:00<")
    assert lines[-1].startswith("train: 2004/2004 [")
    assert lines[-1].endswith("loss=0.5]")
    assert len(lines) <= 3, "a line for every step"
    with progress_bar(initial=0, total=None, enabled=False) as bar:
        bar.update(1)
    assert capsys.readouterr().err == ""
