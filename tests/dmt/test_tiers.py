"""Tables in host memory and on SSDs: what a plan costs and refuses, and what TorchRec's kernels train on CPU ranks."""

from __future__ import annotations

from typing import Any

import pytest

from dmt.errors import InputError
from dmt.plan.tables import TableSpec
from dmt.plan.topology import TowerTopology
from dmt.plan.towers import TowerPlan
from dmt.sharding.costs import CostModel, Hardware, StepWorkload
from dmt.sharding.plan import TowerShardingPlan
from dmt.sharding.plan_tables import plan_tables
from dmt.sharding.planner import parameter_sharding
from dmt.sharding.schemes import TablePlacement
from dmt.sharding.user_rules import ShardingRules, Tiers
from dmt.training.preflight import resolve
from tests.ranks import run_ranks
from tests.sptt_case import Case, check_worst, parity_on_rank
from tests.training.small import small

GB = 10**9
# Rows of Criteo's 26 features over 24 days, as MLPerf's DLRM has them.
CRITEO_1TB = [
    227_605_432, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 130_229_467, 3_067_956, 405_282, 10, 2_209, 11_938,
    155, 4, 976, 14, 292_775_614, 40_790_948, 187_188_510, 590_152, 12_973, 108, 36,
]  # fmt: skip


def table(name: str, rows: int, columns: int = 64, kind: str = "FP32") -> TableSpec:
    return TableSpec(
        name=name, num_embeddings=rows, embedding_dim=columns, feature_names=(f"f_{name}",), data_type=kind
    )


def one_tower(ranks: int) -> TowerTopology:
    return TowerTopology(num_towers=1, ranks_per_tower=ranks)


def kernels(plan: TowerShardingPlan) -> dict[str, str]:
    return {name: placement.kernel for name, placement in plan.placements.items()}


def test_bytes_and_seconds_of_each_kernel() -> None:
    """1,000 rows of 8 FP32 numbers: 32,000 bytes, and 4,000 of row-wise AdaGrad's, which FBGEMM keeps on the device."""
    hardware = Hardware(memory_gb_per_s=100.0, host_gb_per_s=10.0, ssd_gb_per_s=1.0)
    model = CostModel(topology=one_tower(1), workload=StepWorkload(batch_size=100), hardware=hardware)
    own = table("t", 1000, 8)
    touched = 3 * 100 * 32
    found = {
        kernel: model.shard(own, "table_wise", 1000, 8, kernel=kernel, cache=0.25)
        for kernel in ("fused", "fused_uvm", "fused_uvm_caching", "key_value")
    }
    memory = {kernel: (load.memory, load.host_memory, load.ssd) for kernel, load in found.items()}
    cache = 8_000 + 4 * 1000 + 16 * 250
    assert memory == {
        "fused": (36_000, 0, 0),
        "fused_uvm": (4_000, 32_000, 0),
        "fused_uvm_caching": (4_000 + cache, 32_000, 0),
        "key_value": (4_000 + cache, 0, 32_000),
    }
    seconds = {kernel: load.seconds / touched * 1e9 for kernel, load in found.items()}
    assert seconds == pytest.approx(
        {"fused": 0.01, "fused_uvm": 0.1, "fused_uvm_caching": 0.25 * 0.01 + 0.075, "key_value": 0.25 * 0.01 + 0.75}
    )
    adam = CostModel(topology=one_tower(1), workload=StepWorkload(optimizer="adam"))
    assert adam.shard(own, "table_wise", 1000, 8, kernel="fused_uvm")[5:] == (0.0, 96_000, 0)


def test_model_f_of_neo_fits_128_ranks() -> None:
    """Two tables of 10 billion rows x 256 in FP16: 10.2 TB on 128 ranks of 40 GB, which have 5.1 TB."""
    tables = [table(name, 10 * GB, 256, "FP16") for name in ("a", "b")]
    device = Hardware(memory_per_rank=40 * GB)
    with pytest.raises(
        InputError,
        match=r"Table 'a' in tower 0 needs 40\.\d GB of device memory on a rank even row_wise, but memory_per",
    ):
        plan_tables([tables], one_tower(128), hardware=device)
    # 8 ranks on a host of 1.5 TB.
    hardware = Hardware(memory_per_rank=40 * GB, host_memory_per_rank=187 * GB)
    found = plan_tables([tables], one_tower(128), hardware=hardware)
    assert sorted(kernels(found).values()) in (["fused", "fused_uvm_caching"], ["fused_uvm_caching"] * 2)
    assert max(rank.memory for rank in found.ranks) <= 40 * GB
    assert max(rank.host_memory for rank in found.ranks) <= 187 * GB
    assert sum(rank.host_memory for rank in found.ranks) >= 10 * GB * 256 * 2
    assert "fused_uvm_caching: in host memory, 20% of it cached" in str(found.reasons)
    assert "On a CPU all tables are in host memory" in found.notes[0]


