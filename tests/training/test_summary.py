"""The table of a run's numbers."""

from __future__ import annotations

from typing import Any

import pytest

from dmt.training.console import ROWS, SYNC_ROW, cells, print_summary, rows_of


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
