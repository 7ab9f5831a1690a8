"""Measures the feature affinity of a run's trained model, and the feature interactions in a config's data."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from dmt.errors import InputError
from dmt.formatting import shorten
from dmt.partitioner import FeatureAffinity, PartitionRules
from dmt.partitioner.rows import MOST_KEPT
from dmt.training.config import TrainingConfig
from dmt.training.data.batch import ClickBatch
from dmt.training.data.clicks import ClickData
from dmt.training.job import Job, open_tables, open_unsharded
from dmt.training.trained import trained_model

__all__ = ["affinity_of_run", "interactions_of", "spread_batches"]

_BATCH_ROWS, _PLACES = 256, 16
_INTERACTION_ROWS, _MOST_ROWS = 4096, 2**20


def affinity_of_run(
    run: Path,
    *,
    data_path: str | None = None,
    max_rows: int = 65_536,
    rules: PartitionRules | None = None,
    functions: Collection[str] = (),
) -> FeatureAffinity:
    """Collects the feature affinity of a run's newest intact checkpoint.

    Batches come from all over the rows of files, which may be sorted (`spread_batches`); of a source, the first ones.

    Args:
        run: the ``output_dir`` of a run.
        data_path: raw files or a prepared folder to read instead of the run's own data.
        max_rows: number of rows to average over, at most.
        rules: rules to check against the features before the model is loaded.
        functions: see `dmt.training.trained.checkpoint_of`.

    Raises:
        InputError: see `checkpoint_of`; or the run's tables are split by columns, or data or rules do not fit the run.
    """

    def open_rows(config: TrainingConfig) -> Job:
        job = open_unsharded(config)
        if rules is not None:
            rules.for_features(job.data.columns.feature_names)
        if job.column_splits:
            raise InputError(
                f"{run}: this run's tables are cut into column shards ({shorten([*job.column_splits], ', ')}), which "
                "hold only parts of embeddings. Give a run with whole tables, or use --strategy interactions."
            )
        return job

    _, job, model = trained_model(run, data_path, functions, open_rows)
    # The data of a run have at least as many rows as one of its batches.
    size = min(_BATCH_ROWS, job.config.train.batch_size, max(1, max_rows))
    return FeatureAffinity.collect(model, spread_batches(job.data, max_rows=max_rows, batch_size=size))


def interactions_of(
    config: TrainingConfig, *, with_tables: bool, seed: int = 0, rules: PartitionRules | None = None
) -> FeatureAffinity:
    """Measures which features interact, on training rows of a config's data; needs no model.

    Reads 2**20 rows at most (fewer if over 256 columns) at evenly spaced places; from a user's source, the first ones.

    Args:
        config: the config; its model is not built.
        with_tables: whether to keep the tables of the data, for the partitioner's limits and for the plan.
        seed: seed of the splits of rows.
        rules: rules to check against the features before rows are read.

    Raises:
        InputError: the data cannot be read, or `FeatureAffinity.collect_interactions` or the rules refuse the features.
    """
    data, tables = open_tables(config)
    if rules is not None:
        rules.for_features(data.columns.feature_names)
    rows = data.num_rows("train")
    # The number of rows of a user's source is not known.
    size = _BATCH_ROWS if rows is None else max(1, min(_INTERACTION_ROWS, rows // 16))
    # The rows of all batches are kept; otherwise those of the last places would be left out.
    most = min(_MOST_ROWS, MOST_KEPT // len(data.columns.schema))
    batches = spread_batches(data, max_rows=most, batch_size=size)
    tables = tables if with_tables else []
    return FeatureAffinity.collect_interactions(batches, tables=tables, seed=seed, max_rows=most)


def spread_batches(data: ClickData, *, max_rows: int, batch_size: int) -> Iterator[ClickBatch]:
    """Yields batches from evenly spaced places among the training rows; from a user's source, the first batches.

    All batches together have at most ``max_rows`` rows, unless a single batch has more.
    """
    options: dict[str, Any] = {"rank": 0, "world_size": 1, "batch_size": batch_size}
    rows, count = data.num_rows("train"), max(1, max_rows // batch_size)
    if rows is None:
        yield from islice(data.batches("train", **options), count)
        return
    there = max(1, rows // batch_size)
    count = min(there, count)
    # Few places, as each is costly: all rows that are shuffled together there are read.
    places = min(_PLACES, count)
    for place in range(places):
        first, end = count * place // places, count * (place + 1) // places
        start = (first + (there - count) * place // max(places - 1, 1)) * batch_size
        yield from islice(data.batches("train", rows=start, **options), end - first)
