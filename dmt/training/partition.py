"""The feature affinity of a trained model, from the output of its run, and the interactions of a run's features."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from dmt.errors import InputError
from dmt.partitioner import FeatureAffinity, PartitionRules
from dmt.training.build import ClickTask, build_model
from dmt.training.checkpoints.store import load_plain
from dmt.training.config import TrainingConfig
from dmt.training.data.batch import ClickBatch
from dmt.training.data.clicks import ClickData
from dmt.training.job import open_data, open_tables
from dmt.training.trained import checkpoint_of

__all__ = ["affinity_of_run", "interactions_of", "spread_batches"]

_BATCH_ROWS = 256
_INTERACTION_ROWS, _MOST_ROWS = 4096, 2**20
_PLACES = 16


def affinity_of_run(
    run: Path,
    *,
    data_path: str | None = None,
    max_rows: int = 65_536,
    rules: PartitionRules | None = None,
    functions: Collection[str] = (),
) -> FeatureAffinity:
    """Collects the feature affinity of a run's newest whole checkpoint.

    Batches come from all over the training rows (see `spread_batches`): a file may be sorted by time or by user.

    Args:
        run: the ``output_dir`` of a run.
        data_path: rows from here instead of the run's own ``data.train_path``.
        max_rows: rows to average over, at most; the mean settles quickly.
        rules: compared with the features before the model is made.
        functions: see `dmt.training.trained.checkpoint_of`.

    Raises:
        InputError: the folder holds no run or no whole checkpoint, its tables are cut, or the data or the rules do not
            fit it.
    """
    checkpoint, config = checkpoint_of(run, data_path, functions)
    job = open_data(config)
    if rules is not None:
        rules.for_features(job.data.columns.feature_names)
    if job.towers is not None and (cuts := job.towers.column_splits):
        raise InputError(
            f"{run}: this run's tables are cut into column shards ({', '.join([*cuts][:5])}), which hold "
            "parts of embeddings only. Give a run of whole tables, or use --strategy interactions."
        )
    task = ClickTask(build_model(job))
    load_plain(task, checkpoint)
    # At most the run's own batch: that many rows there are.
    size = min(_BATCH_ROWS, config.train.batch_size, max(1, max_rows))
    batches = spread_batches(job.data, max_rows=max_rows, batch_size=size)
    return FeatureAffinity.collect(task.model, batches)


def interactions_of(
    config: TrainingConfig, *, with_tables: bool, seed: int = 0, rules: PartitionRules | None = None
) -> FeatureAffinity:
    """Measures which features interact, on training rows of a config's data; no model is read or made.

    At most 2**20 rows are read, at even distances among all.

    Args:
        config: of which the data and the embedding dimension count.
        with_tables: keep the tables of the data for the partitioner's limits and for the plan.
        seed: of the splits.
        rules: compared with the features before rows are read.

    Raises:
        InputError: the data cannot be read, `FeatureAffinity.collect_interactions` refuses them, or the rules do not
            fit them.
    """
    data, tables = open_tables(config)
    if rules is not None:
        rules.for_features(data.columns.feature_names)
    rows = data.num_rows("train")
    # Nobody has counted the rows of a user's source.
    size = _BATCH_ROWS if rows is None else max(1, min(_INTERACTION_ROWS, rows // 16))
    batches = spread_batches(data, max_rows=_MOST_ROWS, batch_size=size)
    tables = tables if with_tables else []
    return FeatureAffinity.collect_interactions(batches, tables=tables, seed=seed, max_rows=_MOST_ROWS)


def spread_batches(data: ClickData, *, max_rows: int, batch_size: int) -> Iterator[ClickBatch]:
    """Yields batches from places at even distances among the training rows; of a user's source the first ones.

    They have ``max_rows`` together at most, but there is one at least where there are enough rows.
    """
    options: dict[str, Any] = {"rank": 0, "world_size": 1, "batch_size": batch_size}
    rows, count = data.num_rows("train"), max(1, max_rows // batch_size)
    if rows is None:
        yield from islice(data.batches("train", **options), count)
        return
    there = max(1, rows // batch_size)
    count = min(there, count)
    # A place costs the rows that are shuffled together.
    places = min(_PLACES, count)
    for place in range(places):
        number = count * (place + 1) // places - count * place // places
        start = (there - number) * place // max(places - 1, 1) * batch_size
        yield from islice(data.batches("train", rows=start, **options), number)
