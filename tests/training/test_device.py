"""Devices, as far as a machine without a GPU can test them: the choice, what is refused, groups of two backends."""

from __future__ import annotations

import importlib.metadata
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend "fake"

from dmt import TowerMesh
from dmt._torchrec import complete_adam
from dmt.collectives import check_agreement, gather_objects, run_on_all_or_raise
from dmt.errors import InputError
from dmt.sharding.data_parallel import DataParallelOptimizer
from dmt.sharding.optimizers import FUSED_DEFAULTS
from dmt.sptt import group_sharded, towers
from dmt.testing.plain import PlainTable
from dmt.training import build, device, flat
from dmt.training import train as run
from dmt.training.build import ClickTask, build_model, build_optimizer, shard_model
from dmt.training.check.shrink import CheckLimits, shrink
from dmt.training.checkpoints.store import Checkpointer, restore
from dmt.training.data.batch import ClickBatch
from dmt.training.device import (
    _or_raise_on_all,
    backend,
    device_type,
    random_state,
    restart_safe_store,
    set_random_state,
    take_device,
)
from dmt.training.flat import shard_flat
from dmt.training.job import open_job
from dmt.training.preflight import checked_model
from dmt.training.resume import open_lock
from tests.ranks import on_ranks, run_ranks
from tests.training.small import save_alone, small


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes torch say that it sees two GPUs; the result has those that were made current."""
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    return current


def installed(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Makes Python say that just this package is installed."""
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [name] if name == package else [])


def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused() -> None:
    assert [device_type("auto"), device_type("cpu")] == ["cpu", "cpu"]
    assert (take_device("cpu", 7), backend("cpu")) == (torch.device("cpu"), "gloo")
    with pytest.raises(InputError, match=r"train\.device='cuda', but torch sees no GPU on this host, .*or set"):
        device_type("cuda")


def test_with_gpus_a_rank_takes_the_one_of_its_number(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "fbgemm-gpu")
    assert [device_type(wanted) for wanted in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]
    assert take_device("cuda", 1) == device.current_device("cuda") == torch.device("cuda", 1)
    assert gpus == [1]
    installed(monkeypatch, "fbgemm-gpu-cpu")
    assert device_type("auto") == "cpu"
    with pytest.raises(InputError, match=r"LOCAL_RANK=2, but torch sees 2 GPUs.*at most 2 ranks per host"):
        take_device("cuda", 2)


def test_a_rank_without_a_gpu_of_its_own_stops_before_it_waits_for_others(
    gpus: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed(monkeypatch, "fbgemm-gpu")
    one = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in (one | {"LOCAL_RANK": "3"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 0, 1)]))
    topology = {"num_towers": 1, "ranks_per_tower": 1}
    with pytest.raises(InputError, match="LOCAL_RANK=3, but torch sees 2 GPUs"):
        run.train(lambda: small(topology=topology, train={"device": "cuda", "output_dir": str(tmp_path)}))
    with pytest.raises(InputError, match="= 4 ranks, but the job was started with WORLD_SIZE=1"):
        run.train(small)


def test_the_state_of_a_gpus_generator_is_saved_with_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, of_gpu = random_state(), torch.arange(16, dtype=torch.uint8)
    given: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: of_gpu)
    monkeypatch.setattr(torch.cuda, "set_rng_state", given.append)
    saved = random_state()
    assert torch.equal(saved, torch.cat([alone, of_gpu]))
    drawn = torch.rand(3)
    set_random_state(saved)
    assert torch.equal(torch.rand(3), drawn)
    assert [part.tolist() for part in given] == [list(range(16))]
    set_random_state(alone)  # a checkpoint of a run on CPUs
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    set_random_state(saved)  # on CPUs, a checkpoint of a run on GPUs
    assert len(given) == 1


def test_a_config_for_gpus_is_checked_on_the_cpu(tmp_path: Path) -> None:
    checked_model(job := open_job(small(train={"device": "cuda"})))
    assert shrink(job, limits=CheckLimits(), folder=tmp_path).job.device_type == "cpu"


@on_ranks(4)
def test_a_job_for_gpus_is_built_and_placed_on_them(rank: int) -> None:
    config = small(sharding={"scheme": "table_wise"}, train={"device": "cuda"}, optimizer={"sparse": "adam"})
    with (
        patch.object(build, "DistributedModelParallel") as dmp,
        patch.object(build, "current_device", lambda kind: torch.device(kind, 3)),
    ):
        shard_model(open_job(config), TowerMesh(config.topology.build()))
    given = dmp.call_args.kwargs
    assert given["device"] == torch.device("cuda", 3)
    (tables,) = given["plan"].plan.values()
    assert len([name for name, table in tables.items() if table.sharding_type != "data_parallel"]) == 6
    places = {str(shard.placement) for table in tables.values() for shard in table.sharding_spec.shards}
    assert places <= {"rank:0/cuda:0", "rank:1/cuda:1"}


