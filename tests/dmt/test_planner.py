"""`TowerShardingPlanner`, from a model to TorchRec's plan, and tables pinned to host memory; no ranks."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_tower import EmbeddingTowerCollection

from dmt import InputError, TowerPlan, TowerShardingPlanner, TowerTopology
from dmt.plan.tables import TableSpec
from dmt.sharding.costs import CostModel, Hardware, StepWorkload
from dmt.sharding.explanation import TowerShardingPlan
from dmt.sharding.plan_tables import plan_tables
from dmt.sharding.planner import parameter_sharding
from dmt.sharding.schemes import KERNELS, ShardingRules, TablePlacement

TWO_BY_TWO = TowerTopology(num_towers=2, ranks_per_tower=2)


class Sharder:
    """What the planner needs of a sharder; no process group."""

    module_type = EmbeddingBagCollection
    fused_params, id_route = None, "peer"

    def __init__(self, plan: TowerPlan | None = None) -> None:
        self.plan = plan

    def tables_by_tower(self, module: EmbeddingBagCollection) -> list[list[Any]]:
        configs = module.embedding_bag_configs()
        return self.plan.tables_by_tower(configs) if self.plan else [configs[::2], configs[1::2]]

    def outside_tables(self, module: EmbeddingBagCollection) -> list[Any]:
        return self.plan.outside_tables(module.embedding_bag_configs()) if self.plan else []


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
        "*_d": "table_wise",
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


def test_tables_outside_towers_are_on_every_rank() -> None:
    model = nn.Sequential(collection("a", "b", "c", "d"))
    sharder = Sharder(TowerPlan.from_lists([["a"], ["b"]], outside=("d", "c")))
    planner = TowerShardingPlanner(TWO_BY_TWO, scheme="table_wise", hardware=Hardware(memory_per_rank=1_120_000))
    plan, found = planner.plan(model, [sharder]).plan["0"], planner.explain(model, [sharder])
    assert {name: placed.sharding_type for name, placed in plan.items()} == {
        **dict.fromkeys(("t_a", "t_b"), "table_wise"),
        **dict.fromkeys(("t_c", "t_d"), "data_parallel"),
    }
    assert [(entry.name, entry.tower) for entry in found.tables[2:]] == [("t_c", None), ("t_d", None)]
    # Weights and gradients of 1000 x 16 numbers and a state for each row, twice on every rank; one rank has a table.
    assert sorted(rank.memory for rank in found.ranks) == 2 * [2 * 132_000] + 2 * [2 * 132_000 + 68_000]
    # Embeddings and gradients: of 1,024 samples of a rank, and of 4,096 of all.
    looked_up = 1024 * 16 * 8
    assert sorted(rank.activations for rank in found.ranks) == 2 * [2 * looked_up] + 2 * [6 * looked_up]


def test_tables_that_cannot_be_on_every_rank_are_named() -> None:
    plan = TowerPlan.from_lists([["a"], ["b"]], outside=("d", "c"))
    model = nn.Sequential(collection("a", "b", "c", "d"))
    for options, message in (
        ({"hardware": Hardware(memory_per_rank=200_000)}, "tables outside towers need 526 kB on every rank, "
         "263 kB of it for table 't_c', but memory_per_rank=200 kB"),
        ({"pinned": {"t_*": "row_wise"}}, r"'t_c' outside towers is data_parallel, .* its rule 't_\*' asks for row_w"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            TowerShardingPlanner(TWO_BY_TWO, **options).plan(model, [Sharder(plan)])
    half = TableSpec(name="t", num_embeddings=9, embedding_dim=8, feature_names=("f",), data_type="FP16")
    with pytest.raises(InputError, match=r"'t' outside towers .* its weights are FP16"):
        plan_tables([[], []], TWO_BY_TWO, outside=[half])


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


def test_torchrecs_planner_gets_the_memory_that_is_left() -> None:
    items = EmbeddingConfig(name="t_item", num_embeddings=1000, embedding_dim=16, feature_names=["item"])
    model = nn.Sequential(collection("a", "b"), EmbeddingCollection(tables=[items], device="meta"))
    sharders = [Sharder(), EmbeddingCollectionSharder()]
    needed = max(rank.needed for rank in TowerShardingPlanner(TWO_BY_TWO).explain(model, sharders).ranks)
    planner = TowerShardingPlanner(TWO_BY_TWO, hardware=Hardware(memory_per_rank=needed + 1000))
    with pytest.raises(InputError, match=r"cannot place the tables t_item with 1\.00 kB of free memory per rank"):
        planner.plan(model, sharders)


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
    assert planned("adam", workload=StepWorkload(optimizer="sgd")).workload.optimizer == "adam"
    # TorchRec's sharders do not count, and of two of dmt the optimizer with more state.
    of_towers, theirs, beside = Sharder(), EmbeddingCollectionSharder(fused_params={"optimizer": "lamb"}), Sharder()
    of_towers.fused_params, beside.fused_params = {"optimizer": "exact_adagrad"}, {"optimizer": "exact_sgd"}
    beside.module_type = EmbeddingTowerCollection
    plan = TowerShardingPlanner(TWO_BY_TWO).explain(model, [of_towers, beside, theirs])
    assert plan.workload.optimizer == "adagrad"
    assert "data_parallel" in {placement.scheme for placement in plan.placements.values()}
    # What one of them rules out, no table can have.
    of_towers.fused_params = {"optimizer": "lamb"}
    placements = TowerShardingPlanner(TWO_BY_TWO).explain(model, [of_towers, beside]).placements.values()
    assert "data_parallel" not in {placement.scheme for placement in placements}
    with pytest.raises(InputError, match="so that its rows can have copies"):
        planned("adam", scheme="column_wise", hot_rows=True)


def table(name: str, rows: int, columns: int = 64, kind: str = "FP32") -> TableSpec:
    return TableSpec(
        name=name, num_embeddings=rows, embedding_dim=columns, feature_names=(f"f_{name}",), data_type=kind
    )


def one_tower(ranks: int) -> TowerTopology:
    return TowerTopology(num_towers=1, ranks_per_tower=ranks)


def kernels(plan: TowerShardingPlan) -> dict[str, str]:
    return {name: placement.kernel for name, placement in plan.placements.items()}


def test_bytes_of_each_kernel() -> None:
    """1,000 rows of 8 FP32 numbers: 32,000 bytes, and 4,000 of row-wise AdaGrad's, which FBGEMM keeps on the device."""
    model = CostModel(topology=one_tower(1), workload=StepWorkload(batch_size=100))
    loads = {
        kernel: model.shard(table("t", 1000, 8), "table_wise", 1000, 8, kernel=kernel, cache=0.25) for kernel in KERNELS
    }
    cache = 8_000 + 4 * 1000 + 16 * 250
    assert {kernel: (load.memory, load.elsewhere) for kernel, load in loads.items()} == {
        "fused": (36_000, 0),
        "fused_uvm": (4_000, 32_000),
        "fused_uvm_caching": (4_000 + cache, 32_000),
    }
    placed = TablePlacement(scheme="table_wise", ranks=(0,), kernel="fused_uvm_caching", cache_load_factor=0.25)
    assert model.shards(table("t", 1000, 8), placed) == [(0, loads["fused_uvm_caching"])]
    adam = CostModel(topology=one_tower(1), workload=StepWorkload(optimizer="adam"))
    load = adam.shard(table("t", 1000, 8), "table_wise", 1000, 8, kernel="fused_uvm")
    assert (load.memory, load.elsewhere) == (0, 96_000)


