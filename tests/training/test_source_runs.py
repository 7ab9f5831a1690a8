"""Runs on rows of the user's own: training, resume, check, partition, score by a config with ``data.source``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dmt.training.config import TrainingConfig, load_config
from dmt.training.data.config import with_files
from dmt.training.serving.score import score
from tests.training.data.own_rows import columns
from tests.training.small import small
from tests.training.test_resume import attempt, losses

SOURCE = "tests.training.data.own_rows:resumable"


def config_of(folder: Path, **train: Any) -> TrainingConfig:
    names = {"dense": ["d"], "categorical": ["c", "n", "bag", "pair"], "num_embeddings": 23}
    data = {"source": SOURCE, "options": {"rows": 250}, **names}
    train = {"batch_size": 8, "log_every": 1, "output_dir": str(folder), **train}
    config = small(train={"device": "cpu", **train}, topology={"num_towers": 2, "ranks_per_tower": 1})
    return TrainingConfig.model_validate(config.model_dump() | {"data": data})


@pytest.mark.ranks
def test_a_run_is_resumed_bit_for_bit_and_its_model_scores_rows(tmp_path: Path) -> None:
    whole, parts = config_of(tmp_path / "whole"), tmp_path / "parts"
    result = attempt(whole)
    assert result is not None
    assert result["steps"] == 125 // 8
    # The second attempt begins in the middle of a batch of the source.
    assert (attempt(config_of(parts, max_steps=7)) or {})["steps"] == 7
    again = attempt(config_of(parts))
    assert again is not None
    assert again["eval_loss"] == result["eval_loss"]
    assert losses(config_of(parts))["train/loss"] == losses(whole)["train/loss"]

    found = score(tmp_path / "whole", tmp_path / "scores.parquet", functions=[SOURCE])
    assert found.num_rows == 25
    assert found.metrics is not None
    assert found.metrics.loss == pytest.approx(result["eval_loss"], rel=1e-5)  # sums in another order
    # A file with the columns of the source does as well.
    pq.write_table(pa.table(columns(range(40))), tmp_path / "rows.parquet")
    assert score(tmp_path / "whole", tmp_path / "s.parquet", data_path=str(tmp_path / "rows.parquet")).num_rows == 40


def test_a_source_can_be_replaced_by_files() -> None:
    config = load_config("demo", ['data.source="my_data:clicks"', 'data.categorical=["c_*"]'])
    assert (config.data.kind, config.data.source, config.data.categorical) == ("source", "my_data:clicks", ("c_*",))
    files = with_files(config.data, "a.parquet")
    assert (files.kind, files.source, files.train_path) == ("columns", None, "a.parquet")
    files.model_validate(files.model_dump())
