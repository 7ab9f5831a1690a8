"""`TowerShardingPlanner`: from a model to TorchRec's plan, in one process."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dmt import InputError, TowerPlan, TowerShardingPlanner, TowerTopology
from dmt.sharding.costs import Hardware, StepWorkload
from dmt.sharding.plan import TowerShardingPlan
from dmt.sharding.schemes import TablePlacement

TWO_BY_TWO = TowerTopology(num_towers=2, ranks_per_tower=2)


class Sharder:
    """The two things the planner needs of a sharder; no process group."""

    module_type = EmbeddingBagCollection

    def __init__(self, plan: TowerPlan | None = None) -> None:
        self.plan = plan

    def tables_by_tower(self, module: EmbeddingBagCollection) -> list[list[Any]]:
        configs = module.embedding_bag_configs()
        return self.plan.tables_by_tower(configs) if self.plan else [configs[::2], configs[1::2]]


def collection(*names: str, rows: int = 1000, columns: int = 16) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=f"t_{n}", num_embeddings=rows, embedding_dim=columns, feature_names=[n])
            for n in names
        ],
        device="meta",
    )


class Two(nn.Module):
    def __init__(self, *parts: EmbeddingBagCollection) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)


def test_the_plan_is_torchrecs() -> None:
    model = nn.Sequential(collection("a", "b", "c", "d"))
    pins = {
        "t_a": TablePlacement(scheme="column_wise", ranks=(1, 0)),
        "t_b": "row_wise",
        "t_c": "data_parallel",
        "t_[d]": "table_wise",
    }
    plan = TowerShardingPlanner(TWO_BY_TWO, pinned=pins).plan(model, [Sharder()]).plan["0"]
    assert {name: sharding.sharding_type for name, sharding in plan.items()} == {
        "t_a": "column_wise",
        "t_b": "row_wise",
        "t_c": "data_parallel",
        "t_d": "table_wise",
    }
    cuts = [(s.shard_offsets, s.shard_sizes, s.placement.rank()) for s in plan["t_a"].sharding_spec.shards]
    assert cuts == [([0, 0], [1000, 8], 1), ([0, 8], [1000, 8], 0)]


def test_the_plan_and_its_explanation_agree() -> None:
    planner = TowerShardingPlanner(
        TWO_BY_TWO,
        workload=StepWorkload(batch_size=64, pooling_factors={"a": 9.0}, optimizer="adam"),
        hardware=Hardware(memory_per_rank=2_000_000),
        scheme=("table_wise", "row_wise"),
    )
    model = nn.Sequential(collection("a", "b", "c", "d"))
    found = planner.explain(model, [Sharder()])
    plan = planner.plan(model, [Sharder()]).plan["0"]
    assert {n: tuple(s.ranks) for n, s in plan.items()} == {n: p.ranks for n, p in found.placements.items()}
    assert found.workload.optimizer == "adam"
    assert max(rank.memory for rank in found.ranks) <= 2_000_000


def test_modules_of_one_model_share_the_ranks() -> None:
    # Two collections of one table for each tower: apart, both would go to rank 0.
    model = Two(collection("a", "b"), collection("c", "d"))
    plan = TowerShardingPlanner(TWO_BY_TWO, scheme="table_wise").plan(model, [Sharder()])
    assert {path: list(part) for path, part in plan.plan.items()} == {
        "parts.0": ["t_a", "t_b"],
        "parts.1": ["t_c", "t_d"],
    }
    ranks = {name: sharding.ranks for part in plan.plan.values() for name, sharding in part.items()}
    assert sorted(ranks["t_a"] + ranks["t_c"]) == [0, 1]
    # A rule may be meant for any of them.
    TowerShardingPlanner(TWO_BY_TWO, pinned={"t_d": "row_wise"}).plan(model, [Sharder()])


def test_what_does_not_fit_is_refused_without_a_process_group() -> None:
    model = nn.Sequential(collection("a", "b"))
    with pytest.raises(InputError, match="rule for tables 't_c' matches none of the 2 tables of the model"):
        TowerShardingPlanner(TWO_BY_TWO, pinned={"t_c": "row_wise"}).plan(model, [Sharder()])
    with pytest.raises(InputError, match="schemes: 'diagonal' is none of"):
        TowerShardingPlanner(TWO_BY_TWO, scheme="diagonal")
    with pytest.raises(InputError, match=r"tables? of tower 0.*memory_per_rank=10.0 kB have; of table 't_a'"):
        TowerShardingPlanner(TWO_BY_TWO, hardware=Hardware(memory_per_rank=10_000)).plan(model, [Sharder()])
    with pytest.raises(InputError, match="has no module of type"):
        TowerShardingPlanner(TWO_BY_TWO).plan(nn.Linear(1, 1), [Sharder()])


def test_the_optimizer_of_the_sharder_decides_memory_and_data_parallel_tables() -> None:
    model = nn.Sequential(collection("a", "b", "c", "d"))

    def planned(optimizer: str, **options: Any) -> TowerShardingPlan:
        sharder: Any = Sharder()
        sharder.fused_params = {"optimizer": optimizer}
        return TowerShardingPlanner(TWO_BY_TWO, **options).explain(model, [sharder])

    assert planned("exact_row_wise_adagrad").workload.optimizer == "rowwise_adagrad"
    adam, sgd = planned("adam", scheme="table_wise"), planned("exact_sgd", scheme="table_wise")
    assert sum(rank.memory for rank in adam.ranks) == 3 * sum(rank.memory for rank in sgd.ranks)
    assert "data_parallel" in {p.scheme for p in planned("exact_sgd").placements.values()}
    assert "data_parallel" not in {p.scheme for p in planned("lamb").placements.values()}
    with pytest.raises(InputError, match=r"cannot be data_parallel.*its optimizer is lamb"):
        planned("lamb", pinned={"t*": "data_parallel"})
    with pytest.raises(InputError, match=r"workload\.optimizer='sgd', but .* fused_params have optimizer adam"):
        planned("adam", workload=StepWorkload(optimizer="sgd"))