def test_a_pinned_kernel_leaves_room_on_the_device() -> None:
    """Model F of Neo: two tables of 10 billion rows x 256 in FP16, 10.2 TB on 128 ranks of 40 GB, which have 5.1 TB."""
    tables = [table(name, 10**10, 256, "FP16") for name in ("a", "b")]
    hardware = Hardware(memory_per_rank=40 * 10**9)
    with pytest.raises(InputError, match=r"A rank must hold 40\.\d GB of table 'a', even if it is row_wise"):
        plan_tables([tables], one_tower(128), hardware=hardware)
    rules = ShardingRules(tables={"*": "fused_uvm_caching"})
    found = plan_tables([tables], one_tower(128), hardware=hardware, rules=rules)
    assert max(rank.memory for rank in found.ranks) <= 40 * 10**9
    assert sum(entry.memory for entry in found.tables) > sum(entry.num_bytes for entry in tables)


def test_rules_for_kernels() -> None:
    tables = [table("t_a", 1000), table("t_b", 1000), table("u", 1000)]
    rules = ShardingRules(tables={"t_*": "fused_uvm_caching", "t_b": "fused_uvm"})
    found = plan_tables([tables], one_tower(2), rules=rules)
    assert kernels(found) == {"t_a": "fused_uvm_caching", "t_b": "fused_uvm", "u": "fused"}
    rules = ShardingRules(schemes=("data_parallel",), tables={"u": "fused_uvm"})
    assert "kernel='fused_uvm' is for" in plan_tables([tables], one_tower(2), rules=rules).reasons["u"]
    with pytest.raises(InputError, match=r"for tables 'u': 'uvm' is not one of \['table_wise'.*'fused_uvm_caching'"):
        ShardingRules(tables={"u": "uvm"})  # type: ignore[dict-item]


def test_torchrec_is_given_kernel_and_cache() -> None:
    placed = TablePlacement(scheme="row_wise", ranks=(0, 1), kernel="fused_uvm_caching", cache_load_factor=0.1)
    found = parameter_sharding(table("t", 10), placed, device_type="cuda")
    assert found.compute_kernel == "fused_uvm_caching"
    assert found.cache_params is not None
    assert found.cache_params.load_factor == 0.1
