"""Affinities of trained models: which rows they are measured on, and a run that leaves its affinity behind."""

from __future__ import annotations

import json
import logging
import math
import re
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dmt.errors import InputError
from dmt.partitioner import FeatureAffinity
from dmt.sptt.mesh import TowerMesh
from dmt.testing import gather_plain_state, load_plain_state
from dmt.training import partition
from dmt.training.build import shard_model
from dmt.training.checkpoints import load_plain, newest
from dmt.training.config import TrainConfig, load_config, to_toml
from dmt.training.data import DataConfig, open_source
from dmt.training.job import open_job
from dmt.training.partition import affinity_of_run, spread_batches, trained_rows, write_affinity
from dmt.training.preflight import resolve
from tests.programs import run_program
from tests.ranks import run_ranks
from tests.training.checkpoints.made import save_alone
from tests.training.small import plain, small, source


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
    clicks = open_source(DataConfig.model_validate(data), cache=Path(data["train_path"]).parent / "prepared")
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
    found = rows_seen(numbered(tmp_path, 100), num_rows=num_rows, max_rows=max_rows, batch_size=batch_size)
    starts = [batch[0] for batch in found]
    assert found == [list(range(start, start + batch_size)) for start in starts]
    assert len(starts) == len(set(starts)) == count
    assert starts[0] == 0
    if count > 1:
        assert starts[-1] == num_rows - batch_size, "the last rows that there are, and none after them"
        assert max(np.diff(starts)) <= 2 * num_rows / count


def test_ranks_get_different_rows_and_equally_many(tmp_path: Path) -> None:
    data = numbered(tmp_path, 100)
    arguments = {"num_rows": 100, "max_rows": 40, "batch_size": 4, "world_size": 3}
    found = [rows_seen(data, rank=rank, **arguments) for rank in range(3)]
    assert [len(batches) for batches in found] == [3, 3, 3]
    counts = Counter(row for batches in found for rows in batches for row in rows)
    assert (len(counts), set(counts.values())) == (36, {1})


@pytest.mark.parametrize("max_rows", [10, 20, 430, 1290, 2560, 2570])
def test_as_many_rows_are_used_as_asked_for(max_rows: int, tmp_path: Path) -> None:
    # Whole distances between batches gave 1,280 of 2,560 rows.
    batches = rows_seen(numbered(tmp_path, 2570), num_rows=2570, max_rows=max_rows, batch_size=10)
    assert sum(map(len, batches)) == max_rows
    starts = [rows[0] for rows in batches]
    assert all(rows == list(range(rows[0], rows[0] + 10)) for rows in batches)
    assert starts[0] == 0
    assert starts[-1] == 2560 or max_rows == 10


def test_rows_of_a_run_are_those_of_its_steps_in_one_epoch() -> None:
    assert trained_rows(TrainConfig(batch_size=8), steps=5, world_size=2) == 80
    assert trained_rows(TrainConfig(batch_size=8, epochs=2, max_steps=5), steps=5, world_size=2) == 32


def test_the_affinity_of_towers_at_the_end_of_training_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"train\.affinity_rows=100 needs a flat model, but the run has model\.arch='dmt-dlrm'"
    ):
        resolve(small(train={"affinity_rows": 100}), 4)
    assert resolve(small("dlrm", train={"affinity_rows": 100}), 4)


def finished_run(folder: Path, data: dict[str, Any], *, steps: int | None) -> Path:
    """A run with a checkpoint, made in this process without training."""
    config = small("dlrm", data=data, train={"batch_size": 4})
    torch.manual_seed(0)
    save_alone(plain(config), folder / "run" / "checkpoint", files={"config.toml": to_toml(config)})
    if steps is not None:
        (folder / "run" / "result.json").write_text(json.dumps({"steps": steps, "world_size": 2}))
    return folder / "run"


