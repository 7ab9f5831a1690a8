"""What `restore` refuses and leaves as it was, and what else it brings back: generators, counts, scaled moments."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dmt._torchrec import mark_updated_in_backward
from dmt.collectives import RankError
from dmt.errors import InputError
from dmt.sharding.data_parallel import DataParallelOptimizer
from dmt.training.checkpoints import store
from dmt.training.checkpoints.state import Shards, TensorReader, write_tensors
from dmt.training.checkpoints.store import MANIFEST_NAME, Checkpointer, load, newest, read_manifest, restore
from dmt.training.config import OptimizerConfig
from tests.ranks import on_ranks
from tests.sptt_case import Case
from tests.training.checkpoints.test_layouts import Job
from tests.training.small import alone, linear

pytestmark = pytest.mark.ranks


def job(scheme: str = "row_wise", sparse: str = "rowwise_adagrad", **options: Any) -> Job:
    """A flat model of tables t0 and t1 of 8 columns on two ranks, and its optimizers."""
    case = {
        "dims": (8, 8),
        "plan": ((0, 1),),
        **{key: options.pop(key) for key in ("dims", "plan", "fp16") if key in options},
    }
    layout = Case(towers=1, ranks=2, kind="flat", scheme=scheme, optimizer=sparse, max_bag=2, **case)
    config = {"dense": "adamw", "sparse_lr": 0.05, "warmup_steps": 3, **options}
    return Job.of(layout, seed=0, optimizer=OptimizerConfig.model_validate(config))


def save(run: Job, folder: Path, step: int) -> None:
    assert Checkpointer(folder, run.mesh).save(run.model, run.optimizer, step=step, progress={})


def restored(run: Job, folder: Path) -> Job:
    start = restore(folder, run.model, run.optimizer, mesh=run.mesh)
    assert start is not None
    run.optimizer.set_step(start.step)
    return run


def local(run: Job) -> dict[str, Tensor]:
    """What this rank has of weights and states, copied."""
    found: dict[str, Tensor] = {}
    named = dict(run.model.state_dict())
    for key, states in run.optimizer.state_dict()["state"].items():
        named |= {f"{key}.{name}": value for name, value in states.items()}
    for name, value in named.items():
        parts = [part.tensor for part in value.local_shards()] if hasattr(value, "local_shards") else [value]
        found |= {f"{name}#{number}": part.detach().clone() for number, part in enumerate(parts)}
    return found


def assert_same(ours: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert ours.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(ours[name], value), name


@on_ranks(2)
def test_another_model_or_optimizer_is_refused(rank: int, tmp_path: Path) -> None:
    run = job()
    run.train(range(2))
    save(run, tmp_path, 2)
    for options, message in (
        ({"dense": "sgd"}, r"optimizer: yours lacks optimizer\.dense\.over_arch"),
        ({"sparse": "sgd"}, r"yours lacks optimizer\.tables\.\S*t0\.momentum1\S*, \S*t1\.momentum1\S*"),
        ({"sparse": "adagrad"}, r"another model or optimizer, without optimizer\.\S*t\d\.momentum1"),
    ):
        other = job(**options)
        with pytest.raises(InputError, match=message):
            restore(tmp_path, other.model, other.optimizer, mesh=other.mesh)


@on_ranks(2)
def test_a_damaged_checkpoint_is_refused_on_every_rank(rank: int, tmp_path: Path) -> None:
    run = job()
    run.train(range(1))
    save(run, tmp_path, 1)
    first = local(run)
    run.train(range(1, 3))
    save(run, tmp_path, 3)
    before = local(run)
    if rank == 1:
        file = tmp_path / "step-00000003" / "__1_0.distcp"
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    torch.distributed.barrier()
    with pytest.raises(InputError, match=r"step-00000003 is damaged: __1_0\.distcp was altered or cut off\."):
        restore(tmp_path / "step-00000003", run.model, run.optimizer, mesh=run.mesh)
    assert_same(local(run), before)
    found = newest(tmp_path, run.mesh)
    assert found is not None
    assert found.name == "step-00000001"
    assert load(found, run.model, run.optimizer, mesh=run.mesh).step == 1
    assert_same(local(run), first)
    if rank == 0:
        (found / MANIFEST_NAME).unlink()
    torch.distributed.barrier()
    with pytest.raises(InputError, match=r"holds no intact checkpoint: .*step-00000003 is damaged"):
        restore(tmp_path, run.model, run.optimizer, mesh=run.mesh)
    assert restore(tmp_path / "nowhere", run.model, run.optimizer, mesh=run.mesh) is None


@on_ranks(2)
def test_a_folder_that_rank_0_cannot_list_ends_every_rank(rank: int, tmp_path: Path) -> None:
    mesh = job().mesh
    fails = patch.object(store, "checkpoints", side_effect=PermissionError("not allowed"))
    with fails if rank == 1 else nullcontext():  # rank 1 does not list it
        assert newest(tmp_path, mesh) is None
    with fails if rank == 0 else nullcontext(), pytest.raises(RankError, match="rank 0: PermissionError: not allowed"):
        newest(tmp_path, mesh)


@on_ranks(2)
def test_what_else_is_brought_back_before_the_first_step_and_of_generators(rank: int, tmp_path: Path) -> None:
    """Adam has no state before its first step; that there is none is brought back as well."""
    run = job()
    torch.manual_seed(17 + rank)
    save(run, tmp_path, 0)
    drawn = torch.rand(4)
    torch.manual_seed(0)
    restored(job("table_wise"), tmp_path)
    assert torch.equal(torch.rand(4), drawn)
    run.train(range(2))
    again = restored(job(), tmp_path)
    again.train(range(2))
    assert_same(local(again), local(run))


def test_a_layer_that_no_output_uses_has_no_state_again(tmp_path: Path) -> None:
    def made() -> tuple[nn.ModuleList, KeyedOptimizerWrapper]:
        layers = nn.ModuleList([linear(1.0), linear(2.0)])
        return layers, KeyedOptimizerWrapper(dict(layers.named_parameters()), partial(torch.optim.AdamW, lr=0.1))

    def train(layers: nn.ModuleList, optimizer: KeyedOptimizerWrapper) -> None:
        optimizer.zero_grad()
        layers[0](torch.ones(3)).sum().backward()
        optimizer.step()

    (layers, optimizer), (others, other_optimizer) = made(), made()
    with alone() as mesh:
        train(layers, optimizer)
        assert Checkpointer(tmp_path, mesh).save(layers, optimizer, step=1, progress={})
        restore(tmp_path, others, other_optimizer, mesh=mesh)
    train(layers, optimizer)
    train(others, other_optimizer)
    assert_same(dict(others.state_dict()), dict(layers.state_dict()))
    assert len(other_optimizer.state) == len(optimizer.state) == 2


def test_a_warm_up_goes_on_and_one_around_all_optimizers_is_refused(tmp_path: Path) -> None:
    stages = [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=9, value=0.1)]

    def made() -> tuple[nn.ModuleList, CombinedOptimizer]:
        layers = nn.ModuleList([linear(1.0), linear(2.0)])
        table, _, weight, _ = layers.parameters()
        fused = DataParallelOptimizer({"t": table}, {"t": {}})
        mark_updated_in_backward(table, fused)
        dense = KeyedOptimizerWrapper({"dense": weight}, partial(torch.optim.AdamW, lr=0.1))
        parts = [(name, WarmupOptimizer(part, stages)) for name, part in (("tables", fused), ("dense", dense))]
        return layers, CombinedOptimizer(parts)

    (layers, optimizer), (others, other_optimizer) = made(), made()
    optimizer.step()
    with alone() as mesh:
        assert Checkpointer(tmp_path, mesh).save(layers, optimizer, step=1, progress={})
        restore(tmp_path, others, other_optimizer, mesh=mesh)
        assert [group["lr"] for group in other_optimizer.param_groups] == [pytest.approx(0.02)] * 2
        around = WarmupOptimizer(made()[1], stages)
        around.step()
        for hiding in (around, CombinedOptimizer([("all", around)])):
            with pytest.raises(InputError, match=r'would lack .*\("tables", Warmup.*, \("dense", Warmup'):
                Checkpointer(tmp_path, mesh).save(layers, hiding, step=2, progress={})


@on_ranks(2)
def test_a_rank_without_rows_of_a_table_of_torchrec_saves_and_restores(rank: int, tmp_path: Path) -> None:
    """TorchRec may cut a table by rows into fewer blocks than ranks."""
    tables = [EmbeddingBagConfig(rows, 4, f"t{rows}", feature_names=[f"f{rows}"]) for rows in (1, 2)]
    collection = EmbeddingBagCollection(tables=tables)
    sharder = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD})
    by_rows = dict.fromkeys(("t1", "t2"), row_wise(compute_kernel="fused"))
    cut = construct_module_sharding_plan(collection, by_rows, sharder, 2, 2, "cpu")
    plan, model = ShardingPlan({"0": cut}), nn.Sequential(collection)
    sharded: Any = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])
    run = replace(job(), model=sharded, optimizer=sharded.fused_optimizer)
    ids = KeyedJaggedTensor(keys=["f1", "f2"], values=torch.tensor([0, 1]), lengths=torch.ones(2).long())
    sharded(ids).values().sum().backward()
    saved = local(run)
    save(run, tmp_path, 1)
    sharded(ids).values().sum().backward()
    restore(tmp_path, sharded, run.optimizer, mesh=run.mesh)
    assert_same(local(run), saved)


@on_ranks(2)
def test_moments_stay_in_proportion_to_their_scale(rank: int, tmp_path: Path) -> None:
    """v / c stays: t0 goes from c = 2 to 3, t1 from 4 to 1."""
    run = job("column_wise")
    run.train(range(2))
    with patch.object(store, "moment_scales", lambda _: {"t0": 2.0, "t1": 4.0} if rank == 0 else {}):
        save(run, tmp_path, 2)
    assert read_manifest(tmp_path / "step-00000002").moment_scales == {"t0": 2.0, "t1": 4.0}
    wanted = local(run)
    with patch.object(store, "moment_scales", lambda _: {"t0": 3.0}):
        restored(run, tmp_path)
    for name, value in local(run).items():
        factor = {True: 1.5, False: 0.25}["t0" in name] if ".momentum1" in name else 1.0
        assert torch.equal(value, wanted[name] * factor), name


@pytest.mark.parametrize(
    ("saved", "loaded", "options"),
    [
        ("column_wise", "row_wise", {"sparse": "adagrad", "dense": "adagrad"}),
        ("table_wise", "row_wise", {"sparse": "sgd", "dense": "sgd", "warmup_steps": 0}),
        ("data_parallel", "data_parallel", {"sparse": "adam", "dense": "adam"}),
        ("table_wise", "column_wise", {"dims": (8,), "plan": ((0,),), "fp16": (0,)}),  # rank 1 has no table
    ],
)
@on_ranks(2)
def test_what_is_loaded_under_another_scheme_and_back_is_as_it_was(
    rank: int, saved: str, loaded: str, options: dict[str, Any], tmp_path: Path
) -> None:
    run = job(saved, **options)
    run.train(range(2))
    save(run, tmp_path / "1", 2)
    save(restored(job(loaded, **options), tmp_path / "1"), tmp_path / "2", 2)
    back = restored(job(saved, **options), tmp_path / "2")
    assert_same(local(back), local(run))
    for each in (run, back):
        each.train(range(2, 3))
    if loaded == saved:
        assert_same(local(back), local(run))


def test_row_wise_state_is_cut_anew(tmp_path: Path) -> None:
    """Each column range takes the mean over its own columns, also 3 -> 2 and 3 -> 1."""

    def shards(values: dict[tuple[int, int], float]) -> dict[str, Shards]:
        return {
            f"optimizer.t.weight.t.momentum1.columns_{first}_{end}": Shards(
                whole=(3,), table="t", tensors={(0,): torch.full((3,), value)}
            )
            for (first, end), value in values.items()
        }

    with alone() as mesh:
        files = write_tensors(shards({(0, 4): 1.0, (4, 8): 10.0, (8, 12): 4.0}), tmp_path, mesh.global_group)
    for wanted in (
        {(0, 12): 5.0},
        {(0, 8): 5.5, (8, 12): 4.0},
        {(0, 6): 4.0, (6, 12): 6.0},
        {(0, 5): 14 / 5, (5, 12): 46 / 7},
        {(0, 2): 1.0, (2, 4): 1.0, (4, 12): 7.0},
    ):
        state = shards(dict.fromkeys(wanted, 0.0))
        TensorReader(tmp_path, files).fill(state)
        for name, shard in shards(wanted).items():
            assert torch.allclose(state[name].tensors[(0,)], shard.tensors[(0,)], rtol=1e-6), name
