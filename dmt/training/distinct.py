"""Distinct inputs in the data of a job: what each tower is sent of a batch when each distinct input is sent once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
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


def distinct_inputs_of(job: Job) -> list[InputGroup]:
    """Counts the distinct inputs of each tower in the first global batch of training (64 ranks of it at most).

    A tower module reads the features of its tower together; in a flat model each feature stays alone. With
    ``sharding.unique = "auto"``, a group that the exchange would leave as it is has every sample.
    """
    assert job.towers is not None, "the flat dataflow has no towers"
    towers, size = job.towers.to_lists(), job.config.train.batch_size
    whole = [(i, tuple(features)) for i, features in enumerate(towers)]
    groups = whole if job.config.model.has_towers else [(i, (name,)) for i, features in whole for name in features]
    sizes = [len(group) for _, group in groups]
    counted = []
    for ids in first_ids(job.data, world_size=job.topology.world_size, batch_size=size):
        order = [ids.keys().index(name) for _, group in groups for name in group]
        wanted, is_auto = [True] * len(groups), job.config.sharding.unique == "auto"
        sent, found = distinct_inputs(ids.permute(order), sizes, wanted=wanted, auto=is_auto)
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


def first_ids(data: ClickData, *, world_size: int, batch_size: int) -> Iterator[KeyedJaggedTensor]:
    """Yields the ids in each rank's part of the first global batch of training."""
    batches = data.batches("train", rank=0, world_size=1, batch_size=batch_size)
    for batch in islice(batches, min(world_size, _MOST_BATCHES)):
        yield batch.sparse_features
