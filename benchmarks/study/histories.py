"""Models with a history, on data in time order: attention in a tower and in a flat model, and models without it.

A history has the targets of the last L rows of the same group whose label is 1 and already known: the destinations of
an airport's last late flights, the countries of an agent's last canceled bookings, the items that a user clicked last.
The last fifth of the rows, in time order, is the test set.

Legend: B samples, F features, L items of a history at most, N embedding dim, D tower dim, R rows, CR compression ratio.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from datetime import date, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from benchmarks.study.data import Clicks, clicks_of_table
from benchmarks.study.train import SETTINGS, Arm, draw_weights, fit
from dmt.errors import InputError
from dmt.models import DINTowerModule
from dmt.models.dense import DotInteraction, mlp

__all__ = [
    "HISTORIES",
    "HISTORY_MODELS",
    "Histories",
    "HistoryDLRM",
    "last_items",
    "read_histories",
    "train_and_test_histories",
]

HISTORY_MODELS = ("din", "din-linear", "mean-history", "no-history")
"""Attention; attention in a tower that, like ``dmt-dlrm``, sends no inner product; the mean of the history; the target
without a history."""


@dataclass(frozen=True, kw_only=True)
class Histories:
    """How the histories of a data set are made."""

    group: str
    """Column of the groups: rows with the same value share a history."""
    target: str
    """Column of the targets; the items of a history are earlier targets."""
    lag: int
    """Minutes, at least 1, after which the label of a row is known, so that later rows may use it."""
    epochs: int
    """Passes over the training rows; replaces that of `SETTINGS`, because later rows differ from earlier ones."""
    left_out: tuple[str, ...] = ()
    """Columns that are not used: their values do not occur again, or would let a model memorize each group."""


HISTORIES = {
    # Lateness is known 15 minutes after the scheduled arrival; the longest flight takes less than 12 hours.
    "flights": Histories(
        group="c_origin", target="c_dest", lag=12 * 60, epochs=1, left_out=("c_month", "c_day", "c_flight", "c_tailnum")
    ),
    "hotel": Histories(group="c_agent", target="c_country", lag=24 * 60, epochs=2),
    "ordered": Histories(group="c_1", target="c_2", lag=1, epochs=3, left_out=("c_1",)),
}
"""Histories by data set."""
_DATES = {
    "flights": (date(2013, 1, 1), 365, "%-m", ("c_month", "c_day", "c_dow")),
    "hotel": (
        *(date(2015, 7, 1), 793, "%B"),
        ("c_arrival_date_month", "c_arrival_date_day_of_month", "c_arrival_dow"),
    ),
}


def _minutes(data: str, table: pa.Table) -> NDArray[Any]:
    """Returns the time of each row in minutes, [R]; hotel rows have no year, but a weekday, which determines it."""
    if data not in _DATES:
        return np.arange(len(table))
    first, number, form, names = _DATES[data]
    dates = [first + timedelta(days) for days in range(number)]
    day_of = {(f"{day:{form}}", str(day.day), str(day.weekday())): day.toordinal() for day in dates}
    days = [day_of[key] for key in zip(*(table[name].to_pylist() for name in names), strict=True)]
    return 24 * 60 * np.array(days) + (table["d_sched_min"].to_numpy() if data == "flights" else 0)


def last_items(
    groups: NDArray[Any], minutes: NDArray[Any], labels: NDArray[Any], items: NDArray[Any], *, length: int, lag: int
) -> NDArray[np.int64]:
    """Returns, for each row, the items of its group's last rows with label 1 that are at least ``lag`` minutes older.

    Args:
        groups: group of each row, [R].
        minutes: time of each row in minutes, [R], ascending.
        labels: label of each row, [R].
        items: item of each row, [R].
        length: L.
        lag: at least 1, so that a history excludes its own row and rows of the same time.

    Returns:
        Items, int64 [R, L], the newest first; -1 after the last one.

    Example:
        >>> rows = (np.zeros(4), np.array([0, 5, 5, 9]), np.array([1, 0, 1, 1]), np.array([7, 8, 9, 7]))
        >>> last_items(*rows, length=2, lag=1).tolist()
        [[-1, -1], [7, -1], [7, -1], [9, 7]]
    """
    found = np.full((len(groups), length), -1)
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        positive = rows[labels[rows] > 0]
        if len(positive):
            known = np.searchsorted(minutes[positive], minutes[rows] - lag, side="right")
            place = known[:, None] - 1 - np.arange(length)
            found[rows] = np.where(place >= 0, items[positive][place.clip(min=0)], -1)
    return found


@cache
def read_histories(file: Path, data: str, length: int, *, dim: int = 16, max_rows: int | None = None) -> Clicks:
    """Reads a data set in time order; after the ids of the features come L columns of the history's items, or -1.

    Args:
        file: the Parquet file, see `benchmarks.study.data.read_clicks`.
        data: name of the data set.
        length: L.
        dim: N.
        max_rows: largest number of training rows; the last ones are kept. None: all.

    Raises:
        InputError: the data set has no histories.
    """
    if data not in HISTORIES:
        raise InputError(f"Data set {data!r} has no time order. Use {' or '.join(HISTORIES)}.")
    histories, table = HISTORIES[data], pq.read_table(file)
    minutes = _minutes(data, table)
    order = minutes.argsort(kind="stable")
    if max_rows is not None:
        order = order[-max_rows * 5 // 4 :]
    table, minutes = table.take(order), minutes[order]
    num_train = len(order) * 4 // 5
    split = pa.array(np.where(np.arange(len(order)) < num_train, "train", "test"))
    table = table.set_column(table.column_names.index("split"), "split", split)
    clicks = clicks_of_table(table.drop_columns(list(histories.left_out)), dim=dim)
    groups = np.array([str(value) for value in table[histories.group].to_pylist()])
    ids = torch.cat([clicks.train[1], clicks.test[1]])
    targets = ids[:, clicks.features.index(histories.target)].numpy()
    labels = table["label"].to_numpy()
    items = torch.from_numpy(last_items(groups, minutes, labels, targets, length=length, lag=histories.lag))
    train, test = (
        (dense, torch.cat([part_ids, part_items], dim=1), part_labels)
        for (dense, part_ids, part_labels), part_items in zip(
            (clicks.train, clicks.test), (items[:num_train], items[num_train:]), strict=True
        )
    )
    return replace(clicks, train=train, test=test)


class _Mean(nn.Module):
    """Replaces attention by the mean of the items; zeros without a history."""

    def forward(self, target_BN: Tensor, items: Any) -> Tensor:
        counts_B = torch.bincount(items.sample_J, minlength=len(target_BN)).clamp(min=1)
        return items.sum() / counts_B.unsqueeze(1)


class _Projection(nn.Linear):
    """Replaces the projection; drops the input columns after target and pooled history."""

    def forward(self, vectors: Tensor) -> Tensor:
        return super().forward(vectors[:, : self.in_features])


class HistoryDLRM(nn.Module):
    """DLRM whose target attends to a history, as one plain module.

    With ``towers="history"``, target and history form a tower, whose `DINTowerModule` sends 2 N / CR numbers, padded
    with zeros to vectors of N; all other features are outside towers, uncompressed. In the flat model, target and
    pooled history are vectors of N, uncompressed.

    Args:
        arm: the arm; its model is one of `HISTORY_MODELS`.
        clicks: the data, which determine the sizes of tables and the number of dense columns.
        target: name of the feature that attends.
    """

    def __init__(self, arm: Arm, clicks: Clicks, target: str) -> None:
        super().__init__()
        rows, dim = [table.num_embeddings for table in clicks.tables], arm.dim
        self._num_features, self._target = len(rows), clicks.features.index(target)
        self._others = [i for i in range(len(rows)) if i != self._target]
        names, is_flat = ["target", "history"], arm.towers == "flat"
        config = EmbeddingConfig(
            name="t_items", num_embeddings=rows[self._target], embedding_dim=dim, feature_names=names
        )
        self.items = EmbeddingCollection(tables=[config])
        sizes = torch.tensor([rows[i] for i in self._others])
        self.register_buffer("offsets", sizes.cumsum(0) - sizes, persistent=False)
        self.other_embedding = nn.Embedding(int(sizes.sum()), dim)
        width = 2 * dim // (1 if is_flat else arm.ratio)
        self.tower: Any = DINTowerModule(*names, embedding_dim=dim, tower_dim=width)
        if is_flat or arm.model == "din-linear":
            self.tower.product = nn.Threshold(float("inf"), 0.0)  # zeros
            self.tower.project = None if is_flat else _Projection(2 * dim, width)
        if not arm.model.startswith("din"):
            self.tower.attention = _Mean()
        num_vectors = len(self._others) + -(-self.tower.out_features // dim)
        self.dense_arch = mlp(clicks.train[0].shape[1], (64, dim))
        self.inter_arch = DotInteraction(num_vectors=num_vectors, dim=dim)
        self.over_arch = mlp(self.inter_arch.out_features, (64, 32, 1), last_is_linear=True)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Dense [B, columns] and ids [B, F + L] int64, -1 after the end of a history -> logits [B, 1]."""
        targets_B, items_BL = ids[:, self._target], ids[:, self._num_features :]
        is_item = items_BL >= 0
        lengths = torch.cat([torch.ones_like(targets_B), is_item.sum(dim=1)])
        sequences = KeyedJaggedTensor(["target", "history"], torch.cat([targets_B, items_BL[is_item]]), lengths=lengths)
        sent_BD = self.tower(self.items(sequences))
        vectors_BN = self.other_embedding(ids[:, self._others] + self.offsets)
        sent = nn.functional.pad(sent_BD, (0, -sent_BD.shape[1] % vectors_BN.shape[2]))
        vectors = torch.cat([vectors_BN, sent.view(len(ids), -1, vectors_BN.shape[2])], dim=1)
        return self.over_arch(self.inter_arch(self.dense_arch(dense), vectors))


def train_and_test_histories(file: Path, data: str, arm: Arm, seed: int, *, max_rows: int | None) -> dict[str, Any]:
    """Trains a model with a history, and returns its AUC and NE on test rows, and CPU seconds."""
    clicks = read_histories(file, data, arm.length, dim=arm.dim, max_rows=max_rows)
    began = time.process_time()
    model = HistoryDLRM(arm, clicks, HISTORIES[data].target)
    draw_weights(model, seed)
    settings = replace(SETTINGS[data], epochs=HISTORIES[data].epochs)
    return fit(model, settings, arm, clicks, seed) | {"cpu_seconds": round(time.process_time() - began, 2)}
