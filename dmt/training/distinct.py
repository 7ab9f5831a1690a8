"""Distinct inputs in the data of a job: what each tower is sent of a batch when each distinct input is sent once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt.plan.distinct import DistinctRows
from dmt.sptt.rows import by_micro_batch, in_micro_batches
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
    """Distinct inputs that a rank asks towers for, and the ids in them; means over ranks."""
    share: float
    """Distinct over all inputs."""
    parts: tuple[float, ...] = ()
    """For each micro-batch of the run the share of the distinct inputs that no earlier one has."""


def distinct_inputs_of(
    job: Job, hot_rows: Mapping[str, Any] | None = None, batches: Iterable[KeyedJaggedTensor] | None = None
) -> list[InputGroup]:
    """Counts the distinct inputs of each tower in the first global batch of training (64 ranks of it at most).

    A tower module reads the features of its tower together; in a flat model each feature stays alone.

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
    num = job.config.train.micro_batches
    hot = hot_rows or {}
    rows_of = {f: hot[table.name] for table in job.split_tables if table.name in hot for f in table.feature_names}
    if batches is None:
        batches = first_ids(job.data, world_size=job.topology.world_size, batch_size=size)
    # Without hot rows the question is what it would be to share.
    share = not hot_rows or job.config.sharding.unique

    def count(of_ranks: Sequence[KeyedJaggedTensor]) -> list[float]:
        """Counts rows of each micro-batch and group, then ids of each feature; for each of some ranks together."""
        batch_sizes = [ids.stride() for ids in of_ranks]
        ids = in_micro_batches(_joined(of_ranks), batch_sizes, num)
        cold = _without(ids, rows_of) if hot_rows else ids
        sent, found = distinct_inputs(
            cold,
            sizes,
            share=share,
            micro_batches=[sum(part) for part in by_micro_batch(batch_sizes, num)],
        )
        rows = [number for number, features in zip(found.rows, sizes, strict=True) for _ in range(features)]
        num_ids = (int(lengths.sum()) for lengths in sent.lengths().split(rows))
        return [number / len(of_ranks) for number in (*chain(*found.parts), *num_ids)]

    names = [name for _, group in groups for name in group]
    by_rank = [ids.permute([ids.keys().index(name) for name in names]) for ids in batches]
    means = np.mean([count([ids]) for ids in by_rank], axis=0)
    found = _distinct_rows(groups, means, num)
    by_group = means[: num * len(groups)].reshape(num, -1).T
    return [
        InputGroup(
            tower=tower,
            features=group,
            distinct=own,
            share=own.rows / size,
            parts=tuple((parts / (parts.sum() or 1.0)).tolist()),
        )
        for (tower, group), own, parts in zip(groups, found, by_group, strict=True)
    ]


def _distinct_rows(groups: Sequence[tuple[int, tuple[str, ...]]], counted: Any, num: int) -> list[DistinctRows]:
    """Reads rows of each micro-batch and group, then ids of each feature."""
    rows = counted[: num * len(groups)].reshape(num, -1).sum(axis=0).tolist()
    of_feature = iter(counted[num * len(groups) :].tolist())
    return [
        DistinctRows(rows=own, ids=tuple(islice(of_feature, len(group))))
        for (_, group), own in zip(groups, rows, strict=True)
    ]


def _joined(batches: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Returns the samples of several batches as one."""
    keys, strides = batches[0].keys(), [ids.stride() for ids in batches]
    lengths = torch.cat([ids.lengths().view(len(keys), -1) for ids in batches], dim=1)
    by_feature = zip(*(ids.values().split(ids.length_per_key()) for ids in batches), strict=True)
    values = torch.cat([part for parts in by_feature for part in parts])
    return KeyedJaggedTensor(keys=keys, values=values, lengths=lengths.flatten(), stride=sum(strides))


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
