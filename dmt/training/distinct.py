"""Distinct inputs in the data of a job: what each tower is sent of a batch when each distinct input is sent once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt.plan.distinct import DistinctRows
from dmt.sptt.unique import distinct_inputs
from dmt.training.data import ClickData
from dmt.training.job import Job

__all__ = ["InputGroup", "distinct_inputs_of", "first_ids"]

_MOST_BATCHES = 64


@dataclass(frozen=True, kw_only=True)
class InputGroup:
    """Features whose inputs are told apart together."""

    tower: int
    """Tower that they are in."""
    features: tuple[str, ...]
    """All features of the tower; of a flat model a feature alone."""
    distinct: DistinctRows
    """Distinct inputs of a rank's batch, and the ids in them; means over ranks."""
    share: float
    """Distinct over all inputs."""


def distinct_inputs_of(
    job: Job, hot_rows: Mapping[str, Any] | None = None, batches: Iterable[KeyedJaggedTensor] | None = None
) -> list[InputGroup]:
    """Counts the distinct inputs of each tower in the first global batch of training (64 ranks of it at most).

    A tower module reads the features of its tower together; in a flat model each feature stays alone. With
    ``sharding.unique = "auto"``, a group that the exchange would leave as it is has every sample.

    Args:
        job: the run.
        hot_rows: rows of each table that every rank has copies of; their ids are not counted, and samples without other
            ids share a row.
        batches: ids of each rank; by default those of the first global batch.
    """
    assert job.towers is not None, "the flat dataflow has no towers"
    towers, size = job.towers.to_lists(), job.config.train.batch_size
    whole = [(i, tuple(features)) for i, features in enumerate(towers)]
    groups = whole if job.config.model.has_towers else [(i, (name,)) for i, features in whole for name in features]
    sizes = [len(group) for _, group in groups]
    counted = []
    hot = hot_rows or {}
    rows_of = {f: hot[table.name] for table in job.split_tables if table.name in hot for f in table.feature_names}
    if batches is None:
        batches = first_ids(job.data, world_size=job.topology.world_size, batch_size=size)
    for ids in batches:
        order = [ids.keys().index(name) for _, group in groups for name in group]
        # Without hot rows the question is what it would be to share.
        wanted = [not hot_rows or job.config.sharding.unique != "off"] * len(groups)
        is_auto = job.config.sharding.unique == "auto"
        cold = _without(ids.permute(order), rows_of) if hot_rows else ids.permute(order)
        sent, found = distinct_inputs(cold, sizes, wanted=wanted, auto=is_auto, share_empty=bool(hot_rows))
        rows = [number for number, features in zip(found.rows, sizes, strict=True) for _ in range(features)]
        counted.append([*found.rows, *(int(lengths.sum()) for lengths in sent.lengths().split(rows))])
    means = np.mean(counted, axis=0).tolist()
    of_feature = iter(means[len(groups) :])
    return [
        InputGroup(
            tower=tower,
            features=group,
            distinct=DistinctRows(rows=rows, ids=tuple(islice(of_feature, len(group)))),
            share=rows / size,
        )
        for (tower, group), rows in zip(groups, means, strict=False)
    ]


def _without(ids: KeyedJaggedTensor, rows_of: Mapping[str, Any]) -> KeyedJaggedTensor:
    """Returns the ids without some rows of each feature, in as many bags."""
    parts = zip(ids.keys(), ids.values().split(ids.length_per_key()), strict=True)
    is_cold = torch.cat([~torch.isin(values, torch.as_tensor(rows_of.get(name, []))) for name, values in parts])
    lengths = ids.lengths()
    bag_of = torch.arange(len(lengths)).repeat_interleave(lengths)
    left = torch.bincount(bag_of[is_cold], minlength=len(lengths)).to(lengths.dtype)
    return KeyedJaggedTensor(keys=ids.keys(), values=ids.values()[is_cold], lengths=left, stride=ids.stride())


def first_ids(data: ClickData, *, world_size: int, batch_size: int) -> Iterator[KeyedJaggedTensor]:
    """Yields the ids in each rank's part of the first global batch of training."""
    batches = data.batches("train", rank=0, world_size=1, batch_size=batch_size)
    for batch in islice(batches, min(world_size, _MOST_BATCHES)):
        yield batch.sparse_features