def test_criteo_1tb_fits_four_ranks_with_ssds() -> None:
    """At N = 128 some 452 GB: on 4 ranks of 40 GB the coldest large tables move, small ones stay."""
    tables = [table(str(i), rows, 128) for i, rows in enumerate(CRITEO_1TB)]
    towers = TowerPlan.strided([t.name for t in tables], 2).to_lists()
    by_name = {t.name: t for t in tables}
    split = [[by_name[name] for name in names] for names in towers]
    topology = TowerTopology(num_towers=2, ranks_per_tower=2)
    hardware = Hardware(memory_per_rank=40 * GB, host_memory_per_rank=60 * GB, ssd_per_rank=500 * GB)
    found = plan_tables(split, topology, hardware=hardware)
    assert found == plan_tables(split, topology, hardware=hardware)
    chosen = kernels(found)
    assert set(chosen.values()) == {"fused", "fused_uvm_caching", "key_value"}
    assert all(chosen[str(i)] == "fused" for i, rows in enumerate(CRITEO_1TB) if rows < 10**6)
    for rank in found.ranks:
        assert rank.memory <= 40 * GB
        assert rank.host_memory <= 60 * GB
        assert rank.ssd <= 500 * GB
    held = sum(rank.memory + rank.host_memory + rank.ssd for rank in found.ranks)
    assert held >= sum(CRITEO_1TB) * 128 * 4


def test_tables_that_would_take_more_of_a_device_stay_there() -> None:
    tables = [table("narrow", 10**6, 4, "FP16"), table("wide", 10**5, 64)]
    hardware = Hardware(memory_per_rank=18_241_000, host_memory_per_rank=10 * GB)
    found = plan_tables([tables], one_tower(1), hardware=hardware)
    assert kernels(found) == {"narrow": "fused", "wide": "fused_uvm_caching"}


def test_tables_stay_on_the_device_where_they_fit() -> None:
    tables = [table("a", 1000), table("b", 2000)]
    hardware = Hardware(host_memory_per_rank=GB, ssd_per_rank=GB)
    assert plan_tables([tables], one_tower(2), hardware=hardware).placements == (
        plan_tables([tables], one_tower(2)).placements
    )


