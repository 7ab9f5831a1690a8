"""FP16 tables (``EmbeddingBagConfig.data_type``) through both sharders on a CPU, against FP32 in one process.

FBGEMM looks up and updates in FP32 and rounds the new weights to FP16. Its CPU kernels round to nearest, whatever
``stochastic_rounding`` says. So each step errs by at most half the spacing of FP16, 2^-12 of a weight below 1, and the
error of a weight changes later gradients by far less than that.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.embedding_tower import EmbeddingTower
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt import (
    SPTTEmbeddingBagCollectionSharder,
    TowerCollectionSharder,
    TowerMesh,
    TowerPlan,
    TowerShardingPlanner,
    TowerTopology,
)
from dmt.sharding.schemes import TablePlacement
from dmt.testing import gather_plain_state, load_plain_state, table_layout
from tests.parity import (
    EPS,
    LR,
    Batches,
    FlatModel,
    PassThrough,
    TowerModel,
    loss_of,
    make_tables,
    plain_training,
    share,
    train_plainly,
)
from tests.ranks import run_ranks
from tests.sptt_case import OPTIMIZERS

pytestmark = pytest.mark.ranks
CPU = torch.device("cpu")
DIMS = (8, 16, 8, 8)  # column shards of equal width: TorchRec 1.8.0 cannot load others
TOWERS = ((0, 2), (1, 3))
STEPS = 4
BATCHES = Batches(sizes=(5, 3, 6, 4), max_bag=3)


def build(kind: str, fp16: set[int]) -> nn.Module:
    """A model whose tables with the numbers given are FP16, the others FP32."""
    tables = make_tables(list(DIMS))
    for i in fp16:
        tables[i].data_type = DataType.FP16
    if kind == "flat":
        return FlatModel(tables)
    towers = [
        EmbeddingTower(
            EmbeddingBagCollection(tables=[tables[i] for i in members]), PassThrough([f"f{i}" for i in members])
        )
        for members in TOWERS
    ]
    return TowerModel(towers, sum(DIMS))


def shard(
    kind: str, scheme: str, fp16: set[int], optimizer: str, pins: dict[str, Any] | None = None
) -> DistributedModelParallel:
    mesh = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=2))
    fused = {"optimizer": OPTIMIZERS[optimizer], "learning_rate": LR, "eps": EPS}
    model = build(kind, fp16)
    if kind == "flat":
        plan = TowerPlan.from_lists([[f"f{i}" for i in members] for members in TOWERS])
        sharder: Any = SPTTEmbeddingBagCollectionSharder(mesh, plan, fused_params=fused)
    else:
        sharder = TowerCollectionSharder(mesh, fused_params=fused)
    if pins:
        planner = TowerShardingPlanner(mesh.topology, pinned=pins)
    else:
        planner = TowerShardingPlanner(mesh.topology, scheme=scheme)
    return DistributedModelParallel(model, device=CPU, plan=planner.plan(model, [sharder]), sharders=[sharder])


def shard_dtypes(model: DistributedModelParallel) -> dict[str, torch.dtype]:
    """Of the tables this rank holds a part of, by table."""
    found = {}
    for name, value in model.state_dict().items():
        if isinstance(value, ShardedTensor) and value.local_shards():
            found[name.split(".")[-2]] = value.local_shards()[0].tensor.dtype
    return found


def train_on_rank(
    rank: int, kind: str, scheme: str, optimizer: str, fp16: set[int], pins: dict[str, Any] | None
) -> dict[str, float]:
    torch.manual_seed(0)
    plain = build(kind, set())  # FP32, in one process
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            if "embedding_bags" in name:
                weight.copy_(weight.half())  # a start that both can hold
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    tables = make_tables(list(DIMS))
    model = shard(kind, scheme, fp16, optimizer, pins)
    for table, dtype in shard_dtypes(model).items():
        assert dtype == (torch.float16 if int(table[1:]) in fp16 else torch.float32)
    load_plain_state(model, start)
    # The over arch stays as it is: only tables are looked at.
    oracle = plain_training(plain, layout=table_layout(model), optimizer=optimizer, make_optimizer=None)
    for step in range(STEPS):
        everyone = [BATCHES.draw(r, step, tables) for r in range(4)]
        ids, labels = everyone[rank]
        columns, logits = model(ids)
        columns = columns.wait()
        columns = columns if isinstance(columns, torch.Tensor) else columns.values()
        assert columns.dtype == torch.float32
        if step == 0:  # FP16 weights, FP32 sums
            expected = oracle.modules[0](ids)[0]
            expected = expected if isinstance(expected, torch.Tensor) else expected.values()
            torch.testing.assert_close(columns, expected, rtol=1e-6, atol=1e-6)
        loss_of(logits, labels).backward()
        if rank == 0:
            train_plainly(oracle, everyone)
    share(oracle)
    for name, states in model.fused_optimizer.state_dict()["state"].items():
        for part, value in states.items():
            held = [s.tensor for s in value.local_shards()] if isinstance(value, ShardedTensor) else [value]
            assert all(tensor.dtype == torch.float32 for tensor in held), (name, part)
    after = gather_plain_state(model)
    worst = {"fp16": 0.0, "fp32": 0.0, "moved": 0.0}
    for name, value in oracle.modules[0].state_dict().items():
        if "embedding_bags" in name:
            format_ = "fp16" if int(name.split(".")[-2][1:]) in fp16 else "fp32"
            worst[format_] = max(worst[format_], (after[name] - value).abs().max().item())
            worst["moved"] = max(worst["moved"], (after[name] - start[name]).abs().max().item())
            assert value.abs().max() < 1
    return worst


SCHEMES_AND_OPTIMIZERS = product(("table_wise", "row_wise", "column_wise"), ("rowwise_adagrad", "sgd", "adagrad"))


# Both kinds with every scheme and every optimizer; daily, each scheme with an optimizer of its own.
@pytest.mark.parametrize(
    ("kind", "scheme", "optimizer"),
    [
        pytest.param(("flat", "towers")[number % 2], *both, marks=[pytest.mark.slow] if number not in (0, 5, 7) else [])
        for number, both in enumerate(SCHEMES_AND_OPTIMIZERS)
    ],
)
def test_fp16_tables_stay_within_rounding_of_fp32(kind: str, scheme: str, optimizer: str) -> None:
    for worst in run_ranks(train_on_rank, 4, kind, scheme, optimizer, {0, 1, 2, 3}, None):
        assert worst["moved"] > (1e-3 if optimizer == "sgd" else 1e-2), "the comparison would prove nothing"
        # Half as much again for what a changed weight does to later gradients and to AdaGrad's quotient.
        assert 0 < worst["fp16"] <= 1.5 * STEPS * 2**-12, worst


MIX = {
    "t0": TablePlacement(scheme="row_wise", ranks=(0, 1)),
    "t1": TablePlacement(scheme="table_wise", ranks=(1,)),
    "t2": TablePlacement(scheme="data_parallel", ranks=(0, 1)),
    "t3": TablePlacement(scheme="column_wise", ranks=(0, 1)),
}


@pytest.mark.parametrize("kind", ["flat", "towers"])
def test_fp16_and_fp32_tables_share_a_tower(kind: str) -> None:
    for worst in run_ranks(train_on_rank, 4, kind, "", "rowwise_adagrad", {0, 3}, MIX):
        assert 0 < worst["fp16"] <= 1.5 * STEPS * 2**-12, worst
        # FP32 tables only see the FP16 ones through the loss.
        assert worst["fp32"] <= 2**-12, worst


def fresh_on_rank(rank: int, scheme: str) -> None:
    torch.manual_seed(rank)
    for name, weight in gather_plain_state(shard("towers", scheme, {0, 1, 2, 3}, "sgd")).items():
        if "embedding_bags" in name:
            # TorchRec's default: uniform within 1/sqrt(rows).
            limit = weight.shape[0] ** -0.5
            assert 0.8 * limit < weight.abs().max() <= limit * (1 + 2**-11), name
            assert torch.equal(weight, weight.half().float())


@pytest.mark.parametrize("scheme", ["table_wise", "row_wise"])
def test_fresh_fp16_tables_have_the_usual_weights(scheme: str) -> None:
    run_ranks(fresh_on_rank, 4, scheme)


def test_the_plain_collection_makes_fp16_of_every_other_type() -> None:
    """Why BF16 and INT8 tables must be refused by name: TorchRec builds them as FP16 without a word."""
    tables = make_tables(list(DIMS))
    tables[0].data_type = DataType.BF16
    tables[1].data_type = DataType.FP16
    model = FlatModel(tables)
    assert model.sparse_arch.embedding_bags["t0"].weight.dtype == torch.float16
    # and what single-process code sees of FP16 tables: FP32, as on ranks
    assert model(BATCHES.draw(0, 0, tables)[0])[0].values().dtype == torch.float32


def small_steps_on_rank(rank: int) -> dict[str, float]:
    moved = {}
    for precision, fp16 in (("fp32", set()), ("fp16", {0, 1, 2, 3})):
        model = shard("flat", "table_wise", fp16, "sgd")
        start = {n: torch.full_like(v, 0.25 if "bags" in n else 1e-4) for n, v in gather_plain_state(model).items()}
        load_plain_state(model, start)
        ids = KeyedJaggedTensor(
            keys=["f0", "f1", "f2", "f3"], values=torch.zeros(4).long(), lengths=torch.ones(4).long()
        )
        for _ in range(8):
            model(ids)[1].sum().backward()
        name = "sparse_arch.embedding_bags.t0.weight"
        moved[precision] = (gather_plain_state(model)[name] - start[name]).abs().max().item()
    return moved


def test_small_updates_of_fp16_tables_vanish_on_a_cpu() -> None:
    """The trap that docs/precision.md tells of: rounding to nearest drops updates below half a spacing, for ever."""
    for moved in run_ranks(small_steps_on_rank, 4):
        assert moved["fp32"] == pytest.approx(8 * LR * 1e-4, rel=0.01)
        assert moved["fp16"] == 0.0


def save_on_rank(rank: int, folder: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(rank)
    model = shard("towers", "table_wise", {0, 1, 2, 3}, "rowwise_adagrad")
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    return gather_plain_state(model)


def load_on_rank(rank: int, folder: str, scheme: str, fp16: set[int]) -> dict[str, torch.Tensor]:
    torch.manual_seed(7 + rank)
    model = shard("towers", scheme, fp16, "rowwise_adagrad")
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    for table, dtype in shard_dtypes(model).items():
        assert dtype == (torch.float16 if int(table[1:]) in fp16 else torch.float32)
    return gather_plain_state(model)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_fp16_tables_loads_under_another_scheme_and_into_fp32(tmp_path: Path) -> None:
    saved = run_ranks(save_on_rank, 4, str(tmp_path))[0]
    for scheme, fp16 in (("row_wise", {0, 1, 2, 3}), ("column_wise", {0, 2}), ("table_wise", set())):
        loaded = run_ranks(load_on_rank, 4, str(tmp_path), scheme, fp16)[0]
        for name, value in saved.items():
            assert torch.equal(value, loaded[name]), (scheme, name)
