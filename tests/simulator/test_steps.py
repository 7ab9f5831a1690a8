"""Steps of the dataflows on a cluster with round numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dmt.plan.topology import TowerTopology
from dmt.simulator.cluster import Cluster, CollectiveRates
from dmt.simulator.steps import Load, ModelWork, Operator, PartWork, StepWork, simulate, step_operations


def part(flops: float) -> PartWork:
    """A third of the FLOPs forward, two thirds backward."""
    return PartWork((Operator(flops / 3, 0.0, 0.0),), (Operator(2 * flops / 3, 0.0, 0.0),))


RATES = CollectiveRates(latency_s=0.0, uplink_bytes_per_s=10.0, host_bytes_per_s=100.0)
CLUSTER = Cluster(
    name="round",
    hosts=2,
    ranks_per_host=2,
    matmul_flops=1.0,
    memory_bytes_per_s=1e9,
    lookup_bytes_per_s=1.0,
    all_to_all=RATES,
    exchange=RATES,
    all_reduce=RATES,
)
TOPOLOGY = TowerTopology(num_towers=2, ranks_per_tower=2)
NOTHING = Load(0.0, 0.0)
LOADS = {
    "peer_ids": Load(5.0, 0.0),
    "tower_ids": Load(0.0, 50.0),
    "tower_outputs": Load(0.0, 100.0),
    "peer_outputs": Load(40.0, 0.0),
    "peer_gradients": Load(80.0, 0.0),
    "tower_weights": NOTHING,
    "outside_weights": NOTHING,
    "dense_weights": NOTHING,
    "replicas": NOTHING,
}
MODEL = ModelWork(towers=(part(3.0),), dense_arch=part(3.0), rest=part(12.0))
WORK = StepWork(
    model=MODEL, topology=TOPOLOGY, loads=LOADS, lookup_bytes=3.0, embedding_bytes=0.0, output_bytes=0.0, samples=1.0
)


def with_loads(**loads: Load) -> StepWork:
    return replace(WORK, loads={**LOADS, **loads})


def step_seconds(work: StepWork, cluster: Cluster, **options: Any) -> float:
    return sum(simulate(step_operations(work, cluster, **options)).values())


def test_a_step_without_options_is_a_sum_but_for_the_bottom_mlp() -> None:
    found = simulate(step_operations(WORK, CLUSTER))
    # Ids .5 and .5, lookup 1, inside 1, towers 2, the outputs 4 with the bottom MLP (1) in them, over 4 and 8, the
    # gradients 8 with 2 in them, towers 4, inside 1, update 2.
    assert sum(found.values()) == pytest.approx(0.5 + 0.5 + 1 + 1 + 2 + 4 + 4 + 8 + 8 + 4 + 1 + 2)
    assert found["ids"] == pytest.approx(1.0)
    assert found["embeddings"] == pytest.approx(1 + (4 - 1) + (8 - 2) + 1)


def test_prefetched_ids_travel_during_the_step() -> None:
    plain, ahead = (step_seconds(WORK, CLUSTER, prefetch=p) for p in (False, True))
    assert plain - ahead == pytest.approx(1.0)


def test_micro_batches_hide_what_the_dense_part_takes() -> None:
    seconds = [step_seconds(WORK, CLUSTER, micro_batches=k) for k in (1, 2, 4, 16)]
    assert seconds == sorted(seconds, reverse=True)
    # Never below the cores' work, nor below the way of ids, embeddings, outputs and gradients.
    assert seconds[-1] >= 1 + 2 + 1 + 4 + 8 + 2 + 4 + 2
    slow = replace(CLUSTER, exchange=replace(RATES, latency_s=1.0))
    assert step_seconds(WORK, slow, micro_batches=16) > seconds[0]


def test_a_flat_step_has_its_collectives_over_all_ranks_of_a_replica() -> None:
    flat = replace(with_loads(tower_ids=NOTHING, tower_outputs=NOTHING), model=MODEL._replace(towers=()), is_flat=True)
    assert step_seconds(flat, CLUSTER) == pytest.approx(0.5 + 1 + 4 + 4 + 8 + 8 + 2)
    for work, towers in ((flat, 0), (WORK, 6)):
        cores = sum(operation.seconds.get("core", 0.0) for operation in step_operations(work, CLUSTER))
        assert cores == pytest.approx(3 + 3 + 12 + towers)
    # Of larger groups the uplink is slower: 4 ranks of a flat model, 2 of each replica, 2 peers of towers.
    rates = replace(RATES, uplink_by_ranks={2: 1.0, 4: 0.5})
    crowded = replace(CLUSTER, all_to_all=rates, exchange=rates, all_reduce=rates)
    one, many = (simulate(step_operations(flat, cluster))["embeddings"] for cluster in (CLUSTER, crowded))
    assert many - one == pytest.approx(4 + 8)
    copies = replace(flat, topology=TowerTopology(num_replicas=2, num_towers=1, ranks_per_tower=2, ranks_per_host=1))
    assert step_seconds(copies, crowded) == step_seconds(copies, CLUSTER)
    assert step_seconds(WORK, crowded) == step_seconds(WORK, CLUSTER)


def test_cores_that_serve_collectives_slow_what_computes() -> None:
    busy = replace(CLUSTER, exchange=replace(RATES, core_s_per_byte=0.1))
    # The bottom MLP runs beside the outputs: a rank's 20 of the host's 40 bytes are 2 s of its cores.
    plain, slower = (simulate(step_operations(WORK, cluster)) for cluster in (CLUSTER, busy))
    assert slower["compute"] - plain["compute"] == pytest.approx(1.0 + 2.0)
    assert sum(slower.values()) == pytest.approx(sum(plain.values()))


def test_dense_gradients_in_a_ring_and_host_by_host() -> None:
    ring = step_operations(with_loads(dense_weights=Load(30.0, 200.0)), CLUSTER)
    assert [dict(operation.seconds) for operation in ring if operation.kind == "dense"] == [
        {"uplink": 3.0, "host_link": 2.0, "core": 0.0}
    ]
    # Gradients of tables outside towers always go host by host, but for TorchRec's flat dataflow.
    for name, is_hierarchical in (("dense_weights", True), ("outside_weights", False)):
        work = replace(with_loads(**{name: Load(20.0, 200.0)}), is_hierarchical=is_hierarchical)
        inside, across, out = (operation for operation in step_operations(work, CLUSTER) if operation.kind == "dense")
        assert (inside.seconds["host_link"], across.seconds["uplink"], out.seconds["host_link"]) == (1.0, 2.0, 1.0)
        assert inside.name in across.after
        assert across.name in out.after
    flat = step_operations(replace(with_loads(outside_weights=Load(20.0, 200.0)), is_flat=True), CLUSTER)
    assert [operation.seconds["host_link"] for operation in flat if operation.kind == "dense"] == [2.0]


def test_the_update_waits_for_a_sum_over_hosts_of_one_rank() -> None:
    alone = with_loads(dense_weights=Load(400.0, 0.0))
    assert step_seconds(replace(alone, is_hierarchical=True), CLUSTER) == step_seconds(alone, CLUSTER)


def test_tables_outside_towers_are_reduced_before_the_update() -> None:
    plain, found = (
        simulate(step_operations(with_loads(outside_weights=Load(size, 0.0)), CLUSTER)) for size in (0.0, 400.0)
    )
    # 40 s from the end of the towers' backward pass on, beside the exchange inside (1, in equal parts) and the update
    # of the towers' tables (2).
    assert found["dense"] == pytest.approx(40 - 1 / 2 - 2)
    assert sum(found.values()) == pytest.approx(sum(plain.values()) + 40 - 3)


def test_replicas_come_last_and_no_step_is_shorter_than_its_program() -> None:
    slow = replace(CLUSTER, all_reduce=replace(RATES, uplink_bytes_per_s=5.0))
    found = simulate(step_operations(with_loads(replicas=Load(20.0, 0.0)), slow))
    assert (found["replicas"], found["ids"]) == pytest.approx((4.0, 1.0))
    assert step_seconds(WORK, replace(CLUSTER, step_s=100.0)) == 100.0


def test_every_micro_batch_starts_all_operators_and_adds_its_gradients() -> None:
    slow = replace(CLUSTER, operator_s=0.5, memory_bytes_per_s=1.0)
    model = MODEL._replace(rest=part(12.0)._replace(weight_bytes=4))
    one, four = (
        sum(o.seconds.get("core", 0.0) for o in step_operations(replace(WORK, model=model), slow, micro_batches=k))
        for k in (1, 4)
    )
    # Of towers, bottom MLP and dense part one operator each way; sums of 4 bytes read two tensors and write one.
    assert four - one == pytest.approx(3 * 6 * 0.5 + 3 * 3 * 4)


def test_the_update_includes_the_tower_module() -> None:
    slow = replace(CLUSTER, memory_bytes_per_s=1.0)
    model = MODEL._replace(towers=(part(3.0)._replace(weight_bytes=4),))
    before, after = (
        next(o.seconds["core"] for o in step_operations(replace(WORK, model=m), slow) if o.name == "update")
        for m in (MODEL, model)
    )
    # Weight, gradient and moment are read, weight and moment written.
    assert after - before == pytest.approx(5 * 4)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_embeddings_and_outputs_are_copied_twice_each_way(micro_batches: int) -> None:
    slow = replace(CLUSTER, memory_bytes_per_s=2.0)
    before, after = (
        sum(o.seconds.get("core", 0.0) for o in step_operations(work, slow, micro_batches=micro_batches))
        for work in (WORK, replace(WORK, embedding_bytes=3.0, output_bytes=5.0))
    )
    # A copy reads and writes every byte.
    assert after - before == pytest.approx(2 * 2 * 2 * (3 + 5) / 2)


def test_number_formats_cost_their_conversion() -> None:
    slow = replace(CLUSTER, memory_bytes_per_s=1.0)
    before, after, flat_before, flat_after = (
        sum(one.seconds.get("core", 0.0) for one in step_operations(work, slow))
        for flat in (False, True)
        for work in (replace(WORK, is_flat=flat), replace(WORK, is_flat=flat, converted_bytes=(3.0, 4.0)))
    )
    assert after - before == flat_after - flat_before == pytest.approx(7.0)
