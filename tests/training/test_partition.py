"""Affinities of trained models: which rows they are measured on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dmt.errors import InputError
from dmt.training import partition
from dmt.training.config import to_toml
from dmt.training.data.clicks import ClickData
from dmt.training.data.config import DataConfig
from dmt.training.partition import affinity_of_run, spread_batches
from tests.training.small import plain, save_alone, small


def numbered(folder: Path, num_rows: int, **settings: Any) -> dict[str, Any]:
    """A file whose row i has the id i, sorted."""
    numbers = range(num_rows)
    columns = {"label": [i % 2 for i in numbers], "d_1": [0.1 * i for i in numbers], "c_1": numbers}
    pq.write_table(pa.table({name: list(values) for name, values in columns.items()}), folder / "rows.parquet")
    return {
        "kind": "columns",
        "train_path": str(folder / "rows.parquet"),
        "eval_path": str(folder / "rows.parquet"),
        "dense": ["d_1"],
        "categorical": ["c_1"],
        "id_mode": "index",
        "num_embeddings": num_rows,
        "shuffle_rows": 0,
        **settings,
    }


def rows_seen(data: dict[str, Any], **arguments: Any) -> list[list[int]]:
    """The rows of each batch."""
    clicks = ClickData(DataConfig.model_validate(data), cache=Path(data["train_path"]).parent / "prepared")
    return [batch.sparse_features.values().tolist() for batch in spread_batches(clicks, **arguments)]


@pytest.mark.parametrize(
    ("num_rows", "max_rows", "batch_size", "count"),
    [
        (100, 20, 5, 4),
        (100, 1000, 5, 20),
        (100, 99, 10, 9),
        (100, 15, 5, 3),
        (60, 20, 5, 4),
        (100, 1, 5, 1),
        (4, 20, 4, 1),
    ],
)
def test_batches_come_from_all_over_the_rows(
    num_rows: int, max_rows: int, batch_size: int, count: int, tmp_path: Path
) -> None:
    found = rows_seen(numbered(tmp_path, num_rows), max_rows=max_rows, batch_size=batch_size)
    starts = [batch[0] for batch in found]
    assert found == [list(range(start, start + batch_size)) for start in starts]
    assert len(starts) == len(set(starts)) == count
    assert starts[0] == 0
    if count > 1:
        assert starts[-1] == num_rows - batch_size, "the last rows that there are, and none after them"
        assert max(np.diff(starts)) <= 2 * num_rows / count


@pytest.mark.parametrize("max_rows", [10, 20, 430, 1290, 2560, 2570])
def test_as_many_rows_are_used_as_asked_for(max_rows: int, tmp_path: Path) -> None:
    # Whole distances between batches gave 1,280 of 2,560 rows.
    batches = rows_seen(numbered(tmp_path, 2570), max_rows=max_rows, batch_size=10)
    assert sum(map(len, batches)) == max_rows
    starts = [rows[0] for rows in batches]
    assert all(rows == list(range(rows[0], rows[0] + 10)) for rows in batches)
    assert starts[0] == 0
    assert starts[-1] == 2560 or max_rows == 10


def finished_run(folder: Path, data: dict[str, Any]) -> Path:
    """A run with a checkpoint, made in this process without training."""
    config = small("dlrm", data=data, train={"batch_size": 4})
    torch.manual_seed(0)
    save_alone(plain(config), folder / "run" / "checkpoint", files={"config.toml": to_toml(config)})
    return folder / "run"


@pytest.mark.parametrize(
    ("other", "rows"),
    [
        (False, [*range(4), *range(92, 96)]),  # its own file, of 97 rows
        (True, [*range(4), *range(44, 48)]),  # another file, of 50 rows
    ],
)
def test_a_run_is_measured_all_over_the_rows(
    other: bool, rows: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished_run(tmp_path, numbered(tmp_path, 97))
    path = None
    if other:
        (tmp_path / "other").mkdir()
        path = numbered(tmp_path / "other", 50)["train_path"]
    seen: list[int] = []

    def look(*arguments: Any, **settings: Any) -> Any:
        for batch in spread_batches(*arguments, **settings):
            seen.extend(batch.sparse_features.values().tolist())
            yield batch

    monkeypatch.setattr(partition, "spread_batches", look)
    affinity, tables = affinity_of_run(run, data_path=path, max_rows=8)
    assert seen == rows
    assert affinity.num_samples == 8
    assert affinity.tables == tuple(tables)
    assert affinity.pooling_factors == (1.0,)


def test_the_tables_are_checked_before_the_model_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished_run(tmp_path, numbered(tmp_path, 97))
    monkeypatch.setattr(partition, "build_model", None)
    seen: list[list[str]] = []

    def refuse(tables: Any) -> None:
        seen.append([table.name for table in tables])
        raise InputError("these will not do")

    with pytest.raises(InputError, match="these will not do"):
        affinity_of_run(run, check=refuse)
    assert seen == [["t_c_1"]]