TWO = {"num_towers": 2, "ranks_per_tower": 1}


@on_ranks(2)
def test_a_flat_job_is_placed_on_the_gpu_of_each_rank_where_a_machine_holds_several_hosts(rank: int) -> None:
    config = small("dlrm", "flat", topology=TWO, sharding={"scheme": "table_wise"}, train={"device": "cuda"})
    job, mesh = open_job(config), TowerMesh(config.topology.build())
    sharders, plan = shard_flat(job, ClickTask(build_model(job, device="meta")), mesh, {})
    with patch.object(flat, "GroupShardedEBC") as made:
        sharders[0].shard(None, *plan.plan.values(), None, torch.device("cuda", rank))
    shards = [shard for table in made.call_args.kwargs["sharding"].values() for shard in table.sharding_spec.shards]
    assert {str(shard.placement) for shard in shards} == {"rank:0/cuda:0", "rank:1/cuda:1"}


def on_two_backends(rank: int, folder: str) -> list[float]:
    """Trains with groups whose backend for GPUs carries nothing, so that anything it was given would be missing."""
    dist.barrier()  # a rank that leaves its group breaks the connection of one that still joins it
    dist.destroy_process_group()
    store = dist.FileStore(str(Path(folder, "store")), 2)
    dist.init_process_group(backend("cuda").replace("nccl", "fake"), store=store, rank=rank, world_size=2)
    config = small("dmt-dlrm", topology=TWO, train={"output_dir": folder, "dense_reduce": "hierarchical"})
    mesh = TowerMesh(config.topology.build())
    for group in (mesh.tower_group, mesh.peer_group, mesh.global_group):
        assert dist.get_backend_config(group) == "cpu:gloo,cuda:fake"
        assert gather_objects(rank, group) == dist.get_process_group_ranks(group)
    check_agreement("A test", {"value": 1}, mesh.global_group)
    assert run_on_all_or_raise(lambda: rank, mesh.global_group) == [0, 1]
    job = open_job(config)
    model = shard_model(job, mesh)
    optimizer = build_optimizer(config.optimizer, model)
    batches = job.data.batches("train", rank=rank, world_size=2, batch_size=16)
    losses = [trained(model, optimizer, next(batches)) for _ in range(2)]
    saver = Checkpointer(Path(folder, "checkpoint"), mesh, asynchronous=True)
    saver.save(model, optimizer, step=2, progress={})
    assert saver.wait()
    saver.close()
    third = trained(model, optimizer, batch := next(batches))
    restore(Path(folder, "checkpoint"), model, optimizer, mesh=mesh)
    assert trained(model, optimizer, batch) == third
    dist.barrier()
    return [*losses, third]


def on_gloo(rank: int, folder: str) -> list[float]:
    config = small("dmt-dlrm", topology=TWO, train={"dense_reduce": "hierarchical"})
    job, mesh = open_job(config), TowerMesh(config.topology.build())
    model = shard_model(job, mesh)
    optimizer = build_optimizer(config.optimizer, model)
    batches = job.data.batches("train", rank=rank, world_size=2, batch_size=16)
    return [trained(model, optimizer, next(batches)) for _ in range(3)]


def trained(model: Callable[..., Any], optimizer: Any, batch: ClickBatch) -> float:
    optimizer.zero_grad()
    loss, _ = model(batch)
    loss.backward()
    optimizer.step()
    return float(loss)


@pytest.mark.ranks
def test_groups_of_two_backends_train_save_and_restore_as_those_of_one(tmp_path: Path) -> None:
    assert run_ranks(on_two_backends, 2, str(tmp_path), fresh=True) == run_ranks(on_gloo, 2, str(tmp_path))


# Ranks of an attempt find each other in a store that a dead attempt has written to.


def attempt(store: dist.Store, world_size: int, order: list[int]) -> list[str]:
    """What each rank reads of the others, each under the same key, as a process group does with addresses."""
    with ThreadPoolExecutor(world_size) as pool:

        def join(rank: int) -> str:
            own = restart_safe_store(store, rank, world_size, timeout=timedelta(seconds=20))
            own.set(f"address/{rank}", f"attempt {store.get('attempt').decode()}")
            return "; ".join(own.get(f"address/{other}").decode() for other in range(world_size))

        joined = {rank: pool.submit(join, rank) for rank in order}
        return [joined[rank].result(timeout=20) for rank in range(world_size)]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_no_rank_reads_what_an_earlier_attempt_wrote(order: list[int]) -> None:
    store = dist.HashStore()
    for number in range(3):
        store.set("attempt", str(number))
        assert attempt(store, 3, order) == [f"attempt {number}; attempt {number}; attempt {number}"] * 3


