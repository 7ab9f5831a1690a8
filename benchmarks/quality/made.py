"""Two data sets with known interactions, drawn with a fixed seed, in the form of the tower study's files.

- ``planted``: the trainer's own generator (`dmt.training.data.synthetic`) with independent features: 16 of 50 ids, in
  four groups whose features interact in pairs. Nothing resembles anything, so affinities say nothing.
- ``madelon``: scikit-learn's `make_classification` (Guyon 2003): clusters on the corners of a cube, given to the two
  classes at random, so that its 5 informative columns interact in pairs and more; 11 others are noise. Each column
  is cut into 32 equally full pieces.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dmt.training.data.config import SyntheticConfig
from dmt.training.data.synthetic import BLOCK_ROWS, SyntheticClicks

__all__ = ["planted_config", "write_made"]

_BLOCKS, _TEST_SHARE, _FEATURES, _PIECES = 80, 0.2, 16, 32


def planted_config(signal: float = 1.3) -> SyntheticConfig:
    """The generator's settings; ``signal`` is the standard deviation of the log odds that can be predicted."""
    return SyntheticConfig(
        num_features=_FEATURES, num_groups=4, group_correlation=0.0, rows_per_table=50, num_dense=2, signal=signal
    )


def write_made(name: str, path: Path) -> None:
    """Writes ``planted`` or ``madelon`` as a Parquet file of 81,920 rows, a fifth of them to test on."""
    ids, dense, labels = _planted() if name == "planted" else _madelon()
    test = np.random.default_rng(1).random(len(labels)) < _TEST_SHARE
    columns = {f"c_{i + 1}": [str(value) for value in column] for i, column in enumerate(ids.T)}
    columns |= {f"d_{i + 1}": column.tolist() for i, column in enumerate(dense.T)}
    rest = {"label": labels.astype(np.int8).tolist(), "split": np.where(test, "test", "train").tolist()}
    pq.write_table(pa.table(columns | rest), path)


def _planted() -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
    clicks = SyntheticClicks(planted_config())
    rows = [clicks.draw("train", block) for block in range(_BLOCKS)]
    ids = np.concatenate([np.stack([bags.values for bags in own.bags], axis=1) for own in rows])
    return ids, np.log1p(np.concatenate([own.dense for own in rows])), np.concatenate([own.labels for own in rows])


def _madelon() -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
    from sklearn.datasets import make_classification

    values, labels = make_classification(
        n_samples=_BLOCKS * BLOCK_ROWS,
        n_features=_FEATURES,
        n_informative=5,
        n_redundant=0,
        n_clusters_per_class=16,
        flip_y=0.1,
        class_sep=1.0,
        random_state=0,
    )
    order = values.argsort(axis=0).argsort(axis=0)
    dense = np.random.default_rng(0).normal(size=(len(labels), 1)).astype(np.float32)
    return order * _PIECES // len(labels), dense, labels.astype(np.float32)