@pytest.mark.parametrize(
    ("steps", "other", "rows"),
    [
        (5, False, [0, 25, 49, 73, 9, 34, 58, 82]),  # trained on 5 x 2 x 4 rows, a quarter in each lane
        (None, False, [0, 25, 49, 73, 23, 48, 72, 96]),  # does not say; the file is counted
        (5, True, [*range(4), *range(44, 48)]),  # another file, of 50 rows
    ],
)
def test_a_run_is_measured_all_over_the_rows_it_was_trained_on(
    steps: int | None, other: bool, rows: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished_run(tmp_path, numbered(tmp_path, 97), steps=steps)
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
    run = finished_run(tmp_path, numbered(tmp_path, 97), steps=5)
    monkeypatch.setattr(partition, "build_model", None)
    seen: list[list[str]] = []

    def refuse(tables: Any) -> None:
        seen.append([table.name for table in tables])
        raise InputError("these will not do")

    with pytest.raises(InputError, match="these will not do"):
        affinity_of_run(run, check=refuse)
    assert seen == [["t_c_1"]]


def written_on_rank(rank: int, folder: str) -> list[tuple[bool, list[str]]]:
    """Whether each attempt went well on this rank, and what it warned of."""
    config = small("dlrm", topology={"ranks_per_tower": 1}, train={"affinity_rows": 300})
    mesh = TowerMesh(config.topology.build())
    data = source(config)
    model = shard_model(open_job(config), mesh)
    logger = logging.getLogger("dmt.training.partition")
    logger.setLevel(logging.WARNING)  # a command may have run in this process, and told it to be quieter
    found = []
    for name in ("good.npz", "file/bad.npz", "nan.npz"):
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, lines=lines: lines.append(record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)
        if name == "nan.npz":
            with torch.no_grad():
                for key, value in model.state_dict().items():
                    for shard in value.local_shards() if key.endswith("t_C4.weight") else []:
                        shard.tensor.fill_(math.nan)
        path = Path(folder) / name
        done = write_affinity(model, data, mesh, config=config.train, steps=20, path=path) is not None
        found.append((done, lines))
        logger.removeHandler(handler)
    return found


@pytest.mark.ranks
def test_a_run_goes_on_where_its_affinity_cannot_be_had(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first, second = run_ranks(written_on_rank, 2, str(tmp_path))
    assert FeatureAffinity.load(tmp_path / "good.npz").num_samples
    assert [done for done, _ in first] == [True, False, False]
    assert [done for done, _ in second] == [True, True, False]
    assert [len(lines) for _, lines in first] == [0, 1, 1]
    assert not any(lines for _, lines in second), "the first rank warns for all"
    assert re.search(r"No affinity was written \(train\.affinity_rows=300\): .*cannot be written", first[1][1][0])
    assert re.search(r"'C4' is not finite.* The run goes on", first[2][1][0])


def affinity_on_rank(rank: int, path: Path) -> tuple[FeatureAffinity, dict[str, torch.Tensor]]:
    config = small("dlrm", synthetic={"num_rows": 1600, "num_multi_hot": 2}, train={"affinity_rows": 300})
    mesh = TowerMesh(config.topology.build())
    data = source(config)
    model = shard_model(open_job(config), mesh)
    state = gather_plain_state(model)
    load_plain_state(model, state)
    affinity = write_affinity(model, data, mesh, config=config.train, steps=20, path=path)
    assert affinity is not None
    return affinity, state


@pytest.mark.ranks
def test_the_affinity_of_a_sharded_model_is_that_of_the_plain_one_on_the_same_rows(tmp_path: Path) -> None:
    results = run_ranks(affinity_on_rank, 4, tmp_path / "affinity.npz")
    config = small("dlrm", synthetic={"num_rows": 1600, "num_multi_hot": 2})
    model, data = plain(config), source(config)
    model.load_state_dict(results[0][1])
    # Of 20 batches of 64 rows trained on, four at even distances.
    alone = {"rank": 0, "world_size": 1, "batch_size": 64, "lanes": 4}
    batches = [next(data.batches("train", rows=64 * i, **alone)) for i in (0, 6, 12, 19)]
    wanted = FeatureAffinity.collect(model.model, batches)
    for affinity, _ in results:
        assert affinity.num_samples == wanted.num_samples == 256
        np.testing.assert_allclose(affinity.matrix, wanted.matrix, rtol=0, atol=1e-6)
        assert (affinity.tables, affinity.pooling_factors) == (wanted.tables, wanted.pooling_factors)


@pytest.mark.ranks
def test_a_run_leaves_an_affinity_that_is_partitioned_without_its_checkpoint(tmp_path: Path) -> None:
    settings = ["num_features=6", "num_groups=2", "rows_per_table=30", "num_rows=2000", "num_eval_rows=200"]
    overrides = [f"data.synthetic.{setting}" for setting in settings]
    overrides += ["topology.ranks_per_tower=1", "model.arch=dlrm", "train.batch_size=128", "train.affinity_rows=1792"]
    finished = run_program(["-m", "dmt.training", "demo", *overrides, f"train.output_dir={tmp_path}"], 2)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    affinity = FeatureAffinity.load(tmp_path / "affinity.npz")
    assert affinity.num_samples == 1792, "all rows trained on"
    assert [table.num_embeddings for table in affinity.tables] == [30] * 6
    assert affinity.pooling_factors == (1.0,) * 6
    # What the checkpoint gives: the traffic is measured after both, with one step more.
    plain_affinity, _ = affinity_of_run(tmp_path, max_rows=1792)
    assert plain_affinity.num_samples == 1792
    whole = FeatureAffinity.collect(*plain_and_rows(tmp_path))
    np.testing.assert_allclose(affinity.matrix, whole.matrix, rtol=0, atol=1e-6)


def plain_and_rows(run: Path) -> tuple[Any, list[Any]]:
    """The run's plain model, and the rows that its two ranks had."""
    checkpoint = newest(run / "checkpoint")
    assert checkpoint is not None
    config = load_config(checkpoint / "config.toml")
    task = plain(config)
    load_plain(task, checkpoint)
    batches = source(config).batches("train", rank=0, world_size=1, batch_size=128, lanes=2)
    return task.model, list(islice(batches, 14))
