"""The four schemes inside a tower: what TorchRec gets wrong without an error, and what data-parallel tables get."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from dmt import (
    InputError,
    SPTTEmbeddingBagCollectionSharder,
    TowerMesh,
    TowerPlan,
    TowerShardingPlanner,
    TowerTopology,
)
from dmt.sharding.data_parallel import DataParallelOptimizer
from dmt.sharding.schemes import TablePlacement
from dmt.testing import gather_plain_state
from tests.parity import (
    EPS,
    LR,
    Batches,
    FlatModel,
    load_ramps,
    loss_of,
    make_tables,
)
from tests.ranks import run_ranks
from tests.sptt_case import FUSED

CPU = torch.device("cpu")
DATA_PARALLEL = TablePlacement(scheme="data_parallel", ranks=(0, 1, 2))


def sharded(
    tables: list[EmbeddingBagConfig],
    pins: dict[str, TablePlacement],
    *,
    num_ranks: int = 3,
    fused_params: dict[str, Any] = FUSED,
) -> DistributedModelParallel:
    """A flat model with all tables in one tower."""
    mesh = TowerMesh(TowerTopology(num_towers=1, ranks_per_tower=num_ranks))
    plan = TowerPlan.from_lists([list(dict.fromkeys(f for t in tables for f in t.feature_names))])
    sharder = SPTTEmbeddingBagCollectionSharder(mesh, plan, fused_params=fused_params)
    model = FlatModel(tables)
    plan_ = TowerShardingPlanner(mesh.topology, pinned=pins).plan(model, [sharder])
    return DistributedModelParallel(model, device=CPU, plan=plan_, sharders=[sharder])


@pytest.mark.ranks
def test_a_data_parallel_table_keeps_the_optimizer_given_on_its_parameter() -> None:
    """TorchRec drops it without a word."""
    run_ranks(given_on_rank, 2)


def given_on_rank(rank: int) -> None:
    tables = make_tables([8, 8])
    mesh = TowerMesh(TowerTopology(num_towers=1, ranks_per_tower=2))
    model = FlatModel(tables)
    apply_optimizer_in_backward(torch.optim.SGD, [model.sparse_arch.embedding_bags["t0"].weight], {"lr": 0.5})
    sharder = SPTTEmbeddingBagCollectionSharder(mesh, TowerPlan.from_lists([["f0", "f1"]]), fused_params=FUSED)
    plan = TowerShardingPlanner(mesh.topology, scheme="data_parallel").plan(model, [sharder])
    dmp = DistributedModelParallel(model, device=CPU, plan=plan, sharders=[sharder])
    before = gather_plain_state(dmp)
    ids, _ = Batches(sizes=(4, 4)).draw(0, 0, tables)  # the same samples on both ranks
    dmp(ids)[1].sum().backward()
    step = (
        before["sparse_arch.embedding_bags.t0.weight"] - gather_plain_state(dmp)["sparse_arch.embedding_bags.t0.weight"]
    )
    rows = torch.bincount(ids["f0"].values(), minlength=40).float()
    expected = 0.5 * rows.unsqueeze(1) * before["over_arch.weight"][0, :8]
    torch.testing.assert_close(step, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks
def test_data_parallel_tables_start_equal_and_stay_equal() -> None:
    weights = run_ranks(equal_on_rank, 3)
    for name, value in weights[0].items():
        for other in weights[1:]:
            assert torch.equal(value, other[name]), name


def equal_on_rank(rank: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(rank)
    tables = make_tables([8, 8])
    model = sharded(tables, {"t0": DATA_PARALLEL, "t1": DATA_PARALLEL})
    for step in range(3):
        ids, labels = Batches(sizes=(4, 4, 4)).draw(rank, step, tables)
        loss_of(model(ids)[1], labels).backward()
    return {n: p.detach().clone() for n, p in model.state_dict().items() if "embedding_bags" in n}


@pytest.mark.ranks
def test_a_backward_pass_that_raises_leaves_no_trace() -> None:
    """A caller may catch the exception and go on with the next batch."""
    run_ranks(raising_on_rank, 2)


def raising_on_rank(rank: int) -> None:
    tables = make_tables([8, 8])
    states = []
    for raises in (False, True):
        torch.manual_seed(0)
        pins = {"t0": TablePlacement(scheme="data_parallel", ranks=(0, 1))}
        model = sharded(tables, pins, num_ranks=2)
        load_ramps(model)
        for step in range(3):
            ids, labels = Batches(sizes=(6, 6), max_bag=3).draw(rank, step, tables)
            embeddings, logits = model(ids)
            if step == 1:
                if raises:
                    # After the data-parallel table's gradient is there and its reduction has begun.
                    table = model.module.sparse_arch.embedding._lookups[-1]
                    hooked = next(iter(table.parameters())).register_post_accumulate_grad_hook(_fail)
                    with pytest.raises(ZeroDivisionError):
                        embeddings["f0"].sum().backward()
                    hooked.remove()
                continue
            loss_of(logits, labels).backward()
        states.append(gather_plain_state(model)["sparse_arch.embedding_bags.t0.weight"])
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


def _fail(parameter: torch.Tensor) -> None:
    raise ZeroDivisionError


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("saved", "loaded"), list(itertools.permutations(("table_wise", "row_wise", "data_parallel"), 2))
)
def test_optimizer_state_loads_into_another_scheme(saved: str, loaded: str, tmp_path: Path) -> None:
    written = run_ranks(state_on_rank, 2, saved, str(tmp_path), "save")[0]
    read = run_ranks(state_on_rank, 2, loaded, str(tmp_path), "load")[0]
    for name, value in written.items():
        assert value.abs().max() > 0, name
        assert torch.equal(value, read[name]), name


def state_on_rank(rank: int, scheme: str, folder: str, what: str) -> dict[str, torch.Tensor]:
    """The state of two tables' optimizer, whole; every rank holds some of it (an idle rank has no state to name)."""
    tables = make_tables([8, 12])
    torch.manual_seed(rank)
    pins = {
        table.name: TablePlacement(scheme=scheme, ranks=(i,) if scheme == "table_wise" else (0, 1))
        for i, table in enumerate(tables)
    }
    model = sharded(tables, pins, num_ranks=2)
    optimizer = model.fused_optimizer
    if what == "save":
        for step in range(2):
            ids, labels = Batches(sizes=(6, 6), max_bag=3).draw(rank, step, tables)
            loss_of(model(ids)[1], labels).backward()
        dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    else:
        state = {"optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        optimizer.load_state_dict(state["optimizer"])
    whole: dict[str, torch.Tensor] = {}
    for of_table in optimizer.state_dict()["state"].values():
        for name, value in of_table.items():
            shards = value.local_shards() if isinstance(value, ShardedTensor) else []
            target = whole.setdefault(name, torch.zeros(value.size()))
            if not shards:
                target.copy_(value)
            for part in shards:
                first = part.metadata.shard_offsets[0]
                target[first : first + len(part.tensor)] = part.tensor
    everyone: list[Any] = [None] * 2
    dist.all_gather_object(everyone, whole)
    # Each rank has zeros where it holds nothing; data-parallel ranks hold the same.
    names = sorted({name for part in everyone for name in part})
    return {name: torch.stack([part[name] for part in everyone if name in part]).amax(dim=0) for name in names}


def reference_adam(weight: torch.Tensor, grads: list[torch.Tensor]) -> torch.Tensor:
    """FBGEMM's Adam: rows of the batch only, one count of steps for all rows."""
    weight, first, second = weight.clone(), torch.zeros_like(weight), torch.zeros_like(weight)
    for step, grad in enumerate(grads, start=1):
        for row in range(len(weight)):
            if not grad[row].any():
                continue
            first[row] = 0.9 * first[row] + 0.1 * grad[row]
            second[row] = 0.999 * second[row] + 0.001 * grad[row] ** 2
            mean, square = first[row] / (1 - 0.9**step), second[row] / (1 - 0.999**step)
            weight[row] -= LR * mean / (square.sqrt() + EPS)
    return weight


def test_adam_of_data_parallel_tables_visits_the_rows_of_the_batch() -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 4)
    expected_from = weight.clone()
    optimizer = DataParallelOptimizer({"t": weight}, {"t": {**FUSED, "optimizer": EmbOptimType.ADAM}})
    grads = []
    for step in range(4):
        grads.append(torch.randn(6, 4) * (torch.arange(6) % 3 != step % 3).unsqueeze(1))
        weight.grad = grads[-1].clone()
        optimizer.update()
    torch.testing.assert_close(weight, reference_adam(expected_from, grads), rtol=1e-6, atol=1e-6)
    plain = torch.nn.Parameter(torch.ones(2, 2))  # every row in every batch: torch's own Adam
    ours = torch.ones(2, 2)
    adam, fused = (
        torch.optim.Adam([plain], lr=LR),
        DataParallelOptimizer({"t": ours}, {"t": {**FUSED, "optimizer": EmbOptimType.ADAM}}),
    )
    for _ in range(3):
        plain.grad = torch.randn(2, 2)
        ours.grad = plain.grad.clone()
        adam.step()
        fused.update()
    torch.testing.assert_close(ours, plain.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD])
