"""A folder that Spark has prepared has the rows, ids and settings of one that `dmt prepare` writes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dmt.training.data.clicks import ClickData
from dmt.training.data.config import DataConfig
from dmt.training.data.files import read_manifest
from dmt.training.data.prepare import prepare

ROOT = Path(__file__).parent.parent.parent
ROWS = 1000


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java")
def test_spark_prepares_what_dmt_prepare_does(tmp_path: Path) -> None:
    pytest.importorskip("pyspark", reason="pip install pyspark")
    columns = {
        "label": [i % 3 == 0 for i in range(ROWS)],
        "split": ["test" if i % 5 == 0 else "train" for i in range(ROWS)],
        "c_ad": [None if i % 7 == 0 else "" if i % 11 == 0 else f"ad {i % 90} \u00fc" for i in range(ROWS)],
        "c_shop": [None if i % 13 == 0 else 2**53 + i for i in range(ROWS)],
        "d_row": [float(i) for i in range(ROWS)],
        "d_price": [None if i % 3 == 0 else float("nan") if i % 4 == 0 else i / 7 - 50 for i in range(ROWS)],
    }
    clicks = str(tmp_path / "clicks.parquet")
    pq.write_table(pa.table(columns).set_column(0, "label", pa.array([int(x) for x in columns["label"]])), clicks)
    command = [sys.executable, "examples/prepare_on_spark.py", clicks, str(tmp_path / "spark")]
    two_cores = {"PYSPARK_SUBMIT_ARGS": "--master local[2] pyspark-shell"}
    subprocess.run(command, cwd=ROOT, env=os.environ | two_cores, check=True, timeout=300)

    names = {"split_column": "split", "categorical": ("c_*",), "dense": ("d_*",), "num_embeddings": 1_000_000}
    prepare(DataConfig(kind="columns", train_path=clicks, **names), tmp_path / "dmt")
    spark, ours = (read_manifest(tmp_path / name, name) for name in ("spark", "dmt"))
    assert (spark.columns, spark.raw) == (ours.columns, ours.raw)
    for part in ("train", "eval"):
        one, other = (pq.read_table(tmp_path / name / part).sort_by("d_row") for name in ("spark", "dmt"))
        assert one.num_rows == ROWS * (4 if part == "train" else 1) // 5
        assert one.select(other.column_names).cast(other.schema).equals(other)
    data = ClickData(DataConfig(prepared=str(tmp_path / "spark")))
    assert data.num_rows("train") == ROWS * 4 // 5
    assert len(next(data.batches("train", rank=0, world_size=2, batch_size=64)).labels) == 64
