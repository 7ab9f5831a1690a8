"""Bytes that replicas average, of every scheme and optimizer."""

from __future__ import annotations

from typing import Any

import pytest

from dmt import TableSpec, TowerTopology
from dmt.sharding.costs import StepWorkload, replicated_bytes
from dmt.sharding.plan import TowerShardingPlan
from dmt.sharding.plan_tables import plan_tables
from dmt.sharding.schemes import ShardingRules, TablePlacement

TABLES = [
    TableSpec(name="whole", num_embeddings=100, embedding_dim=8, feature_names=("a",)),
    TableSpec(name="columns", num_embeddings=60, embedding_dim=16, feature_names=("b",), data_type="FP16"),
    TableSpec(name="rows", num_embeddings=10, embedding_dim=4, feature_names=("c",)),
    TableSpec(name="copied", num_embeddings=1000, embedding_dim=8, feature_names=("d",)),
]
PLACED = {
    "whole": TablePlacement(scheme="table_wise", ranks=(1,)),
    "columns": TablePlacement(scheme="column_wise", ranks=(0, 1)),
    "rows": TablePlacement(scheme="row_wise", ranks=(0, 1)),
    "copied": TablePlacement(scheme="data_parallel", ranks=(0, 1)),
}


def plan(num_replicas: int, optimizer: Any = "rowwise_adagrad") -> TowerShardingPlan:
    """``whole`` and ``columns`` in tower 0, the others in tower 1."""
    topology = TowerTopology(num_towers=2, ranks_per_tower=2, num_replicas=num_replicas)
    workload = StepWorkload(batch_size=4, optimizer=optimizer)
    return plan_tables([TABLES[:2], TABLES[2:]], topology, workload=workload, rules=ShardingRules(tables=PLACED))


SENT_WEIGHTS = 4 * (100 * 8 + 60 * 16 + 10 * 4)
STATES = {
    "rowwise_adagrad": 4 * (100 + 2 * 60 + 10),
    "adagrad": 4 * (100 * 8 + 60 * 16 + 10 * 4),
    "adam": 8 * (100 * 8 + 60 * 16 + 10 * 4),
    "sgd": 0,
}


@pytest.mark.parametrize("optimizer", STATES)
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_copy_has_its_weights_and_states_in_fp32_but_no_data_parallel_table(optimizer: str, replicas: int) -> None:
    assert replicated_bytes(plan(replicas, optimizer), TABLES) == SENT_WEIGHTS + STATES[optimizer]