def test_rows_that_were_never_read_stay_without_an_epsilon(kind: EmbOptimType) -> None:
    weight = torch.ones(2, 4)
    optimizer = DataParallelOptimizer({"t": weight}, {"t": {**FUSED, "optimizer": kind, "eps": 0.0}})
    weight.grad = torch.tensor([[0.0] * 4, [2.0] * 4])
    optimizer.update()
    torch.testing.assert_close(weight, torch.tensor([[1.0] * 4, [1.0 - LR] * 4]))


def test_optimizers_that_data_parallel_tables_do_not_have_are_named() -> None:
    weight = {"t_ad": torch.zeros(2, 4)}
    with pytest.raises(InputError, match=r"Table 't_ad' is data-parallel, but its optimizer is lamb"):
        DataParallelOptimizer(weight, {"t_ad": {"optimizer": EmbOptimType.LAMB}})
    with pytest.raises(InputError, match=r"'t_ad' is data-parallel, but its fused optimizer sets weight_decay=0.1"):
        DataParallelOptimizer(weight, {"t_ad": {**FUSED, "weight_decay": 0.1}})


@pytest.mark.ranks
def test_a_fault_in_one_tower_is_raised_on_every_rank() -> None:
    """No rank is left waiting for one that has raised."""
    run_ranks(fault_on_rank, 2)


