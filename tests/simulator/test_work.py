"""`step_work` of unequal towers, by hand: the busiest host and rank are those of the largest tower."""

from __future__ import annotations

from dmt.plan.tables import TableSpec
from dmt.plan.topology import TowerTopology
from dmt.sharding.costs import StepWorkload
from dmt.sharding.plan_tables import plan_tables
from dmt.sharding.schemes import ShardingRules
from dmt.simulator.steps import Load, ModelWork, PartWork, StepWork
from dmt.simulator.work import Workload, step_work

TOWERS = [["a0", "a1", "a2"], ["b"], [f"c{i}" for i in range(9)]]
ROWS = {"a0": 100}  # of the data-parallel table, which is in the first tower; 10 of all others
MODULES = ModelWork(tuple(PartWork(weight_bytes=n) for n in (100, 20, 300)), PartWork(), PartWork(), (6, 1, 2))
NO_MODULES = ModelWork((), PartWork(), PartWork())


def work_of(model: ModelWork, **sizes: int) -> StepWork:
    """3 towers of 2 ranks, each on a host; tables of 4 columns; 10 samples, with one id per feature and 5 of c8."""
    tables = [
        [TableSpec(name=f"t_{f}", num_embeddings=ROWS.get(f, 10), embedding_dim=4, feature_names=(f,)) for f in names]
        for names in TOWERS
    ]
    topology = TowerTopology(num_towers=3, ranks_per_tower=2, **sizes)
    lookups = StepWorkload(batch_size=10, pooling_factors={"c8": 5.0})
    rules = ShardingRules(schemes=("table_wise",), tables={"t_a0": "data_parallel"})
    plan = plan_tables(tables, topology, workload=lookups, rules=rules)
    every = [table for of_tower in tables for table in of_tower]
    return step_work(Workload(topology=topology, tables=every, towers=TOWERS, sharding=plan, lookups=lookups), model)


def test_bytes_between_unequal_towers() -> None:
    work = work_of(MODULES)
    # Of 2 peers with 10 samples each, 8 bytes for each id and length: 3 + 3, 1 + 1 and 13 + 9 of a sample.
    assert work.loads["peer_ids"] == Load(2 * 20 * 8 * 22, 0)
    assert work.sent["peer_ids"] == Load(2 * 20 * 8 * (6 + 2 + 22), 0)
    for name in ("peer_outputs", "peer_gradients"):
        assert work.loads[name] == Load(2 * 20 * 4 * 6, 0)
        assert work.sent[name] == Load(2 * 20 * 4 * (6 + 1 + 2), 0)
    # Embeddings as they are: 12, 4 and 36 columns.
    assert work_of(NO_MODULES).loads["peer_outputs"] == Load(2 * 20 * 4 * 36, 0)


def test_weights_that_unequal_towers_sum() -> None:
    # In a ring of 2 a rank sends all bytes once: 100 of its tower module, and 100 x 4 numbers of the table.
    work = work_of(MODULES)
    assert work.loads["tower_weights"] == Load(0, 100 + 1600)
    assert work.sent["tower_weights"] == Load(0, 2 * (1700 + 20 + 300))
    assert work_of(NO_MODULES).loads["tower_weights"] == Load(0, 1600)
    # With two replicas 1.5 times, in a ring of 4 on two hosts; half of its links are between them.
    copies = work_of(MODULES, num_replicas=2)
    assert copies.loads["tower_weights"] == Load(1.5 * 1700, 1.5 * 1700 / 2)
    assert copies.sent["tower_weights"] == Load(2 * 1.5 * 2020, 2 * 1.5 * 2020)