def test_a_rank_that_died_while_joining_leaves_a_greeting_only() -> None:
    store = dist.HashStore()
    store.set("attempt", "1")
    store.set("dmt/greeting/1", "of a rank that was killed")
    assert attempt(store, 2, [0, 1]) == ["attempt 1; attempt 1"] * 2


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(TimeoutError, match=r"Ranks \[1, 2\] of 3 did not join"):
        restart_safe_store(dist.HashStore(), 0, 3, timeout=timedelta(seconds=0.2))


def test_a_rank_that_cannot_begin_tells_the_others() -> None:
    store = dist.HashStore()

    def begin(rank: int) -> str:
        with pytest.raises(InputError) as refused:
            _or_raise_on_all(lambda: device_type("cuda" if rank == 1 else "cpu"), store, rank, 3)
        return str(refused.value)

    with ThreadPoolExecutor(3) as pool:
        told = list(pool.map(begin, range(3)))
    assert told == [f"rank 1 on {socket.gethostname()}: {told[0].partition(': ')[2]}"] * 3
    assert "torch sees no GPU on this host" in told[0]


def test_a_folder_is_free_again_after_the_job(tmp_path: Path) -> None:
    refused = pytest.raises(InputError, match=r"Another job is running in .*train\.output_dir")
    with open_lock(tmp_path), refused, open_lock(tmp_path):
        pass
    with open_lock(tmp_path):
        pass


def test_the_peak_memory_of_a_process_is_not_that_of_the_one_that_started_it() -> None:
    held = b"x" * 2**29
    code = "from dmt.training.device import peak_memory; print(peak_memory('cpu'))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 2**25 < int(ran.stdout) < device.peak_memory("cpu") - len(held) // 2


# On the meta device an operation that mixes devices fails, as on a GPU.
META = torch.device("meta")


def clip_without_gradients() -> Tensor:
    """By the norm on a rank whose tower does not train."""
    tower = towers.ShardedTowerCollection.__new__(towers.ShardedTowerCollection)
    nn.Module.__init__(tower)
    tower.device, tower.interactions, tower.mesh = META, nn.Module(), Mock()
    with patch.object(towers, "sum_over_ranks", lambda value, group: value):
        return towers.clip_grad_norm(tower, 1.0)


def train_plainly() -> Tensor:
    weight = nn.Parameter(torch.zeros(3, 4, device=META))
    weight.grad = torch.zeros_like(weight)
    PlainTable(weight, [2, 2], {**FUSED_DEFAULTS, "optimizer": "exact_row_wise_adagrad"}, 1.0).step(0.1)
    return weight


@pytest.mark.parametrize("compute", [clip_without_gradients, train_plainly])
def test_a_step_stays_on_the_device_of_its_tensors(compute: Callable[[], Tensor]) -> None:
    assert compute().device == META


def test_a_checkpoint_is_not_copied_ahead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PyTorch would wait for GPU 0 then, whose tensors these need not be."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delattr(filesystem, "_OverlappingCpuLoader")
    save_alone(nn.Linear(3, 2), tmp_path)


def test_adam_on_a_gpu_has_the_states_of_data_parallel_tables_and_the_count_that_its_kernel_reads() -> None:
    place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    kernel = SplitTableBatchedEmbeddingBagsCodegen([(3, 4, *place)], optimizer=EmbOptimType.ADAM, device=META)
    (first, *others) = kernel.get_optimizer_state()[0].items()
    # TorchRec calls the first state momentum1.
    states = {"t.momentum1": first[1], **{f"t.{name}": state for name, state in others}}
    complete_adam(Mock(_emb_module=kernel, state={"weight": states}))
    (expected,) = DataParallelOptimizer({"t": torch.zeros(3, 4)}, {"t": {"optimizer": "adam"}}).state.values()
    assert {name: state.shape for name, state in states.items()} == {name: s.shape for name, s in expected.items()}
    states["t.iter"].fill_(7)  # as a checkpoint does
    assert int(kernel.iter_cpu) == 7


@on_ranks(1)
def test_the_states_of_all_fused_optimizers_are_completed(rank: int) -> None:
    config = small("dmt-dlrm", topology={"num_towers": 1, "ranks_per_tower": 1}, sharding={"scheme": "table_wise"})
    with patch.object(group_sharded, "complete_adam") as completed:
        shard_model(open_job(config), TowerMesh(config.topology.build()))
    assert completed.called
