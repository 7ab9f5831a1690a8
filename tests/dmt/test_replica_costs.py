"""The costs of replicas, against the paper's formulas and the shards of every rank."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from dmt import InputError, TableSpec, TowerTopology
from dmt.sharding.costs import StepWorkload, replica_costs
from dmt.sharding.plan import TowerShardingPlan
from dmt.sharding.plan_tables import plan_tables
from dmt.sharding.schemes import TablePlacement
from dmt.sharding.user_rules import ShardingRules

TABLES = [
    TableSpec(name="whole", num_embeddings=100, embedding_dim=8, feature_names=("a",)),
    TableSpec(name="columns", num_embeddings=60, embedding_dim=16, feature_names=("b",), data_type="FP16"),
    TableSpec(name="rows", num_embeddings=10, embedding_dim=4, feature_names=("c",)),
    TableSpec(name="copied", num_embeddings=1000, embedding_dim=8, feature_names=("d",)),
]
PLACED = {
    "whole": TablePlacement(scheme="table_wise", ranks=(1,)),
    "columns": TablePlacement(scheme="column_wise", ranks=(0, 1), sizes=(4, 12)),
    "rows": TablePlacement(scheme="row_wise", ranks=(0, 1), sizes=(7, 3)),
    "copied": TablePlacement(scheme="data_parallel", ranks=(0, 1)),
}


def plan(num_replicas: int, optimizer: Any = "rowwise_adagrad") -> TowerShardingPlan:
    """``whole`` and ``columns`` in tower 0, the others in tower 1."""
    topology = TowerTopology(num_towers=2, ranks_per_tower=2, num_replicas=num_replicas)
    workload = StepWorkload(batch_size=4, optimizer=optimizer)
    return plan_tables([TABLES[:2], TABLES[2:]], topology, workload=workload, rules=ShardingRules(tables=PLACED))


WEIGHTS = 100 * 8 * 4 + 60 * 16 * 2 + 10 * 4 * 4
SENT_WEIGHTS = 4 * (100 * 8 + 60 * 16 + 10 * 4)
STATES = {
    "rowwise_adagrad": 4 * (100 + 2 * 60 + 10),
    "adagrad": 4 * (100 * 8 + 60 * 16 + 10 * 4),
    "adam": 8 * (100 * 8 + 60 * 16 + 10 * 4),
    "sgd": 0,
}
FULLEST = {
    "rowwise_adagrad": 100 * (8 * 4 + 4) + 60 * (12 * 2 + 4),
    "adagrad": 100 * (8 * 4 + 8 * 4) + 60 * (12 * 2 + 12 * 4),
    "adam": 100 * (8 * 4 + 8 * 8) + 60 * (12 * 2 + 12 * 8),
    "sgd": 100 * 8 * 4 + 60 * 12 * 2,
}


@pytest.mark.parametrize("optimizer", STATES)
@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_the_paper_s_formulas(optimizer: str, replicas: int) -> None:
    costs = replica_costs(plan(replicas, optimizer), TABLES, sync_gb_per_s=0.5, sync_every=4)
    copy, ranks = WEIGHTS + STATES[optimizer], 2 * 2 * replicas
    assert (costs.num_replicas, costs.num_ranks, costs.data_parallel_tables) == (replicas, ranks, 1)
    assert (costs.weight_bytes, costs.state_bytes) == (WEIGHTS, STATES[optimizer])
    assert costs.overhead_bytes == pytest.approx(copy * (replicas - 1) / ranks)
    sent = SENT_WEIGHTS + STATES[optimizer]  # in FP32, also the weights of the FP16 table
    assert costs.sent_bytes == sent
    latency = 2 * sent * (replicas - 1) / (ranks * 0.5e9)
    assert costs.sync_seconds == pytest.approx(latency)
    assert costs.step_seconds == pytest.approx(latency / 4)
    assert costs.fullest_overhead_bytes == pytest.approx(FULLEST[optimizer] * (replicas - 1) / replicas)
    most = FULLEST[optimizer] + 2 * 60 * 12
    fullest = 2 * most * (replicas - 1) / replicas / 0.5e9
    assert costs.fullest_sync_seconds == pytest.approx(fullest)
    assert costs.fullest_step_seconds == pytest.approx(fullest / 4)


def test_overhead_is_what_ranks_hold_more_than_if_all_shared_one_copy() -> None:
    """M copies on W ranks less one copy on W ranks, whatever the towers are."""
    costs = replica_costs(plan(4), TABLES)
    held = 4 * costs.table_bytes / costs.num_ranks
    assert costs.overhead_bytes == pytest.approx(held - costs.table_bytes / costs.num_ranks)


def test_without_a_rate_no_time_is_known_and_the_record_says_so() -> None:
    record = dataclasses.asdict(replica_costs(plan(2), TABLES))
    assert [name for name, value in record.items() if value is None] == [
        "sync_gb_per_s",
        "sync_seconds",
        "fullest_sync_seconds",
        "step_seconds",
        "fullest_step_seconds",
    ]
    assert record["overhead_bytes"] == (WEIGHTS + STATES["rowwise_adagrad"]) / 8
    assert record["table_bytes"] == WEIGHTS + STATES["rowwise_adagrad"]


@pytest.mark.parametrize("rate", [0, -1.0, math.inf, math.nan])
def test_a_rate_out_of_range(rate: float) -> None:
    with pytest.raises(InputError, match=rf"sync_gb_per_s={rate} must be a positive number, the 10\^9 bytes"):
        replica_costs(plan(2), TABLES, sync_gb_per_s=rate)