def fault_on_rank(rank: int) -> None:
    mesh = TowerMesh(TowerTopology(num_towers=1, ranks_per_tower=2))
    two = TowerMesh(TowerTopology(num_towers=2, ranks_per_tower=1))
    tables = make_tables([8, 8])
    sharder = SPTTEmbeddingBagCollectionSharder(two, TowerPlan.from_lists([["f0"], ["f1"]]), fused_params=FUSED)
    plan = TowerShardingPlanner(two.topology).plan(FlatModel(tables), [sharder])
    plan.plan["sparse_arch"]["t1"].sharding_spec.shards[0].shard_sizes[0] = 7  # a fault of tower 1 alone
    with pytest.raises(InputError, match="Table 't1' in tower 1 is 43 x 8, but its shards"):
        DistributedModelParallel(FlatModel(tables), device=CPU, plan=plan, sharders=[sharder])
    model = FlatModel(tables)
    apply_optimizer_in_backward(torch.optim.SGD, [model.sparse_arch.embedding_bags["t1"].weight], {"weight_decay": 0.1})
    one = SPTTEmbeddingBagCollectionSharder(mesh, TowerPlan.from_lists([["f0", "f1"]]), fused_params=FUSED)
    everywhere = TowerShardingPlanner(mesh.topology, scheme="data_parallel").plan(model, [one])
    with pytest.raises(InputError, match="'t1' in tower 0 is data_parallel, but its fused optimizer sets weight_decay"):
        DistributedModelParallel(model, device=CPU, plan=everywhere, sharders=[one])