@pytest.mark.parametrize(
    ("hardware", "message"),
    [
        (
            Hardware(memory_per_rank=10**6, host_memory_per_rank=10**6),
            r"Local rank \d of tower 0 needs 1\.\d+ MB of host memory .* host_memory_per_rank is 1\.00 MB; the largest "
            r"is table 'b' \(fused_uvm_caching\) with \d",
        ),
        (
            Hardware(memory_per_rank=10**6, host_memory_per_rank=10**6, ssd_per_rank=10**5),
            r"Local rank \d of tower 0 needs .* of SSD .* ssd_per_rank is 100 kB; the largest is table '\w' "
            r"\(key_value\) with \d",
        ),
        (
            # 2,500 rows on a rank: 500 of 256 bytes in the cache with 16 more, 4 for each of AdaGrad's and of the map.
            Hardware(memory_per_rank=10**4, ssd_per_rank=GB),
            r"Table 'a' in tower 0 needs 156 kB of device memory on a rank even row_wise and key_value, for what a "
            r"device keeps of it \(cache_load_factor\), but memory_per_rank is 10\.0 kB",
        ),
    ],
    ids=["host", "ssd", "caches"],
)
def test_a_refusal_names_memory_table_and_bytes(hardware: Hardware, message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan_tables([[table("a", 5000), table("b", 9000)]], one_tower(2), hardware=hardware)


def test_rules_for_kernels() -> None:
    tables = [table("t_a", 1000), table("t_b", 1000), table("u", 1000)]
    tiers = Tiers(kernels={"t_b": "fused_uvm", "t_*": "fused_uvm_caching"}, cache_load_factor=0.5)
    found = plan_tables([tables], one_tower(2), rules=ShardingRules(tiers=tiers))
    assert kernels(found) == {"t_a": "fused_uvm_caching", "t_b": "fused_uvm", "u": "fused"}
    assert found.placements["t_a"].cache_load_factor == 0.5
    rules = ShardingRules(tiers=Tiers(kernels={"x*": "fused_uvm"}))
    with pytest.raises(InputError, match=r"'x\*' matches none of the 3 tables"):
        plan_tables([tables], one_tower(2), rules=rules)
    rules = ShardingRules(tables={"u": "data_parallel"}, tiers=Tiers(kernels={"u": "fused_uvm"}))
    with pytest.raises(InputError, match=r"Table 'u' in tower 0 cannot be data_parallel with kernel='fused_uvm'"):
        plan_tables([tables], one_tower(2), rules=rules)
    with pytest.raises(InputError, match=r"kernel 'uvm' is unknown; use one of \['fused'"):
        Tiers(kernels={"u": "uvm"})  # type: ignore[dict-item]
    with pytest.raises(InputError, match=r"cache_load_factor=0 must be a share"):
        TablePlacement(scheme="table_wise", ranks=(0,), cache_load_factor=0)


def test_torchrec_is_given_kernel_and_cache() -> None:
    placed = TablePlacement(scheme="row_wise", ranks=(0, 1), kernel="fused_uvm_caching", cache_load_factor=0.1)
    found = parameter_sharding(table("t", 10), placed, device_type="cuda", cache_policy="lfu")
    assert found.compute_kernel == "fused_uvm_caching"
    assert found.cache_params is not None
    assert (found.cache_params.load_factor, found.cache_params.algorithm.name) == (0.1, "LFU")
    on_ssd = TablePlacement(scheme="table_wise", ranks=(0,), kernel="key_value")
    with pytest.raises(InputError, match=r"Table 't' of 2.56 kB has kernel='key_value'.* this run is on CPUs"):
        parameter_sharding(table("t", 10), on_ssd, device_type="cpu")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"sharding": {"kernels": {"t_C1": "key_value"}}},
            r"The plan has table 't_C1' \(559 bytes with its cache\) on an SSD .*on CPUs",
        ),
        (
            {"sharding": {"kernels": {"t_C1": "key_value"}}, "optimizer": {"sparse": "sgd"}},
            r"on an SSD .* only row-wise AdaGrad and Adam, but this run has optimizer\.sparse='sgd'",
        ),
        ({"sharding": {"kernels": {"t_C9": "fused_uvm"}}}, r"Table 't_C9' is pinned but not in the model"),
    ],
    ids=["device", "optimizer", "name"],
)
def test_the_trainer_refuses_kernels_before_any_rank_starts(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve(small(**sections), 4)


def test_kernels_do_not_go_with_what_reads_whole_tables() -> None:
    with pytest.raises(ValueError, match=r"sharding\.kernels.* this run has 2 replicas, whose sync reads whole tables"):
        small(sharding={"kernels": {"*": "fused_uvm"}}, topology={"num_replicas": 2})
    with pytest.raises(ValueError, match=r"sharding\.kernels=.* needs the tower dataflow"):
        small("dlrm", "flat", sharding={"dataflow": "flat", "kernels": {"*": "fused_uvm"}})


@pytest.mark.ranks
@pytest.mark.parametrize(("towers", "ranks", "scheme"), [(1, 3, "row_wise"), (2, 2, "mixed"), (3, 1, "table_wise")])
@pytest.mark.parametrize("kernel", ["fused_uvm", "fused_uvm_caching"])
def test_tables_in_host_memory_train_as_the_plain_module(towers: int, ranks: int, scheme: str, kernel: str) -> None:
    plan = {1: ((0, 1, 2, 3),), 2: ((0, 2), (1, 3)), 3: ((0,), (1,), (2, 3))}[towers]
    case = Case(towers=towers, ranks=ranks, scheme=scheme, plan=plan, max_bag=2, kernel=kernel)
    for worst in run_ranks(parity_on_rank, case.world, case):
        check_worst(case, worst)
