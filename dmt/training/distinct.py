"""Distinct inputs in the data of a job: what each tower is sent of a batch when each distinct input is sent once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from dmt.plan.distinct import DistinctRows, count_distinct
from dmt.training.data import ClickData
from dmt.training.job import Job

__all__ = ["InputGroup", "distinct_inputs_of", "first_bags"]

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

    A tower module reads the features of its tower together; in a flat model each feature stays alone.
    """
    assert job.towers is not None, "the flat dataflow has no towers"
    together = job.config.model.has_towers
    groups = [
        (tower, group)
        for tower, features in enumerate(job.towers.to_lists())
        for group in ([tuple(features)] if together else [(feature,) for feature in features])
    ]
    batch_size = job.config.train.batch_size
    bags = first_bags(job.data, world_size=job.topology.world_size, batch_size=batch_size)
    counted = count_distinct(bags, [group for _, group in groups])
    return [
        InputGroup(tower=tower, features=group, distinct=found, share=found.rows / batch_size)
        for (tower, group), found in zip(groups, counted, strict=True)
    ]


def first_bags(data: ClickData, *, world_size: int, batch_size: int) -> Iterator[Mapping[str, tuple[Any, Any]]]:
    """Yields (lengths, values) of every feature in each rank's part of the first global batch of training."""
    batches = data.batches("train", rank=0, world_size=1, batch_size=batch_size)
    for batch in islice(batches, min(world_size, _MOST_BATCHES)):
        bags = batch.sparse_features.to_dict()
        yield {name: (own.lengths().numpy(), own.values().numpy()) for name, own in bags.items()}
