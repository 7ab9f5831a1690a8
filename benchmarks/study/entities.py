"""Batches grouped by request, and towers of entities, whose inputs repeat within such batches.

A request has the departures from an airport in an hour, or the bookings of a hotel for a day.
"""

from __future__ import annotations

from itertools import islice

import numpy as np
import torch

from benchmarks.study.data import Clicks
from benchmarks.study.train import SETTINGS, Arm, row_order, tower_sizes
from dmt.partitioner import FeatureAffinity, PartitionRules, TowerPartitioner
from dmt.plan.towers import TowerPlan

__all__ = ["ENTITIES", "REQUESTS", "bytes_once", "entity_plan", "request_numbers"]

_BATCHES = 8
REQUESTS = {
    "flights": ["c_month", "c_day", "c_sched_hour", "c_origin"],
    "hotel": ["c_hotel", "c_arrival_date_month", "c_arrival_date_week_number", "c_arrival_date_day_of_month"],
}
ENTITIES = {
    "flights": {
        "hour": ["c_month", "c_day", "c_dow", "c_sched_hour", "c_wind_dir"],
        "route": ["c_origin", "c_dest*", "c_route"],
        "aircraft": ["c_tailnum", "c_manufacturer", "c_model", "c_engine", "c_ptype", "c_pyear"],
    },
    "hotel": {
        "stay": ["c_hotel", "c_arrival_*"],
        "channel": ["c_market_segment", "c_distribution_channel", "c_agent", "c_company", "c_deposit_type"],
        "guest": ["c_country", "c_customer_type", "c_is_repeated_guest"],
    },
}


def request_numbers(data: str, clicks: Clicks) -> torch.Tensor:
    """Returns the number of the request of each training row, int64 [R]."""
    columns = [clicks.features.index(name) for name in REQUESTS[data]]
    return torch.unique(clicks.train[1][:, columns], dim=0, return_inverse=True)[1]


def entity_plan(data: str, clicks: Clicks, num_towers: int) -> TowerPlan:
    """Returns a plan with a separate tower for each entity; the other features fill the other towers."""
    affinity = FeatureAffinity(matrix=np.eye(len(clicks.features)), features=tuple(clicks.features))
    rules = PartitionRules(categories=ENTITIES[data], towers_per_category=dict.fromkeys(ENTITIES[data], 1))
    return TowerPartitioner(num_towers=num_towers, rules=rules).fit(affinity)


def bytes_once(data: str, arm: Arm, clicks: Clicks, plan: TowerPlan, requests: torch.Tensor) -> float:
    """Returns bytes per sample across hosts if a tower gets each distinct input once: ids, lengths, outputs, gradients.

    It is the mean over eight batches of seed 0, with the hosts and formats of `benchmarks.study.train.bytes_across`.
    """
    dim, c, p = tower_sizes(arm, len(clicks.features))
    total = 0.0
    batches = list(islice(row_order(len(clicks.train[2]), SETTINGS[data], 0, requests), _BATCHES))
    for names in plan.to_lists():
        columns = [clicks.features.index(name) for name in names]
        distinct = sum(len(torch.unique(clicks.train[1][rows][:, columns], dim=0)) for rows in batches)
        row_bytes = 16 * len(names) + 2 * 4 * dim * (c * len(names) + p)
        total += row_bytes * distinct / sum(map(len, batches))
    return total * (plan.num_towers - 1) / plan.num_towers
