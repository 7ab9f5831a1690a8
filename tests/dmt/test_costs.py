"""The cost model, shards of placements, and bytes that replicas average, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torchrec import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_configs import DataType

from dmt import InputError, TableSpec, TowerTopology
from dmt.plan.tables import table_specs
from dmt.sharding.costs import CostModel, Hardware, StepWorkload
from dmt.sharding.schemes import SCHEMES, TablePlacement

TABLE = TableSpec(name="t", num_embeddings=1000, embedding_dim=8, feature_names=("a", "b"))
# G = 2 towers * 4 ranks * 16 = 128 samples; 3 + 1 ids per sample.
MODEL = CostModel(
    topology=TowerTopology(num_towers=2, ranks_per_tower=4, num_replicas=2),
    workload=StepWorkload(batch_size=16, pooling_factors={"a": 3.0}),
    hardware=Hardware(memory_gb_per_s=1.0, intra_tower_gb_per_s=0.5, collective_latency_us=10.0),
)


def test_a_whole_table() -> None:
    load = MODEL.shard(TABLE, "table_wise", 1000, 8)
    assert load.row_bytes == 128 * 4 * 8 * 4
    assert load.activations == 2 * 128 * 2 * 8 * 4
    assert load.id_bytes == 0.75 * 128 * 8 * (4 + 2)
    assert load.output_bytes == 0.75 * 128 * 2 * 8 * 4
    assert load.memory == 1000 * (8 * 4 + 4)
    assert load.averaged_bytes == 1000 * (8 + 1) * 4  # over two replicas
    expected = 3 * 128 * 4 * 8 * 4 / 1e9 + (load.id_bytes + 2 * load.output_bytes + load.averaged_bytes) / 0.5e9
    assert load.seconds == pytest.approx(expected)


def test_column_shards_split_everything_but_ids() -> None:
    whole, half = MODEL.shard(TABLE, "table_wise", 1000, 8), MODEL.shard(TABLE, "column_wise", 1000, 4)
    assert half.id_bytes == whole.id_bytes
    assert half.output_bytes == whole.output_bytes / 2
    assert half.activations == whole.activations / 2
    assert half.memory == 1000 * (4 * 4 + 4)  # a row-wise state for each shard


def test_row_shards_split_lookups_but_not_outputs() -> None:
    whole, shard = MODEL.shard(TABLE, "table_wise", 1000, 8), MODEL.shard(TABLE, "row_wise", 250, 8)
    assert shard.row_bytes == whole.row_bytes / 4
    assert shard.activations == whole.activations  # a part of each sum
    assert shard.output_bytes == whole.output_bytes
    assert shard.id_bytes == 0.75 * 128 * 8 * (4 / 4 + 2)
    assert shard.memory == whole.memory / 4


def test_a_table_of_sequences_returns_a_row_for_each_id() -> None:
    table = EmbeddingConfig(name="t", num_embeddings=1000, embedding_dim=8, feature_names=["a", "b"])
    whole, shard = MODEL.shard(table, "table_wise", 1000, 8), MODEL.shard(table, "row_wise", 250, 8)
    assert whole.output_bytes == 0.75 * 128 * 4 * 8 * 4
    assert whole.activations == 2 * 128 * 4 * 8 * 4
    assert (shard.output_bytes, shard.activations) == (whole.output_bytes / 4, whole.activations / 4)
    bags = MODEL.shard(TABLE, "table_wise", 1000, 8)
    assert (whole.row_bytes, whole.id_bytes, whole.memory) == (bags.row_bytes, bags.id_bytes, bags.memory)


def test_a_data_parallel_table_is_reduced_over_all_copies() -> None:
    load = MODEL.shard(TABLE, "data_parallel", 1000, 8)
    assert (load.id_bytes, load.output_bytes) == (0, 0)
    assert load.reduced_bytes == 2 * 7 / 8 * 1000 * 8 * 4
    assert load.memory == 1000 * (8 * 4 * 2 + 4)
    assert load.activations == 2 * 32 * 2 * 8 * 4  # of the samples of a rank and its peers
    # Of 128 ids three passes over a row, four over all numbers, two over all states.
    touched = 3 * 128 * 8 * 4 + 4 * 1000 * 8 * 4 + 2 * 1000 * 4
    assert load.seconds == pytest.approx(touched / 1e9 + load.reduced_bytes / 0.5e9)


@pytest.mark.parametrize(("optimizer", "state"), [("rowwise_adagrad", 4), ("adagrad", 32), ("adam", 64), ("sgd", 0)])
def test_memory_has_the_optimizer_state(optimizer: str, state: int) -> None:
    model = dataclasses.replace(MODEL, workload=StepWorkload(optimizer=optimizer))
    assert model.shard(TABLE, "table_wise", 1000, 8).memory == 1000 * (32 + state)


def test_one_rank_exchanges_nothing() -> None:
    model = CostModel(topology=TowerTopology(num_towers=3, ranks_per_tower=1))
    load = model.shard(TABLE, "table_wise", 1000, 8)
    assert (load.id_bytes, load.output_bytes, model.fixed_seconds("table_wise")) == (0, 0, 0)
    assert [MODEL.fixed_seconds(scheme) for scheme in SCHEMES] == pytest.approx([3e-5, 3e-5, 3e-5, 1e-5])


def test_sixteen_bit_tables_take_half() -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=1000, embedding_dim=8, feature_names=["a"])
    table.data_type = DataType.FP16
    assert MODEL.shard(table, "table_wise", 1000, 8).memory == 1000 * (8 * 2 + 4)
    for table.data_type in (DataType.BF16, DataType.INT8):
        for use in (lambda: MODEL.shard(table, "table_wise", 1000, 8), lambda: table_specs([table])):
            with pytest.raises(InputError, match=f"Table 't' has data_type='{table.data_type.value}', but tables"):
                use()


def test_shards_of_a_placement() -> None:
    loads = MODEL.shards(TABLE, TablePlacement(scheme="column_wise", ranks=(3, 1)))
    assert [rank for rank, _ in loads] == [3, 1]
    assert loads[0][1] == MODEL.shard(TABLE, "column_wise", 1000, 4)


AVERAGED = [
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


SENT_WEIGHTS = 4 * (100 * 8 + 60 * 16 + 10 * 4)
STATES = {
    "rowwise_adagrad": 4 * (100 + 2 * 60 + 10),
    "adagrad": 4 * (100 * 8 + 60 * 16 + 10 * 4),
    "adam": 8 * (100 * 8 + 60 * 16 + 10 * 4),
    "sgd": 0,
}


@pytest.mark.parametrize("optimizer", STATES)
@pytest.mark.parametrize(("replicas", "sync_every"), [(1, 1), (3, 1), (3, 4)])
def test_replicas_average_weights_and_states_in_fp32_but_no_data_parallel_table(
    optimizer: Any, replicas: int, sync_every: int
) -> None:
    costs = CostModel(
        topology=TowerTopology(num_towers=2, ranks_per_tower=2, num_replicas=replicas),
        workload=StepWorkload(optimizer=optimizer, sync_every=sync_every),
    )
    sent = sum(load.averaged_bytes for table in AVERAGED for _, load in costs.shards(table, PLACED[table.name]))
    whole = SENT_WEIGHTS + STATES[optimizer]
    assert sent == pytest.approx(2 * (replicas - 1) / replicas * whole / sync_every)
