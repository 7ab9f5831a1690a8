"""Prepares clicks on a Spark cluster: the folder that `dmt prepare` would write, with the same ids.

    python examples/prepare_on_spark.py CLICKS OUT

CLICKS is a Parquet file or folder with the columns ``label`` (0 or 1), ``split`` (``train`` or ``test``), ``c_*`` (text
or whole numbers) and ``d_*`` (numbers). OUT must be a new folder on a file system that the driver and all executors
share. They all need this package, but not torch. Set ``data.prepared`` of a run to OUT.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import pyarrow as pa
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as f

from dmt.training.data.columns import Feature, explicit_config, find_columns
from dmt.training.data.config import DataConfig
from dmt.training.data.files import FORMAT, MANIFEST, Manifest
from dmt.training.data.hash import hash_rows
from dmt.training.data.prepare import size_and_crc

GROUP_ROWS = 32_768  # rows that the trainer reads and shuffles together


def ids(feature: Feature) -> Column:
    """The rows of a feature's values in its table, int32."""

    @f.pandas_udf("int")
    def hashed(values: pd.Series) -> pd.Series:
        text = pa.array(values.mask(values == ""), pa.string(), from_pandas=True)
        return pd.Series(hash_rows(text, feature=feature.table, num_embeddings=feature.rows))

    return hashed(f.col(feature.name).cast("string")).alias(feature.name)


def dense(name: str) -> Column:
    """A dense column, sign(x) * log(1 + abs(x)) as by default in ``[data]``, float32; 0 for a missing value."""
    value = f.nanvl(f.coalesce(f.col(name).cast("double"), f.lit(0.0)), f.lit(0.0))
    return (f.signum(value) * f.log1p(f.abs(value))).cast("float").alias(name)


def main(clicks: str, out: Path) -> None:
    """Writes the folder; its manifest comes last, so that an unfinished folder is refused."""
    spark = SparkSession.builder.appName("prepare").getOrCreate()
    rows = spark.read.parquet(clicks)
    names = {"split_column": "split", "categorical": ("c_*",), "dense": ("d_*",)}
    config = DataConfig(kind="columns", train_path=clicks, num_embeddings=1_000_000, **names)
    columns = find_columns(config, pa.schema([(name, pa.string()) for name in rows.columns]), clicks)
    label = f.col("label").cast("byte").alias("label")
    chosen = [label, *map(dense, columns.dense), *map(ids, columns.features), f.col("split")]
    for part, value in (("train", "train"), ("eval", "test")):
        written = rows.select(*chosen).where(f.col("split") == value).drop("split").write
        written.option("parquet.block.row.count.limit", GROUP_ROWS).parquet(str(out / part))
    files = sorted(out.glob("*/*.parquet"))
    found = spark.sparkContext.parallelize(files, max(len(files), 1)).map(size_and_crc).collect()
    manifest = Manifest(
        format=FORMAT,
        files={str(path.relative_to(out)): version for path, version in zip(files, found, strict=True)},
        dense=columns.dense,
        features=columns.features,
        label="label",
        raw=explicit_config(config, columns).model_dump(mode="json", exclude_defaults=True),
    )
    (out / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).absolute())
